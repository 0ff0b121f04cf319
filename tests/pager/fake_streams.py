"""Streams without a GPU: the accelerator's own order of work, on plain memory.

What ops do happens at once, as on a CPU. A kernel that was *deferred* runs as late as its stream's
order allows: when another stream that has to wait for it copies something, or when the CPU waits
for it. So a copy that should have waited, and does not, comes first, and the kernel sees its bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from tensorpager.pager import core
from tensorpager.pager.devices.accelerator import Accelerator
from tensorpager.pager.devices.cpu import Cpu
from tensorpager.pager.devices.device import HostMemory


class Stream:
    """``seen``: for each stream, how much of its work comes before what is queued here next."""

    device, device_index = None, 0

    def __init__(self, streams: Streams) -> None:
        self.seen: dict[Stream, int] = {self: 0}
        self.streams = streams

    def wait_stream(self, other: Stream) -> None:
        self._wait_for(other.seen)

    def wait_event(self, event: Event) -> None:
        self._wait_for(event.seen)

    def _wait_for(self, seen: dict[Stream, int]) -> None:
        if not self.streams.forgetful:
            for stream, count in seen.items():
                self.seen[stream] = max(self.seen.get(stream, 0), count)

    def synchronize(self) -> None:
        self.streams.run_before(self)


class Event:
    def __init__(self) -> None:
        self.seen: dict[Stream, int] = {}

    def record(self, stream: Stream) -> None:
        self.seen, self._streams = dict(stream.seen), stream.streams

    def synchronize(self) -> None:
        self._streams.run_before(self)


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

    def set_current(self, stream: Stream) -> None:
        """What this thread queues from now on goes to ``stream``."""
        self._here.stream = stream

    def defer(self, kernel: Callable[[], None]) -> None:
        """Queue it on *compute*."""
        with self._lock:
            assert self.current() is self.compute
            self.compute.seen[self.compute] += 1
            self.pending.append((self.compute.seen[self.compute], kernel))

    def run_before(self, when: Stream | Event) -> None:
        """What a stream has to wait for, or comes before an event."""
        with self._lock:
            reach = when.seen.get(self.compute, 0)
            while self.pending and self.pending[0][0] <= reach:
                self.pending.pop(0)[1]()


class FakeKit:
    """Memory of the CPU, as a kit whose border moves."""

    name, granularity, counted_bytes = "fake", 1, 0
    can_unmap = knows_dense = True
    caps_dense = takes_drives = batches_copies = False

    def __init__(self, streams: Streams, cpu: Cpu) -> None:
        self._streams, self._cpu = streams, cpu
        self.arena, self.address = cpu.arena, cpu.address
        self.reserved_bytes = cpu.reserved_bytes
        self.commit, self.remake, self.fill = cpu.commit, cpu.remake, cpu.fill
        self.register_host = self.unregister_host = cpu.register_host
        self.limit_dense, self.close = cpu.limit_dense, cpu.close

    def host_memory(self, nbytes: int) -> list[HostMemory]:
        def give_back(of_cpu: HostMemory) -> None:
            assert not self._streams.pending, "a kernel has yet to read memory that is given back"
            of_cpu.give_back()

        pieces = self._cpu.host_memory(nbytes)
        return [HostMemory(piece.bytes, partial(give_back, piece)) for piece in pieces]

    @staticmethod
    def lacking(device: torch.device) -> list[str]:
        return []

    def batch(self, copies: Any) -> Any:
        raise NotImplementedError

    def copy_batch(self, batch: Any, stream: Any) -> None:
        raise NotImplementedError


class FakeAccelerator(Accelerator):
    """The accelerator's copies and marks, on a CPU's memory."""

    def __init__(
        self,
        streams: Streams,
        device: torch.device,
        reserved_bytes: int,
        committed_bytes: int,
        kit: Callable[[Streams, Cpu], Any] = FakeKit,
    ) -> None:
        cpu = Cpu(reserved_bytes, committed_bytes)
        super().__init__(cpu.device, kit(streams, cpu))
        self._streams = streams
        for name in (
            *("limit_dense", "cap_dense", "raise_cap", "count_anew"),
            *("dense_now", "dense_peak", "refusal", "discard"),
            *("meter_start", "meter_sample", "meter_stop", "meter_peak"),
            *("meter_level", "meter_timeline", "meter_alive", "meter_forget", "dense_of"),
        ):
            setattr(self, name, getattr(cpu, name))

    def copy(self, copies: Any, lane: str, after: Any, *, to_device: bool) -> Any:
        return super().copy(self._when_due(copies), lane, after, to_device=to_device)

    def _when_due(self, copies: Any) -> Any:
        """Asked for on the stream that copies, after its waits."""
        for copy in copies:
            self._streams.run_before(self._streams.current())
            yield copy


def event(device: torch.device, enable_timing: bool = False) -> Event:
    if enable_timing:
        raise NotImplementedError("these streams have no clock")
    return Event()


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    """Pagers for the CPU are made with a :class:`FakeAccelerator`."""
    streams = Streams()
    monkeypatch.setattr(torch.accelerator, "current_stream", streams.current)
    monkeypatch.setattr(torch._C, "_accelerator_getStream", streams.current)
    monkeypatch.setattr(torch.accelerator, "set_stream", streams.set_current)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    monkeypatch.setattr(torch, "Stream", lambda *_: Stream(streams))
    monkeypatch.setattr(torch, "Event", event)
    monkeypatch.setattr(core, "make_device", lambda *given: FakeAccelerator(streams, *given))
    return streams
