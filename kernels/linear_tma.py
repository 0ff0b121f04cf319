"""Linear through tensor descriptors: on sm_90 and later the copy engine fetches tiles of x and W.

Where pages are runs of whole rows, one descriptor of three dimensions [frames, rows in a page, K]
covers the whole arena. A tile whose height divides the rows of a page lies in one frame, so all
that paging costs a program is one word of the page table.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import torch

from .launch import INTERPRETED, launch, runs_triton, tl, triton, use_triton
from .linear_reference import check_forward, linear_forward_reference
from .linear_tile import (
    Tile,
    multiply,
    rounded,
    tile_of_program,
    vector_elements,
    whole_vectors,
    wide,
)
from .paged_matrix import PagedMatrix

__all__ = ["linear_forward_tma"]

linear_forward_tma_reference = linear_forward_reference

FIRST_CAPABILITY = 9
SMALLEST_HEIGHT = 16  # rows of W in a tile: what tensor cores take
# For up to so many rows of x. Computed to fill shared memory without spilling, not measured.
TILES = (
    (64, Tile(64, 64, 128, 4, 4)),
    (256, Tile(64, 128, 128, 4, 4)),
    (2**31, Tile(128, 128, 64, 8, 4)),
)


@triton.jit(
    do_not_specialize=[
        "x_rows",
        "row_begin",
        "row_end",
        "columns",
        "out_stride",
        "rows_per_page",
    ],
    do_not_specialize_on_alignment=["arena_ptr", "frame_of_ptr", "bias_ptr"],
)
def _linear_forward_tma_kernel(
    arena_ptr,
    frame_of_ptr,
    x_desc,
    weight_desc,
    bias_ptr,
    out_ptr,
    x_rows,
    row_begin,
    row_end,
    columns,
    out_stride,
    rows_per_page,
    HAS_BIAS: tl.constexpr,
    OUT_WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """One program computes BLOCK_M rows by BLOCK_N columns of the output.

    What is read beyond x is 0. What is read beyond the slab, in its last page, is not written.
    """
    row_begin = whole_vectors(row_begin, OUT_WIDE)
    row_end = whole_vectors(row_end, OUT_WIDE)
    tile_m, tile_n = tile_of_program(
        tl.cdiv(x_rows, BLOCK_M), tl.cdiv(row_end - row_begin, BLOCK_N)
    )
    first_m = tile_m * BLOCK_M
    first_n = row_begin + tile_n * BLOCK_N
    frame = tl.load(frame_of_ptr + first_n // rows_per_page)
    row_in_page = first_n % rows_per_page
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first_k in range(0, columns, BLOCK_K):
        x = x_desc.load([first_m, first_k])
        weight = weight_desc.load([frame, row_in_page, first_k]).reshape(BLOCK_N, BLOCK_K)
        total = multiply(x, tl.trans(weight), total, False, INTERPRETED)
    m = first_m + tl.arange(0, BLOCK_M)
    n = first_n + tl.arange(0, BLOCK_N)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + n, mask=n < row_end, other=0.0)
        total += bias.to(tl.float32)[None, :]
    out_row = m.to(tl.int64) * whole_vectors(out_stride, OUT_WIDE)
    out_ptrs = out_ptr + out_row[:, None] + n[None, :]
    written = (m < x_rows)[:, None] & (n < row_end)[None, :]
    tl.store(out_ptrs, rounded(total, out_ptr.dtype.element_ty, INTERPRETED), mask=written)


def linear_forward_tma(
    x: torch.Tensor,
    weight: PagedMatrix,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
    rows: tuple[int, int] | None = None,
    *,
    tile: Tile | None = None,
) -> None:
    """`linear_forward` through descriptors, for what `shape_fits` and devices with sm_90 or later.

    Arguments, result and stream behaviour are those of `linear_forward`. Reads whole tiles: in the
    last frame also bytes behind the matrix, which it does not use. Raises ValueError, before
    anything is written, for operands that descriptors cannot describe.
    """
    begin, end = weight.slab(rows)
    check_forward(x, weight, out, bias)
    if x.shape[0] == 0 or begin == end:
        return
    if not use_triton(weight.arena):
        linear_forward_tma_reference(x, weight, out, bias, rows)
        return
    tile = tile or _pick_tile(x.shape[0])
    height = tile_height(weight, begin, tile)
    if not shape_fits(x, weight, (begin, end)):
        raise ValueError(
            f"descriptors cannot describe x with strides {x.stride()} at {x.data_ptr():#x} and "
            f"rows [{begin}, {end}) of {weight.columns} {weight.dtype} in pages of "
            f"{weight.page_bytes} bytes; use linear_forward"
        )
    x_desc, weight_desc = _descriptors(x, weight, tile, height)
    launch(
        _linear_forward_tma_kernel,
        -(-x.shape[0] // tile.m) * -(-(end - begin) // height),
        weight.arena,
        weight.frame_of,
        x_desc,
        weight_desc,
        out if bias is None else bias,
        out,
        x.shape[0],
        begin,
        end,
        weight.columns,
        out.stride(0),
        weight.rows_per_page,
        HAS_BIAS=bias is not None,
        OUT_WIDE=wide(out, begin, end),
        BLOCK_M=tile.m,
        BLOCK_N=height,
        BLOCK_K=tile.k,
        INTERPRETED=INTERPRETED,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def descriptors_fit(x: torch.Tensor, weight: PagedMatrix, rows: tuple[int, int]) -> bool:
    """Whether this device and these operands can go through `linear_forward_tma`."""
    arena = weight.arena
    return (
        runs_triton(arena.device) and _has_descriptors(arena.device) and shape_fits(x, weight, rows)
    )


def shape_fits(x: torch.Tensor, weight: PagedMatrix, rows: tuple[int, int]) -> bool:
    """Whether descriptors can describe x and rows [begin, end) of the weight.

    Half precision; whole rows in pages, a multiple of 16 bytes each; a slab that begins at a tile
    (every slab of whole pages does); rows of x a multiple of 16 bytes apart.
    """
    tile = _pick_tile(x.shape[0])
    return (
        weight.dtype != torch.float32
        and weight.row_bytes % 16 == 0
        and weight.rows_per_page >= SMALLEST_HEIGHT
        and tile_height(weight, rows[0], tile) >= SMALLEST_HEIGHT
        and wide(x) == vector_elements(x.dtype)
        and x.stride(0) >= x.shape[1]
    )


def tile_height(weight: PagedMatrix, row_begin: int, tile: Tile) -> int:
    """The largest power of two that divides the rows of a page and where the slab begins."""
    height = min(tile.n, weight.rows_per_page)
    return min(height, row_begin & -row_begin) if row_begin else height


def _pick_tile(m: int) -> Tile:
    if INTERPRETED:
        return Tile(16, 32, 32, 4, 1)
    return next(tile for most, tile in TILES if m <= most)


def _descriptors(x: torch.Tensor, weight: PagedMatrix, tile: Tile, height: int) -> tuple[Any, Any]:
    descriptor = import_module("triton.tools.tensor_descriptor").TensorDescriptor
    arena = weight.arena.view(weight.dtype)
    shape = [arena.numel() // weight.page_elements, weight.rows_per_page, weight.columns]
    return (
        descriptor(x, list(x.shape), [x.stride(0), 1], [tile.m, tile.k]),
        descriptor(arena, shape, [weight.page_elements, weight.columns, 1], [1, height, tile.k]),
    )


@cache
def _has_descriptors(device: torch.device) -> bool:
    if torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device)[0] >= FIRST_CAPABILITY
