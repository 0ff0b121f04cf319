"""The host tier: exactly ``host_budget`` bytes, split into page slots."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

import numpy as np

from ..devices.device import Bytes, Copies, Copy, Device, HostMemory
from .frame_pool import FramePool, Numbers, merge

_KNOWN = 4096  # transfers whose copies are remembered


class HostTier:
    """``slots`` (a pool of page slots) over memory that copies to and from the device run on at
    full speed. The last partial page of a budget is unused.

    The memory may be in several pieces (``Device.host_memory``). Slots are numbered through all of
    them; bytes of neighbouring slots lie side by side within one piece only.
    """

    def __init__(self, capacity_bytes: int, page_size: int, backend: Device) -> None:
        self.page_size = page_size
        self.slots = FramePool(0)
        self._backend = backend
        self._pieces: list[HostMemory] = []
        self._starts: list[int] = []  # each one's first slot
        self._addresses: list[int] = []
        self._known: dict[tuple[bytes, bytes], Copies] = {}
        self.grow(capacity_bytes)

    @property
    def capacity_bytes(self) -> int:
        return self.slots.count * self.page_size

    def view(self, slot: int, count: int) -> Bytes:
        """Bytes of ``count`` slots from ``slot`` on, all of one piece."""
        if not count:
            return np.empty(0, np.uint8)
        number = bisect_right(self._starts, slot) - 1
        first = (slot - self._starts[number]) * self.page_size
        view = self._pieces[number].bytes[first : first + count * self.page_size]
        assert len(view) == count * self.page_size, (slot, count, self._starts)
        return view

    def piece_of(self, slot: int) -> tuple[int, Bytes]:
        """The piece that ``slot`` is in: its first slot, and its bytes."""
        number = bisect_right(self._starts, slot) - 1
        return self._starts[number], self._pieces[number].bytes

    def cut(self, slot: int, count: int) -> Iterator[tuple[int, int]]:
        """``count`` slots from ``slot`` on as ``(slot, count)`` of one piece each."""
        while count:
            after = bisect_right(self._starts, slot)
            end = self._starts[after] if after < len(self._starts) else self.slots.count
            here = min(count, end - slot)
            yield slot, here
            slot, count = slot + here, count - here

    def stretches(self, places: Numbers, slots: Numbers) -> Iterator[tuple[int, Bytes]]:
        """For ``slots[i]`` beside ``places[i]`` (frames, or pages of a buffer): the first place of
        each stretch in which both are consecutive, and the bytes of its slots."""
        for copy in self._copies(places, slots):
            yield copy.offset // self.page_size, copy.host

    def copies(self, frames: Numbers, slots: Numbers) -> Copies:
        """Between ``frames`` of an arena and ``slots``: a stretch of both each. In a settled step
        they are those of the step before."""
        key = frames.tobytes(), slots.tobytes()
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= _KNOWN:
                self._known.clear()
            known = self._known[key] = self._copies(frames, slots)
        return known

    def _copies(self, frames: Numbers, slots: Numbers) -> Copies:
        size, found = self.page_size, Copies()
        for frame, slot, count in merge(frames, slots):
            number = bisect_right(self._starts, slot) - 1
            begin = (slot - self._starts[number]) * size
            end, piece = begin + count * size, self._pieces[number].bytes
            if end <= len(piece):
                address = self._addresses[number] + begin
                found.append(Copy(frame * size, piece[begin:end], address))
                continue
            for first, here in self.cut(slot, count):
                found.append(Copy((frame + first - slot) * size, self.view(first, here)))
        return found

    def grow(self, capacity_bytes: int) -> None:
        """Enlarge to ``capacity_bytes``. Contents and slot numbers stay, and so does all if it
        fails."""
        count = capacity_bytes // self.page_size
        fresh = self._backend.host_memory((count - self.slots.count) * self.page_size)
        start = self.slots.count
        for piece in fresh:
            self._starts.append(start)
            self._addresses.append(piece.bytes.ctypes.data)
            start += len(piece.bytes) // self.page_size
        self._pieces += fresh
        self.slots.resize(count)

    def close(self) -> None:
        """Idempotent."""
        pieces, self._pieces, self._starts, self._addresses = self._pieces, [], [], []
        self._known.clear()  # it has parts of them
        for piece in pieces:
            piece.give_back()
