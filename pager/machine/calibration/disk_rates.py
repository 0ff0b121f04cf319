"""How fast the disk tier moves pages: each way alone, both ways at once, and one by one."""

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

from ...devices.device import Bytes
from ...disk.batch import SlotRun
from ...disk.tier import DiskTier
from ...disk.watch import IoWatch
from ...errors import HungDisk
from ...memory.frame_pool import Run

ROUNDS = 5
PHASE_S = 0.15
_ROUND_S = 0.06
_WRITES_QUEUED = 8
_SINGLES = 64

Submit = Callable[[Sequence[SlotRun]], Future[None]]
TimedRuns = Callable[[Sequence[Run]], float]
"""Runs of slots → seconds to move them."""


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


class Transfer(NamedTuple):
    """One that was submitted, and what it uses until it has ended."""

    future: Future[None]
    slots: Run
    buffer: Bytes


@dataclass
class Waiter:
    """Who waits for transfers, as long as ``watch`` allows. ``left``: those that did not end."""

    watch: IoWatch
    left: list[Transfer] = field(default_factory=list)

    def give_up(self, transfers: Iterable[Transfer]) -> None:
        self.left += [transfer for transfer in transfers if not transfer.future.done()]

    def wait_for_ends(self, transfers: Iterable[Transfer]) -> None:
        """Until none is under way, failed or not. Raises ``HungDisk`` if one does not end."""
        try:
            for transfer in transfers:
                self.watch.wait_for_end(transfer.future)
        except HungDisk:
            self.give_up(transfers)
            raise


class DiskRates(NamedTuple):
    """Bytes per second alone, and while the other direction runs too. ``latency_us``: what each
    transfer of one page costs beyond its bytes in a full queue of them."""

    read_alone: float
    write_alone: float
    read_beside: float
    write_beside: float
    latency_us: float


def measure_disk(
    disk: DiskTier,
    runs: Sequence[Run],
    source: Bytes,
    lanes: Sequence[Bytes],
    waiter: Waiter,
    round_s: float = _ROUND_S,
) -> DiskRates:
    """Rates of transfers between memory and ``runs`` of slots, which are the caller's to lose.

    ``source``, one transfer of whole pages, is what is written; each of ``lanes``, as long as it,
    takes one read at a time. No transfer uses them any more when this returns or raises, but for
    ``waiter.left``. A round is as many transfers as should take ``round_s``. Raises ``PagerError``
    or ``CorruptPage`` if the disk fails, and ``HungDisk`` if it does not answer.
    """
    size = disk.page_size
    slots = sum(count for _, count in runs)
    assert slots, "no slot to measure with"
    # A small tier is cut into more than one piece too, so that both directions can run.
    pieces = cut(runs, max(1, min(len(source) // size, slots // 8)))

    def write(what: Sequence[Run]) -> float:
        return _stream(disk.submit_write, what, [source] * _WRITES_QUEUED, size, waiter)

    def read(what: Sequence[Run]) -> float:
        return _stream(disk.submit_read, what, lanes, size, waiter)

    first = write(pieces[:1])
    pieces = pieces[: max(2, int(round_s / first))]
    if first > PHASE_S:  # one transfer says enough about a slow disk
        some, write_alone = pieces[:1], _nbytes(pieces[:1], size) / first
    else:
        some = pieces
        write_alone = _nbytes(some, size) / median_seconds(lambda: write(some))
    read_alone = _nbytes(some, size) / median_seconds(lambda: read(some))
    beside = read_alone, write_alone  # a tier of one slot never does both
    if len(pieces) > 1:
        beside = _both_ways(read, write, pieces, size, beside)

    latency_us = 0.0
    singles = cut(some, 1)[:_SINGLES]
    if some[0][1] > 1:
        for move, rate in ((read, read_alone), (write, write_alone)):
            seconds = median_seconds(lambda move=move: move(singles))  # type: ignore[misc]
            latency_us = max(latency_us, (seconds / len(singles) - size / rate) * 1e6)
    return DiskRates(read_alone, write_alone, *beside, latency_us)


def cut(runs: Sequence[Run], most: int) -> list[Run]:
    """``runs`` in pieces of at most ``most`` pages."""
    return [
        (start, min(most, first + length - start))
        for first, length in runs
        for start in range(first, first + length, most)
    ]


def _stream(
    submit: Submit,
    pieces: Sequence[Run],
    lanes: Sequence[Bytes],
    page_size: int,
    waiter: Waiter,
) -> float:
    """Seconds to move ``pieces`` with one transfer in flight for each of ``lanes``.

    No transfer uses a lane any more when this returns or raises, but for ``waiter.left``.
    """
    in_flight: deque[Transfer] = deque()
    began = time.perf_counter()
    try:
        for index, (slot, count) in enumerate(pieces):
            if len(in_flight) == len(lanes):
                waiter.watch.wait(in_flight[0].future)
                in_flight.popleft()
            buffer = lanes[index % len(lanes)][: count * page_size]
            future = submit([(slot, buffer)])
            in_flight.append(Transfer(future, (slot, count), buffer))
        for transfer in in_flight:
            waiter.watch.wait(transfer.future)
        return since(began)
    except HungDisk:
        waiter.give_up(in_flight)
        raise
    except BaseException:
        waiter.wait_for_ends(in_flight)
        raise


def _both_ways(
    read: TimedRuns,
    write: TimedRuns,
    pieces: Sequence[Run],
    page_size: int,
    alone: tuple[float, float],
) -> tuple[float, float]:
    """Rates of reads and of writes, each while the other runs.

    Each round gives both what they should move in the same time, going by the round before, so the
    first one only finds the shares.
    """
    rounds = [alone]
    began = time.perf_counter()
    with ThreadPoolExecutor(1) as beside:
        while len(rounds) < 2 or (len(rounds) <= ROUNDS and since(began) < 1.5 * PHASE_S):
            share = rounds[-1][0] / sum(rounds[-1])
            middle = min(max(round(share * len(pieces)), 1), len(pieces) - 1)
            reads, writes = pieces[:middle], pieces[middle:]
            writing = beside.submit(write, writes)
            read_s, write_s = read(reads), writing.result()
            moved = _nbytes(reads, page_size), _nbytes(writes, page_size)
            rounds.append(
                (
                    _rate_beside(moved[0], read_s, write_s, alone[0]),
                    _rate_beside(moved[1], write_s, read_s, alone[1]),
                )
            )
    counted = rounds[2:] or rounds[1:]
    return statistics.median(r for r, _ in counted), statistics.median(w for _, w in counted)


def _rate_beside(nbytes: int, seconds: float, other_s: float, alone: float) -> float:
    """Bytes per second while the other direction ran, for its ``other_s``.

    What was moved after that, at the rate ``alone``, does not count. Where noise makes that more
    than there was, the plain rate is all that can be said.
    """
    together = min(seconds, other_s)
    moved = nbytes - alone * (seconds - together)
    return moved / together if moved > 0 else nbytes / seconds


def _nbytes(runs: Sequence[Run], page_size: int) -> int:
    return sum(length for _, length in runs) * page_size
