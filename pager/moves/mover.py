"""Moves pages between the tiers. The page table changes at once, the bytes follow (note in
``tickets.py``)."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from ..devices.device import Bytes, Device, Mark
from ..disk.tier import DiskTier
from ..disk.watch import IoWatch
from ..memory.frame_pool import FramePool, Numbers
from ..memory.host import HostTier
from ..memory.page_table import DIRTY, PageTable
from ..memory.space import Extent
from .slots import Slots
from .tickets import Lane, MoveFailed, Places, Ticket, Tickets
from .transfers import Carrier, Shift, Transfer

TIERS = ("host", "disk")
OTHER = {"host": "disk", "disk": "host"}
NOW, AHEAD, PLANNED = "now", "ahead", "planned"
"""What an op waits for: carried out by whoever asks. What it will want next, and what a plan says:
carried out by lanes, each by its own."""
_THREADS = {"host": 1, "disk": 3}  # of a lane, at most
_BATCH_BYTES = 4 << 20  # moved at once where rates are not known


class Mover:
    """Of one pager; under its lock.

    ``pool``: of frames. ``settle``: is told of pages that have moved; ``unsettle``: of those that
    are on their way. ``watch``: of the disk's calls. ``lanes``: by the planner's names, for moves
    of a plan; ``beside``: of others, ended with them. ``batch_pages``: by the same names, what one
    queued transfer moves at most.
    ``moved``: bytes, by the same. ``error``: of the first queued transfer that failed.
    """

    def __init__(
        self,
        table: PageTable,
        pool: FramePool,
        backend: Device,
        host: HostTier,
        disk: DiskTier | None,
        page_size: int,
        *,
        verify: bool,
        watch: IoWatch | None = None,
    ) -> None:
        self.table, self.pool, self.backend, self.page_size = table, pool, backend, page_size
        self.watch = watch or IoWatch(math.inf)
        self.tickets = Tickets(self.watch, backend.reach)
        self.slots = Slots(table, self.tickets, pool, host, disk, page_size)
        self.carrier = Carrier(backend, host, disk, page_size, self.watch, verify=verify)
        self.settle: Callable[[Numbers], None] = lambda pages: None
        self.unsettle: Callable[[Numbers], None] = lambda pages: None
        self.error: BaseException | None = None
        on_cpu = backend.host_addressable  # a staging buffer is one thread's
        names = {f"{tier}-{way}": tier for tier in TIERS for way in ("out", "in")}
        # What they do between calls of the kernel takes cores from ops, and they wait for the GIL.
        self._cores = len(os.sched_getaffinity(0))
        most = max(1, self._cores // 2) if on_cpu else 1
        threads = {name: min(_THREADS[tier], most) for name, tier in names.items()}
        self.lanes = {name: Lane(name, threads[name]) for name in names}
        self._ahead = {name: Lane(f"ahead-{name}", threads[name]) for name in names}
        self._aside = Lane("aside", 1)
        self.beside: list[Lane] = []
        self.moved = dict.fromkeys(names, 0)
        self.batch_pages = dict.fromkeys(names, max(1, _BATCH_BYTES // page_size))

    # -- off the device --------------------------------------------------------------------------
    def leave(self, pages: Numbers) -> None:
        """Resident ``pages`` leave the device, now; copies that are still valid are not made again.

        Raises ``TierFull`` with every page where it was, and what the disk raises with those where
        they were that have not left.
        """
        dirty = (self.table.flags[pages] & DIRTY) != 0
        clean = pages
        try:
            if dirty.any():
                clean = pages[~dirty]
                to_host, to_disk = self.slots.share_out(pages[dirty], leaving=pages)
                for tier, part in (("disk", to_disk), ("host", to_host)):  # what can fail first
                    if len(part):
                        slots = self.slots.take(tier, len(part), leaving=pages)
                        self.out(tier, part, slots, NOW)
            self.give_frames(self.table.unplace(clean))
        finally:
            self.settle(pages)

    def out(self, tier: str, pages: Numbers, slots: Numbers, urgency: str = PLANNED) -> None:
        """DIRTY → BELOW: ``pages``, which nobody has pinned, leave for ``slots``, taken for them.
        Their frames are free. What is wanted now raises if it fails, and no page has left."""
        frames = self.table.frame[pages]
        at_once = True
        mark, batches = self._batches(pages, frames, slots, f"{tier}-out", urgency)
        begun = 0
        try:
            for part, places, ends in batches:
                transfer = self._transfer(tier, part, places, ends, mark, to_device=False)
                undo = partial(self._undo_out, tier, part, places, ends)
                at_once = self._begin(transfer, urgency, undo) and at_once
                begun += len(part)
        finally:  # what had begun when one failed is under way
            if begun < len(pages):
                self.slots.give(tier, slots[begun:])
                pages, slots = pages[:begun], slots[:begun]
            self.table.copied(pages, slots, tier)
            self._count(tier, "out", begun)
            self.slots.note_peaks()
            self.give_frames(self.table.unplace(pages))
        if urgency != NOW:  # then whoever asked does it
            (self.settle if at_once else self.unsettle)(pages)

    # -- onto the device -------------------------------------------------------------------------
    def bring(self, tier: str, pages: Numbers, frames: Numbers, urgency: str = PLANNED) -> None:
        """BELOW → CLEAN: ``pages``, which have a copy in ``tier``, come to ``frames``, taken for
        them. What is wanted now raises if it fails, and no page has come: the caller gives the
        frames back (``give_frames``)."""
        slots = self.slots.of(tier, pages)
        at_once = True
        mark, batches = self._batches(pages, frames, slots, f"{tier}-in", urgency)
        begun = 0
        try:
            for part, ends, places in batches:
                transfer = self._transfer(tier, part, ends, places, mark, to_device=True)
                undo = partial(self._undo_in, tier, part, ends)
                at_once = self._begin(transfer, urgency, undo) and at_once
                begun += len(part)
        finally:
            self.table.place(pages[:begun], frames[:begun])
            self._count(tier, "in", begun)
        if urgency != NOW:
            (self.settle if at_once else self.unsettle)(pages)

    # -- both ------------------------------------------------------------------------------------
    def _batches(
        self, pages: Numbers, frames: Numbers, slots: Numbers, name: str, urgency: str
    ) -> tuple[Mark, list[tuple[Numbers, Numbers, Numbers]]]:
        """What ops have queued before all of it, and what is moved at once: pages, their frames and
        their slots."""
        batch = max(1, len(pages)) if urgency == NOW else self.batch_pages[name]
        mark = self.backend.mark()
        if 0 < len(pages) <= batch:
            return mark, [(pages, frames, slots)]
        parts = (slice(start, start + batch) for start in range(0, len(pages), batch))
        return mark, [(pages[part], frames[part], slots[part]) for part in parts]

    def _transfer(
        self,
        tier: str,
        pages: Numbers,
        frames: Numbers,
        slots: Numbers,
        mark: Mark,
        *,
        to_device: bool,
    ) -> Transfer:
        """Of ``pages`` in the version that they have now."""
        versions = self.table.version[pages]
        return Transfer(
            self.carrier, tier, pages, versions, frames, slots, to_device=to_device, mark=mark
        )

    def _begin(self, transfer: Transfer, urgency: str, undo: Callable[[], None]) -> bool:
        """Whether it has ended: otherwise it is queued."""
        frames, slots = ("device", transfer.frames), (transfer.tier, transfer.slots)
        if urgency == NOW or (self._is_ops(transfer) and not self.tickets.of(frames, slots)):
            self._carry_out(transfer, frames, slots)
            return True
        way = "from" if transfer.to_device else "to"
        label = f"{len(transfer.pages)} pages {way} {transfer.tier}"
        ticket = self.tickets.take(label, frames, slots)
        ticket.undo = undo
        self._queue(transfer, ticket, urgency)
        return False

    def _is_ops(self, transfer: Transfer) -> bool:
        """It is a copy in memory, by a CPU all of whose cores compute: a lane would take one of
        them from an op, and have to be woken; the thread that runs ops has all of them."""
        return (
            transfer.tier == "host"
            and self.backend.copies_by_core
            and self.carrier.host_stamps is None
            and torch.get_num_threads() >= self._cores
        )

    def _carry_out(self, transfer: Transfer, frames: Places, slots: Places) -> None:
        """By this thread. Where that is given up (``HungDisk``, Ctrl-C) while the disk is at it,
        what it fills stays taken until its end."""
        carrier, tickets = self.carrier, self.tickets
        transfer.urgent = True
        before = tickets.of(frames, slots)
        tickets.wait_over(before)
        if transfer.tier == "disk":
            carrier.wait_for_given_up()
        try:
            mark = transfer.run(sum((ticket.mark for ticket in before), ()))
        except BaseException:
            if transfer.tier == "disk" and carrier.given_up is not None:
                tier, filled = frames if transfer.to_device else slots
                self.slots.hold([carrier.given_up], {tier: filled})
            raise
        if mark:
            tickets.take("a fault", frames, slots).end(mark=mark)

    def _queue(self, transfer: Transfer, ticket: Ticket, urgency: str) -> None:
        """Streams carry what the CPU has nothing to do with, at once where it waits for nothing
        that it has; lanes the rest."""
        on_streams = not self.backend.host_addressable and transfer.tier == "host"
        by_them = on_streams and self.carrier.host_stamps is None
        if by_them and all(before.is_over for before in ticket.after):
            ticket.carry(transfer.run)
            return
        lanes = self._ahead if urgency == AHEAD else self.lanes
        lanes[f"{transfer.tier}-{'in' if transfer.to_device else 'out'}"].add(transfer, ticket)

    def shift(
        self,
        pages: Numbers,
        sources: Numbers,
        targets: Numbers,
        order: Numbers | None = None,
        *,
        exchange: bool = False,
    ) -> bool:
        """``pages`` are about to change frames inside the arena. Whether their bytes follow by
        themselves, on a CPU where a transfer from or to these frames is under way, which no op is
        to wait for that does not use them. Otherwise it is over, and the caller copies them.
        ``order``: [copies, 2], from which frame to which, one after another, if not as they are;
        ``exchange``: in both directions."""
        of, to = (sources, targets) if order is None else order.T
        places: tuple[Places, ...] = ("device", of), ("device", to)
        before = self.tickets.of(*places)
        if not self.backend.host_addressable or all(ticket.is_over for ticket in before):
            self.tickets.wait(before)
            return False
        ticket = self.tickets.take(f"{len(pages)} pages to other frames", *places)
        ticket.undo = partial(self._undo_shift, pages, sources, targets)
        self._aside.add(Shift(self.backend, self.page_size, pages, of, to, exchange), ticket)
        return True

    def _undo_shift(self, pages: Numbers, sources: Numbers, targets: Numbers) -> None:
        here = self.table.frame[pages] == targets  # the others have left, or died, since
        self.give_frames(self.table.unplace(pages[here]))
        self.pool.take_all(sources[here])
        self.table.place(pages[here], sources[here])
        self.settle(pages)

    def _count(self, tier: str, way: str, pages: int) -> None:
        self.moved[f"{tier}-{way}"] += pages * self.page_size

    def give_frames(self, frames: Numbers) -> None:
        """Back into the pool. What still goes on there has a ticket."""
        self.slots.give("device", frames)

    # -- counts ----------------------------------------------------------------------------------
    @property
    def bytes_out(self) -> int:
        """Moved off the device."""
        return self.moved["host-out"] + self.moved["disk-out"]

    @property
    def bytes_in(self) -> int:
        """Moved onto it."""
        return self.moved["host-in"] + self.moved["disk-in"]

    @property
    def activity(self) -> int:
        """Another number whenever pages were moved, or waited for."""
        return self.bytes_in + self.bytes_out + self.tickets.waits

    @property
    def disk_refuses(self) -> bool:
        """The last write to disk failed, so pages that need none should leave first."""
        return self.carrier.disk_refuses

    # -- what has ended --------------------------------------------------------------------------
    def pending(self, pages: Numbers) -> bool:
        """Whether a transfer from or to any of ``pages`` is queued that may fail."""
        if not self.tickets.any:
            return False
        return any(self.tickets.pending(*place).any() for place in self._places_of(pages))

    def _places_of(self, pages: Numbers) -> list[Places]:
        table = self.table
        columns = {"device": table.frame, "host": table.host, "disk": table.disk}
        places = [(tier, column[pages]) for tier, column in columns.items()]
        return [(tier, some[some >= 0]) for tier, some in places]

    def drain(self) -> None:
        """Afterwards nothing is queued or moving, and what has failed is undone: its pages are
        where they were. Raises ``HungDisk`` if the disk does not answer."""
        tickets = self.tickets
        if tickets.any:
            tickets.wait_for_all()
            failed = tickets.failed  # the latest first: each finds what it had left behind
            for ticket in failed:
                ticket.undo()
            tickets.forget(failed)
            if failed:
                self.error = self.error or failed[-1].error
        self.carrier.wait_for_given_up()
        self.slots.let_go()

    def _undo_out(self, tier: str, pages: Numbers, frames: Numbers, slots: Numbers) -> None:
        """The bytes are still in these frames: what came after has not touched them."""
        assert (self.table.frame[pages] < 0).all()
        assert (self.slots.of(tier, pages) == slots).all()
        self.pool.take_all(frames)
        self.table.place(pages, frames)
        self.slots.drop_copies(pages, tier)
        self._count(tier, "out", -len(pages))
        self.settle(pages)

    def _undo_in(self, tier: str, pages: Numbers, frames: Numbers) -> None:
        here = self.table.frame[pages] == frames  # the others have left again since
        self.give_frames(self.table.unplace(pages[here]))
        self._count(tier, "in", -len(pages))
        self.settle(pages)

    # -- bytes without a move --------------------------------------------------------------------
    def copy_of(self, pages: Numbers, out: Bytes) -> None:
        """The bytes of ``pages``, wherever they are, into ``out``, uint8 [pages × page_size]; zeros
        for BLANK ones. No page moves and no frame or slot is needed, so a model can be saved when
        no tier takes a page any more. Raises as :meth:`bring` does."""
        table, size = self.table, self.page_size
        try:
            self.tickets.wait(self.tickets.of(*self._places_of(pages)))
        except MoveFailed:
            self.drain()
        places = np.arange(len(pages))
        resident, on_host = table.frame[pages] >= 0, table.host[pages] >= 0
        on_host &= ~resident
        on_disk = ~resident & ~on_host & (table.disk[pages] >= 0)
        out.reshape(-1, size)[~resident & ~on_host & ~on_disk] = 0
        self.carrier.copy_out(table.frame[pages[resident]], places[resident], out)
        reads = ("host", on_host, self.carrier.read_host), ("disk", on_disk, self.carrier.read_disk)
        for tier, here, read in reads:
            its = pages[here]
            if len(its):
                read(its, table.version[its], self.slots.of(tier, its), places[here], out)

    def host_grew(self) -> None:
        """The host tier has more slots now."""
        if self.carrier.host_stamps is not None:
            self.carrier.host_stamps.resize(self.slots.host.slots.count)

    # -- the end ---------------------------------------------------------------------------------
    def stop(self) -> None:
        """End all threads; ops come after all that they have done. Without the lock; nothing may be
        queued afterwards."""
        lanes = [*self.lanes.values(), *self._ahead.values(), self._aside, *self.beside]
        for lane in lanes:
            lane.stop()
        for lane in lanes:
            lane.join(self.watch)
        self.tickets.pass_over()

    def close(self) -> None:
        self.carrier.close()


class Coming:
    """Pages that come from ``tier`` together, and the frames that were taken for them. ``runs``:
    whose they are."""

    def __init__(self, mover: Mover, tier: str, urgency: str = PLANNED) -> None:
        self.tier, self._urgency = tier, urgency
        self.runs: set[Extent] = set()
        self._mover = mover
        self._pages: list[Numbers] = []
        self._frames: list[Numbers] = []

    def add(self, run: Extent, pages: Numbers, frames: Numbers) -> None:
        if len(pages):
            self.runs.add(run)
            self._pages.append(pages)
            self._frames.append(frames)

    def begin_with(self, run: Extent) -> None:
        """What was added is queued, if pages of ``run`` are among it."""
        if run in self.runs:
            self.begin()

    def begin(self) -> None:
        """What was added is queued: where another tier has a copy, it comes from there."""
        if not self._pages:
            return
        pages, frames = np.concatenate(self._pages), np.concatenate(self._frames)
        self.runs.clear()
        self._pages.clear()
        self._frames.clear()
        here = self._mover.slots.of(self.tier, pages) >= 0
        for tier, part in ((self.tier, here), (OTHER[self.tier], ~here)):
            if part.any():
                self._mover.bring(tier, pages[part], frames[part], self._urgency)
