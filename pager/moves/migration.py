"""Moves pages between the tiers at once: faults and write-backs. Slots are planned before the first
byte moves: all or nothing. What need not be there at once is queued (``mover.py``)."""

import math
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np

from ...planner.sizes import format_bytes
from ..devices.device import Bytes, Device
from ..disk.integrity import Stamps
from ..disk.tier import DiskTier
from ..disk.watch import IoWatch
from ..errors import TierFull
from ..memory.frame_pool import FramePool, expand, merge
from ..memory.host import HostTier
from ..memory.page_table import DIRTY, Int32, PageTable
from .tickets import Places, Tickets
from .transfers import Carrier, Transfer


class Migration:
    """Evicts and fetches pages through the tiers below the device.

    Evicted pages go to the host while it has room (copies of pages that are on the device too are
    given up for it), then to disk. A page whose copy below is still valid leaves for free.

    ``watch``: of the disk's calls. ``held``: I/O that was given up and is of no page, with its
    slots by tier; see :meth:`hold_back`.
    """

    def __init__(
        self,
        table: PageTable,
        backend: Device,
        host: HostTier,
        disk: DiskTier | None,
        page_size: int,
        *,
        verify: bool,
        watch: IoWatch | None = None,
    ) -> None:
        self.table = table
        self.backend = backend
        self.host = host
        self.disk = disk
        self.watch = watch or IoWatch(math.inf)
        self.tickets = Tickets(self.watch, backend.reach)
        self.carrier = Carrier(backend, host, disk, page_size, self.watch, verify=verify)
        self.held: list[tuple[list[Future[None]], dict[str, Int32]]] = []
        self.page_size = page_size
        self.peak_host_slots = self.peak_disk_slots = 0
        # Bytes that each channel has moved, by the planner's names.
        self.moved = dict.fromkeys(("host-out", "disk-out", "host-in", "disk-in"), 0)

    @property
    def disk_refuses(self) -> bool:
        """The last write to disk failed, so pages that need none should leave first."""
        return self.carrier.disk_refuses

    @property
    def host_stamps(self) -> Stamps | None:
        """Of host slots, where pages are verified on their way in from there too."""
        return self.carrier.host_stamps

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

    def transfer(
        self, tier: str, pages: Int32, frames: Int32, slots: Int32, *, to_device: bool
    ) -> Transfer:
        """Of ``pages`` in the version that they have now."""
        versions, mark = self.table.version[pages], self.backend.mark()
        return Transfer(
            self.carrier, tier, pages, versions, frames, slots, to_device=to_device, mark=mark
        )

    def _now(self, transfer: Transfer) -> None:
        """Carry it out. Where that is given up (``HungDisk``, Ctrl-C) while the disk is at it, what
        it fills has a ticket: whoever is given these frames or slots next waits for its end."""
        frames: Places = ("device", transfer.frames)
        slots: Places = (transfer.tier, transfer.slots)
        carrier, tickets = self.carrier, self.tickets
        transfer.urgent = True
        before = tickets.of(frames, slots)
        tickets.wait_over(before)
        if transfer.tier == "disk":
            carrier.wait_for_given_up()
        try:
            mark = transfer.run(sum((ticket.mark for ticket in before), ()))
        except BaseException:
            if carrier.given_up is not None:
                filled = frames if transfer.to_device else slots
                ticket = tickets.take("I/O that was given up", filled)
                carrier.given_up.add_done_callback(lambda _: ticket.end())
            raise
        if mark:
            tickets.take("a fault", frames, slots).end(mark=mark)

    # -- off the device --------------------------------------------------------------------------
    def evict(self, pages: Int32) -> Int32:
        """Take resident ``pages`` off the device; the frames that are free now.

        Raises ``TierFull`` or ``PagerError`` (a disk that cannot be written) with every page where
        it was.
        """
        dirty = pages[(self.table.flags[pages] & DIRTY) != 0]
        if len(dirty):
            self._write_back(dirty, leaving=pages)
        return self.table.unplace(pages)

    def _write_back(self, dirty: Int32, leaving: Int32) -> None:
        """DIRTY → CLEAN: give every page of ``dirty`` a valid copy below. All or nothing."""
        for _ in range(2):
            host_spare = self._spare("host", leaving)
            disk_spare = self._spare("disk", leaving)
            host_room = self.host.slots.free_count + len(host_spare)
            disk_room = (self.disk.slots.free_count if self.disk else 0) + len(disk_spare)
            if host_room + disk_room >= len(dirty):
                break
            self.tickets.wait_for_all()  # copies of what has arrived may be given up too
        else:
            raise self._full(len(dirty), host_room + disk_room)
        count = min(len(dirty), host_room)
        to_host, to_disk = dirty[:count], dirty[count:]
        if len(to_disk):  # the one that can fail goes first
            assert self.disk is not None
            self._make_room(self.disk.slots, "disk", disk_spare, len(to_disk))
            self._write("disk", to_disk)
        if len(to_host):
            self._make_room(self.host.slots, "host", host_spare, len(to_host))
            self._write("host", to_host)

    def _spare(self, tier: str, leaving: Int32) -> Int32:
        """Pages whose copy in ``tier`` may be given up: they stay on the device. Those with a copy
        in the other tier too come first."""
        table = self.table
        column, other = (table.host, table.disk) if tier == "host" else (table.disk, table.host)
        mask = (column >= 0) & (table.frame >= 0)
        mask[leaving] = False
        pages = np.flatnonzero(mask).astype(np.int32)
        pages = pages[~self.tickets.pending("device", table.frame[pages])]  # not there yet
        return pages[np.argsort(other[pages] < 0, kind="stable")]

    def _make_room(self, slots: FramePool, tier: str, spare: Int32, count: int) -> None:
        short = count - slots.free_count
        if short > 0:
            self.drop_copies(spare[:short], tier)

    def _full(self, count: int, room: int) -> TierFull:
        short = (count - room) * self.page_size
        host = format_bytes(self.host.capacity_bytes)
        if self.disk is None:
            tiers, knob = f"host tier ({host})", "host_budget, or give a disk_budget and disk_path,"
        else:
            disk = format_bytes(self.disk.slots.count * self.page_size)
            tiers, knob = f"host tier ({host}) and disk tier ({disk})", "host_budget or disk_budget"
        return TierFull(
            f"{tiers} full: {count} pages of {format_bytes(self.page_size)} must leave the device "
            f"and there is room for {room}; raise {knob} by at least {format_bytes(short)} "
            f"({short} bytes; pager.grow does it now). Nothing was moved or lost."
        )

    def _write(self, tier: str, pages: Int32) -> None:
        pool = self._pool(tier)
        assert pool is not None
        runs = pool.allocate(len(pages))
        assert runs is not None
        slots = expand(runs)
        try:
            frames = self.table.frame[pages]
            self._now(self.transfer(tier, pages, frames, slots, to_device=False))
        except BaseException:
            self.give_slots(tier, slots)
            raise
        self.went(tier, pages, slots)

    # -- onto the device -------------------------------------------------------------------------
    def fetch(self, pages: Int32, frames: Int32) -> None:
        """BELOW → CLEAN: bring ``pages`` into the empty ``frames``.

        Raises ``CorruptPage`` or ``PagerError`` with the page table as it was. The caller gives the
        frames back then.
        """
        if not len(pages):
            return
        on_host = self.table.host[pages] >= 0
        for tier, here in (("disk", ~on_host), ("host", on_host)):  # what can fail goes first
            if here.any():
                slots = self.slots_of(tier, pages[here])
                self._now(self.transfer(tier, pages[here], frames[here], slots, to_device=True))
        for tier, here in (("disk", ~on_host), ("host", on_host)):
            self.came(tier, pages[here], frames[here])

    # -- the page table --------------------------------------------------------------------------
    def came(self, tier: str, pages: Int32, frames: Int32) -> None:
        """BELOW → CLEAN: ``pages`` are in ``frames`` now."""
        self.table.place(pages, frames)
        self.moved[f"{tier}-in"] += len(pages) * self.page_size

    def went(self, tier: str, pages: Int32, slots: Int32) -> None:
        """DIRTY → CLEAN: ``pages`` have a copy in ``slots`` now."""
        self.table.copied(pages, slots, tier)
        self.moved[f"{tier}-out"] += len(pages) * self.page_size
        self.peak_host_slots = max(self.peak_host_slots, self.host.used_slots)
        if self.disk is not None:
            used = self.disk.slots.count - self.disk.slots.free_count
            self.peak_disk_slots = max(self.peak_disk_slots, used)

    def undone(self, tier: str, count: int, *, to_device: bool) -> None:
        """So many pages have not moved after all."""
        self.moved[f"{tier}-{'in' if to_device else 'out'}"] -= count * self.page_size

    def slots_of(self, tier: str, pages: Int32) -> Int32:
        """Of pages that have one in ``tier``."""
        column = self.table.host if tier == "host" else self.table.disk
        slots: Int32 = column[pages]
        return slots

    def pending(self, pages: Int32) -> bool:
        """Whether a transfer from or to any of ``pages`` is queued that may fail."""
        if not self.tickets.any:
            return False
        table = self.table
        columns = {"device": table.frame, "host": table.host, "disk": table.disk}
        places = [(tier, column[pages]) for tier, column in columns.items()]
        return any(self.tickets.pending(tier, some[some >= 0]).any() for tier, some in places)

    # -- slots -----------------------------------------------------------------------------------
    def take_slots(self, tier: str, count: int, leaving: Int32) -> Int32:
        """At most ``count`` slots for pages that will be carried out; fewer, or none, if ``tier``
        is full even when copies of other pages on the device are given up."""
        pool = self._pool(tier)
        if pool is None:
            return np.empty(0, np.int32)
        if pool.free_count < count:
            self._make_room(pool, tier, self._spare(tier, leaving), count)
        runs = pool.allocate(min(count, pool.free_count))
        assert runs is not None
        return expand(runs)

    def give_slots(self, tier: str, slots: Int32) -> None:
        """Back into the pool: what ``take_slots`` gave was not needed."""
        pool = self._pool(tier)
        assert pool is not None
        slots = np.sort(slots)
        for start, _, length in merge(slots, slots):
            pool.free(start, length)

    def _pool(self, tier: str) -> FramePool | None:
        if tier == "host":
            return self.host.slots
        return self.disk.slots if self.disk else None

    # -- I/O of no page --------------------------------------------------------------------------
    def hold_back(
        self, futures: Sequence[Future[None]], runs: dict[str, list[tuple[int, int]]]
    ) -> None:
        """I/O that was given up and is of no page, which nobody waits for: by tier, runs of slots
        that stay taken until all of it has ended."""
        self.held.append((list(futures), {tier: expand(its) for tier, its in runs.items()}))

    def let_go(self) -> None:
        """Slots of :meth:`hold_back` whose I/O has ended by now are free."""
        held, self.held = self.held, []
        for futures, slots in held:
            if not all(future.done() for future in futures):
                self.held.append((futures, slots))
                continue
            for tier, its_slots in slots.items():
                self.give_slots(tier, its_slots)

    def copy_of(self, pages: Int32, out: Bytes) -> None:
        """The bytes of ``pages``, wherever they are, into ``out``, uint8 [pages × page_size]; zeros
        for BLANK ones. No page moves and no frame or slot is needed, so a model can be saved when
        no tier takes a page any more. While no transfer is queued. Raises as :meth:`fetch` does.
        """
        table, size = self.table, self.page_size
        places = np.arange(len(pages), dtype=np.int32)
        resident, on_host = table.frame[pages] >= 0, table.host[pages] >= 0
        on_host &= ~resident
        on_disk = ~resident & ~on_host & (table.disk[pages] >= 0)
        out.reshape(-1, size)[~resident & ~on_host & ~on_disk] = 0
        self.carrier.copy_out(table.frame[pages[resident]], places[resident], out)
        reads = ("host", on_host, self.carrier.read_host), ("disk", on_disk, self.carrier.read_disk)
        for tier, here, read in reads:
            its = pages[here]
            if tier == "host" or len(its):
                read(its, table.version[its], self.slots_of(tier, its), places[here], out)

    # -- copies below ----------------------------------------------------------------------------
    def drop_copies(self, pages: Int32, tier: str) -> None:
        """The copies of ``pages`` in ``tier`` are void; their slots are free again."""
        slots = self.table.drop_copies(pages, tier)
        if len(slots):
            self.give_slots(tier, slots)

    def void_copies(self, pages: Int32) -> None:
        """A write is about to happen: no copy of ``pages`` is valid any more."""
        if (self.table.host[pages] >= 0).any():
            self.drop_copies(pages, "host")
        if (self.table.disk[pages] >= 0).any():
            self.drop_copies(pages, "disk")

    def host_grew(self) -> None:
        """The host tier has more slots now."""
        if self.host_stamps is not None:
            self.host_stamps.resize(self.host.slots.count)

    def close(self) -> None:
        self.carrier.close()
