"""Which pages leave when a planned iteration has to fault: those that its plan uses last.

The plan counts on all pages being where it has put them. The least recently used ones may well be
those that come next, and each of them would then fault in its turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from .access_log import Keys

if TYPE_CHECKING:
    from ..moves.residency import Residency


@contextmanager
def by_next_use(residency: Residency, expected: Sequence[Keys], now: int) -> Iterator[None]:
    """Inside, pages are evicted by Belady's rule instead of LRU. ``expected``: the accesses of an
    iteration, which repeats, as far as is known; access ``now`` is under way."""
    count = len(expected)
    next_use: dict[int, int] = {}
    for number in (*range(now, -1, -1), *range(count - 1, now, -1)):  # the nearest is noted last
        ahead = number + count * (number <= now)
        next_use.update(dict.fromkeys(expected[number], ahead))
    before = residency.ages
    residency.ages = ages = np.ones_like(before)  # what is not known of is not used again
    for run in residency.space.runs.values():
        if run.key in next_use and run.id < len(ages):
            ages[run.id] = 2 * count + 1 - next_use[run.key]
    try:
        yield
    finally:
        residency.ages = before
