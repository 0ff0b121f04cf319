"""What a trace viewer counts over an iteration: bytes in each tier, and how busy the link is."""

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
    for direction in ("out", "in"):
        times, rates = _link_rates(line, direction)
        if rates:
            yield f"link {direction}, GB/s", times, dict(rates)


def _link_rates(line: Timeline, direction: str) -> tuple[Floats, dict[str, Floats]]:
    """GB/s of each tier's transfers over the iteration; what is late counts at its begin."""
    length = line.iteration_us
    edges: list[tuple[float, str, float]] = []
    for part in line.transfers:
        if part.is_out != (direction == "out") or part.end_us <= part.begin_us:
            continue
        rate = part.page_count * line.page_size / (part.end_us - part.begin_us) / 1e3
        for begin, end in (
            (part.begin_us, min(part.end_us, length)),
            (max(part.begin_us, length) - length, part.end_us - length),
        ):
            if end > begin:
                edges += [(begin, part.tier, rate), (end, part.tier, -rate)]
    if not edges:
        return np.zeros(0), {}
    times = np.unique([0.0, *(us for us, _, _ in edges)])
    rates = {tier: np.zeros(len(times)) for tier in sorted({tier for _, tier, _ in edges})}
    for us, tier, rate in edges:
        rates[tier][np.searchsorted(times, us)] += rate
    return times, {tier: np.abs(np.round(np.cumsum(rate), 3)) for tier, rate in rates.items()}
