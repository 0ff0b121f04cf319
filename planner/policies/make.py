"""A plan by the name of its policy."""

from __future__ import annotations

from collections.abc import Callable

from ..hardware import Hardware
from ..plan import Plan
from ..trace import Trace
from . import registry


def make_plan(
    policy: str,
    trace: Trace,
    hardware: Hardware,
    *,
    quick: bool = False,
    progress: Callable[[str, float], None] | None = None,
) -> Plan:
    """The plan as the policy made it. ``quick``, a shorter search, and ``progress`` are for ``lp``,
    the others take no time.

    Raises ``PagerError`` for a name that no policy has, and what the policy raises:
    ``InfeasibleBudget``, ``PolicyRefusal``.
    """
    if policy != "lp":
        return registry.find(policy)(trace, hardware)
    from ..lp.policy import plan  # loads scipy

    return plan(trace, hardware, quick=quick, progress=progress)
