"""What the steps of a plan do, as the simulator needs it: only what a plan can affect.

Most tensors are never moved. They are there while they live, so of them only the number of frames
counts that they take at their first step and give back at their last.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TypeVar

import numpy as np

from ..trace import WRITE, Ints, Trace
from .pages import Pages, Range
from .program import AGAIN, HOST, RUN, Program, Span

T = TypeVar("T")


class Ops:
    """Columns by step. Pages are numbered through all tensors, ranges of them half-open.

    ``accesses``: (tensor, first page, end, whether that is all of it) of tensors that move;
    ``writes``: (first page, end) of those that are written; ``born``, ``dead``: tensors that move
    and whose first or last step it is; ``partial``: whether it uses a part of one. ``new_pages``:
    frames that it takes, for new tensors or for what it makes again; ``dead_pages``: that it gives
    back, of tensors that never move and of temporary pages; ``issued``: moves by their number.
    """

    def __init__(self, trace: Trace, pages: Pages, page_size: int, program: Program) -> None:
        ops, steps = trace.ops, len(program.op)
        self.kind, self.op = program.kind, program.op
        durations = trace.op_duration_us.tolist()
        self.durations: list[float] = [
            0.0 if kind == HOST else durations[op] for kind, op in zip(program.kind, program.op)
        ]
        moves = np.zeros(trace.tensors, np.bool_)
        moves[list(pages.tensors_that_move())] = True

        rows = np.flatnonzero(moves[trace.access_tensor])
        op, tensor = trace.access_op[rows].tolist(), trace.access_tensor[rows]
        begin, end = (bound[rows] for bound in trace.access_ranges(page_size))
        whole: list[bool] = (end - begin == pages.count[tensor]).tolist()
        first, last = (pages.base[tensor] + begin).tolist(), (pages.base[tensor] + end).tolist()
        written = (trace.access_mode[rows] & WRITE != 0).tolist()
        accesses = _by(ops, op, zip(tensor.tolist(), first, last, whole))
        writes = _by(ops, op, ((a, b) if w else None for a, b, w in zip(first, last, written)))

        self.accesses: list[Sequence[tuple[int, int, int, bool]]] = []
        self.writes: list[Sequence[Range]] = []
        self.remade: dict[int, list[tuple[int, int, int]]] = {}
        for step, (kind, number) in enumerate(zip(program.kind, program.op)):
            self.accesses.append(accesses[number] if kind == RUN else ())
            self.writes.append(writes[number] if kind == RUN else ())
            if kind == AGAIN:
                reads = [span for span in program.reads[step] if moves[span.tensor]]
                self.accesses[step] = [
                    (*_numbered(pages, span), span.last - span.first == pages.count[span.tensor])
                    for span in reads
                ]
                self.remade[step] = [_numbered(pages, span) for span in program.remade[step]]
        self.partial = [not all(whole for *_, whole in accesses) for accesses in self.accesses]

        transient = ~trace.tensor_persistent
        transient[list(program.private)] = False
        mine, still = np.flatnonzero(transient & moves), np.flatnonzero(transient & ~moves)
        self.born = _by(steps, program.first[mine].tolist(), mine.tolist())
        self.dead = _by(steps, program.last[mine].tolist(), mine.tolist())
        new = np.flatnonzero(transient)
        self.new_pages = _summed(steps, program.first[new], pages.count[new])
        self.dead_pages = _summed(steps, program.last[still], pages.count[still])
        for step, frames in program.temporary.items():
            self.new_pages[step] += frames + sum(b - a for _, a, b in self.remade[step])
            self.dead_pages[step] += program.given[step]

        issued = _by(ops, [move.issue_op for move in pages.moves], range(len(pages.moves)))
        self.issued = [issued[op] if op >= 0 else () for op in program.before]
        self.quiet = [not (moved or queued) for moved, queued in zip(self.accesses, self.issued)]


def _numbered(pages: Pages, span: Span) -> tuple[int, int, int]:
    base = int(pages.base[span.tensor])
    return span.tensor, base + span.first, base + span.last


def _by(entries: int, keys: Iterable[int], values: Iterable[T | None]) -> list[Sequence[T]]:
    """The values of each entry, in their order, without ``None``."""
    found: defaultdict[int, list[T]] = defaultdict(list)
    for key, value in zip(keys, values):
        if value is not None:
            found[key].append(value)
    return [found.get(key, ()) for key in range(entries)]


def _summed(entries: int, keys: Ints, counts: Ints) -> list[int]:
    total = np.zeros(entries, np.int64)
    np.add.at(total, keys, counts)
    sums: list[int] = total.tolist()
    return sums
