"""Stays of tensors on the device, packed in frames × circular time, each with one base."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..plan import Plan
from ..trace import Bools, Floats, Ints, Trace
from .spells import Spells, expand, pages_off

MAX_ORDERS = 7
MAX_WORK = 8e8  # cells looked at, some 10 ns each: no order is begun that would go beyond
FEW_CELLS = 3e5  # frames × stays
SHUFFLES, SHUFFLED = 16, 0.3  # orders, by sizes times e to the power of so much
HEAD_ROWS = 2  # of a stay that are looked up in all frames at once
BLOCK = 64  # candidate bases that are looked up together


@dataclass(frozen=True, eq=False)
class Stays:
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


def find_stays(trace: Trace, plan: Plan, spells: Spells, max_slots: int) -> Stays:
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
    return Stays(
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


def _time_at(spells: Spells, tick: Ints) -> Floats:
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
    trace: Trace, plan: Plan, spells: Spells, tensor: Ints, stay: Ints, base: Ints
) -> dict[int, int]:
    """Persistent tensor → the stay that holds a page there when an iteration begins, or the next
    one where all are still on their way in."""
    off = pages_off(plan, trace, base, int(trace.pages(plan.page_size).sum()))
    there = np.flatnonzero(trace.tensor_persistent[tensor] & ~off[spells.page])
    holds = (spells.end > spells.ticks) | (spells.end - spells.begin >= spells.ticks)
    wait = np.where(holds, -1, spells.begin)[there]
    order = there[np.lexsort((wait, tensor[there]))]
    found: dict[int, int] = {}
    for index, which in zip(tensor[order].tolist(), stay[order].tolist()):
        found.setdefault(index, which)
    return found


def _rows(stay: Ints, page: Ints, spells: Spells, stays: int, max_slots: int) -> dict[str, Any]:
    """The rows of :class:`Stays`: spells, those that go on into the next iteration cut in two, in
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


class Part(NamedTuple):
    """Of a stay, from tick ``begin`` to ``end``; those of the next iteration follow the last."""

    stay: int
    begin: int
    end: int


class Arena:
    """Frames × slots. ``next[f, k]``: the first slot from k on in which frame f is taken; 0 if it
    is in k itself."""

    def __init__(self, stays: Stays, frames: int) -> None:
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

    def set_part(self, part: Part, base: int, *, free: bool = False) -> None:
        """Take what ``part`` has at ``base``, or give it back."""
        change = self._free if free else self._take
        for first, last, since, until in self.rows_of(part):
            turn = since - since % self.stays.slots
            change(base + first, base + last, since - turn, until - turn)

    def rows_of(self, part: Part) -> list[tuple[int, int, int, int]]:
        """Pages from, to, slots from, to; slots go on behind the last one of an iteration."""
        stays, step = self.stays, self.stays.step
        rows = slice(stays.rows[part.stay], stays.rows[part.stay + 1])
        turns = np.where(stays.since[rows] < stays.begin[part.stay] // step, stays.slots, 0)
        since = np.maximum(stays.since[rows] + turns, part.begin // step)
        until = np.minimum(stays.until[rows] + turns, -(-part.end // step))
        columns = np.stack([stays.first[rows], stays.last[rows], since, until], axis=1)
        return [(a, b, c, d) for a, b, c, d in columns[since < until].tolist()]

    def longest(self, part: Part, ends: Sequence[int]) -> tuple[int, int]:
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


def packings(stays: Stays, frames: int) -> Iterator[Ints]:
    """A base for each stay, −1 where none was found; where these are few, in several ways, as the
    one that leaves the fewest pages over is seldom the one that needs the fewest shifts then."""
    best = _pack(stays, frames)
    yield best
    if (best >= 0).all() or frames * len(best) > FEW_CELLS:
        return
    random, size = np.random.default_rng(0), np.log(np.maximum(1, stays.area * stays.pages))
    for _ in range(SHUFFLES):
        order = np.argsort(-size - SHUFFLED * random.standard_normal(len(size)), kind="stable")
        bases, _ = _first_fit(stays, frames, order, tight=True)
        yield bases
        if (bases >= 0).all():
            return


def _pack(stays: Stays, frames: int) -> Ints:
    """The one of several orders that leaves the fewest pages over.

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


def _first_fit(stays: Stays, frames: int, order: Ints, *, tight: bool) -> tuple[Ints, int]:
    """Bases of stays put one after another, and the cells looked at for them. Not ``tight``: as
    low as possible, but with the base that the tensor has in an earlier one where that is free."""
    arena = Arena(stays, frames)
    bases = np.full(len(order), -1)
    used: dict[int, int] = {}  # tensor → its latest base
    for stay, tensor in zip(order.tolist(), stays.tensor[order].tolist()):
        base = arena.find(stay, -1 if tight else used.get(tensor, -1), tight)
        if base >= 0:
            arena.put(stay, base)
            bases[stay] = used[tensor] = base
    return bases, arena.cells
