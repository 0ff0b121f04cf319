"""Finding the iteration: against a search that tries all periods, and in random streams."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorpager.planner.iteration import (
    ALLOCATION,
    FLOOR,
    Repetition,
    cut_at_least_use,
    encode_events,
    find_balanced,
    repetitions,
)

from .examples import examples


def by_trying(codes: list[int], floor: int) -> set[tuple[int, int, int]]:
    """All maximal stretches with at least two periods of a primitive segment."""
    found = set()
    for period in range(floor, len(codes) // 2 + 1):
        start = 0
        while start + period < len(codes):
            stop = start
            while stop + period < len(codes) and codes[stop] == codes[stop + period]:
                stop += 1
            if stop - start >= period and is_primitive(codes[start : start + period]):
                found.add((start, stop + period, period))
            start = stop + 1
    return found


def is_primitive(segment: list[int]) -> bool:
    size = len(segment)
    return all(size % n or segment != segment[:n] * (size // n) for n in range(1, size))


def find_iteration(codes: np.ndarray, floor: int = FLOOR) -> slice | None:
    """The last whole period of the longest repetition, from where that begins."""
    found = repetitions(codes, floor)
    return found[0].last_iteration(found[0].start) if found else None


@given(st.integers(1, 4).flatmap(lambda n: st.lists(st.integers(0, n), max_size=40)), st.data())
@examples(400)
def test_all_repetitions_are_found(codes: list[int], data: st.DataObject) -> None:
    floor = data.draw(st.integers(1, 4))
    found = repetitions(np.array(codes, np.int64), floor)
    assert {(r.start, r.stop, r.period) for r in found} == by_trying(codes, floor)
    lengths = [r.stop - r.start for r in found]
    assert lengths == sorted(lengths, reverse=True)


@given(
    st.lists(st.integers(0, 9), min_size=16, max_size=60).filter(is_primitive),
    st.integers(2, 6),
    st.lists(st.lists(st.integers(0, 9), max_size=30), max_size=3),
)
@examples(200)
def test_copies_after_warm_up(segment: list[int], copies: int, warm_ups: list[list[int]]) -> None:
    """Warm-ups are shorter than two segments, so nothing in them repeats over a longer stretch."""
    warm_up = [code + 100 for part in warm_ups for code in part][: 2 * len(segment) - 1]
    stream = np.array(warm_up + segment * copies + [200, 201], np.int64)
    found = find_iteration(stream)
    assert found is not None
    assert found.stop - found.start == len(segment)
    assert found.start >= len(warm_up)
    assert sorted(stream[found].tolist()) == sorted(segment)
    assert found.stop <= len(warm_up) + copies * len(segment)


def test_layers_within_an_iteration_do_not_win() -> None:
    layer = list(range(20))
    iteration = layer * 30 + [90, 91, 92] + layer[::-1] * 30
    found = find_iteration(np.array([7, 8, 9] * 50 + iteration * 3))
    assert found is not None
    assert found.stop - found.start == len(iteration)


def test_nothing_repeats() -> None:
    assert find_iteration(np.arange(1000)) is None
    assert find_iteration(np.zeros(0, np.int64)) is None
    assert find_iteration(np.zeros(1000, np.int64)) is None  # its period is below the floor
    assert find_iteration(np.zeros(10, np.int64), floor=1) == slice(9, 10)
    assert find_iteration(np.tile(np.arange(15), 9)) is None
    assert find_iteration(np.tile(np.arange(15), 9), floor=15) == slice(120, 135)


def test_codes_tell_sizes_and_distances() -> None:
    kinds = np.array([ALLOCATION, ALLOCATION, 1, 2, 2, ALLOCATION])
    blocks = np.array([70, 90, 70, 90, 70, 70])
    codes = encode_events(kinds, blocks, np.array([8, 16, 0, 0, 0, 8]))
    assert codes.tolist() == [8 * 3, 16 * 3, 2 * 3 + 1, 2 * 3 + 2, 2 * 3 + 2, 8 * 3]
    assert encode_events(np.zeros(0), np.zeros(0), np.zeros(0)).tolist() == []


def test_codes_do_not_depend_on_addresses() -> None:
    generator = np.random.default_rng(3)
    kinds, sizes = np.tile([0, 0, 1, 1], 50), np.tile([512, 1024, 512, 1024], 50)
    blocks = np.concatenate(
        [np.tile(generator.choice(9999, 2, replace=False), 2) for _ in "x" * 50]
    )
    assert (encode_events(kinds, blocks, sizes).reshape(50, 4)[1:] == [1024, 2048, 5, 5]).all()


def one_iteration() -> tuple[np.ndarray, np.ndarray]:
    """Ten layers that keep 5 bytes each and ten that give them back."""
    forward, backward = [5, 3, -3, *[0] * 17], [2, -2, -5, *[0] * 17]
    change = forward * 10 + [1, -1] + backward * 10
    codes = [*range(20)] * 10 + [50, 51] + [*range(20, 40)] * 10
    return np.array(codes), np.array(change)


def test_balance_tells_iterations_from_layers() -> None:
    codes, change = one_iteration()
    young = np.ones(len(codes), np.int64)
    assert repetitions(codes)[0].period == 20
    assert find_balanced(codes, change, young) is None
    twice = (np.tile(values, 2) for values in (codes, change, young))
    assert find_balanced(*twice) == Repetition(0, 804, 402)


@pytest.mark.parametrize(("nbytes", "age"), [(2, 2), (900, 1404)])
def test_an_optimizer_loop_is_no_iteration(nbytes: int, age: int) -> None:
    """It is balanced and most of the events, but frees little, or what is an iteration old."""
    codes, change = one_iteration()
    loop = np.tile([nbytes, -nbytes], 10)
    codes = np.append(codes, np.tile(np.arange(60, 80), 50))
    change = np.append(change, np.tile(loop, 50))
    ages = np.append(np.ones(402, np.int64), np.tile([0, age], 500))
    longest = repetitions(codes)[0]
    assert (longest.start, longest.stop, longest.period) == (402, 1402, 20)
    assert find_balanced(codes, change, ages) is None
    twice = (np.tile(values, 2) for values in (codes, change, ages))
    assert find_balanced(*twice) == Repetition(0, 2804, 1402)


def test_cut_where_least_is_in_use() -> None:
    change = np.tile([3, -1, -2, 0, 4, -4], 3)
    found = Repetition(1, 18, 6)
    allowed = np.tile([True, False, False, False, True, True], 3)
    assert cut_at_least_use(found, change, allowed) == slice(12, 18)
    allowed[::6] = False  # then 4 is the place
    assert cut_at_least_use(found, change, allowed) == slice(10, 16)


@pytest.mark.parametrize("layers", [1, 60])
def test_a_hundred_thousand_events_take_seconds(layers: int) -> None:
    generator = np.random.default_rng(layers)
    iteration = np.tile(generator.integers(0, 50, 6000 // layers), layers)
    iteration = np.append(iteration, generator.integers(0, 50, 999))
    warm_up = [generator.integers(0, 50, size) for size in (7100, 6900, 7000)]
    stream = np.concatenate([*warm_up, *[iteration] * 12])
    begin = time.process_time()
    found = find_iteration(stream)
    seconds = time.process_time() - begin
    assert found is not None
    assert found.stop - found.start == 6999
    assert seconds < 10  # 0.4 on one core of a small machine; comparing all pairs takes minutes
