"""Counters of a running pager as plain data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .runtime import Pager


def snapshot(pager: Pager) -> dict[str, Any]:
    """What ``Pager.stats`` gives; keys are listed in ``pager/README.md``."""
    size = pager.page_size
    residency, migration, budget = pager.residency, pager.migration, pager.budget
    dense = budget.dense_peak
    pages = pager.space.persistent_pages + pager.space.peak_transient_pages
    return {
        "mode": "demand",
        "iterations": pager.iterations,
        "peak_bytes": {
            "device": budget.peak_bytes(),
            "host": migration.peak_host_slots * size,
            "disk": migration.peak_disk_slots * size,
        },
        "budget_bytes": dict(pager.budget_bytes),
        "needed_bytes": pages * size + dense,
        "dense_peak_bytes": dense,
        "arena_bytes": residency.pool.count * size,
        "live_bytes": pager.space.live_pages * size,
        "faults": residency.faults,
        "prefetches": 0,
        "prefetch_hits": 0,
        "bytes_out": migration.bytes_out,
        "bytes_in": migration.bytes_in,
        "disk_bytes_written": pager.disk.bytes_written if pager.disk else 0,
        "stall_us": pager.stall_us,
        "gathers": pager.gathers,
        "compactions": residency.compactions,
        "fits": pager.fits,
    }
