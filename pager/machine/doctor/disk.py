"""The folder of the paging file: file system, O_DIRECT, room, drive, and how long an SSD lasts."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from ....planner.sizes import format_bytes
from ...disk.mounts import IN_RAM, Mount, mount_of, number_in, text_of
from ...errors import PagerError
from .finding import Finding, State, format_rate

PROBE_PAGE_BYTES = 64 << 10
_REMOTE = ("nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "fuse.sshfs", "virtiofs")
_COPY_ON_WRITE = ("btrfs", "zfs")
_RATED_WRITES = 600  # of its own size: what makers of consumer drives commonly promise (TBW)
_SHORT_DAYS = 30


def disk_findings(folder: Path) -> list[Finding]:
    """Of the folder itself; the first one is a problem if there can be no paging file."""
    place, mount = _place(folder), mount_of(folder)
    if place.state == "problem":
        return [place]
    return [place, *([_file_system(mount)] if mount else []), _room(folder)]


def _place(folder: Path) -> Finding:
    from ...disk.tier import DiskTier

    what = f"disk path {os.fspath(folder.absolute())}"
    try:
        tier = DiskTier(folder, 2 * PROBE_PAGE_BYTES, PROBE_PAGE_BYTES, io_engine="posix")
    except PagerError as error:
        return Finding(what, "problem", str(error))
    direct = tier.direct
    tier.close()
    if not direct:
        detail = "no O_DIRECT, so transfers go through the page cache, which takes memory"
        return Finding(what, "warning", detail, "use ext4 or XFS on a local NVMe drive")
    return Finding(what, "ok", "a private file can be made there, O_DIRECT works")


def _file_system(mount: Mount) -> Finding:
    detail = f"{mount.kind} on {mount.source}, {mount.options}"
    local = "name a folder on a local NVMe drive"
    if mount.kind in IN_RAM:
        reason, remedy = "; this is memory, not a disk", f"{local}, or raise host_budget instead"
    elif mount.kind in _REMOTE:
        reason, remedy = "; over the network or from a host", local
    elif mount.kind == "overlay":
        reason, remedy = "; a container's own layer", "mount a drive into the container (-v)"
    elif mount.kind in _COPY_ON_WRITE:
        reason = "; copies on write, so overwriting may need more room than was reserved"
        remedy = f"{local} with ext4 or XFS"
    else:
        return Finding("file system", "ok", detail)
    return Finding("file system", "warning", detail + reason, remedy)


def _room(folder: Path) -> Finding:
    usage = shutil.disk_usage(folder)
    detail = f"{format_bytes(usage.free)} of {format_bytes(usage.total)} free"
    if usage.free < usage.total // 20:
        remedy = "SSDs slow down when nearly full; leave a tenth of them free"
        return Finding("free space", "warning", detail, remedy)
    return Finding("free space", "ok", detail)


def endurance(folder: Path, write_bytes_per_s: float | None) -> list[Finding]:
    """How long the drive lasts if training wrote to it all day at the measured rate."""
    mount = mount_of(folder)
    if mount is None or mount.drive is None or write_bytes_per_s is None:
        return []
    drive = f"/sys/block/{mount.drive}"
    sectors = number_in(f"{drive}/size")
    if not sectors:
        return []
    size, a_day = 512 * sectors, 86400 * write_bytes_per_s
    days = _RATED_WRITES * size / a_day
    model = text_of(f"{drive}/device/model").strip()
    rotates = number_in(f"{drive}/queue/rotational") == 1
    name = f"{mount.drive}{f' ({model})' if model else ''}, {size / 1e9:.0f} GB"
    if not mount.drive.startswith("nvme") and (rotates or not model):
        kind = "is a hard disk, or a virtual one" if rotates else "is a virtual disk"
        return [Finding("SSD endurance", "ok", f"{name}: {kind}, so there is nothing to estimate")]
    detail = (
        f"{name}: writing all day at {format_rate(write_bytes_per_s)} is {a_day / 1e12:.3g} TB a "
        f"day; rated for {_RATED_WRITES} times its size, as consumer drives commonly are, it "
        f"lasts {days:.0f} days of that (an estimate: only changed pages are written)"
    )
    state: State = "ok" if days >= _SHORT_DAYS else "warning"
    remedy = (
        "raise host_budget so that less goes to disk; pager.stats()['disk_bytes_written'] says "
        "what a run really writes, and the drive's data sheet its TBW"
    )
    return [Finding("SSD endurance", state, detail, remedy if state == "warning" else "")]
