"""``tensorpager html``: an iteration, and what a plan does in it, as a page for the browser."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from .output import emit_json, emit_text, progress_bar

if TYPE_CHECKING:
    from ..hardware import Hardware
    from ..timeline import Timeline


@click.command("html", cls=TraceCommand)
@trace_argument
@plan_argument
@optional_hardware_options
@click.option(
    "--remedies/--no-remedies",
    "find_remedies",
    default=True,
    show_default=True,
    help="Plan, quickly, for machines with more of what the plan waits for, and say what each "
    "would give.",
)
@output_option("The report, an HTML file.")
@json_option
def html(
    trace_path: Path,
    plan_path: Path | None,
    machine: Machine | None,
    find_remedies: bool,
    output: Path,
    as_json: bool,
) -> None:
    """Draw an iteration as a page for the browser.

    Memory over time, where every tensor is when, what moves over which channel, and which op waits
    for what, and what would help. One file that needs no network. Without PLAN it shows the memory
    and what lies idle.

    A PLAN runs on the machine that it was made for, or on that of --hardware.

    \b
    Example:
      tensorpager html trace.parquet plan.json -o report.html
    """
    from ..report.remedies import remedies
    from ..trace_file import read_trace

    trace = read_trace(trace_path)
    line = timeline_of(trace, trace_path, plan_path, machine)
    with progress_bar() as progress:
        helpful = remedies(line, progress) if find_remedies else []
        names_of = {"trace": trace_path.name} | ({"plan": plan_path.name} if plan_path else {})
        size = write_report(output, line, line.hardware, files=names_of, remedies=helpful)
    if as_json:
        emit_json({"path": str(output), "ops": trace.ops, "bytes": size})
        return
    emit_text(f"{output}: {trace.ops} ops, {format_bytes(size)}; open it in a browser")


def write_report(output: Path, line: Timeline, hardware: Hardware | None, **more: Any) -> int:
    """The page of ``report_data(line, hardware, **more)``, whole or not at all: its bytes."""
    from ..report.data import report_data
    from ..report.page import page
    from ..report.payload import encode

    content = page(encode(*report_data(line, hardware, **more))).encode()
    with whole_file(output) as part:
        part.write_bytes(content)
    return len(content)
