#!/usr/bin/env python3
"""What ``torch.compile`` gives a paged model: steps of a small training, compiled and not.

    bench_compile.py
    bench_compile.py --width 384 --rounds 3 --json compile.json

The same blocks are trained plain, with pages and room for everything ("fits"), and with pages and a
part of the need ("tight"); each as it is and compiled with PyTorch's default backend, in a process
of its own, with one thread. Prints the median step after warm-up, how often that is plain's
uncompiled one, and how many products of matrices are inside compiled graphs. Exits 1 where losses
differ from those of the same training without compiling by more than rounding can tell.
"""

import json
import os
import statistics
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read by libraries when they load
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import click
import torch
from lm.modes import chosen, in_child, in_turn
from lm.report import run_facts, write_json
from torch import nn
from torch.nn import functional as F

import tensorpager as tp

PLACES = ("plain", "fits", "tight")
MODES = tuple(f"{place}{how}" for place in PLACES for how in ("", "+compiled"))
WARM_UP = 6
SAME = 1e-3  # of a loss


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate, self.up = nn.Linear(width, 3 * width), nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        result: torch.Tensor = x + self.down(F.silu(self.gate(normed)) * self.up(normed))
        return result


def child(spec: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    width, where = spec["width"], spec["mode"].partition("+")[0]
    model = nn.Sequential(*(Block(width) for _ in range(spec["blocks"])))
    need = 4 * sum(p.nbytes for p in model.parameters()) + 30 * 4 * width * spec["rows"]
    pager = None
    if where != "plain":
        share = 2.0 if where == "fits" else spec["share"] / 100
        pager = tp.Pager(int(share * need), 4 * need, device="cpu", page_size="64KiB")
        pager.page_module(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if pager is not None:
        pager.optimizer(optimizer)
    products = 0

    def backend(graph: Any, inputs: Any) -> Any:
        nonlocal products
        names = [str(node.target) for node in graph.graph.nodes]
        products += sum("linear" in name for name in names)
        return torch._inductor.compile(graph, inputs)

    call = torch.compile(model, backend=backend) if spec["mode"] != where else model
    inputs = torch.randn(spec["rows"], width)
    seconds, losses = [], []
    for _ in range(WARM_UP + spec["steps"]):
        began = time.perf_counter()
        with pager.iteration() if pager is not None else nullcontext():
            loss = call(inputs).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - began)
    found = {"seconds": seconds[WARM_UP:], "first": seconds[:WARM_UP], "losses": losses,
             "products": products, "fits": pager is not None and pager.stats()["fits"]}  # fmt: skip
    if pager is not None:
        pager.close()
    return found


@click.command(help=__doc__.replace("\n\n    bench", "\n\n\b\n    bench") if __doc__ else None)
@click.option("--modes", default=",".join(MODES), show_default=True)
@click.option("--blocks", default=4, show_default=True)
@click.option("--width", default=256, show_default=True)
@click.option("--rows", default=2048, show_default=True)
@click.option("--share", default=50, show_default=True, help="Percent of the need, of tight.")
@click.option("--steps", default=8, show_default=True, help="Timed.")
@click.option("--rounds", default=1, show_default=True)
@click.option("--json", "out", type=Path, help="Write what was measured here.")
@click.option("--child", "request", hidden=True)
def main(
    modes: str,
    blocks: int,
    width: int,
    rows: int,
    share: int,
    steps: int,
    rounds: int,
    out: Path | None,
    request: str | None,
) -> None:
    if request is not None:
        print(json.dumps(child(json.loads(request))))
        return
    spec = {"blocks": blocks, "width": width, "rows": rows, "share": share, "steps": steps}
    found: dict[str, list[dict[str, Any]]] = {}
    for _, mode in in_turn(chosen(modes, MODES), rounds):
        found.setdefault(mode, []).append(in_child(__file__, {**spec, "mode": mode}))
    medians = {
        mode: statistics.median(statistics.median(run["seconds"]) for run in runs)
        for mode, runs in found.items()
    }
    good = True
    for mode, took in medians.items():
        losses = found.get(mode.partition("+")[0], found[mode])[0]["losses"]
        off = max(abs(a - b) / abs(b) for a, b in zip(found[mode][0]["losses"], losses))
        good = good and off <= SAME
        times = f"{took / medians['plain']:5.2f} × plain" if "plain" in medians else ""
        products = f"{found[mode][0]['products']} products in graphs" if "+" in mode else ""
        print(f"{mode:16} {1e3 * took:8.1f} ms {times}  losses off by {off:.1e}  {products}")
    if out is not None:
        write_json(out, {"medians": medians, "runs": found, "facts": run_facts("cpu")})
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
