"""Budgets that are enlarged while the pager runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...planner.sizes import parse_bytes
from ..errors import PagerError
from .ranks import share_of

if TYPE_CHECKING:
    from ..core import Core


def grow(pager: Core, wanted: dict[str, int | str | None]) -> None:
    """See ``Pager.grow``; ``wanted``: tier → its new budget, or ``None``."""
    for tier, text in wanted.items():
        if text is None:
            continue
        nbytes = share_of(parse_bytes(text, f"{tier}_budget"), tier, pager.device.type)
        if nbytes < pager.budget_bytes[tier]:
            raise ValueError(
                f"{tier}_budget={text!r} is less than the {pager.budget_bytes[tier]} bytes it "
                "has now; budgets can only grow"
            )
        with pager.lock:
            if pager.follower is not None:
                pager.follower.forget_plans()
            _grow_tier(pager, tier, nbytes)
            pager.budget_bytes[tier] = nbytes


def _grow_tier(pager: Core, tier: str, nbytes: int) -> None:
    if tier == "host":
        pager.host.grow(nbytes)
        pager.migration.host_grew()
    elif tier == "disk":
        if pager.disk is None:
            raise PagerError("this Pager has no disk tier; give disk_path when making it")
        pager.disk.grow(nbytes)
    elif nbytes > pager.backend.reserved_bytes:
        raise PagerError(
            f"device_budget can grow to {pager.backend.reserved_bytes} bytes at most, the range "
            "reserved at start; save state_dict() and make a new Pager"
        )
    else:
        pager.budget.bytes = nbytes
        with pager.quiet():
            pager.budget.place()
