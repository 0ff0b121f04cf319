"""Dense packing of lifetimes: addresses in one arena for buffers whose lives are known.

``pack`` is ours. The other allocators are there to compare with: SmartPool, best fit, and models of
PyTorch's caching allocator, of CnMem and of fixed pages. ``Buffers.peak_live_bytes`` is what no
packing can go below.
"""

from __future__ import annotations

from .packing.buffers import (
    Buffers,
    BuffersError,
    Packing,
    buffers_of,
    footprint,
    read_csv,
    write_csv,
)
from .packing.caching_allocator import caching_allocator
from .packing.check import check
from .packing.greedy import pack, smartpool
from .packing.online import best_fit, cnmem, pages

__all__ = [
    "Buffers",
    "BuffersError",
    "Packing",
    "best_fit",
    "buffers_of",
    "caching_allocator",
    "check",
    "cnmem",
    "compare",
    "footprint",
    "pack",
    "pages",
    "read_csv",
    "smartpool",
    "write_csv",
]


def compare(buffers: Buffers, capacity: int | None = None, seconds: float = 60.0) -> list[Packing]:
    """What every allocator makes of ``buffers``, ours first. Only ours minds the ``capacity`` and
    stops searching after about ``seconds``."""
    return [
        pack(buffers, capacity, seconds),
        smartpool(buffers),
        smartpool(buffers, best=False),
        best_fit(buffers),
        cnmem(buffers),
        caching_allocator(buffers),
        pages(buffers),
    ]
