"""linear_input_grad and linear_weight_grad on every implementation."""

import pytest
import torch
from linear_suite import (
    Dense,
    LinearCase,
    PagedWeight,
    assert_product,
    linear_cases,
    random,
)
from page_suite import Backend

from tensorpager.kernels.linear import linear_forward
from tensorpager.kernels.linear_grad import (
    linear_input_grad,
    linear_input_grad_reference,
    linear_weight_grad,
    linear_weight_grad_reference,
)


def _operands(case: LinearCase) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output gradient, x, weight."""
    return (
        random(case.m, case.n, dtype=case.dtype, seed=1),
        random(case.m, case.k, dtype=case.dtype, seed=2),
        random(case.n, case.k, dtype=case.dtype, seed=3),
    )


@linear_cases
def test_input_grad(backend: Backend, case: LinearCase) -> None:
    grad, _, weight = _operands(case)
    paged, dense = PagedWeight(weight, backend), Dense(grad, backend, case.shift)
    nan = torch.full((case.m, case.k), torch.nan, dtype=case.dtype)
    out = Dense(nan, backend, case.shift)
    backend.run(
        linear_input_grad,
        *(dense.tensor, paged.matrix, out.tensor),
        reads=[*paged.memory(), dense.memory.tensor],
        writes=[out.memory.tensor],
    )
    assert_product(out.tensor, (grad, weight), 0.0, backend)
    out.assert_guarded()
    dense.assert_unchanged()
    paged.arena.assert_is(paged.before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("columns", [64, 50])
def test_slabs_add_up_in_single_precision(
    backend: Backend, dtype: torch.dtype, columns: int
) -> None:
    n, slabs = 90, [(0, 41), (41, 42), (42, 42), (42, 90)]
    grad, start, weight = _operands(LinearCase(5, n, columns, dtype))
    out, dense = Dense(start.float(), backend), Dense(grad, backend)
    for rows in slabs:
        paged = PagedWeight(weight, backend, rows)
        backend.run(
            linear_input_grad,
            *(dense.tensor, paged.matrix, out.tensor, rows, True),
            reads=[*paged.memory(rows), dense.memory.tensor, out.memory.tensor],
            writes=[out.memory.tensor],
        )
    # The bound of one product covers the three roundings between slabs: n is over 40 larger.
    assert_product(out.tensor, (grad, weight), start, backend)
    out.assert_guarded()


def test_what_lies_outside_a_slab_does_not_matter(backend: Backend) -> None:
    grad, _, weight = _operands(LinearCase(3, 90, 50, torch.float32))
    rows = (41, 83)
    weight[: rows[0]] = weight[rows[1] :] = torch.nan
    grad[:, : rows[0]] = grad[:, rows[1] :] = torch.inf
    paged, dense = PagedWeight(weight, backend, rows), Dense(grad, backend)
    out = torch.empty(3, 50, device=backend.device)
    backend.run(
        linear_input_grad,
        *(dense.tensor, paged.matrix, out, rows),
        reads=[*paged.memory(rows), dense.memory.tensor],
        writes=[out],
    )
    here = slice(*rows)
    assert_product(out, (grad[:, here], weight[here]), 0.0, backend)


@linear_cases
@pytest.mark.parametrize("accumulate", [False, True], ids=["write", "add"])
def test_weight_grad(backend: Backend, case: LinearCase, accumulate: bool) -> None:
    grad, x, start = _operands(case)
    if not accumulate:
        start = torch.full_like(start, torch.nan)
    paged = PagedWeight(start, backend)
    dense = Dense(grad, backend, case.shift), Dense(x, backend, case.shift)
    backend.run(
        linear_weight_grad,
        *(dense[0].tensor, dense[1].tensor, paged.matrix, None, accumulate),
        reads=[*(each.memory.tensor for each in dense), *paged.memory()],
        writes=paged.memory()[1:],
    )
    assert_product(paged.read(), (grad.t(), x), start if accumulate else 0.0, backend)
    paged.assert_nothing_else_changed()
    for each in dense:
        each.assert_unchanged()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [(32, 64), (41, 83), (82, 90)], ids=str)
def test_weight_grad_of_a_slab(backend: Backend, dtype: torch.dtype, rows: tuple[int, int]) -> None:
    grad, x, start = _operands(LinearCase(18, 90, 50, dtype))
    outside = [i for i in range(90) if not rows[0] <= i < rows[1]]
    grad[:, outside] = torch.nan
    paged = PagedWeight(start.float(), backend, rows)  # a gradient in float32 of either dtype
    dense = Dense(grad, backend), Dense(x, backend)
    backend.run(
        linear_weight_grad,
        *(dense[0].tensor, dense[1].tensor, paged.matrix, rows, True),
        reads=[*(each.memory.tensor for each in dense), *paged.memory(rows)],
        writes=paged.memory(rows)[1:],
    )
    here = slice(*rows)
    assert_product(paged.read()[here], (grad[:, here].t(), x), start[here], backend)
    paged.assert_nothing_else_changed(rows)


@pytest.mark.parametrize("columns", [64, 50])
def test_the_products_are_adjoint(backend: Backend, columns: int) -> None:
    """<grad, x Wᵀ> = <grad W, x> = <gradᵀ x, W>, each to what its float32 result can hold."""
    grad, x, weight = _operands(LinearCase(7, 90, columns, torch.float32))
    paged = PagedWeight(weight, backend)
    gradient = PagedWeight(torch.empty_like(weight), backend)
    there = grad.to(backend.device), x.to(backend.device)
    out, input_grad = torch.empty_like(there[0]), torch.empty_like(there[1])
    reads = [*paged.memory(), *there]
    backend.run(linear_forward, there[1], paged.matrix, out, reads=reads, writes=[out])
    args = (there[0], paged.matrix, input_grad)
    backend.run(linear_input_grad, *args, reads=reads, writes=[input_grad])
    backend.run(
        linear_weight_grad,
        *(*there, gradient.matrix),
        reads=[*there, gradient.matrix.frame_of],
        writes=gradient.memory()[1:],
    )
    pairs = [(grad, out.cpu()), (input_grad.cpu(), x), (gradient.read(), weight)]
    sums = [(a.double() * b.double()).sum() for a, b in pairs]
    magnitude = torch.einsum(
        "mn,nk,mk->", grad.abs().double(), weight.abs().double(), x.abs().double()
    )
    bound = 2 * (90 + 3) * 2.0**-24 * magnitude  # each sum is off by half of it at most
    assert abs(sums[0] - sums[1]) <= bound
    assert abs(sums[0] - sums[2]) <= bound
    assert abs(sums[0]) > bound, "the sums say nothing"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("columns", [64, 50])
def test_references_are_torch_where_frames_are_consecutive(
    dtype: torch.dtype, columns: int
) -> None:
    grad, x, weight = _operands(LinearCase(9, 130, columns, dtype))
    paged = PagedWeight(weight, Backend("reference"), consecutive=True)
    out = torch.empty_like(x)
    linear_input_grad_reference(grad, paged.matrix, out)
    assert torch.equal(out, grad @ weight)
    linear_weight_grad_reference(grad, x, paged.matrix)
    assert torch.equal(paged.read(), grad.t() @ x)


def test_bits_are_stable(backend: Backend) -> None:
    grad, x, weight = _operands(LinearCase(9, 90, 50, torch.bfloat16))
    there = grad.to(backend.device), x.to(backend.device)
    results = []
    for _ in range(2):
        paged, out = PagedWeight(weight, backend), torch.empty_like(there[1])
        args = (there[0], paged.matrix, out)
        backend.run(linear_input_grad, *args, reads=[*paged.memory(), *there], writes=[out])
        args = (*there, paged.matrix, None, True)
        reads, writes = [*paged.memory(), *there], paged.memory()[1:]
        backend.run(linear_weight_grad, *args, reads=reads, writes=writes)
        results.append(torch.cat([out.cpu().view(-1), paged.read().view(-1)]))
    assert torch.equal(*results)


@pytest.mark.parametrize(("m", "n", "k"), [(0, 5, 64), (3, 0, 64), (3, 5, 0), (0, 0, 0)])
def test_empty(backend: Backend, m: int, n: int, k: int) -> None:
    grad, x, weight = _operands(LinearCase(m, n, k, torch.float32))
    paged = PagedWeight(weight, backend)
    there = grad.to(backend.device), x.to(backend.device)
    reads, writes = [*paged.memory(), *there], paged.memory()[1:]
    for accumulate, expected in ((True, x), (False, torch.zeros_like(x))):
        out = there[1].clone()
        args = (there[0], paged.matrix, out, (n, n), accumulate)
        backend.run(linear_input_grad, *args, reads=[*reads, out], writes=[out])
        assert torch.equal(out.cpu(), expected)
    for accumulate, expected in ((True, weight), (False, torch.zeros_like(weight))):
        args = (*there, paged.matrix, None, accumulate)
        if n and k:  # m is 0
            backend.run(linear_weight_grad, *args, reads=reads, writes=writes)
            assert torch.equal(paged.read(), expected)
        else:
            backend.run(linear_weight_grad, *args, reads=[], writes=[])
    paged.assert_nothing_else_changed()


@pytest.mark.parametrize(
    ("grad", "other", "message"),
    [
        ((3, 89), (3, 50), r"grad has shape \(3, 89\); pass \(3, 90\)"),
        ((3, 90), (4, 50), r"shape \([34], (?:50|90)\); pass \([34], (?:50|90)\)"),
        ((3, 90), (3, 51), r"shape \(3, 51\); pass \(3, 50\)"),
    ],
)
def test_bad_shapes_are_named(grad: tuple, other: tuple, message: str) -> None:
    paged = PagedWeight(torch.zeros(90, 50), Backend("reference"))
    with pytest.raises(ValueError, match=message):
        linear_input_grad(torch.zeros(grad), paged.matrix, torch.zeros(other))
    with pytest.raises(ValueError, match=message):
        linear_weight_grad(torch.zeros(grad), torch.zeros(other), paged.matrix)
    paged.arena.assert_is(paged.before)


def test_bad_dtypes_are_named() -> None:
    paged = PagedWeight(torch.zeros(90, 50, dtype=torch.bfloat16), Backend("reference"))
    with pytest.raises(ValueError, match=r"grad is torch.float32, the matrix torch.bfloat16"):
        linear_input_grad(torch.zeros(3, 90), paged.matrix, torch.zeros(3, 50))
    with pytest.raises(ValueError, match=r"x is torch.float16, the matrix torch.bfloat16"):
        linear_weight_grad(torch.zeros(3, 90).half(), torch.zeros(3, 50).half(), paged.matrix)
    single = PagedWeight(torch.zeros(90, 50), Backend("reference"))
    with pytest.raises(ValueError, match=r"grad is torch.float32, .*pass torch.float16"):
        linear_weight_grad(torch.zeros(3, 90), torch.zeros(3, 50).half(), single.matrix)
