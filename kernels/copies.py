"""Gather and scatter: pages in scattered frames <-> one dense run of bytes."""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch

from .launch import frame_runs, launch, tl, triton, use_triton
from .tile import copy_tile, page_tile

__all__ = ["gather_pages", "scatter_pages"]


@triton.jit(
    do_not_specialize=["tiles_per_page", "tail_bytes"],
    do_not_specialize_on_alignment=["frame_of_ptr"],
)
def _copy_pages_kernel(
    arena_ptr,
    frame_of_ptr,
    dense_ptr,
    tiles_per_page,
    tail_bytes,
    GATHER: tl.constexpr,
    TILE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Program t copies tile t of the tensor; the last program's tile has `tail_bytes` bytes."""
    tile = tl.program_id(0)
    frame = tl.load(frame_of_ptr + tile // tiles_per_page).to(tl.int64)
    paged = arena_ptr + (frame * tiles_per_page + tile % tiles_per_page) * TILE
    dense = dense_ptr + tile.to(tl.int64) * TILE
    nbytes = tl.where(tile == tl.num_programs(0) - 1, tail_bytes, TILE)
    if GATHER:
        copy_tile(paged, dense, nbytes, TILE, WIDE)
    else:
        copy_tile(dense, paged, nbytes, TILE, WIDE)


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
    is done. No pages and no bytes: nothing happens.
    """
    _copy_pages(arena, frame_of, out, page_bytes, gather=True)


def scatter_pages(
    src: torch.Tensor, frame_of: torch.Tensor, arena: torch.Tensor, page_bytes: int
) -> None:
    """Copy `src`, page by page, into the frames of its table: the inverse of `gather_pages`.

    frame_of has no frame twice. Bytes of the last frame beyond those of `src` keep their values.
    `src` must live, and the frames must not be read elsewhere, until the copy has run.
    """
    _copy_pages(arena, frame_of, src, page_bytes, gather=False)


def _copy_pages(
    arena: torch.Tensor,
    frame_of: torch.Tensor,
    dense: torch.Tensor,
    page_bytes: int,
    *,
    gather: bool,
    reference: bool = False,
) -> None:
    nbytes = dense.numel()
    assert frame_of.numel() == -(-nbytes // page_bytes), "one frame for each page"
    if nbytes == 0:
        return
    if reference or not use_triton(arena):
        for run in frame_runs(frame_of, arena, page_bytes):
            piece = dense[run.page * page_bytes : (run.page + run.pages) * page_bytes]
            paged = arena[run.frame * page_bytes :][: piece.numel()]
            if gather:
                piece.copy_(paged)
            else:
                paged.copy_(piece)
        return
    tile_bytes, constants = page_tile(page_bytes, dense)
    tiles = -(-nbytes // tile_bytes)
    tail_bytes = nbytes - (tiles - 1) * tile_bytes
    launch(
        _copy_pages_kernel,
        tiles,
        arena,
        frame_of,
        dense,
        page_bytes // tile_bytes,
        tail_bytes,
        GATHER=gather,
        **constants,
    )


def gather_pages_reference(
    arena: torch.Tensor, frame_of: torch.Tensor, out: torch.Tensor, page_bytes: int
) -> None:
    """`gather_pages` in plain torch."""
    _copy_pages(arena, frame_of, out, page_bytes, gather=True, reference=True)


def scatter_pages_reference(
    src: torch.Tensor, frame_of: torch.Tensor, arena: torch.Tensor, page_bytes: int
) -> None:
    """`scatter_pages` in plain torch."""
    _copy_pages(arena, frame_of, src, page_bytes, gather=False, reference=True)
