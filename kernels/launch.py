"""What every page launcher needs: Triton if installed, and the launch itself.

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
   that is an AssertionError.
"""

from __future__ import annotations

from importlib import import_module
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

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
    return upload_to(torch.empty_like(table, device=device), table)


def upload_to(there: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The same into memory that is there already, which is given back."""
    if there.device.type == "cpu":
        return there.copy_(table)
    try:
        table = table.pin_memory()
    except (RuntimeError, NotImplementedError):  # a device without: the copy blocks
        return there.copy_(table)
    return there.copy_(table, non_blocking=True)


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


def frame_runs(frames: torch.Tensor, arena: torch.Tensor, page_bytes: int) -> list[FrameRun]:
    """Cut a table into the longest runs of consecutive frames. Reads it on the host, so it
    synchronises with a device."""
    if not frames.numel():
        return []
    column = frames.cpu().numpy()
    assert 0 <= column.min() <= column.max() < arena.numel() // page_bytes, (
        "bring the page in first"
    )
    breaks = np.flatnonzero(np.diff(column) != 1) + 1
    edges = [0, *breaks.tolist(), len(column)]
    return [FrameRun(page, int(column[page]), end - page) for page, end in pairwise(edges)]
