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

if TYPE_CHECKING:
    from ...planner.trace import Floats
    from ..core import Core


class WallClock:
    """The CPU: ops are over when they return, and ``Core.stall_us`` counts what they waited."""

    now = staticmethod(time.perf_counter)

    def __init__(self, pager: Core) -> None:
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

    def __init__(self, pager: Core) -> None:
        self._backend: Any = pager.backend
        self.now: Callable[[], Any] = pager.backend.stamp
        self._waits: list[tuple[int, Any, Any]] = []

    @contextmanager
    def running(self, op: Callable[[], int]) -> Iterator[None]:
        """``op()``: number of the op that is running."""
        backend, self._waits = self._backend, []
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
        """The last ``now`` has been taken."""

    def durations(self, marks: Sequence[Any], stalls: Floats) -> Floats:
        """µs from each mark to the next one, [marks − 1], less the waits in between."""
        elapsed = self._backend.elapsed
        took: Floats = np.array([elapsed(a, b) * 1e6 for a, b in pairwise(marks)])
        for op, before, after in self._waits:
            took[max(op, 0)] -= elapsed(before, after) * 1e6
        longest: Floats = np.maximum(took, 0.0)
        return longest


OpClock = WallClock | DeviceClock


def clock_of(pager: Core) -> OpClock:
    return WallClock(pager) if pager.backend.stamp() is None else DeviceClock(pager)
