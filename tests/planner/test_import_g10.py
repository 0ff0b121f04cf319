"""What the importer reads of G10's workloads has the inactive periods that G10's program printed.

A tensor is born at its first use and dies one kernel after its last use *as an input*; a use is a
read or a write. An inactive period is a run of at least one kernel between two uses that follow
each other; for a tensor that lives across iterations, the last one wraps around the iteration's
end. A tensor that is never an input has no death (−1 there) and no periods. Times are counted in
whole cycles of a clock of 1.2 GHz, what is left of a cycle being lost at each kernel.
"""

from __future__ import annotations

import gzip
import re
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from tensorpager.planner.importers.g10 import load
from tensorpager.planner.trace import READ, Ints, Trace, make_trace

DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "g10"
WORKLOADS = {"bert-256": 1269, "inceptionv3-1536": 1358, "vit-512": 1437}  # periods printed
CYCLE_US = 1 / 1200
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


def test_rules_by_hand() -> None:
    trace = make_trace(
        [(7, 1, False), (8, 1, True), (9, 1, True), (6, 1, False), (5, 1, False)],
        [
            ("a", 10.0, [], [7]),
            ("b", 20.0, [8], []),
            ("c", 30.0, [7], [9, 6]),
            ("d", 40.0, [], [6]),
            ("e", 50.0, [7, 9], [5]),
            ("f", 60.0, [], [7]),
        ],
        page_size=1000,
    )
    found = inactive_periods(trace)
    # Written once more after its last read: that is after its death.
    assert found[7] == TensorPeriods(0, 5, [InactivePeriod(1, 2, 20.0), InactivePeriod(3, 4, 40.0)])
    # Used once: idle all around. Used at 2 and 4: the last gap wraps around.
    assert found[8] == TensorPeriods(0, 6, [InactivePeriod(2, 1, 190.0)])
    assert found[9].periods == [InactivePeriod(3, 4, 40.0), InactivePeriod(5, 2, 90.0)]
    # Never read: no death, no periods.
    assert found[6] == TensorPeriods(2, -1, [])
    assert found[5] == TensorPeriods(4, -1, [])


def test_no_period_where_uses_follow_each_other_around_the_end() -> None:
    ops = [("a", 1.0, [1], []), ("b", 1.0, [], []), ("c", 1.0, [1], [])]
    trace = make_trace([(1, 1, True)], ops, page_size=1)
    assert inactive_periods(trace)[1].periods == [InactivePeriod(1, 2, 1.0)]


def test_times_count_whole_cycles() -> None:
    # 9.216 µs are 11,059.2 cycles.
    ops = [("a", 1.0, [1], []), ("b", 9.216, [], []), ("c", 9.216, [], []), ("d", 1.0, [1], [])]
    trace = make_trace([(1, 1, False)], ops, page_size=1)
    assert inactive_periods(trace)[1].periods[0].idle_us == 2 * 11059 / 1200


def printed(path: Path) -> dict[int, TensorPeriods]:
    """What G10's program printed; births and deaths of global tensors are 0 and 0 here."""
    found: dict[int, TensorPeriods] = {}
    tensor = -1
    for line in gzip.decompress(path.read_bytes()).decode().splitlines():
        if match := re.match(r"tensor(\d+) ", line):
            tensor = int(match[1])
            found.setdefault(tensor, TensorPeriods(0, 0, []))
        elif match := re.match(r"Liveness: Birth: (-?\d+), Death: (-?\d+)", line):
            found[tensor] = TensorPeriods(int(match[1]), int(match[2]), [])
        elif match := re.match(r"interval \d+: (\d+)-+(\d+)", line):
            found[tensor].periods.append(InactivePeriod(int(match[1]), int(match[2]), 0.0))
        elif match := re.match(r"Estimated Time:(\S+)", line):
            last = found[tensor].periods[-1]
            found[tensor].periods[-1] = last._replace(idle_us=float(match[1]))
    return found


@pytest.mark.skipif(not DATA.is_dir(), reason=f"G10's traces are not in {DATA}")
@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_period_that_the_program_prints(workload: str) -> None:
    trace = load(DATA / f"{workload}.json.gz")
    found = inactive_periods(trace)
    expected = printed(DATA / "intervals" / f"{workload}.interval.config.gz")
    assert sum(len(tensor.periods) for tensor in expected.values()) == WORKLOADS[workload]
    assert found.keys() == expected.keys()
    persistent = dict(zip(trace.tensor_ids.tolist(), trace.tensor_persistent.tolist()))
    for tensor, want in expected.items():
        got = found[tensor]
        if not persistent[tensor]:
            assert (got.birth_op, got.death_op) == (want.birth_op, want.death_op), tensor
        assert [p[:2] for p in got.periods] == [p[:2] for p in want.periods], tensor
        for mine, theirs in zip(got.periods, want.periods):
            # Printed with 6 digits. The traces' times are rounded to the nanosecond, which can
            # cost or gain a kernel its last cycle.
            kernels = (mine.end_op - mine.first_op) % trace.ops
            slack_us = 0.5e-5 * mine.idle_us + min(kernels, 3) * CYCLE_US
            assert abs(mine.idle_us - theirs.idle_us) <= slack_us, (tensor, mine, theirs)
