#!/usr/bin/env python3
"""Batches of random lengths: plain, where everything fits, planned, on demand, each length alone.

    bench_lengths.py --modes plain,fits
    bench_lengths.py --modes planned,lru --rounds 3

All modes train the same model on the same batches, each in a process of its own, in turn, with one
thread. The need is the smallest device budget in which the longest batch fits with everything.
"alone" trains batches of one length at a time, of eight lengths, until their plan is followed; what
a length between these takes is on a line between them. CPU seconds are those of all threads; those
of the planner, a process of its own, are beside them. Losses have to be plain's, bit for bit.
"""

import json
import os
import random
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read by libraries when they load
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import click
import numpy as np
import torch
from lm.model import GPT, PRESETS, VOCABULARY
from lm.modes import chosen, in_child, in_turn
from lm.report import run_facts, write_json
from lm.trainer import make_deterministic

import tensorpager as tp

MODES = ("plain", "fits", "planned", "lru", "alone")
SHORTEST, LONGEST, CLASS = 32, 512, 64
ALONE_STEPS, ALONE_TIMED = 24, 4
SETTLED = 10  # steps, after which each is compared with its class
ENOUGH = [name for name, preset in PRESETS.items() if preset.shape.context >= LONGEST]
PAGE_BYTES = 256 << 10


class Run:
    """A model, and what its steps took. ``budget``: bytes on the device; ``None``: plain."""

    def __init__(self, spec: dict[str, Any], policy: str, budget: int | None) -> None:
        make_deterministic(0)
        torch.set_num_threads(1)
        self.batch = spec["batch"]
        self.pager = None
        if budget is not None:
            below = {spec["tier"] + "_budget": spec["below"]}
            if spec["tier"] == "disk":
                below["disk_path"] = spec["folder"]
            self.pager = tp.Pager(
                device_budget=budget, page_size=PAGE_BYTES, device="cpu", policy=policy, **below
            )
        self.model = GPT(PRESETS[spec["preset"]].shape)
        self.model.init_weights(torch.Generator().manual_seed(0))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=False)
        if self.pager is not None:
            self.pager.page_module(self.model)
            self.pager.optimizer(self.optimizer)
        self.steps: list[dict[str, Any]] = []

    def step(self, length: int) -> None:
        generator = torch.Generator().manual_seed(length)
        tokens = torch.randint(VOCABULARY, (self.batch, length + 1), generator=generator)
        wall, cpu = time.perf_counter(), time.process_time()
        if self.pager is None:
            loss = self._train(tokens)
        else:
            with self.pager.iteration():
                loss = self._train(tokens)
        found = {
            "length": length,
            "loss": loss,
            "wall": time.perf_counter() - wall,
            "cpu": time.process_time() - cpu,
        }
        if self.pager is not None:
            stats = self.pager.stats()
            found |= {what: stats[what] for what in ("mode", "stall_us", "bytes_in")}
        self.steps.append(found)

    def _train(self, tokens: torch.Tensor) -> float:
        loss = self.model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def close(self) -> dict[str, Any]:
        stats = self.pager.stats() if self.pager is not None else {}
        if self.pager is not None:
            self.pager.close()
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return {
            "steps": self.steps,
            "planner_cpu": used.ru_utime + used.ru_stime,
            "needed_bytes": stats.get("needed_bytes"),
            "planned": stats.get("planned_iterations"),
            "peak_bytes": stats.get("peak_bytes"),
        }


def child(spec: dict[str, Any]) -> dict[str, Any]:
    """What a mode takes. Of "alone": the median seconds of planned steps by length."""
    mode, budget = spec["mode"], spec["budget"]
    policy = "lru" if mode == "lru" else "lp"
    if mode != "alone":
        run = Run(spec, policy, budget)
        for length in spec["lengths"]:
            run.step(length)
        return run.close()
    alone = {}
    for length in range(CLASS, LONGEST + 1, CLASS):
        run = Run(spec, policy, budget)
        assert run.pager is not None
        for number in range(ALONE_STEPS):
            run.step(length)
            if number % 4 == 3:
                run.pager.plan()  # until it is made
        timed = [step for step in run.steps if step["mode"] == "planned"]
        timed = timed[-ALONE_TIMED:] or run.steps[-ALONE_TIMED:]
        alone[length] = {
            what: statistics.median(step[what] for step in timed) for what in ("wall", "cpu")
        } | {"planned": timed[-1]["mode"] == "planned"}
        run.close()
    return {"alone": alone}


def verdicts(found: dict[str, list[dict[str, Any]]]) -> dict[str, float | bool]:
    """What the runs say together; medians over rounds."""

    def total(mode: str, what: str, first: int = 0, *, planner: bool = False) -> float:
        runs = found[mode]
        return statistics.median(
            sum(step[what] for step in run["steps"][first:]) + run["planner_cpu"] * planner
            for run in runs
        )

    said: dict[str, float | bool] = {}
    ours = [mode for mode in ("fits", "planned", "lru") if mode in found]
    for mode in ours:
        if "plain" in found:
            expected = [step["loss"] for step in found["plain"][0]["steps"]]
            same = all([s["loss"] for s in run["steps"]] == expected for run in found[mode])
            said[f"{mode}: losses are plain's"] = same
    for what in ("wall", "cpu"):
        for mode in ours:
            said[f"{mode}: {what} s"] = total(mode, what)
        if "fits" in found and "plain" in found:
            said[f"fits of plain from the third step on, {what}"] = total("fits", what, 2) / total(
                "plain", what, 2
            )
            said[f"fits beyond plain in the first two steps, {what} s"] = (
                total("fits", what) - total("fits", what, 2)
            ) - (total("plain", what) - total("plain", what, 2))
        if "planned" in found and "lru" in found:
            said[f"planned of lru, {what}"] = total("planned", what) / total("lru", what)
        if "planned" in found and "alone" in found:
            sizes = [int(n) for n in found["alone"][0]["alone"]]
            times = [
                statistics.median(run["alone"][key][what] for run in found["alone"])
                for key in found["alone"][0]["alone"]
            ]
            lengths = [step["length"] for step in found["planned"][0]["steps"]]
            expected = np.interp(lengths, sizes, times)
            for first in (0, SETTLED):
                said[f"planned of each alone, from step {first + 1} on, {what}"] = total(
                    "planned", what, first
                ) / float(expected[first:].sum())
        for mode in ours:
            said[f"{mode}: most of its class's median after the tenth step, {what}"] = max(
                of_class(run["steps"][SETTLED:], what) for run in found[mode]
            )
    for mode in ours:
        runs = found[mode]
        said[f"{mode}: planner's cpu s"] = statistics.median(run["planner_cpu"] for run in runs)
        said[f"{mode}: steps planned"] = statistics.median(run["planned"] for run in runs)
        for what, name, unit in (("stall_us", "stalls s", 1e6), ("bytes_in", "MiB in", 2**20)):
            last = [run["steps"][-1][what] for run in runs]
            said[f"{mode}: {name}"] = statistics.median(last) / unit
    return said


def of_class(steps: list[dict[str, Any]], what: str) -> float:
    """The most that a step takes of the median of those of its class of lengths."""
    classes: dict[int, list[float]] = {}
    for step in steps:
        classes.setdefault(-(-step["length"] // CLASS), []).append(step[what])
    return max(max(times) / statistics.median(times) for times in classes.values())


@click.command(help=__doc__.replace("\n\n    bench", "\n\n\b\n    bench") if __doc__ else None)
@click.option("--modes", default=",".join(MODES), show_default=True)
@click.option("--preset", type=click.Choice(ENOUGH), default="10m", show_default=True)
@click.option("--batch", default=1, show_default=True, help="Sequences in a batch.")
@click.option("--steps", type=click.IntRange(SETTLED + 1), default=60, show_default=True)
@click.option("--seed", default=0, show_default=True, help="Of the lengths.")
@click.option("--share", default=50, show_default=True, help="Percent of the need on the device.")
@click.option("--tier", type=click.Choice(["host", "disk"]), default="host", show_default=True)
@click.option("--disk-path", default=tempfile.gettempdir(), show_default=True, help="A folder.")
@click.option("--rounds", default=1, show_default=True)
@click.option("--json", "out", type=Path, help="Write what was measured here.")
@click.option("--child", "request", hidden=True)
def main(
    modes: str,
    preset: str,
    batch: int,
    steps: int,
    seed: int,
    share: int,
    tier: str,
    disk_path: str,
    rounds: int,
    out: Path | None,
    request: str | None,
) -> None:
    if request is not None:
        print(json.dumps(child(json.loads(request))))
        return
    wanted = chosen(modes, MODES)
    numbers = random.Random(seed)
    lengths = [numbers.randint(SHORTEST, LONGEST) for _ in range(steps)]
    spec = {"preset": preset, "batch": batch, "tier": tier, "folder": disk_path, "below": 4 << 30}
    roomy = {**spec, "mode": "fits", "budget": 8 << 30, "lengths": [LONGEST] * 2}
    need = in_child(__file__, roomy)["needed_bytes"]
    spec |= {"lengths": lengths, "below": 4 * need}
    budgets = {"plain": None, "fits": 10 * need}
    found: dict[str, list[dict[str, Any]]] = {}
    for turn, mode in in_turn(wanted, rounds):
        budget = budgets.get(mode, need * share // 100)
        done = in_child(__file__, {**spec, "mode": mode, "budget": budget})
        found.setdefault(mode, []).append(done)
        took = sum(step["wall"] for step in done.get("steps", []))
        print(f"round {turn + 1}, {mode}: {took:.1f} s", flush=True)
    said = verdicts(found)
    for name, value in said.items():
        print(f"{name:66} {value if isinstance(value, bool) else round(value, 3)}")
    if out is not None:
        write_json(out, {"need": need, "verdicts": said, "runs": found, "facts": run_facts("cpu")})


if __name__ == "__main__":
    main()
