#!/usr/bin/env python3
"""What publishing metrics costs a training: steps with it against steps without, in one process.

One paged model trains. Blocks of steps with metrics on and off alternate (on, off, off, on, …), so
that what else the machine does hits both alike, and each block is divided by its neighbour. A block
lasts long enough for the thread that publishes beside the training to run in it. Wall time is what
counts, on a quiet machine; CPU time of the process is given too, which other programs disturb less.
The cost of one record is timed by itself. Exits 1 if the median ratio of wall times is above 1.01.
"""

import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

# Read by libraries when they load, hence before the imports below.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the profiler's, about older memory

import click
import numpy as np
from lm.data import load_corpus
from lm.memory import PagedMemory
from lm.model import PRESETS
from lm.options import Options, UsageError, parse_options
from lm.report import run_facts, write_json
from lm.trainer import Trainer

import tensorpager as tp
from tensorpager.pager.metrics.publisher import PERIOD_SECONDS

WARMUP_STEPS = 5
ALLOWED_RATIO = 1.01
RECORDS = 2000


def timed_block(
    trainer: Trainer, pager: tp.Pager, steps: int, *, publish: bool
) -> tuple[float, float]:
    """Wall and CPU seconds of each of ``steps`` steps. Turning metrics on and off is not timed."""
    if publish:
        pager.metrics.open(None)
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        trainer.step()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    pager.metrics.close()
    return wall / steps, cpu / steps


def alternate(trainer: Trainer, pager: tp.Pager, pairs: int, steps: int) -> np.ndarray:
    """Seconds for a step: float64 (pairs, without and with metrics, wall and CPU)."""
    results = np.empty((pairs, 2, 2))
    for pair in range(pairs):
        for publish in (False, True) if pair % 2 else (True, False):
            results[pair, int(publish)] = timed_block(trainer, pager, steps, publish=publish)
    return results


def record_us(pager: tp.Pager) -> float:
    """Median µs of publishing one record."""
    pager.metrics.open(None)
    times = np.empty(RECORDS)
    for index in range(RECORDS):
        started = time.perf_counter()
        pager.metrics.publish()
        times[index] = time.perf_counter() - started
    pager.metrics.close()
    return float(np.median(times) * 1e6)


def measure(options: Options, pairs: int, block_seconds: float) -> dict[str, Any]:
    with ExitStack() as stack:
        pager = stack.enter_context(
            tp.Pager(
                options.budget_bytes("device", None),
                options.budget_bytes("host", None),
                page_size=options.page_size,
                policy=options.policy,
                device=options.device,
            )
        )
        trainer = Trainer(options, PagedMemory(pager), load_corpus(options.data, options.seq))
        for _ in range(WARMUP_STEPS):
            trainer.step()
        started = time.perf_counter()
        trainer.step()
        steps = max(1, round(block_seconds / (time.perf_counter() - started)))
        seconds = alternate(trainer, pager, pairs, steps)
        cost_us = record_us(pager)
        stats = pager.stats()
    ratios, cpu_ratios = (seconds[:, 1] / seconds[:, 0]).T
    step_seconds = float(np.median(seconds[:, 0, 0]))
    # One record when a step ends, and those of the thread meanwhile.
    records = 1 + step_seconds / PERIOD_SECONDS
    return {
        "preset": options.preset,
        "batch": options.batch,
        "seq": options.seq,
        "steps_in_a_block": steps,
        "without_seconds": seconds[:, 0, 0].tolist(),
        "with_seconds": seconds[:, 1, 0].tolist(),
        "ratios": ratios.tolist(),
        "median_ratio": float(np.median(ratios)),
        "quartiles": np.quantile(ratios, [0.25, 0.75]).tolist(),
        "median_cpu_ratio": float(np.median(cpu_ratios)),
        "cpu_quartiles": np.quantile(cpu_ratios, [0.25, 0.75]).tolist(),
        "record_us": cost_us,
        "records_share_of_step": records * cost_us / 1e6 / step_seconds,
        "pager": stats,
        "facts": run_facts(options.device),
    }


@click.command(help=__doc__)
@click.option("--preset", type=click.Choice(list(PRESETS)), default="10m", show_default=True)
@click.option("--device-budget", default="1GiB", show_default=True, help="Default: all fits.")
@click.option("--host-budget", default="0", show_default=True)
@click.option("--page-size", default="256KiB", show_default=True)
@click.option("--policy", type=click.Choice(["lp", "lru"]), default="lp", show_default=True)
@click.option("--batch", type=click.IntRange(1), default=2, show_default=True)
@click.option("--seq", type=click.IntRange(1), default=64, show_default=True)
@click.option("--pairs", type=click.IntRange(1), default=20, show_default=True)
@click.option("--block", type=click.FloatRange(0), default=1.0, show_default=True, help="Seconds.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write results here.")
def main(pairs: int, block: float, json_path: Path | None, **chosen: Any) -> None:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in chosen.items()]
    try:
        record = measure(parse_options(flags), pairs, block)
    except (UsageError, tp.InfeasibleBudget, tp.TierFull) as error:
        raise click.UsageError(str(error)) from error
    if json_path is not None:
        write_json(json_path, record)
    (low, high), (cpu_low, cpu_high) = record["quartiles"], record["cpu_quartiles"]
    steps = record["steps_in_a_block"]
    print(f"{chosen['preset']}: {pairs} pairs of blocks of {steps} steps, metrics on / off")
    print(f"median step without     {np.median(record['without_seconds']):.4f} s")
    print(f"median ratio            {record['median_ratio']:.4f} (quartiles {low:.4f}, {high:.4f})")
    cpu = record["median_cpu_ratio"]
    print(f"the same of CPU time    {cpu:.4f} (quartiles {cpu_low:.4f}, {cpu_high:.4f})")
    print(f"one record              {record['record_us']:.1f} µs")
    print(f"records, of a step      {record['records_share_of_step']:.4%}")
    sys.exit(0 if record["median_ratio"] <= ALLOWED_RATIO else 1)


if __name__ == "__main__":
    main()
