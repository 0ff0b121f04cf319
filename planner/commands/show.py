"""``tensorpager show``: what is in a trace."""

from __future__ import annotations

from pathlib import Path

import click

from .checks import read_plan_for, require_machine, warn_of_durations
from .options import (
    Machine,
    TraceCommand,
    json_option,
    optional_hardware_options,
    trace_argument,
)
from .output import emit, emit_json


@click.command(cls=TraceCommand)
@trace_argument
@click.option(
    "--top",
    type=click.IntRange(min=0),
    metavar="N",
    default=5,
    show_default=True,
    help="Rows of each list, the largest first.",
)
@click.option(
    "--plan",
    "plan_path",
    metavar="PLAN",
    type=click.Path(path_type=Path),
    help="What this plan does, for each layer.",
)
@optional_hardware_options
@json_option
def show(
    trace_path: Path,
    top: int,
    plan_path: Path | None,
    machine: Machine | None,
    as_json: bool,
) -> None:
    """Say what a trace holds.

    Memory over time, its peak and what makes it, what lies idle for how long, what is used again
    how soon. With --hardware also how fast it is there, and what of the idle bytes the link could
    hide; without, what was recorded on a CPU is planned for one (the preset cpu) with half of what
    it needs. A PLAN runs on the machine that it was made for.

    \b
    Example:
      tensorpager show trace.parquet --hardware a100
    """
    from ..trace_file import read_trace
    from .show_overview import overview
    from .summary import View, summary

    require_machine(plan_path, machine)
    trace = read_trace(trace_path)
    plan = hardware = None
    if machine is not None:
        warn_of_durations(trace, machine)
        hardware = machine.for_trace(trace)
        if plan_path is not None:
            plan = read_plan_for(plan_path, trace, trace_path, hardware)
    page_size = int(hardware.page_size) if hardware else trace.page_size
    view = View(trace, page_size, hardware, plan)
    found = summary(view, top)
    if as_json:
        emit_json(found)
    else:
        emit(*overview(trace_path, view, found))
