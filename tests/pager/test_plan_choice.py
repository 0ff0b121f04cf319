"""Which plans are followed: those that promise to be faster than what was measured without them."""

from __future__ import annotations

import itertools
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

import tensorpager as tp
from tensorpager.pager.plan.access_log import AccessLog, activation_key, ordered
from tensorpager.pager.plan.compiled_plan import CompiledPlan, Order
from tensorpager.pager.plan.signatures import StepSignature
from tensorpager.pager.plan.ways import Growth, Taken, Ways
from tensorpager.planner.hardware import Hardware

from .models import PAGE_BYTES, make_pager, mlp
from .test_planned import TIERS

MANY = 1e12  # bytes per second: nothing waits
FEW = 1e4  # a page takes seconds


def signature_of(samples: list[list[float]]) -> StepSignature:
    log = AccessLog()
    log.keys.append((1,))
    log.times.append(time.perf_counter())
    signature = StepSignature(1, log)
    signature.samples.clear()
    signature.samples.extend(samples)
    return signature


def on_machine(pager: tp.Pager, monkeypatch: pytest.MonkeyPatch, **rates: float) -> Hardware:
    """``pager`` takes the machine for one with these rates."""
    assert pager.core.follower is not None
    disk = pager.core.budget_bytes["disk"]
    machine = Hardware(
        pager.core.residency.pool.count * PAGE_BYTES, pager.core.budget_bytes["host"], disk,
        **dict.fromkeys(("d2h_bytes_per_s", "h2d_bytes_per_s"), rates["host"]),
        **dict.fromkeys(("disk_read_bytes_per_s", "disk_write_bytes_per_s"), rates["disk"]),
        page_size=PAGE_BYTES,
    )  # fmt: skip
    monkeypatch.setattr(pager.core.follower, "hardware", lambda: machine)
    return machine


def generate(pager: tp.Pager, model: nn.Module, tokens: int, token: Any = None) -> list[str]:
    """The mode of each iteration: one token, nothing is written but it."""
    token = torch.ones(1, 128) if token is None else token
    modes = []
    for _ in range(tokens):
        with pager.iteration(), torch.no_grad():
            model(token)
        modes.append(pager.stats()["mode"])
        pager.plan()
    return modes


# -- durations -------------------------------------------------------------------------------------
def test_what_happens_once_is_no_part_of_a_duration() -> None:
    """The first iteration is slow everywhere, the second one at its end."""
    signature = signature_of([[9.0, 9.0, 9.0], [1.0, 2.0, 9.0], [1.5, 2.0, 3.0]])
    assert sum(signature.seconds()) == pytest.approx(6.5)  # the fastest iteration
    assert signature.seconds() == pytest.approx([6.5 / 6, 2 * 6.5 / 6, 3 * 6.5 / 6])


# -- batches of another length ---------------------------------------------------------------------
def test_what_grows_with_the_length_and_what_does_not() -> None:
    growth = Growth()
    growth.add(10, [1.0, 2.0, 3.0])
    assert growth.ratio(10, 40).tolist() == [1.0]  # nothing is known of that
    growth.add(30, [1.0, 4.0, 1.0])
    assert growth.ratio(10, 40) == pytest.approx([1.0, 2.5, 1.0])
    assert growth.ratio(40, 10) == pytest.approx([1.0, 0.4, 1.0])
    growth = Growth()
    growth.add(10, [1.0])
    growth.add(20, [4.0])  # slow by chance: no more than as many times as long as it is larger
    assert growth.ratio(10, 20) == pytest.approx([2.0])


def logged(seconds: list[float], keys: list[tuple[int, ...]] | None = None) -> AccessLog:
    log = AccessLog()
    log.keys = keys or [(1,)] * len(seconds)
    log.order = [of_order for of_order in map(ordered, log.keys) if of_order]
    log.began, log.ended = 0.0, sum(seconds)
    log.times = [sum(seconds[:index]) for index in range(len(seconds))]
    return log


def test_times_are_those_of_the_longest() -> None:
    signature = StepSignature(1, logged([1.0, 1.0]), 10)
    signature.sample(logged([1.0, 3.0]), 30, followed=False)
    assert signature.samples[-1] == pytest.approx([1.0, 1.0])
    longest = logged([1.0, 3.0])
    assert signature.is_shorter(30)
    signature.lengthen(longest, 30)
    assert signature.log is longest
    assert list(signature.samples) == [pytest.approx([1.0, 3.0])] * 2
    assert not signature.is_shorter(30)


def test_a_longest_one_with_other_activations() -> None:
    """Of its accesses the times before tell nothing."""
    signature = StepSignature(1, logged([1.0, 1.0], [(1,), (2,)]), 10)
    signature.sample(logged([1.0, 3.0], [(1,), (2,)]), 30, followed=False)
    more = [(1,), (activation_key(1, 0),), (2,)]
    signature.lengthen(logged([1.0, 2.0, 3.0], more), 50)
    assert list(signature.samples) == [pytest.approx([1.0, 2.0, 3.0])]


def test_a_much_longer_one_is_planned_again() -> None:
    signature = StepSignature(1, logged([1.0]), 80)
    signature.planned_size, signature.plans = 80, 4
    signature.lengthen(logged([1.0]), 90)
    assert signature.plans == 4
    signature.lengthen(logged([1.0]), 91)
    assert signature.plans == 1


# -- promises --------------------------------------------------------------------------------------
def test_a_promise_is_of_the_fastest_iteration_and_the_plans_own_waiting() -> None:
    signature = signature_of([[9e-3], [2e-3]])
    assert signature.promised_us(SimpleNamespace(predicted_us=9500.0, ideal_us=9000.0)) == 2500.0


def test_what_moves_cost_is_in_the_next_prediction() -> None:
    """Ops run slower beside moves; what iterations on demand take is known all the same."""
    signature = signature_of([[1e-3, 1e-3]])
    signature.ways.latest[False].append(Taken(2500.0, 500.0))
    signature.beside.extend([[2e-3, 2e-3], [2e-3, 4e-3]])
    assert sum(signature.seconds()) == pytest.approx(2e-3), "two are not enough"
    signature.beside.append([2e-3, 3e-3])
    assert signature.seconds() == pytest.approx([2.5e-3, 2.5e-3])  # the middle one of three
    assert signature.on_demand_us == pytest.approx(2500.0)
    signature.forget_plan()
    assert sum(signature.seconds()) == pytest.approx(2e-3)


@pytest.mark.parametrize(("percent", "wants"), [(99.6, False), (99.4, True), (None, True)])
def test_a_full_search_is_for_what_it_can_find(percent: float | None, wants: bool) -> None:
    signature = signature_of([[1.0]])
    assert not signature.wants_full_search, "the first plan is a quick one"
    bound = SimpleNamespace(percent_of_bound=percent) if percent is not None else None
    plan = SimpleNamespace(bound=bound)
    signature.compiled, signature.plans = cast("CompiledPlan", SimpleNamespace(plan=plan)), 1
    assert signature.wants_full_search == wants


def test_what_plain_pytorch_takes_is_the_ideal() -> None:
    """Of 9 ms by the log 3 are the pager's own work, so no bound may count on them."""
    signature = signature_of([[9e-3]])
    plan = SimpleNamespace(bound=SimpleNamespace(iteration_us=10_000.0))
    signature.compiled = cast("CompiledPlan", SimpleNamespace(ideal_us=9000.0, plan=plan))
    assert (signature.ideal_us, signature.bound_us, signature.overhead_us) == (9e3, 10e3, None)
    signature.plain_us = 6000.0
    assert (signature.ideal_us, signature.bound_us, signature.overhead_us) == (6e3, 7e3, None)
    signature.ways.latest[True].extend(map(Taken, (11e3, 12e3, 13e3), (1e3, 2e3, 1.5e3)))
    assert signature.overhead_us == 12_000.0 - 1500.0 - 6000.0
    signature.plain_us = 20_000.0  # the machine was slow then: an iteration on demand took less
    assert (signature.ideal_us, signature.bound_us, signature.overhead_us) == (9e3, 10e3, 1500.0)


# -- what is followed ------------------------------------------------------------------------------
def test_what_a_plan_promises_is_compared_with_what_was_measured() -> None:
    signature = signature_of([[2e-3]])
    compiled = SimpleNamespace(predicted_us=9500.0, ideal_us=9000.0)
    assert signature.no_better(compiled) is None  # nothing was measured
    on_demand = signature.ways.latest[False]
    on_demand.extend(Taken(3e3, stall_us) for stall_us in (900.0, 499.0, 800.0))
    assert "promises 2.5 ms an iteration" in signature.no_better(compiled)
    on_demand.extend([Taken(3e3, 501.0)] * 5)
    assert signature.no_better(compiled) is None


@pytest.mark.slow
def test_a_plan_that_promises_less_than_demand_gives_is_not_followed(monkeypatch) -> None:
    with make_pager(policy="lp") as pager:
        on_machine(pager, monkeypatch, host=FEW, disk=FEW)
        model = pager.page_module(mlp(depth=6))
        assert "planned" not in generate(pager, model, 4)
        assert pager.stats()["planned_iterations"] == 0
        assert "There is no plan: the one that was made promises" in pager.explain()
        signature = pager.core.follower.current
        assert (signature.plans, signature.seen) == (1, 3)  # the first one was metered
        assert (signature.planned_at, signature.is_due(4)) == (2, False)


def test_how_far_ahead_a_use_is() -> None:
    order = Order([(7,), (8, 9), (7,), (9,)])
    asked = [7, 8, 9, 5]
    assert order.ahead(asked, -1).tolist() == [0, 1, 1, -1]
    assert order.ahead(asked, 0).tolist() == [2, 1, 1, -1]
    assert order.ahead(asked, 1).tolist() == [2, 5, 3, -1]
    assert order.ahead(asked, 3).tolist() == [4, 5, 5, -1]
    assert order.ahead([], 3).tolist() == []


def test_on_demand_what_is_used_last_leaves_first(one_thread: None) -> None:
    """A pass over twice as many weights as there is room for brings nearly all of them, where the
    least recently used ones leave, and half of them where the order of uses is known. An access
    that nobody expected ends that until the next iteration."""
    moved = {}
    for policy in ("lru", "lp"):
        with make_pager(policy=policy) as pager:
            follower = pager.core.follower
            if follower is not None:
                follower.most_plans = 0
            weights = [pager.page(torch.ones(2 * PAGE_BYTES // 4)) for _ in range(8)]
            pager.core.budget.settled = True
            pager.core.residency.resize(9)
            pager.core.profile_run.begin = lambda: None  # type: ignore[method-assign]
            pager.core.profile_run.end = lambda: None  # type: ignore[method-assign]
            before = 0
            for count in range(5):
                with pager.iteration():
                    for weight in weights[::-1] if count == 4 else weights:
                        weight.sum()
                moved[policy, count] = (pager.stats()["bytes_in"] - before) // PAGE_BYTES
                before = pager.stats()["bytes_in"]
    assert [moved["lru", count] for count in range(5)][1:4] == [14, 14, 14]
    assert [moved["lp", count] for count in range(5)][2:4] == [9, 10]


def gone(ways: Ways, count: int, plan: list[float], demand: list[float]) -> str:
    """How so many iterations go, ``p`` or ``d``, where each of a way takes the next of its times,
    again and again."""
    turns = {True: itertools.cycle(plan), False: itertools.cycle(demand)}
    went = ""
    for _ in range(count):
        went += "p" if ways.by_plan else "d"
        ways.choose(Taken(next(turns[ways.by_plan]), 0.0), may_try=True)
    return went


SLOW_NOW_AND_THEN = [100.0, 250.0, 101.0, 100.0, 180.0, 102.0]


@pytest.mark.parametrize(
    ("plan", "demand", "goes"),
    [
        ([99.0], SLOW_NOW_AND_THEN, "pppp dddd" + 64 * "p" + "dddd p"),
        (SLOW_NOW_AND_THEN, [99.0], "pppp dddd" + 64 * "p" + "dddd p"),  # hardly faster
        (SLOW_NOW_AND_THEN, [90.0], "pppp dddd" + 64 * "d" + "pppp d"),
        (SLOW_NOW_AND_THEN, [300.0], "pppp dd" + 64 * "p" + "dd p"),  # in vain
        ([300.0], SLOW_NOW_AND_THEN, "pppp dddd" + 64 * "d" + "pp d"),
        ([130.0, 140.0, 124.0, 128.0], [112.0, 144.0, 120.0, 142.0], "pppp dddd" + 64 * "p"),
    ],
)
def test_iterations_go_the_faster_way(plan: list[float], demand: list[float], goes: str) -> None:
    ways = Ways()
    assert gone(ways, 3, plan, [500.0]) == "ddd"  # what a process takes at its begin
    ways.new_plan()
    assert not ways.is_settled
    goes = goes.replace(" ", "")
    assert gone(ways, len(goes), plan, demand) == goes
    assert ways.is_settled


def test_batches_of_different_lengths_are_compared_by_a_line() -> None:
    """By the plan each takes 50 ms and 0.9 ms a page, on demand 0 and 1.3: the shorter ones that
    come on demand take less than the longer ones that come by the plan."""
    ways = Ways()
    for size in (900, 40, 500, 300):
        ways.choose(Taken(1300.0 * size, 1000.0 * size, size), may_try=True)
    ways.new_plan()
    for size in (800, 900, 1000, 700):
        ways.choose(Taken(50e3 + 900.0 * size, 0.0, size), may_try=True)
    assert not ways.by_plan
    for size in (100, 50, 200, 60):
        ways.choose(Taken(1300.0 * size, 1000.0 * size, size), may_try=True)
    assert ways.by_plan
    stalls = [one.stall_us for one in ways.at(False, 400)]
    assert stalls == pytest.approx([400e3] * len(stalls), rel=0.5)


def test_the_faster_way_is_another_one_later() -> None:
    ways = Ways()
    ways.new_plan()
    assert set(gone(ways, 72, [130.0], [100.0])[8:]) == {"d"}
    assert gone(ways, 20, [90.0], [100.0]) == "pppp" + 16 * "p"


def with_plan(plans: int, stall_us: float, predicted_us: float = 100.0) -> StepSignature:
    """It has followed its plan for long enough, and waited so much of 100 µs, of which 10 are
    needed. Making it took as long as twenty such iterations, as many as there were, wait for 2."""
    signature = signature_of([[9e-5]])
    bound = SimpleNamespace(iteration_us=100.0, percent_of_bound=100.0)
    compiled = SimpleNamespace(
        ideal_us=90.0, predicted_us=predicted_us, plan=SimpleNamespace(bound=bound)
    )
    signature.compiled, signature.plans = cast("CompiledPlan", compiled), plans
    signature.seen, signature.planned_at, signature.planning_us = 20, 10, 40.0
    signature.ways.new_plan()
    signature.ways.latest[True].extend([Taken(100.0, stall_us)] * 3)
    return signature


def test_another_plan_is_made_where_it_saves_more_than_it_takes() -> None:
    assert with_plan(1, 12.1).is_due(4)
    assert not with_plan(1, 11.9).is_due(4)
    assert with_plan(1, 11.9, predicted_us=102.1).is_due(4), "a longer search may find more"
    assert not with_plan(2, 11.9, predicted_us=102.1).is_due(4), "which was made already"
    assert with_plan(2, 12.1).is_due(4)
    assert not with_plan(4, 12.1).is_due(4)
    soon, lost = with_plan(2, 12.1), with_plan(2, 12.1)
    soon.planned_at, lost.ways.by_plan = 11, False
    assert not soon.is_due(4), "as many iterations again are seen first"
    assert not lost.is_due(4), "it was made anew once, and is not followed"


@pytest.mark.parametrize(("takes", "is_left"), [(103.0, True), (101.0, False)])
def test_where_nothing_may_be_tried_a_slower_plan_is_left(takes: float, is_left: bool) -> None:
    """Ranks follow plans together."""
    signature = with_plan(1, 16.0)
    signature.ways.latest[False].extend([Taken(100.0, 50.0)] * 3)
    for _ in range(9):
        signature.choose(Taken(takes, 16.0), by_plan=True, alone=False)
    assert signature.followed, "it is made anew first"
    signature.plans = 2
    for _ in range(4):
        signature.choose(Taken(takes, 16.0), by_plan=True, alone=False)
    assert (signature.left, signature.compiled is None) == (is_left, is_left)
    assert not is_left or not signature.is_due(4)


def test_where_plans_are_followed_anyway_nothing_is_left() -> None:
    signature = with_plan(2, 16.0)
    for _ in range(9):
        signature.choose(Taken(500.0, 16.0), by_plan=True, alone=None)
    assert signature.followed
    assert signature.measured == 500.0


def test_a_training_goes_on_without_a_plan_that_takes_longer(monkeypatch) -> None:
    """It promises to wait for nothing, and each iteration that follows it is held up."""
    with make_pager(policy="lp") as pager:
        on_machine(pager, monkeypatch, host=MANY, disk=MANY)
        follower = pager.core.follower
        enter = follower._enter

        def held_up(compiled: CompiledPlan) -> bool:
            time.sleep(0.3)
            return enter(compiled)

        monkeypatch.setattr(follower, "_enter", held_up)
        model = pager.page_module(mlp(depth=6))
        modes = generate(pager, model, 14)
        assert 0 < modes.count("planned") <= 8, "two plans at most, each for four iterations"
        assert modes[-1] == "demand"
        assert "There is a plan, and it is not followed now" in pager.explain()
        assert "the one that was followed took" in pager.explain()


def test_read_only_weights_are_not_written_to_the_disk(monkeypatch, tmp_path) -> None:
    """However fast the disk is: the host holds all. And a plan outlives what is metered later, as
    long as there are about as many frames as it has."""
    options = {**TIERS["both"], "host_budget": "8MiB", "disk_path": tmp_path}
    with make_pager(policy="lp", **options) as pager:
        on_machine(pager, monkeypatch, host=FEW * 1e4, disk=MANY)
        follower = pager.core.follower
        follower.most_plans, follower.only_if_faster = 1, False
        model = pager.page_module(mlp(depth=6))
        assert generate(pager, model, 5)[-1] == "planned"
        stats = pager.stats()
        assert stats["disk_bytes_written"] == 0
        assert stats["channel_bytes"]["host-in"] > 0
        compiled = follower.current.compiled
        with pager.core.lock:
            follower.arena_resized()
            assert follower.current.compiled is compiled
            frames = pager.core.residency.pool.count
            pager.core.residency.resize(frames - frames // 9)
            follower.arena_resized()
            assert follower.current.compiled is compiled
            pager.core.residency.resize(frames - frames // 9 - 1)
            follower.arena_resized()
            assert follower.current.compiled is None


@pytest.mark.slow
def test_a_plan_that_promises_more_is_followed(monkeypatch) -> None:
    with make_pager(policy="lp") as pager:
        on_machine(pager, monkeypatch, host=MANY, disk=MANY)
        pager.core.follower.most_plans = 1
        model = pager.page_module(mlp(depth=6))
        assert generate(pager, model, 4)[-1] == "planned"
        assert "Without a plan it takes" in pager.explain()
