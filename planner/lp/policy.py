"""Policy ``lp``: the linear program's plan, and how far it is from the bound.

The program says how many pages of each gap are off the device where, and the
flows through time; ``schedule`` gives the flows to pages. One solution serves both as the bound and
as the first plan. Where that plan does not run as well as the bound says, the program is solved
again with some of the device left free, with copies that hold their slots, or without gaps that are
too short to be worth it, and the plan that is fastest in the simulator is kept.

Where it differs from a bound over all plans: a page goes out at most once between two uses, and the
latency of transfers is not in the program (the simulator has it).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NoReturn

import numpy as np

from ..errors import InfeasibleBudget, PolicyRefusal
from ..hardware import Hardware
from ..lifetimes import live_pages, working_set_pages
from ..plan import Bound, Plan
from ..simulation import Simulation
from ..simulator import simulate
from ..sizes import format_bytes
from ..trace import Ints, Trace
from .fit import fit
from .narrow import largest, less_room, too_many, without_short
from .problem import Problem, make_problem, merged
from .program import Solution, Unsolved, least_device_pages, solve
from .schedule import make_schedule, to_moves

Progress = Callable[[str, float], None]
GOOD_ENOUGH = 99.8  # percent of the bound at which no further program is solved
PERFECT = 99.9995  # at which the published policies are not asked
CLOSE = 99.5  # at which they are not asked when time is out
FULL_SECONDS, QUICK_SECONDS = 45.0, 12.0
MAX_STEPS, MERGED_STEPS = 2500, 1000  # of a longer trace steps are merged
QUICK_MAX_STEPS, QUICK_MERGED_STEPS, QUICK_BOUND_STEPS = 1000, 500, 300
POOR = 98.0  # percent of the bound below which a search out of time goes on
OTHERS = ("appobmem", "autoswap-doa", "g10", "lru")


@dataclass(frozen=True)
class _Settings:
    """How a program for a plan differs from the one for the bound."""

    reserve_pages: int = 0
    copies_keep_slots: bool = False
    shortest: float = 0.0  # gaps shorter than this many times their transfer time are left out


@dataclass(frozen=True, eq=False)
class _Candidate:
    plan: Plan
    simulation: Simulation


def plan(
    trace: Trace, hardware: Hardware, *, quick: bool = False, progress: Progress | None = None
) -> Plan:
    """The fastest plan found, with ``predicted``, ``bound`` and the settings that gave it.

    ``quick`` takes the first plan that runs, and a bound from merged steps, which is lower.
    ``progress(what, share done)`` is called now and then.

    Raises ``InfeasibleBudget`` with the smallest device budget that works, and ``PolicyRefusal``
    where the tiers below the device are too small for any.
    """
    search = _Search(trace, hardware, quick, progress or (lambda what, share: None))
    return search.run()


def bound(trace: Trace, hardware: Hardware, *, quick: bool = False) -> float:
    """Iteration time in µs that no plan beats (see above for what it is a bound over). Raises as
    :func:`plan` does."""
    search = _Search(trace, hardware, quick, lambda what, share: None)
    if search.fits:
        return trace.ideal_us
    search.check_budget()
    solution = search.solve_bound()
    return trace.ideal_us + (solution.stall_us if solution else 0.0)


class _Search:
    def __init__(self, trace: Trace, hardware: Hardware, quick: bool, progress: Progress) -> None:
        self.trace, self.hardware = trace, hardware
        self.quick, self.progress = quick, progress
        self.until = time.monotonic() + (QUICK_SECONDS if quick else FULL_SECONDS)
        self.limit = QUICK_MAX_STEPS if quick else MAX_STEPS
        self.merged_steps = QUICK_MERGED_STEPS if quick else MERGED_STEPS
        self.live = live_pages(trace, hardware.page_size)
        self.fits = not trace.ops or bool(self.live.max() <= hardware.device_pages)
        if not self.fits:
            self.problem = make_problem(trace, hardware)

    def run(self) -> Plan:
        if self.fits:
            empty = self._plan_of([], [])
            simulation = simulate(self.trace, self.hardware, empty)
            limit = Bound(self.trace.ideal_us, 100.0)
            return replace(empty, predicted=simulation.predicted, bound=limit)
        self.check_budget()
        self.progress("solving for the bound", 0.0)
        solution = self.solve_bound()
        least_us = self.trace.ideal_us + (solution.stall_us if solution else 0.0)
        best: _Candidate | None = None
        for candidate in self._candidates(solution):
            if candidate is not None and _faster(candidate, best):
                best = candidate
            done = _percent(least_us, best)
            self.progress(f"best plan so far: {done:.2f} % of the bound", min(done, 99.0) / 100)
            if best is not None and (self.quick or done >= GOOD_ENOUGH):
                break
            if done >= POOR and time.monotonic() > self.until:
                break
        for name in self._others(best):
            late = time.monotonic() > self.until
            if _percent(least_us, best) >= (CLOSE if late else PERFECT):
                break
            candidate = self._other(name)
            if candidate is not None and _faster(candidate, best):
                best = candidate
        if best is None:
            raise self._no_plan()
        self.progress("done", 1.0)
        predicted = best.simulation.predicted
        limit = Bound(least_us, min(100.0, _percent(least_us, best)))
        return replace(best.plan, predicted=predicted, bound=limit)

    # -- programs --------------------------------------------------------------------------------
    def solve_bound(self) -> Solution | None:
        """The relaxed program; exact, and good for a plan too, if no steps are merged. Raises
        ``InfeasibleBudget`` if it has no solution; ``None`` if none was found in time."""
        problem = self.problem
        if self.quick and problem.steps > QUICK_BOUND_STEPS:
            problem, _ = merged(problem, QUICK_BOUND_STEPS, relaxed=True)
        elif problem.steps > self.limit:
            problem, _ = merged(problem, self.merged_steps, relaxed=True)
        problem = largest(problem, relaxed=True)
        try:
            solution = solve(problem, time_limit_s=4 * FULL_SECONDS)
        except Unsolved:
            return None  # the ideal time is a bound too
        if solution is None:
            self._refuse()
        return solution

    def _candidates(self, solution: Solution | None) -> Iterator[_Candidate | None]:
        """The bound's own solution, then others, the most promising first."""
        steps = np.arange(self.problem.steps)
        whole = self.problem.steps <= self.limit and not too_many(self.problem)
        exact = self.problem.steps <= (QUICK_BOUND_STEPS if self.quick else self.limit)
        if whole and exact and solution is not None:
            yield self._candidate(_Settings(), self.problem, steps, solution)
        for settings in self._settings():
            if whole:
                problem, first_op = self.problem, steps
            else:
                problem, first_op = merged(self.problem, self.merged_steps, relaxed=False)
                problem = largest(problem, relaxed=False)
            problem = without_short(problem, settings.shortest)
            problem = less_room(problem, settings.reserve_pages)
            self.progress(f"solving with {settings}", 0.5)
            answer = self._solve(problem, settings)
            if answer is not None:
                yield self._candidate(settings, problem, first_op, answer)

    def _solve(self, problem: Problem, settings: _Settings) -> Solution | None:
        try:
            return solve(
                problem,
                reserve_pages=settings.reserve_pages,
                copies_keep_slots=settings.copies_keep_slots,
                time_limit_s=max(30.0, self.until - time.monotonic()),
            )
        except Unsolved:
            return None

    def _settings(self) -> list[_Settings]:
        need = int(working_set_pages(self.trace, self.hardware.page_size).max())
        spare = max(0, int(self.hardware.device_pages) - need)
        found = [_Settings(min(spare // 4, 32), True), _Settings(0, True)]
        if not self.quick:
            found.insert(1, _Settings(min(spare // 4, 128), True, 2.0))
            found.insert(2, _Settings(min(spare // 4, 256), True, 6.0))
        return found

    def _candidate(
        self, settings: _Settings, problem: Problem, first_op: Ints, solution: Solution
    ) -> _Candidate | None:
        schedule = fit(problem, make_schedule(problem, solution))
        moves, start = to_moves(self.trace, problem, schedule, first_op)
        made = replace(self._plan_of(moves, start), extra={"settings": vars(settings).copy()})
        simulation = simulate(self.trace, self.hardware, made)
        return _Candidate(made, simulation) if simulation.feasible else None

    def _others(self, best: _Candidate | None) -> tuple[str, ...]:
        """Published policies to ask: no plan of ours may be slower than theirs, and where hardly
        anything has to move, whole tensors are as good. They are not made for long traces."""
        if best is not None and (self.quick or self.trace.ops > MAX_STEPS):
            return ()
        return OTHERS

    def _other(self, name: str) -> _Candidate | None:
        """What a published policy makes of it."""
        from ..policies.registry import POLICIES

        try:
            found = POLICIES[name](self.trace, self.hardware)
        except (PolicyRefusal, InfeasibleBudget):
            return None
        made = replace(found, policy="lp", extra={"settings": {"from": name}})
        simulation = simulate(self.trace, self.hardware, made)
        return _Candidate(made, simulation) if simulation.feasible else None

    def _plan_of(self, moves: list, start: list) -> Plan:  # type: ignore[type-arg]
        hardware = self.hardware
        return Plan(
            policy="lp",
            page_size=hardware.page_size,
            device_bytes=hardware.device_bytes,
            host_bytes=hardware.host_bytes,
            disk_bytes=hardware.disk_bytes,
            moves=moves,
            start=start,
            trace_sha256=self.trace.sha256,
        )

    # -- budgets ---------------------------------------------------------------------------------
    def check_budget(self) -> None:
        """An op's own pages must fit, whatever is moved."""
        need = working_set_pages(self.trace, self.hardware.page_size)
        op = int(need.argmax())
        if need[op] > self.hardware.device_pages:
            self._refuse(
                f"op {op} '{self.trace.op_names[op]}' alone needs "
                f"{format_bytes(int(need[op]) * self.hardware.page_size)}"
            )

    def _refuse(self, why: str = "the tiers below cannot hold the rest") -> NoReturn:
        """Raise with the smallest device budget for which there is a plan."""
        problem = self.problem
        if problem.steps > self.limit:
            problem, _ = merged(problem, self.merged_steps, relaxed=False)
        try:
            least = least_device_pages(largest(problem, relaxed=False))
        except Unsolved:
            least = float(working_set_pages(self.trace, self.hardware.page_size).max())
        pages = self._smallest(math.ceil(least - 1e-6) if least is not None else 0)
        nbytes = pages * int(self.hardware.page_size)
        raise InfeasibleBudget(
            f"a device budget of {format_bytes(self.hardware.device_bytes)} is too small: {why}; "
            f"the smallest that works is {nbytes} bytes ({format_bytes(nbytes)})",
            minimum=nbytes,
        )

    def _smallest(self, pages: int) -> int:
        """From ``pages`` on, the first device size tried for which there is a plan."""
        most = int(self.live.max())
        step = 1
        while 0 < pages < most:
            size = pages * int(self.hardware.page_size)
            search = _Search(
                self.trace, self.hardware.with_(device_bytes=size), True, self.progress
            )
            if any(search._other(name) for name in ("lru", "g10")):
                return pages
            try:
                search.run()
            except PolicyRefusal:
                pages += step
                step *= 2
            except InfeasibleBudget as error:
                return error.minimum // int(self.hardware.page_size)
            else:
                return pages
        return most

    def _no_plan(self) -> PolicyRefusal:
        return PolicyRefusal(
            "no plan of the linear program ran in the simulator at "
            f"{format_bytes(self.hardware.device_bytes)} of device memory; give it a little more, "
            "or a larger tier below"
        )


def _faster(candidate: _Candidate, best: _Candidate | None) -> bool:
    new = candidate.simulation.predicted
    old = best.simulation.predicted if best else None
    return new is not None and (old is None or new.iteration_us < old.iteration_us)


def _percent(least_us: float, best: _Candidate | None) -> float:
    if best is None or best.simulation.predicted is None:
        return 0.0
    taken = best.simulation.predicted.iteration_us
    return 100.0 * least_us / taken if taken else 100.0
