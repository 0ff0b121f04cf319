"""Programs with fewer gaps or less room than the problem has, for plans and for long traces."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from ..trace import Floats
from .groups import grouped
from .problem import Problem

MAX_GAPS = 20_000  # that the program can tell apart


def without_short(problem: Problem, shortest: float) -> Problem:
    """Leave out gaps shorter than ``shortest`` times what their pages take out and in."""
    if not shortest:
        return problem
    transfer_us = problem.gaps.pages * (1 / problem.out_rate + 1 / problem.in_rate)
    return problem.narrowed(_length_us(problem) > shortest * transfer_us)


def _length_us(problem: Problem) -> Floats:
    """Of each gap, [gaps]."""
    gaps, steps = problem.gaps, problem.steps
    begins = np.concatenate([[0.0], np.cumsum(problem.duration_us)])
    ends = begins[gaps.end % steps] + np.where(gaps.end >= steps, begins[-1], 0.0)
    length: Floats = ends - begins[gaps.begin + 1]
    return length


def less_room(problem: Problem, reserve_pages: int) -> Problem:
    """Leave a little of the tiers below free too, for pages that rounding adds."""
    tiers = tuple(
        replace(tier, pages=tier.pages - min(reserve_pages, tier.pages // 50))
        if math.isfinite(tier.pages)
        else tier
        for tier in problem.tiers
    )
    return replace(problem, tiers=tiers)


def too_many(problem: Problem) -> bool:
    return len(problem.gaps) > MAX_GAPS and len(grouped(problem)[0].gaps) > MAX_GAPS


def largest(problem: Problem) -> Problem:
    """If the program would have too many gaps, the largest by pages times duration."""
    if not too_many(problem):
        return problem
    keep = np.zeros(len(problem.gaps), bool)
    keep[np.argsort(-(problem.gaps.pages * _length_us(problem)))[:MAX_GAPS]] = True
    return problem.narrowed(keep)
