"""Checksum: frames -> one 64-bit sum for each page, computed where the page is.

A page is 32-bit little-endian words. Word w at position i of its page becomes a 32-bit hash h(w, i)
and the page's sum is the sum of its hashes, at most 2^54:

    h(w, i):  x = w ^ i * GOLDEN
              x = (x ^ x >> 16) * FIRST + i * GOLDEN     (all modulo 2^32)
              x = (x ^ x >> 13) * SECOND
              x ^ x >> 16

1. For a fixed i, h is one-to-one in w (each line can be undone), so a change within one word, any
   flipped bit for a start, always changes the sum.
2. Changes of several words cancel only by chance, about once in 2^32: words or halves that changed
   places, since i is mixed in twice; a tail that was lost and is zeros now.
3. A sum of integers is the same in every order, so programs add without one.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from .launch import frame_runs, launch, tl, triton, use_triton
from .tile import page_tile

__all__ = ["page_checksums"]

REFERENCE_WORDS = 1 << 14  # few enough for the temporaries to stay in the cache


@triton.jit(
    do_not_specialize=["tiles_per_page"],
    do_not_specialize_on_alignment=["frames_ptr"],
)
def _page_checksums_kernel(arena_ptr, frames_ptr, sums_ptr, tiles_per_page, TILE: tl.constexpr):
    """Program t sums tile t % tiles_per_page of page t // tiles_per_page."""
    page = tl.program_id(0) // tiles_per_page
    tile = tl.program_id(0) % tiles_per_page
    frame = tl.load(frames_ptr + page).to(tl.int64)
    src = arena_ptr + (frame * tiles_per_page + tile) * TILE
    words = tl.arange(0, TILE // 4)
    data = tl.load(src.to(tl.pointer_type(tl.int32), bitcast=True) + words)
    mixed = (tile * (TILE // 4) + words).to(tl.uint32) * 0x9E3779B1
    x = data.to(tl.uint32, bitcast=True) ^ mixed
    x = (x ^ (x >> 16)) * 0x85EBCA6B + mixed
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    x = x ^ (x >> 16)
    tl.store(sums_ptr + tl.program_id(0), tl.sum(x.to(tl.int64), 0))


def page_checksums(arena: torch.Tensor, frames: torch.Tensor, page_bytes: int) -> torch.Tensor:
    """Checksums of the given frames, int64 [pages], on the arena's device.

    arena : uint8 [frames * page_bytes], contiguous, 16-byte aligned.
    frames : int32 [pages], contiguous, on the arena's device. All bytes of a frame count, so the
        caller zeroes what is beyond the end of a last page if that may differ.
    page_bytes : a power of two, 4 KiB to 16 MiB.

    The sums depend on the bytes alone: kernel and reference agree, and a page may be checked in
    another frame, or on another device. On CUDA the work is queued on the current stream of the
    arena's device and the call does not wait; the frames must not be written before it has run. On
    a CPU the call returns when it is done.
    """
    if frames.numel() == 0:
        return torch.empty(0, dtype=torch.int64, device=arena.device)
    if not use_triton(arena):
        return page_checksums_reference(arena, frames, page_bytes)
    tile_bytes, constants = page_tile(page_bytes)
    tiles_per_page = page_bytes // tile_bytes
    tiles = frames.numel() * tiles_per_page
    sums = torch.empty(tiles, dtype=torch.int64, device=arena.device)
    launch(_page_checksums_kernel, tiles, arena, frames, sums, tiles_per_page, **constants)
    return sums.view(-1, tiles_per_page).sum(1)


def page_checksums_reference(
    arena: torch.Tensor, frames: torch.Tensor, page_bytes: int
) -> torch.Tensor:
    """`page_checksums` in numpy, a piece of a page at a time; pages on a device are copied."""
    sums: list[int] = []
    for run in frame_runs(frames, arena, page_bytes):
        for frame in range(run.frame, run.frame + run.pages):
            page = arena[frame * page_bytes : (frame + 1) * page_bytes].cpu().numpy()
            words = page.view("<u4")
            starts = range(0, words.size, REFERENCE_WORDS)
            sums.append(sum(_hash_sum(words[at : at + REFERENCE_WORDS], at) for at in starts))
    return torch.tensor(sums, dtype=torch.int64, device=arena.device)


def _hash_sum(words: npt.NDArray[np.uint32], first: int) -> int:
    """Sum of the hashes of words [first, first + len(words)) of a page."""
    mixed = np.arange(first, first + words.size, dtype=np.uint32)
    mixed *= np.uint32(0x9E3779B1)
    x = words ^ mixed
    x ^= x >> 16
    x *= np.uint32(0x85EBCA6B)
    x += mixed
    x ^= x >> 13
    x *= np.uint32(0xC2B2AE35)
    x ^= x >> 16
    return int(x.sum(dtype=np.int64))
