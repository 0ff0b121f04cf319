"""How little device memory is enough for a share of the speed?

Budgets are whole pages, from the largest working set to room for everything. A few evenly spaced
ones are tried first, because a policy's time need not fall as room grows; then the search goes on
below the smallest that is good enough, with as many budgets at a time as there are processes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from .hardware import Hardware
from .lifetimes import live_pages, working_set_pages
from .plan import Plan
from .sweep import Evaluator, Outcome, Task

SAMPLES = 7  # budgets tried first, beside the least and the most
FINENESS = 1024  # the answer is found to this part of the peak, or to a page: plans differ by more
ROUNDING = 1e-6  # of the time; below it are rounding errors


@dataclass(frozen=True)
class Answer:
    """``tried`` are the outcomes by rising budget, all with plans of one policy.

    ``enough`` is the one with the smallest budget that reaches the target (``None``: none does),
    ``plan`` its plan, ``smallest`` the one with the smallest budget that runs at all.
    """

    policy: str
    target_percent: float
    peak_bytes: int  # in whole pages: room for everything
    step_bytes: int  # how close the search went
    tried: tuple[Outcome, ...]
    enough: Outcome | None
    plan: Plan | None
    smallest: Outcome | None

    @property
    def below(self) -> Outcome | None:
        """The next smaller budget tried; it does not reach the target."""
        if self.enough is None:
            return None
        place = self.tried.index(self.enough)
        return self.tried[place - 1] if place else None

    @property
    def hopeless_bytes(self) -> int | None:
        """With so little memory, or less, the bound says that no plan reaches the target."""
        slowest = 100.0 / self.target_percent * (1.0 + ROUNDING)
        found = [
            int(outcome.hardware.device_bytes)
            for outcome in self.tried
            if outcome.bound_us is not None
            and outcome.predicted is not None
            and outcome.bound_us > slowest * outcome.predicted.ideal_us
        ]
        return max(found, default=None)

    @property
    def fastest(self) -> Outcome | None:
        """The fastest of those tried, the smallest budget if several are."""
        able = [outcome for outcome in self.tried if outcome.predicted is not None]
        return max(able, key=_percent, default=None)


def least_memory(
    evaluator: Evaluator,
    policy: str,
    hardware: Hardware,
    target_percent: float,
    *,
    quick: bool = False,
    done: Callable[[Outcome], None] | None = None,
) -> Answer:
    """The smallest device budget found with which ``policy`` reaches ``target_percent`` of the
    ideal speed. ``hardware``'s own device plays no part; ``done`` is called with each outcome.

    A budget smaller than the answer that was not tried may do too, unless the bound says no."""
    search = _Search(evaluator, policy, hardware, target_percent, quick, done)
    search.begin()
    enough = search.smallest(search.reaches)
    able = search.smallest(lambda outcome: outcome.predicted is not None)
    tried = search.outcomes
    return Answer(
        policy,
        target_percent,
        search.most * hardware.page_size,
        search.step * hardware.page_size,
        tuple(tried[pages] for pages in sorted(tried)),
        None if enough is None else tried[enough],
        None if enough is None else search.plan,
        None if able is None else tried[able],
    )


def _percent(outcome: Outcome) -> float:
    return outcome.predicted.percent_of_ideal if outcome.predicted else 0.0


class _Search:
    def __init__(
        self,
        evaluator: Evaluator,
        policy: str,
        hardware: Hardware,
        target_percent: float,
        quick: bool,
        done: Callable[[Outcome], None] | None,
    ) -> None:
        trace, page = evaluator.trace, hardware.page_size
        self.evaluator, self.policy, self.hardware = evaluator, policy, hardware
        self.target_percent, self.quick, self.done = target_percent, quick, done
        self.most = max(1, int(live_pages(trace, page).max(initial=0)))
        self.least = max(1, int(working_set_pages(trace, page).max(initial=0)))
        self.step = max(1, self.most // FINENESS)
        self.outcomes: dict[int, Outcome] = {}  # by pages of device memory
        self.plan: Plan | None = None  # of the smallest budget so far that reaches the target

    def reaches(self, outcome: Outcome) -> bool:
        predicted = outcome.predicted
        slowest = 100.0 / self.target_percent * (1.0 + ROUNDING)
        return predicted is not None and predicted.iteration_us <= slowest * predicted.ideal_us

    def begin(self) -> None:
        """The least, the most and evenly spaced budgets between. Where a policy refuses the least
        and knows the smallest that works, that is the least."""
        self.attempt([self.least, self.most])
        minimum = self.outcomes[self.least].minimum
        if minimum is not None:
            self.least = min(self.most, -(-minimum // self.hardware.page_size))
        self.attempt([self.least, *_between(self.least, self.most, SAMPLES)])

    def smallest(self, good: Callable[[Outcome], bool]) -> int | None:
        """Pages of the smallest budget that is ``good``, found to ``step`` pages."""
        while True:
            high = min((p for p, found in self.outcomes.items() if good(found)), default=None)
            if high is None:
                return None
            low = max((p for p in self.outcomes if p < high), default=high)
            if high - low <= self.step or high <= self.least:
                return high
            self.attempt(_between(max(low, self.least - 1), high, self.evaluator.jobs))

    def attempt(self, budgets: list[int]) -> None:
        new = sorted(set(budgets) - set(self.outcomes))
        tasks = [
            Task(
                self.policy,
                self.hardware.with_(device_bytes=pages * self.hardware.page_size),
                quick=self.quick,
                keep_plan=True,
            )
            for pages in new
        ]
        outcomes = self.evaluator.run(tasks, self.done)
        best = min((p for p, found in self.outcomes.items() if self.reaches(found)), default=None)
        for pages, outcome in zip(new, outcomes):
            if self.reaches(outcome) and (best is None or pages < best):
                best, self.plan = pages, outcome.plan
            self.outcomes[pages] = replace(outcome, plan=None)


def _between(low: int, high: int, count: int) -> list[int]:
    """``count`` evenly spaced numbers above ``low`` and below ``high``, or all there are."""
    count = min(count, high - low - 1)
    return [low + (high - low) * n // (count + 1) for n in range(1, count + 1)]
