"""A trace that is too long to be planned, planned in fewer ops.

Of micro-batches that are all alike a few are planned (``repeats.py``). Where that is not enough,
neighbouring ops are joined, as for bounds, and so are tensors that these use alike: there are as
many weights and activations as a planner can tell apart. Its plan is one for the long trace, too,
where moves of a tensor's pages are those of the tensors that it stands for, and what is queued,
runs again or is the host's at one of its ops is so at the ops in its place.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from .buckets import blocks_of, even_groups, groups_of, join, kinds_of
from .errors import InfeasibleBudget, PolicyRefusal
from .hardware import Hardware
from .plan import Move, Plan, Recompute, StartRun
from .repeats import find_repeats
from .simulator import simulate
from .trace import Segment, Trace

Search = Callable[[Trace], Plan]
LONG_OPS, SHORT_OPS = 3000, 2400  # more are planned in so many
# That are planned: what the first and the last one do is theirs alone, and all that is done again
# is done by some of the others.
FEWEST_REPEATS, MOST_REPEATS, REPEATED_OPS = 4, 8, 1500
SEARCHED_OPS = 12_000  # of so many all are planned, too, in minutes, where that is not enough


def plan_shorter(trace: Trace, hardware: Hardware, search: Search) -> Plan | None:
    """What ``search`` plans for a shorter trace, as a plan for this one, with what it takes there.
    ``None`` if the trace is not long, or nothing comes of it: all that joined ops use one after the
    other has to fit at once in the shorter one."""
    if trace.ops <= LONG_OPS:
        return None
    for candidates in (_with_fewer_repeats, _with_joined_ops):
        for given in candidates(trace, hardware, search):
            simulation = simulate(trace, hardware, given)
            if simulation.predicted is not None:
                return replace(given, predicted=simulation.predicted)
    return None


def _with_fewer_repeats(trace: Trace, hardware: Hardware, search: Search) -> Iterator[Plan]:
    repeats = find_repeats(trace)
    if repeats is None:
        return
    others = trace.ops - repeats.count * repeats.period
    count = min(max(FEWEST_REPEATS, (REPEATED_OPS - others) // repeats.period), MOST_REPEATS)
    if count < repeats.count:
        fewer = repeats.fewer(count)
        made = _found(search, fewer.trace)
        given = made and fewer.plan(made)
        if given is not None:
            yield given


def _with_joined_ops(trace: Trace, hardware: Hardware, search: Search) -> Iterator[Plan]:
    short = shorter(trace, hardware.page_size, SHORT_OPS)
    if short.trace.ops <= LONG_OPS and (made := _found(search, short.trace)) is not None:
        for late in (False, True):
            yield short.plan(made, late=late)


def _found(search: Search, trace: Trace) -> Plan | None:
    with suppress(InfeasibleBudget, PolicyRefusal):
        return search(trace)
    return None


@dataclass(frozen=True, eq=False)
class Shorter:
    """``trace``: another in fewer ops, with one tensor in the place of those that these use alike.
    Where a plan for it fits, so does what :meth:`plan` makes of it: an op needs at once what the
    ops that it stands for need one after the other.

    ``first_op`` and ``last_op`` of the other that each op stands for; ``parts`` of each tensor, by
    its number: numbers of the other's, and where the pages of each begin.
    """

    trace: Trace
    first_op: list[int]
    last_op: list[int]
    parts: dict[int, tuple[list[int], list[int]]]
    sha256: str

    def plan(self, plan: Plan, *, late: bool = False) -> Plan:
        """For the other trace, without what it takes there. A bound, and notes that tell of it, are
        for this one alone. Updates that are deferred, as no policy has any, are not known here.

        ``late``: what comes in is queued with the last of the ops that one stands for, unless they
        use it. Before, it may take a frame that one of them needs.
        """
        hosted = [
            op
            for step in plan.host_steps
            for op in range(self.first_op[step], self.last_op[step] + 1)
        ]
        again = [
            Recompute(self.first_op[first], self.last_op[last], self.first_op[before])
            for first, last, before in plan.recompute
        ]
        moves = [
            Move(*run, move.tier, move.action, op)
            for move, op in zip(plan.moves, self._issued(plan.moves, late))
            for run in self._runs(move.tensor, move.first_page, move.page_count)
        ]
        start = [
            StartRun(*run, each.tier)
            for each in plan.start
            for run in self._runs(each.tensor, each.first_page, each.page_count)
        ]
        return replace(
            plan,
            moves=sorted(moves, key=lambda move: move.issue_op),
            start=sorted(start),
            recompute=again,
            host_steps=hosted,
            trace_sha256=self.sha256,
            predicted=None,
            bound=None,
            extra={key: value for key, value in plan.extra.items() if key != "notes"},
        )

    def _issued(self, moves: Sequence[Move], late: bool) -> Iterator[int]:
        """The op of the other trace at which each is queued."""
        trace = self.trace
        numbers = trace.tensor_ids[trace.access_tensor].tolist()
        used = set(zip(trace.access_op.tolist(), numbers))
        behind: set[tuple[int, int]] = set()  # what follows such a move of the same tensor, too
        for move in moves:
            place = move.issue_op, move.tensor
            if late and move.action == "in" and place not in used:
                behind.add(place)
            yield (self.last_op if place in behind else self.first_op)[move.issue_op]

    def _runs(self, tensor: int, first: int, count: int) -> Iterator[tuple[int, int, int]]:
        """The same pages as those of the other trace's tensors: number, first page, pages."""
        numbers, begins = self.parts[tensor]
        place = bisect.bisect(begins, first) - 1
        while count:
            begin = first - begins[place]
            some = min(count, begins[place + 1] - first)
            yield numbers[place], begin, some
            first, count, place = first + some, count - some, place + 1


def shorter(trace: Trace, page_size: int, most_ops: int) -> Shorter:
    """In about ``most_ops`` ops; ``page_size`` of the plans."""
    blocks = blocks_of(trace)
    kinds, whole = kinds_of(trace, blocks), True
    if not _suffice(trace, kinds, most_ops):
        kinds, whole = kinds_of(trace), False
    if not _suffice(trace, kinds, most_ops):  # neighbours of which some may not run again
        kinds = (~np.isnan(trace.op_host_us)).tolist()
    groups = even_groups(trace, kinds, most_ops)
    took_us = trace.op_duration_us.tolist()
    # As they were called: those of a pager are known by name.
    names = [trace.op_names[max(ops, key=took_us.__getitem__)] for ops in groups]
    joined = join(trace, groups, names, page_size, math.inf)
    joined = _in_part(joined, trace, groups)
    if not whole:
        segments = tuple(
            Segment(number, number, trace.segments[blocks[ops[0]][0]].name)
            for number, ops in enumerate(groups)
            if all(blocks[op] for op in ops)
        )
        joined = replace(joined, segments=segments)
    made, members = _alike(joined)
    numbers, pages = trace.tensor_ids.tolist(), joined.pages(page_size).tolist()
    parts = {}
    for number, tensors in zip(made.tensor_ids.tolist(), members):
        ids = joined.tensor_ids[tensors].tolist()  # places in ``trace``, or a workspace
        begins = np.cumsum([0, *(pages[tensor] for tensor in tensors)]).tolist()
        parts[number] = [numbers[i] if i < len(numbers) else -1 for i in ids], begins
    first, last = [ops[0] for ops in groups], [ops[-1] for ops in groups]
    return Shorter(made, first, last, parts, trace.sha256)


def _suffice(trace: Trace, kinds: list[Any], most_ops: int) -> bool:
    """Whether so many ops are twice what there are if all neighbours of a kind are joined."""
    return 2 * len(groups_of(trace, kinds, trace.ideal_us)) <= most_ops


def _in_part(joined: Trace, trace: Trace, groups: list[list[int]]) -> Trace:
    """Tensors whose ops use a part of them: from the first page that any of a bucket's ops uses to
    the last one."""
    at = np.repeat(np.arange(len(groups)), [len(ops) for ops in groups])
    first, end = trace.access_ranges(joined.page_size)
    places = at[trace.access_op] * trace.tensors + trace.access_tensor
    known, index = np.unique(places, return_inverse=True)
    low, high = np.full(len(known), np.iinfo(np.int64).max), np.zeros(len(known), np.int64)
    np.minimum.at(low, index, first)
    np.maximum.at(high, index, end)
    tensor = joined.tensor_ids[joined.access_tensor]
    mine = tensor < trace.tensors
    row = np.searchsorted(known, (joined.access_op * trace.tensors + tensor)[mine])
    first_page, page_count = joined.access_first_page.copy(), joined.access_page_count.copy()
    first_page[mine], page_count[mine] = low[row], (high - low)[row]
    return replace(joined, access_first_page=first_page, access_page_count=page_count)


def _alike(trace: Trace) -> tuple[Trace, list[list[int]]]:
    """With one tensor for all that the same ops access in the same way, each as a whole; and which
    ones each stands for."""
    page_size = trace.page_size
    pages = trace.pages(page_size)
    whole = np.ones(trace.tensors, np.bool_)
    whole[trace.access_tensor[trace.access_page_count < pages[trace.access_tensor]]] = False
    order = np.argsort(trace.access_tensor, kind="stable")
    ops, modes = trace.access_op[order], trace.access_mode[order]
    edges = np.searchsorted(trace.access_tensor[order], np.arange(trace.tensors + 1)).tolist()
    found: dict[tuple[Any, ...], list[int]] = {}
    for tensor, (begin, end) in enumerate(pairwise(edges)):
        key: tuple[Any, ...] = (tensor,)
        if whole[tensor]:
            lasting = bool(trace.tensor_persistent[tensor])
            used = ops[begin:end].tobytes(), modes[begin:end].tobytes()
            key = trace.tensor_kinds[tensor], lasting, *used
        found.setdefault(key, []).append(tensor)
    members = list(found.values())
    first = np.array([tensors[0] for tensors in members], np.int64)
    place = np.full(trace.tensors, -1, np.int64)
    place[first] = np.arange(len(first))
    kept = place[trace.access_tensor] >= 0
    together = [int(pages[tensors].sum()) * page_size for tensors in members]
    single = [len(tensors) == 1 for tensors in members]
    nbytes = np.where(single, trace.tensor_bytes[first], together).astype(np.int64)
    index = place[trace.access_tensor[kept]]
    count = np.where(whole[first], -(-nbytes // page_size), 0)[index]
    made = replace(
        trace,
        tensor_ids=np.arange(len(first), dtype=np.int64),
        tensor_names=[trace.tensor_names[tensor] for tensor in first.tolist()],
        tensor_bytes=nbytes,
        tensor_kinds=[trace.tensor_kinds[tensor] for tensor in first.tolist()],
        tensor_persistent=trace.tensor_persistent[first],
        access_op=trace.access_op[kept],
        access_tensor=index,
        access_mode=trace.access_mode[kept],
        access_first_page=trace.access_first_page[kept],
        access_page_count=np.maximum(count, trace.access_page_count[kept]),
    )
    return made, members
