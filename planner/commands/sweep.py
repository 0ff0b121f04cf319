"""``tensorpager simulate --sweep``: what other machines would do, as tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from ..hardware import describe
from ..sizes import format_bytes
from .axes import Axis, Point, grid
from .failures import CheckFailed
from .options import Machine
from .output import Progress, emit, emit_json, progress_bar
from .tables import PREDICTED, bar, format_us, pairs, short, table

if TYPE_CHECKING:
    from ..plan import Plan
    from ..sweep import Outcome, Task
    from ..trace import Trace

MOST_PLANS = 1000
MOST_REASONS = 8
WHOLE_TABLE = 2  # axes up to which a line has room for the peaks
BARS = 1  # axes up to which there is room for a bar, as long as the speed
_UNITS = {"TiB": 1 << 40, "GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10, "B": 1}


class Asked(NamedTuple):
    """What is swept: ``plan`` is run everywhere if there is one, else every policy plans."""

    trace_path: Path
    trace: Trace
    machine: Machine
    policies: Sequence[str]
    quick: bool
    plan: Plan | None = None


def run_sweep(asked: Asked, axes: Sequence[Axis], as_json: bool) -> None:
    """Raises ``CheckFailed``, after all is printed, if nothing is feasible anywhere."""
    count = math.prod(len(axis.values) for axis in axes) * len(asked.policies)
    if count > MOST_PLANS:
        raise click.BadOptionUsage(
            "sweep",
            f"--sweep: {' × '.join(str(len(axis.values)) for axis in axes)} machines and "
            f"{len(asked.policies)} policies are {count} plans; at most {MOST_PLANS} are made at a "
            "time, give fewer values.",
        )
    points = grid(axes, asked.machine, asked.trace)
    outcomes = _evaluated(asked, points)
    if as_json:
        emit_json(_json(asked, axes, outcomes))
    else:
        _print(asked, axes, points, outcomes)
    if not any(outcome.predicted for outcome in outcomes):
        raise CheckFailed(f"nothing runs at any of {len(points)} points: {outcomes[0].reason}")


def _evaluated(asked: Asked, points: Sequence[Point]) -> list[Outcome]:
    """By policy, then by point."""
    from ..sweep import Task, evaluate_all

    tasks = [
        Task(policy, point.hardware, asked.quick, asked.plan)
        for policy in asked.policies
        for point in points
    ]
    with progress_bar() as progress:
        return evaluate_all(asked.trace, tasks, counted(progress, tasks))


def counted(progress: Progress | None, tasks: Sequence[Task]) -> Any:
    """A callback for each outcome that tells ``progress`` how many are there."""
    if progress is None:
        return None
    progress(f"0 of {len(tasks)} plans", 0.0)
    there: list[Outcome] = []

    def done(outcome: Outcome) -> None:
        there.append(outcome)
        progress(f"{len(there)} of {len(tasks)} plans", len(there) / len(tasks))

    return done


# --- JSON ----------------------------------------------------------------------------------------


def row(outcome: Outcome) -> dict[str, Any]:
    """A point as JSON holds it: the whole machine, the policy, what came of it."""
    predicted = outcome.predicted
    hardware = {
        name: "inf" if value == math.inf else value
        for name, value in asdict(outcome.hardware).items()
    }
    return {
        **hardware,
        "policy": outcome.policy,
        "feasible": predicted is not None,
        "reason": outcome.reason,
        **{name: getattr(predicted, name) if predicted else None for name in PREDICTED},
        "bound_us": outcome.bound_us,
        "seconds": outcome.seconds,
    }


def _json(asked: Asked, axes: Sequence[Axis], outcomes: Sequence[Outcome]) -> dict[str, Any]:
    return {
        "ideal_us": asked.trace.ideal_us,
        "peak_bytes": peak_bytes(asked),
        "axes": [
            {"name": axis.name, "fields": axis.fields, "labels": axis.labels} for axis in axes
        ],
        "points": [row(outcome) for outcome in outcomes],
    }


def peak_bytes(asked: Asked) -> int:
    """What the trace has live at its fullest, in whole pages of the machine that was named."""
    from ..lifetimes import live_pages

    page_size = asked.machine.base.page_size
    return int(live_pages(asked.trace, page_size).max(initial=0)) * page_size


# --- for people ----------------------------------------------------------------------------------


def _print(
    asked: Asked,
    axes: Sequence[Axis],
    points: Sequence[Point],
    outcomes: Sequence[Outcome],
) -> None:
    trace = asked.trace
    peak = format_bytes(peak_bytes(asked))
    facts = [
        (
            "trace",
            f"{asked.trace_path}, {trace.ops} ops in {format_us(trace.ideal_us)}, peak {peak}",
        ),
        ("hardware", describe(asked.machine.for_trace(trace))),
        *((f"sweep {axis.name}", _span(axis.labels)) for axis in axes),
    ]
    parts: list[Any] = [pairs(facts)]
    for number, policy in enumerate(asked.policies):
        mine = outcomes[number * len(points) : (number + 1) * len(points)]
        parts += ["", _table(policy, axes, points, mine), *_reasons(points, mine)]
    emit(*parts)


def _span(labels: Sequence[str]) -> str:
    shown = ", ".join(labels if len(labels) <= 5 else [*labels[:2], "…", labels[-1]])
    return shown if len(labels) <= 5 else f"{shown} ({len(labels)} values)"


def _table(
    policy: str, axes: Sequence[Axis], points: Sequence[Point], outcomes: Sequence[Outcome]
) -> Any:
    """One policy at every point; the peaks where there is room for them."""
    sizes = ["bytes_out", "bytes_in"]
    heads = ["out", "in"]
    if len(axes) <= WHOLE_TABLE:
        sizes = ["peak_device_bytes", "peak_host_bytes", "peak_disk_bytes", *sizes]
        heads = ["device", "host", "disk", *heads]
    able = [outcome.predicted for outcome in outcomes if outcome.predicted]
    most = max((getattr(predicted, name) for predicted in able for name in sizes), default=0)
    unit = next(name for name, size in _UNITS.items() if most >= size or size == 1)
    rows = []
    for point, outcome in zip(points, outcomes):
        predicted = outcome.predicted
        if predicted is None:
            rows.append([*point.labels, "no plan", *[""] * (2 + len(sizes) + (len(axes) <= BARS))])
            continue
        rows.append(
            [
                *point.labels,
                format_us(predicted.iteration_us),
                f"{predicted.percent_of_ideal:.2f}",
                format_us(predicted.stall_us),
                *(in_unit(getattr(predicted, name), unit) for name in sizes),
                *([bar(predicted.percent_of_ideal, 100)] if len(axes) <= BARS else []),
            ]
        )
    what = "peaks, bytes out and in" if len(axes) <= WHOLE_TABLE else "bytes out and in"
    names = [axis.name if axis.name != "device" else "budget" for axis in axes]
    ends = ["<"] if len(axes) <= BARS else []
    return table(
        (*names, "time", "% ideal", "stall", *heads, *ends),
        rows,
        title=f"{policy}  ({what} in {unit})",
    )


def in_unit(size: float, unit: str) -> str:
    """``size`` bytes in a unit, which the table names: ``"9.54"``."""
    value = size / _UNITS[unit]
    return f"{value:.0f}" if unit == "B" or not value else f"{value:.2f}"


def _reasons(points: Sequence[Point], outcomes: Sequence[Outcome]) -> list[str]:
    """Why there is no plan at some points."""
    failed = [(point, found) for point, found in zip(points, outcomes) if not found.predicted]
    lines = [
        f"{', '.join(point.labels) or 'here'}: {short(found.reason, 400)}"
        for point, found in failed[:MOST_REASONS]
    ]
    if len(failed) > MOST_REASONS:
        lines.append(f"… and {len(failed) - MOST_REASONS} more without a plan (--json says why)")
    return lines
