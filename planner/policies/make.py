"""A plan by the name of its policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
    allow: Sequence[str] | None = None,
    progress: Callable[[str, float], None] | None = None,
) -> Plan:
    """The plan as the policy made it. ``quick``, a shorter search, and ``progress`` are for ``lp``
    and ``joint``, the others take no time; ``allow`` is for ``joint``: what it may choose.

    Raises ``PagerError`` for a name that no policy has, and what the policy raises:
    ``InfeasibleBudget``, ``PolicyRefusal``.
    """
    if policy == "lp":
        from ..lp.policy import plan  # loads scipy

        return plan(trace, hardware, quick=quick, progress=progress)
    if policy == "joint":
        from ..joint import policy as joint  # loads scipy

        allowed = joint.ALLOWED if allow is None else allow
        return joint.plan(trace, hardware, allow=allowed, quick=quick, progress=progress)
    return registry.find(policy)(trace, hardware)
