"""Which pages leave when a planned iteration has to fault: those that its plan uses last.

The plan counts on all pages being where it has put them. The least recently used ones may well be
those that come next, and each of them would then fault in its turn.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ..moves.residency import Residency
    from .compiled_plan import CompiledPlan


@contextmanager
def by_next_use(residency: Residency, compiled: CompiledPlan, now: int) -> Iterator[None]:
    """Inside, pages are evicted by Belady's rule instead of LRU. The accesses are those of
    ``compiled``, again and again, as far as is known; access ``now`` is under way."""
    count = len(compiled.keys)
    before = residency.ages
    residency.ages = ages = np.ones_like(before)  # what is not known of is not used again
    for run in residency.space.runs.values():
        uses = compiled.uses.get(run.key)
        if uses is not None and run.id < len(ages):
            following = bisect_right(uses, now)
            ahead = uses[following] if following < len(uses) else uses[0] + count
            ages[run.id] = 2 * count + 1 - ahead
    try:
        yield
    finally:
        residency.ages = before
