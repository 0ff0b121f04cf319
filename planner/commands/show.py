"""``tensorpager show``: what is in a trace, and the life of one tensor of it."""

from __future__ import annotations

from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .checks import read_plan_for, warn_of_durations
from .options import (
    F,
    Machine,
    TraceCommand,
    json_option,
    optional_hardware_options,
    trace_argument,
)
from .output import emit, emit_json

if TYPE_CHECKING:
    from ..hardware import Hardware
    from ..trace import Trace

# As in trace.py and show_groups.py, whose numpy is not for --help.
KINDS = ("parameter", "gradient", "optimizer", "activation", "input", "workspace")
BY = ("tensor", "module", "kind", "op")
TOP, TOP_OF_A_LIFE = 5, 20


def _machine_or_page_size(command: F) -> F:
    """``--hardware`` and its overrides, all optional; without a machine ``--page-size`` stands for
    itself, as ``page_size_alone``."""
    takes_a_machine = optional_hardware_options(command)

    @wraps(takes_a_machine)
    def apart(*, hardware: str | None, page_size: int | None, **values: Any) -> Any:
        alone = None if hardware else page_size
        values["page_size"] = page_size if hardware else None
        return takes_a_machine(hardware=hardware, page_size_alone=alone, **values)

    return apart  # type: ignore[return-value]


@click.command(cls=TraceCommand)
@trace_argument
@click.option(
    "--top",
    type=click.IntRange(min=0),
    metavar="N",
    help=f"Rows of each list, the largest first (default: {TOP}; with --tensor {TOP_OF_A_LIFE}).",
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
    type=click.Choice(BY),
    default=BY[0],
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
@_machine_or_page_size
@json_option
def show(
    trace_path: Path,
    top: int | None,
    kinds: tuple[str, ...],
    by: str,
    tensor: str | None,
    plan_path: Path | None,
    machine: Machine | None,
    page_size_alone: int | None,
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

    if plan_path is not None and machine is None:
        raise click.UsageError(f"{plan_path} does not say what it was made for; give --hardware.")
    if tensor is not None and (kinds or by != BY[0]):
        raise click.UsageError("--tensor shows one tensor: leave out --kind and --by.")
    trace = read_trace(trace_path)
    if machine is not None:
        warn_of_durations(trace, machine)
    hardware = None if machine is None else machine.for_trace(trace)
    page_size = int(hardware.page_size) if hardware else page_size_alone or trace.page_size
    if tensor is None:
        count = TOP if top is None else top
        _show_all(trace_path, trace, page_size, kinds, hardware, plan_path, count, by, as_json)
    else:
        count = TOP_OF_A_LIFE if top is None else top
        _show_one(trace_path, trace, page_size, hardware, tensor, plan_path, count, as_json)


def _show_all(
    path: Path,
    trace: Trace,
    page_size: int,
    kinds: tuple[str, ...],
    hardware: Hardware | None,
    plan_path: Path | None,
    top: int,
    by: str,
    as_json: bool,
) -> None:
    from .show_overview import overview
    from .summary import View, summary

    plan = None
    if plan_path is not None and hardware is not None:
        plan = read_plan_for(plan_path, trace, path, hardware)
    view = View(trace, page_size, kinds, hardware, plan)
    found = summary(view, top, by)
    if as_json:
        emit_json(found)
    else:
        emit(*overview(path, view, found))


def _show_one(
    path: Path,
    trace: Trace,
    page_size: int,
    hardware: Hardware | None,
    tensor: str,
    plan_path: Path | None,
    top: int,
    as_json: bool,
) -> None:
    from ..timeline import timeline
    from .show_life import life_tables
    from .show_names import find_tensor
    from .show_tensor import life

    index = find_tensor(trace, tensor, str(path))
    plan = None
    if plan_path is not None:
        assert hardware is not None
        plan = read_plan_for(plan_path, trace, path, hardware)
    found = life(timeline(trace, plan, hardware), index, page_size, hardware)
    if as_json:
        emit_json(found)
    else:
        emit(*life_tables(str(path), found, top))
