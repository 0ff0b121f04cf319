"""Making an op wait until transfers are done, with moves alone.

Note "fence": a tensor that op k needs is sent out and fetched back, both issued at k. Queues are
first in, first out, so it goes out behind every offload issued before and comes in behind every
prefetch issued before; k cannot start until it is back. Moves that are to run beside k come after
the fence.
"""

from __future__ import annotations

import numpy as np

from ..plan import Move
from ..trace import Ints, Trace
from .whole import Decision, Room

MAX_PAGES = 2  # a larger tensor would cost more than the wait that it stands for


def fences(trace: Trace, room: Room, decisions: list[Decision]) -> list[Move]:
    """Host moves that make ops wait: for each offload the second op after its last use, for each
    prefetch the op after the one that it runs beside. Slots are counted in ``room``."""
    ops = {decision.out_op + 1 for decision in decisions}
    ops |= {decision.in_op + 1 for decision in decisions if decision.in_op < decision.next_op}
    busy: dict[int, list[Decision]] = {}
    for decision in decisions:
        busy.setdefault(decision.tensor, []).append(decision)
    moves: list[Move] = []
    for op in sorted(op for op in ops if op < trace.ops):
        tensor = _smallest(trace, room.pages, op, busy)
        if tensor is None:
            continue
        pages = int(room.pages[tensor])
        if pages > MAX_PAGES or not room.fits("host", pages, op, op + 1):
            continue
        room.used["host"][op] += pages
        run = (int(trace.tensor_ids[tensor]), 0, pages, "host")
        moves += [Move(*run, action, op) for action in ("out", "in", "drop")]
    return moves


def _smallest(trace: Trace, pages: Ints, op: int, busy: dict[int, list[Decision]]) -> int | None:
    """The smallest tensor that ``op`` needs and that is on the device, not on its way."""
    begin, end = trace.access_offsets[op : op + 2].tolist()
    whole = (
        trace.access_page_count[begin:end]
        >= trace.pages(trace.page_size)[trace.access_tensor[begin:end]]
    )
    used = np.unique(trace.access_tensor[begin:end][whole])
    there = used[trace.tensor_persistent[used] | (trace.first_op[used] < op)]
    ready = [
        tensor
        for tensor in there.tolist()
        if not any(d.out_op <= op <= d.next_op for d in busy.get(tensor, []))
    ]
    return min(ready, key=lambda tensor: int(pages[tensor]), default=None)
