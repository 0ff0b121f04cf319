"""A transfer: bytes of pages between frames and slots of one tier. Knows no page states."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..devices.device import PLANNED, THROUGH_DISK, URGENT, Copy, Device, HostMemory, Mark
from ..disk.integrity import Stamps, Sums, page_sums
from ..disk.tier import DiskTier
from ..disk.watch import IoWatch
from ..errors import PagerError
from ..memory.frame_pool import Numbers, merge
from ..memory.host import HostTier

_STAGING_PAGES = 8  # a power of two, so that the memory is in one piece


@dataclass(slots=True, eq=False)
class Transfer:
    """``pages``, of ``versions``, between ``frames`` and ``slots`` of ``tier``. ``mark``: of ops,
    when this was decided. ``urgent``: somebody waits for it."""

    carrier: Carrier
    tier: str
    pages: Numbers
    versions: npt.NDArray[np.int64]
    frames: Numbers
    slots: Numbers
    to_device: bool
    mark: Mark = ()
    urgent: bool = False

    def run(self, after: Mark) -> Mark:
        """Move the bytes, behind ``after``; when they are there. Any thread; without the GIL while
        bytes move. If it raises, nothing of it is under way but ``Carrier.given_up``."""
        return (self.carrier.bring if self.to_device else self.carrier.take_away)(
            self, self.mark + after
        )


@dataclass(slots=True, eq=False)
class Shift:
    """``pages`` follow to other frames, on a CPU, from ``sources`` to ``targets``, one after
    another; ``exchange``: and the other way round."""

    backend: Device
    page_size: int
    pages: Numbers
    sources: Numbers
    targets: Numbers
    exchange: bool = False

    def run(self, after: Mark) -> Mark:
        move = self.backend.exchange if self.exchange else self.backend.slide
        for source, target, count in merge(self.sources, self.targets):
            move(source, target, count, self.page_size)
        return ()


class Carrier:
    """Moves the bytes of transfers. Any thread.

    ``disk_refuses``: the last write to disk failed, so pages that need none should leave first.
    ``given_up``: the disk's work that nobody waits for any more, and that may not have ended.
    """

    def __init__(
        self,
        backend: Device,
        host: HostTier,
        disk: DiskTier | None,
        page_size: int,
        watch: IoWatch,
        *,
        verify: bool,
    ) -> None:
        self._backend, self._host, self._disk, self._size = backend, host, disk, page_size
        self._watch = watch
        self.disk_refuses = False
        self.given_up: Future[None] | None = None
        # Of host slots, where pages are verified on their way in from there too.
        self.host_stamps = Stamps(host.slots.count, "host") if verify else None
        # Page-locked buffers between device and disk. None where the disk's engine moves frames.
        self._staging: dict[tuple[bool, bool], HostMemory] = {}
        on_frames = backend.host_addressable or (disk is not None and disk.engine.takes_device)
        if disk is not None and not on_frames:
            for user in ((False, False), (True, False), (True, True)):
                (self._staging[user],) = backend.host_memory(_STAGING_PAGES * page_size)
        self._staging_locks = {user: threading.Lock() for user in self._staging}
        self._staging_marks: dict[tuple[bool, bool], Mark] = dict.fromkeys(self._staging, ())

    # -- off the device --------------------------------------------------------------------------
    def take_away(self, transfer: Transfer, after: Mark) -> Mark:
        """Frames → slots; stamped."""
        if transfer.tier == "disk":
            try:
                self._write(transfer, after)
            except BaseException as error:
                self.disk_refuses = isinstance(error, PagerError)
                raise
            self.disk_refuses = False
            return ()
        mark = self._copy(transfer, self._host.copies(transfer.frames, transfer.slots), after)
        if self.host_stamps is None:
            return mark
        self._backend.wait(mark)
        self.stamp_host(transfer.pages, transfer.versions, transfer.slots)
        return ()

    def _write(self, transfer: Transfer, after: Mark) -> None:
        assert self._disk is not None
        self._disk.stamps.claim(transfer.slots, transfer.pages, transfer.versions)
        for copies, buffers in self._disk_batches(transfer):
            mark = self._copy(transfer, copies, after) if copies else after
            self._backend.wait(mark)
            if transfer.urgent:
                self._wait(self._disk.submit_write(buffers))
            else:
                self._disk.write(buffers)

    # -- onto the device -------------------------------------------------------------------------
    def bring(self, transfer: Transfer, after: Mark) -> Mark:
        """Slots → frames. Raises ``CorruptPage`` where a slot does not hold what was written."""
        if transfer.tier == "disk":
            return self._read(transfer, after)
        self.verify_host(transfer.pages, transfer.versions, transfer.slots)
        return self._copy(transfer, self._host.copies(transfer.frames, transfer.slots), after)

    def _read(self, transfer: Transfer, after: Mark) -> Mark:
        assert self._disk is not None
        self._disk.stamps.expect(transfer.slots, transfer.pages, transfer.versions)
        user, mark = self._user(transfer), ()
        try:
            for copies, buffers in self._disk_batches(transfer):
                if not copies:
                    self._backend.wait(after)
                if transfer.urgent:
                    self._wait(self._disk.submit_read(buffers))
                else:
                    self._disk.read(buffers)
                if copies:
                    mark = self._staging_marks[user] = self._copy(transfer, copies, after)
        except BaseException:
            self._backend.wait(mark)  # the frames are given back
            raise
        return mark

    # -- both ------------------------------------------------------------------------------------
    def _copy(self, transfer: Transfer, copies: list[Copy], after: Mark) -> Mark:
        lane = URGENT if transfer.urgent else PLANNED if transfer.tier == "host" else THROUGH_DISK
        return self._backend.copy(copies, lane, after, to_device=transfer.to_device)

    def _wait(self, future: Future[None]) -> None:
        try:
            self._watch.wait(future)
        except BaseException:
            if not future.done():
                self.given_up = future
            raise

    def wait_for_given_up(self) -> None:
        """It has ended afterwards. Raises ``HungDisk`` if it does not."""
        if self.given_up is not None:
            self._watch.wait_for_end(self.given_up)
            self.given_up = None

    def _disk_batches(
        self, transfer: Transfer
    ) -> Iterator[tuple[list[Copy], list[tuple[int, Any]]]]:
        """Disk I/O in one batch straight on the frames (rule 5 of ``devices/device.py``), or piece
        by piece through a staging buffer."""
        size, frames, slots = self._size, transfer.frames, transfer.slots
        if not self._staging:
            yield (
                [],
                [
                    (slot, self._backend.frames_view(frame * size, count * size))
                    for frame, slot, count in merge(frames, slots)
                ],
            )
            return
        user = self._user(transfer)
        staging = self._staging[user].bytes
        with self._staging_locks[user]:
            for start in range(0, len(frames), _STAGING_PAGES):
                self._backend.wait(self._staging_marks[user])  # they may still be read
                part = slice(start, start + _STAGING_PAGES)
                copies, buffers, used = [], [], 0
                for frame, slot, count in merge(frames[part], slots[part]):
                    piece = staging[used : used + count * size]
                    copies.append(Copy(frame * size, piece))
                    buffers.append((slot, piece))
                    used += count * size
                yield copies, buffers

    def _user(self, transfer: Transfer) -> tuple[bool, bool]:
        """Of a staging buffer."""
        return not transfer.urgent, not transfer.urgent and transfer.to_device

    # -- host slots ------------------------------------------------------------------------------
    def stamp_host(self, pages: Numbers, versions: npt.NDArray[np.int64], slots: Numbers) -> None:
        """Host slots hold these versions of ``pages`` now; nothing where none are stamped."""
        if self.host_stamps is not None:
            self.host_stamps.claim(slots, pages, versions)
            self.host_stamps.wrote(slots, self._host_sums(slots))

    def verify_host(self, pages: Numbers, versions: npt.NDArray[np.int64], slots: Numbers) -> None:
        """Raises ``CorruptPage`` if a host slot does not hold what was written there."""
        stamps = self.host_stamps
        if stamps is None or not len(pages):
            return
        stamps.expect(slots, pages, versions)
        wrong = stamps.sums(slots) != self._host_sums(slots)
        for slot in slots[wrong].tolist():
            raise stamps.wrong(slot)

    def _host_sums(self, slots: Numbers) -> Sums:
        sums = [
            page_sums(view.reshape(-1, self._size))
            for _, view in self._host.stretches(slots, slots)
        ]
        return np.concatenate(sums)

    # -- to plain memory -------------------------------------------------------------------------
    def copy_out(self, frames: Numbers, places: Numbers, out: npt.NDArray[np.uint8]) -> None:
        """``frames`` into the places, in pages, of ``out``. What is on its way, ops come after."""
        size, backend = self._size, self._backend
        copies = [
            Copy(frame * size, out[place * size : (place + count) * size])
            for frame, place, count in merge(frames, places)
        ]
        backend.wait(backend.copy(copies, URGENT, backend.mark(), to_device=False))

    def read_host(
        self, pages: Numbers, versions: npt.NDArray[np.int64], slots: Numbers, places: Numbers,
        out: npt.NDArray[np.uint8],
    ) -> None:  # fmt: skip
        """The same of host slots, whose bytes are there when ``copy_out`` has returned."""
        self.verify_host(pages, versions, slots)
        for place, view in self._host.stretches(places, slots):
            out[place * self._size : place * self._size + len(view)] = view

    def read_disk(
        self, pages: Numbers, versions: npt.NDArray[np.int64], slots: Numbers, places: Numbers,
        out: npt.NDArray[np.uint8],
    ) -> None:  # fmt: skip
        """The same of the disk's."""
        assert self._disk is not None
        self._disk.stamps.expect(slots, pages, versions)
        pieces = [
            (slot, out[place * self._size : (place + count) * self._size])
            for slot, place, count in merge(slots, places)
        ]
        self._watch.wait(self._disk.submit_read(pieces))

    def close(self) -> None:
        for staging in self._staging.values():
            staging.give_back()
        self._staging.clear()
