"""The validator's ledger: where every page is, and how many frames and slots are taken.

A page of the trace is ``base[tensor] + page``. It is in one of five places:

    ABSENT    not alive: a tensor that an iteration makes and that is not there now
    HERE      in a frame, ops may use it
    AWAY      lost to ops: a valid copy is below, or its ``out`` is queued or moving
    ARRIVING  its ``in`` is moving: it has a frame, and a valid copy below
    DISCARDED its bytes are given up, until an op that runs again makes them anew

HERE and ARRIVING take a frame, and so does an ``out`` until it has arrived (``leaving_to``). In
each lower tier a page has no copy, one that is being written, or a valid one; the latter two take
a slot. A page that comes back from one tier while it still goes out to the other has two frames
for that time. If it is then written, the copy on its way is void, and gives its slot back on
arrival.

Each transition is one function that asserts what must hold, and ``audit`` counts everything anew.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from ..trace import Trace

ABSENT, HERE, AWAY, ARRIVING, DISCARDED = range(5)
NO_COPY, WRITING, VALID = range(3)
HOST, DISK = 0, 1
TIER_NUMBER = {"host": HOST, "disk": DISK}
TIER_NAME = ("host", "disk")
NOWHERE = 2  # instead of a tier, in ``leaving_to`` and ``coming_from``: there is no such move


class Infeasible(Exception):  # noqa: N818 (a finding, not a fault of the program)
    """The plan breaks a rule of the machine model; the message says which and where."""


@dataclass
class _Drop:
    tier: int
    awaits: set[str]  # "out", "in": the page's earlier moves that have not arrived


class Ledger:
    """Places and copies of all pages of ``trace``; counts in pages, caps in whole pages."""

    def __init__(self, trace: Trace, page_size: int, caps: tuple[float, float, float]) -> None:
        self.page_size = page_size
        sizes = trace.countable_pages(page_size)
        self.base = [0, *np.cumsum(sizes).tolist()]  # [tensors + 1]
        self.total = self.base[-1]
        self.trace = trace
        self.place = bytearray(self.total)
        self.copy = (bytearray(self.total), bytearray(self.total))
        self.leaving_to = bytearray([NOWHERE]) * self.total
        self.coming_from = bytearray([NOWHERE]) * self.total
        self.users: Counter[int] = Counter()  # page → host steps in the queue that access it
        self.steppers: Counter[int] = Counter()  # page → those of them that write it
        self.void: set[int] = set()  # pages written while a copy of them was on its way out
        self.drops: dict[int, list[_Drop]] = {}  # page → drops that wait for its earlier moves
        self.frame_cap = caps[0]
        self.slot_cap = caps[1:]
        self.frames = 0
        self.slots = [0, 0]
        self.peak_frames = 0
        self.peak_slots = [0, 0]
        self.changes = 0  # since the last audit

    def name(self, page: int) -> str:
        """``page`` as people know it."""
        tensor = int(np.searchsorted(self.base, page, side="right")) - 1
        return f"page {page - self.base[tensor]} of {self.trace.name_of(tensor)}"

    # Frames and slots: the only functions that change the counts.

    def free_frames(self) -> float:
        return self.frame_cap - self.frames

    def free_slots(self, tier: int) -> float:
        return self.slot_cap[tier] - self.slots[tier]

    def _take_frames(self, count: int) -> None:
        self.frames += count
        self.changes += count
        assert self.frames <= self.frame_cap, "device cap exceeded"
        self.peak_frames = max(self.peak_frames, self.frames)

    def _give_frames(self, count: int) -> None:
        self.frames -= count
        self.changes += count
        assert self.frames >= 0, "more frames given back than taken"

    def _set_copy(self, page: int, tier: int, state: int) -> None:
        before = self.copy[tier][page]
        self.copy[tier][page] = state
        self.slots[tier] += (state != NO_COPY) - (before != NO_COPY)
        self.changes += 1
        assert 0 <= self.slots[tier] <= self.slot_cap[tier], f"{TIER_NAME[tier]} cap exceeded"
        self.peak_slots[tier] = max(self.peak_slots[tier], self.slots[tier])

    # The first iteration's begin.

    def place_below(self, page: int, tier: int) -> None:
        """Raises ``Infeasible`` if the tier is full."""
        if self.free_slots(tier) < 1:
            raise Infeasible(
                f"start: {self.name(page)} does not fit, all {self.slot_cap[tier]} pages of "
                f"{TIER_NAME[tier]} are taken"
            )
        self.place[page] = AWAY
        self._set_copy(page, tier, VALID)

    def place_here(self, page: int) -> None:
        """Raises ``Infeasible`` if the device is full."""
        if self.free_frames() < 1:
            raise Infeasible(
                f"start: {self.name(page)} does not fit on the device, all {self.frame_cap} "
                "frames are taken by persistent pages that do not start below"
            )
        self.place[page] = HERE
        self._take_frames(1)

    # What ops do.

    def give_birth(self, begin: int, end: int) -> None:
        """All pages [begin, end) of a new tensor take frames together."""
        assert self.place.count(ABSENT, begin, end) == end - begin
        self.place[begin:end] = bytes([HERE]) * (end - begin)
        self._take_frames(end - begin)

    def write(self, begin: int, end: int) -> None:
        """An op writes pages [begin, end): the copies below are invalid, their slots free."""
        assert self.place.count(HERE, begin, end) == end - begin
        for tier in (HOST, DISK):
            if self.copy[tier].count(NO_COPY, begin, end) < end - begin:
                for page in range(begin, end):
                    if self.copy[tier][page] == VALID:
                        self._set_copy(page, tier, NO_COPY)
        if self.leaving_to.count(NOWHERE, begin, end) < end - begin:
            self.void.update(p for p in range(begin, end) if self.leaving_to[p] != NOWHERE)

    def bury(self, begin: int, end: int) -> None:
        """A tensor's pages [begin, end) give everything back, in every tier.

        The queues must have forgotten them before.
        """
        count = end - begin
        used = self.place.count(HERE, begin, end) + self.place.count(ARRIVING, begin, end)
        self._give_frames(used + count - self.leaving_to.count(NOWHERE, begin, end))
        self.place[begin:end] = bytes(count)
        for tier in (HOST, DISK):
            self.slots[tier] -= count - self.copy[tier].count(NO_COPY, begin, end)
            assert self.slots[tier] >= 0
            self.copy[tier][begin:end] = bytes(count)
        self.leaving_to[begin:end] = bytearray([NOWHERE]) * count
        self.coming_from[begin:end] = bytearray([NOWHERE]) * count
        self.void = {page for page in self.void if not begin <= page < end}
        self.drops = {page: d for page, d in self.drops.items() if not begin <= page < end}

    def spare_frames(self, change: int) -> None:
        """Temporary pages of a recomputation take frames, or give them back."""
        if change > 0:
            self._take_frames(change)
        else:
            self._give_frames(-change)

    def make_again(self, page: int) -> None:
        """A discarded page is its tensor's own again, with no copy below."""
        assert self.place[page] == DISCARDED
        self.place[page] = HERE
        self._take_frames(1)

    def discard(self, page: int) -> None:
        if self.place[page] == ABSENT:
            raise Infeasible(f"{self.name(page)} is not alive")
        if self.leaving_to[page] != NOWHERE or self.coming_from[page] != NOWHERE:
            raise Infeasible(f"{self.name(page)} {self.whereabouts(page)}")
        if self.users[page]:
            raise Infeasible(f"{self.name(page)} is used by a host step that has not ended")
        if self.place[page] == DISCARDED:
            raise Infeasible(f"{self.name(page)} is discarded already")
        if self.place[page] == HERE:
            self._give_frames(1)
        for tier in (HOST, DISK):
            assert self.copy[tier][page] != WRITING
            self._set_copy(page, tier, NO_COPY)
        self.place[page] = DISCARDED

    # What host steps do.

    def host_step_joins(self, used: list[int], written: set[int]) -> None:
        for page in used:
            arrives = self.leaving_to[page] == HOST and page not in self.void
            if self.copy[HOST][page] != VALID and not arrives and not self.steppers[page]:
                raise Infeasible(
                    f"{self.name(page)} {self.whereabouts(page)}, and has no copy in host and no "
                    "'out' to host on its way"
                )
            if page not in written:
                continue
            if self.place[page] in (HERE, ARRIVING) or self.coming_from[page] != NOWHERE:
                raise Infeasible(
                    f"{self.name(page)} {self.whereabouts(page)}, and is to be written"
                )
            if self.leaving_to[page] == DISK:
                raise Infeasible(f"{self.name(page)} is on its way to disk: to be written")
        self.users.update(used)
        self.steppers.update(written)

    def host_step_starts(self, written: set[int]) -> None:
        for page in written:
            if self.copy[DISK][page] == VALID:
                self._set_copy(page, DISK, NO_COPY)

    def host_step_ends(self, used: list[int], written: set[int]) -> None:
        self.users.subtract(used)
        self.steppers.subtract(written)

    # What moves do when they are queued.

    def queue_out(self, page: int, tier: int) -> bool:
        """Whether the page must be transferred. If not, its frame is free and it is away."""
        if self.place[page] != HERE:
            raise Infeasible(f"{self.name(page)} {self.whereabouts(page)}, not on the device")
        if self.leaving_to[page] != NOWHERE:
            to = TIER_NAME[self.leaving_to[page]]
            raise Infeasible(f"{self.name(page)} has an earlier 'out' to {to} on its way")
        self.place[page] = AWAY
        if self.copy[tier][page] == VALID:
            self._give_frames(1)
            return False
        self.leaving_to[page] = tier
        self.changes += 1
        return True

    def queue_in(self, page: int, tier: int) -> None:
        if self.coming_from[page] != NOWHERE:
            raise Infeasible(f"{self.name(page)} has an 'in' queued already")
        if self.place[page] != AWAY:
            raise Infeasible(f"{self.name(page)} {self.whereabouts(page)}, not off the device")
        if self.copy[tier][page] != VALID and self.leaving_to[page] != tier:
            raise Infeasible(f"{self.name(page)} has no valid copy in {TIER_NAME[tier]}")
        if tier == DISK and self.steppers[page]:
            raise Infeasible(f"{self.name(page)} is written by a host step that has not ended")
        self.coming_from[page] = tier

    def queue_drop(self, page: int, tier: int) -> None:
        """Gives the slot back once the page's earlier moves have arrived; now if it has none."""
        under_way = (("out", self.leaving_to), ("in", self.coming_from))
        awaits = {action for action, moves in under_way if moves[page] != NOWHERE}
        if self.users[page] and "in" not in awaits:
            raise Infeasible(f"{self.name(page)} is used by a host step that has not ended")
        if awaits:
            self.drops.setdefault(page, []).append(_Drop(tier, awaits))
        else:
            self._drop(page, tier)

    def _drop(self, page: int, tier: int) -> None:
        if self.copy[tier][page] == NO_COPY:
            return
        assert self.copy[tier][page] == VALID
        if self.place[page] != HERE and self.copy[1 - tier][page] != VALID:
            raise Infeasible(f"drop: {self.name(page)} has no other copy than {TIER_NAME[tier]}'s")
        if tier == HOST and self.users[page]:
            raise Infeasible(f"drop: {self.name(page)} is used by a host step that has not ended")
        self._set_copy(page, tier, NO_COPY)

    def _arrived(self, page: int, action: str) -> None:
        """Carries out the drops that this was the last arrival for."""
        if page not in self.drops:
            return
        waiting = self.drops.pop(page)
        for drop in waiting:
            drop.awaits.discard(action)
        left = [drop for drop in waiting if drop.awaits]
        if left:
            self.drops[page] = left
        for drop in waiting:
            if not drop.awaits:
                self._drop(page, drop.tier)

    # What transfers do.

    def begin_out(self, page: int, tier: int) -> None:
        assert self.leaving_to[page] == tier
        assert self.copy[tier][page] == NO_COPY
        self._set_copy(page, tier, WRITING)

    def end_out(self, page: int, tier: int) -> None:
        assert self.leaving_to[page] == tier
        assert self.copy[tier][page] == WRITING
        self._set_copy(page, tier, NO_COPY if page in self.void else VALID)
        self.void.discard(page)
        self.leaving_to[page] = NOWHERE
        self._give_frames(1)
        if self.drops:
            self._arrived(page, "out")

    def may_begin_in(self, page: int, tier: int) -> bool:
        """Whether the copy that the page comes from is complete, and no host step writes it."""
        return self.copy[tier][page] == VALID and not self.steppers[page]

    def begin_in(self, page: int, tier: int) -> None:
        assert self.place[page] == AWAY
        assert self.coming_from[page] == tier
        assert self.may_begin_in(page, tier)
        self.place[page] = ARRIVING
        self._take_frames(1)

    def end_in(self, page: int) -> None:
        assert self.place[page] == ARRIVING
        self.place[page] = HERE
        self.coming_from[page] = NOWHERE
        self.changes += 1
        if self.drops:
            self._arrived(page, "in")

    # What can be asked.

    def has_moves(self, begin: int, end: int) -> bool:
        """Whether any of the pages [begin, end) is on its way, or queued to be."""
        return any(
            moves.count(NOWHERE, begin, end) < end - begin
            for moves in (self.leaving_to, self.coming_from)
        )

    def whereabouts(self, page: int) -> str:
        """Where the page is, as the rest of a sentence that begins with its name."""
        if self.coming_from[page] != NOWHERE:
            return f"is on its way in from {TIER_NAME[self.coming_from[page]]}"
        place = self.place[page]
        if place == AWAY and self.leaving_to[page] != NOWHERE:
            return f"is on its way out to {TIER_NAME[self.leaving_to[page]]}"
        if place == AWAY:
            tiers = [TIER_NAME[t] for t in (HOST, DISK) if self.copy[t][page] == VALID]
            return f"is in {' and '.join(tiers)}"
        if place == DISCARDED:
            return "is discarded, and was not made again"
        return "is on the device" if place == HERE else "is not alive"

    def settles_here(self, page: int) -> bool:
        """Whether a live page is on the device once all its queued moves have arrived."""
        assert self.place[page] != ABSENT
        return self.coming_from[page] != NOWHERE or self.place[page] == HERE

    def settled_tiers(self, page: int) -> set[int]:
        """Tiers with a copy of a live page once all its queued moves have arrived."""
        tiers = {tier for tier in (HOST, DISK) if self.copy[tier][page] != NO_COPY}
        if self.leaving_to[page] != NOWHERE:
            tiers.add(self.leaving_to[page])
        return tiers.difference(drop.tier for drop in self.drops.get(page, []))

    def audit(self, temporary: int = 0) -> None:
        """Counts all pages anew: nothing is lost, nothing is held twice, no cap is exceeded.
        ``temporary`` frames belong to a recomputation."""
        self.changes = 0
        place = np.frombuffer(self.place, np.uint8)
        leaving_to = np.frombuffer(self.leaving_to, np.uint8)
        copies = [np.frombuffer(self.copy[tier], np.uint8) for tier in (HOST, DISK)]
        leaving = leaving_to != NOWHERE
        framed = (place == HERE).sum() + (place == ARRIVING).sum() + leaving.sum()
        assert int(framed) + temporary == self.frames <= self.frame_cap
        for tier in (HOST, DISK):
            assert int((copies[tier] != NO_COPY).sum()) == self.slots[tier] <= self.slot_cap[tier]
            stray = (copies[tier] == WRITING) & (leaving_to != tier)
            assert not stray.any(), "a copy is written of a page that is not on its way"
        below = (copies[HOST] == VALID) | (copies[DISK] == VALID)
        gone = ((place == AWAY) & ~leaving) | (place == ARRIVING)
        assert not (gone & ~below).any(), "a page is nowhere"
        held = (copies[HOST] != NO_COPY) | (copies[DISK] != NO_COPY) | leaving
        empty = (place == ABSENT) | (place == DISCARDED)
        assert not (empty & held).any(), "a page that is not there holds something"
        assert all(leaving[page] and place[page] != ABSENT for page in self.void)
