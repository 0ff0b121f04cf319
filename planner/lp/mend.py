"""What the simulator shows of a plan, mended, as long as that makes it faster.

The program's pages come back while an op runs, in frames that others leave meanwhile. A plan's
moves are queued when the op begins to wait; if it has to wait for frames, they take those that
become free one by one, and the op waits until more have left. Such moves may come an op later.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

from ..hardware import Hardware
from ..plan import Move, Plan
from ..simulation import Simulation
from ..simulator import simulate
from ..trace import Trace

MOST = 8  # simulations
SHORTEST_US = 1.0  # a wait that is worth one
Mend = Callable[[Plan, Simulation], Plan]


def mended(
    trace: Trace, hardware: Hardware, plan: Plan, simulation: Simulation, mends: Sequence[Mend]
) -> tuple[Plan, Simulation]:
    """``plan``, which runs, or one that is faster, and what the simulator says of it."""
    left = MOST
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
