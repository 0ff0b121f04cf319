"""A queue of the link in the simulator: what moves, how fast, and what holds it up."""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

import numpy as np

from .sim_pages import EPSILON_US, NONE, STALE, VALID, Pages, Range
from .trace import Floats

SAME_US = 1e-7  # what two equal times may differ by in floating point


class Logged(NamedTuple):
    """Pages ``first`` to ``last`` of move ``move`` went one after another, each in equal time.
    Not ``arrived``: their tensor died at ``end_us``; ``begin_us`` is the same if they never began.
    """

    move: int
    first: int
    last: int
    begin_us: float
    end_us: float
    arrived: bool


class Entry(NamedTuple):
    """A queued move: the ranges still to be moved, and where to note its transfers, if at all."""

    move: int
    left: deque[Range]
    log: list[Logged] | None


class Queue:
    """One first-in first-out queue of a direction: its moves, and the page that is moving.

    ``event_us``: when the moving page arrives or the head's latency is over; ``inf`` if neither.
    """

    __slots__ = (
        "_began", "_end", "_fresh", "_left", "_page", "_pages", "_ready_us", "_since", "alone_us",
        "entries", "event_us", "is_out", "latency_us", "moving", "name", "pace_us", "tier",
    )  # fmt: skip

    def __init__(
        self, name: str, tier: int, is_out: bool, alone_us: float, latency_us: float, pages: Pages
    ) -> None:
        self.name, self.tier, self.is_out = name, tier, is_out
        self.alone_us = alone_us  # of a page while nothing shares the link
        self.latency_us = latency_us
        self.entries: deque[Entry] = deque()
        self.moving = False
        self.event_us = math.inf
        self.pace_us = alone_us
        self._pages = pages
        self._page = self._end = 0  # the head's next page, and the end of its range
        self._ready_us = 0.0
        self._since = self._left = 0.0
        self._began = 0.0  # when the moving page began
        self._fresh = False

    def append(
        self, move: int, todo: list[Range], now: float, log: list[Logged] | None = None
    ) -> None:
        """``log``: gets the transfers of this move."""
        self.entries.append(Entry(move, deque(todo), log))
        if len(self.entries) == 1:
            self._new_head(now)

    def _new_head(self, now: float) -> None:
        self._page, self._end = self.entries[0].left.popleft()
        self._ready_us = now + self.latency_us

    def begin(self, now: float) -> None:
        """The head's next page starts moving, if nothing holds it up."""
        if now < self._ready_us - EPSILON_US:
            self.event_us = self._ready_us
            return
        pages = self._pages
        if self.is_out:
            if pages.used[self.tier] >= pages.caps[self.tier]:
                return
            pages.take_slots(self.tier, 1)
        else:
            if pages.free <= 0 or pages.copies[self.tier][self._page] != VALID:
                return
            pages.take_frames(1)
        self.moving = self._fresh = True
        self._began = now

    def set_pace(self, pace_us: float, now: float) -> None:
        """µs for a whole page from now on; also for the rest of the one that is moving."""
        if self._fresh:
            self._fresh = False
            self._left = 1.0
        elif pace_us == self.pace_us:
            return
        else:
            self._left -= (now - self._since) / self.pace_us
        self.pace_us = pace_us
        self._since = now
        self.event_us = now + self._left * pace_us if pace_us < math.inf else math.inf

    def arrive(self) -> None:
        """The moving page is there; the head is then the next page."""
        now = self.event_us
        page = self._page
        pages = self._pages
        self.moving = False
        self.event_us = math.inf
        if self.entries[0].log is not None:
            self._note(page, page + 1, self._began, now)
        self._page = page + 1
        if self._page == self._end:
            self._next_range(now)
        self._land(page, page + 1)
        if pages.drops:
            pages.arrived(page, "out" if self.is_out else "in")

    def _next_range(self, now: float) -> None:
        if self.entries[0].left:
            self._page, self._end = self.entries[0].left.popleft()
            return
        self.entries.popleft()
        if self.entries:
            self._new_head(now)

    def _land(self, first: int, last: int) -> None:
        """Pages ``first`` to ``last`` have arrived."""
        pages = self._pages
        count = last - first
        if self.is_out:
            pages.out_pages += count
            pages.disk_pages += count * self.tier
            pages.free += count
            pages.going[first:last] = bytes(count)
            copies = pages.copies[self.tier]
            if copies.find(STALE, first, last) < 0:
                copies[first:last] = bytes([VALID]) * count
                return
            for page in range(first, last):
                stale = copies[page] == STALE
                copies[page] = NONE if stale else VALID
                pages.used[self.tier] -= stale
            return
        pages.in_pages += count
        pages.there[first:last] = b"\1" * count
        pages.coming[first:last] = bytes(count)
        pages.missing[pages.owner(first)] -= count

    def cancel(self, first: int, last: int, now: float) -> None:
        """Moves of pages ``first`` to ``last`` end; what the moving page took is given back."""
        kept: deque[Entry] = deque()
        for index, entry in enumerate(self.entries):
            head = index == 0
            mine = self._page if head else entry.left[0][0]
            if first <= mine < last:
                if entry.log is not None:
                    self._note_cancelled(entry, entry.log, head, now)
                if head:
                    self._stop()
                continue
            kept.append(entry)
        changed_head = bool(self.entries) and (not kept or kept[0] is not self.entries[0])
        self.entries = kept
        if changed_head and kept:
            self._new_head(now)

    def _stop(self) -> None:
        if self.moving:
            if self.is_out:
                self._pages.used[self.tier] -= 1
            else:
                self._pages.free += 1
        self.moving = False
        self.event_us = math.inf

    def why_blocked(self) -> str:
        pages = self._pages
        tensor = pages.owner(self._page)
        what = f"the {self.name} queue waits with '{pages.trace.name_of(tensor)}'"
        if self.is_out:
            return f"{what} for a free slot"
        if pages.copies[self.tier][self._page] != VALID:
            return f"{what} for its copy"
        return f"{what} for a free frame"

    # -- many pages at once ----------------------------------------------------------------------
    def last_page_us(self) -> float:
        """When the last page of the moving range arrives if nothing changes."""
        return self.event_us + (self._end - 1 - self._page) * self.pace_us

    def pages_before(self, limit_us: float) -> int:
        """Pages that arrive clearly before ``limit_us``; as many begin after them."""
        span = limit_us - 3 * EPSILON_US - self.event_us
        if span < 0 or math.isinf(self.pace_us):
            return 0
        return min(int(span / self.pace_us) + 1, self._end - 1 - self._page)

    def arrivals_us(self, count: int) -> Floats:
        """When the next ``count`` pages arrive if nothing changes."""
        return np.arange(count, dtype=np.float64) * self.pace_us + self.event_us

    def can_coast(self, count: int) -> bool:
        pages = self._pages
        if self.is_out:
            return pages.used[self.tier] + count <= pages.caps[self.tier]
        following = pages.copies[self.tier][self._page + 1 : self._page + 1 + count]
        return following.count(VALID) == count

    def coast(self, count: int) -> None:
        """``count`` pages arrive, and the one after them is moving."""
        first, last = self._page, self._page + count
        if self.entries[0].log is not None:
            self._note(first, first + 1, self._began, self.event_us)
            if count > 1:
                rest_us = (count - 1) * self.pace_us
                self._note(first + 1, last, self.event_us, self.event_us + rest_us)
        self._land(first, last)
        if self.is_out:
            self._pages.take_slots(self.tier, count)
        self._page = last
        begin = self.event_us + (count - 1) * self.pace_us
        self._since, self._left, self._began = begin, 1.0, begin
        self.event_us = begin + self.pace_us

    # -- the log ---------------------------------------------------------------------------------
    def _note(self, first: int, last: int, begin_us: float, end_us: float) -> None:
        """Pages ``first`` to ``last`` of the head took from ``begin_us`` to ``end_us``; one note
        with those before them if they went on at the same pace."""
        move, _, log = self.entries[0]
        assert log is not None
        noted = Logged(move, first, last, begin_us, end_us, True)
        before = log[-1] if log else None
        if before is None or not _goes_on(before, noted):
            log.append(noted)
        else:
            log[-1] = before._replace(last=last, end_us=end_us)

    def _note_cancelled(self, entry: Entry, log: list[Logged], head: bool, now: float) -> None:
        """What of ``entry`` has not arrived never will: the page that is moving, and the rest."""
        left = [(self._page, self._end), *entry.left] if head else list(entry.left)
        if head and self.moving:
            log.append(Logged(entry.move, self._page, self._page + 1, self._began, now, False))
            left[0] = (self._page + 1, self._end)
        log.extend(Logged(entry.move, a, b, now, now, False) for a, b in left if a < b)


def _goes_on(before: Logged, noted: Logged) -> bool:
    """Whether ``noted`` follows ``before`` without a pause, at the same pace."""
    if (before.move, before.last) != (noted.move, noted.first):
        return False
    pages, earlier = noted.last - noted.first, before.last - before.first
    change_us = (noted.end_us - noted.begin_us) / pages
    change_us -= (before.end_us - before.begin_us) / earlier
    return abs(noted.begin_us - before.end_us) <= EPSILON_US and abs(change_us) * pages < SAME_US
