"""total_norm on every implementation, and gradient clipping with it."""

import math

import pytest
import torch
from page_suite import Backend
from reduce_suite import DTYPES, held, mixed_list, random_values, run, scattered

from tensorpager.kernels.norm import total_norm

SIZES = [2049, 1, 1025, 300, 1500, 64]
ORDERS = [0.0, 1.0, 2.0, 3.0, math.inf]


@pytest.mark.parametrize(
    ("dtype", "p"),
    [*((torch.float32, p) for p in ORDERS), *((dtype, 2.0) for dtype in DTYPES)],
    ids=str,
)
def test_it_keeps_to_its_bound(backend: Backend, dtype: torch.dtype, p: float) -> None:
    """48 u (float64: 80 u); in plain torch each operand's norm is rounded to its dtype too."""
    values = [random_values(n, dtype, seed=n) for n in SIZES]
    got = run(backend, total_norm, mixed_list(values, backend), p, dtype=torch.float64)
    assert got.shape == ()
    numbers = [abs(x) for value in values for x in value.double().tolist()]
    if p == math.inf:
        exact = max(numbers)
    elif p == 0:
        exact = sum(x != 0 for x in numbers)
    else:
        exact = math.fsum(x**p for x in numbers) ** (1 / p)
    bound = 80 * 2**-53 if dtype == torch.float64 else 48 * 2**-24
    if backend.name in ("reference", "cpu"):
        bound += 2 * torch.finfo(dtype).eps
    assert abs(got.item() - exact) <= bound * exact


def test_mixed_types_and_empty_operands(backend: Backend) -> None:
    values = [torch.full((n,), 0.5).to(dtype) for n, dtype in zip(SIZES, DTYPES, strict=False)]
    holders = [*mixed_list(values, backend), held(torch.empty(0), backend)]
    got = run(backend, total_norm, holders)
    assert got.dtype == torch.float64
    rounded = 1e-2 if backend.name in ("reference", "cpu") else 1e-5
    assert got.item() == pytest.approx(math.sqrt(sum(SIZES[:4]) / 4), rel=rounded)
    with pytest.raises(ValueError, match="operand 4 is empty and has no norm of order inf"):
        run(backend, total_norm, holders, math.inf)


def test_no_operands(backend: Backend) -> None:
    assert run(backend, total_norm, []).item() == 0
    assert run(backend, total_norm, [held(torch.empty(0), backend)]).item() == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("p", ORDERS[1:])
def test_nan_and_inf_come_through(backend: Backend, bad: float, p: float) -> None:
    values = [random_values(1100, torch.float32, seed=n) for n in range(3)]
    values[1][1099] = bad
    holders = [held(x, backend, scattered(1100, x.dtype)) for x in values]
    assert str(run(backend, total_norm, holders, p).item()) == str(bad)


def test_scattered_frames_in_plain_torch(backend: Backend) -> None:
    """A rounding of each tensor's norm, and of the norm of norms, away from consecutive frames."""
    values = [random_values(3000, torch.float32, seed=n) for n in range(3)]
    apart = [held(x, backend, scattered(3000, x.dtype)) for x in values]
    together = [held(x, backend, range(2, 5)) for x in values]
    norms = [run(backend, total_norm, holders).item() for holders in (apart, together)]
    assert norms[0] == pytest.approx(norms[1], rel=100 * 2**-24)


@pytest.mark.parametrize("p", ORDERS[1:])
def test_consecutive_frames_give_the_bits_of_torch(backend: Backend, p: float) -> None:
    """Clipping with total_norm is clip_grad_norm_, bit for bit."""
    if backend.name in ("interpreter", "cuda"):
        pytest.skip("kernels have their own order of additions")
    for dtype in DTYPES:
        values = [random_values(n, dtype, seed=n) for n in (100_003, 7, 3000)]
        holders = [held(x, backend, range(1, 1 + -(-x.nbytes // 4096))) for x in values]
        norm = run(backend, total_norm, holders, p)
        parameters = [torch.nn.Parameter(torch.zeros_like(x)) for x in values]
        for parameter, x in zip(parameters, values, strict=True):
            parameter.grad = x.clone()
        expected = torch.nn.utils.clip_grad_norm_(parameters, 0.5, norm_type=p)
        assert norm.dtype == expected.dtype
        assert torch.equal(norm, expected)
        for parameter, x in zip(parameters, values, strict=True):
            parameter.grad = x.clone()
        torch.nn.utils.clip_grads_with_norm_(parameters, 0.5, norm)
        for parameter, x in zip(parameters, values, strict=True):
            scale = torch.clamp(0.5 / (expected + 1e-6), max=1.0)
            assert torch.equal(parameter.grad, x * scale)


@pytest.mark.gpu
def test_a_launch_does_not_wait() -> None:
    gradients = [torch.ones(n, device="cuda") for n in (100_000, 7)]
    total_norm(gradients)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        norm = total_norm(gradients)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert norm.item() == pytest.approx(math.sqrt(100_007))
