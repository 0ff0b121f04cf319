"""Fixed pages: no buffer needs adjacent memory, so the only loss is in the last page of each."""

from __future__ import annotations

import time
from dataclasses import replace

from .buffers import Buffers, Packing

PAGE_BYTES = 2 << 20


def pages(buffers: Buffers, page_bytes: int = PAGE_BYTES) -> Packing:
    """The most pages of ``page_bytes`` in use at one time, in bytes."""
    start = time.perf_counter()
    whole = replace(buffers, size=-(-buffers.size // page_bytes) * page_bytes)
    peak = whole.peak_live_bytes
    optimal = peak == buffers.peak_live_bytes
    return Packing("pages", None, peak, optimal, time.perf_counter() - start)
