#!/usr/bin/env python3
"""The same training under several memory systems, side by side.

    bench_train.py --preset 10m --share 50% --disk-rate 200 --disk-rate 500
    bench_train.py --preset 1b --device cuda --share 75% --share 50% --clip 0 --rounds 3
    bench_train.py --modes planned,recompute,joint,checkpoint --host 200% --disk 0 --link-rate 300

On the CPU the cores are the device, but one: it moves pages and runs Python, as a GPU has copy
engines of its own. --threads says otherwise; all memory systems compute with as many.

A first plain run measures the need, which 100 % of --share, --host and --disk means, and gives the
losses that others must repeat bit for bit. Then every memory system trains in a process of its
own, in turns, another one first in each round. Times are of the steps after warm-up; planned modes
warm up until their plan has settled. joint lets the plan choose what runs again and which updates
the host takes; recompute leaves all updates to the device, host_steps all to the host.

Memory is measured from outside. CPU: how much the process grew at its peak (VmHWM), from before
the model was made; the arena is in it, the planner's process is not. CUDA: the caching allocator's
peak in the timed steps, plus the arena, which is not the allocator's.

Exit codes: 1 if losses differ that must not, or one of our modes broke; 2 for wrong usage.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

# Read by libraries when they load, hence before the imports below.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the profiler's, about older memory

import click
import torch
from lm.bench_tables import show
from lm.measure import MOST_WARM_UP_STEPS, OURS, WARM_UP_STEPS, Case, Spec, run_request
from lm.model import PRESETS
from lm.options import DTYPES, UsageError, parse_options, resolve_budget
from lm.report import run_facts, write_json
from lm.summary import exit_code, summarise, verdicts

MOST_SHARES = 2.5  # of its share of the time that is left, one child takes no more

CPU_MODES = (
    "plain",
    "planned",
    "recompute",
    "joint",
    "host_steps",
    "overlap",
    "demand",
    "checkpoint",
    "save_on_cpu",
    "fsdp2",
)
MODES = (*CPU_MODES, "torchao", "bitsandbytes")


def run_child(spec: Spec, deadline: float | None) -> dict[str, Any]:
    """``measure(spec)`` in a process of its own, until ``deadline`` (monotonic seconds)."""
    left = None if deadline is None else deadline - time.monotonic()
    if left is not None and left <= 0:
        return {"error": "not run: --minutes are over", "refused": True}
    with tempfile.TemporaryDirectory(prefix="bench_train-") as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, __file__, "--child", json.dumps(asdict(spec)), str(result)]
        try:
            done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=left)
        except subprocess.TimeoutExpired:
            return {"error": f"did not end within {left:.0f} s of --minutes", "refused": True}
        if result.exists():
            record: dict[str, Any] = json.loads(result.read_text())
            return record
    last = (done.stderr.strip().splitlines() or ["and said nothing"])[-1]
    code = done.returncode
    how = f"signal {-code}" if code < 0 else f"code {code}"
    return {"error": f"ended with {how}: {last}", "refused": spec.case.mode not in OURS}


@dataclass
class Bench:
    """Settings, and what was measured so far: by case name the children's records, a list each."""

    flags: list[str]
    steps: int
    rounds: int
    cases: list[Case]
    sizes: dict[str, str]
    disk_path: str
    page_size: str
    deadline: float | None
    reference: dict[str, Any]
    records: dict[str, list[dict[str, Any]]]

    def spec(self, case: Case) -> Spec:
        common = Spec(case, self.flags, WARM_UP_STEPS, self.steps)
        if case.mode not in OURS:
            return common
        needed = self.reference["needed_bytes"]
        assert case.share is not None
        budgets = {"device": resolve_budget(case.share, "--share", needed)}
        for tier, size in self.sizes.items():
            budgets[tier] = resolve_budget(size, f"--{tier}", needed)
        path = self.disk_path if budgets["disk"] else None
        return replace(common, budgets=budgets, disk_path=path, page_size=self.page_size)

    def run(self, after_each: Callable[[], None]) -> None:
        """The reference, then all cases in turns. A case that failed is not tried again."""
        plain = Case("plain")
        # As long as the longest of the others: losses are compared up to the last step.
        spec = Spec(plain, self.flags, MOST_WARM_UP_STEPS, self.steps, needed=True)
        self.reference.update(
            self._child("plain, measuring the need", spec, self.rounds * len(self.cases))
        )
        if "error" in self.reference:
            raise click.ClickException(f"the plain run failed: {self.reference['error']}")
        for turn in range(self.rounds):
            first = turn % len(self.cases)
            for number, case in enumerate([*self.cases[first:], *self.cases[:first]], 1):
                left = (self.rounds - turn) * len(self.cases) - number
                records = self.records.setdefault(case.name, [])
                if not any("error" in record for record in records):
                    name = f"round {turn + 1} of {self.rounds}: {case.name}"
                    records.append({"round": turn, **self._child(name, self.spec(case), left)})
                    after_each()

    def _child(self, name: str, spec: Spec, left: int = 0) -> dict[str, Any]:
        """``left``: how many more children there will be. One that is slow leaves them time."""
        print(name, end="  ", flush=True)
        deadline = self.deadline
        if deadline is not None:
            seconds = deadline - time.monotonic()
            deadline -= seconds * max(0.0, 1 - MOST_SHARES / (1 + left))
        record = run_child(spec, deadline)
        print(record.get("error") or f"{statistics.median(record['step_seconds']):.4f} s a step")
        return record


def make_record(bench: Bench, device: str) -> dict[str, Any]:
    """What ``--json`` writes: times in seconds (``_us``: microseconds), memory in bytes."""
    records, losses = bench.records, bench.reference["losses"]
    plain = {one["round"]: one for one in records.get("plain", []) if "error" not in one}
    summaries = [summarise(case, records.get(case.name, []), plain, losses) for case in bench.cases]
    settings = ("flags", "steps", "rounds", "sizes", "disk_path", "page_size")
    return {
        **{name: getattr(bench, name) for name in settings},
        "needed_bytes": bench.reference["needed_bytes"],
        "summaries": summaries,
        "verdicts": verdicts(summaries),
        "reference": bench.reference,
        "records": records,
        "facts": run_facts(device),
    }


def make_cases(
    modes: str | None, device: str, shares: list[str], rates: list[float], link_rate: float = 0.0
) -> list[Case]:
    """Plain is always among them: the others are compared with it."""
    names = [name.strip() for name in modes.split(",")] if modes is not None else None
    if names is None:
        names = list(MODES if device == "cuda" else CPU_MODES)
    unknown = [name for name in names if name not in MODES]
    if unknown:
        raise UsageError(f"--modes names {unknown[0]!r}; choose of {', '.join(MODES)}")
    cases = [Case("plain")]
    ours = [name for name in names if name in OURS]
    cases += [Case(name, s, r, link_rate) for s in shares for r in rates for name in ours]
    return cases + [Case(name) for name in names if name not in ("plain", *OURS)]


@click.command(help=__doc__.replace("\n\n    bench", "\n\n\b\n    bench") if __doc__ else None)
@click.option("--preset", type=click.Choice(list(PRESETS)), default="10m", show_default=True)
@click.option("--dtype", type=click.Choice(DTYPES), default="fp32", show_default=True)
@click.option("--batch", type=click.IntRange(1), help="Sequences per step; default by preset.")
@click.option("--seq", type=click.IntRange(1), help="Bytes per sequence; default by preset.")
@click.option("--clip", type=float, default=1.0, show_default=True, help="0: no clipping.")
@click.option("--steps", type=click.IntRange(1), default=10, show_default=True, help="Timed.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--share", "shares", multiple=True, default=["50%"], show_default=True,
              help="Device budget: a share of the need, or bytes.")  # fmt: skip
@click.option("--host", help="Host tier; default 0 on the CPU, 100% of the need on CUDA.")
@click.option("--disk", help="Disk tier; default 200% of the need on the CPU, 0 on CUDA.")
@click.option("--disk-path", default=tempfile.gettempdir(), show_default=True, help="A folder.")
@click.option("--disk-rate", "rates", type=click.FloatRange(0), multiple=True, default=[0.0],
              show_default=True, help="MB/s of the disk tier; 0: no limit.")  # fmt: skip
@click.option("--link-rate", type=click.FloatRange(0), default=0.0, show_default=True,
              help="MB/s between device and host tier, on the CPU; 0: no limit.")  # fmt: skip
@click.option("--page-size", default="2MiB", show_default=True)
@click.option("--modes", help=f"Of {', '.join(MODES)}; default all that the device has.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--threads", type=click.IntRange(1),
              help="That compute, on the CPU; default: all cores but one.")  # fmt: skip
@click.option("--minutes", type=float, help="Start nothing after that; list what was left out.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--child", type=(str, click.Path(path_type=Path)), hidden=True)
def main(
    preset: str,
    dtype: str,
    batch: int | None,
    seq: int | None,
    clip: float,
    steps: int,
    rounds: int,
    shares: tuple[str, ...],
    host: str | None,
    disk: str | None,
    disk_path: str,
    rates: tuple[float, ...],
    link_rate: float,
    page_size: str,
    modes: str | None,
    device: str,
    threads: int | None,
    minutes: float | None,
    json_path: Path | None,
    child: tuple[str, Path] | None,
) -> None:
    if child is not None:
        run_request(*child)
        return
    cuda = device == "cuda"
    sizes = {"host": host or ("100%" if cuda else "0"), "disk": disk or ("0" if cuda else "200%")}
    chosen = {"preset": preset, "dtype": dtype, "batch": batch, "seq": seq, "device": device}
    flags = [f"--{name}={value}" for name, value in chosen.items() if value is not None]
    flags.append(f"--clip={clip}")
    try:
        json_flag = [] if json_path is None else [f"--json={json_path}"]
        parse_options([*flags, *json_flag, "--no-pager", f"--page-size={page_size}"])
        for share in shares:  # a dry run: the need is measured later
            resolve_budget(share, "--share", 1)
        for tier, size in sizes.items():
            resolve_budget(size, f"--{tier}", 1)
        if not Path(disk_path).is_dir():
            raise UsageError(f"--disk-path={disk_path} is not a folder; make it first")
        if link_rate and cuda:
            raise UsageError("--link-rate is for the CPU; a GPU's link is what it is")
        cases = make_cases(modes, device, list(shares), list(rates), link_rate)
    except UsageError as error:
        raise click.UsageError(str(error)) from error
    deadline = None if minutes is None else time.monotonic() + 60 * minutes
    bench = Bench(
        flags, steps, rounds, cases, sizes, disk_path, page_size, deadline, reference={}, records={}
    )

    def save() -> None:
        if json_path is not None:
            write_json(json_path, make_record(bench, device))

    if not cuda:
        count = threads or max(1, len(os.sched_getaffinity(0)) - 1)
        os.environ["OMP_NUM_THREADS"] = str(count)  # of the children
        torch.set_num_threads(count)
    bench.run(save)
    record = make_record(bench, device)
    show(record)
    sys.exit(exit_code(record["summaries"]))


if __name__ == "__main__":
    main()
