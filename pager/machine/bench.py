"""What ``tensorpager bench-io`` measures: the disk tier, with other blocks, threads and engines.

Each setting has a tier of its own for a moment, a nameless file, which is measured as at the start
of a training, checksums included, but for longer. A transfer is one page.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..disk.tier import DiskTier
from ..disk.watch import IoWatch
from .calibration.disk_rates import DiskRates, Waiter, measure_disk
from .calibration.measure import private_bytes

BLOCKS = tuple(size << 10 for size in (64, 256, 1024, 2048, 4096, 16384))
THREADS = (1, 2, 4, 8)
LARGEST = BLOCKS[-1]
CLOSE = 0.97  # what reaches this share of the best is as good, and cheaper settings win
_READS = 16  # in flight

Report = Callable[[str, float], None]


@dataclass(frozen=True)
class Setting:
    """One way to move pages of ``block_bytes``."""

    engine: str
    block_bytes: int
    threads: int

    def __str__(self) -> str:
        """``"posix, 2048 KiB, 4 threads"``."""
        threads = f"{self.threads} thread" + ("s" if self.threads > 1 else "")
        return f"{self.engine}, {self.block_bytes >> 10} KiB, {threads}"


Results = dict[Setting, DiskRates]


def together(rates: DiskRates) -> float:
    """Bytes per second of a run that reads and writes equally much at once."""
    return 2 / (1 / rates.write_beside + 1 / rates.read_beside)


def open_tier(folder: Path, size_bytes: int, setting: Setting) -> DiskTier:
    """Raises PagerError, and leaves nothing behind, if it cannot be had."""
    return DiskTier(
        folder,
        size_bytes,
        setting.block_bytes,
        threads=setting.threads,
        io_engine=setting.engine,
    )


def measure(tier: DiskTier, seconds: float) -> DiskRates:
    """One round of ``seconds`` for each way, and for both at once, over as much of ``tier`` as that
    allows. Raises PagerError if the disk fails, CorruptPage if it lies."""
    size = tier.page_size
    source, *lanes = np.split(private_bytes((_READS + 1) * size), _READS + 1)
    source[:] = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
    runs = [(0, tier.slots.count)]
    return measure_disk(tier, runs, source, lanes, Waiter(IoWatch(math.inf)), round_s=seconds)


def blocks_for(size_bytes: int) -> list[int]:
    """The sizes of a page that are tried in a file of ``size_bytes``."""
    return [size for size in BLOCKS if size <= size_bytes // 16]


def buffer_bytes(size_bytes: int) -> int:
    """Memory that :func:`measure` takes for a file of ``size_bytes``, at most."""
    return (_READS + 1) * blocks_for(size_bytes)[-1]


def sweep(
    folder: Path,
    size_bytes: int,
    engines: Sequence[str],
    *,
    rounds: int,
    seconds: float,
    report: Report | None = None,
) -> tuple[Results, Setting, bool]:
    """Varies one setting after another, from the pager's own on, and keeps the best of each: the
    rates of all that were tried, the best, and whether the page cache is bypassed. ``engines``:
    those that work here."""
    blocks = blocks_for(size_bytes)
    best = Setting(engines[0], min(2 << 20, blocks[-1]), 4)
    steps: list[tuple[str, Sequence[Any]]] = [
        ("block_bytes", blocks),
        ("threads", THREADS),
        ("engine", engines),
    ]
    count = sum(len(values) for _, values in steps)
    results: Results = {}
    direct = False
    for step, (name, values) in enumerate(steps):
        candidates = [replace(best, **{name: value}) for value in values]
        for index, setting in enumerate(candidates):
            if report is not None:
                tried = sum(len(others) for _, others in steps[:step]) + index
                report(str(setting), tried / count)
            if setting not in results:
                with closing(open_tier(folder, size_bytes, setting)) as tier:
                    direct = tier.direct
                    found = [measure(tier, seconds) for _ in range(rounds)]
                results[setting] = DiskRates(*map(statistics.median, zip(*found)))
        best = cheapest_of_the_best(candidates, results)
    return results, best, direct


def cheapest_of_the_best(candidates: Sequence[Setting], results: Results) -> Setting:
    """The first of ``candidates``, which come cheapest first, that is as good as the best one."""
    top = max(together(results[setting]) for setting in candidates)
    return next(s for s in candidates if together(results[s]) >= CLOSE * top)
