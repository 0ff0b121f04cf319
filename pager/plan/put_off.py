"""What a plan has leave, and stays all the same, where there are more frames than it counts on.

Those are the frames that batches have which are shorter than the plan's: they take less dense
memory. Of all that was put off what is used last leaves, as soon as more is put off than there is
room for; what the plan brings back before is there already.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ..memory.page_table import Int32
from ..memory.space import Extent
from ..moves.residency import Residency
from .access_log import Names
from .compiled_plan import ANYWHERE, Action, CompiledPlan


class Job(NamedTuple):
    """An :class:`Action` on a live run. What is done of it the page table says."""

    action: Action
    run: Extent

    @property
    def pages(self) -> Int32:
        return self.run.pages[self.action.first : self.action.first + self.action.pages]


class PutOff:
    """Of one pager; under its lock."""

    def __init__(self, residency: Residency, names: Names) -> None:
        self._residency, self._names = residency, names
        self._plan: CompiledPlan | None = None
        self._jobs: list[Job] = []  # outs

    def follow(self, compiled: CompiledPlan | None) -> None:
        """From now on; what another plan would have had leave is where it is."""
        if compiled is not self._plan:
            self._plan, self._jobs = compiled, []

    @property
    def is_on(self) -> bool:
        """Whether there is, or was, room for any."""
        return bool(self._jobs) or self._room(self._residency.pool.count) > 0

    def _room(self, frames: int) -> int:
        return max(0, frames - self._plan.frames) if self._plan is not None else 0

    def back(self, jobs: Iterable[Job]) -> None:
        """The plan counts on what these bring."""
        coming: dict[Extent, list[Action]] = {}
        for action, run in jobs:
            coming.setdefault(run, []).append(action)
        self._jobs = [
            job
            for job in self._jobs
            if not any(_meet(job.action, one) for one in coming.get(job.run, ()))
        ]

    def add(self, jobs: Sequence[Job], now: int) -> list[Job]:
        """``jobs`` are to leave before access ``now``; those that have to, of these and earlier
        ones."""
        self._jobs += jobs
        return self._beyond(self._residency.pool.count, now)

    def shrink(self, frames: int, now: int) -> list[Job]:
        """There are to be so many frames; what has to leave before. The rest is put elsewhere."""
        return self._beyond(frames, now)

    def _beyond(self, frames: int, now: int) -> list[Job]:
        self._jobs = [job for job in self._jobs if self._names.is_live(job.run)]
        over = sum(job.action.pages for job in self._jobs) - self._room(frames)
        if over <= 0 or self._plan is None:
            return []
        ahead = self._plan.ahead([job.action.key for job in self._jobs], now - 1)
        last_first = np.argsort(np.where(ahead < 0, -np.inf, -ahead), kind="stable")
        leaving = set()
        for which in last_first.tolist():
            if over <= 0:
                break
            leaving.add(which)
            over -= self._jobs[which].action.pages
        found = [self._jobs[which] for which in sorted(leaving)]
        self._jobs = [job for which, job in enumerate(self._jobs) if which not in leaving]
        return found

    def home(self, run: Extent) -> int | None:
        """Where the first page of ``run`` should be, if it was put off: behind the frames that the
        plan has places in."""
        if self._plan is None or not any(job.run is run for job in self._jobs):
            return None
        for start, count in reversed(self._residency.pool.runs()):
            first = max(start, self._plan.frames)
            if start + count - first >= run.count:
                return first
        return ANYWHERE


def _meet(one: Action, other: Action) -> bool:
    return one.first < other.first + other.pages and other.first < one.first + one.pages
