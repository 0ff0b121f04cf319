"""Parameters that some iterations use and others do not, such as those of experts, to which a
router sends what it is given.

Iterations that differ only in these are one kind: what a kind's order is made of leaves out all
accesses in which an *optional* parameter is (``access_log.py``). Which ones these are is found when
no kind comes twice: what some of the latest iterations have used and others not, and the other
members of the same lists of modules, if all the rest is alike in three of them. ::

    iteration 1   attention | router | expert 0 | expert 3 | attention | ...   three kinds, none
    iteration 2   attention | router | expert 1 | expert 3 | attention | ...   of which came again:
    iteration 3   attention | router | expert 0 |            attention | ...   experts are optional
    their order   attention | router |                       attention | ...

A plan is made of the rest, for a part of the frames. The others are left to what comes on demand:
there what was used in the most iterations stays. Small parameters (biases) of all members of such
lists share pages with one another, and with nothing else: these pages are optional too.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from ..memory.space import Extent
from ..tensor.module import FROZEN
from ..tensor.names import named_parameters
from ..tensor.paged_tensor import PagedTensor
from .access_log import AccessLog, Keys, Names, is_optional

if TYPE_CHECKING:
    from ..core import Core

_ONCE = 3  # iterations of which each was of another kind, before they are compared
_LEAST_REST = 8  # accesses that all of them have
_FORGETS = 0.1  # of what was seen before, in each iteration
_RARELY = 0.01  # used in so many iterations: not counted any more


class OptionalParts:
    """Of one pager; under its lock. ``often``: key of what is used in accesses of optional
    parameters → the share of the latest iterations that did."""

    def __init__(self, pager: Core, names: Names) -> None:
        self.often: dict[int, float] = {}
        self._pager, self._names = pager, names
        self._here: list[Extent] = []  # came on demand

    # -- finding them ----------------------------------------------------------------------------
    def look_for(self, once: Sequence[AccessLog]) -> Collection[int]:
        """``once``: iterations of kinds that never came again. Keys of parameters that have turned
        out to be optional, under which they are not known any more; none where there are none."""
        if len(once) < _ONCE:
            return ()
        used: list[set[int]] = [{key for keys in log.order for key in keys} for log in once]
        every = set(used[0]).intersection(*used[1:])
        differ = every.union(*used) - every
        lists, shared = self._lists()
        varying = {lists[key] for key in differ if key in lists}
        members = {key for key, name in lists.items() if name in varying}
        members |= {
            key for key, apart in shared.items() if any(f"{apart}." in name for name in varying)
        }
        for chosen in (members, differ.intersection(members)):
            rest = Counter(_without(log.order, chosen | differ) for log in once)
            alike, times = rest.most_common(1)[0]
            if chosen and len(alike) >= _LEAST_REST and times >= _ONCE:
                self._mark(chosen)
                return chosen
        return ()

    def _lists(self) -> tuple[dict[int, str], dict[int, str]]:
        """Key of a parameter in pages of its own → its name without numbers; of a page that small
        parameters share → the lists of modules that all of these are in, if they are. What has not
        been used yet gets a key."""
        own, shared = {}, {}
        for name, parameter in named_parameters(self._pager):
            value = getattr(parameter, "_local_tensor", parameter)
            if type(value) is not PagedTensor:
                continue
            run = value._storage.run
            if run.small is None:
                own[run.key or self._names.name(run)] = re.sub(r"\d+", "*", name)
            elif apart := run.apart.removeprefix(FROZEN):
                shared[run.key or self._names.name(run)] = apart
        return own, shared

    def _mark(self, keys: Collection[int]) -> None:
        for key in keys:
            run = self._names.run_of(key, {})
            if run is not None:
                self._names.make_optional(run)

    # -- what comes on demand --------------------------------------------------------------------
    def note(self, log: AccessLog) -> None:
        """An iteration has ended."""
        used = {key for keys in set(log.keys) if is_optional(keys) for key in keys if key > 0}
        if used or self.often:
            often = {key: (1 - _FORGETS) * share for key, share in self.often.items()}
            for key in used:
                often[key] = often.get(key, 0.0) + _FORGETS
            self.often = {key: share for key, share in often.items() if share >= _RARELY}

    def frames(self, log: AccessLog, frames: int) -> int:
        """Of so many, those that a plan of ``log`` is to leave: as large a share as optional parts
        have of all pages, and no more than the other accesses can do without."""
        pages = {key: log.facts[key].pages for keys in log.keys for key in keys if key in log.facts}
        theirs: set[int] = set()
        largest = others = 0
        for keys in log.keys:
            need = sum(pages.get(key, 0) for key in keys)
            if is_optional(keys):
                theirs.update(keys)
                largest = max(largest, need)
            else:
                others = max(others, need)
        if not theirs:
            return 0
        share = sum(pages.get(key, 0) for key in theirs) / sum(pages.values())
        return max(0, min(max(int(share * frames), largest), frames - 2 * others))

    def make_room(self, runs: Sequence[Extent], known: Collection[int], left: int) -> None:
        """``runs`` are about to come, where a plan that has the ``known`` keys has left so many
        frames to what it does not know: what was used least often makes way."""
        table, residency = self._pager.residency.table, self._pager.residency
        coming = [run for run in runs if run.key not in known]
        live = [run for run in dict.fromkeys(self._here) if self._names.is_live(run)]
        here = [run for run in live if run not in coming and (table.frame[run.pages] >= 0).any()]
        over = sum(run.count for run in (*here, *coming)) - left
        for run in sorted(here, key=lambda run: self.often.get(run.key, 0.0)):
            if over <= 0:
                break
            if not run.pins and run.parts is None:
                residency.evict_run(run)
                over -= run.count
                here.remove(run)
        self._here = here + coming


def _without(order: Sequence[Keys], optional: Collection[int]) -> tuple[Keys, ...]:
    return tuple(keys for keys in order if not any(key in optional for key in keys))
