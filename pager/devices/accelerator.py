"""The device arena on any accelerator of PyTorch: the one owner of streams and events.

Written on ``torch.accelerator``, ``torch.Stream`` and ``torch.Event`` alone. How the arena's memory
is had and moved, and how host memory is page-locked, differs from vendor to vendor: a *kit* does
that (``cuda_memory.py``; ``plain_memory.py`` for all others).

A stream is made current with ``set_stream``, never with ``with stream:``. A ``torch.Stream`` keeps
what was current before in itself, so two threads inside one stream's block would leave it with each
other's.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch

from ..errors import PagerError
from .dense_meter import NO_TIMELINE, Timeline
from .dense_refusal import Peak
from .device import LANES, Bytes, Copies, Copy, HostMemory, Mark

_THERE: AbstractContextManager[None] = nullcontext()


class Kit(Protocol):
    """What differs between accelerators. Made of (a device with its index, the bytes that the arena
    may have at most, those that it has at first). The methods are those of ``Device``, without its
    streams: when memory is moved, given back or made anew, nothing on the device uses it any more.
    """

    name: str
    granularity: int
    reserved_bytes: int
    can_unmap: bool
    caps_dense: bool
    knows_dense: bool
    takes_drives: bool
    batches_copies: bool

    @staticmethod
    def lacking(device: torch.device) -> list[str]:
        """What ``device`` has to do without, in words."""

    @property
    def arena(self) -> torch.Tensor: ...

    @property
    def address(self) -> int: ...

    @property
    def counted_bytes(self) -> int:
        """Bytes of the arena that PyTorch's allocator counts among its own."""

    def commit(self, nbytes: int) -> None: ...
    def remake(self, nbytes: int, *, empty: bool) -> bool: ...
    def fill(self, offset: int, memory: torch.UntypedStorage, start: int, nbytes: int) -> None: ...
    def host_memory(self, nbytes: int) -> list[HostMemory]: ...
    def register_host(self, memory: Bytes) -> None: ...
    def unregister_host(self, memory: Bytes) -> None: ...

    def batch(self, copies: Sequence[tuple[int, int, int]]) -> Any:
        """Copies ``(source address, target address, bytes)``, at least one, as :meth:`copy_batch`
        takes them, any number of times."""

    def copy_batch(self, batch: Any, stream: torch.Stream) -> None:
        """Where ``batches_copies``: queue them by one call of the driver, without waiting. Raises
        ``PagerError``."""

    def limit_dense(self, nbytes: int | None) -> None:
        """A cap on all that PyTorch's allocator holds on the device."""

    def close(self) -> None: ...


@contextmanager
def on_stream(stream: torch.Stream) -> Iterator[None]:
    """What the calling thread queues inside goes to ``stream``."""
    before = torch.accelerator.current_stream(stream.device_index)
    device = torch.accelerator.current_device_index()
    torch.accelerator.set_stream(stream)  # and its device
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
        if device != stream.device_index:
            torch.accelerator.set_device_index(device)


class Accelerator:
    """Implements :class:`~.device.Device`; the stream order is that module's note."""

    host_addressable = copies_by_core = False
    alignment = 512

    def __init__(self, device: torch.device, kit: Kit) -> None:
        self.device, self.kit = device, kit
        self.granularity, self.reserved_bytes = kit.granularity, kit.reserved_bytes
        self.can_unmap, self.caps_dense = kit.can_unmap, kit.caps_dense
        self.knows_dense, self.takes_drives = kit.knows_dense, kit.takes_drives
        self.batches_copies = kit.batches_copies
        self.arena, self.address, self.fill = kit.arena, kit.address, kit.fill
        self._copies = {(lane, way): torch.Stream(device) for lane in LANES for way in (0, 1)}
        self._compute = self._here()
        self._others: list[torch.Stream] = []  # that pages were used on before
        self._noting = threading.Lock()
        self._has_clock = self._try_clock()
        self._alive = 0  # dense bytes that are not counted: they were there before
        self._left = 0  # bytes that earlier iterations have made and left, at most
        self._alive_before = 0  # the same, when dense memory was measured last
        self._rests = 0  # of the allocator's segments then: a cap counts them, nobody needs them
        self._counts = kit.knows_dense and not kit.caps_dense  # nothing refuses what is too much
        self._cap: int | None = None
        self._make_room: Callable[[int], bool] = lambda missing: False
        self._metering = False
        self._most = self._most_held = 0  # dense bytes that are counted, without and with the arena

    # -- the border ------------------------------------------------------------------------------
    def commit(self, nbytes: int) -> None:
        if self.can_unmap:
            self._settle()
        self.kit.commit(nbytes)

    def discard(self, start: int, nbytes: int) -> None:
        pass  # it is given back when the arena is made anew

    def remake(self, nbytes: int, *, empty: bool) -> bool:
        self._settle()
        self._note_peak()  # of an arena of this size
        try:
            if not self.kit.remake(nbytes, empty=empty):
                return False
        finally:
            self.arena, self.address = self.kit.arena, self.kit.address
        torch.accelerator.empty_cache()
        self._reset_peak()
        return True

    def _settle(self) -> None:
        """Nothing uses memory that is about to be given back, and PyTorch's cache keeps none that
        is about to be needed."""
        torch.accelerator.synchronize(self.device)
        torch.accelerator.empty_cache()

    def frames_view(self, offset: int, nbytes: int) -> torch.Tensor:
        return self.arena[offset : offset + nbytes]

    # -- page-locked host memory -----------------------------------------------------------------
    def host_memory(self, nbytes: int) -> list[HostMemory]:
        return self.kit.host_memory(nbytes)

    def register_host(self, memory: Bytes) -> None:
        self.kit.register_host(memory)

    def unregister_host(self, memory: Bytes) -> None:
        self.kit.unregister_host(memory)

    # -- streams ---------------------------------------------------------------------------------
    def _here(self) -> torch.Stream:
        return torch._C._accelerator_getStream(self.device.index)  # asked so, it takes a tenth

    def note_compute(self) -> None:
        here = torch._C._accelerator_getStream(self.device.index)
        if here == self._compute:
            return
        with self._noting:
            before, self._compute = self._compute, here
            others = [stream for stream in self._others if stream != here]
            self._others = others if before == here else [*others, before]
            self._after_ops(here)

    def _of_ops(self) -> Iterator[torch.Stream]:
        """All streams that were noted. On one that is not the latest there may be ops that were
        queued after another was noted: a thread may be between noting its own and its op."""
        yield self._compute
        yield from self._others

    def _after_ops(self, stream: torch.Stream) -> None:
        """``stream`` waits for all uses of pages so far."""
        for other in self._of_ops():
            if other != stream:
                stream.wait_stream(other)

    def on_compute(self) -> AbstractContextManager[Any]:
        there = torch._C._accelerator_getStream(self.device.index) == self._compute
        return _THERE if there and not self._others else self._after_all(there)

    @contextmanager
    def _after_all(self, there: bool) -> Iterator[None]:
        with nullcontext() if there else on_stream(self._compute):
            self.order_ops()
            yield

    def order_ops(self) -> None:
        if self._others:
            self._after_ops(self._compute)

    # -- time ------------------------------------------------------------------------------------
    def _try_clock(self) -> bool:
        try:
            before, after = self._stamp(), self._stamp()
            self.elapsed(before, after)
        except (RuntimeError, NotImplementedError):
            return False
        return True

    def _stamp(self) -> torch.Event:
        event = torch.Event(self.device, enable_timing=True)
        event.record(self._here())
        return event

    def stamp(self) -> torch.Event | None:
        return self._stamp() if self._has_clock else None

    def elapsed(self, before: Any, after: Any) -> float:
        after.synchronize()
        return float(before.elapsed_time(after)) / 1e3

    # -- copies ----------------------------------------------------------------------------------
    def copy(self, copies: Sequence[Copy], lane: str, after: Mark, *, to_device: bool) -> Mark:
        stream = self._copies[lane, to_device]
        try:
            for event in after:
                stream.wait_event(event)
            self._queue(stream, copies, to_device=to_device)
            return self._marked(stream)
        except BaseException:
            stream.synchronize()  # frames and slots are given back, and some may be queued
            raise

    def _queue(self, stream: torch.Stream, copies: Sequence[Copy], *, to_device: bool) -> None:
        if self.batches_copies and copies:
            ready = copies.ready if isinstance(copies, Copies) else {}
            batch = ready.get((self.address, to_device))
            if batch is None:
                batch = self.kit.batch(self._ends(copies, to_device=to_device))
                ready[self.address, to_device] = batch
            self.kit.copy_batch(batch, stream)
            return
        with on_stream(stream):
            for offset, host, _ in copies:
                frames, bytes_ = self.arena[offset : offset + len(host)], torch.from_numpy(host)
                if to_device:
                    frames.copy_(bytes_, non_blocking=True)
                else:
                    bytes_.copy_(frames, non_blocking=True)

    def _ends(self, copies: Sequence[Copy], *, to_device: bool) -> list[tuple[int, int, int]]:
        """From which address to which, and how many bytes."""
        found = []
        for offset, host, address in copies:
            frame = self.address + offset
            slot = address or host.__array_interface__["data"][0]
            ends = (slot, frame) if to_device else (frame, slot)
            found.append((*ends, len(host)))
        return found

    def _marked(self, *streams: torch.Stream) -> Mark:
        events = []
        for stream in streams:
            events.append(torch.Event(self.device))
            events[-1].record(stream)
        return tuple(events)

    def mark(self) -> Mark:
        return self._marked(*self._of_ops())

    def reach(self, mark: Mark) -> None:
        for event in mark:
            self._compute.wait_event(event)

    def wait(self, mark: Mark) -> None:
        for event in mark:
            event.synchronize()

    def slide(self, source: int, target: int, pages: int, page_size: int) -> None:
        # Copies that do not overlap themselves, each behind the one before.
        step, nbytes = (source - target) * page_size, pages * page_size
        here = self.arena[source * page_size :][:nbytes].split(step)
        there = self.arena[target * page_size :][:nbytes].split(step)
        for to, of in zip(there, here, strict=True):
            to.copy_(of)

    def exchange(self, one: int, other: int, pages: int, page_size: int) -> None:
        here, there = (
            self.arena[frame * page_size :][: pages * page_size].view(torch.int64)
            for frame in (one, other)
        )
        for to, of in ((here, there), (there, here), (here, there)):
            to.bitwise_xor_(of)

    # -- dense memory ----------------------------------------------------------------------------
    def limit_dense(self, nbytes: int | None, *, counted: int = 0, roomy: bool = False) -> None:
        if nbytes is not None:
            nbytes += max(0, self._alive_before + self._rests - counted)
        self.kit.limit_dense(nbytes)

    def limit_guests(self, nbytes: int | None) -> None:
        pass  # its allocator does not know threads; the cap is one for all of them

    def add_guest(self) -> None:
        pass

    def cap_dense(self, nbytes: int | None, make_room: Callable[[int], bool] | None = None) -> None:
        left = max(0, self.dense_now() - self._alive)
        if make_room is None:
            self._left = left
        else:
            self._make_room = make_room
            left = min(left, self._left)  # by earlier iterations, as far as it can still be there
            self.count_anew()
            self._alive -= left
        self.raise_cap(nbytes)

    def lend_idle(self, most: int) -> AbstractContextManager[int]:
        return nullcontext(most)

    def raise_cap(self, nbytes: int | None) -> None:
        self._cap = nbytes if self._counts else None  # or limit_dense is a cap already

    def look_at_dense(self) -> None:
        if self._cap is None:
            return
        self._note_peak()
        missing = self._most - self._cap
        if missing > 0 and not self._make_room(missing):
            raise torch.OutOfMemoryError(
                f"{self._most} bytes of tensors were in use beside it, {missing} more than there "
                f"is room for ({self.device} has no cap that could refuse them)."
            )

    def count_anew(self) -> None:
        self._alive = self.dense_now()
        self._most = self._most_held = 0
        self._reset_peak()

    def _reset_peak(self) -> None:
        if self._counts:
            torch.accelerator.reset_peak_memory_stats(self.device)

    def _note_peak(self) -> None:
        if self._counts:
            held = self._memory("allocated", "peak") - self._alive
            self._most_held = max(self._most_held, held)
            self._most = max(self._most, held - self.kit.counted_bytes)

    def dense_now(self) -> int:
        return self._memory("allocated", "current") - self.kit.counted_bytes

    def dense_peak(self) -> int:
        self._note_peak()
        return self._most

    def most_held(self) -> int:
        return self._most_held

    def refusal(self) -> str:
        return ""

    def _memory(self, what: str, which: str) -> int:
        if not self.knows_dense:
            return 0
        index: int = self.device.index
        stats = torch._C._accelerator_getDeviceStats(index)
        return int(stats[f"{what}_bytes"]["all"][which])

    def meter_start(self, *, go_on: bool = False) -> None:
        if not self.knows_dense:
            return
        torch.accelerator.empty_cache()  # what is cached now is not what an iteration needs
        self._metering = True
        self._note_peak()
        self._most = 0
        torch.accelerator.reset_peak_memory_stats(self.device)
        if not go_on and self.caps_dense:  # a segment stays whole while any tensor is in it
            self._rests = self._memory("reserved", "current") - self.dense_now()
        self._alive_before = self._alive

    def meter_sample(self) -> None:
        pass  # the allocator keeps its peak

    def meter_stop(self) -> int:
        # A cap counts what the allocator holds, the rest of its segments included. Where there is
        # none it may keep any number of them, and what tensors take is all that can be said.
        self._metering = False
        if self.caps_dense:
            return max(0, self._memory("reserved", "peak") - self._alive - self._rests)
        return self.dense_peak()

    def meter_alive(self) -> int:
        return max(0, self.dense_now() - self._alive)

    def dense_of(self, action: Callable[[], None]) -> int:
        if not self.knows_dense:
            action()
            return 0
        self._note_peak()
        torch.accelerator.reset_peak_memory_stats(self.device)
        before = self._memory("allocated", "current")
        action()
        return max(0, self._memory("allocated", "peak") - before)

    def meter_peak(self) -> Peak | None:
        return None

    def meter_level(self) -> int | None:
        if not (self._counts and self._metering):
            return None  # of what it keeps cached, not of what this iteration takes
        return self.dense_peak()

    def meter_timeline(self) -> Timeline:
        return NO_TIMELINE

    def living(self) -> Timeline:
        return NO_TIMELINE

    def meter_forget(self) -> None:
        pass

    def birth_at(self, address: int) -> int:
        return 0

    def close(self) -> None:
        self.arena = torch.empty(0, dtype=torch.uint8)
        try:
            self.kit.close()
        except PagerError as error:
            text = f"{error}. The arena's memory is given back when the process ends"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
