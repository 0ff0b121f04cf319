"""The validator's channels: four queues on a link with two directions.

Time is an integer count of ticks of 2⁻⁴⁰ µs, so that a hundred thousand additions lose nothing and
two events that fall on one instant are seen to. Rates are bytes per µs.

A queue holds jobs (the pages of one move that must be transferred) and moves one page at a time.
Its head may wait for its latency, for a frame, for a slot or for a copy; meanwhile the queue is not
busy. What is left of the link for the host queue changes when the disk queue gets busy or idle, in
the middle of a page too.
"""

from __future__ import annotations

import math
from collections import deque

TICKS_PER_US = 1 << 40
INSTANT = TICKS_PER_US // 10**6  # events this close are at one instant


def ticks(time_us: float) -> int:
    return round(time_us * TICKS_PER_US)


class Job:
    """Pages that one move still has to transfer, first to last, between the device and ``tier``."""

    def __init__(self, move: int, pages: list[int]) -> None:
        self.move = move  # index in the plan
        self.pages = deque(pages)


class Queue:
    """First in, first out; ``tier`` is the lower end, ``action`` "out" or "in"."""

    def __init__(self, tier: int, action: str, latency_us: float, page_size: int) -> None:
        self.tier = tier
        self.action = action
        self.jobs: deque[Job] = deque()
        self.head_ready = 0  # tick when the head job's latency is over
        self.page: int | None = None  # the page that is moving
        self.arrival: int | None = None  # tick, unless none is moving or its rate is 0
        self.turned = False  # busy or idle, since rates were set
        self.moved = 0  # pages in this iteration
        self._latency = ticks(latency_us)
        self._page_size = page_size
        self._left_bytes = 0.0
        self._rate = 0.0
        self._since = 0

    def add(self, job: Job, now: int) -> None:
        assert job.pages
        self.jobs.append(job)
        if len(self.jobs) == 1:
            self.head_ready = now + self._latency

    def candidate(self, now: int) -> int | None:
        """The page whose transfer is next, if nothing moves and no latency is in the way."""
        if self.page is None and self.jobs and self.head_ready <= now + INSTANT:
            return self.jobs[0].pages[0]
        return None

    def begin(self, now: int) -> None:
        """The candidate starts to move; ``set_rate`` follows before time goes on."""
        assert self.page is None
        self.page, self.turned = self.jobs[0].pages[0], True
        self._left_bytes, self._rate, self._since = float(self._page_size), 0.0, now

    def set_rate(self, rate: float, now: int) -> None:
        """From ``now`` on the page moves at ``rate`` bytes per µs."""
        assert self.page is not None
        if rate == self._rate:
            return
        elapsed_us = (now - self._since) / TICKS_PER_US
        moved_bytes = self._rate * elapsed_us if elapsed_us else 0.0
        self._left_bytes = max(0.0, self._left_bytes - moved_bytes)
        self._rate, self._since = rate, now
        self.arrival = now + ticks(self._left_bytes / rate) if rate > 0 else None

    def finish(self, now: int) -> int:
        """The moving page has arrived; the next job's latency begins if it was the job's last."""
        assert self.page is not None
        page, self.page, self.arrival, self.turned = self.page, None, None, True
        self.moved += 1
        assert self.jobs[0].pages.popleft() == page
        if not self.jobs[0].pages:
            self._next_head(now)
        return page

    def forget(self, begin: int, end: int, now: int) -> None:
        """Pages [begin, end) died: none of them is transferred any more."""
        if self.page is not None and begin <= self.page < end:
            self.page, self.arrival, self.turned = None, None, True
        head = self.jobs[0] if self.jobs else None
        for job in self.jobs:
            job.pages = deque(page for page in job.pages if not begin <= page < end)
        self.jobs = deque(job for job in self.jobs if job.pages)
        if self.jobs and self.jobs[0] is not head:
            self.head_ready = now + self._latency

    def next_event(self, now: int) -> int | None:
        """When the moving page arrives or the head's latency is over; None: neither is ahead."""
        if self.page is not None:
            return self.arrival
        if self.jobs and self.head_ready > now + INSTANT:
            return self.head_ready
        return None

    def _next_head(self, now: int) -> None:
        self.jobs.popleft()
        self.head_ready = now + self._latency


class Direction:
    """One direction of the link, ``link`` bytes per µs, shared by a disk and a host queue."""

    def __init__(self, disk: Queue, host: Queue, link: float, disk_rate: float) -> None:
        self.disk, self.host = disk, host
        self._link = link
        self._disk_share = min(disk_rate, link)
        self._host_left = link - self._disk_share if math.isfinite(link) else math.inf

    def share(self, now: int) -> None:
        """Sets both queues' rates as of ``now``, if one of them got busy or idle."""
        if not (self.disk.turned or self.host.turned):
            return
        self.disk.turned = self.host.turned = False
        if self.disk.page is not None:
            self.disk.set_rate(self._disk_share, now)
        if self.host.page is not None:
            self.host.set_rate(self._link if self.disk.page is None else self._host_left, now)
