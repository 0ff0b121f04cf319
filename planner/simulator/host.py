"""The host's queue of optimizer steps in the simulator."""

from __future__ import annotations

import math
from collections import Counter

from ..simulation import EPSILON_US, HostRun
from ..trace import WRITE, Trace
from .pages import COMING, VALID, Infeasible, Pages, Range
from .program import Program


class _Step:
    """Page ranges of one host step, and the tensors that live until it has ended."""

    def __init__(self, op: int, us: float) -> None:
        self.op, self.us = op, us
        self.used: list[Range] = []
        self.written: list[Range] = []
        self.tensors: set[int] = set()


class Host:
    """Takes the steps one at a time in the order of the list, iteration after iteration.

    ``event_us``: when the running step ends; ``inf`` if none runs. ``waiting``: the next step has
    joined, and waits for its pages.
    """

    def __init__(self, trace: Trace, pages: Pages, order: list[int], program: Program) -> None:
        self.trace, self.pages = trace, pages
        self.steps = [_Step(op, float(trace.op_host_us[op])) for op in order]
        self.place = {op: index for index, op in enumerate(order)}
        begin, end = trace.access_ranges(pages.page_size)
        offsets = trace.access_offsets
        for step in self.steps:
            for row in range(offsets[step.op], offsets[step.op + 1]):
                tensor = int(trace.access_tensor[row])
                if tensor in program.private:
                    continue
                base = int(pages.base[tensor])
                pair = base + int(begin[row]), base + int(end[row])
                step.used.append(pair)
                if trace.access_mode[row] & WRITE:
                    step.written.append(pair)
                if not trace.tensor_persistent[tensor]:
                    step.tensors.add(tensor)
        self.joined = [0] * len(order)
        self.next = 0  # in the list
        self.running = False
        self.event_us = math.inf
        self.holds: Counter[int] = Counter()  # tensor → steps that have joined and use it
        self.runs: list[HostRun] = []

    @property
    def waiting(self) -> bool:
        return bool(self.steps) and not self.running and self.joined[self.next] > 0

    def join(self, op: int) -> None:
        """``op`` joins the queue; its pages are in host, or on their way there."""
        pages, step = self.pages, self.steps[self.place[op]]
        for first, last in step.used:
            copies = pages.copies[0]
            for page in range(first, last):
                if copies[page] != VALID and copies[page] != COMING and not pages.locked[page]:
                    raise self._refuse(op, page, "has no copy in host, and no 'out' to host queued")
        for first, last in step.written:
            for page in range(first, last):
                if pages.there[page]:
                    raise self._refuse(op, page, "is on the device, but is written by the step")
                if pages.coming[page] or pages.going[page] == 2:
                    raise self._refuse(op, page, "is on its way elsewhere, but is written by it")
        pages.hold(step.used, step.written, 1)
        self.joined[self.place[op]] += 1
        self.holds.update(step.tensors)

    def _refuse(self, op: int, page: int, why: str) -> Infeasible:
        return Infeasible(
            f"host step {op} '{self.trace.op_names[op]}': {self.pages.name_of(page)} {why}"
        )

    def try_start(self, now: float) -> bool:
        """The next step starts, if it has joined and all its pages have arrived."""
        if not self.waiting:
            return False
        step, copies = self.steps[self.next], self.pages.copies[0]
        if any(copies.count(VALID, a, b) < b - a for a, b in step.used):
            return False
        self.pages.give_up_disk(step.written)
        self.running, self.event_us = True, now + step.us
        self.runs.append(HostRun(step.op, now, self.event_us))
        return True

    def ended(self, now: float) -> list[int] | None:
        """If the running step ends now: the tensors that no step uses any more."""
        if self.event_us > now + EPSILON_US:
            return None
        step = self.steps[self.next]
        self.running, self.event_us = False, math.inf
        self.joined[self.next] -= 1
        self.next = (self.next + 1) % len(self.steps)
        self.pages.hold(step.used, step.written, -1)
        self.holds.subtract(step.tensors)
        return [tensor for tensor in step.tensors if not self.holds[tensor]]

    def left_us(self, now: float) -> float:
        """Work that has joined and is not done."""
        left = sum(number * step.us for number, step in zip(self.joined, self.steps))
        if self.running:
            left -= self.steps[self.next].us - (self.event_us - now)
        return left

    def state(self, now: float) -> tuple[object, ...]:
        """All that its future depends on, with times relative to ``now``."""
        return self.next, tuple(self.joined), self.running, self.event_us - now

    def count_from(self, now: float) -> None:
        """Times count from ``now`` on."""
        self.event_us -= now
        self.runs = []
