"""Demand paging: what unified memory does, with whole tensors for pages.

At each op the tensors that are missing are fetched, the least recently used ones evicted for them,
to the host while there is room and then to disk. It needs no recording; here it is run over the
recorded iteration until its evictions repeat, and those become the plan.

Where ours differs from measured unified memory (G10's baseline: 45 µs for each batch of faulting
4 KiB pages): nothing is charged for the fault itself, transfers run at the link's full rate, and
what an op needs comes in while its victims still go out. So it is an optimistic stand-in.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ..errors import PolicyRefusal
from ..hardware import Hardware
from ..plan import Plan
from ..trace import Trace
from .whole import Decision, build, check_possible, uses_by_tensor

MAX_ITERATIONS = 24
FREE_ITERATIONS = 8  # runs that have not settled by then are calmed, see ``_Pager.iterate``


class _Eviction(NamedTuple):
    tensor: int
    op: int
    tier: str


def plan(trace: Trace, hardware: Hardware) -> Plan:
    """Raises ``PolicyRefusal`` if neither host nor disk has room, or the pattern never repeats."""
    check_possible(trace, hardware, "lru")
    evictions = _settle(_Pager(trace, hardware)) if trace.ops else []
    ops, offsets = uses_by_tensor(trace)
    decisions = []
    for tensor, op, tier in evictions:
        uses = ops[offsets[tensor] : offsets[tensor + 1]]
        after = int(np.searchsorted(uses, op))
        next_op = int(uses[after]) if after < len(uses) else int(uses[0]) + trace.ops
        last_op = int(uses[after - 1]) if after else int(uses[-1]) - trace.ops
        decisions.append(Decision(tensor, last_op, next_op, tier, op, next_op))
    return build(trace, hardware, "lru", decisions)


def _settle(pager: _Pager) -> list[_Eviction]:
    """Evictions of an iteration that ends as it began."""
    before = pager.state()
    common: set[int] | None = None
    for iteration in range(MAX_ITERATIONS):
        evictions = pager.iterate(common)
        after = pager.state()
        if iteration and after == before:
            return evictions
        if iteration >= FREE_ITERATIONS:
            kept = set(pager.resident)
            common = kept if common is None else common & kept
        before = after
    raise PolicyRefusal(f"lru: evictions do not repeat within {MAX_ITERATIONS} iterations")


class _Pager:
    """Which tensors are resident (least recently used first), and where the others are."""

    def __init__(self, trace: Trace, hardware: Hardware) -> None:
        self.trace = trace
        self.pages = trace.pages(hardware.page_size).tolist()
        self.free = hardware.device_pages
        self.slots = {"host": hardware.host_pages, "disk": hardware.disk_pages}
        self.resident: OrderedDict[int, None] = OrderedDict()
        self.below: dict[int, str] = {}
        self.home: dict[int, str] = {}  # the tier that a tensor was last evicted to
        self.calm = False
        offsets = trace.access_offsets.tolist()
        self.used_by = [
            list(dict.fromkeys(trace.access_tensor[begin:end].tolist()))
            for begin, end in pairwise(offsets)
        ]
        self.dying: list[list[int]] = [[] for _ in range(trace.ops)]
        for tensor in np.flatnonzero(~trace.tensor_persistent).tolist():
            self.dying[trace.last_op[tensor]].append(tensor)

    def state(self) -> tuple[list[int], dict[int, str]]:
        return list(self.resident), dict(self.below)

    def iterate(self, common: set[int] | None) -> list[_Eviction]:
        """One iteration. If ``common`` is given, other tensors are evicted at its first op, and a
        tensor goes to the tier that it was in before while that has room."""
        evictions: list[_Eviction] = []
        self.calm = common is not None
        for op, used in enumerate(self.used_by):
            if op == 0 and common is not None:
                for tensor in [t for t in self.resident if t not in common and t not in used]:
                    self._evict(tensor, op, evictions)
            missing = [tensor for tensor in used if tensor not in self.resident]
            for tensor in used:
                if tensor in self.resident:
                    self.resident.move_to_end(tensor)
            need = sum(self.pages[tensor] for tensor in missing)
            while need > self.free:
                self._evict(next(iter(self.resident)), op, evictions)
            for tensor in used:  # in the same order whatever was missing, so that runs settle
                self.resident[tensor] = None
                self.resident.move_to_end(tensor)
            self.free -= need
            self._finish(op, missing)
        return evictions

    def _evict(self, tensor: int, op: int, evictions: list[_Eviction]) -> None:
        pages = self.pages[tensor]
        order = ["host", "disk"]
        if self.calm and self.home.get(tensor) == "disk":
            order.reverse()
        for tier in order:
            if pages <= self.slots[tier]:
                break
        else:
            raise PolicyRefusal(
                f"lru: no room below the device for {self.trace.name_of(tensor)} ({pages} pages) "
                f"at op {op}; raise host_bytes or disk_bytes"
            )
        del self.resident[tensor]
        self.free += pages
        self.slots[tier] -= pages
        self.below[tensor] = self.home[tensor] = tier
        evictions.append(_Eviction(tensor, op, tier))

    def _finish(self, op: int, fetched: list[int]) -> None:
        """Slots of what was fetched are free only now: its way in may have waited for a victim's
        way out, which must not wait for these slots."""
        for tensor in fetched:
            tier = self.below.pop(tensor, None)
            if tier is not None:
                self.slots[tier] += self.pages[tensor]
        for tensor in self.dying[op]:
            del self.resident[tensor]
            self.free += self.pages[tensor]
