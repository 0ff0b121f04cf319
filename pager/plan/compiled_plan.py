"""A plan in the terms of the runtime: what to do at which access, and which frames are whose.

It is made of the accesses of one iteration, and followed in every one with the same order of
accesses (``access_log.py``): there activations have other sizes, and some of them are not there, or
are there and unknown. Their moves are carried out for as large a part of them as the plan says.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...planner.joint.options import without_ends
from ...planner.places.layout import Layout
from ...planner.plan import Plan
from .access_log import Keys, is_optional, ordered
from .traces import Recorded

ANYWHERE = -1  # no frame was found for it in advance


class Action(NamedTuple):
    """Move pages ``first … first+pages`` of the run called ``key``; ``what`` is "out", "in" or
    "drop"; ``base`` the frame of the run's first page once it is on the device; ``of``: pages of
    the run by the plan, 0 for as many as it has. "shift": to frames from ``base`` on."""

    what: str
    tier: str
    key: int
    first: int
    pages: int
    base: int
    of: int = 0

    def on(self, count: int) -> Action:
        """The same for a run of ``count`` pages."""
        if self.of in (0, count):
            return self
        first, end = (at * count // self.of for at in (self.first, self.first + self.pages))
        return self._replace(first=first, pages=end - first)


class Away(NamedTuple):
    """Pages of a run that are off the device when an iteration begins."""

    key: int
    first: int
    pages: int
    tier: str


class Order:
    """The accesses of an iteration, in which others are found again. ``keys``: theirs;
    ``of_order``: what the order has of each; ``order``: theirs, and ``places``: which accesses
    these are; ``uses``: key → its accesses, but of optional ones.
    """

    def __init__(self, keys: list[Keys]) -> None:
        self.keys = keys
        self.of_order = [*map(ordered, keys)]
        self.places = [where for where, of_order in enumerate(self.of_order) if of_order]
        self.order = [self.of_order[where] for where in self.places]
        self.uses: dict[int, list[int]] = {}
        for where, access in enumerate(keys):
            for key in access:
                if not is_optional((key,)):
                    self.uses.setdefault(key, []).append(where)
        # Of all keys, one after the other, in one line: (number of the key, access).
        self._numbers = {key: number for number, key in enumerate(self.uses)}
        line = [np.array(uses) + n * len(keys) for n, uses in enumerate(self.uses.values())]
        self._line = np.concatenate([*line, [len(line) * len(keys)]])

    def ahead(self, keys: Sequence[int], now: int) -> npt.NDArray[np.int64]:
        """The next access behind ``now`` that uses each of ``keys``, as its accesses come again and
        again: those of the second turn have higher numbers. −1 where none does."""
        count = len(self.keys)
        numbers = np.array([self._numbers.get(key, -1) for key in keys], np.int64)
        found = self._line[np.searchsorted(self._line, numbers * count + now + 1)]
        first = self._line[np.searchsorted(self._line, numbers * count)] + count
        ahead = np.where(found < (numbers + 1) * count, found, first) - numbers * count
        return np.where(numbers < 0, -1, ahead)

    def find(self, keys: Keys, of_order: Keys, after: int, place: int) -> int | None:
        """Which of its accesses one is that begins, when its access ``after`` was the latest one
        and ``place`` accesses of the order have begun: ``after`` if it knows nothing of it, or
        ``None`` if it has another order."""
        following = after + 1
        if following < len(self.keys) and self.keys[following] == keys:
            return following
        if of_order:
            known = place < len(self.order) and self.order[place] == of_order
            return self.places[place] if known else None
        end = self.places[place] if place < len(self.places) else len(self.keys)
        uses = self.uses.get(keys[0], ()) if keys else ()
        index = bisect_right(uses, after)
        return uses[index] if index < len(uses) and uses[index] < end else after


class CompiledPlan(Order):
    """What is followed through one kind of iteration. Its accesses are those of the one that it was
    made of.

    ``actions[n]`` are queued when ``n`` accesses have ended; ``next_actions[n]``: the least number,
    from ``n`` on, that has some. ``births``: key → frame of a run's first page when it is born.
    ``start``: positive key → frame of its first page when an iteration begins; ``away``: pages that
    are not on the device then. ``last_in``: key → number of its last in-move, the order of those
    still under way at the end.
    ``hosted``: access that is a step of the host → its place in the host's order. ``frames``: that
    it has places in; ``left``: others, for what it does not know. ``parted``: keys of what is moved
    in parts.
    """

    def __init__(
        self,
        recorded: Recorded,
        plan: Plan,
        layout: Layout,
        keys: list[Keys],
        frames: int,
        left: int = 0,
    ) -> None:
        super().__init__(keys)
        self.plan, self.frames, self.left = plan, frames, left
        self.trace = without_ends(recorded.trace, plan.host_steps)
        self.actions: list[Sequence[Action]] = [()] * (len(keys) + 1)
        self.last_in: dict[int, int] = {}
        names, last_use = recorded.keys, _last_uses(recorded)
        pages = -(-recorded.trace.tensor_bytes // recorded.trace.page_size)
        found: dict[int, list[Action]] = {}
        for index, move in enumerate(plan.moves):
            key = names[move.tensor]
            if move.action == "in":
                self.last_in[key] = index
                if key < 0 and move.issue_op > last_use[move.tensor]:
                    continue  # it would come only to die
            action = Action(
                move.action, move.tier, key, move.first_page, move.page_count,
                layout.ins.get(index, ANYWHERE), int(pages[move.tensor]),
            )  # fmt: skip
            found.setdefault(recorded.position[move.issue_op], []).append(action)
        for op, tensor, base in layout.shifts:
            count = int(pages[tensor])
            action = Action("shift", "device", names[tensor], 0, count, base, count)
            found.setdefault(recorded.position[op], []).append(action)
        self.parted: set[int] = set()
        for where, actions in found.items():
            self.actions[where] = actions
            self.parted.update(action.key for action in actions if action.pages < action.of)
        self.next_actions = [len(self.actions)] * (len(self.actions) + 1)
        for where in reversed(range(len(self.actions))):
            self.next_actions[where] = (
                where if self.actions[where] else self.next_actions[where + 1]
            )
        self.births = {names[tensor]: base for tensor, base in layout.births.items()}
        self.start = {names[tensor]: base for tensor, base in layout.start.items()}
        self.away = [Away(names[run.tensor], *run[1:]) for run in plan.start]
        self.hosted = {recorded.position[op]: n for n, op in enumerate(plan.host_steps)}

    @property
    def predicted_us(self) -> float:
        """Iteration time that the machine model gives."""
        assert self.plan.predicted is not None
        return self.plan.predicted.iteration_us

    @property
    def ideal_us(self) -> float:
        """The part of it in which nothing waits."""
        assert self.plan.predicted is not None
        return self.plan.predicted.ideal_us


def _last_uses(recorded: Recorded) -> dict[int, int]:
    """Last op that uses each tensor's contents."""
    trace = recorded.trace
    uses = zip(trace.access_op.tolist(), trace.access_tensor.tolist())
    return {tensor: op for op, tensor in uses if op not in recorded.frees}
