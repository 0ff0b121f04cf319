"""Moves pages between the tiers. Slots are planned before the first byte moves: all or nothing."""

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from ...planner.sizes import format_bytes
from ..devices.device import Bytes, Copy, Device, HostMemory
from ..disk.integrity import Stamps, Sums, page_sums
from ..disk.tier import DiskTier
from ..disk.watch import IoWatch
from ..errors import PagerError, TierFull
from ..memory.frame_pool import FramePool, expand, merge
from ..memory.host import HostTier
from ..memory.page_table import DIRTY, Int32, PageTable

_STAGING_PAGES = 8  # a power of two, so that the memory is in one piece


class Migration:
    """Evicts and fetches pages through the tiers below the device.

    Evicted pages go to the host while it has room (copies of pages that are on the device too are
    given up for it), then to disk. A page whose copy below is still valid leaves for free.

    ``watch``: of the disk's calls. ``disk_refuses``: the last write to disk failed, so pages that
    need none should leave first. ``unfinished``: I/O that was given up while it was under way, with
    the frames and disk slots that it may still use; ``held``: such I/O that is of no page, with
    its slots by tier; see :meth:`take_back`.
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
        self.disk_refuses = False
        self.unfinished: list[tuple[Future[None], Int32, Int32]] = []
        self.held: list[tuple[list[Future[None]], dict[str, Int32]]] = []
        self.page_size = page_size
        self.bytes_out = self.bytes_in = 0
        self.peak_host_slots = self.peak_disk_slots = 0
        # Of host slots, where pages are verified on their way in from there too.
        self.host_stamps = Stamps(host.slots.count, "host") if verify else None
        # Bytes that each channel has moved, by the planner's names.
        self.moved = dict.fromkeys(("host-out", "disk-out", "host-in", "disk-in"), 0)
        # Page-locked buffers between device and disk: of faults, planned outs and planned ins. None
        # where the disk's engine moves frames itself.
        self._staging: dict[str, HostMemory] = {}
        on_frames = backend.host_addressable or (disk is not None and disk.engine.takes_device)
        if disk is not None and not on_frames:
            for user in ("fault", "out", "in"):
                (self._staging[user],) = backend.host_memory(_STAGING_PAGES * page_size)

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
        host_spare = self._spare("host", leaving)
        disk_spare = self._spare("disk", leaving)
        host_room = self.host.slots.free_count + len(host_spare)
        disk_room = (self.disk.slots.free_count if self.disk else 0) + len(disk_spare)
        if host_room + disk_room < len(dirty):
            raise self._full(len(dirty), host_room + disk_room)
        count = min(len(dirty), host_room)
        to_host, to_disk = dirty[:count], dirty[count:]
        if len(to_disk):  # the one that can fail goes first
            assert self.disk is not None
            self._make_room(self.disk.slots, "disk", disk_spare, len(to_disk))
            self._write_disk(to_disk)
        if len(to_host):
            self._make_room(self.host.slots, "host", host_spare, len(to_host))
            self._write_host(to_host)
        self.bytes_out += len(dirty) * self.page_size

    def _spare(self, tier: str, leaving: Int32) -> Int32:
        """Pages whose copy in ``tier`` may be given up: they stay on the device. Those with a copy
        in the other tier too come first."""
        table = self.table
        column, other = (table.host, table.disk) if tier == "host" else (table.disk, table.host)
        mask = (column >= 0) & (table.frame >= 0)
        mask[leaving] = False
        pages = np.flatnonzero(mask).astype(np.int32)
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

    def _write_host(self, pages: Int32) -> None:
        runs = self.host.slots.allocate(len(pages))
        assert runs is not None
        slots = expand(runs)
        frames = self.table.frame[pages]
        copies = [
            Copy(frame * self.page_size, view) for frame, view in self.host.stretches(frames, slots)
        ]
        try:
            self.backend.copy_out(copies)
            if self.host_stamps is not None:
                self.backend.host_ready()
                self._stamp_host(pages, slots)
        except BaseException:
            self.give_slots("host", slots)
            raise
        self.table.copied(pages, slots, "host")
        self.moved["host-out"] += len(pages) * self.page_size
        self.peak_host_slots = max(self.peak_host_slots, self.host.used_slots)

    def _write_disk(self, pages: Int32) -> None:
        assert self.disk is not None
        runs = self.disk.slots.allocate(len(pages))
        assert runs is not None
        slots = expand(runs)
        future: Future[None] | None = None
        self.disk.stamps.claim(slots, pages, self.table.version[pages])
        try:
            for batch, buffers in self._disk_batches(self.table.frame[pages], slots, "fault"):
                if batch:
                    self.backend.copy_out(batch)
                    self.backend.host_ready()
                else:
                    self.backend.wait(self.backend.mark())
                future = self.disk.submit_write(buffers)
                self.watch.wait(future)
        except BaseException as error:
            self._note_write(error)
            if future is None or future.done():
                self.give_slots("disk", slots)
            else:
                self.unfinished.append((future, np.empty(0, np.int32), slots))
            raise
        self._note_write(None)
        self.table.copied(pages, slots, "disk")
        self.moved["disk-out"] += len(pages) * self.page_size
        used = self.disk.slots.count - self.disk.slots.free_count
        self.peak_disk_slots = max(self.peak_disk_slots, used)

    # -- onto the device -------------------------------------------------------------------------
    def fetch(self, pages: Int32, frames: Int32) -> None:
        """BELOW → CLEAN: bring ``pages`` into the empty ``frames``; ops may use them afterwards.

        Raises ``CorruptPage`` or ``PagerError`` with the page table as it was. The caller gives the
        frames back then, but for those in :attr:`unfinished`.
        """
        if not len(pages):
            return
        on_host = self.table.host[pages] >= 0
        host_pages, host_frames = pages[on_host], frames[on_host]
        slots = self.table.host[host_pages]
        self._verify_host(host_pages, slots)
        disk_pages, disk_frames = pages[~on_host], frames[~on_host]
        if len(disk_pages):
            self._read_disk(disk_pages, disk_frames)
        self.backend.copy_in(
            [
                Copy(frame * self.page_size, view)
                for frame, view in self.host.stretches(host_frames, slots)
            ]
        )
        self.backend.use_frames()
        self.table.place(pages, frames)
        self.bytes_in += len(pages) * self.page_size
        self.moved["disk-in"] += len(disk_pages) * self.page_size
        self.moved["host-in"] += len(host_pages) * self.page_size

    def _stamp_host(self, pages: Int32, slots: Int32) -> None:
        """The bytes of ``pages`` are in these host slots."""
        stamps = self.host_stamps
        assert stamps is not None
        stamps.claim(slots, pages, self.table.version[pages])
        stamps.wrote(slots, self._host_sums(slots))

    def _verify_host(self, pages: Int32, slots: Int32) -> None:
        """Raises ``CorruptPage`` if a host slot does not hold what was written there."""
        stamps = self.host_stamps
        if stamps is None or not len(pages):
            return
        stamps.expect(slots, pages, self.table.version[pages])
        wrong = stamps.sums(slots) != self._host_sums(slots)
        for slot in slots[wrong].tolist():
            raise stamps.wrong(slot)

    def _host_sums(self, slots: Int32) -> Sums:
        sums = [
            page_sums(view.reshape(-1, self.page_size))
            for _, view in self.host.stretches(slots, slots)
        ]
        return np.concatenate(sums)

    def _read_disk(self, pages: Int32, frames: Int32) -> None:
        assert self.disk is not None
        slots = self.table.disk[pages]
        self.disk.stamps.expect(slots, pages, self.table.version[pages])
        for batch, buffers in self._disk_batches(frames, slots, "fault"):
            if not batch:
                self.backend.wait(self.backend.mark())
            future = self.disk.submit_read(buffers)
            try:
                self.watch.wait(future)
            except BaseException:
                if not future.done():
                    self.unfinished.append((future, frames, np.empty(0, np.int32)))
                raise
            if batch:
                self.backend.copy_in(batch)
                self.backend.host_ready()

    def _disk_batches(
        self, frames: Int32, slots: Int32, user: str
    ) -> Iterator[tuple[list[Copy], list[tuple[int, Any]]]]:
        """Disk I/O in one batch straight on the frames (rule 7 of ``devices/device.py``), or piece
        by piece through ``user``'s staging buffer."""
        size = self.page_size
        if user not in self._staging:
            yield (
                [],
                [
                    (slot, self.backend.frames_view(frame * size, count * size))
                    for frame, slot, count in merge(frames, slots)
                ],
            )
            return
        staging = self._staging[user].bytes
        for start in range(0, len(frames), _STAGING_PAGES):
            part = slice(start, start + _STAGING_PAGES)
            copies, buffers, used = [], [], 0
            for frame, slot, count in merge(frames[part], slots[part]):
                piece = staging[used : used + count * size]
                copies.append(Copy(frame * size, piece))
                buffers.append((slot, piece))
                used += count * size
            yield copies, buffers

    # -- planned moves ---------------------------------------------------------------------------
    # The page table is changed before and after, under the lock; bytes move without it.
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

    def carry_out(self, tier: str, pages: Int32, frames: Int32, slots: Int32, mark: Any) -> None:
        """Copy ``pages``, which are in ``frames``, to ``slots``; done when it returns. ``mark``:
        see ``Device.mark``."""
        size = self.page_size
        if tier == "disk":
            assert self.disk is not None
            self.disk.stamps.claim(slots, pages, self.table.version[pages])
            for batch, buffers in self._disk_batches(frames, slots, "out"):
                if batch:
                    self.backend.carry_out(batch, mark)
                else:
                    self.backend.wait(mark)
                try:
                    self.disk.write(buffers, here=True)
                except BaseException as error:
                    self._note_write(error)
                    raise
            self._note_write(None)
            return
        stretches = self.host.stretches(frames, slots)
        copies = [Copy(frame * size, view) for frame, view in stretches]
        self.backend.carry_out(copies, mark)
        if self.host_stamps is not None:
            self._stamp_host(pages, slots)

    def carried_out(self, tier: str, pages: Int32, slots: Int32) -> None:
        """DIRTY → CLEAN: ``pages`` have a copy in ``slots`` now."""
        self.table.copied(pages, slots, tier)
        self.bytes_out += len(pages) * self.page_size
        self.moved[f"{tier}-out"] += len(pages) * self.page_size
        self.peak_host_slots = max(self.peak_host_slots, self.host.used_slots)
        if self.disk is not None:
            used = self.disk.slots.count - self.disk.slots.free_count
            self.peak_disk_slots = max(self.peak_disk_slots, used)

    def carry_in(self, tier: str, pages: Int32, frames: Int32, slots: Int32, mark: Any) -> None:
        """Copy ``slots`` into ``frames``; done when it returns. Raises ``CorruptPage``."""
        size = self.page_size
        if tier == "disk":
            assert self.disk is not None
            self.disk.stamps.expect(slots, pages, self.table.version[pages])
            for batch, buffers in self._disk_batches(frames, slots, "in"):
                if not batch:
                    self.backend.wait(mark)
                self.disk.read(buffers, here=True)
                if batch:
                    self.backend.carry_in(batch, mark)
            return
        self._verify_host(pages, slots)
        stretches = self.host.stretches(frames, slots)
        copies = [Copy(frame * size, view) for frame, view in stretches]
        self.backend.carry_in(copies, mark)

    def carried_in(self, tier: str, pages: Int32, frames: Int32) -> None:
        """BELOW → CLEAN: ``pages`` are in ``frames`` now."""
        self.table.place(pages, frames)
        self.bytes_in += len(pages) * self.page_size
        self.moved[f"{tier}-in"] += len(pages) * self.page_size

    def _pool(self, tier: str) -> FramePool | None:
        if tier == "host":
            return self.host.slots
        return self.disk.slots if self.disk else None

    # -- a disk that fails -----------------------------------------------------------------------
    def _note_write(self, error: BaseException | None) -> None:
        self.disk_refuses = isinstance(error, PagerError)

    def take_back(self) -> Int32:
        """Wait for I/O that was given up; the frames that are free now that it has ended. Its slots
        are too. Raises ``HungDisk`` if it does not end. Before that no page may move.
        """
        self._let_go()
        frames = [np.empty(0, np.int32)]
        while self.unfinished:
            future, its_frames, slots = self.unfinished[0]
            self.watch.wait_for_end(future)
            del self.unfinished[0]
            frames.append(its_frames)
            if len(slots):
                self.give_slots("disk", slots)
        return np.concatenate(frames)

    def hold_back(
        self, futures: Sequence[Future[None]], runs: dict[str, list[tuple[int, int]]]
    ) -> None:
        """I/O that was given up and is of no page, which nobody waits for: by tier, runs of slots
        that stay taken until all of it has ended."""
        self.held.append((list(futures), {tier: expand(its) for tier, its in runs.items()}))

    def _let_go(self) -> None:
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
        no tier takes a page any more. With all channels quiet. Raises as :meth:`fetch` does.
        """
        table, size = self.table, self.page_size
        places = np.arange(len(pages), dtype=np.int32)
        resident, on_host = table.frame[pages] >= 0, table.host[pages] >= 0
        on_host &= ~resident
        on_disk = ~resident & ~on_host & (table.disk[pages] >= 0)
        out.reshape(-1, size)[~resident & ~on_host & ~on_disk] = 0
        self.backend.copy_out(
            [
                Copy(frame * size, out[place * size : (place + count) * size])
                for frame, place, count in merge(table.frame[pages[resident]], places[resident])
            ]
        )
        self._verify_host(pages[on_host], table.host[pages[on_host]])
        self.backend.host_ready()
        for place, view in self.host.stretches(places[on_host], table.host[pages[on_host]]):
            out[place * size : place * size + len(view)] = view
        if on_disk.any():
            assert self.disk is not None
            slots = table.disk[pages[on_disk]]
            self.disk.stamps.expect(slots, pages[on_disk], table.version[pages[on_disk]])
            future = self.disk.submit_read(
                [
                    (slot, out[place * size : (place + count) * size])
                    for slot, place, count in merge(slots, places[on_disk])
                ]
            )
            self.watch.wait(future)

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
        for staging in self._staging.values():
            staging.give_back()
        self._staging.clear()
