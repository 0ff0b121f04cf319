"""In which order the host takes its steps: of those that can begin, the one that is due first."""

from __future__ import annotations

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
    free = 0.0
    for _ in range(3):  # until it begins each iteration as it began the one before
        ends, left = {}, sorted(releases, key=lambda each: (each.due_us, each.unit.ops))
        while left:
            now = max(free, min(each.begin_us for each in left))
            chosen = next(each for each in left if each.begin_us <= now)
            left.remove(chosen)
            free = now + chosen.unit.host_us
            ends[chosen.unit] = free
        free = max(0.0, free - period_us)
    return ends
