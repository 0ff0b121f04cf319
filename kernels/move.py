"""Move: whole pages from frame to frame of one arena, to make room for a consecutive run.

Pages that are pushed together slide: a run moves down by less than its length, so it is written
where it was read.

Note: how one kernel slides a run
---------------------------------
With a distance of d tiles, tile i goes where tile i - d was. Program t takes tiles t, t + d,
t + 2d, … in this order, so it has read a tile before it writes there, and no other program does
either::

    distance 2   before | . . a b c d e |      program 0: a to 0, then c to 2, then e to 4
                  after | a b c d e d e |      program 1: b to 1, then d to 3
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch

from .launch import check_arena, check_frames, frame_runs, launch, tl, triton, use_triton
from .tile import copy_tile, page_tile

__all__ = ["move_pages", "slide_pages"]

FEW_COPIES = 4  # that are cheaper to queue than a kernel


@triton.jit(
    do_not_specialize=["tiles_per_page"],
    do_not_specialize_on_alignment=["src_frames_ptr", "dst_frames_ptr"],
)
def _move_pages_kernel(
    arena_ptr, src_frames_ptr, dst_frames_ptr, tiles_per_page, TILE: tl.constexpr
):
    """Program t copies one tile of page t // tiles_per_page."""
    page = tl.program_id(0) // tiles_per_page
    tile = tl.program_id(0) % tiles_per_page
    src_frame = tl.load(src_frames_ptr + page).to(tl.int64)
    dst_frame = tl.load(dst_frames_ptr + page).to(tl.int64)
    src = arena_ptr + (src_frame * tiles_per_page + tile) * TILE
    dst = arena_ptr + (dst_frame * tiles_per_page + tile) * TILE
    copy_tile(src, dst, TILE, TILE, True)


def move_pages(
    arena: torch.Tensor, src_frames: torch.Tensor, dst_frames: torch.Tensor, page_bytes: int
) -> None:
    """Copy frame src_frames[i] to frame dst_frames[i], for each i, in no particular order.

    arena : uint8 [frames * page_bytes], contiguous, 16-byte aligned.
    src_frames, dst_frames : int32 [pages], contiguous, on the arena's device. No frame is in both,
        and none twice in dst_frames: the copies race otherwise. The reference asserts it; a launch
        cannot see it.
    page_bytes : a power of two, 4 KiB to 16 MiB.

    The source frames keep their bytes. On CUDA the copy is queued on the current stream of the
    arena's device and the call does not wait. On a CPU the call returns when the copy is done. No
    pages: nothing happens. Raises ValueError for arguments that are not as above, before anything
    is written.
    """
    check_arena(arena, page_bytes)
    check_frames("src_frames", src_frames, arena)
    check_frames("dst_frames", dst_frames, arena)
    pages = src_frames.numel()
    if dst_frames.numel() != pages:
        raise ValueError(
            f"src_frames has {pages} entries and dst_frames {dst_frames.numel()}; "
            "pass one of each per page"
        )
    if pages == 0:
        return
    if not use_triton(arena):
        move_pages_reference(arena, src_frames, dst_frames, page_bytes)
        return
    tile_bytes, constants = page_tile(page_bytes)
    tiles_per_page = page_bytes // tile_bytes
    launch(
        _move_pages_kernel,
        pages * tiles_per_page,
        arena,
        src_frames,
        dst_frames,
        tiles_per_page,
        **constants,
    )


def move_pages_reference(
    arena: torch.Tensor, src_frames: torch.Tensor, dst_frames: torch.Tensor, page_bytes: int
) -> None:
    """`move_pages` in plain torch: one copy per run that is consecutive in both tables."""
    written = set(dst_frames.tolist())
    assert len(written) == dst_frames.numel(), (
        f"a frame is twice in dst_frames {dst_frames.tolist()}"
    )
    both = written.intersection(src_frames.tolist())
    assert not both, f"frames {sorted(both)} are both source and destination"
    for src, dst in frame_runs(src_frames, dst_frames, arena=arena, page_bytes=page_bytes):
        nbytes = src.pages * page_bytes
        start, end = src.frame * page_bytes, dst.frame * page_bytes
        arena[end : end + nbytes].copy_(arena[start : start + nbytes])


@triton.jit(do_not_specialize=["src_tile", "distance", "tiles"])
def _slide_pages_kernel(arena_ptr, src_tile, distance, tiles, TILE: tl.constexpr):
    """Program t copies tiles t, t + distance, … of those that begin at src_tile, in this order."""
    for tile in range(tl.program_id(0), tiles, distance):
        src = (src_tile + tile).to(tl.int64)
        copy_tile(arena_ptr + src * TILE, arena_ptr + (src - distance) * TILE, TILE, TILE, True)


def slide_pages(
    arena: torch.Tensor, src_frame: int, dst_frame: int, pages: int, page_bytes: int
) -> None:
    """Copy frames [src_frame, src_frame + pages) to those from dst_frame on, a lower one.

    arena : uint8 [frames * page_bytes], contiguous, 16-byte aligned.
    page_bytes : a power of two, 4 KiB to 16 MiB.

    The two runs may overlap; then source frames are overwritten. On CUDA the copy is queued on the
    current stream of the arena's device and the call does not wait. On a CPU the call returns when
    the copy is done. Raises ValueError for arguments that are not as above, before anything is
    written.
    """
    check_arena(arena, page_bytes)
    if not (0 <= dst_frame < src_frame and 0 <= pages <= arena.numel() // page_bytes - src_frame):
        raise ValueError(
            f"frames {src_frame} to {src_frame + pages} cannot slide to {dst_frame} in an arena of "
            f"{arena.numel() // page_bytes}; slide towards lower frames, inside the arena"
        )
    distance = src_frame - dst_frame
    if not use_triton(arena) or pages <= FEW_COPIES * distance:
        slide_pages_reference(arena, src_frame, dst_frame, pages, page_bytes)
        return
    tile_bytes, constants = page_tile(page_bytes)
    each = page_bytes // tile_bytes
    launch(
        _slide_pages_kernel,
        distance * each,
        arena,
        src_frame * each,
        distance * each,
        pages * each,
        **constants,
    )


def slide_pages_reference(
    arena: torch.Tensor, src_frame: int, dst_frame: int, pages: int, page_bytes: int
) -> None:
    """`slide_pages` in plain torch: copies that do not overlap themselves, one after another."""
    step, nbytes = (src_frame - dst_frame) * page_bytes, pages * page_bytes
    src = arena[src_frame * page_bytes :][:nbytes].split(step)
    dst = arena[dst_frame * page_bytes :][:nbytes].split(step)
    for to, from_ in zip(dst, src, strict=True):
        to.copy_(from_)
