"""Time cut into sections: only the moments at which a largest set of buffers lives together.

Between the last birth and the next death the set of living buffers is the largest around. Every
pair that shares a time shares one of these sections, so nothing else about time matters.
"""

from __future__ import annotations

import numpy as np

from .buffers import Buffers


class Sections:
    """Buffer b lives in the sections ``first[b]`` to ``last[b]``, both inclusive."""

    def __init__(self, buffers: Buffers) -> None:
        births = np.unique(buffers.lower)
        following = np.append(births[1:], np.iinfo(np.int64).max)
        deaths = np.sort(buffers.upper)
        dying = np.searchsorted(deaths, following, side="right") - np.searchsorted(
            deaths, births, side="right"
        )
        moments = births[dying > 0]
        self.count = len(moments)
        self.first = np.searchsorted(moments, buffers.lower)
        self.last = np.searchsorted(moments, buffers.upper) - 1
