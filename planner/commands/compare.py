"""``tensorpager compare``: every policy side by side on one trace and machine."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import InfeasibleBudget, PolicyRefusal
from ..hardware import describe
from ..sizes import format_bytes
from .checks import require_working_sets
from .options import (
    Machine,
    hardware_options,
    json_option,
    policy_names,
    quick_option,
    trace_argument,
)
from .output import Progress, emit, emit_json, progress_bar
from .tables import format_percent, format_us, pairs, table

if TYPE_CHECKING:
    from ..hardware import Hardware
    from ..plan import Predicted
    from ..trace import Trace

_MEASURES = (
    "peak_device_bytes",
    "peak_host_bytes",
    "peak_disk_bytes",
    "bytes_out",
    "bytes_in",
    "disk_bytes_written",
)


@click.command()
@trace_argument
@hardware_options
@click.option("--policies", metavar="A,B,…", help="Which policies (default: all).")
@quick_option
@json_option
def compare(
    trace_path: Path, machine: Machine, policies: str | None, quick: bool, as_json: bool
) -> None:
    """Plan with every policy, side by side.

    Each plan runs through the same machine model.

    A policy that has no plan for this machine is listed with its reason.

    \b
    Example:
      tensorpager compare bert-256.parquet --hardware g10 --policies lru,g10,lp
    """
    from ..policies.registry import POLICIES
    from ..trace_file import read_trace

    names = list(POLICIES) if policies is None else policy_names(policies)
    trace = read_trace(trace_path)
    hardware = machine.for_trace(trace)
    require_working_sets(trace, hardware)
    with progress_bar() as progress:
        result = compared(trace, hardware, names, quick=quick, progress=progress)
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
    emit(heading, "", _table(result["policies"]), *_reasons(result["policies"]))


def compared(
    trace: Trace,
    hardware: Hardware,
    names: list[str],
    *,
    quick: bool,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """The comparison as JSON holds it. The bound is the linear program's, whoever plans."""
    from ..lp.policy import bound

    bound_us: float | None = None
    rows = []
    for number, name in enumerate(names):
        part = _part(progress, name, number, len(names))
        row, found = _row(name, trace, hardware, quick, part)
        bound_us = bound_us if found is None else found
        rows.append(row)
    if bound_us is None:
        bound_us = bound(trace, hardware, quick=quick)
    for row in rows:
        if row["iteration_us"]:
            row["percent_of_bound"] = 100.0 * bound_us / row["iteration_us"]
    return {
        "ideal_us": trace.ideal_us,
        "bound": {
            "iteration_us": bound_us,
            "percent_of_ideal": 100.0 * trace.ideal_us / bound_us if bound_us else 100.0,
        },
        "policies": rows,
    }


def _part(progress: Progress | None, name: str, number: int, total: int) -> Progress | None:
    """Reports the progress of one of ``total`` policies as that of the whole."""
    if progress is None:
        return None
    progress(name, number / total)
    return lambda what, share: progress(f"{name}: {what}", (number + share) / total)


def _row(
    name: str, trace: Trace, hardware: Hardware, quick: bool, progress: Progress | None
) -> tuple[dict[str, Any], float | None]:
    """One policy's line, and the bound in µs if its plan came with one."""
    from ..policies.make import make_plan
    from ..simulator import simulate

    began = time.perf_counter()
    try:
        plan = make_plan(name, trace, hardware, quick=quick, progress=progress)
    except (PolicyRefusal, InfeasibleBudget) as refusal:
        return _entry(name, str(refusal), None, time.perf_counter() - began), None
    seconds = time.perf_counter() - began
    result = simulate(trace, hardware, plan)
    reason = "" if result.feasible else result.reason
    entry = _entry(name, reason, result.predicted if result.feasible else None, seconds)
    return entry, plan.bound.iteration_us if plan.bound else None


def _entry(name: str, reason: str, predicted: Predicted | None, seconds: float) -> dict[str, Any]:
    def value(field: str) -> Any:
        return getattr(predicted, field) if predicted else None

    return {
        "policy": name,
        "feasible": predicted is not None,
        "reason": reason,
        "iteration_us": value("iteration_us"),
        "percent_of_ideal": value("percent_of_ideal"),
        "percent_of_bound": None,
        "stall_us": value("stall_us"),
        **{field: value(field) for field in _MEASURES},
        "plan_seconds": seconds,
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


def _reasons(rows: list[dict[str, Any]]) -> list[str]:
    """A line for each policy without a plan, led by its name."""
    return [
        f"{row['policy']}: {row['reason'].removeprefix(row['policy'] + ': ')}"
        for row in rows
        if not row["feasible"]
    ]
