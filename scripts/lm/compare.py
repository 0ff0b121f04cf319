"""The same training plain and paged, each in a process of its own."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tensorpager.planner.sizes import format_bytes

from .options import TIERS, Options, paged_arguments, plain_arguments
from .report import run_facts, tier_text, write_json


@dataclass(frozen=True)
class ChildError(Exception):
    """A run ended without a result; it has said why on stderr."""

    name: str
    exit_code: int  # negative: the signal that ended it

    def __str__(self) -> str:
        how = f"signal {-self.exit_code}" if self.exit_code < 0 else f"code {self.exit_code}"
        return f"the {self.name} run ended with {how}"


def compare(script: Path, options: Options) -> int:
    """Run all of them, print the table, and return the exit code: 0 if they agree bit for bit."""
    runs: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="train_lm-") as folder:
        result = Path(folder) / "result.json"
        runs["plain"] = plain = _run("plain", script, plain_arguments(options, result), result)
        needed = plain["needed_bytes"]
        for name in ("demand", "paged") if options.demand else ("paged",):
            arguments = paged_arguments(options, result, needed, demand=name == "demand")
            runs[name] = _run(name, script, arguments, result)
    same_losses, same_parameters = (
        all(run[what] == plain[what] for run in runs.values())
        for what in ("losses", "final_parameters_sha256")
    )
    _print_table(runs)
    print(f"losses identical: {_yes(same_losses)}")
    print(f"final parameters identical: {_yes(same_parameters)}")
    if options.json is not None:
        paged = runs["paged"]
        record = {
            **runs,
            "losses_identical": same_losses,
            "final_parameters_identical": same_parameters,
            "speed_ratio": paged["tokens_per_second"] / plain["tokens_per_second"],
            "device_budget_share_of_need": paged["budget_bytes"]["device"] / needed,
            "facts": run_facts(options.device),
        }
        write_json(options.json, record)
    return 0 if same_losses and same_parameters else 1


def _run(name: str, script: Path, arguments: list[str], result: Path) -> dict[str, Any]:
    """One child, its output passed through. Its record, with ``max_rss_bytes`` added."""
    result.unlink(missing_ok=True)
    print(f"{name} run: {script.name} {' '.join(arguments[:-1])}", flush=True)  # without --json
    child = subprocess.Popen([sys.executable, str(script), *arguments])
    try:
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)  # Popen must not wait again
    except BaseException:
        child.send_signal(signal.SIGTERM)
        child.wait()
        raise
    if child.returncode != 0 or not result.exists():
        raise ChildError(name, child.returncode)
    record: dict[str, Any] = json.loads(result.read_text())
    record["max_rss_bytes"] = usage.ru_maxrss * 1024  # Linux counts it in KiB
    return record


def _print_table(runs: dict[str, dict[str, Any]]) -> None:
    """A column for each run, in 80 columns."""
    table = Table(title="train_lm: the same training", title_justify="left")
    table.add_column("")
    shown = {"demand": "on demand", "paged": "planned"} if "demand" in runs else {}
    for name in runs:
        table.add_column(shown.get(name, name), justify="right")
    plain = runs["plain"]

    def row(what: str, cell: Callable[[dict[str, Any]], str]) -> None:
        table.add_row(what, *(cell(run) for run in runs.values()))

    row("loss, first step", lambda run: f"{run['losses'][0]:.4f}")
    row("loss, last step", lambda run: f"{run['losses'][-1]:.4f}")
    row("tokens/s, median", lambda run: f"{run['tokens_per_second']:,.0f}")
    row("speed", lambda run: f"{run['tokens_per_second'] / plain['tokens_per_second']:.1%}")
    for tier in TIERS:
        row(f"{tier} peak", partial(_peak, tier=tier))
    row("largest RSS", lambda run: format_bytes(run["max_rss_bytes"]))
    Console().print(table)


def _peak(run: dict[str, Any], tier: str) -> str:
    """What was used of which budget, one below the other."""
    return tier_text(run, tier).replace(" of ", "\nof ")


def _yes(truth: bool) -> str:
    return "yes" if truth else "no"
