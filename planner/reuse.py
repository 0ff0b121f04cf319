"""Reuse distances: how large a device must be so that a use finds its pages still there.

Think of a device that keeps what was used last (LRU): while an op runs it holds what that op uses
and, of everything else that is alive, the most recently used that still fits. Pages used by op
``a`` and next by op ``b`` are still there if at no op ``t`` in [a, b) there are more pages that are
alive and were used in [a, t] than the device has. The most there ever are is the *reuse distance*.
Mattson's stack distance (1970) counts everything used in between; here what has died by ``t`` holds
nothing, as in the machine model, so a distance is never above the peak. All that op ``a`` itself
uses counts as newer than the pages in question.

Persistent tensors go around: the use before their first one is the last one of the iteration
before. The first use of any other is no reuse, as there is nothing to find.

Note "going back in time". Let ``f[t]`` be the pages alive at op ``t`` that were used since op ``a``
and look at a = ops − 1 … 0: op ``a`` adds each segment that it uses to ``f`` over [a, its next use
or its death), and then its distance is the maximum of ``f`` over that same range, as ``f`` is zero
before ``a``. Done for blocks of ops, halved again and again: a block sees of ``f`` only where its
own ranges begin and end, the maximum between two such points standing for the rest. That is
O(uses · log uses) in whole arrays.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .lifetimes import segments
from .trace import Bools, Ints, Trace

_BLOCK = 128  # uses that are worked out as one grid; smaller or larger ones take longer in all


@dataclass(frozen=True, eq=False)
class Reuses:
    """Uses of segments that were used before, in no particular order.

    ``op`` uses ``pages`` pages of ``tensor`` (index), which an LRU device of ``distance_pages`` or
    more still holds.
    """

    tensor: Ints
    op: Ints
    pages: Ints
    distance_pages: Ints

    def found_in(self, device_pages: float) -> Bools:
        """Which of the uses find their pages on an LRU device of that size. It means something from
        the largest working set on; what is smaller runs no iteration."""
        return self.distance_pages <= device_pages


def reuses(trace: Trace, page_size: int) -> Reuses:
    """Every reuse of an iteration in its steady state, with its distance."""
    cut, uses = segments(trace, page_size)
    tensor, pages = cut.tensor[uses.segment], cut.pages[uses.segment]
    is_last = np.append(uses.segment[1:] != uses.segment[:-1], True)[: len(uses.op)]
    is_first = np.append(True, uses.segment[1:] != uses.segment[:-1])[: len(uses.op)]
    around = uses.op[np.flatnonzero(is_first)[np.cumsum(is_first) - 1]] + trace.ops
    death = trace.last_op[tensor] + 1
    lasting = trace.tensor_persistent[tensor]
    until = np.append(uses.op[1:], 0)[: len(uses.op)]
    until = np.where(is_last, np.where(lasting, around, death), until)

    order = np.argsort(uses.op, kind="stable")
    distance = _distances(uses.op[order], until[order], pages[order], trace.ops)
    again = (~is_last | lasting)[order]
    chosen = order[again]
    return Reuses(tensor[chosen], until[chosen] % trace.ops, pages[chosen], distance[again])


def _distances(op: Ints, until: Ints, pages: Ints, ops: int) -> Ints:
    """Maximum of ``f`` over [op, until) for each use, sorted by op."""
    following = np.zeros(2 * ops, np.int64)  # what the next iteration alone adds to f
    np.add.at(following, op + ops, pages)
    ends = until + ops
    within = ends < 2 * ops
    np.subtract.at(following, ends[within], pages[within])
    return _Distances(op, pages).solved(np.cumsum(following), op, until)


class _Distances:
    """The note's divide and conquer. Positions are indices into ``f`` as a block sees it."""

    def __init__(self, op: Ints, pages: Ints) -> None:
        self.op, self.pages = op, pages
        self.found = np.zeros(len(op), np.int64)

    def solved(self, f: Ints, begin: Ints, end: Ints) -> Ints:
        if len(self.op):
            self._block(0, len(self.op), f, begin, end)
        return self.found

    def _block(self, low: int, high: int, f: Ints, begin: Ints, end: Ints) -> None:
        """Uses ``low`` to ``high``, which add to ``f`` over [begin, end) each; ``f`` as all later
        uses left it."""
        used = np.zeros(len(f) + 1, np.bool_)
        used[begin] = used[end] = True
        points = np.flatnonzero(used)
        place = np.cumsum(used) - 1
        begin, end, f = place[begin], place[end], np.maximum.reduceat(f, points)
        middle = self._middle(low, high)
        if high - low <= _BLOCK or middle is None:
            self._grid(low, high, f, begin, end)
            return
        later = slice(middle - low, None)
        self._block(middle, high, f, begin[later], end[later])
        change = np.zeros(len(f), np.int64)
        np.add.at(change, begin[later], self.pages[middle:high])
        np.subtract.at(change, end[later], self.pages[middle:high])
        earlier = slice(0, middle - low)
        self._block(low, middle, f + np.cumsum(change), begin[earlier], end[earlier])

    def _middle(self, low: int, high: int) -> int | None:
        """Where an op begins, near the middle; ``None`` if all uses are of one op."""
        middle = (low + high) // 2
        begin = int(np.searchsorted(self.op, self.op[middle]))
        if begin > low:
            return begin
        following = int(np.searchsorted(self.op, self.op[middle], "right"))
        return following if following < high else None

    def _grid(self, low: int, high: int, f: Ints, begin: Ints, end: Ints) -> None:
        """A row per op, the last one first: ``f`` once that op has added its own."""
        rank = np.append(0, np.cumsum(np.diff(self.op[low:high]) > 0))
        row = rank[-1] - rank
        grid = np.zeros((int(rank[-1]) + 1, len(f)), np.int64)
        np.add.at(grid, (row, begin), self.pages[low:high])
        np.subtract.at(grid, (row, end), self.pages[low:high])
        np.cumsum(grid, axis=0, out=grid)
        np.cumsum(grid, axis=1, out=grid)
        grid += f
        np.maximum.accumulate(grid, axis=1, out=grid)
        self.found[low:high] = grid[row, end - 1]
