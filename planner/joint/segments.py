"""What to choose in a trace of accesses: steps for the host, and segments to run again as a whole.

The ops of such a trace are a pager's accesses. Those that are an optimizer's step, and could be the
host's, have a ``host_us``; which ones the host takes the joint program says (:func:`plan_steps`).
Those that are called ``HOSTED`` the host takes in any case.

What goes from one op to the next outside of pages is not in the trace, so no single op can be made
again, but a segment whose inputs are kept can: what it makes for later ops is then made right
before these. The trace in which some segments do that is a trace like any other (:func:`again`),
and the linear program says what it takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ..errors import InfeasibleBudget, PagerError, PolicyRefusal
from ..hardware import Hardware
from ..lp.policy import bound
from ..lp.policy import plan as plan_moves
from ..lp.program import Unsolved
from ..plan import Plan
from ..trace import Segment, Trace
from ..trace_check import number_by_appearance
from .decided import MOST_STEPS, Decisions, Planner
from .options import HOSTED, Uses, find_units, without_ends
from .policy import Bounds
from .policy import plan as plan_jointly

OPS_A_STEP = 3  # of a program with longer steps
SHARES = (0.25, 0.5, 0.75, 1.0)  # of the blocks: which ones is taken evenly from first to last
WORTH = 0.97  # of the iteration's time without, at most


def plan_steps(trace: Trace, hardware: Hardware, *, quick: bool) -> tuple[Trace, Plan]:
    """The fastest plan of moves and host steps, and the trace that it is of: where a gradient that
    the host has used dies is no access any more, for its pages are not on the device then.

    Raises ``InfeasibleBudget`` and ``PolicyRefusal`` as ``lp`` does."""
    refusal: PagerError | None = None
    found: list[tuple[Trace, Plan]] = []
    every = [op for op in range(trace.ops) if not np.isnan(trace.op_host_us[op])]
    forced = [op for op in every if trace.op_names[op] == HOSTED]
    if not forced:
        try:
            found.append((trace, plan_moves(trace, hardware, quick=quick)))
        except (InfeasibleBudget, PolicyRefusal) as error:
            refusal = error
    least = 0.0
    if every and hardware.host_pages:
        ended = without_ends(trace, every)
        free = None if forced else _chosen(ended, hardware, quick)
        if free is not None and free.bound is not None:
            least = free.bound.iteration_us
        else:
            least = _least_us(ended, hardware)
        chosen = forced or (free.host_steps if free is not None else [])
        mine = without_ends(trace, chosen)
        if free is not None and len(chosen) == len(every):  # then it is a plan of that too
            found.append((mine, free))
        found += [(mine, plan) for plan in _with_steps(mine, hardware, chosen)]
    if not found:  # what is forced does not fit
        if refusal is not None:
            raise refusal
        found.append((trace, plan_moves(trace, hardware, quick=quick)))
    best, plan = min(found, key=lambda pair: _us(pair[1]))
    return best, plan.bounded(least) if least else plan


def _us(plan: Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.iteration_us


def _chosen(trace: Trace, hardware: Hardware, quick: bool) -> Plan | None:
    try:
        allow = ("move", "host-step")
        return plan_jointly(trace, hardware, allow=allow, quick=quick, workers=1)
    except (InfeasibleBudget, PolicyRefusal):
        return None


def _with_steps(trace: Trace, hardware: Hardware, steps: Sequence[int]) -> list[Plan]:
    """By programs of one op a step, and of several, whose plans have fewer and larger moves."""
    uses = Uses(trace)
    units = [unit for unit in find_units(trace, uses) if set(unit.ops) <= set(steps)]
    found = []
    for most in dict.fromkeys((MOST_STEPS, min(MOST_STEPS, trace.ops // OPS_A_STEP))):
        planner = Planner(trace, hardware, uses, lambda what, share: None, most_steps=most)
        made = planner.plan(Decisions((), units)) if units else None
        found += [made.plan] if made is not None else []
    return found


class Again(NamedTuple):
    """Blocks to run again, and what an iteration takes then by the linear program's plan."""

    blocks: list[str]
    iteration_us: float


def spread(trace: Trace, count: int) -> list[str]:
    """So many blocks of ``trace``, evenly from first to last."""
    blocks = list(dict.fromkeys(segment.name for segment in trace.segments))
    return [blocks[i * len(blocks) // count] for i in range(count)]


def choose(trace: Trace, hardware: Hardware, before: float) -> Again | None:
    """The share of the trace's blocks with which an iteration is fastest, if it is faster than
    ``before``: the µs of a plan in which none runs again, ``inf`` where there is none."""
    if not trace.segments or before * WORTH <= trace.ideal_us:
        return None
    blocks = len({segment.name for segment in trace.segments})
    best, chosen = before * WORTH, list[str]()
    for share in SHARES:
        some = spread(trace, round(share * blocks))
        if not some:
            continue
        tried = again(trace, some)
        if tried.ideal_us >= best:
            continue
        try:
            least = least_us(tried, hardware)
        except PagerError:  # what a segment uses does not fit beside what is there then
            continue
        if least < best:
            best, chosen = least, some
    if not chosen:
        return None
    try:
        _, found = plan_steps(again(trace, chosen), hardware, quick=True)
    except PagerError:
        return None
    if found.predicted is None or found.predicted.iteration_us > before * WORTH:
        return None
    return Again(chosen, found.predicted.iteration_us)


def least_us(trace: Trace, hardware: Hardware) -> float:
    """No plan of moves, and host steps where there are any, is faster."""
    if np.isnan(trace.op_host_us).all():
        return bound(trace, hardware, quick=True)
    steps = np.flatnonzero(~np.isnan(trace.op_host_us)).tolist()
    least = _least_us(without_ends(trace, steps), hardware)
    if not least:
        raise PolicyRefusal("joint: what these blocks use as they run again does not fit")
    return least


def _least_us(trace: Trace, hardware: Hardware) -> float:
    """The same of a trace without those ends; 0 where nothing runs."""
    try:
        best = Bounds(trace).best(hardware, ("move", "host-step"))
    except Unsolved:
        return float(trace.op_duration_us[np.isnan(trace.op_host_us)].sum())
    return best.iteration_us if best is not None else 0.0


def again(trace: Trace, blocks: list[str]) -> Trace:
    """``trace`` with the segments of ``blocks`` run once more, each before the first op that uses
    what it makes, and not keeping that the first time, but for what the next one uses."""
    starts = trace.access_offsets.tolist()
    columns = trace.access_tensor.tolist(), trace.access_mode.tolist()
    rows = list(zip(*columns))
    of_op = [rows[begin:end] for begin, end in pairwise(starts)]
    first, last = trace.first_op.tolist(), trace.last_op.tolist()
    before: dict[int, list[Segment]] = {}
    dropped: set[tuple[int, int]] = set()  # (op, tensor) of the first run
    kept = trace.between_segments()
    for segment in trace.segments:
        made = set(trace.made_by(segment).tolist()) - kept
        if segment.name not in blocks or not made:
            continue
        inside = range(segment.first_op, segment.last_op + 1)
        dropped |= {(op, t) for op in inside for t, _ in of_op[op] if t in made}
        later = range(segment.last_op + 1, trace.ops)
        due = next(op for op in later if any(t in made for t, _ in of_op[op]))
        before.setdefault(due, []).append(segment)
    ops: list[tuple[int, list[tuple[int, int]]]] = []  # the op it was, and its accesses
    sources = list(range(trace.tensors))  # of each tensor, the one that it is a copy of
    for op in range(trace.ops):
        for segment in before.get(op, ()):
            copies: dict[int, int] = {}  # of what the segment needs only while it runs
            for source in range(segment.first_op, segment.last_op + 1):
                accesses = []
                for tensor, mode in of_op[source]:
                    inside = segment.first_op <= first[tensor] and last[tensor] <= segment.last_op
                    if inside and not trace.tensor_persistent[tensor]:
                        if tensor not in copies:
                            copies[tensor] = len(sources)
                            sources.append(tensor)
                        tensor = copies[tensor]
                    accesses.append((tensor, mode))
                ops.append((source, accesses))
        ops.append((op, [(t, mode) for t, mode in of_op[op] if (op, t) not in dropped]))
    order = np.array([op for op, _ in ops], np.int64)
    table = np.array(
        [(k, t, m) for k, (_, accesses) in enumerate(ops) for t, m in accesses], np.int64
    ).reshape(-1, 3)
    index, met = number_by_appearance(table[:, 1])
    tensors = np.array(sources, np.int64)[table[met, 1]]
    us = trace.op_duration_us[order]
    nbytes = trace.tensor_bytes[tensors]
    return replace(
        trace,
        op_names=[trace.op_names[op] for op in order.tolist()],
        op_start_us=np.concatenate([[0.0], np.cumsum(us)[:-1]]),
        op_duration_us=us,
        tensor_ids=np.arange(len(tensors), dtype=np.int64),
        tensor_names=[trace.tensor_names[t] for t in tensors.tolist()],
        tensor_bytes=nbytes,
        tensor_kinds=[trace.tensor_kinds[t] for t in tensors.tolist()],
        tensor_persistent=trace.tensor_persistent[tensors],
        access_op=table[:, 0].copy(),
        access_tensor=index,
        access_mode=table[:, 2].astype(np.int8),
        access_first_page=np.zeros(len(table), np.int64),
        access_page_count=(-(-nbytes // trace.page_size))[index],
        op_rerun=np.zeros(len(ops), np.bool_),
        op_host_us=trace.op_host_us[order],
        segments=(),
    )
