"""In the spirit of AppObMem (Li et al., "An Application-oblivious Memory Scheduling System for DNN
Accelerators", TACO 2022; abstract read, its definitions and tables recalled at best).

What the abstract says, and how it is carried out here:

- *application-oblivious*: only when tensors are used and how large they are counts; no op names, no
  graph, no difference between parameters and activations
- *iterative* and *regular*: one iteration stands for all, gaps around its end included
- *extremalization*: the load rises to extremes, and relieving these is what counts. The highest
  extreme over the limit is looked at first, and what is idle across it goes out. Among those whose
  way out and in is hidden by their idle time, the one that relieves the most extremes (pages ×
  extremes over the limit inside the gap) is taken; if there is none, the one that lacks least.
  Then the next extreme, until all are under the limit.

A victim goes out right after its last use, to the host, and comes back in time for its next.
"""

from __future__ import annotations

import numpy as np

from ..hardware import Hardware
from ..plan import Plan
from ..trace import Bools, Ints, Trace
from .autoswap import absence_us, latest_in_ops, spans
from .whole import (
    Decision,
    Room,
    WholeGaps,
    build,
    check_possible,
    prefetch,
    refuse_if_over,
    relieve,
    whole_gaps,
)


def plan(trace: Trace, hardware: Hardware) -> Plan:
    """Raises ``PolicyRefusal`` if an extreme stays over the limit with all its victims gone."""
    check_possible(trace, hardware, "appobmem")
    room = Room(trace, hardware)
    gaps = whole_gaps(trace, hardware.page_size)
    decisions = _relieve(trace, hardware, gaps, room)
    refuse_if_over(
        room, hardware, "appobmem", f"with {len(decisions)} of {len(gaps)} idle intervals used"
    )
    return build(
        trace,
        hardware,
        "appobmem",
        prefetch(room, decisions, latest_in_ops(trace, hardware, decisions)),
    )


def extremes(load: Ints, limit: float) -> Ints:
    """Ops at which the load, seen as a circle, is over ``limit`` and no neighbour is higher; of
    equals next to each other the first."""
    before, after = np.roll(load, 1), np.roll(load, -1)
    tops = (load > limit) & (load > before) & (load >= after)
    if not tops.any() and load.max(initial=0) > limit:
        tops[int(load.argmax())] = True
    return np.flatnonzero(tops)


def _relieve(trace: Trace, hardware: Hardware, gaps: WholeGaps, room: Room) -> list[Decision]:
    slack = absence_us(trace, hardware, gaps)

    def best(still_open: Bools) -> int | None:
        load = room.used["device"]
        victims = np.flatnonzero(still_open & spans(gaps, int(load.argmax()), trace.ops))
        if not len(victims):
            return None
        relief = gaps.pages[victims] * _inside(gaps, victims, extremes(load, hardware.device_pages))
        score = np.where(slack[victims] >= 0, relief, slack[victims])
        return int(victims[score.argmax()])

    return relieve(gaps, room, best)


def _inside(gaps: WholeGaps, which: Ints, tops: Ints) -> Ints:
    """How many of the ops ``tops`` lie inside each of the gaps ``which``; at least 1."""
    first = np.searchsorted(tops, gaps.last_op[which] + 1)
    return np.asarray(np.maximum(np.searchsorted(tops, gaps.next_op[which]) - first, 1))
