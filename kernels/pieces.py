"""Pieces: flat tensors, paged or dense, cut at the page borders of all that an op reads together.

An op on several lists of tensors (parameters, gradients, two states: one *group* for each
parameter) becomes one launch over pieces. A piece is a stretch of elements that no operand of its
group breaks: its addresses are all that a kernel has to know, so the same kernel serves paged and
dense operands of any mixture, and any number of tensors.

::

    parameter, fp32   |   page 7    |   page 2    |  page 9 |      one group, 3 operands
    gradient,  bf16   |          page 4           | page 1  |
    state,     dense  |=======================================|
    pieces            |      0      |      1      |    2    |

Pages have a power of two of bytes and elements too, so the borders nest.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from .launch import ARENA_ALIGNMENT_BYTES as ALIGNMENT_BYTES
from .launch import upload

__all__ = ["Operand", "Paged", "Pieces", "cut", "stretches"]


@dataclass(frozen=True, eq=False)
class Paged:
    """A flat tensor in pages: element i is in frame ``frames[i * itemsize // page_bytes]``.

    arena : uint8 [frames of the arena * page_bytes], contiguous, 16-byte aligned.
    frames : int64 [pages], on the host; all of them on the device, none twice.
    numel : (pages - 1) * page_bytes < numel * itemsize <= pages * page_bytes.
    """

    arena: torch.Tensor
    frames: npt.NDArray[np.int64]
    page_bytes: int
    dtype: torch.dtype
    numel: int


Operand = Paged | torch.Tensor  # a tensor is contiguous; its elements count in memory order


def memory_of(operand: Operand) -> torch.Tensor:
    """The tensor whose memory an operand is in."""
    return operand.arena if isinstance(operand, Paged) else operand


def numel_of(operand: Operand) -> int:
    """Elements of an operand."""
    return operand.numel if isinstance(operand, Paged) else operand.numel()


def dtype_name(dtype: torch.dtype) -> str:
    """What kernels call a dtype: "float32"."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, eq=False)
class Pieces:
    """What a kernel over pieces reads.

    addresses : int64 [operands, pieces], of the first element of each.
    lengths : int32 [pieces], elements; at most ``longest``.
    group : int32 [pieces], which group each is of, in order.
    starts : int64 [pieces], number of each one's first element within its group.
    aligned : whether every piece of every operand begins at a multiple of 16 bytes.
    """

    addresses: torch.Tensor
    lengths: torch.Tensor
    group: torch.Tensor
    starts: torch.Tensor
    longest: int
    aligned: bool

    @property
    def count(self) -> int:
        return self.lengths.numel()

    def to(self, device: torch.device) -> Pieces:
        """The same on `device`; from the host the copy is queued on the current stream."""
        if device.type == "cpu":
            return self
        tensors = (self.addresses, self.lengths, self.group, self.starts)
        moved = [upload(tensor, device) for tensor in tensors]
        return Pieces(moved[0], moved[1], moved[2], moved[3], self.longest, self.aligned)


def cut(groups: Sequence[Sequence[Operand]], longest: int = 1 << 19) -> Pieces:
    """Pieces of all groups, on the host.

    groups : operands of one group have the same number of elements, and there are as many in each
        group. Empty ones have no pieces.
    longest : elements in a piece at most, a power of two; dense operands are cut at its multiples.
    """
    operands = len(groups[0]) if groups else 0
    columns: list[list[npt.NDArray[np.int64]]] = [[] for _ in range(operands)]
    lengths, owners, starts = [], [], []
    for number, group in enumerate(groups):
        numel = _check(group, operands)
        step = min([longest, *(_elements_per_page(x) for x in group if isinstance(x, Paged))])
        first = np.arange(0, numel, step, dtype=np.int64)
        lengths.append(np.minimum(step, numel - first).astype(np.int32))
        owners.append(np.full(len(first), number, np.int32))
        starts.append(first)
        for column, operand in zip(columns, group, strict=True):
            column.append(_addresses(operand, first))

    def joined(parts: Sequence[npt.NDArray[np.generic]], dtype: type) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([np.empty(0, dtype), *parts]).astype(dtype))

    rows = [joined(column, np.int64) for column in columns]
    length = joined(lengths, np.int32)
    addresses = torch.stack(rows) if rows else torch.empty(0, 0, dtype=torch.int64)
    return Pieces(
        addresses,
        length,
        joined(owners, np.int32),
        joined(starts, np.int64),
        int(length.max()) if length.numel() else 0,
        bool((addresses % ALIGNMENT_BYTES == 0).all()),
    )


def stretches(group: Sequence[Operand]) -> Iterator[list[torch.Tensor]]:
    """The longest pieces of one group as 1-D tensors over the operands' own memory, in order.

    What references run on; frames that happen to be consecutive in all operands are not cut. Reads
    nothing of a device's.
    """
    numel = _check(group, len(group))
    paged = [x for x in group if isinstance(x, Paged)]
    if not numel:
        return
    if not paged:
        yield [x.view(-1) if isinstance(x, torch.Tensor) else x for x in group]  # type: ignore[misc]
        return
    borders = {0, numel}
    for operand in paged:
        breaks = np.flatnonzero(np.diff(operand.frames) != 1) + 1
        borders.update((breaks * _elements_per_page(operand)).tolist())
    edges = sorted(borders)
    for start, stop in itertools.pairwise(edges):
        yield [_view(operand, start, stop) for operand in group]


def _view(operand: Operand, start: int, stop: int) -> torch.Tensor:
    if isinstance(operand, torch.Tensor):
        return operand.view(-1)[start:stop]
    page, inside = divmod(start * operand.dtype.itemsize, operand.page_bytes)
    begin = int(operand.frames[page]) * operand.page_bytes + inside
    nbytes = (stop - start) * operand.dtype.itemsize
    return operand.arena[begin : begin + nbytes].view(operand.dtype)


def _addresses(operand: Operand, first: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    if isinstance(operand, torch.Tensor):
        return operand.data_ptr() + first * operand.element_size()
    page, inside = np.divmod(first * operand.dtype.itemsize, operand.page_bytes)
    where: npt.NDArray[np.int64] = operand.frames[page] * operand.page_bytes
    return where + inside + operand.arena.data_ptr()


def _elements_per_page(operand: Paged) -> int:
    return operand.page_bytes // operand.dtype.itemsize


def _check(group: Sequence[Operand], operands: int) -> int:
    """Elements of each operand of a group."""
    assert len(group) == operands, f"{len(group)} operands, and {operands} in the first group"
    counts = {numel_of(x) for x in group}
    assert len(counts) <= 1, f"operands of {counts} elements"
    for operand in group:
        if isinstance(operand, torch.Tensor):
            assert operand.is_contiguous()
            continue
        frames, size = operand.frames, operand.page_bytes
        assert len(frames) == -(-operand.numel * operand.dtype.itemsize // size)
        last = operand.arena.numel() // size - 1
        if len(frames):
            assert 0 <= frames.min() <= frames.max() <= last, "bring the page in first"
    return counts.pop() if counts else 0
