"""What a trace needs and how fast it can be on a machine, by bounds alone: seconds, and no plan."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from .buckets import shortened, updates_in_slabs
from .hardware import Hardware
from .joint.policy import ALLOWED, Best, Bounds
from .lifetimes import live_bytes_by_kind, live_pages, working_set_pages
from .lp.program import Unsolved
from .repeats import Repeats
from .trace import Trace

BUCKETS = 400  # ops that bounds are computed for
BUDGETS = 4
Choices = tuple[str, ...]
MECHANISMS: dict[str, Choices] = {
    "moves": ("move",),
    "moves, recomputing": ("move", "recompute"),
    "moves, host steps": ("move", "host-step"),
    "all three": ALLOWED,
}


@dataclass(frozen=True)
class Point:
    """A machine, and the fastest that anything can be on it; ``None`` where nothing runs."""

    hardware: Hardware
    best: Best | None


@dataclass(frozen=True)
class Outlook:
    """``need_bytes``: most that there is at once of each kind, without paging; ``peak_bytes`` of
    all, in whole pages. ``smallest_bytes``: the device budget below which some op does not run.
    ``points``: budgets from large to small; ``mechanisms``: bounds at the largest of them;
    ``with_disk``: the same with half of the host memory that is needed, and a disk."""

    ideal_us: float
    need_bytes: dict[str, int]
    peak_bytes: int
    smallest_bytes: int
    smallest_op: str
    fits: bool
    points: list[Point]
    mechanisms: dict[str, Best | None]
    with_disk: Point | None
    budgets: dict[str, int]


def outlook(
    trace: Trace,
    hardware: Hardware,
    progress: Callable[[str, float], None] | None = None,
    *,
    speeds: bool = True,
    repeats: Repeats | None = None,
    batches: int = 1,
) -> Outlook:
    """Bounds, if ``speeds`` are asked for, are for the trace in ``BUCKETS`` ops, if it has more.

    ``batches``: that are added up before a step, of which ``repeats`` are all but the first one in
    the trace. Times are those of one batch and its step then, and for each further one what it
    takes in a row of them."""
    progress = progress or (lambda what, share: None)
    page = hardware.page_size
    peak = int(live_pages(trace, page).max(initial=0)) * page
    slabs = updates_in_slabs(trace)
    working = working_set_pages(slabs, page)
    smallest = int(working.max(initial=0)) * page
    parts = [(1, trace)]
    if repeats is not None:
        parts = [(1, repeats.fewer(0).trace), (batches - 1, repeats.one())]
    top = int(min(hardware.device_bytes, peak) // page * page)
    fits, runs = top >= peak, top >= smallest
    points: list[Point] = []
    mechanisms: dict[str, Best | None] = {}
    with_disk = None
    if runs and not fits and speeds:
        budgets = _budgets(top, smallest, page)
        asked: list[tuple[Hardware, Choices]]
        asked = [(hardware.with_(device_bytes=budget), ALLOWED) for budget in budgets]
        largest = asked[0][0]
        asked += [(largest, allow) for allow in MECHANISMS.values() if allow != ALLOWED]
        half = (peak - top) // 2 // page * page
        if hardware.disk_bytes and half:
            asked.append((largest.with_(host_bytes=half), ALLOWED))
        found = _solved(parts, asked, progress)
        everything = [
            Point(at, best) for (at, allow), best in zip(asked, found) if allow == ALLOWED
        ]
        points = [point for point in everything if point.hardware.host_bytes == hardware.host_bytes]
        with_disk = next((p for p in everything if p not in points), None)
        by_choice = {allow: best for (at, allow), best in zip(asked, found) if at == largest}
        mechanisms = {name: by_choice[allow] for name, allow in MECHANISMS.items()}
    host = int(min(hardware.host_bytes, peak) // page * page)
    return Outlook(
        sum(times * part.ideal_us for times, part in parts),
        _need(trace),
        peak,
        smallest,
        slabs.op_names[int(working.argmax())] if trace.ops else "",
        fits,
        points,
        mechanisms,
        with_disk,
        {
            "device": top,
            "host": 0 if fits else host,
            "disk": 0 if fits else int(min(hardware.disk_bytes, peak - host)),
        },
    )


def _solved(
    parts: list[tuple[int, Trace]],
    asked: list[tuple[Hardware, Choices]],
    progress: Callable[[str, float], None],
) -> list[Best | None]:
    """What ``parts`` take, each so many times. Side by side: the solver runs outside of Python's
    lock."""
    bounds = [(times, Bounds(shortened(part, BUCKETS))) for times, part in parts]

    def solve(task: tuple[Hardware, Choices]) -> Best | None:
        total = Best(0.0)
        for times, bound in bounds:
            try:
                best = bound.best(*task)
            except Unsolved:
                return None
            if best is None:
                return None
            total = Best(
                total.iteration_us + times * best.iteration_us,
                total.recompute_us + times * best.recompute_us,
                total.host_us + times * best.host_us,
            )
        return total

    found = []
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        for number, best in enumerate(pool.map(solve, asked)):
            progress("bounds", (number + 1) / len(asked))
            found.append(best)
    return found


def _budgets(top: int, least: int, page: int) -> list[int]:
    """Evenly from ``top`` down to ``least``, each once."""
    shares = np.linspace(1.0, 0.0, BUDGETS)
    sizes = [least + math.floor((top - least) * share / page) * page for share in shares]
    return list(dict.fromkeys(sizes))


def _need(trace: Trace) -> dict[str, int]:
    """Bytes, not pages."""
    live = live_bytes_by_kind(trace, 1)
    always = dict.fromkeys(["parameter", "gradient", "optimizer", "activation"], 0)
    return always | {kind: int(level.max(initial=0)) for kind, level in live.items()}
