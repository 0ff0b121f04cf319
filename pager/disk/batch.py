"""How a batch of page runs becomes tasks for threads, and one future."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Slots = npt.NDArray[np.int64]
Checksums = npt.NDArray[np.uint64]

SlotRun = tuple[int, Any]
"""First slot, and a C-contiguous uint8 array of k · page_size bytes for it and the k-1 next; or, if
the engine takes device memory, a 1-D uint8 tensor."""

TASK_BYTES = 2 << 20
"""What one thread moves at a time, KvikIO's threads too: large enough for full disk speed, small
enough to share out. Device memory is mapped in pieces of as much, and no transfer of it crosses
their borders. Measured, both ways at once: 2 MiB reach 97 % of the best block's rate, 1 MiB 87 %,
64 KiB 49 % (scripts/results/io-settings-2026-11-22.json)."""

THREADS = 4
"""How many threads read, and how many write. Measured likewise, on a virtual disk and two cores: 1
thread reaches 86 % of the rate of 8, 2 reach 91 %, 4 98 %."""


@dataclass
class Task:
    """Buffers for consecutive slots, moved by one thread. ``checksums``: of each page,
    uint64."""

    first_slot: int
    page_count: int = 0
    buffers: list[Any] = field(default_factory=list)
    checksums: Checksums = field(default_factory=lambda: np.empty(0, np.uint64))

    @property
    def end_slot(self) -> int:
        return self.first_slot + self.page_count


class Batch:
    """Tasks whose end is one future. It keeps the buffers alive, and fails if any task did."""

    def __init__(self, tasks: list[Task], on_success: Callable[[], None]) -> None:
        self.future: Future[None] = Future()
        self.future.set_running_or_notify_cancel()  # a batch cannot be called back
        self._on_success = on_success
        self._running = len(tasks)
        self._error: Exception | None = None
        self._lock = threading.Lock()
        if not tasks:
            self.future.set_result(None)

    def task_ended(self, error: Exception | None = None) -> None:
        with self._lock:
            self._running -= 1
            self._error = self._error or error
            if self._running:
                return
        if self._error is not None:
            self.future.set_exception(self._error)
        else:
            self._on_success()
            self.future.set_result(None)


def split(runs: Sequence[SlotRun], page_size: int) -> list[Task]:
    """Tasks of at most TASK_BYTES (or one page) by slot; small runs side by side share one."""
    limit = max(1, TASK_BYTES // page_size)
    tasks: list[Task] = []
    for slot, array in sorted(runs, key=lambda run: run[0]):
        rest = _flat(array, slot)
        pages, tail = divmod(rest.nbytes, page_size)
        assert tail == 0, f"{rest.nbytes} bytes for slot {slot}"
        while pages:
            if not tasks or tasks[-1].end_slot != slot or tasks[-1].page_count == limit:
                tasks.append(Task(slot))
            taken = min(pages, limit - tasks[-1].page_count)
            tasks[-1].buffers.append(rest[: taken * page_size])
            tasks[-1].page_count += taken
            rest = rest[taken * page_size :]
            slot += taken
            pages -= taken
    return tasks


def _flat(array: Any, slot: int) -> Any:
    if isinstance(array, np.ndarray):
        assert array.dtype == np.uint8, f"{array.dtype} array for slot {slot}"
        assert array.flags.c_contiguous, f"scattered array for slot {slot}"
        return array.reshape(-1)
    return array.view(-1)  # raises for a scattered one


def share_out(tasks: list[Task], checksums: Checksums) -> None:
    """Gives each task its part of one array, as a view."""
    start = 0
    for task in tasks:
        task.checksums = checksums[start : start + task.page_count]
        start += task.page_count


class IoThreads:
    """Calls, first in, first out, on at most ``count`` daemon threads, started when needed.

    ``ThreadPoolExecutor`` waits at exit for whatever its threads are at. A thread in a read that a
    broken drive or a lost network mount never answers would hold the process for ever; what it is
    at is worth nothing by then, because the file has no name.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._name = name
        self._calls: deque[tuple[Callable[..., Any], tuple[Any, ...]]] = deque()
        self._wake = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._closed = False

    def submit(self, call: Callable[..., Any], *arguments: Any) -> None:
        """``call(*arguments)`` soon; it must not raise. ``RuntimeError`` after ``shutdown``, or if
        there is no thread to be had."""
        with self._wake:
            if self._closed:
                raise RuntimeError("the threads have ended")
            self._calls.append((call, arguments))
            if self._idle >= len(self._calls) or len(self._threads) == self._count:
                self._wake.notify()
                return
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError:
                if not self._threads:
                    self._calls.pop()
                    raise
            else:
                self._threads.append(thread)

    def shutdown(self) -> None:
        """Wait until everything submitted has ended, and the threads."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._calls:
                    if self._closed:
                        return
                    self._idle += 1
                    self._wake.wait()
                    self._idle -= 1
                call, arguments = self._calls.popleft()
            call(*arguments)
            del call, arguments  # buffers live no longer than they must
