"""Segments that run again as a whole: the trace of that, and which ones the planner takes."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from tensorpager.planner.errors import PagerError
from tensorpager.planner.hardware import Hardware
from tensorpager.planner.joint.segments import again, choose, plan_steps
from tensorpager.planner.registry import make_plan
from tensorpager.planner.trace import READ, WRITE, Trace, make_trace
from tensorpager.planner.validator import validate

PAGE = 1 << 16


def rows(trace: Trace) -> list[tuple[str, list[tuple[str, int]]]]:
    """Of each op its name, and the names of what it accesses, with how."""
    ends = trace.access_offsets.tolist()
    of_op = [range(a, b) for a, b in pairwise(ends)]
    tensor, mode = trace.access_tensor.tolist(), trace.access_mode.tolist()
    return [
        (name, [(trace.name_of(tensor[row]), mode[row]) for row in of_op[op]])
        for op, name in enumerate(trace.op_names)
    ]


def small() -> Trace:
    """Block b (weight 0) makes tensor 2 from 1, by way of 3."""
    return make_trace(
        [(0, PAGE, True), (1, PAGE, False), (2, 2 * PAGE, False), (3, PAGE, False)],
        [
            ("in", 1.0, [], [1]),
            ("b.1", 2.0, [0, 1], [3]),
            ("b.2", 3.0, [3], [2]),
            ("head", 4.0, [0], []),
            ("back", 5.0, [2, 0], []),
        ],
        page_size=PAGE,
        names={0: "weight", 1: "input", 2: "saved", 3: "between"},
        segments=[(1, 2, "b")],
    )


def test_a_segment_runs_before_what_it_makes_is_used() -> None:
    trace = again(small(), ["b"])
    assert rows(trace) == [
        ("in", [("input", WRITE)]),
        ("b.1", [("weight", READ), ("input", READ), ("between", WRITE)]),
        ("b.2", [("between", READ)]),
        ("head", [("weight", READ)]),
        ("b.1", [("weight", READ), ("input", READ), ("between", WRITE)]),
        ("b.2", [("between", READ), ("saved", WRITE)]),
        ("back", [("saved", READ), ("weight", READ)]),
    ]
    assert trace.op_duration_us.tolist() == [1.0, 2.0, 3.0, 4.0, 2.0, 3.0, 5.0]
    assert trace.tensors == 5  # what lives in the block only is another tensor the second time
    assert trace.first_op[trace.tensor_names.index("saved")] == 5


def test_other_blocks_are_as_they_were() -> None:
    trace = small()
    assert rows(again(trace, [])) == rows(again(trace, ["c"])) == rows(trace)


def deep(layers: int = 12) -> Trace:
    """Each block makes 8 pages from one; backward uses them in the opposite order."""
    tensors = [(0, PAGE, True)]
    forward, backward, segments = [], [], []
    for number in range(layers):
        inputs, saved = 1 + 2 * number, 2 + 2 * number
        tensors += [(inputs, PAGE, False), (saved, 8 * PAGE, False)]
        segments.append((len(forward) + 1, len(forward) + 1, f"h.{number}"))
        forward += [("in", 10.0, [], [inputs]), ("block", 1000.0, [0, inputs], [saved])]
        backward.append(("back", 2000.0, [0, saved, inputs], []))
    return make_trace(tensors, forward + backward[::-1], page_size=PAGE, segments=segments)


def machine(bytes_per_s: float) -> Hardware:
    return Hardware(
        32 * PAGE, 1 << 30, 0, d2h_bytes_per_s=bytes_per_s, h2d_bytes_per_s=bytes_per_s,
        disk_read_bytes_per_s=1e9, disk_write_bytes_per_s=1e9, page_size=PAGE,
    )  # fmt: skip


@pytest.mark.parametrize(("rate", "blocks"), [(1e7, range(6, 13)), (1e10, range(1))])
def test_as_many_as_the_link_is_slow(rate: float, blocks: range) -> None:
    trace, hardware = deep(), machine(rate)
    plan = make_plan("lp", trace, hardware)
    assert plan.predicted is not None
    before = plan.predicted.iteration_us
    found = choose(trace, hardware, before)
    assert (len(found.blocks) if found else 0) in blocks
    if found is not None:
        assert found.iteration_us < 0.97 * before
        assert set(found.blocks) <= {segment.name for segment in trace.segments}
        assert choose(trace, hardware, before) == found  # the same again


def test_nothing_is_chosen_of_a_trace_without_segments() -> None:
    trace = make_trace([(0, PAGE, True)], [("op", 1.0, [0], [])], page_size=PAGE)
    assert choose(trace, machine(1e7), math.inf) is None


# -- steps of the host -----------------------------------------------------------------------------
LAYERS = 6


def steps_of(name: str) -> Trace:
    """A pager's accesses: forward, backward, steps, each with two states, and gradients die."""
    weights, grads = range(LAYERS), range(10, 10 + LAYERS)
    tensors = [(w, 4 * PAGE, True) for w in weights] + [(g, 4 * PAGE, False) for g in grads]
    tensors += [(s, 4 * PAGE, True) for s in (*range(20, 20 + LAYERS), *range(30, 30 + LAYERS))]
    ops: list[tuple[str, float, list[int], list[int]]] = []
    ops += [("access", 1000.0, [w], []) for w in weights]
    ops += [("access", 2000.0, [w], [10 + w]) for w in reversed(weights)]
    first = len(ops)
    ops += [(name, 100.0, [w, 10 + w, 20 + w, 30 + w], [w, 20 + w, 30 + w]) for w in weights]
    ops += [("free", 0.0, [g], []) for g in grads]
    host_us: list[float | None] = [None] * len(ops)
    host_us[first : first + LAYERS] = [300.0] * LAYERS
    return make_trace(tensors, ops, page_size=PAGE, host_us=host_us)


def joint_machine(rate: float, host: int = 200) -> Hardware:
    return Hardware(40 * PAGE, host * PAGE, 0, rate, rate, page_size=PAGE)


def test_steps_go_to_the_host_where_the_link_is_slow() -> None:
    trace, hardware = steps_of("step"), joint_machine(5e8)
    mine, plan = plan_steps(trace, hardware, quick=True)
    moves = make_plan("lp", trace, hardware, quick=True)
    assert plan.predicted is not None
    assert moves.predicted is not None
    assert plan.host_steps
    assert plan.predicted.iteration_us < 0.9 * moves.predicted.iteration_us
    ended = [op for op, accesses in enumerate(rows(mine)) if accesses[0] == "free" and accesses[1]]
    assert len(ended) == LAYERS - len(plan.host_steps)  # of gradients that the device has used
    judged = validate(mine, hardware, plan)
    assert judged.predicted is not None, judged.reason
    assert judged.predicted.iteration_us == pytest.approx(plan.predicted.iteration_us, rel=1e-6)


def test_of_few_pages_none_are_left_free() -> None:
    """With 16 of 40 pages left free it is 92 % of the bound."""
    _, plan = plan_steps(steps_of("step"), joint_machine(2e8), quick=True)
    assert plan.host_steps
    assert plan.bound is not None
    assert plan.bound.percent_of_bound > 95


def test_what_the_hosts_steps_read_may_be_used_after_them() -> None:
    trace, hardware = steps_of("step"), joint_machine(5e8)
    plan = make_plan("joint", trace, hardware)
    assert plan.host_steps
    judged = validate(trace, hardware, plan)
    assert judged.predicted is not None, judged.reason


def test_steps_stay_where_nothing_waits_or_the_host_has_no_memory() -> None:
    trace = steps_of("step")
    _, plan = plan_steps(trace, joint_machine(1e12), quick=True)
    assert plan.predicted is not None
    assert plan.predicted.iteration_us <= 1.02 * trace.ideal_us
    with pytest.raises(PagerError):
        plan_steps(trace, joint_machine(5e8, host=4), quick=True)


def test_steps_that_are_the_hosts_in_any_case() -> None:
    trace = steps_of("host step")
    mine, plan = plan_steps(trace, joint_machine(1e12), quick=True)
    assert sorted(plan.host_steps) == [
        op for op, n in enumerate(trace.op_names) if n == "host step"
    ]
    assert not any(name == "free" and accesses for name, accesses in rows(mine))
