import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tensorpager.pager.memory import frame_pool
from tensorpager.pager.memory.frame_pool import FramePool, distinct


def checkerboard(count: int) -> FramePool:
    """Every second frame free, frame 0 first."""
    pool = FramePool(count)
    for frame in range(1, count, 2):
        pool.take(frame, 1)
    return pool


def test_a_new_pool_is_one_free_run() -> None:
    pool = FramePool(10)
    assert (pool.count, pool.free_count, pool.largest_run) == (10, 10, 10)
    assert pool.runs() == [(0, 10)]


def test_an_empty_pool() -> None:
    pool = FramePool(0)
    assert (pool.count, pool.free_count, pool.largest_run, pool.runs()) == (0, 0, 0, [])
    assert pool.allocate(1) is None
    assert pool.allocate_run(1) is None
    assert pool.allocate(0) == []


def test_best_fit_takes_the_shortest_run_that_is_long_enough() -> None:
    pool = FramePool(20)
    pool.take(5, 1)
    pool.take(9, 1)
    assert pool.runs() == [(0, 5), (6, 3), (10, 10)]
    assert pool.allocate(3) == [(6, 3)]
    assert pool.allocate(4) == [(0, 4)]
    assert pool.allocate(6) == [(10, 6)]


def test_of_equal_runs_the_lowest_is_taken() -> None:
    pool = checkerboard(9)
    assert pool.allocate(1) == [(0, 1)]
    assert pool.allocate(1) == [(2, 1)]


def test_scattered_allocation_uses_the_longest_runs_and_best_fit_for_the_rest() -> None:
    pool = FramePool(20)
    for frame in (4, 8, 10, 16):
        pool.take(frame, 1)
    assert pool.runs() == [(0, 4), (5, 3), (9, 1), (11, 5), (17, 3)]
    assert pool.allocate(6) == [(11, 5), (9, 1)]
    assert pool.runs() == [(0, 4), (5, 3), (17, 3)]


def test_too_large_a_request_changes_nothing() -> None:
    pool = checkerboard(10)
    before = pool.runs()
    assert pool.allocate(6) is None
    assert pool.allocate_run(2) is None
    assert pool.runs() == before
    assert pool.free_count == 5


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [0, 2, 1], [1, 0, 2]])
def test_freed_neighbours_merge(order: list[int]) -> None:
    pool = FramePool(6)
    assert pool.allocate(6) == [(0, 6)]
    for piece in order:
        pool.free(2 * piece, 2)
    assert pool.runs() == [(0, 6)]


def test_taking_the_middle_leaves_both_ends() -> None:
    pool = FramePool(10)
    pool.take(3, 4)
    assert pool.runs() == [(0, 3), (7, 3)]
    assert pool.is_free(0, 3)
    assert not pool.is_free(0, 4)
    assert not pool.is_free(6, 2)
    assert not pool.is_free(8, 3)


@pytest.mark.parametrize(("start", "n"), [(0, 1), (3, 2), (4, 3), (2, 6), (5, 1), (0, 10)])
def test_a_double_free_is_our_bug(start: int, n: int) -> None:
    pool = FramePool(10)
    pool.take(3, 4)
    pool.free(4, 2)
    before = pool.runs()
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(start, n)
    assert pool.runs() == before


@pytest.mark.parametrize(("start", "n"), [(-1, 2), (9, 2), (10, 1)])
def test_frames_outside_the_pool_are_our_bug(start: int, n: int) -> None:
    pool = FramePool(10)
    pool.take(0, 10)
    with pytest.raises(AssertionError):
        pool.free(start, n)
    pool.free(0, 10)
    with pytest.raises(AssertionError, match="not all free"):
        pool.take(start, n)


def test_taking_a_used_frame_is_our_bug() -> None:
    pool = FramePool(4)
    pool.take(1, 1)
    with pytest.raises(AssertionError, match="frames 0 to 2 are not all free"):
        pool.take(0, 2)


def test_growing_merges_with_a_free_tail() -> None:
    pool = FramePool(4)
    pool.take(0, 2)
    pool.resize(8)
    assert pool.runs() == [(2, 6)]
    pool.take(2, 6)
    pool.resize(9)
    assert pool.runs() == [(8, 1)]


def test_shrinking_needs_a_free_tail() -> None:
    pool = FramePool(8)
    pool.take(0, 3)
    with pytest.raises(AssertionError, match="not all free"):
        pool.resize(2)
    assert pool.count == 8
    pool.resize(3)
    assert (pool.count, pool.free_count, pool.runs()) == (3, 0, [])


def test_a_hundred_thousand_frames_survive_random_use() -> None:
    rng = random.Random(1)
    pool = FramePool(100_000)
    live: list[tuple[int, int]] = []
    for _ in range(5_000):
        live += pool.allocate(rng.randint(1, 64)) or []
        if rng.random() < 0.45:
            pool.free(*live.pop(rng.randrange(len(live))))
    assert pool.free_count == 100_000 - sum(length for _, length in live)
    for start, length in live:
        pool.free(start, length)
    assert pool.runs() == [(0, 100_000)]


class AgainstABitmap(RuleBasedStateMachine):
    """The model is one bool per frame; expectations are found by scanning it."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = FramePool(16)
        self.free = [True] * 16

    def model_runs(self) -> list[tuple[int, int]]:
        edges = np.flatnonzero(np.diff([False, *self.free, False]))
        return [(int(a), int(b - a)) for a, b in zip(edges[::2], edges[1::2], strict=True)]

    def mark(self, start: int, n: int, free: bool) -> None:
        for frame in range(start, start + n):
            assert self.free[frame] is not free
            self.free[frame] = free

    @rule(n=st.integers(1, 24))
    def allocate(self, n: int) -> None:
        runs = self.model_runs()
        lengths = sorted((length for _, length in runs), reverse=True)
        got = self.pool.allocate(n)
        if n > sum(lengths):
            assert got is None
            return
        fewest = next(k for k in range(1, n + 1) if sum(lengths[:k]) >= n)
        assert got is not None
        assert len(got) == fewest
        assert sum(length for _, length in got) == n
        if fewest == 1:
            assert got[0][0] == min((length, start) for start, length in runs if length >= n)[1]
        for start, length in got:
            self.mark(start, length, False)

    @rule(n=st.integers(1, 24))
    def allocate_run(self, n: int) -> None:
        fits = [(length, start) for start, length in self.model_runs() if length >= n]
        got = self.pool.allocate_run(n)
        assert got == (min(fits)[1] if fits else None)
        if got is not None:
            self.mark(got, n, False)

    @precondition(lambda self: any(self.free))
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        start, length = data.draw(st.sampled_from(self.model_runs()))
        offset = data.draw(st.integers(0, length - 1))
        n = data.draw(st.integers(1, length - offset))
        self.pool.take(start + offset, n)
        self.mark(start + offset, n, False)

    @precondition(lambda self: not all(self.free))
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        start = data.draw(st.sampled_from([i for i, free in enumerate(self.free) if not free]))
        end = start + 1
        while end < len(self.free) and not self.free[end]:
            end += 1
        n = data.draw(st.integers(1, end - start))
        self.pool.free(start, n)
        self.mark(start, n, True)

    @rule(start=st.integers(0, 39), n=st.integers(1, 10))
    def ask(self, start: int, n: int) -> None:
        wanted = self.free[start : start + n]
        assert self.pool.is_free(start, n) == (len(wanted) == n and all(wanted))

    @rule(extra=st.integers(0, 4))
    def grow(self, extra: int) -> None:
        if len(self.free) + extra <= 40:
            self.free += [True] * extra
            self.pool.resize(len(self.free))

    @rule()
    def shrink(self) -> None:
        runs = self.model_runs()
        if runs and sum(runs[-1]) == len(self.free):
            del self.free[runs[-1][0] + runs[-1][1] // 2 :]
            self.pool.resize(len(self.free))

    @invariant()
    def same_as_the_bitmap(self) -> None:
        runs = self.model_runs()
        assert self.pool.runs() == runs
        assert self.pool.count == len(self.free)
        assert self.pool.free_count == sum(self.free)
        assert self.pool.largest_run == max((length for _, length in runs), default=0)


TestAgainstABitmap = AgainstABitmap.TestCase
TestAgainstABitmap.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)


def test_frames_are_taken_if_they_are_free() -> None:
    pool = FramePool(10)
    assert pool.take_if_free(4, 1)
    for start, n in ((3, 2), (4, 1), (8, 3), (10, 1)):
        assert not pool.take_if_free(start, n)
        assert pool.runs() == [(0, 4), (5, 5)]
    assert pool.take_if_free(1, 2)
    assert pool.runs() == [(0, 1), (3, 1), (5, 5)]


@given(st.lists(st.integers(-(1 << 31), (1 << 31) - 1)), st.sampled_from([np.int32, np.int64]))
def test_distinct_numbers_are_numpys(numbers: list[int], dtype: type) -> None:
    several = np.array(numbers, dtype)
    found = distinct(several)
    assert found.tolist() == np.unique(several).tolist()
    assert found.dtype == dtype


@pytest.mark.parametrize(
    "first", [0, 3, frame_pool._MOST_COUNTED - 2, 3 * frame_pool._MOST_COUNTED]
)
def test_consecutive_numbers(first: int) -> None:
    numbers = frame_pool.consecutive(first, 5)
    assert numbers.tolist() == [*range(first, first + 5)]
    assert numbers.dtype == np.int64
    assert frame_pool.are_consecutive(numbers)
    assert not frame_pool.are_consecutive(numbers[::-1])
    assert not frame_pool.are_consecutive(np.append(numbers, first + 6))
    assert frame_pool.expand([(first, 5)]).tolist() == numbers.tolist()
    assert frame_pool.expand([(first, 2), (7, 1)]).tolist() == [first, first + 1, 7]
    assert not len(frame_pool.expand([]))


@pytest.mark.parametrize("count", [0, 1, frame_pool._FEW - 1, frame_pool._FEW, 1000])
def test_values_are_those_that_there_are(count: int) -> None:
    numbers = np.repeat([5, 3, 5, 9, 3], 1 + count // 5)[:count]
    assert frame_pool.values_of(numbers) == set(numbers.tolist())
