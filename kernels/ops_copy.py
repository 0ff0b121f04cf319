"""Ops that move whole pages. None of them can be differentiated.

A gather has no input that a gradient could flow to: pages are bytes. Where one is due, let the
gathered tensor require it (``requires_grad_()``) and scatter its ``grad`` where it belongs.
"""

from __future__ import annotations

import torch

from .checksum import page_checksums
from .fill import fill_pages
from .gather import gather_pages
from .move import move_pages, slide_pages
from .ops_define import Call, define
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


def _gathered(call: Call) -> torch.Tensor:
    """Room for what is gathered."""
    out: torch.Tensor = call.arena.new_empty(call.size, dtype=call.dtype)
    return out


def _gather(call: Call) -> torch.Tensor:
    out = _gathered(call)
    gather_pages(call.arena, call.frame_of, _bytes("out", out), call.page_bytes)
    return out


define(
    "gather_pages(Tensor arena, Tensor frame_of, int page_bytes, SymInt[] size, ScalarType dtype)"
    " -> Tensor",
    _gather,
    _gathered,
)
define(
    "gather_pages_into(Tensor arena, Tensor frame_of, int page_bytes, Tensor(a!) out) -> ()",
    lambda c: gather_pages(c.arena, c.frame_of, _bytes("out", c.out), c.page_bytes),
)
define(
    "scatter_pages(Tensor src, Tensor(a!) arena, Tensor frame_of, int page_bytes) -> ()",
    lambda c: scatter_pages(_bytes("src", c.src), c.frame_of, c.arena, c.page_bytes),
)
define(
    "move_pages(Tensor(a!) arena, Tensor src_frames, Tensor dst_frames, int page_bytes) -> ()",
    lambda c: move_pages(**vars(c)),
)
define(
    "slide_pages(Tensor(a!) arena, int src_frame, int dst_frame, int pages, int page_bytes) -> ()",
    lambda c: slide_pages(**vars(c)),
)
define(
    "fill_pages(Tensor(a!) arena, Tensor frames, int page_bytes, int value) -> ()",
    lambda c: fill_pages(**vars(c)),
)
define(
    "page_checksums(Tensor arena, Tensor frames, int page_bytes) -> Tensor",
    lambda c: page_checksums(**vars(c)),
    lambda c: c.arena.new_empty(c.frames.shape, dtype=torch.int64),
)
