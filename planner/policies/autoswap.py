"""AutoSwap (Zhang et al., "Efficient Memory Management for GPU-based Deep Learning Systems",
arXiv 1903.06631, 2019; read in the authors' code).

Candidates are tensors of at least 1 MiB that are idle across the load peak. They are taken in the
order of a score until the load is under the limit, which here is the device budget:

- doa, duration of absence: idle time less the time out and the time in
- aoa, area of absence: doa × bytes if doa ≥ 0, else doa / bytes
- wdoa, weighted: the sum, over the ops of the absence, of load less limit
- swdoa, submodular: wdoa on the load that the candidates taken so far leave

Outs go in the order of the last use, one after another; ins are timed from the end backwards, by
next use falling, each as late as possible. Host only; the host copy is given back with the `in`.

Where ours differs: transfer times come from the hardware instead of the authors' fitted line; loads
count per op instead of per memory event; a persistent tensor's absence around the iteration's end
counts as a candidate; where an `in` finds no room as early as timed, it is issued later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np

from ..errors import PolicyRefusal
from ..hardware import Hardware
from ..plan import Plan
from ..trace import Bools, Floats, Ints, Trace
from .whole import (
    Clock,
    Decision,
    Room,
    WholeGaps,
    build,
    check_possible,
    prefetch,
    refuse_if_over,
    relieve,
    transfer_us,
    whole_gaps,
)

Score = Literal["doa", "aoa", "wdoa", "swdoa"]
SCORES: tuple[Score, ...] = ("doa", "aoa", "wdoa", "swdoa")
MIN_BYTES = 1 << 20


def plan(
    trace: Trace, hardware: Hardware, *, score: Score = "swdoa", min_bytes: int = MIN_BYTES
) -> Plan:
    """Raises ``PolicyRefusal`` if all candidates together do not bring the load under the limit."""
    name = f"autoswap-{score}"
    check_possible(trace, hardware, name)
    room = Room(trace, hardware)
    decisions: list[Decision] = []
    if room.excess > 0:
        gaps = candidates(trace, hardware, room, min_bytes)
        scorer = _scorer(trace, hardware, gaps, score)

        def best(still_open: Bools) -> int | None:
            scores = np.where(still_open, scorer(room.used["device"]), -np.inf)
            return int(scores.argmax()) if still_open.any() else None

        decisions = relieve(gaps, room, best)
        refuse_if_over(room, hardware, name, f"after {len(decisions)} of {len(gaps)} candidates")
        decisions.sort(key=lambda decision: decision.last_op)
        wanted = latest_in_ops(trace, hardware, decisions)
        decisions = prefetch(room, decisions, wanted)
    return build(trace, hardware, name, decisions)


def candidates(trace: Trace, hardware: Hardware, room: Room, min_bytes: int) -> WholeGaps:
    """Gaps of large tensors in which the device is fullest."""
    gaps = whole_gaps(trace, hardware.page_size)
    return gaps.pick(
        spans(gaps, int(room.used["device"].argmax()), trace.ops)
        & (trace.tensor_bytes[gaps.tensor] >= min_bytes)
    )


def spans(gaps: WholeGaps, op: int, ops: int) -> Bools:
    """Which gaps have ``op`` strictly inside, in this iteration or the next."""
    now = (gaps.last_op < op) & (op < gaps.next_op)
    then = (gaps.last_op < op + ops) & (op + ops < gaps.next_op)
    return now | then


def absence_us(trace: Trace, hardware: Hardware, gaps: WholeGaps) -> Floats:
    """Idle time less the times out to and in from the host, per gap."""
    clock = Clock(trace)
    idle: Floats = clock.start_us[gaps.next_op] - clock.end_us[gaps.last_op]
    out_us = transfer_us(hardware, "host", "out", gaps.pages)
    return idle - out_us - transfer_us(hardware, "host", "in", gaps.pages)


def weighted_absence(gaps: WholeGaps, load: Ints, limit: float) -> Floats:
    """Sum of load − limit over ops last_op ≤ j < next_op, per gap, in pages."""
    over = np.concatenate([[0.0], np.cumsum(np.tile(load - limit, 2))])
    return np.asarray(over[gaps.next_op] - over[gaps.last_op])


def _scorer(
    trace: Trace, hardware: Hardware, gaps: WholeGaps, score: Score
) -> Callable[[Ints], Floats]:
    """What gives the gaps' scores for a load in pages; only those of swdoa depend on it."""
    limit = hardware.device_pages
    if score == "swdoa":
        return lambda load: weighted_absence(gaps, load, limit)
    if score == "wdoa":
        fixed = weighted_absence(gaps, Room(trace, hardware).used["device"], limit)
    elif score in ("doa", "aoa"):
        fixed = absence_us(trace, hardware, gaps)
        if score == "aoa":
            nbytes = trace.tensor_bytes[gaps.tensor]
            fixed = np.where(fixed >= 0, fixed * nbytes, fixed / nbytes)
    else:
        raise PolicyRefusal(f"autoswap: no score '{score}' (known: {', '.join(SCORES)})")
    return lambda load: fixed


def latest_in_ops(trace: Trace, hardware: Hardware, decisions: list[Decision]) -> list[int]:
    """For each decision the latest op at which its `in` can be issued to be in time, if nothing
    waits and ins pass one after another in each tier."""
    clock = Clock(trace)
    pages = trace.pages(hardware.page_size)
    busy_from = {"host": np.inf, "disk": np.inf}
    wanted = [0] * len(decisions)
    order = sorted(range(len(decisions)), key=lambda n: -decisions[n].next_op)
    for n in order:
        decision = decisions[n]
        end = min(float(clock.start_us[decision.next_op]), busy_from[decision.tier])
        length = float(transfer_us(hardware, decision.tier, "in", pages[decision.tensor]))
        busy_from[decision.tier] = end - length
        wanted[n] = clock.op_before(end - length)
    return wanted
