#!/usr/bin/env python3
"""What one op on a paged tensor costs: `F.linear` with a paged weight against a plain one.

The matrices are tiny, so that the op itself takes next to nothing. Rounds of both alternate; the
cost is the median of the differences. Exits 1 if it is above 15 µs.
"""

import os
import sys
import time
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import click
import numpy as np
import torch
from lm.report import run_facts, write_json
from torch.nn import functional as F

import tensorpager as tp

ALLOWED_US = 15.0
WIDTH = 8


def seconds_per_call(inputs: torch.Tensor, weight: torch.Tensor, calls: int) -> float:
    started = time.perf_counter()
    for _ in range(calls):
        F.linear(inputs, weight)
    return (time.perf_counter() - started) / calls


@click.command(help=__doc__)
@click.option("--rounds", type=click.IntRange(1), default=60, show_default=True)
@click.option("--calls", type=click.IntRange(1), default=2000, show_default=True, help="Per round.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write results here.")
def main(rounds: int, calls: int, json_path: Path | None) -> None:
    torch.set_num_threads(1)
    inputs, plain = torch.randn(WIDTH, WIDTH), torch.randn(WIDTH, WIDTH)
    with tp.Pager("64MiB", page_size="64KiB", device="cpu", policy="lru") as pager:
        paged = pager.page(plain)
        times = np.empty((rounds, 2))
        with torch.no_grad():
            for weight in (plain, paged):
                seconds_per_call(inputs, weight, calls)
            for index in range(rounds):
                for which in (0, 1) if index % 2 else (1, 0):
                    weight = (plain, paged)[which]
                    times[index, which] = seconds_per_call(inputs, weight, calls) * 1e6
    costs = times[:, 1] - times[:, 0]
    cost = float(np.median(costs))
    low, high = np.quantile(costs, [0.25, 0.75])
    print(f"plain linear  {np.median(times[:, 0]):.2f} µs")
    print(f"paged linear  {np.median(times[:, 1]):.2f} µs")
    print(f"cost          {cost:.2f} µs (quartiles {low:.2f}, {high:.2f}; allowed {ALLOWED_US})")
    if json_path is not None:
        record = {
            "plain_us": times[:, 0].tolist(),
            "paged_us": times[:, 1].tolist(),
            "median_cost_us": cost,
            "facts": run_facts("cpu"),
        }
        write_json(json_path, record)
    sys.exit(0 if cost <= ALLOWED_US else 1)


if __name__ == "__main__":
    main()
