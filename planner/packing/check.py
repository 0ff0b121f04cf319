"""Does a packing hold? A sweep over time that shares no code with the allocators."""

from __future__ import annotations

from bisect import bisect_left, insort

from ..trace import Ints
from .buffers import Buffers


def check(buffers: Buffers, offsets: Ints, capacity: int) -> list[str]:
    """What is wrong with ``offsets`` (bytes) in an arena of ``capacity`` bytes, one line per fault.

    Empty if every buffer lies in [0, capacity) and no two that live at one time share an address.
    """
    if len(offsets) != len(buffers):
        return [f"{len(offsets)} offsets for {len(buffers)} buffers"]
    faults: list[str] = []
    events: list[tuple[int, int, int]] = []  # time, 0 for a death and 1 for a birth, buffer
    for number, name in enumerate(buffers.ids):
        begin, size = int(offsets[number]), int(buffers.size[number])
        if begin < 0 or begin + size > capacity:
            faults.append(
                f"buffer {name} lies in [{begin}, {begin + size}), not in [0, {capacity})"
            )
        events.append((int(buffers.lower[number]), 1, number))
        events.append((int(buffers.upper[number]), 0, number))
    return faults + _overlaps(buffers, offsets, sorted(events))


def _overlaps(buffers: Buffers, offsets: Ints, events: list[tuple[int, int, int]]) -> list[str]:
    faults: list[str] = []
    alive: list[tuple[int, int, int]] = []  # begin, end, buffer: sorted by address
    for time, birth, number in events:
        begin = int(offsets[number])
        entry = (begin, begin + int(buffers.size[number]), number)
        if not birth:
            del alive[bisect_left(alive, entry)]
            continue
        place = bisect_left(alive, entry)
        faults += [
            f"at time {time} buffers {buffers.ids[other[2]]} and {buffers.ids[number]} "
            f"share [{max(other[0], begin)}, {min(other[1], entry[1])})"
            for other in alive[max(place - 1, 0) : place + 1]
            if other[0] < entry[1] and entry[0] < other[1]
        ]
        insort(alive, entry)
    return faults
