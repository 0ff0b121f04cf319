"""Versions that the program cannot tell apart become one: gaps that begin and end alike.

In long traces with merged steps that is most of them. Pages off the device in a group are given to
its members one after another, in the same order for every gap of the version, so copies fit.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np

from ..trace import Floats, Ints
from .problem import Problem


def grouped(problem: Problem) -> tuple[Problem, Ints]:
    """The problem with one gap for those that match, and each old gap's place in it."""
    gaps = problem.gaps
    starts = np.flatnonzero(np.diff(gaps.version, prepend=-1))
    edges = [*starts.tolist(), len(gaps)]
    begin, end = gaps.begin.tolist(), gaps.end.tolist()
    pages, lasting, kind = gaps.pages.tolist(), gaps.lasting.tolist(), gaps.kind.tolist()
    first_of: dict[tuple[object, ...], int] = {}  # pattern → its first gap in the new problem
    group = np.empty(len(gaps), np.int64)
    kept: list[int] = []
    for a, b in pairwise(edges):
        same_size = len(set(pages[a:b])) == 1
        pattern = (
            tuple(begin[a:b]), tuple(end[a:b]), tuple(kind[a:b]), lasting[a],
            None if same_size else a,
        )  # fmt: skip
        place = first_of.setdefault(pattern, len(kept))
        if place == len(kept):
            kept.extend(range(a, b))
        group[a:b] = np.arange(place, place + b - a)
    if len(kept) == len(gaps):
        return problem, group
    first = np.zeros(len(gaps), bool)
    first[kept] = True
    size = np.bincount(group, weights=gaps.pages).astype(np.int64)
    most: Floats = np.bincount(group, weights=problem.most).astype(np.float64)
    return replace(problem, gaps=replace(gaps.pick(first), pages=size), most=most), group


def shared_out(off: list[Floats], group: Ints, most: Floats) -> list[Floats]:
    """What each group has off, per tier, given to its members one after another: as few members as
    can be are in part off, or in two tiers."""
    order = np.argsort(group, kind="stable")
    mine = group[order]
    room = most[order]
    begins = np.cumsum(room) - room  # within all groups
    begins = begins - begins[np.searchsorted(mine, mine)]  # within the own group
    shares = []
    taken = np.zeros(len(off[0]))
    for part in off:
        low, high = taken[mine], (taken + part)[mine]
        share = np.empty_like(room)
        share[order] = np.clip(np.minimum(high, begins + room) - np.maximum(low, begins), 0, room)
        shares.append(share)
        taken = taken + part
    return shares
