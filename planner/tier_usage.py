"""Bytes that a plan holds in host memory and on disk over the steady iteration.

A slot is taken when the transfer of its page begins, and given back when the page is written, when
it is dropped, or when its tensor dies. In between the page may come back to the device: a clean
copy keeps its slot.
"""

from __future__ import annotations

import numpy as np

from .places.spells import expand
from .plan import TIERS
from .timeline import Timeline, instants
from .trace import Floats, Ints


def tier_usage(line: Timeline) -> dict[str, tuple[Floats, Ints]]:
    """Per tier, times in µs (the first is 0) and the bytes in use from each of them on. Tiers that
    are never used, and all of a timeline without a plan, are left out."""
    found: dict[str, tuple[Floats, Ints]] = {}
    below = line.simulation.below if line.simulation is not None else []
    for tier in TIERS:
        pages = np.array([getattr(each, tier) for each in below], np.int64)
        if not pages.any():
            continue
        change = np.diff(pages)
        row, number = expand(np.zeros_like(change), np.abs(change))  # page by page
        since, until = np.array([each[:2] for each in below[1:]], np.float64).reshape(-1, 2)[row].T
        times = np.append(
            0.0, since + (until - since) * number / np.maximum(np.abs(change) - 1, 1)[row]
        )
        level = np.append(pages[0], pages[0] + np.cumsum(np.sign(change)[row]))
        times = instants(times)
        last = np.append(np.diff(times) > 0, True)
        found[tier] = times[last], level[last] * line.page_size
    return found
