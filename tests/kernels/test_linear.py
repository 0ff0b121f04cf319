"""linear_forward on every implementation."""

import pytest
import torch
from linear_suite import (
    LONG_ROWS,
    PAGE,
    Dense,
    LinearCase,
    PagedWeight,
    assert_product,
    linear_cases,
    random,
)
from page_suite import Backend

from tensorpager.kernels import launch
from tensorpager.kernels.linear import (
    linear_forward,
    linear_forward_reference,
    reads_directly,
)
from tensorpager.kernels.linear_tile import Tile
from tensorpager.kernels.paged_matrix import PagedMatrix, row_stretches


def _operands(case: LinearCase) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, weight, bias."""
    return (
        random(case.m, case.k, dtype=case.dtype, seed=1),
        random(case.n, case.k, dtype=case.dtype, seed=2),
        random(case.n, dtype=case.dtype, seed=3),
    )


@linear_cases
@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no_bias"])
def test_product(backend: Backend, case: LinearCase, biased: bool) -> None:
    x, weight, bias = _operands(case)
    paged, dense = PagedWeight(weight, backend), Dense(x, backend, case.shift)
    out = Dense(torch.full((case.m, case.n), torch.nan, dtype=case.dtype), backend, case.shift)
    added = bias.to(backend.device) if biased else None

    backend.run(
        linear_forward,
        *(dense.tensor, paged.matrix, out.tensor, added),
        reads=[*paged.memory(), dense.memory.tensor, *([added] if biased else [])],
        writes=[out.memory.tensor],
    )

    assert_product(out.tensor, (x, weight.t()), bias if biased else 0.0, backend)
    out.assert_guarded()
    dense.assert_unchanged()
    paged.arena.assert_is(paged.before)


@pytest.mark.parametrize(
    ("case", "rows"),
    [
        (LinearCase(5, 80, 64, torch.float32), (16, 48)),  # whole pages
        (LinearCase(5, 80, 64, torch.bfloat16), (37, 71)),
        (LinearCase(3, 60, 96, torch.float32), (11, 43)),
        (LinearCase(3, 90, 50, torch.float16), (41, 83)),
        (LinearCase(3, 90, 50, torch.float16), (82, 90)),
    ],
    ids=str,
)
def test_a_slab_needs_only_its_pages(
    backend: Backend, case: LinearCase, rows: tuple[int, int]
) -> None:
    x, weight, bias = _operands(case)
    weight[: rows[0]] = weight[rows[1] :] = torch.nan
    paged, dense = PagedWeight(weight, backend, rows), Dense(x, backend)
    out = Dense(torch.full((case.m, case.n), 7.0, dtype=case.dtype), backend)
    bias = bias.to(backend.device)
    backend.run(
        linear_forward,
        *(dense.tensor, paged.matrix, out.tensor, bias, rows),
        reads=[*paged.memory(rows), dense.memory.tensor, bias],
        writes=[out.memory.tensor],
    )
    got, here = out.tensor.cpu(), slice(*rows)
    assert_product(got[:, here], (x, weight[here].t()), bias[here].cpu(), backend)
    assert got[:, : rows[0]].eq(7).all()
    assert got[:, rows[1] :].eq(7).all()
    out.assert_guarded()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_single_precision_output(backend: Backend, dtype: torch.dtype) -> None:
    x, weight, bias = _operands(LinearCase(5, 45, 64, dtype))
    paged, out = PagedWeight(weight, backend), torch.empty(5, 45, device=backend.device)
    x_there, bias_there = x.to(backend.device), bias.float().to(backend.device)
    backend.run(
        linear_forward,
        *(x_there, paged.matrix, out, bias_there),
        reads=[*paged.memory(), x_there, bias_there],
        writes=[out],
    )
    assert_product(out, (x, weight.t()), bias, backend)


@pytest.mark.interpreter
def test_long_rows_in_large_tiles() -> None:
    backend = Backend("interpreter")
    x, weight, _ = _operands(LONG_ROWS)
    paged, out = PagedWeight(weight, backend), torch.empty(2, 3)
    linear_forward(x, paged.matrix, out, tile=Tile(16, 16, 512, 4, 1))
    assert_product(out, (x, weight.t()), 0.0, backend)


def test_bfloat16_is_rounded_to_nearest_even(backend: Backend) -> None:
    # 1 + 2**-8 and 1 + 3 * 2**-8 lie half way; cut short, both last digits would differ.
    x = torch.tensor([[1.0, 2.0**-8]], dtype=torch.bfloat16)
    weight = torch.tensor([[1.0, 1.0], [1.0, 3.0], [1.0, 1.5]], dtype=torch.bfloat16)
    paged = PagedWeight(weight, backend)
    x, out = x.to(backend.device), torch.empty(1, 3, dtype=torch.bfloat16, device=backend.device)
    backend.run(linear_forward, x, paged.matrix, out, reads=[*paged.memory(), x], writes=[out])
    assert out.tolist() == [[1.0, 1.015625, 1.0078125]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("columns", [64, 50])
def test_reference_is_torch_where_frames_are_consecutive(dtype: torch.dtype, columns: int) -> None:
    x, weight, bias = _operands(LinearCase(9, 130, columns, dtype))
    paged = PagedWeight(weight, Backend("reference"), consecutive=True)
    out = torch.empty(9, 130, dtype=dtype)
    linear_forward_reference(x, paged.matrix, out, bias)
    assert torch.equal(out, torch.nn.functional.linear(x, weight, bias))
    linear_forward_reference(x, paged.matrix, out)
    assert torch.equal(out, torch.nn.functional.linear(x, weight))


def test_bits_are_stable(backend: Backend) -> None:
    x, weight, bias = _operands(LinearCase(9, 90, 50, torch.float32))
    results = []
    for _ in range(2):
        paged, out = PagedWeight(weight, backend), torch.empty(9, 90, device=backend.device)
        there = x.to(backend.device), bias.to(backend.device)
        backend.run(
            linear_forward,
            *(there[0], paged.matrix, out, there[1]),
            reads=[*paged.memory(), *there],
            writes=[out],
        )
        results.append(out.cpu())
    assert torch.equal(*results)


@pytest.mark.parametrize(("m", "n", "k"), [(0, 5, 64), (3, 0, 64), (3, 5, 0), (0, 0, 0)])
def test_empty(backend: Backend, m: int, n: int, k: int) -> None:
    x, weight, bias = _operands(LinearCase(m, n, k, torch.float32))
    paged = PagedWeight(weight, backend)
    there = x.to(backend.device), bias.to(backend.device)
    out = torch.full((m, n), torch.nan, device=backend.device)
    reads = [*paged.memory(), *there]
    args = (there[0], paged.matrix, out, there[1])
    backend.run(linear_forward, *args, reads=reads, writes=[out])
    assert torch.equal(out.cpu(), bias.expand(m, n))
    backend.run(linear_forward, *args[:3], None, (n, n), reads=reads, writes=[out])
    assert torch.equal(out.cpu(), bias.expand(m, n))


def test_stretches_are_views_of_whole_rows() -> None:
    weight = random(50, 96, dtype=torch.float32, seed=0)  # 10 2/3 rows in a page, 5 pages
    paged = PagedWeight(weight, Backend("reference"), consecutive=True)
    paged.matrix.frame_of[:] = torch.tensor([1, 2, 3, 6, 7])
    arena = paged.arena.tensor.view(-1, PAGE)
    arena[[6, 7]] = arena[[4, 5]].clone()
    found = list(row_stretches(paged.matrix, (3, 50)))
    # Page 3 begins at row 32 exactly: 4096 * 3 / 384.
    assert [(each.begin, each.end, len(each.parts)) for each in found] == [(3, 32, 1), (32, 50, 1)]
    paged.matrix.frame_of[:] = torch.tensor([1, 2, 8, 6, 7])
    arena[8] = arena[3].clone()
    found = list(row_stretches(paged.matrix, (0, 50)))
    assert [(each.begin, each.end, len(each.parts)) for each in found] == [
        (0, 21, 1),
        (21, 22, 2),
        (22, 32, 1),
        (32, 50, 1),
    ]
    assert torch.equal(torch.cat([each.dense() for each in found]), weight)


_X, _OUT = torch.zeros(3, 64), torch.zeros(3, 40)


def _matrix(**change: object) -> PagedMatrix:
    good = {
        "arena": torch.zeros(4 * PAGE, dtype=torch.uint8),
        "frame_of": torch.tensor([3, 0, 2], dtype=torch.int32),
        "page_bytes": PAGE,
        "dtype": torch.float32,
        "rows": 40,
        "columns": 64,
    }
    return PagedMatrix(**good | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": torch.float64}, "dtype is torch.float64; use one of torch.float32"),
        ({"rows": 50}, "has 12800 bytes, 4 pages of 4096, but frame_of has 3 entries"),
        ({"rows": -1}, "the matrix is -1 x 64"),
        ({"page_bytes": 100}, "page_bytes is 100; use a power of two"),
    ],
)
def test_bad_matrices_are_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _matrix(**change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": _X[:, :63]}, r"x has shape \(3, 63\); pass \(3, 64\)"),
        ({"x": _X.half()}, "x is torch.float16, the matrix torch.float32; pass torch.float32"),
        ({"x": torch.zeros(64, 3).t()}, r"x has strides \(1, 3\).*pass x.contiguous"),
        ({"x": _X.to("meta")}, "x is on meta, the arena on cpu"),
        ({"x": torch.zeros(64)}, r"x has shape \(64,\)"),
        ({"out": _OUT[:2]}, r"out has shape \(2, 40\); pass \(3, 40\)"),
        ({"out": torch.zeros(1, 40).expand(3, 40)}, "out has strides .*not overlap"),
        ({"out": _OUT.half()}, "out is torch.float16"),
        ({"bias": torch.zeros(39)}, r"bias has shape \(1, 39\); pass \(1, 40\)"),
        ({"bias": torch.zeros(80)[::2]}, r"bias has shape \(40,\) and stride \(2,\)"),
        ({"rows": (5, 41)}, r"rows is \[5, 41\), but the matrix has 40 rows"),
        ({"rows": (5, 4)}, r"rows is \[5, 4\)"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, object], message: str) -> None:
    good = {"x": _X, "weight": _matrix(), "out": _OUT}
    with pytest.raises(ValueError, match=message):
        linear_forward(**good | change)


@pytest.mark.skipif(launch.INTERPRETED, reason="the interpreter trusts the table")
def test_a_page_off_the_device_is_named_on_a_cpu() -> None:
    weight = _matrix(frame_of=torch.tensor([3, -1, 2], dtype=torch.int32))
    with pytest.raises(ValueError, match="page 1 is in frame -1, but the arena has 4 frames"):
        linear_forward(_X, weight, _OUT)
    linear_forward(_X, weight, _OUT, rows=(0, 16))
    linear_forward(_X, weight, _OUT, rows=(32, 40))


def test_the_kernel_is_taken_for_few_rows_of_whole_vectors() -> None:
    half = torch.bfloat16
    assert [m for m in (1, 512, 1024, 2048) if reads_directly(m, 4096, half)] == [1, 512, 1024]
    assert not reads_directly(16, 4097, half)
    assert not reads_directly(1, 64, half, device_type="cpu")
