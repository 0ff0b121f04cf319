"""What changed between two traces, or between two plans: numbers by name, before and after."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import NamedTuple

import numpy as np

from .lifetimes import gap_bytes, gaps, idle_us, live_bytes_by_kind, live_pages, working_set_pages
from .plan import Plan
from .trace import Trace

BYTES, US, COUNT = "bytes", "us", "count"  # what a value is in


class Change(NamedTuple):
    """A value before and after, in bytes, µs or a count."""

    name: str
    unit: str
    a: float
    b: float

    @property
    def delta(self) -> float:
        return self.b - self.a

    @property
    def percent(self) -> float | None:
        """Of ``a``; ``None`` where that is 0."""
        return 100.0 * self.delta / self.a if self.a else None


class Difference(NamedTuple):
    """``lists`` of changes under their titles: of what was measured, and of what is there by name,
    the most changed first. ``differs_in``: fields that are not equal; what a file says of where it
    comes from does not count."""

    differs_in: list[str]
    measures: list[Change]
    lists: dict[str, list[Change]]


def of_traces(a: Trace, b: Trace) -> Difference:
    """Ops and tensors of one name are added up; a tensor without a name goes by the op that touches
    it first."""
    return Difference(
        _differing(a, b, {"source", "sha256", "device", "metadata"}),
        _changes(_trace_measures(a), _trace_measures(b)),
        {
            "bytes at the peak": _by_name(BYTES, _at_peak(a), _at_peak(b)),
            "time of ops": _by_name(US, *(zip(t.op_names, t.op_duration_us) for t in (a, b))),
            "bytes of tensors": _by_name(BYTES, _tensors(a), _tensors(b)),
        },
    )


def of_plans(a: Plan, b: Plan) -> Difference:
    """By tensor: bytes of pages that moves name, by its number in the trace; an "out" of a page
    whose copy is still good counts, too."""
    return Difference(
        _differing(replace(a, extra={}), replace(b, extra={}), set()),
        _changes(_plan_measures(a), _plan_measures(b)),
        {"bytes moved of tensor": _by_name(BYTES, _moved(a), _moved(b))},
    )


def _changes(
    a: Mapping[tuple[str, str], float], b: Mapping[tuple[str, str], float]
) -> list[Change]:
    """Of what both have."""
    return [Change(*key, value, b[key]) for key, value in a.items() if key in b]


def _by_name(unit: str, *both: Iterable[tuple[str, float]]) -> list[Change]:
    sums: defaultdict[str, list[float]] = defaultdict(lambda: [0, 0])
    for side, rows in enumerate(both):
        for name, value in rows:
            sums[name][side] += value
    found = [Change(name, unit, a, b) for name, (a, b) in sums.items() if a != b]
    return sorted(found, key=lambda change: -abs(change.delta))


def _trace_measures(trace: Trace) -> dict[tuple[str, str], float]:
    """Sizes are the tensors' own, but the working set is in whole pages. Idle: bytes that lie
    between two uses with an op in between, on average over the iteration."""
    found = gaps(trace, trace.page_size)
    ends = np.cumsum(trace.op_duration_us)
    length = idle_us(trace, found, ends - trace.op_duration_us, ends, trace.ideal_us)
    idle = float(gap_bytes(trace, found, trace.page_size) @ length)
    need = int(working_set_pages(trace, trace.page_size).max()) * trace.page_size
    return {
        ("peak", BYTES): int(live_pages(trace, 1).max()),
        ("time", US): trace.ideal_us,
        ("working-set", BYTES): need,
        ("idle", BYTES): idle / trace.ideal_us if trace.ideal_us else 0.0,
        ("tensor-bytes", BYTES): int(trace.tensor_bytes.sum()),
        ("tensors", COUNT): trace.tensors,
        ("ops", COUNT): trace.ops,
        ("accesses", COUNT): len(trace.access_op),
    }


def _at_peak(trace: Trace) -> Iterable[tuple[str, int]]:
    op = int(live_pages(trace, 1).argmax())
    return [(kind, int(live[op])) for kind, live in live_bytes_by_kind(trace, 1).items()]


def _tensors(trace: Trace) -> Iterable[tuple[str, int]]:
    for name, first, size in zip(trace.tensor_names, trace.first_op, trace.tensor_bytes.tolist()):
        yield name or f"of {trace.op_names[first]}", size


def _plan_measures(plan: Plan) -> dict[tuple[str, str], float]:
    """Without a prediction only what the plan itself says."""
    found: dict[tuple[str, str], float] = {}
    if (says := plan.predicted) is not None:
        found = {
            ("time", US): says.iteration_us,
            ("stall", US): says.stall_us,
            ("ideal", US): says.ideal_us,
            ("peak-device", BYTES): says.peak_device_bytes,
            ("peak-host", BYTES): says.peak_host_bytes,
            ("peak-disk", BYTES): says.peak_disk_bytes,
            ("bytes-out", BYTES): says.bytes_out,
            ("bytes-in", BYTES): says.bytes_in,
            ("disk-written", BYTES): says.disk_bytes_written,
        }
    if plan.bound is not None:
        found["bound", US] = plan.bound.iteration_us
    return found | {
        ("moves", COUNT): len(plan.moves),
        ("run again", COUNT): sum(run.last_op + 1 - run.first_op for run in plan.recompute),
        ("host steps", COUNT): len(plan.host_steps),
        ("off at the start", BYTES): sum(run.page_count for run in plan.start) * plan.page_size,
    }


def _moved(plan: Plan) -> Iterable[tuple[str, int]]:
    return [
        (str(move.tensor), move.page_count * plan.page_size)
        for move in plan.moves
        if move.action in ("in", "out")
    ]


def _differing(a: Trace | Plan, b: Trace | Plan, ignored: set[str]) -> list[str]:
    found = []
    for item in fields(a):
        one, other = getattr(a, item.name), getattr(b, item.name)
        if isinstance(one, np.ndarray):  # NaN, where the host cannot run an op, is itself
            same = np.array_equal(one, other, equal_nan=one.dtype.kind == "f")
        else:
            same = one == other
        if item.name not in ignored and not same:
            found.append(item.name)
    return found
