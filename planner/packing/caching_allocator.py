"""A model of PyTorch's CUDA caching allocator, with its default settings and one stream.

Sizes round up to 512 bytes. Requests up to 1 MiB come from segments of 2 MiB, those below 10 MiB
from segments of 20 MiB, larger ones from a segment of their own, rounded up to 2 MiB. A request
takes the smallest free block of its pool that holds it. The rest of the block is split off if it
has at least 512 bytes (small pool) or more than 1 MiB (large pool). Free neighbours of one segment
join. Nothing is returned to the driver, so the footprint is the bytes ever reserved.
"""

from __future__ import annotations

import time

import numpy as np

from .buffers import Buffers, Packing
from .heap import Heap, events

MIB = 1 << 20
ROUND = 512
SMALL, SMALL_SEGMENT = MIB, 2 * MIB
MIDDLE, MIDDLE_SEGMENT = 10 * MIB, 20 * MIB
LARGE_ROUND = 2 * MIB


def caching_allocator(buffers: Buffers) -> Packing:
    """What PyTorch would reserve. The small pool's addresses lie above the large pool's."""
    start = time.perf_counter()
    sizes = (-(-buffers.size // ROUND) * ROUND).tolist()
    small = [size <= SMALL for size in sizes]
    pools = {True: Heap(), False: Heap()}
    offsets = np.zeros(len(buffers), np.int64)
    taken = [0] * len(buffers)  # bytes of each buffer's block
    for birth, number in events(buffers):
        heap, size = pools[small[number]], sizes[number]
        if not birth:
            heap.give(int(offsets[number]), taken[number])
            continue
        block = heap.take(size)
        if block is None:
            heap.grow(segment_bytes(size), new_segment=True)
            block = heap.take(size)
            assert block is not None
        address, found = block
        rest = found - size
        if rest >= ROUND if small[number] else rest > SMALL:
            heap.give(address + size, rest)
            found = size
        offsets[number], taken[number] = address, found
    offsets[np.array(small, np.bool_)] += pools[False].reserved
    reserved = pools[True].reserved + pools[False].reserved
    optimal = reserved == buffers.peak_live_bytes
    return Packing("pytorch", offsets, reserved, optimal, time.perf_counter() - start)


def segment_bytes(size: int) -> int:
    """Bytes that a request of ``size`` bytes, which no free block holds, takes from the driver."""
    if size <= SMALL:
        return SMALL_SEGMENT
    if size < MIDDLE:
        return MIDDLE_SEGMENT
    return -(-size // LARGE_ROUND) * LARGE_ROUND
