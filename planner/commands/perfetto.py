"""``tensorpager perfetto``: an iteration as a trace viewer shows it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..files import whole_file
from ..sizes import format_bytes
from .checks import timeline_of
from .options import (
    Machine,
    TraceCommand,
    json_option,
    optional_hardware_options,
    output_option,
    plan_argument,
    trace_argument,
)
from .output import emit_json, emit_text

if TYPE_CHECKING:
    from ..timeline import Timeline


@click.command(cls=TraceCommand)
@trace_argument
@plan_argument
@optional_hardware_options
@output_option("The file to write; packed if its name ends in .gz.")
@json_option
def perfetto(
    trace_path: Path,
    plan_path: Path | None,
    machine: Machine | None,
    output: Path,
    as_json: bool,
) -> None:
    """Write an iteration for the Perfetto trace viewer.

    The file is in the Trace Event Format, for ui.perfetto.dev or chrome://tracing: ops, what they
    wait for, what each channel moves, bytes on the device, in host memory and on
    disk. Without a plan: ops and device memory only.

    \b
    Example:
      tensorpager perfetto trace.parquet plan.json -o ui.json.gz
    """
    from ..perfetto.chrome_trace import write_events
    from ..perfetto.picture import Picture
    from ..trace_file import read_trace

    trace = read_trace(trace_path)
    line = timeline_of(trace, trace_path, plan_path, machine)
    events = Picture(line).events()
    document = {"displayTimeUnit": "ms", "otherData": _other_data(line)}
    with whole_file(output) as part:
        write_events(part, events, document, output.suffix == ".gz")
    transfers = sum(event["ph"] == "X" and "move" in event["args"] for event in events)
    if as_json:
        counts = {"ops": trace.ops, "transfers": transfers, "stalls": len(line.stalls)}
        emit_json({"path": str(output), **counts})
        return
    size = f", {format_bytes(output.stat().st_size)}" if output.is_file() else ""
    emit_text(
        f"{output}: {trace.ops} ops, {transfers} transfers, {len(line.stalls)} stalls{size}; "
        "open it at https://ui.perfetto.dev"
    )


def _other_data(line: Timeline) -> dict[str, str]:
    from ..hardware import describe

    trace = line.trace
    found = {"source": trace.source, "device": trace.device, "trace sha256": trace.sha256}
    if line.plan is not None and line.hardware is not None:
        found |= {"policy": line.plan.policy, "hardware": describe(line.hardware)}
    return found
