"""A transfer: bytes of pages between frames and slots of one tier. Knows no page states."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..devices.device import Copy, Device, HostMemory
from ..disk.integrity import Stamps, Sums, page_sums
from ..disk.tier import DiskTier
from ..disk.watch import IoWatch
from ..errors import PagerError
from ..memory.frame_pool import merge
from ..memory.host import HostTier
from ..memory.page_table import Int32

_STAGING_PAGES = 8  # a power of two, so that the memory is in one piece


@dataclass(slots=True, eq=False)
class Transfer:
    """``pages``, of ``versions``, between ``frames`` and ``slots`` of ``tier``. ``queued``: on a
    lane, behind ``mark`` (``Device.mark``); otherwise in the order of what the caller does."""

    carrier: Carrier
    tier: str
    pages: Int32
    versions: npt.NDArray[np.int64]
    frames: Int32
    slots: Int32
    to_device: bool
    queued: bool = False
    mark: Any = None

    def run(self) -> None:
        """Move the bytes. Queued, they are there when it returns; otherwise for whatever the caller
        queues next. Any thread; without the GIL while bytes move."""
        if self.to_device:
            self.carrier.bring(self)
        else:
            self.carrier.take_away(self)


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

    # -- off the device --------------------------------------------------------------------------
    def take_away(self, transfer: Transfer) -> None:
        """Frames → slots; stamped."""
        if transfer.tier == "disk":
            try:
                self._write(transfer)
            except BaseException as error:
                self.disk_refuses = isinstance(error, PagerError)
                raise
            self.disk_refuses = False
            return
        self._copy(transfer, self._host_copies(transfer))
        stamps = self.host_stamps
        if stamps is not None:
            if not transfer.queued:
                self._backend.host_ready()
            stamps.claim(transfer.slots, transfer.pages, transfer.versions)
            stamps.wrote(transfer.slots, self._host_sums(transfer.slots))

    def _write(self, transfer: Transfer) -> None:
        assert self._disk is not None
        self._disk.stamps.claim(transfer.slots, transfer.pages, transfer.versions)
        for copies, buffers in self._disk_batches(transfer):
            if copies:
                self._copy(transfer, copies)
                if not transfer.queued:
                    self._backend.host_ready()
            else:
                self._reach(transfer)
            if transfer.queued:
                self._disk.write(buffers, here=True)
            else:
                self._wait(self._disk.submit_write(buffers))

    # -- onto the device -------------------------------------------------------------------------
    def bring(self, transfer: Transfer) -> None:
        """Slots → frames. Raises ``CorruptPage`` where a slot does not hold what was written."""
        if transfer.tier == "disk":
            self._read(transfer)
            return
        self._verify_host(transfer.pages, transfer.versions, transfer.slots)
        self._copy(transfer, self._host_copies(transfer))

    def _read(self, transfer: Transfer) -> None:
        assert self._disk is not None
        self._disk.stamps.expect(transfer.slots, transfer.pages, transfer.versions)
        for copies, buffers in self._disk_batches(transfer):
            if not copies:
                self._reach(transfer)
            if transfer.queued:
                self._disk.read(buffers, here=True)
            else:
                self._wait(self._disk.submit_read(buffers))
            self._copy(transfer, copies)
            if copies and not transfer.queued:
                self._backend.host_ready()

    # -- both ------------------------------------------------------------------------------------
    def _copy(self, transfer: Transfer, copies: list[Copy]) -> None:
        backend, mark = self._backend, transfer.mark
        if not copies:
            return
        if not transfer.queued:
            (backend.copy_in if transfer.to_device else backend.copy_out)(copies)
        elif transfer.to_device:
            backend.carry_in(copies, mark)
        else:
            backend.carry_out(copies, mark)

    def _reach(self, transfer: Transfer) -> None:
        """Ops and copies are done with the frames (rule 7 of ``devices/device.py``)."""
        self._backend.wait(transfer.mark if transfer.queued else self._backend.mark())

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

    def _host_copies(self, transfer: Transfer) -> list[Copy]:
        stretches = self._host.stretches(transfer.frames, transfer.slots)
        return [Copy(frame * self._size, view) for frame, view in stretches]

    def _disk_batches(
        self, transfer: Transfer
    ) -> Iterator[tuple[list[Copy], list[tuple[int, Any]]]]:
        """Disk I/O in one batch straight on the frames (rule 7 of ``devices/device.py``), or piece
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
        user = transfer.queued, transfer.queued and transfer.to_device
        staging = self._staging[user].bytes
        with self._staging_locks[user]:
            for start in range(0, len(frames), _STAGING_PAGES):
                part = slice(start, start + _STAGING_PAGES)
                copies, buffers, used = [], [], 0
                for frame, slot, count in merge(frames[part], slots[part]):
                    piece = staging[used : used + count * size]
                    copies.append(Copy(frame * size, piece))
                    buffers.append((slot, piece))
                    used += count * size
                yield copies, buffers

    # -- host slots ------------------------------------------------------------------------------
    def _verify_host(self, pages: Int32, versions: npt.NDArray[np.int64], slots: Int32) -> None:
        """Raises ``CorruptPage`` if a host slot does not hold what was written there."""
        stamps = self.host_stamps
        if stamps is None or not len(pages):
            return
        stamps.expect(slots, pages, versions)
        wrong = stamps.sums(slots) != self._host_sums(slots)
        for slot in slots[wrong].tolist():
            raise stamps.wrong(slot)

    def _host_sums(self, slots: Int32) -> Sums:
        sums = [
            page_sums(view.reshape(-1, self._size))
            for _, view in self._host.stretches(slots, slots)
        ]
        return np.concatenate(sums)

    # -- to plain memory -------------------------------------------------------------------------
    def copy_out(self, frames: Int32, places: Int32, out: npt.NDArray[np.uint8]) -> None:
        """``frames`` into the places, in pages, of ``out``. Complete after ``host_ready``."""
        size = self._size
        self._backend.copy_out(
            [
                Copy(frame * size, out[place * size : (place + count) * size])
                for frame, place, count in merge(frames, places)
            ]
        )

    def read_host(
        self, pages: Int32, versions: npt.NDArray[np.int64], slots: Int32, places: Int32,
        out: npt.NDArray[np.uint8],
    ) -> None:  # fmt: skip
        """The same of host slots."""
        self._verify_host(pages, versions, slots)
        self._backend.host_ready()
        for place, view in self._host.stretches(places, slots):
            out[place * self._size : place * self._size + len(view)] = view

    def read_disk(
        self, pages: Int32, versions: npt.NDArray[np.int64], slots: Int32, places: Int32,
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
