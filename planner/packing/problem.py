"""What every search on the same buffers shares: sections, neighbours, sizes in whole units."""

from __future__ import annotations

import numpy as np

from ..trace import Bools, Ints
from .buffers import Buffers
from .sections import Sections


class Problem:
    """Buffers in order of birth, sizes in ``unit`` bytes, their greatest common divisor."""

    def __init__(self, buffers: Buffers) -> None:
        self._order = np.argsort(buffers.lower, kind="stable")
        self.unit = int(np.gcd.reduce(buffers.size)) if len(buffers) else 1
        self.size = buffers.size[self._order] // self.unit
        self.life = (buffers.upper - buffers.lower)[self._order]
        sections = Sections(buffers.take(self._order))
        self.first, self.last = sections.first, sections.last  # sections, both inclusive
        number = np.arange(sections.count)
        member = (self.first[:, None] <= number) & (number <= self.last[:, None])
        kind = np.int32 if self.size.max(initial=0) < 1 << 31 else np.int64
        self.demand = member * self.size.astype(kind)[:, None]  # [buffers, sections]
        live = self.demand.sum(axis=0, dtype=np.int64)
        around = [live[a : b + 1].max() for a, b in zip(self.first, self.last)]
        self.load = np.array(around, np.int64)  # the most that lives around each buffer
        self.meets: Bools = (self.first[:, None] <= self.last) & (
            self.first <= self.last[:, None]
        )  # [buffers, buffers]: share a time
        np.fill_diagonal(self.meets, False)
        self.near = [np.flatnonzero(row) for row in self.meets]

    def __len__(self) -> int:
        return len(self._order)

    def as_given(self, values: Ints) -> Ints:
        """Values of the buffers, put in the order that the buffers had when they came here."""
        given = np.empty_like(values)
        given[self._order] = values
        return given

    def touched(self, which: Ints) -> Bools:
        """The sections [sections] in which some of ``which`` live."""
        steps = np.zeros(self.demand.shape[1] + 1, np.int64)
        np.add.at(steps, self.first[which], 1)
        np.subtract.at(steps, self.last[which] + 1, 1)
        found: Bools = np.cumsum(steps[:-1]) > 0
        return found
