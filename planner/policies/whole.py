"""What all policies that move whole tensors share: idle gaps, room, and moves from decisions.

Note "no deadlock": the plan counts pages by op, not by time. A tensor's frames are free for others
from the op that issues its `out`, and taken from the op that issues its `in`; a slot below is taken
from the op that issues the `out` until the op that needs the tensor back has started. If these
counts stay within each tier's pages at every op, then whatever an op waits for arrives: an `out`
needs only slots that ops already started have given back, an `in` only frames that such outs free.
Ops past the iteration's end (numbers ≥ ops) are those of the next iteration.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ..errors import PolicyRefusal
from ..hardware import Hardware
from ..lifetimes import live_pages, require_working_sets
from ..plan import Move, Plan, StartRun
from ..simulator import simulate
from ..sizes import format_bytes
from ..trace import Bools, Floats, Ints, Trace


class Decision(NamedTuple):
    """``tensor`` (index) goes to ``tier`` when ``out_op`` may start and comes back when ``in_op``
    may; it was last used by ``last_op`` and is next used by ``next_op``.

    last_op < out_op < in_op ≤ next_op; all but the first two may be ≥ ops, as may ``out_op`` of a
    tensor that the last op uses. ``last_op`` < 0 is an op of the iteration before.
    """

    tensor: int
    last_op: int
    next_op: int
    tier: str
    out_op: int
    in_op: int


@dataclass(frozen=True, eq=False)
class WholeGaps:
    """Times between two uses that follow each other with an op in between, by tensor: arrays of
    equal length. ``end_op`` ≥ ops: the next iteration's op (persistent tensors only)."""

    tensor: Ints
    last_op: Ints
    next_op: Ints
    pages: Ints

    def __len__(self) -> int:
        return len(self.tensor)

    def pick(self, which: Ints | Bools) -> WholeGaps:
        return WholeGaps(
            self.tensor[which], self.last_op[which], self.next_op[which], self.pages[which]
        )

    def away(self, number: int, tier: str, out_op: int | None = None) -> Decision:
        """The gap ``number`` spent in ``tier``, all of it or from ``out_op`` on."""
        arrays = self.tensor, self.last_op, self.next_op
        tensor, last_op, next_op = (int(column[number]) for column in arrays)
        return Decision(
            tensor, last_op, next_op, tier, last_op + 1 if out_op is None else out_op, next_op
        )


def uses_by_tensor(trace: Trace) -> tuple[Ints, Ints]:
    """(ops, offsets): ops that use tensor t, rising, are ``ops[offsets[t]:offsets[t + 1]]``."""
    keys = np.unique(trace.access_tensor * trace.ops + trace.access_op)
    tensors = keys // max(trace.ops, 1)
    return keys - tensors * trace.ops, np.searchsorted(tensors, np.arange(trace.tensors + 1))


def whole_gaps(trace: Trace, page_size: int) -> WholeGaps:
    """All gaps of a trace, by tensor and time."""
    ops, offsets = uses_by_tensor(trace)
    tensors = np.repeat(np.arange(trace.tensors), np.diff(offsets))
    after = np.append(ops[1:], 0)
    last = offsets[1:] - 1
    after[last] = ops[offsets[:-1]] + trace.ops
    is_gap = after > ops + 1
    is_gap[last] &= trace.tensor_persistent
    tensors = tensors[is_gap]
    return WholeGaps(tensors, ops[is_gap], after[is_gap], trace.pages(page_size)[tensors])


class Clock:
    """Begin and end of ops when nothing waits, in µs, over two iterations."""

    def __init__(self, trace: Trace) -> None:
        edges = np.concatenate([[0.0], np.cumsum(np.tile(trace.op_duration_us, 2))])
        self.start_us: Floats = edges[:-1]  # [2 × ops]
        self.end_us: Floats = edges[1:]

    def op_before(self, time_us: float) -> int:
        """The last op that starts no later than ``time_us`` (0 if none does)."""
        return max(int(np.searchsorted(self.start_us, time_us, "right")) - 1, 0)


def transfer_us(hardware: Hardware, tier: str, action: str, pages: Ints) -> Floats:
    """How long moves of ``pages`` take alone, with their latency."""
    return np.asarray(hardware.transfer_latency_us + pages * hardware.page_us(tier, action))


class Room:
    """Pages taken in each tier at each op by the rule of "no deadlock"; starts with everything on
    the device."""

    def __init__(self, trace: Trace, hardware: Hardware) -> None:
        self.ops = trace.ops
        self.pages = trace.pages(hardware.page_size)
        self.limit = {
            "device": hardware.device_pages,
            "host": hardware.host_pages,
            "disk": hardware.disk_pages,
        }
        zeros = np.zeros(trace.ops, np.int64)
        self.used = {
            "device": live_pages(trace, hardware.page_size),
            "host": zeros,
            "disk": zeros.copy(),
        }

    @property
    def excess(self) -> int:
        """Pages too many on the device at the worst op (≤ 0: everything fits)."""
        return int(self.used["device"].max(initial=0) - min(self.limit["device"], 1 << 60))

    def span(self, begin: int, end: int) -> Ints:
        """Positions of ops ``begin`` to ``end`` (exclusive, at most one iteration)."""
        return np.arange(begin, end) % self.ops

    def fits(self, tier: str, pages: int, begin: int, end: int) -> bool:
        """Whether ``pages`` more can be in ``tier`` from op ``begin`` to op ``end`` (exclusive)."""
        if math.isinf(self.limit[tier]):
            return True
        span = self.used[tier][self.span(begin, end)]
        return bool(span.max(initial=0) + pages <= self.limit[tier])

    def has_slots(self, decision: Decision) -> bool:
        pages = int(self.pages[decision.tensor])
        return self.fits(decision.tier, pages, decision.out_op, decision.next_op + 1)

    def take(self, decision: Decision) -> None:
        """Count a decision in."""
        pages = int(self.pages[decision.tensor])
        self.used["device"][self.span(decision.out_op, decision.in_op)] -= pages
        self.used[decision.tier][self.span(decision.out_op, decision.next_op + 1)] += pages

    def earlier(self, decision: Decision, in_op: int) -> Decision:
        """The decision with its `in` moved ahead to the first op ≥ ``in_op`` from which there is
        room until it was issued so far; counted in."""
        in_op = min(max(in_op, decision.out_op + 1), decision.in_op)
        span = self.span(in_op, decision.in_op)
        pages = int(self.pages[decision.tensor])
        full = np.flatnonzero(self.used["device"][span] + pages > self.limit["device"])
        begin = int(full[-1]) + 1 if len(full) else 0
        self.used["device"][span[begin:]] += pages
        return decision._replace(in_op=in_op + begin)


def check_possible(trace: Trace, hardware: Hardware, policy: str) -> None:
    """Raise ``InfeasibleBudget`` if an op alone needs more than the device, ``PolicyRefusal`` if it
    does when tensors are whole."""
    if not trace.ops:
        return
    require_working_sets(trace, hardware)
    keys = np.unique(trace.access_op * trace.tensors + trace.access_tensor)
    pages = trace.pages(hardware.page_size)[keys % trace.tensors]
    whole = np.bincount(keys // trace.tensors, weights=pages, minlength=trace.ops)
    if whole.max() > hardware.device_pages:
        op = int(whole.argmax())
        raise PolicyRefusal(
            f"{policy} moves whole tensors, and those of op {op} ({trace.op_names[op]}) take "
            f"{format_bytes(whole.max() * hardware.page_size)} of "
            f"{format_bytes(hardware.device_bytes)}; a policy that moves pages (lp) needs less"
        )


def refuse_if_over(room: Room, hardware: Hardware, policy: str, tried: str) -> None:
    """Raise ``PolicyRefusal`` if the device would be too full; ``tried`` says after what."""
    if room.excess > 0:
        peak = int(room.used["device"].max()) * hardware.page_size
        raise PolicyRefusal(
            f"{policy}: peak still {format_bytes(peak)} of "
            f"{format_bytes(hardware.device_bytes)} {tried}"
        )


def relieve(gaps: WholeGaps, room: Room, best: Callable[[Bools], int | None]) -> list[Decision]:
    """Gaps spent in the host, each the ``best`` of those still open, until the device's load fits
    or there is none; a tensor that the host has no slots for stays."""
    still_open = np.ones(len(gaps), np.bool_)
    decisions: list[Decision] = []
    while room.excess > 0 and (number := best(still_open)) is not None:
        still_open[number] = False
        decision = gaps.away(number, "host")
        if room.has_slots(decision):
            room.take(decision)
            decisions.append(decision)
    return decisions


def prefetch(room: Room, decisions: Iterable[Decision], wanted: Sequence[int]) -> list[Decision]:
    """Move each decision's `in` ahead to ``wanted`` as far as there is room, soonest due first."""
    pairs = sorted(zip(decisions, wanted), key=lambda pair: (pair[0].next_op, pair[1]))
    return [room.earlier(decision, in_op) for decision, in_op in pairs]


def _used_ends(trace: Trace, page_size: int) -> dict[tuple[int, int], int]:
    """By op and tensor the end of a page range that the op uses, where that is not the tensor's."""
    _, end = trace.access_ranges(page_size)
    partial = np.flatnonzero(end < trace.pages(page_size)[trace.access_tensor])
    ops, tensors = trace.access_op[partial].tolist(), trace.access_tensor[partial].tolist()
    return dict(zip(zip(ops, tensors), end[partial].tolist()))


def build(
    trace: Trace,
    hardware: Hardware,
    policy: str,
    decisions: Iterable[Decision],
    *,
    first_moves: Sequence[Move] = (),
) -> Plan:
    """The plan that carries out ``decisions``, simulated.

    At one op ``first_moves`` come first, then outs, then ins by their need. A page that the next
    op uses comes in last, so that it waits for the whole tensor, which can then go out again. Each
    copy below is dropped when its tensor is back.

    Raises ``PolicyRefusal`` with the simulator's reason if it cannot run.
    """
    pages = trace.pages(hardware.page_size)
    numbers = trace.tensor_ids
    used_end = _used_ends(trace, hardware.page_size)
    keyed: list[tuple[tuple[int, int, int], Move]] = []
    start: list[StartRun] = []
    for place, (tensor, _, next_op, tier, out_op, in_op) in enumerate(decisions):
        run = (int(numbers[tensor]), 0, int(pages[tensor]), tier)
        issue_out, issue_in = out_op % trace.ops, in_op % trace.ops
        due = next_op - in_op
        keyed.append(((issue_out, -1, place), Move(*run, "out", issue_out)))
        end = used_end.get((next_op % trace.ops, tensor), run[2])
        parts = [(end, run[2] - end), (0, end)] if end < run[2] else [(0, run[2])]
        back = [Move(run[0], *part, tier, "in", issue_in) for part in parts]
        back.append(Move(*run, "drop", issue_in))
        keyed.extend(((issue_in, due, place), move) for move in back)
        if out_op < trace.ops <= in_op:
            start.append(StartRun(*run))
    keyed.extend(((m.issue_op, -2, n), m) for n, m in enumerate(first_moves))
    plan = Plan(
        policy=policy,
        page_size=hardware.page_size,
        device_bytes=hardware.device_bytes,
        host_bytes=hardware.host_bytes,
        disk_bytes=hardware.disk_bytes,
        hardware=hardware,
        moves=[move for _, move in sorted(keyed, key=lambda item: item[0])],
        start=sorted(start),
        trace_sha256=trace.sha256,
    )
    result = simulate(trace, hardware, plan)
    if not result.feasible:
        raise PolicyRefusal(f"{policy}: {result.reason}")
    return replace(plan, predicted=result.predicted)
