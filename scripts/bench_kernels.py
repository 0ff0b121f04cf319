#!/usr/bin/env python3
"""Every page kernel against its floor and against torch's own op on dense tensors, on a GPU.

    bench_kernels.py --quick
    bench_kernels.py --only adamw --only gather --json FILE

The floor of a kernel is the time that its bytes take at the rate of a large dense copy, which is
measured first. Frames are in random
order. Each call is first checked once against the same computation on dense tensors, and timed only
if it is right. Times are medians of many repetitions by CUDA events, kernel and rival in turns,
behind other work in the queue and with L2 flushed: of a launch's kernels alone (which the share of
the floor is of), and of the whole call with all that the host does for it (which is compared with
torch). Below what fits in L2 (marked *) a share of the copy rate says little.

Then copies between host and device; and the goals, reached or missed.

Without a GPU it says so, checks all cases on the CPU references at tiny sizes, and times these.

Exit codes: 1 if a kernel is wrong or broken, or a goal is missed; 2 for wrong usage.
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from kernels_bench import link_sweep, report
from kernels_bench.case import Case, ResultError, Setting
from kernels_bench.cases import CASES
from kernels_bench.clock import Clock, CpuClock, CudaClock
from kernels_bench.goals import Found, judge
from kernels_bench.measure import Bench, Row, Sizes, check_all
from kernels_bench.rates import measure_rates
from lm.report import on_fake_cuda, run_facts, write_json

from tensorpager.kernels import launch

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
CPU_PAGE = 4 * KIB
CPU_CHECKED = (  # a partial last page, whole pages, and a single one
    Setting("cpu", 5 * CPU_PAGE - 36, CPU_PAGE),
    Setting("cpu", 8 * CPU_PAGE, CPU_PAGE),
    Setting("cpu", CPU_PAGE, CPU_PAGE),
)
NAMES = (*(case.name for case in CASES), "link")


@dataclass(frozen=True)
class Extent:
    """How much a run on a GPU does.

    seconds : for timing one case in one setting. link_bytes : copied between host and device.
    """

    seconds: float
    sizes: Sizes
    page_bytes: int
    link_bytes: int
    repeats: int


FULL = Extent(
    seconds=0.5,
    sizes=Sizes((MIB, 16 * MIB, 256 * MIB, GIB), (64 * KIB, 2 * MIB, 16 * MIB)),
    page_bytes=2 * MIB,
    link_bytes=512 * MIB,
    repeats=21,
)
QUICK = Extent(
    seconds=0.25,
    sizes=Sizes((256 * MIB,), (2 * MIB,)),
    page_bytes=2 * MIB,
    link_bytes=256 * MIB,
    repeats=5,
)
CPU_REPETITIONS = 3
CPU_SIZES = Sizes((32 * MIB,), (2 * MIB,))
CPU_QUICK_SIZES = Sizes((2 * MIB,), (64 * KIB,))

Save = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Choice:
    """What the options say. deadline : of time.monotonic, after which nothing starts."""

    only: Sequence[str]
    deadline: float
    peers: bool

    @property
    def cases(self) -> list[Case]:
        return [case for case in CASES if not self.only or case.name in self.only]

    def wants(self, sweep: str) -> bool:
        return (not self.only or sweep in self.only) and not self.over()

    def over(self) -> bool:
        return time.monotonic() >= self.deadline


@dataclass
class GpuRun:
    """Everything that is measured on a GPU. `save` is called with the record so far."""

    name: str
    choice: Choice
    extent: Extent
    clock: Clock
    save: Save

    def __post_init__(self) -> None:
        rates = measure_rates(self.clock, self.extent.seconds)
        self.bench = Bench(
            *(self.clock, rates, self.extent.seconds, self.choice.deadline, time.monotonic),
            self.choice.peers,
        )
        self.failures: list[str] = []
        self.record: dict[str, Any] = {
            "gpu": self.name,
            "l2_bytes": self.clock.l2_bytes,
            "rates": {
                "copy_bytes_per_second": rates.memory,
                "link_bytes_per_second": rates.link,
            },
            "rows": self.bench.rows,
            "link": None,
            "failures": self.failures,
            "goals": [],
        }
        l2 = f"L2 {self.clock.l2_bytes // MIB} MiB"
        print(f"{self.name}: {report.rates_text(rates)}, {l2}", flush=True)

    def run(self) -> int:
        """Returns the exit code. The short sweep first, so that a run that is cut short has
        all that goals need."""
        self._attempt("link", self._link)
        if self.choice.cases:
            print(report.HEAD)
            self.bench.run(self.choice.cases, self.extent.sizes, self._show)
        record = self.record
        goals = record["goals"] = judge(Found(record["rows"], record["link"]))
        report.print_goals(goals)
        print(f"cases: {report.counts(record['rows'])}")
        self.save(record)
        judged = [] if on_fake_cuda() else goals
        return exit_code(record["rows"], self.failures, judged)

    def _attempt(self, sweep: str, run: Callable[[], None]) -> None:
        if not self.choice.wants(sweep):
            return
        try:
            run()
        except Exception as error:  # the others may work
            if isinstance(error, ResultError) and on_fake_cuda():
                print(f"{sweep}: no values here: {error}", flush=True)
                return
            self.failures.append(f"{sweep}: {type(error).__name__}: {error}")
            print(f"BROKEN: {self.failures[-1]}", flush=True)
        self.save(self.record)

    def _show(self, row: Row) -> None:
        print(report.row_text(row), flush=True)
        self.save(self.record)

    def _link(self) -> None:
        setting = Setting(self.clock.device, self.extent.link_bytes, self.extent.page_bytes)
        link = link_sweep.sweep_link(self.clock, setting, 2 * self.extent.seconds)
        self.record["link"] = link
        report.print_link(link)


def exit_code(
    rows: Sequence[dict[str, Any]], failures: Sequence[str], goals: Sequence[dict[str, Any]]
) -> int:
    """1 if something is wrong, broken or missed. What was not run or measured is no failure."""
    bad = [row for row in rows if row["status"] in ("wrong", "broken")]
    missed = [goal for goal in goals if goal["outcome"] == "missed"]
    return int(bool(bad or failures or missed))


def on_cpu(choice: Choice, *, quick: bool, save: Save) -> int:
    """Checks and times the references. Returns the exit code."""
    print("No CUDA device: no kernel is measured here. Checking the CPU references instead.")
    torch.set_num_threads(1)  # steady where others are at work too
    checked = check_all(choice.cases, CPU_CHECKED)
    for row in checked:
        if row["status"] != "right":
            print(f"{row['case']}, {row['nbytes']} bytes: {row['status'].upper()}: {row['why']}")
    print(f"checked in {len(CPU_CHECKED)} settings each: {report.counts(checked)}")
    clock, seconds = CpuClock(), 0.0 if quick else 0.2
    rates = measure_rates(clock, seconds)
    print(
        f"dense copy on one thread of this CPU: {rates.memory / 1e9:.1f} GB/s (read plus written)"
    )
    bench = Bench(
        clock, rates, seconds, choice.deadline, time.monotonic, peers=False, least=CPU_REPETITIONS
    )
    bench.run(choice.cases, CPU_QUICK_SIZES if quick else CPU_SIZES, lambda _row: None)
    for line in report.reference_text(bench.rows):
        print(line)
    print("These are CPU references, not kernels: nothing here says how fast a kernel is.")
    save(
        {
            "gpu": None,
            "what": "CPU references, not kernels",
            "rates": {"copy_bytes_per_second": rates.memory},
            "checked": checked,
            "references": bench.rows,
        }
    )
    return exit_code([*checked, *bench.rows], [], [])


@click.command(help=__doc__.replace("\n\n    bench", "\n\n\b\n    bench") if __doc__ else None)
@click.option("--quick", is_flag=True, help="Only 256 MiB in pages of 2 MiB.")
@click.option("--only", multiple=True, type=click.Choice(NAMES), metavar="NAME",
              help=f"Of {', '.join(NAMES)}; may be repeated.")  # fmt: skip
@click.option("--no-peers", is_flag=True, help="Leave torch's own ops out.")
@click.option("--minutes", type=click.FloatRange(0, min_open=True),
              help="Start nothing after that; list what was left out.")  # fmt: skip
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path),
              help="Write results here, after each case.")  # fmt: skip
def main(
    quick: bool,
    only: tuple[str, ...],
    no_peers: bool,
    minutes: float | None,
    json_path: Path | None,
) -> None:
    if launch.INTERPRETED:
        raise click.UsageError("TRITON_INTERPRET is set: nothing to time there; unset it")
    cuda = torch.cuda.is_available()
    if cuda and not launch.HAVE_TRITON:
        raise click.UsageError("there is a GPU but no Triton; install triton>=3.6")
    seconds = float("inf") if minutes is None else 60 * minutes
    choice = Choice(only, time.monotonic() + seconds, not no_peers)
    facts = run_facts("cuda" if cuda else "cpu")

    def save(record: dict[str, Any]) -> None:
        if json_path is not None:
            write_json(json_path, {"quick": quick, **record, "facts": facts})

    if not cuda:
        sys.exit(on_cpu(choice, quick=quick, save=save))
    name = torch.cuda.get_device_name()
    sys.exit(GpuRun(name, choice, QUICK if quick else FULL, CudaClock(), save).run())


if __name__ == "__main__":
    main()
