"""A channel: one thread that carries out planned moves of one tier in one direction, in order."""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

from ..disk.watch import Patience
from ..errors import HungDisk
from ..memory.space import PageRun
from ..plan.guide import Action

if TYPE_CHECKING:
    from .executor import Executor
    from .transfers import Transfer

_PATIENCE = 10  # times what a vain attempt took, until another one that may be vain as well


class Job:
    """An :class:`Action` on a live run, and how many of its pages are done with."""

    __slots__ = ("action", "done", "run")

    def __init__(self, action: Action, run: PageRun) -> None:
        self.action = action
        self.run = run
        self.done = 0


class Channel:
    """First in, first out. Its threads hold the pager's lock except while bytes move.

    There are ``lanes`` of them, so that the next transfer is under way when one ends: in between
    lies Python, which has to wait for the GIL. ``busy``: transfers under way. ``blocked``: the head
    cannot start until something changes. ``retry_at``: not worth the time to try again before, if
    what changed is little (``time.perf_counter``).
    """

    def __init__(self, executor: Executor, tier: str, *, is_out: bool, lanes: int) -> None:
        self.tier = tier
        self.is_out = is_out
        self.jobs: deque[Job] = deque()
        self.busy = 0
        self.blocked = False
        self.retry_at = 0.0
        self._lanes = lanes
        self._executor = executor
        self._wake = threading.Condition(executor.lock)
        self.threads: list[threading.Thread] = []
        # While any transfer was under way: what was moved, and how long that took.
        self.moved_pages = 0
        self.moving_seconds = 0.0
        self._since = 0.0

    @property
    def name(self) -> str:
        """As the planner calls it."""
        return f"{self.tier}-{'out' if self.is_out else 'in'}"

    def add(self, job: Job) -> None:
        """Queue a job; the caller holds the lock."""
        self.jobs.append(job)
        if not self.threads:
            for _ in range(self._lanes):
                name = f"tensorpager-{self.name}"
                self.threads.append(threading.Thread(target=self._run, name=name, daemon=True))
                self.threads[-1].start()
        if len(self.jobs) == 1:
            self.kick()

    def kick(self) -> None:
        """Something changed that the head may be waiting for."""
        self.blocked = False
        if self.busy < self._lanes:
            self._wake.notify()

    def can_progress(self) -> bool:
        return bool(self.busy) or (bool(self.jobs) and not self.blocked)

    def join(self) -> None:
        """Wait, without the lock, for the threads to end; ``executor.closing`` must be set. One
        that waits for a disk that does not answer is left behind."""
        with self._executor.lock:
            self._wake.notify_all()
        patience = Patience(self._executor.watch)
        for thread in self.threads:
            with suppress(HungDisk):  # it ends when the disk answers
                while thread.is_alive():
                    thread.join(patience.tick_seconds)
                    patience.ticked()
        self.threads.clear()

    def _run(self) -> None:
        executor = self._executor
        with executor.lock:
            while not executor.closing:
                transfer = None
                if self.jobs and not executor.paused:
                    began = time.perf_counter()
                    transfer = self._prepare()
                    self.blocked = transfer is None and bool(self.jobs)
                    ended = time.perf_counter()
                    self.retry_at = ended + _PATIENCE * (ended - began)
                if transfer is None:
                    executor.nothing_to_wait_for()
                    self._wake.wait()
                    continue
                if not self.busy:
                    self._since = time.perf_counter()
                self.busy += 1
                if self.jobs and self.busy < self._lanes:
                    self._wake.notify()
                self._move(transfer)
                self.busy -= 1
                self.moved_pages += len(transfer.pages)
                if not self.busy:
                    self.moving_seconds += time.perf_counter() - self._since
                executor.moved(self)

    def _prepare(self) -> Transfer | None:
        try:
            return self._executor.transfers.prepare(self)
        except BaseException as error:  # a thread that died would be waited for
            self._executor.failed(error)
            return None

    def _move(self, transfer: Transfer) -> None:
        """Without the lock while bytes move. A failure ends the plan, not the training."""
        lock = self._executor.lock
        error: BaseException | None = None
        lock.release()
        try:
            transfer.run()
        except BaseException as caught:
            error = caught
        finally:
            lock.acquire()
        try:
            self._executor.transfers.finish(self, transfer, error)
        except BaseException as caught:
            error = error or caught
        if error is not None:
            self._executor.failed(error)
