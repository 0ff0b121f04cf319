"""A few threads for the disk's I/O, which never keep the interpreter from ending.

``ThreadPoolExecutor`` waits at exit for whatever its threads are at. A thread in a read that a
broken drive or a lost network mount never answers would hold the process for ever; what it is at is
worth nothing by then, because the file has no name.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any


class IoThreads:
    """Calls, first in, first out, on at most ``count`` daemon threads, started when needed."""

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
