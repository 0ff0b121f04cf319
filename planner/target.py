"""How little device memory is enough for a share of the speed?

Budgets are whole pages, from the largest working set to room for everything. A few evenly spaced
ones are tried first, because a policy's time need not fall as room grows; then the search goes on
below the smallest that is good enough, by halves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from .hardware import Hardware
from .lifetimes import live_pages, working_set_pages
from .plan import Plan
from .sweep import Outcome, Task, evaluate_all
from .trace import Trace

SAMPLES = 7  # budgets tried first, beside the least and the most
FINENESS = 1024  # the answer is found to this part of the peak, or to a page: plans differ by more
ROUNDING = 1e-6  # of the time; below it are rounding errors


@dataclass(frozen=True)
class Answer:
    """``tried`` are the outcomes by rising budget, all with plans of one policy; ``enough`` is the
    one with the smallest budget that reaches the target (``None``: none does), ``plan`` its plan.
    ``peak_bytes``: in whole pages, room for everything."""

    policy: str
    peak_bytes: int
    tried: list[Outcome]
    enough: Outcome | None
    plan: Plan | None


def least_memory(
    trace: Trace,
    policy: str,
    hardware: Hardware,
    target_percent: float,
    *,
    quick: bool = False,
    done: Callable[[Outcome], None] | None = None,
) -> Answer:
    """The smallest device budget found with which ``policy`` reaches ``target_percent`` of the
    ideal speed. ``hardware``'s own device plays no part; ``done`` is called with each outcome. A
    budget smaller than the answer that was not tried may do too."""
    page = hardware.page_size
    most = max(1, int(live_pages(trace, page).max(initial=0)))
    least = max(1, int(working_set_pages(trace, page).max(initial=0)))
    found: dict[int, Outcome] = {}  # by pages of device memory
    slowest = 100.0 / target_percent * (1.0 + ROUNDING)

    def attempt(budgets: list[int]) -> int | None:
        """Pages of the smallest budget so far that reaches the target; only its plan is kept."""
        new = sorted(set(budgets) - set(found))
        machines = [hardware.with_(device_bytes=pages * page) for pages in new]
        tasks = [Task(policy, machine, quick=quick, keep_plan=True) for machine in machines]
        found.update(zip(new, evaluate_all(trace, tasks, done)))
        good = [
            pages
            for pages, outcome in found.items()
            if outcome.predicted
            and outcome.predicted.iteration_us <= slowest * outcome.predicted.ideal_us
        ]
        best = min(good, default=None)
        for pages in found.keys() - {best}:
            found[pages] = replace(found[pages], plan=None)
        return best

    attempt([least, most])
    minimum = found[least].minimum  # where a policy refuses the least, and knows what works
    if minimum is not None:
        least = min(most, -(-minimum // page))
    best = attempt([least, *between(least, most, SAMPLES)])
    while best is not None and best > least:
        low = max((pages for pages in found if pages < best), default=least - 1)
        if best - low <= max(1, most // FINENESS):
            break
        best = attempt(between(max(low, least - 1), best, 1))
    enough = None if best is None else found[best]
    tried = [found[pages] for pages in sorted(found)]
    return Answer(policy, most * page, tried, enough, enough.plan if enough else None)


def between(low: int, high: int, count: int) -> list[int]:
    """``count`` evenly spaced numbers above ``low`` and below ``high``, or all there are."""
    count = min(count, high - low - 1)
    return [low + (high - low) * n // (count + 1) for n in range(1, count + 1)]
