"""In which order the host takes its steps, so that none is later than has to be.

Of the steps that can begin the host takes the one that is due first. A long step that it has begun
then may keep it from one that comes a little later and is due sooner, so Carlier's search (1982)
tries such a step behind those that it holds up, and before them.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from .options import Unit

MOST_ORDERS = 60  # that are tried


class Release(NamedTuple):
    """``unit`` can begin at ``begin_us`` and should end by ``due_us``; both since its iteration
    began."""

    unit: Unit
    begin_us: float
    due_us: float


def order_steps(
    releases: Sequence[Release], period_us: float, most_orders: int = MOST_ORDERS
) -> dict[Unit, float]:
    """When each unit's step ends, µs since its iteration began, in the order of the list. What the
    host has not done when an iteration ends it does before it begins the next one's."""
    dues = {each.unit: each.due_us for each in releases}
    best: dict[Unit, float] = {}
    least_late = float("inf")
    heap = [(float("-inf"), 0, list(releases))]  # how late a step is at least, with these times
    number = 0
    while heap and number < most_orders and least_late > 0.0:
        at_least, _, times = heapq.heappop(heap)
        if at_least >= least_late:
            break
        ends = _soonest_due(times, period_us)
        number += 1
        late = max((end - dues[unit] for unit, end in ends.items()), default=0.0)
        if late < least_late:
            best, least_late = ends, late
        for place, branch in enumerate(_branches(times, ends)):
            heapq.heappush(heap, (max(at_least, branch[0]), 2 * number + place, branch[1]))
    return best


def _soonest_due(releases: Sequence[Release], period_us: float) -> dict[Unit, float]:
    """Of the steps that can begin the one that is due first."""
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


def _branches(
    releases: Sequence[Release], ends: dict[Unit, float]
) -> list[tuple[float, list[Release]]]:
    """The step that makes another the latest, behind all that it holds up, and before them; each
    with how late a step is then at least."""
    of = {each.unit: each for each in releases}
    order = list(ends)
    late = [ends[unit] - of[unit].due_us for unit in order]
    last = max(range(len(order)), key=lambda place: (late[place], place), default=-1)
    held: list[Release] = []
    for place in range(last, -1, -1):
        each = of[order[place]]
        if each.due_us > of[order[last]].due_us:
            work = sum(other.unit.host_us for other in held)
            first = min(other.begin_us for other in held)
            at_least = first + work - max(other.due_us for other in held)
            behind = each._replace(begin_us=max(each.begin_us, first + work))
            ahead = each._replace(due_us=min(other.due_us for other in held) - 1.0)
            return [
                (at_least, [new if other is each else other for other in releases])
                for new in (behind, ahead)
            ]
        held.append(each)
        if place and ends[order[place]] - each.unit.host_us > ends[order[place - 1]] + 1e-6:
            break  # the host waited for it
    return []
