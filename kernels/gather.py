"""Gather: pages in scattered frames -> one dense run of bytes."""
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

__all__ = ["gather_pages"]


@triton.jit(
    do_not_specialize=["tiles_per_page", "tail_bytes"],
    do_not_specialize_on_alignment=["frame_of_ptr"],
)
def _gather_pages_kernel(
    arena_ptr,
    frame_of_ptr,
    out_ptr,
    tiles_per_page,
    tail_bytes,
    TILE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Program t copies tile t of the tensor; the last program's tile has `tail_bytes` bytes."""
    tile = tl.program_id(0)
    frame = tl.load(frame_of_ptr + tile // tiles_per_page).to(tl.int64)
    src = arena_ptr + (frame * tiles_per_page + tile % tiles_per_page) * TILE
    dst = out_ptr + tile.to(tl.int64) * TILE
    nbytes = tl.where(tile == tl.num_programs(0) - 1, tail_bytes, TILE)
    copy_tile(src, dst, nbytes, TILE, WIDE)


def gather_pages(
    arena: torch.Tensor, frame_of: torch.Tensor, out: torch.Tensor, page_bytes: int
) -> None:
    """Copy a tensor's pages, in order, from their frames into `out`.

    arena : uint8 [frames * page_bytes], contiguous, 16-byte aligned.
    frame_of : int32 [pages], contiguous, on the arena's device; page i is in frame frame_of[i].
    out : uint8 [nbytes], contiguous, at any address outside the arena;
        (pages - 1) * page_bytes < nbytes <= pages * page_bytes, so only the last page may be
        partial.
    page_bytes : a power of two, 4 KiB to 16 MiB.

    On CUDA the copy is queued on the current stream of the arena's device and the call does not
    wait; the frames must not be reused before it has run. On a CPU the call returns when the copy
    is done. No pages and no bytes: nothing happens. Raises ValueError for arguments that are not
    as above, before anything is written.
    """
    check_arena(arena, page_bytes)
    check_frames("frame_of", frame_of, arena)
    check_bytes("out", out, arena)
    nbytes = out.numel()
    check_page_count("out", nbytes, frame_of.numel(), page_bytes)
    if nbytes == 0:
        return
    if not use_triton(arena):
        gather_pages_reference(arena, frame_of, out, page_bytes)
        return
    tile_bytes, constants = page_tile(page_bytes, out)
    tiles = -(-nbytes // tile_bytes)
    tail_bytes = nbytes - (tiles - 1) * tile_bytes
    launch(
        _gather_pages_kernel,
        tiles,
        arena,
        frame_of,
        out,
        page_bytes // tile_bytes,
        tail_bytes,
        **constants,
    )


def gather_pages_reference(
    arena: torch.Tensor, frame_of: torch.Tensor, out: torch.Tensor, page_bytes: int
) -> None:
    """`gather_pages` in plain torch: one copy per run of consecutive frames."""
    for (run,) in frame_runs(frame_of, arena=arena, page_bytes=page_bytes):
        piece = out[run.page * page_bytes : (run.page + run.pages) * page_bytes]
        start = run.frame * page_bytes
        piece.copy_(arena[start : start + piece.numel()])
