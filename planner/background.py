"""Planning beside the training: ``python -m tensorpager.planner.background [PARENT]``.

One request on stdin (``request.py``), one line of JSON on stdout; nothing is written to disk. The
answer is ``{"plan": …, "layout": …, "again": …}`` (blocks that should run again, and what an
iteration takes then, in µs; or null), or ``{"refused": reason, "minimum": bytes or null}`` if no
plan can work, or ``{"error": reason}`` with exit code 1. What is no request ends with exit code 2
and one line on stderr.

What it needs is loaded before it reads, so that one that was started early answers soon. It gives
way to the training (nice 10 for a quick plan, which training waits for, 19 for a full one), runs on
one thread (its parent sets OMP_NUM_THREADS), never loads torch, and dies with its parent, of which
PARENT is the process id.
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
from .layout import Layout, frames_of, layout_to_json, place
from .plan import Bound, Plan, plan_to_json
from .registry import find, make_plan
from .request import read_header, read_trace
from .simulator import simulate
from .trace import Trace

NICE, NICE_IN_FULL = 10, 19
SPARE_SHARES = 64, 32, 24, 16, 12  # of the frames that a plan leaves free, so that all has a place
CPU_SHARES = (32,)
SPARE_COST = 0.01  # of an iteration's time, at most, for that
FEWER_COST = 0.003  # the same, for fewer moves
BAD_INPUT = 2
PR_SET_PDEATHSIG = 1


def plan_with_layout(
    trace: Trace, hardware: Hardware, *, quick: bool, policy: str = "lp"
) -> tuple[Plan, Layout]:
    """A plan, and base frames for as many of its stays as there is a place for.

    Prefetches fill the device to the last frame, so some stays may find none. The executor places
    those when they come, and moves others aside for it, which is in the way of others again: so
    where a plan for a little less of the device waits hardly longer, and has a place for more, it
    is taken: the first one of several in which all has one. For a CPU, where the planner takes
    cores from the training, one is made, in coarse steps.

    Raises what the policy raises: ``InfeasibleBudget``, ``PolicyRefusal``.
    """
    frames = frames_of(trace, hardware)
    trace, plan = _plan(trace, hardware, quick, policy)
    if policy == "lp" and not quick and plan.moves:
        with suppress(InfeasibleBudget, PolicyRefusal):
            plan = _with_fewer_moves(plan, _plan(trace, hardware, True, policy)[1])
    layout, least_us = place(trace, plan, frames), _us(plan)
    on_cpu = trace.device == "cpu"
    shares = SPARE_SHARES[1:] if quick else SPARE_SHARES
    for share in CPU_SHARES if on_cpu else shares:
        if not layout.unplaced_pages or frames < share:
            break
        less = hardware.with_(device_bytes=(frames - frames // share) * hardware.page_size)
        try:
            # What leaves and comes in finer steps finds places more easily.
            its, other = _plan(trace, less, quick and (on_cpu or policy != "lp"), policy)
        except (InfeasibleBudget, PolicyRefusal):
            break
        if _us(other) > (1 + SPARE_COST) * least_us:
            break
        placed = place(its, other, frames)
        if placed.unplaced_pages < layout.unplaced_pages:
            predicted = simulate(its, hardware, other).predicted or other.predicted
            wider = replace(other, device_bytes=plan.device_bytes, hardware=plan.hardware)
            plan, layout = _with_bound(plan, replace(wider, predicted=predicted)), placed
    return plan, layout


def _with_fewer_moves(plan: Plan, coarse: Plan) -> Plan:
    """``coarse``, of fewer, longer steps, where it has fewer moves and takes hardly longer: each
    move takes time of the thread that runs ops, which the machine model has not."""
    if len(coarse.moves) >= len(plan.moves) or _us(coarse) > (1 + FEWER_COST) * _us(plan):
        return plan
    return _with_bound(plan, coarse)


def _with_bound(plan: Plan, other: Plan) -> Plan:
    """``other``, with the bound of ``plan``, which has all of the device and the finest steps."""
    if plan.bound is None:
        return other
    least = plan.bound.iteration_us
    return replace(other, bound=Bound(least, min(100.0, 100 * least / _us(other))))


def _plan(trace: Trace, hardware: Hardware, quick: bool, policy: str) -> tuple[Trace, Plan]:
    """The plan, and what of the trace it is a plan of."""
    if policy == "joint":
        from .joint.segments import plan_steps  # loads scipy

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
        from .joint.segments import choose  # loads scipy

        again = choose(trace, hardware, _us(plan))
    return {"plan": plan_to_json(plan), "layout": layout_to_json(layout), "again": again}


# --- the process ---------------------------------------------------------------------------------


def _die_with_parent() -> None:
    """The kernel kills this process when the thread that started it is gone."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _get_ready() -> None:
    """Load what nearly every plan needs."""
    import scipy.optimize  # noqa: F401 (and scipy.sparse)

    from .lp import policy  # noqa: F401


def main() -> int:
    """Answers the one request; the exit code."""
    _die_with_parent()
    if sys.argv[1:] and sys.argv[1] != str(os.getppid()):
        return 0  # it died before it could take this process with it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the training; it ends this
    os.nice(NICE)
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
        os.nice(NICE_IN_FULL - NICE)
    answer = _answer(trace, hardware, quick, policy)
    try:
        with answer_to:
            answer_to.write(json.dumps(answer).encode() + b"\n")
    except BrokenPipeError:
        return 1  # nobody waits for it any more
    return 1 if "error" in answer else 0


if __name__ == "__main__":
    sys.exit(main())
