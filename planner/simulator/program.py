"""What runs in an iteration of a plan, step by step: ops, ops that run again, the host's steps.

All that a plan decides about order is looked at once, before any time passes: which step follows
which, how long each tensor lives, which pages a step that runs again makes anew, and whether
every step finds in each page that it reads the version that it finds in the trace.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ..plan import DISCARD, Plan
from ..trace import READ, WRITE, Ints, Trace
from .pages import Infeasible

RUN, AGAIN, HOST = range(3)  # what a step does with its op
NEVER = -(1 << 40)  # the version of a page that nobody has written
Row = tuple[int, int, int, int]  # of an access: tensor, mode, first page, end


class Span(NamedTuple):
    """Pages ``first`` to ``last`` (exclusive) of a tensor (its index), counted within it."""

    tensor: int
    first: int
    last: int


@dataclass
class Program:
    """Lists have one entry per step. ``before``: the op whose moves are queued when this step may
    start, or −1: it is not the first one at its place.

    ``first``, ``last``: the steps between which each tensor lives, [tensors]; of one that
    ``wraps`` the last comes before the first, in the next iteration. By step that runs again:
    ``reads`` (pages of the tensor's own that it needs), ``remade`` (discarded pages that are the
    tensor's own again), ``temporary`` (frames that it takes for others) and ``given`` (those of
    the recomputation that end with it). ``private``: tensors that only a host step touches, and
    that do not exist for it.
    """

    kind: list[int]
    op: list[int]
    before: list[int]
    first: Ints
    last: Ints
    wraps: set[int] = field(default_factory=set)
    reads: dict[int, list[Span]] = field(default_factory=dict)
    remade: dict[int, list[Span]] = field(default_factory=dict)
    temporary: dict[int, int] = field(default_factory=dict)
    given: dict[int, int] = field(default_factory=dict)
    private: set[int] = field(default_factory=set)


def make_program(trace: Trace, plan: Plan, page_size: int) -> Program:
    """Raises ``Infeasible`` for a plan whose order breaks a rule, whatever the times are."""
    if not plan.has_choices:
        ops = list(range(trace.ops))
        return Program([RUN] * trace.ops, ops, ops, trace.first_op, trace.last_op)
    return _Maker(trace, plan, page_size).run()


class _Maker:
    def __init__(self, trace: Trace, plan: Plan, page_size: int) -> None:
        self.trace, self.plan = trace, plan
        self.offsets = trace.access_offsets.tolist()
        begin, end = trace.access_ranges(page_size)
        rows = zip(
            trace.access_tensor.tolist(), trace.access_mode.tolist(), begin.tolist(), end.tolist()
        )
        self.rows = list(rows)  # (tensor, mode, first page, end), by access
        self.count = trace.pages(page_size).tolist()
        self.lasting = trace.tensor_persistent.tolist()
        self.hosted = set(plan.host_steps)
        self.moved = {deferred.op: deferred.before_op for deferred in plan.deferred}

    def run(self) -> Program:
        self._check_host_steps()
        self._check_deferred()
        program = self._steps()
        self._lives(program)
        _Versions(self, program).run()
        return program

    def accesses(self, op: int) -> list[Row]:
        return self.rows[self.offsets[op] : self.offsets[op + 1]]

    def name(self, op: int) -> str:
        return f"op {op} '{self.trace.op_names[op]}'"

    def tensor(self, tensor: int) -> str:
        return f"'{self.trace.name_of(tensor)}'"

    # -- what the plan names ---------------------------------------------------------------------
    def _known(self, op: int, where: str) -> None:
        if not 0 <= op < self.trace.ops:
            raise Infeasible(f"{where}: op {op} is not one of {self.trace.ops}")

    def _check_host_steps(self) -> None:
        seen: dict[int, int] = {}
        for index, op in enumerate(self.plan.host_steps):
            where = f"host_steps[{index}]"
            self._known(op, where)
            if op in seen:
                raise Infeasible(f"{where}: {self.name(op)} is host_steps[{seen[op]}] already")
            if np.isnan(self.trace.op_host_us[op]):
                raise Infeasible(f"{where}: the host cannot run {self.name(op)}: it has no host_us")
            if op in self.moved:
                raise Infeasible(
                    f"{where}: {self.name(op)} is deferred too; it is one or the other"
                )
            self._check_order(op, seen, where)
            seen[op] = index

    def _check_order(self, op: int, before: dict[int, int], where: str) -> None:
        """Steps of which one writes what the other accesses stand in the trace's order."""
        if all(other < op for other in before):
            return
        mine = self.accesses(op)
        for other, index in before.items():
            if other > op and _in_each_others_way(mine, self.accesses(other)):
                raise Infeasible(
                    f"{where}: {self.name(op)} comes after {self.name(other)} (host_steps[{index}])"
                    ", and one of them writes what the other accesses"
                )

    def _check_deferred(self) -> None:
        for index, (op, before) in enumerate(self.plan.deferred):
            where = f"deferred[{index}]"
            self._known(op, where)
            self._known(before, where)
            if [each.op for each in self.plan.deferred[:index]].count(op):
                raise Infeasible(f"{where}: {self.name(op)} is deferred twice")
            if before in self.moved and before != op:
                raise Infeasible(f"{where}: before {self.name(before)}, which is deferred itself")
            written = [row for row in self.accesses(op) if row[1] & WRITE]
            user = next(
                other
                for other in range(self.trace.ops)
                if other == op or _overlap(written, self.accesses(other))
            )
            if user < before:
                raise Infeasible(
                    f"{where}: {self.name(user)} comes before {self.name(before)} and accesses "
                    f"what {self.name(op)} writes"
                )

    # -- the steps -------------------------------------------------------------------------------
    def _steps(self) -> Program:
        again: defaultdict[int, list[int]] = defaultdict(list)
        for index, (first, last, before) in enumerate(self.plan.recompute):
            where = f"recompute[{index}]"
            self._known(before, where)
            if not first <= last < before:
                raise Infeasible(f"{where}: ops {first} to {last} do not come before op {before}")
            for op in range(first, last + 1):
                if op in self.hosted:
                    raise Infeasible(f"{where}: {self.name(op)} is a host step")
                lasting = any(m & WRITE and self.lasting[t] for t, m, _, _ in self.accesses(op))
                if not self.trace.op_rerun[op] or lasting:
                    raise Infeasible(f"{where}: {self.name(op)} may not run again")
            again[before] += range(first, last + 1)
        late: defaultdict[int, list[int]] = defaultdict(list)
        for op, before in self.plan.deferred:
            late[before].append(op)
        kind: list[int] = []
        ops: list[int] = []
        before_op: list[int] = []
        for place in range(self.trace.ops):
            for op in [*late[place], *([] if place in self.moved else [place])]:
                here = [*again[op], op]
                ops += here
                kind += [AGAIN] * len(again[op]) + [HOST if op in self.hosted else RUN]
                before_op += [op] + [-1] * len(again[op])
        nowhere = np.full(self.trace.tensors, -1, np.int64)
        return Program(kind, ops, before_op, nowhere, nowhere.copy())

    def _lives(self, program: Program) -> None:
        """From when to when each tensor lives; what only one host step touches does not."""
        trace = self.trace
        step_of = {op: s for s, op in enumerate(program.op) if program.kind[s] != AGAIN}
        self.step_of = step_of
        first_op = trace.first_op.tolist()
        users: defaultdict[int, set[int]] = defaultdict(set)
        for op in range(trace.ops):
            for tensor, *_ in self.accesses(op):
                users[tensor].add(op)
        for tensor in range(trace.tensors):
            if self.lasting[tensor]:
                continue
            maker, begin = first_op[tensor], step_of[first_op[tensor]]
            program.first[tensor], last = begin, begin
            if maker in self.hosted:
                if len(users[tensor]) == 1:
                    program.private.add(tensor)
                    continue
                raise Infeasible(
                    f"{self.name(maker)} is the first to touch {self.tensor(tensor)}, which others "
                    "touch too, and so can be no host step"
                )
            for op in sorted(users[tensor] - {maker}):
                step = step_of[op]
                carried = op in self.moved and maker not in self.moved
                early = maker in self.moved and op not in self.moved
                if early or carried != (step < begin):
                    raise Infeasible(
                        f"deferred: {self.name(op)} would not find {self.tensor(tensor)} as "
                        f"{self.name(maker)} made it"
                    )
                if carried and tensor not in program.wraps:
                    program.wraps.add(tensor)
                    last = step
                elif carried or tensor not in program.wraps:
                    last = max(last, step)
            program.last[tensor] = last
        self._lengthen(program)

    def _lengthen(self, program: Program) -> None:
        """A step that runs again keeps alive what it reads and its recomputation did not write."""
        first_op = self.trace.first_op.tolist()
        made: dict[int, np.ndarray] = {}
        for step, (kind, op, before) in enumerate(zip(program.kind, program.op, program.before)):
            if before >= 0:
                made.clear()
            if kind != AGAIN:
                continue
            for tensor, mode, first, last in self.accesses(op):
                if self.lasting[tensor] or not mode & READ or first_op[tensor] == op:
                    continue
                if tensor in made and made[tensor][first:last].all():
                    continue
                if not (tensor in program.wraps and step > program.first[tensor]):
                    program.last[tensor] = max(program.last[tensor], step)
            for tensor, mode, first, last in self.accesses(op):
                if mode & WRITE:
                    if tensor not in made:
                        made[tensor] = np.zeros(self.count[tensor], np.bool_)
                    made[tensor][first:last] = True


def _overlap(ones: list[Row], others: list[Row]) -> bool:
    return any(
        one[0] == other[0] and one[2] < other[3] and other[2] < one[3]
        for one in ones
        for other in others
    )


def _in_each_others_way(ones: list[Row], others: list[Row]) -> bool:
    """Whether one writes what the other accesses."""
    written = [row for row in ones if row[1] & WRITE]
    return _overlap(written, others) or _overlap([r for r in others if r[1] & WRITE], ones)


class _Versions:
    """Follows the version of every page through two iterations; the second is as all later ones.

    A version is the number of the op that wrote it, plus ``ops`` for each iteration since the
    first. Pages that a recomputation has written: ``made`` (all of them) and ``apart`` (the
    temporary ones), by tensor.
    """

    def __init__(self, maker: _Maker, program: Program) -> None:
        self.maker, self.program, self.ops = maker, program, maker.trace.ops
        self.first_op = maker.trace.first_op.tolist()
        self.wanted = self._by_the_trace()
        count = maker.count
        self.version = [np.full(pages, NEVER, np.int64) for pages in count]
        self.discarded = [np.zeros(pages, np.bool_) for pages in count]
        self.made: dict[int, np.ndarray] = {}
        self.apart: dict[int, np.ndarray] = {}
        self.apart_version: dict[int, np.ndarray] = {}
        self.discards: defaultdict[int, list[Span]] = defaultdict(list)
        for index, move in enumerate(maker.plan.moves):
            if move.action != DISCARD:
                continue
            tensor = maker.trace.index_of.get(move.tensor)
            if tensor is None or move.first_page + move.page_count > count[tensor]:
                continue  # refused with all other moves of what is not there
            if maker.lasting[tensor]:
                raise Infeasible(
                    f"moves[{index}]: 'discard' of {maker.tensor(tensor)}, which lives across "
                    "iterations"
                )
            pages = (move.first_page, move.first_page + move.page_count)
            self.discards[move.issue_op].append(Span(tensor, *pages))

    def _by_the_trace(self) -> list[np.ndarray | None]:
        """Of each access that reads the versions that it finds, as of iteration 0."""
        maker, lasting = self.maker, self.maker.lasting
        current = [np.full(pages, NEVER, np.int64) for pages in maker.count]
        for tensor, mode, first, last in self._rows_with_op(current):
            if mode & WRITE and lasting[tensor]:
                current[tensor][first:last] = self._op - self.ops
        found: list[np.ndarray | None] = []
        for tensor, mode, first, last in self._rows_with_op(current):
            found.append(current[tensor][first:last].copy() if mode & READ else None)
            if mode & WRITE:
                self._written.append((tensor, first, last))
        return found

    def _rows_with_op(self, current: list[np.ndarray]):  # type: ignore[no-untyped-def]
        """All accesses in the trace's order. What an op writes (``_written``) counts as written
        when all its accesses are through."""
        self._written: list[tuple[int, int, int]] = []
        for op in range(self.ops):
            self._op = op
            yield from self.maker.accesses(op)
            for tensor, first, last in self._written:
                current[tensor][first:last] = op
            self._written.clear()

    def run(self) -> None:
        program = self.program
        ends = self._last_use_again()
        for iteration in range(2):
            for step, (kind, op, before) in enumerate(
                zip(program.kind, program.op, program.before)
            ):
                if before >= 0:
                    for span in self.discards[before]:
                        self.discarded[span.tensor][span.first : span.last] = True
                    self.made.clear()
                    self.apart.clear()
                if kind == AGAIN:
                    self._again(step, op, iteration)
                    given = [t for t in ends.get(step, ()) if t in self.apart]
                    program.given[step] = sum(int(self.apart[t].sum()) for t in given)
                else:
                    late = op in self.maker.moved
                    self._once(op, iteration - late, check=iteration > 0)

    def _last_use_again(self) -> dict[int, list[int]]:
        """By step that runs again: the tensors that its recomputation accesses last there."""
        program = self.program
        found: defaultdict[int, list[int]] = defaultdict(list)
        last: dict[int, int] = {}
        for step, (kind, op, before) in enumerate(zip(program.kind, program.op, program.before)):
            if before >= 0:
                last.clear()
            if kind == AGAIN:
                for tensor, *_ in self.maker.accesses(op):
                    if tensor in last and tensor in found[last[tensor]]:
                        found[last[tensor]].remove(tensor)
                    last[tensor] = step
                    found[step].append(tensor)
        return found

    def _alive(self, tensor: int, step: int) -> bool:
        first, last = int(self.program.first[tensor]), int(self.program.last[tensor])
        if tensor in self.program.wraps:
            return step > first or step <= last
        return self.maker.lasting[tensor] or first < step <= last

    def _once(self, op: int, iteration: int, check: bool) -> None:
        maker = self.maker
        rows = range(maker.offsets[op], maker.offsets[op + 1])
        for row in rows:
            tensor, mode, first, last = maker.rows[row]
            if self.first_op[tensor] == op and not maker.lasting[tensor]:
                self.version[tensor][:] = NEVER
                self.discarded[tensor][:] = False
                continue
            if self.discarded[tensor][first:last].any():
                raise Infeasible(
                    f"{maker.name(op)} accesses {maker.tensor(tensor)}, of which pages are "
                    "discarded and were not made again"
                )
            if mode & READ and check:
                self._compare(self.version[tensor][first:last], row, iteration, op)
        for row in rows:
            tensor, mode, first, last = maker.rows[row]
            if mode & WRITE:
                self.version[tensor][first:last] = op + iteration * self.ops

    def _compare(self, found: np.ndarray, row: int, iteration: int, op: int) -> None:
        wanted = self.wanted[row]
        assert wanted is not None
        late = np.where(wanted == NEVER, 0, iteration * self.ops)
        if np.array_equal(found, wanted + late):
            return
        tensor, _, first, _ = self.maker.rows[row]
        page = int(np.flatnonzero(found != wanted + late)[0])
        raise Infeasible(
            f"{self.maker.name(op)} reads page {first + page} of {self.maker.tensor(tensor)} "
            f"{self._who(int(found[page]))}, in the trace {self._who(int(wanted[page]))}"
        )

    def _who(self, version: int) -> str:
        if version == NEVER:
            return "before anyone has written it"
        return f"as {self.maker.name(version % self.ops)} left it"

    def _again(self, step: int, op: int, iteration: int) -> None:
        """An op runs again: what it finds, which pages it needs, and which it makes."""
        maker, program = self.maker, self.program
        reads: list[Span] = []
        remade: list[Span] = []
        frames = 0
        rows = range(maker.offsets[op], maker.offsets[op + 1])
        for row in rows:
            tensor, mode, first, last = maker.rows[row]
            new = self.first_op[tensor] == op and not maker.lasting[tensor]
            if not mode & READ or new:
                continue
            apart = self._of(self.apart, tensor)[first:last]
            own = ~self._of(self.made, tensor)[first:last]
            if (self.discarded[tensor][first:last] & own).any():
                raise Infeasible(
                    f"{maker.name(op)} runs again and reads {maker.tensor(tensor)}, of which pages "
                    "are discarded and were not made again"
                )
            if iteration > 0:
                temporary = self._of(self.apart_version, tensor, np.int64)[first:last]
                found = np.where(apart, temporary, self.version[tensor][first:last])
                self._compare(found, row, iteration, op)
            reads += [Span(tensor, first + a, first + b) for a, b in _runs(own)]
        for row in rows:
            tensor, mode, first, last = maker.rows[row]
            if not mode & WRITE:
                continue
            made, apart = self._of(self.made, tensor), self._of(self.apart, tensor)
            fresh = ~made[first:last]
            mine = fresh & self.discarded[tensor][first:last]
            if not self._alive(tensor, step):
                mine[:] = False
            remade += [Span(tensor, first + a, first + b) for a, b in _runs(mine)]
            self.discarded[tensor][first:last] &= ~mine
            apart[first:last] |= fresh & ~mine
            made[first:last] = True
            frames += int((fresh & ~mine).sum())
            stamp = op + iteration * self.ops
            kept = self.version[tensor][first:last]
            kept[~apart[first:last]] = stamp
            self._of(self.apart_version, tensor, np.int64)[first:last] = stamp
        program.reads[step], program.remade[step] = reads, remade
        program.temporary[step] = frames

    def _of(
        self, by_tensor: dict[int, np.ndarray], tensor: int, kind: type[np.generic] = np.bool_
    ) -> np.ndarray:
        if tensor not in by_tensor:
            by_tensor[tensor] = np.zeros(self.maker.count[tensor], kind)
        return by_tensor[tensor]


def _runs(which: np.ndarray) -> list[tuple[int, int]]:
    """The ranges where ``which`` holds."""
    if not which.any():
        return []
    if which.all():
        return [(0, len(which))]
    edges = np.flatnonzero(np.diff(np.concatenate([[False], which, [False]]).astype(np.int8)))
    return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]
