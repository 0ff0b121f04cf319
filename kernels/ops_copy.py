"""Ops that move whole pages and blocks of bytes. None of them can be differentiated.

A gather has no input that a gradient could flow to: pages are bytes. Where one is due, let the
gathered tensor require it (``requires_grad_()``) and scatter its ``grad`` where it belongs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .checksum import page_checksums
from .fill import fill_pages
from .gather import gather_pages
from .launch import runs_triton
from .move import move_pages
from .ops_define import define
from .scatter import scatter_pages
from .zero_copy import block_table, fetch_blocks

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


def _fetch(
    src: torch.Tensor,
    src_offsets: torch.Tensor,
    dst: torch.Tensor,
    dst_offsets: torch.Tensor,
    lengths: torch.Tensor,
) -> None:
    """Blocks by offsets in bytes, int64 [n] each on the host; looked at, so nothing goes astray."""
    if src.device != dst.device and not (runs_triton(dst.device) and src.device.type == "cpu"):
        raise ValueError(
            f"src is on {src.device}, dst on {dst.device}; fetch from dst's device or the host"
        )
    if runs_triton(dst.device) and src.device.type == "cpu" and not src.is_pinned():
        raise ValueError(
            f"src is pageable memory, which kernels on {dst.device} cannot read; page-lock it "
            "(src.pin_memory())"
        )
    for name, table in (("src_offsets", src_offsets), ("dst_offsets", dst_offsets)):
        if table.dtype != torch.int64 or table.shape != lengths.shape or table.dim() != 1:
            raise ValueError(
                f"{name} is {table.dtype} {tuple(table.shape)} for {tuple(lengths.shape)} lengths; "
                "pass int64 [n], one for each block"
            )
    if {table.device.type for table in (src_offsets, dst_offsets, lengths)} != {"cpu"}:
        raise ValueError(
            f"offsets are on {src_offsets.device} and {dst_offsets.device}, lengths on "
            f"{lengths.device}; pass them on the host"
        )
    size = lengths.detach().numpy()
    starts = []
    for name, memory, offsets in (("src", src, src_offsets), ("dst", dst, dst_offsets)):
        data, first = _bytes(name, memory), offsets.detach().numpy()
        if len(first) and (first.min() < 0 or (first + size).max() > data.numel()):
            raise ValueError(
                f"blocks reach from byte {first.min()} to {(first + size).max()} of {name}, which "
                f"has {data.numel()}; keep them inside"
            )
        starts.append(first + data.data_ptr())
    fetch_blocks(block_table(starts[0], starts[1], size).to(dst.device))


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
define("fill_pages(Tensor(a!) arena, Tensor frames, int page_bytes, int value) -> ()", fill_pages)
define(
    "page_checksums(Tensor arena, Tensor frames, int page_bytes) -> Tensor",
    page_checksums,
    _checksums_fake,
)
define(
    "fetch_blocks(Tensor src, Tensor src_offsets, Tensor(a!) dst, Tensor dst_offsets,"
    " Tensor lengths) -> ()",
    _fetch,
)
