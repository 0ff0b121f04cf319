"""The same training twice, plain and paged, each in a process of its own."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
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
    """Run both, print the table, and return the exit code: 0 if they agree bit for bit."""
    with tempfile.TemporaryDirectory(prefix="train_lm-") as folder:
        result = Path(folder) / "result.json"
        plain = _run("plain", script, plain_arguments(options, result), result)
        needed = plain["needed_bytes"]
        paged = _run("paged", script, paged_arguments(options, result, needed), result)
    same_losses = plain["losses"] == paged["losses"]
    same_parameters = plain["final_parameters_sha256"] == paged["final_parameters_sha256"]
    _print_table(plain, paged)
    print(f"losses identical: {_yes(same_losses)}")
    print(f"final parameters identical: {_yes(same_parameters)}")
    if options.json is not None:
        record = {
            "plain": plain,
            "paged": paged,
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


def _print_table(plain: dict[str, Any], paged: dict[str, Any]) -> None:
    table = Table(title="train_lm: the same training, plain and paged", title_justify="left")
    table.add_column("")
    table.add_column("plain", justify="right")
    table.add_column("paged", justify="right")
    ratio = paged["tokens_per_second"] / plain["tokens_per_second"]
    rows = [
        ("loss, first step", *(f"{run['losses'][0]:.4f}" for run in (plain, paged))),
        ("loss, last step", *(f"{run['losses'][-1]:.4f}" for run in (plain, paged))),
        (
            "tokens/s, median",
            f"{plain['tokens_per_second']:,.0f}",
            f"{paged['tokens_per_second']:,.0f} ({ratio:.1%})",
        ),
        *((f"{tier} peak", tier_text(plain, tier), tier_text(paged, tier)) for tier in TIERS),
        (
            "device, share of the need",
            "100 %",
            f"{paged['budget_bytes']['device'] / plain['needed_bytes']:.1%}",
        ),
        ("process, largest RSS", *(format_bytes(run["max_rss_bytes"]) for run in (plain, paged))),
    ]
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def _yes(truth: bool) -> str:
    return "yes" if truth else "no"
