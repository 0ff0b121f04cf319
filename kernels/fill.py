"""Fill: one byte value into every byte of some frames (zeroing, or poison for pages that left)."""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch

from .launch import check_arena, check_frames, frame_runs, launch, tl, triton, use_triton
from .tile import page_tile

__all__ = ["fill_pages"]


@triton.jit(
    do_not_specialize=["tiles_per_page", "word"],
    do_not_specialize_on_alignment=["frames_ptr"],
)
def _fill_pages_kernel(arena_ptr, frames_ptr, tiles_per_page, word, TILE: tl.constexpr):
    """Program t writes the int32 `word` over one tile of page t // tiles_per_page."""
    page = tl.program_id(0) // tiles_per_page
    tile = tl.program_id(0) % tiles_per_page
    frame = tl.load(frames_ptr + page).to(tl.int64)
    dst = arena_ptr + (frame * tiles_per_page + tile) * TILE
    words = dst.to(tl.pointer_type(tl.int32), bitcast=True) + tl.arange(0, TILE // 4)
    tl.store(words, tl.full((TILE // 4,), word, tl.int32))


def fill_pages(arena: torch.Tensor, frames: torch.Tensor, page_bytes: int, value: int) -> None:
    """Set every byte of the given frames to `value`.

    arena : uint8 [frames * page_bytes], contiguous, 16-byte aligned.
    frames : int32 [pages], contiguous, on the arena's device.
    page_bytes : a power of two, 4 KiB to 16 MiB.
    value : 0 to 255. 255 makes every element NaN in torch's floating-point types (float8_*fnuz
        apart).

    On CUDA the fill is queued on the current stream of the arena's device and the call does not
    wait. On a CPU the call returns when it is done. No frames: nothing happens. Raises ValueError
    for arguments that are not as above, before anything is written.
    """
    check_arena(arena, page_bytes)
    check_frames("frames", frames, arena)
    if not 0 <= value <= 255:
        raise ValueError(f"value is {value}; a byte is 0 to 255")
    if frames.numel() == 0:
        return
    if not use_triton(arena):
        fill_pages_reference(arena, frames, page_bytes, value)
        return
    tile_bytes, constants = page_tile(page_bytes)
    tiles_per_page = page_bytes // tile_bytes
    word = int.from_bytes(bytes([value] * 4), "little", signed=True)
    launch(
        _fill_pages_kernel,
        frames.numel() * tiles_per_page,
        arena,
        frames,
        tiles_per_page,
        word,
        **constants,
    )


def fill_pages_reference(
    arena: torch.Tensor, frames: torch.Tensor, page_bytes: int, value: int
) -> None:
    """`fill_pages` in plain torch: one fill per run of consecutive frames."""
    for (run,) in frame_runs(frames, arena=arena, page_bytes=page_bytes):
        arena[run.frame * page_bytes : (run.frame + run.pages) * page_bytes].fill_(value)
