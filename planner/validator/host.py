"""The validator's host: takes optimizer steps one at a time, in the order of the plan's list."""

from __future__ import annotations

from collections import Counter

from .link import TICKS_PER_US, ticks
from .schedule import Schedule


class HostQueue:
    """``end``: tick at which the step that runs is done; ``None`` if none runs."""

    def __init__(self, schedule: Schedule) -> None:
        self._order = schedule.host_order
        self._us = schedule.host_us
        self._pages = {
            op: (
                sorted({page for span in schedule.touched[op] for page in range(*span)}),
                {page for span in schedule.written[op] for page in range(*span)},
            )
            for op in self._order
        }
        self._joined: Counter[int] = Counter()  # steps that have joined, and are not done
        self._turn = 0
        self.end: int | None = None
        self.log: list[tuple[int, int, int]] = []  # op, begin, end

    def pages_of(self, op: int) -> tuple[list[int], set[int]]:
        """The pages that the step accesses, and those of them that it writes."""
        return self._pages[op]

    def join(self, op: int) -> None:
        self._joined[op] += 1

    def candidate(self) -> int | None:
        """The step that is next in the list, if it has joined and none runs."""
        if self.end is not None or not self._order:
            return None
        op = self._order[self._turn]
        return op if self._joined[op] else None

    def begin(self, now: int) -> None:
        op = self._order[self._turn]
        self.end = now + ticks(self._us[op])
        self.log.append((op, now, self.end))

    def finish(self) -> int:
        """The step that runs is done; its op."""
        assert self.end is not None
        op, self.end = self._order[self._turn], None
        self._joined[op] -= 1
        self._turn = (self._turn + 1) % len(self._order)
        return op

    def left_us(self, now: int) -> float:
        """Work that has joined and is not done."""
        left = sum(number * self._us[op] for op, number in self._joined.items())
        if self.end is not None:
            left -= self._us[self._order[self._turn]] - (self.end - now) / TICKS_PER_US
        return left
