#!/usr/bin/env python3
"""What one op on a paged tensor costs: `F.linear` with a paged weight against a plain one.

The matrices are tiny, so that the op itself takes next to nothing. Three ways: without gradients,
the forward pass with them, and forward and backward together; each inside `pager.iteration()`, as
in training, where the hooks on saved tensors are part of the cost, and outside. The plain weight is
used outside: plain PyTorch has no such hooks. Rounds of both weights alternate. The cost is the
median of the differences; that of the fastest rounds is printed too. Exits 1 if a forward pass
inside an iteration costs more than 15 µs.
"""

import os
import sys
import time
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import click
import numpy as np
import torch
from lm.report import run_facts, write_json
from torch.nn import functional as F

import tensorpager as tp

ALLOWED_US = 15.0
WIDTH = 8
WARMUP_ITERATIONS = 3  # until the pager knows that everything fits


WAYS = ("forward, no gradients", "forward", "forward and backward")
PLACES = ("inside an iteration", "outside")


def seconds_per_call(way: str, inputs: torch.Tensor, weight: torch.Tensor, calls: int) -> float:
    seed = torch.ones(WIDTH, WIDTH)
    backward = way == "forward and backward"
    with torch.set_grad_enabled(way != "forward, no gradients"):
        started = time.perf_counter()
        for _ in range(calls):
            out = F.linear(inputs, weight)
            if backward:
                torch.autograd.grad(out, (inputs, weight), seed)
        return (time.perf_counter() - started) / calls


def measure(way: str, place: str, rounds: int, calls: int) -> dict[str, Any]:
    """Microseconds a call of each round, the median of the differences, and the difference of the
    fastest rounds."""
    inputs = torch.randn(WIDTH, WIDTH, requires_grad=True)
    plain = torch.randn(WIDTH, WIDTH)
    with tp.Pager("64MiB", page_size="64KiB", device="cpu") as pager:
        weights = plain.clone().requires_grad_(), pager.page(plain).requires_grad_()
        for _ in range(WARMUP_ITERATIONS):
            with pager.iteration():
                F.linear(inputs, weights[1]).sum().backward()
        assert pager.stats()["fits"]
        times = np.empty((rounds, 2))
        for index in range(-1, rounds):  # the first one warms up
            for which in (0, 1) if index % 2 else (1, 0):
                with ExitStack() as stack:
                    if which == 1 and place == "inside an iteration":
                        stack.enter_context(pager.iteration())
                    seconds = seconds_per_call(way, inputs, weights[which], calls)
                times[index, which] = seconds * 1e6
    costs = times[:, 1] - times[:, 0]
    return {
        "plain_us": times[:, 0].tolist(),
        "paged_us": times[:, 1].tolist(),
        "median_cost_us": float(np.median(costs)),
        "fastest_cost_us": float(np.diff(times.min(axis=0))[0]),
        "quartiles_us": np.quantile(costs, [0.25, 0.75]).tolist(),
    }


@click.command(help=__doc__)
@click.option("--rounds", type=click.IntRange(1), default=200, show_default=True)
@click.option("--calls", type=click.IntRange(1), default=200, show_default=True, help="Per round.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write results here.")
def main(rounds: int, calls: int, json_path: Path | None) -> None:
    torch.set_num_threads(1)
    results: dict[str, dict[str, Any]] = {place: {} for place in PLACES}
    for place, way in product(PLACES, WAYS):
        found = results[place][way] = measure(way, place, rounds, calls)
        low, high = found["quartiles_us"]
        print(
            f"{way}, {place}: plain {np.median(found['plain_us']):.2f} µs, paged "
            f"{np.median(found['paged_us']):.2f} µs, cost {found['median_cost_us']:.2f} µs "
            f"(quartiles {low:.2f}, {high:.2f}; of the fastest {found['fastest_cost_us']:.2f})"
        )
    if json_path is not None:
        write_json(json_path, {"places": results, "facts": run_facts("cpu")})
    worst = max(results[PLACES[0]][way]["median_cost_us"] for way in WAYS[:2])
    print(f"allowed for a forward pass inside an iteration: {ALLOWED_US:g} µs")
    sys.exit(0 if worst <= ALLOWED_US else 1)


if __name__ == "__main__":
    main()
