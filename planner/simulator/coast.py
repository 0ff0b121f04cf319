"""Pages that nobody waits for arrive together: the simulator's long strides.

Between two instants at which anything else can happen, each moving queue goes on at its pace. The
times are those of going page by page, and so are the fewest free frames on the way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ..simulation import EPSILON_US
from ..trace import Floats, Ints
from .pages import Pages
from .queue import Queue


def coast(
    queues: Sequence[Queue], pages: Pages, limit_us: float, most_out: int | None = None
) -> None:
    """Let pages arrive that nobody can notice before ``limit_us`` or the next other event, and no
    more than ``most_out`` that go out. Every queue that does not move is empty, or waits for its
    latency to be over or for a host step."""
    if most_out is not None:
        limit_us = min(limit_us, _until(most_out, queues))
    moving = []
    for queue in queues:
        event_us = queue.event_us
        if queue.moving:
            moving.append(queue)
            event_us = queue.last_page_us()
        if event_us < limit_us:
            limit_us = event_us
    counts = [queue.pages_before(limit_us) for queue in moving]
    taken = sum(count for queue, count in zip(moving, counts) if not queue.is_out)
    least = pages.free - taken
    if least < pages.least_free:
        ins, needed = _needed(moving, counts)
        short = np.flatnonzero(needed > pages.free)
        if len(short):  # an in that would have to wait for a frame: no further than that
            counts = [queue.pages_before(float(ins[short[0]])) for queue in moving]
            taken = sum(count for queue, count in zip(moving, counts) if not queue.is_out)
            _, needed = _needed(moving, counts)
        least = pages.free - int(needed.max(initial=0))
    if not any(counts):
        return
    if not all(queue.can_coast(count) for queue, count in zip(moving, counts)):
        return
    if pages.drops and _drops_matter(moving, counts, pages):
        return
    pages.least_free = min(pages.least_free, least)
    for queue, count in zip(moving, counts):
        if count:
            queue.coast(count)
    pages.free -= taken


def _until(most_out: int, queues: Sequence[Queue]) -> float:
    """A time before which no more than ``most_out`` pages go out."""
    outs = [queue for queue in queues if queue.is_out and queue.event_us < math.inf]
    each = most_out // max(1, len(outs))
    return min((queue.event_us + each * queue.pace_us for queue in outs), default=math.inf)


def _drops_matter(moving: list[Queue], counts: list[int], pages: Pages) -> bool:
    """Whether the order of drops on the way and of other things could make a difference.

    What comes in is on the device then, so that its copy may go; but slots that are given back
    while pages go out could make the most slots in use fewer than those at the end.
    """
    waiting = pages.drops.keys()
    dropping = False
    for queue, count in zip(moving, counts):
        if not waiting.isdisjoint(queue.next_pages(count)):
            if queue.is_out:
                return True
            dropping = True
    return dropping and any(
        queue.is_out and pages.used[queue.tier] + count > pages.used_peak[queue.tier]
        for queue, count in zip(moving, counts)
    )


def _needed(moving: list[Queue], counts: list[int]) -> tuple[Floats, Ints]:
    """When pages begin to come in while others coast, and how many frames are taken then, less
    those that have become free."""
    ins, outs = (
        np.sort(
            np.concatenate(
                [np.zeros(0)]
                + [q.arrivals_us(n) for q, n in zip(moving, counts) if q.is_out == is_out]
            )
        )
        for is_out in (False, True)
    )
    given = np.searchsorted(outs, ins + EPSILON_US, "right")
    return ins, np.arange(1, len(ins) + 1) - given
