"""A plan in words: what it does, what limits it, and what more device memory would buy."""

from __future__ import annotations

from collections import Counter

import numpy as np

from ...planner.errors import PagerError as PlannerError
from ...planner.hardware import Hardware
from ...planner.sizes import format_bytes
from ...planner.trace import Trace
from ..core import Core
from ..machine import ranks
from ..tensor.names import streamed_names
from ..tensor.segments import Segments
from .compiled_plan import CompiledPlan
from .follower import Follower
from .signatures import StepSignature

_LIMITS = {
    "host-in": "the link into the device",
    "host-out": "the link out of the device",
    "disk-in": "reading the disk",
    "disk-out": "writing to the disk",
}
_NOTHING = 0.01  # of the iteration: waiting that is not worth naming
_MUCH = 0.1  # of what plain PyTorch takes: overhead that is
GiB = 1 << 30


def explain(pager: Core, follower: Follower | None) -> str:
    """See ``Pager.explain``."""
    part = ranks.describe(dict(pager.budget_bytes), pager.device.type)
    said = (
        pager.about_budgets,
        part,
        pager.cut_short,
        f"{follower.starting}." if follower is not None and follower.starting else None,
        _plan_in_words(pager, follower),
        pager.wear.in_words(),
    )
    lines = [line for line in said if line]
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
    signature = follower.current
    if signature is None:
        return "There is no plan yet: no iteration has been recorded."
    if signature.refused is not None:
        return f"There is no plan, pages are brought in when an op needs them: {signature.refused}"
    if signature.turned_down is not None:
        return f"There is no plan: {signature.turned_down}."
    blocks = [] if follower.segments is None else [_blocks_in_words(signature, follower.segments)]
    if signature.compiled is not None and not signature.ways.by_plan:
        said = f"There is a plan, and it is not followed now: {signature.ways}."
        return "\n".join([said, *blocks])
    if signature.compiled is None:
        state = "is being made" if signature.process is not None else "will be made"
        return (
            f"There is no plan yet: it {state}, of an iteration of {len(signature.keys)} accesses."
        )
    lines = [*_plan_lines(signature.compiled), *_speed_lines(signature), *blocks]
    if signature.on_demand_us is not None:
        lines.append(f"Without a plan it takes {signature.on_demand_us / 1e3:.1f} ms at best.")
    if signature.hardware is not None:
        lines += [
            _limit(signature, signature.hardware),
            _more(signature.compiled, signature.hardware),
        ]
    return "\n".join(lines)


def _blocks_in_words(signature: StepSignature, segments: Segments) -> str:
    """Which blocks run again in backward, and which cannot."""
    base = signature.base or signature
    blocks = {call.block for call in signature.log.calls}
    again, fixed = signature.log.again, blocks & segments.refused.keys()
    if again:
        said = (
            f"{len(again)} of {len(blocks)} blocks run again in backward instead of having their "
            f"activations stored ({', '.join(sorted(again))}): without that an iteration takes "
            f"{base.before_us / 1e3:.1f} ms."
        )
    elif base.kept is not None:
        said = f"The activations of all blocks are stored; {base.kept}."
    elif base.again:
        said = f"{len(base.again)} of {len(blocks)} blocks are about to run again in backward."
    else:
        said = f"The activations of all {len(blocks)} blocks are stored."
    why = "".join(f" {block!r} {segments.refused[block]}." for block in sorted(fixed))
    return said + (f" {len(fixed)} cannot run again:{why}" if why else "")


def _steps_in(trace: Trace) -> int:
    return int(np.isfinite(trace.op_host_us).sum())


def _plan_lines(compiled: CompiledPlan) -> list[str]:
    plan, trace = compiled.plan, compiled.trace
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
        f"An iteration of {len(compiled.keys)} accesses to {trace.tensors} extents takes "
        f"{predicted.iteration_us / 1e3:.1f} ms by the plan, and waits for "
        f"{predicted.stall_us / 1e3:.1f} ms of that.",
        f"It moves {ways or 'nothing'}; {trace.tensors - len(moving)} extents stay on the device "
        f"all the time, and {format_bytes(away)} are off it when an iteration begins.",
    ]
    met = [name in ("gather", "reduce") for name in trace.op_names]
    if any(met):
        took = float(trace.op_duration_us[met].sum()) / 1e3
        lines.append(
            f"{took:.1f} ms of it are {sum(met)} gathers and reduce-scatters: the network, and "
            "ranks that wait for each other. Shards arrive before their gathers begin, and other "
            "pages move meanwhile."
        )
    if plan.host_steps:
        lines.append(
            f"The host takes {len(plan.host_steps)} of {_steps_in(trace)} steps of parameters, "
            f"{predicted.host_us / 1e3:.1f} ms of its time."
        )
    return lines


def _speed_lines(signature: StepSignature) -> list[str]:
    """How fast it is, against what was predicted and what can be."""
    compiled, measured = signature.compiled, signature.measured
    assert compiled is not None
    lines = []
    if signature.plain_us is not None and signature.ideal_us is not None:
        lines.append(f"Plain PyTorch takes {signature.ideal_us / 1e3:.1f} ms for the same ops.")
    bound, takes = signature.bound_us, measured or compiled.predicted_us
    if bound is not None and takes < bound:
        lines.append(f"No plan was faster than {bound / 1e3:.1f} ms; ops take less time by now.")
    elif bound is not None:
        how = "as predicted" if measured is None else "as measured"
        lines.append(
            f"No plan is faster than {bound / 1e3:.1f} ms; this one is at "
            f"{100 * bound / takes:.1f} % of that speed, {how}."
        )
    lines += [f"Note: {note}." for note in compiled.plan.notes]
    if measured is not None:
        off = 100 * (measured / compiled.predicted_us - 1)
        waited = signature.waited_us or 0.0
        lines.append(
            f"Measured: {measured / 1e3:.1f} ms, {off:+.1f} % of what was predicted; "
            f"{waited / 1e3:.1f} ms of it waiting for pages."
        )
    if signature.overhead_us is not None:
        lines.append(
            f"Overhead: {signature.overhead_us / 1e3:.1f} ms of that are neither PyTorch's ops nor "
            "waiting, but the pager's own work, and what moves take from the ops beside them."
        )
    return lines


def _limit(signature: StepSignature, hardware: Hardware) -> str:
    from ...planner.simulator import simulate

    compiled, overhead = signature.compiled, signature.overhead_us or 0.0
    assert compiled is not None
    result = simulate(compiled.trace, hardware, compiled.plan)
    waited = Counter[str]()
    for stall in result.stalls:
        waited[stall.channel] += int(stall.us)
    late = (signature.waited_us or 0.0) - sum(waited.values())
    if overhead > max(sum(waited.values()), late, _MUCH * (signature.ideal_us or 0.0)):
        return "The limit is the pager's overhead."
    if late > _MUCH * (signature.measured or 0.0):
        return f"The limit is moves that end later than planned: ops wait {late / 1e3:.1f} ms more."
    if sum(waited.values()) <= _NOTHING * compiled.predicted_us:
        return "The limit is compute: hardly an op waits for a move."
    channel, microseconds = waited.most_common(1)[0]
    return (
        f"The limit is {_LIMITS.get(channel, channel)}: the ops wait {microseconds / 1e3:.1f} ms "
        f"of the iteration for it."
    )


def _more(compiled: CompiledPlan, hardware: Hardware) -> str:
    from ...planner.joint.segments import least_us

    larger = hardware.with_(device_bytes=hardware.device_bytes + GiB)
    try:
        now, then = least_us(compiled.trace, hardware), least_us(compiled.trace, larger)
    except PlannerError as error:
        return f"What one more GiB would buy could not be found out: {error}"
    saved = max(0.0, now - then)
    return (
        f"One more GiB on the device would save up to {saved / 1e3:.1f} ms an iteration "
        f"({100 * saved / now:.1f} %)."
    )
