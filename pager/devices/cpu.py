"""The device arena in RAM: the same runtime with no GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

from .dense_allocator import Account, AllocatorMeter, load, loaded
from .dense_meter import NO_TIMELINE, DenseMeter, Timeline, allocated_bytes
from .dense_refusal import Peak
from .device import URGENT, Bytes, Copy, HostMemory, Mark, fill_by_torch
from .heap import ROOMY_BYTES, TIGHT_BYTES, give_back_idle, map_blocks_from
from .memory import Region


def private_memory(nbytes: int) -> HostMemory:
    """A range of its own, of the size of the budget and no larger."""
    region = Region(nbytes, nbytes)
    return HostMemory(region.array(), region.close)


def warm_up() -> None:
    """Take the process's first square root, in one thread.

    torch hands square roots of CPU tensors to MKL's vector mathematics. Where the first one of a
    process was that of a first AdamW step, by two threads, 4 of 100 processes had other last bits
    in it than the same step gives ever after; of 101 that had taken one before, none. (torch 2.13,
    MKL, two cores. What that first call sets up was not found out.)
    """
    torch.ones(64, dtype=torch.float32, device="cpu").sqrt_()


class Cpu:
    """Implements :class:`~.device.Device`; copies are complete when the call returns."""

    host_addressable = can_unmap = knows_dense = copies_by_core = True
    caps_dense = takes_drives = batches_copies = False
    granularity, alignment = 1, 64

    def __init__(self, reserved_bytes: int, committed_bytes: int) -> None:
        self.device = torch.device("cpu")
        self.reserved_bytes = reserved_bytes
        self._region = Region(reserved_bytes, committed_bytes)
        self._bytes = self._region.array()
        self.arena = torch.from_numpy(self._bytes)
        self.address = self._region.address
        allocator = load()
        self._account = Account(allocator) if allocator is not None else None
        self._cap: int | None = None
        self._keep = reserved_bytes - committed_bytes  # that may stay mapped for dense tensors
        self._lent = 0  # of these, to who needs memory for a moment
        self._meter = AllocatorMeter(self._account, places=True) if self._account else DenseMeter()
        if self._account is not None:
            self._account.pause()  # until an iteration begins
        warm_up()

    def commit(self, nbytes: int) -> None:
        self._region.commit(nbytes)

    def discard(self, start: int, nbytes: int) -> None:
        self._region.discard(start, nbytes)

    def remake(self, nbytes: int, *, empty: bool) -> bool:
        raise NotImplementedError("the border moves")

    def fill(self, offset: int, memory: torch.UntypedStorage, start: int, nbytes: int) -> None:
        fill_by_torch(self.arena, offset, memory, start, nbytes)

    def frames_view(self, offset: int, nbytes: int) -> Bytes:
        return self._bytes[offset : offset + nbytes]

    def host_memory(self, nbytes: int) -> list[HostMemory]:
        return [private_memory(nbytes)] if nbytes else []

    def register_host(self, memory: Bytes) -> None:
        pass

    def unregister_host(self, memory: Bytes) -> None:
        pass

    def copy(self, copies: Sequence[Copy], lane: str, after: Mark, *, to_device: bool) -> Mark:
        for offset, host, _ in copies:
            if lane == URGENT:  # ops wait: by all of torch's threads
                frames, bytes_ = self.arena[offset : offset + len(host)], torch.from_numpy(host)
                (frames.copy_(bytes_) if to_device else bytes_.copy_(frames))
            else:  # by this thread alone, without the GIL: ops have the other cores
                frame_bytes = self._bytes[offset : offset + len(host)]
                np.copyto(*((frame_bytes, host) if to_device else (host, frame_bytes)))
        return ()

    def note_compute(self) -> None:
        pass

    def on_compute(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def order_ops(self) -> None:
        pass

    def stamp(self) -> None:
        return None

    def elapsed(self, before: Any, after: Any) -> float:
        raise NotImplementedError("there are no stamps")

    def mark(self) -> Mark:
        return ()

    def reach(self, mark: Mark) -> None:
        pass

    def wait(self, mark: Mark) -> None:
        pass

    def slide(self, source: int, target: int, pages: int, page_size: int) -> None:
        to, from_ = (self.address + frame * page_size for frame in (target, source))
        ctypes.memmove(to, from_, pages * page_size)

    def exchange(self, one: int, other: int, pages: int, page_size: int) -> None:
        here, there = (
            self.frames_view(frame * page_size, pages * page_size).view(np.int64)
            for frame in (one, other)
        )
        for to, of in ((here, there), (there, here), (here, there)):
            np.bitwise_xor(to, of, out=to)

    def limit_dense(self, nbytes: int | None, *, counted: int = 0, roomy: bool = False) -> None:
        if self._account is not None:
            if nbytes is not None:
                self._keep = nbytes
            self.raise_cap(None)
            return
        # There is no cap then: the border is set from what the meter saw. What can be done is to
        # give freed memory back at once.
        map_blocks_from(ROOMY_BYTES if roomy else TIGHT_BYTES)

    def limit_guests(self, nbytes: int | None) -> None:
        if self._account is not None:
            self._account.guests(nbytes)

    def add_guest(self) -> None:
        if self._account is not None:
            self._account.add_guest()

    def cap_dense(self, nbytes: int | None, make_room: Callable[[int], bool] | None = None) -> None:
        if self._account is not None:
            if make_room is None:
                self._account.pause()
            else:
                self._account.resume()
                self._account.ask(make_room)
        elif make_room is not None:
            self.count_anew()
        self.raise_cap(nbytes)

    def raise_cap(self, nbytes: int | None) -> None:
        self._cap = nbytes
        if self._account is not None:
            self._account.limit(nbytes, keep=max(0, self._keep - self._lent))

    @contextmanager
    def lend_idle(self, most: int) -> Iterator[int]:
        if self._account is not None:
            most = max(0, min(most, self._keep - self._account.current))
            self._lent = most + most // 16  # some for the threads that use it
            self.raise_cap(self._cap)
        give_back_idle()
        try:
            yield most
        finally:
            self._lent = 0
            self.raise_cap(self._cap)

    def count_anew(self) -> None:
        if self._account is not None:
            self._account.reset()
        elif isinstance(self._meter, DenseMeter):
            self._meter.begin()

    def dense_now(self) -> int:
        allocator = loaded()
        return allocated_bytes() if allocator is None else allocator.totals().live

    def dense_peak(self) -> int:
        return self._account.peak if self._account is not None else 0

    def look_at_dense(self) -> None:
        pass

    def most_held(self) -> int:
        return 0

    def refusal(self) -> str:
        return self._account.refusal if self._account is not None else ""

    def meter_start(self, *, go_on: bool = False) -> None:
        self._meter.start(go_on=go_on)

    def meter_sample(self) -> None:
        self._meter.sample()

    def meter_stop(self) -> int:
        return self._meter.stop()

    def meter_alive(self) -> int:
        return self._account.current if self._account is not None else self._meter.alive

    def dense_of(self, action: Callable[[], None]) -> int:
        if self._account is not None:
            self._account.restart()
            before = self._account.peak
            action()
            return self._account.peak - before
        before = self._meter.alive
        self._meter.start(go_on=True)
        try:
            action()
        finally:
            peak = self._meter.stop()
        return max(0, peak - before)

    def meter_peak(self) -> Peak | None:
        return self._meter.at_peak if isinstance(self._meter, AllocatorMeter) else None

    def meter_level(self) -> int | None:
        return self._account.peak if self._account is not None else None

    def meter_timeline(self) -> Timeline:
        return self._meter.timeline

    def living(self) -> Timeline:
        return NO_TIMELINE if self._account is None else self._account.living()

    def meter_forget(self) -> None:
        self._meter.timeline = NO_TIMELINE
        if self._account is not None:
            self._account.places = {}

    def birth_at(self, address: int) -> int:
        return 0 if self._account is None else self._account.birth_at(address)

    def close(self) -> None:
        if self._account is not None:
            self._account.close()
        else:
            map_blocks_from(ROOMY_BYTES)
        self.arena = torch.empty(0, dtype=torch.uint8)
        self._region.close()
