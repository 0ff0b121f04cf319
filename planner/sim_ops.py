"""What the ops of a trace do, as the simulator needs it: per op, and only what a plan can affect.

Most tensors are never moved. They are there while they live, so of them only the number of frames
counts that they take at their first op and give back at their last.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TypeVar

import numpy as np

from .sim_pages import Pages
from .trace import WRITE, Ints, Trace

T = TypeVar("T")


class Ops:
    """Columns by op. Pages are numbered through all tensors, ranges of them half-open.

    ``accesses``: (tensor, first page, end, whether that is all of it) of tensors that move;
    ``writes``: (first page, end) of those that are written; ``born``, ``dead``: tensors that move
    and whose first or last op it is. ``new_pages``: frames that all new tensors take;
    ``dead_pages``: that tensors that never move give back; ``issued``: moves by their number.
    """

    def __init__(self, trace: Trace, pages: Pages, page_size: int) -> None:
        ops = trace.ops
        moves = np.zeros(trace.tensors, np.bool_)
        moves[list(pages.tensors_that_move())] = True
        self.durations: list[float] = trace.op_duration_us.tolist()

        rows = np.flatnonzero(moves[trace.access_tensor])
        op, tensor = trace.access_op[rows].tolist(), trace.access_tensor[rows]
        begin, end = (bound[rows] for bound in trace.access_ranges(page_size))
        whole: list[bool] = (end - begin == pages.count[tensor]).tolist()
        first, last = (pages.base[tensor] + begin).tolist(), (pages.base[tensor] + end).tolist()
        written = (trace.access_mode[rows] & WRITE != 0).tolist()
        self.accesses = _by_op(ops, op, zip(tensor.tolist(), first, last, whole))
        self.writes = _by_op(
            ops, op, ((a, b) if w else None for a, b, w in zip(first, last, written))
        )
        self.partial = not all(whole)

        transient = ~trace.tensor_persistent
        mine, still = np.flatnonzero(transient & moves), np.flatnonzero(transient & ~moves)
        self.born = _by_op(ops, trace.first_op[mine].tolist(), mine.tolist())
        self.dead = _by_op(ops, trace.last_op[mine].tolist(), mine.tolist())
        new = np.flatnonzero(transient)
        self.new_pages = _summed(ops, trace.first_op[new], pages.count[new])
        self.dead_pages = _summed(ops, trace.last_op[still], pages.count[still])

        issue_ops = [move.issue_op for move in pages.moves]
        self.issued = _by_op(ops, issue_ops, range(len(issue_ops)))
        self.quiet = [not (moved or queued) for moved, queued in zip(self.accesses, self.issued)]


def _by_op(ops: int, keys: Iterable[int], values: Iterable[T | None]) -> list[Sequence[T]]:
    """The values of each op, in their order, without ``None``."""
    found: defaultdict[int, list[T]] = defaultdict(list)
    for op, value in zip(keys, values):
        if value is not None:
            found[op].append(value)
    return [found.get(op, ()) for op in range(ops)]


def _summed(ops: int, keys: Ints, counts: Ints) -> list[int]:
    total = np.zeros(ops, np.int64)
    np.add.at(total, keys, counts)
    sums: list[int] = total.tolist()
    return sums
