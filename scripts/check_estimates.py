#!/usr/bin/env python3
"""Every language model of transformers, made small: what ``tensorpager estimate`` says of it from
its configuration, beside the same iteration recorded, and a training that starts from such a plan.

    check_estimates.py
    check_estimates.py llama mixtral t5 --json FILE

The estimate sees no values. ``peak`` and ``bytes`` are its bytes over those of the recording, at
the peak and of the kind of tensor that differs most. The plan is for 60 % of the peak, or what the
largest op needs; a training that is given it follows it from its second iteration on, with plain
PyTorch's losses (where nothing streams, which the budget may ask for), or says where they part.
What transformers cannot make or train so small is left out, with its error.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from check_models import LENGTH, PAGE, ROWS, build, check_each, enough, finish, plainly, train
from torch.optim.optimizer import register_optimizer_step_post_hook

import tensorpager as tp
from tensorpager.pager.errors import PagerError
from tensorpager.pager.plan.estimate import fake, fake_iteration, training_of_hf
from tensorpager.pager.plan.plain_script import IterationLog
from tensorpager.pager.plan.starting import uses_by_name
from tensorpager.planner.hardware import PRESETS, load_compute
from tensorpager.planner.lifetimes import live_pages, working_set_pages
from tensorpager.planner.plan import plan_to_json
from tensorpager.planner.registry import make_plan
from tensorpager.planner.trace import Trace

WIDE = 4  # so that most weights have pages of their own
SHARE = 0.6  # of the peak
BYTES_OFF, PEAK_OFF = 0.05, 0.1
HARDWARE = PRESETS["cpu"].with_(page_size=PAGE)


def recorded(model: Any) -> Trace:
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(3, 250, (ROWS, LENGTH))

    def step() -> None:
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()

    step()
    log = IterationLog()
    hook = register_optimizer_step_post_hook(lambda *_: log.step_ended())
    log.start()
    try:
        step()
    finally:
        log.stop()
        hook.remove()
    return log.trace(host_bytes_per_s=1e9, source="check_estimates.py")


def estimated(model: Any, kind: str, path: Path) -> Trace:
    described = json.loads(model.config.to_json_string())
    described |= {"model_type": kind, "architectures": [type(model).__name__]}
    path.write_text(json.dumps(described))
    with fake():
        training = training_of_hf(path, ROWS, LENGTH, None)
        return fake_iteration(training, "adamw", load_compute("cpu"), 1e9).trace


def compared(ours: Trace, theirs: Trace) -> dict[str, Any]:
    kinds: list[Counter[str]] = [Counter(), Counter()]
    for trace, found in zip((ours, theirs), kinds):
        for kind, nbytes in zip(trace.tensor_kinds, trace.tensor_bytes.tolist()):
            found[kind] += nbytes
    ratios = {kind: kinds[0][kind] / nbytes for kind, nbytes in kinds[1].items() if nbytes}
    off = max(ratios, key=lambda kind: abs(ratios[kind] - 1))
    peaks = [int(live_pages(trace, 1).max()) for trace in (ours, theirs)]
    return {
        "ops": f"{ours.ops} of {theirs.ops}",
        "same ops": ours.op_names == theirs.op_names,
        "peak": round(peaks[0] / peaks[1], 3),
        "bytes": round(ratios[off], 3),
        "off": off,
    }


def started(kind: str, name: str, trace: Trace, path: Path) -> str:
    """Whether a training follows the plan of its estimate."""
    least = int(working_set_pages(trace, PAGE).max())
    budget = max(least, int(SHARE * int(live_pages(trace, PAGE).max()))) * PAGE
    plan = make_plan("lp", trace, HARDWARE.with_(device_bytes=budget), quick=True)
    plan.extra["accesses"] = uses_by_name(trace)
    path.write_text(json.dumps(plan_to_json(plan)))
    plain, _ = train(build(kind, name, WIDE), None)

    def use(budget: int) -> tuple[bool, Any]:
        with tp.Pager(
            budget, "1GiB", page_size=PAGE, device="cpu", policy="lp", plan=path
        ) as pager:
            follower = pager.core.follower
            assert follower is not None
            follower.most_plans = 0  # none of the training takes its place
            losses, _ = train(build(kind, name, WIDE), pager)
            same = losses == plain or pager.stats()["streamed"]
            return same, follower.starting

    same, starting = enough(use, budget)
    if not same:
        return "DIFFERS from plain PyTorch"
    if starting.refused is not None:
        return f"REFUSED: {starting.refused}"
    return "followed" if starting.iterations else "nothing to follow"


def check(kind: str, name: str, _: int, folder: Path) -> dict[str, Any]:
    theirs = plainly(recorded, build(kind, name, WIDE))
    try:
        ours = estimated(build(kind, name, WIDE), kind, folder / "config.json")
    except PagerError as error:
        return {"model": name, "estimate": str(error).partition("config.json")[2].lstrip(": ")}
    row = {"model": name, "estimate": "made", **compared(ours, theirs)}
    row["plan"] = started(kind, name, ours, folder / "plan.json")
    return row


@click.command(help=__doc__)
@click.argument("kinds", nargs=-1)
@click.option("--json", "json_path", type=click.Path(path_type=Path))
def main(kinds: tuple[str, ...], json_path: Path | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        rows = check_each(kinds, partial(check, folder=Path(folder)), "estimate")
    made = [row for row in rows if row["estimate"] == "made"]
    bad = [
        row
        for row in made
        if abs(row["bytes"] - 1) > BYTES_OFF
        or abs(row["peak"] - 1) > PEAK_OFF
        or row["plan"].startswith(("REFUSED", "DIFFERS"))
    ]
    totals = {
        "models": len(rows),
        "trained": sum("left out" not in row["estimate"] for row in rows),
        "estimated": len(made),
        "the same ops": sum(row["same ops"] for row in made),
        "followed": sum(row["plan"] == "followed" for row in made),
        "off": [row["model"] for row in bad],
    }
    finish(json_path, totals, rows, bad=bool(bad))


if __name__ == "__main__":
    main()
