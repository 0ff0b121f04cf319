"""What a plan has leave, and stays all the same, where there are more frames than it counts on.

Those are the frames that batches have which are shorter than the plan's: they take less dense
memory. Of all that was put off what is used last leaves, as soon as more is put off than there is
room for; what the plan brings back before is there already.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ..memory.frame_pool import Numbers
from ..memory.space import Extent
from ..moves.residency import Residency
from .access_log import Names
from .compiled_plan import Action, CompiledPlan

_NOTHING = np.empty(0, np.int64)


class Job(NamedTuple):
    """An :class:`Action` on a live run. What is done of it the page table says."""

    action: Action
    run: Extent

    @property
    def pages(self) -> Numbers:
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
        plan = self._plan
        return max(0, frames - plan.frames - plan.left) if plan is not None else 0

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

    def choose(self, outs: Sequence[Job], now: int) -> list[Job]:
        """``outs`` are to leave before access ``now``; those that have to, of these and earlier
        ones."""
        self._jobs += outs
        return self.beyond(now)

    def in_place(self, frames: Numbers) -> list[Job] | None:
        """What was put off and is in ``frames``; ``None`` if something else is."""
        table = self._residency.table
        pages = table.frame_page[frames]
        pages = pages[pages >= 0]
        owners = set(table.owner[pages].tolist())
        jobs = [job for job in self._jobs if job.run.id in owners]
        mine = [_NOTHING, *(job.pages for job in jobs if not job.run.pins and not job.run.parts)]
        return jobs if np.isin(pages, np.concatenate(mine)).all() else None

    def forget(self, jobs: Sequence[Job]) -> None:
        """They leave."""
        self._jobs = [job for job in self._jobs if job not in jobs]

    def holds(self, run: Extent) -> bool:
        """Whether some of ``run`` was put off."""
        return any(job.run is run for job in self._jobs)

    def behind(self, run: Extent) -> int | None:
        """Where there is room for ``run``, none of which is there, behind the frames that the plan
        has places in. Not for what is moved in parts, which have to be beside each other."""
        if self._plan is None or run.key in self._plan.parted:
            return None
        for start, count in reversed(self._residency.pool.runs()):
            first = max(start, self._plan.frames)
            if start + count - first >= run.count:
                return first
        return None

    def beyond(self, now: int, frames: int | None = None) -> list[Job]:
        """What has to leave where there are, or are to be, so many frames."""
        frames = self._residency.pool.count if frames is None else frames
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


def _meet(one: Action, other: Action) -> bool:
    return one.first < other.first + other.pages and other.first < one.first + one.pages
