"""Policies that choose what to keep, move, make again or step on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tensorpager.planner.errors import PolicyRefusal
from tensorpager.planner.hardware import Hardware
from tensorpager.planner.joint import policy
from tensorpager.planner.joint.decided import Decisions, Hosted, Planner
from tensorpager.planner.joint.host_order import Release, order_steps
from tensorpager.planner.joint.options import Unit, Uses, find_remakes, find_units
from tensorpager.planner.joint.policy import plan, plan_by_rule
from tensorpager.planner.joint.program import Shares, solve_joint
from tensorpager.planner.lp.mend import mended, put_off, sooner
from tensorpager.planner.lp.program import Unsolved
from tensorpager.planner.plan import Move, Plan, plan_from_json, plan_to_json
from tensorpager.planner.registry import make_plan
from tensorpager.planner.simulator import simulate
from tensorpager.planner.trace import Trace, make_trace
from tensorpager.planner.validator import validate

PAGE = 1 << 16
MB = 1 << 20


def layers(
    count: int, *, slabs: int = 1, clip: bool = False, host_us: float = 300.0, choose: bool = True
) -> Trace:
    """A step of ``count`` layers, each a cheap op and a product in its forward pass, with a weight
    of 1 MiB and 3 MiB of states; what they make is used again in the backward pass."""
    tensors: list[tuple[int, int, bool]] = []
    ops: list[tuple[str, float, list[int], list[int]]] = []
    rerun: list[bool] = []
    host: list[float | None] = []
    names: dict[int, str] = {}

    def tensor(name: str, nbytes: int, lasting: bool = False) -> int:
        tensors.append((len(tensors), nbytes, lasting))
        names[len(tensors) - 1] = name
        return len(tensors) - 1

    def op(
        name: str, us: float, reads: Sequence[int], writes: Sequence[int], *, again: bool = False,
        on_host: float | None = None,
    ) -> None:  # fmt: skip
        ops.append((name, us, list(reads), list(writes)))
        rerun.append(again)
        host.append(on_host)

    x = [tensor("x.0", MB // 2)]
    op("embed", 10, [], [x[0]], again=True)
    weights = [tensor(f"weight.{n}", MB, True) for n in range(count)]
    states = [[tensor(f"states.{n}.{s}", 3 * MB // slabs, True) for s in range(slabs)]
              for n in range(count)]  # fmt: skip
    norms, made, segments = [], [], []
    for n in range(count):
        norms.append(tensor(f"norm.{n}", MB // 2))
        made.append(tensor(f"made.{n}", 2 * MB))
        x.append(tensor(f"x.{n + 1}", MB // 2))
        segments.append((len(ops), len(ops) + 2, f"layer.{n}"))
        op(f"norm.{n}", 5, [x[n]], [norms[n]], again=True)
        op(f"product.{n}", 100, [norms[n], weights[n]], [made[n]], again=True)
        op(f"down.{n}", 60, [made[n], weights[n]], [x[n + 1]], again=True)
    loss = tensor("dx", MB // 2)
    op("loss", 50, [x[count]], [loss])
    gradients = []
    for n in reversed(range(count)):
        gradients.append(tensor(f"gradient.{n}", MB))
        op(f"backward.{n}", 320, [loss, x[n], norms[n], made[n], weights[n]],
           [loss, gradients[-1]])  # fmt: skip
        if not clip:
            update(op, n, gradients[-1], weights[n], states[n], host_us, [])
    if clip:
        norm = tensor("clip", 4)
        op("clip", 20, gradients, [norm])
        for n in reversed(range(count)):
            update(op, n, gradients[count - 1 - n], weights[n], states[n], host_us, [norm])
    if not choose:
        rerun, host, segments = [], [], []
    return make_trace(
        tensors, ops, page_size=PAGE, names=names, rerun=rerun, host_us=host, segments=segments
    )


def update(op, n, gradient, weight, states, host_us, more) -> None:  # type: ignore[no-untyped-def]
    for part in states:
        op(f"update.{n}", 20, [gradient, part, *more], [weight, part],
           on_host=host_us / len(states))  # fmt: skip


def machine(trace: Trace, share: float, rate: float = 8e9, **changes: object) -> Hardware:
    from tensorpager.planner.lifetimes import live_pages

    peak = int(live_pages(trace, PAGE).max())
    return Hardware(
        int(share * peak) * PAGE, float("inf"), 0, rate, rate, page_size=PAGE,
        transfer_latency_us=1.0,
    ).with_(**changes)  # fmt: skip


def both_agree(trace: Trace, hardware: Hardware, made: Plan) -> float:
    """µs of an iteration, by simulator and validator."""
    simulated, validated = simulate(trace, hardware, made), validate(trace, hardware, made)
    assert simulated.feasible, simulated.reason
    assert validated.feasible, validated.reason
    assert simulated.predicted
    assert validated.predicted
    taken = simulated.predicted.iteration_us
    assert taken == pytest.approx(validated.predicted.iteration_us, rel=1e-6)
    return taken


@pytest.mark.parametrize(
    ("trace", "share"),
    [
        pytest.param(layers(5), 0.35, id="updates with the backward pass"),
        pytest.param(layers(5, clip=True), 0.5, id="with clipping"),
        pytest.param(layers(4, slabs=3), 0.35, id="updates in slabs"),
    ],
)
def test_joint_is_never_slower_than_what_it_is_made_of(trace: Trace, share: float) -> None:
    hardware = machine(trace, share)
    made = plan(trace, hardware)
    taken = both_agree(trace, hardware, made)
    assert made.predicted
    assert made.bound
    assert made.bound.iteration_us <= taken * (1 + 1e-6)
    assert made.predicted.iteration_us == pytest.approx(taken)
    for name in ("checkpoint", "selective", "zero-offload", "lp"):
        try:
            other = make_plan(name, trace, hardware)
        except PolicyRefusal:
            continue
        assert taken <= both_agree(trace, hardware, other) * (1 + 1e-9), name


@pytest.mark.parametrize("clip", [False, True])
def test_choices_of_a_long_trace_are_carried_out(
    monkeypatch: pytest.MonkeyPatch, clip: bool
) -> None:
    trace = layers(8, clip=clip, slabs=2)
    hardware = machine(trace, 0.4)
    whole = plan(trace, hardware)
    for name, steps in (("MAX_STEPS", 30), ("MERGED_STEPS", 25), ("MERGED_MOVES", 28)):
        monkeypatch.setattr(policy, name, steps)
    made = plan(trace, hardware)
    taken = both_agree(trace, hardware, made)
    assert made.has_choices
    assert made.bound
    assert whole.bound
    assert made.bound.iteration_us <= whole.bound.iteration_us * (1 + 1e-6)
    moves = make_plan("lp", trace, hardware)
    assert moves.predicted
    assert taken < moves.predicted.iteration_us


def test_a_quick_plan_chooses_too() -> None:
    trace = layers(6)
    hardware = machine(trace, 0.35, 4e9)
    made = plan(trace, hardware, quick=True)
    both_agree(trace, hardware, made)
    assert made.has_choices


def test_the_host_takes_of_what_has_come_the_update_that_is_due_first() -> None:
    def unit(op: int, host_us: float) -> Unit:
        return Unit((op,), (op,), (), (), (), (), (0,), (99,), 0, host_us)

    late, soon, first = unit(0, 30.0), unit(1, 10.0), unit(2, 20.0)
    releases = [Release(late, 0.0, 500.0), Release(soon, 25.0, 60.0), Release(first, 5.0, 90.0)]
    ends = order_steps(releases, 1000.0)
    assert list(ends.items()) == [(late, 30.0), (soon, 40.0), (first, 60.0)]
    # What the host has left of the iteration before comes first; more has come when that is done.
    assert list(order_steps(releases, 55.0)) == [first, soon, late]


def test_what_is_allowed_is_what_is_chosen() -> None:
    trace = layers(6)
    hardware = machine(trace, 0.35, 4e9)
    assert plan(trace, hardware).has_choices
    assert not plan(trace, hardware, allow=["move"]).has_choices
    again = plan(trace, hardware, allow=["move", "recompute"])
    assert again.recompute
    assert not again.host_steps
    host = plan(trace, hardware, allow=["move", "host-step"])
    assert host.host_steps
    assert not host.recompute


def test_a_trace_without_choices_is_planned_by_moves() -> None:
    trace = layers(5, choose=False)
    hardware = machine(trace, 0.5)
    made, moves = plan(trace, hardware), make_plan("lp", trace, hardware)
    assert made.policy == "joint"
    assert replace(made, policy="lp") == moves


def test_without_a_tier_below_what_does_not_fit_is_made_again() -> None:
    trace = layers(4)
    hardware = machine(trace, 0.95, host_bytes=0)
    assert not hardware.disk_bytes
    made = plan(trace, hardware)
    both_agree(trace, hardware, made)
    assert made.recompute
    assert {move.action for move in made.moves} <= {"discard"}


def test_checkpoint_runs_every_segment_again() -> None:
    trace = layers(4)
    hardware = machine(trace, 0.6)
    made = plan_by_rule("checkpoint", trace, hardware)
    both_agree(trace, hardware, made)
    again = {op for each in made.recompute for op in range(each.first_op, each.last_op + 1)}
    names = {trace.op_names[op] for op in again}
    assert names == {f"{what}.{n}" for what in ("norm", "product") for n in range(4)}
    assert not made.host_steps


def test_selective_keeps_products() -> None:
    trace = layers(4)
    hardware = machine(trace, 0.6)
    made = plan_by_rule("selective", trace, hardware)
    both_agree(trace, hardware, made)
    assert {trace.op_names[each.first_op] for each in made.recompute} == {
        f"norm.{n}" for n in range(4)
    }


@pytest.mark.parametrize("clip", [False, True])
def test_zero_offload_steps_on_the_host(clip: bool) -> None:
    trace = layers(4, clip=clip, slabs=2)
    hardware = machine(trace, 0.6)
    made = plan_by_rule("zero-offload", trace, hardware)
    both_agree(trace, hardware, made)
    updates = {op for op, name in enumerate(trace.op_names) if name.startswith("update")}
    assert set(made.host_steps) == updates
    states = {int(trace.tensor_ids[t]) for t, name in enumerate(trace.tensor_names)
              if name and name.startswith("states")}  # fmt: skip
    assert not states & {move.tensor for move in made.moves}
    assert states <= {run.tensor for run in made.start}


def test_the_bound_of_moves_alone_is_that_of_lp() -> None:
    from tensorpager.planner.lp.policy import bound

    trace = layers(6)
    hardware = machine(trace, 0.4)
    uses = Uses(trace)
    alone = solve_joint(trace, hardware, uses, [], [], steps=1000, time_limit_s=60)
    assert alone is not None
    assert alone.iteration_us == pytest.approx(bound(trace, hardware), rel=1e-6)
    all_of_it = solve_joint(
        trace, hardware, uses, find_remakes(trace, uses), find_units(trace, uses),
        steps=1000, time_limit_s=60,
    )  # fmt: skip
    assert all_of_it is not None
    assert all_of_it.iteration_us <= alone.iteration_us * (1 + 1e-6)


def test_an_update_of_several_weights_gives_each_back_when_it_is_used() -> None:
    """``late`` is not there while ``crowd`` needs its frames, nor is what the update has for
    itself while the host is at it: 4 pages come in 10 µs each, behind ``crowd``."""
    early, late, scratch, crowd = range(4)
    tensors = [(early, PAGE, True), (late, 4 * PAGE, True), (scratch, 4 * PAGE, False),
               (crowd, 8 * PAGE, False)]  # fmt: skip
    ops = [
        ("first", 100.0, [early], []),
        ("crowd", 100.0, [], [crowd]),
        ("second", 100.0, [late], []),
        ("update", 20.0, [early, late], [early, late, scratch]),
    ]
    trace = make_trace(tensors, ops, page_size=PAGE, host_us=[None, None, None, 5.0])
    hardware = Hardware(
        9 * PAGE, float("inf"), 0, PAGE * 1e5, PAGE * 1e5, page_size=PAGE, transfer_latency_us=0.0
    )
    uses = Uses(trace)
    units = find_units(trace, uses)
    made = Planner(trace, hardware, uses, lambda *_: None).plan(Decisions((), units))
    assert made is not None
    taken = both_agree(trace, hardware, made.plan)
    assert taken == pytest.approx(345.0)
    bound = solve_joint(trace, hardware, uses, [], units, steps=100, time_limit_s=60)
    assert bound is not None
    assert 0.98 * taken <= bound.iteration_us <= taken * (1 + 1e-6)


def test_pages_move_while_something_runs_again() -> None:
    """Before the op that it runs for has its frames: over a slow link that is time won."""
    trace = layers(3, slabs=2, clip=True)
    times_ms = [5.2, 2.6, 52, 31, 2.6, 52, 0, 2.6, 0, 313, 26, 0, 1669, 167, *[10] * 5, 0, 104]
    trace = replace(trace, op_duration_us=1e3 * np.array(times_ms))
    hardware = Hardware(
        182 * PAGE, 0, 290 * PAGE, 1.7e9, 2.9e8, disk_read_bytes_per_s=1.4e8,
        disk_write_bytes_per_s=4.1e6, page_size=PAGE, transfer_latency_us=1.0,
    )  # fmt: skip
    found = plan(trace, hardware, quick=True)
    assert found.recompute
    assert found.bound is not None
    assert found.bound.iteration_us <= both_agree(trace, hardware, found) * (1 + 1e-6)


def test_what_is_made_again_is_asked_anew_where_all_updates_are_the_hosts() -> None:
    trace = layers(6)
    hardware, uses = machine(trace, 0.4, 4e9), Uses(trace)
    remakes, units = find_remakes(trace, uses), find_units(trace, uses)

    def solved(some: list[Unit], *, hosted: bool) -> tuple[float, list[float]]:
        shares = solve_joint(
            trace, hardware, uses, remakes, some, steps=1200, time_limit_s=60, hosted=hosted
        )
        assert shares is not None
        return shares.iteration_us, shares.units.tolist()

    free, _ = solved(units, hosted=False)
    for some in (units[:2], units):
        mine, shares = solved(some, hosted=True)
        assert shares == pytest.approx([1.0] * len(some))
        assert mine >= free * (1 - 1e-6)


def test_the_host_has_room_for_gradients_on_their_way_beside_what_it_updates() -> None:
    """Three updates fit, and no gradient beside them: no plan had any of them then."""
    trace = layers(6)
    each, gradient = 4 * MB // PAGE, MB // PAGE
    hardware = machine(trace, 0.4, host_bytes=(3 * each + gradient // 2) * PAGE)
    uses = Uses(trace)
    remakes, units = find_remakes(trace, uses), find_units(trace, uses)
    search = policy._Search(trace, hardware, uses, remakes, units, False, lambda *_: None, 1)
    begins_us = np.concatenate([[0.0], np.cumsum(trace.op_duration_us)])
    shares = Shares(begins_us[-1], np.zeros(len(remakes)), np.full(6, 0.5), begins_us)
    kept = search._housed(units[:3], shares)
    assert kept == units[1:3]
    assert search._filled(kept, shares, begins_us, 1.0) == kept


def test_a_weight_that_the_host_updates_is_there_when_its_op_begins() -> None:
    """``crowd`` leaves room for 2 of its 10 pages, so 8 come between the end of that and the begin
    of ``use``, in 10 µs each; gradient, host and the states, which never fit, take no time."""
    tensors = [(0, 10 * PAGE, True), (1, 10 * PAGE, True), (2, PAGE, False), (3, 10 * PAGE, False)]
    ops = [
        ("crowd", 100.0, [], [3]),
        ("use", 100.0, [0], []),
        ("back", 100.0, [0], [2]),
        ("update", 20.0, [2, 1], [0, 1]),
    ]
    trace = make_trace(tensors, ops, page_size=PAGE, host_us=[None, None, None, 5.0])
    hardware = Hardware(
        12 * PAGE, float("inf"), 0, PAGE * 1e5, PAGE * 1e5, page_size=PAGE, transfer_latency_us=0.0
    )
    uses = Uses(trace)
    shares = solve_joint(
        trace, hardware, uses, [], find_units(trace, uses), steps=100, time_limit_s=60
    )
    assert shares is not None
    assert shares.iteration_us == pytest.approx(380.0, rel=1e-3)


def test_weights_come_back_when_the_host_has_stepped() -> None:
    """Not only when they are wanted, though nothing else keeps them from coming sooner."""
    trace = layers(6)
    hardware, uses = machine(trace, 0.5), Uses(trace)
    units = find_units(trace, uses)
    planner = Planner(trace, hardware, uses, lambda what, share: None)
    good = planner.plan(Decisions((), units))
    assert good is not None
    begins_us = good.simulation.op_start_us
    assert begins_us is not None
    hosted = Hosted(trace, hardware, units, np.append(begins_us, good.iteration_us))
    due = {trace.tensor_ids[unit.weights[0]]: unit.due % trace.ops for unit in units}
    moves = [
        move._replace(issue_op=due[move.tensor])
        if move.action == "in" and move.issue_op < due.get(move.tensor, 0)
        else move
        for move in good.plan.moves
    ]
    late = replace(good.plan, moves=sorted(moves, key=lambda move: move.issue_op))
    simulation = simulate(trace, hardware, late)
    assert simulation.predicted is not None
    assert simulation.predicted.iteration_us > good.iteration_us * 1.1
    made, _ = mended(trace, hardware, late, simulation, [hosted.mend])
    assert both_agree(trace, hardware, made) == pytest.approx(good.iteration_us, rel=0.02)


def test_a_host_that_takes_iterations_for_its_steps() -> None:
    """All wait for it, however late it is: a gradient that stays on the device until the host has
    stepped is one all the time, not one more in each iteration that the list takes."""
    trace = layers(6, host_us=100_000.0)
    hardware, uses = machine(trace, 0.5), Uses(trace)
    units = find_units(trace, uses)
    search = Planner(trace, hardware, uses, lambda what, share: None)
    found = search.plan(Decisions((), units))
    assert found is not None
    taken = both_agree(trace, hardware, found.plan)
    assert 600_000 < taken < 650_000


def test_what_comes_back_takes_no_frames_from_an_op_that_waits_for_some() -> None:
    """``make`` waits for one page of tensor 0 to leave, in 10 µs; with tensor 1 queued before it
    begins, for all three."""
    tensors = [(0, 3 * PAGE, True), (1, 2 * PAGE, True), (2, 3 * PAGE, False)]
    ops = [
        ("write", 100.0, [], [0]),
        ("make", 100.0, [], [2]),
        ("use", 100.0, [2], []),
        ("read", 100.0, [1], []),
    ]
    trace = make_trace(tensors, ops, page_size=PAGE)
    hardware = Hardware(
        5 * PAGE, float("inf"), 0, PAGE * 1e5, PAGE * 1e5, page_size=PAGE, transfer_latency_us=0.0
    )
    moves = [
        Move(1, 0, 2, "host", "out", 0),
        Move(0, 0, 3, "host", "out", 1),
        Move(1, 0, 2, "host", "in", 1),
        Move(0, 0, 3, "host", "in", 3),
    ]
    bad = Plan("by hand", PAGE, 5 * PAGE, float("inf"), 0, moves)
    simulation = simulate(trace, hardware, bad)
    assert simulation.predicted is not None
    assert simulation.predicted.iteration_us == pytest.approx(430.0)
    made, _ = mended(trace, hardware, bad, simulation, [put_off(trace)])
    assert both_agree(trace, hardware, made) == pytest.approx(410.0)


def test_what_an_op_waits_for_comes_sooner_where_the_queue_was_idle() -> None:
    """Tensor 0 was written and has left at 130 µs; it takes 30 to come back, and is queued when
    its op begins to wait. Two ops before suffices."""
    tensors = [(0, 3 * PAGE, True), (1, PAGE, False)]
    ops = [
        ("write", 100.0, [], [0]),
        ("make", 100.0, [], [1]),
        *((f"use {n}", 20.0, [1], []) for n in range(4)),
        ("read", 100.0, [0], []),
    ]
    trace = make_trace(tensors, ops, page_size=PAGE)
    hardware = Hardware(
        4 * PAGE, float("inf"), 0, PAGE * 1e5, PAGE * 1e5, page_size=PAGE, transfer_latency_us=0.0
    )
    moves = [Move(0, 0, 3, "host", "out", 1), Move(0, 0, 3, "host", "in", 6)]
    late = Plan("by hand", PAGE, 4 * PAGE, float("inf"), 0, moves)
    simulation = simulate(trace, hardware, late, log_transfers=True)
    assert simulation.predicted is not None
    assert simulation.predicted.iteration_us == pytest.approx(410.0)
    late = replace(late, predicted=simulation.predicted)
    made, _ = mended(trace, hardware, late, simulation, sooner(trace)[:1])
    assert [move.issue_op for move in made.moves] == [1, 4]
    assert both_agree(trace, hardware, made) == pytest.approx(380.0)
    elsewhere, _ = mended(trace, hardware, late, simulation, sooner(trace)[1:2])
    assert elsewhere is late


def test_a_solver_without_an_answer_is_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    trace, steps = layers(5), []

    def unsolved(*args: Any, **options: Any) -> None:
        steps.append(options["steps"])
        raise Unsolved("time is over")

    monkeypatch.setattr(policy, "solve_joint", unsolved)
    made = plan(trace, machine(trace, 0.35, 4e9))
    assert steps == [policy.MAX_STEPS, policy.BOUND_STEPS], "a smaller program is asked too"
    assert made.notes == [policy.UNSOLVED]
    assert plan_from_json(plan_to_json(made)).notes == made.notes


def test_fewer_steps_relax_the_bound() -> None:
    trace = layers(6)
    hardware = machine(trace, 0.4)
    uses = Uses(trace)
    options = find_remakes(trace, uses), find_units(trace, uses)
    exact = solve_joint(trace, hardware, uses, *options, steps=1000, time_limit_s=60)
    rough = solve_joint(trace, hardware, uses, *options, steps=12, time_limit_s=60)
    assert exact is not None
    assert rough is not None
    assert rough.iteration_us <= exact.iteration_us * (1 + 1e-6)


def test_same_input_same_plan() -> None:
    trace = layers(5)
    hardware = machine(trace, 0.4)
    assert plan_to_json(plan(trace, hardware)) == plan_to_json(plan(trace, hardware))


def test_a_plan_survives_its_file() -> None:
    trace = layers(5)
    made = plan(trace, machine(trace, 0.35, 4e9))
    content = plan_to_json(made)
    assert content["version"] == 2
    assert plan_to_json(plan_from_json(content)) == content


def test_rules_refuse_what_the_trace_does_not_permit() -> None:
    trace = layers(4, choose=False)
    for name, what in (("checkpoint", "segment"), ("zero-offload", "host")):
        with pytest.raises(PolicyRefusal, match=what):
            plan_by_rule(name, trace, machine(trace, 0.6))
