"""How fast pages move on this machine, measured now with the tiers that training uses."""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ....planner.sizes import format_bytes
from ...errors import HungDisk, PagerError
from .finding import Finding, format_rate

if TYPE_CHECKING:
    from ...disk.tier import DiskTier
    from ...disk.watch import IoWatch
    from ..calibration.measure import Calibration

_PAGE_BYTES = 2 << 20  # what rates are measured with: the default page
_ARENA_BYTES, _HOST_BYTES, _DISK_BYTES = 256 << 20, 32 << 20, 64 << 20
_LEAST_FREE_BYTES = 4 * _PAGE_BYTES
_SLOW_DISK = 200e6
_IO_SECONDS = 60.0  # for one read or write, as a Pager waits by default

_left_to_the_disk: list[object] = []  # what a call that does not return still uses


@dataclass(frozen=True)
class Measured:
    """``write_bytes_per_s``: of the disk with nothing else going on; ``None``: not measured."""

    findings: list[Finding]
    write_bytes_per_s: float | None = None


def measure_rates(folder: Path | None) -> Measured:
    """Over the link and, with a file in ``folder``, to and from the disk. One that does not answer
    for a minute is a problem, and is left alone until the process ends."""
    from ...disk.watch import IoWatch

    watch = IoWatch(_IO_SECONDS)
    try:
        tier = None if folder is None else _small_tier(folder, watch)
        rates = _calibrated(tier, watch)
    except HungDisk as error:
        remedy = "look at the drive or mount and the kernel's log (dmesg), or name another disk"
        return Measured([Finding("disk rates", "problem", f"not measured: {error}", remedy)])
    except PagerError as error:
        return Measured([Finding("transfer rates", "warning", f"not measured: {error}")])
    link = (
        f"{format_rate(rates.d2h_bytes_per_s)} out, {format_rate(rates.h2d_bytes_per_s)} in, "
        f"{rates.transfer_latency_us:.1f} µs per transfer"
    )
    findings = [Finding("link", "ok", link)]
    if folder is not None and tier is None:
        needed = format_bytes(_LEAST_FREE_BYTES)
        findings.append(
            Finding(
                "disk rates",
                "warning",
                f"not measured: less than {needed} is free",
                f"make room in {os.fspath(folder)}, or name another disk",
            )
        )
    return Measured(
        findings + _disk_rates(rates), rates.disk_write_alone_bytes_per_s if tier else None
    )


def _disk_rates(rates: Calibration) -> list[Finding]:
    if not rates.has_disk:
        return []
    alone = rates.disk_write_alone_bytes_per_s, rates.disk_read_alone_bytes_per_s
    both = rates.disk_write_bytes_per_s, rates.disk_read_bytes_per_s
    findings = []
    for what, pair in (("disk, one way at a time", alone), ("disk, both at once", both)):
        detail = f"{format_rate(pair[0])} write, {format_rate(pair[1])} read"
        if min(rate or 0.0 for rate in pair) < _SLOW_DISK:
            remedy = "training will wait for it; name a folder on an NVMe drive"
            findings.append(Finding(what, "warning", detail, remedy))
        else:
            findings.append(Finding(what, "ok", detail))
    return findings


def _small_tier(folder: Path, watch: IoWatch) -> DiskTier | None:
    """A disk tier that leaves most of what is free on the disk; ``None`` if that is no room."""
    from ...disk.tier import DiskTier
    from ...disk.watch import WatchedEngine

    nbytes = min(_DISK_BYTES, shutil.disk_usage(folder).free // 2)
    if 2 * nbytes < _LEAST_FREE_BYTES:
        return None
    return DiskTier(
        folder,
        nbytes,
        _PAGE_BYTES,
        engine=lambda engine: WatchedEngine(engine, watch),
    )


def _calibrated(disk: DiskTier | None, watch: IoWatch) -> Calibration:
    """The rates, measured now and put into the cache; ``disk`` is closed. Raises PagerError if that
    cannot be done."""
    from ...devices.choice import make_device, resolve
    from ...memory.host import HostTier
    from ..calibration.measure import calibrate

    with ExitStack() as stack:
        backend = make_device(resolve(None), _ARENA_BYTES, _PAGE_BYTES)
        stack.callback(backend.close)
        host = HostTier(_HOST_BYTES, _PAGE_BYTES, backend)
        stack.callback(host.close)
        if disk is not None:
            stack.callback(disk.close)  # first of all: it waits for whoever uses the others
        try:
            return calibrate(
                backend=backend,
                host=host,
                disk=disk,
                page_size=_PAGE_BYTES,
                fresh=True,
                watch=watch,
            )
        except HungDisk:
            _left_to_the_disk.append((backend, host, disk, stack.pop_all()))
            raise
