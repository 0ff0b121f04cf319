"""Whether all tiers together can hold what is to be paged, before anything is moved."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from ...planner.sizes import format_bytes
from ..errors import TierFull

if TYPE_CHECKING:
    from ..memory.space import Space
    from .budget import DeviceBudget


def bytes_in_pages(space: Space, tensors: Iterable[torch.Tensor]) -> int:
    """Bytes that copies of ``tensors`` take: whole pages, unless they share one. Of a sharded one
    only this rank's shard counts."""
    total = 0
    for given in tensors:
        tensor = getattr(given, "_local_tensor", given)
        nbytes = tensor.numel() * tensor.element_size()
        small = space.is_small(nbytes)
        total += nbytes if small else space.pages_for(nbytes) * space.page_size
    return total


def check_capacity(budget: DeviceBudget, nbytes: int, what: str) -> None:
    """Refuse what all tiers together cannot hold beside what is live: ``TierFull``. Under the
    pager's lock."""
    size, residency = budget.page_size, budget.residency
    residency.collect()
    host, disk = residency.mover.slots.host, residency.mover.slots.disk
    slots = host.slots.count + (disk.slots.count if disk else 0)
    frames = budget.frames_at_least()
    room = max(0, frames + slots - residency.space.live_pages) * size
    if nbytes > room:
        short = -(-(nbytes - room) // size) * size
        raise TierFull(
            f"{what} take {format_bytes(nbytes)} and the tiers have {format_bytes(room)} left "
            f"(device arena {format_bytes(frames * size)}, host "
            f"{format_bytes(host.capacity_bytes)}, disk "
            f"{format_bytes(disk.slots.count * size if disk else 0)}); raise "
            f"host_budget or disk_budget by at least {format_bytes(short)} ({short} bytes; "
            "pager.grow does it now). Nothing was changed."
        )
