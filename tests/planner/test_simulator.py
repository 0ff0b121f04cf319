"""The simulator's short cuts change nothing: iterations that repeat, pages that arrive together.

What it computes is compared with hand-made cases and with the validator in ``test_machine_model``.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from tensorpager.planner.hardware import Hardware
from tensorpager.planner.plan import Move
from tensorpager.planner.simulation import Simulation
from tensorpager.planner.simulator import machine, simulate
from tensorpager.planner.simulator.coast import coast
from tensorpager.planner.simulator.machine import MIN_ITERATIONS
from tensorpager.planner.simulator.pages import Pages
from tensorpager.planner.simulator.queue import Queue
from tensorpager.planner.trace import READ, WRITE

from .random_plans import PAGE, Access, Case, case_of, choice_case_of, paged_trace, plan_of

SAME = 1e-9  # relative: times that are summed in another order
Machine = machine._Machine


def finer(case: Case, times: int) -> Case:
    """The same bytes in pages that are ``times`` smaller, so that moves have many."""
    plan, size = case.plan, case.plan.page_size // times
    runs = [
        run._replace(first_page=run.first_page * times, page_count=run.page_count * times)
        for run in plan.start
    ]
    moves = [
        move._replace(first_page=move.first_page * times, page_count=move.page_count * times)
        for move in plan.moves
    ]
    plan = replace(plan, page_size=size, moves=moves, start=runs)
    return Case(case.trace, replace(case.hardware, page_size=size), plan)


def run(case: Case) -> Simulation:
    return simulate(case.trace, case.hardware, case.plan, log_transfers=True)


@pytest.fixture
def iterations_run(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the iterations that are really run."""
    count: Counter[str] = Counter()
    iteration = Machine._iteration

    def counted(self: machine._Machine, until_logged: bool = False) -> None:
        count["for the log" if until_logged else "run"] += 1
        iteration(self, until_logged)

    monkeypatch.setattr(Machine, "_iteration", counted)
    return count


# -- iterations that repeat ---------------------------------------------------------------------


def test_an_iteration_that_begins_as_the_one_before_is_not_run(
    iterations_run: Counter[str],
) -> None:
    """A weight goes to the host after its first use, comes back and is written."""
    hardware = Hardware(5 * PAGE, 10 * PAGE, 0, 1e8, 1e8, page_size=PAGE)
    moves = [Move(3, 0, 4, "host", "out", 1), Move(3, 0, 4, "host", "in", 2)]
    ops = [[Access(0, 0, 4, READ)], [Access(1, 0, 1, WRITE)]]
    ops += [[Access(1, 0, 1, READ)], [Access(0, 0, 4, WRITE)]]
    trace = paged_trace([(4, True), (1, False)], [10.0, 100.0, 100.0, 10.0], ops)
    result = run(Case(trace, hardware, plan_of(hardware, moves, [])))
    assert result.feasible
    assert result.iterations == MIN_ITERATIONS
    assert iterations_run == {"run": 1}  # it leaves all as it began, and nothing on its way


def test_what_is_on_its_way_at_the_end_is_a_state_of_its_own(
    iterations_run: Counter[str],
) -> None:
    hardware = Hardware(6 * PAGE, 10 * PAGE, 0, 1e8, 1e8, page_size=PAGE)
    moves = [Move(13, 0, 1, "host", "out", 3), Move(13, 0, 1, "host", "in", 3)]
    ops = [[Access(0, 0, 4, READ)], [Access(1, 0, 1, WRITE)], [], []]
    trace = paged_trace([(4, True), (1, True)], [20.0, 5.0, 5.0, 5.0], ops)
    result = run(Case(trace, hardware, plan_of(hardware, moves, [])))
    assert result.feasible
    # The first begins with nothing on its way, all others with a page going out.
    assert iterations_run == {"run": 2, "for the log": 1}
    assert result.transfers is not None
    assert [(t.is_out, t.begin_us, t.end_us) for t in result.transfers] == [
        (True, 30.0, 40.0),
        (False, 40.0, 50.0),
    ]


def test_repeated_iterations_are_the_same_to_the_last_bit(
    monkeypatch: pytest.MonkeyPatch, iterations_run: Counter[str]
) -> None:
    cases = [case_of(seed) for seed in range(150)]
    quick = [run(case) for case in cases]
    saved = iterations_run["run"]
    marks = itertools.count()
    monkeypatch.setattr(Machine, "_state", lambda self: next(marks))  # no two are equal
    for case, result in zip(cases, quick):
        full = run(case)
        for name in ("feasible", "reason", "predicted", "iterations", "stalls", "transfers"):
            assert getattr(full, name) == getattr(result, name), case
        if full.feasible:
            assert np.array_equal(full.op_start_us, result.op_start_us)
            assert np.array_equal(full.op_end_us, result.op_end_us)
    assert iterations_run["run"] - saved > 1.5 * saved


# -- pages that arrive together -----------------------------------------------------------------


def page_times(result: Simulation) -> tuple[list[tuple[int, int, bool]], list[tuple[float, float]]]:
    """(move, page, whether it arrived) in order, and from when to when each page went."""
    found = []
    for part in result.transfers or ():
        page_us = (part.end_us - part.begin_us) / part.page_count
        for k in range(part.page_count):
            times = part.begin_us + k * page_us, part.begin_us + (k + 1) * page_us
            found.append(((part.move, part.first_page + k, part.arrived), times))
    found.sort()
    return [page for page, _ in found], [times for _, times in found]


def assert_same(one: Simulation, other: Simulation, case: Case) -> None:
    """Times within ``SAME``; everything else exactly."""
    assert (one.feasible, one.reason) == (other.feasible, other.reason), case
    if one.predicted is None or other.predicted is None:
        return
    scale = one.predicted.iteration_us
    first, second = replace(one.predicted, iteration_us=0, stall_us=0), other.predicted
    assert first == replace(second, iteration_us=0, stall_us=0), case
    stalls = [[(s.op, s.tensor, s.channel) for s in result.stalls] for result in (one, other)]
    assert stalls[0] == stalls[1], case
    pages, times = zip(page_times(one), page_times(other))
    assert pages[0] == pages[1], case
    for first_us, second_us in (
        ([scale], [second.iteration_us]),
        (one.op_start_us, other.op_start_us),
        (one.op_end_us, other.op_end_us),
        ([s.us for s in one.stalls], [s.us for s in other.stalls]),
        times,
    ):
        np.testing.assert_allclose(first_us, second_us, 0, SAME * scale, err_msg=repr(case))


def test_pages_that_arrive_together_arrive_as_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [*map(case_of, range(500)), *map(choice_case_of, range(200))]
    cases = [finer(case, (5, 20)[seed % 2]) for seed, case in enumerate(made)]
    together: Counter[str] = Counter()

    def counted(
        queues: Sequence[Queue], pages: Pages, limit_us: float, most_out: int | None = None
    ) -> None:
        before, drops = pages.out_pages + pages.in_pages, len(pages.drops)
        came, free = pages.in_pages, pages.free
        coast(queues, pages, limit_us, most_out)
        if pages.out_pages + pages.in_pages > before:
            together["all"] += 1
            together["with drops"] += len(pages.drops) < drops
            together["frames are waited for"] += most_out is not None
            together["frames become free"] += pages.in_pages - came > free

    monkeypatch.setattr(machine, "coast", counted)
    quick = [run(case) for case in cases]
    assert min(together.values()) > 20, together
    monkeypatch.setattr(machine, "coast", lambda *arguments: None)
    for case, result in zip(cases, quick):
        assert_same(run(case), result, case)


def test_an_op_that_waits_for_frames_starts_with_the_last_of_them() -> None:
    """Six pages go out in 10 µs each, and the op needs five frames of theirs; when it has ended
    they come back."""
    hardware = Hardware(6 * PAGE, 10 * PAGE, 0, 1e8, 1e8, page_size=PAGE)
    ops = [[Access(0, 0, 6, WRITE)], [Access(1, 0, 5, WRITE)], [Access(0, 0, 6, READ)]]
    trace = paged_trace([(6, False), (5, False)], [1.0, 1.0, 1.0], ops)
    moves = [Move(3, 0, 6, "host", "out", 1), Move(3, 0, 6, "host", "in", 2)]
    result = run(Case(trace, hardware, plan_of(hardware, moves, [])))
    assert result.op_start_us is not None
    assert result.op_start_us.tolist() == [0.0, 51.0, 112.0]
    assert [(s.op, s.us, s.tensor, s.channel) for s in result.stalls] == [
        (1, 50.0, -1, "host-out"),
        (2, 60.0, 0, "host-in"),
    ]


def test_only_tensors_that_move_are_looked_at_page_by_page() -> None:
    """A tensor that never moves takes frames all the same, and its deaths make room."""
    hardware = Hardware(5 * PAGE, 10 * PAGE, 0, 1e8, 1e8, page_size=PAGE)
    ops = [[Access(0, 0, 3, WRITE)], [Access(1, 0, 2, WRITE)], [Access(2, 0, 3, WRITE)]]
    trace = paged_trace([(3, False), (2, False), (3, False)], [1.0, 1.0, 1.0], ops)
    result = run(Case(trace, hardware, plan_of(hardware, [], [])))
    assert result.predicted is not None
    assert result.predicted.peak_device_bytes == 3 * PAGE
    ops[2] += [Access(0, 0, 3, READ), Access(1, 0, 2, READ)]
    trace = paged_trace([(3, False), (2, False), (3, False)], [1.0, 1.0, 1.0], ops)
    result = run(Case(trace, hardware, plan_of(hardware, [], [])))
    assert not result.feasible
    assert "waits for 3 free frames (0 free)" in result.reason
