"""A plan in words: what it does, what limits it, and what more device memory would buy."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ...planner.errors import PagerError as PlannerError
from ...planner.sizes import format_bytes
from ..machine import ranks
from ..tensor.names import streamed_names

if TYPE_CHECKING:
    from ...planner.hardware import Hardware
    from ..core import Core
    from .follower import Follower
    from .guide import Guide

_LIMITS = {
    "host-in": "the link into the device",
    "host-out": "the link out of the device",
    "disk-in": "reading the disk",
    "disk-out": "writing to the disk",
}
_NOTHING = 0.01  # of the iteration: waiting that is not worth naming
GiB = 1 << 30


def explain(pager: Core, follower: Follower | None) -> str:
    """See ``Pager.explain``."""
    part = ranks.describe(dict(pager.budget_bytes), pager.device.type)
    lines = [line for line in (part, pager.cut_short, _plan_in_words(pager, follower)) if line]
    streamed = streamed_names(pager)
    if streamed:
        lines.append(
            f"Streamed slab by slab, since they do not fit whole: {', '.join(streamed)}. Their "
            "products, or sums over them, have other last bits than PyTorch's."
        )
    return "\n".join(lines)


def _plan_in_words(pager: Core, follower: Follower | None) -> str:
    if pager.fits:
        return "Everything fits into the device budget: nothing is moved, so nothing is planned."
    if follower is None:
        return "policy='lru' plans nothing: pages are brought in when an op needs them."
    error = follower.mover.error
    if error is not None:
        return f"No plan is followed any more, because a planned move failed: {error}"
    kind = follower.current
    if kind is None:
        return "There is no plan yet: no iteration has been recorded."
    if kind.refused is not None:
        return f"There is no plan, pages are brought in when an op needs them: {kind.refused}"
    if kind.turned_down is not None:
        return f"There is no plan: {kind.turned_down}."
    if kind.guide is None:
        state = "is being made" if kind.process is not None else "will be made"
        return f"There is no plan yet: it {state}, of an iteration of {len(kind.keys)} accesses."
    lines = _plan_lines(kind.guide)
    if kind.measured is not None:
        lines.append(
            f"Measured: {kind.measured / 1e3:.1f} ms, "
            f"{100 * (kind.measured / kind.guide.predicted_us - 1):+.1f} % of what was predicted."
        )
    if kind.on_demand_us is not None:
        lines.append(f"Without a plan it takes {kind.on_demand_us / 1e3:.1f} ms at best.")
    if kind.hardware is not None:
        lines += [_limit(kind.guide, kind.hardware), _more(kind.guide, kind.hardware)]
    return "\n".join(lines)


def _plan_lines(guide: Guide) -> list[str]:
    plan, trace = guide.plan, guide.trace
    predicted = plan.predicted
    assert predicted is not None
    size = plan.page_size
    moved = Counter[str]()
    for move in plan.moves:
        if move.action in ("in", "out"):
            moved[f"{move.tier}-{move.action}"] += move.page_count * size
    away = sum(run.page_count for run in plan.start) * size
    moving = {move.tensor for move in plan.moves}
    ways = ", ".join(f"{format_bytes(nbytes)} {name}" for name, nbytes in sorted(moved.items()))
    lines = [
        f"An iteration of {len(guide.keys)} accesses to {trace.tensors} page runs takes "
        f"{predicted.iteration_us / 1e3:.1f} ms by the plan and {predicted.ideal_us / 1e3:.1f} ms "
        "if nothing ever had to wait.",
        f"It moves {ways or 'nothing'}; {trace.tensors - len(moving)} runs stay on the device all "
        f"the time, and {format_bytes(away)} are off it when an iteration begins.",
    ]
    if plan.bound is not None:
        lines.append(
            f"No plan is faster than {plan.bound.iteration_us / 1e3:.1f} ms; this one is at "
            f"{plan.bound.percent_of_bound:.1f} % of that speed."
        )
    return lines


def _limit(guide: Guide, hardware: Hardware) -> str:
    from ...planner.simulator import simulate

    result = simulate(guide.trace, hardware, guide.plan)
    waited = Counter[str]()
    for stall in result.stalls:
        waited[stall.channel] += int(stall.us)
    if sum(waited.values()) <= _NOTHING * guide.predicted_us:
        return "The limit is compute: the moves hide behind it."
    channel, microseconds = waited.most_common(1)[0]
    return (
        f"The limit is {_LIMITS.get(channel, channel)}: the ops wait {microseconds / 1e3:.1f} ms "
        f"of the iteration for it."
    )


def _more(guide: Guide, hardware: Hardware) -> str:
    from ...planner.lp.policy import bound

    larger = hardware.with_(device_bytes=hardware.device_bytes + GiB)
    try:
        now = bound(guide.trace, hardware, quick=True)
        then = bound(guide.trace, larger, quick=True)
    except PlannerError as error:
        return f"What one more GiB would buy could not be found out: {error}"
    saved = max(0.0, now - then)
    return (
        f"One more GiB on the device would save up to {saved / 1e3:.1f} ms an iteration "
        f"({100 * saved / now:.1f} %)."
    )
