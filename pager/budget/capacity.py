"""Whether all tiers together can hold what is to be paged, before anything is moved."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from ...planner.sizes import format_bytes
from ..errors import TierFull
from ..optim import fused
from .step_need import probe_step

if TYPE_CHECKING:
    from ..api import Pager


def bytes_in_pages(pager: Pager, tensors: Iterable[torch.Tensor]) -> int:
    """Bytes that copies of ``tensors`` take: whole pages, unless they share one. Of a sharded one
    only this rank's shard counts."""
    total = 0
    for given in tensors:
        tensor = getattr(given, "_local_tensor", given)
        nbytes = tensor.numel() * tensor.element_size()
        small = pager.space.is_small(nbytes)
        total += nbytes if small else pager.space.pages_for(nbytes) * pager.page_size
    return total


def check_capacity(pager: Pager, nbytes: int, what: str) -> None:
    """Refuse what all tiers together cannot hold beside what is live: ``TierFull``."""
    size = pager.page_size
    with pager.lock:
        pager.residency.collect()
    slots = pager.host.slots.count + (pager.disk.slots.count if pager.disk else 0)
    frames = pager.budget.frames_at_least()
    room = max(0, frames + slots - pager.space.live_pages) * size
    if nbytes > room:
        short = -(-(nbytes - room) // size) * size
        raise TierFull(
            f"{what} take {format_bytes(nbytes)} and the tiers have {format_bytes(room)} left "
            f"(device arena {format_bytes(frames * size)}, host "
            f"{format_bytes(pager.host.capacity_bytes)}, disk "
            f"{format_bytes(pager.disk.slots.count * size if pager.disk else 0)}); raise "
            f"host_budget or disk_budget by at least {format_bytes(short)} ({short} bytes; "
            "pager.grow does it now). Nothing was changed."
        )


def check_states(pager: Pager, optimizer: Any) -> None:
    """The same for the states that the next step of ``optimizer`` makes."""
    with torch._C.DisableTorchFunctionSubclass():
        fresh = [
            p
            for group in optimizer.param_groups
            for p in group["params"]
            if p.grad is not None and not optimizer.state.get(p)
        ]
    if optimizer._tp_stepped and not optimizer.state:  # of the kind that keeps none
        fresh = []
    if not fresh:
        return
    what = f"the states of {type(optimizer).__mro__[2].__name__}"
    if fused.mode(optimizer) == "always":
        check_capacity(pager, bytes_in_pages(pager, fused.state_shapes(optimizer, fresh)), what)
        return
    need = probe_step(optimizer, lambda action: (action(), 0)[1])  # type: ignore[func-returns-value]
    if need is not None:
        nbytes = int(need.state * bytes_in_pages(pager, fresh))
        check_capacity(pager, nbytes, what)
