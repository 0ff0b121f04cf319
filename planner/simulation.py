"""What a run of the machine model gives; the same for simulator and validator."""

from __future__ import annotations

from dataclasses import dataclass, field

from .plan import Predicted
from .trace import Floats


@dataclass(frozen=True)
class Stall:
    """Op ``op`` waited ``us`` for ``tensor`` (index in the trace; −1: for frames of its new
    tensors) on ``channel`` ("host-in", "disk-in", or "host-out", "disk-out" for frames)."""

    op: int
    us: float
    tensor: int
    channel: str


@dataclass(frozen=True)
class Simulation:
    """``reason`` says why a plan is infeasible, and where; it is empty if it is feasible.

    ``stalls``, ``op_start_us`` and ``op_end_us`` are of the last simulated iteration, times
    relative to its begin.
    """

    feasible: bool
    reason: str = ""
    predicted: Predicted | None = None
    iterations: int = 0
    stalls: list[Stall] = field(default_factory=list)
    op_start_us: Floats | None = None
    op_end_us: Floats | None = None
