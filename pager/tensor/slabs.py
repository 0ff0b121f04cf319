"""Ops on tensors larger than the whole arena: page by page, slab by slab.

An ordinary op holds all pages of its operands. Here only a *part* of a run is held, and a *stream*
holds one part after another: while one is used the next one is read ahead, and the
one before leaves when its frames are wanted, before anything else does. ::

    tensor   | leave if wanted | in use | coming | on host or disk ...
                                 ^ slab k  ^ slab k + 1

A plan moves whole runs, and counts frames. A stream's run is never on the device whole, so a plan
cannot move it; what it can do is keep frames free. To it a stream is one access, to a *workspace*
of some frames, for as long as it runs. ::

    accesses    ... | linear | stream of the head ................ | next linear ...
    frames          | planned runs ...............................................
                             | n kept free: slab in use, slab coming |

``n`` is what the first two slabs take. While the stream runs, planned moves do not take the frames
that it has not filled yet. Pages that were on the device before the stream came stay: they are the
plan's. Those that it brought leave after their slab. Copies below of what is written become void as
they do for other writes.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import NamedTuple

import numpy as np
import torch

from ...kernels.copies import scatter_pages
from ...kernels.launch import upload
from ..budget.fits import frames_anyway
from ..core import Core, PagedStorage
from ..memory.frame_pool import Numbers, distinct
from ..memory.page_table import BLANK, DIRTY, PageTable
from ..memory.space import Extent, Part
from ..moves.mover import AHEAD
from ..moves.tickets import MoveFailed
from .paged_tensor import PagedTensor

TABLE_SHARE = 3  # a table that takes less than this fraction of the arena is whole
_SHARE = 3  # a slab takes this fraction of the arena: two are there at once, and others too
_SLABS = 3  # in use, coming, leaving


class Pages(NamedTuple):
    """Some pages of a storage. ``write``: they will be written."""

    part: Part
    write: bool = False


def pages_of(
    of: PagedTensor | PagedStorage, numbers: Iterable[int] | Numbers, *, write: bool = False
) -> Pages:
    """By their numbers within a tensor's storage. Raises ``ValueError`` unless they are its own, in
    order and none twice."""
    run = (of if isinstance(of, PagedStorage) else of._storage).run
    if isinstance(numbers, range):
        numbers = np.arange(numbers.start, numbers.stop)
    elif not isinstance(numbers, np.ndarray):
        numbers = np.fromiter(numbers, np.int64)
    if len(numbers):
        low, high = int(numbers.min()), int(numbers.max())
        if low < 0 or high >= run.count:
            wrong, last = low if low < 0 else high, run.count - 1
            raise ValueError(f"page {wrong} of a tensor that has pages 0 to {last}")
    if (np.diff(numbers) <= 0).any():
        raise ValueError("page numbers must be in order and none twice; pass np.unique of them")
    return Pages(Part(run, numbers + run.first), write)


# -- streams -------------------------------------------------------------------------------------
def stream(pager: Core, slabs: Iterable[Sequence[Pages]]) -> Generator[list[Numbers], None, None]:
    """Pin the pages of one slab after another; for each, the frames of each of its ``Pages``.

    What is yielded holds until the next slab is asked for, or the stream is closed (leaving a
    ``for`` loop does that). The slab after the one in use is read ahead, so ``slabs`` is one ahead
    too. Raises ``InfeasibleBudget`` or ``TierFull`` with nothing pinned.
    """
    pager.check_open()
    todo = iter(slabs)
    wanted, upcoming = next(todo, None), next(todo, None)
    if wanted is None:
        return
    two = [[pages.part for pages in slab] for slab in (wanted, upcoming or ())]
    writes = [pages.write for pages in wanted]
    with reading_ahead(pager) as ahead, _workspace(pager, two, writes) as frames_kept:
        with pager.lock:
            frames_kept.coming(two[0])
        while wanted is not None:
            parts = [pages.part for pages in wanted]
            written = [pages.part for pages in wanted if pages.write]
            with pager.lock, pager.waiting(own=True):
                ahead.take()
            frames = pager.take_parts(parts, written, streamed=True)
            brought = frames_kept.newest
            try:
                if upcoming is not None:
                    next_parts = [pages.part for pages in upcoming]
                    with pager.lock:
                        frames_kept.coming(next_parts)
                        ahead.ask(next_parts)
                yield frames
            finally:
                pager.release_parts(parts)
                ahead.leave(brought)
            wanted, upcoming = upcoming, None if upcoming is None else next(todo, None)


# -- stretches of one storage ----------------------------------------------------------------------
class Held(NamedTuple):
    """Bytes ``low … high`` of a storage's run, whose pages are held in ``frames``."""

    storage: PagedStorage
    low: int
    high: int
    frames: Numbers

    def pieces(self, low: int, high: int) -> list[torch.Tensor]:
        """Bytes ``low … high``, some of these, uint8, where they are: in as few views as may be."""
        size, arena = self.storage.pager.page_size, self.storage.pager.residency.arena
        first, ahead = low // size, self.low // size
        found: list[list[int]] = []
        for page, frame in enumerate(
            self.frames[first - ahead : -(-high // size) - ahead].tolist()
        ):
            begin, end = max(low, (first + page) * size), min(high, (first + page + 1) * size)
            at = (frame - first - page) * size + begin
            if found and at == found[-1][1]:
                found[-1][1] += end - begin
            else:
                found.append([at, at + end - begin])
        return [arena[start:stop] for start, stop in found]

    def put(self, source: torch.Tensor, low: int) -> None:
        """Write ``source`` from byte ``low`` on, without a copy beside the arena: what comes from
        the host goes straight into its frames, a stretch of neighbours at a time."""
        pager, size = self.storage.pager, self.storage.pager.page_size
        pieces = self.pieces(low, low + source.numel())
        alone = low == self.low and source.numel() == self.high - low and low % size == 0
        if len(pieces) > 1 and source.device.type != "cpu" and alone:
            frames = upload(torch.from_numpy(self.frames.astype(np.int32)), pager.device)
            scatter_pages(source, frames, pager.residency.arena, size)
            return
        for piece, values in zip(pieces, source.split([piece.numel() for piece in pieces])):
            piece.copy_(values)


def walk(
    storage: PagedStorage,
    ranges: Sequence[tuple[int, int]],
    *,
    write: bool = False,
) -> Generator[Held, None, None]:
    """A stream through bytes ``low … high`` of a storage's run, one range after another."""
    size = storage.pager.page_size
    pages = ([pages_of(storage, range(a // size, -(-b // size)), write=write)] for a, b in ranges)
    with closing(stream(storage.pager, pages)) as pinned:
        for (low, high), (frames,) in zip(ranges, pinned):
            yield Held(storage, low, high, frames)


def cut(low: int, high: int, pages: int, size: int) -> list[tuple[int, int]]:
    """Bytes ``low … high`` in ranges that end with a page, after as many ``pages`` of ``size``."""
    inner = range((low // size + pages) * size, high, pages * size)
    return list(itertools.pairwise([low, *inner, high]))


def put_bytes(storage: PagedStorage, source: torch.Tensor, low: int = 0) -> None:
    """``source``, uint8, becomes the bytes from ``low`` on, as many pages at a time as may be held.
    Raises ``InfeasibleBudget`` if not one page has room."""
    pager = storage.pager
    ranges = cut(low, low + source.numel(), max(1, fair_share(pager)), pager.page_size)
    with closing(walk(storage, ranges, write=True)) as held:
        for some in held:
            some.put(source[some.low - low : some.high - low], some.low)


def fair_share(pager: Core) -> int:
    """Frames for one slab: with the next one there too, others keep a third of the arena."""
    with pager.lock:
        return max(0, frames_anyway(pager.budget) - pager.residency.pinned_pages()) // _SHARE


# -- what a stream is to a plan --------------------------------------------------------------------
class Workspace:
    """Frames of one stream. ``newest``: pages of the latest slab that it brings itself."""

    def __init__(self, table: PageTable, frames: int) -> None:
        self._table = table
        self._frames = frames
        self._brought: deque[Numbers] = deque(maxlen=_SLABS)
        self.newest: list[Part] = []

    def coming(self, parts: Sequence[Part]) -> None:
        """A slab is about to be brought in, what is there already excepted."""
        before = self._brought[-1] if self._brought else np.empty(0, np.int64)
        frame = self._table.frame
        self.newest = [
            Part(run, pages[(frame[pages] < 0) | np.isin(pages, before, assume_unique=True)])
            for run, pages in parts
        ]
        every = [pages for _, pages in self.newest]
        self._brought.append(np.concatenate(every) if every else before[:0])

    def kept_frames(self) -> int:
        """Frames that are to stay free for it."""
        pages = distinct(np.concatenate(self._brought)) if self._brought else np.empty(0, np.int64)
        return max(0, self._frames - int((self._table.frame[pages] >= 0).sum()))


@contextmanager
def _workspace(
    pager: Core, slabs: Sequence[Sequence[Part]], write: Sequence[bool]
) -> Iterator[Workspace]:
    """The stream is in the access log, and has its frames if a plan is followed. ``slabs``: the
    first two; ``write``: for each part of the first one."""
    frames = sum(len(distinct(pages)) for slab in slabs for _, pages in slab)
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


# -- reading ahead ---------------------------------------------------------------------------------
@contextmanager
def reading_ahead(pager: Core) -> Iterator[ReadAhead]:
    """A :class:`ReadAhead` for one stream."""
    ahead = ReadAhead(pager)
    try:
        yield ahead
    finally:
        ahead.forget()


class ReadAhead:
    """Of one stream: ``ask`` for the pages of the next slab, then ``take`` them. ::

        op            | slab 0 |      | slab 1        | slab 2 ...
        in-lanes               | slab 1 | slab 2 |      | slab 3 ...
        out-lanes                       | 0, if written    | 1 ...

    It has lanes of its own, because its pages are needed before those that a plan has queued.
    Read-ahead is advice, as a plan is: what it did not bring, for whatever reason, is brought in by
    a fault when the slab is pinned. It takes frames that are free or hold the least recently used
    pages, and does not keep its pages from leaving again, so it can make nothing fail.
    """

    def __init__(self, pager: Core) -> None:
        self._pager = pager
        self._awaited: Numbers | None = None
        self._asked = np.empty(0, np.int64)  # pages that were queued

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
                pages = np.setdiff1d(pages, self._awaited, assume_unique=True)
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

    def _send_away(self, pages: Numbers) -> None:
        """As far as there are slots."""
        pager = self._pager
        dirty = (pager.table.flags[pages] & DIRTY) != 0
        pager.residency.evict_pages(pages[~dirty])
        to_leave = np.sort(pages[dirty])
        room = pager.host.slots.free_count
        self._write_back("host", to_leave[:room])
        if not pager.mover.disk_refuses:
            self._write_back("disk", to_leave[room:])

    def _write_back(self, tier: str, pages: Numbers) -> None:
        if len(pages):
            slots = self._pager.mover.slots.take(tier, len(pages), leaving=pages)
            self._pager.mover.out(tier, pages[: len(slots)], slots, AHEAD)


def _distinct(parts: Sequence[Part]) -> Numbers:
    if not parts:
        return np.empty(0, np.int64)
    return distinct(np.concatenate([pages for _, pages in parts]))


def _only_here(run: Extent, pages: Numbers) -> Numbers:
    """Those that nobody has pinned."""
    held = pages if run.pins else run.held_pages
    return np.setdiff1d(pages, held, assume_unique=True)
