"""The paged product by rows of x: directly, gathered, and as torch does it on a dense weight.

A consecutive weight is a view, multiplied by torch's own product: what cuBLAS takes is its time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from tensorpager.kernels.copies import gather_pages
from tensorpager.kernels.linear import linear_forward, reads_directly

from .case import ResultError, Setting
from .cases_linear import assert_product
from .clock import Clock, take_turns
from .pages import Pages

MS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192)
QUICK_MS = (1, 16, 256, 1024, 2048, 8192)
DTYPE = torch.bfloat16
SHAPES = ((4096, 4096), (14336, 4096))  # N, K of an attention and a feed-forward weight
PATHS = ("cublas", "direct", "gather")


def product_paths(
    m: int, n: int, k: int, setting: Setting
) -> tuple[dict[str, Callable[[], Any]], Callable[[], None]]:
    """The three ways to multiply, and a check that two of ours are right (raises `ResultError`)."""
    x, weight = setting.randn(m, k, dtype=DTYPE, salt=1), setting.randn(n, k, dtype=DTYPE)
    pages = Pages(weight, setting.page_bytes, setting.seed)
    matrix = pages.matrix()
    out = torch.full((m, n), torch.nan, dtype=DTYPE, device=setting.device)
    scratch = torch.zeros_like(weight)
    scratch_bytes = scratch.view(-1).view(torch.uint8)

    def gather() -> torch.Tensor:
        gather_pages(pages.arena, pages.frame_of, scratch_bytes, setting.page_bytes)
        return F.linear(x, scratch)

    def check() -> None:
        linear_forward(x, matrix, out)
        assert_product(out, x, weight.t())
        assert_product(gather(), x, weight.t())

    paths = {
        "cublas": lambda: F.linear(x, weight),
        "direct": lambda: linear_forward(x, matrix, out),
        "gather": gather,
    }
    return paths, check


def sweep_products(
    clock: Clock,
    shapes: Sequence[tuple[int, int]],
    ms: Sequence[int],
    page_bytes: int,
    seconds: float,
    over: Callable[[], bool],
) -> list[dict[str, Any]]:
    """A row for each shape and M, with the medians of all paths; nothing starts when `over`."""
    rows: list[dict[str, Any]] = []
    for n, k in shapes:
        for m in ms:
            if over():
                return rows
            row: dict[str, Any] = {"m": m, "n": n, "k": k, "page_bytes": page_bytes}
            rows.append(row)
            nbytes = n * k * DTYPE.itemsize
            try:
                paths, check = product_paths(m, n, k, Setting(clock.device, nbytes, page_bytes))
                check()
            except ResultError as error:
                row |= {"status": "wrong", "why": str(error)}
                continue
            except Exception as error:  # one broken size must not hide the others
                row |= {"status": "broken", "why": f"{type(error).__name__}: {error}"}
                continue
            turns = {name: lambda run=run: clock.call(run) for name, run in paths.items()}
            times = take_turns(turns, seconds)
            row |= {name: one.record() for name, one in times.items()}
            row |= {"status": "right", **judged(row, {x: times[x].median for x in PATHS})}
    return rows


def judged(row: dict[str, Any], seconds: dict[str, float]) -> dict[str, Any]:
    """The path that is taken, its share of cuBLAS's speed and of the better path's."""
    chosen = "direct" if reads_directly(row["m"], row["k"], DTYPE) else "gather"
    best = min(seconds["direct"], seconds["gather"])
    return {
        "chosen": chosen,
        "direct_share": seconds["cublas"] / seconds["direct"],
        "chosen_share": seconds["cublas"] / seconds[chosen],
        "chosen_of_best": best / seconds[chosen],
    }


def crossover(rows: Sequence[dict[str, Any]]) -> int | None:
    """The largest M up to which the direct kernel should be taken; 0 if never, None without rows.

    Should the winner change more than once, as noise makes it, the border that gives away the
    least time over all rows.
    """
    leads: dict[int, float] = {}
    for row in rows:
        if row["status"] == "right":
            lead = math.log(row["gather"]["median_ms"] / row["direct"]["median_ms"])
            leads[row["m"]] = leads.get(row["m"], 0.0) + lead
    if not leads:
        return None
    best, border, total = 0.0, 0, 0.0
    for m in sorted(leads):
        total += leads[m]
        if total > best:
            best, border = total, m
    return border
