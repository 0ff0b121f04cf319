"""How long FramePool.allocate and .free take in a fragmented pool.

Fills the pool, frees half of it in random order so that free frames lie scattered, then times
random allocations and frees that keep it about half full. Prints median, 99th percentile and the
longest; exits with 1 if a median is above the goal of 20 µs.
"""

import json
import random
import time
from pathlib import Path

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from tensorpager.pager.memory.frame_pool import FramePool

GOAL_US = 20.0


def fragment(pool: FramePool, max_run: int, rng: random.Random) -> list[list[tuple[int, int]]]:
    """Fills the pool, then frees a random half. Returns the allocations that are left."""
    live = []
    while pool.free_count:
        runs = pool.allocate(min(rng.randint(1, max_run), pool.free_count))
        assert runs is not None
        live.append(runs)
    rng.shuffle(live)
    while pool.free_count < pool.count // 2:
        for start, length in live.pop():
            pool.free(start, length)
    return live


def measure(frames: int, operations: int, max_run: int, seed: int) -> dict[str, object]:
    """Times ``operations`` allocations and frees. Times are in µs per call."""
    rng = random.Random(seed)
    pool = FramePool(frames)
    live = fragment(pool, max_run, rng)
    allocate_us: list[float] = []
    free_us: list[float] = []
    free_runs = []
    for step in range(operations):
        if step % 1000 == 0:
            free_runs.append(len(pool.runs()))
        n = rng.randint(1, max_run)
        begin = time.perf_counter_ns()
        runs = pool.allocate(n)
        allocate_us.append((time.perf_counter_ns() - begin) / 1e3)
        if runs is not None:
            live.append(runs)
        while live and pool.free_count < frames // 2:
            position = rng.randrange(len(live))
            live[position], live[-1] = live[-1], live[position]
            for start, length in live.pop():
                begin = time.perf_counter_ns()
                pool.free(start, length)
                free_us.append((time.perf_counter_ns() - begin) / 1e3)
    return {
        "frames": frames,
        "operations": operations,
        "max_run": max_run,
        "median_free_runs": int(np.median(free_runs)),
        "allocate": summary(allocate_us),
        "free": summary(free_us),
    }


def summary(samples_us: list[float]) -> dict[str, float]:
    values = np.array(samples_us)
    return {
        "median_us": round(float(np.median(values)), 3),
        "p99_us": round(float(np.percentile(values, 99)), 3),
        "max_us": round(float(values.max()), 3),
    }


@click.command(help=__doc__)
@click.option("--frames", default=100_000, show_default=True)
@click.option("--operations", default=100_000, show_default=True)
@click.option("--max-run", multiple=True, type=int, help="Largest request [default: 1, 8, 64].")
@click.option("--seed", default=0, show_default=True)
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path))
def main(
    frames: int, operations: int, max_run: tuple[int, ...], seed: int, json_path: Path | None
) -> None:
    results = [measure(frames, operations, longest, seed) for longest in max_run or (1, 8, 64)]
    table = Table(title=f"FramePool, {frames:,} frames, half of them free")
    for column in ("requests", "free runs", "operation", "median µs", "99 % µs", "longest µs"):
        table.add_column(column, justify="right")
    worst = 0.0
    for result in results:
        for operation in ("allocate", "free"):
            times = result[operation]
            assert isinstance(times, dict)
            worst = max(worst, times["median_us"])
            table.add_row(
                f"1 to {result['max_run']}",
                f"{result['median_free_runs']:,}",
                operation,
                *(f"{times[key]:.2f}" for key in ("median_us", "p99_us", "max_us")),
            )
    Console().print(table)
    if json_path is not None:
        json_path.write_text(json.dumps({"goal_us": GOAL_US, "results": results}, indent=2) + "\n")
    if worst > GOAL_US:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
