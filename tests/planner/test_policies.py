"""Every policy's plan runs in the machine model or is refused with a reason, moves whole tensors,
and decides as its source says on small traces whose answer can be worked out by hand.

Pages have 1,000 bytes and take 10 µs on the link, 40 µs on the disk.
"""

from __future__ import annotations

import math
from collections import Counter
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorpager.planner.errors import InfeasibleBudget, PagerError, PolicyRefusal
from tensorpager.planner.hardware import Hardware
from tensorpager.planner.lifetimes import live_pages, working_set_pages
from tensorpager.planner.plan import Plan
from tensorpager.planner.policies import appobmem, autoswap, g10, lru, vdnn
from tensorpager.planner.policies.bandwidth import Channel
from tensorpager.planner.policies.whole import Room, whole_gaps
from tensorpager.planner.registry import ALIASES, CHOOSERS, POLICIES, find
from tensorpager.planner.simulator import simulate
from tensorpager.planner.trace import READ, READWRITE, WRITE, Trace, make_trace
from tensorpager.planner.validator import validate

from .examples import examples

PAGE = 1000
WHOLE_TENSOR_POLICIES = [name for name in POLICIES if name not in ("lp", *CHOOSERS)]


def machine(device_pages: float, host_pages: float = math.inf, disk_pages: float = 0) -> Hardware:
    return Hardware(
        device_bytes=device_pages * PAGE,
        host_bytes=host_pages * PAGE,
        disk_bytes=disk_pages * PAGE,
        d2h_bytes_per_s=1e8,
        h2d_bytes_per_s=1e8,
        disk_read_bytes_per_s=2.5e7,
        disk_write_bytes_per_s=2.5e7,
        page_size=PAGE,
    )


def trace_of(
    tensors: list[tuple[int, bool]], ops: list[tuple[str, float, list[int], list[int]]]
) -> Trace:
    """``tensors``: (pages, persistent), numbered from 0."""
    sized = [(number, pages * PAGE, lasts) for number, (pages, lasts) in enumerate(tensors)]
    return make_trace(sized, ops, page_size=PAGE)


def outs(plan: Plan) -> list[tuple[int, str, int]]:
    """(tensor, tier, issue_op) of each `out`."""
    return [(m.tensor, m.tier, m.issue_op) for m in plan.moves if m.action == "out"]


def ins(plan: Plan) -> list[tuple[int, int]]:
    return [(m.tensor, m.issue_op) for m in plan.moves if m.action == "in"]


def check(trace: Trace, hardware: Hardware, plan: Plan) -> None:
    """Simulator and validator both run the plan, in the time that it says; whole tensors move."""
    for result in (simulate(trace, hardware, plan), validate(trace, hardware, plan)):
        assert result.feasible, result.reason
        assert plan.predicted is not None
        assert result.predicted is not None
        assert result.predicted.iteration_us == pytest.approx(plan.predicted.iteration_us, rel=1e-6)
        assert result.predicted.peak_device_bytes <= hardware.device_bytes
    pages = dict(zip(trace.tensor_ids.tolist(), trace.pages(hardware.page_size).tolist()))
    for run in plan.start:
        assert (run.first_page, run.page_count) == (0, pages[run.tensor])
    moved: Counter[tuple[int, str, int]] = Counter()
    for move in plan.moves:
        moved[move.tensor, move.action, move.issue_op] += move.page_count
    assert all(count == pages[tensor] for (tensor, _, _), count in moved.items())


# Random traces


@st.composite
def random_traces(draw: st.DrawFn) -> Trace:
    """2 to 12 ops on up to 7 tensors; some accesses are to a part of a tensor."""
    count = draw(st.integers(1, 7))
    pages = np.array(draw(st.lists(st.integers(1, 6), min_size=count, max_size=count)))
    persistent = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    length = draw(st.integers(2, 12))
    rows: list[tuple[int, int, int, int, int]] = []
    for tensor in range(count):
        for op in draw(st.sets(st.integers(0, length - 1), min_size=1, max_size=5)):
            begin = draw(st.integers(0, 1)) * (int(pages[tensor]) // 2)
            mode = draw(st.sampled_from([READ, WRITE, READWRITE]))
            rows.append((op, tensor, mode, begin, int(pages[tensor]) - begin))
    rows.sort()
    order = list(dict.fromkeys(row[1] for row in rows))
    rank = {tensor: index for index, tensor in enumerate(order)}
    durations = draw(
        st.lists(st.sampled_from([0.0, 5.0, 20.0, 90.0]), min_size=length, max_size=length)
    )
    kinds = st.sampled_from(["conv", "relu", "matmul", "op"])
    return Trace(
        page_size=PAGE,
        op_names=draw(st.lists(kinds, min_size=length, max_size=length)),
        op_start_us=np.concatenate([[0.0], np.cumsum(durations)[:-1]]),
        op_duration_us=np.array(durations),
        tensor_ids=np.array(order) * 3 + 5,
        tensor_names=[None] * count,
        tensor_bytes=(pages * PAGE - 7)[order],
        tensor_kinds=["activation"] * count,
        tensor_persistent=np.array([persistent[tensor] for tensor in order]),
        access_op=np.array([row[0] for row in rows]),
        access_tensor=np.array([rank[row[1]] for row in rows]),
        access_mode=np.array([row[2] for row in rows], np.int8),
        access_first_page=np.array([row[3] for row in rows]),
        access_page_count=np.array([row[4] for row in rows]),
    )


@st.composite
def chains(draw: st.DrawFn) -> Trace:
    """A network's forward and backward pass: layer i reads x[i] and its weight and writes x[i + 1];
    its backward op reads both and the gradient g[i + 1], and writes g[i]."""
    depth = draw(st.integers(2, 7))
    kinds = draw(
        st.lists(st.sampled_from(["conv", "relu", "matmul"]), min_size=depth, max_size=depth)
    )
    sizes = draw(st.lists(st.integers(1, 6), min_size=depth + 1, max_size=depth + 1))
    weights = draw(st.lists(st.integers(1, 3), min_size=depth, max_size=depth))
    times = st.sampled_from([0.0, 5.0, 40.0, 200.0])
    x, g, w = 0, depth + 1, 2 * depth + 2  # where each family's numbers begin
    tensors = [(n, False) for n in sizes + sizes] + [(n, True) for n in weights]
    ops = [(f"{kinds[i]} forward", draw(times), [x + i, w + i], [x + i + 1]) for i in range(depth)]
    for i in reversed(range(depth)):
        read = [x + i, x + i + 1, w + i, g + i + 1][: 4 if draw(st.booleans()) else 3]
        read += [] if i == depth - 1 or g + i + 1 in read else [g + i + 1]
        update = [w + i] if draw(st.booleans()) else []
        ops.append((f"{kinds[i]} backward", draw(times), [*read, *update], [g + i, *update]))
    return trace_of(tensors, ops)


# AutoSwap leaves tensors under 1 MiB alone; here all are smaller.
SMALL = {
    f"autoswap-{score}": partial(autoswap.plan, score=score, min_bytes=1)
    for score in autoswap.SCORES
}
REASONS = (
    "moves whole tensors",
    "peak still",
    "no room below the device",
    "are full before op",
    "do not repeat",
)


@pytest.mark.parametrize("name", WHOLE_TENSOR_POLICIES)
@examples(60)
@given(data=st.data())
def test_plans_run_or_are_refused(name: str, data: st.DataObject) -> None:
    trace = data.draw(random_traces() | chains())
    attempt(name, trace, data.draw(machines(trace)))


@st.composite
def machines(draw: st.DrawFn, trace: Trace) -> Hardware:
    """From the largest working set to just large enough, now and then too small."""
    least, peak = (int(f(trace, PAGE).max()) for f in (working_set_pages, live_pages))
    pages = draw(st.integers(least, peak))
    return machine(
        max(pages - draw(st.sampled_from([0, 0, 0, 0, 0, 0, 0, 2])), 1),
        draw(st.sampled_from([0, 3, 8, math.inf])),
        draw(st.sampled_from([0, 5, math.inf])),
    ).with_(transfer_latency_us=draw(st.sampled_from([0.0, 3.0])))


def attempt(name: str, trace: Trace, hardware: Hardware) -> str:
    """Plan and check. Says how it went."""
    least = int(working_set_pages(trace, PAGE).max()) * PAGE
    try:
        plan = SMALL.get(name, find(name))(trace, hardware)
    except InfeasibleBudget as error:
        assert error.minimum == least > hardware.device_bytes  # noqa: PT017
        return "infeasible"
    except PolicyRefusal as error:
        # A reason of the simulator's would mean that a policy built a plan that can't run.
        reason = [reason for reason in REASONS if reason in str(error)]
        assert name in str(error)  # noqa: PT017
        assert reason, str(error)  # noqa: PT017
        return reason[0]
    assert hardware.device_bytes >= least
    assert plan.policy == name
    check(trace, hardware, plan)
    return "moves" if plan.moves else "nothing to move"


# Names


def test_names_in_order_with_aliases() -> None:
    assert list(POLICIES) == [
        *("lru", "vdnn-all", "vdnn-conv", "vdnn-dyn", "vdnn++"),
        *("autoswap-doa", "autoswap-aoa", "autoswap-wdoa", "autoswap-swdoa"),
        *("appobmem", "g10", "checkpoint", "selective", "zero-offload", "lp", "joint"),
    ]
    assert {alias: find(alias) for alias in ALIASES} == {
        "vdnn": POLICIES["vdnn-dyn"],
        "autoswap": POLICIES["autoswap-swdoa"],
    }


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(PagerError, match=r"no policy 'capuchin' \(known: lru, .*, autoswap\)"):
        find("capuchin")


# One small network: x0 → x1 → x2 of 4 pages each, forward and back. Ops 2 to 4 have all 12 live.


def network(op_us: float = 100.0) -> Trace:
    return trace_of(
        [(4, False), (4, False), (4, False)],
        [
            ("conv0 forward", op_us, [], [0]),
            ("conv1 forward", op_us, [0], [1]),
            ("conv2 forward", op_us, [1], [2]),
            ("loss", op_us, [2], []),
            ("conv2 backward", op_us, [1, 2], []),
            ("conv1 backward", op_us, [0, 1], []),
        ],
    )


@pytest.mark.parametrize("name", WHOLE_TENSOR_POLICIES)
def test_all_policies_move_x0_in_the_only_gap_that_makes_room(name: str) -> None:
    trace, hardware = network(), machine(8)
    plan = SMALL.get(name, find(name))(trace, hardware)
    check(trace, hardware, plan)
    # Only x0 is idle at op 2, where x1 and x2 fill the device. Before op 5 there is no room for it.
    assert (0, "host", 2) in outs(plan)
    assert (0, 5) in ins(plan)
    assert plan.predicted is not None
    assert plan.predicted.peak_device_bytes == 8 * PAGE
    if name == "lru":
        # Op 2 waits for 4 pages to go out, op 5 for them to come back.
        assert plan.predicted.iteration_us == 600 + 40 + 40


@pytest.mark.parametrize(
    "name",  # vdnn-all and vdnn-conv offload whether it fits or not
    [name for name in WHOLE_TENSOR_POLICIES if name not in ("vdnn-all", "vdnn-conv")],
)
def test_what_fits_is_left_alone(name: str) -> None:
    plan = find(name)(network(), machine(100, host_pages=0))
    assert not plan.moves
    assert plan.predicted is not None
    assert plan.predicted.percent_of_ideal == 100.0


@pytest.mark.parametrize("name", WHOLE_TENSOR_POLICIES)
def test_too_small_a_device_names_the_smallest(name: str) -> None:
    with pytest.raises(InfeasibleBudget, match="op 1 'conv1 forward' alone needs") as caught:
        find(name)(network(), machine(7))
    assert caught.value.minimum == 8 * PAGE


@pytest.mark.parametrize("name", WHOLE_TENSOR_POLICIES)
def test_no_room_below_is_refused(name: str) -> None:
    with pytest.raises(PolicyRefusal, match=f"^{name.replace('+', '[+]')}: "):
        SMALL.get(name, find(name))(network(), machine(8, host_pages=3))


def test_a_plan_repeats_with_persistent_tensors_below_at_the_start() -> None:
    # Two weights that are each used in one half of the iteration share 4 frames.
    trace = trace_of([(4, True), (4, True)], [("a", 50, [0], [0]), ("b", 50, [1], [1])])
    plan = lru.plan(trace, machine(4))
    check(trace, machine(4), plan)
    assert outs(plan) == [(1, "host", 0), (0, "host", 1)]
    assert ins(plan) == [(0, 0), (1, 1)]
    assert [tuple(run) for run in plan.start] == [(0, 0, 4, "host")]


# lru


def test_lru_evicts_the_least_recently_used_and_spills_to_disk() -> None:
    trace = trace_of(
        [(2, False), (2, False), (2, False), (4, False)],
        [
            ("a", 10, [], [0]),
            ("b", 10, [], [1]),
            ("c", 10, [0], [2]),  # makes 1 the least recently used
            ("d", 10, [], [3]),
            ("e", 10, [0], []),
            ("f", 10, [1, 2], []),
        ],
    )
    plan = lru.plan(trace, machine(6, host_pages=2, disk_pages=10))
    check(trace, machine(6, host_pages=2, disk_pages=10), plan)
    assert outs(plan)[:2] == [(1, "host", 3), (0, "disk", 3)]


# vDNN


def deep_network(kinds: list[str], op_us: float = 20.0) -> Trace:
    """Layer i reads x[i] (2 pages) and a weight (1 page, number 10 + i) and writes x[i + 1]."""
    depth = len(kinds)
    sized = [(i, 2 * PAGE, False) for i in range(depth + 1)]
    sized += [(10 + i, PAGE, True) for i in range(depth)]
    ops = [(f"{kinds[i]}{i} forward", op_us, [i, 10 + i], [i + 1]) for i in range(depth)]
    ops += [
        (f"{kinds[i]}{i} backward", op_us, [i, i + 1, 10 + i], []) for i in reversed(range(depth))
    ]
    return make_trace(sized, ops, page_size=PAGE)


def test_vdnn_offloads_by_kind_and_never_the_last() -> None:
    trace = deep_network(["conv", "relu", "conv", "pool", "conv", "linear"])
    conv = POLICIES["vdnn-conv"](trace, machine(100))
    every = POLICIES["vdnn-all"](trace, machine(100))
    # x1 is relu's input, x3 pool's, x4 the last convolution's, x5 the fully connected layer's.
    assert {t for t, _, _ in outs(conv) if t < 10} == {0, 2}
    assert {t for t, _, _ in outs(every) if t < 10} == {0, 2, 3}
    for plan in (conv, every):
        check(trace, machine(100), plan)


def test_vdnn_fetches_the_nearest_offloaded_layer_beside_each_backward_layer() -> None:
    # Op 5 ends the forward pass; 6 is the backward op of layer 5, and so on down to 11 of layer 0.
    trace = deep_network(["conv"] * 6)
    plan = POLICIES["vdnn++"](trace, machine(14))
    every = POLICIES["vdnn-all"](trace, machine(100))
    assert dict(t for t in ins(every) if t[0] < 10) == {4: 6, 3: 7, 2: 8, 1: 9, 0: 10}
    check(trace, machine(14), plan)


def test_vdnn_does_not_search_past_a_convolution_that_stays() -> None:
    # Layer 3's input is its weight too: persistent, so it stays and ends the search.
    trace = make_trace(
        [(i, 2 * PAGE, i == 3) for i in range(7)],
        [(f"conv{i} forward", 20.0, [i], [i + 1]) for i in range(6)]
        + [(f"conv{i} backward", 20.0, [i, i + 1], []) for i in reversed(range(6))],
        page_size=PAGE,
    )
    plan = POLICIES["vdnn-all"](trace, machine(100))
    # x4 is fetched beside layer 5 and x2 only beside layer 3, below which the search begins again.
    assert [in_ for in_ in ins(plan) if in_ in [(4, 6), (2, 7), (2, 8), (2, 9)]] == [(4, 6), (2, 8)]


def test_matrix_products_stand_for_convolutions_in_a_transformer() -> None:
    layers = vdnn.find_layers(deep_network(["linear", "softmax", "linear", "gelu"]), machine(100))
    assert layers.convolutional.tolist() == [True, False, True, False]
    assert layers.offloadable.tolist() == [True, False, True, False]


def test_vdnn_waits_for_an_offload_and_vdnnpp_does_not() -> None:
    trace = deep_network(["conv"] * 6, op_us=5.0)
    waits = POLICIES["vdnn-all"](trace, machine(14))
    goes_on = POLICIES["vdnn++"](trace, machine(14))
    run = simulate(trace, machine(14), waits)
    assert run.op_start_us is not None
    # x0 goes out when op 0 has ended (20 µs); then a weight of op 2 goes out and comes back.
    assert run.op_start_us[2] >= 5 + 20 + 10 + 10
    assert waits.predicted is not None
    assert goes_on.predicted is not None
    assert waits.predicted.iteration_us > goes_on.predicted.iteration_us
    fenced = {move.tensor for move in waits.moves if move.tensor >= 10}
    assert fenced
    assert not {move.tensor for move in goes_on.moves if move.tensor >= 10}


def test_vdnn_dyn_takes_the_first_that_fits() -> None:
    trace = deep_network(["conv", "pool", "conv", "pool", "conv", "pool"])
    peak = int(live_pages(trace, PAGE).max())
    moved = [
        {t for t, _, _ in outs(POLICIES["vdnn++"](trace, machine(pages)))}
        for pages in (peak, peak - 4, peak - 6)
    ]
    assert moved == [set(), {0, 2}, {0, 1, 2, 3, 4}]


# AutoSwap and AppObMem


def test_autoswap_scores() -> None:
    # Tensor 0: 1 page, idle for ops 1 to 4; tensor 1: 8 pages, idle for ops 2 and 3.
    trace = trace_of(
        [(1, False), (8, False), (1, False)],
        [
            ("a", 100, [], [0]),
            ("b", 50, [], [1]),
            ("c", 60, [], []),
            ("d", 70, [], [2]),
            ("e", 80, [1], []),
            ("f", 100, [0], []),
        ],
    )
    gaps = whole_gaps(trace, PAGE)
    assert gaps.tensor.tolist() == [0, 1]
    # Idle less 10 µs a page each way: 260 − 20 and 130 − 160.
    assert autoswap.absence_us(trace, machine(9), gaps).tolist() == [240.0, -30.0]
    load = live_pages(trace, PAGE)
    assert load.tolist() == [1, 9, 9, 10, 9, 1]
    # Σ load − 9 over ops 0 to 4 and 1 to 3.
    assert autoswap.weighted_absence(gaps, load, 9).tolist() == [-8 + 0 + 0 + 1 + 0, 0 + 0 + 1]
    first = {
        score: outs(SMALL[f"autoswap-{score}"](trace, machine(9))) for score in autoswap.SCORES
    }
    assert first == {
        "doa": [(0, "host", 1)],
        "aoa": [(0, "host", 1)],  # 240 × 1,000 against −30 / 8,000
        "wdoa": [(1, "host", 2)],
        "swdoa": [(1, "host", 2)],
    }


def test_autoswap_leaves_small_tensors_and_says_what_is_missing() -> None:
    with pytest.raises(PolicyRefusal, match=r"autoswap-doa: peak still .* after 0 of 0 candidates"):
        autoswap.plan(network(), machine(8), score="doa")


def test_autoswap_times_ins_from_the_end_backwards() -> None:
    trace = trace_of(
        [(4, False), (4, False), (8, False)],
        [
            ("a", 100, [], [0]),
            ("b", 100, [], [1]),
            ("outs", 100, [], []),
            ("c", 100, [], [2]),
            ("d", 30, [], []),
            ("e", 30, [], []),
            ("f", 30, [], []),
            ("g", 30, [1], []),
            ("h", 30, [0], []),
        ],
    )
    plan = SMALL["autoswap-doa"](trace, machine(9))
    check(trace, machine(9), plan)
    assert sorted(outs(plan)) == [(0, "host", 1), (1, "host", 2)]
    # Op 7 starts at 490, op 8 at 520. 0 takes 480 to 520, from op 6 on; 1 before it 440 to 480.
    assert sorted(ins(plan)) == [(0, 6), (1, 5)]
    assert plan.predicted is not None
    assert plan.predicted.stall_us == 0


def test_appobmem_relieves_all_extremes_with_the_gap_across_them() -> None:
    assert appobmem.extremes(np.array([1, 5, 5, 2, 6, 1]), 4).tolist() == [1, 4]
    assert appobmem.extremes(np.array([5, 5, 5]), 4).tolist() == [0]
    # Tensor 0 is idle across both peaks (ops 2 and 5), 1 across the first, 2 across the second.
    trace = trace_of(
        [(4, False), (4, False), (4, False), (4, False), (5, False)],
        [
            ("a", 500, [], [0]),
            ("b", 500, [], [1]),
            ("peak", 500, [], [3]),
            ("d", 500, [1], []),
            ("e", 500, [], [2]),
            ("peak", 500, [], [4]),
            ("g", 500, [2], []),
            ("h", 500, [0], []),
        ],
    )
    plan = appobmem.plan(trace, machine(9))
    check(trace, machine(9), plan)
    assert outs(plan) == [(0, "host", 1)]
    assert plan.predicted is not None
    assert plan.predicted.stall_us == 0


# G10


def test_a_channel_books_what_is_free() -> None:
    channel = Channel(np.array([20.0, 10.0, 30.0, 40.0]), 10.0)  # 2, 1, 3, 4 pages
    one = np.array([1])
    assert channel.covered_at(one, np.array([4.0])).tolist() == [3]  # ops 1 and 2
    assert channel.covered_at(one, np.array([4.5])).tolist() == [4]
    assert channel.begun_at(np.array([3]), np.array([3.0])).tolist() == [2]
    assert channel.begun_at(np.array([5]), np.array([7.0])).tolist() == [2]  # ops 4 (0), 3 and 2
    assert not channel.is_booked(1, 2)
    channel.book(np.arange(1, 3), 4)
    assert channel.free.tolist() == [2, 0, 0, 4]
    assert channel.is_booked(1, 2)
    assert channel.covered_at(one, np.array([4.0])).tolist() == [4]


def g10_trace(idle_us: float) -> Trace:
    """Tensor 0 (2 pages) is idle for ops 1 to 3, in the middle of which 8 more are needed."""
    return trace_of(
        [(2, False), (8, False)],
        [
            ("a", 10, [], [0]),
            ("b", idle_us / 3, [], []),
            ("c", idle_us / 3, [], [1]),
            ("d", idle_us / 3, [], []),
            ("e", 10, [0], []),
        ],
    )


def test_g10_sends_long_absences_to_disk_and_shorter_ones_to_the_host() -> None:
    # Out and in take 160 µs by disk and 40 µs by host.
    hardware = machine(9, host_pages=9, disk_pages=9)
    assert outs(g10.plan(g10_trace(2.5 * 160 + 6), hardware)) == [(0, "disk", 1)]
    assert outs(g10.plan(g10_trace(2.5 * 160 - 6), hardware)) == [(0, "host", 1)]
    # Too short for either: evicted on demand, at the op that lacks room.
    assert outs(g10.plan(g10_trace(2.5 * 40 - 6), hardware)) == [(0, "host", 2)]
    for idle_us in (500, 200, 60):
        check(g10_trace(idle_us), hardware, g10.plan(g10_trace(idle_us), hardware))


def test_g10_fetches_as_early_as_there_is_room() -> None:
    # Tensor 1 dies with op 2, so from op 3 on there is room, long before tensor 0 is needed.
    plan = g10.plan(g10_trace(3000), machine(9, disk_pages=9))
    assert ins(plan) == [(0, 3)]


def test_g10_prefers_more_bytes_for_longer() -> None:
    # 0 and 1 are both idle across op 3, which lacks 2 pages; 1 is larger.
    trace = trace_of(
        [(2, False), (3, False), (9, False)],
        [
            ("a", 900, [], [0]),
            ("b", 900, [], [1]),
            ("c", 900, [], []),
            ("d", 900, [], [2]),
            ("e", 900, [], []),
            ("f", 900, [1], []),
            ("g", 900, [0], []),
        ],
    )
    plan = g10.plan(trace, machine(12, disk_pages=99))
    assert outs(plan) == [(1, "disk", 2)]


def test_room_counts_by_op_and_around_the_end() -> None:
    trace = trace_of(
        [(4, True), (4, True)], [("a", 1, [0], []), ("b", 1, [1], []), ("c", 1, [], [])]
    )
    room = Room(trace, machine(5, host_pages=4))
    assert room.excess == 3
    gaps = whole_gaps(trace, PAGE)
    assert list(zip(gaps.last_op.tolist(), gaps.next_op.tolist())) == [(0, 3), (1, 4)]
    decision = lru.Decision(1, 1, 4, "host", 2, 4)
    assert room.has_slots(decision)
    room.take(decision)
    assert room.used["device"].tolist() == [4, 8, 4]
    assert room.used["host"].tolist() == [4, 4, 4]
    assert not room.has_slots(lru.Decision(0, 0, 3, "host", 1, 3))
    # Moved ahead as far as there is room: not to op 3 (op 0 of the next iteration), which is full.
    assert room.earlier(decision, 3).in_op == 4
