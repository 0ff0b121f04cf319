"""The tensor table: what each tensor is, how long it lies idle, what it costs."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..lifetimes import gaps, idle_us
from ..timeline import Timeline
from ..trace import KINDS, Floats

Columns = dict[str, npt.NDArray[Any]]


def tensor_columns(line: Timeline) -> Columns:
    """Columns over the trace's tensors. ``longest_gap``: µs that some page of it is idle at a
    stretch, stalls included. ``moved_out`` and ``moved_in``: bytes in whole pages. ``stall``: µs
    that ops wait for it."""
    trace = line.trace
    moved = np.zeros((2, trace.tensors), np.int64)
    for transfer in line.transfers:
        moved[0 if transfer.is_out else 1, transfer.tensor] += transfer.page_count
    waits = np.zeros(trace.tensors)
    for stall in line.stalls:
        if stall.tensor >= 0:
            waits[stall.tensor] += stall.us
    return {
        "tensor_id": trace.tensor_ids.astype(np.float64),
        "tensor_bytes": trace.tensor_bytes.astype(np.float64),
        "tensor_pages": trace.pages(line.page_size).astype(np.float64),
        "tensor_kind": np.array([KINDS.index(k) for k in trace.tensor_kinds], np.uint8),
        "tensor_persistent": trace.tensor_persistent.astype(np.uint8),
        "tensor_first_op": trace.first_op.astype(np.uint32),
        "tensor_last_op": np.maximum(trace.last_op, 0).astype(np.uint32),
        "tensor_accesses": np.bincount(trace.access_tensor, minlength=trace.tensors).astype("u4"),
        "tensor_longest_gap": _longest_gap(line),
        "tensor_moved_out": moved[0] * float(line.page_size),
        "tensor_moved_in": moved[1] * float(line.page_size),
        "tensor_stall": waits,
    }


def _longest_gap(line: Timeline) -> Floats:
    trace = line.trace
    longest = np.zeros(trace.tensors)
    if not trace.ops:
        return longest
    found = gaps(trace, line.page_size)
    idle = idle_us(trace, found, line.op_start_us, line.op_end_us, line.iteration_us)
    np.maximum.at(longest, found.tensor, idle)
    return longest
