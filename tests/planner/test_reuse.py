"""Reuse distances against an LRU device that is run op by op."""

from random import Random

import numpy as np
import pytest

from tensorpager.planner.lifetimes import live_pages, working_set_pages
from tensorpager.planner.reuse import reuses
from tensorpager.planner.trace import Trace, make_trace

from .random_plans import PAGE, page_groups, random_trace


def found_by_running(trace: Trace, device_pages: int) -> list[tuple[int, int, int]]:
    """(tensor, op, pages) of every use that finds its pages, in the third iteration. What was used
    last by the same op leaves together; what is dead holds nothing."""
    groups = [(tensor, end - begin, set(uses)) for tensor, begin, end, uses in page_groups(trace)]
    last: dict[int, int] = {}  # group on the device → when it was used
    found = []
    for step in range(3 * trace.ops):
        op = step % trace.ops
        for group, (tensor, pages, uses) in enumerate(groups):
            if op in uses:
                if group in last and step >= 2 * trace.ops:
                    found.append((tensor, op, pages))
                last[group] = step
        while sum(groups[group][1] for group in last) > device_pages:
            oldest = min(last.values())
            last = {group: when for group, when in last.items() if when > oldest}
        for group, (tensor, _, _) in enumerate(groups):
            if trace.last_op[tensor] == op and not trace.tensor_persistent[tensor]:
                last.pop(group, None)
    return sorted(found)


@pytest.mark.parametrize("block", [1, 3, 64])
def test_an_lru_device_finds_what_is_as_near_as_it_is_large(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tensorpager.planner.reuse._BLOCK", block)
    compared = 0
    for seed in range(60):
        trace = random_trace(Random(seed))
        got = reuses(trace, PAGE)
        need = int(working_set_pages(trace, PAGE).max())
        whole = int(live_pages(trace, PAGE).max())
        for device in {need, (need + whole) // 2, whole - 1, whole}:
            if device < need:
                continue
            which = got.found_in(device)
            rows = zip(got.tensor[which], got.op[which], got.pages[which])
            assert sorted((int(t), int(o), int(p)) for t, o, p in rows) == found_by_running(
                trace, device
            ), (seed, device)
            compared += int(which.sum())
        assert got.found_in(whole).all()
    assert compared > 1000


def test_what_has_died_holds_nothing() -> None:
    """Between the uses of the weight live temporaries of 2 and 3 pages, one after the other, and
    between its last use and the first of the next iteration nothing."""
    trace = make_trace(
        [(0, PAGE, True), (1, 2 * PAGE, False), (2, 3 * PAGE, False)],
        [("a", 1.0, [0], []), ("b", 1.0, [], [1]), ("c", 1.0, [], [2]), ("d", 1.0, [0], [])],
        page_size=PAGE,
    )
    got = reuses(trace, PAGE)
    assert sorted(zip(got.op.tolist(), got.distance_pages.tolist())) == [(0, 1), (3, 4)]


def test_nothing_is_used_again() -> None:
    once = make_trace([(0, 5, False)], [("a", 1.0, [], [0])], page_size=PAGE)
    idle = make_trace([], [("a", 1.0, [], [])], page_size=PAGE)
    for trace in (once, idle):
        assert not len(reuses(trace, PAGE).op)
    always = make_trace([(0, 5, True)], [("a", 1.0, [0], [])], page_size=PAGE)
    assert reuses(always, PAGE).distance_pages.tolist() == [1]


def test_a_device_of_the_peak_finds_everything_in_a_longer_trace() -> None:
    """Several blocks deep, against the definition: a maximum over the ops in between."""
    rng = np.random.default_rng(0)
    ops, tensors = 300, 40
    uses = [sorted(set(rng.integers(0, tensors, 3).tolist())) for _ in range(ops)]
    sizes = rng.integers(1, 9, tensors)
    trace = make_trace(
        [(t, int(sizes[t]) * PAGE, True) for t in range(tensors)],
        [("op", 1.0, mine, []) for mine in uses],
        page_size=PAGE,
    )
    got = reuses(trace, PAGE)
    ids = trace.tensor_ids[got.tensor]
    twice = [*uses, *uses]
    for tensor, op, distance in zip(ids.tolist(), got.op.tolist(), got.distance_pages.tolist()):
        before = next(a for a in range(op + ops - 1, -1, -1) if tensor in twice[a])
        between = {other for at in range(before, op + ops) for other in twice[at]}
        assert distance == sizes[sorted(between)].sum()  # nothing dies: the last op sees them all
