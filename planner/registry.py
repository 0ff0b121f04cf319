"""All policies by name, and a plan by the name of its policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from .errors import PagerError
from .hardware import Hardware
from .plan import Plan
from .policies import appobmem, autoswap, g10, lru, vdnn, vdnnpp
from .trace import Trace

Policy = Callable[[Trace, Hardware], Plan]
RULES = ("checkpoint", "selective", "zero-offload")
CHOOSERS = (*RULES, "joint")  # do more than move pages


def _by_rule(name: str, trace: Trace, hardware: Hardware) -> Plan:
    from .joint.policy import plan_by_rule  # loads the solver

    return plan_by_rule(name, trace, hardware)


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
        from .lp.policy import plan  # loads the solver

        return plan(trace, hardware, quick=quick, progress=progress)
    if policy == "joint":
        from .joint import policy as joint  # loads the solver

        allowed = joint.ALLOWED if allow is None else allow
        return joint.plan(trace, hardware, allow=allowed, quick=quick, progress=progress)
    return find(policy)(trace, hardware)


POLICIES: dict[str, Policy] = {
    "lru": lru.plan,
    "vdnn-all": partial(vdnn.plan, variant="all"),
    "vdnn-conv": partial(vdnn.plan, variant="conv"),
    "vdnn-dyn": partial(vdnn.plan, variant="dyn"),
    "vdnn++": vdnnpp.plan,
    **{f"autoswap-{score}": partial(autoswap.plan, score=score) for score in autoswap.SCORES},
    "appobmem": appobmem.plan,
    "g10": g10.plan,
    **{name: partial(_by_rule, name) for name in RULES},
    **{name: partial(make_plan, name) for name in ("lp", "joint")},
}
ALIASES = {"vdnn": "vdnn-dyn", "autoswap": "autoswap-swdoa"}


def find(name: str) -> Policy:
    """The policy called ``name``, or by an alias. Raises ``PagerError`` for others."""
    policy = POLICIES.get(ALIASES.get(name, name))
    if policy is None:
        known = ", ".join([*POLICIES, *ALIASES])
        raise PagerError(f"no policy '{name}' (known: {known})")
    return policy
