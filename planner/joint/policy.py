"""Policies that choose: ``joint`` by a program, ``checkpoint``, ``selective`` and ``zero-offload``
by a rule of thumb each. Once their choices are made, the linear program moves pages for them."""

from __future__ import annotations

import math
import os
import re
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import Any

import numpy as np

from ..errors import InfeasibleBudget, PolicyRefusal
from ..hardware import Hardware
from ..lifetimes import gaps as find_gaps
from ..lifetimes import live_pages
from ..lp.policy import bound as bound_of_moves
from ..lp.policy import plan as plan_moves
from ..lp.program import Unsolved
from ..plan import Plan
from ..shorter import SEARCHED_OPS, plan_shorter
from ..simulation import Simulation
from ..trace import Floats, Trace
from .decided import Decisions, Hosted, Outcome, Planner, faster
from .host_order import MOST_ORDERS
from .options import Remake, Unit, Uses, find_remakes, find_units
from .program import Shares, solve_joint

Progress = Callable[[str, float], None]
Tried = tuple[Decisions, Outcome | None]  # a candidate: its choices, and what came of it
ALLOWED = ("move", "recompute", "host-step")
MAX_STEPS, MERGED_STEPS, BOUND_STEPS = 1200, 250, 150  # of the program for the choices
MANY_GAPS = 20_000  # of a trace with more the steps of all programs are merged, too
MERGED_MOVES, QUICK_MOVES = 700, 250  # of that for the moves, where it would be more than MAX_STEPS
MOST_FILLED = 200  # updates that are looked at for what is left of the host's time
CHEAP_SHARE = 0.1  # of a segment's time: an op that takes less is cheap to run again
# For the bound, by the clock, as the solver counts; then for choices, of one processor, so that
# what else runs changes little: since the begin, and after the bound at least.
BOUND_SECONDS, SECONDS, QUICK_SECONDS = 180.0, (32.0, 10.0), (0.0, 3.0)
PAIR = 1.3  # times as much of the processors, where two candidates are planned at a time
UNSOLVED = (
    f"the solver had no answer in {BOUND_SECONDS:.0f} s: choices are by rules of thumb, and the "
    "bound is only the time of the ops that no host can take"
)
ROUGH = (
    f"the solver had no answer in {BOUND_SECONDS:.0f} s: choices and bound are of a program of "
    f"{BOUND_STEPS} steps, whose bound is lower"
)
GOOD_ENOUGH = 0.995  # of the bound, at which no further choice is tried
# How the moves of the best choices are planned again: the part of the steps, and whether the host's
# list is by due time alone, which leaves fewer steps late, if by more; and how long that may take.
POLISHED = ((1, False), (3, True), (2, True), (1, True), (3, False), (2, False))
ROUNDS = 2  # of all of them, at most
POLISH_SECONDS = 42.0, 6.0  # since the begin, and after the choices at least
POOR, POOR_LONGER = 0.97, 0.7  # below such a part of the bound it may take so much longer
# What is tried of the program's shares: how much more of what may be made again, and how late the
# host may be by its estimated times, of an iteration.
TRIALS = ((0.0, 0.02), (0.0, 0.05), (0.0, 0.0), (0.1, 0.02), (-0.1, 0.02), (0.0, 1.0))


def plan(
    trace: Trace,
    hardware: Hardware,
    *,
    allow: Sequence[str] = ALLOWED,
    quick: bool = False,
    progress: Progress | None = None,
    workers: int = 2,
) -> Plan:
    """The fastest plan found of what ``allow`` and the trace permit, with a bound for all of them.

    Plans of moves only, full and selective checkpointing and ZeRO-Offload's rule are candidates,
    so none of them is faster. ``workers``: threads, which share Python and not the solver. Raises
    ``InfeasibleBudget`` and ``PolicyRefusal`` as ``lp`` does.
    """
    progress = progress or (lambda what, share: None)
    uses = Uses(trace)
    remakes = find_remakes(trace, uses) if "recompute" in allow else []
    units = find_units(trace, uses) if "host-step" in allow and hardware.host_pages else []
    if not remakes and not units:
        return replace(plan_moves(trace, hardware, quick=quick, progress=progress), policy="joint")
    workers = 1 if quick else min(workers, len(os.sched_getaffinity(0)))
    again = partial(
        plan, hardware=hardware, allow=allow, quick=quick, progress=progress, workers=workers
    )
    return _Search(trace, hardware, uses, remakes, units, quick, progress, workers).run(again)


@dataclass(frozen=True)
class Best:
    """What the program says of a machine: no plan with what is allowed is faster. Shares of what it
    decides: ``recompute_us`` more on the device, ``host_us`` of updates on the host."""

    iteration_us: float
    recompute_us: float = 0.0
    host_us: float = 0.0


class Bounds:
    """Bounds of one trace on several machines, without any plan."""

    def __init__(self, trace: Trace) -> None:
        self._trace, self._uses = trace, Uses(trace)
        self._remakes = find_remakes(trace, self._uses)
        self._units = find_units(trace, self._uses)

    def best(self, hardware: Hardware, allow: Sequence[str] = ALLOWED) -> Best | None:
        """``None`` where nothing runs. Raises ``Unsolved``."""
        trace = self._trace
        if live_pages(trace, hardware.page_size).max(initial=0) <= hardware.device_pages:
            return Best(trace.ideal_us)
        remakes = self._remakes if "recompute" in allow else []
        units = self._units if "host-step" in allow and hardware.host_pages else []
        shares = solve_joint(
            trace,
            hardware,
            self._uses,
            remakes,
            units,
            steps=BOUND_STEPS,
            time_limit_s=BOUND_SECONDS,
        )
        if shares is None:
            return None
        return Best(
            shares.iteration_us,
            float(sum(share * each.us for share, each in zip(shares.remakes, remakes))),
            float(sum(share * unit.host_us for share, unit in zip(shares.units, units))),
        )


class _Search:
    def __init__(
        self,
        trace: Trace,
        hardware: Hardware,
        uses: Uses,
        remakes: list[Remake],
        units: list[Unit],
        quick: bool,
        progress: Progress,
        workers: int,
    ) -> None:
        self.trace, self.hardware, self.uses = trace, hardware, uses
        self.remakes, self.units = remakes, units
        self.quick, self.progress, self.workers = quick, progress, workers
        # Programs take longer then, and are in merged steps.
        self.long = trace.ops > MAX_STEPS or len(find_gaps(trace, hardware.page_size)) > MANY_GAPS
        steps = MERGED_MOVES if self.long else MAX_STEPS
        steps = QUICK_MOVES if quick else steps
        self.planner = Planner(trace, hardware, uses, progress, most_steps=steps)
        sizes = trace.pages(hardware.page_size)
        self._below = [int(sizes[[*unit.weights, *unit.states]].sum()) for unit in units]
        # Of the host, beside gradients on their way: one that is used, and one that comes.
        gradients = [int(sizes[list(unit.gradients)].sum()) for unit in units]
        self.room = hardware.host_pages - 2 * max(gradients, default=0)
        self.best: Outcome | None = None
        self.chosen: Decisions | None = None  # of ``best``
        self.latest: dict[Decisions, Outcome] = {}  # of what runs
        self.bound_us = 0.0
        self.until = self.later = math.inf
        self.longest = 0.0  # that a candidate has taken
        self.tried: set[tuple[Any, ...]] = set()
        self.notes: list[str] = []

    def run(self, again: Callable[[Trace], Plan]) -> Plan:
        """``again``: the whole search, of a shorter trace."""
        with ThreadPoolExecutor(self.workers) as self.pool:
            return self._run(again)

    def _run(self, again: Callable[[Trace], Plan]) -> Plan:
        self.progress("solving for the bound", 0.0)
        self.began = time.process_time()
        steps = MERGED_STEPS if self.long else MAX_STEPS
        self.steps = BOUND_STEPS if self.quick else steps
        shares = self._solve(self.units)
        device_us = self.trace.op_duration_us[np.isnan(self.trace.op_host_us)]
        self.bound_us = float(device_us.sum())  # where the program has no answer
        if shares is not None:
            self.bound_us = shares.iteration_us
        found = plan_shorter(self.trace, self.hardware, again)
        if found is not None:
            self._keep(Outcome(found, Simulation(True, predicted=found.predicted), 0.0))
            if self.trace.ops > SEARCHED_OPS or not self._poor():
                return self._made(found)
        self.until = self.later = self._until(QUICK_SECONDS if self.quick else SECONDS)
        if shares is not None:
            self._try_all(self._choices(shares))
        if not self.quick or self.best is None:
            self.until = self.later = math.inf  # of most it is soon seen that they are slow
            self._try_all(self._rules())
        self.until = self._until(POLISH_SECONDS)
        self.later = self.until + (self.until - self.began) * POOR_LONGER
        self._try_all(self._polish(None if shares is None else shares.begins_us))
        refusal = self._moves_only()
        if self.best is None:
            raise refusal or PolicyRefusal("joint: no plan of the program ran in the simulator")
        return self._made(self.best.plan)

    def _made(self, best: Plan) -> Plan:
        self.progress("done", 1.0)
        made = replace(best, policy="joint").bounded(self.bound_us)
        return replace(made, extra={**made.extra, "notes": self.notes}) if self.notes else made

    def _try_all(self, candidates: Iterator[Callable[[], Tried] | None]) -> None:
        """As many at a time as there are workers. ``None`` waits for those that are under way."""
        flying: deque[tuple[float, Future[Tried]]] = deque()

        def land() -> None:
            begun, candidate = flying.popleft()
            decisions, outcome = candidate.result()
            self.longest = max(self.longest, time.process_time() - begun)
            if outcome is not None:
                self.latest[decisions] = outcome
            if self._keep(outcome):
                self.chosen = decisions

        for candidate in takewhile(lambda _: not self._over(), candidates):
            if candidate is not None:
                flying.append((time.process_time(), self.pool.submit(candidate)))
            while flying and (candidate is None or len(flying) >= self.workers):
                land()
        while flying:
            land()

    def _until(self, seconds: tuple[float, float]) -> float:
        """By the processor's time: so long after the begin, and from now at least."""
        pair = PAIR if self.workers > 1 else 1.0
        return max(self.began + pair * seconds[0], time.process_time() + pair * seconds[1])

    def _solve(self, units: list[Unit], *, hosted: bool = False) -> Shares | None:
        """``None``, and a note that says so, if not even a program of few steps has an answer."""
        for steps in dict.fromkeys((self.steps, min(self.steps, BOUND_STEPS))):
            try:
                return solve_joint(
                    self.trace,
                    self.hardware,
                    self.uses,
                    self.remakes,
                    units,
                    steps=steps,
                    time_limit_s=BOUND_SECONDS * _slowed(),
                    hosted=hosted,
                )
            except Unsolved:
                self.steps = min(steps, BOUND_STEPS)  # what took too long is not tried again
                if not hosted:
                    self.notes = [UNSOLVED if steps == self.steps else ROUGH]
        return None

    def _choices(self, shares: Shares) -> Iterator[Callable[[], Tried] | None]:
        """The program's shares made whole in several ways, then by the times of the best plan,
        until no better plan comes of it. What is asked anew comes first: most often that is the
        best, and soon shows which others can't be."""
        begins_us: Floats | None = shares.begins_us
        if self.remakes and self.units and not self.quick:
            chosen = rounded(self.trace, shares, self.remakes, self.units)
            housed = self._housed(chosen.units, shares)
            timely = self._timely(housed, shares.begins_us, TRIALS[0][1])
            units = self._filled(timely, shares, shares.begins_us, TRIALS[0][1])
            if units:
                yield partial(self._ask_anew, units)
        best = None
        while begins_us is not None and (best is not self.best or best is None):
            best = self.best
            for number, (more, slack) in enumerate(TRIALS):
                self.progress("trying the program's choices", 0.1 + 0.1 * number)
                chosen = rounded(self.trace, shares, self.remakes, self.units, more)
                timely = self._timely(self._housed(chosen.units, shares), begins_us, slack)
                filled = self._filled(timely, shares, begins_us, slack)
                decisions = Decisions(chosen.remakes, filled)
                if self._is_new(decisions):
                    yield partial(self._plan, decisions, begins_us)
            yield None
            begins_us = None if self.best is None else self._times(self.best)

    def _rules(self) -> Iterator[Callable[[], Tried]]:
        for name in RULES:
            decisions = decide(name, self.trace, self.remakes, self.units)
            if self._is_new(decisions):
                yield partial(self._plan, decisions, None)

    @staticmethod
    def _times(best: Outcome) -> Floats | None:
        """When the ops of a plan begin, and its end."""
        begins_us = best.simulation.op_start_us
        return None if begins_us is None else np.append(begins_us, best.iteration_us)

    def _ask_anew(self, units: list[Unit]) -> Tried:
        """What is made again where the host takes just these updates: they fill host memory that
        the program shared out in parts."""
        if self.long:
            self.steps = BOUND_STEPS
        shares = self._solve(units, hosted=True)
        if shares is not None:
            decisions = Decisions(rounded(self.trace, shares, self.remakes, units).remakes, units)
            if self._is_new(decisions):
                return self._plan(decisions, shares.begins_us)
        return Decisions(), None

    def _late(self, units: Sequence[Unit], begins_us: Floats, slack: float) -> dict[Unit, float]:
        """Updates that the host ends more than a ``slack`` of the iteration too late, and when."""
        hosted = Hosted(self.trace, self.hardware, units, begins_us)
        allowed_us = slack * float(begins_us[-1])
        late = zip(hosted.released, hosted.late_us)
        return {unit: hosted.ends_us[unit] for unit, late_us in late if late_us > allowed_us}

    def _timely(self, units: Sequence[Unit], begins_us: Floats, slack: float) -> list[Unit]:
        """Without the updates that the host could not finish in time; the first that is late goes
        first, since others wait for it, and some at once where there are many."""
        kept = list(units)
        while late := self._late(kept, begins_us, slack):
            first = sorted(late, key=lambda unit: late[unit])
            gone = set(first[: max(1, len(first) // 8)])
            kept = [unit for unit in kept if unit not in gone]
        return kept

    def _housed(self, units: Sequence[Unit], shares: Shares) -> list[Unit]:
        """Without the updates for which host memory has no room: those go first of which the
        program gave the host the smallest share, and among these the largest."""
        kept = set(units)
        order = sorted(
            (number for number, unit in enumerate(self.units) if unit in kept),
            key=lambda n: (float(shares.units[n]), -self._below[n]),
        )
        taken = sum(self._below[number] for number in order)
        for number in order:
            if taken <= self.room:
                break
            taken -= self._below[number]
            kept.discard(self.units[number])
        return [unit for unit in units if unit in kept]

    def _filled(
        self, units: list[Unit], shares: Shares, begins_us: Floats, slack: float
    ) -> list[Unit]:
        """With more updates, as many as the program had there and the host has time for: those of
        which the program gave it the largest share, and among these the largest. What is left of
        its time the small ones take."""
        chosen = set(units)
        below = self._below
        room = min(self.room, float(np.dot(below, shares.units)))
        taken = sum(n for n, unit in zip(below, self.units) if unit in chosen)
        order = sorted(
            (number for number, unit in enumerate(self.units) if unit not in chosen),
            key=lambda n: (-round(float(shares.units[n]), 2), -self.units[n].host_us, n),
        )
        for number in order[:MOST_FILLED]:
            more = [*units, self.units[number]]
            if taken + below[number] <= room and not self._late(more, begins_us, slack):
                units, taken = more, taken + below[number]
        return sorted(units, key=lambda unit: unit.ops)

    def _is_new(self, decisions: Decisions) -> bool:
        """Whether it has not been tried, and chooses anything."""
        key = (
            tuple(each.tensor for each in decisions.remakes),
            tuple(unit.ops for unit in decisions.units),
        )
        new = any(key) and key not in self.tried
        self.tried.add(key)
        return new

    def _plan(
        self, decisions: Decisions, begins_us: Floats | None, planner: Planner | None = None
    ) -> Tried:
        cutoff_us = self.best.iteration_us if self.best else math.inf
        planner = replace(planner or self.planner, cutoff_us=cutoff_us)
        return decisions, planner.plan(decisions, begins_us, rounds=1)

    def _polish(self, program_us: Floats | None) -> Iterator[Callable[[], Tried]]:
        """The moves of the best choices by the times of the plan before, and by programs of fewer,
        longer steps: their plans have fewer and larger moves, and no program knows what each costs.
        In turns with the choices whose program promised the most. Then these by the times of the
        program of all choices, ``program_us``, from which a plan that missed them has led away."""
        if self.quick or self.chosen is None:
            return
        promising = min(self.latest, key=lambda each: self.latest[each].least_us)
        planners = [
            replace(
                self.planner,
                most_steps=min(self.planner.most_steps, self.trace.ops) // part,
                most_orders=1 if by_due else MOST_ORDERS,
            )
            for part, by_due in POLISHED
        ]
        for planner in ROUNDS * planners:
            for decisions in dict.fromkeys((self.chosen, promising)):
                yield partial(self._plan, decisions, self._times(self.latest[decisions]), planner)
        for planner in planners:
            yield partial(self._plan, promising, program_us, planner)

    def _keep(self, outcome: Outcome | None) -> bool:
        """Whether it is the fastest so far."""
        if outcome is None or not (self.best is None or faster(outcome, self.best)):
            return False
        self.best = outcome
        return True

    def _moves_only(self) -> Exception | None:
        """The plan of ``lp``, if that could be faster; or why there is none."""
        if self.long and self._good():
            return None
        try:
            if self.best is not None:
                for quick in (True, self.quick):
                    least_us = bound_of_moves(self.trace, self.hardware, quick=quick)
                    if least_us >= self.best.iteration_us:
                        return None
            found = plan_moves(self.trace, self.hardware, quick=self.quick)
        except (InfeasibleBudget, PolicyRefusal) as refusal:
            return refusal
        assert found.predicted
        simulation = Simulation(True, predicted=found.predicted)
        self._keep(Outcome(found, simulation, 0.0))
        return None

    def _good(self) -> bool:
        return self.best is not None and self.bound_us >= GOOD_ENOUGH * self.best.iteration_us

    def _poor(self) -> bool:
        return self.best is None or self.bound_us < POOR * self.best.iteration_us

    def _over(self) -> bool:
        """Whether no further choice is tried: of a long trace, one that would end late."""
        until = self.later if self._poor() else self.until
        late = self.longest / 2 if self.long and not self.quick else 0.0
        return self._good() or time.process_time() + late > until


def _slowed() -> float:
    """By how much other work slows this, up to 8: the solver goes by the clock."""
    return min(8.0, max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))


# -- from shares to whole decisions --------------------------------------------------------------
def rounded(
    trace: Trace,
    shares: Shares,
    remakes: Sequence[Remake],
    units: Sequence[Unit],
    more: float = 0.0,
) -> Decisions:
    """A share of 0.37 for the same activation of every layer becomes yes in 37 % of the layers: the
    error is carried on from one to the next. ``more`` is added to each share of what may be made
    again that is neither 0 nor 1."""
    kinds = [_kind(trace, each.maker, each.tensor) for each in remakes]
    chosen = _carried(kinds, shares.remakes, more)
    kinds = [_kind(trace, unit.ops[0], unit.weights[0]) for unit in units]
    hosted = _carried(kinds, shares.units, 0.0)
    return Decisions(
        [each for each, yes in zip(remakes, chosen) if yes],
        [unit for unit, yes in zip(units, hosted) if yes],
    )


def _kind(trace: Trace, op: int, tensor: int) -> tuple[str, int]:
    """Ops and tensors of different layers are of one kind if they differ in numbers only."""
    return re.sub(r"\d+", "#", trace.op_names[op]), int(trace.tensor_bytes[tensor])


def _carried(kinds: Sequence[Any], shares: Floats, more: float) -> list[bool]:
    carry: dict[Any, float] = defaultdict(float)
    found = []
    for kind, share in zip(kinds, shares.tolist()):
        if 0.02 < share < 0.98:
            share = min(1.0, max(0.0, share + more))
        carry[kind] += share
        found.append(carry[kind] >= 0.5)
        carry[kind] -= found[-1]
    return found


# -- rules of thumb ------------------------------------------------------------------------------
RULES = ("checkpoint", "selective", "zero-offload")


def decide(name: str, trace: Trace, remakes: Sequence[Remake], units: Sequence[Unit]) -> Decisions:
    """``checkpoint``: what the segments make for the backward pass is made again, but what goes
    from one to the next. ``selective``: of that only what is cheap to make. ``zero-offload``: every
    update is the host's, and what the segments make is made again."""
    around = _segment_of(trace)
    inside = [each for each in remakes if around[each.maker] >= 0]
    inside = [e for e in inside if e.after <= trace.segments[around[e.maker]].last_op]
    if name == "selective":
        inside = [each for each in inside if _cheap(trace, each, around[each.maker])]
    return Decisions(inside, units if name == "zero-offload" else ())


def _segment_of(trace: Trace) -> list[int]:
    """The outermost segment around each op, or −1."""
    found = [-1] * trace.ops
    for number, segment in enumerate(trace.segments):
        for op in range(segment.first_op, segment.last_op + 1):
            other = found[op]
            if other < 0 or _length(trace.segments[other]) < _length(segment):
                found[op] = number
    return found


def _length(segment: Any) -> int:
    return int(segment.last_op - segment.first_op)


def _cheap(trace: Trace, each: Remake, segment: int) -> bool:
    first, last, _ = trace.segments[segment]
    total = float(trace.op_duration_us[first : last + 1].sum())
    return each.us <= CHEAP_SHARE * total


def plan_by_rule(name: str, trace: Trace, hardware: Hardware) -> Plan:
    """Raises ``PolicyRefusal`` where the trace permits nothing of it, or nothing fits."""
    uses = Uses(trace)
    decisions = decide(name, trace, find_remakes(trace, uses), find_units(trace, uses))
    if name != "zero-offload" and not decisions.remakes:
        raise PolicyRefusal(f"{name}: the trace has no segment of which anything can be made again")
    if name == "zero-offload" and not decisions.units:
        raise PolicyRefusal(f"{name}: the trace has no update that the host can take")
    found = Planner(trace, hardware, uses, lambda what, share: None, name).plan(decisions)
    if found is None:
        raise PolicyRefusal(f"{name}: no plan with these choices fits")
    return found.plan
