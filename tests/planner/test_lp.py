"""Policy lp: its plans run, its bound holds, its smallest budget works, one page less does not."""

import math
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorpager.planner.errors import InfeasibleBudget, PolicyRefusal
from tensorpager.planner.hardware import Hardware
from tensorpager.planner.lp import policy as lp_policy
from tensorpager.planner.lp import settings as lp_settings
from tensorpager.planner.lp.fit import fit, resident_pages
from tensorpager.planner.lp.groups import grouped
from tensorpager.planner.lp.policy import OTHERS, bound, plan
from tensorpager.planner.lp.problem import Problem, make_problem, merged
from tensorpager.planner.lp.program import Solution, Unsolved, least_device_pages, solve
from tensorpager.planner.lp.schedule import Schedule, make_schedule
from tensorpager.planner.registry import POLICIES
from tensorpager.planner.simulator import simulate
from tensorpager.planner.trace import READ, WRITE, Trace, make_trace
from tensorpager.planner.validator import validate

from .examples import examples
from .random_plans import PAGE, Access, paged_trace, random_hardware, random_trace

seeds = st.integers(0, 10**6)


def chain(layers: int, *, pages: int = 40, op_us: float = 400.0) -> Trace:
    """Forward, backward and optimizer step of ``layers`` layers with one weight each."""
    weights, activations = range(layers), range(layers, 2 * layers)
    gradient = 2 * layers
    tensors = [(w, pages * PAGE, True) for w in weights]
    tensors += [(a, pages * PAGE, False) for a in activations]
    tensors += [(gradient + n, pages * PAGE // 2, False) for n in range(layers)]
    ops = []
    for n in range(layers):
        before = [activations[n - 1]] if n else []
        ops.append((f"forward.{n}", op_us, [weights[n], *before], [activations[n]]))
    for n in reversed(range(layers)):
        after = [gradient + n + 1] if n + 1 < layers else []
        reads = [weights[n], activations[n], *after]
        ops.append((f"backward.{n}", 2 * op_us, reads, [gradient + n]))
    ops += [(f"step.{n}", op_us / 4, [weights[n]], [weights[n]]) for n in range(layers)]
    return make_trace(tensors, ops, page_size=PAGE)


def machine(pages: float, **changes: float) -> Hardware:
    """A device of ``pages`` pages; a page takes 10 µs on the link and 30 µs on the disk."""
    base = Hardware(
        pages * PAGE, 10**9, math.inf, 1e8, 1e8, PAGE / 30e-6, PAGE / 30e-6, page_size=PAGE
    )
    return base.with_(**changes)


def runs(trace: Trace, hardware: Hardware, **options: bool) -> tuple[float, float]:
    """Iteration time and bound of lp's plan, which simulator and validator agree on."""
    made = plan(trace, hardware, **options)
    assert made.predicted is not None
    assert made.bound is not None
    first, second = simulate(trace, hardware, made), validate(trace, hardware, made)
    assert first.feasible, first.reason
    assert second.feasible, second.reason
    assert first.predicted == made.predicted
    assert second.predicted is not None
    assert second.predicted.iteration_us == pytest.approx(made.predicted.iteration_us, abs=1e-3)
    assert made.predicted.peak_device_bytes <= hardware.device_bytes
    assert made.predicted.peak_host_bytes <= hardware.host_bytes
    assert made.predicted.peak_disk_bytes <= hardware.disk_bytes
    return made.predicted.iteration_us, made.bound.iteration_us


# -- any trace -----------------------------------------------------------------------------------
@examples(60)
@given(seeds)
def test_a_plan_runs_or_is_refused(seed: int) -> None:
    rng = Random(seed)
    trace = random_trace(rng)
    hardware = random_hardware(rng, trace)
    try:
        taken, least = runs(trace, hardware)
    except (InfeasibleBudget, PolicyRefusal) as error:
        refused = error
    else:
        refused = None
    if isinstance(refused, InfeasibleBudget):
        assert refused.minimum > hardware.device_bytes // PAGE * PAGE
    if refused is not None:
        return
    assert least <= taken * (1 + 1e-6)
    assert least >= trace.ideal_us * (1 - 1e-9)


@examples(25)
@given(seeds)
def test_no_policy_beats_the_bound_nor_lp(seed: int) -> None:
    rng = Random(seed)
    trace = random_trace(rng)
    hardware = random_hardware(rng, trace).with_(transfer_latency_us=0.0)
    try:
        taken, least = runs(trace, hardware)
    except (InfeasibleBudget, PolicyRefusal):
        return
    for name, policy in POLICIES.items():
        try:
            other = policy(trace, hardware)
        except (InfeasibleBudget, PolicyRefusal):
            continue
        assert other.predicted is not None
        assert other.predicted.iteration_us >= least * (1 - 1e-6), name
        if name in OTHERS:
            assert taken <= other.predicted.iteration_us * (1 + 1e-5), name


# -- a trace with known answers ------------------------------------------------------------------
def test_what_fits_moves_nothing() -> None:
    trace = chain(6)
    made = plan(trace, machine(10_000))
    assert not made.moves
    assert made.bound is not None
    assert made.bound.percent_of_bound == 100


@pytest.mark.parametrize(
    ("share", "host_share"),
    [
        (0.35, 0.3),
        (0.5, 1.0),
        *(
            pytest.param(*shares, marks=pytest.mark.slow)
            for shares in ((0.35, 1.0), (0.5, 0.3), (0.75, 1.0), (0.75, 0.3))
        ),
    ],
)
def test_close_to_the_bound(share: float, host_share: float) -> None:
    trace = chain(24)
    peak = make_problem(trace, machine(1)).live.max()
    hardware = machine(int(share * peak), host_bytes=int(host_share * peak) * PAGE)
    taken, least = runs(trace, hardware)
    assert least / taken >= 0.96


def test_one_gap_worked_out_by_hand() -> None:
    """Tensor 0 (4 pages) must leave for tensor 1 (4 pages) on a device of 4: 2 µs of op 1 less than
    the 40 µs that it takes out; then 40 µs back in, with nothing that runs beside it."""
    trace = make_trace(
        [(0, 4 * PAGE, False), (1, 4 * PAGE, False)],
        [("a", 10.0, [], [0]), ("b", 2.0, [], [1]), ("c", 10.0, [0], [])],
        page_size=PAGE,
    )
    taken, least = runs(trace, machine(4))
    assert taken == pytest.approx(10 + 40 + 2 + 40 + 10)
    assert least == pytest.approx(taken, rel=1e-6)


def test_pages_that_nobody_uses_again_leave_for_good() -> None:
    """As those of a gradient that is kept until the end: one of its 4 is used there, and no other
    one comes back. 3 leave for tensor 1, which takes 30 µs and runs for 2."""
    tensors, durations = [(4, False), (4, False)], [10.0, 2.0, 10.0]
    ops = [[Access(0, 0, 4, WRITE)], [Access(1, 0, 4, WRITE)], [Access(0, 0, 1, READ)]]
    trace = paged_trace(tensors, durations, ops)
    taken, least = runs(trace, machine(5))
    assert taken == pytest.approx(10 + 30 + 2 + 10)
    assert least == pytest.approx(taken, rel=1e-6)
    made = plan(trace, machine(5))
    assert made.predicted is not None
    assert made.predicted.bytes_out == 3 * PAGE
    assert made.predicted.bytes_in == 0


def test_clean_copies_count() -> None:
    """Weights that are only read need no way out after the first iteration, whatever is left."""
    trace = make_trace(
        [(n, 8 * PAGE, True) for n in range(4)],
        [(f"{n}", 1000.0, [n % 4], []) for n in range(8)],
        page_size=PAGE,
    )
    made = plan(trace, machine(18))
    assert made.predicted is not None
    assert made.predicted.bytes_out == 0
    assert made.predicted.bytes_in > 0


def test_more_of_anything_is_never_slower() -> None:
    trace = chain(16)
    peak = int(make_problem(trace, machine(1)).live.max())
    times = [runs(trace, machine(int(peak * s)))[0] for s in (0.3, 0.5, 0.9)]
    assert all(after <= before * 1.005 for before, after in pairwise(times))
    rates = [machine(peak // 2, d2h_bytes_per_s=r, h2d_bytes_per_s=r) for r in (5e7, 1e8, 4e8)]
    times = [runs(trace, hardware)[0] for hardware in rates]
    assert all(after <= before * 1.005 for before, after in pairwise(times))


@pytest.mark.parametrize("share", [0.3, 0.5, 0.8])
def test_quick_runs_with_a_bound_that_holds(share: float) -> None:
    trace = chain(16)
    hardware = machine(int(share * make_problem(trace, machine(1)).live.max()))
    quick, loose = runs(trace, hardware, quick=True)
    taken, least = runs(trace, hardware)
    assert loose <= least * (1 + 1e-6)
    assert taken <= quick * (1 + 1e-9)


# -- budgets -------------------------------------------------------------------------------------
def test_the_smallest_budget_works_and_one_page_less_is_refused() -> None:
    trace = chain(8)
    with pytest.raises(InfeasibleBudget, match="the smallest that works is") as refused:
        plan(trace, machine(10))
    pages = refused.value.minimum // PAGE
    runs(trace, machine(pages))
    with pytest.raises(InfeasibleBudget) as again:
        plan(trace, machine(pages - 1))
    assert again.value.minimum == refused.value.minimum


def test_too_little_below_needs_more_on_the_device() -> None:
    trace = chain(8)
    peak = int(make_problem(trace, machine(1)).live.max())
    small = machine(peak // 2, host_bytes=20 * PAGE, disk_bytes=0)
    with pytest.raises(InfeasibleBudget) as refused:
        plan(trace, small)
    assert refused.value.minimum >= (peak - 20) * PAGE
    runs(trace, small.with_(device_bytes=refused.value.minimum))


def test_bound_alone() -> None:
    trace = chain(12)
    hardware = machine(200)
    made = plan(trace, hardware)
    assert made.bound is not None
    assert bound(trace, hardware) == pytest.approx(made.bound.iteration_us)
    assert bound(trace, machine(100_000)) == trace.ideal_us


# -- the parts -----------------------------------------------------------------------------------
def stall(problem: Problem) -> float:
    solution = solve(problem)
    return math.inf if solution is None else solution.stall_us


@examples(20)
@given(seeds)
def test_merging_relaxes_or_tightens(seed: int) -> None:
    rng = Random(seed)
    trace = chain(rng.randint(4, 10), pages=rng.randint(3, 30), op_us=rng.choice([50.0, 500.0]))
    peak = int(make_problem(trace, machine(1)).live.max())
    problem = make_problem(trace, machine(int(peak * rng.uniform(0.35, 0.9))))
    exact = stall(problem)
    steps = rng.randint(4, problem.steps)
    relaxed, _ = merged(problem, steps, relaxed=True)
    tight, first = merged(problem, steps, relaxed=False)
    assert len(first) <= steps
    assert stall(relaxed) <= exact + 1e-3 * trace.ideal_us
    assert stall(tight) >= exact - 1e-3 * trace.ideal_us


def test_groups_change_no_answer() -> None:
    """Two equal layers side by side are one group, with the same stall as one of twice the size."""
    tensors = [(n, 10 * PAGE, False) for n in range(2)] + [(2, 20 * PAGE, False)]
    ops = [("a", 5.0, [], [0, 1]), ("b", 5.0, [], [2]), ("c", 5.0, [0, 1], [])]
    two = make_problem(make_trace(tensors, ops, page_size=PAGE), machine(25))
    small, group = grouped(two)
    assert len(two.gaps) == 2
    assert len(small.gaps) == 1
    assert group.tolist() == [0, 0]
    assert small.gaps.pages.tolist() == [20]
    whole = [(0, 20 * PAGE, False), (2, 20 * PAGE, False)]
    ops = [("a", 5.0, [], [0]), ("b", 5.0, [], [2]), ("c", 5.0, [0], [])]
    one = make_problem(make_trace(whole, ops, page_size=PAGE), machine(25))
    assert stall(two) == pytest.approx(stall(one))
    solution = solve(two)
    assert solution is not None
    assert sum(part.sum() for part in solution.off) == pytest.approx(15)
    assert all((sum(part[g] for part in solution.off)) <= 10 + 1e-6 for g in range(2))


def test_least_device_is_the_largest_working_set_with_room_below() -> None:
    trace = chain(8)
    least = least_device_pages(make_problem(trace, machine(1)))
    assert least == pytest.approx(40 + 40 + 20 + 20)  # weight, activation, two gradients


def scheduled(trace: Trace, hardware: Hardware) -> tuple[Problem, Solution, Schedule]:
    """What the exact program gives, in whole pages."""
    problem = make_problem(trace, hardware)
    solution = solve(problem)
    assert solution is not None
    return problem, solution, make_schedule(problem, solution)


def test_fit_makes_every_step_fit() -> None:
    trace = chain(10)
    problem, _, schedule = scheduled(trace, machine(300))
    early = [[*chunks] for chunks in schedule.ins]
    part = max(range(len(early)), key=lambda p: len(early[p]))
    length = problem.gaps.end - problem.gaps.begin
    chunk = max(early[part], key=lambda c: int(length[c.gap]))
    index = early[part].index(chunk)
    out = next(c for c in schedule.outs[part] if c.gap == chunk.gap)
    early[part][index] = type(chunk)(chunk.gap, chunk.first, chunk.count, out.step + 1)
    crowded = Schedule(schedule.off, schedule.outs, early)
    assert resident_pages(problem, crowded).max() > 300
    assert resident_pages(problem, fit(problem, crowded)).max() <= 300


def test_whole_pages_and_flows_balance() -> None:
    trace = chain(10)
    problem, solution, schedule = scheduled(trace, machine(250, host_bytes=100 * PAGE))
    total = sum(schedule.off)
    assert np.all(total >= sum(solution.off) - 1e-2)
    assert np.all(total <= problem.gaps.pages)
    for part in range(len(problem.tiers)):
        outs, ins = (sum(c.count for c in x[part]) for x in (schedule.outs, schedule.ins))
        assert outs == ins == schedule.off[part].sum()


def test_pages_go_and_come_inside_their_gap() -> None:
    """That of the last op's weight too, whose gap is all of the next iteration."""
    trace = chain(10)
    problem, _, schedule = scheduled(trace, machine(200))
    begin, end, last = problem.gaps.begin, problem.gaps.end, problem.steps - 1
    chunks = [chunk for part in (*schedule.outs, *schedule.ins) for chunk in part]
    assert any(begin[chunk.gap] == last for chunk in chunks)
    assert all(begin[chunk.gap] < chunk.step <= end[chunk.gap] for chunk in chunks)
    assert simulate(trace, machine(200), plan(trace, machine(200))).feasible


def test_rates_without_limit() -> None:
    rates = ("d2h", "h2d", "disk_read", "disk_write")
    hardware = machine(250, **{f"{name}_bytes_per_s": math.inf for name in rates})
    taken, _ = runs(chain(10), hardware)
    assert taken == pytest.approx(chain(10).ideal_us)


# -- full and quick searches ---------------------------------------------------------------------
@pytest.mark.parametrize("coarse", [(), lp_settings.COARSE], ids=["none", "coarse"])
def test_a_full_search_is_never_worse_than_a_quick_one(
    monkeypatch: pytest.MonkeyPatch, coarse: tuple[tuple[int, int], ...]
) -> None:
    """Where each move has a latency, the few and large moves of merged steps are the better plan:
    the fine programs alone reach 29.8 % of the ideal here, the quick search 30.1, coarse ones 32.5.
    """
    sizes = {"MAX": 20, "MERGED": 14, "BOUND": 10, "EXACT": 10}
    for kind, steps in sizes.items():  # as if the trace were one of thousands of ops
        monkeypatch.setattr(lp_settings, f"QUICK_{kind}_STEPS", steps)
        monkeypatch.setattr(lp_policy, f"QUICK_{kind}_STEPS", steps)
    monkeypatch.setattr(lp_settings, "COARSE", coarse)
    trace = chain(12, pages=30, op_us=150.0)
    peak = make_problem(trace, machine(1)).live.max()
    hardware = machine(int(0.4 * peak), transfer_latency_us=200.0)
    full, quick = (plan(trace, hardware, quick=short).predicted for short in (False, True))
    assert full is not None
    assert quick is not None
    assert full.iteration_us <= quick.iteration_us * (0.95 if coarse else 1.0)


@pytest.mark.parametrize("quick", [True, False])
def test_a_program_that_is_wrongly_refused_leaves_a_plan(
    monkeypatch: pytest.MonkeyPatch, quick: bool
) -> None:
    """Merged steps, or rounding, may make a program infeasible; no refusal names what there is."""
    monkeypatch.setattr("tensorpager.planner.lp.policy.solve", lambda *args, **options: None)
    trace = chain(8)
    taken, least = runs(trace, machine(250), quick=quick)
    assert least == trace.ideal_us
    assert taken > least


def test_very_different_rates_are_no_reason_to_refuse() -> None:
    """Of this program the interior point method says that it has no solution."""
    trace = chain(17)
    hardware = machine(414, host_bytes=0, disk_write_bytes_per_s=PAGE)
    assert solve(make_problem(trace, hardware)) is not None
    assert plan(trace, hardware, quick=True).policy == "lp"


def test_a_solver_that_gives_up_leaves_a_plan_and_a_true_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def give_up(*args: object, **options: object) -> None:
        raise Unsolved("time limit")

    monkeypatch.setattr("tensorpager.planner.lp.policy.solve", give_up)
    trace = chain(8)
    taken, least = runs(trace, machine(250))
    assert least == trace.ideal_us
    assert taken > least
