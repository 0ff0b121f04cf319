"""Scatter: one dense run of bytes -> pages in scattered frames."""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch

from .launch import (
    check_arena,
    check_bytes,
    check_frames,
    check_page_count,
    frame_runs,
    launch,
    tl,
    triton,
    use_triton,
)
from .tile import copy_tile, page_tile

__all__ = ["scatter_pages"]


@triton.jit(
    do_not_specialize=["tiles_per_page", "tail_bytes"],
    do_not_specialize_on_alignment=["frame_of_ptr"],
)
def _scatter_pages_kernel(
    arena_ptr,
    frame_of_ptr,
    src_ptr,
    tiles_per_page,
    tail_bytes,
    TILE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Program t copies tile t of the tensor; the last program's tile has `tail_bytes` bytes."""
    tile = tl.program_id(0)
    frame = tl.load(frame_of_ptr + tile // tiles_per_page).to(tl.int64)
    src = src_ptr + tile.to(tl.int64) * TILE
    dst = arena_ptr + (frame * tiles_per_page + tile % tiles_per_page) * TILE
    nbytes = tl.where(tile == tl.num_programs(0) - 1, tail_bytes, TILE)
    copy_tile(src, dst, nbytes, TILE, WIDE)


def scatter_pages(
    src: torch.Tensor, frame_of: torch.Tensor, arena: torch.Tensor, page_bytes: int
) -> None:
    """Copy `src`, page by page, into the frames of its table: the inverse of `gather_pages`.

    src : uint8 [nbytes], contiguous, at any address outside the arena;
        (pages - 1) * page_bytes < nbytes <= pages * page_bytes, so only the last page may be
        partial.
    frame_of : int32 [pages], contiguous, on the arena's device, no frame twice; page i goes to
        frame frame_of[i]. Bytes of the last frame beyond `nbytes` keep their values.
    arena : uint8 [frames * page_bytes], contiguous, 16-byte aligned.
    page_bytes : a power of two, 4 KiB to 16 MiB.

    On CUDA the copy is queued on the current stream of the arena's device and the call does not
    wait; `src` must live, and the frames must not be read elsewhere, until it has run. On a CPU
    the call returns when the copy is done. No pages and no bytes: nothing happens. Raises
    ValueError for arguments that are not as above, before anything is written.
    """
    check_arena(arena, page_bytes)
    check_frames("frame_of", frame_of, arena)
    check_bytes("src", src, arena)
    nbytes = src.numel()
    check_page_count("src", nbytes, frame_of.numel(), page_bytes)
    if nbytes == 0:
        return
    if not use_triton(arena):
        scatter_pages_reference(src, frame_of, arena, page_bytes)
        return
    tile_bytes, constants = page_tile(page_bytes, src)
    tiles = -(-nbytes // tile_bytes)
    tail_bytes = nbytes - (tiles - 1) * tile_bytes
    launch(
        _scatter_pages_kernel,
        tiles,
        arena,
        frame_of,
        src,
        page_bytes // tile_bytes,
        tail_bytes,
        **constants,
    )


def scatter_pages_reference(
    src: torch.Tensor, frame_of: torch.Tensor, arena: torch.Tensor, page_bytes: int
) -> None:
    """`scatter_pages` in plain torch: one copy per run of consecutive frames."""
    for (run,) in frame_runs(frame_of, arena=arena, page_bytes=page_bytes):
        piece = src[run.page * page_bytes : (run.page + run.pages) * page_bytes]
        start = run.frame * page_bytes
        arena[start : start + piece.numel()].copy_(piece)
