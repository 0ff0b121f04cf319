"""Many short exact searches, each with another priority, instead of one long one.

Which priority works differs from problem to problem, and a search that took a wrong turn early
stays lost for long. So the first round gives each fixed priority a few steps per buffer, and
every later round twice as many, together with random mixtures.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..trace import Ints
from .exact import GaveUp, Limits, Search
from .problem import Problem

_FIRST_STEPS = 3  # per buffer
_MIXTURES = 4  # per round
_SEED = 20240406


def find_packing(problem: Problem, capacity: int, deadline: float) -> Ints | None:
    """Offsets below ``capacity`` bytes, in the order of the buffers as given; None if there are
    none. Raises ``GaveUp`` at ``deadline`` (time.perf_counter)."""
    steps = _FIRST_STEPS * len(problem)
    random = np.random.default_rng(_SEED)
    while True:
        for keys in _priorities(problem, random, mixtures=steps > _FIRST_STEPS * len(problem)):
            search = Search(problem, capacity, _ranks(keys), Limits(deadline, steps))
            try:
                return search.run()
            except GaveUp:
                if search.nodes <= steps:
                    raise
        steps *= 2


def _priorities(
    problem: Problem, random: np.random.Generator, *, mixtures: bool
) -> Iterator[list[Ints]]:
    """Lists of keys, the largest first, the most important key first."""
    life, size, load = problem.life, problem.size, problem.load
    spans = problem.last - problem.first + 1
    yield [load, life]
    yield [size * spans]
    yield [load, size]
    yield [life]
    yield [load, size * life]
    yield [size * life]
    yield [spans, size]
    yield [size]
    for _ in range(_MIXTURES if mixtures else 0):
        weights = random.random(3) * (1, 1, random.integers(0, 5))
        noise = random.random(len(problem)) * random.random()
        yield [weights @ np.log([size, life, load]) + noise]


def _ranks(keys: list[Ints]) -> Ints:
    ranks = np.empty(len(keys[0]), np.int64)
    ranks[np.lexsort([-key for key in reversed(keys)])] = np.arange(len(ranks))
    return ranks
