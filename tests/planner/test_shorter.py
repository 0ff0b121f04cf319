"""Long traces planned in fewer ops, and programs that know fewer gaps."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorpager.planner import shorter as module
from tensorpager.planner.hardware import Hardware
from tensorpager.planner.joint import program
from tensorpager.planner.joint.options import Uses, find_remakes, find_units
from tensorpager.planner.joint.policy import plan as plan_jointly
from tensorpager.planner.joint.program import solve_joint
from tensorpager.planner.lp.policy import plan as plan_moves
from tensorpager.planner.lp.problem import make_problem, merged
from tensorpager.planner.lp.program import solve, solve_loosely
from tensorpager.planner.plan import Move, Plan, StartRun
from tensorpager.planner.shorter import shorter
from tensorpager.planner.simulator import simulate
from tensorpager.planner.trace import READ, Trace, make_trace
from tensorpager.planner.validator import validate

from .random_plans import (
    choice_plan,
    plan_of,
    random_choices,
    random_hardware,
    random_trace,
)
from .test_joint import PAGE, both_agree, layers, machine


def accumulated(count: int, micros: int) -> Trace:
    """Steps of ``count`` layers one after the other, of which only the last one has updates."""
    once = layers(count)
    hosted = ~np.isnan(once.op_host_us)
    reads: list[list[int]] = [[] for _ in range(once.ops)]
    writes: list[list[int]] = [[] for _ in range(once.ops)]
    rows = zip(once.access_op.tolist(), once.access_tensor.tolist(), once.access_mode.tolist())
    for op, tensor, mode in rows:
        (reads if mode == READ else writes)[op].append(tensor)
        if mode & READ and mode != READ:
            reads[op].append(tensor)
    tensors: dict[int, tuple[int, int, bool]] = {}
    ops, rerun, host, segments = [], [], [], []
    for micro in range(micros):
        last = micro == micros - 1
        place = {}
        for op in range(once.ops):
            if hosted[op] and not last:
                continue
            place[op] = len(ops)
            names = []
            for group in (reads[op], writes[op]):
                mine = []
                for tensor in group:
                    lasting = bool(once.tensor_persistent[tensor])
                    number = tensor if lasting else tensor + 1000 * (micro + 1)
                    tensors[number] = number, int(once.tensor_bytes[tensor]), lasting
                    mine.append(number)
                names.append(mine)
            ops.append((f"{once.op_names[op]}.{micro}", float(once.op_duration_us[op]), *names))
            rerun.append(bool(once.op_rerun[op]))
            us = float(once.op_host_us[op])
            host.append(None if np.isnan(us) else us)
        segments += [(place[a], place[b], f"{name}.{micro}") for a, b, name in once.segments]
    return make_trace(
        list(tensors.values()), ops, page_size=PAGE, rerun=rerun, host_us=host, segments=segments
    )


def test_ops_in_a_row_and_tensors_that_are_used_alike_become_one() -> None:
    tensors = [(7, 3 * PAGE, True), (8, 2 * PAGE - 5, True), (9, PAGE, False), (5, PAGE, True)]
    ops = [
        ("a", 5.0, [7, 8], [9]), ("b", 5.0, [9, 8, 7], []),
        ("c", 100.0, [5], []),
        ("d", 5.0, [8], []), ("e", 5.0, [7], []),
    ]  # fmt: skip
    trace = make_trace(tensors, ops, page_size=PAGE)
    short = shorter(trace, PAGE, 3)
    assert (short.first_op, short.last_op) == ([0, 2, 3], [1, 2, 4])
    assert short.trace.op_duration_us.tolist() == [10.0, 100.0, 10.0]
    sizes = short.trace.pages(PAGE).tolist()
    assert sorted(sizes) == [1, 1, 5]  # another weight, what is only inside of the first, and both
    both = short.trace.pages(PAGE).tolist().index(5)
    hardware = machine(trace, 1.0)
    moves = [
        Move(both, 1, 4, "host", "out", 1), Move(both, 1, 3, "host", "in", 2),
        Move(both, 4, 1, "host", "in", 2),
    ]  # fmt: skip
    made = short.plan(replace(plan_of(hardware, moves, [StartRun(both, 0, 4, "disk")])))
    assert list(made.moves) == [
        Move(7, 1, 2, "host", "out", 2), Move(8, 0, 2, "host", "out", 2),
        Move(7, 1, 2, "host", "in", 3), Move(8, 0, 1, "host", "in", 3),
        Move(8, 1, 1, "host", "in", 3),
    ]  # fmt: skip
    assert list(made.start) == [StartRun(7, 0, 3, "disk"), StartRun(8, 0, 1, "disk")]


def test_what_comes_in_late_waits_for_the_last_of_the_ops() -> None:
    """But for what they use, and with all that follows for the same tensor."""
    tensors = [(0, PAGE, True), (1, PAGE, True)]
    ops = [("a", 1.0, [0, 1], []), ("b", 90.0, [], []), ("c", 1.0, [1], []), ("d", 1.0, [1], []),
           ("e", 90.0, [0], [])]  # fmt: skip
    trace = make_trace(tensors, ops, page_size=PAGE)
    short = shorter(trace, PAGE, 4)
    assert (short.first_op, short.last_op) == ([0, 1, 2, 4], [0, 1, 3, 4])
    moves = [
        Move(0, 0, 1, "host", "out", 1), Move(0, 0, 1, "host", "in", 2),
        Move(1, 0, 1, "host", "in", 2), Move(0, 0, 1, "host", "drop", 2),
    ]  # fmt: skip
    made = short.plan(plan_of(machine(trace, 1.0), moves, []), late=True)
    assert [(m.tensor, m.action, m.issue_op) for m in made.moves] == [
        (0, "out", 1), (1, "in", 2), (0, "in", 3), (0, "drop", 3),
    ]  # fmt: skip


@given(st.integers(0, 2**32 - 1), st.sampled_from((0.3, 0.5, 0.7)))
def test_a_plan_of_fewer_ops_computes_the_same_in_all_of_them(seed: int, share: float) -> None:
    """Where it runs there. That something is short of frames is found out by simulation."""
    rng = Random(seed)
    trace = random_choices(rng, random_trace(rng, partial=rng.random() < 0.3))
    hardware = random_hardware(rng, trace)
    short = shorter(trace, hardware.page_size, max(1, int(share * trace.ops)))
    made = replace(choice_plan(rng, short.trace, hardware), deferred=())
    if not simulate(short.trace, hardware, made).feasible:
        return
    for late in (False, True):
        given_back = short.plan(made, late=late)
        simulated = simulate(trace, hardware, given_back)
        assert simulated.feasible == validate(trace, hardware, given_back).feasible
        for wrong in ("reads", "left it", "runs again", "would not find"):
            assert wrong not in (simulated.reason or "")


def long_plan(
    monkeypatch: pytest.MonkeyPatch, trace: Trace, hardware: Hardware, most: int, **how: object
) -> Plan:
    monkeypatch.setattr(module, "LONG_OPS", most + 10)
    monkeypatch.setattr(module, "SHORT_OPS", most)
    made = plan_jointly(trace, hardware, **how)  # type: ignore[arg-type]
    both_agree(trace, hardware, made)
    return made


def as_given_back(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """Every plan that one of joined ops becomes, where that is all that is tried."""
    monkeypatch.setattr(module, "find_repeats", lambda _: None)
    found: list[Plan] = []
    plan = module.Shorter.plan

    def noted(self: module.Shorter, made: Plan, **how: bool) -> Plan:
        found.append(plan(self, made, **how))
        return found[-1]

    monkeypatch.setattr(module.Shorter, "plan", noted)
    return found


def test_a_long_trace_is_planned_in_fewer_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = accumulated(6, 8)
    assert trace.ops > 200
    hardware = machine(trace, 0.5)
    direct = plan_jointly(trace, hardware)
    given_back = as_given_back(monkeypatch)
    made = long_plan(monkeypatch, trace, hardware, 120)
    assert made.moves in [each.moves for each in given_back]
    assert made.policy == "joint"
    assert made.trace_sha256 == trace.sha256
    assert made.host_steps or made.recompute
    assert made.predicted
    assert direct.predicted
    assert made.bound
    assert direct.bound
    assert made.predicted.iteration_us <= 1.01 * direct.predicted.iteration_us
    assert made.bound.iteration_us == pytest.approx(direct.bound.iteration_us)
    moves = plan_moves(trace, hardware)
    both_agree(trace, hardware, moves)
    assert moves.moves in [each.moves for each in given_back]
    assert moves.policy == "lp"
    assert not moves.recompute
    assert moves.predicted
    assert moves.bound
    assert moves.bound.percent_of_bound > 85


def test_what_is_poor_in_fewer_ops_is_planned_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = accumulated(6, 8)
    hardware = machine(trace, 0.35, rate=2e9)
    direct = plan_jointly(trace, hardware, quick=True)
    given_back = as_given_back(monkeypatch)
    made = long_plan(monkeypatch, trace, hardware, 80, quick=True)
    assert made.predicted
    assert direct.predicted
    poor = simulate(trace, hardware, given_back[-1]).predicted
    assert poor
    assert poor.iteration_us > 1.5 * direct.predicted.iteration_us
    assert made.predicted.iteration_us < 1.1 * direct.predicted.iteration_us


def test_what_does_not_come_of_fewer_ops_is_planned_in_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def refuse(trace: Trace, *_: object) -> None:
        asked.append(trace.ops)

    monkeypatch.setattr("tensorpager.planner.joint.policy.plan_shorter", refuse)
    trace = accumulated(3, 2)
    made = long_plan(monkeypatch, trace, machine(trace, 0.6), 60, quick=True)
    assert asked == [trace.ops]
    assert made.predicted


@given(st.integers(0, 2**32 - 1), st.booleans())
def test_a_program_of_fewer_gaps_allows_all_that_the_other_does(seed: int, join: bool) -> None:
    rng = Random(seed)
    trace = random_trace(rng, partial=rng.random() < 0.3)
    problem = make_problem(trace, random_hardware(rng, trace))
    exact = solve(problem)
    if exact is None:
        return
    if join:
        problem, _ = merged(problem, max(1, trace.ops // 2), relaxed=True)
    for loose in (solve(problem), solve_loosely(problem, 60)):
        assert loose is not None
        assert loose.stall_us <= exact.stall_us * (1 + 1e-4) + 0.1


@pytest.mark.parametrize("steps", [4, 6])
def test_what_is_used_in_one_of_the_merged_steps_need_not_be_in_another(steps: int) -> None:
    """States of updates that are one step: two of them fit at once, and never all of them."""
    tensors = [(n, 3 * PAGE, True) for n in range(6)] + [(9, PAGE, False)]
    ops = [("a", 50.0, [], [9]), ("b", 50.0, [9], []), ("c", 50.0, [], []), ("d", 50.0, [], [])]
    ops += [(f"update.{n}", 1.0, [n], [n]) for n in range(6)]
    trace = make_trace(tensors, ops, page_size=PAGE)
    problem = make_problem(trace, machine(trace, 0.4))
    exact = solve(problem)
    assert exact is not None
    joined, _ = merged(problem, steps, relaxed=True)
    for loose in (solve(joined), solve_loosely(joined, 60)):
        assert loose is not None
        assert loose.stall_us <= exact.stall_us * (1 + 1e-4) + 0.1


@pytest.mark.parametrize("share", [0.3, 0.5])
def test_remakes_that_are_not_told_apart_allow_more(
    monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    trace = accumulated(6, 3)
    hardware = machine(trace, share, rate=1e9)
    uses = Uses(trace)
    remakes, units = find_remakes(trace, uses), find_units(trace, uses)
    found = []
    for most in (4000, 0):
        monkeypatch.setattr(program, "MOST_REMAKES", most)
        shares = solve_joint(trace, hardware, uses, remakes, units, steps=40, time_limit_s=60)
        assert shares is not None
        assert len(shares.remakes) == len(remakes)
        assert ((shares.remakes > -1e-6) & (shares.remakes < 1 + 1e-6)).all()
        found.append(shares.iteration_us)
    assert found[1] <= found[0] * (1 + 1e-4)
    assert found[1] > 0.5 * found[0]
