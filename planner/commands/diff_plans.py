"""``tensorpager diff`` of two plans."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..difference.change import BYTES, Change, changes, most_changed_first
from ..errors import PlanError
from ..sizes import format_bytes
from .checks import require_same_trace
from .diff_tables import Report, change_json, delta, measure_table, pair
from .tables import pairs, short, table
from .thresholds import PLANS

if TYPE_CHECKING:
    from ..difference.plans import MovesChange
    from ..plan import Plan


def diff_plans(path_a: Path, path_b: Path, top: int, trace_path: Path | None) -> Report:
    from ..difference.plans import moves_changes, plan_measures, same_plan, settings
    from ..plan import read_plan

    a, b = read_plan(path_a), read_plan(path_b)
    names = _names(trace_path, [(a, path_a), (b, path_b)])
    both = plan_measures(a), plan_measures(b)
    found, moves = changes(*both), moves_changes(a, b)
    one, other = settings(a), settings(b)
    content = {
        "kind": PLANS,
        "identical": same_plan(a, b),
        "a": str(path_a),
        "b": str(path_b),
        "settings": {
            name: {"a": _json_size(one[name]), "b": _json_size(other[name])} for name in one
        },
        "same_trace": a.trace_sha256 == b.trace_sha256,
        "measures": [change_json(change) for change in found],
        "tensors": {
            "changed": len(moves),
            "changed_most": [
                {**row._asdict(), "name": names.get(row.tensor)} for row in moves[:top]
            ],
        },
    }

    def value(metric: str) -> tuple[float, float]:
        for measured, path in zip(both, (path_a, path_b)):
            if metric not in measured:
                raise PlanError(
                    f"{path} has no prediction, so no '{metric}' to check; plan again with "
                    "'tensorpager plan'"
                )
        return both[0][metric][1], both[1][metric][1]

    if content["identical"]:
        same = f"{path_a} and {path_b} are the same plan: {len(a.moves)} moves by {a.policy}."
        return Report(content, [same], value)
    parts: list[Any] = [pairs([("A", str(path_a)), ("B", str(path_b)), *_setting_rows(one, other)])]
    if not content["same_trace"]:
        parts += ["", "They are for different traces: tensors are compared by number only."]
    parts += [
        "",
        *measure_table(found, most_changed_first(found)),
        *_move_table(moves, names, top),
    ]
    return Report(content, parts, value)


def _names(trace_path: Path | None, plans: Sequence[tuple[Plan, Path]]) -> dict[int, str]:
    """Of tensors, by their number; raises ``PlanError`` if a plan is for another trace."""
    if trace_path is None:
        return {}
    from ..trace_file import read_trace

    trace = read_trace(trace_path)
    for plan, path in plans:
        require_same_trace(plan, path, trace, trace_path)
    return {int(number): trace.name_of(i) for i, number in enumerate(trace.tensor_ids)}


def _setting_rows(
    one: dict[str, float | str], other: dict[str, float | str]
) -> list[tuple[str, str]]:
    return [(name, pair(_setting(one[name]), _setting(other[name]))) for name in one]


def _setting(value: float | str) -> str:
    if isinstance(value, str):
        return short(value, 40)
    return "no limit" if math.isinf(value) else format_bytes(value)


def _json_size(value: float | str) -> float | str:
    return "inf" if value == math.inf else value


def _move_table(moves: list[MovesChange], names: dict[int, str], top: int) -> list[Any]:
    if not moves:
        return ["", "Moves: no change"]
    rows = moves[:top]
    lines = []
    for row in rows:
        name = [names.get(row.tensor, "")] if names else []
        sizes = (format_bytes(row.a_bytes), format_bytes(row.b_bytes))
        change = delta(Change("", BYTES, row.a_bytes, row.b_bytes))
        lines.append(
            (str(row.tensor), *name, pair(str(row.a_moves), str(row.b_moves)), *sizes, change)
        )
    listed = f"; the {len(rows)} that changed most" if 0 < len(rows) < len(moves) else ""
    title = f"Moves: of {len(moves)} tensors changed{listed}"
    heads = ("tensor", *(["<name"] if names else []), "moves", "bytes A", "B", "change")
    return ["", title, *([table(heads, lines)] if lines else [])]
