"""A disk, and a link to host memory, that are no faster than one wants them to be: for figures that
do not depend on the machine."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tensorpager.pager.core import Core
from tensorpager.pager.disk.engine import Engine
from tensorpager.pager.disk.tier import DiskTier
from tensorpager.pager.machine.calibration.measure import Calibration
from tensorpager.pager.plan.follower import Follower

WAKING_SECONDS = 0.02


class Pace:
    """``bytes_per_s`` in each of two directions. Each transfer has a slot of time, one slot after
    another in its direction. It starts at once and returns at the end of its slot. Idle time earns
    no credit, but for the moment in which a busy machine wakes up a thread that has more to do."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at: dict[Any, float] = {}

    def slot(self, way: Any, nbytes: int) -> float:
        """When it ends."""
        with self._lock:
            now, free = time.monotonic(), self._free_at.get(way, 0.0)
            begin = now if now > free + WAKING_SECONDS else free
            self._free_at[way] = begin + nbytes / self.bytes_per_s
            return self._free_at[way]

    @staticmethod
    def wait_for(end: float) -> None:
        time.sleep(max(0.0, end - time.monotonic()))


class SlowDisk:
    """An engine of the disk tier around another, at a pace. Measured rates are remembered under the
    engine's name, so those of the disk itself stay apart."""

    def __init__(self, inner: Engine, bytes_per_s: float) -> None:
        self.name = f"{inner.name} with {bytes_per_s:g} bytes/s"
        self.direct, self.takes_device = inner.direct, inner.takes_device
        self.inner = inner
        self.bytes_per_s = bytes_per_s
        self._pace = Pace(bytes_per_s)

    def write(self, buffers: Sequence[Any], offset: int) -> None:
        end = self._slot("write", buffers)
        self.inner.write(buffers, offset)
        Pace.wait_for(end)

    def read(self, buffers: Sequence[Any], offset: int) -> None:
        end = self._slot("read", buffers)
        self.inner.read(buffers, offset)
        Pace.wait_for(end)

    def close(self) -> None:
        self.inner.close()

    def _slot(self, way: str, buffers: Sequence[Any]) -> float:
        return self._pace.slot(way, sum(buffer.nbytes for buffer in buffers))


def slow_down(disk: DiskTier, bytes_per_s: float) -> None:
    """From now on."""
    disk.engine = SlowDisk(disk.engine, bytes_per_s)


def slow_link(core: Core, bytes_per_s: float) -> None:
    """Copies between a pager's device, a CPU, and host memory take so long from now on, and its
    planner knows. Most of it is waiting, which is no work for the thread that runs ops."""
    device, follower = core.backend, core.follower
    copy, pace = device.copy, Pace(bytes_per_s)

    def paced(copies: Any, lane: str, after: Any, *, to_device: bool) -> Any:
        end = pace.slot(to_device, sum(len(each.host) for each in copies))
        mark = copy(copies, lane, after, to_device=to_device)
        Pace.wait_for(end)
        return mark

    device.copy = paced  # type: ignore[method-assign]
    device.copies_by_core = False
    if follower is not None:
        follower.calibrate = _Calibrated(follower, bytes_per_s)  # type: ignore[method-assign]


class _Calibrated:
    """``follower.calibrate`` where copies over the link take that long: plans, and the size of
    transfers, follow from it."""

    def __init__(self, follower: Follower, bytes_per_s: float) -> None:
        self._follower, self._measure = follower, follower.calibrate
        self._rates = dict.fromkeys(("d2h_bytes_per_s", "h2d_bytes_per_s"), bytes_per_s)

    def __call__(self, *, fresh: bool = False) -> Calibration:
        found = replace(self._measure(fresh=fresh), **self._rates)
        self._follower._calibration = found
        self._follower._size_batches(found)
        return found
