"""Moves pages between the tiers. Slots are planned before the first byte moves: all or nothing."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import xxhash

from ..planner.sizes import format_bytes
from .backend import Backend, Bytes, Copy
from .disk import DiskTier
from .errors import CorruptPage, TierFull
from .frame_pool import FramePool
from .host import HostTier
from .memory import Region
from .page_table import DIRTY, Int32, PageTable

_STAGING_PAGES = 8


def expand(runs: list[tuple[int, int]]) -> Int32:
    """Numbers covered by half-open ``(start, length)`` runs, in order."""
    if not runs:
        return np.empty(0, np.int32)
    return np.concatenate([np.arange(a, a + n, dtype=np.int32) for a, n in runs])


def merge(left: Int32, right: Int32) -> Iterator[tuple[int, int, int]]:
    """``(left, right, count)`` for stretches in which both sides are consecutive."""
    if not len(left):
        return
    cuts = np.flatnonzero((np.diff(left) != 1) | (np.diff(right) != 1)) + 1
    for start, stop in zip([0, *cuts.tolist()], [*cuts.tolist(), len(left)]):
        yield int(left[start]), int(right[start]), stop - start


class Migration:
    """Evicts and fetches pages through the tiers below the device.

    Evicted pages go to the host while it has room (copies of pages that are on the device too are
    given up for it), then to disk. A page whose copy below is still valid leaves for free.
    """

    def __init__(
        self,
        table: PageTable,
        backend: Backend,
        host: HostTier,
        disk: DiskTier | None,
        page_size: int,
        *,
        verify: bool,
    ) -> None:
        self.table = table
        self.backend = backend
        self.host = host
        self.disk = disk
        self.page_size = page_size
        self.bytes_out = self.bytes_in = 0
        self.peak_host_slots = self.peak_disk_slots = 0
        self._sums = np.zeros(host.slots.count, np.uint64) if verify else None
        # Bytes that each channel has moved, by the planner's names.
        self.moved = dict.fromkeys(("host-out", "disk-out", "host-in", "disk-in"), 0)
        # Page-locked buffers between device and disk: of faults, planned outs and planned ins.
        self._staging: dict[str, Region] = {}
        if not backend.host_addressable and disk is not None:
            nbytes = _STAGING_PAGES * page_size
            for user in ("fault", "out", "in"):
                self._staging[user] = Region(nbytes, nbytes)
                backend.register_host(self._staging[user].array())

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
            Copy(frame * self.page_size, self.host.view(slot, count))
            for frame, slot, count in merge(frames, slots)
        ]
        self.backend.copy_out(copies)
        if self._sums is not None:
            self.backend.host_ready()
            for slot in slots.tolist():
                self._sums[slot] = xxhash.xxh3_64_intdigest(self.host.view(slot, 1))
        self.table.copied(pages, slots, "host")
        self.moved["host-out"] += len(pages) * self.page_size
        self.peak_host_slots = max(self.peak_host_slots, self.host.used_slots)

    def _write_disk(self, pages: Int32) -> None:
        assert self.disk is not None
        runs = self.disk.slots.allocate(len(pages))
        assert runs is not None
        slots = expand(runs)
        try:
            for batch, buffers in self._disk_batches(self.table.frame[pages], slots, "fault"):
                if batch:
                    self.backend.copy_out(batch)
                    self.backend.host_ready()
                self.disk.write(buffers)
        except BaseException:
            for start, length in runs:
                self.disk.slots.free(start, length)
            raise
        self.table.copied(pages, slots, "disk")
        self.moved["disk-out"] += len(pages) * self.page_size
        used = self.disk.slots.count - self.disk.slots.free_count
        self.peak_disk_slots = max(self.peak_disk_slots, used)

    # -- onto the device -------------------------------------------------------------------------
    def fetch(self, pages: Int32, frames: Int32) -> None:
        """BELOW → CLEAN: bring ``pages`` into the empty ``frames``; ops may use them afterwards.

        Raises ``CorruptPage`` with the page table as it was.
        """
        if not len(pages):
            return
        on_host = self.table.host[pages] >= 0
        host_pages, host_frames = pages[on_host], frames[on_host]
        slots = self.table.host[host_pages]
        if self._sums is not None:
            self._verify(host_pages, slots)
        disk_pages, disk_frames = pages[~on_host], frames[~on_host]
        if len(disk_pages):
            self._read_disk(disk_frames, self.table.disk[disk_pages])
        self.backend.copy_in(
            [
                Copy(frame * self.page_size, self.host.view(slot, count))
                for frame, slot, count in merge(host_frames, slots)
            ]
        )
        self.backend.use_frames()
        self.table.place(pages, frames)
        self.bytes_in += len(pages) * self.page_size
        self.moved["disk-in"] += len(disk_pages) * self.page_size
        self.moved["host-in"] += len(host_pages) * self.page_size

    def _verify(self, pages: Int32, slots: Int32) -> None:
        assert self._sums is not None
        self.backend.host_ready()
        for page, slot in zip(pages.tolist(), slots.tolist()):
            if self._sums[slot] != xxhash.xxh3_64_intdigest(self.host.view(slot, 1)):
                raise CorruptPage(
                    f"page {page} in host slot {slot} does not match the checksum it was written "
                    "with; something wrote into the pager's host memory. Restore a checkpoint."
                )

    def _read_disk(self, frames: Int32, slots: Int32) -> None:
        assert self.disk is not None
        for batch, buffers in self._disk_batches(frames, slots, "fault"):
            self.disk.read(buffers)
            if batch:
                self.backend.copy_in(batch)
                self.backend.host_ready()

    def _disk_batches(
        self, frames: Int32, slots: Int32, user: str
    ) -> Iterator[tuple[list[Copy], list[tuple[int, Bytes]]]]:
        """Disk I/O in one batch straight on the frames, or piece by piece through ``user``'s
        staging buffer."""
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
        staging = self._staging[user].array()
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

    def carry_out(self, tier: str, frames: Int32, slots: Int32, mark: Any) -> None:
        """Copy ``frames`` to ``slots``; done when it returns. ``mark``: see ``Backend.mark``."""
        size = self.page_size
        if tier == "disk":
            assert self.disk is not None
            for batch, buffers in self._disk_batches(frames, slots, "out"):
                if batch:
                    self.backend.carry_out(batch, mark)
                self.disk.write(buffers, here=True)
            return
        stretches = merge(frames, slots)
        copies = [Copy(frame * size, self.host.view(slot, n)) for frame, slot, n in stretches]
        self.backend.carry_out(copies, mark)
        if self._sums is not None:
            for slot in slots.tolist():
                self._sums[slot] = xxhash.xxh3_64_intdigest(self.host.view(slot, 1))

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
            for batch, buffers in self._disk_batches(frames, slots, "in"):
                self.disk.read(buffers, here=True)
                if batch:
                    self.backend.carry_in(batch, mark)
            return
        if self._sums is not None:
            self._verify(pages, slots)
        stretches = merge(frames, slots)
        copies = [Copy(frame * size, self.host.view(slot, n)) for frame, slot, n in stretches]
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
        if self._sums is not None:
            more = self.host.slots.count - len(self._sums)
            self._sums = np.concatenate([self._sums, np.zeros(more, np.uint64)])

    def close(self) -> None:
        for staging in self._staging.values():
            self.backend.unregister_host(staging.array())
            staging.close()
        self._staging.clear()
