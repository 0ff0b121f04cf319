"""Place buffers one after another into holes: SmartPool, and ours, the best of several orders."""

from __future__ import annotations

import itertools
import time

import numpy as np

from ..trace import Ints
from .buffers import Buffers, Packing, footprint

ORDERS = ("size", "area", "life", "start", "size+life")


def smartpool(buffers: Buffers, *, best: bool = True) -> Packing:
    """SmartPool (arXiv 1903.06631): by size falling, then birth, each in the best-fitting hole that
    the blocks placed before leave during its lifetime (or the first one that fits)."""
    start = time.perf_counter()
    order = np.lexsort([buffers.lower, -buffers.size])
    offsets = place(buffers, order, best=best)
    name = "smartpool" if best else "smartpool-first-fit"
    size = footprint(buffers, offsets)
    seconds = time.perf_counter() - start
    return Packing(name, offsets, size, size == buffers.peak_live_bytes, seconds)


def pack(buffers: Buffers, capacity: int | None = None, seconds: float = 60.0) -> Packing:
    """Ours: every order and rule in turn, SmartPool's own first, until one needs no more than
    ``capacity`` bytes (else than the lower bound) or ``seconds`` are over; the smallest of them."""
    start = time.perf_counter()
    bound = buffers.peak_live_bytes
    best: Ints | None = None
    for name, fits_best in itertools.product(ORDERS, (True, False)):
        offsets = place(buffers, order_of(buffers, name), best=fits_best)
        if best is None or footprint(buffers, offsets) < footprint(buffers, best):
            best = offsets
        late = time.perf_counter() > start + seconds
        if late or footprint(buffers, best) <= max(bound, capacity or 0):
            break
    assert best is not None
    needed = footprint(buffers, best)
    return Packing("ours", best, needed, needed == bound, time.perf_counter() - start)


def order_of(buffers: Buffers, name: str) -> Ints:
    """Largest first by ``name``, one of ``ORDERS`` (earliest first by "start")."""
    life = buffers.upper - buffers.lower
    keys = {
        "size": (-buffers.size, buffers.lower),
        "area": (-(buffers.size.astype(np.float64) * life), -buffers.size),
        "life": (-life, -buffers.size),
        "start": (buffers.lower, -buffers.size),
        "size+life": (-(_share(buffers.size) + _share(life)), buffers.lower),
    }
    first, second = keys[name]
    return np.lexsort([second, first]).astype(np.int64)


def place(buffers: Buffers, order: Ints, *, best: bool) -> Ints:
    """Offsets in bytes when the buffers are placed in ``order``, each in the lowest hole that holds
    it, or in the smallest such hole, or on top of everything that it meets in time."""
    lower, upper, size = buffers.lower[order], buffers.upper[order], buffers.size[order]
    begins, ends = np.zeros((2, len(order)), np.int64)
    for place in range(len(order)):  # those before it have one
        near = (lower[:place] < upper[place]) & (upper[:place] > lower[place])
        begins[place] = hole(begins[:place][near], ends[:place][near], int(size[place]), best=best)
        ends[place] = begins[place] + size[place]
    found = np.empty_like(begins)
    found[order] = begins
    return found


def hole(begins: Ints, ends: Ints, size: int, *, best: bool) -> int:
    """Where ``size`` bytes fit among the taken ranges [begins, ends), which may overlap."""
    if not len(begins):
        return 0
    by_begin = np.argsort(begins)
    begins, ends = begins[by_begin], np.maximum.accumulate(ends[by_begin])
    gaps = begins.copy()  # free bytes below each range
    gaps[1:] -= ends[:-1]
    fitting = np.flatnonzero(gaps >= size)
    if not len(fitting):
        return int(ends[-1])
    chosen = int(fitting[np.argmin(gaps[fitting])] if best else fitting[0])
    return int(ends[chosen - 1]) if chosen else 0


def _share(values: Ints) -> Ints:
    """Each value as millionths of the largest."""
    return values * 1_000_000 // max(int(values.max(initial=0)), 1)
