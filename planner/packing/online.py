"""Allocators that see one event at a time: best fit, a model of CnMem, and fixed pages.

Best fit holds one range that grows at its end by what is missing there.

CnMem (NVIDIA/cnmem, read in its code) rounds to 512 bytes, takes the smallest free block that fits
and splits it; where none fits it asks the driver for exactly the size. Its blocks never join across
two such requests. The model starts with an empty pool and lets it grow, as CnMem does by default.

With fixed pages no buffer needs adjacent memory: the only loss is in the last page of each.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from .buffers import Buffers, Packing
from .heap import Heap, events

CNMEM_GRANULARITY = 512  # bytes
PAGE_BYTES = 2 << 20


def best_fit(buffers: Buffers) -> Packing:
    """Each buffer, when it is born, in the smallest hole that holds it."""
    return _run(buffers, "best-fit", granularity=1, new_segments=False)


def cnmem(buffers: Buffers) -> Packing:
    """What CnMem would take from the driver."""
    return _run(buffers, "cnmem", granularity=CNMEM_GRANULARITY, new_segments=True)


def pages(buffers: Buffers, page_bytes: int = PAGE_BYTES) -> Packing:
    """The most pages of ``page_bytes`` in use at one time, in bytes."""
    start = time.perf_counter()
    whole = replace(buffers, size=-(-buffers.size // page_bytes) * page_bytes)
    peak = whole.peak_live_bytes
    optimal = peak == buffers.peak_live_bytes
    return Packing("pages", None, peak, optimal, time.perf_counter() - start)


def _run(buffers: Buffers, name: str, *, granularity: int, new_segments: bool) -> Packing:
    start = time.perf_counter()
    heap = Heap()
    sizes = (-(-buffers.size // granularity) * granularity).tolist()
    offsets = np.zeros(len(buffers), np.int64)
    for birth, number in events(buffers):
        size = sizes[number]
        if not birth:
            heap.give(int(offsets[number]), size)
            continue
        block = heap.take(size)
        if block is None:
            missing = size if new_segments else size - heap.free_at_end
            heap.grow(missing, new_segment=new_segments)
            block = heap.take(size)
            assert block is not None
        address, found = block
        offsets[number] = address
        if found > size:
            heap.give(address + size, found - size)
    peak = buffers.peak_live_bytes
    seconds = time.perf_counter() - start
    return Packing(name, offsets, heap.reserved, heap.reserved == peak, seconds)
