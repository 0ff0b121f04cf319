"""``tensorpager diff``: what changed from one trace to another, or from one plan to another."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import PagerError, TraceError
from ..sizes import format_bytes, parse_bytes
from .failures import CheckFailed
from .options import json_option
from .output import emit, emit_json, emit_text
from .tables import format_us, pairs, table

if TYPE_CHECKING:
    from ..difference import Change

TRACE, PLAN = "trace", "plan"
US = "us"  # as in difference.py, whose numpy is not for --help
_TIMES = {"us": 1.0, "µs": 1.0, "ms": 1e3, "s": 1e6}
_THRESHOLD = re.compile(
    r"(?P<metric>[a-z]+(?:-[a-z]+)*)(?P<sign>[+-])"
    r"(?P<amount>(?P<number>[0-9]+\.?[0-9]*|\.[0-9]+)\s*(?P<unit>\S*))"
)


@click.command()
@click.argument("path_a", metavar="A", type=click.Path(path_type=Path))
@click.argument("path_b", metavar="B", type=click.Path(path_type=Path))
@click.option(
    "--fail-if",
    "thresholds",
    metavar="METRIC+X%",
    multiple=True,
    help="Exit with 1 if METRIC, one of the first table, is more than X% (or a size, a time, a "
    "count) above A's, or with '-' below it. May be repeated.",
)
@click.option(
    "--top",
    type=click.IntRange(min=0),
    default=10,
    show_default=True,
    help="How many rows of each list.",
)
@json_option
def diff(path_a: Path, path_b: Path, thresholds: tuple[str, ...], top: int, as_json: bool) -> None:
    """Say what changed from A to B.

    Both are traces, or both are plans. Rows of lists are sorted by how much they changed.

    \b
    Example:
      tensorpager diff old.parquet new.parquet --fail-if peak+5%
      tensorpager diff old.json new.json --fail-if time+10ms
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
    failed = [text for text in (_failure(text, found.measures) for text in thresholds) if text]
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
                "failed": failed,
            }
        )
    elif not found.differs_in:
        emit_text(f"{path_a} and {path_b} hold the same {kinds[0]}.")
    else:
        names = ", ".join(name.replace("_", " ") for name in found.differs_in)
        parts: list[Any] = [
            pairs([("A", str(path_a)), ("B", str(path_b)), ("differs in", names)]),
            "",
            table(("<", "A", "B", "change", ""), [_cells(change) for change in found.measures]),
        ]
        for title, changes in found.lists.items():
            parts += _list(title, changes, top)
        emit(*parts)
    if failed:
        raise CheckFailed("; ".join(failed))


def _failure(text: str, measures: Sequence[Change]) -> str:
    """What a threshold such as ``peak+5%`` or ``time-10ms`` finds; nothing if it holds. Raises
    ``click.UsageError`` for what is none of these measures."""
    known = {change.name: change for change in measures}
    match = _THRESHOLD.fullmatch(text.strip())
    if match is None or match["metric"] not in known:
        raise click.UsageError(
            f"--fail-if {text}: not METRIC+X%, METRIC+SIZE, METRIC+TIME or with '-'; the metrics "
            f"of these files are {', '.join(known)}."
        )
    change = known[match["metric"]]
    times = _TIMES if change.unit == US else {}
    try:
        number = float(match["number"])
        if match["unit"] == "%":
            number *= change.a / 100
        elif match["unit"]:
            number = number * times[match["unit"]] if times else parse_bytes(match["amount"])
    except (KeyError, ValueError):
        raise click.UsageError(
            f"--fail-if {text}: {match['amount']!r} is no amount; write for example 5%, 200MiB or "
            "10ms."
        ) from None
    sign = 1 if match["sign"] == "+" else -1
    limit = change.a + sign * number
    if sign * (change.b - limit) <= 1e-9 * abs(limit):
        return ""
    most = "most" if sign > 0 else "least"
    was, now, allowed = (_shown(value, change.unit) for value in (change.a, change.b, limit))
    return f"{change.name} was {was} and is {now}; --fail-if {text} allows at {most} {allowed}"


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
