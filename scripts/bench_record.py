#!/usr/bin/env python3
"""What ``tensorpager record`` costs a plain PyTorch script.

A small training runs by itself and under ``record``, in turn. CPU times of steps are divided by the
median of the run by itself: of steps that are not recorded (asked: at most 1.01), and of the one
that is, without the optimizer's (asked: at most 2). The trace is written behind the recorded step's
update; what that takes, once, is what this update takes more than the others. CPU time, because
what else a machine does hardly changes it. No recording of ops in Python can cost less than a
dispatch mode that only calls them; it is measured beside ours, as the floor.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
from lm.report import run_facts, write_json

STEPS, RECORDED, WARMUP = 24, 12, 3
TRAINING = """
import json, sys, time
import torch
from torch.utils._python_dispatch import TorchDispatchMode
width, batch, steps, empty = map(int, sys.argv[1:5])
class Empty(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))
torch.manual_seed(0)
torch.set_num_threads(1)
layer = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
model = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
x = torch.randn(batch, 64, width)
took = []
def passes_of_a_step():
    optimizer.zero_grad()
    model(x).square().mean().backward()
for step in range(steps):
    started = time.process_time()
    if step == empty:
        with Empty():
            passes_of_a_step()
    else:
        passes_of_a_step()
    passes = time.process_time()
    optimizer.step()
    took.append((passes - started, time.process_time() - passes))
print("took", json.dumps(took))
"""


def steps(width: int, batch: int, folder: Path, *, recorded: bool) -> list[tuple[float, float]]:
    """CPU seconds of each step of a run: forward and backward pass, and the update. The step that
    would be recorded runs under an empty mode where it is not."""
    script = folder / "training.py"
    script.write_text(TRAINING)
    empty = -1 if recorded else RECORDED - 1
    command = [sys.executable, str(script), *map(str, (width, batch, STEPS, empty))]
    if recorded:
        tensorpager = str(Path(sys.executable).with_name("tensorpager"))
        record = ["record", "-o", str(folder / "t.parquet"), "--iteration", str(RECORDED)]
        command = [tensorpager, *record, "--", *command]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    line = next(line for line in done.stdout.splitlines() if line.startswith("took "))
    return [(passes, update) for passes, update in json.loads(line.removeprefix("took "))]


@click.command()
@click.option("--pairs", default=5, show_default=True, help="Runs of each kind.")
@click.option("--json", "out", type=Path, help="Write what was measured here.")
def main(pairs: int, out: Path | None) -> None:
    """Measure what recording costs a plain script."""
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for width, batch in ((64, 1), (256, 8)):
            rows.append(measure(width, batch, pairs, Path(name)))
            print(
                "width {width}, batch {batch}: plain {plain_cpu_ms:.1f} ms a step of CPU time; "
                "under record x {not_recorded:.3f}; passes of the recorded step x {recorded:.2f} "
                "(empty mode x {floor:.2f}), "
                "then {writing_ms:.0f} ms to write the trace".format(**rows[-1])
            )
    if out is not None:
        write_json(out, {**run_facts("cpu"), "pairs": pairs, "rows": rows})


def measure(width: int, batch: int, pairs: int, folder: Path) -> dict[str, Any]:
    found: dict[str, list[float]] = {}
    for _ in range(pairs):
        plain = steps(width, batch, folder, recorded=False)
        floor = plain[RECORDED - 1][0]
        plain = plain[WARMUP : RECORDED - 1]
        under = steps(width, batch, folder, recorded=True)
        passes, update = under.pop(RECORDED - 1)
        # Nothing of record is left in the script when its trace is written.
        waiting = statistics.median(map(sum, under[WARMUP : RECORDED - 1]))
        whole = statistics.median(map(sum, plain))
        for name, value in (
            ("plain_cpu_ms", 1e3 * whole),
            ("not_recorded", waiting / whole),
            ("recorded", passes / statistics.median(step[0] for step in plain)),
            ("floor", floor / statistics.median(step[0] for step in plain)),
            ("writing_ms", 1e3 * (update - statistics.median(step[1] for step in plain))),
        ):
            found.setdefault(name, []).append(value)
    medians = {name: statistics.median(values) for name, values in found.items()}
    return {"width": width, "batch": batch, **medians}


if __name__ == "__main__":
    main()
