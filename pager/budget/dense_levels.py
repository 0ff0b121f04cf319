"""How much dense memory there is beside the arena while each op of an iteration runs.

On the CPU from our own allocator, ops' temporaries included. Where it could not be built, from the
allocator events of PyTorch's profiler; where one is running already (the pager's own meter, or one
of the user's) from a look at the C heap as each op begins. On an accelerator from the allocator's
count, likewise.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from ..devices.dense_allocator import Account, AllocatorMeter, DenseAllocator, loaded
from ..devices.dense_meter import DenseMeter, mapped_bytes

if TYPE_CHECKING:
    from ...planner.trace import Floats, Ints
    from ..devices.dense_meter import Timeline
    from ..devices.device import Device

_SAMPLE_US = 1.5  # that a look may cost an op on average
_TRIALS = 5


def no_sample() -> int:
    return 0


class AllocatorLevels:
    """On the CPU, by an account of our allocator. ``sample()`` need not look."""

    source = "allocator"

    def __init__(self, allocator: DenseAllocator) -> None:
        self._meter = AllocatorMeter(Account(allocator))
        self.sample = no_sample

    @contextmanager
    def measuring(self) -> Iterator[None]:
        self._meter.start()
        try:
            yield
        finally:
            self._meter.stop()
            self._meter.account.close()

    def levels(self, began: Floats, samples: Ints) -> Ints:
        """As :class:`HeapLevels`."""
        return _most_while(self._meter.timeline, began)


class HeapLevels:
    """On the CPU without our allocator. ``sample()`` is called as each op begins; what it returns
    goes to ``levels``."""

    def __init__(self, backend: Device) -> None:
        self._backend = backend
        self._meter = DenseMeter()
        self._start = 0
        self._until = 0.0  # when the profiler stopped (``time.perf_counter``)
        self.sample: Callable[[], int] = no_sample
        self.source = ""

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure inside the block. If the pager begins to meter meanwhile it gets the profiler,
        because its budget depends on it."""
        backend = self._backend
        theirs = backend.meter_start
        self._start = mapped_bytes()
        self._meter.start()
        profiling = self._meter.profiling
        self.source = "allocator events" if profiling else "C heap"
        self.sample = no_sample if profiling else self._look
        self._until = math.inf if profiling else 0.0

        def give_way(*, go_on: bool = False) -> None:
            if self._until == math.inf:
                self._stop()
                self.sample, self.source = self._look, "allocator events, then C heap"
            theirs(go_on=go_on)

        backend.meter_start = give_way  # type: ignore[method-assign]
        try:
            yield
        finally:
            del backend.meter_start
            self._stop()

    def _stop(self) -> None:
        if self._until == math.inf:
            self._until = time.perf_counter()
            self._meter.stop()

    def _look(self) -> int:
        return mapped_bytes() - self._start

    def levels(self, began: Floats, samples: Ints) -> Ints:
        """Most dense bytes while each op ran, [ops], on top of those at the start (so they may be
        negative). ``began``: when each op began, ``time.perf_counter``."""
        found = _most_while(self._meter.timeline, began)
        return np.where(began < self._until, found, samples)


def _most_while(timeline: Timeline, began: Floats) -> Ints:
    """The largest level from each of the moments ``began`` to the next one."""
    times, dense = timeline
    order = np.argsort(times, kind="stable")
    level = np.concatenate([[0], dense[order]]).astype(np.int64)  # after so many events
    at = np.searchsorted(times[order], began, "right")
    inside = np.maximum.reduceat(level, at)
    after = level[np.append(at[1:], len(level) - 1)]
    most: Ints = np.maximum(inside, after)
    return most


class DeviceLevels:
    """On an accelerator. Reading the allocator's statistics takes Python some microseconds, so only
    every few ops do."""

    source = "device allocator"

    def __init__(self, backend: Device) -> None:
        self._allocated = backend.dense_now
        self._every = 1
        self._ops = 0
        self._last = 0

    @contextmanager
    def measuring(self) -> Iterator[None]:
        start = time.perf_counter()
        for _ in range(_TRIALS):
            self._last = self._allocated()
        cost_us = (time.perf_counter() - start) / _TRIALS * 1e6
        self._every = max(1, math.ceil(cost_us / _SAMPLE_US))
        yield

    def sample(self) -> int:
        self._ops += 1
        if self._ops % self._every == 0:
            self._last = self._allocated()
        return self._last

    def levels(self, began: Floats, samples: Ints) -> Ints:
        """As :class:`HeapLevels`, of all bytes that the allocator has out. What an op leaves behind
        is seen as a later one begins."""
        return np.maximum(samples, np.append(samples[1:], samples[-1:]))


Levels = AllocatorLevels | HeapLevels | DeviceLevels


def levels_of(backend: Device) -> Levels:
    if not backend.host_addressable:
        return DeviceLevels(backend)
    allocator = loaded()
    return HeapLevels(backend) if allocator is None else AllocatorLevels(allocator)
