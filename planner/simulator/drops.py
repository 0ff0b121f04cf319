"""Drops in the simulator: slots that are given back, at once or when earlier moves have arrived."""

from __future__ import annotations

import numpy as np

from ..plan import Move
from .pages import COMING, NONE, STALE, TIER_INDEX, VALID, Infeasible, Pages

OUT, IN = 1, 2  # bits: the moves that a drop waits for
_DROPPED = bytes((NONE, NONE, COMING, STALE)) + bytes(252)  # what a drop makes of a copy


def drop(pages: Pages, move: Move) -> None:
    """Queue the drop ``move``, or carry it out where nothing is on its way."""
    first, last = pages.range_of(move)
    tier = TIER_INDEX[move.tier]
    used = (first + np.flatnonzero(pages.used_by_host[first:last])).tolist()
    if not all(pages.coming[page] for page in used):
        raise Infeasible(
            f"'drop' at op {move.issue_op}: pages of '{pages.trace.name_of(move.tensor)}' are used "
            "by a host step that has not ended"
        )
    if not pages.on_the_way(first, last) and pages.there.count(1, first, last) == last - first:
        _give_back(pages, first, last, tier)
        return
    come = pages.coming.find(0, first, last) < 0
    come &= pages.going.count(0, first, last) == last - first
    if come and pages.drops.keys().isdisjoint(range(first, last)):  # all wait for the same
        pages.drops.update(dict.fromkeys(range(first, last), ((tier, IN),)))
        return
    for page in range(first, last):
        waits = OUT * (pages.going[page] > 0) | IN * (pages.coming[page] > 0)
        if waits:
            pages.drops[page] = (*pages.drops.get(page, ()), (tier, waits))
        elif pages.copies[tier][page] == VALID:
            _drop_now(pages, page, tier)


def arrived(pages: Pages, first: int, last: int, what: int) -> None:
    """Drops that waited for an arrival of pages ``first`` to ``last`` (``what``: OUT or IN) take
    place if it was the last that they waited for."""
    drops = pages.drops
    found = [drops.pop(page, None) for page in range(first, last)]
    alike = found.count(found[0]) == len(found)
    if alike and (found[0] is None or _drop_all(pages, first, last, found[0], what)):
        return
    for page, waiting in enumerate(found, first):
        if waiting is None:
            continue
        left = tuple((tier, waits & ~what) for tier, waits in waiting if waits & ~what)
        if left:
            drops[page] = left
        for tier, waits in waiting:
            if not waits & ~what:
                _drop_now(pages, page, tier)


def _drop_all(
    pages: Pages, first: int, last: int, waiting: tuple[tuple[int, int], ...], what: int
) -> bool:
    """All of these pages at once, if that is one drop that waited for this and for nothing else;
    whether it was done."""
    tier, waits = waiting[0]
    if len(waiting) > 1 or waits & ~what or pages.there.count(0, first, last):
        return False
    if tier == 0 and pages.used_by_host[first:last].any():
        return False
    _give_back(pages, first, last, tier)
    return True


def _drop_now(pages: Pages, page: int, tier: int) -> None:
    if not pages.there[page] and pages.copies[1 - tier][page] != VALID:
        raise Infeasible(f"'drop' of the only copy of {pages.name_of(page)}")
    if tier == 0 and pages.used_by_host[page]:
        raise Infeasible(f"'drop' of {pages.name_of(page)}, which a host step uses")
    _give_back(pages, page, page + 1, tier)


def _give_back(pages: Pages, first: int, last: int, tier: int) -> None:
    """The slots of valid copies; of others there are none yet, or they are void."""
    copies = pages.copies[tier]
    valid = copies.count(VALID, first, last)
    if valid:
        copies[first:last] = copies[first:last].translate(_DROPPED)
        pages.used[tier] -= valid
