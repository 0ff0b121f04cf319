"""Seconds of what is repeated: medians within a time limit."""

import statistics
import time
from collections.abc import Callable

ROUNDS = 5
PHASE_S = 0.15


def since(began: float) -> float:
    """Seconds since ``began`` (of ``time.perf_counter``), never 0."""
    return max(time.perf_counter() - began, 1e-9)


def median_seconds(timed: Callable[[], float], rounds: int = ROUNDS) -> float:
    """Median of ``rounds`` rounds, or of as many as begin within ``PHASE_S``; one at least."""
    seconds: list[float] = []
    began = time.perf_counter()
    while not seconds or (len(seconds) < rounds and since(began) < PHASE_S):
        seconds.append(timed())
    return statistics.median(seconds)
