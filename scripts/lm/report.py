"""What a run shows: progress while it trains, a table at its end, a JSON file for others."""

import ctypes
import datetime
import json
import os
import platform
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import tensorpager as tp
from tensorpager.pager.machine.ranks import ranks_sharing
from tensorpager.planner.sizes import format_bytes

from .memory import MemoryReport
from .options import TIERS, Options

UNTIMED_STEPS = 2  # measured, recorded or warming up: not typical


class StepPrinter:
    """A progress bar on a terminal, about twenty plain lines elsewhere."""

    def __init__(self, name: str, options: Options, first_step: int, *, quiet: bool) -> None:
        """``quiet``: print nothing, as all ranks but one do."""
        self._name = name
        self._quiet = quiet
        self._options = options
        self._every = max(1, (options.steps - first_step) // 20)
        self._bar: Progress | None = None
        console = Console()
        if console.is_terminal and not quiet:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[facts]}"),
                TimeRemainingColumn(),
                console=console,
            )
            self._task = self._bar.add_task(
                name, total=options.steps, completed=first_step, facts=""
            )

    def __enter__(self) -> "StepPrinter":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, step: int, loss: float, seconds: float, peaks: dict[str, int] | None) -> None:
        """Show step number ``step`` (from 0). ``peaks``: bytes by tier so far, if known."""
        if self._quiet:
            return
        rate = self._options.batch * self._options.seq / seconds
        facts = f"loss {loss:.4f}  {rate:,.0f} tokens/s"
        for tier in TIERS if peaks is not None else ():
            facts += f"  {tier} {format_bytes(peaks[tier])}" if peaks and peaks[tier] else ""
        if self._bar is not None:
            self._bar.update(self._task, completed=step + 1, facts=facts)
        elif (step + 1) % self._every == 0 or step + 1 == self._options.steps:
            print(f"{self._name} step {step + 1}/{self._options.steps}  {facts}", flush=True)


def tokens_per_second(options: Options, step_seconds: list[float]) -> float:
    """From the median step, without the first ones where there are others."""
    timed = step_seconds[UNTIMED_STEPS:] or step_seconds
    return options.batch * options.seq / statistics.median(timed)


def make_record(
    options: Options,
    first_step: int,
    losses: list[float],
    gradient_norms: list[float | None],
    step_seconds: list[float],
    reports: list[MemoryReport],
    parameters_sha256: str,
) -> dict[str, Any]:
    """What ``--json`` writes. Times in seconds, memory in bytes. ``reports``: by rank; the record
    has the largest peaks of any, and the part of the budgets that each has."""
    needs = [report.needed_bytes for report in reports if report.needed_bytes is not None]
    memory = reports[0]
    return {
        "mode": "paged" if options.pager else "plain",
        "parallel": options.parallel,
        "first_step": first_step,
        "losses": losses,
        "gradient_norms": gradient_norms,
        "final_parameters_sha256": parameters_sha256,
        "step_seconds": step_seconds,
        "tokens_per_second": tokens_per_second(options, step_seconds),
        "peak_bytes": {tier: max(r.peak_bytes[tier] for r in reports) for tier in TIERS},
        "budget_bytes": memory.budget_bytes,
        "needed_bytes": max(needs) * ranks_sharing("device", options.device) if needs else None,
        "pager": memory.pager,
        "ranks": [
            {
                "peak_bytes": report.peak_bytes,
                "budget_bytes": report.budget_bytes,
                "stall_us": None if report.pager is None else report.pager["stall_us"],
            }
            for report in reports
        ],
        "facts": run_facts(options.device),
    }


def run_facts(device: str) -> dict[str, Any]:
    """Where, when and with what a figure was measured."""
    gpu = torch.cuda.get_device_name() if device == "cuda" else None
    return {
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": platform.machine(),
        "system": platform.platform(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": gpu,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "tensorpager": tp.__version__,
    }


def on_fake_cuda() -> bool:
    """Kernels do nothing here (tests/fakecuda): no time or value that is measured says anything."""
    return hasattr(ctypes.CDLL(None), "fakecuda_counts")


def write_json(path: Path, record: dict[str, Any]) -> None:
    path.write_text(json.dumps(record, indent=2) + "\n")


def print_summary(record: dict[str, Any]) -> None:
    """The table at the end of one run."""
    table = Table(title=f"train_lm: {record['mode']} run", title_justify="left")
    table.add_column("")
    table.add_column("value", justify="right")
    for name, value in _summary_rows(record):
        table.add_row(name, value)
    Console().print(table)


def _summary_rows(record: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [
        ("loss, first step", f"{record['losses'][0]:.4f}"),
        ("loss, last step", f"{record['losses'][-1]:.4f}"),
        ("tokens/s, median", f"{record['tokens_per_second']:,.0f}"),
        ("step, median", f"{statistics.median(record['step_seconds']):.3f} s"),
    ]
    if len(record["ranks"]) > 1:
        rows.append(("ranks", f"{len(record['ranks'])}, {record['parallel']}; of the largest:"))
    rows += [(f"{tier} peak", tier_text(record, tier)) for tier in TIERS]
    if record["needed_bytes"] is not None:
        needed = record["needed_bytes"]
        rows.append(("would fit in", f"{format_bytes(needed)} ({needed} bytes)"))
    return rows + (_pager_rows(record["pager"]) if record["pager"] is not None else [])


def _pager_rows(stats: dict[str, Any]) -> list[tuple[str, str]]:
    """What the pager did, and whether it went as planned."""
    if stats["fits"]:
        return [("paging", "none: everything fits")]
    rows = [("paging", stats["mode"])]
    if stats["iteration_stall_us"] is not None:
        rows.append(("stall, last step", f"{stats['iteration_stall_us'] / 1e3:.1f} ms"))
    if stats["measured_us"] is not None:
        times = f"{stats['measured_us'] / 1e3:.1f} of {stats['predicted_us'] / 1e3:.1f} ms"
        rows.append(("iteration, measured of predicted", times))
    if stats.get("overhead_us") is not None:
        ideal, overhead = stats["ideal_us"] / 1e3, stats["overhead_us"] / 1e3
        rows.append(("overhead, beside plain PyTorch's", f"{overhead:.1f}, {ideal:.1f} ms"))
    if stats["prefetches"]:
        share = stats["prefetch_hits"] / stats["prefetches"]
        rows.append(("prefetches in time", f"{share:.1%} of {stats['prefetches']:,}"))
    moved = (f"{format_bytes(n)} {way}" for way, n in stats["channel_bytes"].items() if n)
    return [*rows, ("moved", ", ".join(moved) or "nothing")]


def tier_text(record: dict[str, Any], tier: str) -> str:
    """Such as ``"96.00 MiB of 100.00 MiB"``."""
    peak = format_bytes(record["peak_bytes"][tier])
    if record["budget_bytes"] is None:
        return peak
    return f"{peak} of {format_bytes(record['budget_bytes'][tier])}"
