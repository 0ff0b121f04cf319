"""Memory: what the machine has, and what limits it: container and ulimit."""

from __future__ import annotations

import resource

from ....planner.sizes import format_bytes
from ..free_memory import container_room, meminfo
from .finding import Finding


def memory_findings(*, on_gpu: bool) -> list[Finding]:
    """``on_gpu``: where device pages are."""
    info, room = meminfo(), container_room()
    found = []
    if "MemAvailable" in info:
        available, total = info["MemAvailable"], info.get("MemTotal", 0)
        detail = f"{format_bytes(available)} of {format_bytes(total)} available"
        found.append(Finding("RAM", "ok", detail))
    limit = "none"
    if room is not None:
        limit = f"{format_bytes(room[0])}, of which {format_bytes(room[1])} are free"
    return [*found, Finding("memory limit (cgroup)", "ok", limit), _page_locking(on_gpu)]


def allocator_finding() -> Finding:
    """Whether dense memory on the CPU has an allocator of our own; builds it where that is possible
    and has not been done."""
    from ...devices.allocator_build import NotBuiltError, is_off, library

    what = "dense memory on the CPU"
    try:
        library(again=True)
    except NotBuiltError as error:
        why = f"measured with PyTorch's profiler, and not capped: {error}"
        if is_off():
            return Finding(what, "ok", why)
        return Finding(what, "warning", why, "install a C++ compiler (apt install g++)")
    return Finding(what, "ok", "counted, capped and reused by our own allocator")


def _page_locking(on_gpu: bool) -> Finding:
    what = "page-locked memory"
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding(what, "ok", "no limit (ulimit -l)")
    detail = f"limited to {format_bytes(soft)} (ulimit -l)"
    if not on_gpu:
        return Finding(what, "ok", f"{detail}; without a GPU nothing is page-locked")
    own = "" if hard == resource.RLIM_INFINITY else " as root (limits.conf, or LimitMEMLOCK=)"
    return Finding(
        what,
        "warning",
        f"{detail}; a driver that counts what it registers would refuse host_budget",
        f"ulimit -l unlimited{own}; in a container, docker run --ulimit memlock=-1",
    )
