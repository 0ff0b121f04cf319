"""What a link could hide: of idle pages, those that have time to go to the host and come back."""

from __future__ import annotations

import numpy as np

from ..hardware import Hardware
from ..lifetimes import Gaps
from ..trace import Floats, Ints, Trace


def idle_us(trace: Trace, found: Gaps, starts: Floats, ends: Floats, iteration_us: float) -> Floats:
    """How long each gap is, from the end of the use before to the start of the one after, [gaps],
    for ops that run from ``starts`` to ``ends`` µs."""
    around = found.end >= trace.ops
    after: Floats = starts[found.end % trace.ops] + around * iteration_us
    return np.maximum(after - ends[found.begin], 0.0)


def gap_bytes(trace: Trace, found: Gaps, page_size: int) -> Ints:
    """Bytes that are idle in each gap, without the rest of a last page, [gaps]."""
    begin = found.first_page * page_size
    end = begin + found.pages * page_size
    size: Ints = np.minimum(end, trace.tensor_bytes[found.tensor]) - begin
    return size


def hideable_bytes(size: Ints, pages: Ints, idle: Floats, hardware: Hardware) -> Ints:
    """Of ``size`` bytes in ``pages`` pages, idle for ``idle`` µs: those of whole pages that go out
    over the link, one after the other, and then come back before they are needed. Each gap has the
    link for itself."""
    page_us = hardware.page_us("d2h_bytes_per_s") + hardware.page_us("h2d_bytes_per_s")
    time = np.maximum(idle - 2 * hardware.transfer_latency_us, 0.0)
    fitting = np.floor(time / page_us + 1e-9) if page_us else np.where(time > 0, np.inf, 0.0)
    moved = np.minimum(fitting, pages).astype(np.int64)
    return np.minimum(moved * hardware.page_size, size)
