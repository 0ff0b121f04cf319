"""Tiles: the piece of a page that one program moves.

A page is a whole number of tiles, so a tile never crosses a frame, and tile t of a tensor is bytes
[t * TILE, (t + 1) * TILE) of its dense copy. Large tiles keep four independent 128-bit accesses in
flight per thread (32-lane warps); 4 KiB tiles serve pages below 16 KiB and copies from or to
unaligned memory.

The page size is not a compile-time constant: a kernel multiplies a frame by its number of tiles
and then by TILE, which is one, and that is what tells the compiler that the address is aligned.
Two tile sizes thus serve all page sizes.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch

from .launch import tl, triton

LARGE_TILE_BYTES = 16 << 10
SMALL_TILE_BYTES = 4 << 10
VECTOR_BYTES = 16


def page_tile(page_bytes: int, *dense: torch.Tensor) -> tuple[int, dict[str, int | bool]]:
    """Tile size in bytes for a page size, and the constants of a launch.

    dense : tensors outside the arena that the kernel reads or writes, at any address. One that is
        not 16-byte aligned turns the copy into one of single bytes (WIDE false).
    """
    wide = all(tensor.data_ptr() % VECTOR_BYTES == 0 for tensor in dense)
    tile = LARGE_TILE_BYTES if wide and page_bytes >= LARGE_TILE_BYTES else SMALL_TILE_BYTES
    warps = 8 if tile == LARGE_TILE_BYTES or not wide else 2
    constants: dict[str, int | bool] = {"TILE": tile, "num_warps": warps}
    return tile, constants | {"WIDE": wide} if dense else constants


@triton.jit
def copy_tile(src, dst, nbytes, TILE: tl.constexpr, WIDE: tl.constexpr):
    """Copy the first `nbytes` (1 to TILE) bytes of a tile.

    src, dst : pointers to uint8; with WIDE both known to be 16-byte aligned.
    nbytes : int32. Nothing is read or written beyond it.

    What is read is first to leave the caches, since it was copied; what is written is needed next.
    """
    if WIDE:
        words = tl.arange(0, TILE // 4)
        src_words = src.to(tl.pointer_type(tl.int32), bitcast=True) + words
        dst_words = dst.to(tl.pointer_type(tl.int32), bitcast=True) + words
        if nbytes == TILE:
            data = tl.load(src_words, eviction_policy="evict_first")
            tl.store(dst_words, data)
        else:
            # The mask holds for four words at a time, so accesses stay 128 bits wide.
            whole = words // 4 < nbytes // 16
            data = tl.load(src_words, mask=whole, eviction_policy="evict_first")
            tl.store(dst_words, data, mask=whole)
            rest = nbytes // 16 * 16 + tl.arange(0, 16)
            tl.store(dst + rest, tl.load(src + rest, mask=rest < nbytes), mask=rest < nbytes)
    else:
        # Not known to be contiguous, so lanes take bytes in turn and a warp's access is one piece.
        each = tl.max_contiguous(tl.arange(0, TILE), 1)
        data = tl.load(src + each, mask=each < nbytes, eviction_policy="evict_first")
        tl.store(dst + each, data, mask=each < nbytes)
