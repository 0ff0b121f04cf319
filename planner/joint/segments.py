"""Which segments should run again as a whole, in a trace of accesses.

The ops of such a trace are a pager's accesses. What goes from one to the next outside of pages is
not in it, so no single op can be made again, but a segment whose inputs are kept can: what it makes
for later ops is then made right before these. The trace in which some segments do that is a trace
like any other (:func:`again`), and the linear program says what it takes.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ..errors import PagerError
from ..hardware import Hardware
from ..lp.policy import bound
from ..lp.policy import plan as plan_moves
from ..plan import Plan
from ..trace import Segment, Trace
from ..trace_check import number_by_appearance

SHARES = (0.25, 0.5, 0.75, 1.0)  # of the blocks: which ones is taken evenly from first to last
WORTH = 0.97  # of the iteration's time without, at most


class Again(NamedTuple):
    """Blocks to run again, and what an iteration takes then by the linear program's plan."""

    blocks: list[str]
    iteration_us: float


def choose(trace: Trace, hardware: Hardware, plan: Plan) -> Again | None:
    """The share of the trace's blocks with which an iteration is fastest, if it is faster than by
    ``plan``, which only moves pages."""
    assert plan.predicted is not None
    before = plan.predicted.iteration_us
    if not trace.segments or before * WORTH <= trace.ideal_us:
        return None
    blocks = list(dict.fromkeys(segment.name for segment in trace.segments))
    best, chosen = before * WORTH, list[str]()
    for share in SHARES:
        count = round(share * len(blocks))
        some = [blocks[i * len(blocks) // count] for i in range(count)]
        if not some:
            continue
        try:
            least = bound(again(trace, some), hardware, quick=True)
        except PagerError:  # what a segment uses does not fit beside what is there then
            continue
        if least < best:
            best, chosen = least, some
    if not chosen:
        return None
    try:
        found = plan_moves(again(trace, chosen), hardware, quick=True)
    except PagerError:
        return None
    if found.predicted is None or found.predicted.iteration_us > before * WORTH:
        return None
    return Again(chosen, found.predicted.iteration_us)


def again(trace: Trace, blocks: list[str]) -> Trace:
    """``trace`` with the segments of ``blocks`` run once more, each before the first op that uses
    what it makes, and not keeping that the first time."""
    starts = trace.access_offsets.tolist()
    columns = trace.access_tensor.tolist(), trace.access_mode.tolist()
    rows = list(zip(*columns))
    of_op = [rows[begin:end] for begin, end in pairwise(starts)]
    first, last = trace.first_op.tolist(), trace.last_op.tolist()
    before: dict[int, list[Segment]] = {}
    dropped: set[tuple[int, int]] = set()  # (op, tensor) of the first run
    for segment in trace.segments:
        made = set(trace.made_by(segment).tolist())
        if segment.name not in blocks or not made:
            continue
        inside = range(segment.first_op, segment.last_op + 1)
        dropped |= {(op, t) for op in inside for t, _ in of_op[op] if t in made}
        later = range(segment.last_op + 1, trace.ops)
        due = next(op for op in later if any(t in made for t, _ in of_op[op]))
        before.setdefault(due, []).append(segment)
    ops: list[tuple[int, list[tuple[int, int]]]] = []  # the op it was, and its accesses
    sources = list(range(trace.tensors))  # of each tensor, the one that it is a copy of
    for op in range(trace.ops):
        for segment in before.get(op, ()):
            copies: dict[int, int] = {}  # of what the segment needs only while it runs
            for source in range(segment.first_op, segment.last_op + 1):
                accesses = []
                for tensor, mode in of_op[source]:
                    inside = segment.first_op <= first[tensor] and last[tensor] <= segment.last_op
                    if inside and not trace.tensor_persistent[tensor]:
                        if tensor not in copies:
                            copies[tensor] = len(sources)
                            sources.append(tensor)
                        tensor = copies[tensor]
                    accesses.append((tensor, mode))
                ops.append((source, accesses))
        ops.append((op, [(t, mode) for t, mode in of_op[op] if (op, t) not in dropped]))
    order = np.array([op for op, _ in ops], np.int64)
    table = np.array(
        [(k, t, m) for k, (_, accesses) in enumerate(ops) for t, m in accesses], np.int64
    ).reshape(-1, 3)
    index, met = number_by_appearance(table[:, 1])
    tensors = np.array(sources, np.int64)[table[met, 1]]
    us = trace.op_duration_us[order]
    nbytes = trace.tensor_bytes[tensors]
    return replace(
        trace,
        op_names=[trace.op_names[op] for op in order.tolist()],
        op_start_us=np.concatenate([[0.0], np.cumsum(us)[:-1]]),
        op_duration_us=us,
        tensor_ids=np.arange(len(tensors), dtype=np.int64),
        tensor_names=[trace.tensor_names[t] for t in tensors.tolist()],
        tensor_bytes=nbytes,
        tensor_kinds=[trace.tensor_kinds[t] for t in tensors.tolist()],
        tensor_persistent=trace.tensor_persistent[tensors],
        access_op=table[:, 0].copy(),
        access_tensor=index,
        access_mode=table[:, 2].astype(np.int8),
        access_first_page=np.zeros(len(table), np.int64),
        access_page_count=(-(-nbytes // trace.page_size))[index],
        op_rerun=np.zeros(len(ops), np.bool_),
        op_host_us=np.full(len(ops), np.nan),
        segments=(),
    )
