"""How many bytes PyTorch's CPU allocator has given out: now, and at the peak.

The peak comes from the allocator events of PyTorch's profiler, because ops allocate inside (a
``logsumexp`` over 67 MB takes another 67 MB that no dispatch mode sees). Where a profiler is
already running the peak is sampled from the C library's own count instead.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch


class Timeline(NamedTuple):
    """Of dense memory: ``when`` blocks were made and freed (``time.perf_counter``), the ``nbytes``
    that there were from then on, and the ``birth`` of the block, a number that no other one has."""

    when: npt.NDArray[np.float64]
    nbytes: npt.NDArray[np.int64]
    birth: npt.NDArray[np.int64]


NO_TIMELINE = Timeline(np.empty(0), np.empty(0, np.int64), np.empty(0, np.int64))


class _Mallinfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


_mallinfo2: Any = getattr(ctypes.CDLL(None), "mallinfo2", None)
if _mallinfo2 is not None:
    _mallinfo2.restype = _Mallinfo2


def mapped_bytes() -> int:
    """Bytes of large live blocks of the C heap, those that it maps one by one (``heap.py`` sets
    from which size on); 0 where the C library cannot tell. About 1 µs.

    Python's own objects are not among them, tensors of any weight are.
    """
    return int(_mallinfo2().hblkhd) if _mallinfo2 is not None else 0


def allocated_bytes() -> int:
    """All live bytes of the C heap, small blocks included; 0 where it cannot tell. Walks the free
    lists: tens of µs."""
    if _mallinfo2 is None:
        return 0
    heap = _mallinfo2()
    return int(heap.uordblks + heap.hblkhd)


def in_backward() -> bool:
    """Whether autograd is running on this thread. It puts back what the profiler was before when it
    is done, so the profiler must not be switched there."""
    return torch._C._current_graph_task_id() != -1


class _Here(threading.local):
    """Of one thread: the measurement for which the profiler is on here. PyTorch keeps a profiler
    with the thread that has switched it on, and only there can it be switched off."""

    measurement: _Measurement | None = None


class _Measurement:
    """``over``: nobody asks for it any more, so its thread may switch the profiler off."""

    def __init__(self) -> None:
        self.over = False
        self.started = time.perf_counter()


_here = _Here()
_births = itertools.count(1)


class DenseMeter:
    """Dense bytes on the CPU, on top of those alive at ``start``, of the thread that calls it. A
    measurement that another thread stops has no timeline; the profiler stays on until its own
    thread measures again."""

    def __init__(self) -> None:
        self._start = mapped_bytes()
        self._sampled = 0
        self._before = 0  # bytes that were alive at ``start``, and count
        self.alive = 0  # bytes at ``stop``, of those that were counted
        self._measurement: _Measurement | None = None
        # Of the last measurement. The profiler does not say which block is freed: the one of that
        # size that was made last.
        self.timeline = NO_TIMELINE

    def sample(self) -> None:
        """Look at the C heap, for when the profiler is not to be had."""
        self._sampled = max(self._sampled, mapped_bytes() - self._start)

    def begin(self) -> None:
        """What is alive now will not count in a measurement that goes on."""
        self._start, self.alive = mapped_bytes(), 0

    def start(self, *, go_on: bool = False) -> None:
        here = _here.measurement
        if here is not None:
            if here is self._measurement and in_backward():
                return
            if (here is self._measurement or here.over) and not in_backward():
                _switch_off()
        self._let_go()
        if not go_on:
            self.begin()
        self._before, self._sampled = self.alive, 0
        self.timeline = NO_TIMELINE
        self._measurement = None if in_backward() else _switch_on()

    def stop(self) -> int:
        measurement = self._measurement
        if measurement is None or measurement is not _here.measurement or in_backward():
            if measurement is not None and measurement is not _here.measurement:
                self._let_go()
            self.alive = max(0, mapped_bytes() - self._start)
            return self._sampled
        self._measurement = None
        times, dense, births = [], [], []
        living: defaultdict[int, list[int]] = defaultdict(list)
        for thread in _switch_off():
            current = self._before
            for event in thread:
                if str(event.kind()) == "memory_alloc":
                    nbytes = event.cpu_memory_usage()
                    current += nbytes
                    times.append(measurement.started + thread[0].cpu_elapsed_us(event) / 1e6)
                    dense.append(current)
                    alike = living[abs(nbytes)]
                    if nbytes > 0:
                        alike.append(next(_births))
                    births.append(alike[-1] if nbytes > 0 else alike.pop() if alike else 0)
        self.timeline = Timeline(
            np.array(times), np.array(dense, np.int64), np.array(births, np.int64)
        )
        self.alive = dense[-1] if dense else self._before
        return max(dense, default=self._before)

    def _let_go(self) -> None:
        if self._measurement is not None:
            self._measurement.over = True
            self._measurement = None


def _switch_on() -> _Measurement | None:
    """The profiler of this thread; ``None`` where it is on already, the user's perhaps."""
    config = torch.autograd.ProfilerConfig(  # type: ignore[attr-defined]
        torch.autograd.ProfilerState.CPU,  # type: ignore[attr-defined]
        False,  # shapes
        True,  # memory
        False,  # stacks
        False,  # flops
        False,  # modules
        torch._C._profiler._ExperimentalConfig(),
    )
    try:
        torch.autograd._enable_profiler_legacy(config)  # type: ignore[attr-defined]
    except RuntimeError:
        return None
    _here.measurement = _Measurement()
    # Memory events only: records of the ops themselves would take some 10 KB an op.
    torch.autograd._enable_record_function(False)  # type: ignore[attr-defined]
    return _here.measurement


def _switch_off() -> Any:
    """The events of this thread's measurement, by threads."""
    _here.measurement = None
    torch.autograd._enable_record_function(True)  # type: ignore[attr-defined]
    return torch.autograd._disable_profiler_legacy()  # type: ignore[attr-defined]
