"""The steady iteration of a plan as a picture needs it: when ops ran, what moved, where pages were.

Everything is derived from one run of the machine model. The iteration repeats, so what a move does
after the iteration's end is shown at its begin, where the move of the iteration before does it.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from .errors import PlanError
from .hardware import Hardware
from .lifetimes import live_bytes_by_kind
from .plan import DISCARD, Move, Plan, StartRun
from .simulation import EPSILON_US, Simulation, Stall, Transfer
from .simulator import simulate
from .simulator.program import AGAIN, make_program
from .trace import KINDS, Floats, Ints, Trace

DEVICE, LEAVING, HOST, DISK, COMING = "device", "leaving", "host", "disk", "coming"
DISCARDED = "discarded"  # given up, to be made again
HELD = (DEVICE, LEAVING, COMING)  # with a frame
PLACES = (DEVICE, LEAVING, HOST, DISK, COMING, DISCARDED)
_REMADE = "made again"  # on the device if it was discarded


class _Remade(NamedTuple):
    """Discarded pages that are on the device again from ``us`` on."""

    us: float
    first_page: int
    page_count: int


class Span(NamedTuple):
    """Pages of a tensor (index in the trace) that were at one place from ``begin_us`` on.

    ``leaving`` and ``coming`` pages hold a frame and are lost to ops; a leaving page may still be
    waiting for the link. ``coming`` begins with the transfer: pages that wait for it are below.
    """

    tensor: int
    first_page: int
    page_count: int
    begin_us: float
    end_us: float
    place: str


@dataclass(frozen=True, eq=False)
class Curve:
    """Device bytes in whole pages from ``time_us[i]`` until ``time_us[i + 1]``, per kind of tensor;
    kinds of which there is nothing are left out."""

    time_us: Floats
    by_kind: dict[str, Ints]

    @cached_property
    def total(self) -> Ints:
        return sum(self.by_kind.values(), np.zeros(len(self.time_us), np.int64))


@dataclass(frozen=True, eq=False)
class Timeline:
    """One iteration: times in µs since its begin, tensors as their index in ``trace``.

    Without a plan nothing moves and nothing waits. ``transfers`` may end after ``iteration_us``.
    """

    trace: Trace
    page_size: int
    iteration_us: float
    op_start_us: Floats
    op_end_us: Floats
    plan: Plan | None = None
    hardware: Hardware | None = None
    simulation: Simulation | None = None
    stalls: Sequence[Stall] = ()
    transfers: Sequence[Transfer] = ()
    _lives: dict[int, tuple[float, float]] = field(default_factory=dict)  # where choices say so
    _remade: dict[int, list[_Remade]] = field(default_factory=dict)  # tensor → pages of it
    _start: dict[int, list[StartRun]] = field(default_factory=dict)
    _temporary: Sequence[tuple[float, int]] = ()  # when, frames taken or given back by reruns
    _moves: dict[int, list[int]] = field(default_factory=dict)  # tensor → moves of it
    _transfers: dict[int, list[Transfer]] = field(default_factory=dict)  # move → its transfers

    def queued_us(self, move: Move) -> float:
        """When ``move`` is queued: at the end of the op before the one that it belongs to."""
        assert self.simulation is not None
        assert self.simulation.queued_us is not None
        return float(self.simulation.queued_us[move.issue_op])

    def lifetime_us(self, tensor: int) -> tuple[float, float]:
        """From when to when ``tensor`` exists; one that lives on into the next iteration ends
        after this one."""
        if self.trace.tensor_persistent[tensor]:
            return 0.0, self.iteration_us
        if tensor in self._lives:
            return self._lives[tensor]
        first, last = self.trace.first_op[tensor], self.trace.last_op[tensor]
        return float(self.op_start_us[first]), float(self.op_end_us[last])

    def moves_of(self, tensor: int) -> list[Move]:
        """The plan's moves of ``tensor``, in their order."""
        return (
            [self.plan.moves[index] for index in self._moves.get(tensor, ())] if self.plan else []
        )

    def residency(self, tensor: int, *, by_page: bool = False) -> list[Span]:
        """Where the pages of ``tensor`` are while it exists, by pages, then by time: pages that
        move together are one span, or each has its own."""
        spans: list[Span] = []
        runs = self._runs(tensor)
        if by_page and len(runs) + len(self.moves_of(tensor)) > 1:
            runs = [(page, page + 1) for page in range(runs[-1][1])]
        for first, last in runs:
            spans += self._spans(tensor, first, last)
        return spans

    def _runs(self, tensor: int) -> list[tuple[int, int]]:
        """Its pages, cut where a move, a transfer or what is made again begins or ends."""
        cuts = {0, int(-(-self.trace.tensor_bytes[tensor] // self.page_size))}
        for index in self._moves.get(tensor, ()):
            assert self.plan is not None
            for part in (self.plan.moves[index], *self._transfers.get(index, ())):
                cuts |= {part.first_page, part.first_page + part.page_count}
        for run in (*self._remade.get(tensor, ()), *self._start.get(tensor, ())):
            cuts |= {run.first_page, run.first_page + run.page_count}
        edges = sorted(cuts)
        return list(itertools.pairwise(edges))

    def _start_of(self, tensor: int, first: int, last: int) -> str:
        """Where pages that never move are: those that only the host uses are below."""
        runs = self._start.get(tensor, ())
        return next((run.tier for run in runs if _covers(run, first, last)), DEVICE)

    def _spans(self, tensor: int, first: int, last: int) -> list[Span]:
        """Of pages that always move together."""
        born, dead = self.lifetime_us(tensor)
        changes = self._changes(tensor, first, last)
        if self.trace.tensor_persistent[tensor]:
            # The end of the iteration before is the end of this one. What it left comes first even
            # where some pages of the run go on before others have ended.
            late = [(time - dead, place) for time, place in changes if time >= dead]
            changes = late + [change for change in changes if change[0] < dead]
            place = changes[-1][1] if changes else self._start_of(tensor, first, last)
        else:
            place = DEVICE
            if dead > self.iteration_us:  # what is done to it in the next iteration comes after
                changes = [(us if us >= born else us + self.iteration_us, to) for us, to in changes]
                changes.sort(key=lambda change: change[0])
        spans: list[Span] = []
        begin = born
        for time, following in [*changes, (dead, "")]:
            if following == _REMADE:
                if place != DISCARDED:
                    continue
                following = DEVICE
            end = min(max(time, begin), dead)
            if end > begin and spans and spans[-1].place == place:
                spans[-1] = spans[-1]._replace(end_us=end)
            elif end > begin:
                spans.append(Span(tensor, first, last - first, begin, end, place))
            begin, place = end, following
        return spans if dead <= self.iteration_us else self._within(spans)

    def _within(self, spans: list[Span]) -> list[Span]:
        """What goes on into the next iteration at the begin of this one, where the same happens."""
        found: list[Span] = []
        for span in spans:
            begin, end = span.begin_us, span.end_us
            while begin < end:
                earlier = self.iteration_us * (begin // self.iteration_us)
                cut = min(end, earlier + self.iteration_us)
                found.append(span._replace(begin_us=begin - earlier, end_us=cut - earlier))
                begin = cut
        return sorted(found, key=lambda span: span.begin_us)

    def _changes(self, tensor: int, first: int, last: int) -> list[tuple[float, str]]:
        """(when, where to) of pages ``first`` to ``last`` by the moves of one iteration."""
        found: list[tuple[float, str]] = []
        for index in self._moves.get(tensor, ()):
            assert self.plan is not None
            move = self.plan.moves[index]
            if move.action == DISCARD and _covers(move, first, last):
                found.append((self.queued_us(move), DISCARDED))
                found += [
                    (part.us, _REMADE)
                    for part in self._remade.get(tensor, ())
                    if _covers(part, first, last)
                ]
                found.sort(key=lambda change: change[0])
            if move.action in ("drop", DISCARD) or not _covers(move, first, last):
                continue
            mine = [t for t in self._transfers.get(index, ()) if _covers(t, first, last)]
            if move.action == "out":
                found.append((self.queued_us(move), LEAVING if mine else move.tier))
            for transfer in mine:
                page_us = (transfer.end_us - transfer.begin_us) / transfer.page_count
                begin = transfer.begin_us + (first - transfer.first_page) * page_us
                if move.action == "in" and transfer.end_us > transfer.begin_us:
                    found.append((begin, COMING))
                if transfer.arrived:
                    place = DEVICE if move.action == "in" else move.tier
                    found.append((begin + (last - first) * page_us, place))
        return found


def _covers(part: Move | Transfer | _Remade | StartRun, first: int, last: int) -> bool:
    return part.first_page <= first and last <= part.first_page + part.page_count


def timeline(trace: Trace, plan: Plan | None = None, hardware: Hardware | None = None) -> Timeline:
    """Of ``plan`` on ``hardware``, both or neither. Raises ``PlanError`` if it is infeasible there.

    ``plan.trace_sha256`` is not looked at; ``commands.checks`` does that with the files' names.
    """
    if plan is None or hardware is None:
        ends = np.cumsum(trace.op_duration_us)
        starts = ends - trace.op_duration_us
        return Timeline(trace, trace.page_size, trace.ideal_us, starts, ends)
    result = simulate(trace, hardware, plan, log_transfers=True)
    if result.predicted is None or result.transfers is None:
        raise PlanError(f"the plan is infeasible on this machine: {result.reason}")
    moves: dict[int, list[int]] = defaultdict(list)
    for number, move in enumerate(plan.moves):
        moves[trace.index_of[move.tensor]].append(number)
    transfers: dict[int, list[Transfer]] = defaultdict(list)
    for transfer in result.transfers:
        transfers[transfer.move].append(transfer)
    nothing = np.zeros(0)
    return Timeline(
        trace,
        hardware.page_size,
        result.predicted.iteration_us,
        nothing if result.op_start_us is None else result.op_start_us,
        nothing if result.op_end_us is None else result.op_end_us,
        plan,
        hardware,
        result,
        result.stalls,
        result.transfers,
        _moves=dict(moves),
        _transfers=dict(transfers),
        **_lives_of_choices(trace, plan, result),
    )


def _lives_of_choices(trace: Trace, plan: Plan, result: Simulation) -> dict[str, Any]:
    """How long tensors live where a plan discards, runs ops again, steps on the host or defers; and
    what ops that run again take."""
    assert result.predicted is not None
    assert result.op_start_us is not None
    assert result.op_end_us is not None
    if not plan.has_choices:
        return {}
    program, period_us = make_program(trace, plan, plan.page_size), result.predicted.iteration_us
    again = iter(result.reruns)
    times = [
        next(again)[2:] if kind == AGAIN else (result.op_start_us[op], result.op_end_us[op])
        for kind, op in zip(program.kind, program.op)
    ]
    remade: defaultdict[int, list[_Remade]] = defaultdict(list)
    for step, spans in program.remade.items():
        for span in spans:
            remade[span.tensor].append(_Remade(times[step][0], span.first, span.last - span.first))
    temporary = [(times[step][0], frames) for step, frames in program.temporary.items()]
    temporary += [(times[step][1], -frames) for step, frames in program.given.items()]
    start: defaultdict[int, list[StartRun]] = defaultdict(list)
    for below in plan.start:
        start[trace.index_of[below.tensor]].append(below)
    lives: dict[int, tuple[float, float]] = {}
    for tensor in np.flatnonzero(~trace.tensor_persistent).tolist():
        if tensor in program.private:
            lives[tensor] = 0.0, 0.0
            continue
        later_us = period_us if tensor in program.wraps else 0.0
        begin, end = times[program.first[tensor]][0], times[program.last[tensor]][1] + later_us
        lives[tensor] = float(begin), float(end)
    offsets = trace.access_offsets
    for run in result.host_runs:
        # One that began before its op joined is of the iteration before.
        early = run.begin_us < result.op_start_us[run.op] - EPSILON_US
        end_us = run.end_us + (period_us if early else 0.0)
        for tensor in trace.access_tensor[offsets[run.op] : offsets[run.op + 1]].tolist():
            if tensor in lives and tensor not in program.private:
                lives[tensor] = lives[tensor][0], max(lives[tensor][1], end_us)
    return {
        "_lives": lives,
        "_remade": dict(remade),
        "_start": dict(start),
        "_temporary": temporary,
    }


def instants(time: Floats) -> Floats:
    """Times that lie as close together as what happens at one instant are all the first of them.

    The same instant reached over transfers and over ops differs in its last bits.
    """
    order = np.argsort(time, kind="stable")
    ordered = time[order]
    begins = np.diff(ordered, prepend=-np.inf) > EPSILON_US
    found = np.empty_like(time)
    found[order] = ordered[begins][np.cumsum(begins) - 1]
    return found


def device_curve(line: Timeline) -> Curve:
    """Frames that are held over time, page by page, by the kind of the tensor that holds them.

    A frame is held until the page that leaves it has arrived, and from when the transfer of the
    page that takes it begins. Pages that only ops that run again see count too.
    """
    trace = line.trace
    if line.plan is None or line.simulation is None or not line.iteration_us:
        return Curve(line.op_start_us, live_bytes_by_kind(trace, line.page_size))
    parts = [(0.0, 0, KINDS[0])]
    parts += [(us, frames, "activation") for us, frames in line._temporary]
    for tensor, kind in enumerate(trace.tensor_kinds):
        for span in line.residency(tensor, by_page=True):
            if span.place in HELD:
                parts.append((span.begin_us, span.page_count, kind))
                parts.append((span.end_us, -span.page_count, kind))
    times = instants(np.array([us for us, *_ in parts]))
    order = np.argsort(times, kind="stable")
    times = times[order]
    last = np.append(np.diff(times) > 0, True) & (times < line.iteration_us - EPSILON_US)
    by_kind: dict[str, Ints] = {}
    changed = np.zeros(int(last.sum()), np.bool_)
    changed[:1] = True
    for kind in KINDS:
        frames = np.array([frames if of == kind else 0 for _, frames, of in parts], np.int64)
        levels = np.cumsum(frames[order])[last] * line.page_size
        changed[1:] |= np.diff(levels) != 0
        if levels.any():
            by_kind[kind] = levels
    return Curve(times[last][changed], {kind: of[changed] for kind, of in by_kind.items()})


def telling_points(times: Floats, total: Any, span_us: float, most: int) -> Ints:
    """Indices of at most ``most`` points of a curve: all, or of each stretch of time the first and
    last one, the highest and the lowest."""
    count = len(times)
    if count <= most:
        return np.arange(count)
    stretches = most // 4
    stretch = np.minimum(times / (span_us or 1.0) * stretches, stretches - 1).astype(np.int64)
    order = np.lexsort((total, stretch))
    lowest = order[np.flatnonzero(np.diff(stretch[order], prepend=-1))]
    highest = order[np.flatnonzero(np.diff(stretch[order], append=stretches))]
    first = np.flatnonzero(np.diff(stretch, prepend=-1))
    last = np.flatnonzero(np.diff(stretch, append=stretches))
    return np.unique(np.concatenate([first, last, lowest, highest]))
