from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorpager.planner import offsets as pool
from tensorpager.planner.offsets import Buffers, Packing
from tensorpager.planner.packing.heap import Heap
from tensorpager.planner.trace import make_trace

from .examples import examples

MIB = 1 << 20
GAP = (
    *((0, 1, 4), (0, 1, 1), (1, 2, 4), (2, 3, 2), (1, 4, 1)),
    *((3, 4, 1), (4, 5, 2), (2, 5, 2), (3, 6, 1), (5, 6, 4)),
)
Boxes = list[tuple[int, int, int, int]]
ALLOCATORS: list[Callable[[Buffers], Packing]] = [
    pool.pack,
    pool.smartpool,
    lambda buffers: pool.smartpool(buffers, best=False),
    pool.best_fit,
    pool.cnmem,
    pool.caching_allocator,
]


def buffers(*rows: tuple[int, int, int]) -> Buffers:
    """From (lower, upper, size)."""
    table = np.array(rows, np.int64).reshape(-1, 3)
    return Buffers([str(n) for n in range(len(rows))], table[:, 0], table[:, 1], table[:, 2])


def some_buffers(most: int, times: int = 12, size: int = 9) -> st.SearchStrategy[Buffers]:
    row = st.tuples(st.integers(0, times - 1), st.integers(1, times), st.integers(1, size)).map(
        lambda row: (row[0], row[0] + row[1], row[2])
    )
    return st.lists(row, min_size=1, max_size=most).map(lambda rows: buffers(*rows))


@examples(60)
@given(some_buffers(30))
@pytest.mark.parametrize("allocate", ALLOCATORS)
def test_every_packing_holds_and_is_no_smaller_than_the_bound(
    allocate: Callable[[Buffers], Packing], given: Buffers
) -> None:
    packing = allocate(given)
    assert packing.offsets is not None
    assert pool.check(given, packing.offsets, packing.footprint_bytes) == []
    assert packing.footprint_bytes >= given.peak_live_bytes
    assert packing.optimal or packing.footprint_bytes > given.peak_live_bytes


@examples(60)
@given(some_buffers(40))
def test_ours_is_never_worse_than_smartpool(given: Buffers) -> None:
    ours = pool.pack(given, seconds=2.0).footprint_bytes
    assert ours <= pool.smartpool(given).footprint_bytes
    assert ours <= pool.smartpool(given, best=False).footprint_bytes


def test_the_search_ends_at_the_bound_at_the_capacity_or_in_time() -> None:
    """5 bytes live at every time, and no way to lay them out needs less than 6."""
    given = buffers(*GAP)
    assert given.live_bytes.tolist() == [5, 5, 5, 5, 5, 5, 0]
    packing = pool.pack(given)
    assert packing.footprint_bytes >= 6
    assert not packing.optimal
    first = pool.smartpool(given).footprint_bytes
    assert pool.pack(given, seconds=0.0).footprint_bytes == first
    assert pool.pack(given, capacity=first).footprint_bytes == first
    easy = buffers((0, 2, 3), (1, 3, 2), (2, 4, 3))
    assert pool.pack(easy).footprint_bytes == 5
    assert pool.pack(easy).optimal


def test_the_check_names_what_is_wrong() -> None:
    two = buffers((0, 5, 10), (4, 6, 10))
    assert pool.check(two, np.array([0, 10]), 20) == []
    assert pool.check(two, np.array([0, 9]), 20) == ["at time 4 buffers 0 and 1 share [9, 10)"]
    assert pool.check(two, np.array([0, 10]), 19) == ["buffer 1 lies in [10, 20), not in [0, 19)"]
    assert pool.check(two, np.array([0]), 20) == ["1 offsets for 2 buffers"]
    after = buffers((0, 5, 10), (5, 6, 10))
    assert pool.check(after, np.array([0, 0]), 10) == []


@examples(100)
@given(some_buffers(12), st.data())
def test_the_check_finds_every_clash(given: Buffers, data: st.DataObject) -> None:
    offsets = np.array([data.draw(st.integers(0, 40)) for _ in given.ids])
    ends, count = offsets + given.size, len(given)
    clash = any(
        given.lower[a] < given.upper[b]
        and given.lower[b] < given.upper[a]
        and offsets[a] < ends[b]
        and offsets[b] < ends[a]
        for a in range(count)
        for b in range(a)
    )
    assert bool(pool.check(given, offsets, 1000)) == clash


def test_smartpool_takes_the_hole_that_fits_best() -> None:
    """What ends at time 3 leaves holes of 7 bytes at 12 and of 5 bytes at 25; then come 4 bytes."""
    given = buffers((0, 9, 12), (0, 3, 7), (0, 9, 6), (0, 3, 5), (0, 9, 4), (4, 9, 4))
    best = pool.smartpool(given).offsets
    first = pool.smartpool(given, best=False).offsets
    assert best is not None
    assert first is not None
    assert best.tolist() == [0, 12, 19, 25, 30, 25]
    assert first.tolist() == [0, 12, 19, 25, 30, 12]


def test_the_caching_allocator_reserves_as_pytorch_does() -> None:
    def reserved(*rows: tuple[int, int, int]) -> int:
        return pool.caching_allocator(buffers(*rows)).footprint_bytes

    assert reserved((0, 1, 1)) == 2 * MIB  # the small pool
    assert reserved((0, 1, MIB), (0, 1, MIB)) == 2 * MIB  # two in one segment
    assert reserved((0, 1, MIB), (0, 1, MIB), (0, 1, 1)) == 4 * MIB
    assert reserved((0, 1, MIB + 1)) == 20 * MIB  # a segment of the middle size
    assert reserved((0, 1, 6 * MIB), (0, 1, 6 * MIB), (0, 1, 6 * MIB)) == 20 * MIB
    assert reserved((0, 1, 10 * MIB)) == 10 * MIB  # one of its own, in whole 2 MiB
    assert reserved((0, 1, 11 * MIB)) == 12 * MIB
    assert reserved((0, 1, 16 * MIB), (1, 2, 15 * MIB), (1, 2, MIB + 1)) == 36 * MIB  # no split
    assert reserved((0, 1, 16 * MIB), (1, 2, 14 * MIB), (1, 2, MIB + 1)) == 16 * MIB  # split
    assert reserved((0, 1, 16 * MIB), (1, 2, MIB)) == 18 * MIB  # pools do not mix


def test_cnmem_never_joins_blocks_of_two_requests_and_best_fit_does() -> None:
    grown = buffers((0, 2, 512), (0, 2, 512), (2, 4, 1024))
    assert pool.cnmem(grown).footprint_bytes == 2048
    assert pool.best_fit(grown).footprint_bytes == 1024
    assert pool.cnmem(buffers((0, 1, 1))).footprint_bytes == 512
    assert pool.best_fit(buffers((0, 2, 4), (0, 1, 3), (1, 2, 5))).footprint_bytes == 9


def test_pages_lose_only_the_last_page_of_each() -> None:
    assert pool.pages(buffers((0, 2, 1), (1, 3, 2 * MIB))).footprint_bytes == 4 * MIB
    assert pool.pages(buffers((0, 2, 1), (2, 3, 2 * MIB))).footprint_bytes == 2 * MIB


def test_a_heap_joins_free_neighbours_within_a_segment() -> None:
    heap = Heap()
    heap.grow(10, new_segment=True)
    heap.grow(10, new_segment=True)
    assert heap.take(11) is None
    assert heap.take(10) == (0, 10)
    for address in (0, 6, 3):
        heap.give(address, 3)
    heap.give(9, 1)
    assert heap.take(10) == (0, 10)
    assert heap.take(10) == (10, 10)
    assert heap.take(1) is None


def test_a_trace_becomes_buffers_in_aligned_bytes() -> None:
    trace = make_trace(
        [(7, 1000, True), (8, 512, False), (9, 513, False)],
        [("a", 1.0, [7], [8]), ("b", 1.0, [8], [9]), ("c", 1.0, [], [9])],
        page_size=4096,
    )
    made = pool.buffers_of(trace)
    assert made.ids == ["7", "8", "9"]
    assert made.lower.tolist() == [0, 0, 1]
    assert made.upper.tolist() == [3, 2, 3]
    assert made.size.tolist() == [1024, 512, 1024]
    assert made.peak_live_bytes == 2560
    assert pool.pack(made).footprint_bytes == 2560


def test_nothing_needs_nothing() -> None:
    for packing in pool.compare(buffers()):
        assert packing.footprint_bytes == 0
        assert packing.optimal


def test_csv_files_come_back_as_written(tmp_path: Path) -> None:
    path = tmp_path / "buffers.csv"
    path.write_text("size,id,upper,note,lower\n4,a,3,x,0\n\n5,b,9,y,-3\n")
    read = pool.read_csv(path)
    assert (read.ids, read.lower.tolist(), read.upper.tolist()) == (["a", "b"], [0, -3], [3, 9])
    pool.write_csv(path, read, np.array([5, 0]))
    assert path.read_text() == "id,lower,upper,size,offset\na,0,3,4,5\nb,-3,9,5,0\n"
    assert pool.read_csv(path).size.tolist() == [4, 5]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "line 1: no column id, lower, upper, size"),
        ("id,lower,size\n", "line 1: no column upper"),
        ("id,lower,upper,size\na,1,2,3\nb,1,x,3\n", "line 3: lower, upper, size = 1, x, 3"),
        ("id,lower,upper,size\na,1,2\n", "line 2: 3 values"),
        ("id,lower,upper,size\na,2,2,3\n", "line 2: buffer a has upper=2"),
        ("id,lower,upper,size\na,1,2,0\n", "size=0"),
        ("id,lower,upper,size\na,1,2,99999999999999999999\n", "below 2⁶²"),
        ("id,lower,upper,size\na,1,2,3\na,1,2,3\n", "two buffers have the id 'a'"),
        ("id,lower,upper,size\na,1,2,3\0\n", "line"),
    ],
)
def test_a_bad_csv_file_is_refused_by_place_and_reason(
    tmp_path: Path, content: str, reason: str
) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(content)
    with pytest.raises(pool.BuffersError, match=reason) as caught:
        pool.read_csv(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_csv_file_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(pool.BuffersError, match="cannot be read"):
        pool.read_csv(tmp_path / "none.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(pool.BuffersError, match=r"binary\.csv is not a CSV file"):
        pool.read_csv(tmp_path / "binary.csv")
