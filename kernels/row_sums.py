"""Gradients of an embedding: one sum for each distinct row that was looked up.

The dense gradient [V, D] of a table larger than memory cannot exist; what exists is one summed row
for each distinct row, added into pages.

Sums are in a fixed order: one program for each distinct row adds its gradients one after another,
as they stand in the batch, in fp32 (fp64 for fp64). Nothing is atomic, so runs agree to the bit. In
fp32 and fp64 the bits are those of `torch.ops.aten.embedding_dense_backward` on a CPU, which adds
in that order too; only under `scale_grad_by_freq` a kernel may round additions differently.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .launch import launch, tl, triton, upload, use_triton
from .masked import load_floats, store_floats
from .pieces import Paged, dtype_name
from .rows import REFERENCE_ELEMENTS, check_table, frame_table, row_blocks

__all__ = ["RowGroups", "add_rows", "group_rows"]

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


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

    indices : int64, any shape. On CUDA the call synchronises, since it must know how many rows are
        distinct: group on the host, where lookups are known before their pages come in, and move.
    padding_idx : a row whose gradients do not count.
    """
    flat = indices.reshape(-1)
    if flat.dtype != torch.int64:
        raise ValueError(f"indices is {flat.dtype}, not torch.int64; pass indices.long()")
    if flat.numel() >= 2**31:
        raise ValueError(f"indices has {flat.numel()} lookups; pass fewer than 2**31 at a time")
    rows, order = torch.sort(flat, stable=True)
    if padding_idx is not None:
        kept = rows != padding_idx
        rows, order = rows[kept], order[kept]
    ids, counts = torch.unique_consecutive(rows, return_counts=True)
    starts = torch.zeros(ids.numel() + 1, dtype=torch.int32, device=ids.device)
    starts[1:] = torch.cumsum(counts, 0)
    return RowGroups(ids, order.to(torch.int32), starts, flat.numel())


@triton.jit
def _row_sum(
    grad_ptr,
    order_ptr,
    begin,
    end,
    row_numel,
    columns,
    mask,
    COMPUTE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BY_FREQUENCY: tl.constexpr,
):
    """Sum of the gradients at positions order[begin : end], one after another."""
    grad_dtype: tl.constexpr = grad_ptr.dtype.element_ty
    size: tl.constexpr = grad_dtype.primitive_bitwidth // 8
    total = tl.zeros([columns.shape[0]], COMPUTE)
    scale = tl.full([], 1, COMPUTE)
    if BY_FREQUENCY:
        if COMPUTE.is_fp64():
            scale = scale / (end - begin).to(COMPUTE)
        else:
            scale = tl.div_rn(scale, (end - begin).to(COMPUTE))
    k = begin
    while k < end:
        # Four loads in flight; beyond the end they give zeros, which change no bit of a sum.
        for step in tl.static_range(4):
            live = k + step < end
            position = tl.load(order_ptr + k + step, mask=live, other=0).to(tl.int64)
            address = grad_ptr.to(tl.int64) + position * row_numel * size
            grad = load_floats(
                *(address, columns, mask & live, grad_dtype, COMPUTE, ALIGNED),
            )
            if BY_FREQUENCY:
                total = tl.fma(grad, tl.broadcast_to(scale, grad.shape), total)
            else:
                total += grad
        k += 4
    return total


@triton.jit(
    do_not_specialize=["row_numel", "tiles_per_row", "page_shift"],
    do_not_specialize_on_alignment=[
        *("arena_ptr", "frame_of_ptr", "grad_ptr", "ids_ptr", "order_ptr", "starts_ptr")
    ],
)
def _add_rows_kernel(
    arena_ptr,
    frame_of_ptr,
    grad_ptr,
    ids_ptr,
    order_ptr,
    starts_ptr,
    row_numel,
    tiles_per_row,
    page_shift,
    COMPUTE: tl.constexpr,
    TARGET: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOGETHER: tl.constexpr,
    BY_FREQUENCY: tl.constexpr,
):
    """One tile of one distinct row; it is at most 4 KiB wide, so it is on two pages at most."""
    size: tl.constexpr = TARGET.primitive_bitwidth // 8
    row = tl.program_id(0) // tiles_per_row
    start = tl.program_id(0) % tiles_per_row * COLUMNS
    lanes = tl.arange(0, COLUMNS)
    width = tl.minimum(row_numel - start, COLUMNS)
    mask = lanes // TOGETHER < width // TOGETHER
    begin, end = tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1)
    total = _row_sum(
        *(grad_ptr, order_ptr, begin, end, row_numel, start + lanes, mask),
        *(COMPUTE, TOGETHER > 1, BY_FREQUENCY),
    )
    first = (tl.load(ids_ptr + row) * row_numel + start) * size
    page = first >> page_shift
    inside = first - (page << page_shift)
    page_numel = (tl.full([], 1, tl.int32) << page_shift) // size
    border = tl.minimum(page_numel - inside.to(tl.int32) // size, width)

    frame = tl.load(frame_of_ptr + page).to(tl.int64)
    address = arena_ptr.to(tl.int64) + (frame << page_shift) + inside
    here = lanes // TOGETHER < border // TOGETHER
    _add_in_place(address, lanes, total, here, TARGET, TOGETHER > 1)
    if border < width:
        frame = tl.load(frame_of_ptr + page + 1).to(tl.int64)
        address = arena_ptr.to(tl.int64) + (frame << page_shift) - border * size
        there = mask & (lanes // TOGETHER >= border // TOGETHER)
        _add_in_place(address, lanes, total, there, TARGET, TOGETHER > 1)


@triton.jit
def _add_in_place(
    address,
    lanes,
    total,
    mask,
    TARGET: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    old = load_floats(address, lanes, mask, TARGET, total.dtype, ALIGNED)
    store_floats(address, lanes, old + total, mask, TARGET, ALIGNED)


def add_rows(
    grad_out: torch.Tensor,
    groups: RowGroups,
    target: Paged,
    scale_grad_by_freq: bool = False,
) -> None:
    """Add an embedding's gradient into pages: target[ids[k]] += sum where row ids[k] stands.

    grad_out : [n, D], fp32, fp16, bf16 or fp64, contiguous, on the arena's device.
    groups : `group_rows` of the n lookups, on the same device.
    scale_grad_by_freq : each gradient times 1 / (how often its row stands in the batch).
    target : V * D elements, fp64 where grad_out is and else fp32, fp16 or bf16. Rounded once, after
        the sum in fp32 (fp64). Frames of pages that hold no row of `groups` may be -1.

    On CUDA queued on the current stream of the arena's device without waiting; a row outside the
    table, or on a page off the device, is the caller's bug. On a CPU these are an IndexError and a
    ValueError. Raises ValueError for other arguments that are not as above. Nothing is written
    before an error.
    """
    check_table("target", target, "grad_out", grad_out)
    _check_sum(grad_out, groups, target.dtype)
    if not groups.ids.numel() or not grad_out.numel():
        return
    if not use_triton(target.arena):
        add_rows_reference(grad_out, groups, target, scale_grad_by_freq)
        return
    tiles_per_row, constants = _sum_tile(grad_out, target.dtype)
    launch(
        _add_rows_kernel,
        groups.ids.numel() * tiles_per_row,
        target.arena,
        frame_table(target),
        grad_out,
        groups.ids,
        groups.order,
        groups.starts,
        grad_out.shape[1],
        tiles_per_row,
        target.page_bytes.bit_length() - 1,
        TARGET=getattr(tl, dtype_name(target.dtype)),
        **constants,
        BY_FREQUENCY=scale_grad_by_freq,
    )


def add_rows_reference(
    grad_out: torch.Tensor,
    groups: RowGroups,
    target: Paged,
    scale_grad_by_freq: bool = False,
) -> None:
    """`add_rows` in plain torch."""
    total = _summed(grad_out, groups, scale_grad_by_freq)
    for blocks, numbers, part in row_blocks(target, groups.ids, total):
        old = blocks.index_select(0, numbers).to(total.dtype)
        blocks.index_copy_(0, numbers, old.add_(part).to(blocks.dtype))


def _sum_tile(grad_out: torch.Tensor, dtype: torch.dtype) -> tuple[int, dict[str, Any]]:
    """Tiles in a row, and the constants of a launch over tiles of at most 4 KiB.

    dtype : of what is written.
    """
    row_numel = grad_out.shape[1]
    columns = 128 if row_numel <= 256 else (512 if dtype == torch.float64 else 1024)
    together = 16 // min(grad_out.element_size(), dtype.itemsize)
    aligned = row_numel % together == 0 and grad_out.data_ptr() % 16 == 0
    constants = {
        "COMPUTE": tl.float64 if dtype == torch.float64 else tl.float32,
        "COLUMNS": columns,
        "TOGETHER": together if aligned else 1,
        "num_warps": 1 if columns == 128 else 4,
    }
    return -(-row_numel // columns), constants


def _summed(grad_out: torch.Tensor, groups: RowGroups, by_frequency: bool) -> torch.Tensor:
    """[u, D] in fp32 (fp64), by torch's own loop over the batch: one addition after another."""
    distinct = groups.ids.numel()
    numbers = torch.arange(distinct, device=grad_out.device)
    padding = distinct
    number = torch.full((groups.lookups,), padding, device=grad_out.device)
    number[groups.order.long()] = numbers.repeat_interleave(groups.starts.diff())

    def summed(grad: torch.Tensor) -> torch.Tensor:
        backward = torch.ops.aten.embedding_dense_backward
        total: torch.Tensor = backward(grad, number, distinct + 1, padding, by_frequency)
        return total[:distinct]

    if grad_out.dtype in (torch.float32, torch.float64):
        return summed(grad_out)
    step = max(1, REFERENCE_ELEMENTS // grad_out.shape[0])
    return torch.cat([summed(part.float()) for part in grad_out.split(step, dim=1)], dim=1)


def _check_sum(grad_out: torch.Tensor, groups: RowGroups, dtype: torch.dtype) -> None:
    if grad_out.dim() != 2 or grad_out.shape[0] != groups.lookups or not grad_out.is_contiguous():
        raise ValueError(
            f"grad_out is {tuple(grad_out.shape)} with stride {grad_out.stride()}; pass "
            f"[{groups.lookups}, D], contiguous"
        )
    if groups.ids.device != grad_out.device:
        raise ValueError(
            f"groups is on {groups.ids.device}, grad_out on {grad_out.device}; pass "
            "groups.to(grad_out.device)"
        )
    for kind in (grad_out.dtype, dtype):
        if kind not in FLOATS or (kind == torch.float64) != (grad_out.dtype == torch.float64):
            raise ValueError(
                f"grad_out is {grad_out.dtype}, target {dtype}; use float32, float16 and bfloat16 "
                "in any mixture, or float64 for both"
            )
