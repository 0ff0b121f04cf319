"""``tensorpager diff`` of two traces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..difference.change import BYTES, US, Change, changes, most_changed_first
from ..sizes import format_bytes
from .diff_tables import Report, cells, change_json, delta, measure_table, pair, percent
from .tables import format_us, pairs, short, table
from .thresholds import TRACES

if TYPE_CHECKING:
    from ..difference.traces import OpChange, Peak, TensorChange
    from ..trace import Trace


def diff_traces(path_a: Path, path_b: Path, top: int) -> Report:
    from ..difference.traces import differing, measures, op_changes, peak_of, tensor_changes
    from ..trace_file import read_trace

    a, b = read_trace(path_a), read_trace(path_b)
    found = changes(measures(a), measures(b))
    fields = differing(a, b)
    peaks = peak_of(a), peak_of(b)
    kinds = [
        Change(kind, BYTES, size, peaks[1].by_kind[kind]) for kind, size in peaks[0].by_kind.items()
    ]
    ops, tensors = op_changes(a, b), tensor_changes(a, b)
    content = {
        "kind": TRACES,
        "identical": not fields,
        "a": str(path_a),
        "b": str(path_b),
        "differs_in": fields,
        "measures": [change_json(change) for change in found],
        "peak": {side: _peak_json(peak) for side, peak in zip("ab", peaks)},
        "bytes_by_kind": [change_json(change) for change in kinds],
        "ops": {**_counts(ops), "changed_most": [_op_json(op) for op in _top(ops, top)]},
        "tensors": {
            **_counts(tensors),
            "changed_most": [_tensor_json(tensor) for tensor in _top(tensors, top)],
        },
    }
    parts: list[Any] = [
        pairs([("A", f"{path_a}, {_about(a)}"), ("B", f"{path_b}, {_about(b)}")]),
        "",
        *measure_table(found, most_changed_first(found)),
        *_peak_lines(peaks),
        *_kind_table(kinds),
        *_op_table(ops, top),
        *_tensor_table(tensors, top),
    ]
    if not fields:
        parts = [f"{path_a} and {path_b} hold the same iteration: {_about(a)}."]
    elif not any(change.delta for change in found) and not _top(ops, 1) + _top(tensors, 1):
        names = ", ".join(name.replace("_", " ") for name in fields)
        parts = [*parts[:1], "", f"Sizes, names and times are the same; what differs is {names}."]
    values = {change.name: (change.a, change.b) for change in found}
    return Report(content, parts, values.__getitem__)


def _about(trace: Trace) -> str:
    return f"{trace.ops} ops in {format_us(trace.ideal_us)}, {trace.tensors} tensors"


def _top(rows: Sequence[Any], top: int) -> list[Any]:
    return [row for row in rows if row.status != "same"][:top]


def _counts(rows: Sequence[Any]) -> dict[str, int]:
    found: dict[str, int] = {}
    for row in rows:
        found[row.status] = found.get(row.status, 0) + 1
    return dict(sorted(found.items()))


def _peak_lines(peaks: tuple[Peak, Peak]) -> list[str]:
    one, other = (f"op {peak.op} '{short(peak.op_name, 20)}'" for peak in peaks)
    return ["", f"Peak at {one}" + (f", now at {other}" if one != other else "")]


def _kind_table(kinds: list[Change]) -> list[Any]:
    rows = [change for change in kinds if change.a or change.b]
    rows.sort(key=lambda change: -abs(change.delta))
    heads = ("<bytes at the peak", "A", "B", "change", "")
    return ["", table(heads, [cells(change) for change in rows])]


def _op_table(ops: list[OpChange], top: int) -> list[Any]:
    rows, counts = _top(ops, top), _counts(ops)
    if not counts.keys() - {"same"}:
        return ["", "Ops: no change"]
    lines = []
    for op in rows:
        change = Change(op.name, US, op.a_us, op.b_us)
        a_us = format_us(op.a_us) if op.a_count else ""
        b_us = format_us(op.b_us) if op.b_count else ""
        count = pair(str(op.a_count), str(op.b_count))
        lines.append((op.name, op.status, count, a_us, b_us, delta(change), percent(change)))
    heads = ("<op", "<", "count", "time A", "B", "change", "")
    return ["", _title("Ops by name", counts, len(rows)), *([table(heads, lines)] if lines else [])]


def _tensor_table(tensors: list[TensorChange], top: int) -> list[Any]:
    """Those of one name, kind and size in a row together."""
    counts = _counts(tensors)
    if not counts.keys() - {"same"}:
        return ["", "Tensors: no change"]
    alike = Counter(
        (tensor.name, tensor.kind, tensor.status, tensor.a_bytes, tensor.b_bytes)
        for tensor in tensors
        if tensor.status != "same"
    )
    rows = sorted(alike.items(), key=lambda row: -abs(row[0][4] - row[0][3]) * row[1])[:top]
    lines = []
    for (name, kind, status, a_bytes, b_bytes), number in rows:
        a_size = format_bytes(a_bytes) if status != "new" else ""
        b_size = format_bytes(b_bytes) if status != "gone" else ""
        change = delta(Change(name, BYTES, a_bytes * number, b_bytes * number))
        lines.append((short(name, 18), kind, status, str(number), a_size, b_size, change))
    heads = ("<tensor", "<kind", "<", "n", "each A", "B", "in all")
    listed = sum(number for _, number in rows)
    title = _title("Tensors", counts, listed)
    return ["", title, *([table(heads, lines)] if lines else [])]


def _title(what: str, counts: dict[str, int], listed: int) -> str:
    """How many of each sort, and how many of them are listed."""
    order = ("new", "gone", "grown", "shrunk", "changed", "same")
    parts = [f"{counts[status]} {status}" for status in order if status in counts]
    changed = sum(count for status, count in counts.items() if status != "same")
    most = f"; the {listed} that changed most" if 0 < listed < changed else ""
    return f"{what}: {', '.join(parts)}{most}"


def _peak_json(peak: Peak) -> dict[str, Any]:
    return {"op": peak.op, "op_name": peak.op_name, "bytes": peak.nbytes}


def _op_json(op: OpChange) -> dict[str, Any]:
    return {**op._asdict(), "status": op.status}


def _tensor_json(tensor: TensorChange) -> dict[str, Any]:
    return {**tensor._asdict(), "status": tensor.status}
