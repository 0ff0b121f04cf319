"""Which buffers live at the same time as a given one, without comparing all pairs.

Buffers are ranked by birth. Those born during a lifetime are a run of ranks; those alive at its
birth are in a list kept for every 64th rank, or were born since. So a query costs about as much as
its answer is long.
"""

from __future__ import annotations

import numpy as np

from ..trace import Ints
from .buffers import Buffers

_STRIDE = 64  # ranks between two lists of what is alive
_CACHED_NUMBERS = 20_000_000  # answers kept, in numbers (160 MB)


class Overlaps:
    def __init__(self, buffers: Buffers) -> None:
        self._by_birth = np.argsort(buffers.lower, kind="stable").astype(np.int64)
        self._lower = buffers.lower[self._by_birth]
        self._upper = buffers.upper[self._by_birth]
        self._rank = np.empty(len(buffers), np.int64)
        self._rank[self._by_birth] = np.arange(len(buffers))
        self._end = np.searchsorted(self._lower, self._upper)  # first rank born after the lifetime
        self._alive = self._alive_lists()
        self._cache: dict[int, Ints] = {}
        self._room = _CACHED_NUMBERS

    def of(self, buffer: int) -> Ints:
        """The other buffers that share a time with ``buffer``, each once."""
        known = self._cache.get(buffer)
        if known is None:
            known = self._find(int(self._rank[buffer]))
            if len(known) <= self._room:
                self._room -= len(known)
                self._cache[buffer] = known
        return known

    def _find(self, rank: int) -> Ints:
        first = rank - rank % _STRIDE
        earlier = np.concatenate([self._alive[rank // _STRIDE], np.arange(first, rank)])
        earlier = earlier[self._upper[earlier] > self._lower[rank]]
        later = np.arange(rank + 1, self._end[rank])
        found: Ints = self._by_birth[np.concatenate([earlier, later])]
        return found

    def _alive_lists(self) -> list[Ints]:
        lists: list[Ints] = []
        alive = np.zeros(0, np.int64)
        for first in range(0, len(self._lower), _STRIDE):
            alive = alive[self._upper[alive] > self._lower[first]]
            lists.append(alive)
            alive = np.concatenate(
                [alive, np.arange(first, min(first + _STRIDE, len(self._lower)))]
            )
        return lists
