"""All policies by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ..errors import PagerError
from ..hardware import Hardware
from ..plan import Plan
from ..trace import Trace
from . import appobmem, autoswap, g10, lru, vdnn, vdnnpp

Policy = Callable[[Trace, Hardware], Plan]


def _lp(trace: Trace, hardware: Hardware) -> Plan:
    from ..lp.policy import plan  # loads scipy

    return plan(trace, hardware)


def _joint(trace: Trace, hardware: Hardware) -> Plan:
    from ..joint.policy import plan  # loads scipy

    return plan(trace, hardware)


def _by_rule(name: str, trace: Trace, hardware: Hardware) -> Plan:
    from ..joint.policy import plan_by_rule  # loads scipy

    return plan_by_rule(name, trace, hardware)


POLICIES: dict[str, Policy] = {
    "lru": lru.plan,
    "vdnn-all": partial(vdnn.plan, variant="all"),
    "vdnn-conv": partial(vdnn.plan, variant="conv"),
    "vdnn-dyn": partial(vdnn.plan, variant="dyn"),
    "vdnn++": vdnnpp.plan,
    **{f"autoswap-{score}": partial(autoswap.plan, score=score) for score in autoswap.SCORES},
    "appobmem": appobmem.plan,
    "g10": g10.plan,
    **{name: partial(_by_rule, name) for name in ("checkpoint", "selective", "zero-offload")},
    "lp": _lp,
    "joint": _joint,
}
CHOOSERS = ("checkpoint", "selective", "zero-offload", "joint")  # do more than move pages
ALIASES = {"vdnn": "vdnn-dyn", "autoswap": "autoswap-swdoa"}


def names() -> list[str]:
    """All policies, without aliases."""
    return list(POLICIES)


def find(name: str) -> Policy:
    """The policy called ``name``, or by an alias. Raises ``PagerError`` for others."""
    policy = POLICIES.get(ALIASES.get(name, name))
    if policy is None:
        known = ", ".join([*POLICIES, *ALIASES])
        raise PagerError(f"no policy '{name}' (known: {known})")
    return policy
