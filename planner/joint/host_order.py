"""In which order the host takes its steps: of those that can begin, the one that is due first."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from .options import Unit


class Release(NamedTuple):
    """``unit`` can begin at ``begin_us`` and should end by ``due_us``; both since its iteration
    began."""

    unit: Unit
    begin_us: float
    due_us: float


def order_steps(releases: Sequence[Release], period_us: float) -> dict[Unit, float]:
    """When each unit's step ends, µs since its iteration began, in the order of the list. What the
    host has not done when an iteration ends it does before it begins the next one's."""
    ends: dict[Unit, float] = {}
    coming = sorted(releases, key=lambda each: (each.begin_us, each.unit.ops))
    free = 0.0
    for _ in range(3):  # until it begins each iteration as it began the one before
        ends, met = {}, 0
        ready: list[tuple[float, tuple[int, ...], Unit]] = []  # by due time
        while len(ends) < len(coming):
            now = free if ready else max(free, coming[met].begin_us)
            while met < len(coming) and coming[met].begin_us <= now:
                unit, _, due_us = coming[met]
                heapq.heappush(ready, (due_us, unit.ops, unit))
                met += 1
            chosen = heapq.heappop(ready)[2]
            free = now + chosen.host_us
            ends[chosen] = free
        free = max(0.0, free - period_us)
    return ends
