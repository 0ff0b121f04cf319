"""From the program's flows to moves: which pages of which gap go when.

Outs take the flow of each slot soonest due first, among the gaps that have begun; ins take it in
the order in which they are due, among the pages that are out. A page's identity follows from its
place: host pages are counted from the front of a gap's segment, disk pages from its back, so that
a later gap of the same version finds the same pages with good copies.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace

import numpy as np

from ..lifetimes import DYING, KEPT, LAST, RETURN
from ..plan import Move, StartRun
from ..trace import Floats, Ints, Trace
from .problem import DISK, Problem
from .program import Solution

TIER_NAMES = ("host", "disk")


@dataclass(frozen=True)
class Chunk:
    """``count`` pages of a gap, from its ``first``-th on (host: from the front, disk: from the
    back), that go ``out`` or in when step ``step`` may start; ``step`` ≥ steps: next iteration."""

    gap: int
    first: int
    count: int
    step: int


@dataclass(frozen=True, eq=False)
class Schedule:
    """Chunks by tier; ``off``: whole pages of each gap per tier."""

    off: list[Ints]
    outs: list[list[Chunk]]
    ins: list[list[Chunk]]


def whole_pages(problem: Problem, solution: Solution) -> list[Ints]:
    """Pages off the device per tier and gap. What a gap has off in all is rounded up; of a gap in
    two tiers the first gets its share on average over the gaps in the order they begin."""
    if not problem.tiers:
        return []
    total = np.ceil(sum(solution.off) - 1e-3).astype(np.int64)
    total = np.minimum(total, problem.gaps.pages)
    if problem.tiers[-1].kept:
        copied = np.isin(problem.gaps.kind, (KEPT, RETURN))
        others = replace(solution, off=[np.where(copied, 0, off) for off in solution.off[:-1]])
        shared = whole_pages(replace(problem, tiers=problem.tiers[:-1]), others)
        return [*shared, np.where(copied, total, 0)]
    if len(solution.off) == 1:
        return [total]
    first = np.zeros_like(total)
    wanted = solution.off[0].tolist()
    carry = 0.0
    last = problem.gaps.kind == LAST
    first[last] = total[last]
    for gap in np.argsort(problem.gaps.begin, kind="stable").tolist():
        if last[gap]:
            continue
        carry += wanted[gap]
        first[gap] = min(max(int(carry + 1e-6), 0), total[gap])
        carry -= float(first[gap])
    return [first, total - first]


def written_pages(problem: Problem, off: Ints) -> Ints:
    """Pages of each gap that have no good copy yet when it begins."""
    gaps = problem.gaps
    written = np.zeros(len(gaps), np.int64)
    version, have = -1, 0
    for gap in range(len(gaps)):
        if gaps.version[gap] != version:
            version, have = int(gaps.version[gap]), 0
        written[gap] = 0 if gaps.lasting[gap] else max(0, int(off[gap]) - have)
        have = max(have, int(off[gap]))
    return written


def make_schedule(problem: Problem, solution: Solution) -> Schedule:
    """Whole pages, and when they go."""
    off = whole_pages(problem, solution)
    outs, ins = [], []
    for part in range(len(problem.tiers)):
        pair = _Assignment(problem, off[part], solution, part).run()
        outs.append(pair[0])
        ins.append(pair[1])
    return Schedule(off, outs, ins)


def _scaled(flow: Floats, pages: int) -> Floats:
    total = float(flow.sum())
    return flow * (pages / total) if total > 0 else flow


class _Assignment:
    """Gives one tier's flows to pages, slot by slot, over three iterations; the chunks of the gaps
    that begin in the second one are those of the steady state."""

    def __init__(self, problem: Problem, off: Ints, solution: Solution, part: int) -> None:
        self.steps = problem.steps
        self.off = off
        self.written = written_pages(problem, off)
        self.early = int(solution.early_at_start[part] + 0.5)
        self.below = int(solution.below_at_start[part] + 0.5)
        # Rounding has changed the sums a little; without a correction every iteration would lag
        # more behind the flows than the one before.
        self.flow_out = _scaled(solution.flow_out[part], int(self.written.sum()))
        gaps = problem.gaps
        dies = np.isin(gaps.kind, DYING)
        self.dies, self.leaves = dies.tolist(), (gaps.kind == LAST).tolist()
        self.flow_in = _scaled(solution.flow_in[part], int(off[~dies].sum()))
        self.begin, self.end = gaps.begin.tolist(), gaps.end.tolist()
        self.starting: list[list[int]] = [[] for _ in range(self.steps)]
        for gap in np.flatnonzero(off).tolist():
            self.starting[(self.begin[gap] + 1) % self.steps].append(gap)

    def run(self) -> tuple[list[Chunk], list[Chunk]]:
        steps = self.steps
        self.outs: list[Chunk] = []
        self.ins: list[Chunk] = []
        self.to_go: list[list[int]] = []  # heap of [due, gap, first page, pages] to be written
        self.to_come: list[list[int]] = []  # heap of the same, below
        self._begin()
        credit_out = credit_in = 0.0
        for now in range(3 * steps):
            step = now % steps
            credit_in += float(self.flow_in[2 * step])
            credit_in = self._bring(now, credit_in)
            for gap in self.starting[step]:
                self._start(gap, now)
            credit_out += float(self.flow_out[2 * step] + self.flow_out[2 * step + 1])
            credit_out = self._send(now, credit_out)
            credit_in += float(self.flow_in[2 * step + 1])
            credit_in = self._bring(now, credit_in)
        return self.outs, self.ins

    def _begin(self) -> None:
        """Gaps that cross the begin: the soonest due are back early, the next are below, the last
        are still to go."""
        crossing = [g for g in np.flatnonzero(self.off).tolist() if self.begin[g] + 1 < self.steps]
        crossing = [g for g in crossing if self.end[g] >= self.steps and not self.dies[g]]
        early, below = self.early, self.below
        for gap in sorted(crossing, key=lambda g: self.end[g]):
            due, first, count = self.end[gap] - self.steps, 0, int(self.off[gap])
            for heap, room in ((None, early), (self.to_come, below), (self.to_go, count)):
                take = min(count - first, room)
                if take and heap is not None:
                    heapq.heappush(heap, [due, gap, first, take])
                first += take
                early -= take if heap is None else 0
                below -= take if heap is self.to_come else 0

    def _start(self, gap: int, now: int) -> None:
        """Pages with good copies are free at once; the others queue for the flow."""
        clean = int(self.off[gap] - self.written[gap])
        length = self.end[gap] - self.begin[gap] - 1
        due = now + length
        if clean:
            self._note(self.outs, gap, 0, clean, now, due)
            if not self.dies[gap]:
                heapq.heappush(self.to_come, [due, gap, 0, clean])
        if self.written[gap]:
            heapq.heappush(self.to_go, [due, gap, clean, int(self.written[gap])])

    def _send(self, now: int, credit: float) -> float:
        while self.to_go:
            due, gap, first, count = self.to_go[0]
            if due <= now and not self.leaves[gap]:  # too late to be of use: it stays on the device
                heapq.heappop(self.to_go)
                continue
            if due <= now:
                credit = max(credit, float(count))
            take = min(count, int(credit + 0.999))
            if take <= 0:
                return credit
            credit -= take
            self._note(self.outs, gap, first, take, now, due)
            if not self.dies[gap]:
                heapq.heappush(self.to_come, [due, gap, first, take])
            if take == count:
                heapq.heappop(self.to_go)
            else:
                self.to_go[0][2:] = [first + take, count - take]
        return credit

    def _bring(self, now: int, credit: float) -> float:
        while self.to_come:
            due, gap, first, count = self.to_come[0]
            take = count if due <= now else min(count, int(credit + 1e-6))
            if take <= 0:
                return credit
            credit -= take
            self._note(self.ins, gap, first, take, now, due)
            if take == count:
                heapq.heappop(self.to_come)
            else:
                self.to_come[0][2:] = [first + take, count - take]
        return credit

    def _note(
        self, chunks: list[Chunk], gap: int, first: int, take: int, now: int, due: int
    ) -> None:
        """Keep chunks of gaps that began in the second iteration, in steps as the gap's begin and
        end are: one that begins with the last step goes and comes in the iteration after it."""
        steps = self.steps
        began = due - (self.end[gap] - self.begin[gap] - 1)
        if not steps <= began < 2 * steps:
            return
        step = now - began + self.begin[gap] + 1
        last = chunks[-1] if chunks else None
        if last and (last.gap, last.first + last.count, last.step) == (gap, first, step):
            chunks[-1] = Chunk(gap, last.first, last.count + take, step)
        else:
            chunks.append(Chunk(gap, first, take, step))


# -- moves ---------------------------------------------------------------------------------------
def to_moves(
    trace: Trace, problem: Problem, schedule: Schedule, first_op: Ints
) -> tuple[list[Move], list[StartRun]]:
    """Moves in queue order, and the pages that are off the device when an iteration begins.
    ``first_op``: of each step."""
    keyed: list[tuple[int, int, int, Move]] = []
    start: list[StartRun] = []
    steps = problem.steps
    ends = problem.gaps.end
    needed = _needed_later(problem, schedule)
    for part, tier in enumerate(problem.tiers):
        name = TIER_NAMES[tier.index]
        from_back = tier.index == DISK
        start += [
            StartRun(*_pages(trace, problem, chunk, from_back), name)
            for chunk in _off_at_begin(schedule, part, steps)
        ]
        for order, chunk in enumerate(schedule.outs[part]):
            if problem.gaps.kind[chunk.gap] == RETURN:
                continue  # it left before the host's step
            run = _pages(trace, problem, chunk, from_back)
            step = chunk.step % steps
            keyed.append((step, 0, order, Move(*run, name, "out", int(first_op[step]))))
        for order, chunk in enumerate(schedule.ins[part]):
            run = _pages(trace, problem, chunk, from_back)
            step = chunk.step % steps
            op = int(first_op[step])
            keyed.append((step, 1, int(ends[chunk.gap]) - chunk.step, Move(*run, name, "in", op)))
            rest = chunk.first + chunk.count - max(chunk.first, int(needed[part][chunk.gap]))
            if rest > 0:
                chunk = replace(chunk, first=chunk.first + chunk.count - rest, count=rest)
                run = _pages(trace, problem, chunk, from_back)
                keyed.append((step, 2, order, Move(*run, name, "drop", op)))
    keyed.sort(key=lambda entry: entry[:3])
    return [entry[3] for entry in keyed], start


def _off_at_begin(schedule: Schedule, part: int, steps: int) -> list[Chunk]:
    """Pages that have left before an iteration begins and come back after it has."""
    late: dict[int, list[Chunk]] = {}  # leave when it has begun
    for chunk in schedule.outs[part]:
        if chunk.step >= steps:
            late.setdefault(chunk.gap, []).append(chunk)
    found = []
    for chunk in schedule.ins[part]:
        if chunk.step < steps:
            continue
        first, end = chunk.first, chunk.first + chunk.count
        for out in [*late.get(chunk.gap, ()), Chunk(chunk.gap, end, 0, 0)]:
            until = min(out.first, end)
            if until > first:
                found.append(Chunk(chunk.gap, first, until - first, chunk.step))
            first = max(first, out.first + out.count)
    return found


def _pages(trace: Trace, problem: Problem, chunk: Chunk, from_back: bool) -> tuple[int, int, int]:
    """The chunk's tensor (its number in the file), first page and page count."""
    gaps, gap = problem.gaps, chunk.gap
    begin = int(gaps.first_page[gap])
    first = begin + chunk.first
    if from_back:
        first = begin + int(gaps.pages[gap]) - chunk.first - chunk.count
    return int(trace.tensor_ids[gaps.tensor[gap]]), first, chunk.count


def _needed_later(problem: Problem, schedule: Schedule) -> list[Ints]:
    """Per tier and gap: the pages, counted as chunks are, whose copies a later gap of the version
    uses again; of what is only read all of them."""
    found = []
    gaps = problem.gaps
    for off in schedule.off:
        needed = np.where(gaps.lasting, gaps.pages, 0)
        for gap in range(len(gaps) - 2, -1, -1):
            if gaps.version[gap] == gaps.version[gap + 1] and not gaps.lasting[gap]:
                needed[gap] = max(needed[gap + 1], off[gap + 1])
        found.append(needed)
    return found
