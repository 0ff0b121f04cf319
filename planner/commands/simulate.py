"""``tensorpager simulate``: a plan run through the machine model, here or on other machines."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ..hardware import describe
from .axes import KINDS, Axis, check_together, parse_axis
from .checks import read_plan_for, require_machine, warn_of_durations
from .failures import CheckFailed
from .options import (
    Machine,
    TraceCommand,
    json_option,
    optional_hardware_options,
    plan_argument,
    policy_names,
    trace_argument,
)
from .output import emit, emit_json
from .ranks import Fleet, fleet_options, run_ranks
from .sweep import Asked, run_sweep
from .tables import format_share, format_us, pairs, predicted_json, predicted_table, table
from .target import percent, run_target

if TYPE_CHECKING:
    from ..simulation import Simulation, Stall
    from ..trace import Trace

MOST_STALLS = 10  # of the longest that are listed


@click.command(cls=TraceCommand)
@trace_argument
@plan_argument
@optional_hardware_options
@click.option(
    "--sweep",
    "axes",
    metavar="NAME=LOW:HIGH:STEPS",
    type=parse_axis,
    multiple=True,
    callback=lambda context, option, axes: check_together(axes),
    help=f"Try other machines, or NAME=a,b,c: {', '.join(KINDS)}. Several give every combination.",
)
@click.option(
    "--target", type=percent, metavar="%", help="Find the least device memory for this speed: 95%."
)
@click.option(
    "--policies", metavar="A,B,…", help="Who plans for --sweep and --target (default: lp,lru)."
)
@click.option("--quick", is_flag=True, help="A shorter search (policy lp).")
@fleet_options
@json_option
@click.pass_context
def simulate(
    context: click.Context,
    trace_path: Path,
    plan_path: Path | None,
    machine: Machine | None,
    axes: tuple[Axis, ...],
    target: float | None,
    policies: str | None,
    quick: bool,
    fleet: Fleet | None,
    as_json: bool,
) -> None:
    """Run a plan through the machine model, or ask what other machines would do.

    With PLAN: how fast it is, how much memory it takes, and which op waits for what. The machine
    may be another than the plan was made for, with pages of the same size; without --hardware it is
    that one.

    With --sweep each policy plans for each machine, or PLAN runs on each; without either, on this
    machine alone. Sizes and rates more than 8 times apart are spaced by equal factors, page sizes
    are powers of two, device sizes may be shares of the trace's peak.

    With --target the least device memory with which a policy reaches that share of the ideal speed.

    With --ranks what 1, 2, 4, … N devices do under FSDP2, each on as much as TRACE: speed and cost,
    with pages moved and without. --hardware is a node then: each rank has its own device and link,
    and all of a node share its host memory and disk. Where TRACE has blocks, as many of them run
    again as it takes to fit without paging, and with --policies joint as is fastest with it.

    Exits with 1 if nothing is feasible, or no policy reaches the target.

    \b
    Example:
      tensorpager simulate trace.parquet plan.json --h2d 1GB
      tensorpager simulate trace.parquet --hardware g10 --sweep device=50%:100%:3
      tensorpager simulate trace.parquet --hardware g10 --sweep link=1GB:16GB:3
      tensorpager simulate trace.parquet --hardware g10 --target 95% --quick
      tensorpager simulate trace.parquet --hardware h100 --ranks 64 --nodes 8 \\
        --policies joint
    """
    _refuse_what_plays_no_part(context)
    require_machine(plan_path, machine)
    if machine is None:
        raise click.UsageError("Missing option '--hardware'.")
    if plan_path is not None and not axes:
        _run_plan(trace_path, plan_path, machine, as_json)
        return
    from ..trace_file import read_trace

    usual = "lp,lru" if fleet is None else "lp"
    names = policy_names(usual if policies is None else policies)
    trace, plan = read_trace(trace_path), None
    warn_of_durations(trace, machine)
    if plan_path is not None:
        plan = read_plan_for(plan_path, trace, trace_path, machine.base)
        names = [plan.policy]
    asked = Asked(trace_path, trace, machine, names, quick, plan)
    if fleet is not None:
        run_ranks(asked, fleet, as_json)
    elif target is None:
        run_sweep(asked, axes, as_json)
    else:
        run_target(asked, target, as_json)


def _refuse_what_plays_no_part(context: click.Context) -> None:
    """A combination that would leave something out without a word is bad usage."""
    given = {
        name
        for name in context.params
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }
    for name in ("axes", "device_bytes", "plan_path") if "target" in given else ():
        if name in given:
            raise click.UsageError(
                "--target looks for a device budget; leave out --sweep, --device-bytes and PLAN."
            )
    if "plan_path" in given:
        for name in ("policies", "quick"):
            if name in given:
                raise click.UsageError(f"--{name} is for planning; leave it or PLAN out.")
        if any(axis.name == "page-size" for axis in context.params["axes"]):
            raise click.UsageError(
                "--sweep page-size: a plan has pages of one size; leave out PLAN to plan anew."
            )
    if "ranks" in given:
        for name in ("axes", "target", "plan_path"):
            if name in given:
                shown = {"axes": "--sweep", "plan_path": "PLAN"}.get(name, f"--{name}")
                raise click.UsageError(
                    f"--ranks plans for each number of ranks; leave out {shown}."
                )


def _run_plan(trace_path: Path, plan_path: Path, machine: Machine, as_json: bool) -> None:
    from ..simulator import simulate as run
    from ..trace_file import read_trace

    trace = read_trace(trace_path)
    warn_of_durations(trace, machine)
    hardware = machine.for_trace(trace)
    plan = read_plan_for(plan_path, trace, trace_path, hardware)
    result = run(trace, hardware, plan)
    longest = sorted(result.stalls, key=lambda stall: -stall.us)[:MOST_STALLS]
    if as_json:
        emit_json(_json(trace, result, longest))
    elif result.predicted is not None:
        heading = pairs(
            [
                ("trace", f"{trace_path}, {trace.ops} ops"),
                ("plan", f"{plan_path}, {len(plan.moves)} moves by {plan.policy}"),
                ("hardware", describe(hardware)),
            ]
        )
        emit(heading, "", predicted_table(result.predicted), *_stall_table(trace, result, longest))
    if not result.feasible:
        raise CheckFailed(f"{plan_path} is infeasible: {result.reason}")


def _json(trace: Trace, result: Simulation, longest: list[Stall]) -> dict[str, Any]:
    return {
        "feasible": result.feasible,
        "reason": result.reason,
        "predicted": predicted_json(result.predicted),
        "iterations": result.iterations,
        "stalls": [
            {
                "op": stall.op,
                "op_name": trace.op_names[stall.op],
                "us": stall.us,
                "tensor": int(trace.tensor_ids[stall.tensor]) if stall.tensor >= 0 else None,
                "tensor_name": trace.name_of(stall.tensor) if stall.tensor >= 0 else None,
                "channel": stall.channel,
            }
            for stall in longest
        ],
    }


def _stall_table(trace: Trace, result: Simulation, longest: list[Stall]) -> list[Any]:
    """The stalls, longest first; nothing where no op waits or none is to be listed."""
    if not longest:
        return []
    total = sum(stall.us for stall in result.stalls)
    rows = [
        (
            str(stall.op),
            trace.op_names[stall.op],
            format_us(stall.us),
            format_share(stall.us, total),
            trace.name_of(stall.tensor) if stall.tensor >= 0 else "(free frames)",
            stall.channel,
        )
        for stall in longest
    ]
    title = f"{len(longest)} longest of {len(result.stalls)} stalls"
    heads = ("op", "<name", "waits", "of all", "<for", "<channel")
    return ["", table(heads, rows, title=title)]
