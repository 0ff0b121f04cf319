"""Rows of a large table: only the pages that hold them are brought to the device.

A table that takes more than a share of the arena is not pinned as a whole. The pages of the rows
that are looked up come in groups, as many at once as may be held, and the next group is read ahead
(``slabs.stream``). ::

    rows wanted   | 3   4 | 91    92 93 |      sorted; a row may straddle two pages
    pages         | 0   1 | 17       18 |      two groups, of two pages each
"""

from __future__ import annotations

import weakref
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ...kernels.launch import upload
from ...kernels.pieces import Paged
from ...kernels.rows import gather_rows, pages_of_rows, row_blocks
from ..budget.fits import fits
from ..core import PagedStorage
from ..tensor.paged_tensor import PagedTensor
from ..tensor.slabs import fair_share, pages_of, stream

SHARE = 3  # a table of more than this fraction of the arena is large
_CHUNK_ELEMENTS = 1 << 20  # of a temporary

Int64 = npt.NDArray[np.int64]

_large: weakref.WeakSet[PagedStorage] = weakref.WeakSet()


def is_large(table: PagedTensor) -> bool:
    """Whether rows of ``table`` are brought in by themselves, and its gradient goes into pages.

    What was large stays so, whatever becomes of the arena: dense memory that an iteration did not
    need when it was measured must not be needed later. Nothing is while all fits.
    """
    storage = table._storage
    pager = storage.pager
    if pager.fits or storage.run.small is not None:
        return False
    if storage in _large:
        return True
    if fits(pager.budget, storage.run.count, share=SHARE):
        return False
    _large.add(storage)
    return True


def can_be_whole(table: PagedTensor) -> bool:
    """Whether all of it can be on the device at once."""
    return fits(table._storage.pager.budget, table._storage.run.count)


def is_table(tensor: PagedTensor) -> bool:
    """Whether it is rows one after the other, from the first byte of pages of its own."""
    storage = tensor._storage
    return (
        tensor.dim() == 2
        and storage.run.small is None
        and not tensor.storage_offset()
        and tensor.is_contiguous()
        and tensor.numel() > 0
        and tensor.numel() * tensor.element_size() == storage.nbytes
        and not (tensor.dtype.is_complex or tensor.is_neg())
    )


def row_bytes(table: torch.Tensor) -> int:
    return table.size(1) * table.element_size()


def pages_at_once(table: PagedTensor) -> int:
    """Pages to hold at a time: a fair share, and enough for any one row."""
    size = table._storage.pager.page_size
    return max(fair_share(table._storage.pager), (row_bytes(table) - 2) // size + 2)


def in_frames(table: PagedTensor) -> Paged:
    """``table`` as kernels see it, with what is on the device now; other pages have frame -1."""
    pager, run = table._storage.pager, table._storage.run
    frames = pager.table.frame[run.first : run.first + run.count].copy()
    return Paged(pager.residency.arena, frames, pager.page_size, table.dtype, table.numel())


# -- groups of rows --------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class RowGroup:
    """``rows[start:stop]``, whose pages are held on the device until the next group is asked for.

    table : with the frames of all pages that are there.
    """

    table: Paged
    start: int
    stop: int


def row_groups(
    table: PagedTensor, rows: Int64, *, write: bool = False
) -> Generator[RowGroup, None, None]:
    """Hold the pages of ``rows`` (ascending, none twice), group by group.

    ``write``: they will be written. To be closed, if left before its end. Raises as
    ``slabs.stream`` does, and ``IndexError`` as torch does for a row that the table has not.
    """
    if not len(rows):
        return
    _check_rows(table, rows)
    pager, nbytes = table._storage.pager, row_bytes(table)
    cuts = _cuts(rows, nbytes, pager.page_size, pages_at_once(table))
    pages = (
        [pages_of(table, pages_of_rows(rows[start:stop], nbytes, pager.page_size), write=write)]
        for start, stop in cuts
    )
    with closing(stream(pager, pages)) as pinned:
        for (start, stop), _ in zip(cuts, pinned):
            yield RowGroup(in_frames(table), start, stop)


def _check_rows(table: PagedTensor, rows: Int64) -> None:
    if rows[0] < 0 or rows[-1] >= table.size(0):
        raise IndexError("index out of range in self")


def _cuts(rows: Int64, nbytes: int, page_bytes: int, limit: int) -> list[tuple[int, int]]:
    """Groups of ``rows``, half-open, each on at most ``limit`` pages (more for one row alone)."""
    first, last = rows * nbytes // page_bytes, ((rows + 1) * nbytes - 1) // page_bytes
    before = np.concatenate([[-1], last[:-1]])
    fresh = last - np.maximum(first, before + 1) + 1  # pages that the rows before are not on
    total = np.cumsum(fresh)
    cuts, start = [], 0
    while start < len(rows):
        own = int(last[start] - first[start]) + 1
        stop = int(np.searchsorted(total, total[start] + limit - own, side="right"))
        cuts.append((start, max(stop, start + 1)))
        start = cuts[-1][1]
    return cuts


# -- reading and writing rows ----------------------------------------------------------------------
def look_up(table: PagedTensor, indices: torch.Tensor) -> torch.Tensor:
    """Rows of a paged table, dense: [..., D].

    indices : int64 [...], on the table's device. On CUDA the call waits for them: which pages hold
        the rows must be known on the host.
    """
    shape = *indices.shape, table.size(1)
    result = torch.empty(shape, dtype=table.dtype, device=table.device)
    out, indices = result.view(-1, table.size(1)), indices.reshape(-1)
    places = indices.cpu().numpy()
    rows = np.unique(places)
    table._storage.pager.check_open()
    with closing(row_groups(table, rows)) as groups:
        for group in groups:
            if group.stop - group.start == len(rows):
                gather_rows(group.table, indices, out)
                break
            mine = rows[group.start], rows[group.stop - 1]
            here = torch.from_numpy(np.flatnonzero((places >= mine[0]) & (places <= mine[1])))
            for some in upload(here, out.device).split(max(1, _CHUNK_ELEMENTS // out.shape[1])):
                part = out.new_empty(len(some), out.shape[1])
                gather_rows(group.table, indices[some], part)
                out.index_copy_(0, some, part)
    return result


def put_rows(table: Paged, rows: torch.Tensor, values: torch.Tensor) -> None:
    """Write ``values`` [n, D] to ``rows``, int64 [n], none twice, whose pages are held to be
    written."""
    for blocks, numbers, part in row_blocks(table, rows, values):
        blocks.index_copy_(0, numbers, part)
