"""A disk that is no faster than one wants it to be, for figures that do not depend on the drive."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from tensorpager.pager.disk.engine import Engine
from tensorpager.pager.disk.tier import DiskTier


class SlowDisk:
    """An engine of the disk tier around another: ``bytes_per_s`` for reads, and for writes.

    Each transfer has a slot of time, one slot after another in its direction. It starts at once and
    returns at the end of its slot. Idle time earns no credit. Measured rates are remembered under
    the engine's name, so those of the disk itself stay apart.
    """

    def __init__(self, inner: Engine, bytes_per_s: float) -> None:
        self.name = f"{inner.name} with {bytes_per_s:g} bytes/s"
        self.direct, self.takes_device = inner.direct, inner.takes_device
        self.inner = inner
        self.bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at = {"read": 0.0, "write": 0.0}

    def write(self, buffers: Sequence[Any], offset: int) -> None:
        end = self._slot("write", buffers)
        self.inner.write(buffers, offset)
        time.sleep(max(0.0, end - time.monotonic()))

    def read(self, buffers: Sequence[Any], offset: int) -> None:
        end = self._slot("read", buffers)
        self.inner.read(buffers, offset)
        time.sleep(max(0.0, end - time.monotonic()))

    def close(self) -> None:
        self.inner.close()

    def _slot(self, way: str, buffers: Sequence[Any]) -> float:
        seconds = sum(buffer.nbytes for buffer in buffers) / self.bytes_per_s
        with self._lock:
            self._free_at[way] = max(time.monotonic(), self._free_at[way]) + seconds
            return self._free_at[way]


def slow_down(disk: DiskTier, bytes_per_s: float) -> None:
    """From now on."""
    disk.engine = SlowDisk(disk.engine, bytes_per_s)
