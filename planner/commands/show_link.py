"""What a link could hide: of idle pages, those that have time to go to the host and come back."""

from __future__ import annotations

import numpy as np

from ..hardware import Hardware
from ..trace import Floats, Ints


def hideable_bytes(size: Ints, pages: Ints, idle: Floats, hardware: Hardware) -> Ints:
    """Of ``size`` bytes in ``pages`` pages, idle for ``idle`` µs: those of whole pages that go out
    over the link, one after the other, and then come back before they are needed. Each gap has the
    link for itself."""
    page_us = hardware.page_us("d2h_bytes_per_s") + hardware.page_us("h2d_bytes_per_s")
    time = np.maximum(idle - 2 * hardware.transfer_latency_us, 0.0)
    fitting = np.floor(time / page_us + 1e-9) if page_us else np.where(time > 0, np.inf, 0.0)
    moved = np.minimum(fitting, pages).astype(np.int64)
    return np.minimum(moved * hardware.page_size, size)
