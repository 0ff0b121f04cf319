"""Fewer ops: what is kept, what is inside, and updates in slabs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tensorpager.planner.buckets import SLAB_BYTES, UPDATES, bucketed, updates_in_slabs
from tensorpager.planner.lifetimes import live_pages
from tensorpager.planner.trace import READ, READWRITE, WRITE, Trace, make_trace
from tensorpager.planner.trace_file import decode_trace, encode_trace

PAGE = 1 << 16


def chain(length: int = 12):  # type: ignore[no-untyped-def]
    """Activations one from the other, the first is read at the end too; a weight is read by all and
    updated."""
    tensors = [(0, 4 * PAGE, True), *((1 + i, PAGE, False) for i in range(length))]
    ops = [("start", 5.0, [0], [1])]
    ops += [(f"op{i}", 5.0, [i, 0], [i + 1]) for i in range(1, length)]
    ops += [("last", 5.0, [1, length], [1 + length]), ("update.w", 3.0, [0, 1 + length], [0])]
    tensors.append((1 + length, 4 * PAGE, False))
    flags = [True] * length + [False, False]
    host = [None] * (length + 1) + [100.0]
    return make_trace(
        tensors,
        ops,
        page_size=PAGE,
        kinds={0: "parameter", 1 + length: "gradient"},
        rerun=flags,
        host_us=host,
        segments=[(0, 5, "block.0"), (6, 11, "block.1")],
    )


def test_time_peak_blocks_and_choices_are_kept() -> None:
    trace = chain()
    joined = bucketed(trace, 8)
    assert joined.ops == 8
    assert joined.ideal_us == trace.ideal_us
    assert live_pages(joined, PAGE).max() == live_pages(trace, PAGE).max()
    assert np.flatnonzero(~np.isnan(joined.op_host_us)).tolist() == [7]
    assert joined.op_rerun.tolist() == [True] * 6 + [False, False]
    assert [(s.first_op, s.last_op, s.name) for s in joined.segments] == [
        (0, 2, "block.0"), (3, 5, "block.1"),
    ]  # fmt: skip
    assert joined.op_names[0] == "block.0.start"
    decode_trace(encode_trace(joined, "joined"), "joined")  # it is a trace that can be read


def test_updates_of_a_small_model_stay_apart() -> None:
    """The host could else do all of them or none."""
    layers = 64
    tensors = [(i, PAGE, True) for i in range(layers)]
    passes = [(f"op{i}", 5.0, [i], []) for i in range(layers)]
    updates = [(f"update.{i}", 3.0, [i], [i]) for i in range(layers)]
    trace = make_trace(
        tensors,
        passes + updates,
        page_size=PAGE,
        kinds=dict.fromkeys(range(layers), "parameter"),
        host_us=[None] * layers + [10.0] * layers,
    )
    joined = bucketed(trace, 40)
    assert np.count_nonzero(~np.isnan(joined.op_host_us)) == UPDATES
    assert np.nansum(joined.op_host_us) == 10.0 * layers


def test_what_lives_inside_is_no_tensor() -> None:
    """Of the second bucket, op2 and op3: tensor 3 is made and used up in it."""
    joined = bucketed(chain(), 8)
    rows = joined.access_op == 1
    tensors = joined.tensor_ids[joined.access_tensor[rows]].tolist()
    assert dict(zip(tensors, joined.access_mode[rows].tolist())) == {2: READ, 0: READ, 4: WRITE}
    assert "workspace" not in joined.tensor_kinds  # while 3 is there, 2 or 4 is not yet or no more


def test_what_is_only_inside_counts_as_workspace() -> None:
    trace = make_trace(
        [(0, PAGE, True), (1, 6 * PAGE, False), (2, PAGE, False)],
        [("a", 1.0, [0], [1]), ("b", 1.0, [1], [2]), ("c", 1.0, [2, 0], [])]
        + [(name, 1.0, [0], []) for name in "def"],
        page_size=PAGE,
        rerun=[True, True, False, False, False, False],
    )
    joined = bucketed(trace, 4)
    assert joined.op_names == ["a", "c", "e"]
    assert dict(zip(joined.tensor_kinds, joined.tensor_bytes.tolist()))["workspace"] == 6 * PAGE
    assert live_pages(joined, PAGE).tolist() == [8, 2, 1]


def test_a_short_trace_is_as_it_was() -> None:
    trace = chain()
    joined = bucketed(trace, 100)
    assert joined.op_duration_us.tolist() == trace.op_duration_us.tolist()
    assert joined.access_tensor.tolist() == trace.access_tensor.tolist()
    assert joined.access_mode.tolist() == trace.access_mode.tolist()


@pytest.mark.parametrize("shorten", [lambda trace: bucketed(trace, 100), updates_in_slabs])
def test_large_updates_are_in_slabs_of_all_pages(shorten: Callable[[Trace], Trace]) -> None:
    nbytes = 2 * SLAB_BYTES + 5
    trace = make_trace(
        [(0, nbytes, True), (1, 2 * nbytes, True), (2, nbytes, False)],
        [("backward", 1.0, [0], [2]), ("update.w", 3.0, [0, 1, 2], [0, 1])],
        page_size=PAGE,
        kinds={0: "parameter", 1: "optimizer", 2: "gradient"},
        host_us=[None, 30.0],
    )
    joined = shorten(trace)
    assert joined.op_names == ["backward"] + ["update.w"] * 3
    assert joined.op_host_us[1:].tolist() == [10.0] * 3
    for tensor in range(3):
        rows = (joined.access_tensor == tensor) & (joined.access_op > 0)
        first = joined.access_first_page[rows].tolist()
        count = joined.access_page_count[rows].tolist()
        assert first == np.cumsum([0, *count[:-1]]).tolist()
        assert sum(count) == joined.pages(PAGE)[tensor]
    assert joined.access_mode[joined.access_op == 2].tolist()[:2] == [READWRITE, READWRITE]
    decode_trace(encode_trace(joined, "joined"), "joined")
