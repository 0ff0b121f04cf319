"""Our packing: cheap orders first, then an exact search on the parts that still miss the goal."""

from __future__ import annotations

import time
from dataclasses import dataclass

from ..trace import Ints
from .buffers import Buffers, Packing, footprint
from .exact import GaveUp
from .greedy import portfolio
from .overlaps import Overlaps
from .problem import Problem
from .restarts import find_packing
from .sections import Sections
from .split import Piece, split

_LARGEST_TABLE = 40_000_000  # buffers × sections that an exact search is tried on (160 MB)
_CLOSE_ENOUGH = 1e-4  # of the footprint: no more searching below that


@dataclass
class _Found:
    """The best so far of one piece: ``floor`` is proven to be needed."""

    offsets: Ints
    footprint: int
    floor: int


def pack(buffers: Buffers, capacity: int | None = None, seconds: float = 60.0) -> Packing:
    """Offsets for ``buffers`` in as few bytes as can be found in about ``seconds``.

    Stops at the first packing that needs no more than ``capacity`` bytes if that is given, else at
    the lower bound. Never worse than SmartPool.
    """
    start = time.perf_counter()
    deadline = start + seconds
    bound = buffers.peak_live_bytes
    goal = bound if capacity is None or capacity < bound else capacity
    offsets, floor = _best_of_portfolio(buffers, goal, deadline), bound
    if footprint(buffers, offsets) > goal:
        share = 0.5 if capacity is None else 1.0
        found, floor = _by_pieces(buffers, goal, deadline, share)
        offsets = min(offsets, found, key=lambda each: footprint(buffers, each))
    needed = footprint(buffers, offsets)
    return Packing("ours", offsets, needed, needed <= floor, time.perf_counter() - start)


def _best_of_portfolio(buffers: Buffers, goal: int, deadline: float) -> Ints:
    """The first that reaches ``goal`` bytes, or the smallest, of those tried in time."""
    best: Ints | None = None
    for offsets in portfolio(buffers, Overlaps(buffers)):
        if best is None or footprint(buffers, offsets) < footprint(buffers, best):
            best = offsets
        if footprint(buffers, best) <= goal or time.perf_counter() > deadline:
            break
    assert best is not None
    return best


def _by_pieces(buffers: Buffers, goal: int, deadline: float, share: float) -> tuple[Ints, int]:
    """Offsets, and a footprint in bytes that no packing goes below."""
    parts = split(buffers)
    offsets = parts.settled.copy()
    floor = buffers.peak_live_bytes
    open_pieces: list[tuple[Piece, Buffers, Ints]] = []
    for piece in parts.pieces:
        inside = buffers.take(piece.which)
        first = _best_of_portfolio(inside, goal - piece.base_bytes, deadline)
        offsets[piece.which] = first + piece.base_bytes
        if footprint(inside, first) + piece.base_bytes > goal:
            open_pieces.append((piece, inside, first))
    # What the worst piece needs in the end, the others may take too.
    open_pieces.sort(key=lambda one: -one[0].base_bytes - footprint(one[1], one[2]))
    for place, (piece, inside, first) in enumerate(open_pieces):
        now = time.perf_counter()
        until = now + (deadline - now) / (len(open_pieces) - place)
        found = _improve(inside, first, goal - piece.base_bytes, until, share=share)
        offsets[piece.which] = found.offsets + piece.base_bytes
        goal = max(goal, found.footprint + piece.base_bytes)
        floor = max(floor, found.floor + piece.base_bytes)
    return offsets, floor


def _improve(
    buffers: Buffers, offsets: Ints, goal: int, deadline: float, *, share: float
) -> _Found:
    """Search for ``goal`` bytes in ``share`` of the time left, then for targets halfway to the
    best, each in the same share of what is left then."""
    found = _Found(offsets, footprint(buffers, offsets), buffers.peak_live_bytes)
    too_large = len(buffers) * Sections(buffers).count > _LARGEST_TABLE
    if too_large or time.perf_counter() >= deadline:
        return found
    problem = Problem(buffers)
    low = target = max(goal, found.floor)  # less than low is not looked for any more
    while target < found.footprint and (now := time.perf_counter()) < deadline:
        try:
            better = find_packing(problem, target, now + (deadline - now) * share)
        except GaveUp:
            low = target + problem.unit
        else:
            if better is None:
                low = found.floor = (target // problem.unit + 1) * problem.unit
            else:
                found.offsets, found.footprint = better, footprint(buffers, better)
        if found.footprint - low <= found.footprint * _CLOSE_ENOUGH:
            break
        target = (low + found.footprint) // 2
    return found
