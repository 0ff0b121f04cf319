"""Many what-ifs on one trace: plans by any policy, or a given plan, on any machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .errors import InfeasibleBudget, PolicyRefusal
from .hardware import Hardware
from .lifetimes import require_working_sets
from .plan import Plan, Predicted
from .registry import make_plan
from .simulator import simulate
from .trace import Trace


@dataclass(frozen=True)
class Task:
    """A plan by ``policy`` for ``hardware``; or this very ``plan``, made for whatever machine."""

    policy: str
    hardware: Hardware
    quick: bool = False
    plan: Plan | None = None
    keep_plan: bool = False  # hand the plan back with the outcome
    allow: tuple[str, ...] | None = None  # what policy joint may choose; all if not given


@dataclass(frozen=True)
class Outcome:
    """``predicted`` is ``None`` where nothing runs, and ``reason`` says why; ``minimum`` is then
    the smallest device budget in bytes that works, if the policy knows it."""

    policy: str
    hardware: Hardware
    predicted: Predicted | None
    seconds: float
    reason: str = ""
    minimum: int | None = None
    bound_us: float | None = None  # no plan is faster; policy lp only
    plan: Plan | None = None


def evaluate(
    trace: Trace, task: Task, progress: Callable[[str, float], None] | None = None
) -> Outcome:
    """Plans if there is no plan yet, and runs the machine model. A refusal is an outcome too."""
    began = time.perf_counter()
    try:
        # Asked first, because ``lp`` would search for the smallest budget that works.
        require_working_sets(trace, task.hardware)
        plan = task.plan or make_plan(
            task.policy,
            trace,
            task.hardware,
            quick=task.quick,
            allow=task.allow,
            progress=progress,
        )
    except (PolicyRefusal, InfeasibleBudget) as refusal:
        reason = str(refusal).removeprefix(f"{task.policy}: ")
        minimum = refusal.minimum if isinstance(refusal, InfeasibleBudget) else None
        seconds = time.perf_counter() - began
        return Outcome(task.policy, task.hardware, None, seconds, reason, minimum)
    predicted, reason = plan.predicted, ""
    if task.plan is not None or predicted is None:
        result = simulate(trace, task.hardware, plan)
        predicted, reason = (result.predicted if result.feasible else None), result.reason
    return Outcome(
        task.policy,
        task.hardware,
        predicted,
        time.perf_counter() - began,
        reason,
        bound_us=plan.bound.iteration_us if plan.bound and task.plan is None else None,
        plan=plan if task.keep_plan else None,
    )


def evaluate_all(
    trace: Trace, tasks: Sequence[Task], done: Callable[[Outcome], None] | None = None
) -> list[Outcome]:
    """The outcomes in the order of ``tasks``; ``done`` is called with each when it is there."""
    outcomes = []
    for task in tasks:
        outcomes.append(evaluate(trace, task))
        if done is not None:
            done(outcomes[-1])
    return outcomes
