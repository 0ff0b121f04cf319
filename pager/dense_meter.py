"""How many bytes PyTorch's CPU allocator has given out: now, and at the peak.

The peak comes from the allocator events of PyTorch's profiler, because ops allocate inside (a
``logsumexp`` over 67 MB takes another 67 MB that no dispatch mode sees). Where a profiler is
already running the peak is sampled from the C library's own count instead.
"""

import ctypes
import time
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Timeline = tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]


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
    """Whether autograd is running: its nodes carry the profiler's state with them, so it must not
    be switched there."""
    return torch._C._current_graph_task_id() != -1


class DenseMeter:
    """Dense bytes on the CPU, on top of those alive at ``start``."""

    def __init__(self) -> None:
        self._start = mapped_bytes()
        self._sampled = 0
        self._profiling = False
        self._started = 0.0
        # Of the last measurement: times (``time.perf_counter``) and the dense bytes from then on.
        self.timeline: Timeline = (np.empty(0), np.empty(0, np.int64))

    def sample(self) -> None:
        """Look at the C heap, for when the profiler is not to be had."""
        self._sampled = max(self._sampled, mapped_bytes() - self._start)

    def start(self) -> None:
        if self._profiling and in_backward():
            return
        self._start = mapped_bytes()
        self._sampled = 0
        self.timeline = np.empty(0), np.empty(0, np.int64)
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
            self._started = time.perf_counter()
            # Memory events only: records of the ops themselves would take some 10 KB an op.
            torch.autograd._enable_record_function(False)  # type: ignore[attr-defined]
            self._profiling = True
        except RuntimeError:  # the user profiles this iteration: sample instead
            self._profiling = False

    def stop(self) -> int:
        if not self._profiling or in_backward():
            return self._sampled
        self._profiling = False
        torch.autograd._enable_record_function(True)  # type: ignore[attr-defined]
        times, dense = [], []
        for thread in torch.autograd._disable_profiler_legacy():  # type: ignore[attr-defined]
            current = 0
            for event in thread:
                if str(event.kind()) == "memory_alloc":
                    current += event.cpu_memory_usage()
                    times.append(self._started + thread[0].cpu_elapsed_us(event) / 1e6)
                    dense.append(current)
        self.timeline = np.array(times), np.array(dense, np.int64)
        return max(dense, default=0)
