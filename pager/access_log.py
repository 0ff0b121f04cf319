"""What one iteration accesses, in order, by keys that mean the same in every iteration.

A run of pages that lived before the iteration has a positive key for as long as it lives. One that
is born inside has −1, −2, … in the order of its first access. So two iterations do the same if and
only if their keys are equal, whatever happened to be at which address. A run that outlives its
iteration gets the positive key that the run born at the same place of an earlier iteration had, if
that one is dead by now: gradients that are kept for several iterations come back under their names.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from .space import PageRun, Space

Keys = tuple[int, ...]


class AccessLog:
    """The accesses of one iteration. ``times``: seconds at which each began; ``stalls``: position →
    seconds that it waited for its pages; ``writes`` and ``deaths``: (position, key)."""

    def __init__(self) -> None:
        self.keys: list[Keys] = []
        self.times: list[float] = []
        self.stalls: dict[int, float] = {}
        self.writes: list[tuple[int, int]] = []
        self.deaths: list[tuple[int, int]] = []
        self.newborn: list[PageRun] = []
        self.ended = 0.0

    def began(self, keys: Keys) -> None:
        self.keys.append(keys)
        self.times.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Of each access up to the next one, without the time that it waited."""
        ends = [*self.times[1:], self.ended]
        stalls = self.stalls
        return [
            max(0.0, end - start - stalls.get(position, 0.0))
            for position, (start, end) in enumerate(zip(self.times, ends))
        ]


class Names:
    """Gives runs their keys."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._last = 0
        self.runs: dict[int, PageRun] = {}  # by positive key
        self._heirs: dict[tuple[int, int, str], list[int]] = {}

    def is_live(self, run: PageRun) -> bool:
        return self._space.runs.get(run.id) is run

    def run_of(self, key: int, newborn: Sequence[PageRun]) -> PageRun | None:
        """The live run called ``key``, or ``None``."""
        if key < 0:
            run = newborn[-1 - key] if -key <= len(newborn) else None
        else:
            run = self.runs.get(key)
        return run if run is not None and self.is_live(run) else None

    def name(self, run: PageRun, log: AccessLog, births_before: int) -> int:
        """Key of a run that has none yet. ``births_before``: runs born before the iteration."""
        if run.born < births_before:
            return self._keep(run)
        log.newborn.append(run)
        run.key = -len(log.newborn)
        return run.key

    def settle(self, log: AccessLog) -> None:
        """End of an iteration: runs that outlive it are named for the next ones."""
        for index, run in enumerate(log.newborn):
            if not self.is_live(run):
                continue
            place = (index, run.count, run.kind)
            known = self._heirs.setdefault(place, [])
            free = next((key for key in known if not self._is_taken(key)), None)
            if free is None:
                known.append(self._keep(run))
            else:
                run.key = free
                self.runs[free] = run

    def forget_dead(self) -> None:
        """Drop what the map holds of runs that are gone."""
        self.runs = {key: run for key, run in self.runs.items() if self.is_live(run)}

    def _is_taken(self, key: int) -> bool:
        run = self.runs.get(key)
        return run is not None and self.is_live(run)

    def _keep(self, run: PageRun) -> int:
        self._last += 1
        run.key = self._last
        self.runs[run.key] = run
        return run.key
