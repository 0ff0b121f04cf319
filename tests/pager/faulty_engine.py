"""An engine of the disk tier with faults: below the retries and the checksums, above the file."""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

import tensorpager as tp
from tensorpager.pager.disk.engine import Engine
from tensorpager.pager.disk.file import aligned_bytes
from tensorpager.pager.disk.watch import WatchedEngine


class FaultyEngine:
    """Around ``inner``. ``happened``: how often each fault struck, by name."""

    def __init__(self, inner: Engine, seed: int = 0) -> None:
        self.name, self.direct, self.takes_device = inner.name, inner.direct, inner.takes_device
        self.happened: Counter[str] = Counter()
        self.delay_seconds = 0.0
        self.chances: dict[tuple[str, int], float] = {}
        self.damage: list[str] = []  # of the next writes: flip, torn, lost
        self.astray_bytes = 0  # where reads go instead
        self.flipped_reads = 0  # of the next ones, a bit is flipped on the way
        self._inner = inner
        self._rules: list[list[Any]] = []
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._open = {verb: threading.Event() for verb in ("write", "read")}
        for gate in self._open.values():
            gate.set()

    # -- what is to happen -----------------------------------------------------------------------
    def fail(self, verb: str, code: int, times: float = float("inf")) -> None:
        """The next ``times`` calls of ``verb`` fail with ``code``."""
        self._rules.append([verb, code, times])

    def heal(self) -> None:
        """No fault any more; what hangs goes on."""
        self._rules.clear()
        self.chances.clear()
        self.delay_seconds = 0.0
        for gate in self._open.values():
            gate.set()

    def hang(self, verb: str) -> None:
        """Calls of ``verb`` do not return until ``heal``."""
        self._open[verb].clear()

    # -- an engine -------------------------------------------------------------------------------
    def write(self, buffers: Sequence[Any], offset: int) -> None:
        self._before("write")
        damage = self.damage.pop(0) if self.damage else None
        if damage is None:
            self._inner.write(buffers, offset)
            return
        self.happened[damage] += 1
        if damage == "lost":
            return
        whole = aligned_bytes(sum(buffer.nbytes for buffer in buffers))
        np.concatenate(buffers, out=whole)
        if damage == "flip":
            whole[len(whole) // 3] ^= 16
        else:
            assert damage == "torn"
            whole = whole[: len(whole) // 8192 * 4096]
        self._inner.write([whole], offset)

    def read(self, buffers: Sequence[Any], offset: int) -> None:
        self._before("read")
        self._inner.read(buffers, offset + self.astray_bytes)
        if self.flipped_reads:
            self.flipped_reads -= 1
            buffers[0][77] ^= 1

    def close(self) -> None:
        self._inner.close()

    def _before(self, verb: str) -> None:
        if self.delay_seconds:
            time.sleep(self.delay_seconds)
        self._open[verb].wait()
        with self._lock:
            code = self._error_of(verb)
            if code is not None:
                self.happened[os.strerror(code)] += 1
        if code is not None:
            raise OSError(code, os.strerror(code))

    def _error_of(self, verb: str) -> int | None:
        for rule in self._rules:
            if rule[0] == verb and rule[2] > 0:
                rule[2] -= 1
                return int(rule[1])
        for (where, code), chance in self.chances.items():
            if where == verb and self._random.random() < chance:
                return code
        return None


def break_disk(pager: tp.Pager, seed: int = 0) -> FaultyEngine:
    """Puts a :class:`FaultyEngine` below the retries of ``pager``'s disk tier."""
    assert pager.core.disk is not None
    watched = pager.core.disk.engine
    assert isinstance(watched, WatchedEngine)
    watched.inner = FaultyEngine(watched.inner, seed)
    return watched.inner
