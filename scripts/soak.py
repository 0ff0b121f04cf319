#!/usr/bin/env python3
"""Train under a tight budget for a long time while the disk misbehaves: does anything creep in?

Of all calls of the disk tier's engine 1 % fail with EIO and 5 % are held up for up to 20 ms, at
random; the errors pass when the call is tried again. Afterwards the same steps are taken without a
pager. It passes if

- all losses are the same bits as without a pager;
- memory is flat: resident bytes of the process, median of the last quarter against median of the
  first one after the warm-up, differ by 2 % at most;
- no descriptor and no thread is left over: no more at the end than after the warm-up;
- no error reached the training, and errors were really injected.

Exits with 1 if not.
"""

import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Read by libraries when they load, hence before the imports below.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the profiler's, about older memory

import click
import torch
from lm.data import load_corpus
from lm.memory import PagedMemory, PlainMemory
from lm.model import PRESETS
from lm.options import Options, UsageError, parse_options
from lm.report import run_facts, write_json
from lm.trainer import Trainer

import tensorpager as tp
from tensorpager.pager.disk.engine import Engine
from tensorpager.pager.disk.watch import WatchedEngine

ERROR_CHANCE, DELAY_CHANCE, LONGEST_DELAY_SECONDS = 0.01, 0.05, 0.02
WARM_UP_SHARE = 0.2
FLAT = 0.02
TOLD_SECONDS = 30.0


class Unreliable:
    """An engine whose calls fail or take long at random."""

    def __init__(self, inner: Engine, seed: int) -> None:
        self.name, self.direct, self.takes_device = inner.name, inner.direct, inner.takes_device
        self.calls = self.errors = self.delays = 0
        self._inner = inner
        self._chance = random.Random(seed)
        self._lock = threading.Lock()

    def write(self, buffers: Sequence[Any], offset: int) -> None:
        self._before()
        self._inner.write(buffers, offset)

    def read(self, buffers: Sequence[Any], offset: int) -> None:
        self._before()
        self._inner.read(buffers, offset)

    def close(self) -> None:
        self._inner.close()

    def _before(self) -> None:
        with self._lock:
            self.calls += 1
            fails = self._chance.random() < ERROR_CHANCE
            waits = self._chance.random() < DELAY_CHANCE
            seconds = self._chance.random() * LONGEST_DELAY_SECONDS
            self.errors += fails
            self.delays += waits
        if waits:
            time.sleep(seconds)
        if fails:
            raise OSError(5, os.strerror(5))


@dataclass(frozen=True)
class Sample:
    """What the process had at the end of a step."""

    seconds: float
    rss_bytes: int
    descriptors: int
    threads: int


def sample(began: float) -> Sample:
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return Sample(
        time.monotonic() - began,
        resident,
        len(os.listdir("/proc/self/fd")),
        threading.active_count(),
    )


def train_paged(options: Options, folder: str, minutes: float) -> dict[str, Any]:
    corpus = load_corpus(options.data, options.seq)
    with ExitStack() as stack:
        pager = stack.enter_context(
            tp.Pager(
                options.budget_bytes("device", None),
                options.budget_bytes("host", None),
                options.budget_bytes("disk", None),
                disk_path=folder,
                page_size=options.page_size,
                policy=options.policy,
                device=options.device,
            )
        )
        if pager.core.disk is None or not isinstance(pager.core.disk.engine, WatchedEngine):
            raise click.UsageError("--disk-budget must be above 0")
        unreliable = Unreliable(pager.core.disk.engine.inner, options.seed)
        pager.core.disk.engine.inner = unreliable
        trainer = Trainer(options, PagedMemory(pager), corpus)
        losses: list[float] = []
        samples: list[Sample] = []
        began = told = time.monotonic()
        while time.monotonic() - began < 60 * minutes:
            losses.append(trainer.step())
            samples.append(sample(began))
            if time.monotonic() - told > TOLD_SECONDS:
                told = time.monotonic()
                tell(len(losses), samples[-1], unreliable)
        stats = pager.stats()
        explained = pager.core.mover.error
    return {
        "losses": losses,
        "samples": [asdict(one) for one in samples],
        "calls": unreliable.calls,
        "errors": unreliable.errors,
        "delays": unreliable.delays,
        "plan_error": None if explained is None else str(explained),
        "pager": stats,
    }


def tell(steps: int, last: Sample, unreliable: Unreliable) -> None:
    print(
        f"{last.seconds / 60:5.1f} min  step {steps}  {last.rss_bytes / 2**20:.0f} MiB  "
        f"{last.descriptors} descriptors  {unreliable.errors} errors in {unreliable.calls} calls",
        file=sys.stderr,
        flush=True,
    )


def train_plain(options: Options, steps: int) -> list[float]:
    corpus = load_corpus(options.data, options.seq)
    trainer = Trainer(options, PlainMemory(options.device, measure=False), corpus)
    return [trainer.step() for _ in range(steps)]


def judge(record: dict[str, Any], plain: list[float]) -> dict[str, Any]:
    """The figures that decide, and ``passed``."""
    samples = [Sample(**one) for one in record["samples"]]
    steady = [one for one in samples if one.seconds > WARM_UP_SHARE * samples[-1].seconds]
    quarter = max(1, len(steady) // 4)
    first, last = steady[:quarter], steady[-quarter:]
    before = statistics.median(one.rss_bytes for one in first)
    after = statistics.median(one.rss_bytes for one in last)
    same = record["losses"] == plain
    growth = after / before - 1
    descriptors = max(one.descriptors for one in last) - max(one.descriptors for one in first)
    threads = max(one.threads for one in last) - max(one.threads for one in first)
    retries = record["pager"]["io_retries"]
    return {
        "steps": len(plain),
        "losses_identical": same,
        "rss_before_bytes": before,
        "rss_after_bytes": after,
        "rss_growth": growth,
        "rss_largest_bytes": max(one.rss_bytes for one in steady),
        "descriptors_more": descriptors,
        "threads_more": threads,
        "errors_injected": record["errors"],
        "io_retries": retries,
        "passed": same
        and abs(growth) <= FLAT
        and descriptors <= 0
        and threads <= 0
        and record["plan_error"] is None
        and record["errors"] > 0
        and retries >= record["errors"],
    }


@click.command(help=__doc__)
@click.option("--minutes", type=click.FloatRange(0.1), default=30.0, show_default=True)
@click.option("--preset", type=click.Choice(list(PRESETS)), default="10m", show_default=True)
@click.option("--device-budget", default="141MiB", show_default=True, help="Half of 10m's need.")
@click.option("--host-budget", default="32MiB", show_default=True)
@click.option("--disk-budget", default="512MiB", show_default=True)
@click.option("--disk-path", help="Default: the folder for temporary files.")
@click.option("--page-size", default="256KiB", show_default=True)
@click.option("--policy", type=click.Choice(["lp", "lru"]), default="lp", show_default=True)
@click.option(
    "--threads", type=click.IntRange(1), default=1, show_default=True, help="That compute."
)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write results here.")
def main(
    minutes: float, threads: int, disk_path: str | None, json_path: Path | None, **chosen: Any
) -> None:
    torch.set_num_threads(threads)
    folder = disk_path or tempfile.gettempdir()
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in chosen.items()]
    flags.append(f"--disk-path={folder}")
    try:
        options = parse_options(flags)
        record = train_paged(options, folder, minutes)
    except (UsageError, ValueError, tp.InfeasibleBudget, tp.TierFull) as error:
        raise click.UsageError(str(error)) from error
    verdict = judge(record, train_plain(options, len(record["losses"])))
    if json_path is not None:
        write_json(json_path, {"verdict": verdict, **record, "facts": run_facts(options.device)})
    growth, mib = verdict["rss_growth"], verdict["rss_before_bytes"] / 2**20
    print(f"steps                 {verdict['steps']} in {minutes:g} min, {chosen['preset']}")
    print(f"losses                {'identical' if verdict['losses_identical'] else 'DIFFER'}")
    print(f"memory                {mib:.0f} MiB {growth:+.2%} (at most {FLAT:.0%})")
    print(f"descriptors, threads  {verdict['descriptors_more']:+d}, {verdict['threads_more']:+d}")
    print(
        f"disk                  {record['calls']} calls, {record['errors']} errors injected, "
        f"{verdict['io_retries']} retries, {record['delays']} delays"
    )
    if record["plan_error"] is not None:
        print(f"the plan was ended by {record['plan_error']}")
    print("passed" if verdict["passed"] else "FAILED")
    sys.exit(0 if verdict["passed"] else 1)


if __name__ == "__main__":
    main()
