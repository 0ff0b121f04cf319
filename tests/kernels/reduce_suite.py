"""Lists of operands in guarded memory, and reductions of them under the address checker.

Every byte of an arena that is not an operand's is 0xFF, so a stray read gives NaN.
"""

import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
from address_checker import checked_addresses
from page_suite import Backend, Guarded

from tensorpager.kernels import combine, reduce, unscale
from tensorpager.kernels.pieces import Operand, Paged

PAGE = 4096
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass
class Held:
    """An operand, the memory around it, and the views of its own bytes."""

    operand: Operand
    memory: Guarded
    views: list[torch.Tensor]

    def values(self) -> torch.Tensor:
        """Its elements, dense."""
        return torch.cat([*self.views, self.memory.tensor[:0]]).clone().view(self.operand.dtype)

    def untouched(self) -> bytes:
        """The bytes around it."""
        copy = self.memory.tensor.clone()
        for view in self.views:
            start = view.data_ptr() - self.memory.tensor.data_ptr()
            copy[start : start + view.numel()] = 0
        return bytes(copy.cpu().numpy())


def held(
    values: torch.Tensor,
    backend: Backend,
    frames: Sequence[int] | None = None,
    offset: int = 0,
    page_bytes: int = PAGE,
) -> Held:
    """Values [n] in these frames, or dense and `offset` bytes off 16-byte alignment."""
    raw = values.contiguous().view(torch.uint8).to(backend.device)
    if frames is None:
        memory = Guarded(raw.numel(), backend, offset=offset)
        memory.tensor.copy_(raw)
        return Held(memory.tensor.view(values.dtype), memory, [memory.tensor])
    memory = Guarded((max(frames, default=0) + 2) * page_bytes, backend)
    memory.tensor.fill_(0xFF)
    views = []
    for page, frame in enumerate(frames):
        part = raw[page * page_bytes : (page + 1) * page_bytes]
        views.append(memory.tensor[frame * page_bytes :][: part.numel()])
        views[-1].copy_(part)
    table = np.array(frames, np.int32)
    paged = Paged(memory.tensor, table, page_bytes, values.dtype, values.numel())
    return Held(paged, memory, views)


def scattered(numel: int, dtype: torch.dtype, page_bytes: int = PAGE) -> list[int]:
    """Frames for so many elements, no two in a row consecutive."""
    pages = -(-numel * dtype.itemsize // page_bytes)
    return [2 * (pages - page) + (page % 3) for page in range(pages)]


def mixed_list(values: Sequence[torch.Tensor], backend: Backend) -> list[Held]:
    """In turn scattered, dense, in consecutive frames, and dense but not 16-byte aligned."""
    lists = []
    for number, x in enumerate(values):
        pages = -(-x.nbytes // PAGE)
        layouts: list[dict[str, Any]] = [
            {"frames": scattered(x.numel(), x.dtype)},
            {},
            {"frames": list(range(1, 1 + pages))},
            {"offset": 8},
        ]
        lists.append(held(x, backend, **layouts[number % 4]))
    return lists


def run(
    backend: Backend,
    launcher: Callable[..., Any],
    holders: Sequence[Held],
    *args: Any,
    writes: Sequence[torch.Tensor] = (),
    real_tiles: bool = False,
    **named: Any,
) -> Any:
    """Call the backend's implementation; kernels may touch only `writes` and the operands.

    Operands may be written only by an operation that is given `writes`. In the interpreter tiles
    have 1,024 elements and are combined by 16, to be quick, unless `real_tiles`.
    """
    operands = [holder.operand for holder in holders]
    if backend.name == "reference":
        launcher = getattr(sys.modules[launcher.__module__], f"{launcher.__name__}_reference")
    with contextlib.ExitStack() as stack:
        if backend.name == "interpreter":
            _watch(stack, holders, args, writes, real_tiles)
        result = launcher(operands, *args, **named)
    if backend.name == "cuda":
        torch.cuda.synchronize()
    return result


def _watch(
    stack: contextlib.ExitStack,
    holders: Sequence[Held],
    args: Sequence[Any],
    writes: Sequence[torch.Tensor],
    real_tiles: bool,
) -> None:
    views = [view for holder in holders for view in holder.views]
    scalars = [arg for arg in args if isinstance(arg, torch.Tensor)]
    stack.enter_context(
        checked_launches([*views, *scalars], [*views, *writes] if writes else []),
    )
    if not real_tiles:
        for module in (reduce, unscale):
            stack.enter_context(mock.patch.object(module, "_tile", return_value=1024))
        stack.enter_context(mock.patch.object(combine, "PARTIALS_PER_PROGRAM", 16))


@contextlib.contextmanager
def checked_launches(
    reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]
) -> Iterator[None]:
    """Check addresses of launches inside; a launch may also touch the tables it is given."""

    def checked(launch: Callable[..., None]) -> Callable[..., None]:
        def call(kernel: Any, programs: int, *args: Any, **constants: Any) -> None:
            own = [arg for arg in args if isinstance(arg, torch.Tensor)]
            mine = [t for t in own if all(t is not r for r in reads)]
            with checked_addresses([*reads, *own], [*writes, *mine]):
                launch(kernel, programs, *args, **constants)

        return call

    modules: list[Any] = [combine, reduce, unscale]
    with contextlib.ExitStack() as patches:
        for module in modules:
            patches.callback(setattr, module, "launch", module.launch)
            module.launch = checked(module.launch)
        yield


def random_values(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Numbers of both signs and very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=generator, dtype=torch.float64)
    exponents = torch.randint(-6, 4, (numel,), generator=generator)
    return torch.ldexp(x, exponents).to(dtype)


def exact_power_sum(x: torch.Tensor, p: float) -> float:
    """Sum of |x|^p, as exact as float64 can be."""
    return math.fsum(abs(value) ** p for value in x.double().tolist())
