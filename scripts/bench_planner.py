#!/usr/bin/env python3
"""What the planner's policies reach on public traces: the tables of planner/README.md.

  python scripts/bench_planner.py compare  bert-256.json.gz …     every policy and the bound
  python scripts/bench_planner.py lp       TRACES…                 lp, quick lp and the bound
  python scripts/bench_planner.py shares   TRACE                   30, 50 and 70 % of the peak
  python scripts/bench_planner.py monotone TRACE                   more memory, host, bandwidth
  python scripts/bench_planner.py savings  TRACE                   memory saved at a slowdown
  python scripts/bench_planner.py scale                            100,000 ops, 50,000 tensors
  python scripts/bench_planner.py joint    TRACE HARDWARE …        what is kept, moved, made again …

TRACES are g10-neutral-1 files (.json.gz) or traces (.parquet). Every plan is run by the simulator,
and by the independent validator where the last column says so.
"""

from __future__ import annotations

import datetime
import json
import platform
import random
import resource
import sys
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from tensorpager.planner.errors import InfeasibleBudget, PolicyRefusal
from tensorpager.planner.hardware import PRESETS, Hardware, load_hardware
from tensorpager.planner.importers import g10
from tensorpager.planner.lifetimes import live_pages
from tensorpager.planner.lp.policy import plan as plan_lp
from tensorpager.planner.plan import Plan
from tensorpager.planner.policies import autoswap
from tensorpager.planner.registry import POLICIES, make_plan
from tensorpager.planner.sizes import format_bytes
from tensorpager.planner.target import least_memory
from tensorpager.planner.trace import Trace, make_trace
from tensorpager.planner.trace_file import read_trace
from tensorpager.planner.validator import validate

Rows = list[dict[str, Any]]
GIB = 1 << 30


def load(path: Path) -> Trace:
    return read_trace(path) if path.suffix == ".parquet" else g10.load(path)


def name_of(path: Path) -> str:
    return path.name.removesuffix(".gz").removesuffix(".json").removesuffix(".parquet")


def peak_bytes(trace: Trace, hardware: Hardware) -> int:
    return int(live_pages(trace, hardware.page_size).max()) * hardware.page_size


def described(plan: Plan, seconds: float) -> dict[str, Any]:
    """The figures of a plan that every table has."""
    assert plan.predicted is not None
    return {
        "percent_of_ideal": round(plan.predicted.percent_of_ideal, 2),
        "out": format_bytes(plan.predicted.bytes_out),
        "disk written": format_bytes(plan.predicted.disk_bytes_written),
        "seconds": round(seconds, 1),
    }


def with_bound(plan: Plan, trace: Trace) -> dict[str, Any]:
    assert plan.bound is not None
    return {
        "bound": round(100 * trace.ideal_us / plan.bound.iteration_us, 2),
        "percent_of_bound": round(plan.bound.percent_of_bound, 2),
    }


def timed(policy: Any, trace: Trace, hardware: Hardware) -> tuple[Plan, float]:
    started = time.perf_counter()
    plan = policy(trace, hardware)
    return plan, time.perf_counter() - started


@click.group(help=__doc__)
def main() -> None:
    pass


def finish(title: str, rows: Rows, json_path: Path | None) -> None:
    """Print the table, and write it with what it takes to repeat it."""
    console = Console(width=None if sys.stdout.isatty() else 150)
    table = Table(title=title, title_justify="left")
    columns = list(dict.fromkeys(key for row in rows for key in row))
    for column in columns:
        table.add_column(column, justify="left" if column == columns[0] else "right")
    for row in rows:
        table.add_row(*(str(row.get(column, "")) for column in columns))
    console.print(table)
    if json_path is not None:
        facts = {
            "command": ["scripts/bench_planner.py", *sys.argv[1:]],
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "system": platform.platform(),
            "python": platform.python_version(),
        }
        json_path.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")


json_option = click.option("--json", "json_path", type=click.Path(path_type=Path))
hardware_option = click.option(
    "--hardware", type=click.Choice(list(PRESETS)), default="g10", show_default=True
)
traces_argument = click.argument(
    "paths", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path)
)
trace_argument = click.argument("path", type=click.Path(exists=True, path_type=Path))


@main.command()
@traces_argument
@hardware_option
@json_option
def compare(paths: tuple[Path, ...], hardware: str, json_path: Path | None) -> None:
    """Percent of the ideal that every policy reaches; "-": it refuses."""
    rows: Rows = []
    machine = PRESETS[hardware]
    for path in paths:
        trace = load(path)
        row: dict[str, Any] = {"trace": name_of(path)}
        for name, policy in POLICIES.items():
            try:
                plan, _ = timed(policy, trace, machine)
            except (PolicyRefusal, InfeasibleBudget):
                row[name] = "-"
                continue
            assert plan.predicted is not None
            row[name] = round(plan.predicted.percent_of_ideal, 2)
            if name == "lp":
                row |= with_bound(plan, trace)
        rows.append(row)
    finish(f"percent of the ideal on {hardware}", rows, json_path)


@main.command()
@traces_argument
@hardware_option
@json_option
def lp(paths: tuple[Path, ...], hardware: str, json_path: Path | None) -> None:
    """lp, and lp --quick, against the bound."""
    rows: Rows = []
    machine = PRESETS[hardware]
    for path in paths:
        trace = load(path)
        plan, seconds = timed(plan_lp, trace, machine)
        quick, quick_seconds = timed(partial(plan_lp, quick=True), trace, machine)
        assert plan.predicted is not None
        assert quick.predicted is not None
        verdict = validate(trace, machine, plan)
        agrees = verdict.predicted is not None and (
            abs(verdict.predicted.iteration_us - plan.predicted.iteration_us) < 1.0
        )
        rows.append(
            {
                "trace": name_of(path),
                "ops": trace.ops,
                "peak": format_bytes(peak_bytes(trace, machine)),
                **with_bound(plan, trace),
                **described(plan, seconds),
                "quick": round(quick.predicted.percent_of_ideal, 2),
                "quick seconds": round(quick_seconds, 1),
                "validator": "agrees" if agrees else f"DIFFERS {verdict.reason}",
            }
        )
    finish(f"lp on {hardware}", rows, json_path)


@main.command()
@trace_argument
@click.option("--policies", default="lp,g10,appobmem,autoswap-doa,lru", show_default=True)
@click.option("--quick", is_flag=True, help="lp --quick.")
@json_option
def shares(path: Path, policies: str, quick: bool, json_path: Path | None) -> None:
    """Shares of a trace's peak as device memory, on a100 and h200."""
    trace = load(path)
    rows: Rows = []
    for preset in ("a100", "h200"):
        for share in (0.3, 0.5, 0.7):
            peak = peak_bytes(trace, PRESETS[preset])
            machine = PRESETS[preset].with_(device_bytes=int(share * peak))
            row: dict[str, Any] = {
                "hardware": preset,
                "share": f"{share:.0%}",
                "device": format_bytes(share * peak),
            }
            for name in policies.split(","):
                policy = partial(plan_lp, quick=quick) if name == "lp" else POLICIES[name]
                try:
                    plan, _ = timed(policy, trace, machine)
                except (PolicyRefusal, InfeasibleBudget):
                    row[name] = "-"
                    continue
                assert plan.predicted is not None
                row[name] = round(plan.predicted.percent_of_ideal, 2)
                if name == "lp":
                    row |= with_bound(plan, trace)
            rows.append(row)
    finish(
        f"{name_of(path)} ({format_bytes(peak)} at its peak), percent of the ideal", rows, json_path
    )


@main.command()
@trace_argument
@click.option("--quick", is_flag=True)
@json_option
def monotone(path: Path, quick: bool, json_path: Path | None) -> None:
    """Iteration times of lp as one resource grows. Exits 1 if more is over 0.5 % slower."""
    trace = load(path)
    base = PRESETS["g10"]
    series: dict[str, list[Hardware]] = {
        "device": [base.with_(device_bytes=n * GIB) for n in (24, 32, 40, 48, 64)],
        "host": [base.with_(host_bytes=n * GIB) for n in (0, 16, 32, 64, 128)],
        "link": [
            base.with_(d2h_bytes_per_s=n * 1e9, h2d_bytes_per_s=n * 1e9)
            for n in (8, 12, 16, 25, 50)
        ],
        "disk": [
            base.with_(disk_read_bytes_per_s=n * 1e9, disk_write_bytes_per_s=n * 1e9)
            for n in (1.6, 3.2, 6.4, 12.8)
        ],
    }
    rows: Rows = []
    worst = 0.0
    for what, machines in series.items():
        seconds = []
        for machine in machines:
            try:
                plan = plan_lp(trace, machine, quick=quick)
            except InfeasibleBudget:
                continue  # too small for any plan
            assert plan.predicted is not None
            seconds.append(plan.predicted.iteration_us / 1e6)
        slower = max((b / a - 1) * 100 for a, b in pairwise(seconds))
        worst = max(worst, slower)
        rows.append(
            {
                "more": what,
                "seconds": ", ".join(f"{second:.3f}" for second in seconds),
                "worst step %": round(slower, 3),
            }
        )
    finish(f"{name_of(path)}: iteration time of lp as a resource grows", rows, json_path)
    sys.exit(worst > 0.5)


@main.command()
@trace_argument
@hardware_option
@json_option
def savings(path: Path, hardware: str, json_path: Path | None) -> None:
    """The smallest device memory at a slowdown: AutoSwap's claim (none) and AppObMem's (5, 10 and
    20 %), with lp beside them: its search ends within 0.5 % of the bound, rarely at no stall at
    all, hence the column of 0.1 %."""
    trace, machine = load(path), PRESETS[hardware]
    rows: Rows = []
    policies = ["lp", *(f"autoswap-{score}" for score in autoswap.SCORES), "appobmem"]
    for name in policies:
        row: dict[str, Any] = {"policy": name + " --quick" * (name == "lp")}
        for slowdown in (0.0, 0.001, 0.05, 0.1, 0.2):
            found = least_memory(trace, name, machine, 100 / (1 + slowdown), quick=True)
            saved = "-"
            if found.enough is not None:
                share = found.enough.hardware.device_bytes / found.peak_bytes
                saved = f"{100 * (1 - share):.1f} %"
            row[f"saved at {slowdown:.1%}"] = saved
        rows.append(row)
    peak = format_bytes(peak_bytes(trace, machine))
    finish(f"{name_of(path)} on {hardware}: memory saved of {peak}", rows, json_path)


@main.command()
@click.option("--ops", type=int, default=100_000, show_default=True)
@json_option
def scale(ops: int, json_path: Path | None) -> None:
    """A long made-up iteration: seconds and memory that planning takes."""
    trace = long_trace(ops)
    peak = peak_bytes(trace, PRESETS["h200"])
    machine = PRESETS["h200"].with_(device_bytes=int(0.6 * peak), host_bytes=peak)
    rows: Rows = []
    for quick in (True, False):
        plan, seconds = timed(partial(plan_lp, quick=quick), trace, machine)
        rows.append(
            {
                "ops": trace.ops,
                "tensors": trace.tensors,
                "quick": quick,
                **with_bound(plan, trace),
                **described(plan, seconds),
                "most memory": format_bytes(
                    resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
                ),
            }
        )
    finish("a long trace", rows, json_path)


def long_trace(ops: int) -> Trace:
    """Forward and backward through as many layers as it takes, and an optimizer step; half as many
    tensors as ops."""
    rng = random.Random(0)
    layers = ops // 20
    tensors: list[tuple[int, int, bool]] = []
    steps: list[tuple[str, float, list[int], list[int]]] = []

    def tensor(most_mib: int, lasting: bool) -> int:
        tensors.append((len(tensors), rng.randint(1, most_mib) << 20, lasting))
        return len(tensors) - 1

    weights = [tensor(40, True) for _ in range(layers)]
    saved: list[list[int]] = []
    last: list[int] = []
    for layer in range(layers):
        saved.append([])
        for part in range(7):
            made = tensor(64, False) if part % 2 == 0 else last[0]
            reads = [*last, *([weights[layer]] if part == 0 else [])]
            steps.append((f"forward.{layer}.{part}", rng.uniform(50, 3000), reads, [made]))
            saved[-1] += [made] if part % 2 == 0 else []
            last = [made]
    for layer in reversed(range(layers)):
        for part in reversed(range(7)):
            made = tensor(64, False) if part % 2 == 0 else last[0]
            reads = [*last, saved[layer][part // 2]]
            reads += [weights[layer]] if part == 0 else []
            steps.append((f"backward.{layer}.{part}", rng.uniform(50, 6000), reads, [made]))
            last = [made]
    for layer in range(layers):
        for part in range(6):
            weight = [weights[layer]]
            steps.append((f"step.{layer}.{part}", rng.uniform(20, 200), weight, weight))
    return make_trace(tensors, steps, page_size=2 << 20, source="made up")


@main.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--alone", is_flag=True, help="Only joint.")
@json_option
def joint(paths: tuple[Path, ...], alone: bool, json_path: Path | None) -> None:
    """Traces of version 2, each followed by its hardware file: joint, and what it is made of."""
    rows: Rows = []
    for trace_path, hardware_path in zip(paths[::2], paths[1::2]):
        trace, machine = read_trace(trace_path), load_hardware(hardware_path)
        row: dict[str, Any] = {"trace": name_of(trace_path)}
        started, clock = time.process_time(), time.perf_counter()
        plan = make_plan("joint", trace, machine)
        row["seconds"] = round(time.perf_counter() - clock, 1)
        row["cpu seconds"] = round(time.process_time() - started, 1)
        judged = validate(trace, machine, plan)
        for name in () if alone else ("lp", "checkpoint", "selective", "zero-offload"):
            try:
                found = make_plan(name, trace, machine)
            except (InfeasibleBudget, PolicyRefusal):
                row[name] = "–"
            else:
                assert found.predicted is not None
                row[name] = round(found.predicted.percent_of_ideal, 2)
        assert plan.predicted is not None
        row["joint"] = round(plan.predicted.percent_of_ideal, 2)
        row |= with_bound(plan, trace)
        row["validator"] = (
            round(judged.predicted.percent_of_ideal, 2) if judged.predicted else judged.reason
        )
        row["host steps"] = len(plan.host_steps)
        row["run again"] = f"{100 * plan.predicted.recompute_us / trace.ideal_us:.1f} %"
        rows.append(row)
        finish("percent of the ideal", rows, json_path)


if __name__ == "__main__":
    main()
