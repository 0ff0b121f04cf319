"""What the head of the report says: sizes, speeds, and what limits the iteration, in words."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import asdict
from typing import Any

from ..hardware import Hardware
from ..sizes import DAY_SECONDS, format_bytes, format_us, wear
from ..timeline import Timeline

# As lanes, from top to bottom. A stall may be for a host step, which is no channel of the link.
CHANNELS = ("host-out", "disk-out", "disk-in", "host-in", "host-step", "run-again")
WAITS_FOR = {
    "host-in": "pages on their way from host memory",
    "disk-in": "pages on their way from the disk",
    "host-out": "free frames, which pages on their way to host memory still hold",
    "disk-out": "free frames, which pages on their way to the disk still hold",
    "host-step": "steps of the host that have not ended",
}
SAME = 1e-3  # two runs of the machine model agree; the model itself settles within 1e-4


def facts(line: Timeline, hardware: Hardware | None) -> dict[str, Any]:
    """Everything that is not about single ops, tensors or transfers; without limit is ``null``."""
    trace, plan = line.trace, line.plan
    predicted = line.simulation.predicted if line.simulation else None
    return {
        "source": trace.source,
        "device": trace.device,
        "ops": trace.ops,
        "tensors": trace.tensors,
        "persistent_tensors": int(trace.tensor_persistent.sum()),
        "page_size": line.page_size,
        "ideal_us": trace.ideal_us,
        "iteration_us": line.iteration_us,
        "hardware": _hardware(hardware),
        "policy": plan.policy if plan else None,
        "moves": len(plan.moves) if plan else None,
        "predicted": asdict(predicted) if predicted else None,
        "bound_us": plan_bound_us(line),
        "channels": _channels(line),
        "limit": limit(line),
        "wear": _wear(line),
        "notes": _notes(line),
    }


def plan_bound_us(line: Timeline) -> float | None:
    """The bound that came with the plan, if the machine is the one it is for, as far as the
    predicted time tells."""
    if line.plan is None or line.plan.bound is None or not _as_planned(line):
        return None
    return line.plan.bound.iteration_us


def limit(line: Timeline) -> str:
    """What the ops wait for most, in a sentence or two."""
    if line.plan is None:
        return ""
    waits: dict[tuple[str, bool], float] = defaultdict(float)
    for stall in line.stalls:
        waits[stall.channel, stall.tensor < 0] += stall.us
    total = sum(waits.values())
    if not total:
        return "No op waits: the iteration takes as long as if everything were on the device."
    (channel, _), us = max(waits.items(), key=lambda item: item[1])
    busy = next((c["busy_share"] for c in _channels(line) if c["name"] == channel), 0.0)
    return (
        f"Ops wait {format_us(total)} in all, {_percent(total / line.iteration_us)} of the "
        f"iteration; {_percent(us / total)} of that for {WAITS_FOR[channel]} "
        f"({channel}, busy {_percent(busy)} of the time)."
    )


def _percent(share: float) -> str:
    if share < 1e-3:
        return "less than 0.1 %"
    return f"{100 * share:.2g} %" if share < 0.995 else f"{100 * min(share, 1.0):.0f} %"


def _wear(line: Timeline) -> str:
    """What the plan does to a drive, were it followed day and night."""
    predicted = line.simulation.predicted if line.simulation else None
    if predicted is None or not predicted.iteration_us:
        return ""
    return wear(predicted.disk_bytes_written / predicted.iteration_us * 1e6 * DAY_SECONDS)


def _hardware(hardware: Hardware | None) -> dict[str, Any] | None:
    if hardware is None:
        return None
    return {
        name: None if isinstance(value, float) and math.isinf(value) else value
        for name, value in asdict(hardware).items()
    }


def _channels(line: Timeline) -> list[dict[str, Any]]:
    """Those that carry something: bytes, share of the iteration, and who waits for them."""
    if line.plan is None:
        return []
    pages: dict[str, int] = defaultdict(int)
    busy: dict[str, float] = defaultdict(float)
    for transfer in line.transfers:
        name = f"{transfer.tier}-{'out' if transfer.is_out else 'in'}"
        pages[name] += transfer.page_count
        busy[name] += transfer.end_us - transfer.begin_us
    waits: dict[str, float] = defaultdict(float)
    for stall in line.stalls:
        waits[stall.channel] += stall.us
    if line.simulation is not None:
        busy["host-step"] = sum(run.end_us - run.begin_us for run in line.simulation.host_runs)
        busy["run-again"] = sum(run.end_us - run.begin_us for run in line.simulation.reruns)
    length = line.iteration_us or 1.0
    return [
        {
            "name": name,
            "bytes": pages[name] * line.page_size,
            "busy_share": min(1.0, busy[name] / length),
            "stall_us": waits[name],
        }
        for name in CHANNELS
        if pages[name] or waits[name] or busy[name]
    ]


def _as_planned(line: Timeline) -> bool:
    plan, now = line.plan, line.simulation.predicted if line.simulation else None
    if plan is None or plan.predicted is None or now is None or line.hardware is None:
        return False
    same_sizes = plan.device_bytes == line.hardware.device_bytes
    return same_sizes and math.isclose(
        plan.predicted.iteration_us, now.iteration_us, rel_tol=SAME, abs_tol=1e-3
    )


def _notes(line: Timeline) -> list[str]:
    plan = line.plan
    if plan is None or plan.predicted is None or line.hardware is None or _as_planned(line):
        return []
    was, now = (
        "unlimited" if math.isinf(size) else format_bytes(size)
        for size in (plan.device_bytes, line.hardware.device_bytes)
    )
    assert line.simulation is not None
    assert line.simulation.predicted is not None
    return [
        f"This is not the machine that the plan was made for: device {was} there, {now} here; "
        f"{format_us(plan.predicted.iteration_us)} predicted there, "
        f"{format_us(line.simulation.predicted.iteration_us)} here. Its bound is left out."
    ]
