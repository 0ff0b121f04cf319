"""Segments and uses, against a count page by page."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorpager.planner.lifetimes import segments
from tensorpager.planner.trace import WRITE, Trace, make_trace

from .examples import examples
from .random_plans import PAGE, random_trace


def rows_of_pages(trace: Trace, page_size: int) -> dict[tuple[int, int], list[int]]:
    """(tensor, page) → the accesses that touch it."""
    found: dict[tuple[int, int], list[int]] = {
        (tensor, page): []
        for tensor, count in enumerate(trace.pages(page_size).tolist())
        for page in range(count)
    }
    for row, (first, end) in enumerate(np.transpose(trace.access_ranges(page_size)).tolist()):
        for page in range(first, end):
            found[int(trace.access_tensor[row]), page].append(row)
    return found


@pytest.mark.parametrize("page_size", [PAGE, PAGE // 2, 3 * PAGE])
@examples(40)
@given(seed=st.integers(0, 10**6))
def test_segments_page_by_page(page_size: int, seed: int) -> None:
    trace = random_trace(Random(seed))
    cut, uses = segments(trace, page_size)
    rows = rows_of_pages(trace, page_size)
    ops: dict[int, list[tuple[int, bool]]] = {n: [] for n in range(len(cut.tensor))}
    for segment, op, writes in zip(uses.segment.tolist(), uses.op.tolist(), uses.writes.tolist()):
        ops[segment].append((op, writes))
    pages = []
    for segment in range(len(cut.tensor)):
        tensor, first = int(cut.tensor[segment]), int(cut.first_page[segment])
        mine = [(tensor, page) for page in range(first, first + int(cut.pages[segment]))]
        pages += mine
        written: dict[int, bool] = {}
        for row in rows[mine[0]]:
            op = int(trace.access_op[row])
            written[op] = written.get(op, False) or bool(trace.access_mode[row] & WRITE)
        assert ops[segment] == sorted(written.items())
        assert all(rows[page] == rows[mine[0]] for page in mine)
    assert pages == list(rows)  # every page once, in order


def test_a_tensor_in_three_parts() -> None:
    whole = make_trace(
        [(7, 10 * PAGE, True), (9, 2 * PAGE, False)],
        [("a", 1.0, [], [7, 9]), ("b", 1.0, [7], []), ("c", 1.0, [9, 7], [])],
        page_size=PAGE,
    )
    assert whole.access_tensor.tolist() == [0, 1, 0, 1, 0]
    trace = replace(
        whole,
        access_first_page=np.array([0, 0, 2, 0, 5]),
        access_page_count=np.array([10, 2, 6, 2, 5]),
    )
    cut, uses = segments(trace, PAGE)
    assert cut.tensor.tolist() == [0, 0, 0, 0, 1]
    assert cut.first_page.tolist() == [0, 2, 5, 8, 0]
    assert cut.pages.tolist() == [2, 3, 3, 2, 2]
    found = list(zip(uses.segment.tolist(), uses.op.tolist(), uses.writes.tolist()))
    first = [(segment, 0, True) for segment in range(5)]
    later = [(1, 1, False), (2, 1, False), (2, 2, False), (3, 2, False), (4, 2, False)]
    assert found == sorted(first + later)
