"""Transfers as a trace viewer shows them, and the ops that they are for."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from ..simulation import Transfer
from ..timeline import Timeline

WAIT, USE, FRAMES = "waits for it", "uses it", "waits for its frames"  # what a flow means


def merged(transfers: Iterable[Transfer]) -> list[Transfer]:
    """In the order of time, without those that never began; one for what a move's pages do without
    a pause, although the pace may change."""
    found: list[Transfer] = []
    last: dict[tuple[str, bool], int] = {}  # channel → its latest in ``found``
    for part in sorted(transfers, key=lambda part: part.begin_us):
        if part.end_us <= part.begin_us:
            continue
        place = last.get((part.tier, part.is_out))
        if place is not None and _goes_on(found[place], part):
            pages = found[place].page_count + part.page_count
            found[place] = found[place]._replace(page_count=pages, end_us=part.end_us)
        else:
            last[part.tier, part.is_out] = len(found)
            found.append(part)
    return found


def _goes_on(before: Transfer, part: Transfer) -> bool:
    return (
        before.move == part.move
        and before.arrived == part.arrived
        and before.first_page + before.page_count == part.first_page
        and part.begin_us - before.end_us < 1e-3
    )


class Uses:
    """Which op a transfer is for."""

    def __init__(self, line: Timeline) -> None:
        trace = line.trace
        self.line = line
        order = np.argsort(trace.access_tensor, kind="stable")
        first, end = trace.access_ranges(line.page_size)
        self._op, self._first, self._end = trace.access_op[order], first[order], end[order]
        self._rows = np.searchsorted(trace.access_tensor[order], np.arange(trace.tensors + 1))
        self._starts = line.op_start_us.tolist()
        self._waits = {stall.op: stall for stall in line.stalls}
        self._for_frames: dict[str, list[int]] = defaultdict(list)
        for stall in line.stalls:
            if stall.tensor < 0:
                self._for_frames[stall.channel].append(stall.op)

    def op_after(self, part: Transfer) -> tuple[int, str] | None:
        """The op that waited for it or uses its pages first, and which of the two; of an ``out``
        the op that waited for the frames. Ops of the next iteration count on from the last."""
        if not part.arrived:
            return None
        if part.is_out:
            return self._op_for_frames(part)
        after = bisect_left(self._starts, part.end_us % self.line.iteration_us - 1e-3)
        around = int(part.end_us // self.line.iteration_us)
        rows = slice(self._rows[part.tensor], self._rows[part.tensor + 1])
        mine = (self._first[rows] < part.first_page + part.page_count) & (
            self._end[rows] > part.first_page
        )
        ops = self._op[rows][mine]
        if not len(ops):
            return None
        place = int(np.searchsorted(ops, after))
        if place == len(ops) and not self.line.trace.tensor_persistent[part.tensor]:
            return None
        around += place == len(ops)
        op = int(ops[place % len(ops)])
        stall = self._waits.get(op)
        waited = stall is not None and stall.tensor == part.tensor
        return op + around * self.line.trace.ops, WAIT if waited else USE

    def _op_for_frames(self, part: Transfer) -> tuple[int, str] | None:
        """The op during whose wait it arrived."""
        around, end = divmod(part.end_us, self.line.iteration_us)
        for op in self._for_frames.get(f"{part.tier}-out", ()):
            if self._starts[op] - self._waits[op].us < end <= self._starts[op] + 1e-3:
                return op + int(around) * self.line.trace.ops, FRAMES
        return None
