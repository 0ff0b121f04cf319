"""What every page launcher needs: Triton if installed, argument checks, and the launch itself.

Triton is optional on a machine without a GPU. Where it is missing, `triton.jit` becomes the
identity, so that kernel modules import and their references run; only a launch on a device then
fails.

Access rules that all page kernels keep:

1. An arena is one run of frames, 16-byte aligned, so every frame is. Frame f is bytes
   [f * page_bytes, (f + 1) * page_bytes).
2. A kernel reads and writes only frames named in its tables, and of a partial page only its valid
   bytes.
3. On a device, tables are read by the kernel, in stream order. The host never looks at them: a
   launch does not synchronise, and a frame number outside the arena is the caller's bug. On a CPU
   it is a ValueError.
"""

from __future__ import annotations

from importlib import import_module
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

MIN_PAGE_BYTES = 4 << 10
MAX_PAGE_BYTES = 16 << 20
ARENA_ALIGNMENT_BYTES = 16

triton: Any
tl: Any


class _TritonMissing:
    """Stands in for both `triton` and `triton.language` in decorators and annotations."""

    constexpr = None

    def jit(self, fn: Any = None, **_options: Any) -> Any:
        return fn if fn is not None else lambda decorated: decorated


try:
    triton, tl = import_module("triton"), import_module("triton.language")
    HAVE_TRITON = True
    INTERPRETED = bool(triton.knobs.runtime.interpret)
except ModuleNotFoundError as error:
    if error.name != "triton":
        raise
    triton = tl = _TritonMissing()
    HAVE_TRITON = INTERPRETED = False


class FrameRun(NamedTuple):
    """Pages [page, page + pages) of a table that lie in frames [frame, frame + pages)."""

    page: int
    frame: int
    pages: int


def use_triton(arena: torch.Tensor) -> bool:
    """Whether a launcher runs its kernel (on a device, or interpreted) or its reference."""
    return INTERPRETED if arena.device.type == "cpu" else runs_triton(arena.device)


def runs_triton(device: torch.device) -> bool:
    """Whether compiled kernels run on ``device``. Other accelerators run the references."""
    return device.type == "cuda"


def upload(table: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`table` where kernels on `device` read it.

    From the host the copy is queued on the current stream, from page-locked memory where there is
    any, so that nobody waits for it. PyTorch keeps that memory until the copy is over.
    """
    if table.device == device or table.device.type != "cpu" or not table.numel():
        return table.to(device, non_blocking=True)
    try:
        table = table.pin_memory()
    except (RuntimeError, NotImplementedError):  # a device without: the copy blocks
        return table.to(device)
    return table.to(device, non_blocking=True)


def launch(
    kernel: Any, programs: int, arena: torch.Tensor, *args: torch.Tensor | int, **constants: Any
) -> None:
    """Queue `kernel(arena, *args)` on the current stream of the arena's device."""
    if not HAVE_TRITON:
        raise RuntimeError(f"pages on {arena.device} need Triton; install triton>=3.6")
    device = arena.device
    if device.type != "cpu" and device.index != torch.accelerator.current_device_index():
        with torch.accelerator.device_index(device.index):
            kernel[(programs,)](arena, *args, **constants)
    else:
        kernel[(programs,)](arena, *args, **constants)


def check_arena(arena: torch.Tensor, page_bytes: int) -> None:
    """Raise ValueError unless `arena` is whole frames of a supported page size."""
    if not MIN_PAGE_BYTES <= page_bytes <= MAX_PAGE_BYTES or page_bytes & (page_bytes - 1):
        raise ValueError(
            f"page_bytes is {page_bytes}; use a power of two from {MIN_PAGE_BYTES} "
            f"to {MAX_PAGE_BYTES}"
        )
    check_bytes("arena", arena, arena)
    if arena.numel() % page_bytes:
        raise ValueError(
            f"arena has {arena.numel()} bytes; use a multiple of page_bytes = {page_bytes}"
        )
    if arena.data_ptr() % ARENA_ALIGNMENT_BYTES:
        raise ValueError(
            f"arena starts at {arena.data_ptr():#x}; align it to {ARENA_ALIGNMENT_BYTES} bytes"
        )


def check_bytes(name: str, tensor: torch.Tensor, arena: torch.Tensor) -> None:
    """Raise ValueError unless `tensor` is uint8 [nbytes], contiguous, on the arena's device."""
    _check_vector(name, tensor, torch.uint8, "pass tensor.view(torch.uint8)", arena)


def check_frames(name: str, frames: torch.Tensor, arena: torch.Tensor) -> None:
    """Raise ValueError unless `frames` is int32 [n], contiguous, on the arena's device."""
    _check_vector(name, frames, torch.int32, "pass frames.to(torch.int32)", arena)


def check_page_count(name: str, nbytes: int, pages: int, page_bytes: int) -> None:
    """Raise ValueError unless `nbytes` bytes take exactly `pages` pages."""
    needed = -(-nbytes // page_bytes)
    if needed != pages:
        raise ValueError(
            f"{name} has {nbytes} bytes, {needed} pages of {page_bytes}, but frame_of has {pages} "
            "entries; pass one frame per page"
        )


def frame_runs(*tables: torch.Tensor, arena: torch.Tensor, page_bytes: int) -> list[list[FrameRun]]:
    """Cut tables of one length into the longest runs that are consecutive in all of them.

    Returns, for each piece, one FrameRun per table. Reads the tables on the host, so it
    synchronises with a device. Raises ValueError for a frame outside the arena.
    """
    if not tables[0].numel():
        return []
    columns = [table.cpu().numpy() for table in tables]
    frames_in_arena = arena.numel() // page_bytes
    for column in columns:
        if column.min() < 0 or column.max() >= frames_in_arena:
            page = int(np.argmax((column < 0) | (column >= frames_in_arena)))
            raise ValueError(
                f"page {page} is in frame {column[page]}, but the arena has {frames_in_arena} "
                "frames; bring the page in first (-1 means not on the device)"
            )
    breaks = np.zeros(columns[0].size + 1, dtype=bool)
    breaks[[0, -1]] = True
    for column in columns:
        breaks[1:-1] |= np.diff(column) != 1
    edges = np.flatnonzero(breaks).tolist()
    starts = [column[edges[:-1]].tolist() for column in columns]
    return [
        [FrameRun(page, start[i], end - page) for start in starts]
        for i, (page, end) in enumerate(pairwise(edges))
    ]


def _check_vector(
    name: str, tensor: torch.Tensor, dtype: torch.dtype, remedy: str, arena: torch.Tensor
) -> None:
    if tensor.dtype != dtype:
        raise ValueError(f"{name} is {tensor.dtype}, not {dtype}; {remedy}")
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} and stride {tensor.stride()}; "
            f"pass {name}.contiguous().view(-1)"
        )
    if tensor.device != arena.device:
        raise ValueError(
            f"{name} is on {tensor.device}, the arena on {arena.device}; move it there"
        )
