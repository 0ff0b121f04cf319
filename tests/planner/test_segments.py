"""Segments that run again as a whole: the trace of that, and which ones the planner takes."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tensorpager.planner.hardware import Hardware
from tensorpager.planner.joint.segments import again, choose
from tensorpager.planner.registry import make_plan
from tensorpager.planner.trace import READ, WRITE, Trace, make_trace

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
    found = choose(trace, hardware, plan)
    assert (len(found.blocks) if found else 0) in blocks
    if found is not None:
        assert plan.predicted is not None
        assert found.iteration_us < 0.97 * plan.predicted.iteration_us
        assert set(found.blocks) <= {segment.name for segment in trace.segments}
        assert choose(trace, hardware, plan) == found  # the same again


def test_nothing_is_chosen_of_a_trace_without_segments() -> None:
    trace = make_trace([(0, PAGE, True)], [("op", 1.0, [0], [])], page_size=PAGE)
    plan = make_plan("lp", trace, machine(1e7))
    assert choose(trace, machine(1e7), plan) is None
