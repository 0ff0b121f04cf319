"""Memory: what the machine has, and what limits it: container and ulimit."""

from __future__ import annotations

import resource
from dataclasses import dataclass

from ....planner.sizes import format_bytes
from ..free_memory import container_room, meminfo
from .finding import Finding


@dataclass(frozen=True)
class Budgets:
    """Bytes that the user plans to give, 0 where not said; ``on_gpu``: where device pages are."""

    device: int = 0
    host: int = 0
    disk: int = 0
    on_gpu: bool = False

    @property
    def ram(self) -> int:
        return self.host + (0 if self.on_gpu else self.device)


def memory_findings(budgets: Budgets) -> list[Finding]:
    info = meminfo()
    return [
        *_ram(info, budgets),
        _container(budgets),
        _page_locking(budgets),
    ]


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


def _ram(info: dict[str, int], budgets: Budgets) -> list[Finding]:
    if "MemAvailable" not in info:
        return []
    free = info["MemAvailable"]
    detail = f"{format_bytes(free)} of {format_bytes(info.get('MemTotal', 0))} available"
    return [_against("RAM", detail, free, budgets)]


def _against(what: str, detail: str, free: int, budgets: Budgets) -> Finding:
    if budgets.ram <= free:
        return Finding(what, "ok", detail)
    where = "host_budget" if budgets.on_gpu else "device_budget and host_budget"
    return Finding(
        what,
        "problem",
        f"{detail}; {where} of {format_bytes(budgets.ram)} do not fit",
        f"lower {where} by {format_bytes(budgets.ram - free)} or more",
    )


def _container(budgets: Budgets) -> Finding:
    what, room = "memory limit (cgroup)", container_room()
    if room is None:
        return Finding(what, "ok", "none")
    limit, free = room
    detail = f"{format_bytes(limit)}, of which {format_bytes(free)} are free"
    finding = _against(what, detail, free, budgets)
    if finding.state == "problem":
        remedy = f"{finding.remedy}, or raise the container's limit (docker --memory)"
        return Finding(what, "problem", finding.detail, remedy)
    return finding


def _page_locking(budgets: Budgets) -> Finding:
    what = "page-locked memory"
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding(what, "ok", "no limit (ulimit -l)")
    detail = f"limited to {format_bytes(soft)} (ulimit -l)"
    if not budgets.on_gpu:
        return Finding(what, "ok", f"{detail}; without a GPU nothing is page-locked")
    if soft >= max(budgets.host, 1):
        return Finding(what, "ok", detail)
    own = "" if hard == resource.RLIM_INFINITY else " as root (limits.conf, or LimitMEMLOCK=)"
    return Finding(
        what,
        "warning",
        f"{detail}; a driver that counts what it registers would refuse host_budget",
        f"ulimit -l unlimited{own}; in a container, docker run --ulimit memlock=-1",
    )
