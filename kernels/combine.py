"""Combine: the partial results of many tiles -> one result per range, in a fixed order.

::

    partials  | . . . . . . . | . . . . . | . . |      float64, one for each tile
    ranges    |   tensor 0    | tensor 1  |  2  |
    pass 1    |  x    x    x  |   x    x  |  x  |      one for each 4,096 partials
    pass 2    |       x       |     x     |  x  |

Every pass cuts each range into pieces of 4,096 and each is one program's, so the order of additions
depends on the number of partials alone: never on timing, and there are no atomics.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import itertools
import math

import numpy as np
import numpy.typing as npt
import torch

from .launch import launch, tl, triton, upload, use_triton

__all__ = ["combine"]

PARTIALS_PER_PROGRAM = 4096
NEUTRAL = {"sum": 0.0, "max": -math.inf, "min": math.inf}


@triton.jit
def join(x, JOIN: tl.constexpr):
    """All of a block as one number: its "sum", or its "max" or "min", NaN where one is NaN."""
    if JOIN == "sum":
        y = tl.sum(x, 0)
    else:
        nan = x != x
        if JOIN == "max":
            y = tl.max(tl.where(nan, float("-inf"), x), 0)
        else:
            y = tl.min(tl.where(nan, float("inf"), x), 0)
        y = tl.where(tl.max(nan.to(tl.int32), 0) > 0, float("nan"), y)
    return y


@triton.jit(
    do_not_specialize=["programs"],
    do_not_specialize_on_alignment=["bounds_ptr"],
)
def _combine_kernel(
    partials_ptr,
    bounds_ptr,
    out_ptr,
    programs,
    JOIN: tl.constexpr,
    NEUTRAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program t joins partials [bounds[t], bounds[programs + t]), at most BLOCK of them."""
    number = tl.program_id(0)
    start = tl.load(bounds_ptr + number)
    count = (tl.load(bounds_ptr + programs + number) - start).to(tl.int32)
    each = tl.arange(0, BLOCK)
    x = tl.load(partials_ptr + start + each, mask=each < count, other=NEUTRAL)
    tl.store(out_ptr + number, join(x, JOIN))


def combine(partials: torch.Tensor, bounds: npt.NDArray[np.int64], how: str) -> torch.Tensor:
    """One result for each range of partial results, float64 [ranges] on their device.

    partials : float64 [n], contiguous.
    bounds : int64 [ranges + 1], on the host, not falling, from 0 to n at most; range r is
        [bounds[r], bounds[r + 1]). An empty range gives 0, -inf or inf.
    how : "sum", "max" or "min"; a NaN among the partials makes the result NaN.

    On CUDA the work is queued on the current stream and the call does not wait. A sum has at most
    40 roundings in a row per pass, and passes are log_4096 of the longest range, rounded up.
    """
    if not use_triton(partials):
        return combine_reference(partials, bounds, how)
    ranges = len(bounds) - 1
    if ranges == 0:
        return partials.new_empty(0)
    while True:
        starts, ends, bounds = _cut(bounds)
        out = partials.new_empty(len(starts))
        table = upload(torch.from_numpy(np.concatenate([starts, ends])), partials.device)
        launch(
            _combine_kernel,
            len(starts),
            partials,
            table,
            out,
            len(starts),
            JOIN=how,
            NEUTRAL=NEUTRAL[how],
            BLOCK=PARTIALS_PER_PROGRAM,
            num_warps=8,
            enable_fp_fusion=False,
        )
        if len(starts) == ranges:
            return out
        partials = out


def _cut(bounds: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], ...]:
    """Starts and ends of every program's partials, and the ranges of their results."""
    programs = np.maximum(-(-np.diff(bounds) // PARTIALS_PER_PROGRAM), 1)
    results = np.concatenate([[0], np.cumsum(programs)])
    owner = np.repeat(np.arange(len(programs)), programs)
    nth = np.arange(results[-1]) - results[owner]
    starts = bounds[owner] + nth * PARTIALS_PER_PROGRAM
    ends = np.minimum(starts + PARTIALS_PER_PROGRAM, bounds[owner + 1])
    return starts, ends, results


def combine_reference(
    partials: torch.Tensor, bounds: npt.NDArray[np.int64], how: str
) -> torch.Tensor:
    """`combine` in plain torch: one reduction for each range."""
    out = partials.new_full((len(bounds) - 1,), NEUTRAL[how])
    for number, (start, end) in enumerate(itertools.pairwise(bounds.tolist())):
        if end > start:
            part = partials[start:end]
            out[number] = part.sum() if how == "sum" else getattr(part, f"a{how}")()
    return out
