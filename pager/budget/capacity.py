"""Whether all tiers together can hold what is to be paged, before anything is moved."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from ...planner.sizes import format_bytes
from ..errors import TierFull

if TYPE_CHECKING:
    from ..core import Core


def bytes_in_pages(pager: Core, tensors: Iterable[torch.Tensor]) -> int:
    """Bytes that copies of ``tensors`` take: whole pages, unless they share one. Of a sharded one
    only this rank's shard counts."""
    total = 0
    for given in tensors:
        tensor = getattr(given, "_local_tensor", given)
        nbytes = tensor.numel() * tensor.element_size()
        small = pager.space.is_small(nbytes)
        total += nbytes if small else pager.space.pages_for(nbytes) * pager.page_size
    return total


def check_capacity(pager: Core, nbytes: int, what: str) -> None:
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
