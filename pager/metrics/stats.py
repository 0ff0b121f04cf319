"""Counters of a running pager as plain data."""

from __future__ import annotations

from typing import Any

from ...planner.sizes import format_bytes
from ..core import Core
from ..machine import ranks
from ..memory.frame_pool import FramePool
from ..plan.follower import Follower
from ..tensor.names import streamed_names


def snapshot(pager: Core, follower: Follower | None) -> dict[str, Any]:
    """What ``Pager.stats`` gives; keys are listed in ``pager/README.md``."""
    figures = plan_figures(follower)
    return {**counters(pager, follower), **figures, "streamed": streamed_names(pager)}


def counters(pager: Core, follower: Follower | None) -> dict[str, Any]:
    """The part that any thread may ask for, without the pager's lock: it is numbers that are there
    anyway. Numbers that belong together may be of slightly different instants then."""
    size = pager.page_size
    residency, mover, budget = pager.residency, pager.mover, pager.budget
    dense = budget.dense_peak
    return {
        "mode": follower.mode if follower is not None else "demand",
        "iterations": pager.iterations,
        "used_bytes": {
            "device": max(0, residency.frames_used) * size,
            "host": _used(pager.host.slots) * size,
            "disk": _used(pager.disk.slots) * size if pager.disk is not None else 0,
        },
        "peak_bytes": {
            "device": max(budget.peak_bytes(), _with_overlap(pager)),
            "host": mover.slots.peaks["host"] * size,
            "disk": mover.slots.peaks["disk"] * size,
        },
        "budget_bytes": dict(pager.budget_bytes),
        "needed_bytes": pager.profile_run.needed_bytes,
        "dense_peak_bytes": dense,
        "arena_bytes": residency.frames * size,
        "live_bytes": pager.space.live_pages * size,
        "faults": residency.faults,
        "overlap_updates": pager.in_backward.updates,
        **_reruns(follower),
        "host_steps": pager.host_steps.taken,
        "host_step_bytes": pager.host_steps.nbytes,
        "host_step_us": pager.host_steps.seconds * 1e6,
        **_moves(follower),
        "bytes_out": mover.bytes_out,
        "bytes_in": mover.bytes_in,
        "disk_bytes_written": pager.disk.bytes_written if pager.disk else 0,
        "calibration_bytes_written": pager.disk.bytes_measured if pager.disk else 0,
        "disk_wear": pager.wear.figures(),
        "disk_engine": pager.disk.describe() if pager.disk else None,
        "io_retries": pager.io_watch.retries + (pager.disk.rereads if pager.disk else 0),
        "channel_bytes": dict(mover.moved),
        "stall_us": pager.stall_us,
        "gathers": pager.gathers,
        "compactions": residency.compactions,
        "whole_peak_bytes": budget.most_whole,
        "fits": pager.fits,
        "ranks": ranks.facts(pager.device.type),
    }


def summary(pager: Core, follower: Follower | None) -> str:
    """What ``print(pager)`` shows."""
    head = f"Pager on {pager.device}, pages of {format_bytes(pager.page_size)}"
    if pager.closed_reason is not None:
        return f"{head}: {pager.closed_reason}"
    found = counters(pager, follower)
    how = "everything fits" if found["fits"] else found["mode"]
    done = found["iterations"]
    rows = [f"{head}: {done} iteration{'' if done == 1 else 's'}, {how}"]
    rows += [
        f"  {tier}: {format_bytes(found['used_bytes'][tier])} in use, "
        f"{format_bytes(found['peak_bytes'][tier])} at most, of {format_bytes(budget)}"
        for tier, budget in found["budget_bytes"].items()
        if budget
    ]
    moved = ", ".join(
        f"{format_bytes(size)} {name}" for name, size in found["channel_bytes"].items() if size
    )
    stalls = f"{found['stall_us'] / 1e6:.3g} s waited"
    rows.append(f"  moved: {moved or 'nothing'}; {found['faults']} faults, {stalls}")
    return "\n".join(rows)


def _used(pool: FramePool) -> int:
    count = pool.count
    return min(max(0, count - pool.free_count), count)


def _moves(follower: Follower | None) -> dict[str, int]:
    """What planning did."""
    if follower is None:
        zeros = ("prefetches", "prefetch_hits", "departures", "planned_iterations", "kinds")
        return dict.fromkeys(zeros, 0)
    prefetches = follower.planned.prefetched
    return {
        "prefetches": prefetches,
        "prefetch_hits": max(0, prefetches - follower.planned.late),
        "departures": follower.departures,
        "planned_iterations": follower.planned_iterations,
        "kinds": len(follower.signatures.all),
    }


def _reruns(follower: Follower | None) -> dict[str, float]:
    """Blocks that ran again."""
    segments = follower.segments if follower is not None else None
    if segments is None:
        return {"reruns": 0, "recomputed_bytes": 0, "recompute_us": 0.0}
    return {
        "reruns": segments.reruns,
        "recomputed_bytes": segments.nbytes,
        "recompute_us": segments.seconds * 1e6,
    }


def _with_overlap(pager: Core) -> int:
    """Device bytes at the peak of an update during backward."""
    if not pager.in_backward.dense_peak or pager.budget.moved:
        return 0
    return pager.residency.peak_frames * pager.page_size + pager.in_backward.dense_peak


def plan_figures(follower: Follower | None) -> dict[str, float | None]:
    """Times by the plan and measured, in µs, of the latest iteration's kind."""
    found: dict[str, float | None] = dict.fromkeys(
        (
            "predicted_us", "measured_us", "ideal_us", "bound_us", "overhead_us",
            "iteration_stall_us",
        )
    )  # fmt: skip
    if follower is None:
        return found
    signature = follower.current
    found["iteration_stall_us"] = follower.stall_us_last
    if signature is not None and signature.compiled is not None:
        found["predicted_us"] = signature.compiled.predicted_us
        for name in ("ideal", "bound", "overhead"):
            found[f"{name}_us"] = getattr(signature, f"{name}_us")
        found["measured_us"] = signature.measured
    return found
