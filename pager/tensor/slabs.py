"""Ops on tensors larger than the whole arena: page by page, slab by slab.

An ordinary op holds all pages of its operands. Here only a *part* of a run is held, and a *stream*
holds one part after another: while one is used the next one is read ahead, and the
one before leaves when its frames are wanted, before anything else does. ::

    tensor   | leave if wanted | in use | coming | on host or disk ...
                                 ^ slab k  ^ slab k + 1

Plans know whole runs only. To them a stream is one access, to a workspace of as many frames as two
slabs take (``workspace.py``); what it brought leaves as soon as a slab is done with. Copies below
of what is written become void as they do for other writes.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from ...kernels.pieces import Operand, Paged
from ..budget.fits import frames_anyway
from ..core import PagedStorage
from ..errors import PagerError
from ..memory.page_table import Int32
from ..memory.space import Extent, Part
from .paged_tensor import PagedTensor
from .read_ahead import ReadAhead, reading_ahead
from .workspace import workspace

if TYPE_CHECKING:
    from ..core import Core

_SHARE = 3  # a slab takes this fraction of the arena: two are there at once, and others too
_TABLE_SHARE = 3  # a table that takes less than this fraction is whole (`table_rows.py`)


@dataclass(frozen=True, eq=False)
class Pages:
    """Some pages of a storage: numbers within it, in order, none twice. ``write``: they will be
    written."""

    storage: PagedStorage
    numbers: Int32
    write: bool = False

    @property
    def part(self) -> Part:
        return Part(self.storage.run, (self.numbers + self.storage.run.first).astype(np.int32))


def pages_of(
    of: PagedTensor | PagedStorage, numbers: Iterable[int] | Int32, *, write: bool = False
) -> Pages:
    """Pages of a tensor's storage. Raises ``ValueError`` unless they are its own and in order."""
    storage = of if isinstance(of, PagedStorage) else of._storage
    if not isinstance(numbers, np.ndarray):
        numbers = np.fromiter(numbers, np.int32)
    if len(numbers):
        low, high = int(numbers.min()), int(numbers.max())
        if low < 0 or high >= storage.run.count:
            wrong, last = low if low < 0 else high, storage.run.count - 1
            raise ValueError(f"page {wrong} of a tensor that has pages 0 to {last}")
    if (np.diff(numbers) <= 0).any():
        raise ValueError("page numbers must be in order and none twice; pass np.unique of them")
    return Pages(storage, numbers.astype(np.int32), write)


# -- one part ------------------------------------------------------------------------------------
@contextmanager
def part(
    pager: Core, of: PagedTensor | PagedStorage, first: int, count: int, *, write: bool = False
) -> Iterator[Int32]:
    """Keep pages ``first … first+count`` of a tensor's storage on the device; their frames, int32
    [count], on the host, in any order. They hold while the block runs.

    ``write``: the block writes to them. Raises ``InfeasibleBudget`` or ``TierFull`` with nothing
    pinned, ``ValueError`` for pages that the storage does not have.
    """
    if count < 1:
        raise ValueError(f"{count} pages: a part has one at least")
    wanted = pages_of(of, np.arange(first, first + count, dtype=np.int32), write=write)
    with page_set(pager, wanted) as frames:
        yield frames


@contextmanager
def page_set(pager: Core, wanted: Pages) -> Iterator[Int32]:
    """:func:`part` for any set of pages, or none: those that hold some rows of a table."""
    with pager.hold_parts(*_parts_of(pager, [wanted])) as (frames,):
        yield frames


def _parts_of(pager: Core, wanted: Sequence[Pages]) -> tuple[list[Part], list[Part]]:
    """To be held, and those of them to be written."""
    for pages in wanted:
        if pages.storage.pager is not pager:
            raise PagerError("the pages are of another Pager; use the tensor's own, tensor.pager")
    parts = [pages.part for pages in wanted]
    return parts, [part for pages, part in zip(wanted, parts) if pages.write]


# -- streams -------------------------------------------------------------------------------------
def stream(
    pager: Core, slabs: Iterable[Sequence[Pages]], *, noted: bool = False
) -> Generator[list[Int32], None, None]:
    """Pin the pages of one slab after another; for each, the frames of each of its ``Pages``.

    What is yielded holds until the next slab is asked for, or the stream is closed (leaving a
    ``for`` loop does that). The slab after the one in use is read ahead, so ``slabs`` is one ahead
    too. ``noted``: who streams has said what it would take whole (``whole_need.py``); else it is a
    table, and said here. Raises as :func:`part` does, with nothing pinned.
    """
    pager.check_open()
    began = time.perf_counter()
    todo = iter(slabs)
    wanted, upcoming = next(todo, None), next(todo, None)
    if wanted is None:
        return
    first = wanted
    ahead: ReadAhead
    two = [[pages.part for pages in slab] for slab in (first, upcoming or ())]
    with reading_ahead(pager) as ahead, workspace(pager, two, _writes(first)) as frames_kept:
        with pager.lock:
            frames_kept.coming(two[0])
        try:
            while wanted is not None:
                parts, written = _parts_of(pager, wanted)
                with pager.lock, pager.waiting(own=True):
                    ahead.take()
                frames = pager.take_parts(parts, written, streamed=True)
                brought = frames_kept.newest
                try:
                    if upcoming is not None:
                        next_parts = [pages.part for pages in upcoming]
                        with pager.lock:
                            frames_kept.coming(next_parts)
                            ahead.ask(next_parts)
                    yield frames
                finally:
                    pager.release_parts(parts)
                    ahead.leave(brought)
                wanted, upcoming = upcoming, None if upcoming is None else next(todo, None)
        finally:
            if pager.metering_this() and not noted:
                _note_whole_need(pager, first, began)


def _writes(slab: Sequence[Pages]) -> list[bool]:
    return [pages.write for pages in slab]


def _note_whole_need(pager: Core, slab: Sequence[Pages], began: float) -> None:
    """Whole, a table is held, and its gradient is dense."""
    for pages in slab:
        run = pages.storage.run
        of_gradient = pages.storage.nbytes if run.kind == "gradient" else 0
        pager.budget.whole_needs.note(
            run.count,
            share=_TABLE_SHARE,
            more_dense=of_gradient,
            began=began,
            ended=time.perf_counter(),
        )


# -- tensors in step -----------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class Slab:
    """Elements ``start … stop`` of each of the tensors that are walked, as operands for kernels
    over pieces; those in pages are on the device. Valid until the next slab is asked for."""

    start: int
    stop: int
    operands: tuple[Operand, ...]


def slabs(
    pager: Core,
    tensors: Sequence[torch.Tensor],
    pages_per_slab: int | None = None,
    *,
    write: Sequence[bool] | None = None,
) -> Iterator[Slab]:
    """Walk ``tensors`` in step from the first element to the last, as many at once as
    ``pages_per_slab`` frames hold of all of them together (but never less than a page of the widest
    dtype).

    tensors : all with the same number of elements, contiguous, paged here or dense.
    pages_per_slab : default a third of the frames that nobody else has pinned.
    write : which tensors will be written; default none.

    Raises as :func:`stream` does, and ``ValueError`` for tensors that cannot be walked.
    """
    flat = [_Flat.of(pager, tensor) for tensor in tensors]
    counts = {tensor.numel() for tensor in tensors}
    if len(counts) > 1:
        raise ValueError(f"tensors have {sorted(counts)} elements; those walked in step must agree")
    if write is None:
        write = [False] * len(flat)
    if len(write) != len(flat):
        raise ValueError(f"write names {len(write)} tensors, but {len(flat)} are walked")
    numel = counts.pop() if counts else 0
    if pages_per_slab is None:
        pages_per_slab = fair_share(pager)
    return _walk(pager, flat, write, numel, _step(flat, numel, pages_per_slab))


def _walk(
    pager: Core, flat: Sequence[_Flat], write: Sequence[bool], numel: int, step: int
) -> Iterator[Slab]:
    borders = range(0, numel, step)

    def wanted() -> Iterator[list[Pages]]:
        for start in borders:
            stop = min(start + step, numel)
            yield [f.pages(start, stop, write=w) for f, w in zip(flat, write) if f.storage]

    with closing(stream(pager, wanted(), noted=True)) as pinned:
        for start, _ in zip(borders, pinned):
            stop = min(start + step, numel)
            yield Slab(start, stop, tuple(f.operand(start, stop) for f in flat))


def fair_share(pager: Core) -> int:
    """Frames for one slab: with the next one there too, others keep a third of the arena."""
    with pager.lock:
        return max(0, frames_anyway(pager.budget) - pager.residency.pinned_pages()) // _SHARE


def _step(flat: Sequence[_Flat], numel: int, frames: int) -> int:
    """Elements of a slab: a power of two below a page of the narrowest dtype, else a multiple of
    such a page, so that each slab begins at a page border of each tensor, or lies in one page."""
    sizes = [f.dtype.itemsize for f in flat if f.storage]
    if not sizes:
        return max(1, numel)
    page = next(f.page_bytes for f in flat if f.storage)
    step, whole = page // max(sizes), page // min(sizes)

    def cost(step: int) -> int:
        return sum(max(1, step * size // page) for size in sizes)

    while step < whole and cost(2 * step) <= frames:
        step *= 2
    if step == whole:
        step *= max(1, frames // cost(whole))
    return step


@dataclass(frozen=True, eq=False)
class _Flat:
    """A contiguous tensor as bytes: ``begin`` … of its storage, or dense memory."""

    storage: PagedStorage | None
    dense: torch.Tensor | None
    dtype: torch.dtype
    begin: int  # within the run
    nbytes: int
    page_bytes: int

    @classmethod
    def of(cls, pager: Core, tensor: torch.Tensor) -> _Flat:
        if not tensor.is_contiguous():
            raise ValueError(
                f"a tensor of shape {tuple(tensor.shape)} and stride {tensor.stride()} cannot be "
                "walked; pass it contiguous"
            )
        if type(tensor) is not PagedTensor:
            return cls(None, tensor.view(-1), tensor.dtype, 0, 0, pager.page_size)
        storage, size = tensor._storage, tensor.dtype.itemsize
        begin = storage.offset + int(tensor.storage_offset()) * size
        nbytes = tensor.numel() * size
        in_one = begin % pager.page_size + nbytes <= pager.page_size
        if begin % pager.page_size and not in_one:
            raise ValueError(
                f"a view that begins at byte {begin} of its pages does not begin at a page border "
                f"(pages have {pager.page_size} bytes); walk the tensor that it is a view of"
            )
        return cls(storage, None, tensor.dtype, begin, nbytes, pager.page_size)

    def pages(self, start: int, stop: int, *, write: bool) -> Pages:
        """Those that hold these elements."""
        assert self.storage is not None
        first = (self.begin + start * self.dtype.itemsize) // self.page_bytes
        last = (self.begin + stop * self.dtype.itemsize - 1) // self.page_bytes
        return Pages(self.storage, np.arange(first, last + 1, dtype=np.int32), write)

    def operand(self, start: int, stop: int) -> Operand:
        """These elements; the pages that hold them are on the device."""
        if self.dense is not None:
            return self.dense[start:stop]
        assert self.storage is not None
        size = self.dtype.itemsize
        low, high = self.begin + start * size, self.begin + stop * size
        return _operand(self.storage.pager, self.storage.run, low, high, self.dtype)


def operand(tensor: PagedTensor, first: int, count: int) -> Operand:
    """What ``tensor`` has in pages ``first … first+count`` of its storage, which are pinned: pages,
    or a view where it is all inside one page and does not begin with it.

    tensor : contiguous. Raises ``ValueError`` if it begins amid the pages, ``PagerError`` if these
    are not on the device.
    """
    pager = tensor._storage.pager
    flat = _Flat.of(pager, tensor)
    low = max(first * pager.page_size, flat.begin)
    high = min((first + count) * pager.page_size, flat.begin + flat.nbytes)
    if low >= high:
        raise ValueError(f"the tensor has no element in pages {first} to {first + count - 1}")
    return _operand(pager, tensor._storage.run, low, high, tensor.dtype)


def _operand(pager: Core, run: Extent, low: int, high: int, dtype: torch.dtype) -> Operand:
    """Bytes ``low … high`` of ``run``."""
    size = pager.page_size
    rows = slice(run.first + low // size, run.first - (-high // size))
    frames = pager.table.frame[rows].copy()
    if (frames < 0).any():
        page = low // size + int(np.argmax(frames < 0))
        raise PagerError(f"page {page} is not on the device; pin it first, with pager.part")
    arena = pager.residency.arena
    if low % size == 0:
        return Paged(arena, frames, size, dtype, (high - low) // dtype.itemsize)
    begin = int(frames[0]) * size + low % size
    return arena[begin : begin + high - low].view(dtype)
