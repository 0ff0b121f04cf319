"""What all kernel tests share: implementations, guarded memory, and one list of cases.

The oracle is Python's bytes: expectations are slices of `bytes`, never torch or Triton.
"""

import ast
import contextlib
import mmap
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from address_checker import checked_addresses

from tensorpager.kernels import launch

KIB = 1 << 10
MIB = 1 << 20
GUARD_BYTES = 4 * KIB
SENTINEL = 0xA5
MAP_NORESERVE = 0x4000  # Linux; in Python's mmap from 3.13 on


@dataclass(frozen=True)
class Backend:
    """One implementation of every page kernel."""

    name: str

    @property
    def device(self) -> str:
        return "cuda" if self.name == "cuda" else "cpu"

    def run(
        self,
        launcher: Callable[..., None],
        *args: torch.Tensor | int,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
    ) -> None:
        """Call this implementation of `launcher`, which may touch only `reads` and `writes`."""
        if self.name == "reference":
            launcher = getattr(sys.modules[launcher.__module__], f"{launcher.__name__}_reference")
        checker = contextlib.nullcontext()
        if self.name == "interpreter":
            checker = checked_addresses(reads, writes)
        with checker:
            launcher(*args)
        if self.name == "cuda":
            torch.cuda.synchronize()

    def frames(self, numbers: Sequence[int]) -> torch.Tensor:
        """A table, int32 [n]; like most slices of a table, it is not 16-byte aligned."""
        return torch.tensor([-1, *numbers], dtype=torch.int32, device=self.device)[1:]


class Guarded:
    """Random bytes between two guards, the first one `offset` bytes off 16-byte alignment."""

    def __init__(self, nbytes: int, backend: Backend, offset: int = 0, seed: int = 0) -> None:
        self._whole = torch.full((2 * GUARD_BYTES + offset + nbytes,), SENTINEL, dtype=torch.uint8)
        self._whole = self._whole.to(backend.device)
        assert self._whole.data_ptr() % 16 == 0
        self._start = GUARD_BYTES + offset
        self.tensor = self._whole[self._start : self._start + nbytes]
        generator = torch.Generator().manual_seed(seed)
        self.tensor.copy_(torch.randint(256, (nbytes,), dtype=torch.uint8, generator=generator))

    def bytes(self) -> bytes:
        return bytes(self.tensor.cpu().numpy())

    def assert_is(self, expected: bytes) -> None:
        """The bytes are `expected`, and the guards are as they were."""
        whole = bytes(self._whole.cpu().numpy())
        end = self._start + self.tensor.numel()
        assert whole[: self._start] == bytes([SENTINEL]) * self._start, "wrote below the tensor"
        assert whole[end:] == bytes([SENTINEL]) * GUARD_BYTES, "wrote above the tensor"
        if whole[self._start : end] != expected:
            found = zip(whole[self._start : end], expected, strict=True)
            wrong = [i for i, (got, want) in enumerate(found) if got != want]
            pytest.fail(f"{len(wrong)} bytes differ, from {wrong[0]} to {wrong[-1]}")


@dataclass(frozen=True)
class DenseCase:
    """A tensor of `nbytes` in pages, its dense copy `offset` bytes off 16-byte alignment."""

    page_bytes: int
    frame_of: tuple[int, ...]
    nbytes: int
    offset: int = 0

    @property
    def arena_frames(self) -> int:
        return max(self.frame_of, default=0) + 2

    def page(self, i: int) -> slice:
        """Bytes of page i in the dense copy, half-open."""
        return slice(i * self.page_bytes, min((i + 1) * self.page_bytes, self.nbytes))

    def place(self, i: int) -> slice:
        """Valid bytes of page i in the arena, half-open."""
        start = self.frame_of[i] * self.page_bytes
        page = self.page(i)
        return slice(start, start + page.stop - page.start)

    def __str__(self) -> str:
        frames = "-".join(map(str, self.frame_of)) or "none"
        return f"{self.page_bytes // KIB}KiB,frames={frames},{self.nbytes}B,+{self.offset}"


_SMALL, _MEDIUM, _LARGE = 4 * KIB, 8 * KIB, 16 * KIB
DENSE_CASES = [
    DenseCase(_SMALL, (), 0),
    DenseCase(_SMALL, (), 0, offset=3),
    *(DenseCase(_SMALL, (2,), nbytes) for nbytes in (1, 3, 15, 16, 17, 4079, 4095, 4096)),
    DenseCase(_SMALL, (0,), 4096),
    DenseCase(_SMALL, (5, 1, 3), 3 * _SMALL),
    DenseCase(_SMALL, (5, 1, 3), 2 * _SMALL + 1),
    DenseCase(_SMALL, (1, 2, 3), 2 * _SMALL + 4093),
    DenseCase(_SMALL, (0, 1, 6, 7, 3), 4 * _SMALL + 1000),
    DenseCase(_SMALL, (4, 3, 2, 1, 0), 5 * _SMALL),
    DenseCase(_MEDIUM, (3, 0), _MEDIUM + 7),
    DenseCase(_MEDIUM, (3, 0), _MEDIUM + _SMALL),
    DenseCase(_MEDIUM, (3, 0), _MEDIUM + _SMALL + 33),
    DenseCase(_LARGE, (2, 0, 1), 2 * _LARGE + 9999),
    DenseCase(_LARGE, (1,), _LARGE - 16),
    DenseCase(4 * _LARGE, (3, 1), 4 * _LARGE + 2 * _LARGE + 5),
    *(DenseCase(_SMALL, (4, 0, 2), 2 * _SMALL + 77, offset) for offset in (1, 2, 4, 8, 15)),
    DenseCase(_SMALL, (1,), 1, offset=1),
    DenseCase(_LARGE, (2, 0), 2 * _LARGE, offset=8),
    DenseCase(_LARGE, (2, 0), 2 * _LARGE - 4097, offset=3),
]


dense_cases = pytest.mark.parametrize("case", DENSE_CASES, ids=str)


def kernels_in_folder() -> set[str]:
    """`module.launcher` for every function _<launcher>_kernel in the kernels folder."""
    found = set()
    for path in Path(launch.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                found.add(f"{path.stem}.{node.name.removesuffix('_kernel').strip('_')}")
    return found


def distant_frame(backend: Backend, page_bytes: int) -> tuple[torch.Tensor, int]:
    """An arena with a frame whose address needs 64 bits, and the number of its last frame.

    On a CPU: 100,000 frames, of which the system backs only those that are touched. On CUDA: 5 GiB.
    """
    if backend.device == "cpu":
        frames = 100_001
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        try:
            memory = mmap.mmap(-1, frames * page_bytes, flags=flags)
        except OSError as error:
            pytest.skip(f"no address space for {frames} frames: {error}")
        arena = torch.frombuffer(memory, dtype=torch.uint8)
    else:
        frames = 5 * 1024 * MIB // page_bytes
        if torch.cuda.mem_get_info()[0] < 2 * frames * page_bytes:
            pytest.skip("needs 10 GiB of free device memory")
        arena = torch.empty(frames * page_bytes, dtype=torch.uint8, device="cuda")
    return arena, frames - 1
