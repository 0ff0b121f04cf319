"""Ops that move whole pages. None of them can be differentiated.

A gather has no input that a gradient could flow to: pages are bytes. Where one is due, let the
gathered tensor require it (``requires_grad_()``) and scatter its ``grad`` where it belongs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .checksum import page_checksums
from .fill import fill_pages
from .gather import gather_pages
from .move import move_pages, slide_pages
from .ops_define import define
from .scatter import scatter_pages

__all__: list[str] = []


def _bytes(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Its memory as uint8 [nbytes]."""
    if not tensor.is_contiguous():
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} and stride {tensor.stride()}; pass "
            f"{name}.contiguous()"
        )
    return tensor.detach().view(-1).view(torch.uint8)


def _gather(
    arena: torch.Tensor,
    frame_of: torch.Tensor,
    page_bytes: int,
    size: Sequence[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    out = torch.empty(size, dtype=dtype, device=arena.device)
    gather_pages(arena, frame_of, _bytes("out", out), page_bytes)
    return out


def _gather_fake(
    arena: torch.Tensor,
    frame_of: torch.Tensor,
    page_bytes: int,
    size: Sequence[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    return arena.new_empty(size, dtype=dtype)


def _gather_into(
    arena: torch.Tensor, frame_of: torch.Tensor, page_bytes: int, out: torch.Tensor
) -> None:
    gather_pages(arena, frame_of, _bytes("out", out), page_bytes)


def _scatter(
    src: torch.Tensor, arena: torch.Tensor, frame_of: torch.Tensor, page_bytes: int
) -> None:
    scatter_pages(_bytes("src", src), frame_of, arena, page_bytes)


def _checksums_fake(arena: torch.Tensor, frames: torch.Tensor, page_bytes: int) -> torch.Tensor:
    return arena.new_empty(frames.shape, dtype=torch.int64)


define(
    "gather_pages(Tensor arena, Tensor frame_of, int page_bytes, SymInt[] size, ScalarType dtype)"
    " -> Tensor",
    _gather,
    _gather_fake,
)
define(
    "gather_pages_into(Tensor arena, Tensor frame_of, int page_bytes, Tensor(a!) out) -> ()",
    _gather_into,
)
define(
    "scatter_pages(Tensor src, Tensor(a!) arena, Tensor frame_of, int page_bytes) -> ()",
    _scatter,
)
define(
    "move_pages(Tensor(a!) arena, Tensor src_frames, Tensor dst_frames, int page_bytes) -> ()",
    move_pages,
)
define(
    "slide_pages(Tensor(a!) arena, int src_frame, int dst_frame, int pages, int page_bytes) -> ()",
    slide_pages,
)
define("fill_pages(Tensor(a!) arena, Tensor frames, int page_bytes, int value) -> ()", fill_pages)
define(
    "page_checksums(Tensor arena, Tensor frames, int page_bytes) -> Tensor",
    page_checksums,
    _checksums_fake,
)
