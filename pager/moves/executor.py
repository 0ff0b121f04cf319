"""Carries out planned moves beside the training, one channel for each tier and direction.

Note: who may wait for whom
---------------------------
The training thread queues moves when an access has ended, and waits in ``serve`` when an access
needs pages that are still on their way. It waits only while some channel can go on; if none can (a
head waits for frames that nobody will give back, because the iteration is not the planned one) the
access is served by a fault instead. A fault may evict and move anything, so it begins with
``quiet``: channels finish the transfer that they are at and start no other until it has ended. So a
plan can be wrong in any way and costs only time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from ..disk.watch import Patience
from ..errors import PagerError
from ..memory.space import PageRun
from ..plan.access_log import Names
from ..plan.guide import ANYWHERE, Action
from .channel import Channel, Job
from .migration import Migration
from .residency import Residency
from .transfers import Transfers
from .windows import find_window

_WATCHDOG_SECONDS = 60.0
_LANES = 3
TIERS = ("host", "disk")


class Executor:
    """All methods but ``stop`` are called with the pager's lock held.

    ``late``: runs that an access had to wait for; ``faults``: accesses that the plan did not serve.
    """

    def __init__(
        self,
        lock: threading.RLock,
        residency: Residency,
        migration: Migration,
        transfers: Transfers,
        names: Names,
    ) -> None:
        self.lock = lock
        self.watch = migration.watch
        self.transfers = transfers
        self.paused = 0  # by so many, each in :meth:`quiet`
        self.closing = False
        self.error: BaseException | None = None
        self.late = self.faults = 0
        self._residency = residency
        self._migration = migration
        self._names = names
        self._changed = threading.Condition(lock)  # for the training thread
        self._waiting = 0  # so many threads
        lanes = _LANES if residency.backend.host_addressable else 1  # one staging buffer
        self._outs = {tier: Channel(self, tier, is_out=True, lanes=lanes) for tier in TIERS}
        self._ins = {tier: Channel(self, tier, is_out=False, lanes=lanes) for tier in TIERS}
        self.channels = (*self._outs.values(), *self._ins.values())
        self.births: dict[int, int] = {}  # key → frame, of the plan that is followed

    # -- queueing --------------------------------------------------------------------------------
    def issue(self, actions: Iterable[Action], newborn: Sequence[PageRun]) -> None:
        """Queue moves. Those of runs that are gone, and of pages that a run does not have, are left
        out."""
        if self.closing or self.error is not None:
            return
        for action in actions:
            run = self._names.run_of(action.key, newborn)
            if run is None or action.first + action.pages > run.count:
                continue
            if action.what == "drop":
                self._drop(run, action)
            elif action.what == "out":
                run.leaving += 1
                self._outs[action.tier].add(Job(action, run))
            else:
                run.coming += 1
                self._ins[action.tier].add(Job(action, run))

    def _drop(self, run: PageRun, action: Action) -> None:
        """Copies below are given up where the page is on the device."""
        table = self._residency.table
        first = run.first + action.first
        pages = np.arange(first, first + action.pages, dtype=np.int32)
        if not run.moving:
            self._migration.drop_copies(pages[table.frame[pages] >= 0], action.tier)

    def clear(self) -> None:
        """Forget what is queued. Transfers under way end by themselves."""
        for channel in self.channels:
            for job in channel.jobs:
                if channel.is_out:
                    job.run.leaving -= 1
                else:
                    job.run.coming -= 1
            channel.jobs.clear()

    @property
    def idle(self) -> bool:
        """Nothing is queued or moving."""
        return not any(channel.jobs or channel.busy for channel in self.channels)

    # -- the training thread ---------------------------------------------------------------------
    def serve(self, runs: Sequence[PageRun]) -> bool:
        """Wait until ``runs`` are on the device, and pin them. ``False``, and nothing pinned, if
        that cannot be expected of the plan."""
        for run in runs:
            run.pins += 1
        served = False
        try:
            for run in runs:
                if run.base < 0 and not self._serve(run):
                    return False
                self._residency.touch(run)
            served = True
        finally:
            if not served:
                for run in runs:
                    run.pins -= 1
        return True

    def _serve(self, run: PageRun) -> bool:
        waited = kicked = False
        while run.base < 0:
            if self._residency.is_blank(run):
                if self._place(run):
                    return True
            elif not (run.moving or run.coming):
                return False
            elif not waited:
                waited = True
                self.late += 1
            if not self.wait() and not self._promote(run):
                if kicked:
                    return False
                kicked = True
                self.kick()  # what was in the way then may move now
        return True

    def _place(self, run: PageRun) -> bool:
        """Frames for a run that is born, if enough are free."""
        residency = self._residency
        if residency.place_at(run, self.births.get(run.key, ANYWHERE)):
            return True
        found = find_window(residency, run)
        return found is not None and residency.place_at(run, found)

    def _promote(self, run: PageRun) -> bool:
        """Let ``run`` overtake jobs that cannot go on; ``False`` if that cannot help."""
        helps = False
        for channel in self._ins.values():
            mine = [job for job in channel.jobs if job.run is run]
            if mine and channel.jobs[0].run is not run:
                others = [job for job in channel.jobs if job.run is not run]
                channel.jobs.clear()
                channel.jobs.extend((*mine, *others))
                channel.kick()
                helps = True
        return helps

    def wait(self) -> bool:
        """Until something has moved; ``False`` if nothing will. Raises ``HungDisk`` if a call of
        the disk does not return."""
        if not any(channel.can_progress() for channel in self.channels):
            return False
        self._waiting += 1
        deadline = time.monotonic() + _WATCHDOG_SECONDS
        patience = Patience(self.watch)
        try:
            while not self._changed.wait(patience.tick_seconds):
                if not any(channel.can_progress() for channel in self.channels):
                    break
                patience.ticked()
                if self.watch.calls:  # a slow disk; a hung one has its own time-out
                    deadline = time.monotonic() + _WATCHDOG_SECONDS
                if time.monotonic() > deadline:
                    raise PagerError(
                        f"no page moved for {_WATCHDOG_SECONDS:g} s: {self.describe()}"
                    )
        finally:
            self._waiting -= 1
        return True

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Inside, no planned move is under way and none begins."""
        self.paused += 1
        try:
            while any(channel.busy for channel in self.channels):
                self.wait()
            yield
        finally:
            self.paused -= 1
            if not self.paused:
                self.kick()

    def drain(self) -> None:
        """Wait until everything queued has been done, or cannot be; what is left is forgotten."""
        self.kick()
        while not self.idle and self.wait():
            pass
        self.clear()
        while any(channel.busy for channel in self.channels):
            self.wait()
        self._residency.take_back()

    # -- the channels' side ----------------------------------------------------------------------
    def moved(self, channel: Channel) -> None:
        """A transfer has ended: others may be able to go on."""
        self.kick(besides=channel)
        channel.blocked = False
        if self._waiting:
            self._changed.notify_all()

    def nothing_to_wait_for(self) -> None:
        """A channel cannot go on; nor may the training thread, if it was the last."""
        if self._waiting:
            self._changed.notify_all()

    def let_go(self) -> None:
        """Runs are not in use any more, so they may make way for those that wait for a window."""
        free = self._residency.pool.free_count
        for channel in self._ins.values():
            if channel.blocked and channel.jobs and time.perf_counter() >= channel.retry_at:
                job = channel.jobs[0]
                if free >= job.action.pages - job.done:
                    channel.kick()

    def kick(self, besides: Channel | None = None) -> None:
        """Frames, slots or runs may have become free."""
        for channel in self.channels:
            if channel is not besides and channel.jobs:
                channel.kick()

    def failed(self, error: BaseException) -> None:
        """A transfer failed, or could not be prepared. Its pages are where they were; no plan is
        followed any more, and faults will meet the same error, if it lasts. The training thread
        tells the user of the first one (``Follower.warn``)."""
        self.error = self.error or error
        self.clear()

    # -- looking, ending -------------------------------------------------------------------------
    def describe(self) -> str:
        """What every channel is at, for the watchdog."""
        parts = []
        for channel in self.channels:
            if channel.jobs or channel.busy:
                state = "moving" if channel.busy else "blocked" if channel.blocked else "queued"
                head = channel.jobs[0].action if channel.jobs else None
                parts.append(f"{channel.name} {state}, {len(channel.jobs)} queued, head {head}")
        return "; ".join(parts) or "all channels are empty"

    def stop(self) -> None:
        """End all threads. Called without the lock; nothing may be queued afterwards."""
        with self.lock:
            self.closing = True
            self.clear()
        for channel in self.channels:
            channel.join()
