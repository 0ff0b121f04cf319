"""Consecutive frames for a run among frames that are free here and there.

A plan counts frames, not places. Where enough are free but not in one piece, what is in the way is
moved aside inside the arena: a copy in memory, far cheaper than waiting for a transfer. ::

    frames   | A A . . B . . C C C |      need 4, and 4 are free: the cheapest window holds B,
             | A A . . . . B C C C |      which finds another place

    frames   | A A . B B B . . C C |      need 3: B finds no other place, but there is room
             | A A B B B . . . C C |      for it and for the window where both are
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..memory.frame_pool import Numbers, distinct, expand, sliding_max
from ..memory.space import Extent

if TYPE_CHECKING:
    from .residency import Residency

TAKEN = 1 << 60  # later than any transfer
_WAIT = 8  # cost of waiting for a transfer: of so many copies of a page inside the arena
_NEVER = 1 << 40  # cost of a frame that must stay as it is
_TRIES = 4  # windows to try, the cheapest first
_ROOM, _HELD, _WALL = 0, 1, 2


# -- frames that are free, but not yet -------------------------------------------------------------
def waits_on_host(residency: Residency) -> bool:
    """Something is queued that the host carries out, which streams do not: whoever gets a frame
    that it is to empty waits for all that is queued before."""
    return residency.backend.host_addressable and residency.mover.tickets.any


def due_after(residency: Residency) -> Numbers:
    """Of each frame: the transfer that it is free after, 0 if it is; ``TAKEN`` if it will not
    be."""
    due = np.full(residency.pool.count, TAKEN)
    free = expand(residency.pool.runs())
    late = waits_on_host(residency)
    due[free] = residency.mover.tickets.latest("device", free) if late else 0
    return due


def soonest(residency: Residency, width: int) -> int | None:
    """Where so many free frames begin that are there first."""
    pool = residency.pool
    if width > pool.count or not waits_on_host(residency):
        return pool.find_run(width)
    windows = sliding_max(due_after(residency), width)
    best = int(np.argmin(windows))
    return best if windows[best] < TAKEN else None


def is_awaited(residency: Residency, first: int, count: int) -> bool:
    """Whether somebody has yet to leave one of these frames, and the host would wait for that."""
    frames = np.arange(first, first + count)
    return waits_on_host(residency) and bool(
        residency.mover.tickets.pending("device", frames).any()
    )


def _waits(residency: Residency) -> Numbers:
    """What waiting for each frame costs, of those that are free."""
    if not waits_on_host(residency):
        return np.zeros(residency.pool.count, np.int64)
    due = due_after(residency)
    later = (due > 0) & (due < TAKEN)
    before_all = residency.mover.tickets.behind(0)  # the same number away from each one's
    return np.where(later, _WAIT * np.maximum(0, due + before_all), 0)


# -- windows ---------------------------------------------------------------------------------------
def find_window(residency: Residency, run: Extent) -> int | None:
    """The first of ``run.count`` consecutive frames that are free, or were made so; pages of
    ``run`` itself may be in them, then at their places. ``None`` as of :func:`_open_window`. Others
    are moved aside also where that takes less than waiting for a transfer."""
    found = None
    if (residency.table.frame[run.pages] < 0).all():
        found = soonest(residency, run.count)
        if found is not None and not is_awaited(residency, found, run.count):
            return found
    opened = _open_window(residency, run)
    return found if opened is None else opened


def _open_window(residency: Residency, run: Extent) -> int | None:
    """Make ``run.count`` consecutive frames free but for pages of ``run`` itself, which are at
    their places in it then; the first frame. ``None``, and nothing moved that matters, if too few
    are free or nothing can be moved. ``run`` must not be in use in its present place."""
    table, pool = residency.table, residency.pool
    own = table.frame[run.first : run.first + run.count]
    if pool.free_count < run.count - int((own >= 0).sum()) or run.count > pool.count:
        return None
    cost = _costs(residency, run) + _waits(residency)
    sums = np.concatenate([[0], np.cumsum(cost)])
    windows = sums[run.count :] - sums[: -run.count]
    for base in _cheapest(windows):
        if windows[base] >= _NEVER:
            break
        if _clear(residency, run, base):
            return base
    found = _slide(residency, run)
    return _swap(residency, run, windows) if found is None else found


def _swap(residency: Residency, run: Extent, windows: npt.NDArray[np.int64]) -> int | None:
    """The same where others cannot stay in one piece: what is in the cheapest window changes places
    with pages of ``run`` outside of it, or goes where there is room."""
    base, table, own = int(np.argmin(windows)), residency.table, run.pages
    if windows[base] >= _NEVER:
        return None
    window = np.arange(base, base + run.count)
    inside = table.frame_page[window]
    others = inside[(inside >= 0) & ~np.isin(inside, own)]
    free = [np.arange(a, a + n) for a, n in residency.pool.runs()]
    left = np.concatenate([*free, table.frame[own]])
    left = left[(left >= 0) & ((left < base) | (left >= base + run.count))]
    if len(left) < len(others):
        return None
    _arrange(
        residency,
        np.concatenate([others, own]),
        np.concatenate([left[: len(others)], own + (base - run.first)]),
    )
    return base


def make_way(
    residency: Residency, run: Extent, frames: Numbers, home_of: Callable[[Extent], int]
) -> bool:
    """Move all but pages of ``run`` out of ``frames``, if none of it is where it should be, or in
    use, or on its way; whether they are free then. ``home_of``: the frame in which the first page
    of a run should be. What makes way goes there, or where there is room.
    """
    table, runs = residency.table, residency.space.runs
    pages = table.frame_page[frames]
    if residency.mover.tickets.pending("device", frames[pages >= 0]).any():
        return False
    owners = set(table.owner[pages[pages >= 0]].tolist())
    others = [runs[owner] for owner in owners if owner != run.id]
    if any(_stays(other) or base_of(residency, other) == home_of(other) for other in others):
        return False
    return _cleared(residency, frames, others, lambda run: _goes_home(residency, run, home_of(run)))


def vacate(residency: Residency, frames: int, home_of: Callable[[Extent], int]) -> None:
    """What is behind the first ``frames`` frames, and not in use, goes home, or where there is room
    in front, as far as there is."""
    table, runs = residency.table, residency.space.runs
    behind = np.arange(frames, residency.pool.count)
    pages = table.frame_page[behind]
    owners = distinct(table.owner[pages[pages >= 0]]).tolist()
    others = [runs[owner] for owner in owners if not _stays(runs[owner])]
    _cleared(residency, behind, others, lambda run: _goes_home(residency, run, home_of(run)))


def _cleared(
    residency: Residency, frames: Numbers, runs: Sequence[Extent], move: Callable[[Extent], bool]
) -> bool:
    """``move`` moves ``runs``, which are in ``frames``, one after another; whether all have gone,
    and these are free. Meanwhile what is free of them is taken, so that nothing is moved there."""
    pages, pool = residency.table.frame_page, residency.pool
    taken = np.zeros(len(frames), np.bool_)

    def take_free() -> bool:
        """``False`` where what is empty is not free either."""
        fresh = (pages[frames] < 0) & ~taken
        free = pool.all_free(frames[fresh])
        if free:
            pool.take_all(frames[fresh])
            taken[fresh] = True
        return free

    try:
        return take_free() and all(move(run) and take_free() for run in runs)
    finally:
        pool.free_all(frames[taken])


def base_of(residency: Residency, run: Extent) -> int:
    """Where the first page of ``run`` is, or would be beside those that are there."""
    frames = residency.table.frame[run.pages]
    there = int(np.argmax(frames >= 0))
    return int(frames[there]) - there


def _goes_home(residency: Residency, run: Extent, home: int) -> bool:
    """All of ``run`` that is there moves to the place that begins at ``home``, or to another, if
    that is free, and nobody has to wait for it; whether it has."""
    pool, tickets = residency.pool, residency.mover.tickets
    there = np.flatnonzero(residency.table.frame[run.pages] >= 0)
    for base in (home, pool.find_run(run.count)):
        if base is None or not 0 <= base <= pool.count - run.count:
            continue
        targets = there + base
        if pool.all_free(targets) and not tickets.pending("device", targets).any():
            residency.relocate(run.pages[there], targets)
            return True
    return False


def _cheapest(windows: npt.NDArray[np.int64]) -> list[int]:
    """Where the ``_TRIES`` smallest are, the first of equal ones, without sorting all."""
    last = min(_TRIES, len(windows)) - 1
    few = np.flatnonzero(windows <= np.partition(windows, last)[last])
    found: list[int] = few[np.argsort(windows[few], kind="stable")][:_TRIES].tolist()
    return found


def _slide(residency: Residency, run: Extent) -> int | None:
    """The same where nothing has another place to go to: what lies between two frames that must
    stay is pushed together there, as little of it as possible."""
    table = residency.table
    best: tuple[int, int, int] | None = None  # pages of others to move, frames from, to
    pieces = _pieces(residency, run)
    first = room = held = 0
    for number, (start, end, kind) in enumerate(pieces):
        if kind == _WALL:
            first, room, held = number + 1, 0, 0
            continue
        room += (end - start) * (kind == _ROOM)
        held += (end - start) * (kind == _HELD)
        while room >= run.count:
            begin, stop, front = pieces[first]
            if best is None or held < best[0]:
                best = held, begin, end
            room -= (stop - begin) * (front == _ROOM)
            held -= (stop - begin) * (front == _HELD)
            first += 1
    if best is None:
        return None
    moved, begin, end = best
    between = np.arange(begin, end)
    pages = table.frame_page[between]
    others = between[(pages >= 0) & (table.owner[pages] != run.id)]
    targets = np.arange(begin, begin + moved)
    base: int = end - run.count
    own = run.pages
    if (table.frame[own] < 0).all():
        wrong = others != targets
        if wrong.any():
            residency.slide(others[wrong], targets[wrong])
        return base
    pages = np.concatenate([table.frame_page[others], own])
    _arrange(residency, pages, np.concatenate([targets, own + (base - run.first)]))
    return base


def _pieces(residency: Residency, run: Extent) -> list[tuple[int, int, int]]:
    """All frames as (from, to, kind): consecutive ones that are free or ``run``'s own, that are
    another run's and may move, or that must stay."""
    cost = _costs(residency, run)
    pages = residency.table.frame_page
    owner = np.where(pages >= 0, residency.table.owner[pages], -1)
    room = (cost == 0) | (owner == run.id)
    kind = np.where(room, _ROOM, np.where(cost < _NEVER, _HELD, _WALL))
    owner[kind != _HELD] = -1
    cuts = np.flatnonzero((np.diff(kind) != 0) | (np.diff(owner) != 0)) + 1
    edges = [0, *cuts.tolist(), len(kind)]
    return [(a, b, int(kind[a])) for a, b in itertools.pairwise(edges)]


def _costs(residency: Residency, run: Extent) -> npt.NDArray[np.int64]:
    """Of making each frame free: 0 where it is, 1 for a page that may move."""
    table, pool = residency.table, residency.pool
    cost = np.full(pool.count, _NEVER, np.int64)
    for start, length in pool.runs():
        cost[start : start + length] = 0
    held = np.flatnonzero(table.frame_page >= 0)
    owners = table.owner[table.frame_page[held]]
    fixed = [r.id for r in residency.space.runs.values() if r is not run and (r.pins or r.parts)]
    on_their_way = residency.mover.tickets.pending("device", held)
    stays = np.isin(owners, fixed) | on_their_way
    cost[held] = np.where(stays, _NEVER, 1)
    return cost


def _stays(run: Extent) -> bool:
    """Its pages may not move: they are in use."""
    return bool(run.pins or run.parts)


def _clear(residency: Residency, run: Extent, base: int) -> bool:
    """Move what is in the window from ``base`` on to other places, and ``run``'s pages into it."""
    table = residency.table
    window = np.arange(base, base + run.count)
    held = table.frame_page[window]
    owners = distinct(table.owner[held[held >= 0]]).tolist()
    occupants = [residency.space.runs[owner] for owner in owners if owner != run.id]
    cleared = _cleared(residency, window, occupants, lambda other: _move_aside(residency, other))
    if cleared:
        _arrange(residency, run.pages, run.pages + (base - run.first))
    return cleared


def _move_aside(residency: Residency, run: Extent) -> bool:
    """All pages of ``run`` that are on the device go to another place for the whole of it."""
    start = soonest(residency, run.count)
    if start is None:
        return False
    _arrange(residency, run.pages, run.pages + (start - run.first))
    return True


def _arrange(residency: Residency, pages: Numbers, targets: Numbers) -> None:
    """:func:`rearrange` of those of ``pages`` that are on the device, and elsewhere."""
    frames = residency.table.frame[pages]
    wrong = (frames >= 0) & (frames != targets)
    rearrange(residency, pages[wrong], targets[wrong])


def rearrange(residency: Residency, pages: Numbers, targets: Numbers) -> None:
    """Move resident, unpinned ``pages`` to ``targets``, free or held by others of them. Where pages
    go round in circles, and no frame is free to take one of each meanwhile, they are exchanged."""
    sources = residency.table.frame[pages]
    order, circles = _in_order(sources.tolist(), targets.tolist(), residency.pool.find_run(1))
    turn = np.zeros(len(pages), np.bool_)
    turn[circles] = True
    if order:
        residency.relocate(pages[~turn], targets[~turn], np.array(order, np.int64))
    if circles:
        swaps = _exchanges(sources[turn].tolist(), targets[turn].tolist())
        residency.relocate(pages[turn], targets[turn], np.array(swaps, np.int64), exchange=True)


def _exchanges(sources: list[int], targets: list[int]) -> list[tuple[int, int]]:
    """Which two frames to exchange, one after another, where all go round in circles."""
    goes = dict(zip(sources, targets))
    found = []
    while goes:
        first = next(iter(goes))
        target = goes.pop(first)
        while target != first:
            found.append((first, target))
            target = goes.pop(target)
    return found


def _in_order(
    sources: list[int], targets: list[int], free: int | None
) -> tuple[list[tuple[int, int]], list[int]]:
    """From which frame to which to copy, one after another, so that nothing is overwritten before
    it was copied; and which ones go round in circles, and are left out as no frame is ``free``."""
    held, wants = set(sources), {target: number for number, target in enumerate(targets)}
    order: list[tuple[int, int]] = []
    left = dict.fromkeys(range(len(sources)))

    def follow(number: int | None, last: int | None = None) -> None:
        """``number`` goes, then whoever wants its frame, and so on."""
        while number is not None and number != last:
            order.append((sources[number], targets[number]))
            del left[number]
            number = wants.get(sources[number])

    for number, target in enumerate(targets):
        if target not in held:
            follow(number)
    # What the last one of a chain has left; where there is no chain, nobody wants a free frame.
    spare = next((source for source in sources if source not in wants), free)
    if spare is None:
        return order, list(left)
    while left:
        first = next(iter(left))
        order.append((sources[first], spare))
        follow(wants[sources[first]], first)
        order.append((spare, targets[first]))
        del left[first]
    return order, []
