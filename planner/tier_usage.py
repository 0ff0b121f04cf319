"""Bytes that a plan holds in host memory and on disk over the steady iteration.

A slot is taken when the transfer of its page begins, and given back when the page is written, when
it is dropped, or when its tensor dies. In between the page may come back to the device: a clean
copy keeps its slot.
"""

from __future__ import annotations

import numpy as np

from .layout import expand
from .plan import DEVICE, DISCARD, TIERS
from .timeline import Timeline, instants
from .trace import WRITE, Bools, Floats, Ints

# At one instant, in this order: slots go back before others are taken. ``_HOLD`` only tells that a
# copy is there.
_FREE, _HOLD, _TAKE = 0, 1, 2


def tier_usage(line: Timeline) -> dict[str, tuple[Floats, Ints]]:
    """Per tier, times in µs (the first is 0) and the bytes in use from each of them on. Tiers that
    are never used, and all of a timeline without a plan, are left out."""
    found: dict[str, tuple[Floats, Ints]] = {}
    if line.plan is None or not (line.plan.moves or line.plan.start):
        return found
    moved = _Moved(line)
    for tier in TIERS:
        page, at_us, what = moved.events(tier)
        resting = moved.resting(tier, page)
        if not len(page) and not resting:
            continue
        order = np.lexsort((what, at_us, page))
        page, at_us, there = page[order], at_us[order], what[order] != _FREE
        first = np.diff(page, prepend=-1) != 0
        last = np.append(first, True)[1:]
        # What is left at the end of the iteration is there when it begins.
        previous = np.arange(len(page)) - 1
        previous[first] = np.flatnonzero(last)
        change = there.astype(np.int64) - there[previous]
        # So is what a tensor has there that lives on into the next iteration.
        later = at_us >= line.iteration_us
        held = resting + int(there[last].sum()) - int(change[later].sum())
        at_us = np.where(later, at_us - line.iteration_us, at_us)
        if held or change.any():
            found[tier] = _curve(at_us[change != 0], change[change != 0], held, line.page_size)
    return found


def _curve(times: Floats, pages: Ints, held: int, page_size: int) -> tuple[Floats, Ints]:
    times, pages = np.append(0.0, instants(times)), np.append(0, pages)
    order = np.lexsort((pages, times))  # at one instant slots go back before others are taken
    times, level = times[order], held + np.cumsum(pages[order])
    last = np.append(np.diff(times) > 0, True)
    return times[last], level[last] * page_size


class _Moved:
    """What the plan's moves, the writes and the ends of tensors do to copies, page by page; pages
    are numbered through all tensors."""

    def __init__(self, line: Timeline) -> None:
        assert line.plan is not None
        self.line, trace, moves = line, line.trace, line.plan.moves
        self.count = trace.pages(line.page_size)
        self.base = np.cumsum(self.count) - self.count
        self.owner = np.repeat(np.arange(trace.tensors), self.count)
        self.tensor = np.array([trace.index_of[move.tensor] for move in moves], np.int64)
        self.first = self.base[self.tensor] + np.array(
            [move.first_page for move in moves], np.int64
        )
        self.pages = np.array([move.page_count for move in moves], np.int64)
        self.op = np.array([move.issue_op for move in moves], np.int64)
        assert line.simulation is not None
        assert line.simulation.queued_us is not None
        self.queued_us = line.simulation.queued_us[self.op]
        self.kind = np.array([f"{move.tier} {move.action}" for move in moves], np.str_)
        parts = line.transfers
        table = np.array(
            [(p.move, self.base[p.tensor] + p.first_page, p.page_count) for p in parts], np.int64
        ).reshape(-1, 3)
        times = np.array([(p.begin_us, p.end_us) for p in parts], np.float64).reshape(-1, 2)
        each_us = (times[:, 1] - times[:, 0]) / np.maximum(table[:, 2], 1)
        part, page = expand(table[:, 1], table[:, 2])
        order = np.argsort(page, kind="stable")
        part = part[order]
        self.move, self.page = table[part, 0], page[order]  # of each page of each transfer
        self.begin_us = times[part, 0] + (self.page - table[part, 1]) * each_us[part]
        self.end_us = self.begin_us + each_us[part]

    def events(self, tier: str) -> tuple[Ints, Floats, Ints]:
        """Page, time and what happens to its copy in ``tier``."""
        outs = self.kind == f"{tier} out"
        taken = outs[self.move] & (self.end_us > self.begin_us)
        number, page = self._pages_of(outs)
        total = len(self.owner) + 1
        clean = ~np.isin(number * total + page, self.move * total + self.page)
        dropped, dropped_us = self._drops(tier)
        written, written_us = self._writes(tier)
        freed = len(dropped) + len(written)
        return self._within_lives(
            tier,
            np.concatenate([self.page[taken], page[clean], dropped, written]),
            np.concatenate(
                [self.begin_us[taken], self.queued_us[number[clean]], dropped_us, written_us]
            ),
            np.repeat([_TAKE, _HOLD, _FREE], [taken.sum(), clean.sum(), freed]),
        )

    def resting(self, tier: str, moving: Ints) -> int:
        """Pages that are there when an iteration begins, and stay: only the host uses them."""
        assert self.line.plan is not None
        start = [run for run in self.line.plan.start if run.tier == tier]
        first = [self.base[self.line.trace.index_of[run.tensor]] + run.first_page for run in start]
        counts = [run.page_count for run in start]
        _, page = expand(np.array(first, np.int64), np.array(counts, np.int64))
        return len(np.setdiff1d(page, moving))

    def _pages_of(self, which: Bools) -> tuple[Ints, Ints]:
        """The move and the page, for each page of the moves ``which``."""
        chosen = np.flatnonzero(which)
        owner, page = expand(self.first[chosen], self.pages[chosen])
        return chosen[owner], page

    def _of_tier(self, tier: str) -> Ints:
        """The tensors that have moves to or from it."""
        return np.unique(self.tensor[np.char.startswith(self.kind, f"{tier} ")])

    def _drops(self, tier: str) -> tuple[Ints, Floats]:
        """At once, or when what was queued before has arrived. What is discarded has no copy."""
        number, page = self._pages_of(np.isin(self.kind, [f"{tier} drop", f"{DEVICE} {DISCARD}"]))
        at_us = self.queued_us[number]
        low, high = (np.searchsorted(self.page, page, side) for side in ("left", "right"))
        drop, other = expand(low, high - low)
        earlier = (self.op[self.move[other]], self.move[other])
        this = (self.op[number[drop]], number[drop])
        before = (earlier[0] < this[0]) | ((earlier[0] == this[0]) & (earlier[1] < this[1]))
        arrived_us = self.end_us[other] - np.where(before, 0.0, self.line.iteration_us)
        np.maximum.at(at_us, drop, arrived_us)
        return page, at_us

    def _writes(self, tier: str) -> tuple[Ints, Floats]:
        trace = self.line.trace
        begin, end = trace.access_ranges(self.line.page_size)
        rows = np.flatnonzero(
            (trace.access_mode & WRITE != 0) & np.isin(trace.access_tensor, self._of_tier(tier))
        )
        if tier == "host":  # what the host writes is the copy
            assert self.line.plan is not None
            rows = rows[~np.isin(trace.access_op[rows], self.line.plan.host_steps)]
        start = self.base[trace.access_tensor[rows]] + begin[rows]
        owner, page = expand(start, end[rows] - begin[rows])
        at_us = self.line.op_start_us.copy()
        if self.line.simulation is not None:
            for run in self.line.simulation.host_runs:
                at_us[run.op] = run.begin_us
        return page, at_us[trace.access_op[rows]][owner]

    def _within_lives(
        self, tier: str, page: Ints, at_us: Floats, what: Ints
    ) -> tuple[Ints, Floats, Ints]:
        """Of tensors that die what is between birth and death, and that; of others what goes on
        into the next iteration comes at its begin."""
        line, trace = self.line, self.line.trace
        tensor = self.owner[page]
        lasting = trace.tensor_persistent[tensor]
        born_us, dead_us = np.array([line.lifetime_us(each) for each in range(trace.tensors)]).T
        carried = dead_us[tensor] > line.iteration_us
        at_us = np.where(carried & (at_us < born_us[tensor]), at_us + line.iteration_us, at_us)
        keep = lasting | ((born_us[tensor] < at_us) & (at_us < dead_us[tensor]))
        late = lasting & (at_us >= line.iteration_us)
        at_us = np.where(late, at_us - line.iteration_us, at_us)
        dying = self._of_tier(tier)
        dying = dying[~trace.tensor_persistent[dying]]
        owner, ends = expand(self.base[dying], self.count[dying])
        return (
            np.append(page[keep], ends),
            np.append(at_us[keep], dead_us[dying][owner]),
            np.append(what[keep], np.full(len(ends), _FREE)),
        )
