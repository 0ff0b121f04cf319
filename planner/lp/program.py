"""The linear program: the least stall with which a trace can run inside the tiers.

Time has two slots per step: the stall before it (its length y is a variable) and its run. Per slot
and tier there are flows out (o) and in (i), in pages, and three stocks: queued to go out (q), on
the tier below (e), and brought back before it is due (p). Each gap has z pages off the device per
tier, of which w have to be written there first; the others have a good copy from an earlier gap of
the same version. Only sums over gaps appear per slot, so there are some 20 variables per step and a
few per gap.

It bounds every plan that sends a page out at most once between two uses. Pages may be split: a page
is small against a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..lifetimes import DYING, KEPT, LAST, RETURN
from ..trace import Floats, Ints
from .groups import Loose, grouped, loosened, shared_out
from .problem import Problem

BuilderMaker = Callable[[Problem, float, bool], "Builder"]
MOVE_COST, DISK_WRITE_COST = 1e-5, 1e-5  # of a page, in the time that a page takes on the link


class Unsolved(Exception):  # noqa: N818 (it says nothing about the problem)
    """The solver ran out of time, or into numerical trouble."""


@dataclass(frozen=True, eq=False)
class Solution:
    """``stall_us`` in all; per tier ``off`` pages by gap, flows by slot (0: stall before step 0,
    1: its run, …), and of the pages whose gap crosses the iteration's begin those that are back
    early then and those that are below."""

    stall_us: float
    off: list[Floats]
    flow_out: list[Floats]
    flow_in: list[Floats]
    early_at_start: list[float]
    below_at_start: list[float]
    stalls_us: Floats  # before each step


@dataclass
class Rows:
    """Rows of a sparse matrix under construction, with right-hand sides."""

    count: int = 0
    row: list[Any] = field(default_factory=list)
    column: list[Any] = field(default_factory=list)
    value: list[Any] = field(default_factory=list)
    right: list[Any] = field(default_factory=list)

    def new(self, right: Any) -> Ints:
        """Rows with these right-hand sides; their numbers."""
        right = np.atleast_1d(np.asarray(right, np.float64))
        self.right.append(right)
        self.count += len(right)
        return np.arange(self.count - len(right), self.count)

    def add(self, row: Any, column: Any, value: float | Floats) -> None:
        row, column = np.broadcast_arrays(row, column)
        self.row.append(row.ravel())
        self.column.append(column.ravel())
        self.value.append(np.broadcast_to(np.asarray(value, np.float64), row.shape).ravel())

    def entries(self) -> tuple[Ints, Ints, Floats]:
        """Rows, columns and values; several of one place count together."""
        if not self.row:
            return np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0)
        return np.concatenate(self.row), np.concatenate(self.column), np.concatenate(self.value)

    def rights(self) -> Floats:
        return np.concatenate(self.right) if self.right else np.zeros(0)


class _Columns:
    """Hands out variable numbers."""

    def __init__(self) -> None:
        self.count = 0

    def new(self, number: int) -> Ints:
        self.count += number
        return np.arange(self.count - number, self.count)


class TierColumns:
    def __init__(self, columns: _Columns, slots: int, gaps: int) -> None:
        self.out, self.into = columns.new(slots), columns.new(slots)
        self.queued, self.below, self.early = (columns.new(slots) for _ in range(3))
        self.off, self.written = columns.new(gaps), columns.new(gaps)
        # Of a gap of a version that has others which are not told apart: what is copied for those.
        self.copies = np.full(gaps, -1)


def solve(
    problem: Problem,
    *,
    reserve_pages: float = 0,
    copies_keep_slots: bool = False,
    time_limit_s: float = 60,
    make: BuilderMaker | None = None,
) -> Solution | None:
    """``None`` if nothing is feasible. ``reserve_pages`` of the device are left free, and with
    ``copies_keep_slots`` a copy holds its slot until its version ends: both for plans, not for the
    bound. ``make`` makes the builder, if it is to have more rows. Raises ``Unsolved`` if the solver
    ends without an answer."""
    if not problem.tiers or not len(problem.gaps):
        return _nothing_moves(problem, reserve_pages)
    if _least_pages(problem) > problem.device_pages - reserve_pages:
        return None  # which the solver may take minutes to see
    small, group = grouped(problem)
    builder = (make or Builder)(small, problem.device_pages - reserve_pages, copies_keep_slots)
    x = run(builder, builder.cost(), time_limit_s)
    if x is None:
        return None
    found = builder.solution(x)
    return replace(found, off=shared_out(found.off, group, problem.most))


def _least_pages(problem: Problem) -> float:
    """Of the device, that some step needs with all off that may be off while it runs."""
    gaps, steps = problem.gaps, problem.steps
    change = np.zeros(3 * steps + 1)  # from one iteration before
    np.add.at(change, steps + gaps.begin + 1, problem.most)
    np.add.at(change, steps + gaps.end, -problem.most)
    off = np.cumsum(change[:-1]).reshape(3, steps).sum(axis=0)
    return float((problem.live - off).max(initial=0.0))


def solve_loosely(problem: Problem, time_limit_s: float) -> Solution | None:
    """For the bound alone: what is off in each gap is not said. As :func:`solve`."""
    if not problem.tiers or not len(problem.gaps):
        return _nothing_moves(problem, 0.0)
    none = np.zeros(len(problem.gaps), np.bool_)
    builder = Builder(problem, problem.device_pages, False, loosened(problem, none))
    x = run(builder, builder.cost(), time_limit_s, vertex=False)
    return None if x is None else builder.solution(x)


def least_device_pages(problem: Problem) -> float | None:
    """Fewest pages of device memory with which anything runs, however slowly; ``None`` if the
    tiers below are too small for every device."""
    if not problem.tiers or not len(problem.gaps):
        return float(problem.live.max()) if problem.steps else 0.0
    builder = Builder(grouped(problem)[0], None, copies_keep_slots=True)
    cost = np.zeros(builder.columns.count)
    cost[builder.device] = 1.0
    x = run(builder, cost, 60.0)
    return None if x is None else float(x[builder.device])


def run(
    builder: Builder, cost: Floats, time_limit_s: float, *, vertex: bool = True
) -> Floats | None:
    """``None`` if nothing is feasible. ``vertex``: a solution at a corner, where as little as can
    be is in parts, which may take as long again. The interior point method sometimes says that
    programs have no solution which have one (very different rates are enough), so it is believed
    where the simplex method agrees."""
    import highspy

    program = _program(builder, cost)
    found = highspy.HighsModelStatus
    infeasible = found.kInfeasible, found.kUnboundedOrInfeasible  # a stall is bounded
    status = found.kNotset
    for solver, crossover in (("ipm", "on" if vertex else "off"), ("simplex", "on")):
        solved: Any = highspy.Highs()  # type: ignore[no-untyped-call]
        solved.setOptionValue("output_flag", False)
        solved.setOptionValue("solver", solver)
        solved.setOptionValue("run_crossover", crossover)
        solved.setOptionValue("time_limit", max(time_limit_s, 1.0))
        solved.passModel(program)
        solved.run()
        status = solved.getModelStatus()
        if status == found.kOptimal:
            return np.array(solved.getSolution().col_value)
        if status == found.kTimeLimit:
            break
    if status in infeasible:
        return None
    raise Unsolved(f"the solver ended with {status.name[1:]}")


def _program(builder: Builder, cost: Floats) -> Any:
    """For the solver: rows that are below, then those that are equal, each as its columns."""
    import highspy

    rights, equals = builder.below.rights(), builder.equal.rights()
    below, equal = builder.below.entries(), builder.equal.entries()
    width = builder.columns.count
    of_equal = (equal[0] + len(rights)) * width + equal[1]
    places = np.concatenate([below[0] * width + below[1], of_equal])
    place, index = np.unique(places, return_inverse=True)
    program = highspy.HighsLp()
    program.num_col_, program.num_row_ = width, len(rights) + len(equals)
    program.col_cost_ = cost
    program.col_lower_, program.col_upper_ = builder.bounds().T.copy()
    program.row_lower_ = np.concatenate([np.full(len(rights), -np.inf), equals])
    program.row_upper_ = np.concatenate([rights, equals])
    matrix = program.a_matrix_
    matrix.format_ = highspy.MatrixFormat.kRowwise
    matrix.num_col_, matrix.num_row_ = program.num_col_, program.num_row_
    matrix.start_ = np.searchsorted(place, np.arange(program.num_row_ + 1) * width)
    matrix.index_ = place % width
    values: Floats = np.zeros(len(place))
    np.add.at(values, index, np.concatenate([below[2], equal[2]]))
    matrix.value_ = values
    return program


def _nothing_moves(problem: Problem, reserve_pages: float) -> Solution | None:
    if problem.steps and problem.live.max() > problem.device_pages - reserve_pages:
        return None
    slots = np.zeros(2 * problem.steps)
    tiers = len(problem.tiers)
    none = [np.zeros(len(problem.gaps))] * tiers
    flows = [slots] * tiers
    at_start = [0.0] * tiers
    return Solution(0.0, none, flows, flows, at_start, at_start, np.zeros(problem.steps))


class Builder:
    """Variables and rows. Time is in page-times of the link out, so that numbers are near 1."""

    def __init__(
        self,
        problem: Problem,
        device_pages: float | None,
        copies_keep_slots: bool,
        loose: Loose | None = None,
    ) -> None:
        """``device_pages``: ``None`` makes them a variable, ``device``. ``loose``: the program is
        for its gaps."""
        self.every, self.loose = problem.gaps, loose
        if loose is not None:
            problem = replace(problem, gaps=loose.problem.gaps, most=loose.problem.most)
        self.problem = problem
        self.room = device_pages
        self.equal, self.below, self.columns = Rows(), Rows(), _Columns()
        self.device = int(self.columns.new(1)[0])
        steps, gaps = problem.steps, problem.gaps
        self.slots = 2 * steps
        self.stall = self.columns.new(steps)
        self.parts = [TierColumns(self.columns, self.slots, len(gaps)) for _ in problem.tiers]
        self.released = (2 * (gaps.begin + 1)) % self.slots  # the stall after the last use
        self.due = 2 * (gaps.end % steps) + 1  # the run of the next use
        crossed = gaps.end // steps - (gaps.begin + 1) // steps  # begins of iterations
        self.wraps = np.flatnonzero(crossed)
        self.crossed = crossed[self.wraps].astype(np.float64)
        # What a program with choices adds: columns that change what may be off in a gap (gap,
        # column, pages), how long a step runs, or what runs before it does (step, column, µs), what
        # is on the device in it (step, column, pages), and flows on the link (by slot: columns,
        # pages each).
        self.size_terms: list[tuple[Any, Any, Any]] = []
        self.time_terms: list[tuple[Any, Any, Any]] = []
        self.before_terms: list[tuple[Any, Any, Any]] = []
        self.live_terms: list[tuple[Any, Any, Any]] = []
        self.late_terms: list[tuple[Any, Any, Any]] = []  # as live_terms, when the step ends only
        self.flow_terms: dict[bool, list[tuple[Any, Any, Any]]] = {True: [], False: []}
        self.slot_terms: list[tuple[Any, Any, Any]] = []  # (slot, column, pages in host)
        self.free: list[int] = []  # columns that may be negative
        self.moved: list[int] = []  # flows that are not of ``parts``, and cost as much
        if loose is not None:
            self._copies(loose)
        self.choose()
        for tier, part in zip(problem.tiers, self.parts):
            self._stocks(part)
            if not tier.kept:
                self._clean_copies(part)
        self._sizes()
        self._frames()
        self._channels()
        for tier, part in zip(problem.tiers, self.parts):
            if np.isfinite(tier.pages):
                self._slots_below(part, tier.pages, copies_keep_slots)

    def choose(self) -> None:
        """What a program with choices adds."""

    def _copies(self, loose: Loose) -> None:
        """Of versions whose gaps are not told apart: how much of each is copied below, once, and
        what is off in a gap is of those that are. Copies are on the link out of each tier."""
        place = {version: at for at, version in enumerate(loose.copied_at)}
        at = np.array([place.get(version, -1) for version in self.every.version.tolist()], np.int64)
        queued_at = (2 * np.array(list(loose.copied_at.values()), np.int64) + 3) % self.slots
        told = (loose.place < loose.told) & (at >= 0)
        several = (loose.place >= loose.first) & (at >= 0)
        pairs = np.unique(np.stack([loose.place, at])[:, several], axis=1)
        joined = np.unique(pairs[0])
        now = np.arange(self.slots)
        pages = np.array(list(loose.pages.values()), np.float64)
        for tier, part in zip(self.problem.tiers, self.parts):
            if tier.kept or not len(place):
                continue
            copied, queue, out = (self.columns.new(n) for n in (len(place), *2 * [self.slots]))
            self.below.add(self.below.new(pages), copied, 1.0)
            rows = self.equal.new(np.zeros(self.slots))  # queue' = queue + copied − out
            self.equal.add(np.roll(rows, -1), np.roll(queue, -1), 1.0)
            self.equal.add(np.roll(rows, -1), queue, -1.0)
            self.equal.add(np.roll(rows, -1), out, 1.0)
            self.equal.add(rows[queued_at], copied, -1.0)
            self.flow_terms[True].append((now, out, 1.0))
            self.moved += out.tolist()
            part.copies[loose.place[told]] = copied[at[told]]
            rows = self.below.new(np.zeros(len(joined)))
            self.below.add(rows, part.off[joined], 1.0)
            self.below.add(rows[np.searchsorted(joined, pairs[0])], copied[pairs[1]], -1.0)

    def _stocks(self, part: TierColumns) -> None:
        """Stocks when a slot begins, before what it releases; all return to where they began."""
        now = np.arange(self.slots)
        freed = (self.released + 1) % self.slots
        then = (now + 1) % self.slots
        zero = np.zeros(self.slots)
        rows = self.equal
        row = rows.new(zero)[then]  # queued' = queued + written of gaps that begin - out
        rows.add(row, part.queued[then], 1)
        rows.add(row, part.queued, -1)
        rows.add(row, part.out, 1)
        begin = row.min() + freed
        rows.add(begin, part.written, -1)
        row = rows.new(zero)[then]  # below' = below + out + clean of gaps that begin - in
        rows.add(row, part.below[then], 1)
        rows.add(row, part.below, -1)
        rows.add(row, part.out, -1)
        rows.add(row, part.into, 1)
        begin = row.min() + freed
        rows.add(begin, part.off, -1)
        rows.add(begin, part.written, 1)
        dying = np.isin(self.problem.gaps.kind, DYING)
        dies = np.flatnonzero(dying)
        rows.add(row.min() + self.due[dies], part.off[dies], 1)
        row = rows.new(zero)[then]  # early' = early + in - off of gaps that are due
        rows.add(row, part.early[then], 1)
        rows.add(row, part.early, -1)
        rows.add(row, part.into, -1)
        stays = np.flatnonzero(~dying)
        rows.add(row.min() + self.due[stays], part.off[stays], 1)
        start = rows.new(0.0)  # when the iteration begins: what its wrapping gaps have off
        rows.add(start, np.array([part.queued[0], part.below[0], part.early[0]]), 1)
        rows.add(np.full(len(self.wraps), start), part.off[self.wraps], -self.crossed)

    def _clean_copies(self, part: TierColumns) -> None:
        """Within a version what is off was written by this gap or an earlier one."""
        gaps = self.problem.gaps
        index = np.flatnonzero(~gaps.lasting)
        if not len(index):
            return
        version = gaps.version[index]
        first = np.searchsorted(version, version)  # sorted by version
        row = self.below.new(np.zeros(len(index)))
        self.below.add(row, part.off[index], 1)
        copies = part.copies[index]
        self.below.add(row[copies >= 0], copies[copies >= 0], -1)
        lengths = np.arange(len(index)) - first + 1
        rows = np.repeat(row, lengths)
        offsets = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        self.below.add(rows, part.written[index[np.repeat(first, lengths) + offsets]], -1)

    def _sizes(self) -> None:
        row = self.below.new(self.problem.most)
        for gap, column, pages in self.size_terms:
            self.below.add(row[gap], column, -pages)
        for part in self.parts:
            self.below.add(row, part.off, 1)
            less = self.below.new(np.zeros(len(self.problem.gaps)))
            self.below.add(less, part.written, 1)
            self.below.add(less, part.off, -1)

    def _frames(self) -> None:
        """Resident pages fit, when a step begins to run and when it ends."""
        run = np.arange(1, self.slots, 2)
        right = (self.room or 0.0) - self.problem.live
        begin, end = self.below.new(right), self.below.new(right)
        if self.room is None:
            self.below.add(np.concatenate([begin, end]), self.device, -1)
        for step, column, pages in self.live_terms:
            self.below.add(begin[step], column, pages)
            self.below.add(end[step], column, pages)
        for step, column, pages in self.late_terms:
            self.below.add(end[step], column, pages)
        for part in self.parts:
            self.below.add(begin, part.below[run], -1)
            self.below.add(end, part.below[run], -1)
            self.below.add(end, part.out[run], -1)
            self.below.add(end, part.into[run], 1)
            enough = self.below.new(np.zeros(self.slots))  # in ≤ below + out
            self.below.add(enough, part.into, 1)
            self.below.add(enough, part.below, -1)
            self.below.add(enough, part.out, -1)

    def _channels(self) -> None:
        problem, unit = self.problem, 1 / self.problem.out_rate
        stall, run = np.arange(0, self.slots, 2), np.arange(1, self.slots, 2)
        for outward in (True, False):
            link = problem.out_rate if outward else problem.in_rate
            flows = [part.out if outward else part.into for part in self.parts]
            limits = [(link, flows)]
            for tier, flow in zip(problem.tiers, flows):
                rate = tier.out_rate if outward else tier.in_rate
                if rate < link and not tier.kept:
                    limits.append((rate, [flow]))
            for rate, group in limits:
                running = self.below.new(rate * problem.duration_us)
                waiting = self.below.new(np.zeros(problem.steps))
                for flow in group:
                    self.below.add(running, flow[run], 1)
                    self.below.add(waiting, flow[stall], 1)
                self.below.add(waiting, self.stall, -rate * unit)
                for row, terms in ((running, self.time_terms), (waiting, self.before_terms)):
                    for step, column, us in terms:
                        self.below.add(row[step], column, -rate * us)
                if len(group) == len(flows):
                    both = np.stack([waiting, running], axis=1).ravel()  # by slot
                    for slot, column, pages in self.flow_terms[outward]:
                        self.below.add(both[slot], column, pages)

    def _slots_below(self, part: TierColumns, pages: float, copies_keep_slots: bool) -> None:
        """What a tier holds: what is there now and, for a plan, copies of what is back on the
        device that a later gap of their version needs."""
        right = np.full(self.slots, pages)
        if part is self.parts[0] and self.problem.held is not None:
            right -= np.repeat(self.problem.held, 2)
        rows = [self.below.new(right), self.below.new(right)]  # when a slot begins, and its end
        for row in rows:
            self.below.add(row, part.below, 1)
            if part is self.parts[0]:
                for slot, column, each in self.slot_terms:
                    self.below.add(row[slot], column, each)
        self.below.add(rows[1], part.out, 1)
        self.below.add(rows[1], part.into, -1)
        if copies_keep_slots:
            self._copies_kept(part, rows)

    def _copies_kept(self, part: TierColumns, limits: Sequence[Ints]) -> None:
        """Copies that hold slots while their pages are on the device, in the rows of ``limits``:
        between two gaps of a version what the second has clean or a later one has, and in a gap
        what is not off in it but in a later one."""
        gaps = self.problem.gaps
        level = self.columns.new(self.slots)
        now = np.arange(self.slots)
        then = (now + 1) % self.slots
        change = self.equal.new(np.zeros(self.slots))[then]
        self.equal.add(change, level[then], 1)
        self.equal.add(change, level, -1)
        self.free += level.tolist()
        for row in limits:
            self.below.add(row, level, 1)
        first = change.min()
        begins = self.equal.new(0.0)
        self.equal.add(begins, level[:1], 1)
        follows = np.flatnonzero((gaps.version[1:] == gaps.version[:-1]) & ~gaps.lasting[1:])
        kept, idle = self.columns.new(len(follows)), self.columns.new(len(follows))
        after = follows + 1
        need = self.below.new(np.zeros(len(follows)))  # kept ≥ what the next gap has clean
        self.below.add(need, part.off[after], 1)
        self.below.add(need, part.written[after], -1)
        self.below.add(need, kept, -1)
        again = np.flatnonzero(after[:-1] == follows[1:])
        need = self.below.new(np.zeros(len(again)))  # and what a later one has
        self.below.add(need, kept[again + 1], 1)
        self.below.add(need, part.written[after[again]], -1)
        self.below.add(need, kept[again], -1)
        need = self.below.new(np.zeros(len(again)))  # of which some is not off in between
        self.below.add(need, kept[again + 1], 1)
        self.below.add(need, part.off[after[again]], -1)
        self.below.add(need, idle[again], -1)
        due, freed = self.due, (self.released + 1) % self.slots
        levels = [
            (kept, due[follows], freed[after]),
            (idle[again], freed[after[again]], due[after[again]]),
        ]
        lasting = np.flatnonzero(gaps.lasting)
        if len(lasting):
            kinds, index = np.unique(gaps.version[lasting], return_inverse=True)
            copies = self.columns.new(len(kinds))  # of segments that are only read
            need = self.below.new(np.zeros(len(lasting)))
            self.below.add(need, part.off[lasting], 1)
            self.below.add(need, copies[index], -1)
            for row in limits:
                self.below.add(np.repeat(row, len(kinds)), np.tile(copies, self.slots), 1)
            levels.append((part.off[lasting], due[lasting], freed[lasting]))
            self.equal.add(np.full(len(lasting), begins), part.off[lasting], 1)
        for column, start, stop in levels:
            self.equal.add(first + start, column, -1)
            self.equal.add(first + stop, column, 1)
            across = column[(start == 0) | (start > stop) & (stop > 0)]
            self.equal.add(np.full(len(across), begins), across, -1)

    def cost(self) -> Floats:
        cost = np.zeros(self.columns.count)
        cost[self.stall] = 1.0
        for tier, part in zip(self.problem.tiers, self.parts):
            cost[part.out] = MOVE_COST + (DISK_WRITE_COST if tier.index else 0.0)
            cost[part.into] = MOVE_COST
        cost[self.moved] += MOVE_COST
        for _, column, us in (*self.time_terms, *self.before_terms):
            np.add.at(cost, column, us * self.problem.out_rate)
        return cost

    def bounds(self) -> Floats:
        bounds = np.zeros((self.columns.count, 2))
        bounds[:, 1] = np.inf
        bounds[self.free, 0] = -np.inf
        gaps = self.problem.gaps
        copied = np.isin(gaps.kind, (KEPT, RETURN))
        for tier, part in zip(self.problem.tiers, self.parts):
            # A copy of what is only read was made in an earlier iteration.
            bounds[part.written[gaps.lasting], 1] = 0.0
            bounds[part.off[copied != tier.kept], 1] = 0.0
            if tier.kept:
                bounds[part.off[gaps.kind == RETURN], 0] = gaps.pages[gaps.kind == RETURN]
            last = gaps.kind == LAST
            if tier.index:
                bounds[part.off[last], 1] = 0.0
            elif not tier.kept:
                bounds[part.off[last], 0] = bounds[part.written[last], 0] = gaps.pages[last]
        return bounds

    def solution(self, x: Floats) -> Solution:
        unit = 1 / self.problem.out_rate
        stall = np.maximum(x[self.stall], 0) * unit
        return Solution(
            stall_us=float(stall.sum()),
            off=[np.maximum(x[part.off], 0) for part in self.parts],
            flow_out=[np.maximum(x[part.out], 0) for part in self.parts],
            flow_in=[np.maximum(x[part.into], 0) for part in self.parts],
            early_at_start=[float(x[part.early[0]]) for part in self.parts],
            below_at_start=[float(x[part.below[0]]) for part in self.parts],
            stalls_us=stall,
        )
