"""CUDA's streams without a GPU: the CUDA backend's own order of work, on plain memory.

What ops do happens at once, as on a CPU. A kernel that was *deferred* runs as late as its stream's
order allows: when another stream that has to wait for it copies something, or when the CPU waits
for it. So a copy that should have waited, and does not, comes first, and the kernel sees its bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tensorpager.pager import runtime
from tensorpager.pager.backend import Bytes
from tensorpager.pager.cpu_backend import CpuBackend
from tensorpager.pager.cuda_backend import CudaBackend

from .models import PAGE_BYTES


class Stream:
    """``seen``: for each stream, how much of its work comes before what is queued here next."""

    def __init__(self, streams: Streams) -> None:
        self.seen: dict[Stream, int] = {self: 0}
        self._streams = streams

    def wait_stream(self, other: Stream) -> None:
        self._wait_for(other.seen)

    def wait_event(self, event: Event) -> None:
        self._wait_for(event.seen)

    def _wait_for(self, seen: dict[Stream, int]) -> None:
        if not self._streams.forgetful:
            for stream, count in seen.items():
                self.seen[stream] = max(self.seen.get(stream, 0), count)

    def synchronize(self) -> None:
        self._streams.run_before(self)


class Event:
    def __init__(self) -> None:
        self.seen: dict[Stream, int] = {}

    def record(self, stream: Stream) -> None:
        self.seen = dict(stream.seen)


class Streams:
    """``forgetful``: waits do nothing, to see whether a test would notice."""

    def __init__(self) -> None:
        self.forgetful = False
        self.compute = Stream(self)
        self.pending: list[tuple[int, Callable[[], None]]] = []
        self._lock = threading.RLock()
        self._here = threading.local()

    def current(self, device: Any = None) -> Stream:
        stream: Stream = getattr(self._here, "stream", self.compute)
        return stream

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """What follows is queued on ``stream``."""
        before = self.current()
        self._here.stream = stream
        try:
            yield
        finally:
            self._here.stream = before

    def defer(self, kernel: Callable[[], None]) -> None:
        """Queue it on *compute*."""
        with self._lock:
            assert self.current() is self.compute
            self.compute.seen[self.compute] += 1
            self.pending.append((self.compute.seen[self.compute], kernel))

    def run_before(self, stream: Stream) -> None:
        """What ``stream`` has to wait for."""
        with self._lock:
            reach = stream.seen.get(self.compute, 0)
            while self.pending and self.pending[0][0] <= reach:
                self.pending.pop(0)[1]()


class FakeCudaBackend(CudaBackend):
    """The CUDA backend's copies and marks, on a CPU's memory.

    ``written``: addresses of the host slots that were copied to, by the way that did it.
    """

    def __init__(self, streams: Streams, reserved_bytes: int, committed_bytes: int) -> None:
        self._cpu = CpuBackend(reserved_bytes, committed_bytes)
        self.device, self.arena = self._cpu.device, self._cpu.arena
        self.address, self.granularity = self._cpu.address, 1
        self._streams = streams
        self._out, self._in, self._carry_out, self._carry_in = (Stream(streams) for _ in range(4))  # type: ignore[assignment]
        self._compute = streams.compute  # type: ignore[assignment]
        self.commit = self._cpu.commit  # type: ignore[method-assign]
        for name in (
            *("limit_dense", "cap_dense", "count_anew", "dense_peak", "refusal"),
            *("meter_start", "meter_sample", "meter_stop", "meter_peak"),
            *("meter_level", "meter_timeline"),
        ):
            setattr(self, name, getattr(self._cpu, name))
        self.written: dict[str, set[int]] = {"fault": set(), "planned": set()}

    def register_host(self, memory: Bytes) -> None:
        pass

    def unregister_host(self, memory: Bytes) -> None:
        assert not self._streams.pending, "a kernel has yet to read memory that is given back"

    def copy_out(self, copies: Any) -> None:
        super().copy_out(self._when_due(copies, "fault"))

    def copy_in(self, copies: Any) -> None:
        super().copy_in(self._when_due(copies))

    def carry_out(self, copies: Any, mark: Any) -> None:
        super().carry_out(self._when_due(copies, "planned"), mark)

    def carry_in(self, copies: Any, mark: Any) -> None:
        super().carry_in(self._when_due(copies), mark)

    def _when_due(self, copies: Any, way: str = "") -> Any:
        """Asked for on the stream that copies, after its waits."""
        for copy in copies:
            self._streams.run_before(self._streams.current())
            if way:
                first, nbytes = copy.host.ctypes.data, len(copy.host)
                self.written[way].update(range(first, first + nbytes, PAGE_BYTES))
            yield copy

    def close(self) -> None:
        self._cpu.close()


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    """Pagers for the CPU are made with a :class:`FakeCudaBackend`."""
    streams = Streams()
    monkeypatch.setattr(torch.cuda, "current_stream", streams.current)
    monkeypatch.setattr(torch.cuda, "stream", streams.on)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(
        runtime, "make_backend", lambda device, *given: FakeCudaBackend(streams, *given)
    )
    return streams
