"""Carries out what a plan says: on the thread that runs ops, when an access ends.

Moves are queued in the plan's order. What cannot begin (no frame or slot is free, something that
may not move is in the way) is tried again when the next access ends, and everything behind it on
the same channel waits with it. An access whose pages are queued waits for their tickets; what is
not queued by then is faulted in. So a plan can be wrong in any way and costs only time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..memory.frame_pool import Numbers, distinct, merge
from ..memory.page_table import BLANK, DIRTY
from ..memory.space import Extent
from ..moves.compaction import (
    TAKEN,
    base_of,
    due_after,
    find_window,
    is_awaited,
    make_way,
    rearrange,
    soonest,
    vacate,
    waits_on_host,
)
from ..moves.mover import OTHER, TIERS, Coming, Mover
from ..moves.residency import Residency
from ..moves.tickets import MoveFailed
from .access_log import Names
from .compiled_plan import ANYWHERE, Action, CompiledPlan
from .put_off import Job, PutOff

_NOTHING = np.empty(0, np.int64)
_LATE = 2  # transfers that are queued before it, or in between
_PATIENCE = 16  # times that a move waits for its place: some 8 accesses


class _Moves(NamedTuple):
    """Of one kind and tier, at one point: actions, each with the number of its run; all ``pages``,
    and the ``frames`` where the plan has them; how many these are after each action (``ends``)."""

    actions: list[tuple[Action, int]]
    pages: Numbers
    frames: Numbers
    ends: Numbers

    @classmethod
    def of(cls, actions: list[tuple[Action, int]], runs: Sequence[Extent | None]) -> _Moves:
        jobs = cls(actions, _NOTHING, _NOTHING, _NOTHING).jobs(runs)
        pages = [job.pages for job in jobs]
        shifts = [job.action.base - job.run.first for job in jobs]
        frames = [some + shift for some, shift in zip(pages, shifts)]
        ends = np.cumsum([len(some) for some in pages], dtype=np.int64)
        return cls(actions, np.concatenate(pages), np.concatenate(frames), ends)

    def jobs(self, runs: Sequence[Extent | None], begun: int = 0) -> list[Job]:
        """But for the first ones."""
        some = [(action, runs[number]) for action, number in self.actions[begun:]]
        return [Job(action, run) for action, run in some if run is not None]


class _Point:
    """What a plan does at one point of the program, for runs with these numbers of the first page
    and of pages (``shapes``; ``None`` for one that is gone): worked out once, as they are the same
    in one iteration after another."""

    def __init__(
        self, actions: Sequence[Action], runs: Sequence[Extent | None], shapes: list[Any]
    ) -> None:
        self.shapes = shapes
        found: dict[tuple[str, str], list[tuple[Action, int]]] = {}
        for number, (planned, run) in enumerate(zip(actions, runs)):
            action = planned.on(run.count) if run is not None else None
            # Nothing of pages that a run does not have.
            if run is not None and action and 0 < action.pages <= run.count - action.first:
                found.setdefault((action.what, action.tier), []).append((action, number))
        drops, self.outs, self.ins = (
            [(t, _Moves.of(found[w, t], runs)) for t in TIERS if (w, t) in found]
            for w in ("drop", "out", "in")
        )
        self.drops = [(tier, distinct(moves.pages)) for tier, moves in drops]
        self.shifts = found.get(("shift", "device"), [])
        # What leaves twice leaves in two parts.
        self.is_plain = all(
            len({shapes[number] for _, number in m.actions}) == len(m.actions) for _, m in self.outs
        )
        placed = [*(pair for _, moves in self.ins for pair in moves.actions), *self.shifts]
        self.homes = {action.key: action.base for action, _ in placed}


class PlannedMoves:
    """Of one pager; under its lock.

    ``late``: runs that an access had to wait for; ``faults``: accesses that the plan did not serve;
    ``prefetched``: in-moves that brought their pages. ``births``: key → frame, of the plan that is
    followed. ``homes``: the same of what was there when its iteration began, or was to come since.
    """

    def __init__(self, residency: Residency, mover: Mover, names: Names) -> None:
        self.late = self.faults = self.prefetched = 0
        self.births: dict[int, int] = {}
        self.homes: dict[int, int] = {}
        self._tidies = False
        self._hurry = False
        self._of: CompiledPlan | None = None  # that these points are of
        self._points: dict[int | None, _Point] = {}
        self._waiting_first: dict[str, tuple[Job, int]] = {}  # by tier, and how often it has waited
        self._residency, self._mover, self._names = residency, mover, names
        self._table = residency.table
        self._put_off = PutOff(residency, names)
        self._outs: dict[str, deque[Job]] = {tier: deque() for tier in TIERS}
        self._ins: dict[str, deque[Job]] = {tier: deque() for tier in TIERS}
        self.queues = (*self._outs.values(), *self._ins.values())  # what has not begun

    # -- queueing --------------------------------------------------------------------------------
    def issue(
        self, actions: Sequence[Action], newborn: Mapping[int, Extent], where: int | None = None
    ) -> None:
        """Queue moves, all of those of point ``where`` of the plan, if that is given. What is of
        runs that are gone, or of pages that a run does not have, is left out."""
        known, live = self._names.runs, self._residency.space.runs
        runs: list[Extent | None] = []
        in_use = False  # what the plan did not foresee
        for action in actions:
            run = (newborn if action.key < 0 else known).get(action.key)
            if run is not None and live.get(run.id) is not run:
                run = None
            elif run is not None and (run.parts or (run.pins and action.what == "out")):
                in_use = True
            runs.append(run)
        shapes = [(run.first, run.count) if run is not None else None for run in runs]
        point = self._points.get(where)
        if point is None or point.shapes != shapes:
            point = _Point(actions, runs, shapes)
            if where is not None:
                self._points[where] = point
        self.homes.update(point.homes)
        for tier, pages in point.drops:
            self._drop(tier, pages)
        at_once = point.is_plain and not in_use and not any(self.queues)
        if where is not None and self._put_off.is_on:
            self._put_off.back(job for _, moves in point.ins for job in moves.jobs(runs))
            outs = [job for _, moves in point.outs for job in moves.jobs(runs)]
            self._carefully(partial(self._begin_but, outs, point, runs, where))
            return
        self._carefully(partial(self._begin, point, runs, at_once=at_once))

    def _begin_but(
        self, outs: list[Job], point: _Point, runs: Sequence[Extent | None], where: int
    ) -> None:
        """The same, but ``outs`` leave only where others of them have no room beside them."""
        self._queue_outs(self._put_off.choose(outs, where))
        self._shift(point, runs)
        for tier, moves in point.ins:
            self._ins[tier] += moves.jobs(runs)
        if any(self.queues):
            self._begin_queued()

    def _queue_outs(self, jobs: list[Job]) -> None:
        for job in jobs:
            self._outs[job.action.tier].append(job)
        if jobs:
            self._begin_queued()

    def _begin(self, point: _Point, runs: Sequence[Extent | None], *, at_once: bool) -> None:
        """Begin ``at_once`` what can be, together; the rest is queued, and begins if it can."""
        for tier, moves in point.outs:
            if not (at_once and self._leave(tier, moves.pages)):
                self._outs[tier] += moves.jobs(runs)
        at_once = at_once and not any(self._outs.values())
        self._shift(point, runs)
        for tier, moves in point.ins:
            begun = self._come(tier, moves, runs) if at_once else 0
            if begun < len(moves.actions):
                self._ins[tier] += moves.jobs(runs, begun)
        if any(self.queues):
            self._begin_queued()

    def _shift(self, point: _Point, runs: Sequence[Extent | None]) -> None:
        for action, number in point.shifts:
            run = runs[number]
            if run is not None and self._tidies:
                self._move_to(run, action.base)

    def _come(self, tier: str, moves: _Moves, runs: Sequence[Extent | None]) -> int:
        """How many of ``moves``, the first ones, have begun: those for which nothing has to be
        moved aside, as their places are free, and none of their pages is there."""
        table, pool, pages = self._table, self._residency.pool, moves.pages
        if self._residency.workspaces:
            return 0
        able = (table.frame[pages] < 0) & ((table.flags[pages] & BLANK) == 0)
        able &= self._mover.slots.of(tier, pages) >= 0
        count, begun = len(moves.actions), 0
        if not able.all():
            count = int(np.searchsorted(moves.ends, np.argmin(able), "right"))
        frames = moves.frames[: moves.ends[count - 1]] if count else _NOTHING
        if self._is_late(frames[frames >= 0]):
            return 0
        for action, number in moves.actions[:count]:
            run, base = runs[number], action.base
            assert run is not None
            if not 0 <= base <= pool.count - run.count:
                break
            if action.pages < run.count and not self._is_beside(run, base):
                break
            if not pool.take_if_free(base + action.first, action.pages):
                break
            begun += 1
        if begun:
            self.prefetched += begun
            end = moves.ends[begun - 1]
            self._mover.bring(tier, pages[:end], moves.frames[:end])
        return begun

    def _is_beside(self, run: Extent, base: int) -> bool:
        """What is there of ``run`` is where it is if its first page is in frame ``base``."""
        own = self._table.frame[run.pages]
        there = np.flatnonzero(own >= 0)
        return bool((own[there] == base + there).all())

    def _drop(self, tier: str, pages: Numbers) -> None:
        """Copies below are given up where the page is on the device."""
        pages = pages[self._table.frame[pages] >= 0]
        pages = pages[~self._mover.tickets.pending("device", self._table.frame[pages])]
        self._mover.slots.drop_copies(pages, tier)

    def go_on(self) -> None:
        """Begin what can begin."""
        self._carefully(self._begin_queued)

    def _begin_queued(self) -> None:
        for tier, queue in self._outs.items():
            self._begin_outs(tier, queue)
        leaving = {job.run for queue in self._outs.values() for job in queue}
        for tier, queue in self._ins.items():
            self._begin_ins(tier, queue, leaving)

    def _carefully(self, begin: Callable[[], None]) -> None:
        """Where that fails, or what was queued before has, its pages are where they were, and the
        plan is over (``Mover.error``)."""
        try:
            begin()
        except MoveFailed:
            self._mover.drain()
        except Exception as error:
            self._mover.error = self._mover.error or error
        if self._mover.error is not None:
            self.clear()

    def follow(self, compiled: CompiledPlan | None) -> None:
        """Places are those of this plan, as it begins. What has gone astray finds back."""
        self.births = compiled.births if compiled is not None else {}
        self.homes = {**compiled.start} if compiled is not None else {}
        self._tidies = compiled is not None
        self._put_off.follow(compiled)
        if compiled is not None and compiled is not self._of:
            self._of = compiled
            self._points.clear()

    def shrink(self, frames: int, now: int) -> None:
        """The arena is to have so many frames, before access ``now``: what was put off, and has no
        room in them, leaves, and what is behind them goes where there is room."""

        def begin() -> None:
            self._queue_outs(self._put_off.beyond(now, frames))
            self._mover.drain()
            vacate(self._residency, frames, self._home)

        self._carefully(begin)

    def clear(self) -> None:
        """Forget what has not begun."""
        for queue in self.queues:
            queue.clear()

    @property
    def waiting(self) -> bool:
        """Something has not begun."""
        return any(self.queues)

    def _begin_outs(self, tier: str, queue: deque[Job]) -> None:
        """Clean pages leave at once; for the others slots are taken, as far as there are any. What
        leaves at one point of the program leaves together."""
        while queue:
            jobs, leaving = 0, [_NOTHING]
            seen: set[Extent] = set()
            for job in queue:
                run = job.run
                if run in seen:
                    break
                seen.add(run)
                jobs += 1
                # What is used at this moment, which the plan did not foresee, stays.
                if self._names.is_live(run) and not run.pins:
                    pages = job.pages
                    leaving.append(
                        pages
                        if run.parts is None
                        else np.setdiff1d(pages, run.held_pages, assume_unique=True)
                    )
            if not self._leave(tier, np.concatenate(leaving)):
                while self._has_left(queue[0]):
                    queue.popleft()
                return
            for _ in range(jobs):
                queue.popleft()

    def _leave(self, tier: str, pages: Numbers) -> bool:
        """Whether all of ``pages`` have left."""
        table = self._table
        resident = pages[table.frame[pages] >= 0]
        dirty = (table.flags[resident] & DIRTY) != 0
        to_leave = resident[dirty]
        if len(to_leave) < len(resident):
            self._residency.evict_pages(resident[~dirty])
        if not len(to_leave):
            return True
        slots = self._mover.slots.take(tier, len(to_leave), leaving=to_leave)
        self._mover.out(tier, to_leave[: len(slots)], slots)
        rest = to_leave[len(slots) :]
        if not len(rest) or self._mover.slots.will_have(tier, len(rest)):
            return not len(rest)
        # Others are there that the plan has elsewhere, as when it has just begun.
        slots = self._mover.slots.take(OTHER[tier], len(rest), leaving=rest)
        self._mover.out(OTHER[tier], rest[: len(slots)], slots)
        return len(slots) == len(rest)

    def _has_left(self, job: Job) -> bool:
        if not self._names.is_live(job.run) or job.run.pins:
            return True
        pages = job.pages[self._table.frame[job.pages] >= 0]
        return not len(pages) or set(pages.tolist()) <= set(job.run.held_pages.tolist())

    def _begin_ins(self, tier: str, queue: deque[Job], leaving: set[Extent]) -> None:
        """Frames are taken, the planned ones where that is possible, for what has a copy in
        ``tier``; what comes at one point of the program comes together. ``leaving``: runs with
        pages that have yet to leave."""
        coming = Coming(self._mover, tier)
        while queue:
            job = queue[0]
            if self._names.is_live(job.run):
                if job.run in leaving or self._may_wait(job):
                    break
                done = self._find_frames(job, coming)
                if not done:
                    break
            queue.popleft()
        coming.begin()

    def _may_wait(self, job: Job) -> bool:
        """Its place is taken by what the plan has there until later: the plan counts on runs to
        live on for a few accesses after their last one, so frames are free earlier than it says.
        Not if ``job`` is wanted now, nor for long."""
        action, run = job
        base = action.base
        if self._hurry or not self._tidies:
            return False
        if run.parts is not None or not self._is_inside(run, base):
            return False
        pages = self._table.frame_page[base + action.first :][: action.pages]
        owners = set(self._table.owner[pages[pages >= 0]].tolist()) - {run.id}
        if not owners:
            return False
        runs = self._residency.space.runs
        if not all(
            base_of(self._residency, runs[owner]) == self._home(runs[owner]) for owner in owners
        ):
            return False
        before, times = self._waiting_first.get(action.tier, (job, 0))
        times = times + 1 if before is job else 1
        self._waiting_first[action.tier] = job, times
        return times <= _PATIENCE

    def _find_frames(self, job: Job, coming: Coming) -> bool:
        """For what ``job`` brings; whether there were enough."""
        run, table = job.run, self._table
        coming.begin_with(run)
        pages = job.pages
        wanted = pages[(table.frame[pages] < 0) & ((table.flags[pages] & BLANK) == 0)]
        if run.parts is not None or not len(wanted):  # what is in use cannot make way for the rest
            return True
        for first, _, count in merge(wanted, wanted):
            coming.begin_with(run)  # the rest of it goes beside that
            pages = self._beside_streams(run.pages[first - run.first :][:count])
            found = self._with_frames(run, pages, job.action.base, coming)
            coming.add(run, *found)
            if len(found[0]) < count:
                return False
        self.prefetched += 1
        return True

    def _beside_streams(self, pages: Numbers) -> Numbers:
        """The first of ``pages``: what leaves streams the frames that they are about to fill."""
        residency = self._residency
        if not residency.workspaces:
            return pages
        return pages[: max(0, residency.pool.free_count - residency.kept_frames())]

    def _with_frames(
        self, run: Extent, pages: Numbers, base: int, coming: Coming
    ) -> tuple[Numbers, Numbers]:
        """``pages``, and free frames taken for them: as many of both as are free.

        The plan counts on any free frames: those that were foreseen are only the ones for which
        nothing has to be moved aside.
        """
        if not len(pages):
            return pages, pages
        own, pool = self._table.frame[run.pages], self._residency.pool
        resident = np.flatnonzero(own >= 0)
        if not len(resident):
            base = self._sooner(run, base, pages - run.first)
        window: int | None = base
        if not self._is_to_be_had(run, pages, base, coming):
            first, count = run.first, run.count
            instead = self._instead(run, pages, base, whole=not len(resident))
            if instead is not None:
                window, first, count = instead, int(pages[0]), len(pages)
            elif len(resident):
                base = int(own[resident[0]] - resident[0])
                first, count = int(pages[0]), len(pages)
                window = base
            else:
                window = soonest(self._residency, run.count)
            if window is not None and not (
                self._is_inside(run, window) and pool.is_free(window + first - run.first, count)
            ):
                window = None
        frames = None if window is None else pages - (run.first - window)
        if frames is None or self._is_late(frames):
            # Anywhere: it is put together when an op uses it, which is a copy in memory. If others
            # were moved aside, they would be in the way of what comes next.
            frames = self._soonest_frames(len(pages))
        pool.take_all(frames)
        return pages[: len(frames)], frames

    def _is_late(self, frames: Numbers) -> bool:
        """Whether these free frames are there much later than as many others are."""
        if not waits_on_host(self._residency) or not len(frames):
            return False
        due = int(self._mover.tickets.latest("device", frames).max())
        if self._mover.tickets.behind(due) <= _LATE:
            return False
        times = np.sort(due_after(self._residency))[: len(frames)]
        return due > int(times[times < TAKEN].max(initial=0)) + _LATE

    def _soonest_frames(self, count: int) -> Numbers:
        """So many free frames, or as many as there are, that are there first."""
        count = min(count, self._residency.pool.free_count)
        return np.argsort(due_after(self._residency), kind="stable")[:count]

    def _sooner(self, run: Extent, base: int, part: Numbers) -> int:
        """``base``, or where as many free frames as ``run`` has begin if those for ``part`` of it
        are there much sooner: what is to leave the planned ones may be the last in its queue."""
        if self._is_inside(run, base) and self._is_late(part + base):
            sooner = soonest(self._residency, run.count)
            return base if sooner is None else sooner
        return base

    def _instead(self, run: Extent, pages: Numbers, base: int, *, whole: bool) -> int | None:
        """Where the first page of ``run`` is to be, if nothing but what was put off is in the place
        of ``pages``: behind the plan's frames, or there, when that has left."""
        if not self._put_off.is_on or not self._is_inside(run, base):
            return None
        own = self._table.frame[run.pages]
        resident = np.flatnonzero(own >= 0)
        if (own[resident] != base + resident).any():
            return None
        frames = pages - (run.first - base)
        jobs = self._put_off.in_place(frames)
        if not jobs:
            return None
        behind = self._put_off.behind(run) if whole else None
        if behind is not None:
            return behind
        self._put_off.forget(jobs)
        for job in jobs:
            self._leave(job.action.tier, job.pages)
        return base if self._residency.pool.all_free(frames) else None

    def _is_to_be_had(self, run: Extent, pages: Numbers, base: int, coming: Coming) -> bool:
        """Whether ``pages`` of ``run`` can come to the place that the plan has for it, which begins
        at ``base``: it is free, or was made so, and what is there of ``run`` is at its place."""
        if not self._is_inside(run, base):
            return False
        pool, first = self._residency.pool, int(pages[0]) - run.first
        own = self._table.frame[run.pages]
        resident = np.flatnonzero(own >= 0)
        wrong = resident[own[resident] != base + resident]
        if not len(wrong) and pool.is_free(base + first, len(pages)):
            return True
        if not self._tidies:
            return False
        if len(wrong) and (
            run.pins
            or run.parts is not None
            or self._mover.tickets.pending("device", own[wrong]).any()
        ):
            return False
        places = base + wrong
        frames = np.concatenate([pages - (run.first - base), places])
        if self._put_off.is_on and self._put_off.in_place(frames):
            return False  # that need not be moved aside
        if self._is_late(frames[self._table.frame_page[frames] < 0]):
            return False  # what is there would wait with the rest
        coming.begin()  # before anything is
        if not make_way(self._residency, run, frames, self._home):
            return False
        rearrange(self._residency, run.pages[wrong], places)
        return pool.is_free(base + first, len(pages))

    def go_home(self) -> None:
        """As an iteration begins: what is not where its plan has it goes there, if that can be
        without waiting. Where it fails the plan is over (``Mover.error``)."""
        if not self._tidies:
            return
        try:
            self._go_home()
        except Exception as error:
            self._mover.error = self._mover.error or error
            self.clear()

    def _go_home(self) -> None:
        for key, base in self.homes.items():
            run = self._names.run_of(key, {})
            # Nobody is in its way behind the plan's frames.
            if run is not None and (self._of is None or run.base < self._of.frames):
                self._move_to(run, base)

    def _move_to(self, run: Extent, base: int) -> None:
        """What is there of ``run`` goes to its places from frame ``base`` on, if that can be
        without waiting."""
        if run.base == base or run.pins or run.parts is not None or not self._is_inside(run, base):
            return
        own = self._table.frame[run.pages]
        wrong = np.flatnonzero((own >= 0) & (own != base + np.arange(run.count)))
        places = base + wrong
        if self._mover.tickets.pending("device", np.concatenate([own[wrong], places])).any():
            return  # also from there: whoever uses it would wait for what is leaving these places
        if len(wrong) and make_way(self._residency, run, places, self._home):
            rearrange(self._residency, run.pages[wrong], places)

    def _home(self, run: Extent) -> int:
        """The frame that the plan has for the first page of ``run``, as far as it has come."""
        if self._put_off.holds(run):
            return ANYWHERE
        return self.homes.get(run.key, self.births.get(run.key, ANYWHERE))

    def _window(self, run: Extent, base: int) -> int | None:
        """The first of as many free frames as ``run`` has pages, ``base`` if it is."""
        place = self._birthplace(run, self._sooner(run, base, run.pages - run.first))
        if place is None or is_awaited(self._residency, place, run.count):
            return find_window(self._residency, run)
        return place

    def _birthplace(self, run: Extent, base: int) -> int | None:
        """The place that the plan has for ``run``, if it is free, or was made so, or another one
        behind the plan's frames."""
        if base >= 0 and self._residency.pool.is_free(base, run.count):
            return base
        place = self._instead(run, run.pages, base, whole=True)
        if place is not None or not self._tidies or not self._is_inside(run, base):
            return place
        frames = run.pages - (run.first - base)
        return base if make_way(self._residency, run, frames, self._home) else None

    def _is_inside(self, run: Extent, base: int) -> bool:
        return 0 <= base <= self._residency.pool.count - run.count

    # -- accesses --------------------------------------------------------------------------------
    def serve(self, runs: Sequence[Extent]) -> bool:
        """Wait until ``runs`` are on the device, and keep them. ``False``, and none kept, if
        the plan has not brought them."""
        if self.waiting:
            self._go_on_for(runs)  # what was in the way then may move now
        self._residency.keep(runs)
        served = False
        try:
            served = all(run.base >= 0 or self._serve(run) for run in runs)
        except MoveFailed:
            self._mover.drain()
            self.clear()
        finally:
            if not served:
                self._residency.release(runs)
        return served

    def serve_at_once(self, runs: Sequence[Extent]) -> bool:
        """:meth:`serve`, where the host has to wait for nothing. ``False``, and none kept, if it
        would have to."""
        if any(self.queues):
            self._go_on_for(runs)
        self._residency.keep(runs)
        for run in runs:
            if run.base < 0 and not self._is_ready(run):
                self._residency.release(runs)
                return False
        return True

    def _is_ready(self, run: Extent) -> bool:
        residency, pool = self._residency, self._residency.pool
        if run.generation != run.unplaced:
            if residency.has_come(run):
                return True
            if not residency.is_blank(run):
                return False
        base = self.births.get(run.key, ANYWHERE)
        if base < 0 or not pool.take_if_free(base, run.count):
            found = self._birthplace(run, base)
            if found is None:
                found = pool.find_run(run.count)
            if found is None:
                return False
            base = found
            pool.take(base, run.count)
        if not self._mover.tickets.reach_at_once(base, run.count):
            pool.free(base, run.count)
            return False
        residency.bear(run, base)
        return run.base >= 0

    def _go_on_for(self, runs: Sequence[Extent]) -> None:
        """What is wanted now, and what comes before it, waits for no place."""
        self._hurry = any(job.run in runs for queue in self._ins.values() for job in queue)
        try:
            self.go_on()
        finally:
            self._hurry = False

    def make_windows(self, runs: Sequence[Extent]) -> None:
        """So that runs which are faulted in find room in one piece without evicting anything, if
        enough frames are free."""
        try:
            for run in runs:
                if run.base < 0 and not self._residency.is_whole(run):
                    find_window(self._residency, run)
        except MoveFailed:
            self._mover.drain()

    def _serve(self, run: Extent) -> bool:
        residency = self._residency
        if residency.is_blank(run):
            return self._bear(run)
        if not residency.is_there(run):
            return False
        self.late += residency.wait_for(run.pages)
        if not residency.is_whole(run):
            find_window(residency, run)
        residency.settle(run)
        return run.base >= 0

    def _bear(self, run: Extent) -> bool:
        """Frames for a run that is born, if enough are free."""
        residency, base = self._residency, self.births.get(run.key, ANYWHERE)
        while residency.is_blank(run):  # the lock is given away below
            window = self._window(run, base)
            if window is None:
                return False
            if not residency.wait_for_frames(run.pages - (run.first - window)):
                return residency.place_at(run, window)
        return run.base >= 0
