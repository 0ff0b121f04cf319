"""What the validator does in an iteration, laid out before the run; plans that cannot be laid out.

An iteration is a list of acts: ops, ops that run again, and ops that join the host's queue. Without
recomputation, host steps and deferred updates there is one act per op, in the trace's order.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..hardware import Hardware
from ..plan import ACTIONS, DEVICE, DISCARD, Plan
from ..trace import READ, WRITE, Ints, Trace
from .ledger import NOWHERE, TIER_NUMBER, Infeasible

Range = tuple[int, int]  # pages [begin, end), numbered through all tensors
Versions = list[int | None]  # of pages: the op that wrote each last, less ``ops`` if before
ON_DEVICE, ONCE_MORE, ON_HOST = "on the device", "once more", "on the host"


class QueuedMove(NamedTuple):
    number: int  # its index in the plan
    pages: range
    tier: int
    action: str


class Act(NamedTuple):
    """``op`` runs, ``how``; its results count as those of iteration ``turn`` after the one in which
    it runs (0, or −1 if it was deferred). ``opens``: moves of ``for_op`` are queued before it."""

    op: int
    how: str
    turn: int
    for_op: int
    opens: bool


class Read(NamedTuple):
    """An op reads pages [begin, end), and finds these ``versions`` in the trace."""

    begin: int
    end: int
    versions: Versions


@dataclass(frozen=True)
class Schedule:
    """By op: page ranges that it touches and writes, what it reads, the moves queued before it. By
    act: the tensors that it makes (and their pages together), those that die with it, and those of
    which a recomputation's temporary pages end with it."""

    acts: list[Act]
    touched: list[list[Range]]
    written: list[list[Range]]
    reads: list[list[Read]]
    moves: list[list[QueuedMove]]
    born: list[list[Range]]
    dying: list[list[Range]]
    new_pages: list[int]
    parting: list[list[Range]]
    lasting: list[Range]  # pages that live from one iteration into the next
    versions: Versions  # of all pages when the first iteration begins
    start: dict[int, int]  # page → tier
    host_order: list[int]
    host_us: dict[int, float]


def make_schedule(trace: Trace, hardware: Hardware, plan: Plan) -> Schedule:
    """Raises ``Infeasible`` if the plan is not for this trace and hardware."""
    page_size = int(hardware.page_size)
    if plan.page_size != page_size:
        raise Infeasible(
            f"the plan's page_size {plan.page_size} is not the hardware's {page_size}; plan again"
        )
    return _Layout(trace, plan, page_size).schedule()


class _Row(NamedTuple):
    """An access: pages [begin, end) of all tensors' pages."""

    tensor: int
    begin: int
    end: int
    reads: bool
    writes: bool


class _Layout:
    def __init__(self, trace: Trace, plan: Plan, page_size: int) -> None:
        self.trace, self.plan = trace, plan
        self.sizes = trace.pages(page_size)
        self.base: list[int] = [0, *np.cumsum(self.sizes).tolist()]
        self.persistent: list[bool] = trace.tensor_persistent.tolist()
        self.maker: list[int] = trace.first_op.tolist()
        self.rows: list[list[_Row]] = [[] for _ in range(trace.ops)]
        begins, ends = trace.access_ranges(page_size)
        for op, tensor, mode, begin, end in zip(
            trace.access_op.tolist(),
            trace.access_tensor.tolist(),
            trace.access_mode.tolist(),
            begins.tolist(),
            ends.tolist(),
        ):
            base = self.base[tensor]
            row = _Row(tensor, base + begin, base + end, bool(mode & READ), bool(mode & WRITE))
            self.rows[op].append(row)

    def schedule(self) -> Schedule:
        trace, plan = self.trace, self.plan
        self._check_host_steps()
        self._check_recompute()
        self._check_deferred()
        acts = self._acts()
        born, dying, lasting = self._lives(acts)
        finder = _Finder(trace, self.sizes, self.base)
        chooses = plan.has_choices
        for op in plan.host_steps:  # what nobody else touches does not exist for a host step
            self.rows[op] = [row for row in self.rows[op] if row.tensor not in self.unknown]
        return Schedule(
            acts=acts,
            touched=[[(r.begin, r.end) for r in rows] for rows in self.rows],
            written=[[(r.begin, r.end) for r in rows if r.writes] for rows in self.rows],
            reads=self._reads() if chooses else [[] for _ in range(trace.ops)],
            moves=_moves(trace, plan, finder),
            born=born,
            dying=dying,
            new_pages=[sum(end - begin for begin, end in tensors) for tensors in born],
            parting=self._parting(acts),
            lasting=[self._pages(tensor) for tensor in lasting],
            versions=self._first_versions(acts, born) if chooses else [],
            start=_start(plan, finder, set(lasting)),
            host_order=list(plan.host_steps),
            host_us={op: float(trace.op_host_us[op]) for op in plan.host_steps},
        )

    def _pages(self, tensor: int) -> Range:
        return self.base[tensor], self.base[tensor + 1]

    def _name(self, op: int) -> str:
        return f"op {op} ({self.trace.op_names[op]})"

    def _require_op(self, where: str, op: int) -> None:
        if not 0 <= op < self.trace.ops:
            raise Infeasible(
                f"{where}: op {op} is not in 0 … {self.trace.ops - 1}, the trace's ops"
            )

    # What is decided.

    def _check_host_steps(self) -> None:
        order = self.plan.host_steps
        for number, op in enumerate(order):
            where = f"host_steps[{number}]"
            self._require_op(where, op)
            if math.isnan(self.trace.op_host_us[op]):
                raise Infeasible(f"{where}: {self._name(op)} has no host_us; the host cannot do it")
            if op in order[:number]:
                raise Infeasible(f"{where}: {self._name(op)} is in the list twice")
        # Per page: who came last in the list, as reader or as writer.
        readers: dict[int, int] = {}
        writers: dict[int, int] = {}
        for number, op in enumerate(order):
            for row in self.rows[op]:
                for page in range(row.begin, row.end):
                    late = max(writers.get(page, -1), readers.get(page, -1) if row.writes else -1)
                    if late > op:
                        raise Infeasible(
                            f"host_steps[{number}]: {self._name(op)} stands behind "
                            f"{self._name(late)}, which comes after it in the trace, and they are "
                            "in each other's way"
                        )
            for row in self.rows[op]:
                last = writers if row.writes else readers
                for page in range(row.begin, row.end):
                    last[page] = max(last.get(page, -1), op)

    def _check_recompute(self) -> None:
        for number, (first, last, before) in enumerate(self.plan.recompute):
            where = f"recompute[{number}]"
            self._require_op(where, before)
            if first > last or last >= before:
                raise Infeasible(f"{where}: it is not so that {first} ≤ {last} < {before}")
            for op in range(first, last + 1):
                if not self.trace.op_rerun[op]:
                    raise Infeasible(f"{where}: {self._name(op)} cannot run again")
                if op in self.plan.host_steps:
                    raise Infeasible(f"{where}: {self._name(op)} is a host step")
                if any(row.writes and self.persistent[row.tensor] for row in self.rows[op]):
                    raise Infeasible(f"{where}: {self._name(op)} writes what lives on")

    def _check_deferred(self) -> None:
        late = [op for op, _ in self.plan.deferred]
        for number, (op, before) in enumerate(self.plan.deferred):
            where = f"deferred[{number}]"
            self._require_op(where, op)
            self._require_op(where, before)
            if late.count(op) > 1 or op in self.plan.host_steps:
                raise Infeasible(f"{where}: {self._name(op)} is named elsewhere too")
            if before in late and before != op:
                raise Infeasible(f"{where}: {self._name(before)} is deferred itself")
            mine = {p for row in self.rows[op] if row.writes for p in range(row.begin, row.end)}
            for other in range(min(before, op)):
                theirs = (range(row.begin, row.end) for row in self.rows[other])
                if any(not mine.isdisjoint(pages) for pages in theirs):
                    raise Infeasible(
                        f"{where}: {self._name(before)} is behind {self._name(other)}, the first "
                        f"that accesses what {self._name(op)} writes"
                    )
            if before > op:
                raise Infeasible(f"{where}: {self._name(op)} itself comes before op {before}")

    def _acts(self) -> list[Act]:
        late = {op for op, _ in self.plan.deferred}
        acts: list[Act] = []
        for place in range(self.trace.ops):
            due = [(op, -1) for op, before in self.plan.deferred if before == place]
            for op, turn in [*due, *([(place, 0)] if place not in late else [])]:
                opens = True
                for first, last, before in self.plan.recompute:
                    if before != op:
                        continue
                    for again in range(first, last + 1):
                        acts.append(Act(again, ONCE_MORE, 0, op, opens))
                        opens = False
                how = ON_HOST if op in self.plan.host_steps else ON_DEVICE
                acts.append(Act(op, how, turn, op, opens))
        return acts

    # Lives.

    def _lives(self, acts: list[Act]) -> tuple[list[list[Range]], list[list[Range]], list[int]]:
        """Which tensors each act makes, which die with it, and which live on between iterations."""
        born: list[list[Range]] = [[] for _ in acts]
        dying: list[list[Range]] = [[] for _ in acts]
        lasting = [tensor for tensor, lives_on in enumerate(self.persistent) if lives_on]
        uses: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)  # (turn, act) by tensor
        for place, act in enumerate(acts):
            if act.how != ONCE_MORE:
                for tensor in {row.tensor for row in self.rows[act.op]}:
                    uses[tensor].append((-act.turn, place))
        kept_by = self._kept_by_recomputation(acts)
        self.unknown: set[int] = set()
        for tensor, lives_on in enumerate(self.persistent):
            if lives_on:
                continue
            mine = sorted(uses[tensor])
            first = next(use for use in mine if acts[use[1]].op == self.maker[tensor])
            if acts[first[1]].how == ON_HOST:
                if len(mine) == 1:
                    self.unknown.add(tensor)
                    continue
                raise Infeasible(
                    f"host_steps: {self._name(self.maker[tensor])} is the first to touch "
                    f"{self.trace.name_of(tensor)}, and not the only one"
                )
            if mine[0] != first:
                raise Infeasible(
                    f"deferred: {self._name(self.maker[tensor])} makes "
                    f"{self.trace.name_of(tensor)}, which others use before it runs"
                )
            birth, (later, death) = first[1], mine[-1]
            wraps = later > first[0]
            if wraps and death > birth:
                raise Infeasible(
                    f"deferred: {self._name(acts[death].op)} would use "
                    f"{self.trace.name_of(tensor)} when it has been made anew"
                )
            for place in kept_by.get(tensor, ()):
                if not wraps or place < birth:
                    death = max(death, place)
            if wraps:
                lasting.append(tensor)
            born[birth].append(self._pages(tensor))
            dying[death].append(self._pages(tensor))
        return born, dying, lasting

    def _kept_by_recomputation(self, acts: list[Act]) -> dict[int, list[int]]:
        """Acts that run again and read of a tensor what their recomputation has not written."""
        kept: defaultdict[int, list[int]] = defaultdict(list)
        written: set[int] = set()
        for place, act in enumerate(acts):
            if act.opens:
                written.clear()
            if act.how != ONCE_MORE:
                continue
            for row in self.rows[act.op]:
                own = row.reads and self.maker[row.tensor] != act.op
                if own and not written.issuperset(range(row.begin, row.end)):
                    kept[row.tensor].append(place)
            for row in self.rows[act.op]:
                if row.writes:
                    written.update(range(row.begin, row.end))
        return kept

    def _parting(self, acts: list[Act]) -> list[list[Range]]:
        """Tensors that each act that runs again is the last of its recomputation to access."""
        parting: list[list[Range]] = [[] for _ in acts]
        seen: set[int] = set()
        for place in range(len(acts) - 1, -1, -1):
            if acts[place].how != ONCE_MORE:
                seen.clear()
                continue
            for row in self.rows[acts[place].op]:
                if row.tensor not in seen:
                    seen.add(row.tensor)
                    parting[place].append(self._pages(row.tensor))
        return parting

    # Versions.

    def _reads(self) -> list[list[Read]]:
        """What each op reads, but for tensors that it is the first to touch."""
        ops = self.trace.ops
        last: Versions = [None] * self.base[-1]
        for op, rows in enumerate(self.rows):
            for row in rows:
                if row.writes and self.persistent[row.tensor]:
                    last[row.begin : row.end] = [op - ops] * (row.end - row.begin)
        found: list[list[Read]] = []
        for op, rows in enumerate(self.rows):
            found.append(
                [
                    Read(row.begin, row.end, last[row.begin : row.end])
                    for row in rows
                    if row.reads and (self.persistent[row.tensor] or self.maker[row.tensor] != op)
                ]
            )
            for row in rows:
                if row.writes:
                    last[row.begin : row.end] = [op] * (row.end - row.begin)
        return found

    def _first_versions(self, acts: list[Act], born: list[list[Range]]) -> Versions:
        """As an iteration before the first one would have left them."""
        ops = self.trace.ops
        last: Versions = [None] * self.base[-1]
        for act, made in zip(acts, born):
            for begin, end in made:
                last[begin:end] = [None] * (end - begin)
            for row in self.rows[act.op] if act.how != ONCE_MORE else ():
                if row.writes:
                    version = act.op + (act.turn - 1) * ops
                    last[row.begin : row.end] = [version] * (row.end - row.begin)
        return last


class _Finder:
    """Finds the pages that a row of a plan means."""

    def __init__(self, trace: Trace, sizes: Ints, base: list[int]) -> None:
        self._index = {int(identity): tensor for tensor, identity in enumerate(trace.tensor_ids)}
        self._sizes: list[int] = sizes.tolist()
        self._base = base

    def index(self, where: str, tensor: int) -> int:
        if tensor not in self._index:
            raise Infeasible(f"{where}: the trace has no tensor {tensor!r}")
        return self._index[tensor]

    def pages(self, where: str, tensor: int, first: int, count: int) -> range:
        index = self.index(where, tensor)
        if first < 0 or count < 1 or first + count > self._sizes[index]:
            raise Infeasible(
                f"{where}: pages {first} to {first + count} are not among the "
                f"{self._sizes[index]} of tensor {tensor}"
            )
        begin = self._base[index] + first
        return range(begin, begin + count)

    def tier(self, where: str, tier: str) -> int:
        if tier not in TIER_NUMBER:
            raise Infeasible(f"{where}: tier {tier!r} is none of {', '.join(TIER_NUMBER)}")
        return TIER_NUMBER[tier]


def _moves(trace: Trace, plan: Plan, finder: _Finder) -> list[list[QueuedMove]]:
    moves: list[list[QueuedMove]] = [[] for _ in range(trace.ops)]
    for number, move in enumerate(plan.moves):
        where = f"moves[{number}]"
        pages = finder.pages(where, move.tensor, move.first_page, move.page_count)
        if (move.action == DISCARD) != (move.tier == DEVICE):
            raise Infeasible(f"{where}: action {move.action!r} with tier {move.tier!r}")
        tier = NOWHERE if move.action == DISCARD else finder.tier(where, move.tier)
        if move.action not in (*ACTIONS, DISCARD):
            raise Infeasible(f"{where}: action {move.action!r} is none of {', '.join(ACTIONS)}")
        if not 0 <= move.issue_op < trace.ops:
            raise Infeasible(
                f"{where}: issue_op {move.issue_op} is not in 0 … {trace.ops - 1}, the trace's ops"
            )
        moves[move.issue_op].append(QueuedMove(number, pages, tier, move.action))
    return moves


def _start(plan: Plan, finder: _Finder, lasting: set[int]) -> dict[int, int]:
    start: dict[int, int] = {}
    for number, run in enumerate(plan.start):
        where = f"start[{number}]"
        if finder.index(where, run.tensor) not in lasting:
            raise Infeasible(f"{where}: tensor {run.tensor} does not live across iterations")
        for page in finder.pages(where, run.tensor, run.first_page, run.page_count):
            if page in start:
                raise Infeasible(f"{where}: a page of tensor {run.tensor} is listed twice")
            start[page] = finder.tier(where, run.tier)
    return start
