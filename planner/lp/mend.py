"""What the simulator shows of a plan, mended, as long as that makes it faster.

The program's pages come back while an op runs, in frames that others leave meanwhile. A plan's
moves are queued when the op begins to wait; if it has to wait for frames, they take those that
become free one by one, and the op waits until more have left. Such moves may come an op later.

Nor does a program know when in an op its moves begin: where one waits for what comes in, and the
queue had nothing to do shortly before, what it had to do next may be queued sooner.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from ..hardware import Hardware
from ..plan import Move, Plan
from ..simulation import Simulation
from ..simulator import simulate
from ..trace import Trace

MOST, FEWEST = 20, 4  # simulations
MOST_MOVES = 80_000  # in all of them, beyond which they take more time than they save
SHORTEST_US = 1.0  # a wait that is worth one
# Of the iteration: where all moves that could be sooner leave too few frames, some of them may not.
PARTS = ((0.0, 1.0), (0.0, 0.25), (0.25, 0.5), (0.5, 0.75), (0.75, 1.0))
Mend = Callable[[Plan, Simulation], Plan]


def mended(
    trace: Trace, hardware: Hardware, plan: Plan, simulation: Simulation, mends: Sequence[Mend]
) -> tuple[Plan, Simulation]:
    """``plan``, which runs, or one that is faster, and what the simulator says of it."""
    left = min(MOST, max(FEWEST, MOST_MOVES // (len(plan.moves) + 1)))
    todo = list(mends)
    while todo and left:
        changed = todo.pop(0)(plan, simulation)
        if changed is plan:
            continue
        left -= 1
        result = simulate(trace, hardware, changed, log_transfers=True)
        assert simulation.predicted is not None
        if result.predicted is None:
            continue
        if result.predicted.iteration_us < simulation.predicted.iteration_us:
            plan, simulation = replace(changed, predicted=result.predicted), result
            todo = list(mends)
    return plan, simulation


def put_off(running: Trace) -> Mend:
    """Moves onto the device come an op later where an op that does not use what they bring waits
    for frames. ``running``: the trace, with what is made again in the ops before which that is."""
    using: dict[int, set[int]] = defaultdict(set)  # op → numbers of the tensors that it uses
    numbers = running.tensor_ids[running.access_tensor].tolist()
    for op, number in zip(running.access_op.tolist(), numbers):
        using[op].add(number)

    def mend(plan: Plan, simulation: Simulation) -> Plan:
        waits = {
            stall.op
            for stall in simulation.stalls
            if stall.us > SHORTEST_US
            and stall.channel.endswith("-out")
            and stall.op + 1 < running.ops
        }
        at: dict[int, list[Move]] = defaultdict(list)
        for move in plan.moves:
            at[move.issue_op].append(move)
        late: list[Move] = []
        for op in sorted(waits & at.keys()):
            late = [move for move in at[op] if move.action == "in" and move.tensor not in using[op]]
            brought = {(move.tensor, move.first_page) for move in late}
            late = [
                move
                for move in at[op]
                if (move.tensor, move.first_page) in brought and move.action in ("in", "drop")
            ]
            at[op] = [move for move in at[op] if move not in late]
            at[op + 1] = [*(move._replace(issue_op=op + 1) for move in late), *at[op + 1]]
        moves = [move for op in sorted(at) for move in at[op]]
        return plan if moves == plan.moves else replace(plan, moves=moves)

    return mend


def sooner(running: Trace) -> list[Mend]:
    """Moves onto the device are queued so much sooner as an op waits behind them, or as the queue
    was idle before: all of them, or those of each of ``PARTS``."""
    ops = running.ops
    using: dict[int, list[int]] = defaultdict(list)  # number of a tensor → ops that use it
    numbers = running.tensor_ids[running.access_tensor].tolist()
    for op, number in zip(running.access_op.tolist(), numbers):
        using[number].append(op)

    def mend(part: tuple[float, float], plan: Plan, simulation: Simulation) -> Plan:
        begin, end = part[0] * ops, part[1] * ops
        queued_us, start_us = simulation.queued_us, simulation.op_start_us
        if queued_us is None or start_us is None:
            return plan
        leaving: dict[int, list[int]] = defaultdict(list)
        for move in plan.moves:
            if move.action != "in":
                leaving[move.tensor].append(move.issue_op)
        waits = [
            (float(start_us[stall.op]), stall.us)
            for stall in simulation.stalls
            if stall.us > SHORTEST_US and stall.channel.endswith("-in")
        ]
        new: dict[int, int] = {}  # move → op
        for first in _after_idle(simulation):
            move = plan.moves[first.move]
            idle_us = float(queued_us[move.issue_op]) - first.idle_since_us
            waited = [us for at, us in waits if first.begin_us < at <= first.end_us + SHORTEST_US]
            if idle_us <= 0 or not waited or not begin <= move.issue_op < end:
                continue
            wanted = queued_us[move.issue_op] - min(idle_us, max(waited)) - SHORTEST_US
            before = [op + 1 for op in using[move.tensor] if op < move.issue_op]
            before += [op for op in leaving[move.tensor] if op <= move.issue_op]
            op = int(np.searchsorted(queued_us, wanted, "right")) - 1
            op = max(min(op, move.issue_op - 1), *before, 0)
            if op < move.issue_op:
                new[first.move] = op
        if not new:
            return plan
        moves = [
            move._replace(issue_op=new.get(number, move.issue_op))
            for number, move in enumerate(plan.moves)
        ]
        return replace(plan, moves=sorted(moves, key=lambda move: move.issue_op))

    return [partial(mend, part) for part in PARTS]


class _Busy(NamedTuple):
    """A queue was idle, and then at work without a pause. ``move``: its first."""

    idle_since_us: float
    begin_us: float
    end_us: float
    move: int


def _after_idle(simulation: Simulation) -> list[_Busy]:
    """Of the queues onto the device."""
    found: list[_Busy] = []
    for tier in ("host", "disk"):
        busy: list[_Busy] = []
        for each in sorted(simulation.transfers or (), key=lambda each: each.begin_us):
            if each.is_out or each.tier != tier or not each.arrived:
                continue
            since_us = busy[-1].end_us if busy else 0.0
            if busy and each.begin_us - since_us <= SHORTEST_US:
                busy[-1] = busy[-1]._replace(end_us=max(since_us, each.end_us))
            else:
                busy.append(_Busy(since_us, each.begin_us, each.end_us, each.move))
        found += busy
    return found
