"""The gradients of `linear_forward`: of its input, and of its weight, written into pages."""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch

from .launch import launch, tl, triton, use_triton
from .linear_reference import (
    check_input_grad,
    check_weight_grad,
    linear_input_grad_reference,
    linear_weight_grad_reference,
)
from .linear_tile import (
    INPUT_GRAD,
    WEIGHT_GRAD,
    Tile,
    constants,
    element_offsets,
    multiply,
    page_shift,
    pick_tile,
    rounded,
    tile_of_program,
    whole_vectors,
    wide,
)
from .paged_matrix import PagedMatrix

__all__ = ["linear_input_grad", "linear_weight_grad"]


@triton.jit(
    do_not_specialize=[
        "grad_rows",
        "row_begin",
        "row_end",
        "columns",
        "grad_stride",
        "out_stride",
        "page_shift",
    ],
    do_not_specialize_on_alignment=["frame_of_ptr"],
)
def _linear_input_grad_kernel(
    arena_ptr,
    frame_of_ptr,
    grad_ptr,
    out_ptr,
    grad_rows,
    row_begin,
    row_end,
    columns,
    grad_stride,
    out_stride,
    page_shift,
    ACCUMULATE: tl.constexpr,
    MODE: tl.constexpr,
    WIDE: tl.constexpr,
    GRAD_WIDE: tl.constexpr,
    OUT_WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TF32: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """One program computes BLOCK_M rows by BLOCK_K columns, adding up over the rows of the slab."""
    columns = whole_vectors(columns, WIDE if WIDE > OUT_WIDE else OUT_WIDE)
    row_begin = whole_vectors(row_begin, GRAD_WIDE)
    row_end = whole_vectors(row_end, GRAD_WIDE)
    tile_m, tile_k = tile_of_program(tl.cdiv(grad_rows, BLOCK_M), tl.cdiv(columns, BLOCK_K))
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    first_k = tile_k * BLOCK_K
    k = first_k + tl.arange(0, BLOCK_K)[None, :]
    grad_row = tl.minimum(m, grad_rows - 1).to(tl.int64) * whole_vectors(grad_stride, GRAD_WIDE)
    weight_ptr = arena_ptr.to(tl.pointer_type(grad_ptr.dtype.element_ty), bitcast=True)
    total = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    for first_n in range(row_begin, row_end, BLOCK_N):
        n = first_n + tl.arange(0, BLOCK_N)
        # Rows behind the slab are 0 on both sides: read, they could be infinite.
        grad = tl.load(
            grad_ptr + grad_row[:, None] + n[None, :], mask=(n < row_end)[None, :], other=0.0
        )
        row = tl.minimum(n, row_end - 1)
        offsets = element_offsets(
            frame_of_ptr, row, first_k, columns, page_shift, BLOCK_K, MODE, WIDE
        )
        inside = (n < row_end)[:, None]
        if MODE == 2:
            inside = inside & (k < columns)
        weight = tl.load(weight_ptr + offsets, mask=inside, other=0.0)
        total = multiply(grad, weight, total, TF32, INTERPRETED)
    out_row = m.to(tl.int64) * whole_vectors(out_stride, OUT_WIDE)
    out_ptrs = out_ptr + out_row[:, None] + k
    written = (m < grad_rows)[:, None] & (k < columns)
    if ACCUMULATE:
        total += tl.load(out_ptrs, mask=written, other=0.0).to(tl.float32)
    tl.store(out_ptrs, rounded(total, out_ptr.dtype.element_ty, INTERPRETED), mask=written)


def linear_input_grad(
    grad: torch.Tensor,
    weight: PagedMatrix,
    out: torch.Tensor,
    rows: tuple[int, int] | None = None,
    accumulate: bool = False,
    *,
    tile: Tile | None = None,
) -> None:
    """out = grad[:, rows] @ W[rows], or added to `out`, for all rows of W or a slab of them.

    grad : [M, N] of the weight's dtype; rows at any stride, each contiguous.
    weight : W [N, K]; only the pages of `rows` are read, and only they need frames.
    out : [M, K] of the weight's dtype or float32; rows at any stride, each contiguous. A product
        that is added up slab by slab loses nothing in float32; in the weight's dtype it is rounded
        at each slab.
    rows : half-open; None means all.
    tile : as in `linear_forward`.

    Precision, bits and stream behaviour are those of `linear_forward`. No rows: zeros, or nothing
    if accumulating. Raises ValueError for arguments that are not as above, before anything is
    written.
    """
    begin, end = weight.slab(rows)
    check_input_grad(grad, weight, out)
    m = grad.shape[0]
    if m == 0 or weight.columns == 0:
        return
    if begin == end:
        if not accumulate:
            out.zero_()
        return
    if not use_triton(weight.arena):
        linear_input_grad_reference(grad, weight, out, rows, accumulate)
        return
    grad_wide = wide(grad, begin, end)
    tile = tile or pick_tile(INPUT_GRAD, m, weight, (grad, grad_wide))
    launch(
        _linear_input_grad_kernel,
        -(-m // tile.m) * -(-weight.columns // tile.k),
        weight.arena,
        weight.frame_of,
        grad,
        out,
        m,
        begin,
        end,
        weight.columns,
        grad.stride(0),
        out.stride(0),
        page_shift(weight),
        ACCUMULATE=accumulate,
        GRAD_WIDE=grad_wide,
        OUT_WIDE=wide(out, weight.columns),
        **constants(weight, tile),
    )


@triton.jit(
    do_not_specialize=[
        "x_rows",
        "row_begin",
        "row_end",
        "columns",
        "grad_stride",
        "x_stride",
        "page_shift",
    ],
    do_not_specialize_on_alignment=["frame_of_ptr"],
)
def _linear_weight_grad_kernel(
    arena_ptr,
    frame_of_ptr,
    grad_ptr,
    x_ptr,
    x_rows,
    row_begin,
    row_end,
    columns,
    grad_stride,
    x_stride,
    page_shift,
    SINGLE: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    MODE: tl.constexpr,
    WIDE: tl.constexpr,
    GRAD_WIDE: tl.constexpr,
    X_WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TF32: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """One program computes BLOCK_N rows by BLOCK_K columns of the gradient and writes its pages."""
    columns = whole_vectors(columns, WIDE if WIDE > X_WIDE else X_WIDE)
    row_begin = whole_vectors(row_begin, GRAD_WIDE)
    row_end = whole_vectors(row_end, GRAD_WIDE)
    tile_n, tile_k = tile_of_program(
        tl.cdiv(row_end - row_begin, BLOCK_N), tl.cdiv(columns, BLOCK_K)
    )
    n = row_begin + tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    first_k = tile_k * BLOCK_K
    k = first_k + tl.arange(0, BLOCK_K)[None, :]
    m = tl.arange(0, BLOCK_M)
    grad_stride = whole_vectors(grad_stride, GRAD_WIDE)
    x_stride = whole_vectors(x_stride, X_WIDE)
    total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for first_m in range(0, x_rows, BLOCK_M):
        there = (first_m + m < x_rows)[:, None]
        row = (first_m + m).to(tl.int64)[:, None]
        grad = tl.load(
            grad_ptr + row * grad_stride + n[None, :],
            mask=there & (n < row_end)[None, :],
            other=0.0,
        )
        x = tl.load(x_ptr + row * x_stride + k, mask=there & (k < columns), other=0.0)
        total = multiply(tl.trans(grad), x, total, TF32, INTERPRETED)
    dtype: tl.constexpr = tl.float32 if SINGLE else x_ptr.dtype.element_ty
    gradient_ptr = arena_ptr.to(tl.pointer_type(dtype), bitcast=True)
    row = tl.minimum(n, row_end - 1)
    offsets = element_offsets(frame_of_ptr, row, first_k, columns, page_shift, BLOCK_K, MODE, WIDE)
    written = (n < row_end)[:, None] & (k < columns)
    if ACCUMULATE:
        total += tl.load(gradient_ptr + offsets, mask=written, other=0.0).to(tl.float32)
    tl.store(gradient_ptr + offsets, rounded(total, dtype, INTERPRETED), mask=written)


def linear_weight_grad(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight_grad: PagedMatrix,
    rows: tuple[int, int] | None = None,
    accumulate: bool = False,
    *,
    tile: Tile | None = None,
) -> None:
    """dW[rows] = grad[:, rows].T @ x, or added to it, for all rows of dW or a slab of them.

    grad : [M, N]; rows at any stride, each contiguous.
    x : [M, K] of the same dtype; rows at any stride, each contiguous.
    weight_grad : dW [N, K] of the same dtype or float32. Only the pages of `rows` are written, no
        frame twice; bytes of these pages outside `rows` keep their values.
    rows : half-open; None means all.
    accumulate : whether to add to what the pages hold, in float32, rounded once.
    tile : as in `linear_forward`.

    Precision, bits and stream behaviour are those of `linear_forward`. M = 0: zeros, or nothing if
    accumulating. Raises ValueError for arguments that are not as above, before anything is written.
    """
    begin, end = weight_grad.slab(rows)
    check_weight_grad(grad, x, weight_grad)
    if begin == end or weight_grad.columns == 0:
        return
    if not use_triton(weight_grad.arena):
        linear_weight_grad_reference(grad, x, weight_grad, rows, accumulate)
        return
    grad_wide, x_wide = wide(grad, begin, end), wide(x, weight_grad.columns)
    dense = ((grad, grad_wide), (x, x_wide))
    tile = tile or pick_tile(WEIGHT_GRAD, x.shape[0], weight_grad, *dense)
    launch(
        _linear_weight_grad_kernel,
        -(-(end - begin) // tile.n) * -(-weight_grad.columns // tile.k),
        weight_grad.arena,
        weight_grad.frame_of,
        grad,
        x,
        x.shape[0],
        begin,
        end,
        weight_grad.columns,
        grad.stride(0),
        x.stride(0),
        page_shift(weight_grad),
        SINGLE=weight_grad.dtype == torch.float32,
        ACCUMULATE=accumulate,
        GRAD_WIDE=grad_wide,
        X_WIDE=x_wide,
        **constants(weight_grad, tile),
    )
