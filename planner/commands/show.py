"""``tensorpager show``: what is in a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from .checks import read_plan_for, require_machine, timeline_of, warn_of_durations
from .options import (
    Machine,
    TraceCommand,
    json_option,
    optional_hardware_options,
    trace_argument,
)
from .output import emit, emit_json

# As in trace.py, whose numpy is not for --help.
KINDS = ("parameter", "gradient", "optimizer", "activation", "input", "workspace")


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
    "--kind",
    "kinds",
    type=click.Choice(KINDS),
    multiple=True,
    metavar="KIND",
    help=f"Only tensors of this kind ({', '.join(KINDS)}); may be given several times.",
)
@click.option(
    "--by",
    type=click.Choice(("tensor", "module", "kind", "op")),
    default="tensor",
    show_default=True,
    help="What the lists are of; op: that made a tensor, or that accesses it.",
)
@click.option("--tensor", metavar="NAME|NUMBER", help="Show the life of this tensor instead.")
@click.option(
    "--plan",
    "plan_path",
    metavar="PLAN",
    type=click.Path(path_type=Path),
    help="What this plan does: with the tensor, or for each layer.",
)
@optional_hardware_options
@json_option
def show(
    trace_path: Path,
    top: int,
    kinds: tuple[str, ...],
    by: str,
    tensor: str | None,
    plan_path: Path | None,
    machine: Machine | None,
    as_json: bool,
) -> None:
    """Say what a trace holds.

    Memory over time, its peak and what makes it, what lies idle for how long, what is used again
    how soon. With --hardware also how fast it is there, and what of the idle bytes the link could
    hide; without, what was recorded on a CPU is planned for one (the preset cpu) with half of what
    it needs.

    With --tensor: one tensor's uses, its idle periods and, with --plan, when it moves where, is
    made again, or is stepped by the host. A PLAN runs on the machine that it was made for.

    \b
    Example:
      tensorpager show trace.parquet --hardware a100 --by module
      tensorpager show trace.parquet --tensor blocks.3.mlp_up.weight
    """
    from ..trace_file import read_trace
    from .show_overview import overview
    from .summary import View, summary

    if tensor is not None and (kinds or by != "tensor"):
        raise click.UsageError("--tensor shows one tensor: leave out --kind and --by.")
    require_machine(plan_path, machine)
    trace = read_trace(trace_path)
    hardware = None if machine is None else machine.for_trace(trace)
    page_size = int(hardware.page_size) if hardware else trace.page_size
    parts: list[Any]
    if tensor is not None:
        from .show_tensor import find_tensor, life, life_tables

        number = find_tensor(trace, tensor, str(trace_path))
        line = timeline_of(trace, trace_path, plan_path, machine)
        found = life(line, number, page_size, hardware)
        parts = life_tables(str(trace_path), found, top)
    else:
        plan = None
        if machine is not None:
            warn_of_durations(trace, machine)
        if plan_path is not None and hardware is not None:
            plan = read_plan_for(plan_path, trace, trace_path, hardware)
        view = View(trace, page_size, kinds, hardware, plan)
        found = summary(view, top, by)
        parts = overview(trace_path, view, found, top)
    if as_json:
        emit_json(found)
    else:
        emit(*parts)
