"""Slots of host and disk: who has one, what may be given up for one, when there is none. And
frames, where what has to be said of them is the same."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np

from ...planner.sizes import format_bytes
from ..disk.tier import DiskTier
from ..errors import TierFull
from ..machine.ranks import about_share
from ..memory.frame_pool import FramePool, Numbers, expand
from ..memory.host import HostTier
from ..memory.page_table import LIVE, PageTable, none_of
from .tickets import Tickets


class Slots:
    """Of one pager; under its lock. The host's have precedence: the disk is for what they cannot
    hold.

    ``peaks``: slots in use at once, at most. ``lent``: those that are no page's, by tier.
    """

    def __init__(
        self,
        table: PageTable,
        tickets: Tickets,
        frames: FramePool,
        host: HostTier,
        disk: DiskTier | None,
        page_size: int,
    ) -> None:
        self.host, self.disk = host, disk
        self.peaks = {"host": 0, "disk": 0}
        self.lent = dict.fromkeys(("host", "disk"), np.empty(0, np.int64))
        self._wanted = {"host": 0, "disk": 0}  # by pages, at once, at most
        self._held: list[tuple[list[Future[None]], dict[str, Numbers]]] = []  # see `hold`
        self._table, self._tickets, self._size = table, tickets, page_size
        self._pools = {"host": host.slots} | ({"disk": disk.slots} if disk is not None else {})
        self._all = self._pools | {"device": frames}

    def of(self, tier: str, pages: Numbers) -> Numbers:
        """Of pages that have one in ``tier``."""
        column = self._table.host if tier == "host" else self._table.disk
        slots: Numbers = column[pages]
        return slots

    # -- taking ----------------------------------------------------------------------------------
    def share_out(self, dirty: Numbers, leaving: Numbers) -> tuple[Numbers, Numbers]:
        """Of ``dirty`` pages among those ``leaving`` the device: which can go to the host, and
        which to the disk. Raises ``TierFull`` if there is no room for all of them."""
        for _ in range(2):
            room = {
                tier: pool.free_count + len(self._spare(tier, leaving))
                for tier, pool in self._pools.items()
            }
            if sum(room.values()) >= len(dirty):
                count = min(len(dirty), room["host"])
                return dirty[:count], dirty[count:]
            self._tickets.wait_for_all()  # copies of what has arrived may be given up too
        raise self._full(len(dirty), sum(room.values()))

    def take(self, tier: str, count: int, leaving: Numbers) -> Numbers:
        """At most ``count`` slots for pages that will be carried out; fewer, or none, if ``tier``
        is full even when copies of other pages on the device are given up."""
        pool = self._pools.get(tier)
        if pool is None:
            return np.empty(0, np.int64)
        short = count - pool.free_count
        if short > 0:
            self.drop_copies(self._spare(tier, leaving)[:short], tier)
        runs = pool.allocate(min(count, pool.free_count))
        assert runs is not None
        return expand(runs)

    def will_have(self, tier: str, count: int) -> bool:
        """Whether so many copies in ``tier`` can be given up once pages that are on their way to
        the device are there."""
        pages = np.flatnonzero(self._table.frame >= 0)
        frames = self._table.frame[pages[self.of(tier, pages) >= 0]]
        return int(self._tickets.pending("device", frames).sum()) >= count

    def give(self, tier: str, slots: Numbers) -> None:
        """Back into the pool: what was taken is not needed, or not any more. What is held gets
        there when it is not."""
        if self._held:
            slots = np.setdiff1d(slots, self.held(tier), assume_unique=True)
        self._all[tier].free_all(slots)

    def lend(self, tier: str, count: int) -> Numbers | None:
        """``count`` free slots for what is no page's, of those that pages have not wanted so far;
        ``None`` if there are not so many. For :meth:`give_back`."""
        pool = self._pools.get(tier)
        if pool is None or pool.count - self._wanted[tier] - len(self.lent[tier]) < count:
            return None
        runs = pool.allocate(count)
        if runs is None:
            return None
        slots = expand(runs)
        self.lent[tier] = np.concatenate([self.lent[tier], slots])
        self.note_peaks()
        return slots

    @property
    def lends_some(self) -> bool:
        return any(map(len, self.lent.values()))

    def give_back(self, tier: str, slots: Numbers, after: Sequence[Future[None]] = ()) -> None:
        """What was lent is free again, when ``after`` has ended."""
        self.lent[tier] = np.setdiff1d(self.lent[tier], slots, assume_unique=True)
        self.hold(after, {tier: slots})
        self.let_go()

    def note_peaks(self) -> None:
        for tier, pool in self._pools.items():
            used = pool.count - pool.free_count
            self.peaks[tier] = max(self.peaks[tier], used)
            self._wanted[tier] = max(self._wanted[tier], used - len(self.lent[tier]))

    def _spare(self, tier: str, leaving: Numbers) -> Numbers:
        """Pages whose copy in ``tier`` may be given up: they stay on the device. Those with a copy
        in the other tier too come first."""
        table = self._table
        column, other = (table.host, table.disk) if tier == "host" else (table.disk, table.host)
        mask = (column >= 0) & (table.frame >= 0)
        mask[leaving] = False
        pages = np.flatnonzero(mask)
        pages = pages[~self._tickets.pending("device", table.frame[pages])]  # not there yet
        return pages[np.argsort(other[pages] < 0, kind="stable")]

    def _full(self, count: int, room: int) -> TierFull:
        short = (count - room) * self._size
        live = int(np.count_nonzero(self._table.flags & LIVE)) * self._size
        host = format_bytes(self.host.capacity_bytes)
        if self.disk is not None:
            disk = format_bytes(self.disk.slots.count * self._size)
            full = f"host tier ({host}) and disk tier ({disk}) full"
            knob = "host_budget or disk_budget"
        elif self.host.capacity_bytes:
            full = f"host tier ({host}) full"
            knob = "host_budget, or give a disk_budget and disk_path,"
        else:
            full = "there is no tier below the device"
            knob = "host_budget or device_budget"
        return TierFull(
            f"{full}: {count} pages of {format_bytes(self._size)} must leave the device "
            f"and there is room for {room}; raise {knob} by at least {format_bytes(short)} "
            f"({short} bytes; pager.grow does it now): host_budget={live} bytes would hold all "
            f"pages that there are. Nothing was moved or lost.{about_share('host', '')}"
        )

    # -- copies below ----------------------------------------------------------------------------
    def drop_copies(self, pages: Numbers, tier: str) -> None:
        """The copies of ``pages`` in ``tier`` are void; their slots are free again."""
        slots = self._table.drop_copies(pages, tier)
        if len(slots):
            self.give(tier, slots)

    def void_copies(self, pages: Numbers) -> None:
        """A write is about to happen: no copy of ``pages`` is valid any more."""
        if not none_of(self._table.host[pages]):
            self.drop_copies(pages, "host")
        if not none_of(self._table.disk[pages]):
            self.drop_copies(pages, "disk")

    # -- I/O that was given up -------------------------------------------------------------------
    def hold(self, futures: Sequence[Future[None]], slots: dict[str, Numbers]) -> None:
        """By tier, slots (or frames) that are of no page, and that I/O uses which nobody waits for:
        they stay taken until all of it has ended."""
        self._held.append((list(futures), slots))

    def hold_back(
        self, futures: Sequence[Future[None]], runs: dict[str, list[tuple[int, int]]]
    ) -> None:
        """The same of runs of slots."""
        self.hold(futures, {tier: expand(its) for tier, its in runs.items()})

    @property
    def holds_some(self) -> bool:
        """:meth:`hold` has some."""
        return bool(self._held)

    def held(self, tier: str) -> Numbers:
        """Slots, or frames, of :meth:`hold`."""
        found = [slots[tier] for _, slots in self._held if tier in slots]
        return np.concatenate([np.empty(0, np.int64), *found])

    def let_go(self) -> None:
        """What is held for I/O that has ended by now is free."""
        held, self._held = self._held, []
        for futures, slots in held:
            if not all(future.done() for future in futures):
                self._held.append((futures, slots))
                continue
            for tier, its_slots in slots.items():
                self.give(tier, its_slots)
