"""``tensorpager compare``: every policy side by side on one trace and machine."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..hardware import describe
from ..sizes import format_bytes
from .checks import warn_of_durations
from .options import (
    Machine,
    TraceCommand,
    hardware_options,
    json_option,
    policy_names,
    quick_option,
    trace_argument,
)
from .output import Progress, emit, emit_json, output_path, progress_bar
from .tables import PREDICTED, format_percent, format_us, layers_table, pairs, table

if TYPE_CHECKING:
    from ..hardware import Hardware
    from ..sweep import Outcome
    from ..trace import Trace


@click.command(cls=TraceCommand)
@trace_argument
@hardware_options
@click.option("--policies", metavar="A,B,…", help="Which policies (default: all).")
@quick_option
@click.option(
    "--html",
    "html_path",
    metavar="FILE",
    type=click.Path(path_type=Path),
    callback=output_path,
    help="Write a page for the browser too: the policies, and what the fastest one does.",
)
@json_option
def compare(
    trace_path: Path,
    machine: Machine,
    policies: str | None,
    quick: bool,
    html_path: Path | None,
    as_json: bool,
) -> None:
    """Plan with every policy, side by side.

    Each plan runs through the same machine model.

    A policy that has no plan for this machine is listed with its reason. Where the trace says which
    ops may run again and which the host can take, there are also checkpoint, selective,
    zero-offload and joint, with what each decided for which layers.

    \b
    Example:
      tensorpager compare trace.parquet --hardware g10 --device-bytes 50% \\
        --policies lru,lp
    """
    from ..lifetimes import require_working_sets
    from ..registry import CHOOSERS, POLICIES
    from ..timeline import timeline
    from ..trace_file import read_trace
    from .html import write_report

    trace = read_trace(trace_path)
    names = policy_names(policies) if policies is not None else list(POLICIES)
    if policies is None and not trace.has_choices:
        names = [name for name in names if name not in CHOOSERS]
    warn_of_durations(trace, machine)
    hardware = machine.for_trace(trace)
    require_working_sets(trace, hardware)
    with progress_bar() as progress:
        outcomes = planned(trace, hardware, names, quick=quick, progress=progress)
    result = beside(trace, hardware, outcomes, quick=quick)
    if html_path is not None:
        ran = [(one.predicted.iteration_us, one.plan) for one in outcomes if one.predicted]
        best = min(ran, key=lambda one: one[0])[1] if ran else None
        line = timeline(trace, best, hardware if best else None)
        names_of = {"trace": trace_path.name}
        write_report(html_path, line, hardware, files=names_of, comparison=result)
    if as_json:
        emit_json(result)
        return
    bound = result["bound"]
    heading = pairs(
        [
            ("trace", f"{trace_path}, {trace.ops} ops"),
            ("hardware", describe(hardware)),
            ("ideal", format_us(trace.ideal_us)),
            (
                "bound",
                f"{format_us(bound['iteration_us'])}, "
                f"{format_percent(bound['percent_of_ideal'])} of the ideal",
            ),
        ]
    )
    emit(
        heading,
        "",
        _table(result["policies"]),
        *_reasons(result["policies"]),
        *_decisions(result["policies"]),
        *([] if html_path is None else ["", f"{html_path}: open it in a browser"]),
    )


def planned(
    trace: Trace,
    hardware: Hardware,
    names: list[str],
    *,
    quick: bool,
    progress: Progress | None = None,
) -> list[Outcome]:
    """Of each policy, with its plan."""
    from ..sweep import Task, evaluate

    return [
        evaluate(
            trace,
            Task(name, hardware, quick, keep_plan=True),
            _part(progress, name, number, len(names)),
        )
        for number, name in enumerate(names)
    ]


def beside(
    trace: Trace, hardware: Hardware, outcomes: list[Outcome], *, quick: bool
) -> dict[str, Any]:
    """The comparison as JSON holds it. The bound is a linear program's, whoever plans: the joint
    one where that was asked for."""
    from ..lp.policy import bound

    bounds = [outcome.bound_us for outcome in outcomes if outcome.bound_us is not None]
    bound_us = min(bounds) if bounds else bound(trace, hardware, quick=quick)
    return {
        "ideal_us": trace.ideal_us,
        "bound": {
            "iteration_us": bound_us,
            "percent_of_ideal": 100.0 * trace.ideal_us / bound_us if bound_us else 100.0,
        },
        "policies": [_row(trace, outcome, bound_us) for outcome in outcomes],
    }


def _part(progress: Progress | None, name: str, number: int, total: int) -> Progress | None:
    """Reports the progress of one of ``total`` policies as that of the whole."""
    if progress is None:
        return None
    progress(name, number / total)
    return lambda what, share: progress(f"{name}: {what}", (number + share) / total)


def _row(trace: Trace, outcome: Outcome, bound_us: float) -> dict[str, Any]:
    from ..joint.layers import decided

    predicted = outcome.predicted
    figures = {name: getattr(predicted, name) if predicted else None for name in PREDICTED}
    time_us, of_ideal = figures.pop("iteration_us"), figures.pop("percent_of_ideal")
    return {
        "policy": outcome.policy,
        "feasible": predicted is not None,
        "reason": outcome.reason,
        "iteration_us": time_us,
        "percent_of_ideal": of_ideal,
        "percent_of_bound": 100.0 * bound_us / time_us if time_us else None,
        **figures,
        "plan_seconds": outcome.seconds,
        **(
            {"layers": [asdict(layer) for layer in decided(trace, outcome.plan)]}
            if outcome.plan is not None and outcome.plan.has_choices
            else {}
        ),
    }


def _table(rows: list[dict[str, Any]]) -> Any:
    heads = ("<policy", "time", "% ideal", "% bound", "out", "in", "planned")
    return table(heads, [_cells(row) for row in rows])


def _cells(row: dict[str, Any]) -> list[str]:
    planned = f"{row['plan_seconds']:.1f} s"
    if not row["feasible"]:
        return [row["policy"], "no plan", "", "", "", "", planned]
    return [
        row["policy"],
        format_us(row["iteration_us"]),
        *(f"{row[name]:.2f}" for name in ("percent_of_ideal", "percent_of_bound")),
        *(format_bytes(row[name]) for name in ("bytes_out", "bytes_in")),
        planned,
    ]


def _decisions(rows: list[dict[str, Any]]) -> list[Any]:
    """A table for each policy that chose, of what it decided."""
    found: list[Any] = []
    for row in rows:
        if row.get("layers"):
            found += ["", layers_table(row["layers"], f"what {row['policy']} decided")]
    return found


def _reasons(rows: list[dict[str, Any]]) -> list[str]:
    """A line for each policy without a plan, led by its name."""
    return [f"{row['policy']}: {row['reason']}" for row in rows if not row["feasible"]]
