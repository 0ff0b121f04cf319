"""Kinds of iterations (a training step, a step that only accumulates, an evaluation), told apart by
their signatures, which are the orders of what they access, and which one comes next.

Batches of every length are one kind (``access_log.py``). What is known of it is of the longest one
seen: its accesses, and times. Those of a shorter one are made longer (``ways.Growth``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import PagerError
from .access_log import AccessLog, Keys
from .compiled_plan import CompiledPlan, Order
from .ways import Growth, Taken, Ways

if TYPE_CHECKING:
    from ...planner.hardware import Hardware
    from .planning import Awaited, PlanningProcess
    from .traces import Recorded

_RECORDED = 2  # iterations before the first plan: what happens once would be taken for work
_AGAIN = 2  # times as many iterations seen as before a plan, until another one is made
_MEASURED = 3  # iterations that follow a plan before another one is made
_CLOSE = 99.5  # percent of the bound's speed: no plan is worth much more
_SAMPLES = 5
_MORE_FRAMES = 9 / 8  # times those that there are: a plan for as many is followed
_LONGER = 9 / 8  # times what was planned: another plan is worth its time
_MOST_KINDS = 8
_HISTORY = 256
_LONGEST_MATCH = 16


class StepSignature:
    """Iterations with the same order of accesses. ``log`` is of the longest one seen, with ``size``
    pages of activations; all times are as it would take.

    ``turned_down``: why the latest plan is not followed.

    ``again``: blocks of the model that run again in iterations of this kind, which are another
    kind then, ``variant``, whose ``base`` this one is; both have one place in the order of kinds.
    ``kept``: why they do not, where that has been tried.

    ``plain_us``: what its ops take in plain PyTorch (``plain_speed.py``), where that was measured.
    """

    def __init__(self, number: int, log: AccessLog, size: int = 0) -> None:
        self.number = number
        self.log = log
        self.size = size
        self.seen = 1
        self.compiled: CompiledPlan | None = None
        self.recorded: Recorded | None = None  # what `process` or `compiled` was made from
        self.hardware: Hardware | None = None  # it was, or is being, planned for
        self.planned_size = 0  # of what it was made from
        self.left_frames = 0  # frames of the device that the plan leaves to what comes on demand
        self.process: PlanningProcess | Awaited | None = None
        self.refused: str | None = None  # why there is no plan
        self.left = False  # for good, a plan that was followed
        self.turned_down: str | None = None
        self.planned_at = 0  # iterations that had been seen
        self.planning_us = 0.0  # that it took
        self.plans = 0
        self.again: frozenset[str] = frozenset()
        self.before_us = self.again_us = 0.0  # promised without and with ``again``
        self.variant: StepSignature | None = None
        self.base: StepSignature | None = None
        self.strays = 0  # iterations with ``again`` that were of another kind
        self.kept: str | None = None
        # Of the latest iterations, without stalls: seconds of each access. `beside`: of those that
        # followed a plan, whose moves have taken time of the ops beside them.
        self.samples: deque[list[float]] = deque([log.seconds()], _SAMPLES)
        self.beside: deque[list[float]] = deque(maxlen=_SAMPLES)
        self._latest = self.samples  # which of them has the latest iteration
        self.ways = Ways()
        self.plain_us: float | None = None
        self._accesses: Order | None = None
        self._of_each, self._of_all = Growth(), Growth()
        self._of_each.add(size, self.samples[0])
        self._of_all.add(size, [sum(self.samples[0])])

    @property
    def keys(self) -> list[Keys]:
        return self.log.keys

    @property
    def accesses(self) -> Order:
        """Those of the longest one."""
        if self._accesses is None or self._accesses.keys is not self.keys:
            self._accesses = Order(self.keys)
        return self._accesses

    # -- batches of another length ---------------------------------------------------------------
    def is_shorter(self, size: int) -> bool:
        """Whether one with ``size`` pages of activations is to take the place of the longest."""
        return size > self.size and self.process is None

    def lengthen(self, log: AccessLog, size: int) -> None:
        """``log``, with ``size`` pages of activations, is the longest now. What the host took by a
        plan it may take, and need not, by the next one."""
        alike = log.keys == self.keys
        if alike:
            log.hosted = self.log.hosted
        elif len(log.hosted) != len(self.log.hosted):
            return
        more = float(self._of_all.ratio(self.size, size)[0])
        if self.plain_us is not None:
            self.plain_us *= more
        if alike:
            each = self._of_each.ratio(self.size, size)
            for samples in (self.samples, self.beside):
                for index, seconds in enumerate(samples):
                    samples[index] = (each * seconds).tolist()
        else:
            self._of_each = Growth()
            self._of_each.add(size, log.seconds())
            self.beside.clear()
            self.samples.clear()
            self.samples.append(log.seconds())
        self.log, self.size = log, size
        if size > _LONGER * self.planned_size and not self.left:
            self._plan_again()

    def note_plain(self, us: float, size: int) -> None:
        """Of one with ``size`` pages of activations."""
        self.plain_us = us * float(self._of_all.ratio(size, self.size)[0])

    def sample(self, log: AccessLog, size: int, *, followed: bool) -> None:
        """The times of another one. What the host took the device would take as long for as
        before."""
        found = log.seconds()
        if log.keys == self.keys:
            for where in log.hosted - self.log.hosted:
                found[where] = self.samples[0][where]
            self._of_each.add(size, found)
            as_longest = self._of_each.ratio(size, self.size) * found
            self._latest = self.beside if followed else self.samples
            self._latest.append(as_longest.tolist())
        self._of_all.add(size, [sum(found)])

    def met_seconds(self) -> list[float]:
        """Of each collective of the latest iteration that was sampled."""
        latest = (self._latest or self.samples)[-1]
        return [latest[where] for where in self.log.collectives]

    def have_met(self, seconds: list[float]) -> None:
        """Of these, what does not count waiting for other ranks."""
        latest = (self._latest or self.samples)[-1]
        for where, least in zip(self.log.collectives, seconds):
            latest[where] = least

    def seconds(self) -> list[float]:
        """Of each access, as the next plan should take it: beside moves, where that is known."""
        if len(self.beside) >= _MEASURED:
            return _shared_out(self.beside, median)
        return self.alone_seconds()

    def alone_seconds(self) -> list[float]:
        """Of each access in the fastest iteration in which nothing moved beside ops. What an access
        takes once, or now and then (a first call, memory that is mapped, another process), is no
        part of it: so each one's share is that of its fastest. But slow moments come at another
        access each time, and the fastest of all accesses add up to less than any iteration takes.
        """
        return _shared_out(self.samples, min)

    def promised_us(self, compiled: CompiledPlan) -> float:
        """Of an iteration that follows ``compiled``: the waiting of the plan, beside what the
        accesses take."""
        return sum(self.seconds()) * 1e6 + compiled.predicted_us - compiled.ideal_us

    @property
    def on_demand_us(self) -> float | None:
        """Of an iteration that follows no plan, likewise: the least waiting of the latest ones. On
        a machine that is busy now and then whole times cannot be compared, waiting can."""
        stalls = [one.stall_us for one in self.ways.at(False, self.size)]
        return sum(self.alone_seconds()) * 1e6 + min(stalls) if stalls else None

    @property
    def measured(self) -> float | None:
        """Median µs of the latest iterations that followed the plan."""
        return self._median_by_plan("us")

    @property
    def waited_us(self) -> float | None:
        """Of those iterations, what ops waited for pages."""
        return self._median_by_plan("stall_us")

    def _median_by_plan(self, what: str) -> float | None:
        latest = [getattr(one, what) for one in self.ways.at(True, self.size)]
        return median(latest) if latest else None

    @property
    def ideal_us(self) -> float | None:
        """Of an iteration in plain PyTorch, if everything fitted; where that was not measured, of
        one that never waits, with our own work in it."""
        if self.plain_us is not None:
            return min(self.plain_us, sum(self.alone_seconds()) * 1e6)
        return self.compiled.ideal_us if self.compiled is not None else None

    @property
    def bound_us(self) -> float | None:
        """No plan is faster: what any plan has to wait for, beside what the ops take in plain
        PyTorch. (A schedule for shorter ops, with pauses in which they would have
        gone on, is one for the longer ones: so it saves no more than they are shorter.)"""
        compiled, ideal = self.compiled, self.ideal_us
        if compiled is None or compiled.plan.bound is None or ideal is None:
            return None
        return compiled.plan.bound.iteration_us - max(0.0, compiled.ideal_us - ideal)

    @property
    def overhead_us(self) -> float | None:
        """Of the latest iterations that followed the plan, what was neither plain PyTorch's nor
        waiting: our own work, and what moves took from the ops beside them."""
        ideal, stall = self.ideal_us, self.waited_us
        if self.plain_us is None or self.measured is None or stall is None or ideal is None:
            return None
        return max(0.0, self.measured - stall - ideal)

    # -- blocks that run again -------------------------------------------------------------------
    def is_like(self, other: StepSignature) -> bool:
        """Whether both do the same work, but for what runs again: the same calls, on the same
        parameters and states."""
        mine, theirs = self._work(), other._work()
        return mine == theirs

    def _work(self) -> tuple[list[str], set[int]]:
        facts, used = self.log.facts, {key for keys in self.keys for key in keys}
        lasting = {k for k in used if k in facts and facts[k].kind in ("parameter", "optimizer")}
        return [call.block for call in self.log.calls], lasting

    def judge(self) -> None:
        """Nothing runs again any more if that is not faster: by the plan, or as measured."""
        variant = self.variant
        if not self.again or variant is None:
            return
        compiled = variant.compiled
        takes = variant.promised_us(compiled) if compiled is not None else 0.0
        if variant.measured is not None and len(variant.ways.latest[True]) >= _MEASURED:
            takes = max(takes, variant.measured)
        if takes > self.before_us:
            self.keep(f"takes {takes / 1e3:.1f} ms, and without it {self.before_us / 1e3:.1f} ms")
        elif variant.refused or variant.turned_down:
            self.keep(f"has no plan: {variant.refused or variant.turned_down}")

    def keep(self, why: str) -> None:
        """Nothing is to run again in iterations of this kind."""
        self.kept = f"running {len(self.again)} blocks again was tried: an iteration {why}"
        self.again = frozenset()
        if self.variant is not None:
            self.variant.cancel()

    # -- plans -----------------------------------------------------------------------------------
    def is_due(self, most_plans: int) -> bool:
        """Whether a plan is worth its time: the first one, or one that would have saved more in all
        iterations so far than making the one before has taken."""
        if self.process is not None or self.refused is not None or self.plans >= most_plans:
            return False
        if self.seen < max(_RECORDED, _AGAIN * self.planned_at):
            return False
        compiled, measured = self.compiled, self.measured
        if compiled is None:
            return bool(self.keys)
        if measured is None or (self.plans > 1 and self.followed is None):
            return False
        bound, stall = compiled.plan.bound, self.waited_us or 0.0
        least = compiled.ideal_us if bound is None else bound.iteration_us
        saves = stall - max(0.0, least - compiled.ideal_us)
        if self.plans == 1:  # by a quick search
            saves = max(saves, compiled.predicted_us - least)
        return saves * self.seen > self.planning_us and len(self.ways.latest[True]) >= _MEASURED

    @property
    def followed(self) -> CompiledPlan | None:
        """The plan, if iterations follow it now."""
        return self.compiled if self.ways.by_plan else None

    @property
    def wants_full_search(self) -> bool:
        """Whether the next plan is worth a longer search than the quick one that there is: it takes
        time of the training, and of the machine."""
        bound = self.compiled.plan.bound if self.compiled is not None else None
        return self.plans > 0 and (bound is None or bound.percent_of_bound < _CLOSE)

    def take_plan(self, *, only_if_faster: bool) -> str | None:
        """``process`` has ended: its plan is followed, or it is known why there is none. Returns
        what a planner died of, which is nobody's fault but ours."""
        from .planning import PlanRefused

        process, self.process = self.process, None
        assert process is not None
        self.planning_us = process.seconds * 1e6
        assert self.recorded is not None
        try:
            planned = process.result()
        except PagerError as error:
            known = isinstance(error, PlanRefused)
            self.refused = str(error) if known else f"the planner ended with an error: {error}"
            error.__traceback__ = None  # it has the caller's frames, and the process has the error
            return None if known else self.refused
        assert self.hardware is not None
        compiled = CompiledPlan(
            self.recorded, planned.plan, planned.layout, self.keys,
            int(self.hardware.device_pages) - self.left_frames, self.left_frames,
        )  # fmt: skip
        # Where one is followed already both are compared with what is measured (`choose`).
        compare = only_if_faster and self.followed is None
        no_better = self.no_better(compiled) if compare else None
        if planned.again and self.kept is None:
            least = self.on_demand_us
            self.before_us = self.promised_us(compiled)
            if least is not None and only_if_faster:
                self.before_us = min(self.before_us, least)
            self.again_us = self.promised_us(compiled) + planned.again_us - compiled.predicted_us
            self.again = planned.again if self.again_us < self.before_us else self.again
        if no_better is None:
            self.compiled, self.turned_down = compiled, None
            self.ways.new_plan()
            return None
        self.planned_at = self.seen
        if self.compiled is None:
            self.turned_down = no_better
        return None

    def no_better(self, compiled: CompiledPlan) -> str | None:
        """Why ``compiled`` should not be followed: on demand an iteration takes less."""
        promised, measured = self.promised_us(compiled), self.on_demand_us
        if measured is None or promised <= measured:
            return None
        return (
            f"the one that was made promises {promised / 1e3:.1f} ms an iteration, and bringing "
            f"pages in when an op needs them takes {measured / 1e3:.1f} ms"
        )

    def choose(self, taken: Taken, *, by_plan: bool, alone: bool | None) -> None:
        """Whether the next iteration follows the plan, after one that did or did not. Where blocks
        run again, or not ``alone``, one that is slower than paging on demand is left for good,
        once it was made anew if that was worth it. ``None``: it is followed anyway."""
        if by_plan is not self.ways.by_plan:
            return
        may_try = bool(alone) and self.base is None and not self.again
        if alone is None or (self.is_due(2) and not may_try):
            self.ways.note(taken)
            return
        self.ways.choose(taken, may_try=may_try)
        if self.compiled is not None and self.followed is None and not may_try:
            self.leave(str(self.ways))

    def leave(self, why: str) -> None:
        """No plan is followed any more in iterations of this kind."""
        self.cancel()
        self.compiled, self.refused, self.left, self.ways = None, why, True, Ways()

    def arena_has(self, nbytes: int) -> None:
        """The device has so many bytes for pages now. A plan for a few more is followed until there
        is another one."""
        planned_bytes = self.hardware.device_bytes if self.hardware is not None else None
        if planned_bytes == nbytes:
            return
        if planned_bytes is None or planned_bytes > _MORE_FRAMES * nbytes:
            self.forget_plan()
            return
        if self.followed is not None:
            self.ways.latest[False].clear()
            self.ways.new_plan()
        if self.process is None:
            self._plan_again()

    def _plan_again(self) -> None:
        """Another plan may be made, if it is worth its time."""
        self.plans, self.planned_at = min(self.plans, 1), 0
        self.refused = self.turned_down = None
        self.left = False

    def forget_plan(self) -> None:
        self.cancel()
        self._plan_again()
        self.compiled, self.plans, self.ways = None, 0, Ways()
        self.beside.clear()

    def cancel(self) -> None:
        """Nothing is planned any more when this returns."""
        if self.process is not None:
            self.process.cancel()
            self.process = None


def _shared_out(samples: Iterable[list[float]], typical: Callable[..., Any]) -> list[float]:
    """What is ``typical`` of whole iterations, shared out among accesses by their fastest times."""
    several = np.array(list(samples))
    least = several.min(axis=0)
    whole, parts = float(typical(several.sum(axis=1))), float(least.sum())
    return [float(s) for s in least * (whole / parts if parts else 1.0)]


class Signatures:
    """The kinds seen so far, the latest used last, and the order in which they came."""

    def __init__(self) -> None:
        self.all: list[StepSignature] = []
        self._numbers = 0
        self._history: list[int] = []

    def find(self, log: AccessLog) -> StepSignature | None:
        order = _order(log)
        return next((signature for signature in self.all if _order(signature.log) == order), None)

    def add(self, log: AccessLog, size: int) -> StepSignature:
        """A new kind; the one that was not seen for longest is forgotten if there are many."""
        self._numbers += 1
        signature = StepSignature(self._numbers, log, size)
        self.all.append(signature)
        if len(self.all) > _MOST_KINDS:
            self.all.pop(0).cancel()
        return signature

    def forget(self, keys: Collection[int]) -> None:
        """Kinds that use what is not called so any more."""
        if keys:
            gone = [one for one in self.all if any(set(access) & set(keys) for access in one.keys)]
            for one in gone:
                one.cancel()
                self.all.remove(one)

    def came(self, signature: StepSignature) -> None:
        """``signature`` was the latest iteration's. What came only once tells nothing."""
        base = signature.base or signature
        for one in dict.fromkeys((base, signature)):
            if one in self.all:
                self.all.remove(one)
            self.all.append(one)
        if base.seen > 1 or not self._history:
            self._history = [*self._history[1 - _HISTORY :], base.number]

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

    def with_prefix(self, order: list[Keys]) -> CompiledPlan | None:
        """The plan of a kind that began as ``order`` has so far."""
        plans = (one.followed for one in reversed(self.all) if one.followed is not None)
        return next((plan for plan in plans if plan.order[: len(order)] == order), None)


def _order(log: AccessLog) -> list[Keys]:
    """Where there are activations only, all accesses."""
    return log.order or log.keys
