"""An address range handed out online: free blocks by size, joined again when both are free.

Segments model separate calls of the driver's allocator: blocks never join across their bounds.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

import numpy as np

from .buffers import Buffers


class Heap:
    """All in bytes. ``reserved`` is the end of the highest segment."""

    def __init__(self) -> None:
        self.reserved = 0
        self._by_size: list[tuple[int, int]] = []  # size, address of the free blocks
        self._size_at: dict[int, int] = {}  # address of a free block → its size
        self._begin_of: dict[int, int] = {}  # end of a free block → its address
        self._segments: set[int] = set()

    def grow(self, size: int, *, new_segment: bool) -> None:
        """Add ``size`` free bytes at the end, as a segment of their own or joined to the last."""
        if new_segment:
            self._segments.add(self.reserved)
        self.reserved += size
        self.give(self.reserved - size, size)

    def take(self, size: int) -> tuple[int, int] | None:
        """Address and size of the smallest free block of at least ``size`` bytes, the lowest of
        those that are equally small, now taken whole; None if there is none."""
        place = bisect_left(self._by_size, (size, 0))
        if place == len(self._by_size):
            return None
        found, address = self._by_size.pop(place)
        del self._size_at[address], self._begin_of[address + found]
        return address, found

    def give(self, address: int, size: int) -> None:
        """Free the ``size`` bytes at ``address`` and join them with free neighbours."""
        end = address + size
        if address in self._begin_of and address not in self._segments:
            address = self._begin_of[address]
            self._forget(address)
        if end in self._size_at and end not in self._segments:
            after = end + self._size_at[end]
            self._forget(end)
            end = after
        insort(self._by_size, (end - address, address))
        self._size_at[address] = end - address
        self._begin_of[end] = address

    @property
    def free_at_end(self) -> int:
        """Free bytes in the block that touches the end of the address range."""
        begin = self._begin_of.get(self.reserved)
        return 0 if begin is None else self.reserved - begin

    def _forget(self, address: int) -> None:
        size = self._size_at.pop(address)
        del self._begin_of[address + size]
        del self._by_size[bisect_left(self._by_size, (size, address))]


def events(buffers: Buffers) -> Iterator[tuple[bool, int]]:
    """(is a birth, buffer) in time order. At one time deaths come first, then births as listed."""
    count = len(buffers)
    times = np.concatenate([buffers.upper, buffers.lower])
    for event in np.argsort(times, kind="stable").tolist():
        yield event >= count, event % count
