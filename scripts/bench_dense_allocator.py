#!/usr/bin/env python3
"""What an allocator of our own saves under a tight budget: page faults, time and RSS of a step.

Three runs of the same training, each in a process of its own: plain PyTorch; paged at a share of
what plain needs with the allocator off (glibc maps large blocks one by one); the same with it on.
Counts are of ``getrusage``, averaged over steps after the first ones. Exits 1 if the losses differ.
"""

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import click
from lm.data import load_corpus
from lm.measure import load_libraries
from lm.memory import PagedMemory, PlainMemory
from lm.model import PRESETS
from lm.options import Options, parse_options
from lm.report import run_facts, write_json
from lm.trainer import Trainer

import tensorpager as tp
from tensorpager.planner.sizes import format_bytes

KINDS = ("plain", "off", "on", "huge")
WARMUP_STEPS = 4


def rss(name: str) -> int:
    """``VmRSS`` or ``VmHWM`` of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise KeyError(name)


def measured(trainer: Trainer, steps: int) -> dict[str, Any]:
    losses = [trainer.step() for _ in range(WARMUP_STEPS)]
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    losses += [trainer.step() for _ in range(steps)]
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    return {
        "seconds": seconds / steps,
        "user_seconds": (after.ru_utime - before.ru_utime) / steps,
        "system_seconds": (after.ru_stime - before.ru_stime) / steps,
        "page_faults": (after.ru_minflt - before.ru_minflt) / steps,
        "losses": losses,
    }


def run(kind: str, options: Options, steps: int, budget: int) -> dict[str, Any]:
    """In a process of its own."""
    corpus = load_corpus(options.data, options.seq)
    load_libraries(options, corpus)
    base = rss("VmRSS")
    if kind == "plain":
        memory = PlainMemory(options.device)
        found = measured(Trainer(options, memory, corpus), steps)
        found["needed_bytes"] = memory.report().peak_bytes["device"]
    else:
        with tp.Pager(budget, host_budget=2 * budget, device="cpu", policy="lru") as pager:
            if kind == "huge":
                from tensorpager.pager.devices.dense_allocator import loaded

                allocator = loaded()
                assert allocator is not None
                allocator.huge_pages(True)
            found = measured(Trainer(options, PagedMemory(pager), corpus), steps)
            found["pager"] = pager.stats()
    return {**found, "rss_growth_bytes": rss("VmHWM") - base}


def child(kind: str, flags: list[str], steps: int, budget: int) -> dict[str, Any]:
    environment = {**os.environ}
    if kind == "off":
        environment["TENSORPAGER_ALLOCATOR"] = "off"
    command = [sys.executable, __file__, "--child", json.dumps([kind, flags, steps, budget])]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


@click.command(help=__doc__)
@click.option("--preset", type=click.Choice(list(PRESETS)), default="125m", show_default=True)
@click.option("--batch", type=click.IntRange(1), default=4, show_default=True)
@click.option("--seq", type=click.IntRange(1), default=256, show_default=True)
@click.option("--steps", type=click.IntRange(1), default=6, show_default=True)
@click.option("--share", type=float, default=0.5, show_default=True, help="Budget, of the need.")
@click.option("--kinds", default="plain,off,on", show_default=True, help=f"Among {KINDS}.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write results here.")
def main(
    preset: str, batch: int, seq: int, steps: int, share: float, kinds: str, json_path: Path | None
) -> None:
    chosen = {"preset": preset, "batch": batch, "seq": seq, "device": "cpu", "clip": 0}
    flags = [*(f"--{name}={value}" for name, value in chosen.items()), "--no-pager"]
    runs: dict[str, dict[str, Any]] = {}
    budget, load = 0, os.getloadavg()
    for kind in ["plain", *(k for k in kinds.split(",") if k != "plain")]:
        runs[kind] = child(kind, flags, steps, budget)
        budget = budget or int(share * runs["plain"]["needed_bytes"])
        found = runs[kind]
        print(
            f"{kind:6} {found['seconds']:8.3f} s a step (user {found['user_seconds']:.3f}, system "
            f"{found['system_seconds']:.3f}), {found['page_faults']:10,.0f} page faults, RSS + "
            f"{format_bytes(found['rss_growth_bytes'])}",
            flush=True,
        )
    same = all(found["losses"] == runs["plain"]["losses"] for found in runs.values())
    print(f"budget {format_bytes(budget)}, identical losses: {'yes' if same else 'no'}")
    if json_path is not None:
        facts = {"preset": preset, "batch": batch, "seq": seq, "steps": steps, "share": share}
        facts["load_average"] = load  # before the first run: what else the machine had to do
        write_json(json_path, {**facts, "budget": budget, "runs": runs, "facts": run_facts("cpu")})
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        kind, flags, steps, budget = json.loads(sys.argv[2])
        print(json.dumps(run(kind, parse_options(flags), steps, budget)))
    else:
        main()
