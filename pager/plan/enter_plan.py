"""Bringing the arena into the state in which a plan begins, after something else has happened."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..memory.frame_pool import Numbers
from ..memory.page_table import NONE
from ..memory.space import Extent
from ..moves.compaction import rearrange
from ..moves.residency import Residency
from .access_log import Names
from .compiled_plan import ANYWHERE, Action, CompiledPlan


def enter_plan(residency: Residency, names: Names, compiled: CompiledPlan) -> list[Action]:
    """Pages that ``compiled`` does not want on the device leave it; the others go to their frames.

    The moves that bring what is missing, to be queued before the plan's own. Nothing may be moving
    and nothing pinned. Raises ``TierFull`` if what should leave has nowhere to go.
    """
    table = residency.table
    order = _by_first_use(names, compiled)
    target, wanted = _targets(residency, names, compiled, order)
    resident = table.frame >= 0
    unwanted = np.flatnonzero(resident & (target < 0))
    residency.evict_pages(unwanted)
    pages = np.flatnonzero((table.frame >= 0) & (table.frame != target))
    rearrange(residency, pages, target[pages])
    settled = [entry for entry in order if (target[entry[1].first :][: entry[1].count] >= 0).any()]
    late = [entry for entry in order if entry not in settled]
    late.sort(key=lambda entry: compiled.last_in.get(entry[0], 0))
    return _missing(residency, compiled, [*settled, *late], wanted)


def _by_first_use(names: Names, compiled: CompiledPlan) -> list[tuple[int, Extent]]:
    """Keys and runs that live on from iteration to iteration."""
    found = ((key, names.run_of(key, {})) for key in compiled.uses if key > 0)
    return [(key, run) for key, run in found if run is not None]


def _targets(
    residency: Residency, names: Names, compiled: CompiledPlan, order: list[tuple[int, Extent]]
) -> tuple[Numbers, npt.NDArray[np.bool_]]:
    """Frame of each page, −1 for none; and which pages should be on the device.

    A plan may want two pages in one frame: when its iterations follow each other, one of them is
    still on its way, and waits. The one that is used first gets the frame. Runs for which the plan
    has found no place stay where they are, or go where there is room for them.
    """
    table = residency.table
    wanted = np.zeros(len(table.frame), np.bool_)
    for _, run in order:
        wanted[run.first : run.first + run.count] = True
    for away in compiled.away:
        gone = names.run_of(away.key, {})
        if gone is not None:
            rows = slice(gone.first, gone.first + gone.count)
            wanted[rows][away.first : away.first + away.pages] = False
    target = np.full(len(table.frame), NONE)
    taken = np.zeros(residency.pool.count, np.bool_)

    def put(run: Extent, pages: npt.NDArray[np.intp], base: int) -> bool:
        frames = base + pages
        if not len(frames) or frames[0] < 0 or frames[-1] >= len(taken) or taken[frames].any():
            return False
        taken[frames] = True
        target[run.first + pages] = frames
        return True

    elsewhere = []
    for key, run in order:
        pages = np.flatnonzero(wanted[run.first : run.first + run.count])
        if key in compiled.start:
            put(run, pages, compiled.start[key])
        elif len(pages) and not (run.base >= 0 and put(run, pages, run.base)):
            elsewhere.append((run, pages))
    for run, pages in elsewhere:
        free = np.concatenate([[0], np.cumsum(taken)])
        gaps = np.flatnonzero(free[run.count :] == free[: -run.count])
        if len(gaps):
            put(run, pages, int(gaps[-1]))  # what is born in the iteration begins at the front
    return target, wanted


def _missing(
    residency: Residency,
    compiled: CompiledPlan,
    order: list[tuple[int, Extent]],
    wanted: npt.NDArray[np.bool_],
) -> list[Action]:
    """In-moves for pages that should be on the device and are below it."""
    table = residency.table
    found = []
    for key, run in order:
        base = compiled.start.get(key, ANYWHERE)
        rows = slice(run.first, run.first + run.count)
        absent = wanted[rows] & (table.frame[rows] < 0)
        for tier, here in (
            ("host", absent & (table.host[rows] >= 0)),
            ("disk", absent & (table.host[rows] < 0) & (table.disk[rows] >= 0)),
        ):
            edges = np.flatnonzero(np.diff(np.concatenate([[0], here.view(np.int8), [0]])))
            for first, last in edges.reshape(-1, 2).tolist():
                found.append(Action("in", tier, key, first, last - first, base))
    return found
