"""Does it fit? How many frames an op may count on, by what the budget knows so far.

::

    0                                                                     device_budget
    |-- frames_anyway --|                     | dense bytes known so far, or dense_reserve |
    |---------------- most_frames ------------|

Before the border between frames and dense memory is settled, and while an iteration is metered, it
may still move: what fits is what the budget leaves beside the dense bytes that are known. Once it
is settled, it is the frames that there are, and both numbers are the same.

There are two numbers because there are two questions:

* :func:`fits`: *may* this be whole? For what has other bits slab by slab (products, reductions,
  halves, random numbers), or takes other dense memory (gradients of embeddings): it is whole
  where that is possible, so that results are PyTorch's own.
* :func:`frames_anyway`: does being whole cost *nothing*? For what has the same bits either way
  (copies, elementwise ops, lookups). In a metered iteration, which finds the smallest budget, it
  takes no more frames than other ops need.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ...planner.sizes import format_bytes
from ..errors import TierFull
from ..machine.ranks import about_share
from ..memory.space import Extent, Space
from .budget import DeviceBudget


def most_frames(budget: DeviceBudget, dense_bytes: int = 0) -> int:
    """Frames that the arena may have. ``dense_bytes``: that are sure to be needed beside them."""
    if budget.settled:
        return budget.residency.frames
    beside = max(budget.dense_peak, budget.fixed_reserve or 0, dense_bytes)
    return max(0, budget.bytes - beside) // budget.page_size


def fits(budget: DeviceBudget, pages: int, *, dense_bytes: int = 0) -> bool:
    """Whether ``pages`` may be on the device at once."""
    return pages <= most_frames(budget, dense_bytes)


def streams(
    budget: DeviceBudget, run: Extent, *, gradient_bytes: int, dense_bytes: int | None = None
) -> bool:
    """The verdict on a weight or a table (``placement.py``): whether it goes slab by slab.

    Who asks first makes it: ``run`` streams if its pages do not fit beside a dense gradient of it,
    which training with a whole one needs, or what was in use before. Where ``dense_bytes``, that
    are needed either way, take more than the budget by themselves, streaming would not help, and no
    verdict is made: the ordinary way then says which budget would.
    """
    known = budget.placement.known(run)
    if known is not None:
        return known
    if budget.inferring:  # nothing is known of the training that may come
        return run.count > 1 and not fits(budget, run.count)
    beside = max(gradient_bytes, budget.dense_so_far())
    whole = run.count == 1 or fits(budget, run.count, dense_bytes=beside)
    if not whole and dense_bytes is not None and dense_bytes > budget.bytes:
        return False
    budget.placement.judge(run, streamed=not whole)
    return not whole


def frames_anyway(budget: DeviceBudget) -> int:
    """Frames to be had without asking for more: in a metered iteration those that one op before
    needed, at most, other than the product of a weight that could stream, or those that were
    foreseen for a step."""
    residency = budget.residency
    if not budget.metering:
        return budget.frames_for_all
    return max(residency.rigid_need, residency.step.frames if residency.step is not None else 0)


# -- into all tiers together ---------------------------------------------------------------------
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


def check_capacity(budget: DeviceBudget, nbytes: int, what: str, *, beside: int = 0) -> None:
    """Refuse what all tiers together cannot hold beside what is live: ``TierFull``. ``beside``:
    bytes that will be live with it in an iteration, which it is refused for only where one is
    metered. Under the pager's lock."""
    size, residency = budget.page_size, budget.residency
    residency.collect()
    host, disk = residency.mover.slots.host, residency.mover.slots.disk
    slots = host.slots.count + (disk.slots.count if disk else 0)
    frames = budget.frames_at_least()
    room = max(0, frames + slots - residency.space.live_pages) * size
    if nbytes + (beside if budget.metering else 0) > room:
        short = -(-(nbytes + beside - room) // size) * size
        all_of_it = -(-(residency.space.live_pages * size + nbytes + beside) // size) * size
        more = f", an iteration {format_bytes(beside)} more at its peak," if beside else ""
        raise TierFull(
            f"{what} take {format_bytes(nbytes)}{more} and the tiers have {format_bytes(room)} "
            f"left (device arena {format_bytes(frames * size)}, host "
            f"{format_bytes(host.capacity_bytes)}, disk "
            f"{format_bytes(disk.slots.count * size if disk else 0)}); raise "
            f"host_budget or disk_budget by at least {format_bytes(short)} ({short} bytes; "
            f"pager.grow does it now): host_budget={all_of_it} bytes would hold all of it. Nothing "
            f"was changed.{about_share('host', residency.backend.device.type)}"
        )
