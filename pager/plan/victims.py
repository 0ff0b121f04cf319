"""Which pages leave when an iteration faults whose accesses are known: what it uses last.

A plan counts on all pages being where it has put them; the least recently used ones may well be
those that come next, and each of them would then fault in its turn. States of an optimizer stay
where they are few (LoRA): what leaves instead was only read, and need not be written below.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np

from ..moves.residency import Residency
from .compiled_plan import Order

_FEW = 8  # times as many frames: states stay


@contextmanager
def by_next_use(
    residency: Residency, known: Order, now: int, often: Mapping[int, float]
) -> Iterator[None]:
    """Inside, pages are evicted by Belady's rule instead of LRU. The accesses are those of
    ``known``, again and again, as far as is known; access ``now`` is under way. What comes on
    demand is taken to come as ``often`` as it does: once in so many of these turns."""
    count = len(known.keys)
    before = residency.ages
    residency.ages = ages = np.ones_like(before)  # what is not known of is not used again
    runs = [run for run in residency.space.runs.values() if run.id < len(ages)]
    ahead = known.ahead([run.key for run in runs], now)
    if often:
        shares = np.array([often.get(run.key, 0.0) for run in runs])
        seldom = (ahead < 0) & (2 * shares >= 1)
        ahead[seldom] = count / shares[seldom]
    ages[[run.id for run in runs]] = np.where(ahead < 0, 1, 2 * count + 1 - ahead)
    states = [run for run in runs if run.kind == "optimizer"]
    if _FEW * sum(run.count for run in states) <= residency.pool.count:
        ages[[run.id for run in states]] = 2 * count + 1
    try:
        yield
    finally:
        residency.ages = before
