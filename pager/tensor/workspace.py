"""What a stream is to a plan: one access, to a workspace of some frames, for as long as it runs.

A plan moves whole runs, and counts frames. A stream's run is never on the device whole, so a plan
cannot move it; what it can do is keep frames free. ::

    accesses    ... | linear | stream of the head ................ | next linear ...
    frames          | planned runs ...............................................
                             | n kept free: slab in use, slab coming |

``n`` is what the first two slabs take. While the stream runs, planned moves do not take the frames
that it has not filled yet. Pages that were on the device before the stream came stay: they are the
plan's. Those that it brought leave after their slab.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from ..memory.page_table import Int32, PageTable
from ..memory.space import Part

if TYPE_CHECKING:
    from ..core import Core

_SLABS = 3  # in use, coming, leaving


class Workspace:
    """Frames of one stream. ``newest``: pages of the latest slab that it brings itself."""

    def __init__(self, table: PageTable, frames: int) -> None:
        self._table = table
        self._frames = frames
        self._brought: deque[Int32] = deque(maxlen=_SLABS)
        self.newest: list[Part] = []

    def coming(self, parts: Sequence[Part]) -> None:
        """A slab is about to be brought in, what is there already excepted."""
        before = self._brought[-1] if self._brought else np.empty(0, np.int32)
        self.newest = [
            Part(run, pages[(self._table.frame[pages] < 0) | np.isin(pages, before)])
            for run, pages in parts
        ]
        every = [pages for _, pages in self.newest]
        self._brought.append(np.concatenate(every) if every else before[:0])

    def kept_frames(self) -> int:
        """Frames that are to stay free for it."""
        pages = np.unique(np.concatenate(self._brought)) if self._brought else np.empty(0, np.int32)
        return max(0, self._frames - int((self._table.frame[pages] >= 0).sum()))


@contextmanager
def workspace(
    pager: Core, slabs: Sequence[Sequence[Part]], write: Sequence[bool]
) -> Iterator[Workspace]:
    """The stream is in the access log, and has its frames if a plan is followed. ``slabs``: the
    first two; ``write``: for each part of the first one."""
    frames = sum(len(np.unique(pages)) for slab in slabs for _, pages in slab)
    space = Workspace(pager.table, min(frames, pager.residency.pool.count))
    watch, follower, kept = pager.watcher(), pager.follower, pager.residency.workspaces
    if watch is None:
        yield space
        return
    with pager.lock:
        access = watch.stream_begins([run for run, _ in slabs[0]], write, frames)
        if access is not None and follower is not None and follower.compiled is not None:
            kept.append(space)
    try:
        yield space
    finally:
        with pager.lock:
            if space in kept:
                kept.remove(space)
            if access is not None:
                watch.stream_ended(access)
                if follower is not None:
                    follower.unpinned()
