"""The joint program: what to move, what to make again and which updates the host takes, in shares.

The program of ``lp`` with more columns. Of each tensor that can be made again a share of its pages
is discarded and made again before its next use, or earlier where another that is made again needs
it; that lengthens the op and frees frames until then. Of each update a share is the host's: its
states live in host memory, its gradient goes out, and its weight comes back when the host has
stepped, which takes the host's time. Its value bounds every plan that carries out such choices in
whole tensors. Time may be in steps of several ops.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..hardware import Hardware
from ..lifetimes import Gaps
from ..lp.groups import Loose, loosened
from ..lp.problem import Problem, make_problem, merged, with_kept_copies
from ..lp.program import Builder, run
from ..trace import Bools, Floats, Ints, Trace
from .options import Remake, Unit, Uses

MOST_REMAKES = 4000  # that the program can tell apart
ALIKE, TINY_US = 1.05, 1e-6  # times as long for a page as another is about as long
GROWTH = 1.6  # of the groups of parameters whose steps the program cannot tell apart


@dataclass(frozen=True, eq=False)
class Shares:
    """The program's value and choices: of each remake, by its number, the share that is made again
    (anywhere), of each unit the share that is the host's; and about when each op begins, [ops + 1].
    """

    iteration_us: float
    remakes: Floats
    units: Floats
    begins_us: Floats


def solve_joint(
    trace: Trace,
    hardware: Hardware,
    uses: Uses,
    remakes: Sequence[Remake],
    units: Sequence[Unit],
    *,
    steps: int,
    time_limit_s: float,
    hosted: bool = False,
) -> Shares | None:
    """``hosted``: all of ``units`` are the host's. ``None`` if nothing is feasible. Raises
    ``Unsolved`` if the solver ends without an answer."""
    problem = make_problem(trace, hardware)
    begins = problem.gaps.begin
    step_of = np.arange(trace.ops)
    if trace.ops > steps:
        problem, first = merged(problem, steps, relaxed=True)
        step_of = np.repeat(np.arange(len(first)), np.diff(np.append(first, trace.ops)))
    alike, loose = len(remakes) > MOST_REMAKES, None
    if alike or trace.ops > steps:
        chosen = _chosen_gaps(problem.gaps, begins, () if alike else remakes, units)
        loose = loosened(problem, chosen)
    if units:
        problem = with_kept_copies(problem)
    pages = trace.pages(hardware.page_size).tolist()
    builder = _Joint(problem, trace, uses, remakes, units, step_of, begins, pages, loose)
    builder.least = float(hosted)
    x = run(builder, builder.cost(), time_limit_s, vertex=False)
    return None if x is None else builder.shares(x)


def _chosen_gaps(
    gaps: Gaps, begins: Ints, remakes: Sequence[Remake], units: Sequence[Unit]
) -> Bools:
    """Those of which choices change how much may be off, [gaps]. ``begins``: the op before each."""
    after = {each.tensor: each.after for each in remakes}
    given = {tensor: unit.given for unit in units for tensor in unit.gradients}
    given |= {tensor: -1 for unit in units for tensor in unit.states}
    updates: dict[int, tuple[int, ...]] = {}
    for unit in units:
        updates |= unit.gaps_begin()
    return np.array(
        [
            after.get(tensor) == op
            or given.get(tensor, op + 1) <= op
            or op in updates.get(tensor, ())
            for tensor, op in zip(gaps.tensor.tolist(), begins[gaps.number].tolist())
        ],
        np.bool_,
    )


class _Joint(Builder):
    def __init__(
        self,
        problem: Problem,
        trace: Trace,
        uses: Uses,
        remakes: Sequence[Remake],
        units: Sequence[Unit],
        step_of: Ints,
        gap_begins: Ints,
        page_count: list[int],
        loose: Loose | None = None,
    ) -> None:
        """``step_of``: of each op; ``gap_begins``: the op before each gap, by its number;
        ``loose``: what the program is for, where that is not all of ``problem``'s gaps."""
        self.trace, self.uses, self.remakes, self.units = trace, uses, remakes, units
        self.step_of, self.relaxed = step_of, len(problem.duration_us) < trace.ops
        self.page_count, self.gap_begins = page_count, gap_begins
        self.none: list[int] = []  # columns that are 0
        self.least = 0.0  # share of each update that the host takes
        self.kept_gaps: list[int] = []
        super().__init__(problem, problem.device_pages, False, loose)

    # -- choices ---------------------------------------------------------------------------------
    def choose(self) -> None:
        gaps = self.problem.gaps
        self.gap_of: dict[tuple[int, int], list[int]] = defaultdict(list)  # tensor, op before
        self.of_tensor: dict[int, list[int]] = defaultdict(list)
        self.begin_op: list[int] = self.gap_begins[gaps.number].tolist()
        told = len(gaps) if self.loose is None else self.loose.told
        for gap, tensor in enumerate(gaps.tensor[:told].tolist()):
            self.gap_of[tensor, self.begin_op[gap]].append(gap)
            self.of_tensor[tensor].append(gap)
        self.live_change: list[tuple[int, int, int, float]] = []  # first, end step, column, pages
        self.live_points: list[tuple[int, int, float]] = []  # from this step on
        if len(self.remakes) > MOST_REMAKES and self.loose is not None:
            self._choose_alike(self.loose)
        else:
            self._choose_remakes()
        if self.units:
            self._choose_units()
        self._longer_steps()
        if self.units:
            self._chains()
            self._in_time()
        self._level()

    def _absolute(self, op: int) -> int:
        """The step of an op, ≥ steps in the next iteration."""
        turns, op = divmod(op, self.trace.ops)
        return turns * self.problem.steps + int(self.step_of[op])

    def _between(self, after: int, before: int) -> tuple[int, int]:
        """The steps between two ops, end exclusive; with both of them if steps are relaxed."""
        first, end = self._absolute(after) + 1, self._absolute(before)
        if self.relaxed:
            first, end = first - 1, min(end + 1, first - 1 + self.problem.steps)
        return first, end

    def _places(self) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
        """Of each tensor that may be made again, the ops before which: its next use, and where one
        is made that needs it; and what it needs of the others."""
        by_tensor = {each.tensor: each for each in self.remakes}
        places: dict[int, set[int]] = {each.tensor: {each.before} for each in self.remakes}
        inputs: dict[int, list[int]] = {}
        for each in sorted(self.remakes, key=lambda each: -each.maker):
            inputs[each.tensor] = sorted(
                {t for t in self.uses.reads[each.maker] if t in by_tensor} - {each.tensor}
            )
            for needed in inputs[each.tensor]:
                other = by_tensor[needed]
                places[needed] |= {
                    op for op in places[each.tensor] if other.after < op < other.before
                }
        return {tensor: sorted(ops) for tensor, ops in places.items()}, inputs

    def _choose_remakes(self) -> None:
        by_tensor = {each.tensor: each for each in self.remakes}
        places, inputs = self._places()
        self.remake_columns: list[Ints] = []
        column: dict[tuple[int, int], int] = {}
        from_place: dict[int, tuple[list[int], Ints]] = {}
        for each, us in zip(self.remakes, self._remake_us()):
            mine = places[each.tensor]
            columns = self.columns.new(len(mine))
            self.remake_columns.append(columns)
            pages = self.page_count[each.tensor]
            for op, number in zip(mine, columns.tolist()):
                column[each.tensor, op] = number
                self.before_terms.append(([self.step_of[op]], [number], us))
                self.live_points.append((self._between(each.after, op)[1], number, pages))
            made_from = self._sums_from(columns)  # at this place or a later one
            self.below.add(self.below.new(1.0), made_from[:1], 1.0)
            first, _ = self._between(each.after, each.before)
            self.live_points.append((first, int(made_from[0]), -pages))
            for gap in self.gap_of[each.tensor, each.after]:
                self.size_terms.append(([gap], made_from[:1], -self.problem.gaps.pages[gap]))
            from_place[each.tensor] = mine, made_from
        for (tensor, op), number in column.items():
            for needed in inputs[tensor]:
                other = by_tensor[needed]
                if not other.after < op < other.before:
                    continue
                at, made_from = from_place[needed]
                later = bisect.bisect(at, op)
                row = self.below.new(1.0)
                self.below.add(row, np.array([number, *made_from[later : later + 1]]), 1.0)

    def _remake_us(self) -> list[float]:
        """What each takes at least: ops that several need before the same op count in parts."""
        together: dict[tuple[int, int], int] = defaultdict(int)
        chains = [self.uses.closure(each.tensor, each.before) for each in self.remakes]
        for each, chain in zip(self.remakes, chains):
            for op in chain:
                together[op, each.before] += 1
        durations = self.trace.op_duration_us.tolist()
        return [
            sum(durations[op] / together[op, each.before] for op in chain)
            for each, chain in zip(self.remakes, chains)
        ]

    def _choose_alike(self, loose: Loose) -> None:
        """Of more than can be told apart: one share for all that would leave and be back in the
        same steps, and take about as long for each page. What they need that is gone too is not
        asked for, so this allows more."""
        pages = np.array([self.page_count[each.tensor] for each in self.remakes], np.float64)
        page_us = np.array(self._remake_us()) / np.maximum(pages, 1)
        paces = np.floor(np.log(np.maximum(page_us, TINY_US)) / np.log(ALIKE)).astype(int)
        spans = [self._between(each.after, each.before) for each in self.remakes]
        kinds, index = np.unique(
            [(*s, p) for s, p in zip(spans, paces)], axis=0, return_inverse=True
        )
        group = index.reshape(-1)
        least_us = np.full(len(kinds), np.inf)
        np.minimum.at(least_us, group, page_us)
        sizes = np.bincount(group, weights=pages)
        steps: list[set[tuple[int, int]]] = [set() for _ in kinds]  # in which it may be made again
        before, _ = self._places()
        for each, number in zip(self.remakes, group.tolist()):
            steps[number] |= {
                (self._between(each.after, op)[1], int(self.step_of[op]))
                for op in before[each.tensor]
            }
        shares: list[Ints] = []
        for (first, _, _), mine, size, us in zip(kinds.tolist(), steps, sizes, least_us):
            shares.append(self.columns.new(len(mine)))
            self.below.add(self.below.new(1.0), shares[-1], 1.0)
            for (end, step), column in zip(sorted(mine), shares[-1].tolist()):
                self.live_points += [(first, column, -size), (end, column, size)]
                self.before_terms.append(([step], [column], us * size))
        self.remake_columns = [shares[number] for number in group.tolist()]
        number_of = {
            (each.tensor, each.after): number for each, number in zip(self.remakes, group.tolist())
        }
        begins = self.gap_begins[self.every.number].tolist()
        less: dict[tuple[int, int], int] = defaultdict(int)  # gap, number: pages
        for gap, place in enumerate(zip(self.every.tensor.tolist(), begins)):
            if place in number_of:
                less[int(loose.place[gap]), number_of[place]] += int(self.every.pages[gap])
        for (gap, number), size in less.items():
            columns = shares[number]
            self.size_terms.append((np.full(len(columns), gap), columns, -float(size)))

    def _sums_from(self, columns: Ints) -> Ints:
        """Columns of what each of ``columns`` and those after it are together."""
        sums = self.columns.new(len(columns))
        rows = self.equal.new(np.zeros(len(columns)))
        self.equal.add(rows, sums, 1.0)
        self.equal.add(rows[:-1], sums[1:], -1.0)
        self.equal.add(rows, columns, -1.0)
        return sums

    def _choose_units(self) -> None:
        gaps, pages = self.problem.gaps, self.page_count
        self.share = self.columns.new(len(self.units))
        home = int(self.columns.new(1)[0])  # pages in host of what the host updates
        row = self.equal.new(0.0)
        self.equal.add(row, [home], -1.0)
        self.slot_terms.append((np.arange(self.slots), home, 1.0))
        for unit, share in zip(self.units, self.share.tolist()):
            self.below.add(self.below.new(1.0), [share], 1.0)
            for op in unit.ops:
                us = -float(self.trace.op_duration_us[op])
                self.time_terms.append(([self.step_of[op]], [share], us))
            for tensor in unit.gradients:
                self.live_change.append(
                    (*self._between(unit.given, unit.ops[-1] + 1), share, -pages[tensor])
                )
            for tensor in unit.states:
                self.live_change.append((0, self.problem.steps, share, -pages[tensor]))
            for tensor in unit.inside:
                step = int(self.step_of[self.trace.first_op[tensor]])
                self.live_change.append((step, step + 1, share, -pages[tensor]))
            for tensor, left, back in zip(unit.weights, unit.left, unit.back):
                self.live_change.append((*self._between(left, back), share, -pages[tensor]))
            begins = unit.gaps_begin()
            for tensor in (*unit.gradients, *unit.states, *unit.weights):
                for gap in self.of_tensor[tensor]:
                    if tensor in begins and self.begin_op[gap] not in begins[tensor]:
                        self.kept_gaps.append(gap)
                        limit = self.below.new(0.0)
                        self.below.add(limit, self.parts[-1].off[gap], 1.0)
                        self.below.add(limit, share, -float(gaps.pages[gap]))
                    elif tensor not in unit.gradients or self.begin_op[gap] >= unit.given:
                        self.size_terms.append(([gap], [share], -gaps.pages[gap]))
            below = sum(pages[tensor] for tensor in (*unit.states, *unit.weights))
            self.equal.add(row, [share], float(below))
        if self.loose is not None:
            self._kept_together(self.loose)

    def _kept_together(self, loose: Loose) -> None:
        """As much of gaps that are not told apart as the host's share of their weights may be off
        without being written: a copy is in host in any case."""
        owner = {
            tensor: number for number, unit in enumerate(self.units) for tensor in unit.weights
        }
        mine = np.array([owner.get(tensor, -1) for tensor in self.every.tensor.tolist()], np.int64)
        chosen = (mine >= 0) & (loose.place >= loose.told)
        joined = np.unique(loose.place[chosen])
        limit = self.below.new(np.zeros(len(joined)))
        self.below.add(limit, self.parts[-1].off[joined], 1.0)
        rows = limit[np.searchsorted(joined, loose.place[chosen])]
        self.below.add(rows, self.share[mine[chosen]], -self.every.pages[chosen].astype(np.float64))
        self.kept_gaps += joined.tolist()

    def _longer_steps(self) -> None:
        """One column for each step that choices make longer, or shorter, and for what runs before
        one: many rows say how long it takes, and would have all of their columns."""
        self.time_terms, self.before_terms = (
            self._in_one(terms) for terms in (self.time_terms, self.before_terms)
        )

    def _in_one(self, terms: list[tuple[Any, Any, Any]]) -> list[tuple[Any, Any, Any]]:
        if not terms:
            return []
        found = np.unique(np.concatenate([step for step, _, _ in terms]))
        more = self.columns.new(len(found))
        self.free += more.tolist()
        rows = self.equal.new(np.zeros(len(found)))
        self.equal.add(rows, more, -1.0)
        for step, column, us in terms:
            self.equal.add(rows[np.searchsorted(found, step)], column, us * self.problem.out_rate)
        return [(found, more, 1 / self.problem.out_rate)]

    def _in_time(self) -> None:
        """What the host takes of the updates that are due first fits between the first of their
        gradients and the last of their uses. Groups of :meth:`_chains` do not say that: the host's
        work for one update would serve for another of the group, given earlier and due later. An
        update alone has its gradient go out first, and its weight come back behind it."""
        problem = self.problem
        steps, pace = problem.steps, problem.out_rate  # times are in pages of the link out
        begin = self.columns.new(steps + 1)  # when each step begins to run, and the iteration ends
        stall = np.append(self.stall, -1)
        rows = self.equal.new(np.append(0.0, problem.duration_us * pace))
        self.equal.add(rows, begin, 1.0)
        self.equal.add(rows[1:], begin[:-1], -1.0)
        self.equal.add(rows[:-1], stall[:-1], -1.0)
        for later, terms in ((1, self.time_terms), (0, self.before_terms)):
            for step, column, us in terms:
                self.equal.add(rows[np.asarray(step) + later], column, -us * pace)

        def within(terms: list[tuple[int, float]], first: int, last: int) -> None:
            row = self.below.new(0.0)
            for column, us in terms:
                self.below.add(row, column, us * pace)
            for step, sign in ((first, 1.0), (last, -1.0)):
                turns, step = divmod(step, steps)
                self.below.add(row, begin[step], sign)
                if turns:
                    self.below.add(row, begin[steps], sign * turns)
            # Moves go while it waits, and while something runs before it.
            self.below.add(row, self.stall[first % steps], -1.0)
            for at, column, us in self.before_terms:
                self.below.add(row, column[at == first % steps], -us * pace)

        released = [
            self._absolute(max(unit.given, unit.ops[0] - 1)) + (not self.relaxed)
            for unit in self.units
        ]
        due = [self._absolute(unit.due) + self.relaxed for unit in self.units]
        work: list[tuple[int, float]] = []
        earliest = 2 * steps
        for number in sorted(range(len(self.units)), key=lambda n: (due[n], n)):
            unit, share = self.units[number], int(self.share[number])
            gradients = sum(self.page_count[t] for t in unit.gradients) / problem.out_rate
            first = (t for t, back in zip(unit.weights, unit.back) if back == unit.due)
            weights = sum(self.page_count[t] for t in first) / problem.in_rate
            within([(share, gradients + unit.host_us + weights)], released[number], due[number])
            work.append((share, unit.host_us))
            earliest = min(earliest, released[number])
            within(work, earliest, due[number])

    def _groups(self) -> list[list[int]]:
        """Units by their first use after the update; small groups where that comes first."""
        left = sorted(range(len(self.units)), key=lambda n: self.units[n].due)
        groups, size = [], 2
        while left:
            groups.append(left[:size])
            left = left[size:]
            if len(groups) >= 2:
                size = int(size * GROWTH) + 1
        return groups

    def _chains(self) -> None:
        """Gradients on their way to the host, its steps, and weights on their way back. Stocks and
        flows are in pages of weights."""
        steps, unit_us = self.problem.steps, 1 / self.problem.out_rate
        waiting, running = self.below.new(np.zeros(steps)), self.below.new(self.problem.duration_us)
        self.below.add(waiting, self.stall, -unit_us)
        for row, terms in ((running, self.time_terms), (waiting, self.before_terms)):
            for step, column, us in terms:
                self.below.add(row[step], column, -us)
        busy = np.stack([waiting, running], axis=1).ravel()
        for group in self._groups():
            units = [self.units[number] for number in group]
            weights = [sum(self.page_count[t] for t in unit.weights) for unit in units]
            gradients = sum(self.page_count[t] for unit in units for t in unit.gradients)
            ratio = gradients / max(1, sum(weights))
            each_us = sum(unit.host_us for unit in units) / max(1, sum(weights))
            first = 2 * min(self._absolute(unit.given) + (not self.relaxed) for unit in units)
            last = 2 * max(self._absolute(op) for unit in units for op in unit.back) + self.relaxed
            allowed = 2 * min(self._absolute(unit.ops[0]) for unit in units)
            window = np.arange(first, last + 1)
            slot, length = window % self.slots, len(window)
            out, into, cpu = (self.columns.new(length) for _ in range(3))
            stocks = [self.columns.new(length + 1) for _ in range(4)]
            queued, there, _, early = stocks
            rows = [self.equal.new(np.zeros(length)) for _ in stocks]
            for row, stock in zip(rows, stocks):
                self.equal.add(row, stock[1:], 1)
                self.equal.add(row, stock[:-1], -1)
                self.none += [int(stock[0]), int(stock[-1])]
            self.none += cpu[window < allowed].tolist()
            for row, flow, sign in (
                (rows[0], out, 1), (rows[1], out, -1), (rows[1], cpu, 1),
                (rows[2], cpu, -1), (rows[2], into, 1), (rows[3], into, -1),
            ):  # fmt: skip
                self.equal.add(row, flow, sign)
            for number, unit, pages in zip(group, units, weights):
                given = 2 * (self._absolute(unit.given) + (not self.relaxed)) - first
                self.equal.add(rows[0][given], self.share[number], -float(pages))
                for tensor, back in zip(unit.weights, unit.back):
                    due = 2 * self._absolute(back) + self.relaxed - first
                    size = float(self.page_count[tensor])
                    self.equal.add(rows[3][due], self.share[number], size)
            runs = np.flatnonzero(window % 2 == 1)
            at = slot[runs] // 2
            self.live_terms += [(at, queued[:-1][runs], ratio), (at, early[:-1][runs], 1.0)]
            self.late_terms += [(at, out[runs], -ratio), (at, into[runs], 1.0)]
            self.flow_terms[True].append((slot, out, ratio))
            self.flow_terms[False].append((slot, into, 1.0))
            self.slot_terms.append((slot, there[:-1], ratio))
            self.below.add(busy[slot], cpu, each_us)
            self.moved += [*out.tolist(), *into.tolist()]

    def _level(self) -> None:
        """What choices take away from the pages on the device, as a level that rises and falls."""
        steps = self.problem.steps
        if not self.live_change and not self.live_points:
            return
        level = self.columns.new(steps)
        self.free += level.tolist()
        rows = self.equal.new(np.zeros(steps))
        self.equal.add(rows, level, 1)
        self.equal.add(rows[1:], level[:-1], -1)
        for step, column, pages in self.live_points:
            if step < steps:
                self.equal.add(rows[step], column, -pages)
        for first, end, column, pages in self.live_change:
            if end <= first:
                continue
            end = min(end, first + steps)
            begin, stop = first % steps, end - first + first % steps
            self.equal.add(rows[begin], column, -pages)
            if stop > steps:  # on into the next iteration: there from the begin of this one
                self.equal.add(rows[0], column, -pages)
                stop -= steps
                if stop <= begin:
                    self.equal.add(rows[stop], column, pages)
                continue
            if stop < steps:
                self.equal.add(rows[stop], column, pages)
        self.live_terms.append((np.arange(steps), level, 1.0))

    # -- the program -----------------------------------------------------------------------------
    def bounds(self) -> Floats:
        bounds = super().bounds()
        bounds[self.none, 1] = 0.0
        if self.units:
            kept = self.parts[-1]
            bounds[kept.off[self.kept_gaps], 1] = np.inf
            bounds[kept.written, 1] = 0.0
            bounds[self.share, 0] = self.least
        return bounds

    def shares(self, x: Floats) -> Shares:
        unit_us = 1 / self.problem.out_rate
        stalls = np.maximum(x[self.stall], 0) * unit_us
        times = self.problem.duration_us.copy()
        for terms in (self.time_terms, self.before_terms):
            for step, column, us in terms:
                times[step] += us * x[column]
        begins = np.concatenate([[0.0], np.cumsum(times + stalls)])
        ops = np.append(begins[self.step_of], begins[-1])
        return Shares(
            float(begins[-1]),
            np.array([x[columns].sum() for columns in self.remake_columns]),
            x[self.share] if self.units else np.zeros(0),
            ops,
        )
