"""When each page holds a frame, for whoever decides moves in the order of the program."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from ..plan import Plan
from ..trace import Bools, Floats, Ints, Trace

_LINGERS = 3  # ops in which what died may still be somebody's, as a trace of accesses counts
_SETTLING = 2  # iterations before the one that is laid out


@dataclass(frozen=True, eq=False)
class Spells:
    """Times in which one page holds a frame, ticks ``begin`` to ``end``, half-open.

    ``ticks`` is the number of ticks of an iteration; spells that go on into the next one end after
    it. Sorted by page, counted through all tensors, and by time.
    """

    ticks: int
    times: Floats  # [ticks + 1], in ops: of each tick, and of the first in the next iteration
    page: Ints
    begin: Ints
    end: Ints
    ins: dict[int, tuple[int, int]]  # move in → ticks from the begin of its first page to the last


def spells_in_order(trace: Trace, plan: Plan, frames: int) -> Spells:
    """When pages hold frames for an executor that decides in the order of the program: before op k
    the moves of k are queued, and whatever leaves gives its frame back at that, whatever comes
    takes one then, if there are enough, or at one of the next ops, at the latest at the one that
    uses it. What died with op k − 1 gives its frames back before op k begins, or some ops later
    where nobody is short of them. The transfers follow, and wait for each other.
    """
    count = trace.pages(plan.page_size)
    base = np.cumsum(count) - count
    program = Order(trace, plan, frames, base, count)
    for _ in range(_SETTLING + 1):
        program.run()
    page, at, change, move = program.events()
    times, tick = np.unique(at, return_inverse=True) if len(at) else (np.zeros(1), page)
    ticks = len(times)
    lasting = np.repeat(trace.tensor_persistent, count)
    order = np.lexsort((change, tick, page))
    spell_page, begin, end = _pair(page[order], tick[order], change[order], ticks)

    # Pages that never leave, or that come as often as they go only in a longer period.
    stays = lasting & ~pages_off(plan, trace, base, len(lasting))
    stays[page] = False
    net = np.zeros(len(lasting), np.int64)
    np.add.at(net, page, change)
    stays |= lasting & (net != 0)
    keep = ~stays[spell_page]
    always = np.flatnonzero(stays)
    spell_page = np.concatenate([spell_page[keep], always])
    begin = np.concatenate([begin[keep], np.zeros(len(always), np.int64)])
    end = np.concatenate([end[keep], np.full(len(always), ticks)])
    order = np.argsort(spell_page, kind="stable")

    span = np.flatnonzero((change > 0) & (move >= 0))
    ins: dict[int, tuple[int, int]] = {}
    for index, moment in zip(move[span].tolist(), tick[span].tolist()):
        first, last = ins.get(index, (moment, moment))
        ins[index] = min(first, moment), max(last, moment)
    times = np.append(times, float(trace.ops))
    return Spells(ticks, times, spell_page[order], begin[order], end[order], ins)


class Order:
    """One iteration after another, as :func:`spells_in_order` says."""

    def __init__(self, trace: Trace, plan: Plan, frames: int, base: Ints, count: Ints) -> None:
        self._ops = trace.ops
        self._held = np.repeat(trace.tensor_persistent, count)
        self._held[pages_off(plan, trace, base, len(self._held))] = False
        self._free = frames - int(self._held.sum())
        self._living = self._held | np.repeat(trace.tensor_persistent, count)
        self._moves: dict[int, list[int]] = {}
        self._rows: dict[int, tuple[str, str, slice]] = {}
        for index, move in enumerate(plan.moves):
            first = int(base[trace.index_of[move.tensor]]) + move.first_page
            self._rows[index] = move.action, move.tier, slice(first, first + move.page_count)
            self._moves.setdefault(move.issue_op, []).append(index)
        self._born: dict[int, list[slice]] = {}
        self._dead: dict[int, list[slice]] = {}
        self._over: dict[int, list[slice]] = {}  # they have died, and linger
        self._lingering: list[slice] = []
        for tensor in np.flatnonzero(~trace.tensor_persistent).tolist():
            rows = slice(int(base[tensor]), int(base[tensor] + count[tensor]))
            self._born.setdefault(int(trace.first_op[tensor]), []).append(rows)
            last = int(trace.last_op[tensor]) + 1
            self._over.setdefault(min(last, trace.ops), []).append(rows)
            self._dead.setdefault(min(last + _LINGERS, trace.ops), []).append(rows)
        self._uses: dict[int, set[int]] = {}
        for op, tensor in zip(trace.access_op.tolist(), trace.access_tensor.tolist()):
            self._uses.setdefault(op, set()).add(tensor)
        self._of = [trace.index_of[move.tensor] for move in plan.moves]
        self._waiting: dict[str, deque[int]] = {}
        self._events: list[tuple[Ints, float, int, int]] = []  # of the latest iteration

    def events(self) -> tuple[Ints, Floats, Ints, Ints]:
        """Of each page that takes (1) or gives back (−1) a frame: the page, when, which of these,
        and the move in."""
        pages = [pages for pages, *_ in self._events]
        table = np.array([rest for _, *rest in self._events], np.float64).reshape(-1, 3)
        at, change, move = np.repeat(table, [len(some) for some in pages], axis=0).T
        page = np.concatenate([np.empty(0, np.int64), *pages])
        return page, at, change.astype(np.int64), move.astype(np.int64)

    def run(self) -> None:
        self._events.clear()
        for op in range(self._ops + 1):
            # After the last op, but still in this iteration.
            at = op if op < self._ops else op - 0.3
            for index in self._moves.get(op, ()):
                action, tier, rows = self._rows[index]
                if action == "out":
                    self._give(rows, at)
                elif action == "in":
                    self._waiting.setdefault(tier, deque()).append(index)
            self._bring(at)
            self._lingering += self._over.get(op, ())
            self._end(self._dead.get(op, ()), at + 0.1)
            self._bring(at + 0.1, self._uses.get(op, ()))
            for rows in self._born.get(op, ()):
                self._living[rows] = True
                wanted = rows.start + np.flatnonzero(~self._held[rows])
                if len(wanted) > self._free:
                    self._end(self._lingering, at + 0.1)
                self._take(wanted, at + 0.2, -1)

    def _bring(self, at: float, used: Collection[int] = ()) -> None:
        """What has room, and what is ``used`` now in any case."""
        for queue in self._waiting.values():
            due = max((n + 1 for n, move in enumerate(queue) if self._of[move] in used), default=0)
            while queue:
                rows = self._rows[queue[0]][2]
                wanted = rows.start + np.flatnonzero(self._living[rows] & ~self._held[rows])
                if len(wanted) > self._free:
                    if due <= 0:
                        break
                    self._end(self._lingering, at)
                due -= 1
                self._take(wanted, at, queue.popleft())

    def _end(self, tensors: Collection[slice], at: float) -> None:
        for rows in tensors:
            self._give(rows, at)
            self._living[rows] = False
        self._lingering = [rows for rows in self._lingering if self._living[rows.start]]

    def _take(self, pages: Ints, at: float, move: int) -> None:
        self._held[pages] = True
        self._free -= len(pages)
        self._events.append((pages, at, 1, move))

    def _give(self, rows: slice, at: float) -> None:
        pages = rows.start + np.flatnonzero(self._held[rows])
        self._held[pages] = False
        self._free += len(pages)
        self._events.append((pages, at, -1, -1))


def expand(first: Ints, count: Ints) -> tuple[Ints, Ints]:
    """For ranges of ``count`` numbers from ``first`` on: the range and the number, one by one."""
    owner = np.repeat(np.arange(len(count)), count)
    return owner, np.arange(len(owner)) + np.repeat(first - (np.cumsum(count) - count), count)


def pages_off(plan: Plan, trace: Trace, base: Ints, pages: int) -> Bools:
    """Pages that ``plan.start`` names, [pages]."""
    off = np.zeros(pages, np.bool_)
    for run in plan.start:
        first = base[trace.index_of[run.tensor]] + run.first_page
        off[first : first + run.page_count] = True
    return off


def _pair(page: Ints, moment: Ints, change: Ints, ticks: int) -> tuple[Ints, Ints, Ints]:
    """Page, begin and end of each spell, from events sorted by page and time."""
    if not len(page):
        return page, moment, moment
    heads = np.flatnonzero(np.diff(page, prepend=-1))
    which = np.cumsum(np.diff(page, prepend=-1) != 0) - 1
    held = np.cumsum(change)
    held -= (held[heads] - change[heads])[which]
    # What goes before it came was there when the iteration began.
    held += np.maximum(0, -np.minimum.reduceat(held, heads))[which]
    before = held - change
    edge = np.flatnonzero((before > 0) != (held > 0))
    page, moment, opens = page[edge], moment[edge], held[edge] > 0
    following = np.arange(1, len(page) + 1)
    last = np.diff(page, append=-1) != 0
    following[last] = np.searchsorted(page, page[last])
    end = moment[following] + np.where(last, ticks, 0)
    return page[opens], moment[opens], end[opens]
