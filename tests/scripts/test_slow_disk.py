"""A disk as slow as one wants it: each way has its rate, and a failure is not held up."""

import errno
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from lm.slow_disk import SlowDisk

BLOCK = np.zeros(1000, np.uint8)


class Memory:
    """An engine that does nothing."""

    name, direct, takes_device = "memory", False, False

    def __init__(self) -> None:
        self.calls: list[str] = []

    def write(self, buffers: Sequence[Any], offset: int) -> None:
        self.calls.append("write")
        if offset < 0:
            raise OSError(errno.EIO, "Input/output error")

    def read(self, buffers: Sequence[Any], offset: int) -> None:
        self.calls.append("read")

    def close(self) -> None:
        self.calls.append("close")


def test_each_way_takes_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = 100.0, []

    def sleep(seconds: float) -> None:
        nonlocal now
        slept.append(seconds)
        now += seconds

    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(time, "sleep", sleep)
    disk = SlowDisk(Memory(), 1000)
    disk.write([BLOCK, BLOCK], 0)
    assert slept == [2.0]
    now -= 1.0  # as if it had taken a second of them itself
    disk.write([BLOCK], 0)
    assert slept == [2.0, 2.0]  # its slot comes after the one before
    disk.read([BLOCK], 0)
    assert slept == [2.0, 2.0, 1.0]
    now += 50.0
    disk.read([BLOCK], 0)
    assert slept[3:] == [1.0]  # being idle was for nothing
    assert disk.name == "memory with 1000 bytes/s"


def test_a_failure_is_not_held_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("waited"))
    with pytest.raises(OSError, match="Input/output error"):
        SlowDisk(Memory(), 1e-9).write([BLOCK], -1)
