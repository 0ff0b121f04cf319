"""What the simulator knows of pages and tiers at one instant."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..hardware import Hardware
from ..plan import DEVICE, DISCARD, Move, Plan, StartRun
from ..trace import Trace

if TYPE_CHECKING:
    from .program import Program
    from .queue import Queue

NO_LIMIT = 1 << 60
NONE, VALID, COMING, STALE = 0, 1, 2, 3  # a page's copy in a lower tier
_WRITTEN = bytes((NONE, NONE, STALE, STALE)) + bytes(252)  # what a write makes of them
TIER_INDEX = {"host": 0, "disk": 1}
Range = tuple[int, int]  # half-open


class Infeasible(Exception):  # noqa: N818 (a verdict on a plan)
    """The plan cannot be carried out; the message says what is wrong, and where."""


def _limit(pages: float) -> int:
    return NO_LIMIT if math.isinf(pages) else int(pages)


class Pages:
    """Every page of every tensor, numbered from 0 through all tensors, and the tiers' free room.

    ``there``: usable by ops. ``going``: 1 + tier that it is on its way out to, still in its frame.
    ``coming``: 1 + tier of an ``in`` queued for it. ``copies[tier]``: NONE, VALID, COMING (an
    ``out`` is queued) or STALE (one is queued, and the page was written since).
    """

    unborn = NO_LIMIT

    def __init__(self, trace: Trace, hardware: Hardware, plan: Plan, program: Program) -> None:
        self.trace, self.program = trace, program
        self.host_steps = plan.host_steps
        self.page_size = hardware.page_size
        self.count = trace.countable_pages(hardware.page_size)
        self.base = np.concatenate([[0], np.cumsum(self.count)])[:-1]
        self._base: list[int] = self.base.tolist()
        self._count: list[int] = self.count.tolist()
        total = int(self.count.sum())
        self.there = bytearray(total)
        self.going = bytearray(total)
        self.coming = bytearray(total)
        self.copies = (bytearray(total), bytearray(total))
        self.used_by_host = np.zeros(total, np.int32)  # by how many steps that have not ended
        self.locked = np.zeros(total, np.int32)  # the same of those that write it
        self.caps = (_limit(hardware.host_pages), _limit(hardware.disk_pages))
        self.used = [0, 0]
        self.used_peak = [0, 0]
        self.frames = _limit(hardware.device_pages)
        self.missing = [self.unborn] * trace.tensors
        self.drops: dict[int, tuple[tuple[int, int], ...]] = {}  # page → tier, what it waits for
        self.out_pages = self.in_pages = self.disk_pages = 0
        self.moves = [self._known(move, f"moves[{i}]") for i, move in enumerate(plan.moves)]
        self._lay_out(plan)

    def _known(self, move: Move, where: str) -> Move:
        """The move with the tensor's index for its number."""
        tiers = (DEVICE,) if move.action == DISCARD else TIER_INDEX
        if move.tier not in tiers:
            raise Infeasible(f"{where}: '{move.action}' with '{move.tier}', none of its tiers")
        if not 0 <= move.issue_op < self.trace.ops:
            raise Infeasible(f"{where}: op {move.issue_op} is not one of {self.trace.ops}")
        return move._replace(tensor=self._tensor(move, where))

    def _tensor(self, run: Move | StartRun, where: str) -> int:
        tensor = self.trace.index_of.get(run.tensor)
        if tensor is None:
            raise Infeasible(f"{where}: the trace has no tensor {run.tensor}")
        if not 0 <= run.first_page < run.first_page + run.page_count <= self._count[tensor]:
            raise Infeasible(
                f"{where}: pages {run.first_page} to {run.first_page + run.page_count} are not in "
                f"'{self.trace.name_of(tensor)}', which has {self._count[tensor]}"
            )
        return tensor

    def _lay_out(self, plan: Plan) -> None:
        """The state in which the first iteration begins."""
        lasting = self.trace.tensor_persistent.copy()
        lasting[list(self.program.wraps)] = True  # what lives from one iteration into the next
        start = np.zeros(len(self.there), np.int8)  # 1 + tier of persistent pages that are off
        for index, run in enumerate(plan.start):
            where = f"start[{index}]"
            tensor = self._tensor(run, where)
            if not lasting[tensor]:
                raise Infeasible(f"{where}: '{self.trace.name_of(tensor)}' is not persistent")
            first = self._base[tensor] + run.first_page
            part = start[first : first + run.page_count]
            if part.any():
                raise Infeasible(f"{where}: pages of '{self.trace.name_of(tensor)}' named twice")
            part[:] = 1 + TIER_INDEX[run.tier]
        self._start = start
        self._lasting = np.repeat(lasting, self.count)
        resident = self._lasting & (start == 0)
        self.there[:] = resident.astype(np.uint8).tobytes()
        for tier, name in enumerate(TIER_INDEX):
            self.copies[tier][:] = (start == 1 + tier).astype(np.uint8).tobytes()
            self.used[tier] = self.used_peak[tier] = int((start == 1 + tier).sum())
            if self.used[tier] > self.caps[tier]:
                raise Infeasible(
                    f"start: {self.used[tier]} pages are in the {name} tier, which holds "
                    f"{self.caps[tier]}"
                )
        self.free = self.least_free = self.frames - int(resident.sum())
        if self.free < 0:
            raise Infeasible(
                f"start: {self.frames - self.free} persistent pages are on the device, which holds "
                f"{self.frames}"
            )
        for tensor in np.flatnonzero(lasting).tolist():
            first = self._base[tensor]
            self.missing[tensor] = self.there.count(0, first, first + self._count[tensor])

    def tensor_of(self, page: int) -> int:
        return bisect_right(self._base, page) - 1

    def name_of(self, page: int) -> str:
        """The page as errors call it."""
        tensor = self.tensor_of(page)
        return f"page {page - self._base[tensor]} of '{self.trace.name_of(tensor)}'"

    def tensors_that_move(self) -> set[int]:
        """Those whose pages the plan names, and those that the host steps or that live on into the
        next iteration. All others are only so many frames while they live."""
        off = np.flatnonzero(self._start)
        started = np.unique(np.searchsorted(self.base, off, "right") - 1).tolist()
        stepped = np.isin(self.trace.access_op, list(self.host_steps))
        hosted = set(self.trace.access_tensor[stepped].tolist()) - self.program.private
        return {move.tensor for move in self.moves}.union(started, hosted, self.program.wraps)

    def state(self) -> tuple[object, ...]:
        """All that their future depends on."""
        pages = (self.there, self.going, self.coming, *self.copies)
        return (*map(bytes, pages), self.free, *self.used, dict(self.drops))

    def on_the_way(self, first: int, last: int) -> bool:
        """Whether a move of one of the pages is queued."""
        count = last - first
        still = self.coming.count(0, first, last) == count == self.going.count(0, first, last)
        return not still

    # -- frames and slots ------------------------------------------------------------------------
    def take_frames(self, pages: int) -> None:
        self.free -= pages
        if self.free < self.least_free:
            self.least_free = self.free

    def take_slots(self, tier: int, pages: int) -> None:
        self.used[tier] += pages
        if self.used[tier] > self.used_peak[tier]:
            self.used_peak[tier] = self.used[tier]

    def peaks_bytes(self) -> tuple[int, int, int]:
        """Most bytes ever held on the device, the host, the disk."""
        peaks = (self.frames - self.least_free, *self.used_peak)
        return peaks[0] * self.page_size, peaks[1] * self.page_size, peaks[2] * self.page_size

    def start_counting(self) -> None:
        self.out_pages = self.in_pages = self.disk_pages = 0

    def counted_bytes(self) -> tuple[int, int, int]:
        """Out, in and disk writes of the pages that arrived since ``start_counting``."""
        size = self.page_size
        return self.out_pages * size, self.in_pages * size, self.disk_pages * size

    # -- ops -------------------------------------------------------------------------------------
    def bear(self, tensor: int) -> None:
        """Its pages are there, in frames that its op has taken."""
        first, count = self._base[tensor], self._count[tensor]
        self.there[first : first + count] = b"\1" * count
        self.missing[tensor] = 0

    def write(self, first: int, last: int) -> None:
        """Copies below of pages ``first`` to ``last`` become void and give their slots back."""
        for tier, copies in enumerate(self.copies):
            valid = copies.count(VALID, first, last)
            if valid == last - first:
                copies[first:last] = bytes(valid)
            elif valid or copies.find(COMING, first, last) >= 0:
                copies[first:last] = copies[first:last].translate(_WRITTEN)
            self.used[tier] -= valid

    def remake(self, tensor: int, first: int, last: int) -> None:
        """Discarded pages are its own again, in frames that the step has taken."""
        self.there[first:last] = b"\1" * (last - first)
        self.missing[tensor] -= last - first

    def die(self, tensor: int, queues: tuple[Queue, ...], now: float) -> None:
        """Everything of ``tensor`` is given back, in every tier; moves of it still queued end."""
        first, count = self._base[tensor], self._count[tensor]
        last = first + count
        if self.on_the_way(first, last):
            for queue in queues:
                queue.cancel(tensor, now)
        frames = self.there.count(1, first, last)
        frames += count - self.going.count(0, first, last)
        self.free += frames
        blank = bytes(count)
        for tier, copies in enumerate(self.copies):
            self.used[tier] -= copies.count(VALID, first, last)
            copies[first:last] = blank
        self.there[first:last] = self.going[first:last] = self.coming[first:last] = blank
        self.missing[tensor] = self.unborn
        if self.drops:
            for page in range(first, last):
                self.drops.pop(page, None)

    def check_coming(self, first: int, last: int, op: int) -> None:
        """Every page of an op's access that is off the device has an ``in`` queued for it."""
        page = self.there.find(0, first, last)
        while page >= 0:
            if not self.coming[page]:
                raise Infeasible(
                    f"op {op} '{self.trace.op_names[op]}' accesses {self.name_of(page)}, which is "
                    "off the device, with no 'in' queued for it"
                )
            page = self.there.find(0, page + 1, last)

    def channel_of(self, first: int, last: int) -> str:
        """Which queue the first missing page of a range comes through."""
        page = self.there.find(0, first, last)
        return "disk-in" if self.coming[page] == 2 else "host-in"

    # -- moves -----------------------------------------------------------------------------------
    def range_of(self, move: Move) -> Range:
        first = self._base[move.tensor] + move.first_page
        return first, first + move.page_count

    def _refuse(self, move: Move, page: int, why: str) -> Infeasible:
        return Infeasible(f"'{move.action}' at op {move.issue_op}: {self.name_of(page)} {why}")

    def queue_out(self, move: Move) -> list[Range]:
        """Pages become lost to ops; the ranges that must be transferred."""
        first, last = self.range_of(move)
        page = self.there.find(0, first, last)
        if page >= 0:
            raise self._refuse(move, page, "is not on the device")
        if self.going.count(0, first, last) < last - first:
            raise self._refuse(move, first, "is still on its way out")
        tier = TIER_INDEX[move.tier]
        copies = self.copies[tier]
        todo = _runs_without(copies, VALID, first, last)
        self.there[first:last] = bytes(last - first)
        self.missing[move.tensor] += last - first
        self.free += last - first
        for a, b in todo:
            self.free -= b - a
            copies[a:b] = bytes([COMING]) * (b - a)
            self.going[a:b] = bytes([1 + tier]) * (b - a)
        return todo

    def queue_in(self, move: Move) -> list[Range]:
        first, last = self.range_of(move)
        if self.missing[move.tensor] >= self.unborn:
            raise self._refuse(move, first, "does not exist then")
        page = self.there.find(1, first, last)
        if page >= 0:
            raise self._refuse(move, page, "is on the device already")
        if self.coming.count(0, first, last) < last - first:
            raise self._refuse(move, first, "has another 'in' queued")
        tier = TIER_INDEX[move.tier]
        if tier and self.locked[first:last].any():
            raise self._refuse(move, first, "is written by a host step that has not ended")
        for state in (NONE, STALE):
            page = self.copies[tier].find(state, first, last)
            if page >= 0:
                raise self._refuse(move, page, f"has no copy in the {move.tier} tier")
        self.coming[first:last] = bytes([1 + tier]) * (last - first)
        return [(first, last)]

    def discard(self, move: Move) -> None:
        """The pages' frames and slots are free at once."""
        first, last = self.range_of(move)
        if self.missing[move.tensor] >= self.unborn:
            raise self._refuse(move, first, "does not exist then")
        for page in range(first, last):
            if self.going[page] or self.coming[page]:
                raise self._refuse(move, page, "is on its way")
            if self.used_by_host[page]:
                raise self._refuse(move, page, "is used by a host step that has not ended")
            if not (self.there[page] or any(copies[page] == VALID for copies in self.copies)):
                raise self._refuse(move, page, "holds neither a frame nor a copy")
        resident = self.there.count(1, first, last)
        self.free += resident
        self.missing[move.tensor] += resident
        blank = bytes(last - first)
        self.there[first:last] = blank
        for tier, copies in enumerate(self.copies):
            self.used[tier] -= copies.count(VALID, first, last)
            copies[first:last] = blank

    # -- host steps ------------------------------------------------------------------------------
    def hold(self, used: list[Range], written: list[Range], change: int) -> None:
        """A host step that uses and writes these pages joins (1) or has ended (−1)."""
        for counts, ranges in ((self.used_by_host, used), (self.locked, written)):
            for first, last in ranges:
                counts[first:last] += change

    def give_up_disk(self, ranges: list[Range]) -> None:
        """The slots on disk of pages that the host writes."""
        for first, last in ranges:
            self.used[1] -= self.copies[1].count(VALID, first, last)
            self.copies[1][first:last] = bytes(last - first)

    def host_uses(self, ranges: Sequence[Range]) -> bool:
        return any(self.used_by_host[a:b].any() for a, b in ranges)

    # -- the end of an iteration -----------------------------------------------------------------
    def check_end(self) -> None:
        """When all queued moves have arrived, persistent pages are where ``start`` has them."""
        there = np.frombuffer(self.there, np.uint8) | (np.frombuffer(self.coming, np.uint8) > 0)
        off = self._lasting & (there == 0)
        wrong = off != (self._start > 0)
        for tier in (0, 1):
            copy = np.frombuffer(self.copies[tier], np.uint8)
            wrong |= off & (self._start == 1 + tier) & (copy != VALID) & (copy != COMING)
        if wrong.any():
            page = int(np.flatnonzero(wrong)[0])
            tier = int(self._start[page])
            place = ("on the device", "in the host tier", "in the disk tier")[tier]
            raise Infeasible(
                f"at the end of the iteration {self.name_of(page)} is not {place}, as 'start' has "
                "it"
            )


def _runs_without(copies: bytearray, state: int, first: int, last: int) -> list[Range]:
    """The ranges of ``first`` to ``last`` whose pages are not in ``state``."""
    matching = copies.count(state, first, last)
    if matching == 0:
        return [(first, last)]
    if matching == last - first:
        return []
    other = np.frombuffer(copies, np.uint8)[first:last] != state
    edges = np.flatnonzero(np.diff(np.concatenate([[False], other, [False]]).astype(np.int8)))
    return [(first + int(a), first + int(b)) for a, b in edges.reshape(-1, 2)]
