"""One tensor's life, as numbers: its uses, its idle periods, what a plan does with it.

Times are in µs since the iteration's begin, of the plan's steady state if there is a plan, else as
if nothing waited. A move that goes on into the next iteration ends after this one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..hardware import Hardware
from ..lifetimes import gap_bytes, gaps, idle_us
from ..timeline import DEVICE, Timeline
from ..trace import ACCESS_NAMES, READ, WRITE, Trace
from .show_groups import module_of
from .show_link import hideable_bytes
from .show_names import shared_names


def life(
    line: Timeline, tensor: int, page_size: int, hardware: Hardware | None = None
) -> dict[str, Any]:
    """Everything ``show --tensor --json`` prints of ``tensor`` (index)."""
    trace = line.trace
    name, kind = trace.tensor_names[tensor], trace.tensor_kinds[tensor]
    persistent = bool(trace.tensor_persistent[tensor])
    rows = np.flatnonzero(trace.access_tensor == tensor)
    mode = trace.access_mode[rows]
    begin, end = line.lifetime_us(tensor)
    return {
        "tensor": int(trace.tensor_ids[tensor]),
        "name": name,
        "shared_with": shared_names(trace, tensor)[1:],
        "kind": kind,
        "module": module_of(name, kind),
        "nbytes": int(trace.tensor_bytes[tensor]),
        "page_size": page_size,
        "pages": int(trace.pages(page_size)[tensor]),
        "persistent": persistent,
        "from_op": 0 if persistent else int(trace.first_op[tensor]),
        "to_op": trace.ops - 1 if persistent else int(trace.last_op[tensor]),
        "from_us": begin,
        "to_us": end,
        "iteration_us": line.iteration_us,
        "reads": int(((mode & READ) != 0).sum()),
        "writes": int(((mode & WRITE) != 0).sum()),
        "accesses": _accesses(line, rows, page_size),
        "gaps": _gaps(line, tensor, page_size, hardware),
        "plan": None if line.plan is None else _planned(line, tensor),
    }


def _tensors_of(trace: Trace, op: int, mode: int = READ | WRITE) -> set[int]:
    rows = slice(*trace.access_offsets[op : op + 2])
    return set(trace.access_tensor[rows][(trace.access_mode[rows] & mode) != 0].tolist())


def _made_again(line: Timeline, tensor: int) -> list[dict[str, Any]]:
    """When ops that run again write it."""
    reruns = [] if line.simulation is None else line.simulation.reruns
    return [
        _when(line, run) | {"before_op": run.before_op}
        for run in reruns
        if tensor in _tensors_of(line.trace, run.op, WRITE)
    ]


def _host_steps(line: Timeline, tensor: int) -> list[dict[str, Any]]:
    """When the host steps it, or uses it for a step."""
    runs = [] if line.simulation is None else line.simulation.host_runs
    return [_when(line, run) for run in runs if tensor in _tensors_of(line.trace, run.op)]


def _when(line: Timeline, run: Any) -> dict[str, Any]:
    """What runs, and when: of an op that runs again, or of a step of the host."""
    return {
        "op": run.op,
        "op_name": line.trace.op_names[run.op],
        "begin_us": run.begin_us,
        "end_us": run.end_us,
    }


def _accesses(line: Timeline, rows: Any, page_size: int) -> list[dict[str, Any]]:
    trace = line.trace
    first, last = trace.access_ranges(page_size)
    return [
        {
            "op": op,
            "op_name": trace.op_names[op],
            "access": ACCESS_NAMES[int(trace.access_mode[row])],
            "first_page": int(first[row]),
            "page_count": int(last[row] - first[row]),
            "start_us": float(line.op_start_us[op]),
            "end_us": float(line.op_end_us[op]),
        }
        for row in rows.tolist()
        for op in (int(trace.access_op[row]),)
    ]


def _gaps(
    line: Timeline, tensor: int, page_size: int, hardware: Hardware | None
) -> list[dict[str, Any]]:
    """Idle periods of at least one op, in the order of time; ``to_op`` of the one around the
    iteration's end is of the next iteration if it is not above ``from_op``."""
    trace = line.trace
    found = gaps(trace, page_size)
    found = found.pick(found.tensor == tensor)
    found = found.pick(np.lexsort((found.first_page, found.begin)))  # type: ignore[arg-type]
    size = gap_bytes(trace, found, page_size)
    length = idle_us(trace, found, line.op_start_us, line.op_end_us, line.iteration_us)
    hidden = None if hardware is None else hideable_bytes(size, found.pages, length, hardware)
    return [
        {
            "from_op": begin,
            "to_op": int(found.end[gap]) % trace.ops,
            "first_page": int(found.first_page[gap]),
            "page_count": int(found.pages[gap]),
            "begin_us": float(line.op_end_us[begin]),
            "idle_us": float(length[gap]),
            "bytes": int(size[gap]),
            "hideable_bytes": None if hidden is None else int(hidden[gap]),
        }
        for gap, begin in enumerate(found.begin.tolist())
    ]


def _planned(line: Timeline, tensor: int) -> dict[str, Any]:
    assert line.plan is not None
    trace = line.trace
    times: dict[int, list[tuple[float, float]]] = {}
    for part in line.transfers:
        if part.tensor == tensor and part.arrived:
            times.setdefault(part.move, []).append((part.begin_us, part.end_us))
    moves = []
    for index, move in enumerate(line.plan.moves):
        if move.tensor != trace.tensor_ids[tensor]:
            continue
        parts = times.get(index)
        moves.append(
            {
                "action": move.action,
                "tier": move.tier,
                "first_page": move.first_page,
                "page_count": move.page_count,
                "issue_op": move.issue_op,
                "queued_us": line.queued_us(move),
                "begin_us": min(begin for begin, _ in parts) if parts else None,
                "end_us": max(end for _, end in parts) if parts else None,
            }
        )
    spans = line.residency(tensor)
    there = sum((span.end_us - span.begin_us) * span.page_count for span in spans)
    here = sum((s.end_us - s.begin_us) * s.page_count for s in spans if s.place == DEVICE)
    return {
        "policy": line.plan.policy,
        "moves": moves,
        "residency": [
            {
                "place": span.place,
                "first_page": span.first_page,
                "page_count": span.page_count,
                "begin_us": span.begin_us,
                "end_us": span.end_us,
            }
            for span in spans
        ],
        "share_of_time_on_device": here / there if there else 1.0,
        "stalls": [
            {
                "op": stall.op,
                "op_name": trace.op_names[stall.op],
                "us": stall.us,
                "channel": stall.channel,
            }
            for stall in line.stalls
            if stall.tensor == tensor
        ],
        "made_again": _made_again(line, tensor),
        "host_steps": _host_steps(line, tensor),
        "deferred": [
            {"op": op, "before_op": before}
            for op, before in line.plan.deferred
            if tensor in _tensors_of(trace, op)
        ],
        "stall_us": sum(stall.us for stall in line.stalls if stall.tensor == tensor),
    }
