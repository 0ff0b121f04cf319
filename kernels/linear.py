"""Linear: y = x Wᵀ + b with W in pages; the gradients are in `linear_grad`."""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch

from .launch import launch, runs_triton, tl, triton, use_triton
from .linear_reference import check_forward, linear_forward_reference
from .linear_tile import (
    FORWARD,
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

__all__ = ["linear_forward"]

VECTOR_BYTES = 16
# Rows of x up to which the kernel on pages is taken to be faster than torch's product with a dense
# copy of the weight. Not measured (`scripts/bench_kernels.py` does it), but computed from an H200's
# rates, 4.3 TB/s and 790 and 67 TFLOP/s, and a kernel at 0.8 and 0.6 of torch's speed.
DIRECT_ROWS = {torch.float16: 1470, torch.bfloat16: 1470, torch.float32: 93}


def reads_directly(m: int, k: int, dtype: torch.dtype, *, device_type: str = "cuda") -> bool:
    """Whether x [m, k] times a weight [n, k] in scattered frames, or one of its slabs, goes by the
    kernel on pages. The gradients have the same bytes and operations, and the same answer.

    Without the compiled kernel one large product is faster than many small ones; where rows are not
    whole vectors of 16 bytes, it would read them in narrow pieces.
    """
    if not runs_triton(torch.device(device_type)) or k * dtype.itemsize % VECTOR_BYTES:
        return False
    return m <= DIRECT_ROWS[dtype]


@triton.jit(
    do_not_specialize=[
        "x_rows",
        "row_begin",
        "row_end",
        "columns",
        "x_stride",
        "out_stride",
        "page_shift",
    ],
    do_not_specialize_on_alignment=["frame_of_ptr", "bias_ptr"],
)
def _linear_forward_kernel(
    arena_ptr,
    frame_of_ptr,
    x_ptr,
    bias_ptr,
    out_ptr,
    x_rows,
    row_begin,
    row_end,
    columns,
    x_stride,
    out_stride,
    page_shift,
    HAS_BIAS: tl.constexpr,
    MODE: tl.constexpr,
    WIDE: tl.constexpr,
    X_WIDE: tl.constexpr,
    OUT_WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TF32: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """One program computes BLOCK_M rows by BLOCK_N columns of the output.

    Rows beyond the end are read as the last one, so that reads need no mask, and not written.
    """
    columns = whole_vectors(columns, WIDE)
    row_begin = whole_vectors(row_begin, OUT_WIDE)
    row_end = whole_vectors(row_end, OUT_WIDE)
    tile_m, tile_n = tile_of_program(
        tl.cdiv(x_rows, BLOCK_M), tl.cdiv(row_end - row_begin, BLOCK_N)
    )
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = row_begin + tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(n, row_end - 1)
    x_row = tl.minimum(m, x_rows - 1).to(tl.int64) * whole_vectors(x_stride, X_WIDE)
    k = tl.arange(0, BLOCK_K)[None, :]
    x_ptrs = x_ptr + x_row[:, None] + k
    weight_ptr = arena_ptr.to(tl.pointer_type(x_ptr.dtype.element_ty), bitcast=True)
    if MODE == 0:
        in_first = element_offsets(frame_of_ptr, row, 0, columns, page_shift, BLOCK_K, MODE, WIDE)
        weight_ptrs = weight_ptr + in_first
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first_k in range(0, columns, BLOCK_K):
        if MODE == 0:
            x = tl.load(x_ptrs + first_k)
            weight = tl.load(weight_ptrs + first_k)
        else:
            offsets = element_offsets(
                frame_of_ptr, row, first_k, columns, page_shift, BLOCK_K, MODE, WIDE
            )
            if MODE == 1:
                x = tl.load(x_ptrs + first_k)
                weight = tl.load(weight_ptr + offsets)
            else:
                inside = first_k + k < columns
                x = tl.load(x_ptrs + first_k, mask=inside, other=0.0)
                weight = tl.load(weight_ptr + offsets, mask=inside, other=0.0)
        total = multiply(x, tl.trans(weight), total, TF32, INTERPRETED)
    if HAS_BIAS:
        total += tl.load(bias_ptr + row).to(tl.float32)[None, :]
    out_row = m.to(tl.int64) * whole_vectors(out_stride, OUT_WIDE)
    out_ptrs = out_ptr + out_row[:, None] + n[None, :]
    written = (m < x_rows)[:, None] & (n < row_end)[None, :]
    tl.store(out_ptrs, rounded(total, out_ptr.dtype.element_ty, INTERPRETED), mask=written)


def linear_forward(
    x: torch.Tensor,
    weight: PagedMatrix,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
    rows: tuple[int, int] | None = None,
    *,
    tile: Tile | None = None,
) -> None:
    """out[:, rows] = x @ W[rows].T + bias[rows], for all rows of W or a slab of them.

    x : [M, K] of the weight's dtype; rows at any stride, each contiguous.
    weight : W [N, K]; only the pages of `rows` are read, and only they need frames.
    out : [M, N] of the weight's dtype or float32; rows at any stride, each contiguous. Not in the
        weight's pages. Columns outside `rows` keep their values.
    bias : [N] of the weight's dtype or float32, contiguous, or None.
    rows : half-open; None means all.
    tile : what one program computes; None takes it from the table in `linear_tile`. Ignored by the
        reference.

    Products are added up in float32 (on a CPU as torch does). float32 operands are multiplied
    exactly unless torch.backends.cuda.matmul.allow_tf32 says otherwise. Bits are the same from run
    to run.

    On CUDA the product is queued on the current stream of the arena's device and the call does not
    wait; frames and operands must live, unchanged, until it has run. On a CPU the call returns when
    it is done. Raises ValueError for arguments that are not as above, before anything is written.
    """
    begin, end = weight.slab(rows)
    check_forward(x, weight, out, bias)
    if x.shape[0] == 0 or begin == end:
        return
    if not use_triton(weight.arena):
        linear_forward_reference(x, weight, out, bias, rows)
        return
    if weight.columns == 0:
        out[:, begin:end] = 0 if bias is None else bias[begin:end]
        return
    x_wide = wide(x)
    tile = tile or pick_tile(FORWARD, x.shape[0], weight, (x, x_wide))
    launch(
        _linear_forward_kernel,
        -(-x.shape[0] // tile.m) * -(-(end - begin) // tile.n),
        weight.arena,
        weight.frame_of,
        x,
        out if bias is None else bias,
        out,
        x.shape[0],
        begin,
        end,
        weight.columns,
        x.stride(0),
        out.stride(0),
        page_shift(weight),
        HAS_BIAS=bias is not None,
        X_WIDE=x_wide,
        OUT_WIDE=wide(out, begin, end),
        **constants(weight, tile),
    )
