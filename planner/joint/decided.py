"""Choices carried out: the trace as it runs then, and the plan that the moves of that make.

What runs again before an op is part of that op here, and a tensor that is discarded is two, one
until its last use before and one from when it is made again. Ops keep their numbers, so moves need
no translation.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import pairwise

import numpy as np

from ..hardware import Hardware
from ..lifetimes import KEPT, LAST, RETURN, Gaps
from ..lp.fit import fit
from ..lp.mend import SHORTEST_US, mended, put_off, sooner
from ..lp.narrow import largest, less_room
from ..lp.problem import HOST, Problem, make_problem, merged, with_kept_copies
from ..lp.program import Builder, Solution, Unsolved, solve, solve_loosely
from ..lp.schedule import Schedule, make_schedule, to_moves
from ..plan import DEVICE, DISCARD, Move, Plan, Recompute, StartRun
from ..simulation import Simulation
from ..simulator import simulate
from ..trace import READ, WRITE, Floats, Ints, Trace
from .host_order import MOST_ORDERS, Release, order_steps
from .options import Impossible, Remake, Unit, Uses

MOST_STEPS = 1200
MOST_MENDED = 1.08  # times the best plan's time: mending seldom saves more
MOST_RESERVE, RESERVE_SHARE = 16, 64  # pages left free, and one of so many at most
GLANCE_STEPS = 120  # of a program that only shows whether choices can be the best
Again = dict[int, list[int]]  # op → ops that run again before it


@dataclass(frozen=True, eq=False)
class Decisions:
    """Tensors that are discarded, and updates that the host takes."""

    remakes: Sequence[Remake] = ()
    units: Sequence[Unit] = ()


@dataclass(frozen=True, eq=False)
class Expanded:
    """``trace`` with the choices in it; ``again``: what runs again before which op."""

    trace: Trace
    again: Again
    index: dict[int, int]  # tensor of the recorded trace → of this one, if it is there once
    discards: list[tuple[int, int]]  # (tensor, op before which it is discarded)


def resolve(uses: Uses, remakes: Sequence[Remake]) -> Again:
    """Which ops run again before which op. What one needs that is discarded too is made again with
    it, and stays. Raises ``Impossible``."""
    gone = {each.tensor: each for each in remakes}
    again: Again = {}
    for before in sorted({each.before for each in remakes}):
        here = [each for each in gone.values() if each.before == before]
        if not here:
            continue
        absent = {each.tensor: each.maker for each in gone.values() if each.after < before}
        ops = uses.chain({each.maker for each in here}, before, absent, here[0].tensor)
        again[before] = sorted(ops)
        for op in ops:
            for tensor in uses.writes[op]:
                if tensor in absent:
                    gone.pop(tensor, None)
    return again


def expand(trace: Trace, uses: Uses, decisions: Decisions) -> Expanded:
    """Raises ``Impossible`` for what cannot be made again."""
    again = resolve(uses, decisions.remakes)
    gone = {each.tensor: each for each in decisions.remakes}
    hosted = np.zeros(trace.ops, np.bool_)
    for unit in decisions.units:
        hosted[list(unit.ops)] = True
    rows: list[tuple[int, int, int, int, int]] = []  # op, tensor, mode, first page, pages
    second: dict[int, int] = {}  # tensor → the op before which it is made again
    for before, ops in sorted(again.items()):
        for op in ops:
            for tensor in uses.writes[op]:
                if tensor in gone and gone[tensor].after < before:
                    second.setdefault(tensor, before)
    number = trace.tensors
    extra: list[int] = []  # tensor of which each new number is another
    twin: dict[int, int] = {}
    for tensor in second:
        twin[tensor] = number + len(extra)
        extra.append(tensor)
    for op, tensor, mode, first, count in zip(
        trace.access_op.tolist(),
        trace.access_tensor.tolist(),
        trace.access_mode.tolist(),
        trace.access_first_page.tolist(),
        trace.access_page_count.tolist(),
    ):
        if hosted[op]:
            continue
        mine = twin[tensor] if tensor in second and op > gone[tensor].after else tensor
        rows.append((op, mine, mode, first, count))
    pages = trace.pages(trace.page_size).tolist()
    for before, ops in again.items():
        made: dict[int, int] = {}
        for op in ops:
            for tensor in uses.reads[op]:
                if tensor in made or (uses.first[tensor] == op and not uses.lasting[tensor]):
                    continue
                mine = tensor
                if tensor in second and before > gone[tensor].after:
                    mine = twin[tensor]
                rows.append((before, mine, READ, 0, pages[tensor]))
            for tensor in uses.writes[op]:
                if second.get(tensor) == before:
                    made[tensor] = twin[tensor]
                elif tensor not in made:
                    made[tensor] = number + len(extra)
                    extra.append(tensor)
                rows.append((before, made[tensor], WRITE, 0, pages[tensor]))
    rows.sort(key=lambda row: row[0])
    table = np.array(rows, np.int64).reshape(-1, 5)
    used, renumbered = np.unique(table[:, 1], return_inverse=True)
    origin = np.array([*range(trace.tensors), *extra], np.int64)[used]
    durations = trace.op_duration_us.copy()
    durations[hosted] = 0.0
    for before, ops in again.items():
        durations[before] += trace.op_duration_us[ops].sum()
    expanded = Trace(
        page_size=trace.page_size,
        op_names=trace.op_names,
        op_start_us=trace.op_start_us,
        op_duration_us=durations,
        tensor_ids=trace.tensor_ids[origin],
        tensor_names=[trace.tensor_names[tensor] for tensor in origin.tolist()],
        tensor_bytes=trace.tensor_bytes[origin],
        tensor_kinds=[trace.tensor_kinds[tensor] for tensor in origin.tolist()],
        tensor_persistent=trace.tensor_persistent[origin],
        access_op=table[:, 0].copy(),
        access_tensor=renumbered.reshape(-1).astype(np.int64),
        access_mode=table[:, 2].astype(np.int8),
        access_first_page=table[:, 3].copy(),
        access_page_count=table[:, 4].copy(),
    )
    index = {int(tensor): place for place, tensor in enumerate(used.tolist())}
    discards = [(tensor, each.after + 1) for tensor, each in gone.items() if tensor in second]
    return Expanded(expanded, again, index, discards)


@dataclass(frozen=True, eq=False)
class Outcome:
    """A plan that runs, and what the program said of it."""

    plan: Plan
    simulation: Simulation
    least_us: float

    @property
    def iteration_us(self) -> float:
        assert self.plan.predicted
        return self.plan.predicted.iteration_us


@dataclass
class Planner:
    """Plans the moves of choices on one trace and machine."""

    trace: Trace
    hardware: Hardware
    uses: Uses
    progress: Callable[[str, float], None]
    policy: str = "joint"
    most_steps: int = MOST_STEPS  # of the program for the moves; neighbours of more ops are joined
    cutoff_us: float = math.inf  # choices whose program takes longer are not tried
    most_orders: int = MOST_ORDERS  # of the host's list

    def plan(
        self,
        decisions: Decisions,
        begins_us: Floats | None = None,
        *,
        rounds: int = 2,
    ) -> Outcome | None:
        """The fastest plan found for these choices; ``begins_us``: about when each op begins,
        [ops + 1]. ``None`` if none runs."""
        try:
            expanded = expand(self.trace, self.uses, decisions)
        except Impossible:
            return None
        best: Outcome | None = None
        if begins_us is None:
            begins_us = np.concatenate([[0.0], np.cumsum(expanded.trace.op_duration_us)])
        measured: dict[Unit, float] | None = None
        for _ in range(rounds if decisions.units else 1):
            hosted = Hosted(
                self.trace, self.hardware, decisions.units, begins_us, measured, self.most_orders
            )
            found = self._once(decisions, expanded, hosted)
            if found is None:
                return best
            outcome, begins_us = found
            if outcome is None:
                continue
            if best is None or faster(outcome, best):
                best = outcome
            measured = hosted.measured(outcome.simulation)
        return best

    def _once(
        self, decisions: Decisions, expanded: Expanded, hosted: Hosted
    ) -> tuple[Outcome | None, Floats] | None:
        begins_us = hosted.begins_us
        best: Outcome | None = None
        problem = hosted.problem(expanded, make_problem(expanded.trace, self.hardware))
        if problem is None or self._too_slow(problem):
            return None
        first_op = np.arange(problem.steps)
        if problem.steps > self.most_steps:
            problem, first_op = merged(problem, self.most_steps, relaxed=False)
            problem = largest(problem)
        spare = min(MOST_RESERVE, int(self.hardware.device_pages) // RESERVE_SHARE)
        for reserve in dict.fromkeys((spare, 0)):
            try:
                solution = solve(
                    less_room(problem, reserve),
                    reserve_pages=reserve,
                    copies_keep_slots=True,
                    time_limit_s=60,
                    make=partial(_Timed, hosted, first_op) if decisions.units else None,
                )
            except Unsolved:
                return None  # with less in reserve it takes as long
            if solution is None:
                continue
            least_us = float(problem.duration_us.sum()) + solution.stall_us
            if least_us > self.cutoff_us:
                return None
            made = self._made(expanded, hosted, problem, first_op, solution)
            simulation = simulate(self.trace, self.hardware, made, log_transfers=True)
            if simulation.predicted is not None:
                made = replace(made, predicted=simulation.predicted)
                if simulation.predicted.iteration_us <= MOST_MENDED * self.cutoff_us:
                    running = expanded.trace
                    mends = [hosted.reorder, put_off(running), hosted.mend, *sooner(running)]
                    made, simulation = mended(self.trace, self.hardware, made, simulation, mends)
                outcome = Outcome(made, simulation, least_us)
                if best is None or faster(outcome, best):
                    best = outcome
            begins_us = _begins(expanded.trace, problem, first_op, solution)
            if best is not None:
                break
        if best is not None and best.simulation.op_start_us is not None:
            begins_us = np.append(best.simulation.op_start_us, best.iteration_us)
        return best, begins_us

    def _too_slow(self, problem: Problem) -> bool:
        """Whether a program of few steps, which is soon solved, already says so."""
        if math.isinf(self.cutoff_us) or problem.steps <= 2 * GLANCE_STEPS:
            return False
        problem, _ = merged(problem, GLANCE_STEPS, relaxed=True)
        try:
            solution = solve_loosely(problem, time_limit_s=60)
        except Unsolved:
            return False
        if solution is None:  # of so few steps; it may have one of all
            return False
        return float(problem.duration_us.sum()) + solution.stall_us > self.cutoff_us

    def _made(
        self,
        expanded: Expanded,
        hosted: Hosted,
        problem: Problem,
        first_op: Ints,
        solution: Solution,
    ) -> Plan:
        schedule = fit(problem, make_schedule(problem, solution))
        moves, start = to_moves(expanded.trace, problem, schedule, first_op)
        moves = [hosted.in_time(move) for move in moves]
        more, started = hosted.moves(expanded, problem, schedule, first_op)
        ids, pages = self.trace.tensor_ids, self.trace.pages(self.hardware.page_size)
        for tensor, op in expanded.discards:
            run = (int(ids[tensor]), 0, int(pages[tensor]))
            more.append((op - 0.3, Move(*run, DEVICE, DISCARD, op)))
        order = sorted([*more, *((m.issue_op, m) for m in moves)], key=lambda pair: pair[0])
        return Plan(
            policy=self.policy,
            page_size=self.hardware.page_size,
            device_bytes=self.hardware.device_bytes,
            host_bytes=self.hardware.host_bytes,
            disk_bytes=self.hardware.disk_bytes,
            hardware=self.hardware,
            moves=[move for _, move in order],
            start=sorted({*start, *started}),
            trace_sha256=self.trace.sha256,
            recompute=_ranges(expanded.again),
            host_steps=hosted.order,
        )


def _ranges(again: Again) -> list[Recompute]:
    """Ops that follow each other are one entry."""
    found = []
    for before, ops in sorted(again.items()):
        first = ops[0]
        for op, following in pairwise([*ops, -1]):
            if following != op + 1:
                found.append(Recompute(first, op, before))
                first = following
    return found


def _begins(trace: Trace, problem: Problem, first_op: Ints, solution: Solution) -> Floats:
    """When each op begins by the program, and the iteration ends."""
    steps = np.concatenate([[0.0], np.cumsum(problem.duration_us + solution.stalls_us)])
    before = np.concatenate([[0.0], np.cumsum(trace.op_duration_us[:-1])])
    of_op = _step_of(first_op, trace.ops)
    return np.append(steps[of_op] + before - before[first_op[of_op]], steps[-1])


def _step_of(first_op: Ints, ops: int) -> Ints:
    """The step of each op."""
    return np.repeat(np.arange(len(first_op)), np.diff(np.append(first_op, ops)))


def faster(one: Outcome, other: Outcome) -> bool:
    return one.iteration_us < other.iteration_us


class Hosted:
    """The host's list, and what it means for the program: when weights may come back."""

    def __init__(
        self,
        trace: Trace,
        hardware: Hardware,
        units: Sequence[Unit],
        begins_us: Floats,
        measured: dict[Unit, float] | None = None,
        most_orders: int = MOST_ORDERS,
    ) -> None:
        """``measured``: when the steps ended in a run, in the order of its list."""
        self.trace, self.units = trace, units
        self.page_size = hardware.page_size
        self.pages = trace.pages(hardware.page_size).tolist()
        out_us = hardware.page_us("host", "out")
        self.in_us = in_us = hardware.page_us("host", "in")
        period = float(begins_us[-1])
        releases: list[Release] = []
        free = 0.0
        for unit in sorted(units, key=lambda unit: unit.given):
            gradient = sum(self.pages[tensor] for tensor in unit.gradients)
            free = max(free, float(begins_us[unit.given + 1])) + gradient * out_us
            joined = float(begins_us[unit.ops[-1]])
            weight = sum(self.pages[tensor] for tensor in unit.weights)
            turns, due = divmod(unit.due, trace.ops)
            wanted = turns * period + float(begins_us[due]) - weight * in_us
            releases.append(Release(unit, max(free, joined), wanted))
        self.ends_us = measured or order_steps(releases, period, most_orders)
        self.late_us = [self.ends_us[each.unit] - each.due_us for each in releases]
        self.released = [each.unit for each in releases]
        self.order = [op for unit in self.ends_us for op in unit.ops]
        self.left: dict[int, int] = {}  # weight → its last use before the host's step
        self.begins_us, self.period = begins_us, period
        self.latest = {
            int(trace.tensor_ids[tensor]): (int(trace.first_op[tensor]), unit.given, unit.ops[0])
            for unit in units
            for tensor in unit.gradients
        }

    def measured(self, simulation: Simulation) -> dict[Unit, float] | None:
        """When the steps of ``simulation`` ended, since the begin of the iteration that they are
        of."""
        ends = {each.op: each.end_us for each in simulation.host_runs}
        assert simulation.op_start_us is not None
        assert simulation.predicted is not None
        found = {}
        for unit in self.ends_us:
            last = unit.ops[-1]
            if last not in ends:
                return None
            late = ends[last] < simulation.op_start_us[last]
            found[unit] = ends[last] + late * simulation.predicted.iteration_us
        return found

    def mend(self, plan: Plan, simulation: Simulation) -> Plan:
        """Weights come back when the host has stepped: not before, since what is behind them in
        the queue would wait too, and in time for what has waited for them."""
        measured = self.measured(simulation)
        if measured is None or simulation.queued_us is None:
            return plan
        assert simulation.predicted is not None
        ops, period = self.trace.ops, simulation.predicted.iteration_us
        queued_us = np.concatenate([simulation.queued_us, simulation.queued_us + period])
        waits = {(each.op, each.tensor): each.us for each in simulation.stalls}
        place = {
            int(self.trace.tensor_ids[t]): (unit, t) for unit in self.units for t in unit.weights
        }
        moves, start = [], set(plan.start)
        for move in plan.moves:
            unit, tensor = place.get(move.tensor, (None, -1))
            moves.append(move)
            if unit is None or move.action != "in":
                continue
            joins, turn = unit.ops[-1], ops if move.issue_op <= unit.due % ops else 0
            issue = move.issue_op + (turn if unit.due >= ops else 0)
            if not joins < issue <= unit.due:
                continue
            ready = int(np.searchsorted(queued_us, measured[unit] - SHORTEST_US))
            new = issue
            if queued_us[issue] < measured[unit] - SHORTEST_US:
                new = min(ready, unit.due)
            elif (waited_us := waits.get((unit.due % ops, tensor), 0.0)) > SHORTEST_US:
                begins_us = queued_us[issue] - waited_us
                sooner = int(np.searchsorted(queued_us, begins_us, "right")) - 1
                new = max(joins + 1, ready, min(sooner, issue))
            if new != issue:
                moves[-1] = move._replace(issue_op=new % ops)
                run = StartRun(move.tensor, move.first_page, move.page_count, "host")
                if new >= ops > issue:
                    start.add(run)
                elif issue >= ops > new:
                    start.discard(run)
        if moves == plan.moves:
            return plan
        moves.sort(key=lambda move: move.issue_op)
        return replace(plan, moves=moves, start=sorted(start))

    def reorder(self, plan: Plan, simulation: Simulation) -> Plan:
        """The list again, by when the gradients did arrive and the weights were wanted."""
        transfers, queued_us = simulation.transfers, simulation.queued_us
        if not self.units or transfers is None or queued_us is None:
            return plan
        assert simulation.predicted is not None
        period = simulation.predicted.iteration_us
        arrived: dict[int, float] = {}
        for each in transfers:
            if each.is_out:
                arrived[each.tensor] = max(arrived.get(each.tensor, 0.0), each.end_us)
        releases = []
        for unit in self.units:
            there = [arrived.get(tensor, 0.0) for tensor in unit.gradients]
            turns, due = divmod(unit.due, self.trace.ops)
            wanted = turns * period + float(queued_us[due])
            wanted -= self.pages_of(unit.weights) * self.in_us
            joined = float(queued_us[unit.ops[-1]])
            releases.append(Release(unit, max([joined, *there]), wanted))
        order = [op for unit in order_steps(releases, period) for op in unit.ops]
        return plan if order == plan.host_steps else replace(plan, host_steps=order)

    def pages_of(self, tensors: Sequence[int]) -> int:
        return sum(self.pages[tensor] for tensor in tensors)

    def _op_at(self, us: float) -> int:
        """The first op that begins then or later (≥ ops: in the next iteration)."""
        turns, rest = divmod(us, self.period)
        op = int(np.searchsorted(self.begins_us[:-1], rest - 1e-6))
        return int(turns) * self.trace.ops + op

    def problem(self, expanded: Expanded, problem: Problem) -> Problem | None:
        """``problem`` with the gaps of what the host updates. ``None`` if its states and weights do
        not fit in host memory."""
        if not self.units:
            return problem
        steps, gaps = problem.steps, problem.gaps
        begin, end, kind = gaps.begin.copy(), gaps.end.copy(), gaps.kind.copy()
        live, held = problem.live.copy(), np.zeros(steps, np.int64)
        of_tensor: dict[int, list[int]] = defaultdict(list)
        for gap, tensor in enumerate(gaps.tensor.tolist()):
            of_tensor[tensor].append(gap)
        going: list[tuple[int, int, int, int]] = []  # tensor, pages, begin, end of gradients
        below = 0
        for unit in self.units:
            below += sum(self.pages[tensor] for tensor in (*unit.weights, *unit.states))
            ready = min(self._op_at(self.ends_us[unit]), unit.due - 1)
            for gap in [g for tensor in unit.weights for g in of_tensor[expanded.index[tensor]]]:
                kind[gap] = KEPT
                if begin[gap] < unit.ops[0] and end[gap] > unit.ops[-1]:
                    self.left[int(gaps.tensor[gap])] = int(begin[gap])
                    back = max(int(begin[gap]) + 1, ready)
                    _add(live, int(begin[gap]) + 1, back, -int(gaps.pages[gap]))
                    late = steps if back >= steps else 0
                    kind[gap], begin[gap], end[gap] = RETURN, back - 1 - late, end[gap] - late
            # Gradients are there when their step is to begin, or all that follow are late. What
            # needs the weights waits for the step, so it is over then at the latest.
            taken = max(self._op_at(self.ends_us[unit] - unit.host_us), unit.ops[-1] + 1)
            taken, over = min(taken, unit.due), min(self._op_at(self.ends_us[unit]), unit.due)
            _add(held, taken, over + 1, self.pages_of(unit.gradients))
            for tensor in unit.gradients:
                place = expanded.index[tensor]
                given = int(expanded.trace.last_op[place])
                _add(live, given + 1, taken, self.pages[tensor])
                going.append((place, self.pages[tensor], given, taken))
        host = problem.tiers[0] if problem.tiers and problem.tiers[0].index == HOST else None
        if host is None or host.pages < below:
            return None
        gaps = _with_going(replace(gaps, begin=begin, end=end, kind=kind), going)
        tiers = (replace(host, pages=host.pages - below), *problem.tiers[1:])
        most = gaps.pages.astype(np.float64)
        return with_kept_copies(
            replace(problem, live=live, gaps=gaps, most=most, tiers=tiers, held=held)
        )

    def in_time(self, move: Move) -> Move:
        """A gradient's last way out begins before its step joins."""
        if move.action != "out" or move.tensor not in self.latest:
            return move
        first, given, joins = self.latest[move.tensor]
        late = move.issue_op > joins or (move.issue_op < first and given >= first)
        return move._replace(issue_op=joins) if late else move

    def moves(
        self, expanded: Expanded, problem: Problem, schedule: Schedule, first_op: Ints
    ) -> tuple[list[tuple[float, Move]], list[StartRun]]:
        """What the schedule has not: weights leave and states are below; gradients and weights
        that it left out. With the places of moves: op, and a fraction for the order there."""
        gaps, ops = problem.gaps, self.trace.ops
        number = expanded.trace.tensor_ids[gaps.tensor].tolist()
        back: dict[int, list[tuple[int, int, int]]] = defaultdict(list)  # op, first page, pages
        sent: defaultdict[int, int] = defaultdict(int)
        for part in range(len(problem.tiers)):
            for chunk in schedule.ins[part]:
                if gaps.kind[chunk.gap] == RETURN:
                    first = int(gaps.first_page[chunk.gap]) + chunk.first
                    op = int(first_op[chunk.step % problem.steps])
                    back[number[chunk.gap]].append((op, first, chunk.count))
            for chunk in schedule.outs[part]:
                sent[number[chunk.gap]] += chunk.count if gaps.kind[chunk.gap] == LAST else 0
        found: list[tuple[float, Move]] = []
        start: list[StartRun] = []
        for unit in self.units:
            start += [StartRun(*self._whole(tensor), "host") for tensor in unit.states]
            for tensor in unit.weights:
                whole = self._whole(tensor)
                # What runs again may need it longer.
                left = self.left.get(expanded.index[tensor], max(unit.left))
                out, due = left + 1, unit.due % ops
                found.append((out - 0.5, Move(*whole, "host", "out", out)))
                have = {p for _, a, n in back[whole[0]] for p in range(a, a + n)}
                for first, count in _runs([p not in have for p in range(whole[2])]):
                    found.append((due + 0.25, Move(whole[0], first, count, "host", "in", due)))
                    back[whole[0]].append((due, first, count))
                if unit.due >= ops:
                    early = [run for run in back[whole[0]] if run[0] < out]  # the next iteration's
                    start += [StartRun(whole[0], first, count, "host") for _, first, count in early]
            for tensor in unit.gradients:
                whole = self._whole(tensor)
                if sent[whole[0]] < whole[2]:
                    assert not sent[whole[0]]
                    op = int(expanded.trace.last_op[expanded.index[tensor]]) + 1
                    found.append((op - 0.25, Move(*whole, "host", "out", op)))
        for tensor in sorted({tensor for unit in self.units for tensor in unit.shared}):
            whole = self._whole(tensor)
            for op in [(w + 1) % ops for w in self.written_by(tensor)] or [0]:
                found += [(op - 0.4, Move(*whole, "host", how, op)) for how in ("out", "in")]
        return found, start

    def _whole(self, tensor: int) -> tuple[int, int, int]:
        return int(self.trace.tensor_ids[tensor]), 0, self.pages[tensor]

    def written_by(self, tensor: int) -> list[int]:
        trace = self.trace
        rows = (trace.access_tensor == tensor) & (trace.access_mode & WRITE != 0)
        return sorted(set(trace.access_op[rows].tolist()))


class _Timed(Builder):
    """The program with the host's time in it: steps follow each other in the order of the list,
    each behind its gradient, and what a step updates is used when it has ended and come back. An op
    in a step of several counts as the last of it, or as the first where something is due."""

    def __init__(
        self,
        hosted: Hosted,
        first_op: Ints,
        problem: Problem,
        pages: float,
        copies_keep_slots: bool,
    ) -> None:
        self.hosted = hosted
        self.step_of = _step_of(first_op, hosted.trace.ops).tolist()
        super().__init__(problem, pages, copies_keep_slots)

    def choose(self) -> None:
        problem, hosted, ops = self.problem, self.hosted, self.hosted.trace.ops
        steps, pace = problem.steps, problem.out_rate  # times are in pages of the link out
        durations = problem.duration_us * pace
        begin = self.columns.new(steps)  # when each step begins to run
        rows = self.equal.new(np.append(0.0, durations[:-1]))
        self.equal.add(rows, begin, 1.0)
        self.equal.add(rows[1:], begin[:-1], -1.0)
        self.equal.add(rows, self.stall, -1.0)
        order = list(hosted.ends_us)
        end = self.columns.new(len(order))  # when each of the host's steps ends

        def at_least(us: float, *terms: tuple[int, float]) -> None:
            row = self.below.new(-us * pace)
            for column, sign in terms:
                self.below.add(row, column, -sign)

        last, whole_us = int(begin[-1]), float(problem.duration_us[-1])  # an iteration, with last
        for place, unit in enumerate(order):
            mine, before = int(end[place]), int(end[place - 1])
            took_us = unit.host_us
            if place:
                at_least(took_us, (mine, 1.0), (before, -1.0))
            else:
                at_least(took_us - whole_us, (mine, 1.0), (before, -1.0), (last, 1.0))
            joins = self.step_of[unit.ops[-1]]
            inside_us = float(problem.duration_us[joins]) if steps < ops else 0.0
            at_least(took_us + inside_us, (mine, 1.0), (int(begin[joins]), -1.0))
            out_us = hosted.pages_of(unit.gradients) / problem.out_rate
            if unit.given >= 0:
                given = self.step_of[unit.given]
                given_us = float(problem.duration_us[given])
                at_least(took_us + given_us + out_us, (mine, 1.0), (int(begin[given]), -1.0))
            in_us = hosted.pages_of(unit.weights) / problem.in_rate
            turns, due = divmod(unit.due, ops)
            terms = [
                (int(begin[self.step_of[due]]), 1.0),
                (mine, -1.0),
                *([(last, 1.0)] if turns else []),
            ]
            at_least(in_us - turns * whole_us, *terms)


def _add(live: Ints, first: int, end: int, pages: int) -> None:
    """``pages`` more in the steps from ``first`` to ``end`` (exclusive), on into the next
    iteration."""
    np.add.at(live, np.arange(first, max(first, end)) % len(live), pages)


def _with_going(gaps: Gaps, going: list[tuple[int, int, int, int]]) -> Gaps:
    """With gaps of gradients, each of a version of its own."""
    rows = [row for row in going if row[3] > row[2] + 1]
    if not rows:
        return gaps
    tensor, pages, begin, end = np.array(rows, np.int64).T
    new = np.arange(len(rows))
    none = np.zeros(len(rows), np.int64)
    more = Gaps(
        segment=none - 1,
        tensor=tensor,
        first_page=none,
        pages=pages,
        begin=begin,
        end=end,
        version=new + 1 + int(gaps.version.max(initial=0)),
        lasting=none > 0,
        kind=none + LAST,
        number=new + len(gaps),
    )
    return Gaps(
        *(
            np.concatenate([getattr(gaps, item.name), getattr(more, item.name)])
            for item in fields(Gaps)
        )
    )


def _runs(which: list[bool]) -> list[tuple[int, int]]:
    """(first, count) of the stretches where it holds."""
    found: list[tuple[int, int]] = []
    for page, holds in enumerate(which):
        if not holds:
            continue
        if found and sum(found[-1]) == page:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((page, 1))
    return found
