"""The gradient of a large table: a PagedTensor, made slab by slab.

A dense gradient would be as large as the table. Here no more than a slab of it is on the device at
a time, and autograd's own sums of such gradients (a table that is used twice in a graph) give pages
again, while ``param.grad += gradient`` is an ordinary op, which ``page_run.py`` does in slabs.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import Any, TypeGuard

import numpy as np
import torch

from ...kernels.cpu_split import Place
from ...kernels.elementwise import elementwise
from ...kernels.fill import fill_pages
from ...kernels.launch import upload
from ...kernels.row_sums import RowGroups, add_rows, group_rows
from ..core import PagedStorage
from ..memory.page_table import Int32
from ..tensor.new_pages import empty_like_geometry
from ..tensor.page_run import elementwise_op
from ..tensor.paged_tensor import PagedTensor
from ..tensor.slabs import Pages, fair_share, slabs, stream
from .table_rows import can_be_whole, in_frames, pages_at_once, row_bytes

_gradients: weakref.WeakSet[PagedStorage] = weakref.WeakSet()


def new_gradient(table: torch.Tensor) -> PagedTensor:
    """In pages, with the table's geometry; the caller writes all of its values."""
    assert type(table) is PagedTensor
    like = torch.empty(table.size(), dtype=table.dtype, device="meta")
    gradient = empty_like_geometry(table._storage.pager, like, "gradient", overwritten=True)
    _gradients.add(gradient._storage)
    return gradient


def is_gradient(value: Any) -> TypeGuard[PagedTensor]:
    """Whether this module made it, or it is one that can never be on the device whole; all of
    it."""
    if type(value) is not PagedTensor or value._storage.run.kind != "gradient":
        return False
    if value._storage not in _gradients and can_be_whole(value):
        return False
    nbytes = value.numel() * value.element_size()
    return value.is_contiguous() and nbytes == value._storage.nbytes


# -- of an embedding -------------------------------------------------------------------------------
def embedding_gradient(
    table: PagedTensor,
    grad: torch.Tensor,
    indices: torch.Tensor,
    padding_idx: int,
    scale_grad_by_freq: bool,
) -> PagedTensor:
    """Zeros, and the sums of ``grad`` in the rows that were looked up.

    grad : [n, D], contiguous, of the table's dtype.
    indices : int64 [n]; ``padding_idx``: a row that gets no gradient, or -1.

    For float32 and float64 the bits are those of ``embedding_dense_backward`` on a CPU; halves are
    summed in float32 and rounded once.
    """
    gradient = new_gradient(table)
    grouped = group_rows(indices.cpu(), padding_idx)
    ids = grouped.ids.numpy()
    starts = grouped.starts.tolist()
    device = table.device
    grouped = grouped.to(device)
    pager, page_bytes = table._storage.pager, table._storage.pager.page_size
    zeroed = 0  # pages
    with closing(_row_slabs(gradient)) as row_slabs:
        for first_row, last_row in row_slabs:
            run = gradient._storage.run
            stop_page = -(-last_row * row_bytes(table) // page_bytes)
            fresh = pager.table.frame[run.first + zeroed : run.first + stop_page].copy()
            fill_pages(
                pager.residency.arena, upload(torch.from_numpy(fresh), device), page_bytes, 0
            )
            zeroed = stop_page
            a, b = np.searchsorted(ids, [first_row, last_row]).tolist()
            if a < b:
                some = RowGroups(
                    grouped.ids[a:b],
                    grouped.order[starts[a] : starts[b]],
                    grouped.starts[a : b + 1] - starts[a],
                    grouped.lookups,
                )
                add_rows(grad, some, in_frames(gradient), None, scale_grad_by_freq)
    return gradient


def _row_slabs(table: PagedTensor) -> Generator[tuple[int, int], None, None]:
    """Walk all rows, ``first … last`` at a time, with their pages held to be written."""
    nbytes, size = row_bytes(table), table._storage.pager.page_size
    limit = pages_at_once(table)
    borders = [0]
    while borders[-1] < table.size(0):
        reach = borders[-1] * nbytes // size + limit  # pages up to here
        borders.append(min(max(reach * size // nbytes, borders[-1] + 1), table.size(0)))
    ranges = list(itertools.pairwise(borders))
    pages = (
        [_pages_between(table._storage, first * nbytes, last * nbytes)] for first, last in ranges
    )
    with closing(stream(table._storage.pager, pages)) as pinned:
        for rows, _ in zip(ranges, pinned):
            yield rows


def _pages_between(storage: PagedStorage, low: int, high: int, *, write: bool = True) -> Pages:
    """Those that hold bytes ``low … high``."""
    size = storage.pager.page_size
    return Pages(storage, np.arange(low // size, -(-high // size), dtype=np.int32), write)


# -- of a range of rows ----------------------------------------------------------------------------
def write_rows(table: PagedTensor, begin: int, values: torch.Tensor) -> None:
    """``table[begin : begin + n] = values``, [n, D], contiguous, of the table's dtype."""
    storage = table._storage
    pager, size = storage.pager, storage.pager.page_size
    source = values.reshape(-1).view(torch.uint8)
    low = begin * row_bytes(table)
    high = low + source.numel()
    step = max(1, fair_share(pager))
    borders = [low, *range((low // size + step) * size, high, step * size), high]
    ranges = list(itertools.pairwise(borders))
    pages = ([_pages_between(storage, start, stop)] for start, stop in ranges)
    with closing(stream(pager, pages)) as pinned:
        for (start, stop), (frames,) in zip(ranges, pinned):
            for at, piece in pieces_of_bytes(frames, start, stop, size):
                position = start - low + at
                pager.residency.arena[piece].copy_(
                    source[position : position + piece.stop - piece.start]
                )


def pieces_of_bytes(frames: Int32, start: int, stop: int, size: int) -> Iterator[tuple[int, slice]]:
    """Bytes ``start … stop`` of some pages, which are in ``frames`` from that of ``start`` on, as
    ranges of the arena that are as long as may be; each with its distance from ``start``."""
    first = start // size * size
    breaks = np.flatnonzero(np.diff(frames) != 1) + 1
    edges = [0, *breaks.tolist(), len(frames)]
    for a, b in itertools.pairwise(edges):
        low, high = max(first + a * size, start), min(first + b * size, stop)
        where = int(frames[a]) * size + low - (first + a * size)
        yield low - start, slice(where, where + high - low)


# -- sums and copies -------------------------------------------------------------------------------
def add_gradients(one: torch.Tensor, other: torch.Tensor, alpha: Any) -> Any:
    """``one + alpha * other`` in new pages; one of them is such a gradient. ``NotImplemented`` if
    the other one is something else."""
    gradient = one if is_gradient(one) else other
    assert type(gradient) is PagedTensor
    for tensor in (one, other):
        if (
            tensor.size() != gradient.size()
            or tensor.dtype != gradient.dtype
            or tensor.layout is not torch.strided
            or not tensor.is_contiguous()
            or (type(tensor) is PagedTensor and not _can_walk(tensor, gradient))
        ):
            return NotImplemented
    total = new_gradient(gradient)
    for slab in slabs(total._storage.pager, [total, one, other], write=[True, False, False]):
        out, left, right = slab.operands
        place = Place(slab.start, total.numel())
        elementwise_op("add", [out], [[left], [right], [alpha]], [place])
    return total


def copy_gradient(gradient: PagedTensor) -> PagedTensor:
    """In new pages."""
    twin = new_gradient(gradient)
    for slab in slabs(twin._storage.pager, [twin, gradient], write=[True, False]):
        elementwise("copy", [slab.operands[0]], [slab.operands[1]])
    return twin


def _can_walk(tensor: PagedTensor, beside: PagedTensor) -> bool:
    storage = tensor._storage
    same = storage.pager is beside._storage.pager
    return same and not storage.offset and not tensor.storage_offset()
