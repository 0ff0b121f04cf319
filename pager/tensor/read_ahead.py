"""Brings the pages of the next slab in while an op uses those of this one.

::

    op            | slab 0 |      | slab 1        | slab 2 ...
    in-lanes               | slab 1 | slab 2 |      | slab 3 ...
    out-lanes                       | 0, if written    | 1 ...

It has lanes of its own, because its pages are needed before those that a plan has queued.
Read-ahead is advice, as a plan is: what it did not bring, for whatever reason, is brought in by a
fault when the slab is pinned. It takes frames that are free or hold the least recently used pages,
and does not keep its pages from leaving again, so it can make nothing fail.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from ..memory.page_table import BLANK, DIRTY, Int32
from ..memory.space import Extent, Part
from ..moves.mover import AHEAD
from ..moves.tickets import MoveFailed

if TYPE_CHECKING:
    from ..core import Core


@contextmanager
def reading_ahead(pager: Core) -> Iterator[ReadAhead]:
    """A :class:`ReadAhead` for one stream."""
    ahead = ReadAhead(pager)
    try:
        yield ahead
    finally:
        ahead.forget()


class ReadAhead:
    """Of one stream. ``ask`` for the pages of the next slab, then ``take`` them."""

    def __init__(self, pager: Core) -> None:
        self._pager = pager
        self._awaited: Int32 | None = None
        self._asked = np.empty(0, np.int32)  # pages that were queued

    def ask(self, parts: Sequence[Part]) -> None:
        """Queue what brings ``parts`` in. Not in a metered iteration: what an op needs at least is
        found there."""
        pager, residency = self._pager, self._pager.residency
        with pager.lock:
            if pager.budget.metering or pager.closed_reason is not None:
                return
            table, pages = pager.table, _distinct(parts)
            self._awaited = pages
            residency.awaited.append(pages)
            absent = pages[table.frame[pages] < 0]
            self._make_room(len(absent))
            asked = absent[(table.flags[absent] & BLANK) == 0]
            frames = residency.claim_free(len(asked))
            self._asked = asked[: len(frames)]
            on_host = table.host[self._asked] >= 0
            for tier, here in (("host", on_host), ("disk", ~on_host)):
                pager.mover.bring(tier, self._asked[here], frames[here], AHEAD)

    def take(self) -> None:
        """Wait for what was asked for, and forget about it."""
        pager = self._pager
        with pager.lock:
            try:
                pager.residency.wait_for(self._asked)
            except MoveFailed:
                pager.mover.drain()  # a fault meets the same error, if it lasts
            there = pager.table.frame[self._asked] >= 0
            pager.residency.pages_ahead += int(there.sum())
            self.forget()

    def leave(self, parts: Sequence[Part]) -> None:
        """A slab was used and is not pinned any more. While a plan is followed it leaves at once:
        the plan counts on all frames. Otherwise it does when frames are wanted."""
        pager = self._pager
        with pager.lock:
            follower = pager.follower
            if follower is None or follower.compiled is None or pager.closed_reason is not None:
                return
            pages = _distinct([Part(run, _only_here(run, pages)) for run, pages in parts])
            pages = pages[pager.table.frame[pages] >= 0]
            if self._awaited is not None:
                pages = np.setdiff1d(pages, self._awaited)
            self._send_away(pages)

    def forget(self) -> None:
        """What was asked for may leave again."""
        with self._pager.lock:
            self._asked = self._asked[:0]
            if self._awaited is not None:
                awaited = self._pager.residency.awaited
                del awaited[next(i for i, a in enumerate(awaited) if a is self._awaited)]
                self._awaited = None

    # -- room ------------------------------------------------------------------------------------
    def _make_room(self, frames: int) -> None:
        """So that ``frames`` are free: the least recently used pages leave. Those of a plan that is
        followed stay: it keeps frames free for the stream."""
        follower, residency = self._pager.follower, self._pager.residency
        if follower is not None and follower.compiled is not None:
            return
        short = frames - residency.pool.free_count
        if short > 0:
            self._send_away(residency.oldest(short))

    def _send_away(self, pages: Int32) -> None:
        """As far as there are slots."""
        pager = self._pager
        dirty = (pager.table.flags[pages] & DIRTY) != 0
        pager.residency.evict_pages(pages[~dirty])
        to_leave = np.sort(pages[dirty])
        room = pager.host.slots.free_count
        self._write_back("host", to_leave[:room])
        if not pager.mover.disk_refuses:
            self._write_back("disk", to_leave[room:])

    def _write_back(self, tier: str, pages: Int32) -> None:
        if len(pages):
            slots = self._pager.mover.slots.take(tier, len(pages), leaving=pages)
            self._pager.mover.out(tier, pages[: len(slots)], slots, AHEAD)


def _distinct(parts: Sequence[Part]) -> Int32:
    if not parts:
        return np.empty(0, np.int32)
    return np.unique(np.concatenate([pages for _, pages in parts]))


def _only_here(run: Extent, pages: Int32) -> Int32:
    """Those that nobody has pinned."""
    return np.empty(0, np.int32) if run.pins else np.setdiff1d(pages, run.held_pages)
