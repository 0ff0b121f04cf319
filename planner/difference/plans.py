"""What changed from one plan to another: what the machine model says of it, and what it moves."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import NamedTuple

from ..plan import Plan
from .change import BYTES, COUNT, US


def plan_measures(plan: Plan) -> dict[str, tuple[str, float]]:
    """Unit and value of each, by the names that thresholds use. Without a prediction only what the
    plan itself says."""
    found: dict[str, tuple[str, float]] = {}
    if (says := plan.predicted) is not None:
        found |= {
            "time": (US, says.iteration_us),
            "stall": (US, says.stall_us),
            "ideal": (US, says.ideal_us),
        }
    if plan.bound is not None:
        found["bound"] = (US, plan.bound.iteration_us)
    if says is not None:
        found |= {
            "peak-device": (BYTES, says.peak_device_bytes),
            "peak-host": (BYTES, says.peak_host_bytes),
            "peak-disk": (BYTES, says.peak_disk_bytes),
            "bytes-out": (BYTES, says.bytes_out),
            "bytes-in": (BYTES, says.bytes_in),
            "disk-written": (BYTES, says.disk_bytes_written),
            "host-out": (BYTES, says.bytes_out - says.disk_bytes_written),
        }
    for tier in ("host", "disk"):  # an "in" always moves its pages; an "out" may find a copy there
        pages = sum(m.page_count for m in plan.moves if (m.tier, m.action) == (tier, "in"))
        found[f"{tier}-in"] = (BYTES, pages * plan.page_size)
    return found | {
        "moves": (COUNT, len(plan.moves)),
        "tensors moved": (COUNT, len({move.tensor for move in plan.moves})),
        "off at the start": (BYTES, sum(run.page_count for run in plan.start) * plan.page_size),
    }


class MovesChange(NamedTuple):
    """A tensor (its number in the trace file): its moves, and the bytes of the pages they name; an
    "out" of a page whose copy is still good counts, too."""

    tensor: int
    a_moves: int
    b_moves: int
    a_bytes: int
    b_bytes: int


def moves_changes(a: Plan, b: Plan) -> list[MovesChange]:
    """One for each tensor whose moves are not the same, most changed bytes first."""
    moves: defaultdict[int, tuple[list[object], list[object]]] = defaultdict(lambda: ([], []))
    nbytes: defaultdict[int, list[int]] = defaultdict(lambda: [0, 0])
    for side, plan in enumerate((a, b)):
        for move in plan.moves:
            moves[move.tensor][side].append(move)
            if move.action != "drop":
                nbytes[move.tensor][side] += move.page_count * plan.page_size
    found = [
        MovesChange(tensor, len(mine), len(theirs), *nbytes[tensor])
        for tensor, (mine, theirs) in moves.items()
        if mine != theirs or a.page_size != b.page_size
    ]
    return sorted(
        found,
        key=lambda row: (-abs(row.b_bytes - row.a_bytes), -abs(row.b_moves - row.a_moves), row[0]),
    )


def settings(plan: Plan) -> dict[str, float | str]:
    """What the plan was made for."""
    return {
        "policy": plan.policy,
        "page size": plan.page_size,
        "device budget": plan.device_bytes,
        "host budget": plan.host_bytes,
        "disk budget": plan.disk_bytes,
    }


def same_plan(a: Plan, b: Plan) -> bool:
    """Whether they do the same and promise the same; settings of the search do not count."""
    return replace(a, extra={}) == replace(b, extra={})
