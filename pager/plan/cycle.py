"""A model that is only read, pass after pass: which weights stay on the device, and what is read
ahead of use.

A pass uses all weights in the same order, so the least recently used one is the next to be wanted,
and by LRU all of them would move in every pass. Here as many stay as there is room for, spread over
the pass, and are never moved again. The others pass through the frames that are left, in the order
in which the passes before used them: when half of these frames have been used, what was in them
leaves, and as much comes, together::

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
from collections.abc import Collection, Sequence
from contextlib import suppress
from itertools import pairwise

import numpy as np

from ..core import Core, Watcher
from ..errors import PagerError
from ..memory.frame_pool import Numbers
from ..memory.page_table import BLANK
from ..memory.space import Extent
from ..moves.compaction import find_window
from ..moves.mover import AHEAD, Coming
from ..moves.tickets import MoveFailed

Pair = tuple[Extent | None, Extent | None]
_NOTHING = np.empty(0, np.int64)
_LEAST_THROUGH_BYTES = 8 << 20  # with less room, what passes through comes in small pieces
_BATCHES = 2  # in which what passes through comes: each costs the host the same


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
        self._pages: Numbers = _NOTHING  # theirs
        self._frames = -1  # for so many it was decided
        self._batch = 1  # so many frames are free, or spent, before anything is brought in
        self._spent: dict[Extent, None] = {}  # used, and nobody waits for it
        self._coming: deque[Extent] = deque()  # that are expected next, and are there or on the way
        self._end: Pair = (None, None)  # the two latest when these have been used
        self._full = False  # nothing that is there could make way for them
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
            self._spent.clear()
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
            if run.kind != "parameter":
                self._full = False
            elif run not in self._staying:
                self._spent[run] = None
        room = self._pager.residency.pool.free_count + sum(run.count for run in self._spent)
        if not self._coming or room >= self._batch:
            self._let_go()
            self._look_ahead()

    # -- what stays ------------------------------------------------------------------------------
    def _decide(self, frames: int) -> None:
        """What stays in so many frames."""
        self._expect_nothing()
        self._withdraw(self._pages)
        order = self._order()
        least = _LEAST_THROUGH_BYTES // self._pager.page_size
        staying = _choose(order, frames, self._staying, least)
        self._staying = dict.fromkeys(staying)
        self._frames, self._unplaced = frames, False
        pages = [run.pages for run in staying]
        self._pages = np.concatenate(pages) if pages else _NOTHING
        self._batch = max(1, (frames - len(self._pages)) // _BATCHES)
        residency = self._pager.residency
        residency.awaited.append(self._pages)
        if len(staying) < len(order):  # what stays, side by side; the rest of the frames is free
            self._spent.update((run, None) for run in order if run not in self._staying)
            self._let_go()
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

    def _let_go(self) -> None:
        """What has been used leaves, if nobody uses it and it has a place below."""
        live = self._pager.space.runs
        spent = [
            run
            for run in self._spent
            if not (run.pins or run.parts or run in self._coming or run in self._staying)
            and live.get(run.id) is run
        ]
        self._full &= len(spent) == len(self._spent)
        self._spent.clear()
        if not spent:
            return
        residency = self._pager.residency
        pages = np.concatenate([run.pages for run in spent])
        try:
            residency.evict_pages(pages[self._pager.table.frame[pages] >= 0])
        except PagerError:  # there is not room for all of it
            self._full = False
            for run in spent:
                with suppress(PagerError):
                    residency.evict_run(run)

    # -- ahead of use ----------------------------------------------------------------------------
    def _look_ahead(self) -> None:
        """What is expected next is brought in, as far as there are frames."""
        if not self._coming:
            self._end = self._at
        residency, coming = self._pager.residency, Coming(self._pager.mover, "host", AHEAD)
        try:
            while len(self._coming) < len(self._seen):
                run = self._next.get(self._end)
                if run is None:
                    return
                there = run.base >= 0 or run in coming.runs or residency.is_whole(run)
                if not there and not self._bring(run, coming):
                    return
                self._coming.append(run)
                residency.awaited.append(run.pages)
                self._end = (self._end[1], run)
        finally:
            coming.begin()

    def _bring(self, run: Extent, coming: Coming) -> bool:
        """Queue what brings ``run`` in, in one piece; whether there was room."""
        pager = self._pager
        table, residency = pager.table, pager.residency
        if run.pins or run.parts is not None or (table.flags[run.pages] & BLANK).any():
            return False
        try:
            if (table.frame[run.pages] >= 0).any():  # what a window has cut off of it
                residency.evict_run(run)
            short = run.count - residency.pool.free_count
            if short > 0:
                others = _NOTHING if self._full else residency.oldest(short)
                self._full = len(others) < short
                if self._full:
                    return False
                residency.evict_pages(others)
            window = residency.pool.find_run(run.count)
            if window is None:
                coming.begin()  # before anything is moved aside
                window = find_window(residency, run)
        except MoveFailed:
            pager.mover.drain()
            return False
        except PagerError:
            return False
        if window is None or (table.frame[run.pages] >= 0).any():
            return False
        residency.pool.take(window, run.count)
        coming.add(run, run.pages, np.arange(window, window + run.count))
        return True

    def _expect_nothing(self) -> None:
        self._full = False
        while self._coming:
            self._withdraw(self._coming.popleft().pages)

    def _withdraw(self, pages: Numbers) -> None:
        """``pages`` are awaited no more."""
        awaited = self._pager.residency.awaited
        at = next((i for i, other in enumerate(awaited) if other is pages), None)
        if at is not None:
            del awaited[at]


def _choose(
    order: Sequence[Extent], frames: int, before: Collection[Extent], least: int = 1
) -> list[Extent]:
    """Of weights in the order of a pass, those that stay in ``frames``, the most important first;
    what stayed ``before`` goes on doing so as long as it fits.

    What passes through has room for two of the largest of them. So the largest come first where two
    of them would take half of what is left, and where the next ones are half as large or smaller
    and two of these take at least ``least`` frames; then those that are left, spread over the pass.
    """
    order = [run for run in order if run.count <= frames]  # the others go slab by slab
    if sum(run.count for run in order) <= frames:
        return list(order)
    by_size = sorted(order, key=lambda run: -run.count)
    taken, few, halves = 0, 0, True  # of the largest: their pages, how many they are
    for number, (run, after) in enumerate(pairwise(by_size), start=1):
        taken += run.count
        if taken + 2 * after.count > frames:
            break
        halves = halves and 4 * run.count > frames - taken + run.count
        worth = 2 * after.count <= run.count and 2 * after.count >= least
        if halves or worth:
            few = number
    large, by_size = by_size[:few], by_size[few:]
    room = frames - sum(run.count for run in large)
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
