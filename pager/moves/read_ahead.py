"""Brings the pages of the next slab in while an op uses those of this one.

::

    op            | slab 0 |      | slab 1        | slab 2 ...
    in-channels            | slab 1 | slab 2 |      | slab 3 ...
    out-channels                    | 0, if written    | 1 ...

The jobs are put before what a plan has queued on the same channels, because they are needed next.
Read-ahead is advice, as a plan is: what did not come in time, for whatever reason, is brought in by
a fault when the slab is pinned, and the jobs that are left are forgotten then. It takes frames
that are free or hold the least recently used pages, and does not keep its pages from leaving again,
so it can make nothing fail.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from ..memory.frame_pool import merge
from ..memory.page_table import BLANK, DIRTY, Int32
from ..plan.access_log import Names
from ..plan.guide import Action
from .channel import Channel, Job
from .executor import Executor
from .parts import Part, held_pages
from .transfers import PAGEWISE, Transfers

if TYPE_CHECKING:
    from ..core import Core
    from ..memory.space import PageRun

_BATCH_BYTES = 4 << 20  # moved at once where rates are not known


@contextmanager
def reading_ahead(pager: Core) -> Iterator[ReadAhead]:
    """A :class:`ReadAhead` on the channels of planned moves, or on its own where there are none."""
    if pager.follower is not None:
        ahead = ReadAhead(pager, pager.follower.executor)
        try:
            yield ahead
        finally:
            ahead.forget()
        return
    executor = _own_executor(pager)
    ahead = ReadAhead(pager, executor)
    with pager.lock:
        pager.residency.streams.append(executor)
    try:
        yield ahead
    finally:
        with pager.lock:
            _end(pager, executor)
            ahead.forget()
            pager.residency.streams.remove(executor)


def _own_executor(pager: Core) -> Executor:
    names = Names(pager.space)
    transfers = Transfers(pager.table, pager.migration, pager.residency, pager.backend, names)
    executor = Executor(pager.lock, pager.residency, pager.migration, transfers, names)
    pages = max(1, _BATCH_BYTES // pager.page_size)
    transfers.batch_pages = {channel.name: pages for channel in executor.channels}
    return executor


def _end(pager: Core, executor: Executor) -> None:
    """No transfer is under way afterwards. The threads are not waited for: they end when they get
    the lock, which this thread may hold (a generator can be closed anywhere)."""
    with pager.lock:
        executor.closing = True
        with executor.quiet():
            executor.clear()
        for channel in executor.channels:
            for _ in channel.threads:
                channel.kick()


class ReadAhead:
    """Of one stream. ``ask`` for the pages of the next slab, then ``take`` them."""

    def __init__(self, pager: Core, executor: Executor) -> None:
        self._pager = pager
        self._executor = executor
        self._jobs: list[tuple[Channel, Job]] = []
        self._awaited: Int32 | None = None
        self._asked = np.empty(0, np.int32)  # pages to come

    def ask(self, parts: Sequence[Part]) -> None:
        """Queue what brings ``parts`` in. Not in a metered iteration: what an op needs at least is
        found there."""
        pager, executor = self._pager, self._executor
        with pager.lock:
            if pager.budget.metering or executor.closing or executor.error is not None:
                return
            table, pages = pager.table, _distinct(parts)
            self._awaited = pages
            pager.residency.parts.awaited.append(pages)
            absent = pages[table.frame[pages] < 0]
            self._asked = absent[(table.flags[absent] & BLANK) == 0]
            self._make_room(len(absent))
            on_host = table.host[self._asked] >= 0
            self._queue("in", "host", self._asked[on_host])
            self._queue("in", "disk", self._asked[~on_host])

    def take(self) -> None:
        """Wait for what was asked for as long as it is coming, and forget about it."""
        with self._pager.lock:
            while self._is_coming() and self._executor.wait():
                pass
            there = self._pager.table.frame[self._asked] >= 0
            self._pager.residency.pages_ahead += int(there.sum())
            self.forget()

    def leave(self, parts: Sequence[Part]) -> None:
        """A slab was used and is not pinned any more. While a plan is followed it leaves at once:
        the plan counts on all frames. Otherwise it does when frames are wanted."""
        pager = self._pager
        with pager.lock:
            follower = pager.follower
            if follower is None or follower.guide is None or pager.closed_reason is not None:
                return
            pages = _distinct([Part(run, _only_here(run, pages)) for run, pages in parts])
            pages = pages[pager.table.frame[pages] >= 0]
            if self._awaited is not None:
                pages = np.setdiff1d(pages, self._awaited)
            self._send_away(pages)
            self._jobs = [(channel, job) for channel, job in self._jobs if not channel.is_out]

    def forget(self) -> None:
        """Jobs that are left are not done any more."""
        with self._pager.lock:
            for channel, job in self._jobs:
                if job in channel.jobs:
                    channel.jobs.remove(job)
                    if channel.is_out:
                        job.run.leaving -= 1
                    else:
                        job.run.coming -= 1
                    channel.kick()
            self._jobs.clear()
            self._asked = self._asked[:0]
            if self._awaited is not None:
                awaited = self._pager.residency.parts.awaited
                del awaited[next(i for i, a in enumerate(awaited) if a is self._awaited)]
                self._awaited = None

    def _is_coming(self) -> bool:
        missing = self._asked[self._pager.table.frame[self._asked] < 0]
        if not len(missing):
            return False
        queued = any(job in channel.jobs for channel, job in self._jobs if not channel.is_out)
        return queued or not self._pager.residency.in_flight.isdisjoint(missing.tolist())

    # -- room ------------------------------------------------------------------------------------
    def _make_room(self, frames: int) -> None:
        """So that ``frames`` are free, soon: the least recently used pages leave. Those of a plan
        that is followed stay: it keeps frames free for the stream."""
        follower, residency = self._pager.follower, self._pager.residency
        if follower is not None and follower.guide is not None:
            return
        short = frames - residency.pool.free_count
        if short > 0:
            self._send_away(residency.oldest(short))

    def _send_away(self, pages: Int32) -> None:
        """Clean pages leave at once, the others by the out-channels."""
        pager = self._pager
        pages = pages[~pager.residency.is_moving(pages)]
        dirty = (pager.table.flags[pages] & DIRTY) != 0
        pager.residency.evict_pages(pages[~dirty])
        to_leave = np.sort(pages[dirty])
        room = pager.host.slots.free_count
        self._queue("out", "host", to_leave[:room])
        if pager.disk is not None:
            self._queue("out", "disk", to_leave[room:])
        self._executor.kick()

    def _queue(self, what: str, tier: str, pages: Int32) -> None:
        """Before everything that is queued on this channel."""
        if not len(pages):
            return
        pager = self._pager
        is_out = what == "out"
        channel = next(c for c in self._executor.channels if c.name == f"{tier}-{what}")
        jobs = []
        for owner in dict.fromkeys(pager.table.owner[pages].tolist()):
            run = pager.space.runs[owner]
            mine = pages[pager.table.owner[pages] == owner]
            for first, _, count in merge(mine, mine):
                action = Action(what, tier, run.key, first - run.first, count, PAGEWISE)
                jobs.append(Job(action, run))
        for job in reversed(jobs):
            if is_out:
                job.run.leaving += 1
            else:
                job.run.coming += 1
            channel.add(job)
            channel.jobs.rotate(1)
        channel.kick()
        self._jobs.extend((channel, job) for job in jobs)


def _distinct(parts: Sequence[Part]) -> Int32:
    if not parts:
        return np.empty(0, np.int32)
    return np.unique(np.concatenate([pages for _, pages in parts]))


def _only_here(run: PageRun, pages: Int32) -> Int32:
    """Those that nobody has pinned."""
    return np.empty(0, np.int32) if run.pins else np.setdiff1d(pages, held_pages(run))
