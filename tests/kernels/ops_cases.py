"""A call of every op, on small arenas with scattered frames, for `test_ops`."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

import tensorpager.kernels.ops  # noqa: F401
from tensorpager.kernels.ops_define import encoded
from tensorpager.kernels.pieces import Operand, Paged
from tensorpager.kernels.row_sums import group_rows
from tensorpager.kernels.softmax_slabs import new_state

PAGE = 4096
FRAMES = 24
ops = torch.ops.tensorpager

Args = tuple[Any, ...]


class Memory:
    """An arena of zeros in which tensors are placed page by page, never in consecutive frames."""

    def __init__(self, frames: int = FRAMES) -> None:
        self.arena = torch.zeros(frames * PAGE, dtype=torch.uint8)
        self._free = [*range(frames - 1, 0, -2), *range(frames - 2, 0, -2)]

    def page(self, tensor: torch.Tensor) -> Paged:
        """The tensor in pages; the last may be partial."""
        data = tensor.contiguous().view(-1).view(torch.uint8)
        frames = []
        for part in data.split(PAGE):
            frames.append(self._free.pop(0))
            self.arena[frames[-1] * PAGE :][: part.numel()] = part
        return Paged(self.arena, np.array(frames, np.int32), PAGE, tensor.dtype, tensor.numel())

    def dense(self, paged: Paged) -> torch.Tensor:
        """What the pages hold."""
        pages = [self.arena[frame * PAGE :][:PAGE] for frame in paged.frames.tolist()]
        whole = torch.cat([self.arena[:0], *pages])
        return whole[: paged.numel * paged.dtype.itemsize].view(paged.dtype)


def values(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def table(paged: Paged) -> torch.Tensor:
    return torch.from_numpy(paged.frames)


def lists(*operands: Operand) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return encoded(operands)


def _three(memory: Memory) -> tuple[list[int], list[Operand]]:
    """Numels and operands: paged float32, dense, paged bfloat16."""
    operands: list[Operand] = [
        memory.page(values(1500)),
        values(30, seed=1),
        memory.page(values(700, dtype=torch.bfloat16, seed=2)),
    ]
    return [1500, 30, 700], operands


def gather_pages() -> Args:
    memory = Memory()
    paged = memory.page(values(30, 50))
    return memory.arena, table(paged), PAGE, [30, 50], torch.float32


def gather_pages_into() -> Args:
    arena, frames, page, size, dtype = gather_pages()
    return arena, frames, page, torch.zeros(size, dtype=dtype)


def scatter_pages() -> Args:
    arena, frames, page, size, _dtype = gather_pages()
    return values(*size, seed=1), arena, frames, page


def move_pages() -> Args:
    arena, frames, page, _size, _dtype = gather_pages()
    return arena, frames, torch.tensor([2, 0], dtype=torch.int32), page


def slide_pages() -> Args:
    arena, _frames, page, _size, _dtype = gather_pages()
    return arena, 1, 0, arena.numel() // page - 1, page


def fill_pages() -> Args:
    arena, frames, page, _size, _dtype = gather_pages()
    return arena, frames, page, 7


def page_checksums() -> Args:
    return gather_pages()[:3]


def elementwise() -> Args:
    memory = Memory()
    numels, outs = _three(memory)
    other, tables = lists(values(1500, seed=3), memory.page(values(30, seed=4)), values(700))
    both = [[*mine, *others] for mine, others in zip(lists(*outs), (other, tables), strict=True)]
    return "add", memory.arena, PAGE, numels, *lists(*outs), "ttn", *both, [0.5]


def reduce() -> Args:
    memory = Memory()
    numels, operands = _three(memory)
    return memory.arena, PAGE, numels, *lists(*operands), "norm", 2.0


def total_norm() -> Args:
    return reduce()[:5]


def non_finite_check_and_unscale() -> Args:
    return *reduce()[:5], torch.zeros(1), torch.full((1,), 0.25)


def optimizer_args(memory: Memory, states: int, in_8_bits: bool) -> Args:
    """Parameters paged and dense, gradients in bfloat16 and float32, as an optimizer takes them."""
    numels = [1500, 300]
    params = lists(memory.page(values(1500)), values(300, seed=1))
    grads = lists(memory.page(values(1500, dtype=torch.bfloat16, seed=2)), values(300, seed=3))
    kept: list[Operand] = []
    scales: list[Operand] = []
    dtype = torch.uint8 if in_8_bits else torch.float32
    for _ in range(states):
        kept += [memory.page(torch.zeros(1500, dtype=dtype)), torch.zeros(300, dtype=dtype)]
        scales += [memory.page(torch.zeros(6)), torch.zeros(2)] if in_8_bits else []
    return (
        *(memory.arena, PAGE, numels, *params, *grads, *lists(*kept), *lists(*scales)),
        *([], []),
    )


def adam_step(in_8_bits: bool = False) -> Args:
    steps = [torch.tensor(1.0), torch.tensor(3.0)]
    numbers = torch.tensor(1e-3, dtype=torch.float64), None, torch.zeros(())
    return *optimizer_args(Memory(), 2, in_8_bits), steps, *numbers, 0.9, 0.999, 1e-8, 0.01, True


def sgd_step() -> Args:
    numbers = torch.tensor(1.0), torch.tensor(0.1, dtype=torch.float64), None, None
    return *optimizer_args(Memory(), 1, False), *numbers, [True, False], 0.9, 0.0, 0.01, False


def quantize() -> Args:
    memory = Memory()
    codes = memory.page(torch.zeros(1500, dtype=torch.uint8))
    scales = memory.page(torch.zeros(6))
    paged = memory.page(values(1500))
    return memory.arena, PAGE, [1500], *lists(paged), *lists(codes), *lists(scales), False


def dequantize() -> Args:
    args = quantize()
    ops.quantize(*args)
    return *args[:3], *args[5:9], *lists(torch.zeros(1500)), False


def linear(dtype: torch.dtype = torch.float32, requires_grad: bool = True) -> Args:
    """W [40, 65] in three pages of float32, whose rows straddle borders."""
    memory = Memory()
    weight = memory.page(values(40, 65, dtype=dtype))
    x, bias = (
        values(*shape, dtype=dtype, seed=1).requires_grad_(requires_grad)
        for shape in ((2, 3, 65), (40,))
    )
    return x, memory.arena, table(weight), PAGE, dtype, 40, bias


def linear_into() -> Args:
    x, *weight, _rows, bias = linear(requires_grad=False)
    return x.view(6, 65), *weight, torch.zeros(6, 40), bias, 5, 33


def linear_input_grad() -> Args:
    _x, *weight, _rows, _bias = linear()
    return values(2, 3, 40).requires_grad_(), *weight, 65


def linear_input_grad_into() -> Args:
    _x, *weight, _rows, _bias = linear()
    return values(6, 40), *weight, values(6, 65, seed=1), True, 5, 33


def linear_weight_grad() -> Args:
    x, *weight, _rows, _bias = linear(requires_grad=False)
    return values(2, 3, 40), x, *weight, True, 5, 33


def gather_rows() -> Args:
    _x, *weight, rows, _bias = linear()
    return *weight, rows, 65, torch.tensor([[3, 39], [3, 16]])


def group_rows_() -> Args:
    return torch.tensor([[5, 2, 7], [2, 2, 5]]), 7


def _lookups() -> Args:
    groups = group_rows(torch.tensor([5, 2, 7, 2, 2, 5]), 7)
    return values(6, 65), groups.ids, groups.order, groups.starts


def sum_rows() -> Args:
    return *_lookups(), torch.bfloat16, True


def add_rows() -> Args:
    _x, *weight, rows, _bias = linear()
    return *weight, rows, *_lookups()


def softmax_update() -> Args:
    state = new_state(4, torch.float32, torch.device("cpu"))
    return values(4, 9), 20, torch.tensor([3, 20, 28, 22]), state


def softmax_grad() -> Args:
    logits, begin, targets, _state = softmax_update()
    return logits, begin, targets, values(4, 4, seed=1).abs()


CASES: dict[str, Callable[[], Args]] = {
    make.__name__.rstrip("_"): make
    for make in (
        *(gather_pages, gather_pages_into, scatter_pages, move_pages, slide_pages, fill_pages),
        *(page_checksums, elementwise, reduce, total_norm, non_finite_check_and_unscale),
        *(adam_step, sgd_step, quantize, dequantize),
        *(linear, linear_into, linear_input_grad, linear_input_grad_into, linear_weight_grad),
        *(gather_rows, group_rows_, sum_rows, add_rows, softmax_update, softmax_grad),
    )
}

VARIANTS: dict[str, tuple[str, Callable[[], Args]]] = {
    "adam_in_8_bits": ("adam_step", lambda: adam_step(in_8_bits=True)),
    "no_operands": (
        "elementwise",
        lambda: ("fill", Memory().arena, PAGE, [], [], [], "n", [], [], [1.0]),
    ),
    "nothing_to_reduce": ("reduce", lambda: (Memory().arena, PAGE, [], [], [], "sum")),
    "half": ("linear", lambda: linear(torch.float16)),
    "no_bias": ("linear", lambda: (*linear()[:-1], None)),
    "no_rows_of_x": ("linear", lambda: (torch.zeros(0, 65), *linear()[1:])),
}


def tensors(args: Sequence[Any]) -> list[torch.Tensor]:
    """All tensors of a call, those in lists too."""
    found = []
    for value in args:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list):
            found += [each for each in value if isinstance(each, torch.Tensor)]
    return found
