"""Planning beside the training: ``python -m tensorpager.planner.background [PARENT]``.

One request on stdin (``request.py``), one line of JSON on stdout; nothing is written to disk. The
answer is ``{"plan": …, "layout": …, "again": …}`` (blocks that should run again, and what an
iteration takes then, in µs; or null), or ``{"refused": reason, "minimum": bytes or null}`` if no
plan can work, or ``{"error": reason}`` with exit code 1. What is no request ends with exit code 2
and one line on stderr.

What it needs is loaded before it reads, so that one that was started early answers soon. A search
in full gives way to the training (nice 19); a quick plan does not, as training is slow until it has
one. It runs on one thread (its parent sets OMP_NUM_THREADS), never loads torch, and dies with its
parent, of which PARENT is the process id.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from contextlib import suppress
from dataclasses import replace
from typing import Any

from .errors import InfeasibleBudget, PagerError, PolicyRefusal
from .hardware import Hardware, from_mapping
from .lifetimes import live_pages
from .places.layout import Layout, frames_of, layout_to_json, place
from .plan import Plan, plan_to_json
from .registry import find, make_plan
from .request import read_header, read_trace
from .simulator import simulate
from .trace import Trace

NICE_IN_FULL = 19
SPARE_SHARES = 64, 32, 24, 16, 12  # of the frames that a plan leaves free, so that all has a place
CPU_SHARE = 8
NEARLY = 1.25  # times the ideal time: a better plan can come with the next search
SHIFT_US, ASTRAY_US = 500.0, 3000.0  # of the host, for a shift; for a page that has no place
ASTRAY_COST = 0.01  # of an iteration's time: no better layout is looked for
FEWER_COST = 0.003  # the same, for fewer moves
BAD_INPUT = 2
PR_SET_PDEATHSIG = 1


def plan_with_layout(
    trace: Trace, hardware: Hardware, *, quick: bool, policy: str = "lp"
) -> tuple[Plan, Layout]:
    """A plan, and base frames for as many of its stays as there is a place for.

    Prefetches fill the device to the last frame, so some stays are shifted, or find no place. The
    executor places those when they come, and moves others aside for it, which is in the way of
    others again: so where a plan for a little less of the device takes less time, that of its
    host for all this included, it is taken. For a CPU, where the planner takes cores from the
    training, one such plan is made, in coarse steps: the first one, and the last one too if it is
    within a quarter of a device without limit.

    Raises what the policy raises: ``InfeasibleBudget``, ``PolicyRefusal``.
    """
    frames = frames_of(trace, hardware)
    on_cpu = trace.device == "cpu"
    first = None
    fits = not trace.ops or int(live_pages(trace, hardware.page_size).max()) <= frames
    if quick and on_cpu and policy == "lp" and not fits:
        first = _for_less(trace, hardware, CPU_SHARE, quick=True, policy=policy)
        if first is not None and _host_us(*first) <= NEARLY * trace.ideal_us:
            return first
    trace, plan = _plan(trace, hardware, quick, policy)
    if policy == "lp" and not quick and plan.moves:
        with suppress(InfeasibleBudget, PolicyRefusal):
            plan = _with_fewer_moves(plan, _plan(trace, hardware, True, policy)[1])
    best = plan, place(trace, plan, frames)
    shares = SPARE_SHARES[1:] if quick else SPARE_SHARES
    for share in (CPU_SHARE,) if on_cpu else shares:
        if _host_us(*best) <= (1 + ASTRAY_COST) * _us(best[0]):
            break
        # What leaves and comes in finer steps finds places more easily.
        coarse = quick and (on_cpu or policy != "lp")
        found = first or _for_less(trace, hardware, share, quick=coarse, policy=policy)
        if found is None or _us(found[0]) > _host_us(*best):
            break
        if _host_us(*found) < _host_us(*best):
            best = _with_bound(plan, found[0]), found[1]
    return best


def _for_less(
    trace: Trace, hardware: Hardware, share: int, *, quick: bool, policy: str
) -> tuple[Plan, Layout] | None:
    """A plan for all frames but one of ``share``, and a layout in all of them; ``None`` if there is
    none. Its bound is the ideal time."""
    frames = frames_of(trace, hardware)
    if frames < share:
        return None
    less = hardware.with_(device_bytes=(frames - frames // share) * hardware.page_size)
    try:
        trace, plan = _plan(trace, less, quick, policy)
    except (InfeasibleBudget, PolicyRefusal):
        return None
    predicted = simulate(trace, hardware, plan).predicted or plan.predicted
    plan = replace(plan, device_bytes=hardware.device_bytes, hardware=hardware, predicted=predicted)
    plan = plan.bounded(trace.ideal_us)
    return plan, place(trace, plan, frames)


def _host_us(plan: Plan, layout: Layout) -> float:
    """What an iteration takes with what the host takes for stays that have no place as long as they
    last."""
    return _us(plan) + SHIFT_US * len(layout.shifts) + ASTRAY_US * layout.unplaced_pages


def _with_fewer_moves(plan: Plan, coarse: Plan) -> Plan:
    """``coarse``, of fewer, longer steps, where it has fewer moves and takes hardly longer: each
    move takes time of the thread that runs ops, which the machine model has not."""
    if len(coarse.moves) >= len(plan.moves) or _us(coarse) > (1 + FEWER_COST) * _us(plan):
        return plan
    return _with_bound(plan, coarse)


def _with_bound(plan: Plan, other: Plan) -> Plan:
    """``other``, with the bound of ``plan``, which has all of the device and the finest steps."""
    return other if plan.bound is None else other.bounded(plan.bound.iteration_us)


def _plan(trace: Trace, hardware: Hardware, quick: bool, policy: str) -> tuple[Trace, Plan]:
    """The plan, and what of the trace it is a plan of."""
    if policy == "joint":
        from .joint.segments import plan_steps  # loads the solver

        trace, plan = plan_steps(trace, hardware, quick=quick)
    else:
        plan = make_plan(policy, trace, hardware, quick=quick)
    simulation = simulate(trace, hardware, plan)
    if simulation.predicted is None:
        raise PolicyRefusal(f"policy '{policy}' made a plan that cannot run: {simulation.reason}")
    return trace, plan


def _us(plan: Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.iteration_us


def _answer(trace: Trace, hardware: Hardware, quick: bool, policy: str) -> dict[str, Any]:
    try:
        plan, layout = plan_with_layout(trace, hardware, quick=quick, policy=policy)
    except InfeasibleBudget as error:
        return {"refused": str(error), "minimum": error.minimum}
    except PolicyRefusal as error:
        return {"refused": str(error), "minimum": None}
    except Exception as error:  # the parent goes on without a plan, and says why
        import traceback

        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}
    again = None
    if policy == "joint" and trace.segments:
        from .joint.segments import choose  # loads the solver

        again = choose(trace, hardware, _us(plan))
    return {"plan": plan_to_json(plan), "layout": layout_to_json(layout), "again": again}


# --- the process ---------------------------------------------------------------------------------


def _die_with_parent() -> None:
    """The kernel kills this process when the thread that started it is gone."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _get_ready() -> None:
    """Load what nearly every plan needs."""
    import highspy  # noqa: F401

    from .lp import policy  # noqa: F401


def main() -> int:
    """Answers the one request; the exit code."""
    _die_with_parent()
    if sys.argv[1:] and sys.argv[1] != str(os.getppid()):
        return 0  # it died before it could take this process with it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the training; it ends this
    answer_to = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a solver prints is no answer
    _get_ready()
    try:
        header = read_header(sys.stdin.buffer)
        if header.get("parent_pid", os.getppid()) != os.getppid():
            return 0  # likewise
        hardware = from_mapping(header["hardware"], "hardware")
        trace = read_trace(sys.stdin.buffer, header)
        policy = header.get("policy", "lp")
        find(policy)
    except PagerError as error:
        line = " ".join(str(error).split())
        print(f"tensorpager.planner.background: no request on stdin: {line}", file=sys.stderr)
        return BAD_INPUT
    quick = header.get("quick", False)
    if not quick:
        os.nice(NICE_IN_FULL)
    answer = _answer(trace, hardware, quick, policy)
    try:
        with answer_to:
            answer_to.write(json.dumps(answer).encode() + b"\n")
    except BrokenPipeError:
        return 1  # nobody waits for it any more
    return 1 if "error" in answer else 0


if __name__ == "__main__":
    sys.exit(main())
