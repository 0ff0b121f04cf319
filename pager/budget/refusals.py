"""What is said where a budget is refused, and which one would do."""

from __future__ import annotations

import warnings

from ...planner.sizes import format_bytes
from ..errors import InfeasibleBudget
from ..machine.ranks import about_share, ranks_sharing
from .border import Border

AS_PLAIN = "as plain PyTorch has it."
UNCHANGED = "No parameter was changed."
CHANGED = f"What the iteration has changed before is {AS_PLAIN}"
AFTER = (
    "Most dense memory was in use after the optimizer's step; what the step changed is " + AS_PLAIN
)
_GRAIN = 4096  # of minima that are named


class LeftOut(InfeasibleBudget):
    """Before a write to a parameter, in an iteration that is refused. An op that can do without the
    write leaves it out, and the iteration goes on to its end, so that what comes after counts too.
    Others raise this."""


def to_name(nbytes: int) -> int:
    """A minimum of ``nbytes`` as users are told it: small tensors that come and go with Python's
    garbage make the dense peak differ by some bytes from run to run."""
    return (nbytes // _GRAIN + 2) * _GRAIN


def too_small(border: Border, hints: str, then: str) -> InfeasibleBudget:
    """A metered iteration takes more than there is. ``hints``: what takes it; ``then``: what was
    changed."""
    budget, reserve, size = border.bytes, border.fixed_reserve, border.page_size
    dense, frames = border.dense_peak, border.residency.largest_need
    device = border.backend.device.type
    minimum = to_name(max(dense, reserve or 0) + frames * size)
    text = (
        f"device_budget of {format_bytes(budget)} ({budget} bytes) is too small: this iteration "
        f"takes {format_bytes(dense)} of dense temporaries and {frames} pages of "
        f"{format_bytes(size)} at once in one operation. "
    )
    if reserve is not None and dense > reserve:
        text += f"dense_reserve is {format_bytes(reserve)}; raise it or pass 'auto'. "
    text += (
        f"{hints}The smallest device_budget that works for these shapes is {minimum} bytes "
        f"({format_bytes(minimum)}). {then}{about_share('device', device)}"
    )
    return InfeasibleBudget(text, minimum=minimum * ranks_sharing("device", device))


def does_not_fit(border: Border, told: str) -> InfeasibleBudget:
    """Dense memory was refused, as ``told``, or has taken more than there is."""
    return InfeasibleBudget(
        f"dense memory does not fit beside the arena: {told} Raise device_budget (now "
        f"{border.bytes} bytes), or make the batch smaller.",
        minimum=to_name(border.bytes + max(border.lacking, border.page_size)),
    )


def warn_of_excess(border: Border, held: int) -> None:
    """A metered iteration had ``held`` bytes, which are more than the budget."""
    warnings.warn(
        f"this iteration had {held} bytes on {border.backend.device} at once, "
        f"{held - border.bytes} more than device_budget: its memory cannot be capped, and the "
        "arena was not smaller in time. The next iterations have a smaller one; with "
        "dense_reserve= the first has too",
        RuntimeWarning,
        stacklevel=2,
    )
