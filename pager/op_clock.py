"""How long ops take without the time that they wait for pages.

An op is taken to last until the next one begins, so that all durations together are the iteration.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from ..planner.trace import Floats
    from .runtime import Pager


class WallClock:
    """The CPU: ops are over when they return, and ``Pager.stall_us`` counts what they waited."""

    now = staticmethod(time.perf_counter)

    def __init__(self, pager: Pager) -> None:
        self._pager = pager

    @contextmanager
    def running(self, op: Callable[[], int]) -> Iterator[None]:
        """``op()``: number of the op that is running."""
        yield

    def finish(self) -> None:
        """The last ``now`` has been taken."""

    def durations(self, marks: Sequence[Any], stalls: Floats) -> Floats:
        """µs from each mark to the next one, [marks − 1], less the growth of ``stalls`` [marks]."""
        moving = (np.array(marks) - marks[0]) * 1e6 - stalls
        return np.diff(np.maximum.accumulate(moving))


class DeviceClock:
    """An accelerator: events in the compute stream, read when all is over. What that stream waits
    for pages lies between a pair of events around each ``use_frames`` and ``reuse_frames`` of the
    backend."""

    def __init__(self, pager: Pager) -> None:
        self._pager = pager
        self._pool: list[torch.Event] = []
        self._used: list[torch.Event] = []
        self._waits: list[tuple[int, torch.Event, torch.Event]] = []

    def now(self) -> torch.Event:
        device = self._pager.device
        event = self._pool.pop() if self._pool else torch.Event(device, enable_timing=True)
        event.record(torch.accelerator.current_stream(device))
        self._used.append(event)
        return event

    @contextmanager
    def running(self, op: Callable[[], int]) -> Iterator[None]:
        """``op()``: number of the op that is running."""
        backend: Any = self._pager.backend
        self._pool += self._used  # of the recording before
        self._used, self._waits = [], []
        with ExitStack() as stack:
            for name in ("use_frames", "reuse_frames"):
                setattr(backend, name, self._timed(getattr(backend, name), op))
                stack.callback(delattr, backend, name)
            yield

    def _timed(self, wait: Callable[[], None], op: Callable[[], int]) -> Callable[[], None]:
        def timed() -> None:
            before = self.now()
            wait()
            self._waits.append((op(), before, self.now()))

        return timed

    def finish(self) -> None:
        """The last ``now`` has been taken: wait until the device gets there."""
        torch.accelerator.synchronize(self._pager.device)

    def durations(self, marks: Sequence[torch.Event], stalls: Floats) -> Floats:
        """µs from each mark to the next one, [marks − 1], less the waits in between."""
        took: Floats = np.array([a.elapsed_time(b) * 1e3 for a, b in pairwise(marks)])
        for op, before, after in self._waits:
            took[max(op, 0)] -= before.elapsed_time(after) * 1e3
        longest: Floats = np.maximum(took, 0.0)
        return longest


OpClock = WallClock | DeviceClock


def clock_of(pager: Pager) -> OpClock:
    return WallClock(pager) if pager.backend.host_addressable else DeviceClock(pager)
