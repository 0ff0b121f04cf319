"""Versions that the program cannot tell apart become one: gaps that begin and end alike.

In long traces with merged steps that is most of them. Pages off the device in a group are given to
its members one after another, in the same order for every gap of the version, so copies fit.

A bound may be looser: weights have a gap between any two of their uses, and no two of them the same
pattern, but gaps of many begin and end in the same steps (:func:`loosened`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from ..lifetimes import Gaps
from ..trace import Bools, Floats, Ints
from .problem import Problem

FEW = 2  # gaps of a version, of which alike ones are alike as a whole


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


@dataclass(frozen=True, eq=False)
class Loose:
    """``problem`` with fewer gaps, and the place of each old one in it: first those that are
    ``told`` apart, then those that stand for versions that are all alike, and from ``first`` on
    gaps that are. Of each version that has some of these, by its number in the old problem:
    ``copied_at``, the step after which it can be copied, and its pages.
    """

    problem: Problem
    place: Ints
    told: int
    first: int
    copied_at: dict[int, int]
    pages: dict[int, int]


def loosened(problem: Problem, apart: Bools) -> Loose:
    """A problem whose program allows all that the old one does. Of versions with more than ``FEW``
    gaps those that are not to be told ``apart`` become one where they begin and end alike."""
    gaps = problem.gaps
    kinds, version = np.unique(gaps.version, return_inverse=True)
    many = (np.bincount(version) > FEW)[version] & ~apart
    told = np.zeros(len(kinds), np.bool_)
    told[version[apart]] = True
    single = ~many & told[version]
    alike = ~many & ~single
    small, group = grouped(problem.narrowed(alike))
    place = np.empty(len(gaps), np.int64)
    ones = problem.narrowed(single)
    place[single] = np.arange(len(ones.gaps))
    place[alike] = len(ones.gaps) + group
    first = len(ones.gaps) + len(small.gaps)
    rows = np.stack([gaps.begin, gaps.end, gaps.kind, gaps.lasting])[:, many]
    _, chosen, inverse = np.unique(rows, axis=1, return_index=True, return_inverse=True)
    inverse = inverse.reshape(-1)
    place[many] = first + inverse
    joined = problem.narrowed(np.flatnonzero(many)[chosen])
    none, new = np.full(len(joined.gaps), -1), np.arange(len(joined.gaps))
    pages = np.bincount(inverse, weights=gaps.pages[many], minlength=len(none)).astype(np.int64)
    parts = (
        ones.gaps,
        replace(small.gaps, tensor=np.full(len(small.gaps), -1)),
        replace(joined.gaps, tensor=none, pages=pages, version=new, lasting=new >= 0),
    )
    offsets = np.cumsum([0, *(part.version.max(initial=-1) + 1 for part in parts)])
    columns = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in gaps.__dataclass_fields__
    }
    columns["version"] = np.concatenate(
        [part.version + offset for part, offset in zip(parts, offsets)]
    )
    sizes = np.concatenate([ones.most, small.most, pages])
    begins = np.unique(version, return_index=True)[1]
    copied = np.unique(version[many & ~gaps.lasting]).tolist()
    return Loose(
        replace(problem, gaps=Gaps(**columns), most=sizes),
        place,
        len(ones.gaps),
        first,
        {int(kinds[v]): int(gaps.begin[begins[v]]) for v in copied},
        {int(kinds[v]): int(gaps.pages[begins[v]]) for v in copied},
    )


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
