"""What the channels of this machine really do, measured at start and remembered for a week.

Measured with what training uses: memory of the host tier, slots and threads of the disk tier, and
transfers of its size. Only free slots are touched, and given back; beside them there is scratch
memory, of 8 MiB at most: where the device is RAM it is what dense memory has idle, as far as that
goes beyond two pages. All of it takes a second or so; two, if one transfer takes a third of a
second.

::

    scratch   | source: one transfer | lane | lane | lane |
    link      source (on a GPU: a copy of it there) <-> free host slots, or the lanes
    disk      source -> free disk slots -> lanes, each taking one read at a time
"""

import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ....planner.hardware import Hardware
from ...devices.device import Bytes, Device
from ...disk.batch import TASK_BYTES
from ...disk.tier import DiskTier
from ...disk.watch import IoWatch
from ...errors import HungDisk, PagerError
from ...memory.frame_pool import FramePool, Run
from ...memory.host import HostTier
from . import cache
from .disk_rates import DiskRates, Waiter, cut, measure_disk
from .link import LinkRates, measure_link

_SCRATCH_BYTES, _HOST_BYTES, _DISK_BYTES = 8 << 20, 32 << 20, 32 << 20  # at most
_READS = 8  # in flight
_HUGE_PAGE = 2 << 20
_MOST_PER_S, _MOST_US = 1e15, 1e9

HoldBack = Callable[[Sequence[Future[None]], dict[str, list[Run]]], None]
"""Transfers that did not end, and by tier the slots that are free only when they have."""


@dataclass(frozen=True)
class Calibration:
    """Rates in bytes per second; latencies in µs.

    ``disk_read_bytes_per_s`` and ``disk_write_bytes_per_s`` are what each can count on while the
    other runs too; ``disk_*_alone`` are for people. ``transfer_latency_us`` is what a copy over the
    link costs beyond its bytes, ``disk_latency_us`` what each transfer of one page costs beyond
    its bytes in a full queue of them. What concerns the disk is ``None`` where there is none.

    Raises ``ValueError`` for values that no machine has.
    """

    d2h_bytes_per_s: float
    h2d_bytes_per_s: float
    transfer_latency_us: float
    disk_read_bytes_per_s: float | None = None
    disk_write_bytes_per_s: float | None = None
    disk_read_alone_bytes_per_s: float | None = None
    disk_write_alone_bytes_per_s: float | None = None
    disk_latency_us: float | None = None

    @property
    def has_disk(self) -> bool:
        return self.disk_read_bytes_per_s is not None

    def __post_init__(self) -> None:
        values = asdict(self)
        of_disk = [name for name in values if name.startswith("disk_")]
        if all(values[name] is None for name in of_disk):
            for name in of_disk:
                del values[name]
        for name, value in values.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"{name} = {value!r} is not a number")
            least, most = (1, _MOST_PER_S) if name.endswith("_per_s") else (0, _MOST_US)
            if not least <= value <= most:
                raise ValueError(f"{name} = {value!r} is not from {least} to {most:g}")


def calibrate(
    *,
    backend: Device,
    disk: DiskTier | None,
    page_size: int,
    fresh: bool = False,
    **others: Any,
) -> Calibration:
    """The rates of these tiers: from this machine's cache, or measured and put there.

    ``fresh``: measure, whatever the cache has. Otherwise as :func:`measure`.
    """
    key = cache.machine_key(backend.device, disk, page_size)
    known = None if fresh else _from_cache(key, disk)
    if known is not None:
        return known
    measured = measure(backend=backend, disk=disk, page_size=page_size, **others)
    cache.store(key, asdict(measured))
    return measured


def is_known(backend: Device, disk: DiskTier | None, page_size: int) -> bool:
    """Whether :func:`calibrate` has nothing to measure."""
    return _from_cache(cache.machine_key(backend.device, disk, page_size), disk) is not None


def _from_cache(key: cache.Key, disk: DiskTier | None) -> Calibration | None:
    values = cache.load(key)
    if values is None:
        return None
    try:
        known = Calibration(**values)
    except (TypeError, ValueError):
        return None
    return known if known.has_disk == (disk is not None) else None


def measure(
    *,
    backend: Device,
    host: HostTier,
    disk: DiskTier | None,
    page_size: int,
    watch: IoWatch | None = None,
    hold_back: HoldBack | None = None,
) -> Calibration:
    """Measures the link and, if there is one, the disk tier. Nothing may be in flight.

    ``watch``: of the disk's calls; it ends the wait for one that does not return. ``hold_back``:
    takes what such a call may still use; without it that stays taken.

    Free slots hold anything afterwards. Raises ``PagerError``, with every slot given back, if the
    disk fails or has no free slot, or if the device has no room for one transfer. Raises
    ``HungDisk`` if the disk does not answer; nothing that matters is in the slots of those calls.
    """
    if disk is not None and not disk.slots.free_count:
        raise PagerError(
            f"the disk tier in {disk.directory!r} cannot be measured: none of its "
            f"{disk.slots.count} slots is free; raise disk_budget (pager.grow does it now)"
        )
    waiter = Waiter(watch or IoWatch(math.inf))
    try:
        waiter.watch.refuse_if_hung()
        with (
            backend.lend_idle(min(_SCRATCH_BYTES, backend.reserved_bytes // 16)) as room,
            nullcontext() if disk is None else disk.measuring(),
        ):
            return _measure(backend, host, disk, page_size, room, waiter, hold_back)
    except HungDisk as error:
        assert disk is not None
        raise HungDisk(
            f"the disk tier in {disk.directory!r} could not be measured: {error}; or set disk_path "
            "to another disk"
        ) from error


def _measure(
    backend: Device,
    host: HostTier,
    disk: DiskTier | None,
    page_size: int,
    room: int,
    waiter: Waiter,
    hold_back: HoldBack | None,
) -> Calibration:
    piece_pages = max(1, min(TASK_BYTES, room // 4) // page_size)
    piece_bytes = piece_pages * page_size
    count = max(2, room // piece_bytes)
    with (
        scratch(backend, count * piece_bytes) as memory,
        _borrowed(host.slots, _HOST_BYTES, page_size) as of_host,
    ):
        source, *lanes = np.split(memory, count)
        _fill(source)
        host_runs = [part for run in cut(of_host.runs, piece_pages) for part in host.cut(*run)]
        pieces = [host.view(*run) for run in host_runs]
        link = measure_link(backend, source, pieces or lanes)
        if disk is None:
            return Calibration(link.out, link.in_, link.latency_us)
        lanes += [piece for piece in pieces if len(piece) == piece_bytes]
        with _borrowed(disk.slots, _DISK_BYTES, page_size) as of_disk:
            try:
                rates = measure_disk(disk, of_disk.runs, source, lanes[:_READS], waiter)
            except HungDisk:
                of_disk.kept = [transfer.slots for transfer in waiter.left]
                of_host.kept = [
                    run
                    for run, piece in zip(host_runs, pieces)
                    if any(np.may_share_memory(piece, left.buffer) for left in waiter.left)
                ]
                if waiter.left and hold_back is not None:
                    futures = [transfer.future for transfer in waiter.left]
                    hold_back(futures, {"host": of_host.kept, "disk": of_disk.kept})
                raise
    return _calibration(link, rates)


def _calibration(link: LinkRates, rates: DiskRates) -> Calibration:
    return Calibration(
        link.out,
        link.in_,
        link.latency_us,
        disk_read_bytes_per_s=min(rates.read_alone, rates.read_beside),
        disk_write_bytes_per_s=min(rates.write_alone, rates.write_beside),
        disk_read_alone_bytes_per_s=rates.read_alone,
        disk_write_alone_bytes_per_s=rates.write_alone,
        disk_latency_us=rates.latency_us,
    )


def hardware(
    calibration: Calibration,
    device_bytes: float,
    host_bytes: float,
    disk_bytes: float,
    page_size: int,
) -> Hardware:
    """The planner's machine with these tiers (bytes) and the measured rates.

    Its one latency is the link's where there is a host tier, or no disk tier, and the disk's where
    there is nothing else below the device. Raises ``ValueError`` for a disk that was not measured.
    """
    if disk_bytes and not calibration.has_disk:
        raise ValueError(f"{disk_bytes=}, but the disk was not measured; calibrate with its tier")
    latency_us = calibration.transfer_latency_us
    if disk_bytes and not host_bytes:
        latency_us = max(latency_us, calibration.disk_latency_us or 0.0)
    return Hardware(
        device_bytes,
        host_bytes,
        disk_bytes,
        d2h_bytes_per_s=calibration.d2h_bytes_per_s,
        h2d_bytes_per_s=calibration.h2d_bytes_per_s,
        transfer_latency_us=latency_us,
        page_size=page_size,
    ).with_(
        disk_read_bytes_per_s=calibration.disk_read_bytes_per_s,
        disk_write_bytes_per_s=calibration.disk_write_bytes_per_s,
    )


@dataclass
class _Loan:
    """Slots of a tier, all of them free again at its end but for those in ``kept``."""

    runs: list[Run]
    kept: list[Run]


@contextmanager
def _borrowed(slots: FramePool, nbytes: int, page_size: int) -> Iterator[_Loan]:
    """Free slots for ``nbytes`` (four at least), or as many as there are; given back at the end."""
    runs = slots.allocate(min(max(math.ceil(nbytes / page_size), 4), slots.free_count))
    assert runs is not None
    loan = _Loan(runs, [])
    try:
        yield loan
    finally:
        if loan.kept:
            kept = {slot for first, count in loan.kept for slot in range(first, first + count)}
            runs = [run for run in cut(runs, 1) if run[0] not in kept]
        for run in runs:
            slots.free(*run)


@contextmanager
def scratch(backend: Device, nbytes: int) -> Iterator[Bytes]:
    """Memory that can be copied like that of the host tier."""
    memory = private_bytes(nbytes)
    backend.register_host(memory)
    try:
        yield memory
    finally:
        backend.unregister_host(memory)


def private_bytes(nbytes: int) -> Bytes:
    """Memory like that of the tiers (see ``memory.py``), gone with the last array that shows it: an
    error's traceback may be looked at later."""
    memory = mmap.mmap(-1, nbytes + _HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in (mmap.MADV_DONTFORK, mmap.MADV_HUGEPAGE):
        with suppress(OSError):  # unknown to this kernel
            memory.madvise(advice)
    span = np.frombuffer(memory, np.uint8)
    start = -span.ctypes.data % _HUGE_PAGE
    return span[start : start + nbytes]


def _fill(memory: Bytes) -> None:
    """Bytes that no disk can compress, no two blocks of them alike."""
    generator = np.random.default_rng()
    for start in range(0, len(memory), 1 << 16):
        block = memory[start : start + (1 << 16)]
        block[:] = np.frombuffer(generator.bytes(len(block)), np.uint8)
