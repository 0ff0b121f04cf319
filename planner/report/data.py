"""A timeline as the report's header and columns."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..hardware import Hardware
from ..lifetimes import live_pages
from ..tier_usage import tier_usage
from ..timeline import PLACES, Curve, Timeline, device_curve, telling_points
from ..trace import KINDS, WRITE, Floats
from .facts import CHANNELS, facts
from .reduce import Bars, fewer_bars
from .rows import Map, residency_map, span_columns
from .tensors import Columns, tensor_columns

CURVE_POINTS = 20_000
MOST_BARS = 150_000
NS = 1e-3
LAST_TICK = 2**32 - 1


class Ticks:
    """Times as u32: nanoseconds, or what is needed for the longest time to fit."""

    def __init__(self, longest_us: float) -> None:
        self.tick_us = max(NS, longest_us / LAST_TICK)

    def __call__(self, us: Floats) -> npt.NDArray[np.uint32]:
        return np.clip(np.rint(us / self.tick_us), 0, LAST_TICK).astype(np.uint32)


def report_data(
    line: Timeline,
    hardware: Hardware | None = None,
    *,
    files: dict[str, str] | None = None,
    comparison: dict[str, Any] | None = None,
    remedies: list[dict[str, Any]] | None = None,
) -> tuple[dict[str, Any], Columns]:
    """Header and columns for :func:`payload.encode`.

    ``files``: names to show, by what they are (trace, plan). ``comparison``: as
    ``commands.compare.compared`` gives it; the seconds that planning took are left out, so that
    equal input gives an equal report. ``remedies``: as ``remedies.remedies`` gives them.
    """
    longest = max([line.iteration_us, *(transfer.end_us for transfer in line.transfers)])
    ticks = Ticks(longest)
    found, curve = residency_map(line), device_curve(line)
    columns: Columns = {
        **_ops(line, ticks),
        **_stalls(line),
        **_transfers(line, ticks),
        **tensor_columns(line),
        **span_columns(found, ticks),
    }
    curve_part, curve_header = _curve(line, curve, ticks)
    tier_part, tier_header = _tiers(line, ticks)
    columns |= curve_part | tier_part
    header = {
        "facts": facts(line, hardware),
        "files": files or {},
        "comparison": _comparison(comparison),
        "remedies": remedies or [],
        "tiers": tier_header,
        "tick_us": ticks.tick_us,
        "kinds": KINDS,
        "places": PLACES,
        "lanes": CHANNELS,
        "curve": curve_header,
        "rest": _rest(line, found),
        "op_names": list(dict.fromkeys(line.trace.op_names)),
        "tensor_names": line.trace.tensor_names,
    }
    return header, columns


def _ops(line: Timeline, ticks: Ticks) -> Columns:
    index: dict[str, int] = {}
    names = [index.setdefault(name, len(index)) for name in line.trace.op_names]
    return {
        "op_name": np.array(names, np.uint32),
        "op_start": ticks(line.op_start_us),
        "op_end": ticks(line.op_end_us),
    }


def _stalls(line: Timeline) -> Columns:
    """One row per stall, in the order of ops; channels as their place in ``CHANNELS``."""
    stalls = sorted(line.stalls, key=lambda stall: stall.op)
    return {
        "stall_op": np.array([stall.op for stall in stalls], np.uint32),
        "stall_us": np.array([stall.us for stall in stalls], np.float64),
        "stall_tensor": np.array([stall.tensor for stall in stalls], np.int32),
        "stall_channel": np.array([CHANNELS.index(stall.channel) for stall in stalls], np.uint8),
    }


def _transfers(line: Timeline, ticks: Ticks) -> Columns:
    moves = line.plan.moves if line.plan else ()
    table = [
        (
            CHANNELS.index(f"{t.tier}-{'out' if t.is_out else 'in'}"),
            t.begin_us,
            t.end_us,
            t.tensor,
            t.first_page,
            t.page_count,
            moves[t.move].issue_op,
            t.arrived,
        )
        for t in line.transfers
        if t.end_us > t.begin_us
    ]
    table += _runs(line)
    table.sort()
    parts = list(zip(*table)) or [()] * len(Bars._fields)
    kinds = (np.int64, np.float64, np.float64, np.int64, np.int64, np.int64, np.int64, np.bool_)
    bars = fewer_bars(Bars(*(np.array(p, k) for p, k in zip(parts, kinds))), MOST_BARS)
    return {
        "move_channel": bars.channel.astype(np.uint8),
        "move_begin": ticks(bars.begin_us),
        "move_end": ticks(bars.end_us),
        "move_tensor": bars.tensor.astype(np.int32),
        "move_first": bars.first_page.astype(np.uint32),
        "move_pages": bars.pages.astype(np.uint32),
        "move_op": bars.op.astype(np.uint32),
        "move_arrived": bars.arrived.astype(np.uint8),
    }


def _runs(line: Timeline) -> list[tuple[Any, ...]]:
    """The host's steps and what runs again, as bars of lanes of their own."""
    if line.simulation is None:
        return []
    trace, offsets = line.trace, line.trace.access_offsets
    found = []
    for lane, runs in (
        ("host-step", line.simulation.host_runs),
        ("run-again", line.simulation.reruns),
    ):
        for run in runs:
            rows = range(offsets[run.op], offsets[run.op + 1])
            written = [row for row in rows if trace.access_mode[row] & WRITE]
            tensor = int(trace.access_tensor[written[0]]) if written else 0
            if run.end_us > run.begin_us:
                place = CHANNELS.index(lane)
                found.append((place, run.begin_us, run.end_us, tensor, 0, 1, run.op, True))
    return found


def _curve(line: Timeline, curve: Curve, ticks: Ticks) -> tuple[Columns, dict[str, Any]]:
    """Device memory over time in pages per kind, and its peak."""
    total = curve.total
    peak = int(total.argmax()) if len(total) else 0
    points = telling_points(curve.time_us, total, line.iteration_us, CURVE_POINTS)
    columns: Columns = {"curve_time": ticks(curve.time_us[points])}
    for number, level in enumerate(curve.by_kind.values()):
        columns[f"curve_{number}"] = (level[points] // line.page_size).astype(np.uint32)
    return columns, {
        "kinds": list(curve.by_kind),
        "points": len(curve.time_us),
        "peak_bytes": int(total[peak]) if len(total) else 0,
        "peak_us": float(curve.time_us[peak]) if len(total) else 0.0,
    }


def _tiers(line: Timeline, ticks: Ticks) -> tuple[Columns, list[dict[str, Any]]]:
    """Host and disk over time in pages, where the plan uses them; and, in pages by op, what is live
    in the run without a limit."""
    if line.plan is None:
        return {}, []
    live = live_pages(line.trace, line.page_size)
    columns: Columns = {"unlimited": live.astype(np.uint32)}
    header = []
    for tier, (time_us, level) in tier_usage(line).items():
        points = telling_points(time_us, level, line.iteration_us, CURVE_POINTS)
        columns[f"{tier}_time"] = ticks(time_us[points])
        columns[f"{tier}_pages"] = (level[points] // line.page_size).astype(np.uint32)
        header.append({"name": tier, "peak_bytes": int(level.max(initial=0))})
    return columns, header


def _rest(line: Timeline, found: Map) -> dict[str, int]:
    """How many tensors have no row of their own, and their bytes."""
    others = np.ones(line.trace.tensors, np.bool_)
    others[found.tensors] = False
    sizes = line.trace.tensor_bytes[others]
    return {"tensors": int(others.sum()), "bytes": int(sizes.sum())}


def _comparison(comparison: dict[str, Any] | None) -> dict[str, Any] | None:
    if comparison is None:
        return None
    rows = [
        {name: value for name, value in row.items() if name != "plan_seconds"}
        for row in comparison["policies"]
    ]
    return {**comparison, "policies": rows}
