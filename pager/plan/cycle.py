"""A model that is only read, pass after pass: which weights stay on the device, and what is read
ahead of use.

A pass uses all weights in the same order, so the least recently used one is the next to be wanted,
and by LRU all of them would move in every pass. Here as many stay as there is room for, spread over
the pass, and are never moved again. The others pass through the frames that are left, in the order
in which the passes before used them, and leave when they were used::

    frames   | stay: A . . D . . G        | through: B C | E F | H ...
    ops        A   B   C   D   E   F   G
    lane           C   E   F   B ...                          ahead of use

Weights are not written between passes, so one that has left once has its copy below, and leaves for
nothing from then on. The order is known by what came after each two weights. Another one than
expected (the experts of a mixture, another model) is brought in by a fault, and the order goes on
from there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from ..core import Core, Watcher
from ..errors import PagerError
from ..memory.page_table import BLANK, Int32
from ..memory.space import Extent
from ..moves.compaction import find_window
from ..moves.mover import AHEAD
from ..moves.tickets import MoveFailed

Pair = tuple[Extent | None, Extent | None]
_NOTHING = np.empty(0, np.int32)


class Cycle(Watcher):
    """Of one pager, a watcher of its core in inference (``inference.py``)."""

    sees_ends = True

    def __init__(self, pager: Core) -> None:
        self._pager = pager
        self._next: dict[Pair, Extent] = {}  # what came after these two
        self._seen: set[Extent] = set()
        self._unplaced = False  # some of these were not seen yet when it was decided what stays
        self._at: Pair = (None, None)  # the two latest
        self._staying: dict[Extent, None] = {}  # the first ones stay longest where frames get fewer
        self._pages: Int32 = _NOTHING  # theirs
        self._frames = -1  # for so many it was decided
        self._coming: deque[Extent] = deque()  # that are expected next, and are there or on the way
        self._end: Pair = (None, None)  # the two latest when these have been used
        self._full = False  # nothing is on the device that could make way for them
        self._begun = False

    # -- begin and end ---------------------------------------------------------------------------
    def begin(self) -> None:
        """With the lock: passes begin, or go on after :meth:`rest`."""
        pager = self._pager
        runs = pager.space.runs
        if any(runs.get(run.id) is not run for run in self._seen):
            self.end()
            self._forget()
        if not self._begun:
            self._begun = True
            self._at = self._end = (None, None)
            pager.residency.awaited.append(self._pages)
        self._full = False
        if pager.watch is None and pager.follower is not None:
            pager.watch = self

    def rest(self) -> None:
        """With the lock: what is done now is no part of a pass; the next one is expected to go on
        where this one ended."""
        if self._pager.watch is self:
            self._pager.watch = None

    def end(self) -> None:
        """With the lock: they are over."""
        self.rest()
        if self._begun:
            self._begun = False
            self._expect_nothing()
            self._withdraw(self._pages)

    def _forget(self) -> None:
        self._next.clear()
        self._seen.clear()
        self._staying.clear()
        self._pages, self._frames = _NOTHING, -1

    # -- what it is told -------------------------------------------------------------------------
    def pinning(self, runs: Sequence[Extent]) -> None:
        for run in runs:
            if run.kind == "parameter":
                self._used(run)

    def _used(self, run: Extent) -> None:
        known = self._next.get(self._at) is run
        self._next[self._at] = run
        self._at = (self._at[1], run)
        if run not in self._seen:
            self._seen.add(run)
            self._unplaced = True
        if self._coming and self._coming[0] is run:
            self._withdraw(self._coming.popleft().pages)
        else:
            self._expect_nothing()
        frames = self._pager.residency.frames
        if known and (self._unplaced or frames != self._frames):
            self._decide(frames)

    def unpinned(self, runs: Sequence[Extent]) -> None:
        if self._frames < 0 or self._pager.mover.error is not None:
            return
        for run in runs:
            if run.kind == "parameter" and run not in self._staying and run not in self._coming:
                self._let_go(run)
        self._look_ahead()

    # -- what stays ------------------------------------------------------------------------------
    def _decide(self, frames: int) -> None:
        """What stays in so many frames."""
        self._expect_nothing()
        self._withdraw(self._pages)
        order = self._order()
        staying = _choose(order, frames, self._staying)
        self._staying = dict.fromkeys(staying)
        self._frames, self._unplaced = frames, False
        pages = [run.pages for run in staying]
        self._pages = np.concatenate(pages) if pages else _NOTHING
        residency = self._pager.residency
        residency.awaited.append(self._pages)
        if len(staying) < len(order):  # what stays, side by side; the rest of the frames is free
            for run in order:
                if run not in self._staying:
                    self._let_go(run)
            residency.compact()

    def _order(self) -> list[Extent]:
        """The weights of a pass, each once, in the order of their first use from now on."""
        found: dict[Extent, None] = {}
        at, passed = self._at, set()
        while at not in passed:
            passed.add(at)
            run = self._next.get(at)
            if run is None:
                break
            found[run] = None
            at = (at[1], run)
        return [*found, *(run for run in self._seen if run not in found and run in self._staying)]

    def _let_go(self, run: Extent) -> None:
        """It leaves, if nobody uses it and it has a place below."""
        if not run.pins and run.parts is None:
            with suppress(PagerError):
                self._pager.residency.evict_run(run)
                self._full = False

    # -- ahead of use ----------------------------------------------------------------------------
    def _look_ahead(self) -> None:
        """What is expected next is brought in, as far as there are frames."""
        if not self._coming:
            self._end = self._at
        residency = self._pager.residency
        while len(self._coming) < len(self._seen):
            run = self._next.get(self._end)
            if run is None:
                return
            if run.base < 0 and not residency.is_whole(run) and not self._bring(run):
                return
            self._coming.append(run)
            residency.awaited.append(run.pages)
            self._end = (self._end[1], run)

    def _bring(self, run: Extent) -> bool:
        """Queue what brings ``run`` in, in one piece; whether there was room."""
        pager = self._pager
        table, residency = pager.table, pager.residency
        if run.pins or run.parts is not None or (table.flags[run.pages] & BLANK).any():
            return False
        self._let_go(run)  # what a window has cut off of it
        try:
            short = run.count - residency.pool.free_count
            if short > 0:
                others = _NOTHING if self._full else residency.oldest(short)
                self._full = len(others) < short
                if self._full:
                    return False
                residency.evict_pages(others)
            window = find_window(residency, run)
        except MoveFailed:
            pager.mover.drain()
            return False
        except PagerError:
            return False
        if window is None or (table.frame[run.pages] >= 0).any():
            return False
        residency.pool.take(window, run.count)
        frames = np.arange(window, window + run.count, dtype=np.int32)
        on_host = table.host[run.pages] >= 0
        for tier, here in (("host", on_host), ("disk", ~on_host)):
            if here.any():
                pager.mover.bring(tier, run.pages[here], frames[here], AHEAD)
        return True

    def _expect_nothing(self) -> None:
        while self._coming:
            self._withdraw(self._coming.popleft().pages)

    def _withdraw(self, pages: Int32) -> None:
        """``pages`` are awaited no more."""
        awaited = self._pager.residency.awaited
        at = next((i for i, other in enumerate(awaited) if other is pages), None)
        if at is not None:
            del awaited[at]


def _choose(order: Sequence[Extent], frames: int, before: Sequence[Extent] | Any) -> list[Extent]:
    """Of weights in the order of a pass, those that stay in ``frames``, the most important first;
    what stayed ``before`` goes on doing so as long as it fits.

    The largest come first where two of them would take half of what is left; then those that are
    left, spread over the pass. What passes through has room for two of the largest of them.
    """
    order = [run for run in order if run.count <= frames]  # the others go slab by slab
    if sum(run.count for run in order) <= frames:
        return list(order)
    by_size = sorted(order, key=lambda run: -run.count)
    large: list[Extent] = []
    room = frames
    while len(by_size) > 1 and 4 * by_size[0].count > room:
        if by_size[0].count + 2 * by_size[1].count > room:
            break
        large.append(by_size.pop(0))
        room -= large[-1].count
    room -= 2 * by_size[0].count
    chosen = dict.fromkeys(large)
    rest = [run for run in order if run not in chosen]
    for run in before:
        if run not in chosen and run.count <= room:
            chosen[run] = None
            room -= run.count
    rest = [run for run in rest if run not in chosen]
    total = sum(run.count for run in rest)
    share, owed = (max(0, room) / total if total else 0.0), 0.0
    for run in rest:
        owed += share * run.count
        if 2 * owed >= run.count and run.count <= room:
            chosen[run] = None
            room -= run.count
            owed -= run.count
    for run in rest:
        if run not in chosen and run.count <= room:
            chosen[run] = None
            room -= run.count
    return list(chosen)
