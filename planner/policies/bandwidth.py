"""Bandwidth booked ahead, op by op, in pages: how G10 estimates when a migration is done."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..hardware import Hardware
from ..trace import Floats, Ints, Trace
from .whole import Clock


class Channel:
    """Pages that can still pass while each op runs, if nothing waits. The iteration is a circle;
    positions below are ops over two or three rounds of it."""

    def __init__(self, duration_us: Floats, page_us: float) -> None:
        self.ops = len(duration_us)
        self.whole: Floats = duration_us / page_us  # [ops]
        self.free: Floats = self.whole.copy()
        self._sum()

    def _sum(self) -> None:
        self.total = np.concatenate([[0.0], np.cumsum(np.tile(self.free, 3))])

    def covered_at(self, begin: Ints, pages: Floats) -> Ints:
        """The op by whose end what is free from op ``begin`` on adds up to ``pages``, plus one; at
        most one iteration later."""
        end = np.searchsorted(self.total, self.total[begin] + pages - 1e-9)
        return np.asarray(np.minimum(end, begin + self.ops))

    def begun_at(self, end: Ints, pages: Floats) -> Ints:
        """The latest op from which what is free until op ``end`` begins adds up to ``pages``; at
        most one iteration earlier, not below 0."""
        later = end + self.ops  # so that walking back crosses the iteration's begin
        begin = np.searchsorted(self.total, self.total[later] - pages + 1e-9, "right") - 1
        return np.asarray(np.maximum(np.maximum(begin, end) - self.ops, 0))

    def is_booked(self, begin: int, pages: int) -> bool:
        """Whether nothing is free in the time that ``pages`` would need from op ``begin`` if
        nothing at all were booked."""
        ahead = np.cumsum(self.whole[np.arange(begin, begin + self.ops) % self.ops])
        end = begin + min(int(np.searchsorted(ahead, pages)) + 1, self.ops)
        return bool(self.total[end] - self.total[begin] < 1e-6)

    def book(self, span: Ints, pages: float) -> None:
        """Take ``pages`` from ops ``span``, in that order."""
        positions = span % self.ops
        before = np.concatenate([[0.0], np.cumsum(self.free[positions])[:-1]])
        self.free[positions] -= np.clip(pages - before, 0.0, self.free[positions])
        self._sum()


class Channels:
    """The four ways, disk and host each out and in. What goes to or from the disk is booked on the
    link as well."""

    def __init__(self, trace: Trace, hardware: Hardware) -> None:
        self.clock = Clock(trace)
        self.host_out, self.host_in, self.disk_out, self.disk_in = (
            Channel(trace.op_duration_us, hardware.page_us(tier, action))
            for tier in ("host", "disk")
            for action in ("out", "in")
        )

    def book_out(self, tier: str, out_op: int, pages: int) -> tuple[int, int]:
        """Book from ``out_op`` on: the ops by which half and all of it is out."""
        channel = self.disk_out if tier == "disk" else self.host_out
        half, done = _at(channel.covered_at, out_op, pages)
        span = np.arange(out_op, done)
        channel.book(span, pages)
        if tier == "disk":
            self.host_out.book(span, pages)
        return half, done

    def book_in(self, tier: str, next_op: int, pages: int) -> tuple[int, int]:
        """Book backwards from ``next_op``: the ops at which it begins and is half there."""
        channel = self.disk_in if tier == "disk" else self.host_in
        half, begun = _at(channel.begun_at, next_op, pages)
        span = np.arange(next_op - 1, begun - 1, -1)
        channel.book(span, pages)
        if tier == "disk":
            self.host_in.book(span, pages)
        return begun, half


def _at(find: Callable[[Ints, Floats], Ints], op: int, pages: int) -> tuple[int, int]:
    """Where half of ``pages`` has passed, and all."""
    found = find(np.array([op, op]), np.array([pages / 2, pages]))
    return int(found[0]), int(found[1])
