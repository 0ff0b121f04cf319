"""When a trace viewer shows what a timeline has at some time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..timeline import Timeline
from ..trace import Floats, Ints


@dataclass(frozen=True)
class Clock:
    """What the timeline has at ``plan_us`` is shown at ``shown_us``, straight in between, and at
    the same pace outside. Neither falls; where ``plan_us`` stands still, what begins is shown at
    the last value and what ends at the first. ``ops``: begins and ends of the ops, where they are
    known better than by that."""

    plan_us: Floats  # [knots], at least two
    shown_us: Floats
    ops: tuple[Floats, Floats] | None = None

    def begin(self, us: Floats) -> Floats:
        return self._at(us, np.searchsorted(self.plan_us, us, "right") - 1)

    def end(self, us: Floats) -> Floats:
        return self._at(us, np.searchsorted(self.plan_us, us, "left") - 1)

    def _at(self, us: Floats, before: Ints) -> Floats:
        last = len(self.plan_us) - 1
        low, high = np.clip(before, 0, last), np.clip(before + 1, 0, last)
        x, y = self.plan_us, self.shown_us
        width = x[high] - x[low]
        inside = (before >= 0) & (width > 0)
        pace = np.where(inside, (y[high] - y[low]) / np.where(inside, width, 1.0), 1.0)
        shown: Floats = y[low] + (us - x[low]) * pace
        return shown


def steady(line: Timeline, iterations: int) -> Clock:
    """Times as they are, over so many iterations."""
    ends = np.array([0.0, iterations * line.iteration_us])
    return Clock(ends, ends)
