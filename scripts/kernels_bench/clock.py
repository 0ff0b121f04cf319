"""Clocks: how long a call takes, many times over, and how long its kernels alone.

On a device each repetition is queued behind other work, as in a training step::

    stream   | read L2 away | wait 0.2 ms | began | what is measured | ended |
    host        … queues what is measured in the meantime

so neither a full L2 nor the time to queue a launch counts, but a host that needs more than that,
and copies of tables that wait for it, do: that is the time of the *call*. The time of its *kernels*
has the same in front of each launch. torch's own ops have no launches of ours: only calls.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch

from tensorpager.kernels import launch as launch_module

WAIT_CYCLES = 400_000  # 0.2 ms at 2 GHz
LEAST_FLUSH_BYTES = 64 << 20
LEAST_REPETITIONS = 10
MOST_REPETITIONS = 200

Run = Callable[[], Any]


class Times(NamedTuple):
    """Seconds, of many repetitions."""

    median: float
    low: float
    high: float
    repetitions: int

    def record(self) -> dict[str, float]:
        """For JSON: milliseconds and quartiles."""
        return {
            "median_ms": self.median * 1e3,
            "quartiles_ms": [self.low * 1e3, self.high * 1e3],
            "repetitions": self.repetitions,
        }


def summary(seconds: list[float]) -> Times:
    """Median and quartiles; of one repetition, three times itself."""
    if len(seconds) < 2:
        return Times(seconds[0], seconds[0], seconds[0], len(seconds))
    low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return Times(median, low, high, len(seconds))


class Clock(Protocol):
    """Measures on one device."""

    device: str
    l2_bytes: int

    def call(self, run: Run) -> float:
        """Seconds of one call."""

    def kernels(self, run: Run) -> float | None:
        """Seconds of the kernels of one call, if they can be told apart."""


class CpuClock:
    device = "cpu"
    l2_bytes = 0

    def call(self, run: Run) -> float:
        began = time.perf_counter()
        run()
        return max(time.perf_counter() - began, 1e-9)

    def kernels(self, run: Run) -> float | None:
        return None


class CudaClock:
    device = "cuda"

    def __init__(self) -> None:
        self.l2_bytes = torch.cuda.get_device_properties("cuda").L2_cache_size
        size = max(LEAST_FLUSH_BYTES, 4 * self.l2_bytes)
        self._flush = torch.zeros(size // 4, dtype=torch.int32, device="cuda")

    def _queue_ahead(self, *, flush: bool) -> None:
        if flush:
            self._flush.amax()  # reading leaves nothing in L2 that has to be written back
        torch.cuda._sleep(WAIT_CYCLES)

    def call(self, run: Run) -> float:
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._queue_ahead(flush=True)
        began.record()
        run()
        ended.record()
        ended.synchronize()
        return max(began.elapsed_time(ended) / 1e3, 1e-9)

    def kernels(self, run: Run) -> float | None:
        spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

        def launched(launch: Run) -> None:
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._queue_ahead(flush=not spans)
            began.record()
            launch()
            ended.record()
            spans.append((began, ended))

        with around_launches(launched):
            run()
        torch.cuda.synchronize()
        seconds = sum(began.elapsed_time(ended) for began, ended in spans) / 1e3
        return seconds if spans else None


@contextmanager
def around_launches(around: Callable[[Run], None]) -> Iterator[None]:
    """Within it, every launch of a page kernel is handed to `around`, which has to call it."""
    original = launch_module.launch

    def launch(*args: Any, **constants: Any) -> None:
        around(lambda: original(*args, **constants))

    prefix = launch_module.__name__.rpartition(".")[0] + "."
    modules = [
        module
        for name, module in sys.modules.items()
        if name.startswith(prefix) and getattr(module, "launch", None) is original
    ]
    for module in modules:
        module.launch = launch
    try:
        yield
    finally:
        for module in modules:
            module.launch = original


def take_turns(
    contenders: dict[str, Callable[[], float | None]],
    seconds: float,
    least: int = LEAST_REPETITIONS,
    most: int = MOST_REPETITIONS,
    now: Callable[[], float] = time.monotonic,
) -> dict[str, Times]:
    """One measurement of each, another one first in each round, for so many `seconds`.

    `least` rounds at least, `most` at most; a round before them is not counted. Contenders that
    cannot be measured (None) are left out.
    """
    alive = {name: one for name, one in contenders.items() if one() is not None}
    found: dict[str, list[float]] = {name: [] for name in alive}
    names = list(alive)
    end = now() + seconds
    rounds = 0
    while names and rounds < most and (rounds < least or now() < end):
        for name in names[rounds % len(names) :] + names[: rounds % len(names)]:
            measured = alive[name]()
            assert measured is not None
            found[name].append(measured)
        rounds += 1
    return {name: summary(values) for name, values in found.items()}
