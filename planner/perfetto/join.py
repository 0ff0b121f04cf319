"""A plan on the clock of the profile that its trace was imported from.

Recorded ops are shown when they were measured. What the plan does is shown where its ops would be
then: an op begins as much later than it was measured as the plan has made ops wait until then, and
the pauses between ops stay as they were.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import TraceError
from ..importers.torch_profiler import Measured, measured
from ..timeline import Timeline
from ..trace import Trace
from .clock import Clock

FIRST_PID, PIDS = 1_000_000_000, 100  # far from what an operating system hands out


def profile_events(document: dict[str, Any], path: Path) -> list[Any]:
    """The events of a profile. Raises ``TraceError`` if it has none."""
    events = document.get("traceEvents")
    if not isinstance(events, list):
        raise TraceError(f"{path}: no list 'traceEvents', so this is no profiler trace")
    return events


def measured_iteration(
    trace: Trace, trace_path: Path, events: list[Any], profile_path: Path
) -> Measured:
    """The ops of ``trace`` as the profile has them. Raises ``TraceError`` unless the trace was
    imported from just this profile."""
    remedy = (
        f"run 'tensorpager import torch-profiler {profile_path} -o TRACE.parquet' and join that"
    )
    first = trace.metadata.get("first_op")
    if trace.source != "torch profiler" or type(first) is not int:
        raise TraceError(
            f"{trace_path} was not imported from a profile (its source: "
            f"'{trace.source or 'not given'}'); {remedy}"
        )
    found = measured(events, profile_path)
    part = slice(first, first + trace.ops)
    same = found.names[part] == trace.op_names
    if not same or not np.array_equal(found.duration_us[part], trace.op_duration_us):
        raise TraceError(f"{trace_path} was not imported from {profile_path}; {remedy}")
    return Measured(found.names[part], found.start_us[part], found.duration_us[part])


def joined_clock(line: Timeline, ops: Measured) -> Clock:
    """Shows ``line``, whose ops these are, when they were measured plus the waits until then."""
    before = np.concatenate([[0.0], line.op_end_us[:-1]])
    waited = np.cumsum(line.op_start_us - before)
    # An op ends where the next one begins at the latest.
    following = np.append(ops.start_us[1:], np.inf)
    begin = ops.start_us + waited
    end = np.minimum(ops.start_us + ops.duration_us, following) + waited
    plan_us = np.concatenate([[0.0], np.column_stack([line.op_start_us, line.op_end_us]).ravel()])
    shown_us = np.concatenate([ops.start_us[:1], np.column_stack([begin, end]).ravel()])
    return Clock(plan_us, np.maximum.accumulate(shown_us), (begin, end))


def free_pid(events: list[Any]) -> int:
    """The first of as many process numbers in a row that the profile does not use."""
    used = {
        value
        for event in events
        if isinstance(event, dict)
        for value in (event.get("pid"), event.get("tid"))
        if isinstance(value, int)
    }
    for pid in itertools.count(FIRST_PID, PIDS):
        if used.isdisjoint(range(pid, pid + PIDS)):
            return pid
    raise AssertionError("unreachable")
