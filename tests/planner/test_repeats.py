"""Traces that repeat themselves, planned with a few of the repetitions."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tensorpager.planner import shorter as module
from tensorpager.planner.errors import InfeasibleBudget
from tensorpager.planner.joint.policy import plan as plan_jointly
from tensorpager.planner.lp.policy import plan as plan_moves
from tensorpager.planner.plan import Move, Plan, StartRun
from tensorpager.planner.registry import make_plan
from tensorpager.planner.repeats import find_repeats
from tensorpager.planner.simulator import simulate
from tensorpager.planner.trace import READ, READWRITE, WRITE, Trace, make_trace
from tensorpager.planner.validator import validate

from .random_plans import (
    DURATIONS_US,
    PAGE,
    Access,
    choice_plan,
    paged_trace,
    plan_of,
    random_hardware,
    random_plan,
    with_choices,
)
from .test_joint import both_agree, layers, machine
from .test_shorter import accumulated


def steps(count: int, *, us: float = 10.0) -> Trace:
    """A weight (0) and a gradient (1) of four pages each, used in turn by each of ``count``
    repetitions of three ops, between an op before and one behind them."""
    tensors = [(0, 4 * PAGE, True), (1, 4 * PAGE, False)]
    ops: list[tuple[str, float, list[int], list[int]]] = [("begin", 5.0, [], [1])]
    for number in range(count):
        tensors.append((10 + number, PAGE, False))
        made = [10 + number]
        ops += [
            (f"forward.{number}", us + number, [0], made),
            (f"idle.{number}", us, made, []),
            (f"backward.{number}", us, [1, *made], [1]),
        ]
    ops.append(("end", 5.0, [0, 1], [0]))
    return make_trace(tensors, ops, page_size=PAGE)


def unrolled(count: int, planned: int, moves: list[Move], start: list[StartRun]) -> Plan:
    """``moves`` of ``planned`` of the repetitions of :func:`steps`, as those of ``count``."""
    trace = steps(count)
    repeats = find_repeats(trace)
    assert repeats
    assert (repeats.begin, repeats.period, repeats.count) == (1, 3, count)
    fewer = repeats.fewer(planned)
    hardware = machine(trace, 1.0, page_size=PAGE, disk_bytes=float("inf"), device_bytes=20 * PAGE)
    made = plan_of(hardware, moves, start)
    both_agree(fewer.trace, hardware, made)
    found = fewer.plan(made)
    assert found
    both_agree(trace, hardware, found)
    return found


def ways(plan: Plan, tensor: int) -> list[tuple[int, int, str, str, int]]:
    return [tuple(move)[1:] for move in plan.moves if move.tensor == tensor]  # type: ignore[misc]


def test_micro_batches_are_found() -> None:
    trace = accumulated(4, 6)
    repeats = find_repeats(trace)
    assert repeats
    once = (trace.ops - int((~np.isnan(trace.op_host_us)).sum())) // 6
    assert repeats.period == once
    assert repeats.count >= 4
    fewer = repeats.fewer(3)
    assert fewer.trace.ops == trace.ops - (repeats.count - 3) * once
    assert len(fewer.trace.segments) == len(trace.segments) - (repeats.count - 3) * 4
    assert set(fewer.trace.tensor_ids.tolist()) < set(trace.tensor_ids.tolist())
    for first, last, name in fewer.trace.segments:
        micro = name.rsplit(".", 1)[1]
        assert {each.rsplit(".", 1)[1] for each in fewer.trace.op_names[first : last + 1]} == {
            micro
        }


def test_more_of_them() -> None:
    few, many = accumulated(4, 5), accumulated(4, 9)
    repeats = find_repeats(few)
    assert repeats
    made = repeats.more(4)
    for name in ("op", "tensor", "mode", "first_page", "page_count"):
        assert (getattr(made, f"access_{name}") == getattr(many, f"access_{name}")).all()
    assert (made.tensor_bytes == many.tensor_bytes).all()
    assert (made.op_rerun == many.op_rerun).all()
    assert [each[:2] for each in made.segments] == [each[:2] for each in many.segments]
    again = find_repeats(made)
    assert again
    assert again.count == repeats.count + 4


def test_one_of_them_is_an_iteration() -> None:
    trace = steps(6)
    repeats = find_repeats(trace)
    assert repeats
    one = repeats.one()
    assert one.op_names == ["forward.5", "idle.5", "backward.5"]
    assert one.tensor_ids[one.tensor_persistent].tolist() == [0, 1]  # the gradient goes on, too
    assert repeats.fewer(0).trace.op_names == ["begin", "end"]


def test_repetitions_take_what_they_take_on_the_average() -> None:
    trace = steps(9)
    repeats = find_repeats(trace)
    assert repeats
    fewer = repeats.fewer(4).trace
    assert fewer.op_duration_us.tolist() == [5.0, *4 * [14.0, 10.0, 10.0], 5.0]
    assert fewer.op_names[-4:] == ["forward.3", "idle.3", "backward.3", "end"]


@pytest.mark.parametrize("different", ["weight", "size", "twice", "turns"])
def test_what_only_looks_alike_does_not_repeat(different: str) -> None:
    """Layers with weights of their own; sizes that differ; a tensor that two repetitions use; one
    that two ops use in every other repetition only."""
    if different == "weight":
        assert find_repeats(layers(8)) is None
        return
    tensors = [(0, 4 * PAGE, True)] + [(10 + n, PAGE, False) for n in range(9)]
    if different == "size":
        tensors = [(n, nbytes + (n - 10) * PAGE * (n >= 10), yes) for n, nbytes, yes in tensors]
    ops: list[tuple[str, float, list[int], list[int]]] = []
    for number in range(9):
        before = [9 + number] if different == "twice" and number else []
        made = 10 + number
        if different == "turns" and number % 2:
            tensors.append((100 + number, PAGE, False))
            made += 90
        ops += [("a", 1.0, [0, *before], [10 + number]), ("b", 1.0, [0, made], [])]
    assert find_repeats(make_trace(tensors, ops, page_size=PAGE)) is None


def test_what_is_done_alike_is_done_again() -> None:
    moves = []
    for number in range(4):
        op = 1 + 3 * number
        moves += [Move(0, 0, 4, "host", "out", op + 1), Move(0, 0, 4, "host", "in", op + 2)]
    made = unrolled(7, 4, moves, [])
    assert ways(made, 0) == [
        (0, 4, "host", action, 1 + 3 * number + place)
        for number in range(7)
        for action, place in (("out", 1), ("in", 2))
    ]


def test_at_a_seam_pages_come_and_go() -> None:
    """Of the planned repetitions the second ends without two pages that the first ends with."""
    moves = [
        Move(1, 0, 4, "host", "out", 2), Move(1, 0, 4, "host", "in", 3),
        Move(1, 0, 1, "host", "out", 4), Move(1, 0, 1, "host", "in", 5),
        Move(1, 0, 3, "host", "out", 7), Move(1, 0, 3, "host", "in", 8),
        Move(1, 1, 3, "host", "out", 10), Move(1, 1, 3, "host", "in", 11),
    ]  # fmt: skip
    made = unrolled(8, 4, moves, [])
    # The last but one of those that are planned comes again and again: what leaves with it as it
    # begins has to be there before.
    assert made.moves[0] == moves[0]
    for number in range(1, 8):
        at = 1 + 3 * number
        mine = [move for move in made.moves if at <= move.issue_op < at + 3]
        out = sum(move.page_count for move in mine if move.action == "out")
        assert out == sum(move.page_count for move in mine if move.action == "in")


def test_what_would_come_in_vain_does_not_come() -> None:
    """The weight is brought back early in one repetition, in time in the others."""
    moves = []
    for number in range(4):
        op = 1 + 3 * number
        due = op + 2 if number == 1 else op + 3
        moves += [Move(0, 0, 4, "host", "out", op + 1), Move(0, 0, 4, "host", "in", due)]
    made = unrolled(7, 4, moves, [])
    assert len(ways(made, 0)) == 14
    assert sum(at % 3 == 0 for *_, action, at in ways(made, 0) if action == "in") <= 1


def repeated(rng: Random, count: int) -> Trace:
    """Some ops, then others ``count`` times, then others. Some tensors are used by all, some by
    one repetition alone."""
    tensors: list[tuple[int, bool]] = []
    ops: list[list[Access]] = []
    durations: list[float] = []
    before, body, after = rng.randint(1, 3), rng.randint(3, 8), rng.randint(1, 3)
    shared = [(rng.randint(1, 6), rng.random() < 0.5) for _ in range(rng.randint(2, 5))]
    tensors += shared

    def accesses(tensor: int, pages: int, places: list[int], at: int) -> list[tuple[int, Access]]:
        found = []
        for place in places:
            begin, end = 0, pages
            if pages > 1 and rng.random() < 0.15:
                begin = rng.randint(0, pages - 1)
                end = rng.randint(begin + 1, pages)
            mode = rng.choice((READ, READ, WRITE, READWRITE))
            found.append((at + place, Access(tensor, begin, end, mode)))
        return found

    rows: list[tuple[int, Access]] = []
    for tensor, (pages, _) in enumerate(shared):
        rows += [(0, Access(tensor, 0, pages, WRITE))]
    uses = [
        (tensor, accesses(tensor, pages, sorted(rng.sample(range(body), rng.randint(1, 2))), 0))
        for tensor, (pages, _) in enumerate(shared)
        if rng.random() < 0.8
    ]
    own = []
    for _ in range(rng.randint(1, 4)):
        pages = rng.randint(1, 5)
        places = sorted(rng.sample(range(body), rng.randint(1, min(3, body))))
        own.append((pages, accesses(0, pages, places, 0)))
    us = [rng.choice(DURATIONS_US) for _ in range(body)]
    durations += [rng.choice(DURATIONS_US) for _ in range(before)]
    for repetition in range(count):
        at = before + repetition * body
        for _, found in uses:
            rows += [(at + place, access) for place, access in found]
        for pages, found in own:
            rows += [(at + place, replace(access, tensor=len(tensors))) for place, access in found]
            tensors.append((pages, False))
        durations += [each * rng.uniform(0.9, 1.1) for each in us]
    durations += [rng.choice(DURATIONS_US) for _ in range(after)]
    for tensor, (pages, _) in enumerate(shared):
        if rng.random() < 0.8:
            at = before + count * body + rng.randrange(after)
            rows += [(at, Access(tensor, 0, pages, rng.choice((READ, READWRITE))))]
    ops = [[] for _ in durations]
    for op, access in rows:
        ops[op].append(access)
    trace = paged_trace(tensors, durations, ops)
    updates = range(before + count * body, len(durations))
    lasting = {tensor for tensor, (_, lasts) in enumerate(shared) if lasts}
    pure = [
        not any(a.tensor in lasting and a.mode != READ for a in ops[before + op])
        and rng.random() < 0.85
        for op in range(body)
    ]
    rerun = [before + op for op in range(count * body) if pure[op % body]]
    host = {
        op: rng.choice(DURATIONS_US)
        for op in updates
        if any(a.tensor in lasting and a.mode != READ for a in ops[op])
    }
    return with_choices(trace, rerun, host)


@example(380, "moves")  # a copy is in two tiers, and the page comes from the one
@given(st.integers(0, 2**32 - 1), st.sampled_from(("moves", "choices", "lru", "lp", "joint")))
def test_a_plan_of_fewer_repetitions_is_one_of_all(seed: int, how: str) -> None:
    """If what goes out for another one is not still on its way."""
    rng = Random(seed)
    trace = repeated(rng, 9)
    repeats = find_repeats(trace)
    if repeats is None or repeats.count < 5:
        return
    hardware = random_hardware(rng, trace)
    fewer = repeats.fewer(4)
    if how == "moves":
        made = random_plan(rng, fewer.trace, hardware, lapsing=False)
    elif how == "choices":
        made = replace(choice_plan(rng, fewer.trace, hardware), deferred=())
    else:
        try:
            made = make_plan(how, fewer.trace, hardware, quick=True)
        except InfeasibleBudget:
            return
    if not simulate(fewer.trace, hardware, made).feasible:
        return
    found = fewer.plan(made)
    if found is None:
        assert how == "choices"
        return
    simulated, validated = simulate(trace, hardware, found), validate(trace, hardware, found)
    assert simulated.feasible == validated.feasible
    assert simulated.feasible or "is still on its way out" in str(simulated.reason)


def test_a_long_trace_is_planned_with_fewer_repetitions(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = accumulated(5, 12)
    hardware = machine(trace, 0.5)
    direct = plan_jointly(trace, hardware)
    planned: list[int] = []
    for name, make in (("joint", plan_jointly), ("lp", plan_moves)):
        with monkeypatch.context() as patch:
            patch.setattr(module, "LONG_OPS", 180)
            patch.setattr(module, "REPEATED_OPS", 150)
            patch.setattr(module, "shorter", lambda *_: planned.append(1))
            made = make(trace, hardware)
        both_agree(trace, hardware, made)
        assert made.policy == name
        assert made.trace_sha256 == trace.sha256
        assert made.predicted
        assert direct.predicted
        if name == "joint":
            assert made.predicted.iteration_us <= 1.02 * direct.predicted.iteration_us
    assert not planned  # no ops were joined


def test_more_pages_than_can_be_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorpager.planner.repeats.MOST_PAGES", 5)
    repeats = find_repeats(steps(8))
    assert repeats
    fewer = repeats.fewer(4)
    hardware = machine(fewer.trace, 1.0, page_size=PAGE)
    assert fewer.plan(plan_of(hardware, [], [])) is None
