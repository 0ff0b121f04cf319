"""What would make a plan's iteration faster: other machines, each planned for and simulated.

The plans are quick ones, so that a page takes seconds: a full search may reach a little more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..hardware import Hardware
from ..sizes import format_bytes
from ..sweep import Task, evaluate
from ..timeline import Timeline

MOST_OPS = 5000  # of a trace for which plans are made in some seconds
LEAST_WAITING = 2e-3  # of the iteration: nobody buys memory for less
LEAST_GAIN = 0.1  # in points of the ideal speed


def remedies(
    line: Timeline, progress: Callable[[str, float], None] | None = None
) -> list[dict[str, Any]]:
    """The three that help most, the best first: what to change, and the speed that a plan has then.
    None where ops hardly wait, or there are too many of them."""
    if line.plan is None or line.hardware is None or line.simulation is None:
        return []
    now = line.simulation.predicted
    if now is None or now.stall_us < LEAST_WAITING * line.iteration_us or line.trace.ops > MOST_OPS:
        return []
    found: list[dict[str, Any]] = []
    changes = [*_choices(line, line.hardware), *_changes(line, line.hardware)]
    for number, (what, tasks) in enumerate(changes):
        if progress is not None:
            progress(f"with {what}", number / len(changes))
        outcomes = [evaluate(line.trace, task).predicted for task in tasks]
        percent = max((one.percent_of_ideal for one in outcomes if one is not None), default=0.0)
        if percent - now.percent_of_ideal >= LEAST_GAIN:
            found.append({"what": what, "percent_of_ideal": percent})
    return sorted(found, key=lambda one: -float(one["percent_of_ideal"]))[:3]


def _choices(line: Timeline, hardware: Hardware) -> list[tuple[str, list[Task]]]:
    """What costs nothing: what the trace permits, and a plan that only moves does not do."""
    assert line.plan is not None
    trace = line.trace
    if line.plan.has_choices:
        return []
    possible = {
        "recompute": ("ops that run again", trace.op_rerun.any()),
        "host-step": ("steps on the host", not np.isnan(trace.op_host_us).all()),
    }
    return [
        (f"{what} (plan --allow {name})", [Task("joint", hardware, True, allow=("move", name))])
        for name, (what, permitted) in possible.items()
        if permitted
    ]


def _changes(line: Timeline, hardware: Hardware) -> list[tuple[str, list[Task]]]:
    """More of what there is, in words and as a new plan and the one that there is on it."""
    assert line.plan is not None
    policy = "joint" if line.plan.has_choices else "lp"
    return [
        (what, [Task(policy, machine, True), Task("", machine, plan=line.plan)])
        for what, machine in _machines(line, hardware)
    ]


def _machines(line: Timeline, hardware: Hardware) -> list[tuple[str, Hardware]]:
    assert line.simulation is not None
    assert line.simulation.predicted is not None
    size, peak = hardware.page_size, line.simulation.predicted.peak_disk_bytes
    found = []
    if hardware.device_pages != float("inf"):
        device = int(hardware.device_pages * 5 // 4) * size
        found.append(
            (
                f"{format_bytes(device)} on the device, a quarter more",
                hardware.with_(device_bytes=device),
            )
        )
    if peak and hardware.host_pages != float("inf"):
        host = int(hardware.host_pages) * size + peak
        found.append(
            (
                f"{format_bytes(host)} of host memory, and no need of the disk",
                hardware.with_(host_bytes=host),
            )
        )
    if peak:
        rates = {
            "disk_read_bytes_per_s": 2 * hardware.disk_read_bytes_per_s,
            "disk_write_bytes_per_s": 2 * hardware.disk_write_bytes_per_s,
        }
        found.append(("a disk twice as fast", hardware.with_(**rates)))
    if line.simulation.predicted.peak_host_bytes:
        rates = {
            "d2h_bytes_per_s": 2 * hardware.d2h_bytes_per_s,
            "h2d_bytes_per_s": 2 * hardware.h2d_bytes_per_s,
        }
        found.append(("a link twice as fast", hardware.with_(**rates)))
    return found
