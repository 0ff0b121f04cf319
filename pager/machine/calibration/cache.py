"""Measured rates, kept for a week in one small file per machine, device, disk and page size.

They are in ``$XDG_CACHE_HOME/tensorpager`` (``~/.cache/tensorpager``), private to the user.
``TENSORPAGER_CALIBRATION=off`` keeps them out of there. A file that is not what was written here is
as good as none, and a folder that cannot be had means no cache; nothing raises.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import stat
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .... import __version__
from ...devices.allocator_build import private_folder
from ...disk.mounts import mount_of, text_of
from ..ranks import ranks_on_node

if TYPE_CHECKING:
    import torch

    from ...disk.tier import DiskTier

MAX_AGE_S = 7 * 24 * 3600
_MAX_FILE_BYTES = 1 << 16

Key = dict[str, str | int | None]


def machine_key(device: torch.device, disk: DiskTier | None, page_size: int) -> Key:
    """All that the rates depend on and that stays the same when the machine starts again."""
    key: Key = {
        "tensorpager": __version__,
        "host": platform.node(),
        "machine": text_of("/etc/machine-id").partition("\n")[0].strip(),
        "device": _cpu_name() if device.type == "cpu" else _accelerator_name(device),
        "page_size": page_size,
    }
    if ranks_on_node() > 1:  # each has a part of these rates
        key["ranks"] = ranks_on_node()
    if disk is not None:
        mount = mount_of(disk.directory)
        key["disk_device"] = os.stat(disk.directory).st_dev
        key["disk_file_system"] = "" if mount is None else f"{mount.kind} {mount.source}"
        key |= {"disk_direct": int(disk.direct), "disk_engine": disk.engine.name}
        key["disk_threads"] = disk.threads
    return key


def load(key: Key) -> dict[str, Any] | None:
    """What was stored under ``key`` within a week; ``None`` if nothing can be trusted to be it.

    The values are whatever the file says: the caller checks them.
    """
    folder = _folder(make=False)
    if folder is None:
        return None
    try:
        content = json.loads(_read_own(folder / _file_name(key)))
        values, age_s = content["values"], time.time() - content["measured_at"]
        fits = content["key"] == key and 0 <= age_s <= MAX_AGE_S and isinstance(values, dict)
    except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None
    return values if fits else None


def store(key: Key, values: dict[str, Any]) -> None:
    """Puts ``values`` (numbers by name) in place of what there was under ``key``; whole, or not
    at all."""
    folder = _folder(make=True)
    if folder is None:
        return
    content = {"key": key, "measured_at": time.time(), "values": values}
    part = None
    try:
        descriptor, part = tempfile.mkstemp(prefix=".calibration-", dir=folder)  # mode 0600
        with os.fdopen(descriptor, "w") as file:
            json.dump(content, file, indent=2)
        os.replace(part, folder / _file_name(key))
    except OSError:
        if part is not None:
            with contextlib.suppress(OSError):
                os.unlink(part)


def _file_name(key: Key) -> str:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return f"calibration-{digest[:16]}.json"


def _folder(*, make: bool) -> Path | None:
    """The cache's folder, if it can be had."""
    if os.environ.get("TENSORPAGER_CALIBRATION", "").lower() == "off":
        return None
    try:
        return private_folder(make=make)
    except OSError:
        return None


def _read_own(path: Path) -> bytes:
    """A small regular file of this user's; OSError for anything else."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise PermissionError(f"{path} is not a file of this user")
        content = file.read(_MAX_FILE_BYTES + 1)
    if len(content) > _MAX_FILE_BYTES:
        raise OSError(f"{path} is too large")
    return content


def _accelerator_name(device: torch.device) -> str:
    import torch

    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return device.type if name is None else f"{device.type} {name(device)}"


def _cpu_name() -> str:
    found = re.search(r"^model name\s*:\s*(.*)$", text_of("/proc/cpuinfo"), re.MULTILINE)
    return found[1].strip() if found else platform.machine()
