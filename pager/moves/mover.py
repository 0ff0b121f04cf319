"""Queues transfers. The page table changes at once, the bytes follow (note in ``tickets.py``)."""

from __future__ import annotations

from functools import partial

import numpy as np

from ..memory.frame_pool import merge
from ..memory.page_table import Int32
from .residency import Residency
from .tickets import Lane, Ticket
from .transfers import Transfer

TIERS = ("host", "disk")
_THREADS = 3
_BATCH_BYTES = 4 << 20  # moved at once where rates are not known


class Mover:
    """Of one pager; under its lock. What has to be there before an op goes on is the faults'
    (``Residency.pin``).

    ``lanes``: by the planner's names, for moves of a plan; what is read ahead has others, because
    it is needed first. ``batch_pages``: by the same names, what one transfer moves at most.
    ``error``: of the first transfer that failed.
    """

    def __init__(self, residency: Residency) -> None:
        self.error: BaseException | None = None
        self._residency = residency
        self._migration = residency.migration
        threads = _THREADS if residency.backend.host_addressable else 1  # one staging buffer
        names = [f"{tier}-{way}" for tier in TIERS for way in ("out", "in")]
        self.lanes = {name: Lane(name, threads) for name in names}
        self._ahead = {name: Lane(f"ahead-{name}", threads) for name in names}
        self.batch_pages = dict.fromkeys(names, max(1, _BATCH_BYTES // residency.page_size))
        residency.drain = self.drain

    def out(self, tier: str, pages: Int32, slots: Int32, *, ahead: bool = False) -> None:
        """DIRTY → BELOW: ``pages``, which nobody has pinned, leave for ``slots``, taken for them.
        Their frames are free."""
        table, tickets = self._residency.table, self._migration.tickets
        batch = self.batch_pages[f"{tier}-out"]
        for start in range(0, len(pages), batch):
            part, ends = pages[start : start + batch], slots[start : start + batch]
            frames = table.frame[part]
            transfer = self._migration.transfer(tier, part, frames, ends, to_device=False)
            label = f"{len(part)} pages to {tier}"
            ticket = tickets.take(label, ("device", frames), (tier, ends))
            ticket.undo = partial(self._undo_out, tier, part, frames, ends)
            self._migration.went(tier, part, ends)
            self._residency.give_frames(table.unplace(part))
            self._queue(transfer, ticket, ahead=ahead)
        self._residency.settle_all(pages)

    def bring(self, tier: str, pages: Int32, frames: Int32, *, ahead: bool = False) -> None:
        """BELOW → CLEAN: ``pages``, which have a copy in ``tier``, come to ``frames``, taken for
        them."""
        batch = self.batch_pages[f"{tier}-in"]
        tickets = self._migration.tickets
        for start in range(0, len(pages), batch):
            part, ends = pages[start : start + batch], frames[start : start + batch]
            slots = self._migration.slots_of(tier, part)
            transfer = self._migration.transfer(tier, part, ends, slots, to_device=True)
            label = f"{len(part)} pages from {tier}"
            ticket = tickets.take(label, ("device", ends), (tier, slots))
            ticket.undo = partial(self._undo_in, tier, part, ends)
            self._migration.came(tier, part, ends)
            self._queue(transfer, ticket, ahead=ahead)
        self._residency.settle_all(pages)

    def _queue(self, transfer: Transfer, ticket: Ticket, *, ahead: bool) -> None:
        """Streams carry what the CPU has nothing to do with, at once where it waits for nothing
        that it has; lanes the rest."""
        on_streams = not self._residency.backend.host_addressable and transfer.tier == "host"
        by_them = on_streams and self._migration.host_stamps is None
        if by_them and all(before.is_over for before in ticket.after):
            ticket.carry(transfer.run)
            return
        lanes = self._ahead if ahead else self.lanes
        lanes[f"{transfer.tier}-{'in' if transfer.to_device else 'out'}"].add(transfer, ticket)

    # -- what has ended --------------------------------------------------------------------------
    def drain(self) -> None:
        """Afterwards nothing is queued or moving, and what has failed is undone: its pages are
        where they were. Raises ``HungDisk`` if the disk does not answer."""
        tickets = self._migration.tickets
        if tickets.any:
            tickets.wait_for_all()
            failed = tickets.failed  # the latest first: each finds what it had left behind
            for ticket in failed:
                ticket.undo()
            tickets.forget(failed)
            if failed:
                self.error = self.error or failed[-1].error
        self._migration.let_go()

    def _undo_out(self, tier: str, pages: Int32, frames: Int32, slots: Int32) -> None:
        """The bytes are still in these frames: what came after has not touched them."""
        residency, migration = self._residency, self._migration
        assert (residency.table.frame[pages] < 0).all()
        assert (migration.slots_of(tier, pages) == slots).all()
        for start, _, count in merge(*2 * (np.sort(frames),)):
            residency.pool.take(start, count)
        residency.table.place(pages, frames)
        migration.drop_copies(pages, tier)
        migration.undone(tier, len(pages), to_device=False)
        residency.settle_all(pages)

    def _undo_in(self, tier: str, pages: Int32, frames: Int32) -> None:
        table = self._residency.table
        here = table.frame[pages] == frames  # the others have left again since
        self._residency.give_frames(table.unplace(pages[here]))
        self._migration.undone(tier, len(pages), to_device=True)
        self._residency.settle_all(pages)

    def stop(self) -> None:
        """End all threads; ops come after all that they have done. Without the lock; nothing may be
        queued afterwards."""
        lanes = [*self.lanes.values(), *self._ahead.values()]
        for lane in lanes:
            lane.stop()
        for lane in lanes:
            lane.join(self._migration.watch)
        self._migration.tickets.pass_over()
