"""A queue of the link in the simulator: what moves, how fast, and what holds it up."""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from .sim_pages import EPSILON_US, NONE, STALE, VALID, Pages, Range
from .trace import Floats


class Queue:
    """One first-in first-out queue of a direction: its moves, and the page that is moving.

    ``event_us``: when the moving page arrives or the head's latency is over; ``inf`` if neither.
    """

    __slots__ = (
        "_end", "_fresh", "_left", "_page", "_pages", "_ready_us", "_since", "alone_us", "entries",
        "event_us", "is_out", "latency_us", "moving", "name", "pace_us", "tier",
    )  # fmt: skip

    def __init__(
        self, name: str, tier: int, is_out: bool, alone_us: float, latency_us: float, pages: Pages
    ) -> None:
        self.name, self.tier, self.is_out = name, tier, is_out
        self.alone_us = alone_us  # of a page while nothing shares the link
        self.latency_us = latency_us
        self.entries: deque[deque[Range]] = deque()  # moves; each the ranges still to be moved
        self.moving = False
        self.event_us = math.inf
        self.pace_us = alone_us
        self._pages = pages
        self._page = self._end = 0  # the head's next page, and the end of its range
        self._ready_us = 0.0
        self._since = self._left = 0.0
        self._fresh = False

    def append(self, todo: list[Range], now: float) -> None:
        self.entries.append(deque(todo))
        if len(self.entries) == 1:
            self._new_head(now)

    def _new_head(self, now: float) -> None:
        self._page, self._end = self.entries[0].popleft()
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
        self._page = page + 1
        if self._page == self._end:
            self._next_range(now)
        self._land(page, page + 1)
        if pages.drops:
            pages.arrived(page, "out" if self.is_out else "in")

    def _next_range(self, now: float) -> None:
        if self.entries[0]:
            self._page, self._end = self.entries[0].popleft()
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
        kept: deque[deque[Range]] = deque()
        for index, entry in enumerate(self.entries):
            head = index == 0
            mine = self._page if head else entry[0][0]
            if first <= mine < last:
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
        self._land(first, last)
        if self.is_out:
            self._pages.take_slots(self.tier, count)
        self._page = last
        begin = self.event_us + (count - 1) * self.pace_us
        self._since, self._left = begin, 1.0
        self.event_us = begin + self.pace_us
