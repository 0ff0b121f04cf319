#!/usr/bin/env python3
"""Whether the pager works on this GPU at all, in half a minute: what to run first on a new one.

    gpu_smoke.py --json FILE

A linear layer in pages; pages that slide over each other; a training step inside half of what the
model needs, with what does not fit in host memory; the same following a plan; and with the host too
small, so that pages go to disk. Losses and parameters are those of the run without a pager. Ends
with the first error, unabridged.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts

import click
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tensorpager as tp

MIB = 1 << 20
PAGE = 64 << 10
WIDTH, LAYERS = 1024, 12  # 12 weights of 4 MiB, as many gradients, twice as many states
STEPS = 2
DENSE = 96 * MIB  # beside the arena: activations, temporaries, cuBLAS's workspace
ARENA = 96 * MIB  # half of the 192 MiB of weights, gradients and states
MOST_STEPS = 20
PLANNED_STEPS = 2  # that follow the plan

State = tuple[list[float], list[Tensor]]


def one_linear() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(512, 512, device="cuda")
    x = torch.randn(64, 512, device="cuda")
    expected = layer(x)
    with tp.Pager(4 * DENSE, device="cuda") as pager:
        pager.page_module(layer)
        with pager.iteration():
            found = layer(x)
            found.sum().backward()
        same(found.detach().cpu(), expected.detach().cpu(), "a linear layer's output")


def slide() -> None:
    """By less than their length, into the frame of a page that is gone, and by one kernel."""
    data = torch.randint(256, (15 * PAGE,), dtype=torch.uint8, device="cuda")
    with tp.Pager(4 * DENSE, page_size=PAGE, device="cuda") as pager:
        first = pager.page(torch.zeros(PAGE, dtype=torch.uint8, device="cuda"))
        rest = pager.page(data)
        residency = pager.core.residency
        before = rest._storage.run.base
        del first
        with pager.core.quiet():
            residency.collect()
            residency.compact(set())
        if rest._storage.run.base != before - 1:
            raise RuntimeError(f"pages from frame {before} on are at {rest._storage.run.base} now")
        same(rest.to_dense().cpu(), data.cpu(), "pages that slid")


def training(pager: tp.Pager | None, steps: int, until: str = "") -> State:
    """Losses, and parameters after STEPS steps. ``steps`` at least, and PLANNED_STEPS in the mode
    that ``until`` names."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False, device="cuda") for _ in range(LAYERS)]
    model = nn.Sequential(*[module for layer in layers for module in (layer, nn.GELU())])
    if pager is not None:
        pager.page_module(model)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    if pager is not None:
        optimizer = pager.optimizer(optimizer)
    x = torch.randn(256, WIDTH, device="cuda")
    losses: list[float] = []
    parameters: list[Tensor] = []
    in_mode = 0
    while len(losses) < steps or (until and in_mode < PLANNED_STEPS):
        if len(losses) == MOST_STEPS:
            assert pager is not None
            raise RuntimeError(f"no plan is followed after {len(losses)} steps; {pager.explain()}")
        with pager.iteration() if pager is not None else nullcontext():
            loss = F.mse_loss(model(x), x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        if len(losses) == STEPS:
            parameters = [parameter.detach().cpu() for parameter in model.parameters()]
        if pager is not None and until:
            in_mode += pager.stats()["mode"] == until
            pager.plan(wait=True)
    return losses, parameters


def same(found: Any, expected: Any, what: str) -> None:
    torch.testing.assert_close(
        found, expected, rtol=0, atol=0, msg=lambda text: f"{what} differ from plain's: {text}"
    )


def paged_training(expected: State, host: int, disk: int, *, plan: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="gpu_smoke-") as folder:
        lower: dict[str, Any] = {"host_budget": host, "policy": "lp" if plan else "lru"}
        if disk:
            lower |= {"disk_budget": disk, "disk_path": folder}
        with tp.Pager(ARENA + DENSE, device="cuda", **lower) as pager:
            losses, parameters = training(pager, STEPS, "planned" if plan else "")
            stats = pager.stats()
    same(losses, expected[0][: len(losses)], "losses")
    same(parameters, expected[1], "parameters")
    if stats["fits"] or (disk and not stats["disk_bytes_written"]):
        raise RuntimeError(f"nothing was paged: {stats}")
    return {name: stats[name] for name in ("mode", "faults", "disk_bytes_written")}


@click.command(help=__doc__.replace("\n\n    gpu", "\n\n\b\n    gpu") if __doc__ else None)
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path))
def main(json_path: Path | None) -> None:
    torch.use_deterministic_algorithms(True)
    expected: State = ([], [])

    def plain() -> None:
        nonlocal expected
        expected = training(None, MOST_STEPS)

    host = 512 * MIB
    checks: dict[str, Callable[[], object]] = {
        "a linear layer in pages": one_linear,
        "pages that slide": slide,
        "a training step without a pager": plain,
        "a paged step": lambda: paged_training(expected, host, 0, plan=False),
        "a planned step": lambda: paged_training(expected, host, 0, plan=True),
        "a step with pages on disk": lambda: paged_training(expected, 16 * MIB, host, plan=False),
    }
    record: dict[str, Any] = {}
    for name, run in checks.items():
        print(f"{name} … ", end="", flush=True)
        began = time.perf_counter()
        said = run()
        torch.cuda.synchronize()
        record[name] = {"seconds": round(time.perf_counter() - began, 2), "stats": said}
        print(f"ok, {record[name]['seconds']} s", flush=True)
    if json_path is not None:
        json_path.write_text(json.dumps(record, indent=1) + "\n")
    sys.exit(0)


if __name__ == "__main__":
    main()
