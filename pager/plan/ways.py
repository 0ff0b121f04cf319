"""The ways in which iterations of a kind go, by its plan or on demand, and which one they go.

They go the faster way. The other one is tried now and then, side by side with it, since the first
iterations of a process take longer than later ones, and machines are busy for a while::

    no plan: on demand | by the plan, 4 | on demand, 4 | the faster way, 64 | the other, 4 | ...

Of each way its faster iterations count: what takes longer was held up, or began with pages where
the other way had left them. The other way is taken for faster only if most of its iterations are
faster than most of this one's. Where batches have different lengths, it is what they would have
taken at one length, as far as a line through those of the same way tells.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from ...planner.trace import Floats

_SAMPLES = 5
_TELLING = 32  # iterations, of how times grow with lengths
_TRIED = 4  # iterations of the way that is tried
_LONGER = 16  # times the stretch of the faster way before: the next one
_SLOWER = 1.02  # times what the other way takes: that is the faster one from now on
_MOSTLY = 0.75  # of its iterations against the other way's, each with each, are faster then
_FAR = 2.0  # times what the faster way takes: it need not be tried any longer


class Growth:
    """How long things take with so many pages of activations, as far as the latest iterations tell:
    some seconds that are always the same, and some for each page, neither below 0."""

    def __init__(self, samples: int = 8) -> None:
        self._seen: deque[tuple[int, Floats]] = deque(maxlen=samples)

    def add(self, size: int, seconds: Sequence[float]) -> None:
        self._seen.append((size, np.array(seconds)))

    def ratio(self, size: int, wanted: int) -> Floats:
        """How many times as long each thing takes with ``wanted`` pages as with ``size``."""
        sizes = np.array([float(some) for some, _ in self._seen])
        if size == wanted or not len(sizes) or sizes.min() == sizes.max():
            return np.ones(1)
        times = np.array([seconds for _, seconds in self._seen])
        middle, typical = sizes.mean(), times.mean(axis=0)
        beside = sizes - middle
        slope = (beside @ times) / (beside @ beside)
        slope = np.clip(slope, 0.0, typical / middle)
        have, want = (typical + slope * (some - middle) for some in (size, wanted))
        found: Floats = np.divide(want, have, out=np.ones_like(have), where=have > 0.0)
        return found


class Taken(NamedTuple):
    """What an iteration took, and waited of that; ``size``: pages of its activations."""

    us: float
    stall_us: float
    size: int = 0


class Ways:
    """Of one kind, batches of all lengths. ``by_plan``: the next one follows its
    plan. ``latest``: what those took that did (``True``), and those on demand (``False``)."""

    def __init__(self) -> None:
        self.by_plan = False
        self.latest = {way: deque[Taken](maxlen=_SAMPLES) for way in (False, True)}
        self._growth = {way: Growth(_TELLING) for way in (False, True)}
        self._faster = False
        self._stretch = 0  # of the faster way
        self._left = math.inf  # iterations until another way is taken

    def new_plan(self) -> None:
        """There is another plan, which is tried."""
        self.latest[True].clear()
        self.by_plan = self._faster = True
        self._stretch = self._left = _TRIED

    def note(self, taken: Taken) -> None:
        """An iteration has gone the present way."""
        self.latest[self.by_plan].append(taken)
        self._growth[self.by_plan].add(taken.size, [taken.us, taken.stall_us])

    def choose(self, taken: Taken, *, may_try: bool) -> None:
        """The next way, after an iteration that went the present one. ``may_try``: not only one
        that is faster as far as is known."""
        self.note(taken)
        self._left -= 1
        faster, other = self._faster, not self._faster
        if self._left > 0 and self.by_plan is faster:
            return
        best, tried = (self._typical_us(way) for way in (faster, other))
        in_vain = self.by_plan is other and _FAR * best < tried and len(self.latest[other]) > 1
        if self._left > 0 and not in_vain:
            return
        if may_try and self.by_plan is faster:
            self.latest[other].clear()
            self.by_plan, self._left = other, _TRIED
            return
        if _SLOWER * tried < best and self._wins(other) >= _MOSTLY:
            self._faster = other
        self._stretch *= _LONGER
        self.by_plan, self._left = self._faster, self._stretch

    @property
    def is_settled(self) -> bool:
        """Whether both were tried."""
        return self._stretch > _TRIED

    def at(self, way: bool, size: int) -> list[Taken]:
        """What the latest iterations of a way would have taken with so many pages of activations,
        as far as a line through them tells."""
        found = []
        for one in self.latest[way]:
            more = np.broadcast_to(self._growth[way].ratio(one.size, size), 2)
            found.append(Taken(one.us * float(more[0]), one.stall_us * float(more[1]), size))
        return found

    def _us(self, way: bool) -> Floats:
        """What iterations took, at one length."""
        sizes = [one.size for latest in self.latest.values() for one in latest]
        return np.array([one.us for one in self.at(way, sum(sizes) // max(1, len(sizes)))])

    def _typical_us(self, way: bool) -> float:
        """At most which the fastest quarter of iterations took; for ever where there was none."""
        us = self._us(way)
        return float(np.quantile(us, 0.25)) if len(us) else math.inf

    def _wins(self, way: bool) -> float:
        """The share of cases in which an iteration of this way was faster than one of the other: on
        a busy machine one or two of four are fast by chance."""
        others = self._us(not way)
        return float(np.mean(self._us(way)[:, None] < others)) if len(others) else 1.0

    def __str__(self) -> str:
        plan, demand = (self._typical_us(way) / 1e3 for way in (True, False))
        return (
            f"the one that was followed took {plan:.1f} ms an iteration, and bringing pages in "
            f"when an op needs them takes {demand:.1f} ms"
        )
