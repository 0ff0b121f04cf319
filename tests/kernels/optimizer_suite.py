"""What tests of optimizers share: tensors in scattered, guarded frames, and states of each kind."""

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from address_checker import checked_addresses
from page_suite import SENTINEL, Backend

from tensorpager.kernels.blockwise import BLOCK, Blockwise
from tensorpager.kernels.pieces import Operand, Paged

PAGE_BYTES = 4 << 10


class Arena:
    """Frames full of sentinel bytes, handed out in random order."""

    def __init__(self, backend: Backend, frames: int = 64, page_bytes: int = PAGE_BYTES) -> None:
        self.page_bytes = page_bytes
        self.memory = torch.full((frames * page_bytes,), SENTINEL, dtype=torch.uint8)
        self.memory = self.memory.to(backend.device)
        self._free = np.random.default_rng(0).permutation(frames).tolist()
        self._used = np.zeros(frames * page_bytes, dtype=bool)

    def page(self, tensor: torch.Tensor) -> Paged:
        """A copy of `tensor` in scattered frames."""
        data = tensor.contiguous().view(-1).view(torch.uint8)
        frames = [self._free.pop() for _ in range(-(-data.numel() // self.page_bytes))]
        for page, frame in enumerate(frames):
            part = data[page * self.page_bytes : (page + 1) * self.page_bytes]
            place = slice(frame * self.page_bytes, frame * self.page_bytes + part.numel())
            self.memory[place] = part
            self._used[place] = True
        table = np.array(frames, np.int64)
        return Paged(self.memory, table, self.page_bytes, tensor.dtype, tensor.numel())

    def assert_rest_untouched(self) -> None:
        rest = self.memory.cpu().numpy()[~self._used]
        assert (rest == SENTINEL).all(), "wrote where no tensor is"


def dense(operand: Operand) -> torch.Tensor:
    """A flat copy, on the CPU."""
    if isinstance(operand, torch.Tensor):
        return operand.detach().cpu().view(-1).clone()
    frames = operand.arena.cpu().view(-1, operand.page_bytes)[torch.from_numpy(operand.frames)]
    return frames.view(-1)[: operand.numel * operand.dtype.itemsize].clone().view(operand.dtype)


def zeros(numel: int, kind: torch.dtype, place: Callable[[torch.Tensor], Operand]) -> Any:
    """A state of zeros: of a float dtype, or blockwise for uint8."""
    if kind is not torch.uint8:
        return place(torch.zeros(numel, dtype=kind))
    scales = torch.zeros(-(-numel // BLOCK))
    return Blockwise(place(torch.zeros(numel, dtype=kind)), place(scales))


def bits(state: Any) -> torch.Tensor:
    """All that a state holds, as bytes."""
    if isinstance(state, Blockwise):
        return torch.cat([bits(state.codes), bits(state.scales)])
    return dense(state).view(torch.uint8)


def close(found: torch.Tensor, expected: torch.Tensor, ulps: float) -> bool:
    """Whether all differ by at most `ulps` * 2^-24 of their magnitude and the mean of it."""
    if not expected.numel():
        return not found.numel()
    found, expected = found.double(), expected.double()
    scale = expected.abs() + expected.abs().mean()
    return bool(((found - expected).abs() <= ulps * 2.0**-24 * scale).all())


def memory(operands: list[Any]) -> list[torch.Tensor]:
    """What the operands may be read from and written to, each page apart."""
    found = []
    for operand in operands:
        if isinstance(operand, Blockwise):
            found += memory([operand.codes, operand.scales])
        elif isinstance(operand, Paged):
            nbytes = operand.numel * operand.dtype.itemsize
            for page, frame in enumerate(operand.frames.tolist()):
                start = frame * operand.page_bytes
                length = min(operand.page_bytes, nbytes - page * operand.page_bytes)
                found.append(operand.arena[start : start + length])
        elif operand is not None:
            found.append(operand)
    return found


def run(backend: Backend, launcher: Callable[..., None], *lists: Any, **named: Any) -> None:
    """Call this implementation of an optimizer's launcher."""
    if backend.name == "reference":
        launcher = getattr(sys.modules[launcher.__module__], f"{launcher.__name__}_reference")
    launcher(*lists, **named)
    if backend.name == "cuda":
        torch.cuda.synchronize()


@contextlib.contextmanager
def only_touching(backend: Backend, reads: list[Any], writes: list[Any]) -> Any:
    """Check the addresses that a kernel launched inside touches, its tables aside."""
    if backend.name != "interpreter":
        yield
        return
    from tensorpager.kernels import update

    launch = update.launch

    def checked(kernel: Any, programs: int, *args: Any, **constants: Any) -> None:
        tables = [x for x in args if isinstance(x, torch.Tensor)]
        with checked_addresses(memory(reads) + memory(writes) + tables, memory(writes)):
            launch(kernel, programs, *args, **constants)

    update.launch = checked
    try:
        yield
    finally:
        update.launch = launch


def place_of(backend: Backend, arena: Arena, paged: bool) -> Callable[[torch.Tensor], Operand]:
    """Puts tensors into pages, or on the device as they are."""
    return arena.page if paged else lambda tensor: tensor.clone().to(backend.device)
