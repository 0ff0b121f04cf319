"""A queue of the link in the simulator: what moves, how fast, and what holds it up."""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

import numpy as np

from ..hardware import Hardware
from ..simulation import EPSILON_US
from ..trace import Floats
from .drops import IN, OUT, arrived
from .log import Log, Logged, note, note_cancelled
from .pages import NONE, STALE, TIER_INDEX, VALID, Pages, Range

MARGIN_US = 3 * EPSILON_US  # arrivals that are clearly before an event


class Entry(NamedTuple):
    """A queued move of ``tensor``: the ranges still to be moved, and where to note its transfers,
    if at all."""

    move: int
    tensor: int
    left: deque[Range]
    log: Log | None


class Queue:
    """One first-in first-out queue of a direction: its moves, and the page that is moving.

    ``event_us``: when the moving page arrives or the head's latency is over; ``inf`` if neither.
    ``fresh``: a page has begun since its pace was last set.
    """

    __slots__ = (
        "_end", "_left", "_page", "_pages", "_ready_us", "_since", "alone_us", "began",
        "entries", "event_us", "fresh", "is_out", "latency_us", "moving", "name", "pace_us", "tier",
    )  # fmt: skip

    def __init__(self, tier: str, action: str, hardware: Hardware, pages: Pages) -> None:
        self.name, self.tier, self.is_out = f"{tier}-{action}", TIER_INDEX[tier], action == "out"
        self.alone_us = hardware.page_us(tier, action)  # while nothing shares the link
        self.latency_us = hardware.transfer_latency_us
        self.entries: deque[Entry] = deque()
        self.moving = False
        self.event_us = math.inf
        self.pace_us = self.alone_us
        self.fresh = False
        self._pages = pages
        self._page = self._end = 0  # the head's next page, and the end of its range
        self._ready_us = 0.0
        self._since = self._left = 0.0
        self.began = 0.0  # when the moving page began

    def append(
        self, move: int, tensor: int, todo: list[Range], now: float, log: Log | None = None
    ) -> None:
        """``log``: gets the transfers of this move."""
        self.entries.append(Entry(move, tensor, deque(todo), log))
        if len(self.entries) == 1:
            self._new_head(now)

    def _new_head(self, now: float) -> None:
        self._page, self._end = self.entries[0].left.popleft()
        self._ready_us = now + self.latency_us

    def begin(self, now: float) -> bool:
        """The head's next page starts moving, if nothing holds it up."""
        if now < self._ready_us - EPSILON_US:
            self.event_us = self._ready_us
            return False
        pages = self._pages
        if self.is_out:
            if pages.used[self.tier] >= pages.caps[self.tier]:
                return False
            pages.take_slots(self.tier, 1)
        else:
            if pages.free <= 0 or pages.copies[self.tier][self._page] != VALID:
                return False
            if pages.locked[self._page]:  # the host's step has not ended
                return False
            pages.take_frames(1)
        self.moving = self.fresh = True
        self.began = now
        return True

    def set_pace(self, pace_us: float, now: float) -> None:
        """µs for a whole page from now on; also for the rest of the one that is moving."""
        if self.fresh:
            self.fresh = False
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
        now, page = self.event_us, self._page
        self.moving = False
        self.event_us = math.inf
        head = self.entries[0]
        if head.log is not None:
            note(head.log, head.move, page, page + 1, self.began, now)
        self._land(page, page + 1)
        self._page = page + 1
        if self._page == self._end:
            self._next_range(now)

    def _next_range(self, now: float) -> None:
        if self.entries[0].left:
            self._page, self._end = self.entries[0].left.popleft()
            return
        self.entries.popleft()
        if self.entries:
            self._new_head(now)

    def _land(self, first: int, last: int) -> None:
        """Pages ``first`` to ``last`` of the head have arrived."""
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
            else:
                for page in range(first, last):
                    stale = copies[page] == STALE
                    copies[page] = NONE if stale else VALID
                    pages.used[self.tier] -= stale
        else:
            pages.in_pages += count
            pages.there[first:last] = b"\1" * count
            pages.coming[first:last] = bytes(count)
            pages.missing[self.entries[0].tensor] -= count
        if pages.drops:
            arrived(pages, first, last, OUT if self.is_out else IN)

    def cancel(self, tensor: int, now: float) -> None:
        """Moves of ``tensor`` end; what the moving page took is given back."""
        if not self.entries:
            return
        head = self.entries[0]
        for entry in self.entries:
            if entry.tensor == tensor and entry.log is not None:
                self._note_cancelled(entry, entry.log, entry is head, now)
        self.entries = deque(entry for entry in self.entries if entry.tensor != tensor)
        if head.tensor == tensor:
            self._stop()
            if self.entries:
                self._new_head(now)

    def _note_cancelled(self, entry: Entry, log: Log, head: bool, now: float) -> None:
        """What of ``entry`` has not arrived never will: the page that is moving, and the rest."""
        page = self._page
        if head and self.moving:
            log.append(Logged(entry.move, page, page + 1, self.began, now, False))
            page += 1
        note_cancelled(log, entry.move, [(page, self._end)] if head else [], now)
        note_cancelled(log, entry.move, entry.left, now)

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
        tensor = self.entries[0].tensor
        what = f"the {self.name} queue waits with '{pages.trace.name_of(tensor)}'"
        if self.is_out:
            return f"{what} for a free slot"
        if pages.copies[self.tier][self._page] != VALID:
            return f"{what} for its copy"
        if pages.locked[self._page]:
            return f"{what} for the host's step"
        return f"{what} for a free frame"

    def waits_for_host(self) -> bool:
        """Whether nothing holds its head up but a host step."""
        page = self._page
        return not self.is_out and bool(self._pages.locked[page])

    # -- from one iteration to the next ----------------------------------------------------------
    def state(self, now: float) -> tuple[object, ...]:
        """All that its future depends on, with times relative to ``now``."""
        if not self.entries:
            return ()
        waiting = tuple((entry.move, *entry.left) for entry in self.entries)
        ready_us = max(0.0, self._ready_us - now)
        if not self.moving:
            return waiting, self._page, self._end, ready_us
        times = self.event_us - now, self._since - now, self._left, self.pace_us
        return waiting, self._page, self._end, *times

    def count_from(self, now: float) -> None:
        """Times count from ``now`` on."""
        self.event_us -= now
        self._ready_us -= now
        self._since -= now
        self.began -= now

    # -- many pages at once ----------------------------------------------------------------------
    def last_page_us(self) -> float:
        """When the last page of the moving range arrives if nothing changes."""
        return self.event_us + (self._end - 1 - self._page) * self.pace_us

    def pages_before(self, limit_us: float) -> int:
        """Pages that arrive clearly before ``limit_us``; as many begin after them."""
        span = limit_us - MARGIN_US - self.event_us
        if span < 0 or math.isinf(self.pace_us):
            return 0
        return min(int(span / self.pace_us) + 1, self._end - 1 - self._page)

    def arrivals_us(self, count: int) -> Floats:
        """When the next ``count`` pages arrive if nothing changes."""
        return np.arange(count, dtype=np.float64) * self.pace_us + self.event_us

    def next_pages(self, count: int) -> range:
        """The moving page and those after it, ``count`` in all."""
        return range(self._page, self._page + count)

    def can_coast(self, count: int) -> bool:
        pages = self._pages
        if self.is_out:
            return pages.used[self.tier] + count <= pages.caps[self.tier]
        following = self._page + 1
        if pages.locked[following : following + count].any():
            return False
        return pages.copies[self.tier].count(VALID, following, following + count) == count

    def coast(self, count: int) -> None:
        """``count`` pages arrive, and the one after them is moving."""
        first, last = self._page, self._page + count
        begin = self.event_us + (count - 1) * self.pace_us
        head = self.entries[0]
        if head.log is not None:
            note(head.log, head.move, first, first + 1, self.began, self.event_us)
            if count > 1:
                note(head.log, head.move, first + 1, last, self.event_us, begin)
        self._land(first, last)
        if self.is_out:
            self._pages.take_slots(self.tier, count)
        self._page = last
        self._since, self._left, self.began = begin, 1.0, begin
        self.event_us = begin + self.pace_us
