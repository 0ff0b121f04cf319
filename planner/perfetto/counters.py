"""What a trace viewer counts over an iteration: bytes in each tier."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..tier_usage import tier_usage
from ..timeline import Timeline, device_curve
from ..trace import Floats

# A counter: its name, times in µs, and the values of each series from each of them on.
Counter = tuple[str, Floats, dict[str, Any]]


def counters(line: Timeline) -> Iterator[Counter]:
    """Those of one iteration; the first time of each is 0."""
    curve = device_curve(line)
    yield "device bytes", curve.time_us, dict(curve.by_kind)
    yield "device bytes, all kinds", curve.time_us, {"bytes": curve.total}
    if line.plan is None or line.hardware is None:
        return
    if math.isfinite(line.hardware.device_bytes):
        budget = np.array([int(line.hardware.device_bytes)])
        yield "device budget", np.zeros(1), {"bytes": budget}
    for tier, (times, used) in tier_usage(line).items():
        yield f"{tier} bytes", times, {"bytes": used}
