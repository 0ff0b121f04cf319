"""How much dense memory there is beside the arena while each op of an iteration runs.

On the CPU from our own allocator, ops' temporaries included. Elsewhere, and where it could not be
built, from a look at the device's count as ops begin: what an op makes and gives back is not seen.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from ..devices.dense_allocator import Account, AllocatorMeter, DenseAllocator, loaded
from ..devices.device import Device

if TYPE_CHECKING:
    from ...planner.trace import Floats, Ints

_SAMPLE_US = 1.5  # that a look may cost an op on average
_TRIALS = 5


class AllocatorLevels:
    """On the CPU, by an account of our allocator. ``sample()`` need not look."""

    source = "allocator"

    def __init__(self, allocator: DenseAllocator) -> None:
        self._meter = AllocatorMeter(Account(allocator))

    def sample(self) -> int:
        return 0

    @contextmanager
    def measuring(self) -> Iterator[None]:
        self._meter.account.reset()
        self._meter.start()
        try:
            yield
        finally:
            self._meter.stop()
            self._meter.account.close()

    def levels(self, began: Floats, samples: Ints) -> Ints:
        """Most dense bytes while each op ran, [ops], on top of those at the start (so they may be
        negative). ``began``: when each op began, ``time.perf_counter``; ``samples``: what
        ``sample()`` gave then."""
        times, dense = self._meter.timeline
        order = np.argsort(times, kind="stable")
        level = np.concatenate([[0], dense[order]]).astype(np.int64)  # after so many events
        at = np.searchsorted(times[order], began, "right")
        inside = np.maximum.reduceat(level, at)
        after = level[np.append(at[1:], len(level) - 1)]
        most: Ints = np.maximum(inside, after)
        return most


class SampledLevels:
    """By the device's count. Asking for it takes some microseconds, so only every few ops do."""

    source = "samples"

    def __init__(self, backend: Device) -> None:
        self._allocated = backend.dense_now
        self._in_ram = backend.host_addressable
        self._before = self._last = 0
        self._every = 1
        self._ops = 0

    @contextmanager
    def measuring(self) -> Iterator[None]:
        start = time.perf_counter()
        for _ in range(_TRIALS):
            self._last = self._allocated()
        cost_us = (time.perf_counter() - start) / _TRIALS * 1e6
        self._every = max(1, math.ceil(cost_us / _SAMPLE_US))
        # In RAM there is more than tensors; on an accelerator all that was there counts.
        self._before = self._last if self._in_ram else 0
        yield

    def sample(self) -> int:
        self._ops += 1
        if self._ops % self._every == 0:
            self._last = self._allocated()
        return self._last - self._before

    def levels(self, began: Floats, samples: Ints) -> Ints:
        """As :class:`AllocatorLevels`. What an op leaves is seen as a later one begins."""
        return np.maximum(samples, np.append(samples[1:], samples[-1:]))


Levels = AllocatorLevels | SampledLevels


def levels_of(backend: Device) -> Levels:
    allocator = loaded() if backend.host_addressable else None
    return SampledLevels(backend) if allocator is None else AllocatorLevels(allocator)
