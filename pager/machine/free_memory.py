"""What memory is free, and what budgets are made of it where none is given."""

from __future__ import annotations

import os
import resource
from typing import NamedTuple

import torch

from ...planner.sizes import format_bytes
from ..disk.mounts import number_in, text_of

_NO_LIMIT = 1 << 60
_CGROUPS = "/sys/fs/cgroup"
_OF_DEVICE = 0.9  # of what an accelerator has free; the rest is for its driver and libraries
_OF_CPU = 0.75  # of the memory that is free, where it is the device
_OF_HOST = 0.5


class Budgets(NamedTuple):
    """Bytes, and in words what they were taken of."""

    device: int
    host: int
    words: str


def free_of_device(device: torch.device) -> int:
    """Bytes that nobody uses now. Raises ``ValueError`` where that is not known."""
    if device.type == "cpu":
        return free_of_host()
    try:
        return int(torch.accelerator.get_memory_info(device)[0])
    except (AttributeError, RuntimeError) as error:
        raise ValueError(
            f"PyTorch does not say how much memory {device} has free ({error}); give device_budget "
            "in bytes"
        ) from error


def free_of_host() -> int:
    """Bytes of memory that can be had: of the machine, and of the control groups around this
    process."""
    known = [room[1] for room in [container_room()] if room is not None]
    return min([*known, meminfo().get("MemAvailable", 0)])


def default_budgets(device: torch.device) -> Budgets:
    """Where the user gives none."""
    free = free_of_device(device)
    if device.type == "cpu":
        taken = int(free * _OF_CPU)
        return Budgets(
            taken, 0,
            f"{format_bytes(taken)} on the CPU, {_OF_CPU:.0%} of the {format_bytes(free)} that "
            "are free; nothing below it",
        )  # fmt: skip
    taken, on_host = int(free * _OF_DEVICE), free_of_host()
    host = int(on_host * _OF_HOST)
    words = f"{format_bytes(host)} of host memory, {_OF_HOST:.0%} of the {format_bytes(on_host)}"
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit != resource.RLIM_INFINITY and limit < host and os.geteuid() != 0:
        host = limit
        words = f"{format_bytes(host)} of host memory, all that may be page-locked (ulimit -l), of"
    return Budgets(
        taken, host,
        f"{format_bytes(taken)} on {device}, {_OF_DEVICE:.0%} of the {format_bytes(free)} that "
        f"are free, and {words} that are free; no disk",
    )  # fmt: skip


# -- what the system says --------------------------------------------------------------------------
def meminfo() -> dict[str, int]:
    """/proc/meminfo in bytes."""
    found = {}
    for line in text_of("/proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        value = rest.split()
        if value and value[0].isdigit():
            found[name] = int(value[0]) << 10
    return found


def container_room() -> tuple[int, int] | None:
    """The least of the memory limits of this control group and those around it, and what is free
    of it; ``None`` where there is no limit."""
    found = [room for folder, kind in _groups() if (room := _room(folder, kind)) is not None]
    return min(found, key=lambda pair: pair[1]) if found else None


def _groups() -> list[tuple[str, str]]:
    """Folders of this process's control groups of memory and their parents, with "v1" or "v2"."""
    folders = []
    for line in text_of("/proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            bases, kind = [_CGROUPS, f"{_CGROUPS}/unified"], "v2"
        elif "memory" in controllers.split(","):
            bases, kind = [f"{_CGROUPS}/memory"], "v1"
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for base in bases:
            folders += [(os.path.join(base, *parts[:n]), kind) for n in range(len(parts) + 1)]
    return folders


def _room(folder: str, kind: str) -> tuple[int, int] | None:
    """Limit and what is free of it, cached files counted as free; ``None`` without a limit."""
    names = (
        ("memory.max", "memory.current", "inactive_file")
        if kind == "v2"
        else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    )
    limit, used = (number_in(f"{folder}/{name}") for name in names[:2])
    if limit is None or limit >= _NO_LIMIT:
        return None
    cached = 0
    for line in text_of(f"{folder}/memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name == names[2] and value.isdigit():
            cached = int(value)
    return limit, max(0, limit - max(0, (used or 0) - cached))
