"""What a run of the machine model gives; the same for simulator and validator."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from .plan import Predicted
from .trace import Floats

EPSILON_US = 1e-6  # what lies closer together happens at one instant


@dataclass(frozen=True)
class Stall:
    """Op ``op`` waited ``us`` for ``tensor`` (index in the trace; −1: for frames of its new
    tensors) on ``channel`` ("host-in", "disk-in", or "host-out", "disk-out" for frames)."""

    op: int
    us: float
    tensor: int
    channel: str


class Transfer(NamedTuple):
    """``page_count`` pages of a move that go one after another, each taking equally long.

    The first begins at ``begin_us``, the last arrives at ``end_us``; µs since the iteration that
    queued them began, so those that go on into the next one end after it. ``arrived`` is false for
    pages whose tensor died before: at ``end_us``, which is ``begin_us`` too if they never began.
    """

    move: int  # index in the plan
    is_out: bool
    tier: str
    tensor: int  # index in the trace
    first_page: int  # within the tensor
    page_count: int
    begin_us: float
    end_us: float
    arrived: bool


class Below(NamedTuple):
    """Pages that hold a slot in each tier from ``until_us`` on: those that there were before have
    become so many from ``since_us`` on, one by one at an even pace. Times as of a transfer."""

    since_us: float
    until_us: float
    host: int
    disk: int


class Rerun(NamedTuple):
    """Op ``op`` ran again, before op ``before_op``."""

    op: int
    before_op: int
    begin_us: float
    end_us: float


class HostRun(NamedTuple):
    """The host took op ``op``; it began in the iteration, and may end in the next."""

    op: int
    begin_us: float
    end_us: float


@dataclass(frozen=True)
class Simulation:
    """``reason`` says why a plan is infeasible, and where; it is empty if it is feasible.

    ``stalls``, ``op_start_us`` and ``op_end_us`` are of the last simulated iteration, times
    relative to its begin. ``transfers``, if they were asked for, are those of the moves that it
    queued, each page once; pages that an ``out`` gives back without a transfer are not among them.

    A host step's op starts and ends when it joins the host's queue. ``queued_us``: when the moves
    of each op are queued, [ops]. ``reruns`` and ``host_runs``: of the last iteration; ``below``
    too, where there are ``transfers``.
    """

    feasible: bool
    reason: str = ""
    predicted: Predicted | None = None
    iterations: int = 0
    stalls: list[Stall] = field(default_factory=list)
    op_start_us: Floats | None = None
    op_end_us: Floats | None = None
    transfers: list[Transfer] | None = None
    queued_us: Floats | None = None
    reruns: list[Rerun] = field(default_factory=list)
    host_runs: list[HostRun] = field(default_factory=list)
    below: list[Below] = field(default_factory=list)
