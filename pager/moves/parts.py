"""Pages that are pinned without the rest of their runs.

An op on a tensor larger than the arena holds a few of its pages at a time: a *part*. Those may not
move or leave; the run's other pages come and go. ``run.parts`` is ``None`` for all other runs, so
that ops on whole runs pay one comparison where pages are chosen to leave, and nothing elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..errors import TierFull
from ..memory.page_table import Int32
from ..memory.space import Extent
from .tickets import MoveFailed

if TYPE_CHECKING:
    from .residency import Residency

_NOTHING = np.empty(0, np.int32)


class Part(NamedTuple):
    """Some virtual ``pages`` of ``run``, in order, none twice."""

    run: Extent
    pages: Int32


class Parts:
    """All part pins of one pager. Methods are called with its lock held.

    ``awaited``: pages that will be pinned next (read-ahead brings them): they leave last of all
    that may leave.
    """

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._table = residency.table
        self._runs: set[Extent] = set()
        self.awaited: list[Int32] = []

    # -- pinning ---------------------------------------------------------------------------------
    def pin(self, parts: Sequence[Part], *, streamed: bool = False) -> None:
        """Bring these pages in, to any frames, and forbid their eviction. All or nothing.
        ``streamed``: what is not pinned of their runs is the first to leave from now on.

        Raises ``InfeasibleBudget`` or ``TierFull``, or what the disk raises, with nothing pinned.
        While it waits for what is queued the lock is given away.
        """
        residency = self._residency
        residency.let_go()
        try:
            self._pin(parts, streamed=streamed)
        except MoveFailed:
            residency.mover.drain()
            self._pin(parts, streamed=streamed)

    def _pin(self, parts: Sequence[Part], *, streamed: bool) -> None:
        residency = self._residency
        residency.mover.slots.let_go()
        residency.collect()
        residency.before_pinning()
        self.hold(parts, streamed=streamed)
        try:
            residency.check_need(())
            for part in parts:
                try:
                    self._bring(part)
                except TierFull:
                    if not residency.make_way(len(part.pages)):
                        raise
                    self._bring(part)
            for _, pages in parts:
                residency.wait_for(pages)
        except BaseException:
            self.unpin(parts)
            raise

    def has(self, parts: Sequence[Part]) -> bool:
        """Whether all these pages are on the device, none of them still to arrive."""
        tickets = self._residency.mover.tickets
        return all(
            bool((frames >= 0).all()) and not tickets.of(("device", frames))
            for frames in (self._table.frame[pages] for _, pages in parts)
        )

    def hold(self, parts: Iterable[Part], *, streamed: bool = False) -> None:
        """:meth:`pin` for pages that are there (see :meth:`has`). May be done several times."""
        for run, pages in parts:
            if run.parts is None:
                run.parts = []
                self._runs.add(run)
            run.parts.append(pages)
            if streamed:
                self._residency.spent(run)
            else:
                self._residency.touch(run)

    def unpin(self, parts: Iterable[Part]) -> None:
        """End of what :meth:`pin` or :meth:`hold` began with these very parts."""
        for run, pages in parts:
            assert run.parts is not None, f"no part of run {run.id} is pinned"
            del run.parts[next(i for i, other in enumerate(run.parts) if other is pages)]
            if not run.parts:
                run.parts = None
                self._runs.discard(run)

    def _bring(self, part: Part) -> None:
        run, pages = part
        absent = pages[self._table.frame[pages] < 0]
        if len(absent):
            frames = self._residency.claim_any(len(absent))
            self._residency.fill(run, absent, frames)

    def written(self, part: Part) -> None:
        """A write to these pages, which are pinned, is about to happen: copies below are void."""
        if not part.run.settled:
            self._residency.mover.slots.void_copies(part.pages)

    # -- looking ---------------------------------------------------------------------------------
    def pages(self) -> Int32:
        """All pages that are pinned by themselves, none twice."""
        if not self._runs:
            return _NOTHING
        return np.concatenate([held_pages(run) for run in self._runs])

    def frames(self) -> Int32:
        """Where they are; while a part is being brought in, not all of them are."""
        return self._resident(self.pages())

    def awaited_frames(self) -> Int32:
        """Frames of the awaited pages that are there."""
        return self._resident(np.concatenate(self.awaited)) if self.awaited else _NOTHING

    def _resident(self, pages: Int32) -> Int32:
        frames: Int32 = self._table.frame[pages]
        return frames[frames >= 0]

    def count(self, besides: Sequence[Extent] = ()) -> int:
        """Pages held, of runs that are not pinned whole, nor among ``besides``."""
        return sum(
            len(held_pages(run)) for run in self._runs if not run.pins and run not in besides
        )


def held_pages(run: Extent) -> Int32:
    """Pages of ``run`` that are pinned by themselves, in order."""
    if run.parts is None:
        return _NOTHING
    return np.unique(np.concatenate(run.parts))
