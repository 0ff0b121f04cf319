"""A large table: only the pages of the rows looked up are brought in; its gradient is in pages.

A table that takes more than a share of the arena is not held as a whole. The pages of the rows
that are looked up come in groups, as many at once as may be held, and the next group is read ahead
(``slabs.stream``). ::

    rows wanted   | 3   4 | 91    92 93 |      sorted; a row may straddle two pages
    pages         | 0   1 | 17       18 |      two groups, of two pages each

A dense gradient is as large as the table. Where the table streams, by the verdict on it
(``placement.py``), and so has no room for that, the gradient is in pages (``gradients.py``).

PyTorch's own way of ``F.embedding`` pins the whole table. Smaller tables, and calls that somebody
wants to see or to change the ops of, go that way. A gradient is sparse, exactly as PyTorch's own,
if asked for.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.autograd import forward_ad

from ...kernels.launch import upload
from ...kernels.pieces import Paged
from ...kernels.rows import (
    MOST_BLOCKS,
    MOST_ELEMENTS,
    RowGroups,
    add_rows,
    gather_rows,
    group_rows,
    pages_of_rows,
    row_blocks,
)
from ..budget.fits import frames_anyway, streams
from ..budget.placement import Taken, Weight
from ..memory.frame_pool import distinct, merge
from ..tensor.dispatcher import serve_call, serve_op
from ..tensor.op_info import our_modes
from ..tensor.operands import operand
from ..tensor.paged_tensor import PagedTensor
from ..tensor.slabs import TABLE_SHARE, fair_share, pages_of, stream
from ..tensor.tensor_bytes import array_of
from .gradients import (
    add_gradients,
    can_be_whole,
    copy_gradient,
    in_pages,
    is_gradient,
    new_gradient,
)
from .rows import Matrix

aten = torch.ops.aten
_modes = torch._C._len_torch_dispatch_stack
_functorch_level = torch._C._functorch.peek_interpreter_stack
_CHUNK_ELEMENTS = 1 << 20  # of a temporary
_SUM_ELEMENTS = 1 << 16  # of another one

Int64 = npt.NDArray[np.int64]


def is_read_by_rows(table: PagedTensor) -> bool:
    """Whether the rows that are looked up are brought in by themselves. They have the same bits
    either way, so a table is whole where that takes no room that others may want."""
    pager, run = table._storage.pager, table._storage.run
    if pager.fits or run.small is not None:
        return False
    return run.count * TABLE_SHARE > frames_anyway(pager.budget)


def is_large(table: PagedTensor, lookups: int = 0) -> bool:
    """Whether its gradient, of so many ``lookups``, goes into pages, by the verdict on ``table``.
    Nothing is large while all fits; nor is what would take more dense memory in pages."""
    pager, run = table._storage.pager, table._storage.run
    own = table.numel() * table.dtype.itemsize
    if pager.fits or run.small is not None:
        return False
    if run.streamed is None and lookups and _streaming_takes(table, lookups) >= own:
        return False
    return streams(pager.budget, run, gradient_bytes=own)


def has_room(table: PagedTensor) -> bool:
    """Whether a dense gradient of ``table``, which is not large, finds room. In a metered iteration
    it may not; then the table streams from now on."""
    pager, run = table._storage.pager, table._storage.run
    if not pager.metering_this() or run.count == 1:
        return True
    if pager.budget.finds_room(0, table.numel() * table.dtype.itemsize):
        return True
    pager.budget.placement.stream(run)
    return False


def noted_as(table: PagedTensor) -> Weight:
    """What is known of it in this metered iteration."""
    return table._storage.pager.budget.placement.weight(table._storage.run, _pages_of_row(table))


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
    return max(fair_share(table._storage.pager), _pages_of_row(table))


def _pages_of_row(table: PagedTensor) -> int:
    """At most."""
    return (row_bytes(table) - 2) // table._storage.pager.page_size + 2


# -- groups of rows --------------------------------------------------------------------------------
class RowGroup(NamedTuple):
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
    if rows[0] < 0 or rows[-1] >= table.size(0):
        raise IndexError("index out of range in self")
    pager, nbytes = table._storage.pager, row_bytes(table)
    cuts = _cuts(rows, nbytes, pager.page_size, pages_at_once(table))
    pages = (
        [pages_of(table, pages_of_rows(rows[start:stop], nbytes, pager.page_size), write=write)]
        for start, stop in cuts
    )
    with closing(stream(pager, pages)) as pinned:
        for (start, stop), _ in zip(cuts, pinned):
            yield RowGroup(operand(table), start, stop)  # type: ignore[arg-type]


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
    places = array_of(indices)
    rows = distinct(places)
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


# -- gradients -------------------------------------------------------------------------------------
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
    ids, starts = grouped.ids.numpy(), grouped.starts.tolist()
    grouped = grouped.to(table.device)
    pager, size = table._storage.pager, table._storage.pager.page_size
    zeroed, step = 0, _rows_at_once(table)  # pages, rows
    matrix, most = Matrix.of(gradient), pages_at_once(table)
    with closing(matrix.walk(write=True, frames=most, block=1)) as row_slabs:
        for slab in row_slabs:
            first_page = slab.held.low // size
            fresh = slab.held.frames[zeroed - first_page :]
            zeroed = first_page + len(slab.held.frames)
            for first, _, count in merge(fresh, fresh):
                pager.residency.arena[first * size : (first + count) * size].zero_()
            begin, end = np.searchsorted(ids, [slab.first, slab.stop]).tolist()
            for a in range(begin, end, step):
                b = min(a + step, end)
                some = RowGroups(
                    grouped.ids[a:b],
                    grouped.order[starts[a] : starts[b]],
                    grouped.starts[a : b + 1] - starts[a],
                    grouped.lookups,
                )
                add_rows(grad, some, operand(gradient), scale_grad_by_freq)  # type: ignore[arg-type]
    return gradient


# -- F.embedding -----------------------------------------------------------------------------------
def embedding(
    indices: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """``F.embedding``; ``NotImplemented`` where PyTorch's own way has to be taken.

    indices : int64 or int32, any shape, on the weight's device. On CUDA the call waits for them.
    weight : PagedTensor [rows, D], large, contiguous and all of its storage.
    """
    if type(weight) is not PagedTensor or max_norm is not None:
        return NotImplemented
    if not is_table(weight) or not _are_indices(indices, weight):
        return NotImplemented
    padding = _padding(padding_idx, weight.size(0))
    if padding is None or _is_watched(weight):
        return NotImplemented
    differentiated = torch.is_grad_enabled() and weight.requires_grad
    large = differentiated and not sparse and is_large(weight, indices.numel())
    metered = weight._storage.pager.metering_this() and weight._storage.run.count > 1
    if not large and not metered and not is_read_by_rows(weight):
        return NotImplemented
    if type(indices) is PagedTensor:
        indices = indices.detach().to_dense()
    indices = indices.long()
    if differentiated:
        return _Lookup.apply(weight, indices, padding, scale_grad_by_freq, sparse)  # type: ignore[no-untyped-call]
    return look_up(weight, indices)


def _are_indices(indices: Any, weight: PagedTensor) -> bool:
    return (
        type(indices) in (torch.Tensor, PagedTensor)
        and indices.dtype in (torch.int64, torch.int32)
        and indices.layout is torch.strided
        and indices.device.type == weight.device.type
    )


def _padding(given: int | None, rows: int) -> int | None:
    """As a row number, -1 for none; ``None`` for what torch refuses."""
    if given is None:
        return -1
    if not -rows <= given < rows:
        return None
    return given % rows


def _is_watched(weight: PagedTensor) -> bool:
    """Somebody wants to see, or to change, the ops that it is made of. (Autocast leaves embeddings
    alone; a mode cannot see a table that is never on the device.)"""
    return bool(
        (_modes() > our_modes.count and can_be_whole(weight))
        or _functorch_level() is not None
        or forward_ad._current_level >= 0
    )


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        weight: PagedTensor,
        indices: torch.Tensor,
        padding_idx: int,
        scale_grad_by_freq: bool,
        sparse: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(indices)
        ctx.table = weight.detach()  # its geometry; the values are not wanted any more
        ctx.options = padding_idx, scale_grad_by_freq
        ctx.sparse = sparse
        return look_up(ctx.table, indices)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (indices,) = ctx.saved_tensors
        if type(indices) is PagedTensor:
            indices = indices.to_dense()
        rows, options = ctx.table.size(0), ctx.options
        aten = torch.ops.aten
        if ctx.sparse:
            of_weight = aten.embedding_sparse_backward(grad, indices, rows, *options)
        elif torch.is_grad_enabled():  # its own history is wanted: only a dense one can have it
            of_weight = aten.embedding_dense_backward(grad, indices, rows, *options)
        else:
            of_weight = _gradient(ctx.table, grad, indices, *options)
        return of_weight, None, None, None, None


def _gradient(table: PagedTensor, grad: torch.Tensor, indices: torch.Tensor, *options: Any) -> Any:
    """Dense, or in pages where the table streams."""
    flat = grad.reshape(-1, grad.size(-1)).contiguous()
    may_stream = table._storage.run.streamed is not None
    whole = not is_large(table, len(flat)) and (not may_stream or has_room(table))
    began = time.perf_counter()
    if whole:
        found = torch.ops.aten.embedding_dense_backward(flat, indices, table.size(0), *options)
    else:
        found = embedding_gradient(table, flat, indices, *options)
    pager = table._storage.pager
    if may_stream and pager.metering_this() and table._storage.run.count > 1:
        # What a stream takes is counted in one way, whether it is seen to stream or not.
        noted = noted_as(table)
        taken = Taken(0, _streaming_takes(table, len(flat)), None if whole else 0)
        if whole:
            found = in_pages(found, table, noted)
        pager.budget.placement.note_product(noted, began, taken)
    return found


def _rows_at_once(table: PagedTensor) -> int:
    """That are summed together, in a temporary of their size. (In half precision that widens all
    values once more, so all rows of a slab are.)"""
    half = table.dtype.itemsize < torch.float32.itemsize
    return table.size(0) if half else max(1, _SUM_ELEMENTS // table.size(1))


def _streaming_takes(table: PagedTensor, lookups: int) -> int:
    """Dense bytes that :func:`embedding_gradient` takes, at most: of each lookup its place among
    the others, and in half precision its values as float32; of the rows that are summed together
    their sums, what was there before, and where their blocks are."""
    rows, columns = min(lookups, _rows_at_once(table)), table.size(1)
    per_row = row_bytes(table) // math.gcd(row_bytes(table), table._storage.pager.page_size)
    blocks = 48 * min(rows * per_row, max(per_row, MOST_BLOCKS))
    sums = (rows + 1) * columns * max(table.dtype.itemsize, torch.float32.itemsize)
    if table.dtype.itemsize >= torch.float32.itemsize:
        return 48 * lookups + 2 * sums + blocks
    wide = min(lookups * columns, max(lookups, MOST_ELEMENTS)) * torch.float32.itemsize
    return 48 * lookups + max(2 * sums + wide, 3 * sums + blocks)


# -- ops below autograd ----------------------------------------------------------------------------
# Autograd sums and copies gradients; sparse optimizers read and add to some rows of the table and
# of their states. All other ops are for ``dense_run.py``.
def _add(one: Any, other: Any, *, alpha: Any = 1) -> Any:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return NotImplemented
    if not (is_gradient(one) or is_gradient(other)):
        return NotImplemented
    for gradient, rows in ((one, other), (other, one)):
        if alpha == 1 and is_gradient(gradient) and _are_rows_of(rows, gradient):
            return _add_sparse(copy_gradient(gradient), rows)
    return add_gradients(one, other, alpha)


def _add_sparse(table: Any, values: Any, *, alpha: Any = 1) -> Any:
    """``table.add_(sparse)``, as torch adds it, on the pages of the rows that it has."""
    if not _are_rows_of(values, table):
        return NotImplemented
    indices = values._indices()[0]
    host = array_of(indices)
    rows = distinct(host)
    with closing(row_groups(table, rows, write=True)) as groups:
        for group in groups:
            mine = rows[group.start : group.stop]
            some = upload(torch.from_numpy(mine), table.device)
            dense = torch.empty(len(mine), table.size(1), dtype=table.dtype, device=table.device)
            gather_rows(group.table, some, dense)
            places = np.flatnonzero((host >= mine[0]) & (host <= mine[-1]))
            found = torch.from_numpy(np.searchsorted(mine, host[places])[None])
            part = torch.sparse_coo_tensor(
                upload(found, table.device),
                values._values()[upload(torch.from_numpy(places), table.device)],
                dense.size(),
                is_coalesced=values.is_coalesced(),
                check_invariants=False,
            )
            dense.add_(part, alpha=alpha)
            for blocks, numbers, values_of in row_blocks(group.table, some, dense):
                blocks.index_copy_(0, numbers, values_of)
    return table


def _sparse_mask(table: Any, mask: Any) -> Any:
    """The table's values in the rows that ``mask`` has."""
    if not _are_rows_of(mask, table):
        return NotImplemented
    indices = mask._indices()
    return torch.sparse_coo_tensor(
        indices,
        look_up(table, indices[0]),
        mask.size(),
        is_coalesced=mask.is_coalesced(),
        check_invariants=False,
    )


def _are_rows_of(values: Any, table: Any) -> bool:
    """Whether ``values`` is sparse, whole rows each, like ``table``, which is read by rows."""
    return (
        type(values) is torch.Tensor
        and values.layout is torch.sparse_coo
        and type(table) is PagedTensor
        and values.size() == table.size()
        and values.sparse_dim() == 1
        and values.device == table.device
        and is_table(table)
        and is_read_by_rows(table)
    )


for _op, _run in (
    (aten.add.Tensor, _add),
    (aten.add_.Tensor, _add_sparse),
    (aten.sparse_mask.default, _sparse_mask),
):
    serve_op(_op, _run)
serve_call(torch.nn.functional.embedding, embedding)
