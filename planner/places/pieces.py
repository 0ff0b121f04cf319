"""Stays that have no place as long as they last, in pieces that have: they are shifted in between,
and others make room for them."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from ..plan import Plan
from ..trace import Ints, Trace
from .spells import Spells
from .stays import Arena, Part, Stays

MAX_WINDOWS = 30  # in which others are asked to make room
MAX_LOOKS = 500_000  # at parts of stays that may be in the way, some µs each
_SWAP_LOOKS = 100  # that moving one of them takes as long as


class _Pieces:
    """``bases``: where each part is; −1: nowhere."""

    def __init__(self, arena: Arena, cuts: _Cuts, bases: dict[Part, int]) -> None:
        self.bases, self._arena, self._cuts = bases, arena, cuts
        self._log: list[tuple[Part, int, bool]] = []
        self._rows: dict[Part, list[tuple[int, int, int, int]]] = {}
        self._looks = 0

    def _put(self, part: Part, base: int) -> None:
        self.bases[part] = base
        if base >= 0:
            self._arena.set_part(part, base)
        self._log.append((part, base, True))

    def _remove(self, part: Part) -> None:
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

    def place(self, whole: Part, *, others: bool = True) -> bool:
        """Put ``whole`` in as few parts as have room, where ``others`` move if they must; whether
        all of it has a place. Otherwise what has none is in ``bases`` too, with −1."""
        ends = [*self._cuts.between(whole), whole.end]
        begin, complete = whole.begin, True
        while ends:
            rest = Part(whole.stay, begin, whole.end)
            base, number = self._arena.longest(rest, ends)
            if number < 0 and others and self._make_room(Part(whole.stay, begin, ends[0])):
                base, number = self._arena.longest(rest, ends)
            if number < 0:
                base, number, complete = -1, 0, False
                if not others:
                    return False
            self._put(Part(whole.stay, begin, ends[number]), base)
            begin, ends = ends[number], ends[number + 1 :]
        return complete

    def _make_room(self, part: Part) -> bool:
        """Others go elsewhere, so that ``part`` has room."""
        arena, pages = self._arena, int(self._arena.stays.pages[part.stay])
        mine, slots = arena.rows_of(part), arena.stays.slots
        self._looks += len(self.bases)
        if self._looks > MAX_LOOKS:
            return False
        cost = np.zeros(arena.frames)
        inside: list[tuple[int, int, Part]] = []
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

    def _swap(self, part: Part, others: Collection[Part]) -> bool:
        """``others`` make way for ``part``, from when they can on."""
        rests = []
        for other in sorted(others):
            self._looks += _SWAP_LOOKS
            turn = self._arena.stays.ticks
            at = part.begin + (other.end - 1 - part.begin) // turn * turn  # the last one before
            cuts = (t for t in self._cuts.between(other) if t <= at)
            cut = max(cuts, default=other.begin)
            was = self.bases[other]
            self._remove(other)
            if cut > other.begin:
                self._put(Part(other.stay, other.begin, cut), was)
            rests.append(Part(other.stay, cut, other.end))
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

    def __init__(self, trace: Trace, plan: Plan, spells: Spells, stays: Stays) -> None:
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

    def between(self, part: Part) -> list[int]:
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


def in_pieces(
    trace: Trace, plan: Plan, spells: Spells, stays: Stays, bases: Ints, frames: int
) -> dict[Part, int]:
    """A base for each part: stays have one where they have one in ``bases``; the others, and those
    that make room for them, as few as possible; −1: none."""
    ends = zip(stays.begin.tolist(), stays.end.tolist())
    parts = [Part(stay, begin, end) for stay, (begin, end) in enumerate(ends)]
    found = {part: base for part, base in zip(parts, bases.tolist()) if base >= 0}
    if len(found) == len(parts):
        return found
    arena = Arena(stays, frames)
    for part, base in found.items():
        arena.put(part.stay, base)
    pieces = _Pieces(arena, _Cuts(trace, plan, spells, stays), found)
    left = np.flatnonzero(bases < 0)
    for stay in left[np.argsort(-stays.area[left], kind="stable")].tolist():
        pieces.place(parts[stay])
    return pieces.bases
