"""``tensorpager plan``: which pages move when."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..files import whole_file
from ..hardware import describe
from .checks import warn_of_durations
from .failures import CheckFailed
from .options import (
    Machine,
    TraceCommand,
    hardware_options,
    json_option,
    output_option,
    trace_argument,
)
from .output import emit, emit_json, progress_bar
from .tables import format_us, pairs, predicted_json, predicted_table

if TYPE_CHECKING:
    from ..hardware import Hardware
    from ..plan import Plan
    from ..simulation import Simulation
    from ..trace import Trace

ALLOWED = ("move", "recompute", "host-step")
AGREEMENT = 1e-3  # simulator and validator settle on an iteration time each by 0.01 %


@click.command(cls=TraceCommand)
@trace_argument
@hardware_options
@click.option("--policy", default="joint", show_default=True, help="Which policy plans.")
@click.option(
    "--allow",
    metavar="A,B,…",
    callback=lambda context, option, text: allowed(text),
    help=f"What policy joint may choose: {', '.join(ALLOWED)} (default: all that TRACE permits).",
)
@click.option("--quick", is_flag=True, help="A shorter search (policies joint and lp).")
@output_option("The plan, a JSON file.")
@json_option
def plan(
    trace_path: Path,
    machine: Machine,
    policy: str,
    allow: list[str] | None,
    quick: bool,
    output: Path,
    as_json: bool,
) -> None:
    """Plan a trace's migrations for a machine.

    The plan is run through the machine model twice, by the simulator and by an independent
    validator, before it is written. Exits with 1 if they do not agree that it works.

    Policy joint also discards activations and runs ops again, and steps on the host, where the
    trace says that they can. Whatever it may choose, moving pages is among it.

    \b
    Example:
      tensorpager plan trace.parquet --hardware g10 --device-bytes 50% \\
        -o plan.json
    """
    from ..lifetimes import require_working_sets
    from ..plan import plan_to_json
    from ..registry import find, make_plan
    from ..trace_file import read_trace

    find(policy)
    if allow is not None and policy != "joint":
        raise click.UsageError("--allow is for policy joint.")
    trace = read_trace(trace_path)
    warn_of_durations(trace, machine)
    hardware = machine.for_trace(trace)
    require_working_sets(trace, hardware)
    began = time.perf_counter()
    with progress_bar() as progress:
        made = make_plan(policy, trace, hardware, quick=quick, allow=allow, progress=progress)
    seconds = time.perf_counter() - began
    made = checked(trace, hardware, made)
    with whole_file(output) as part:
        part.write_text(json.dumps(plan_to_json(made), allow_nan=False) + "\n")
    assert made.predicted is not None
    if as_json:
        content = plan_to_json(made)
        emit_json(
            {
                "predicted": predicted_json(made.predicted),
                "bound": content["bound"],
                "notes": made.notes,
            }
        )
        return
    heading = pairs(
        [
            ("trace", f"{trace_path}, {trace.ops} ops in {format_us(trace.ideal_us)}"),
            ("hardware", describe(hardware)),
            ("plan", f"{output}, {len(made.moves)} moves by {made.policy} in {seconds:.1f} s"),
        ]
    )
    emit(heading, "", predicted_table(made.predicted, made.bound), *made.notes)


def allowed(text: str | None) -> list[str] | None:
    """The names between commas, each of them known."""
    if text is None:
        return None
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names or [text]:
        if name not in ALLOWED:
            raise click.BadParameter(f"{name!r} is none of {', '.join(ALLOWED)}.")
    return names


def checked(trace: Trace, hardware: Hardware, made: Plan) -> Plan:
    """The plan with the trace's sha256 and what the simulator predicts. Raises ``CheckFailed`` if
    simulator and validator do not both find it feasible, in the same time."""
    from ..simulator import simulate
    from ..validator import validate

    simulated, validated = simulate(trace, hardware, made), validate(trace, hardware, made)
    for who, result in (("simulator", simulated), ("validator", validated)):
        if not result.feasible:
            raise CheckFailed(
                f"the {who} finds the plan of {made.policy} infeasible: {result.reason}; "
                "nothing was written"
            )
    if not _agree(simulated, validated):
        raise CheckFailed(
            f"simulator and validator do not agree on the plan of {made.policy}: "
            f"{_iteration_us(simulated):.3f} and {_iteration_us(validated):.3f} µs; "
            "nothing was written"
        )
    return replace(made, trace_sha256=trace.sha256, predicted=simulated.predicted)


def _agree(one: Simulation, other: Simulation) -> bool:
    a, b = _iteration_us(one), _iteration_us(other)
    return abs(a - b) <= AGREEMENT * max(a, b)


def _iteration_us(simulation: Simulation) -> float:
    assert simulation.predicted is not None
    return simulation.predicted.iteration_us
