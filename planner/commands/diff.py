"""``tensorpager diff``: what changed from one trace to another, or from one plan to another."""

from __future__ import annotations

from pathlib import Path

import click

from ..errors import PagerError, TraceError
from .failures import CheckFailed
from .options import json_option
from .output import emit, emit_json, emit_text
from .thresholds import PLANS, TRACES, Threshold, fail_if_option, failures, metrics_help


@click.command()
@click.argument("path_a", metavar="A", type=click.Path(path_type=Path))
@click.argument("path_b", metavar="B", type=click.Path(path_type=Path))
@click.option(
    "--fail-if",
    "thresholds",
    metavar="METRIC+X%",
    multiple=True,
    callback=fail_if_option,
    help="Exit with 1 if METRIC is more than X% (or a size, or a time) above A's, or with '-' "
    f"below it. May be repeated. Metrics: {metrics_help()}.",
)
@click.option(
    "--top",
    type=click.IntRange(min=0),
    default=10,
    show_default=True,
    help="How many rows of each list.",
)
@click.option(
    "--trace",
    "trace_path",
    metavar="TRACE",
    type=click.Path(path_type=Path),
    help="The trace of two plans, for the names of its tensors.",
)
@json_option
def diff(
    path_a: Path,
    path_b: Path,
    thresholds: list[Threshold],
    top: int,
    trace_path: Path | None,
    as_json: bool,
) -> None:
    """Say what changed from A to B.

    Both are traces, or both are plans. Rows are sorted by how much they changed.

    \b
    Example:
      tensorpager diff old.parquet new.parquet --fail-if peak+5%
      tensorpager diff old.json new.json --trace trace.parquet --fail-if time+10ms
    """
    kinds = _kind(path_a), _kind(path_b)
    if kinds[0] != kinds[1]:
        raise PagerError(
            f"{path_a} is a {kinds[0][:-1]} and {path_b} a {kinds[1][:-1]}; "
            "give two traces, or two plans"
        )
    if kinds[0] == TRACES and trace_path is not None:
        raise click.UsageError("--trace is for plans; traces have names of their own.")
    if kinds[0] == TRACES:
        from .diff_traces import diff_traces

        report = diff_traces(path_a, path_b, top)
    else:
        from .diff_plans import diff_plans

        report = diff_plans(path_a, path_b, top, trace_path)
    failed = failures(thresholds, kinds[0], report.value)
    if as_json:
        emit_json({**report.content, "failed": failed})
    elif report.content["identical"]:
        emit_text(*report.parts)
    else:
        emit(*report.parts)
    if failed:
        raise CheckFailed("; ".join(failed))


def _kind(path: Path) -> str:
    """Told by the file's first bytes, not by its name."""
    if path.is_dir():
        raise TraceError(f"{path}: a folder; name the trace or the plan in it")
    with path.open("rb") as file:
        start = file.read(4096)
    if start.startswith(b"PAR1"):
        return TRACES
    if start.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
        return PLANS
    raise TraceError(
        f"{path}: {'an empty file is' if not start else 'this is'} neither a trace (Parquet) nor "
        "a plan (JSON); 'tensorpager import' makes a trace of other formats"
    )
