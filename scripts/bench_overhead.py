#!/usr/bin/env python3
"""What the pager costs where everything fits: paged steps against plain ones.

Two processes train the same model on the same batches, one with a pager. Their steps alternate
(plain, paged, paged, plain, …): one process waits while the other works, so what else the machine
does hits both alike, and neither's memory or threads are in the other's way. Step number n of one
is divided by step number n of the other. Where the system happens to put a process's memory moves
all its ratios by some per cent, so several pairs of processes do this one after the other. Exits 1
if the losses differ or, but on tests/fakecuda, where kernels take no time, the 95 % upper bound of
the median ratio of all is above 1.03.
"""

import os
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# Read by libraries when they load, hence before the imports below.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the profiler's, about older memory

import click
import numpy as np
from lm.data import load_corpus
from lm.memory import Memory, PagedMemory, PlainMemory
from lm.model import PRESETS
from lm.options import Options, UsageError, parse_options, resolve_budget
from lm.report import on_fake_cuda, run_facts, write_json
from lm.trainer import Trainer

import tensorpager as tp
from tensorpager.planner.sizes import format_bytes

WARMUP_STEPS = 3  # make optimizer states, measure dense memory
ALLOWED_RATIO = 1.03
RESAMPLES = 10_000


def timed_step(trainer: Trainer) -> tuple[float, float]:
    """Seconds and loss of one step."""
    started = time.perf_counter()
    loss = trainer.step()
    return time.perf_counter() - started, loss


def upper_bound_of_median(ratios: np.ndarray) -> float:
    """The 95th percentile of the medians of bootstrap resamples. ``ratios``: (processes, steps);
    a resample draws processes, and in each of them steps."""
    rng = np.random.default_rng(0)
    processes, steps = ratios.shape
    medians = np.empty(RESAMPLES)
    for i in range(RESAMPLES):
        drawn = rng.integers(processes, size=(processes, 1))
        medians[i] = np.median(ratios[drawn, rng.integers(steps, size=(processes, steps))])
    return float(np.quantile(medians, 0.95))


def train(connection: Connection, options: Options, budget: int | None) -> None:
    """In a process of its own: warm up, then one step for each message, and a last word after
    ``None``. ``budget``: device bytes of the pager; None trains without one."""
    corpus = load_corpus(options.data, options.seq)
    with ExitStack() as stack:
        pager = None
        memory: Memory = PlainMemory(options.device)
        if budget is not None:
            pager = stack.enter_context(tp.Pager(budget, device=options.device))
            memory = PagedMemory(pager)
        trainer = Trainer(replace(options, pager=pager is not None), memory, corpus)
        losses = [trainer.step() for _ in range(WARMUP_STEPS)]
        connection.send((losses, memory.report().peak_bytes["device"]))
        before = pager.stats() if pager is not None else {}
        while connection.recv() is not None:
            connection.send(timed_step(trainer))
        stats = pager.stats() if pager is not None else {}
        moved = sum(stats[key] - before[key] for key in ("bytes_out", "bytes_in") if stats)
        connection.send({"sha256": trainer.parameters_sha256(), "stats": stats, "moved": moved})


class Training:
    """``train`` in a process; ends with the ``with`` block, or with this process."""

    def __init__(self, options: Options, budget: int | None) -> None:
        context = get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=train, args=(theirs, options, budget), daemon=True)
        self._process.start()
        theirs.close()
        self.first_losses, self.peak_bytes = self._answer()

    def _answer(self) -> Any:
        try:
            return self._connection.recv()
        except EOFError:
            self._process.join()
            code = self._process.exitcode
            raise UsageError(f"a training ended with {code}; its error is above") from None

    def step(self) -> tuple[float, float]:
        """Seconds and loss."""
        self._connection.send("step")
        seconds, loss = self._answer()
        return seconds, loss

    def end(self) -> dict[str, Any]:
        self._connection.send(None)
        last: dict[str, Any] = self._answer()
        return last

    def __enter__(self) -> "Training":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.join()


def measure(options: Options, budget: int | None) -> dict[str, Any]:
    """Run both. ``budget``: device bytes of the pager, by default twice what the plain run needs.

    Raises ``UsageError`` if the budget did not hold everything.
    """
    with Training(options, None) as plain:
        with Training(options, budget or 2 * plain.peak_bytes) as paged:
            results = np.empty((options.steps, 2, 2))  # step, which of the two, seconds and loss
            for step in range(options.steps):
                for which in (0, 1) if step % 2 == 0 else (1, 0):
                    results[step, which] = (plain, paged)[which].step()
            last, last_paged = plain.end(), paged.end()
        stats, moved = last_paged["stats"], last_paged["moved"]
        if moved:
            raise UsageError(
                f"--budget {format_bytes(stats['budget_bytes']['device'])} does not hold "
                f"everything ({format_bytes(moved)} moved); give at least "
                f"{format_bytes(1.1 * stats['needed_bytes'])}"
            )
        same = plain.first_losses == paged.first_losses
    same = same and bool(np.array_equal(results[:, 0, 1], results[:, 1, 1]))
    return {
        "plain_seconds": results[:, 0, 0].tolist(),
        "paged_seconds": results[:, 1, 0].tolist(),
        "losses_and_parameters_identical": same and last["sha256"] == last_paged["sha256"],
        "pager": stats,
    }


def measure_pairs(options: Options, budget: int | None, processes: int) -> dict[str, Any]:
    """``measure`` so many times, and what they say together."""
    runs = [measure(options, budget) for _ in range(processes)]
    ratios = np.array([run["paged_seconds"] for run in runs])
    ratios /= np.array([run["plain_seconds"] for run in runs])
    return {
        "preset": options.preset,
        "batch": options.batch,
        "seq": options.seq,
        "median_plain_seconds": float(np.median([run["plain_seconds"] for run in runs])),
        "median_ratio": float(np.median(ratios)),
        "median_ratio_of_processes": np.median(ratios, axis=1).tolist(),
        "quartiles": np.quantile(ratios, [0.25, 0.75]).tolist(),
        "upper_bound_95": upper_bound_of_median(ratios),
        "losses_and_parameters_identical": all(r["losses_and_parameters_identical"] for r in runs),
        "runs": runs,
        "facts": run_facts(options.device),
    }


@click.command(help=__doc__)
@click.option("--preset", type=click.Choice(list(PRESETS)), default="125m", show_default=True)
@click.option("--batch", type=click.IntRange(1), default=4, show_default=True)
@click.option("--seq", type=click.IntRange(1), default=256, show_default=True)
@click.option(
    "--steps",
    type=click.IntRange(1),
    default=20,
    show_default=True,
    help="Timed in each process.",
)
@click.option(
    "--processes", type=click.IntRange(1), default=5, show_default=True, help="Pairs of them."
)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--budget", help="Device budget; by default twice what the plain run needs.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write results here.")
def main(
    preset: str,
    batch: int,
    seq: int,
    steps: int,
    processes: int,
    device: str,
    budget: str | None,
    json_path: Path | None,
) -> None:
    chosen = {"preset": preset, "batch": batch, "seq": seq, "steps": steps, "device": device}
    flags = [f"--{name}={value}" for name, value in chosen.items()]
    try:
        options = parse_options([*flags, "--no-pager"])
        budget_bytes = None if budget is None else resolve_budget(budget, "--budget", None)
        record = measure_pairs(options, budget_bytes, processes)
    except (UsageError, tp.InfeasibleBudget, tp.TierFull) as error:
        raise click.UsageError(str(error)) from error
    if json_path is not None:
        write_json(json_path, record)
    low, high = record["quartiles"]
    same = record["losses_and_parameters_identical"]
    fits = record["upper_bound_95"] <= ALLOWED_RATIO
    pairs = f"{processes} pairs of processes, {steps} steps in each"
    print(f"{preset}, batch {batch}, seq {seq}: {pairs}, paged / plain")
    print(f"median plain step       {record['median_plain_seconds']:.4f} s")
    print(f"median ratio            {record['median_ratio']:.4f} (quartiles {low:.4f}, {high:.4f})")
    of_each = ", ".join(f"{ratio:.4f}" for ratio in record["median_ratio_of_processes"])
    print(f"of each process         {of_each}")
    print(f"95 % upper bound        {record['upper_bound_95']:.4f} (allowed {ALLOWED_RATIO})")
    print(f"identical losses, parameters: {'yes' if same else 'no'}")
    sys.exit(0 if same and (fits or on_fake_cuda()) else 1)


if __name__ == "__main__":
    main()
