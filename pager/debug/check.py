"""Proof of the page table's rules, from its columns alone. Run by tests after each operation."""

from __future__ import annotations

import numpy as np

from ..core import Core
from ..memory.page_table import BLANK, DIRTY, LIVE


def check_invariants(pager: Core) -> None:
    """Raise ``AssertionError`` naming the first rule that does not hold."""
    with pager.quiet():
        _check(pager)


def _check(pager: Core) -> None:
    table, residency, space = pager.table, pager.residency, pager.space
    residency.collect()
    live = (table.flags & LIVE) != 0
    resident = table.frame >= 0

    # Every live page belongs to a run, every run's pages are live, none twice.
    owner = np.full(len(table.owner), -1, np.int64)
    for run in space.runs.values():
        rows = slice(run.first, run.first + run.count)
        assert (owner[rows] < 0).all(), f"run {run.id} shares pages with another run"
        owner[rows] = run.id
    assert (owner == table.owner).all(), "a page's owner is not the run that holds it"
    assert (live == (owner >= 0)).all(), "a live page has no run, or a free one has"
    assert space.live_pages == int(live.sum()), "live pages are miscounted"

    # Frames: one page each, the inverse map is exact, free frames are empty.
    frames = table.frame[resident]
    assert len(np.unique(frames)) == len(frames), "two pages are in one frame"
    inverse = np.full(len(table.frame_page), -1, np.int64)
    inverse[frames] = np.flatnonzero(resident)
    assert (inverse == table.frame_page).all(), "frame_page is not the inverse of frame"
    held = np.concatenate([frames, residency._lent])
    _check_pool(residency.pool.runs(), held, residency.pool.count, "frame")
    budget = pager.budget_bytes["device"]
    if pager.budget.settled:
        assert residency.frames * pager.page_size <= budget, "the arena exceeds its budget"

    # Slots of each tier below likewise; only live pages hold any.
    tiers = [("host", table.host, pager.host.slots)]
    if pager.disk is not None:
        tiers.append(("disk", table.disk, pager.disk.slots))
    for name, column, pool in tiers:
        slots = column[column >= 0]
        assert len(np.unique(slots)) == len(slots), f"two pages are in one {name} slot"
        assert not (column[~live] >= 0).any(), f"a free page holds a {name} slot"
        taken = np.concatenate([slots, pager.mover.slots.lent[name]])
        _check_pool(pool.runs(), taken, pool.count, f"{name} slot")

    # Stamps say whose page, and which version of it, each slot holds.
    stamped = [(pager.mover.carrier.host_stamps, table.host)]
    if pager.disk is not None:
        stamped.append((pager.disk.stamps, table.disk))
    for stamps, column in stamped:
        if stamps is not None:
            pages = np.flatnonzero(column >= 0)
            stamps.check_owners(column[pages], pages, table.version[pages])

    # States: no live page is nowhere, and the flags say what the columns say.
    below = (table.host >= 0) | (table.disk >= 0)
    blank = (table.flags & BLANK) != 0
    nowhere = live & ~resident & ~below
    assert (blank == nowhere).all(), "a written page is nowhere, or a blank one is somewhere"
    dirty = (table.flags & DIRTY) != 0
    assert (dirty == (resident & ~below)).all(), "DIRTY does not mean: on the device, no copy"

    for run in space.runs.values():
        where = table.frame[run.first : run.first + run.count]
        if run.base >= 0:
            expected = run.base + np.arange(run.count)
            assert (where == expected).all(), f"run {run.id} is not where its base says"
        if run.settled:
            rows = slice(run.first, run.first + run.count)
            assert not below[rows].any(), f"run {run.id} is settled but has copies below"
        if run.pins:
            assert (where >= 0).all(), f"pinned run {run.id} is not on the device"
        if run.parts is not None:
            held = run.held_pages
            assert run.parts, f"run {run.id} is said to have pinned parts but has none"
            assert run.first <= held[0], f"a part of run {run.id} begins before it"
            assert held[-1] < run.first + run.count, f"a part of run {run.id} ends behind it"
            assert (table.frame[held] >= 0).all(), f"a pinned part of run {run.id} is not there"
        assert run.storages > 0 or run.parts or run.pins, f"run {run.id} has no storage"
    assert not pager.mover.tickets.any, "a page is said to be on its way, and nothing moves"


def _check_pool(
    free_runs: list[tuple[int, int]], used: np.ndarray[tuple[int], np.dtype[np.int64]], count: int,
    what: str,
) -> None:  # fmt: skip
    state = np.zeros(count, np.int8)
    for start, length in free_runs:
        state[start : start + length] += 1
    state[used] += 2
    assert (state > 0).all(), f"a {what} is neither free nor used"
    assert (state < 3).all(), f"a {what} is free and used"
