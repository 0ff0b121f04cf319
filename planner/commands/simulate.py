"""``tensorpager simulate``: a plan run through the machine model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..hardware import describe
from .checks import require_same_pages, require_same_trace
from .failures import CheckFailed
from .options import Machine, hardware_options, json_option, trace_argument
from .output import emit, emit_json
from .tables import format_share, format_us, pairs, predicted_json, predicted_table, table

if TYPE_CHECKING:
    from ..simulation import Simulation, Stall
    from ..trace import Trace


@click.command()
@trace_argument
@click.argument("plan_path", metavar="PLAN", type=click.Path(path_type=Path))
@hardware_options
@click.option(
    "--stalls",
    type=click.IntRange(min=0),
    default=10,
    show_default=True,
    help="How many of the longest stalls to list.",
)
@json_option
def simulate(
    trace_path: Path, plan_path: Path, machine: Machine, stalls: int, as_json: bool
) -> None:
    """Run a plan through the machine model.

    Says how fast it is, how much memory it takes, and which op waits for what.

    The machine may be another than the plan was made for, with pages of the same size. Exits with
    1 if the plan is not feasible there.

    \b
    Example:
      tensorpager simulate bert-256.parquet plan.json --hardware a100 --h2d 12GB
    """
    from ..plan import read_plan
    from ..simulator import simulate as run
    from ..trace_file import read_trace

    plan = read_plan(plan_path)
    trace = read_trace(trace_path)
    hardware = machine.for_trace(trace)
    require_same_trace(plan, plan_path, trace, trace_path)
    require_same_pages(plan, plan_path, hardware)
    result = run(trace, hardware, plan)
    longest = sorted(result.stalls, key=lambda stall: -stall.us)[:stalls]
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
