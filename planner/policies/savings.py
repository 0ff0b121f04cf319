"""How much device memory a policy can do without at a given slowdown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..errors import InfeasibleBudget, PolicyRefusal
from ..hardware import Hardware
from ..lifetimes import live_pages, working_set_pages
from ..plan import Plan, Predicted
from ..simulator import simulate
from ..sizes import format_bytes
from ..trace import Trace

Policy = Callable[[Trace, Hardware], Plan]
STILL_NO_STALL = 1e-6  # of the ideal time; below it are rounding errors of the times


@dataclass(frozen=True)
class Saving:
    """``plan`` runs in ``device_bytes``, which is ``saved_bytes`` less than ``peak_bytes``, what
    the iteration has live at its fullest."""

    device_bytes: int
    peak_bytes: int
    plan: Plan
    predicted: Predicted

    @property
    def saved_bytes(self) -> int:
        return self.peak_bytes - self.device_bytes

    @property
    def saved_percent(self) -> float:
        return 100.0 * self.saved_bytes / self.peak_bytes if self.peak_bytes else 0.0


def saving_at(
    policy: Policy, trace: Trace, hardware: Hardware, slowdown: float, *, samples: int = 0
) -> Saving:
    """The smallest device budget found whose plan takes at most (1 + ``slowdown``) × ideal.

    Bisection over whole pages between the largest working set and the peak; ``hardware``'s own
    device size plays no part. A policy's time need not fall as room grows, so a smaller budget
    that bisection never looked at may do too; the one returned does. ``samples`` evenly spaced
    budgets are tried first, from the smallest on, and bisection goes on below the first that does.
    Raises ``PolicyRefusal`` if the plan is too slow even with room for everything.
    """
    page = int(hardware.page_size)
    peak = int(live_pages(trace, page).max(initial=0))
    high = max(peak, 1)
    best = _attempt(policy, trace, hardware.with_(device_bytes=high * page), slowdown)
    if best is None:  # vdnn-all, for one, moves tensors even then
        raise PolicyRefusal(
            f"with room for all {format_bytes(high * page)} the policy's plan is already more than "
            f"{100 * slowdown:g} % slower than the ideal; allow a greater slowdown"
        )
    low = max(int(working_set_pages(trace, page).max(initial=0)), 1) - 1  # taken as too small
    step = (high - low) / (samples + 1)
    tries = sorted({low + int(step * n) for n in range(1, samples + 1)} - {low})
    while high - low > 1:
        middle = tries.pop(0) if tries else (low + high) // 2
        attempt = _attempt(policy, trace, hardware.with_(device_bytes=middle * page), slowdown)
        if attempt is None:
            low = middle
        else:
            high, best = middle, attempt
            tries.clear()
    return Saving(high * page, peak * page, *best)


def _attempt(
    policy: Policy, trace: Trace, hardware: Hardware, slowdown: float
) -> tuple[Plan, Predicted] | None:
    """The plan and its prediction if it is fast enough."""
    try:
        plan = policy(trace, hardware)
    except (PolicyRefusal, InfeasibleBudget):
        return None
    predicted = plan.predicted or simulate(trace, hardware, plan).predicted
    limit = 1.0 + slowdown + STILL_NO_STALL
    if predicted is None or predicted.iteration_us > limit * predicted.ideal_us:
        return None
    return plan, predicted
