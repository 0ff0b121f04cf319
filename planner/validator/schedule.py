"""What the validator does at each op, laid out before the run; plans that cannot be laid out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..hardware import Hardware
from ..plan import ACTIONS, Plan
from ..trace import WRITE, Ints, Trace
from .ledger import TIER_NUMBER, Infeasible

Range = tuple[int, int]  # pages [begin, end), numbered through all tensors


class QueuedMove(NamedTuple):
    number: int  # its index in the plan
    pages: range
    tier: int
    action: str


@dataclass(frozen=True)
class Schedule:
    """Lists have one entry per op: page ranges it touches and writes, the tensors that it makes
    (and their pages together), those that die with it, the moves queued before it."""

    touched: list[list[Range]]
    written: list[list[Range]]
    born: list[list[Range]]
    dying: list[list[Range]]
    new_pages: list[int]
    moves: list[list[QueuedMove]]
    persistent: list[Range]
    start: dict[int, int]  # page → tier


def make_schedule(trace: Trace, hardware: Hardware, plan: Plan) -> Schedule:
    """Raises ``Infeasible`` if the plan is not for this trace and hardware."""
    page_size = int(hardware.page_size)
    if plan.page_size != page_size:
        raise Infeasible(
            f"the plan's page_size {plan.page_size} is not the hardware's {page_size}; plan again"
        )
    sizes = trace.pages(page_size)
    base = [0, *np.cumsum(sizes).tolist()]
    born: list[list[Range]] = [[] for _ in range(trace.ops)]
    dying: list[list[Range]] = [[] for _ in range(trace.ops)]
    for tensor in np.flatnonzero(~trace.tensor_persistent).tolist():
        whole = (base[tensor], base[tensor + 1])
        born[trace.first_op[tensor]].append(whole)
        dying[trace.last_op[tensor]].append(whole)
    touched, written = _accesses(trace, page_size, base)
    finder = _Finder(trace, sizes, base)
    return Schedule(
        touched=touched,
        written=written,
        born=born,
        dying=dying,
        new_pages=[sum(end - begin for begin, end in tensors) for tensors in born],
        moves=_moves(trace, plan, finder),
        persistent=[
            (base[tensor], base[tensor + 1])
            for tensor in np.flatnonzero(trace.tensor_persistent).tolist()
        ],
        start=_start(trace, plan, finder),
    )


def _accesses(
    trace: Trace, page_size: int, base: list[int]
) -> tuple[list[list[Range]], list[list[Range]]]:
    touched: list[list[Range]] = [[] for _ in range(trace.ops)]
    written: list[list[Range]] = [[] for _ in range(trace.ops)]
    begins, ends = trace.access_ranges(page_size)
    for op, tensor, mode, begin, end in zip(
        trace.access_op.tolist(),
        trace.access_tensor.tolist(),
        trace.access_mode.tolist(),
        begins.tolist(),
        ends.tolist(),
    ):
        pages = (base[tensor] + begin, base[tensor] + end)
        touched[op].append(pages)
        if mode & WRITE:
            written[op].append(pages)
    return touched, written


class _Finder:
    """Finds the pages that a row of a plan means."""

    def __init__(self, trace: Trace, sizes: Ints, base: list[int]) -> None:
        self._index = {int(identity): tensor for tensor, identity in enumerate(trace.tensor_ids)}
        self._sizes: list[int] = sizes.tolist()
        self._base = base

    def index(self, where: str, tensor: int) -> int:
        if tensor not in self._index:
            raise Infeasible(f"{where}: the trace has no tensor {tensor!r}")
        return self._index[tensor]

    def pages(self, where: str, tensor: int, first: int, count: int) -> range:
        index = self.index(where, tensor)
        if first < 0 or count < 1 or first + count > self._sizes[index]:
            raise Infeasible(
                f"{where}: pages {first} to {first + count} are not among the "
                f"{self._sizes[index]} of tensor {tensor}"
            )
        begin = self._base[index] + first
        return range(begin, begin + count)

    def tier(self, where: str, tier: str) -> int:
        if tier not in TIER_NUMBER:
            raise Infeasible(f"{where}: tier {tier!r} is none of {', '.join(TIER_NUMBER)}")
        return TIER_NUMBER[tier]


def _moves(trace: Trace, plan: Plan, finder: _Finder) -> list[list[QueuedMove]]:
    moves: list[list[QueuedMove]] = [[] for _ in range(trace.ops)]
    for number, move in enumerate(plan.moves):
        where = f"moves[{number}]"
        pages = finder.pages(where, move.tensor, move.first_page, move.page_count)
        tier = finder.tier(where, move.tier)
        if move.action not in ACTIONS:
            raise Infeasible(f"{where}: action {move.action!r} is none of {', '.join(ACTIONS)}")
        if not 0 <= move.issue_op < trace.ops:
            raise Infeasible(
                f"{where}: issue_op {move.issue_op} is not in 0 … {trace.ops - 1}, the trace's ops"
            )
        moves[move.issue_op].append(QueuedMove(number, pages, tier, move.action))
    return moves


def _start(trace: Trace, plan: Plan, finder: _Finder) -> dict[int, int]:
    start: dict[int, int] = {}
    for number, run in enumerate(plan.start):
        where = f"start[{number}]"
        if not trace.tensor_persistent[finder.index(where, run.tensor)]:
            raise Infeasible(f"{where}: tensor {run.tensor} does not live across iterations")
        for page in finder.pages(where, run.tensor, run.first_page, run.page_count):
            if page in start:
                raise Infeasible(f"{where}: a page of tensor {run.tensor} is listed twice")
            start[page] = finder.tier(where, run.tier)
    return start
