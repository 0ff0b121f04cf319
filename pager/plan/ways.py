"""The ways in which iterations of a kind go, by its plan or on demand, and which one they go.

They go the faster way. The other one is tried now and then, side by side with it, since the first
iterations of a process take longer than later ones, and machines are busy for a while::

    no plan: on demand | by the plan, 4 | on demand, 4 | the faster way, 64 | the other, 4 | ...

Of each way its faster iterations count: what takes longer was held up, or began with pages where
the other way had left them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_SAMPLES = 5
_TRIED = 4  # iterations of the way that is tried
_LONGER = 16  # times the stretch of the faster way before: the next one
_SLOWER = 1.02  # times what the other way takes: that is the faster one from now on
_FAR = 2.0  # times what the faster way takes: it need not be tried any longer


class Taken(NamedTuple):
    """What an iteration took, and waited of that."""

    us: float
    stall_us: float


class Ways:
    """Of one kind. ``by_plan``: the next iteration follows the plan. ``latest``: what those took
    that did (``True``), and those on demand (``False``)."""

    def __init__(self) -> None:
        self.by_plan = False
        self.latest = {way: deque[Taken](maxlen=_SAMPLES) for way in (False, True)}
        self._faster = False
        self._stretch = 0  # of the faster way
        self._left = math.inf  # iterations until another way is taken

    def new_plan(self) -> None:
        """There is another plan, which is tried."""
        self.latest[True].clear()
        self.by_plan = self._faster = True
        self._stretch = self._left = _TRIED

    def choose(self, taken: Taken, *, may_try: bool) -> None:
        """The next way, after an iteration that went the present one. ``may_try``: not only one
        that is faster as far as is known."""
        self.latest[self.by_plan].append(taken)
        self._left -= 1
        faster, other = self._faster, not self._faster
        best, tried = (typical_us(self.latest[way]) for way in (faster, other))
        in_vain = self.by_plan is other and _FAR * best < tried and len(self.latest[other]) > 1
        if self._left > 0 and not in_vain:
            return
        if may_try and self.by_plan is faster:
            self.latest[other].clear()
            self.by_plan, self._left = other, _TRIED
            return
        self._faster = other if _SLOWER * tried < best else faster
        self._stretch *= _LONGER
        self.by_plan, self._left = self._faster, self._stretch

    @property
    def is_settled(self) -> bool:
        """Whether both were tried."""
        return self._stretch > _TRIED

    def scale(self, more: float) -> None:
        """Iterations take so many times as long from now on."""
        for way, latest in self.latest.items():
            some = (Taken(one.us * more, one.stall_us * more) for one in latest)
            self.latest[way] = deque(some, _SAMPLES)

    def __str__(self) -> str:
        plan, demand = (typical_us(self.latest[way]) / 1e3 for way in (True, False))
        return (
            f"the one that was followed took {plan:.1f} ms an iteration, and bringing pages in "
            f"when an op needs them takes {demand:.1f} ms"
        )


def typical_us(latest: Sequence[Taken]) -> float:
    """At most which the fastest quarter of iterations took; for ever where there was none."""
    return float(np.quantile([one.us for one in latest], 0.25)) if latest else math.inf
