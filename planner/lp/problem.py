"""What the linear program is about: steps of time, gaps between uses, and tiers in pages."""

from __future__ import annotations

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


@dataclass(frozen=True, eq=False)
class Problem:
    """One iteration in ``steps`` of time (ops, or buckets of ops).

    ``duration_us``: of each step. ``live``: pages that must have a frame if nothing is off the
    device, [steps]. ``gaps``: with ``begin`` and ``end`` in steps. ``most``: pages of each gap that
    may be off, [gaps].
    """

    duration_us: Floats
    live: Ints
    gaps: Gaps
    most: Floats
    device_pages: float
    out_rate: float
    in_rate: float
    tiers: tuple[Tier, ...]

    @property
    def steps(self) -> int:
        return len(self.duration_us)

    def narrowed(self, keep: np.ndarray, most: Floats | None = None) -> Problem:
        """Only the gaps where ``keep``; ``most`` (for all gaps) replaces what may be off."""
        limit = self.most if most is None else most
        return replace(self, gaps=self.gaps.pick(keep), most=limit[keep])


def make_problem(trace: Trace, hardware: Hardware) -> Problem:
    """One step per op."""
    page = hardware.page_size
    found = gaps(trace, page)
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


def merged(problem: Problem, steps: int) -> Problem:
    """The same with neighbouring steps joined, about ``steps`` of them of equal duration each.

    A relaxation: of the ops in a bucket only the one with the fewest live pages counts, a gap may
    begin and end anywhere in its buckets, and gaps within one bucket are left out.
    """
    if problem.steps <= steps:
        return problem
    ends = np.cumsum(problem.duration_us)
    total = ends[-1] if ends[-1] > 0 else 1.0
    # Half by time, half by number, so that neither long nor many short ops end up in one bucket.
    place = ends / total + np.arange(1, problem.steps + 1) / problem.steps
    bucket = np.minimum((place / 2 * steps).astype(np.int64), steps - 1)
    _, bucket = np.unique(bucket, return_inverse=True)
    count = int(bucket[-1]) + 1
    begins = np.searchsorted(bucket, np.arange(count))
    old, ops = problem.gaps, problem.steps
    begin = bucket[old.begin]
    end = bucket[old.end % ops] + np.where(old.end >= ops, count, 0)
    kept = end > begin
    picked = old.pick(kept)
    return replace(
        problem,
        duration_us=np.add.reduceat(problem.duration_us, begins),
        live=np.minimum.reduceat(problem.live, begins),
        gaps=replace(picked, begin=begin[kept], end=end[kept]),
        most=problem.most[kept],
    )
