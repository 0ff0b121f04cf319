"""Which programs are solved for a plan, and in which order.

Time is in steps of one op each, or neighbouring ops are merged: a long trace to what can be solved,
and any trace for the sake of its moves: a program knows no latency, so its plan moves a few pages
in every step; with fewer, longer steps there are fewer and larger moves.
"""

from __future__ import annotations

from dataclasses import dataclass

from .narrow import too_many
from .problem import Problem

MAX_STEPS, MERGED_STEPS = 2500, 1000  # of a longer trace steps are merged
QUICK_MAX_STEPS, QUICK_MERGED_STEPS, QUICK_BOUND_STEPS = 1000, 500, 500
QUICK_EXACT_STEPS = 500  # of so few none are merged, as the plan moves less then
QUICK_COARSE = (4, 100)  # a part of the steps, and no fewer than so many
FEW_PAGES = 1000  # of the device
SMALL_RESERVES, SMALL_PARTS = (0, 1, 2), (1, 2, 4, 6)
COARSE = ((2, 500), (4, 300))  # a part of the steps, and at most so many


@dataclass(frozen=True)
class Settings:
    """How a program for a plan differs from the one for the bound, which has none of it."""

    reserve_pages: int = 0
    copies_keep_slots: bool = False
    shortest: float = 0.0  # gaps shorter than this many times their transfer time are left out
    merged_steps: int | None = None  # merged to at most so many


EXACT = Settings()


def quick(problem: Problem, spare_pages: int) -> list[Settings]:
    """For a quick search, which ends with the first plan that runs, or is good enough where
    programs are small. ``spare_pages``: of the device beside the largest working set. A program
    with a quarter of the steps is solved in a third of the time, and its plan has fewer, larger
    moves."""
    reserve = min(spare_pages // 4, 32)
    steps = None if _whole(problem, QUICK_MAX_STEPS) else QUICK_MERGED_STEPS
    full, spare = Settings(0, True, 0.0, steps), Settings(reserve, True, 0.0, steps)
    if is_small(problem):
        return [EXACT, full, spare]
    if steps is None:
        part, least = QUICK_COARSE
        return [Settings(reserve, True, 0.0, max(problem.steps // part, least)), spare, full]
    return [spare, full]


def is_small(problem: Problem) -> bool:
    """Its programs are solved in about a second each."""
    return _whole(problem, QUICK_EXACT_STEPS)


def has_few_pages(problem: Problem) -> bool:
    """And few steps: a plan is soon simulated."""
    return is_small(problem) and problem.device_pages <= FEW_PAGES


def exact(problem: Problem) -> list[Settings]:
    """The bound's own program, where no steps are merged for it."""
    return [EXACT] if _whole(problem, MAX_STEPS) else []


def coarse(problem: Problem) -> list[Settings]:
    """With fewer steps than could be."""
    sizes = [min(problem.steps // part + 1, most) for part, most in COARSE]
    return [Settings(0, True, 0.0, steps) for steps in sizes]


def fine(problem: Problem, spare_pages: int) -> list[Settings]:
    """With as many steps as can be, the most promising first. Where pages are few, what
    rounding to whole ones costs is another thing with each program, so many are tried."""
    if has_few_pages(problem):
        return [
            Settings(min(spare_pages, reserve), keep, 0.0, problem.steps // part + 1)
            for part in SMALL_PARTS
            for keep in (False, True)
            for reserve in SMALL_RESERVES
        ]
    steps = None if _whole(problem, MAX_STEPS) else MERGED_STEPS
    kinds = ((32, 0.0), (128, 2.0), (256, 6.0), (0, 0.0))
    return [Settings(min(spare_pages // 4, most), True, short, steps) for most, short in kinds]


def _whole(problem: Problem, most: int) -> bool:
    return problem.steps <= most and not too_many(problem)
