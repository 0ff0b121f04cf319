"""Rows in pages: lookups, and sums of gradients."""

import numpy as np
import pytest
import torch
from page_suite import Backend, Guarded
from paged_table import PAGE, Table

from tensorpager.kernels.pieces import Paged
from tensorpager.kernels.rows import RowGroups, add_rows, gather_rows, group_rows, pages_of_rows

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


@pytest.fixture(
    params=["reference", pytest.param("cuda", marks=pytest.mark.gpu)], ids=["cpu", "cuda"]
)
def backend(request: pytest.FixtureRequest) -> Backend:
    return Backend(request.param)


def _indices(rows: list[int], backend: Backend) -> torch.Tensor:
    return torch.tensor([-1, *rows], device=backend.device)[1:]  # at no multiple of 16 bytes


def _gather(backend: Backend, table: Table, rows: list[int], out: Guarded) -> None:
    indices = _indices(rows, backend)
    dense = out.tensor.view(table.paged.dtype).view(len(rows), table.dense.shape[1])
    before = table.memory.bytes()
    gather_rows(table.paged, indices, dense)
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
    frames = np.array([2, 0, -1], np.int64)
    weight = Paged(arena, frames, PAGE, torch.float32, 2500)
    indices = _indices([1, 102], backend)
    out = torch.full((2, 10), -1.0, device=backend.device)
    gather_rows(weight, indices, out)
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


@cases
def test_pages_of_rows(case: str) -> None:
    (_, columns), rows = CASES[case]
    row_bytes = 4 * columns
    touched = {(row * row_bytes + i) // PAGE for row in rows for i in range(row_bytes)}
    pages = pages_of_rows(np.array(rows, dtype=np.int64), row_bytes, PAGE)
    assert pages.dtype == np.int64
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


# -- sums of gradients -----------------------------------------------------------------------------
FP32, FP16, BF16, FP64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
PADDING = 2
SUM_CASES = {
    # (rows, columns), rows looked up; row 2 is padding
    "aligned": ((40, 64), [3, 39, 0, 3, 17, 2, 16, 3]),
    "one_element": ((2000, 1), [0, 1999, 1024, 1023, 1, 0, 0, 2]),
    "odd": ((60, 101), [10, 59, 10, 20, 40]),
    "straddling": ((30, 100), [10, 20, 10, 29, 9, 10, 10, 10, 10, 10]),
    "straddling_aligned": ((12, 304), [3, 6, 11, 6, 2]),
    "over_a_page": ((7, 1030), [0, 3, 6, 3]),
    "over_two_pages": ((4, 2500), [3, 1, 1]),
}
TYPES = {
    "fp32": (FP32, FP32),
    "bf16": (BF16, BF16),
    "bf16_to_fp32": (BF16, FP32),
    "fp16": (FP16, FP16),
    "fp64": (FP64, FP64),
}
sum_cases = pytest.mark.parametrize("case", SUM_CASES)
types_quick_and_slow = pytest.mark.parametrize(
    "types",
    [n if n in ("fp32", "bf16") else pytest.param(n, marks=pytest.mark.slow) for n in TYPES],
)


def _gradients(rows: list[int], columns: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(rows) + columns)
    return torch.randn(len(rows), columns, generator=generator).to(dtype)


def _in_order(rows: list[int], grad: torch.Tensor) -> dict[int, torch.Tensor]:
    """The oracle: for each row one addition after another, in numpy's fp32 (fp64)."""
    compute = np.float64 if grad.dtype == FP64 else np.float32
    numbers = grad.to(FP64).numpy().astype(compute)
    sums: dict[int, np.ndarray] = {}
    for row, number in zip(rows, numbers, strict=True):
        if row != PADDING:
            sums[row] = sums.get(row, np.zeros(grad.shape[1], compute)) + number
    return {row: torch.from_numpy(sums[row]) for row in sorted(sums)}


def _exact_by_frequency(rows: list[int], grad: torch.Tensor) -> dict[int, torch.Tensor]:
    return {row: total / rows.count(row) for row, total in _in_order(rows, grad.to(FP64)).items()}


def _groups(rows: list[int], backend: Backend) -> RowGroups:
    groups = group_rows(torch.tensor(rows, dtype=torch.int64), padding_idx=PADDING)
    return groups.to(torch.device(backend.device))


def _sum(
    backend: Backend,
    rows: list[int],
    grad: torch.Tensor,
    dtype: torch.dtype,
    by_frequency: bool = False,
) -> torch.Tensor:
    """The sums alone: what is added to a table of zeros."""
    groups = _groups(rows, backend)
    grad = grad.to(backend.device)
    shape = max(rows, default=0) + 1, grad.shape[1]
    numel = shape[0] * shape[1]
    pages = -(-numel * dtype.itemsize // PAGE)
    memory = Guarded(pages * PAGE, backend)
    memory.tensor.zero_()
    target = Paged(memory.tensor, np.arange(pages), PAGE, dtype, numel)
    add_rows(grad, groups, target, by_frequency)
    memory.assert_is(memory.bytes())
    return memory.tensor.view(dtype)[:numel].view(shape)[groups.ids].cpu()


@sum_cases
@types_quick_and_slow
def test_sums_are_in_order(backend: Backend, case: str, types: str) -> None:
    """To the bit, whatever the implementation."""
    (_, columns), rows = SUM_CASES[case]
    grad = _gradients(rows, columns, TYPES[types][0])
    expected = _in_order(rows, grad)
    found = _sum(backend, rows, grad, TYPES[types][1])
    assert torch.equal(found, torch.stack([*expected.values()]).to(TYPES[types][1]))


@sum_cases
@types_quick_and_slow
def test_sums_into_pages(backend: Backend, case: str, types: str) -> None:
    """To the bit; of the pages only the rows that were looked up are read and written."""
    shape, rows = SUM_CASES[case]
    grad = _gradients(rows, shape[1], TYPES[types][0])
    expected = _in_order(rows, grad)
    dtype = TYPES[types][1]
    target = Table(backend, shape, dtype, needed=expected)
    groups, grad = _groups(rows, backend), grad.to(backend.device)
    before = target.memory.bytes()
    add_rows(grad, groups, target.paged)
    compute = FP64 if dtype == FP64 else FP32
    new = {row: (target.dense[row].to(compute) + expected[row]).to(dtype) for row in expected}
    target.assert_is(before, {row: bytes(x.view(torch.uint8).numpy()) for row, x in new.items()})


@pytest.mark.parametrize("dtype", [FP32, FP64], ids=str)
def test_torch_adds_in_the_same_order(dtype: torch.dtype) -> None:
    """What the reference promises: the bits of torch's dense gradient on a CPU."""
    generator = torch.Generator().manual_seed(5)
    indices = torch.randint(50, (4000,), generator=generator)
    grad = torch.randn(4000, 19, generator=generator, dtype=dtype)
    found = _sum(Backend("reference"), indices.tolist(), grad, dtype)
    dense = torch.ops.aten.embedding_dense_backward(grad, indices, 50, PADDING, False)
    groups = _groups(indices.tolist(), Backend("reference"))
    assert torch.equal(found, dense[groups.ids])
    assert torch.equal(found, torch.stack([*_in_order(indices.tolist(), grad).values()]))


@pytest.mark.parametrize("columns", [64, 101])
def test_scaled_by_frequency(backend: Backend, columns: int) -> None:
    """Within one rounding of each addition and one of the scale.

    |found - exact| <= (k + 2) * 2^-24 * (sum of the k gradients' magnitudes) / k
    """
    rows = [3, 7, 3, 2, 3, 3, 9, 7, *[11] * 30]
    grad = _gradients(rows, columns, FP32)
    exact = _exact_by_frequency(rows, grad)
    size = _exact_by_frequency(rows, grad.abs())
    found = _sum(backend, rows, grad, FP32, by_frequency=True)
    for row, total in zip(exact, found.to(FP64), strict=True):
        bound = (rows.count(row) + 2) * 2**-24 * size[row]
        assert ((total - exact[row]).abs() <= bound).all()


def test_scaled_by_frequency_into_pages(backend: Backend) -> None:
    rows = [3, 7, 3, 2, 3, 3, 9, 7]
    grad = _gradients(rows, 64, FP64)
    exact = _exact_by_frequency(rows, grad)
    target = Table(backend, (40, 64), FP64, needed=exact)
    groups, grad = _groups(rows, backend), grad.to(backend.device)
    add_rows(grad, groups, target.paged, True)
    found = torch.cat(target.places()).cpu().view(FP64).view(len(exact), 64)
    for row, total in zip(exact, found, strict=True):
        assert torch.allclose(total, target.dense[row] + exact[row], rtol=0, atol=1e-12)


@pytest.mark.parametrize("by_frequency", [False, True])
def test_bits_of_torch_on_a_cpu(by_frequency: bool) -> None:
    rows = [3, 7, 3, 2, 3, 3, 9, 7]
    grad = _gradients(rows, 101, FP32)
    dense = torch.ops.aten.embedding_dense_backward(
        grad, torch.tensor(rows), 12, PADDING, by_frequency
    )
    found = _sum(Backend("reference"), rows, grad, FP32, by_frequency)
    assert torch.equal(found, dense[[3, 7, 9]])


def test_infinities_and_nans_stay_in_their_rows(backend: Backend) -> None:
    rows = [3, 7, 3, 9]
    grad = torch.ones(4, 8)
    grad[0, 1], grad[2, 1], grad[1, 2], grad[3] = torch.inf, -torch.inf, torch.nan, -0.0
    found = _sum(backend, rows, grad, BF16)
    expected = torch.tensor([[2.0] * 8, [1.0] * 8, [0.0] * 8])
    expected[0, 1] = expected[1, 2] = torch.nan
    assert torch.equal(found.float().nan_to_num(7), expected.nan_to_num(7))


@pytest.mark.parametrize("rows", [[], [2, 2]])
def test_nothing_to_sum(backend: Backend, rows: list[int]) -> None:
    grad = torch.ones(len(rows), 8)
    assert _sum(backend, rows, grad, FP32).shape == (0, 8)
    target = Table(backend, (9, 8), FP32, needed=[])
    before = target.memory.bytes()
    groups, grad = _groups(rows, backend), grad.to(backend.device)
    add_rows(grad, groups, target.paged)
    target.memory.assert_is(before)


def test_groups() -> None:
    groups = group_rows(torch.tensor([[5, 1, 5], [0, 5, 1]]), padding_idx=0)
    assert groups.ids.tolist() == [1, 5]
    assert groups.order.tolist() == [1, 5, 0, 2, 4]
    assert groups.starts.tolist() == [0, 2, 5]
    assert groups.lookups == 6
