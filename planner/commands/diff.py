"""``tensorpager diff``: what changed from one trace to another, or from one plan to another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import PagerError, TraceError
from ..sizes import format_bytes
from .options import json_option
from .output import emit, emit_json, emit_text
from .tables import format_us, pairs, table

if TYPE_CHECKING:
    from ..difference import Change

TRACE, PLAN = "trace", "plan"


@click.command()
@click.argument("path_a", metavar="A", type=click.Path(path_type=Path))
@click.argument("path_b", metavar="B", type=click.Path(path_type=Path))
@click.option(
    "--top",
    type=click.IntRange(min=0),
    default=10,
    show_default=True,
    help="How many rows of each list.",
)
@json_option
def diff(path_a: Path, path_b: Path, top: int, as_json: bool) -> None:
    """Say what changed from A to B.

    Both are traces, or both are plans. Rows of lists are sorted by how much they changed.

    \b
    Example:
      tensorpager diff old.parquet new.parquet
      tensorpager diff old.json new.json --top 3
    """
    from ..difference import of_plans, of_traces
    from ..plan import read_plan
    from ..trace_file import read_trace

    kinds = _kind(path_a), _kind(path_b)
    if kinds[0] != kinds[1]:
        raise PagerError(
            f"{path_a} is a {kinds[0]} and {path_b} a {kinds[1]}; give two traces, or two plans"
        )
    if kinds[0] == TRACE:
        found = of_traces(read_trace(path_a), read_trace(path_b))
    else:
        found = of_plans(read_plan(path_a), read_plan(path_b))
    if as_json:
        emit_json(
            {
                "kind": f"{kinds[0]}s",
                "identical": not found.differs_in,
                "a": str(path_a),
                "b": str(path_b),
                "differs_in": found.differs_in,
                "measures": [_json(change) for change in found.measures],
                "lists": {
                    title: [_json(change) for change in changes[:top]]
                    for title, changes in found.lists.items()
                },
            }
        )
        return
    if not found.differs_in:
        emit_text(f"{path_a} and {path_b} hold the same {kinds[0]}.")
        return
    names = ", ".join(name.replace("_", " ") for name in found.differs_in)
    parts: list[Any] = [
        pairs([("A", str(path_a)), ("B", str(path_b)), ("differs in", names)]),
        "",
        table(("<", "A", "B", "change", ""), [_cells(change) for change in found.measures]),
    ]
    for title, changes in found.lists.items():
        parts += _list(title, changes, top)
    emit(*parts)


def _list(title: str, changes: Sequence[Change], top: int) -> list[Any]:
    if not changes[:top]:
        return []
    more = f"; {len(changes) - top} more" if len(changes) > top else ""
    heads = (f"<{title}{more}", "A", "B", "change", "")
    return ["", table(heads, [_cells(change) for change in changes[:top]])]


def _cells(change: Change) -> tuple[str, ...]:
    sign = "+" if change.delta > 0 else ""
    delta = f"{sign}{_shown(change.delta, change.unit)}" if change.delta else ""
    percent = "" if change.percent is None or not delta else f"{change.percent:+.1f} %"
    both = _shown(change.a, change.unit), _shown(change.b, change.unit)
    return change.name, *both, delta, percent


def _shown(value: float, unit: str) -> str:
    if unit == "count":
        return str(int(value))
    return format_bytes(value) if unit == "bytes" else format_us(value)


def _json(change: Change) -> dict[str, Any]:
    return {**change._asdict(), "change": change.delta, "percent": change.percent}


def _kind(path: Path) -> str:
    """Told by the file's first bytes, not by its name."""
    if path.is_dir():
        raise TraceError(f"{path}: a folder; name the trace or the plan in it")
    with path.open("rb") as file:
        start = file.read(4096)
    if start.startswith(b"PAR1"):
        return TRACE
    if start.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
        return PLAN
    raise TraceError(
        f"{path}: {'an empty file is' if not start else 'this is'} neither a trace (Parquet) nor "
        "a plan (JSON); 'tensorpager import' makes a trace of other formats"
    )
