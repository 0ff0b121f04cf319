"""Fixed addresses for a plan: a base frame for every stay of a tensor on the device.

An op wants the pages of a tensor in consecutive frames. The machine model counts frames only, but a
plan is the same in each iteration, so addresses are a packing problem that is solved once: frames
× circular time. What is packed are *stays*, from when a tensor's first page takes a frame until its
last page has left. A stay has one base for as long as it lasts, page ``i`` is at ``base + i``, and
frames of pages that are away meanwhile are free for others. A stay for which no base is free as
long as it lasts has several, one after the other: it is *shifted* between two uses, which is a copy
inside the device.

Time is the order of the program, in *ticks*: a page holds its frame from the tick that takes it to
the tick that gives it back. So a runtime that keeps the order of each queue, and lets what takes a
frame wait for what held it, cannot deadlock: in that order every wait comes to an end.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from .hardware import Hardware
from .plan import Plan
from .trace import Bools, Floats, Ints, Trace

MIN_SLOTS, MAX_SLOTS = 256, 16_384  # of time; if there are no more ticks, one for each
MAX_CELLS = 96 << 20  # frames × slots, two bytes each
MAX_ORDERS = 7
MAX_WORK = 8e8  # cells looked at, some 10 ns each: no order is begun that would go beyond
HEAD_ROWS = 2  # of a stay that are looked up in all frames at once
_LINGERS = 3  # ops in which what died may still be somebody's, as a trace of accesses counts
_SETTLING = 2  # iterations before the one that is laid out
BLOCK = 64  # candidate bases that are looked up together
MAX_WINDOWS = 30  # in which others are asked to make room
MAX_LOOKS = 500_000  # at parts of stays that may be in the way, some µs each


@dataclass(frozen=True)
class Layout:
    """Base frames, of 0 … ``frames`` − 1; a base is the frame that the tensor's page 0 has or would
    have. Tensors by their numbers (``trace.tensor_ids``), moves by their index in ``plan.moves``.

    ``start``: persistent tensors with pages that ``plan.start`` has on the device. While an
    iteration begins, pages of others may still be leaving frames that these will take.
    ``births``: other tensors, when they are born. ``ins``: moves in. What is in none of them has no
    base: no room was found, ``unplaced_pages`` in all, or (``ins``) its tensor dies before a page
    of the move begins. ``shifts``: (op, tensor, base), in this order: when what leaves before the
    op has left, and before anything comes, what is there of the tensor goes to another base.
    """

    frames: int
    start: dict[int, int]
    births: dict[int, int]
    ins: dict[int, int]
    unplaced_pages: int
    shifts: list[tuple[int, int, int]] = field(default_factory=list)


def layout_to_json(layout: Layout) -> dict[str, Any]:
    """An object that JSON can hold; the dicts are lists of pairs, as JSON has no other keys than
    strings."""
    return {
        "frames": layout.frames,
        "start": [list(pair) for pair in layout.start.items()],
        "births": [list(pair) for pair in layout.births.items()],
        "ins": [list(pair) for pair in layout.ins.items()],
        "unplaced_pages": layout.unplaced_pages,
        "shifts": layout.shifts,
    }


def layout_from_json(content: dict[str, Any]) -> Layout:
    """What :func:`layout_to_json` was given."""
    bases = {name: dict(content[name]) for name in ("start", "births", "ins")}
    shifts = [(op, tensor, base) for op, tensor, base in content["shifts"]]
    return Layout(
        content["frames"], **bases, unplaced_pages=content["unplaced_pages"], shifts=shifts
    )


def frames_of(trace: Trace, hardware: Hardware) -> int:
    """Whole pages of the device; of one without limit, as many as there are pages."""
    unlimited = math.isinf(hardware.device_pages)
    return int(trace.pages(hardware.page_size).sum() if unlimited else hardware.device_pages)


def place(trace: Trace, plan: Plan, frames: int) -> Layout:
    """Base frames of ``frames`` for ``plan``, for whoever decides moves in the order of the program
    (:func:`spells_in_order`)."""
    if not trace.ops:
        return Layout(frames, {}, {}, {}, 0)
    max_slots = min(MAX_SLOTS, max(MIN_SLOTS, MAX_CELLS // max(1, frames)))
    spells = spells_in_order(trace, plan, frames)
    stays = _find_stays(trace, plan, spells, max_slots)
    bases = _in_pieces(trace, plan, spells, stays, _pack(stays, frames), frames)
    return _named(trace, frames, spells, stays, bases)


# --- when each page holds a frame ----------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Spells:
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


def spells_in_order(trace: Trace, plan: Plan, frames: int) -> _Spells:
    """When pages hold frames for an executor that decides in the order of the program: before op k
    the moves of k are queued, and whatever leaves gives its frame back at that, whatever comes
    takes one then, if there are enough, or at one of the next ops, at the latest at the one that
    uses it. What died with op k − 1 gives its frames back before op k begins, or some ops later
    where nobody is short of them. The transfers follow, and wait for each other.
    """
    count = trace.pages(plan.page_size)
    base = np.cumsum(count) - count
    program = _Order(trace, plan, frames, base, count)
    for _ in range(_SETTLING + 1):
        program.run()
    page, at, change, move = program.events()
    times, tick = np.unique(at, return_inverse=True) if len(at) else (np.zeros(1), page)
    ticks = len(times)
    lasting = np.repeat(trace.tensor_persistent, count)
    order = np.lexsort((change, tick, page))
    spell_page, begin, end = _pair(page[order], tick[order], change[order], ticks)

    # Pages that never leave, or that come as often as they go only in a longer period.
    stays = lasting & ~_pages_off(plan, trace, base, len(lasting))
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
    return _Spells(ticks, times, spell_page[order], begin[order], end[order], ins)


class _Order:
    """One iteration after another, as :func:`spells_in_order` says."""

    def __init__(self, trace: Trace, plan: Plan, frames: int, base: Ints, count: Ints) -> None:
        self._ops = trace.ops
        self._held = np.repeat(trace.tensor_persistent, count)
        self._held[_pages_off(plan, trace, base, len(self._held))] = False
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


def _pages_off(plan: Plan, trace: Trace, base: Ints, pages: int) -> Bools:
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


# --- stays ---------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Stays:
    """What has one base: tensor ``tensor`` (index in the trace) from tick ``begin`` to ``end``.

    Rows are sorted by stay, rows ``rows[i]:rows[i + 1]`` are stay i's: its pages ``first`` to
    ``last`` hold frames in the slots ``since`` to ``until`` of ``slots``. All half-open.
    """

    tensor: Ints
    begin: Ints
    end: Ints
    pages: Ints  # of the tensor, held or not
    held: Ints  # pages that hold frames at all
    area: Floats  # pages × ops
    rows: Ints  # [stays + 1]
    first: Ints
    last: Ints
    since: Ints
    until: Ints
    slots: int
    step: int  # ticks of a slot
    ticks: int
    of_start: dict[int, int]  # tensor → stay that it is in when an iteration begins
    of_birth: dict[int, int]
    of_in: dict[int, int]  # index of a move in → stay


def _find_stays(trace: Trace, plan: Plan, spells: _Spells, max_slots: int) -> _Stays:
    count = trace.pages(plan.page_size)
    base = np.cumsum(count) - count
    owner = np.repeat(np.arange(trace.tensors), count)
    ticks, spell_tensor = spells.ticks, owner[spells.page]
    ins = np.array(
        [(trace.index_of[plan.moves[i].tensor], a, b) for i, (a, b) in spells.ins.items()], np.int64
    ).reshape(-1, 3)
    # A move in has one base, so it holds a stay together from its first page to its last.
    span_begin = ins[:, 1] % ticks
    of_all, begin, end, tensor = _join(
        np.concatenate([spell_tensor, ins[:, 0]]),
        np.concatenate([spells.begin, span_begin]),
        np.concatenate([spells.end, span_begin + ins[:, 2] - ins[:, 1] + 1]),
        ticks,
    )
    of_spell, of_in = of_all[: len(spells.page)], of_all[len(spells.page) :]

    held_for = _time_at(spells, spells.end) - _time_at(spells, spells.begin)
    area: Floats = np.bincount(of_spell, held_for, len(tensor)).astype(np.float64)
    pairs = np.unique(np.stack([of_spell, spells.page]), axis=1)
    first_spell = np.searchsorted(spells.page, base)
    made = np.flatnonzero(~trace.tensor_persistent)
    return _Stays(
        tensor=tensor,
        begin=begin,
        end=end,
        pages=count[tensor],
        held=np.bincount(pairs[0], minlength=len(tensor)),
        area=area,
        **_rows(of_spell, spells.page - base[spell_tensor], spells, len(tensor), max_slots),
        ticks=ticks,
        of_start=_at_start(trace, plan, spells, spell_tensor, of_spell, base),
        of_birth=dict(zip(made.tolist(), of_spell[first_spell[made]].tolist())),
        of_in=dict(zip(spells.ins, of_in.tolist())),
    )


def _time_at(spells: _Spells, tick: Ints) -> Floats:
    ticks = spells.ticks
    time: Floats = spells.times[tick % ticks] + tick // ticks * spells.times[-1]
    return time


def _join(tensor: Ints, begin: Ints, end: Ints, ticks: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Stays from what must be in one stay if it overlaps: the stay of each, and the stays' begin,
    end and tensor."""
    order = np.lexsort((begin, tensor))
    tensor, begin, end = tensor[order], begin[order], end[order]
    ahead = tensor * 4 * ticks  # so that tensors follow each other in one time
    reach = np.maximum.accumulate(ahead + end)
    new = np.ones(len(order), np.bool_)
    new[1:] = (ahead + begin)[1:] >= reach[:-1]
    heads = np.flatnonzero(new)
    stay = np.empty(len(order), np.int64)
    stay[order] = np.cumsum(new) - 1
    begin, tensor = begin[heads], tensor[heads]
    end = np.maximum.reduceat(end, heads) if len(heads) else end

    # The last stay of a tensor may go on into the first ones of the next iteration.
    into = np.arange(len(heads))
    final = np.diff(tensor, append=-1) != 0
    for last in np.flatnonzero(final & (end > ticks)).tolist():
        first = int(np.searchsorted(tensor, tensor[last]))
        while first < last and begin[first] + ticks < end[last]:
            end[last] = max(end[last], end[first] + ticks)
            into[first] = last
            first += 1
    kept, into = np.unique(into, return_inverse=True)
    return into[stay], begin[kept], end[kept], tensor[kept]


def _at_start(
    trace: Trace, plan: Plan, spells: _Spells, tensor: Ints, stay: Ints, base: Ints
) -> dict[int, int]:
    """Persistent tensor → the stay that holds a page there when an iteration begins, or the next
    one where all are still on their way in."""
    off = _pages_off(plan, trace, base, int(trace.pages(plan.page_size).sum()))
    there = np.flatnonzero(trace.tensor_persistent[tensor] & ~off[spells.page])
    holds = (spells.end > spells.ticks) | (spells.end - spells.begin >= spells.ticks)
    wait = np.where(holds, -1, spells.begin)[there]
    order = there[np.lexsort((wait, tensor[there]))]
    found: dict[int, int] = {}
    for index, which in zip(tensor[order].tolist(), stay[order].tolist()):
        found.setdefault(index, which)
    return found


def _rows(stay: Ints, page: Ints, spells: _Spells, stays: int, max_slots: int) -> dict[str, Any]:
    """The rows of :class:`_Stays`: spells, those that go on into the next iteration cut in two, in
    slots of one tick or, if there are too many, of several; like ones of adjacent pages together.
    """
    ticks = spells.ticks
    step = -(-ticks // max_slots)
    on = np.flatnonzero(spells.end > ticks)
    stay, page = (np.concatenate([column, column[on]]) for column in (stay, page))
    since = np.concatenate([spells.begin, np.zeros(len(on), np.int64)]) // step
    until = -(-np.concatenate([np.minimum(spells.end, ticks), spells.end[on] - ticks]) // step)
    order = np.lexsort((page, until, since, stay))
    stay, page, since, until = stay[order], page[order], since[order], until[order]
    new = np.ones(len(order), np.bool_)
    new[1:] = (np.diff(stay) != 0) | (np.diff(since) != 0) | (np.diff(until) != 0)
    new[1:] |= np.diff(page) > 1
    heads = np.flatnonzero(new)
    tails = np.append(heads[1:], len(order)) - 1 if len(heads) else heads
    return {
        "rows": np.searchsorted(stay[heads], np.arange(stays + 1)),
        "first": page[heads],
        "last": page[tails] + 1,
        "since": since[heads],
        "until": until[heads],
        "slots": -(-ticks // step),
        "step": step,
    }


# --- packing -------------------------------------------------------------------------------------


class _Arena:
    """Frames × slots. ``next[f, k]``: the first slot from k on in which frame f is taken; 0 if it
    is in k itself."""

    def __init__(self, stays: _Stays, frames: int) -> None:
        self.stays, self.frames = stays, frames
        self.next = np.full((frames, stays.slots), stays.slots, np.uint16)
        self.cells = 0  # looked at so far

    def put(self, stay: int, base: int) -> None:
        stays = self.stays
        rows = slice(stays.rows[stay], stays.rows[stay + 1])
        columns = (stays.first, stays.last, stays.since, stays.until)
        for first, last, since, until in zip(*(column[rows].tolist() for column in columns)):
            self._take(base + first, base + last, since, until)

    def _take(self, first: int, last: int, since: int, until: int) -> None:
        frames = self.next[first:last]
        frames[:, since:until] = 0
        np.minimum(frames[:, :since], since, out=frames[:, :since])
        self.cells += (last - first) * until

    def _free(self, first: int, last: int, since: int, until: int) -> None:
        """The opposite of :meth:`_take`."""
        frames, slots = self.next[first:last], self.stays.slots
        after = frames[:, until, None] if until < slots else np.full((last - first, 1), slots)
        after = np.where(after, after, until).astype(np.uint16)
        frames[:, since:until] = after
        before = frames[:, :since]
        np.copyto(before, after, where=before == since)
        self.cells += (last - first) * until

    def set_part(self, part: _Part, base: int, *, free: bool = False) -> None:
        """Take what ``part`` has at ``base``, or give it back."""
        change = self._free if free else self._take
        for first, last, since, until in self.rows_of(part):
            turn = since - since % self.stays.slots
            change(base + first, base + last, since - turn, until - turn)

    def rows_of(self, part: _Part) -> list[tuple[int, int, int, int]]:
        """Pages from, to, slots from, to; slots go on behind the last one of an iteration."""
        stays, step = self.stays, self.stays.step
        rows = slice(stays.rows[part.stay], stays.rows[part.stay + 1])
        turns = np.where(stays.since[rows] < stays.begin[part.stay] // step, stays.slots, 0)
        since = np.maximum(stays.since[rows] + turns, part.begin // step)
        until = np.minimum(stays.until[rows] + turns, -(-part.end // step))
        columns = np.stack([stays.first[rows], stays.last[rows], since, until], axis=1)
        return [(a, b, c, d) for a, b, c, d in columns[since < until].tolist()]

    def longest(self, part: _Part, ends: Sequence[int]) -> tuple[int, int]:
        """Where most of ``part`` has room, up to one of these ticks: the base, and the number of
        that tick; −1 where not even the first one is reached."""
        bases, never = self.frames - int(self.stays.pages[part.stay]) + 1, 1 << 40
        if bases <= 0:
            return -1, -1
        reach = np.full(bases, never)
        for first, last, since, until in self.rows_of(part):
            at = since % self.stays.slots
            taken = self.next[:, at].astype(np.int64)
            taken = np.where(taken, taken, at) + (since - at)
            taken[taken >= until] = never
            windows = np.lib.stride_tricks.sliding_window_view(taken, last - first)
            reach = np.minimum(reach, windows.min(axis=1)[first : first + bases])
            self.cells += self.frames
        base = int(reach.argmax())
        return base, bisect_right(ends, int(reach[base]) * self.stays.step) - 1

    def find(self, stay: int, wanted: int, tight: bool) -> int:
        """A base at which ``stay`` fits: ``wanted`` if it does there, else the lowest, or if
        ``tight`` one where the least time is left until its frames are next taken; −1: none."""
        stays = self.stays
        bases = self.frames - int(stays.pages[stay]) + 1
        if bases <= 0:
            return -1
        rows = np.arange(stays.rows[stay], stays.rows[stay + 1])
        weight = (stays.until[rows] - stays.since[rows]) * (stays.last[rows] - stays.first[rows])
        rows = rows[np.argsort(-weight, kind="stable")]
        if wanted >= 0 and self._fits(rows, np.array([wanted]))[0]:
            return wanted
        fits = np.ones(bases, np.bool_)
        left = np.zeros(bases, np.int64)
        for row in rows[:HEAD_ROWS].tolist():
            first, pages = int(stays.first[row]), int(stays.last[row] - stays.first[row])
            spare = self.next[:, stays.since[row]] - stays.until[row]
            fits &= _all_of(spare >= 0, pages)[first : first + bases]
            if tight:
                total = np.concatenate([[0], np.cumsum(spare)])
                left += (total[pages:] - total[:-pages])[first : first + bases]
            self.cells += self.frames
        candidates = np.flatnonzero(fits)
        if tight:
            candidates = candidates[np.argsort(left[candidates], kind="stable")]
        rest = rows[HEAD_ROWS:]
        for begin in range(0, len(candidates), BLOCK):
            block = candidates[begin : begin + BLOCK]
            good = self._fits(rest, block)
            if good.any():
                return int(block[good.argmax()])
        return -1

    def _fits(self, rows: Ints, bases: Ints) -> Bools:
        """Whether pages of ``rows`` are free at each of ``bases``."""
        stays = self.stays
        row, page = expand(stays.first[rows], stays.last[rows] - stays.first[rows])
        since, until = stays.since[rows][row], stays.until[rows][row]
        self.cells += len(row) * len(bases)
        good: Bools = (self.next[bases[:, None] + page, since] >= until).all(axis=1)
        return good


def _all_of(free: Bools, run: int) -> Bools:
    """Whether ``run`` in a row are free from each on, [len(free) − run + 1]."""
    total = np.concatenate([[0], np.cumsum(free)])
    every: Bools = total[run:] - total[: len(total) - run] == run
    return every


def _pack(stays: _Stays, frames: int) -> Ints:
    """A base for each stay, −1 where none was found: the best of several orders.

    After the plain ones comes the best one again, with what found no room before in front.
    """
    span = np.minimum(stays.end - stays.begin, stays.ticks)
    crosses = (stays.end > stays.ticks) | (span == stays.ticks)
    orders = [
        np.lexsort((-stays.area, ~crosses)),
        np.lexsort((-stays.area, -stays.pages)),
        np.argsort(-stays.area * stays.pages, kind="stable"),
        np.argsort(-stays.area, kind="stable"),
    ]
    best, least = np.full(len(span), -1), int(stays.held.sum()) + 1
    failures, rank = np.zeros((2, len(span)), np.int64)
    work = 0
    for tried in range(MAX_ORDERS):
        plain = tried < len(orders)
        order = orders[tried] if plain else np.lexsort((rank, -failures))
        bases, cells = _first_fit(stays, frames, order, tight=tried > 0)
        missing = int(stays.held[bases < 0].sum())
        if missing < least:
            best, least = bases, missing
            rank[order] = np.arange(len(order))
            failures[:] = 0
        if not least:
            break
        failures += bases < 0
        work += cells
        if work + cells > MAX_WORK:
            break
    return best


def _first_fit(stays: _Stays, frames: int, order: Ints, *, tight: bool) -> tuple[Ints, int]:
    """Bases of stays put one after another, and the cells looked at for them. Not ``tight``: as
    low as possible, but with the base that the tensor has in an earlier one where that is free."""
    arena = _Arena(stays, frames)
    bases = np.full(len(order), -1)
    used: dict[int, int] = {}  # tensor → its latest base
    for stay, tensor in zip(order.tolist(), stays.tensor[order].tolist()):
        base = arena.find(stay, -1 if tight else used.get(tensor, -1), tight)
        if base >= 0:
            arena.put(stay, base)
            bases[stay] = used[tensor] = base
    return bases, arena.cells


# --- stays that have no place as long as they last -----------------------------------------------


class _Part(NamedTuple):
    """Of a stay, from tick ``begin`` to ``end``; those of the next iteration follow the last."""

    stay: int
    begin: int
    end: int


class _Pieces:
    """``bases``: where each part is; −1: nowhere."""

    def __init__(self, arena: _Arena, cuts: _Cuts, bases: dict[_Part, int]) -> None:
        self.bases, self._arena, self._cuts = bases, arena, cuts
        self._log: list[tuple[_Part, int, bool]] = []
        self._rows: dict[_Part, list[tuple[int, int, int, int]]] = {}
        self._looks = 0

    def _put(self, part: _Part, base: int) -> None:
        self.bases[part] = base
        if base >= 0:
            self._arena.set_part(part, base)
        self._log.append((part, base, True))

    def _remove(self, part: _Part) -> None:
        base = self.bases.pop(part)
        if base >= 0:
            self._arena.set_part(part, base, free=True)
        self._log.append((part, base, False))

    def _undo(self, to: int) -> None:
        while len(self._log) > to:
            part, base, put = self._log.pop()
            if put:
                del self.bases[part]
            else:
                self.bases[part] = base
            if base >= 0:
                self._arena.set_part(part, base, free=put)

    def place(self, whole: _Part, *, others: bool = True) -> bool:
        """Put ``whole`` in as few parts as have room, where ``others`` move if they must; whether
        all of it has a place. Otherwise what has none is in ``bases`` too, with −1."""
        ends = [*self._cuts.between(whole), whole.end]
        begin, complete = whole.begin, True
        while ends:
            rest = _Part(whole.stay, begin, whole.end)
            base, number = self._arena.longest(rest, ends)
            if number < 0 and others and self._make_room(_Part(whole.stay, begin, ends[0])):
                base, number = self._arena.longest(rest, ends)
            if number < 0:
                base, number, complete = -1, 0, False
                if not others:
                    return False
            self._put(_Part(whole.stay, begin, ends[number]), base)
            begin, ends = ends[number], ends[number + 1 :]
        return complete

    def _make_room(self, part: _Part) -> bool:
        """Others go elsewhere, so that ``part`` has room."""
        arena, pages = self._arena, int(self._arena.stays.pages[part.stay])
        mine, slots = arena.rows_of(part), arena.stays.slots
        self._looks += len(self.bases)
        if self._looks > MAX_LOOKS:
            return False
        cost = np.zeros(arena.frames)
        inside: list[tuple[int, int, _Part]] = []
        for other, base in self.bases.items():
            if base < 0:
                continue
            if other not in self._rows:
                self._rows[other] = arena.rows_of(other)
            for first, last, since, until in self._rows[other]:
                if any(_meet(since, until, a, b, slots) for _, _, a, b in mine):
                    inside.append((base + first, base + last, other))
        for first, last, other in inside:
            cost[first:last] = np.maximum(cost[first:last], arena.stays.pages[other.stay])
        total = np.concatenate([[0.0], np.cumsum(cost)])
        windows = total[pages:] - total[:-pages]
        for base in np.argsort(windows, kind="stable")[:MAX_WINDOWS].tolist():
            there = {o for first, last, o in inside if first < base + pages and last > base}
            mark = len(self._log)
            if self._swap(part, there):
                return True
            self._undo(mark)
        return False

    def _swap(self, part: _Part, others: Collection[_Part]) -> bool:
        """``others`` make way for ``part``, from when they can on."""
        rests = []
        for other in sorted(others):
            turn = self._arena.stays.ticks
            at = part.begin + (other.end - 1 - part.begin) // turn * turn  # the last one before
            cuts = (t for t in self._cuts.between(other) if t <= at)
            cut = max(cuts, default=other.begin)
            was = self.bases[other]
            self._remove(other)
            if cut > other.begin:
                self._put(_Part(other.stay, other.begin, cut), was)
            rests.append(_Part(other.stay, cut, other.end))
        kept, number = self._arena.longest(part, [part.end])
        if number < 0:
            return False
        self._arena.set_part(part, kept)  # while the others find theirs
        try:
            return all(self.place(rest, others=False) for rest in rests)
        finally:
            self._arena.set_part(part, kept, free=True)


def _meet(since: int, until: int, begin: int, end: int, slots: int) -> bool:
    """Whether two spans of slots have one in common, as iterations follow each other."""
    return any(since + turn < end and begin < until + turn for turn in (-slots, 0, slots))


class _Cuts:
    """Where stays may be cut in two: before an op, not while what that one uses is coming."""

    def __init__(self, trace: Trace, plan: Plan, spells: _Spells, stays: _Stays) -> None:
        times, self._tensors = spells.times[:-1], stays.tensor
        self._ticks = np.flatnonzero(times == np.floor(times))
        self._ops = times[self._ticks].astype(np.int64)
        self._count, self._all = trace.ops, spells.ticks
        self._uses: dict[int, list[int]] = {}
        for op, tensor in zip(trace.access_op.tolist(), trace.access_tensor.tolist()):
            self._uses.setdefault(tensor, []).append(op)
        self._ins: dict[int, list[int]] = {}
        for move in plan.moves:
            if move.action == "in":
                self._ins.setdefault(trace.index_of[move.tensor], []).append(move.issue_op)

    def between(self, part: _Part) -> list[int]:
        """Ticks at which ``part`` may be cut in two."""
        tensor, begin, end = int(self._tensors[part.stay]), part.begin, part.end
        good = np.ones(len(self._ops), np.bool_)
        uses = np.array(self._uses.get(tensor, [0]))
        for issued in self._ins.get(tensor, ()):
            later = np.searchsorted(uses, issued)
            used = int(uses[later]) if later < len(uses) else int(uses[0]) + self._count
            good &= (self._ops < issued) | (self._ops > used)
            good &= self._ops + self._count > used
        ticks = self._ticks[good]
        ticks = np.concatenate([ticks, ticks + self._all])
        found: list[int] = ticks[(ticks > begin) & (ticks < end)].tolist()
        return found


def _in_pieces(
    trace: Trace, plan: Plan, spells: _Spells, stays: _Stays, bases: Ints, frames: int
) -> dict[_Part, int]:
    """A base for each part: stays have one where they have one in ``bases``; the others, and those
    that make room for them, as few as possible; −1: none."""
    ends = zip(stays.begin.tolist(), stays.end.tolist())
    parts = [_Part(stay, begin, end) for stay, (begin, end) in enumerate(ends)]
    found = {part: base for part, base in zip(parts, bases.tolist()) if base >= 0}
    if len(found) == len(parts):
        return found
    arena = _Arena(stays, frames)
    for part, base in found.items():
        arena.put(part.stay, base)
    pieces = _Pieces(arena, _Cuts(trace, plan, spells, stays), found)
    left = np.flatnonzero(bases < 0)
    for stay in left[np.argsort(-stays.area[left], kind="stable")].tolist():
        pieces.place(parts[stay])
    return pieces.bases


def _named(
    trace: Trace, frames: int, spells: _Spells, stays: _Stays, bases: dict[_Part, int]
) -> Layout:
    """By the numbers of tensors and moves that plans use."""
    number = trace.tensor_ids.tolist()
    parts: dict[int, list[_Part]] = {}
    for part in sorted(bases):
        parts.setdefault(part.stay, []).append(part)

    def base_at(stay: int, tick: int) -> int:
        """Of the part that there is at ``tick`` of an iteration, or is the first one."""
        its, tick = parts[stay], tick + stays.ticks * int(tick < stays.begin[stay])
        return bases[next((part for part in its if part.begin <= tick < part.end), its[0])]

    def placed(found: Iterable[tuple[int, int]]) -> dict[int, int]:
        return {key: base for key, base in found if base >= 0}

    for its in parts.values():
        if its[-1].end - its[0].begin >= stays.ticks:
            its.append(its[0])  # it goes on in the next iteration
    shifts = {
        (int(spells.times[part.begin % stays.ticks]), number[stays.tensor[part.stay]], bases[part])
        for its in parts.values()
        for before, part in itertools.pairwise(its)
        if bases[part] not in (-1, bases[before])
    }
    missing = {part.stay for part, base in bases.items() if base < 0}
    births = [(number[tensor], bases[parts[stay][0]]) for tensor, stay in stays.of_birth.items()]
    start = [(number[tensor], base_at(stay, 0)) for tensor, stay in stays.of_start.items()]
    ins = [(move, base_at(stay, spells.ins[move][0])) for move, stay in stays.of_in.items()]
    return Layout(
        frames,
        placed(start),
        placed(births),
        placed(ins),
        int(stays.held[[*missing]].sum()),
        sorted(shifts),
    )
