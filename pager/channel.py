"""A channel: one thread that carries out planned moves of one tier in one direction, in order."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from .guide import Action
from .space import PageRun

if TYPE_CHECKING:
    from .executor import Executor
    from .transfers import Transfer


class Job:
    """An :class:`Action` on a live run, and how many of its pages are done with."""

    __slots__ = ("action", "done", "run")

    def __init__(self, action: Action, run: PageRun) -> None:
        self.action = action
        self.run = run
        self.done = 0


class Channel:
    """First in, first out. The thread holds the pager's lock except while bytes move.

    ``busy``: bytes are moving. ``blocked``: the head cannot start until something changes.
    """

    def __init__(self, executor: Executor, tier: str, *, is_out: bool) -> None:
        self.tier = tier
        self.is_out = is_out
        self.jobs: deque[Job] = deque()
        self.busy = False
        self.blocked = False
        self._executor = executor
        self._wake = threading.Condition(executor.lock)
        self._thread: threading.Thread | None = None

    @property
    def name(self) -> str:
        """As the planner calls it."""
        return f"{self.tier}-{'out' if self.is_out else 'in'}"

    def add(self, job: Job) -> None:
        """Queue a job; the caller holds the lock."""
        self.jobs.append(job)
        if self._thread is None:
            name = f"tensorpager-{self.name}"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()
        if len(self.jobs) == 1:
            self.kick()

    def kick(self) -> None:
        """Something changed that the head may be waiting for."""
        self.blocked = False
        if self._thread is not None and not self.busy:
            self._wake.notify()

    def can_progress(self) -> bool:
        return self.busy or (bool(self.jobs) and not self.blocked)

    def join(self) -> None:
        """Wait, without the lock, for the thread to end; ``executor.closing`` must be set."""
        if self._thread is not None:
            with self._executor.lock:
                self._wake.notify()
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        executor = self._executor
        with executor.lock:
            while not executor.closing:
                transfer = None
                if self.jobs and not executor.paused:
                    transfer = self._prepare()
                    self.blocked = transfer is None and bool(self.jobs)
                if transfer is None:
                    executor.nothing_to_wait_for()
                    self._wake.wait()
                    continue
                self.busy = True
                self._move(transfer)
                self.busy = False
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
