"""How the threads of an op wait for each other where threads that move pages need cores too.

By spinning, 3 ms and more, and so between ops. On idle cores that is right, also beside moves:
who sleeps has to be woken for each op. Where others use the cores it is not: part of an op stands
still with its thread while the rest spin. GNU's OpenMP hardly spins where it manages more
threads than there are cores. So as long as threads of this process wait for cores, one of ours is
the master of a team of more, which has nothing to do. How many threads an op has, and so its bits,
stays as it is.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_GNU = "libgomp.so.1"
_FEW_CORES = 4  # on more it takes longer to wake all threads of an op than what ours take from one
# Of an iteration one thread was ready and had no core: cores are busy above, and idle below. With
# moves on two cores that were ours it was 0.13 to 0.23, on busy ones 0.58 to 0.71.
_BUSY, _IDLE = 0.35, 0.2
_MOST_CALM = 256
_TASKS = Path("/proc/self/task")


class OpenMPWaits:
    """Of the process, by what the iterations of one pager find. ``moves``: whether pages move."""

    def __init__(self, moves: Callable[[], bool]) -> None:
        self._moves = moves
        self._calm, self._needed = 0, 1  # idle iterations one after another; until threads spin
        self._master: threading.Thread | None = None
        self._end = threading.Event()  # of that
        self._openmp = _gnu_openmp()
        self._known = _delays() if self._openmp is not None else {}
        self._since = time.perf_counter_ns()

    @property
    def asleep(self) -> bool:
        """Whether threads of ops sleep as they wait."""
        return self._master is not None

    def iteration_ended(self) -> None:
        if self._openmp is None:
            return
        if not self._moves():
            self.spin()
            return
        delays, now = _delays(), time.perf_counter_ns()
        longest = max((ns - self._known.get(task, ns) for task, ns in delays.items()), default=0)
        self.judge(longest / (now - self._since))
        self._known, self._since = delays, now

    def judge(self, share: float) -> None:
        """In the latest iteration a thread waited for a core for such a share of the time. Each
        time that spinning turns out wrong, it takes twice as long until it is tried again."""
        if not self.asleep:
            if share > _BUSY:
                self._sleep()
            return
        self._calm = self._calm + 1 if share < _IDLE else 0
        if self._calm >= self._needed:
            self._needed = min(2 * self._needed, _MOST_CALM)
            self.spin()

    def _sleep(self) -> None:
        self._calm, begun = 0, threading.Event()
        self._end.clear()
        self._master = threading.Thread(
            target=self._manage, args=(begun,), name="tensorpager-openmp", daemon=True
        )
        self._master.start()
        begun.wait()

    def _manage(self, begun: threading.Event) -> None:
        assert self._openmp is not None
        # What the team runs: a function of C that takes what it is given and changes nothing.
        nothing = ctypes.cast(ctypes.CDLL(None).labs, ctypes.c_void_p)
        parallel = self._openmp.GOMP_parallel
        parallel.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint
        parallel.restype = None
        parallel(nothing, None, len(os.sched_getaffinity(0)) + 1, 0)
        begun.set()
        self._end.wait()  # the team ends with its master

    def spin(self) -> None:
        if self._master is not None:
            self._end.set()
            self._master.join()
            self._master = None


def _gnu_openmp() -> ctypes.CDLL | None:
    """What PyTorch has loaded; ``None`` on many cores, and where it is another one."""
    if len(os.sched_getaffinity(0)) <= _FEW_CORES:
        with suppress(OSError):
            return ctypes.CDLL(_GNU, os.RTLD_NOLOAD | os.RTLD_NOW)
    return None


def _delays() -> dict[str, int]:
    """Nanoseconds that each thread of this process was ready to run and had no core."""
    found = {}
    for task in os.listdir(_TASKS):
        with suppress(OSError, IndexError):  # it has ended; a kernel that does not say
            found[task] = int((_TASKS / task / "schedstat").read_text().split()[1])
    return found
