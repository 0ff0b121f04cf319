"""Kinds of iterations (a training step, a step that only accumulates, an evaluation, another batch
shape), told apart by their signatures, which are what they access, and which one comes next."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from .access_log import AccessLog, Keys
from .compiled_plan import CompiledPlan
from .sequence_trace import RunFacts

if TYPE_CHECKING:
    from ...planner.hardware import Hardware
    from .planning import PlanningProcess
    from .sequence_trace import Recorded

_SAMPLES = 5
_MOST_KINDS = 8
_HISTORY = 256
_LONGEST_MATCH = 16


class StepSignature:
    """Iterations with the same accesses. ``log`` is of the first one seen.

    ``turned_down``: why the latest plan is not followed; another one may be made when ``again_at``
    iterations have been seen.
    """

    def __init__(self, number: int, log: AccessLog, facts: dict[int, RunFacts]) -> None:
        self.number = number
        self.keys: list[Keys] = log.keys
        self.log = log
        self.facts = facts
        self.seen = 1
        self.compiled: CompiledPlan | None = None
        self.recorded: Recorded | None = None  # what `process` or `compiled` was made from
        self.hardware: Hardware | None = None  # it was, or is being, planned for
        self.process: PlanningProcess | None = None
        self.refused: str | None = None  # why there is no plan
        self.turned_down: str | None = None
        self.again_at = 0
        self.plans = 0
        # Of the latest iterations, without stalls: seconds of each access.
        self.samples: deque[list[float]] = deque([log.seconds()], _SAMPLES)
        self.measured_us: deque[float] = deque(maxlen=_SAMPLES)  # of those that followed `compiled`
        self.demand_stall_us: deque[float] = deque(maxlen=_SAMPLES)  # of those that followed none

    def seconds(self) -> list[float]:
        """Of each access, in the fastest iteration. What an access takes once, or now and then (a
        first call, memory that is mapped, another process), is no part of it: so each one's share
        is that of its fastest. But slow moments come at another access each time, and the fastest
        of all accesses add up to less than any iteration takes."""
        samples = np.array(self.samples)
        least = samples.min(axis=0)
        whole, parts = float(samples.sum(axis=1).min()), float(least.sum())
        return [float(s) for s in least * (whole / parts if parts else 1.0)]

    def promised_us(self, compiled: CompiledPlan) -> float:
        """Of an iteration that follows ``compiled``: the waiting of the plan, beside what the
        accesses take in the fastest iteration seen."""
        return sum(self.seconds()) * 1e6 + compiled.predicted_us - compiled.ideal_us

    @property
    def on_demand_us(self) -> float | None:
        """Of an iteration that follows no plan, likewise: the least waiting of the latest ones. On
        a machine that is busy now and then whole times cannot be compared, waiting can."""
        if not self.demand_stall_us:
            return None
        return sum(self.seconds()) * 1e6 + min(self.demand_stall_us)

    @property
    def measured(self) -> float | None:
        """Median µs of the latest iterations that followed the plan."""
        return float(np.median(self.measured_us)) if self.measured_us else None


class Signatures:
    """The kinds seen so far, the latest used last, and the order in which they came."""

    def __init__(self) -> None:
        self.all: list[StepSignature] = []
        self._numbers = 0
        self._history: list[int] = []

    def find(self, log: AccessLog) -> StepSignature | None:
        return next((signature for signature in self.all if signature.keys == log.keys), None)

    def add(self, log: AccessLog, facts: dict[int, RunFacts]) -> StepSignature:
        """A new kind; the one that was not seen for longest is forgotten if there are many."""
        self._numbers += 1
        signature = StepSignature(self._numbers, log, facts)
        self.all.append(signature)
        if len(self.all) > _MOST_KINDS:
            gone = self.all.pop(0)
            if gone.process is not None:
                gone.process.cancel()
        return signature

    def came(self, signature: StepSignature) -> None:
        """``signature`` was the latest iteration's. What came only once tells nothing."""
        self.all.remove(signature)
        self.all.append(signature)
        if signature.seen > 1 or not self._history:
            self._history = [*self._history[1 - _HISTORY :], signature.number]

    def expected(self) -> StepSignature | None:
        """The kind that followed the last time that things went as they do now: after the longest
        sequence of kinds that was seen before."""
        history = self._history
        best, number = 0, history[-1] if history else None
        for end in range(len(history) - 1, 0, -1):
            length = 0
            while (
                length < min(end, _LONGEST_MATCH)
                and history[end - 1 - length] == history[-1 - length]
            ):
                length += 1
            if length > best:
                best, number = length, history[end]
            if best == _LONGEST_MATCH:
                break
        return next((signature for signature in self.all if signature.number == number), None)

    def with_prefix(self, keys: list[Keys]) -> StepSignature | None:
        """A planned kind that began as ``keys`` have so far."""
        for signature in reversed(self.all):
            if signature.compiled is not None and signature.keys[: len(keys)] == keys:
                return signature
        return None
