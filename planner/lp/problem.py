"""What the linear program is about: steps of time, gaps between uses, and tiers in pages."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from ..hardware import Hardware
from ..lifetimes import Gaps, gaps, live_pages
from ..trace import Floats, Ints, Trace

HOST, DISK = 0, 1


@dataclass(frozen=True, eq=False)
class Tier:
    """A tier below the device: ``pages`` it holds (``inf``: no limit); its own rates in pages per
    µs, already no more than the link's."""

    index: int
    pages: float
    out_rate: float
    in_rate: float
    kept: bool = False  # the copies in host of what the host updates: there in any case


@dataclass(frozen=True, eq=False)
class Problem:
    """One iteration in ``steps`` of time (ops, or buckets of ops).

    ``duration_us``: of each step. ``live``: pages that must have a frame if nothing is off the
    device, [steps]. ``gaps``: with ``begin`` and ``end`` in steps. ``most``: pages of each gap that
    may be off, [gaps]. ``held``: pages in host beside what moves, [steps].
    """

    duration_us: Floats
    live: Ints
    gaps: Gaps
    most: Floats
    device_pages: float
    out_rate: float
    in_rate: float
    tiers: tuple[Tier, ...]
    held: Ints | None = None

    @property
    def steps(self) -> int:
        return len(self.duration_us)

    def narrowed(self, keep: np.ndarray) -> Problem:
        """Only the gaps where ``keep``."""
        return replace(self, gaps=self.gaps.pick(keep), most=self.most[keep])


def make_problem(trace: Trace, hardware: Hardware) -> Problem:
    """One step per op."""
    page = hardware.page_size
    hardware = _finite(trace, hardware)
    found = gaps(trace, page, outlived=True)
    return Problem(
        duration_us=trace.op_duration_us,
        live=live_pages(trace, page),
        gaps=found,
        most=found.pages.astype(np.float64),
        device_pages=hardware.device_pages,
        out_rate=hardware.d2h_bytes_per_s / page / 1e6,
        in_rate=hardware.h2d_bytes_per_s / page / 1e6,
        tiers=_tiers(hardware),
    )


def _finite(trace: Trace, hardware: Hardware) -> Hardware:
    """Rates without limit become such that everything moves in a thousandth of the time."""
    total = float(trace.pages(hardware.page_size).sum()) * hardware.page_size
    most = 1e9 * total / max(trace.ideal_us, 1.0)
    rates = [name for name in vars(hardware) if name.endswith("_per_s")]
    return hardware.with_(**{n: most for n in rates if math.isinf(getattr(hardware, n))})


def _tiers(hardware: Hardware) -> tuple[Tier, ...]:
    page = hardware.page_size
    out_rate, in_rate = hardware.d2h_bytes_per_s, hardware.h2d_bytes_per_s
    host = Tier(HOST, hardware.host_pages, out_rate / page / 1e6, in_rate / page / 1e6)
    disk = Tier(
        DISK,
        hardware.disk_pages,
        min(out_rate, hardware.disk_write_bytes_per_s) / page / 1e6,
        min(in_rate, hardware.disk_read_bytes_per_s) / page / 1e6,
    )
    return tuple(tier for tier in (host, disk) if tier.pages > 0)


def with_kept_copies(problem: Problem) -> Problem:
    """With a tier of its own for copies that are in host in any case."""
    rates = problem.out_rate, problem.in_rate
    return replace(problem, tiers=(*problem.tiers, Tier(HOST, math.inf, *rates, kept=True)))


def merged(problem: Problem, steps: int, *, relaxed: bool) -> tuple[Problem, Ints]:
    """The same with neighbouring steps joined to at most ``steps`` buckets, and the first step of
    each bucket.

    ``relaxed`` (for a bound): a gap may use all of the buckets that it begins and ends in, and of a
    bucket's steps the one with the fewest live pages counts. Else (for a plan) it may use neither,
    and the step with the most counts.
    """
    first = _buckets(problem.duration_us, steps)
    count = len(first)
    bucket = np.repeat(np.arange(count), np.diff(np.append(first, problem.steps)))
    gaps, ops = problem.gaps, problem.steps
    begin = np.where(gaps.begin < 0, -1, bucket[gaps.begin])  # −1: there from the first step on
    end = bucket[gaps.end % ops] + np.where(gaps.end >= ops, count, 0)
    if relaxed:
        begin, end = begin - 1, end + 1  # longer than an iteration, of what one bucket uses
    kept = end > begin + 1
    extreme = np.minimum if relaxed else np.maximum
    joined = replace(
        problem,
        duration_us=np.add.reduceat(problem.duration_us, first),
        live=extreme.reduceat(problem.live, first),
        gaps=replace(gaps, begin=begin, end=end).pick(kept),
        most=problem.most[kept],
        held=None if problem.held is None else extreme.reduceat(problem.held, first),
    )
    return joined, first


def _buckets(duration_us: Floats, steps: int) -> Ints:
    """First steps of at most ``steps`` buckets: half by time and half by number, so that neither
    long steps nor many short ones end up in one."""
    number = len(duration_us)
    if number <= steps:
        return np.arange(number)
    ends = np.cumsum(duration_us)
    share = ends / ends[-1] if ends[-1] > 0 else 0.0
    place = (share + np.arange(1, number + 1) / number) / 2
    bucket = np.minimum((place * steps).astype(np.int64), steps - 1)
    return np.unique(bucket, return_index=True)[1].astype(np.int64)
