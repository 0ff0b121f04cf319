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
  halves, random numbers), or needs other dense memory (embeddings and their gradients): it is whole
  where that is possible, so that results are PyTorch's own.
* :func:`frames_anyway`: does being whole cost *nothing*? For what has the same bits either way
  (copies, elementwise ops). In a metered iteration, which finds the smallest budget, it takes no
  more frames than other ops need.

What is streamed in a metered iteration because it does not fit is noted, see ``whole_need.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .budget import DeviceBudget


def most_frames(budget: DeviceBudget, dense_bytes: int = 0) -> int:
    """Frames that the arena may have. ``dense_bytes``: that are sure to be needed beside them."""
    if budget.settled:
        return budget.residency.frames
    beside = max(budget.dense_peak, budget.fixed_reserve or 0, dense_bytes)
    return max(0, budget.bytes - beside) // budget.page_size


def fits(budget: DeviceBudget, pages: int, *, share: int = 1, dense_bytes: int = 0) -> bool:
    """Whether ``pages`` may be on the device at once, in 1 / ``share`` of all frames."""
    return pages * share <= most_frames(budget, dense_bytes)


def frames_anyway(budget: DeviceBudget) -> int:
    """Frames to be had without asking for more: in a metered iteration those that one op before
    needed, at most, other than the product of a weight that could stream, or those that were
    foreseen for a step."""
    residency = budget.residency
    if not budget.metering:
        return residency.frames
    return max(residency.rigid_need, residency.step.frames if residency.step is not None else 0)
