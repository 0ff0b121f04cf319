"""A trace that repeats itself, as micro-batches do, planned with a few of the repetitions.

What they use in common, weights and gradients, is somewhere at the end of each of them. Where two
of these places are alike, the plan's moves between them can be made any number of times. What is
not alike is brought into place by moves at the seam.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .plan import DISCARD, Move, Plan, Recompute
from .trace import WRITE, Bools, Ints, Segment, Trace
from .trace_check import number_by_appearance

FEWEST = 3  # repetitions that are called so
PERIODS = 16  # that are looked at
MOST_PAGES = 1 << 20  # of which some 60 bytes are kept before each repetition
HOST, DISK = 0, 1
TIERS = ("host", "disk")
Pages = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Repeats:
    """Ops ``begin`` to ``begin + count * period`` are ``count`` times the same ones. Tensors are
    used in one repetition only, or in all in the same way."""

    trace: Trace
    begin: int
    period: int
    count: int

    @property
    def end(self) -> int:
        return self.begin + self.count * self.period

    @property
    def last(self) -> range:
        return range(self.end - self.period, self.end)

    def fewer(self, count: int) -> Fewer:
        """With only so many of them, each of which takes what they take on the average."""
        us = self.trace.op_duration_us.copy()
        alike = us[self.begin : self.end].reshape(self.count, self.period)
        alike[:] = alike.mean(axis=0)
        before, behind = range(self.begin + count * self.period), range(self.end, self.trace.ops)
        return Fewer(self, _made_of(replace(self.trace, op_duration_us=us), before, behind), count)

    def one(self) -> Trace:
        """The last of them, as an iteration: what they share lives on from each to the next."""
        trace, ops = self.trace, self.last
        shared = (trace.first_op < ops.start) | (trace.last_op >= ops.stop)
        return _made_of(replace(trace, tensor_persistent=trace.tensor_persistent | shared), ops)

    def more(self, count: int) -> Trace:
        """With ``count`` more of them, each as the last one."""
        before, behind = range(self.last.start), range(self.end, self.trace.ops)
        return _made_of(self.trace, before, *[self.last] * (count + 1), behind)


def _made_of(trace: Trace, *stretches: range) -> Trace:
    """Stretches of its ops one after the other. What is alive in one stretch only is there anew,
    with a number of its own, each time that this comes again."""
    ops = np.concatenate([np.arange(each.start, each.stop) for each in stretches])
    starts, lengths = trace.access_offsets, np.diff(trace.access_offsets)
    rows = np.concatenate([np.arange(starts[s.start], starts[s.stop]) for s in stretches])
    copies, segments, before = [], [], 0
    for number, stretch in enumerate(stretches):
        copy = stretches[:number].count(stretch)
        copies.append(np.full(starts[stretch.stop] - starts[stretch.start], copy, np.int64))
        segments += [
            Segment(first - stretch.start + before, last - stretch.start + before, name)
            for first, last, name in trace.segments
            if first >= stretch.start and last < stretch.stop
        ]
        before += len(stretch)
    again = np.concatenate(copies)
    for stretch in {each for each in stretches if stretches.count(each) > 1}:
        inside = (trace.first_op >= stretch.start) & (trace.last_op < stretch.stop)
        again *= (inside & ~trace.tensor_persistent)[trace.access_tensor[rows]]
    index, met = number_by_appearance(trace.access_tensor[rows] + trace.tensors * again)
    tensors, copied = trace.access_tensor[rows][met], again[met] > 0
    ids = trace.tensor_ids[tensors]
    ids[copied] = int(trace.tensor_ids.max(initial=0)) + 1 + np.arange(int(copied.sum()))
    us = trace.op_duration_us[ops]
    return replace(
        trace,
        op_names=[trace.op_names[op] for op in ops.tolist()],
        op_start_us=np.concatenate([[0.0], np.cumsum(us)[:-1]]),
        op_duration_us=us,
        tensor_ids=ids,
        tensor_names=[trace.tensor_names[tensor] for tensor in tensors.tolist()],
        tensor_bytes=trace.tensor_bytes[tensors],
        tensor_kinds=[trace.tensor_kinds[tensor] for tensor in tensors.tolist()],
        tensor_persistent=trace.tensor_persistent[tensors],
        access_op=np.repeat(np.arange(len(ops)), lengths[ops]),
        access_tensor=index,
        access_mode=trace.access_mode[rows],
        access_first_page=trace.access_first_page[rows],
        access_page_count=trace.access_page_count[rows],
        op_rerun=trace.op_rerun[ops],
        op_host_us=trace.op_host_us[ops],
        segments=tuple(segments),
    )


@dataclass(frozen=True, eq=False)
class Fewer:
    """``trace``: that of ``repeats`` with only ``count`` of its repetitions."""

    repeats: Repeats
    trace: Trace
    count: int

    def plan(self, plan: Plan) -> Plan | None:
        """Of a plan for ``trace``, one for the trace with all repetitions, without what it takes
        there; ``None`` where what it does in one of them is about another one, and for more pages
        than can be looked at one by one. Deferred updates, as no policy has any, are not known."""
        whole = self.repeats
        if self.trace.pages(plan.page_size).sum() > MOST_PAGES:
            return None
        made = self._unrolled(plan)
        if made is None:
            return None
        end = whole.begin + self.count * whole.period
        later = whole.end - end
        moves, again = made
        return replace(
            plan,
            moves=moves,
            recompute=again,
            host_steps=[op + later if op >= end else op for op in plan.host_steps],
            trace_sha256=whole.trace.sha256,
            predicted=None,
            bound=None,
            extra={key: value for key, value in plan.extra.items() if key != "notes"},
        )

    def _unrolled(self, plan: Plan) -> tuple[list[Move], list[Recompute]] | None:
        whole, trace = self.repeats, self.repeats.trace
        found = self._order(plan)
        if found is None:
            return None
        order, seams = found
        begin, period = whole.begin, whole.period
        moves_of: defaultdict[int, list[tuple[int, Move]]] = defaultdict(list)
        again_of: defaultdict[int, list[Recompute]] = defaultdict(list)
        for index, move in enumerate(plan.moves):
            moves_of[self._repetition(move.issue_op)].append((index, move))
        for each in plan.recompute:
            again_of[self._repetition(each.before_op)].append(each)
        low = int(trace.access_offsets[begin])
        rows = int(trace.access_offsets[begin + period]) - low
        numbers = trace.tensor_ids[trace.access_tensor].tolist()
        mine = self._own_rows(low, rows)
        places = [(-1, -1), *enumerate(order), (len(order), self.count)]
        moves: list[tuple[int, int, Move]] = []  # op, place among its moves
        again: list[Recompute] = []
        left_out: dict[tuple[int, int], Pages] = {}  # pages of a move that a seam does without
        for place, seam in seams.items():
            at = begin + place * period
            moves += [(at + op, 2 if op < 0 else 0, move) for op, move in seam.moves]
            for side, base in ((seam.before, order[place - 1] + 1), (seam.after, order[place])):
                for index, pages in side.items():
                    repetition = self._repetition(plan.moves[index].issue_op)
                    left_out[place + repetition - base, index] = pages
        for place, repetition in places:
            shift = (place - repetition) * period
            for index, move in moves_of[repetition]:
                tensor = move.tensor
                if tensor in mine:
                    of, row = mine[tensor]
                    if of != repetition:
                        return None
                    tensor = numbers[low + place * rows + row]
                op = move.issue_op + shift
                for first, count in _without(move, left_out.get((place, index))):
                    moves.append((op, 1, Move(tensor, first, count, move.tier, move.action, op)))
            for each in again_of[repetition]:
                span = []
                for op in (each.first_op, each.last_op):
                    of = self._repetition(op)
                    if of not in (-1, repetition):
                        return None
                    span.append(op + shift if begin <= op else op)
                again.append(Recompute(span[0], span[1], each.before_op + shift))
        moves.sort(key=lambda each: each[:2])
        return [move._replace(issue_op=op) for op, _, move in moves], again

    def _repetition(self, op: int) -> int:
        """Which one ``op`` is in; −1 before the first one, ``count`` behind the last one."""
        number = (op - self.repeats.begin) // self.repeats.period
        return min(max(number, -1), self.count)

    def _own_rows(self, begin: int, rows: int) -> dict[int, tuple[int, int]]:
        """Tensors of one repetition only, by their number in the file: which one, and the first of
        its accesses that is theirs."""
        trace = self.repeats.trace
        first, last = trace.first_op, trace.last_op
        found: dict[int, tuple[int, int]] = {}
        for row, tensor in enumerate(trace.access_tensor[begin : begin + self.count * rows]):
            inside = first[tensor] >= self.repeats.begin and last[tensor] < self.repeats.end
            if inside and not trace.tensor_persistent[tensor]:
                found.setdefault(int(trace.tensor_ids[tensor]), (row // rows, row % rows))
        return found

    def _order(self, plan: Plan) -> tuple[list[int], dict[int, _Seam]] | None:
        """The repetition of ``trace`` that stands for each of the whole trace, and what is done
        before those that do not follow the one before them: the two that are most alike come again
        and again."""
        whole, numbers = self.repeats, self.trace.tensor_ids
        bounds = [whole.begin + number * whole.period for number in range(self.count)]
        states = _Walk(self.trace, plan).run(bounds)
        more = self.repeats.count - self.count
        best: tuple[float, int, int] | None = None
        for first in range(1, self.count):
            for last in range(first + 1, self.count):
                times, rest = divmod(more, last - first)
                since = states[first].op
                cost = times * states[last].pages_to(states[first], since)
                if rest:
                    cost += states[last].pages_to(states[last - rest], since)
                if np.isfinite(cost) and (best is None or cost < best[0]):
                    best = cost, first, last
        if best is None:
            return None
        _, first, last = best
        times, rest = divmod(more, last - first)
        order = list(range(last))
        seams: dict[int, _Seam] = {}
        begins = {first, last - rest} - {last}
        made = {begin: states[last].seam(states[begin], numbers) for begin in begins}
        for begin in [first] * times + [last - rest] * (rest > 0):
            seams[len(order)] = made[begin]
            order += range(begin, last)
        return order + list(range(last, self.count)), seams


def _without(move: Move, pages: Pages | None) -> Iterator[tuple[int, int]]:
    """First page and number of pages of each run of ``move`` that is left."""
    if pages is None:
        yield move.first_page, move.page_count
        return
    kept = np.ones(move.page_count + 2, np.bool_)
    kept[[0, -1]] = False
    kept[pages - move.first_page + 1] = False
    edges = np.flatnonzero(kept[1:] != kept[:-1]).tolist()
    for begin, end in zip(edges[::2], edges[1::2]):
        yield move.first_page + begin, end - begin


@dataclass(frozen=True, eq=False)
class _Seam:
    """``moves`` with the op at which each is queued, from the seam on. ``before`` and ``after`` it,
    moves of the plan, by their places, are without some pages."""

    moves: list[tuple[int, Move]]
    before: dict[int, Pages]
    after: dict[int, Pages]


class _Ways(NamedTuple):
    """Pages: brought in vain; that go out; that come in; that are in another tier; that would leave
    before their next use anyway. And where copies are if none are brought in vain, where one is
    needed if the page is not here, and where they may stay: [2, pages]."""

    vain: Bools
    out: Bools
    back: Bools
    across: Bools
    leaves: Bools
    before: Bools
    needed: Bools
    after: Bools


@dataclass(frozen=True, eq=False)
class _State:
    """Where pages are as a repetition begins at ``op``, by the order of a plan: [pages]. Moves are
    named by their places in the plan; −1: there is none."""

    op: int
    tensor: Pages  # index in the trace
    page: Pages  # within the tensor
    due: Pages  # op of the next use of its tensor
    here: Bools
    copies: Bools  # [2, pages], in host and on disk
    gone: Bools  # discarded
    came_by: Pages  # what brought it, if it has not been used since
    came: Pages  # at that op
    dropped_by: Pages  # what has given back its slot since
    dropped_from: Pages  # in that tier
    left_by: Pages  # by which it went out last
    left: Pages  # at that op
    leaves_by: Pages  # what will take it out before it is used
    leaves: Pages  # at that op
    leaves_to: Pages  # to that tier
    comes_from: Pages  # the tier from which it will come in

    def at(self, op: int, due: Ints) -> _State:
        """A copy, of which nothing is known yet of what comes later."""
        arrays = {
            name: array.copy()
            for name, array in vars(self).items()
            if isinstance(array, np.ndarray)
        }
        state = replace(self, **arrays, op=op)
        state.due[:] = due[self.tensor]
        state.leaves_by[:], state.comes_from[:] = -1, -1
        return state

    def pages_to(self, other: _State, since: int) -> float:
        """That are moved for a seam, beside what would be moved in any case; ``inf`` where it would
        take another move of before op ``since``, or what is discarded in only one of them."""
        ways = self._ways(other)
        early = (ways.vain & (self.came < since)) | (ways.across & (self.left < since))
        if (self.gone != other.gone).any() or early.any():
            return np.inf
        lacks = ways.out & ~(ways.before & ways.needed).any(axis=0)
        return float(lacks.sum() + (ways.back & (other.came_by < 0)).sum() + ways.across.sum())

    def _ways(self, other: _State) -> _Ways:
        coming = self.here & (self.came_by >= 0)
        leaves = other.here & (other.leaves_by >= 0) & (other.leaves < self.op)
        leaves &= ~self.here | coming
        vain = coming & (~other.here | leaves)
        here = self.here & ~vain
        pages = np.arange(len(here))
        before, after = self.copies.copy(), other.copies.copy()
        before[self.dropped_from, pages] |= vain & (self.dropped_by >= 0)
        after[other.leaves_to, pages] |= leaves
        needed = after & ((other.comes_from == [[HOST], [DISK]]) | (other.comes_from < 0))
        off = (~other.here | leaves) & needed.any(axis=0)
        across = off & ~here & ~(before & needed).any(axis=0)
        back = ~here & other.here & ~leaves & before.any(axis=0)
        return _Ways(vain, here & off, back, across, leaves, before, needed, after)

    def seam(self, other: _State, numbers: Ints) -> _Seam:
        """So that all is as in ``other``, but that what is on the device may lack copies below.
        ``numbers`` of tensors in plans."""
        ways = self._ways(other)
        dropped = ways.vain & (self.dropped_by >= 0)
        without = self._by(self.came_by, ways.vain) | self._by(self.dropped_by, dropped)
        without |= self._by(self.left_by, ways.across)
        left = self.left - self.op
        early = np.where(other.came_by >= 0, np.maximum(other.came - other.op, left), 0)
        now = np.zeros_like(left)
        moves: list[tuple[int, Move]] = []

        def move(which: Bools, tier: int, action: str, at: Pages) -> None:
            moves.extend(
                (op, Move(int(numbers[tensor]), page, count, TIERS[tier], action, 0))
                for op, tensor, page, count in self._runs(which, at)
            )

        kept = ways.before.copy()  # what is there in the end
        out, back, across = ways.out, ways.back, ways.across
        for tier in (HOST, DISK):
            goes, late = out & ways.needed[tier], across & ways.needed[tier]
            comes = back & ways.before[tier]
            move(goes, tier, "out", now)
            move(late, tier, "out", left)
            move(comes, tier, "in", early)
            kept[tier] |= goes | late
            out, back, across = out & ~goes, back & ~comes, across & ~late
        for tier in (HOST, DISK):
            move(kept[tier] & ~ways.after[tier], tier, "drop", now)
        return _Seam(moves, without, self._by(other.leaves_by, ways.leaves))

    def _by(self, index: Pages, which: Bools) -> dict[int, Pages]:
        """Pages within their tensors, by the move that ``index`` names."""
        pages = np.flatnonzero(which)
        moves = index[pages]
        return {int(each): self.page[pages[moves == each]] for each in np.unique(moves)}

    def _runs(self, which: Bools, at: Pages) -> Iterator[tuple[int, int, int, int]]:
        """Ops, tensors, first pages and numbers of pages; what is used first comes first."""
        pages = np.flatnonzero(which)
        pages = pages[np.lexsort((pages, self.due[pages], at[pages]))]
        parts = (self.tensor[pages], self.page[pages] - np.arange(len(pages)), at[pages])
        cut = [np.flatnonzero(np.diff(part)) + 1 for part in parts]
        edges = np.unique(np.concatenate([[0], *cut, [len(pages)]])).tolist()
        for begin, end in pairwise(edges):
            first = pages[begin]
            yield int(at[first]), int(self.tensor[first]), int(self.page[first]), end - begin


class _Walk:
    """Through a plan for ``trace`` in the order of its ops."""

    def __init__(self, trace: Trace, plan: Plan) -> None:
        self.trace = trace
        self.sizes = trace.pages(plan.page_size).tolist()
        ends = np.cumsum(self.sizes)
        self.base = (ends - self.sizes).tolist()
        total = int(ends[-1])
        tensor = np.repeat(np.arange(trace.tensors, dtype=np.int32), self.sizes)
        page = np.arange(total, dtype=np.int32) - np.array(self.base, np.int32)[tensor]
        none = np.full(total, -1, np.int32)
        no = np.zeros(total, np.bool_)
        zero = np.zeros(total, np.int32)
        first = _State(
            0, tensor, page, zero, trace.tensor_persistent[tensor], np.stack([no, no]), no, none,
            zero, none, zero, none, none, none, zero, zero, none,
        )  # fmt: skip
        self.now = first.at(0, np.zeros(trace.tensors, np.int64))
        self.now.left[:] = -trace.ops
        for run in plan.start:
            pages = self._pages(run.tensor, run.first_page, run.page_count)
            self.now.here[pages] = False
            self.now.copies[TIERS.index(run.tier), pages] = True
        self.moves: defaultdict[int, list[tuple[int, Move]]] = defaultdict(list)
        for index, move in enumerate(plan.moves):
            self.moves[move.issue_op].append((index, move))
        self.again: defaultdict[int, list[int]] = defaultdict(list)
        for each in plan.recompute:
            self.again[each.before_op] += range(each.first_op, each.last_op + 1)
        self.hosted = set(plan.host_steps)
        columns = trace.access_ranges(plan.page_size)
        writes = trace.access_mode & WRITE != 0
        columns = (trace.access_tensor, *columns, writes)  # type: ignore[assignment]
        self.rows = list(zip(*(column.tolist() for column in columns)))
        self.starts = trace.access_offsets.tolist()
        self.lasting = trace.tensor_persistent.tolist()
        self.first, self.last = trace.first_op.tolist(), trace.last_op.tolist()
        self.states: list[_State] = []
        self.unused = no.copy()  # since the last of ``states``

    def _pages(self, number: int, first: int, count: int) -> slice:
        begin = self.base[self.trace.index_of[number]] + first
        return slice(begin, begin + count)

    def run(self, bounds: Sequence[int]) -> list[_State]:
        """Before each of some ops."""
        trace = self.trace
        for op in range(bounds[-1] + 1):
            if op in bounds:
                due = np.full(trace.tensors, trace.ops)
                row = self.starts[op]
                np.minimum.at(due, trace.access_tensor[row:], trace.access_op[row:])
                self.states.append(self.now.at(op, due))
                self.unused[:] = True
            for index, move in self.moves[op]:
                self._move(index, move)
            for remade in self.again[op]:
                self._remake(remade)
            self._access(op)
        return self.states

    def _move(self, index: int, move: Move) -> None:
        now = self.now
        pages = self._pages(move.tensor, move.first_page, move.page_count)
        if move.action == DISCARD:
            now.here[pages], now.copies[:, pages], now.gone[pages] = False, False, True
            return
        tier = TIERS.index(move.tier)
        if move.action == "drop":
            there = pages.start + np.flatnonzero(now.copies[tier, pages])
            now.dropped_by[there], now.dropped_from[there] = index, tier
            now.copies[tier, pages] = False
        elif move.action == "in":
            for state in self.states[-1:]:
                comes = pages.start + np.flatnonzero(state.comes_from[pages] < 0)
                state.comes_from[comes] = tier
            now.here[pages], now.came_by[pages], now.came[pages] = True, index, move.issue_op
            now.dropped_by[pages] = -1
            self.unused[pages] = False
        else:
            for state in self.states[-1:]:
                leaves = pages.start + np.flatnonzero(self.unused[pages])
                state.leaves_by[leaves], state.leaves[leaves] = index, move.issue_op
                state.leaves_to[leaves] = tier
            now.here[pages], now.came_by[pages], now.copies[tier, pages] = False, -1, True
            now.left_by[pages], now.left[pages] = index, move.issue_op
            self.unused[pages] = False

    def _remake(self, op: int) -> None:
        for tensor, first, end, writes in self.rows[self.starts[op] : self.starts[op + 1]]:
            pages = slice(self.base[tensor] + first, self.base[tensor] + end)
            self.now.came_by[pages] = -1
            if writes:
                self.now.here[pages] |= self.now.gone[pages]
                self.now.gone[pages] = False

    def _access(self, op: int) -> None:
        now = self.now
        for tensor, first, end, writes in self.rows[self.starts[op] : self.starts[op + 1]]:
            base = self.base[tensor]
            whole, pages = slice(base, base + self.sizes[tensor]), slice(base + first, base + end)
            if self.first[tensor] == op and not self.lasting[tensor]:
                now.here[whole] = True
            now.came_by[pages], self.unused[pages] = -1, False
            if writes:
                now.copies[:, pages] = False
                now.copies[HOST, pages] = op in self.hosted
            if self.last[tensor] == op and not self.lasting[tensor]:
                now.here[whole], now.copies[:, whole], now.gone[whole] = False, False, False


def find_repeats(trace: Trace, fewest: int = FEWEST) -> Repeats | None:
    """The longest stretch of a trace that is some ops again and again, so many times at least."""
    marks = _marks(trace)
    found = ((*_longest(marks, period), period) for period in _periods(marks))
    for begin, ops, period in sorted(found, key=lambda each: (-each[1], each[2])):
        repeats = _aligned(trace, begin, period, ops) if ops >= fewest * period else None
        if repeats is not None and repeats.count >= fewest:
            return repeats
    return None


def _marks(trace: Trace) -> Ints:
    """A number for each op. Two have the same one if they may be the same op of two repetitions:
    called alike but for digits, with alike accesses, those of persistent tensors to the same ones.
    (What has the same number by chance is found out later.)"""
    names: dict[str, int] = {}
    words = [re.sub(r"\d+", "#", name) for name in trace.op_names]
    kinds = {kind: number for number, kind in enumerate(dict.fromkeys(trace.tensor_kinds))}
    kind = np.array([kinds[kind] for kind in trace.tensor_kinds], np.int64)
    lasting = np.where(trace.tensor_persistent, np.arange(trace.tensors), -1)
    columns = (
        trace.access_mode.astype(np.int64),
        trace.access_first_page,
        trace.access_page_count,
        trace.tensor_bytes[trace.access_tensor],
        kind[trace.access_tensor],
        lasting[trace.access_tensor],
        np.arange(len(trace.access_op)) - trace.access_offsets[trace.access_op],
    )
    rows = np.zeros(len(trace.access_op), np.uint64)
    for column in columns:
        rows = _mixed(rows ^ column.astype(np.uint64))
    found = np.array([names.setdefault(word, len(names)) for word in words], np.uint64)
    found = _mixed(2 * found + trace.op_rerun)
    np.add.at(found, trace.access_op, rows)
    hosted = np.flatnonzero(~np.isnan(trace.op_host_us))
    found[hosted] = np.arange(len(hosted))  # an update is there once
    return _mixed(found).view(np.int64)


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """64-bit numbers scattered over all of them (the finalizer of splitmix64)."""
    values = values.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = values ^ (values >> np.uint64(31))
    return mixed


def _periods(marks: Ints) -> list[int]:
    """Distances at which ops come again, those first that cover the most."""
    order = np.argsort(marks, kind="stable")
    alike = marks[order][1:] == marks[order][:-1]
    found, count = np.unique(np.diff(order)[alike], return_counts=True)
    best = np.argsort(-found * count, kind="stable")[:PERIODS]
    periods: list[int] = found[best].tolist()
    return periods


def _longest(marks: Ints, period: int) -> tuple[int, int]:
    """The longest stretch in which each op comes again after ``period`` ops: begin and ops."""
    alike = np.concatenate([[False], marks[:-period] == marks[period:], [False]])
    edges = np.flatnonzero(alike[1:] != alike[:-1])
    if not len(edges):
        return 0, period
    begins, ends = edges[::2], edges[1::2]
    best = int(np.argmax(ends - begins))
    return int(begins[best]), int(ends[best] - begins[best]) + period


def _aligned(trace: Trace, begin: int, period: int, ops: int) -> Repeats | None:
    """From where on repetitions have only such tensors to themselves that are used in no other."""
    starts = trace.access_offsets
    # Rows of one repetition, and those that come after a period, have to be of the same tensors or
    # of those in their place.
    low, high = int(starts[begin]), int(starts[begin + ops])
    rows = int(starts[begin + period]) - low
    if not rows:
        return None
    tensors = trace.access_tensor[low:high]
    before, after = tensors[:-rows], tensors[rows:]
    for column in (trace.access_mode, trace.access_first_page, trace.access_page_count):
        if (column[low:high][:-rows] != column[low:high][rows:]).any():
            return None
    if (trace.tensor_bytes[before] != trace.tensor_bytes[after]).any():
        return None
    pairs = np.unique(before * trace.tensors + after)
    if len(pairs) != len(np.unique(before)) or len(pairs) != len(np.unique(after)):
        return None
    shared = np.zeros(trace.tensors, np.bool_)
    shared[before[before == after]] = True
    own = np.zeros(trace.tensors, np.bool_)
    own[tensors] = True
    own &= ~shared
    # At how many op boundaries each tensor that is not shared is alive.
    alive = np.zeros(trace.ops + 2, np.int64)
    np.add.at(alive, trace.first_op[own] + 1, 1)
    np.add.at(alive, trace.last_op[own] + 1, -1)
    alive = np.cumsum(alive)  # [op]: alive before op and at it
    for phase in range(period):
        first = begin + phase
        count = (begin + ops - first) // period
        bounds = first + period * np.arange(count + 1)
        if not alive[bounds].any():
            return Repeats(trace, first, period, int(count))
    return None
