"""Rows of a table in pages: which pages hold them, looking them up, and sums of gradients.

A table W [V, D] lies row after row in its pages, so a row may straddle borders. What is done to
some rows touches the pages that hold them and no other: others may be off the device (frame -1).

The dense gradient [V, D] of a table larger than memory cannot exist; what exists is one summed row
for each distinct row that was looked up, added into pages. Sums are torch's own, made by
`embedding_dense_backward` of the distinct rows alone, so in fp32 and fp64 they have the bits that
it has for the whole table.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from .launch import upload
from .pieces import Paged

__all__ = ["RowGroups", "add_rows", "gather_rows", "group_rows", "pages_of_rows", "row_blocks"]

MOST_ELEMENTS = 1 << 20  # of a temporary
MOST_BLOCKS = 1 << 13  # that are placed at a time


def pages_of_rows(
    indices: npt.NDArray[np.int64], row_bytes: int, page_bytes: int
) -> npt.NDArray[np.int64]:
    """The pages that hold the rows `indices` (any shape, repeats allowed), sorted, each once.

    Raises IndexError for a row below 0.
    """
    if indices.size == 0 or row_bytes == 0:
        return np.empty(0, np.int64)
    if (lowest := int(indices.min())) < 0:
        raise IndexError(f"row {lowest} is looked up; rows count from 0")
    begin = indices.reshape(-1).astype(np.int64) * row_bytes
    first, last = begin // page_bytes, (begin + row_bytes - 1) // page_bytes
    steps = range(int((last - first).max()) + 1)
    pages = np.concatenate([(first + step)[first + step <= last] for step in steps])
    pages.sort()  # np.unique would load numpy's masked arrays, a MiB of code
    found: npt.NDArray[np.int64] = pages[np.diff(pages, prepend=-1) > 0]
    return found


def gather_rows(weight: Paged, indices: torch.Tensor, out: torch.Tensor) -> None:
    """Copy rows of a table in pages: out[i] = weight[indices[i]].

    weight : V * D elements of any dtype; the pages of all rows that are looked up are there.
    indices : int64 [n], on the arena's device; 0 <= index < V.
    out : [n, D] of weight's dtype, contiguous, outside the pages.
    """
    for blocks, numbers, part in row_blocks(weight, indices, out):
        torch.index_select(blocks, 0, numbers, out=part)


def row_blocks(
    table: Paged, rows: torch.Tensor, dense: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Rows as the largest blocks that divide both a row and a page.

    rows : int64 [n], as for `gather_rows`. dense : [n, D], whose row i goes with row rows[i].

    Yields, for each run of rows, the arena as [blocks, elements], which of those blocks, in
    order, and the same part of `dense` as [blocks, elements].
    """
    if not dense.numel():
        return
    row_numel, itemsize = dense.shape[1], table.dtype.itemsize
    frames = upload(torch.from_numpy(table.frames), rows.device)
    block_bytes = math.gcd(row_numel * itemsize, table.page_bytes)
    elements = block_bytes // itemsize
    blocks = table.arena.view(table.dtype).view(-1, elements)
    per_row, per_page = row_numel // elements, table.page_bytes // block_bytes
    step = max(1, min(MOST_ELEMENTS // row_numel, MOST_BLOCKS // per_row))
    within = torch.arange(per_row, device=rows.device)
    for some, part in zip(rows.split(step), dense.split(step), strict=True):
        block = (some.unsqueeze(1) * per_row + within).view(-1)
        numbers = frames[block // per_page] * per_page + block % per_page
        yield blocks, numbers, part.view(-1, elements)


# -- gradients -----------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class RowGroups:
    """Where each distinct row stands in a batch of lookups.

    ids : int64 [u], the distinct rows, ascending; padding left out.
    order : int32 [m], positions in the batch, ascending within a row.
    starts : int32 [u + 1]; row ids[k] stands at positions order[starts[k] : starts[k + 1]].
    lookups : positions in the batch, padding included.
    """

    ids: torch.Tensor
    order: torch.Tensor
    starts: torch.Tensor
    lookups: int

    def to(self, device: torch.device) -> RowGroups:
        """The same on `device`; from the host the copies are queued on the current stream."""
        ids, order, starts = (upload(x, device) for x in (self.ids, self.order, self.starts))
        return RowGroups(ids, order, starts, self.lookups)


def group_rows(indices: torch.Tensor, padding_idx: int | None = None) -> RowGroups:
    """Sort a batch of lookups by row.

    indices : int64, any shape, on the host: how many rows are distinct must be known there.
    padding_idx : a row whose gradients do not count.
    """
    flat = indices.reshape(-1)
    rows, order = torch.sort(flat, stable=True)
    if padding_idx is not None:
        kept = rows != padding_idx
        rows, order = rows[kept], order[kept]
    ids, counts = torch.unique_consecutive(rows, return_counts=True)
    starts = torch.zeros(ids.numel() + 1, dtype=torch.int32, device=ids.device)
    starts[1:] = torch.cumsum(counts, 0)
    return RowGroups(ids, order.to(torch.int32), starts, flat.numel())


def add_rows(
    grad_out: torch.Tensor, groups: RowGroups, target: Paged, scale_grad_by_freq: bool = False
) -> None:
    """Add an embedding's gradient into pages: target[ids[k]] += sum where row ids[k] stands.

    grad_out : [n, D], fp32, fp16, bf16 or fp64, contiguous, on the arena's device.
    groups : `group_rows` of the n lookups, on the same device.
    target : V * D elements, fp64 where grad_out is and else fp32, fp16 or bf16. Rounded once, after
        the sum in fp32 (fp64). The pages of all rows of `groups` are there.
    scale_grad_by_freq : each gradient times 1 / (how often its row stands in the batch).
    """
    if not groups.ids.numel() or not grad_out.numel():
        return
    total = _summed(grad_out, groups, scale_grad_by_freq)
    for blocks, numbers, part in row_blocks(target, groups.ids, total):
        old = blocks.index_select(0, numbers).to(total.dtype)
        blocks.index_copy_(0, numbers, old.add_(part).to(blocks.dtype))


def _summed(grad_out: torch.Tensor, groups: RowGroups, by_frequency: bool) -> torch.Tensor:
    """[u, D] in fp32 (fp64), by torch's own loop over the batch: one addition after another."""
    distinct = groups.ids.numel()
    numbers = torch.arange(distinct, device=grad_out.device)
    padding = distinct
    number = torch.full((groups.lookups,), padding, device=grad_out.device)
    number[groups.order.long()] = numbers.repeat_interleave(
        groups.starts.diff(), output_size=groups.order.numel()
    )

    def summed(grad: torch.Tensor) -> torch.Tensor:
        backward = torch.ops.aten.embedding_dense_backward
        total: torch.Tensor = backward(grad, number, distinct + 1, padding, by_frequency)
        return total[:distinct]

    if grad_out.dtype in (torch.float32, torch.float64):
        return summed(grad_out)
    step = max(1, MOST_ELEMENTS // grad_out.shape[0])
    return torch.cat([summed(part.float()) for part in grad_out.split(step, dim=1)], dim=1)
