"""What a channel's thread does to pages: prepared and finished under the lock, run without it.

A run has ``moving`` > 0 from *prepare* to *finish*. Until then its pages keep what they have: pages
that leave keep their frames, pages that come are nowhere but below, their frames taken. Whoever
wants to pin the run waits, so nobody sees it in between. A run that dies meanwhile is given back
when the transfer has ended (``Residency.collect`` leaves it alone).
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np

from ..devices.device import Device
from ..memory.frame_pool import merge
from ..memory.page_table import BLANK, DIRTY, Int32, PageTable
from ..memory.space import PageRun, generations
from .channel import Channel, Job
from .migration import Migration
from .parts import held_pages
from .residency import Residency
from .windows import find_window

if TYPE_CHECKING:
    from ..plan.access_log import Names

PAGEWISE = -2  # an action's base: read-ahead, whose pages go to any free frames


class Transfer:
    """Pages of several jobs that move at once. ``parts``: (run, pages in order)."""

    __slots__ = ("frames", "mark", "migration", "pages", "parts", "slots", "tier", "to_device")

    def __init__(
        self,
        migration: Migration,
        tier: str,
        parts: list[tuple[PageRun, Int32]],
        frames: Int32,
        slots: Int32,
        *,
        to_device: bool,
        mark: Any,
    ) -> None:
        self.migration = migration
        self.tier = tier
        self.parts = parts
        self.pages = np.concatenate([pages for _, pages in parts])
        self.frames = frames
        self.slots = slots
        self.to_device = to_device
        self.mark = mark

    def run(self) -> None:
        """Move the bytes; they are there when it returns. Any thread, without the lock."""
        if self.to_device:
            self.migration.carry_in(self.tier, self.pages, self.frames, self.slots, self.mark)
        else:
            self.migration.carry_out(self.tier, self.pages, self.frames, self.slots, self.mark)


class Transfers:
    """Prepares and finishes transfers. ``prefetched``, ``skipped``: jobs that brought their pages,
    and jobs that found nothing to do or no way to."""

    def __init__(
        self,
        table: PageTable,
        migration: Migration,
        residency: Residency,
        backend: Device,
        names: Names,
    ) -> None:
        self._table = table
        self._migration = migration
        self._residency = residency
        self._backend = backend
        self._names = names
        self.batch_pages: dict[str, int] = {}  # by channel name
        self.prefetched = self.skipped = 0

    # -- before ----------------------------------------------------------------------------------
    def prepare(self, channel: Channel) -> Transfer | None:
        """The next transfer of ``channel``, its frames or slots taken; ``None`` if its head has to
        wait for something, or nothing is left to do. Where it raises nothing is taken, and no page
        is moving for it."""
        parts: list[tuple[PageRun, Int32]] = []
        ends: list[Int32] = []  # frames (in) or slots (out), as the pages of `parts`
        try:
            self._collect(channel, parts, ends)
            return self._transfer(channel, parts, ends) if parts else None
        except BaseException:
            self._undo(channel, parts, ends)
            raise

    def _collect(
        self, channel: Channel, parts: list[tuple[PageRun, Int32]], ends: list[Int32]
    ) -> None:
        limit = self.batch_pages.get(channel.name, 1)
        count = 0
        while channel.jobs and count < limit:
            job = channel.jobs[0]
            if not self._names.is_live(job.run):
                self._ended(channel)
                continue
            if channel.is_out:
                chosen = [pages for run, pages in parts if run is job.run]
                pages, taken = self._start_out(channel.tier, job, limit - count, chosen)
            else:
                pages, taken = self._start_in(job, limit - count)
            if pages is None:
                break
            if len(pages):
                job.run.moving += 1
                self._residency.in_flight.update(pages.tolist())
                parts.append((job.run, pages))
                ends.append(taken)
                count += len(pages)
            if job.done >= job.action.pages:
                self._ended(channel)

    def _transfer(
        self, channel: Channel, parts: list[tuple[PageRun, Int32]], ends: list[Int32]
    ) -> Transfer:
        together = np.concatenate(ends)
        pages = np.concatenate([pages for _, pages in parts])
        if channel.is_out:
            return Transfer(
                self._migration, channel.tier, parts, self._table.frame[pages].copy(), together,
                to_device=False, mark=self._backend.mark(),
            )  # fmt: skip
        column = self._table.host if channel.tier == "host" else self._table.disk
        return Transfer(
            self._migration, channel.tier, parts, together, column[pages].copy(),
            to_device=True, mark=self._residency.mark_of(together),
        )  # fmt: skip

    def _undo(
        self, channel: Channel, parts: list[tuple[PageRun, Int32]], ends: list[Int32]
    ) -> None:
        """Everything is as if these parts had never been chosen."""
        for run, pages in parts:
            self._still(run, pages)
        for (run, _), taken in zip(parts, ends):
            if channel.is_out:
                self._migration.give_slots(channel.tier, taken)
                self._residency.settle(run)
            else:
                self._give_frames(taken)

    def _still(self, run: PageRun, pages: Int32) -> None:
        """These pages are not moving any more."""
        run.moving -= 1
        self._residency.in_flight.difference_update(pages.tolist())

    def _give_frames(self, frames: Int32) -> None:
        """Back into the pool: what was taken for pages that do not come."""
        frames = np.sort(frames)
        for start, _, length in merge(frames, frames):
            self._residency.pool.free(start, length)

    def _ended(self, channel: Channel) -> None:
        job = channel.jobs.popleft()
        if channel.is_out:
            job.run.leaving -= 1
        else:
            job.run.coming -= 1

    def _rest(self, job: Job) -> Int32:
        first = job.run.first + job.action.first
        return np.arange(first + job.done, first + job.action.pages, dtype=np.int32)

    def _start_out(
        self, tier: str, job: Job, limit: int, chosen_before: list[Int32]
    ) -> tuple[Int32 | None, Int32]:
        """Clean pages leave at once; for the others slots are taken. ``chosen_before``: pages of
        the run that this transfer has already."""
        run, table = job.run, self._table
        nothing = np.empty(0, np.int32)
        pages = self._rest(job)
        if run.pins:  # used at this moment, which the plan did not foresee
            self.skipped += 1
            job.done = job.action.pages
            return nothing, nothing
        if run.moving > len(chosen_before) and job.action.base != PAGEWISE:
            return None, nothing
        resident = self._may_leave(run, pages)
        for others in chosen_before:  # an earlier job, so late that this one is due too
            resident = np.setdiff1d(resident, others)
        clean = resident[(table.flags[resident] & DIRTY) == 0]
        if len(clean):
            self._residency.evict_pages(clean)
        dirty = resident[(table.flags[resident] & DIRTY) != 0]
        if not len(dirty):
            job.done = job.action.pages
            return nothing, nothing
        chosen = dirty[:limit]
        slots = self._migration.take_slots(tier, len(chosen), leaving=dirty)
        if not len(slots):
            return None, nothing
        chosen = chosen[: len(slots)]
        run.base = -1
        run.generation = next(generations)
        job.done = int(chosen[-1]) + 1 - run.first - job.action.first
        return chosen, slots

    def _may_leave(self, run: PageRun, pages: Int32) -> Int32:
        """Those that are on the device, not moving, and not pinned by themselves."""
        resident = pages[self._table.frame[pages] >= 0]
        if run.moving:
            resident = resident[~self._residency.is_moving(resident)]
        if run.parts is not None:
            resident = np.setdiff1d(resident, held_pages(run))
        return resident

    def _start_in(self, job: Job, limit: int) -> tuple[Int32 | None, Int32]:
        """Frames are taken, the planned ones where that is possible."""
        run, table = job.run, self._table
        nothing = np.empty(0, np.int32)
        pagewise = job.action.base == PAGEWISE
        if (run.leaving or run.moving) and not pagewise:
            return None, nothing  # its pages are on their way out
        if run.parts is not None and not pagewise:  # what is in use cannot make way for the rest
            self.skipped += 1
            job.done = job.action.pages
            return nothing, nothing
        pages = self._rest(job)
        below = (table.frame[pages] < 0) & ((table.flags[pages] & BLANK) == 0)
        if run.moving:
            below &= ~self._residency.is_moving(pages)
        column = table.host if job.action.tier == "host" else table.disk
        here = below & (column[pages] >= 0)
        if not here.any():
            self.skipped += 1
            job.done = job.action.pages
            return nothing, nothing
        start = int(np.argmax(here))
        stop = start + int(np.argmin(np.append(here[start:], False)))
        pages = pages[start : min(stop, start + limit)]
        if not pagewise and self._residency.workspaces:
            pages = self._beside_streams(pages)
            if not len(pages):
                return None, nothing
        if pagewise:
            frames = self._residency.claim_free(len(pages))
        else:
            frames = self._frames_for(run, pages, job.action.base)
        if not len(frames):
            return None, nothing
        pages = pages[: len(frames)]
        job.done = int(pages[-1]) + 1 - run.first - job.action.first
        if job.done == job.action.pages and not pagewise:
            self.prefetched += 1
        return pages, frames

    def _beside_streams(self, pages: Int32) -> Int32:
        """The first of ``pages``: what leaves streams the frames that they are about to fill."""
        residency = self._residency
        return pages[: max(0, residency.pool.free_count - residency.kept_frames())]

    def _frames_for(self, run: PageRun, pages: Int32, base: int) -> Int32:
        """Free frames for the first of ``pages``, taken from the pool; none if too few are free.

        The plan counts on any free frames: those that were foreseen are only the ones for which
        nothing has to be moved aside.
        """
        pool = self._residency.pool
        own = self._table.frame[run.first : run.first + run.count]
        resident = np.flatnonzero(own >= 0)
        offset = int(pages[0]) - run.first
        if len(resident):
            base = int(own[resident[0]] - resident[0])
        if not self._fits(run, base, offset, len(pages), partly=bool(len(resident))):
            found = find_window(self._residency, run)
            if found is None:
                return np.empty(0, np.int32)
            base = found
        first = base + offset
        pool.take(first, len(pages))
        return np.arange(first, first + len(pages), dtype=np.int32)

    def _fits(self, run: PageRun, base: int, offset: int, count: int, *, partly: bool) -> bool:
        """The frames for these pages are free; all of the run's, if none of it is there yet."""
        if base < 0 or base + run.count > self._residency.pool.count:
            return False
        if partly:
            return self._residency.pool.is_free(base + offset, count)
        return self._residency.pool.is_free(base, run.count)

    # -- after -----------------------------------------------------------------------------------
    def finish(self, channel: Channel, transfer: Transfer, error: BaseException | None) -> None:
        """The bytes are there, or not: put the page table right, of each part whatever becomes of
        the others."""
        start = 0
        with ExitStack() as stack:
            stack.callback(self._residency.collect)
            for run, pages in transfer.parts:
                part = slice(start, start + len(pages))
                start += len(pages)
                self._still(run, pages)
                ok = error is None and self._names.is_live(run) and run.storages > 0
                finish = self._finish_out if channel.is_out else self._finish_in
                ends = transfer.slots[part] if channel.is_out else transfer.frames[part]
                stack.callback(finish, channel.tier, run, pages, ends, ok)

    def _finish_out(self, tier: str, run: PageRun, pages: Int32, slots: Int32, ok: bool) -> None:
        if not ok:
            self._migration.give_slots(tier, slots)
            self._residency.settle(run)
            return
        self._migration.carried_out(tier, pages, slots)
        self._residency.evict_pages(pages)

    def _finish_in(self, tier: str, run: PageRun, pages: Int32, frames: Int32, ok: bool) -> None:
        if not ok:
            self._give_frames(frames)
            return
        self._migration.carried_in(tier, pages, frames)
        self._residency.arrived(run)
