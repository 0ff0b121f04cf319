"""G10 (Zhang et al., "G10: Enabling an Efficient Unified GPU Memory and Storage Architecture with
Smart Tensor Migrations", MICRO 2023; its rules read in the authors' code).

Until the device is at most 99 % full everywhere by its own estimate, the best idle gap is taken:
the one with the most bytes × time over that capacity between the half-way points of its way out
and its way in, given the disk bandwidth booked so far; ties go to bytes × idle time. It goes to the
disk if it is idle for more than 2.5 × the time out and in there, but to the host if the disk is
booked all through the best time for it and the host has room; else to the host if it is idle for
2.5 × the time there; else it stays.

A tensor comes back at the latest op from which free bandwidth covers its bytes, not before its way
out is done. A second pass, by that op, moves each `in` as much earlier as there is room.

Where ours differs: bandwidth is booked per op and per direction in the machine model's rates, host
transfers on what disk transfers leave of the link. Where the estimate says that all fits and pages
at every op say that it does not, the program's runtime would evict on demand; here, at the op that
lacks room, what was used least recently goes out and comes back at its next use.
"""

from __future__ import annotations

import numpy as np

from ..hardware import Hardware
from ..plan import Plan
from ..trace import Bools, Floats, Trace
from .bandwidth import Channels
from .whole import (
    Decision,
    Room,
    WholeGaps,
    build,
    check_possible,
    refuse_if_over,
    transfer_us,
    whole_gaps,
)

FULL = 0.99  # of the device: below it nothing needs to move
LONG_ENOUGH = 2.5  # an idle time worth a migration, in times out plus in


def plan(trace: Trace, hardware: Hardware) -> Plan:
    """Raises ``PolicyRefusal`` if nothing that may move is left and the device is too full."""
    check_possible(trace, hardware, "g10")
    room = Room(trace, hardware)
    gaps = whole_gaps(trace, hardware.page_size)
    taken, decisions, wanted = _Selection(trace, hardware, gaps, room).run()
    decisions += _on_demand(gaps, taken, room)
    refuse_if_over(room, hardware, "g10", f"after {len(decisions)} of {len(gaps)} idle periods")
    planned = len(wanted)
    in_time = _come_back(room, decisions[:planned], wanted)
    return build(trace, hardware, "g10", in_time + decisions[planned:])


class _Selection:
    """The loop that takes gaps. ``load`` is the estimated residency in pages, per op."""

    def __init__(self, trace: Trace, hardware: Hardware, gaps: WholeGaps, room: Room) -> None:
        self.ops, self.gaps, self.room = trace.ops, gaps, room
        self.duration_us = trace.op_duration_us
        self.channels = Channels(trace, hardware)
        self.load: Floats = room.used["device"].astype(np.float64)
        self.limit = FULL * hardware.device_pages
        self.idle_us = (
            self.channels.clock.start_us[gaps.next_op] - (self.channels.clock.end_us[gaps.last_op])
        )
        self.time_us = {
            tier: transfer_us(hardware, tier, "out", gaps.pages)
            + transfer_us(hardware, tier, "in", gaps.pages)
            for tier in ("disk", "host")
        }
        self.open = np.ones(len(gaps), np.bool_)

    def run(self) -> tuple[Bools, list[Decision], list[int]]:
        """Which gaps were taken, as decisions that come back at the last moment, and for each the
        op at which it should."""
        taken = np.zeros(len(self.gaps), np.bool_)
        decisions: list[Decision] = []
        wanted: list[int] = []
        while self.load.max(initial=0.0) > self.limit and self.open.any():
            number = self._best()
            if number is None:
                break
            self.open[number] = False
            decision = self._place(number)
            if decision is None:
                continue
            taken[number] = True
            self.room.take(decision)
            decisions.append(decision)
            wanted.append(self._book(number, decision))
        return taken, decisions, wanted

    def _best(self) -> int | None:
        """The gap of the greatest benefit, if any has one."""
        gaps, open_ = self.gaps, np.flatnonzero(self.open)
        pages = gaps.pages[open_]
        half_out = self.channels.disk_out.covered_at(gaps.last_op[open_] + 1, pages / 2)
        half_in = self.channels.disk_in.begun_at(gaps.next_op[open_], pages / 2)
        over = np.tile(np.where(self.load > self.limit, self.duration_us, 0.0), 2)
        total = np.concatenate([[0.0], np.cumsum(over)])
        relieved = np.maximum(total[half_in] - total[half_out], 0.0)
        benefit = pages * relieved
        best = benefit.max(initial=0.0)
        if best <= 0:
            return None
        equal = open_[benefit == best]
        return int(equal[(gaps.pages[equal] * self.idle_us[equal]).argmax()])

    def _place(self, number: int) -> Decision | None:
        gaps = self.gaps
        host, disk = (gaps.away(number, tier) for tier in ("host", "disk"))
        idle_us = self.idle_us[number]
        to_host = idle_us > LONG_ENOUGH * self.time_us["host"][number]
        to_disk = idle_us > LONG_ENOUGH * self.time_us["disk"][number]
        if to_disk and self.room.has_slots(disk):
            crowded = self.channels.disk_out.is_booked(disk.out_op, int(gaps.pages[number]))
            return host if crowded and self.room.has_slots(host) else disk
        return host if to_host and self.room.has_slots(host) else None

    def _book(self, number: int, decision: Decision) -> int:
        """Book both ways, lower the estimate between their half-way points, and give the op at
        which the `in` should be issued."""
        pages = int(self.gaps.pages[number])
        half_out, out_done = self.channels.book_out(decision.tier, decision.out_op, pages)
        in_begun, half_in = self.channels.book_in(decision.tier, decision.next_op, pages)
        if half_in > half_out:
            self.load[np.arange(half_out, half_in) % self.ops] -= pages
        return min(max(in_begun, out_done, decision.out_op + 1), decision.next_op)


def _on_demand(gaps: WholeGaps, taken: Bools, room: Room) -> list[Decision]:
    """At each op that lacks room, evict what is idle there and was used least recently, to the
    host while it has slots, then to disk."""
    decisions: list[Decision] = []
    limit = room.limit["device"]
    free = ~taken
    for op in range(room.ops):
        if room.used["device"][op] <= limit:
            continue
        now = (gaps.last_op < op) & (op < gaps.next_op)
        then = (gaps.last_op < op + room.ops) & (op + room.ops < gaps.next_op)
        idle = np.flatnonzero(free & (now | then))
        since = np.where(now[idle], op, op + room.ops) - gaps.last_op[idle]
        for number in idle[np.argsort(-since, kind="stable")].tolist():
            if room.used["device"][op] <= limit:
                break
            at = op if now[number] else op + room.ops
            for tier in ("host", "disk"):
                decision = gaps.away(number, tier, at)
                if room.has_slots(decision):
                    room.take(decision)
                    decisions.append(decision)
                    free[number] = False
                    break
    return decisions


def _come_back(room: Room, decisions: list[Decision], wanted: list[int]) -> list[Decision]:
    """The latest safe ops first, for all; then, in their order, each as early as there is room."""
    order = sorted(range(len(decisions)), key=lambda n: (wanted[n], decisions[n].next_op))
    safe = {n: room.earlier(decisions[n], wanted[n]) for n in order}
    return [room.earlier(safe[n], safe[n].out_op + 1) for n in order]
