"""Inactive periods by G10's own rules, to compare with what its program prints.

A tensor is born at its first use and dies one kernel after its last use *as an input*; a use is a
read or a write. An inactive period is a run of at least one kernel between two uses that follow
each other; for a tensor that lives across iterations, the last one wraps around the iteration's
end. A tensor that is never an input has no death (−1 there) and no periods. Times are counted in
whole cycles of a clock of 1.2 GHz, what is left of a cycle being lost at each kernel.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from .trace import READ, Ints, Trace

CYCLES_PER_US = 1200


class InactivePeriod(NamedTuple):
    """Ops ``first_op`` to ``end_op`` (exclusive) leave the tensor alone; ``end_op`` ≤ ``first_op``
    where it wraps around the iteration's end. ``idle_us``: what those ops take together."""

    first_op: int
    end_op: int
    idle_us: float


class TensorPeriods(NamedTuple):
    """``birth_op`` and ``death_op`` (exclusive; −1: never read) of one tensor; both are 0 and the
    op count for a tensor that lives across iterations."""

    birth_op: int
    death_op: int
    periods: list[InactivePeriod]


def inactive_periods(trace: Trace) -> dict[int, TensorPeriods]:
    """By the tensor's number in the trace file."""
    cycles = np.floor(trace.op_duration_us * CYCLES_PER_US).astype(np.int64)
    ends = np.concatenate([[0], np.cumsum(cycles)])
    order = np.lexsort((trace.access_op, trace.access_tensor))
    ops = trace.access_op[order]
    reads = (trace.access_mode[order] & READ) != 0
    offsets = np.searchsorted(trace.access_tensor[order], np.arange(trace.tensors + 1))
    return {
        int(trace.tensor_ids[t]): _tensor_periods(
            ops[offsets[t] : offsets[t + 1]],
            reads[offsets[t] : offsets[t + 1]],
            bool(trace.tensor_persistent[t]),
            ends,
        )
        for t in range(trace.tensors)
    }


def _tensor_periods(ops: Ints, reads: Ints, persistent: bool, ends: Ints) -> TensorPeriods:
    """``ends``: cycles from the iteration's begin to each op's, and to its end."""
    uses = np.unique(ops).tolist()
    count = len(ends) - 1
    if persistent:
        birth, death = 0, count
    else:
        birth, death = uses[0], int(ops[reads].max()) + 1 if reads.any() else -1
        uses = [op for op in uses if op < death]
    periods = [
        InactivePeriod(last + 1, use, float(ends[use] - ends[last + 1]) / CYCLES_PER_US)
        for last, use in pairwise(uses)
        if use > last + 1
    ]
    if persistent and (uses[-1] + 1) % count != uses[0]:
        idle = float(ends[-1] - ends[uses[-1] + 1] + ends[uses[0]])
        periods.append(InactivePeriod((uses[-1] + 1) % count, uses[0], idle / CYCLES_PER_US))
    return TensorPeriods(birth, death, periods)
