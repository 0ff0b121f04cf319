"""Exact search for a packing below a capacity: canonical placements, inference, backjumping.

Any packing can be pushed down until every buffer rests on another or on the floor, and its buffers
then be read off from the bottom up. So the search only places buffers in order of rising offset
(ties by a fixed priority), each at its lowest free offset: what MiniMalloc calls canonical.

At each step the buffer that can lie lowest is placed there or, if that led nowhere, *deferred*. A
deferred buffer must be lifted by a later one that lives at the same time, which raises the lowest
offset that it can have at last, its *bound*. Of the buffers that live at one time, those with a
bound of h or more must fit between h and the capacity. This fails early, often long before some
buffer has no place left. Parts of what is left that share no time are searched one by one.

Note on blame. Every failure comes with the placed buffers that suffice for it: as long as they lie
where they lie, and the buffers that were unplaced when the last of them was placed come after it,
nothing else can help. A bound of h is due to the earliest placed neighbour whose top is at h or
above; the bound of a deferred buffer is due to what made its placement fail, to all its placed
neighbours (they cannot lift it any more) and to the bounds of the others (one of them will). If the
last choice is not to blame, the alternative to it would fail too, and is not tried.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from ..trace import Bools, Ints
from .problem import Problem

_NEVER = 1 << 60
_ROUNDS = 6  # of raising bounds of deferred buffers by each other; more gain little


@dataclass
class Limits:
    """When a search gives up: at ``deadline`` (time.perf_counter) or after ``nodes`` steps."""

    deadline: float
    nodes: int = _NEVER


class GaveUp(Exception):  # noqa: N818 (an answer of the search, not a fault)
    """The limits were reached before the search knew."""


class Search:
    """One depth-first search. ``priority`` breaks ties between equal offsets, lowest first."""

    def __init__(self, problem: Problem, capacity: int, priority: Ints, limits: Limits) -> None:
        count = len(problem)
        self._p = problem
        self._capacity = capacity // problem.unit
        self._priority = priority
        self._limits = limits
        self._lowest = np.zeros(count, np.int64)  # lowest free offset; of placed ones their own
        self._bound = np.zeros(count, np.int64)  # no completion has the buffer lower
        self._deferred = np.zeros(count, np.bool_)
        self._why_deferred: dict[int, Bools] = {}
        self._placed = np.zeros(count, np.bool_)
        self._stack: list[int] = []  # the placed ones in order
        self._demand = problem.demand.astype(_narrow_type(self._capacity), copy=False)
        self._open = problem.demand.sum(axis=0, dtype=np.int64)  # [sections], units not placed yet
        self.nodes = 0

    def run(self) -> Ints | None:
        """Offsets in bytes in the order of the buffers as given, or None if nothing fits below the
        capacity. Raises ``GaveUp`` at the limits."""
        everything = np.arange(len(self._p))
        with _recursion(4 * len(self._p) + 200):
            if self._solve(everything, np.full(len(self._p), -1)) is not None:
                return None
        return self._p.as_given(self._lowest * self._p.unit)

    def _solve(self, left: Ints, checked: Ints) -> Bools | None:
        """Place all of ``left`` (in order of birth), or say which placed buffers are to blame
        [buffers]; then ``left`` is unplaced, and the caller restores its lowest offsets and
        deferrals. ``checked`` are bounds [buffers] that are known to leave room."""
        if not len(left):
            return None
        parts = self._parts(left)
        if len(parts) == 1:
            return self._place_or_defer(left, checked)
        height = len(self._stack)
        for part in sorted(parts, key=len):
            blame = self._solve(part, checked)
            if blame is not None:
                self._take_back(height)
                return blame
        return None

    def _place_or_defer(self, left: Ints, checked: Ints) -> Bools | None:
        self._count()
        lowest, deferred, height = self._lowest, self._deferred, len(self._stack)
        floor = lowest[left]
        while True:
            blame = self._clash(left, checked)
            if blame is not None:
                return blame
            free = left[~deferred[left]]
            if not len(free):
                return self._all_around(left)
            checked = self._bound.copy()
            chosen = int(free[np.argmin(lowest[free] * len(self._p) + self._priority[free])])
            was_deferred = deferred[left]
            why = [(other, self._why_deferred[other]) for other in left[was_deferred].tolist()]
            self._place(chosen)
            blame = self._solve(left[left != chosen], checked)
            if blame is None:
                return None
            self._take_back(height)
            lowest[left], deferred[left] = floor, was_deferred
            self._why_deferred.update(why)
            if not blame[chosen]:
                return blame
            blame[chosen] = False
            deferred[chosen], self._why_deferred[chosen] = True, blame

    def _place(self, buffer: int) -> None:
        self._stack.append(buffer)
        self._placed[buffer] = True
        size = self._p.size[buffer]
        self._open[self._p.first[buffer] : self._p.last[buffer] + 1] -= size
        top = self._lowest[buffer] + size
        near = self._p.near[buffer]
        lifted = near[(self._lowest[near] < top) & ~self._placed[near]]
        self._lowest[lifted] = top
        self._deferred[lifted] = False

    def _take_back(self, height: int) -> None:
        """Unplace all but the first ``height`` buffers."""
        taken = self._stack[height:]
        del self._stack[height:]
        self._placed[taken] = False
        self._open += self._p.demand[taken].sum(axis=0)

    def _clash(self, left: Ints, checked: Ints) -> Bools | None:
        """What is to blame if certainly nothing can come of this state.

        A section is looked at only if a bound of its buffers is not as ``checked``, and if what is
        open there would not fit even above the highest bound.
        """
        stuck = self._raise_deferred(left)
        if stuck is not None:
            return self._blame(np.array([stuck]), self._capacity - int(self._p.size[stuck]) + 1)
        bound = self._bound[left]
        risen = left[bound > checked[left]]
        if not len(risen):
            return None
        suspect = self._p.touched(risen) & (self._open > self._capacity - bound.max())
        sections = np.flatnonzero(suspect)
        if not len(sections):
            return None
        falling = left[np.argsort(-bound, kind="stable")]
        begin, end = sections[0], sections[-1] + 1
        if 2 * len(sections) < end - begin:
            demand = self._demand[falling][:, sections]
        else:
            demand, sections = self._demand[falling, begin:end], np.arange(begin, end)
        tops = np.cumsum(demand, axis=0, dtype=demand.dtype)
        tops += self._bound[falling].astype(demand.dtype)[:, None]
        if tops.max() <= self._capacity:
            return None
        row, column = divmod(int(np.argmax(tops > self._capacity)), tops.shape[1])
        high = falling[: row + 1]
        crowd = high[self._p.demand[high, sections[column]] > 0]
        return self._blame(crowd, self._capacity - int(self._p.size[crowd].sum()) + 1)

    def _raise_deferred(self, left: Ints) -> int | None:
        """Set the bounds of ``left``. Returns a deferred buffer that nothing can lift and leave
        below the capacity, if there is one."""
        bound, size, placed = self._bound, self._p.size, self._placed
        bound[left] = self._lowest[left]
        waiting = left[self._deferred[left]].tolist()
        changed = bool(waiting)
        for _ in range(_ROUNDS):
            if not changed:
                break
            changed = False
            for buffer in waiting:
                near = self._p.near[buffer]
                near = near[~placed[near]]
                highest = self._capacity - size[buffer]
                lifted = (bound[near] + size[near]).min(initial=highest + 1)
                if lifted > highest:
                    return int(buffer)
                if lifted > bound[buffer]:
                    bound[buffer], changed = lifted, True
        return None

    def _blame(self, crowd: Ints, height: int) -> Bools:
        """Placed buffers [buffers] that suffice for all of ``crowd`` to have bounds >= height."""
        blame = np.zeros(len(self._p), np.bool_)
        placed = np.array(self._stack, np.int64)
        tops = self._lowest[placed] + self._p.size[placed]
        explained: dict[int, int] = {}
        heights = np.full(len(crowd), height, np.int64)
        tasks = [(crowd, heights)]
        while tasks:
            crowd, heights = tasks.pop()
            needed = heights > 0
            crowd, heights = crowd[needed], heights[needed]
            direct = self._lowest[crowd] >= heights
            holds = self._p.meets[np.ix_(crowd[direct], placed)]
            holds &= tops >= heights[direct, None]
            blame[placed[np.argmax(holds, axis=1)] if len(placed) else placed] = True
            for buffer, wanted in zip(crowd[~direct].tolist(), heights[~direct].tolist()):
                if explained.get(buffer, 0) >= wanted:
                    continue
                explained[buffer] = wanted
                near = self._p.near[buffer]
                blame |= self._why_deferred[buffer]
                blame[near[self._placed[near]]] = True
                near = near[~self._placed[near]]
                tasks.append((near, wanted - self._p.size[near]))
        return blame

    def _all_around(self, left: Ints) -> Bools:
        """Every placed buffer that ``left`` and its deferrals depend on [buffers]."""
        blame: Bools = self._p.meets[left].any(axis=0) & self._placed
        for buffer in left[self._deferred[left]].tolist():
            blame |= self._why_deferred[buffer]
        return blame

    def _parts(self, left: Ints) -> list[Ints]:
        """``left`` cut where no lifetime crosses."""
        reach = np.maximum.accumulate(self._p.last[left])
        cuts = np.flatnonzero(self._p.first[left[1:]] > reach[:-1]) + 1
        return np.split(left, cuts) if len(cuts) else [left]

    def _count(self) -> None:
        self.nodes += 1
        if self.nodes > self._limits.nodes or time.perf_counter() > self._limits.deadline:
            raise GaveUp


def _narrow_type(capacity: int) -> type[np.signedinteger]:
    """The narrowest type that holds sums of a few capacities, for speed."""
    narrow = np.int16 if capacity < 1 << 12 else np.int32
    return narrow if capacity < 1 << 28 else np.int64


@contextmanager
def _recursion(depth: int) -> Iterator[None]:
    """Allow ``depth`` more calls than usual."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(before + depth)
    try:
        yield
    finally:
        sys.setrecursionlimit(before)
