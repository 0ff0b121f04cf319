"""non_finite_check_and_unscale on every implementation, against torch's op on dense tensors."""

import math

import pytest
import torch
from page_suite import Backend
from reduce_suite import DTYPES, Held, held, mixed_list, random_values, run

from tensorpager.kernels.unscale import non_finite_check_and_unscale

SIZES = [2049, 1, 1023, 1025, 3]
SCALES = [1.0, 2.0**-16, 0.1, 3e4, 0.0]


def _scalars(backend: Backend, found: float, scale: float) -> list[torch.Tensor]:
    return [torch.full((1,), value, device=backend.device) for value in (found, scale)]


def _unscale(
    backend: Backend, holders: list[Held], scale: float, found: float = 0.0, **named: bool
) -> tuple[float, list[torch.Tensor]]:
    """What found_inf became, and the elements now; bytes around them must be as before."""
    around = [holder.untouched() for holder in holders]
    found_inf, inv_scale = _scalars(backend, found, scale)
    run(
        backend,
        non_finite_check_and_unscale,
        holders,
        *(found_inf, inv_scale),
        writes=[found_inf],
        **named,
    )
    assert [holder.untouched() for holder in holders] == around
    for holder in holders:
        holder.memory.assert_is(holder.memory.bytes())
    assert inv_scale.item() == torch.tensor(scale).item()
    return found_inf.item(), [holder.values().cpu() for holder in holders]


def _bits(x: torch.Tensor) -> torch.Tensor:
    """Bytes of each element, all NaN the same."""
    return torch.where(x.isnan(), torch.full_like(x, math.nan), x).view(torch.uint8)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).split(".")[1])
def test_elements_have_the_bits_of_torch(
    backend: Backend, dtype: torch.dtype, scale: float
) -> None:
    values = [random_values(n, dtype, seed=n) for n in SIZES]
    limits = torch.finfo(dtype)
    values[0][:4] = torch.tensor([0.0, -0.0, limits.max, limits.tiny], dtype=dtype)
    found, got = _unscale(backend, mixed_list(values, backend), scale)
    expected = [x.clone() for x in values]
    found_in_torch = torch.zeros(1)
    torch._amp_foreach_non_finite_check_and_unscale_(
        expected, found_in_torch, torch.full((1,), scale)
    )
    assert found == found_in_torch.item() == 0
    for x, y in zip(got, expected, strict=True):
        assert torch.equal(_bits(x), _bits(y))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).split(".")[1])
def test_one_bad_number_is_found(backend: Backend, dtype: torch.dtype) -> None:
    bad_ones = [(math.nan, 1200), (math.inf, 0), (-math.inf, -1), (math.nan, -1)]
    for number, (bad, where) in enumerate(bad_ones):  # each layout of mixed_list
        values = [random_values(n, dtype, seed=n) for n in (100, 200, 30, 40)]
        values[number] = random_values(1571, dtype, seed=1)
        values[number][where] = bad
        found, got = _unscale(backend, mixed_list(values, backend), 0.25)
        assert found == 1
        expected = [x * 0.25 for x in values]
        for x, y in zip(got, expected, strict=True):
            assert torch.equal(_bits(x), _bits(y))


def test_an_overflow_of_the_product_is_not_found(backend: Backend) -> None:
    x = torch.full((5,), 60000, dtype=torch.float16)
    found, got = _unscale(backend, [held(x, backend)], 10.0)
    assert (found, got[0].tolist()) == (0, [math.inf] * 5)


def test_found_inf_is_never_cleared(backend: Backend) -> None:
    found, _ = _unscale(backend, [held(torch.ones(5), backend)], 1.0, found=1.0)
    assert found == 1


def test_mixed_types_and_empty_operands(backend: Backend) -> None:
    values = [torch.full((3000,), 3.0).to(dtype) for dtype in DTYPES]
    holders = [
        *mixed_list(values, backend),
        held(torch.empty(0), backend),
        held(values[0], backend),
    ]
    found, got = _unscale(backend, holders, 0.5)
    assert found == 0
    assert all(x.eq(1.5).all() for x in got)
    assert _unscale(backend, [], 0.5)[0] == 0


def test_random_bits_of_halves(backend: Backend) -> None:
    """Every bit pattern of the 16-bit types, subnormal numbers, inf and NaN too."""
    patterns = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        x = patterns.view(dtype)
        found, got = _unscale(backend, [held(x, backend)], 0.7, real_tiles=True)
        wide = x.float() * torch.tensor(0.7)
        assert found == 1
        assert torch.equal(_bits(got[0]), _bits(wide.to(dtype)))


@pytest.mark.parametrize(
    ("operands", "found_inf", "inv_scale", "message"),
    [
        ([torch.ones(2).int()], torch.zeros(1), torch.ones(1), "operand 0 is torch.int32"),
        ([torch.ones(2)], torch.zeros(2), torch.ones(1), "found_inf is torch.float32 with 2"),
        ([torch.ones(2)], torch.zeros(1), torch.ones(1).double(), "inv_scale is torch.float64"),
        ([torch.ones(2)], torch.zeros(1), torch.ones(1).to("meta"), "inv_scale is on meta"),
        (
            [torch.ones(2).to("meta")],
            torch.zeros(1),
            torch.ones(1),
            "operand 1 is on cpu, operand 0",
        ),
        ([torch.ones(4, 4).t()[:2]], torch.zeros(1), torch.ones(1), "stride"),
    ],
)
def test_bad_arguments_are_named(
    operands: list, found_inf: torch.Tensor, inv_scale: torch.Tensor, message: str
) -> None:
    good = torch.ones(3)
    operands = [*operands, good]
    with pytest.raises(ValueError, match=message):
        non_finite_check_and_unscale(operands, found_inf, inv_scale)
    assert good.tolist() == [1, 1, 1]
