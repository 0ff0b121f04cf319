"""Policy ``lp``: the linear program's plan, and how far it is from the bound.

The program says how many pages of each gap are off the device where, and the
flows through time; ``schedule`` gives the flows to pages. One solution serves both as the bound and
as the first plan. Where that plan does not run as well as the bound says, the program is solved
again with other settings (``settings.py``), and the plan that is fastest in the simulator is kept.

Where it differs from a bound over all plans: a page goes out at most once between two uses, and the
latency of transfers is not in the program (the simulator has it).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from ..errors import InfeasibleBudget, PolicyRefusal
from ..hardware import Hardware
from ..lifetimes import live_pages, working_set_pages
from ..plan import Bound, Plan
from ..policies import appobmem, autoswap, g10, lru
from ..shorter import SEARCHED_OPS, plan_shorter
from ..simulation import Simulation
from ..simulator import simulate
from ..sizes import format_bytes
from ..trace import Trace
from . import settings
from .fit import fit
from .mend import mended, put_off, sooner
from .narrow import largest, less_room, too_many, without_short
from .problem import Problem, make_problem, merged
from .program import Solution, Unsolved, least_device_pages, solve, solve_loosely
from .schedule import make_schedule, to_moves
from .settings import (
    EXACT,
    MAX_STEPS,
    MERGED_STEPS,
    QUICK_BOUND_STEPS,
    QUICK_EXACT_STEPS,
    QUICK_MAX_STEPS,
    QUICK_MERGED_STEPS,
    Settings,
)

Progress = Callable[[str, float], None]
GOOD_ENOUGH = 99.8  # percent of the bound at which no further program is solved
PERFECT = 99.9995  # at which nobody else is asked
CLOSE = 99.5  # at which they are not asked when time is out
FULL_SECONDS, QUICK_SECONDS = 45.0, 12.0
UNSOLVED = f"the solver had no bound in {4 * FULL_SECONDS:.0f} s: the ideal time stands for it"
QUICK_ENOUGH = 97.0  # at which a quick search of small programs ends
POOR = 98.0  # percent of the bound below which a search out of time goes on
OTHERS: dict[str, Callable[[Trace, Hardware], Plan]] = {
    "appobmem": appobmem.plan,
    "autoswap-doa": partial(autoswap.plan, score="doa"),
    "g10": g10.plan,
    "lru": lru.plan,
}


@dataclass(frozen=True, eq=False)
class _Candidate:
    plan: Plan
    simulation: Simulation


def plan(
    trace: Trace, hardware: Hardware, *, quick: bool = False, progress: Progress | None = None
) -> Plan:
    """The fastest plan found, with ``predicted``, ``bound`` and the settings that gave it.

    ``quick`` takes the first plan that runs, and of a long trace a bound from merged steps, which
    is lower.
    ``progress(what, share done)`` is called now and then.

    Raises ``InfeasibleBudget`` with the smallest device budget that works, and ``PolicyRefusal``
    where the tiers below the device are too small for any.
    """
    return _Search(trace, hardware, quick, progress or (lambda what, share: None)).run()


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
        self.solution: Solution | None = None  # of the bound's program
        self.least_us = trace.ideal_us
        self.ran: dict[Settings, bool] = {}  # programs that were tried
        self.best: _Candidate | None = None
        if not self.fits:
            self.problem = make_problem(trace, hardware)
            need = int(working_set_pages(trace, hardware.page_size).max())
            self.spare = max(0, int(hardware.device_pages) - need)

    def run(self) -> Plan:
        if self.fits:
            empty = self._plan_of([], [])
            simulation = simulate(self.trace, self.hardware, empty)
            limit = Bound(self.trace.ideal_us, 100.0)
            return replace(empty, predicted=simulation.predicted, bound=limit)
        self.check_budget()
        self.progress("solving for the bound", 0.0)
        self.solution = self.solve_bound()
        if self.solution is not None:
            self.least_us += self.solution.stall_us
        if self._keep(self._in_fewer_ops()):
            assert self.best is not None
            if self.trace.ops > SEARCHED_OPS or self.quick or self._percent() >= POOR:
                return self._made(self.best)
        if not self.quick:
            self._full()
        if self._percent() < PERFECT:  # a full search is never worse than a quick one
            self._quickly()
        for name in self._others():
            late = time.monotonic() > self.until
            if self._percent() >= (CLOSE if late else PERFECT):
                break
            self._keep(self._other(name))
        if self.best is None:
            raise self._no_plan()
        if self._percent() < PERFECT and settings.has_few_pages(self.problem):
            self._mend(self.best.plan)
        return self._made(self.best)

    def _made(self, best: _Candidate) -> Plan:
        self.progress("done", 1.0)
        predicted = best.simulation.predicted
        made = replace(best.plan, predicted=predicted).bounded(self.least_us)
        if self.solution is None:
            made = replace(made, extra={**made.extra, "notes": [UNSOLVED]})
        return made

    def _in_fewer_ops(self) -> _Candidate | None:
        """The plan of a shorter trace, if this one is long."""
        again = partial(plan, hardware=self.hardware, quick=self.quick, progress=self.progress)
        found = plan_shorter(self.trace, self.hardware, again)
        if found is None:
            return None
        return _Candidate(found, Simulation(True, predicted=found.predicted))

    def _quickly(self) -> None:
        small = settings.is_small(self.problem)
        for each in settings.quick(self.problem, self.spare):
            if self._try(each) and (not small or self._percent() >= QUICK_ENOUGH):
                break

    def _full(self) -> None:
        """The most promising programs first, until a plan is good enough."""
        for each in self._in_full():
            self._try(each)
            done = self._percent()
            self.progress(f"best plan so far: {done:.2f} % of the bound", min(done, 99.0) / 100)
            if done >= GOOD_ENOUGH or (done >= POOR and time.monotonic() > self.until):
                break

    def _in_full(self) -> Iterator[Settings]:
        yield from settings.exact(self.problem)
        own = self.best
        yield from settings.coarse(self.problem)
        coarse_won = self.best is not own
        for each in settings.fine(self.problem, self.spare):
            if coarse_won and time.monotonic() > self.until:
                return
            yield each

    def _try(self, how: Settings) -> bool:
        """Whether the program's plan runs."""
        if how not in self.ran:
            self.ran[how] = self._keep(self._candidate(how))
        return self.ran[how]

    def _keep(self, candidate: _Candidate | None) -> bool:
        """Whether there is one; it is kept if it is the fastest."""
        if candidate is not None and _faster(candidate, self.best):
            self.best = candidate
        return candidate is not None

    def _mend(self, plan: Plan) -> None:
        """Many simulations, and worth it where these are short."""
        simulation = simulate(self.trace, self.hardware, plan, log_transfers=True)
        assert simulation.predicted is not None
        made = replace(plan, predicted=simulation.predicted)
        mends = [put_off(self.trace), *sooner(self.trace)]
        found = mended(self.trace, self.hardware, made, simulation, mends)
        self._keep(_Candidate(*found))

    def _percent(self) -> float:
        """Of the bound, that the best plan reaches."""
        if self.best is None or self.best.simulation.predicted is None:
            return 0.0
        taken = self.best.simulation.predicted.iteration_us
        return 100.0 * self.least_us / taken if taken else 100.0

    # -- programs --------------------------------------------------------------------------------
    def solve_bound(self) -> Solution | None:
        """The relaxed program; exact, and good for a plan too, if no steps are merged. Raises
        ``InfeasibleBudget`` if it has no solution; ``None`` if none was found."""
        problem, steps = self.problem, None
        if self.quick and problem.steps > QUICK_EXACT_STEPS:
            steps = QUICK_BOUND_STEPS
        elif problem.steps > self.limit:
            steps = self.merged_steps
        if steps is not None:
            problem, _ = merged(problem, steps, relaxed=True)
        how = solve if steps is None and not too_many(problem) else solve_loosely
        try:
            solution = how(problem, time_limit_s=4 * FULL_SECONDS)
        except Unsolved:
            return None  # the ideal time is a bound too
        if solution is None:
            self._refuse()
        return solution

    def _candidate(self, how: Settings) -> _Candidate | None:
        """The plan of this program, if it has one and that runs."""
        problem, first_op = self.problem, np.arange(self.problem.steps)
        solution = self.solution
        if how != EXACT:
            if how.merged_steps is not None:
                problem, first_op = merged(problem, how.merged_steps, relaxed=False)
                problem = largest(problem)
            problem = without_short(problem, how.shortest)
            problem = less_room(problem, how.reserve_pages)
            self.progress(f"solving with {how}", 0.5)
            solution = self._solve(problem, how)
        if solution is None:
            return None
        schedule = fit(problem, make_schedule(problem, solution))
        moves, start = to_moves(self.trace, problem, schedule, first_op)
        made = replace(self._plan_of(moves, start), extra={"settings": vars(how).copy()})
        simulation = simulate(self.trace, self.hardware, made)
        return _Candidate(made, simulation) if simulation.feasible else None

    def _solve(self, problem: Problem, how: Settings) -> Solution | None:
        try:
            return solve(
                problem,
                reserve_pages=how.reserve_pages,
                copies_keep_slots=how.copies_keep_slots,
                time_limit_s=max(30.0, self.until - time.monotonic()),
            )
        except Unsolved:
            return None

    def _others(self) -> tuple[str, ...]:
        """Published policies to ask: no plan of ours may be slower than theirs, and where hardly
        anything has to move, whole tensors are as good. They are not made for long traces."""
        if self.best is not None and (self.quick or self.trace.ops > MAX_STEPS):
            return ()
        return tuple(OTHERS)

    def _other(self, name: str) -> _Candidate | None:
        """What a published policy makes of it."""
        try:
            found = OTHERS[name](self.trace, self.hardware)
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
            hardware=hardware,
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

    def _refuse(self, why: str = "the tiers below cannot hold the rest") -> None:
        """Raise with the smallest device budget for which there is a plan. Where it is not larger
        than what there is, the program that had no solution was wrong (merged steps, rounding), and
        the search goes on."""
        problem = self.problem
        if problem.steps > self.limit:
            problem, _ = merged(problem, self.merged_steps, relaxed=False)
        try:
            least = least_device_pages(largest(problem))
        except Unsolved:
            least = float(working_set_pages(self.trace, self.hardware.page_size).max())
        pages = self._smallest(math.ceil(least - 1e-6) if least is not None else 0)
        nbytes = pages * int(self.hardware.page_size)
        if nbytes <= self.hardware.device_bytes:
            return
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
