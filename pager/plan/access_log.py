"""What one iteration accesses, in order, by keys that mean the same in every iteration.

A run of pages that lived before the iteration has a positive key for as long as it lives. One that
is born inside has a negative one of its number in the order of first accesses and of its size. So
two iterations do the same to the same sizes if and only if their keys are equal, whatever happened
to be at which address: a plan of one batch length knows nothing of another's. A stream
(``slabs.py``) is an access as well, with a key of its own for the runs that it goes through. A run
that outlives its iteration gets the positive key that the run born at the same place of an earlier
iteration had, if that one is dead by now: gradients that are kept for several
iterations come back under their names.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from ..memory.space import Extent, Space

Keys = tuple[int, ...]
FIRST_STREAM = 1 << 40  # keys of streams are not less, those of runs are
_MOST_NEWBORN = 1 << 32  # runs born in one iteration


def newborn_key(index: int, pages: int) -> int:
    """Of the run of ``pages`` pages that was the ``index``-th, from 0, to be born and used."""
    return -(pages * _MOST_NEWBORN + index + 1)


def newborn_index(key: int) -> int:
    """The inverse of :func:`newborn_key`."""
    return -key % _MOST_NEWBORN - 1


class StreamAccess:
    """Access number ``begin`` is a stream, which ended when ``end`` accesses had begun; ``frames``:
    of its workspace."""

    __slots__ = ("begin", "end", "frames")

    def __init__(self, begin: int, frames: int) -> None:
        self.begin = begin
        self.end = begin + 1
        self.frames = frames


class AccessLog:
    """The accesses of one iteration. ``times``: seconds at which each began; ``stalls``: position →
    seconds that it waited for its pages, ``own_stalls``: for those of a stream, which no plan can
    bring; ``writes`` and ``deaths``: (position, key).

    ``stamps``: of a device (``Device.stamp``), where it has a clock: one as each access began, and
    one at the end; ``ready``: position → when the pages that it waited for were there."""

    def __init__(self) -> None:
        self.keys: list[Keys] = []
        self.times: list[float] = []
        self.stalls: dict[int, float] = {}
        self.own_stalls: dict[int, float] = {}
        self.streams: list[StreamAccess] = []
        self.writes: list[tuple[int, int]] = []
        self.deaths: list[tuple[int, int]] = []
        self.newborn: list[Extent] = []
        self.ended = 0.0
        self.stamps: list[Any] = []
        self.ready: dict[int, Any] = {}

    def began(self, keys: Keys) -> None:
        self.keys.append(keys)
        self.times.append(time.perf_counter())

    def take_times(self, elapsed: Callable[[Any, Any], float]) -> None:
        """Where there are stamps, times and stalls are the device's from now on: when ops began and
        ended there, not when they were queued."""
        if not self.stamps:
            return
        first, starts = self.stamps[0], self.stamps[:-1]
        self.times = [elapsed(first, stamp) for stamp in starts]
        self.ended = elapsed(first, self.stamps[-1])
        self.stalls = {where: elapsed(starts[where], at) for where, at in self.ready.items()}
        self.own_stalls = {}
        self.stamps, self.ready = [], {}

    def stalls_of_plans(self) -> dict[int, float]:
        """Position → seconds that it waited for what a plan can bring."""
        own = self.own_stalls
        return {where: waited - own.get(where, 0.0) for where, waited in self.stalls.items()}

    def seconds(self) -> list[float]:
        """Of each access up to the next one, without the time that it waited for what a plan can
        bring: the reads of a stream are a part of it."""
        ends = [*self.times[1:], self.ended]
        stalls = self.stalls_of_plans()
        return [
            max(0.0, end - start - stalls.get(position, 0.0))
            for position, (start, end) in enumerate(zip(self.times, ends))
        ]


class Names:
    """Gives runs their keys."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._last = 0
        self.runs: dict[int, Extent] = {}  # by positive key
        self._heirs: dict[tuple[int, int, str], list[int]] = {}
        self._streams: dict[tuple[tuple[int, bool], ...], int] = {}

    def is_live(self, run: Extent) -> bool:
        return self._space.runs.get(run.id) is run

    def run_of(self, key: int, newborn: Sequence[Extent]) -> Extent | None:
        """The live run called ``key``, or ``None``."""
        if key < 0:
            index = newborn_index(key)
            run = newborn[index] if index < len(newborn) else None
            if run is not None and run.key != key:
                run = None  # of another size, or renamed
        else:
            run = self.runs.get(key)
        return run if run is not None and self.is_live(run) else None

    def name(self, run: Extent, log: AccessLog, births_before: int) -> int:
        """Key of a run that has none yet. ``births_before``: runs born before the iteration."""
        if run.born < births_before:
            return self._keep(run)
        run.key = newborn_key(len(log.newborn), run.count)
        log.newborn.append(run)
        return run.key

    def of_stream(self, runs: Sequence[tuple[int, bool]]) -> int:
        """Key of a stream through runs with these keys, each written or not."""
        return self._streams.setdefault(tuple(runs), FIRST_STREAM + len(self._streams))

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

    def _keep(self, run: Extent) -> int:
        self._last += 1
        run.key = self._last
        self.runs[run.key] = run
        return run.key
