"""What ``tensorpager bench-io`` measures: one file, moved in many ways.

Each measurement is one pass over the file, or as much of it as ``seconds`` allow, by threads that
take block after block: the way of the disk tier, with the checksum of every block made and checked.

Caches: with O_DIRECT nothing is cached but what the drive itself keeps. Without it, writes count
until they are on the drive (``fdatasync``), and what will be read is thrown out of the page cache
first (``posix_fadvise``).
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import xxhash

from ..disk import file as disk_io
from ..disk.engine import Engine, make_engine
from ..errors import CorruptPage, PagerError

BLOCKS = tuple(size << 10 for size in (64, 256, 1024, 2048, 4096, 16384))
THREADS = (1, 2, 4, 8)
LARGEST = BLOCKS[-1]
MEMORY_BYTES = 128 << 20  # more than caches hold; the file is this, again and again
CLOSE = 0.97  # what reaches this share of the best is as good, and cheaper settings win

Report = Callable[[str, float], None]


@dataclass(frozen=True)
class Setting:
    """One way to move the file."""

    engine: str
    direct: bool
    block_bytes: int
    threads: int


@dataclass(frozen=True)
class Rates:
    """Bytes per second: each way alone, and both at once."""

    write: float
    read: float
    write_beside: float
    read_beside: float

    @property
    def together(self) -> float:
        """Bytes per second of a run that reads and writes equally much at once."""
        return 2 / (1 / self.write_beside + 1 / self.read_beside)


Results = dict[Setting, Rates]


class BenchFile:
    """A nameless file of ``size_bytes`` (a multiple of LARGEST) in ``directory``, full of what is
    in memory, which takes up as much or MEMORY_BYTES. Gone when it is closed, or the process ends.

    Raises PagerError, and leaves nothing behind, if it cannot be had.
    """

    def __init__(self, directory: Path, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.fd = disk_io.open_unlinked(str(directory), size_bytes)
        try:
            nbytes = min(size_bytes, MEMORY_BYTES) // LARGEST * LARGEST
            self._source, self._target = _huge_pages(nbytes), _huge_pages(nbytes)
            self._source[:] = np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8)
            self._sums: dict[int, list[int]] = {}
            self.takes_direct = disk_io.enable_direct(self.fd, BLOCKS[0], size_bytes)
            self.fill()
        except BaseException:
            os.close(self.fd)
            raise

    def __enter__(self) -> BenchFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self.fd)

    def fill(self) -> None:
        """Writes all of it, so that no measurement is of blocks that were never written."""
        for start in range(0, self.size_bytes, LARGEST):
            disk_io.write_at(self.fd, [self._at(self._source, start, LARGEST)], start, unit=4096)

    @contextmanager
    def engine(self, setting: Setting) -> Iterator[Engine]:
        """The engine that ``setting`` names, for as long as the block lasts."""
        flags = fcntl.fcntl(self.fd, fcntl.F_GETFL)
        flags = flags | os.O_DIRECT if setting.direct else flags & ~os.O_DIRECT
        fcntl.fcntl(self.fd, fcntl.F_SETFL, flags)
        engine = make_engine(
            setting.engine,
            self.fd,
            direct=setting.direct,
            callers=2 * setting.threads,
            task_bytes=max(setting.block_bytes, 2 << 20),
            on_cuda=False,
        )
        if engine.direct != setting.direct:
            engine.close()
            raise PagerError(f"the {setting.engine} engine has no O_DIRECT here")
        try:
            yield engine
        finally:
            engine.close()

    def measure(self, engine: Engine, setting: Setting, seconds: float) -> Rates:
        """One round. Raises ``OSError`` if the disk fails, CorruptPage if it lies."""
        everything = range(self.size_bytes // setting.block_bytes)
        middle = len(everything) // 2
        (write,) = self._timed(engine, setting, [("write", everything)], seconds)
        (read,) = self._timed(engine, setting, [("read", everything)], seconds)
        both = [("write", everything[:middle]), ("read", everything[middle:])]
        return Rates(write, read, *self._timed(engine, setting, both, seconds))

    def _timed(
        self,
        engine: Engine,
        setting: Setting,
        jobs: Sequence[tuple[str, range]],
        seconds: float,
    ) -> list[float]:
        """Bytes per second of each job; all of them end when the first has nothing left to do."""
        if not setting.direct and any(way == "read" for way, _ in jobs):
            os.fdatasync(self.fd)
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        sums = self._checksums(setting.block_bytes)
        stop, began = threading.Event(), time.perf_counter()
        counts = [itertools.count() for _ in jobs]
        done = [[0] * setting.threads for _ in jobs]

        def work(job: int, thread: int) -> None:
            way, blocks = jobs[job]
            size = setting.block_bytes
            while True:  # each thread moves a block at least, so that there is a rate
                index = next(counts[job])
                if index >= len(blocks):
                    stop.set()
                    return
                offset = blocks[index] * size
                if way == "write":
                    block = self._at(self._source, offset, size)
                    xxhash.xxh3_64_intdigest(block)
                    engine.write([block], offset)
                else:
                    block = self._at(self._target, offset, size)
                    engine.read([block], offset)
                    if xxhash.xxh3_64_intdigest(block) != sums[blocks[index] % len(sums)]:
                        raise CorruptPage(
                            f"{size} bytes at {offset} are not what was written there; check the "
                            "drive (dmesg, smartctl)"
                        )
                done[job][thread] += size
                if stop.is_set() or time.perf_counter() - began > seconds:
                    stop.set()
                    return

        def guarded(job: int, thread: int) -> None:
            try:
                work(job, thread)
            finally:
                stop.set()

        with ThreadPoolExecutor(setting.threads * len(jobs)) as pool:
            began = time.perf_counter()
            running = [
                pool.submit(guarded, job, thread)
                for job in range(len(jobs))
                for thread in range(setting.threads)
            ]
            try:
                for future in running:
                    future.result()
            finally:
                stop.set()
        took = time.perf_counter() - began
        if not setting.direct:
            os.fdatasync(self.fd)
        synced = time.perf_counter() - began
        return [
            sum(job_done) / (synced if way == "write" else took)
            for (way, _), job_done in zip(jobs, done)
        ]

    def _at(self, memory: disk_io.Bytes, offset: int, nbytes: int) -> disk_io.Bytes:
        start = offset % memory.nbytes
        return memory[start : start + nbytes]

    def _checksums(self, block_bytes: int) -> list[int]:
        if block_bytes not in self._sums:
            blocks = self._source.reshape(-1, block_bytes)
            self._sums[block_bytes] = [xxhash.xxh3_64_intdigest(block) for block in blocks]
        return self._sums[block_bytes]


def _huge_pages(nbytes: int) -> disk_io.Bytes:
    """Memory as the pager's arenas have it."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def sweep(
    file: BenchFile, engines: Sequence[str], *, rounds: int, seconds: float, report: Report | None
) -> tuple[Results, Setting]:
    """Varies one setting after another, from the pager's own on, and keeps the best of each:
    the rates of all that were tried, and the best. ``engines``: those that work here."""
    blocks = [size for size in BLOCKS if size <= file.size_bytes // 16]
    best = Setting(engines[0], file.takes_direct, min(2 << 20, blocks[-1]), 4)
    steps: list[tuple[str, Sequence[Any]]] = [
        ("block_bytes", blocks),
        ("threads", THREADS),
        ("direct", [True, False] if file.takes_direct else [False]),
        ("engine", engines),
    ]
    count = sum(len(values) for _, values in steps)
    results: Results = {}
    for step, (name, values) in enumerate(steps):
        candidates = [replace(best, **{name: value}) for value in values]
        for index, setting in enumerate(candidates):
            if report is not None:
                tried = sum(len(others) for _, others in steps[:step]) + index
                report(describe(setting), tried / count)
            if setting not in results:
                results[setting] = _median_of_rounds(file, setting, rounds, seconds)
        best = cheapest_of_the_best(candidates, results)
    return results, best


def cheapest_of_the_best(candidates: Sequence[Setting], results: Results) -> Setting:
    """The first of ``candidates``, which come cheapest first, that is as good as the best one."""
    top = max(results[setting].together for setting in candidates)
    return next(s for s in candidates if results[s].together >= CLOSE * top)


def describe(setting: Setting) -> str:
    """``"posix, direct, 2048 KiB, 4 threads"``."""
    cache = "direct" if setting.direct else "buffered"
    threads = f"{setting.threads} thread" + ("s" if setting.threads > 1 else "")
    return f"{setting.engine}, {cache}, {setting.block_bytes >> 10} KiB, {threads}"


def _median_of_rounds(file: BenchFile, setting: Setting, rounds: int, seconds: float) -> Rates:
    with file.engine(setting) as engine:
        measured = [file.measure(engine, setting, seconds) for _ in range(rounds)]
    return Rates(
        *(
            statistics.median(getattr(rates, name) for rates in measured)
            for name in ("write", "read", "write_beside", "read_beside")
        )
    )
