"""Counters of a running pager as plain data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .follower import Follower
    from .runtime import Pager


def snapshot(pager: Pager) -> dict[str, Any]:
    """What ``Pager.stats`` gives; keys are listed in ``pager/README.md``."""
    size, follower = pager.page_size, pager.follower
    residency, migration, budget = pager.residency, pager.migration, pager.budget
    dense = budget.dense_peak
    pages = pager.space.persistent_pages + pager.space.peak_transient_pages
    return {
        "mode": follower.mode if follower is not None else "demand",
        "iterations": pager.iterations,
        "peak_bytes": {
            "device": max(budget.peak_bytes(), _with_overlap(pager)),
            "host": migration.peak_host_slots * size,
            "disk": migration.peak_disk_slots * size,
        },
        "budget_bytes": dict(pager.budget_bytes),
        "needed_bytes": pages * size + dense,
        "dense_peak_bytes": dense,
        "arena_bytes": residency.pool.count * size,
        "live_bytes": pager.space.live_pages * size,
        "faults": residency.faults,
        "overlap_updates": pager.overlap.updates,
        **_planned(follower),
        "bytes_out": migration.bytes_out,
        "bytes_in": migration.bytes_in,
        "disk_bytes_written": pager.disk.bytes_written if pager.disk else 0,
        "channel_bytes": dict(migration.moved),
        "stall_us": pager.stall_us,
        "gathers": pager.gathers,
        "compactions": residency.compactions,
        "fits": pager.fits,
    }


def _with_overlap(pager: Pager) -> int:
    """Device bytes at the peak of an update during backward."""
    if not pager.overlap.dense_peak:
        return 0
    return pager.residency.peak_frames * pager.page_size + pager.overlap.dense_peak


def _planned(follower: Follower | None) -> dict[str, Any]:
    """What planning did; times are of the latest iteration's kind."""
    found: dict[str, Any] = dict.fromkeys(
        ("predicted_us", "measured_us", "ideal_us", "bound_us", "iteration_stall_us")
    )
    if follower is None:
        zeros = ("prefetches", "prefetch_hits", "departures", "planned_iterations", "kinds")
        return {**dict.fromkeys(zeros, 0), **found}
    executor, kind = follower.executor, follower.current
    prefetches = executor.transfers.prefetched
    found["iteration_stall_us"] = follower.stall_us_last
    if kind is not None and kind.guide is not None:
        plan = kind.guide.plan
        found["predicted_us"] = kind.guide.predicted_us
        found["ideal_us"] = kind.guide.trace.ideal_us
        found["bound_us"] = plan.bound.iteration_us if plan.bound is not None else None
        found["measured_us"] = kind.measured
    return {
        "prefetches": prefetches,
        "prefetch_hits": max(0, prefetches - executor.late),
        "departures": follower.departures,
        "planned_iterations": follower.planned_iterations,
        "kinds": len(follower.kinds.all),
        **found,
    }
