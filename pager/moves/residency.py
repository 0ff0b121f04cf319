"""Which runs are on the device, and which leave when frames are short (LRU).

Ops need a run in *consecutive* frames to see it as a plain strided view, so victims are chosen as
a window of frames: among all windows that are long enough and hold no pinned page, the one whose
most recently used page is oldest. A window may cut a run in two; only the pages inside it leave.

::

    frames   | A A A | B B B B | free | C C | D D D |      need 4 frames; ages A=9 B=2 C=3 D=8
                     |---------- window ----|              oldest "youngest page" (3): B, C leave

If pinned pages leave no such window, runs slide together (compaction); if even that cannot make
room, the run is placed in scattered frames and ops read it through the gather kernel.

What is *held* may not move or leave: extents whole, or *parts*, some pages of an extent, for ops
on tensors larger than the arena. Any frames will do for parts, which are read page by page; the
rest of their extent comes and goes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from ..devices.device import Device
from ..errors import InfeasibleBudget, TierFull
from ..machine.ranks import about_share, ranks_sharing
from ..memory.frame_pool import Numbers, distinct, expand, merge, sliding_max, values_of
from ..memory.page_table import BLANK, DIRTY, NONE, PageTable
from ..memory.space import Extent, Part, Space, generations
from ..memory.turns import Crowded, Pin, Turns
from .mover import NOW, Mover
from .tickets import MoveFailed

_PINNED = np.iinfo(np.int64).max
_AWAITED = _PINNED - 1
_LATER = 1 << 50
_EMPTY = -1  # less than the age of pages that are to leave first
_NOTHING = np.empty(0, np.int64)


class Workspace(Protocol):
    """Frames of a stream that a plan keeps free."""

    def kept_frames(self) -> int:
        """That are to stay free for it."""


class Needs(Protocol):
    """``frames``: that one op of its kind has needed, at most."""

    frames: int


class Residency:
    """Owns the frames of the arena. All methods run under the pager's lock.

    ``make_room(frames)`` is asked when an op needs more frames than there are, ``make_way(frames)``
    when the tiers below have no room for what should leave; they may move the border of the arena,
    and return whether they did. ``before_pinning`` may move it too. ``let_go`` unpins what is
    pinned only to be at hand.

    ``awaited``: pages that will be held next (read-ahead brings them): they leave last of all that
    may leave. ``workspaces``: of streams beside which a plan is followed. ``pages_ahead``: pages
    that were brought in before a slab needed them, and were still there when it did.
    """

    def __init__(
        self,
        table: PageTable,
        space: Space,
        mover: Mover,
        backend: Device,
        page_size: int,
        turns: Turns,
    ) -> None:
        self.table = table
        self.space = space
        self.mover = mover
        self.backend = backend
        self.page_size = page_size
        self.turns = turns
        self.pool = mover.pool
        self.tick = 0
        self.ages: npt.NDArray[np.int64] = np.zeros(1024, np.int64)
        self.awaited: list[Numbers] = []
        self.workspaces: list[Workspace] = []
        self.pages_ahead = 0
        self.faults = 0
        self.compactions = 0
        self.peak_frames = 0
        # Frames that one op had pinned, at most; the same of ops other than products of weights
        # that could stream, and not of steps. To go back to where an op could do with less.
        self.needs = 0, 0
        self.step: Needs | None = None  # of an optimizer whose step is under way
        self._held_dead: list[Extent] = []
        self._asking: set[Extent] = set()  # runs of the access that begins now
        self._lent: Numbers = np.empty(0, np.int64)  # frames, see `shrink`
        self.scattered = False  # debug lane: never hand out consecutive frames
        self.make_room: Callable[[int], bool] = lambda frames: False
        self.make_way: Callable[[int], bool] = lambda frames: False
        self.before_pinning: Callable[[], None] = lambda: None
        self.let_go: Callable[[], None] = lambda: None
        mover.settle, mover.unsettle = self.settle_all, self.unsettle
        # Of the weight whose product an op on these is a part of, in a metered iteration.
        self.weight_of: Callable[[Collection[Extent]], Needs | None] = lambda runs: None
        self.minimum_bytes: Callable[[int], int] = lambda frames: frames * page_size

    @property
    def frames(self) -> int:
        """That pages may be in."""
        return self.pool.count - len(self._lent)

    @property
    def frames_used(self) -> int:
        return self.frames - self.pool.free_count

    def _note_peak(self) -> None:
        used = self.pool.count - len(self._lent) - self.pool.free_count
        if used > self.peak_frames:
            self.peak_frames = used

    # -- holding ---------------------------------------------------------------------------------
    def touch(self, run: Extent) -> None:
        """``run`` is the most recently used one now."""
        self.tick += 1
        self._set_age(run, self.tick)

    def _set_age(self, run: Extent, age: int) -> None:
        if run.id >= len(self.ages):
            ages = np.zeros(max(2 * len(self.ages), run.id + 1), np.int64)
            ages[: len(self.ages)] = self.ages
            self.ages = ages
        self.ages[run.id] = age

    def keep(self, runs: Sequence[Extent]) -> None:
        """``runs``, which are on the device or about to be, stay until :meth:`release`."""
        tick = self.tick
        for run in runs:
            run.pins += 1
            tick += 1
            try:
                self.ages[run.id] = tick
            except IndexError:
                self._set_age(run, tick)
        self.tick = tick

    def keep_parts(self, parts: Sequence[Part], *, streamed: bool = False) -> None:
        """The same for parts; may be done several times. ``streamed``: what is not held of their
        runs is the first to leave from now on."""
        for run, pages in parts:
            if run.parts is None:
                run.parts = []
            run.parts.append(pages)
            if streamed:
                self.spent(run)
            else:
                self.touch(run)

    def release(self, runs: Sequence[Extent]) -> None:
        for run in runs:
            assert run.pins > 0
            run.pins -= 1

    def release_parts(self, parts: Sequence[Part]) -> None:
        """Of these very parts."""
        for run, pages in parts:
            assert run.parts is not None, f"no part of run {run.id} is held"
            del run.parts[next(i for i, other in enumerate(run.parts) if other is pages)]
            run.parts = run.parts or None

    def has(self, parts: Sequence[Part]) -> bool:
        """Whether all these pages are on the device, none of them still to arrive."""
        tickets = self.mover.tickets
        return all(
            bool((frames >= 0).all()) and not tickets.of(("device", frames))
            for frames in (self.table.frame[pages] for _, pages in parts)
        )

    def bring(
        self, runs: Sequence[Extent], parts: Sequence[Part] = (), *, streamed: bool = False
    ) -> None:
        """Bring distinct ``runs``, and ``parts``, onto the device and keep them. All or nothing.

        Afterwards the ``base`` of a run is its first frame, or −1 for one in scattered frames.
        While it waits for what is queued the lock is given away. Raises ``InfeasibleBudget`` or
        ``TierFull``, or what the disk raises.
        """
        self.let_go()
        try:
            self._bring_all(runs, parts, streamed=streamed)
        except MoveFailed:  # of what was queued before; now it is as if it never had been
            self.mover.drain()
            self._bring_all(runs, parts, streamed=streamed)

    def _bring_all(self, runs: Sequence[Extent], parts: Sequence[Part], *, streamed: bool) -> None:
        self.mover.slots.let_go()
        self.collect()
        self.before_pinning()
        self.keep(runs)
        self.keep_parts(parts, streamed=streamed)
        try:
            self._asking = set(runs)
            try:
                self.check_need()
                largest_first = sorted(runs, key=lambda run: -run.count)
                wanted: list[Pin] = [*((run, None) for run in largest_first), *parts]
                left = list(wanted)
                while left:
                    run, pages = left.pop(0)
                    try:
                        self._bring(run, pages)
                    except TierFull:
                        if not self.make_way(run.count if pages is None else len(pages)):
                            raise
                        left = list(wanted)  # they may have left an arena that was made anew
            finally:
                self._asking = set()
            for run in runs:
                if run.base < 0:
                    self.wait_for(run.pages)
                    if self.is_whole(run):
                        self.settle(run)
            for _, pages in parts:
                self.wait_for(pages)
        except BaseException:
            self.release(runs)
            self.release_parts(parts)
            raise

    def wait_for(self, pages: Numbers) -> bool:
        """What ops do next comes after those of ``pages`` that are on their way have come. The lock
        is given away while the host waits; whether it did. Raises ``MoveFailed``, ``HungDisk``."""
        if not self.mover.tickets.any:
            return False
        frames = self.table.frame[pages]
        return self.wait_for_frames(frames[frames >= 0])

    def wait_for_frames(self, frames: Numbers) -> bool:
        """The same of all that goes on in these frames."""
        tickets = self.mover.tickets.of(("device", frames))
        return self.mover.tickets.wait(tickets, self.turns.lock)

    def reach(self, frames: Numbers) -> None:
        """The same with the lock held, amid a decision: nobody may see it half made."""
        tickets = self.mover.tickets
        tickets.wait(tickets.of(("device", frames)))

    def has_come(self, run: Extent) -> bool:
        """``run`` is there, in one piece, and may be used. ``False`` where it is not, or the host
        would have to wait for it."""
        base = self._base_of(run)
        if base < 0 or not self.mover.tickets.reach_at_once(base, run.count):
            return False
        run.base, run.generation, run.settled = base, next(generations), False
        return True

    def is_there(self, run: Extent) -> bool:
        """All of it is in frames, or on its way there."""
        return bool((self._frames_of(run) >= 0).all())

    def is_whole(self, run: Extent) -> bool:
        """All of it is in consecutive frames, or on its way there."""
        return self._base_of(run) >= 0

    def _base_of(self, run: Extent) -> int:
        """Its first frame, where :meth:`is_whole`; else less than 0."""
        if self.scattered and run.count > 1:
            return NONE
        return self.table.base(run.first, run.count)

    def _frames_of(self, run: Extent) -> Numbers:
        return self.table.frame[run.first : run.first + run.count]

    def pinned_pages(self) -> int:
        """Pages that are held."""
        return sum(
            run.count if run.pins else len(run.held_pages)
            for run in self.space.runs.values()
            if run.pins or run.parts
        )

    def held_frames(self, besides: Collection[Extent] = ()) -> Numbers:
        """Of the pages that are held, as far as they are there; of ``besides`` only their parts."""
        held = [
            run.pages if run.pins and run not in besides else run.held_pages
            for run in self.space.runs.values()
            if run.pins or run.parts
        ]
        frames: Numbers = self.table.frame[np.concatenate(held)] if held else _NOTHING
        return frames[frames >= 0]

    def check_need(self) -> None:
        """Room for all that is held, the access that begins included. ``Crowded`` if there would
        be, were it not for what other threads hold."""
        together = need = self.pinned_pages()
        if together > self.frames - len(self.mover.slots.held("device")):
            self.mover.carrier.wait_for_given_up()
            self.mover.slots.let_go()
        mine = self.turns.mine()
        if mine is not None:
            need = _pages_in(mine)
        if need > self.frames and not self.make_room(need):
            raise self._refusal(need, need)
        if together > self.frames:
            raise Crowded(self._refusal(need, together))
        if not self.turns.is_home():
            return
        largest, rigid = max(self.needs[0], need), self.needs[1]
        if self.step is not None:
            self.step.frames = max(self.step.frames, need)
        elif (weight := self.weight_of(self._asking)) is not None:
            weight.frames = max(weight.frames, need)
        else:
            rigid = max(rigid, need)
        self.needs = largest, rigid

    @property
    def largest_need(self) -> int:
        return self.needs[0]

    @property
    def rigid_need(self) -> int:
        return self.needs[1]

    def _refusal(self, need: int, together: int) -> InfeasibleBudget:
        minimum, kind, there = self.minimum_bytes(together), self.backend.device.type, self.frames
        beside, end = f"and the arena has {there}", "."
        if together > need:
            beside = f"beside {together - need} that other threads have pinned, the arena has "
            beside += f"{there}, and none of these threads gives any back"
            end = ", or end their pins before."
        return InfeasibleBudget(
            f"one operation needs {need} pages of {self.page_size} bytes on the device at once "
            f"{beside}; raise device_budget to at least {minimum} bytes{end}"
            f"{about_share('device', kind)}",
            minimum=minimum * ranks_sharing("device", kind),
        )

    # -- streams (``slabs.py``) ------------------------------------------------------------------
    def spent(self, run: Extent) -> None:
        """Pages of ``run`` are the first to leave from now on: a stream is over with them."""
        self._set_age(run, 0)

    def kept_frames(self) -> int:
        """Free frames that planned moves may not take: streams are about to fill them."""
        return sum(space.kept_frames() for space in self.workspaces)

    def oldest(self, count: int) -> Numbers:
        """At most ``count`` pages on the device that may leave, least recently used first; none
        that is awaited."""
        ages = self._frame_ages()
        ages[self.table.frame_page < 0] = _PINNED
        order = np.argsort(ages, kind="stable")
        chosen: Numbers = self.table.frame_page[order[ages[order] < _AWAITED]][:count]
        return chosen

    # -- bringing a run in -----------------------------------------------------------------------
    def _bring(self, run: Extent, pages: Numbers | None) -> None:
        """All of it, to frames side by side, or what is missing of ``pages``, to any."""
        if pages is not None:
            absent = pages[self.table.frame[pages] < 0]
            if len(absent):
                self.fill(run, absent, self.claim_any(len(absent)))
            return
        if run.base >= 0 or self.is_whole(run):
            return  # there, or on its way
        # Else in frames that another op reads, or to be left as they are.
        if not self.is_there(run) or (run.pins == 1 and not self.scattered):
            self.fill(run, run.pages, self._claim(run))

    def fill(self, run: Extent, pages: Numbers, frames: Numbers) -> None:
        """Bring ``pages`` of ``run`` to ``frames``, which are empty, or theirs already."""
        current = self.table.frame[pages]
        moved = (current >= 0) & (current != frames)
        try:
            if moved.any():
                self._move(pages[moved], frames[moved])
            absent = current < 0
            below = absent & ((self.table.flags[pages] & BLANK) == 0)
            if below.any():
                self.faults += 1
                self._fetch(pages[below], frames[below])
            blank = absent & ~below
            if blank.any():
                self._open_blank(run, pages[blank], frames[blank])
        except BaseException:
            self.mover.give_frames(frames[self.table.frame_page[frames] < 0])
            self.settle(run)
            raise
        self.settle(run)
        self._note_peak()

    def _fetch(self, pages: Numbers, frames: Numbers) -> None:
        on_host = self.table.host[pages] >= 0
        for tier, here in (("disk", ~on_host), ("host", on_host)):  # what can fail goes first
            if here.any():
                self.mover.bring(tier, pages[here], frames[here], NOW)

    def _open_blank(self, run: Extent, pages: Numbers, frames: Numbers) -> None:
        """Pages that were never written get ``frames``. What another tensor left there is erased
        unless the maker of the run writes all of it anyway."""
        size = self.page_size
        self.reach(frames)
        with self.backend.on_compute():
            if not run.overwritten:
                for start, _, count in merge(frames, frames):
                    self.arena[start * size : (start + count) * size].zero_()
        self.table.place(pages, frames)

    def settle(self, run: Extent) -> None:
        """Recompute ``run.base`` after its pages moved; dense views made before are stale."""
        frames = self._frames_of(run)
        there = self.is_whole(run) and not self.mover.tickets.of(("device", frames))
        run.base = int(frames[0]) if there else -1  # nobody may use it before without waiting
        run.generation = next(generations)
        run.settled = False

    def settle_all(self, pages: Numbers) -> None:
        """The runs of these pages; what came may be more than there ever was."""
        for owner in values_of(self.table.owner[pages]):
            self.settle(self.space.runs[owner])
        self._note_peak()

    def unsettle(self, pages: Numbers) -> None:
        """The runs of these pages, which are on their way: whoever uses them waits."""
        for owner in values_of(self.table.owner[pages]):
            run = self.space.runs[owner]
            run.base, run.generation, run.settled = -1, next(generations), False
        self._note_peak()

    def _claim(self, run: Extent) -> Numbers:
        """Frames for all pages of ``run``, empty or its own; taken from the pool."""
        count = run.count
        if run.parts is not None or (self.scattered and count > 1):
            return self._claim_scattered(run)
        in_place = self._in_place_base(run)
        if in_place is None:
            start = self.pool.allocate_run(count)
            if start is not None:
                return np.arange(start, start + count)
        start = self._choose_window(run, in_place)
        if start is None:
            start = self._compact_for(run)
            if start is None:
                return self._claim_scattered(run)
            return np.arange(start, start + count)
        window = np.arange(start, start + count)
        own = self._frames_of(run)
        try:
            self._evict_frames(window[~np.isin(window, own, assume_unique=True)])
        except TierFull:  # nothing may leave: make do with what is free, if that is enough
            start = self._compact_for(run)
            if start is None:
                raise
            return np.arange(start, start + count)
        self.pool.take_all(window[self.table.frame_page[window] < 0])
        return window

    def _in_place_base(self, run: Extent) -> int | None:
        """Where the window would begin if the pages that are resident stayed where they are."""
        frames = self._frames_of(run)
        resident = np.flatnonzero(frames >= 0)
        if not len(resident):
            return None
        base = int(frames[resident[0]] - resident[0])
        fits = base >= 0 and base + run.count <= self.pool.count
        return base if fits and bool((frames[resident] - resident == base).all()) else -1

    def _frame_ages(self) -> npt.NDArray[np.int64]:
        """Age of the page in each frame: −1 where empty, the largest number where pinned, the next
        one where awaited; by ``_LATER`` more where the page is DIRTY and the disk fails."""
        pages = self.table.frame_page
        owners = self.table.owner[pages]
        ages = np.where(pages >= 0, self.ages[owners], _EMPTY)
        if self.mover.disk_refuses:  # what has to be written may not be able to leave
            ages[(pages >= 0) & ((self.table.flags[pages] & DIRTY) != 0)] += _LATER
        for pages in self.awaited:
            frames = self.table.frame[pages]
            ages[frames[frames >= 0]] = _AWAITED
        ages[self.held_frames()] = _PINNED
        ages[self._lent] = ages[self.mover.slots.held("device")] = _PINNED
        return ages

    def _choose_window(self, run: Extent, in_place: int | None) -> int | None:
        if run.count > self.pool.count:
            return None
        ages = self._frame_ages()  # the run itself is pinned: its own frames are not to be had ...
        worst = sliding_max(ages, run.count)
        start = int(np.argmin(worst))
        best = int(worst[start])
        if in_place is not None and in_place >= 0:  # ... but for staying where they are
            window = ages[in_place : in_place + run.count].copy()
            window[np.flatnonzero(self._frames_of(run) >= 0)] = _EMPTY
            if int(window.max()) <= best and window.max() != _PINNED:
                return in_place
        return None if best == _PINNED else start

    def _claim_scattered(self, run: Extent) -> Numbers:
        """Keep what is resident, take any frames for the rest."""
        frames = self._frames_of(run).copy()
        missing = np.flatnonzero(frames < 0)
        frames[missing] = self.claim_any(len(missing))
        return frames

    def claim_any(self, count: int) -> Numbers:
        """``count`` empty frames, side by side where that can be had."""
        self._free_up(count)
        taken = self.claim_free(count)
        assert len(taken) == count
        return taken

    def claim_free(self, count: int) -> Numbers:
        """Free frames, taken from the pool: ``count``, or as many as there are."""
        runs = self.pool.allocate(min(count, self.pool.free_count))
        assert runs is not None
        taken = expand(runs)
        return taken[::-1] if self.scattered else taken  # the debug lane: no two pages side by side

    # -- room ------------------------------------------------------------------------------------
    def _free_up(self, frames: int) -> None:
        """Evict the least recently used pages until ``frames`` frames are free, anywhere."""
        short = frames - self.pool.free_count
        if short <= 0:
            return
        ages = self._frame_ages()
        ages[self.table.frame_page < 0] = _PINNED
        order = np.argsort(ages, kind="stable")[:short]
        assert ages[order[-1]] != _PINNED, "check_need let a need pass that cannot be met"
        self._evict_frames(np.sort(order))

    def _evict_frames(self, frames: Numbers) -> None:
        pages = self.table.frame_page[frames]
        self.evict_pages(pages[pages >= 0])

    def evict_pages(self, pages: Numbers) -> None:
        """Take these resident pages off the device, and their frames back into the pool."""
        if len(pages):
            self.mover.leave(pages)

    def evict_run(self, run: Extent) -> Numbers:
        """Take a run that is not held whole off the device, but for its parts that are; the frames
        that are free now."""
        assert not run.pins
        pages = run.pages[self.table.frame[run.pages] >= 0]
        if run.parts is not None:
            pages = np.setdiff1d(pages, run.held_pages, assume_unique=True)
        frames: Numbers = self.table.frame[pages]
        self.evict_pages(pages)
        return frames

    def _compact_for(self, run: Extent) -> int | None:
        """Slide runs together until ``run`` fits in one piece; its first frame, or ``None``.

        What only this access holds may move (nobody has a view of it yet).
        """
        own = self._frames_of(run)
        if (own >= 0).any():  # must come together anyway; blanks are not evicted, they have no data
            self._evict_frames(np.sort(own[own >= 0]))
        self._free_up(run.count)
        self.compact([other for other in self._asking if other.pins == 1])
        return self.pool.allocate_run(run.count)

    def compact(self, besides: Collection[Extent] = ()) -> None:
        """Move every page towards frame 0, in order, but for what is held; ``besides``: runs of
        which only the parts stay."""
        self.compactions += 1
        pages_of = self.table.frame_page
        held = set(self.held_frames(besides).tolist())
        lent = {*self._lent.tolist(), *self.mover.slots.held("device").tolist()}
        target, sources, targets = 0, [], []
        for frame in np.flatnonzero(pages_of >= 0).tolist():
            if frame in held:
                target = frame + 1
                continue
            while target in lent:
                target += 1
            if frame > target:
                sources.append(frame)
                targets.append(target)
            target += 1
        if sources:
            self.slide(np.array(sources, np.int64), np.array(targets, np.int64))

    def slide(self, sources: Numbers, targets: Numbers) -> None:
        """Move the pages in ``sources``, in the order of frames, to ``targets``: lower ones, free
        or left by those before. None of their runs is in use. Where it raises, some have moved and
        the others are where they were."""
        pages, size = self.table.frame_page[sources], self.page_size
        follows = self.mover.shift(pages, sources, targets)
        try:
            with self.backend.on_compute():
                for source, target, count in merge(sources, targets):
                    if not follows:
                        self.backend.slide(source, target, count, size)
                    self._slid(source, target, count)
        finally:
            self.settle_all(pages)

    def _slid(self, source: int, target: int, count: int) -> None:
        for start in range(0, count, source - target):  # as it leaves frames to what follows
            n = min(source - target, count - start)
            moved = self.table.frame_page[source + start : source + start + n].copy()
            self.pool.take(target + start, n)
            self.table.move(moved, np.arange(n) + (target + start))
            self.pool.free(source + start, n)

    def relocate(
        self,
        pages: Numbers,
        frames: Numbers,
        order: Numbers | None = None,
        *,
        exchange: bool = False,
    ) -> None:
        """Move resident, unpinned ``pages`` into ``frames``, which are free, or left by others of
        them. ``order``: [copies, 2], from which frame to which, one after another, also through a
        free one; by default each goes to a free one. ``exchange``: each of these is in both
        directions. All or nothing."""
        fresh = frames
        if order is not None:
            fresh = np.setdiff1d(frames, self.table.frame[pages], assume_unique=True)
        self.pool.take_all(fresh)
        try:
            self._move(pages, frames, order, exchange=exchange)
        except BaseException:
            self.pool.free_all(fresh)
            raise
        self.settle_all(pages)

    def _move(
        self,
        pages: Numbers,
        frames: Numbers,
        order: Numbers | None = None,
        *,
        exchange: bool = False,
    ) -> None:
        """Copy resident pages into other frames of the arena, as :meth:`relocate` has them."""
        old = left = self.table.frame[pages].copy()
        sources, targets = old, frames
        if order is not None:
            left = np.setdiff1d(old, frames, assume_unique=True)
            sources, targets = order.T
        if not self.mover.shift(pages, old, frames, order, exchange=exchange):
            size, arena = self.page_size, self.arena
            with self.backend.on_compute():
                for source, target, count in merge(sources, targets):
                    if exchange:
                        self.backend.exchange(source, target, count, size)
                        continue
                    if target < source < target + count:
                        self.backend.slide(source, target, count, size)
                        continue
                    there = arena[target * size : (target + count) * size]
                    there.copy_(arena[source * size : (source + count) * size])
        self.table.move(pages, frames)
        self.pool.free_all(left)

    @property
    def arena(self) -> torch.Tensor:
        """The committed part of the arena, uint8 [frames × page_size]."""
        return self.backend.arena[: self.pool.count * self.page_size]

    # -- the border ------------------------------------------------------------------------------
    def resize(self, frames: int) -> None:
        """Move the border of the arena. Shrinking evicts what no longer fits, and stops at the
        last pinned frame."""
        self.mover.drain()
        self.let_go()
        self._resize(frames)

    def shrink(self, frames: int) -> None:
        """Have no more than so many frames, in the middle of an op: no fewer than are pinned. What
        is pinned stays where it is, so the border may be in its way. Then frames below it are
        *lent*: no page gets there, and their memory is given back, until the border is moved the
        next time. Raises ``TierFull``; there may be fewer frames than before then."""
        self.mover.drain()
        self.let_go()
        if not len(self._lent):
            self._resize(frames)
        if self.frames > frames:
            lent = np.sort(self.claim_any(self.frames - frames))
            for start, _, count in merge(lent, lent):
                self.backend.discard(start * self.page_size, count * self.page_size)
            self._lent = np.concatenate([self._lent, lent])

    def _resize(self, frames: int) -> None:
        self.pool.free_all(self._lent)
        self._lent = _NOTHING
        old = self.pool.count
        frames = max(frames, int(self.held_frames().max(initial=-1)) + 1)
        if frames < old:
            self._free_up(old - frames)
            if (self.table.frame_page[frames:] >= 0).any():
                self.compact()
            self._evict_frames(np.arange(frames, old))
        if frames < old:
            self.table.resize_frames(frames)
            self.pool.resize(frames)
            self.backend.commit(frames * self.page_size)
        elif frames > old:  # memory first: if there is none, the frames are those from before
            nbytes = frames * self.page_size
            if nbytes > self.backend.arena.numel():
                self._remake(nbytes)
            self.backend.commit(nbytes)
            self.table.resize_frames(frames)
            self.pool.resize(frames)

    def fit(self) -> None:
        """Where the border cannot move: an arena of the size that is used now, if no page is pinned
        (it is tried again when the border is placed the next time). Raises ``TierFull`` with the
        old one in use as far as it goes."""
        nbytes = self.pool.count * self.page_size
        if not self.backend.can_unmap and nbytes != self.backend.arena.numel():
            self.mover.drain()
            self.let_go()
            if not self.in_use():
                try:
                    self._remake(nbytes)
                except TierFull:
                    self._resize(self.backend.arena.numel() // self.page_size)
                    raise

    def in_use(self) -> bool:
        """Somebody may have an address in the arena: a page is held, but for those of the access
        that begins now."""
        asking = self._asking
        runs = self.space.runs.values()
        return any(run.parts or run.pins > (run in asking) for run in runs)

    def _remake(self, nbytes: int) -> None:
        """Nobody has an address in the arena; addresses that were known are wrong afterwards. Where
        there is no room for the old one beside the new one, all pages leave. Raises ``TierFull``
        with everything as it was if they have nowhere to go."""
        if not self.backend.remake(nbytes, empty=False):
            try:
                self._evict_frames(np.arange(self.pool.count))
            except TierFull as error:
                raise TierFull(
                    f"{self.backend.device} has no room inside device_budget for an arena of "
                    f"{nbytes} bytes beside the one of {self.backend.arena.numel()} that it "
                    f"replaces, so its pages have to leave for a moment, but: {error} With "
                    "dense_reserve= the arena has its size from the start."
                ) from error
            self.backend.remake(nbytes, empty=True)
        for run in self.space.runs.values():
            self.settle(run)

    # -- for planned moves -----------------------------------------------------------------------
    def place_at(self, run: Extent, base: int) -> bool:
        """Put a run that was never written into the frames from ``base`` on, if they are free."""
        if base < 0 or not self.pool.take_if_free(base, run.count):
            return False
        if self.mover.tickets.any:
            self.reach(run.pages - (run.first - base))
        self.bear(run, base)
        return True

    def bear(self, run: Extent, base: int) -> None:
        """The same of frames that were taken for it, in which nothing goes on any more."""
        size = self.page_size
        if run.overwritten:
            self.backend.order_ops()  # its maker writes it
        else:
            with self.backend.on_compute():
                self.arena[base * size : (base + run.count) * size].zero_()
        self.table.bear(run.first, run.pages, base)
        run.base = -1 if self.scattered and run.count > 1 else base
        run.generation = next(generations)
        run.settled = run.kind != "parameter"  # one may not be written at any time
        used = self.pool.count - len(self._lent) - self.pool.free_count
        if used > self.peak_frames:  # as `_note_peak`
            self.peak_frames = used

    def is_blank(self, run: Extent) -> bool:
        """Nothing was ever written to ``run``: it has no page anywhere."""
        if run.generation == run.unplaced:
            return True
        flags = self.table.flags[run.first : run.first + run.count]
        return bool(flags[0] & BLANK) and (run.count == 1 or bool((flags & BLANK).all()))

    # -- writes and ends -------------------------------------------------------------------------
    def written(self, run: Extent, pages: Numbers | None = None) -> None:
        """A write to ``run``, or to ``pages`` of it, is about to happen: copies below are void."""
        if not run.settled:
            self.mover.slots.void_copies(run.pages if pages is None else pages)
            run.settled = pages is None

    def written_whole(self, runs: Sequence[Extent]) -> None:
        """The same of all of ``runs``, none of which is settled."""
        pages = [run.pages for run in runs]
        self.mover.slots.void_copies(pages[0] if len(pages) == 1 else np.concatenate(pages))
        for run in runs:
            run.settled = True

    def collect(self) -> None:
        """Give back everything of runs that nobody refers to any more; of those whose pages are
        on their way, held or pinned, when they are not any more."""
        if not self.space.dead and not self._held_dead:
            return
        ended, self._held_dead = [*self._held_dead, *self.space.drain()], []
        holds_some = self.mover.slots.holds_some
        for run in ended:
            if run.parts or run.pins:
                self._held_dead.append(run)
            elif run.settled and run.base >= 0 and not holds_some:
                # Most by far: all of it is in these frames, and nowhere else.
                self.table.end(run.first, run.count, run.base)
                self.pool.free(run.base, run.count)
                self.space.forget(run)
            elif self.mover.pending(run.pages):
                self._held_dead.append(run)
            else:
                self.mover.slots.void_copies(run.pages)
                resident = run.pages[self.table.frame[run.pages] >= 0]
                if len(resident):
                    self.mover.give_frames(self.table.unplace(resident))
                self.table.release(run.first, run.count)
                self.space.forget(run)


def _pages_in(pins: Sequence[Pin]) -> int:
    """Pages that ``pins`` hold, each counted once."""
    whole = {run for run, pages in pins if pages is None}
    parts: dict[Extent, list[Numbers]] = {}
    for run, pages in pins:
        if pages is not None and run not in whole:
            parts.setdefault(run, []).append(pages)
    single = sum(len(distinct(np.concatenate(pages))) for pages in parts.values())
    return sum(run.count for run in whole) + single
