"""Bringing the arena into the state in which a plan begins, after something else has happened."""

from __future__ import annotations

import numpy as np

from .access_log import Names
from .guide import Action, Guide
from .page_table import NONE, Int32
from .residency import Residency


def reconcile(residency: Residency, names: Names, guide: Guide) -> list[Action]:
    """Pages that ``guide`` does not want on the device leave it; the others go to their frames.

    The moves that bring what is missing, to be queued before the plan's own. Nothing may be moving
    and nothing pinned. Raises ``TierFull`` if what should leave has nowhere to go.
    """
    table = residency.table
    target = np.full(len(table.frame), NONE)
    for key, base in guide.start.items():
        run = names.run_of(key, ())
        if run is not None and base + run.count <= residency.pool.count:
            rows = slice(run.first, run.first + run.count)
            target[rows] = np.arange(base, base + run.count)
    for away in guide.away:
        run = names.run_of(away.key, ())
        if run is not None:
            first = run.first + away.first
            target[first : first + away.pages] = NONE
    resident = table.frame >= 0
    unwanted = np.flatnonzero(resident & (target < 0)).astype(np.int32)
    residency.evict_pages(unwanted)
    pages = np.flatnonzero((table.frame >= 0) & (table.frame != target)).astype(np.int32)
    _rearrange(residency, pages, target[pages].astype(np.int32))
    return _missing(residency, names, guide, target)


def _rearrange(residency: Residency, pages: Int32, targets: Int32) -> None:
    """Move resident ``pages`` to ``targets``, which are free or held by others of them."""
    while len(pages):
        free = residency.table.frame_page[targets] < 0
        if free.any():
            residency.relocate(pages[free], targets[free])
            pages, targets = pages[~free], targets[~free]
            continue
        # Only cycles are left: one page makes way, through a free frame or below.
        spare = residency.pool.allocate_run(1)
        if spare is None:
            residency.evict_pages(pages[:1])
            pages, targets = pages[1:], targets[1:]
        else:
            residency.pool.free(spare, 1)
            residency.relocate(pages[:1], np.array([spare], np.int32))


def _missing(residency: Residency, names: Names, guide: Guide, target: Int32) -> list[Action]:
    """In-moves for pages that should be on the device and are below it, in the order of keys'
    first use."""
    table = residency.table
    found = []
    seen: set[int] = set()
    for keys in guide.keys:
        for key in keys:
            run = names.run_of(key, ()) if key > 0 and key not in seen else None
            seen.add(key)
            if run is None or key not in guide.start:
                continue
            rows = slice(run.first, run.first + run.count)
            absent = (target[rows] >= 0) & (table.frame[rows] < 0)
            for tier, column in (("host", table.host), ("disk", table.disk)):
                here = absent & (column[rows] >= 0)
                if tier == "disk":
                    here &= table.host[rows] < 0
                edges = np.flatnonzero(np.diff(np.concatenate([[0], here.view(np.int8), [0]])))
                for first, last in edges.reshape(-1, 2).tolist():
                    found.append(Action("in", tier, key, first, last - first, guide.start[key]))
    return found
