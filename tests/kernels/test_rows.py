"""Lookups of rows in pages, on every implementation."""

import numpy as np
import pytest
import torch
from page_suite import Backend, Guarded
from paged_table import PAGE, Table

from tensorpager.kernels.pieces import Paged
from tensorpager.kernels.rows import gather_rows, pages_of_rows

CASES = {
    # (rows, columns), rows looked up
    "aligned": ((40, 64), [3, 39, 0, 3, 17, 16]),
    "many": ((40, 64), [5 * i % 40 for i in range(70)]),
    "one_element": ((2000, 1), [0, 1999, 1024, 1023, 1]),
    "three_elements": ((1000, 3), [341, 682, 999, 0, 341]),
    "odd": ((60, 101), [10, 59, 20, 40]),
    "straddling": ((30, 100), [10, 20, 29, 9]),
    "straddling_aligned": ((12, 300), [3, 6, 11, 6]),
    "over_a_page": ((7, 1030), [0, 3, 6, 1]),
    "over_two_pages": ((4, 2500), [3, 1, 1]),
    "a_page": ((4, 1024), [2, 0]),
    "one_row": ((9, 12), [8]),
}
cases = pytest.mark.parametrize("case", CASES)


def _indices(rows: list[int], backend: Backend) -> torch.Tensor:
    return torch.tensor([-1, *rows], device=backend.device)[1:]  # at no multiple of 16 bytes


def _gather(backend: Backend, table: Table, rows: list[int], out: Guarded) -> None:
    indices = _indices(rows, backend)
    dense = out.tensor.view(table.paged.dtype).view(len(rows), table.dense.shape[1])
    before = table.memory.bytes()
    backend.run(
        gather_rows,
        *(table.paged, indices, dense),
        reads=[table.frame_of, indices, *table.places()],
        writes=[out.tensor],
    )
    out.assert_is(b"".join(table.row(row) for row in rows))
    table.memory.assert_is(before)


@cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_rows_arrive(backend: Backend, case: str, dtype: torch.dtype) -> None:
    shape, rows = CASES[case]
    table = Table(backend, shape, dtype, needed=rows)
    _gather(backend, table, rows, Guarded(len(rows) * table.row_bytes, backend, seed=9))


@pytest.mark.parametrize("dtype", [torch.float64, torch.uint8, torch.float16, torch.int64], ids=str)
def test_other_types(backend: Backend, dtype: torch.dtype) -> None:
    table = Table(backend, (90, 75), dtype, needed=[89, 54, 55])
    _gather(backend, table, [54, 89, 55, 54], Guarded(4 * table.row_bytes, backend))


def test_unaligned_result(backend: Backend) -> None:
    table = Table(backend, (12, 300), torch.float32, needed=[3, 4])
    _gather(backend, table, [4, 3], Guarded(2 * table.row_bytes, backend, offset=4))


def test_hand_made(backend: Backend) -> None:
    """Rows of ten; row 102 has four elements at the end of page 0 and six on page 1."""
    arena = torch.arange(3072, dtype=torch.float32, device=backend.device).view(torch.uint8)
    frames = np.array([2, 0, -1], np.int32)
    weight = Paged(arena, frames, PAGE, torch.float32, 2500)
    indices = _indices([1, 102], backend)
    out = torch.full((2, 10), -1.0, device=backend.device)
    backend.run(
        gather_rows,
        *(weight, indices, out),
        reads=[torch.from_numpy(frames), indices, arena],
        writes=[out],
    )
    assert out.tolist() == [
        [2058, 2059, 2060, 2061, 2062, 2063, 2064, 2065, 2066, 2067],
        [3068, 3069, 3070, 3071, 0, 1, 2, 3, 4, 5],
    ]


def test_nothing_to_look_up(backend: Backend) -> None:
    table = Table(backend, (9, 12), torch.float32, needed=[])
    out = Guarded(0, backend)
    _gather(backend, table, [], out)


def test_table_is_copied_up_if_not_given(backend: Backend) -> None:
    table = Table(backend, (12, 300), torch.float32, needed=[3, 11])
    out = torch.empty(2, 300, device=backend.device)
    gather_rows(table.paged, _indices([11, 3], backend), out)
    assert torch.equal(out.cpu(), table.dense[[11, 3]])


@pytest.mark.interpreter
def test_checker_sees_a_row_that_was_not_looked_up() -> None:
    """The lane proves something: with one row fewer allowed, the same lookup fails."""
    backend = Backend("interpreter")
    table = Table(backend, (40, 64), torch.float32, needed=[3, 17])
    table.needed = [3]
    with pytest.raises(AssertionError, match="not the kernel's"):
        _gather(backend, table, [3, 17], Guarded(2 * table.row_bytes, backend))


@pytest.fixture
def plain() -> Backend:
    return Backend("reference")


def test_pages_away_are_an_error(plain: Backend) -> None:
    table = Table(plain, (40, 64), torch.float32, needed=[0])
    out = Guarded(2 * table.row_bytes, plain)
    before = out.bytes()
    dense = out.tensor.view(torch.float32).view(2, 64)
    with pytest.raises(ValueError, match=r"row 39 is on page 2, which is in frame -1, .* bring"):
        plain.run(gather_rows, table.paged, torch.tensor([0, 39]), dense, reads=[], writes=[])
    out.assert_is(before)


@pytest.mark.parametrize("row", [-1, 40])
def test_rows_outside_the_table_are_an_error(plain: Backend, row: int) -> None:
    table = Table(plain, (40, 64), torch.float32, needed=range(40))
    out = torch.empty(2, 64)
    with pytest.raises(IndexError, match=rf"row {row} is looked up, .* rows 0 to 39"):
        plain.run(gather_rows, table.paged, torch.tensor([0, row]), out, reads=[], writes=[])


@pytest.mark.parametrize(
    ("indices", "out", "message"),
    [
        (torch.zeros(2, dtype=torch.int32), torch.empty(2, 64), r"pass indices.long\(\)"),
        (torch.zeros(3, dtype=torch.int64), torch.empty(2, 64), r"pass \(2,\)"),
        (torch.zeros(4, dtype=torch.int64)[::2], torch.empty(2, 64), r"stride \(2,\)"),
        (torch.zeros(2, dtype=torch.int64), torch.empty(2, 64).double(), "float64.*must agree"),
        (torch.zeros(2, dtype=torch.int64), torch.empty(2, 63), "whole rows of 63"),
        (torch.zeros(2, dtype=torch.int64), torch.empty(64, 2).t(), r"pass \[n, D\]"),
        (torch.zeros(2, dtype=torch.int64), torch.empty(2, 8, 8), r"pass \[n, D\]"),
    ],
)
def test_wrong_arguments(
    plain: Backend, indices: torch.Tensor, out: torch.Tensor, message: str
) -> None:
    table = Table(plain, (40, 64), torch.float32, needed=range(40))
    with pytest.raises(ValueError, match=message):
        gather_rows(table.paged, indices, out)


def test_frame_table_of_another_length(plain: Backend) -> None:
    table = Table(plain, (40, 64), torch.float32, needed=range(40))
    short = Paged(table.paged.arena, table.paged.frames[:-1], PAGE, torch.float32, 40 * 64)
    with pytest.raises(ValueError, match="3 pages, but frames has 2"):
        gather_rows(short, torch.tensor([0]), torch.empty(1, 64))


@cases
def test_pages_of_rows(case: str) -> None:
    (_, columns), rows = CASES[case]
    row_bytes = 4 * columns
    touched = {(row * row_bytes + i) // PAGE for row in rows for i in range(row_bytes)}
    pages = pages_of_rows(np.array(rows, dtype=np.int64), row_bytes, PAGE)
    assert pages.dtype == np.int32
    assert pages.tolist() == sorted(touched)


def test_pages_of_many_rows_in_any_shape() -> None:
    indices = np.array([[3, 0], [3, 1000]], dtype=np.int64)
    assert pages_of_rows(indices, 8 * PAGE, PAGE).tolist() == [
        *range(8),
        *range(24, 32),
        *range(8000, 8008),
    ]


def test_pages_of_no_rows() -> None:
    assert pages_of_rows(np.empty((0, 4), dtype=np.int64), 400, PAGE).tolist() == []


def test_pages_of_a_row_below_zero() -> None:
    with pytest.raises(IndexError, match="row -2"):
        pages_of_rows(np.array([0, -2]), 400, PAGE)
