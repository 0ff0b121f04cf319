"""The choice between the direct kernel and a dense copy."""

import pytest
import torch

from tensorpager.kernels.linear_choice import Rates, reads_directly

HALF = torch.bfloat16
SHAPES = [(4096, 4096), (14336, 4096), (4096, 14336), (128256, 4096)]


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(n: int, k: int, dtype: torch.dtype) -> None:
    direct = [m for m in (1, 32, 512, 1024, 2048, 8192) if reads_directly(m, n, k, dtype)]
    assert direct == [1, 32, 512, 1024]


@pytest.mark.parametrize("m", [1, 4096])
def test_without_compiled_kernels_it_is_a_copy(m: int) -> None:
    assert not reads_directly(m, 100, 64, HALF, device_type="cpu")


def test_narrow_rows_are_copied() -> None:
    assert not reads_directly(16, 4096, 4097, HALF)
    assert reads_directly(16, 4096, 4096 + 8, HALF)


def test_measured_rates_replace_the_constants() -> None:
    assert not reads_directly(1024, 4096, 4096, HALF, rates=Rates(direct_half=0.5))
    measured = Rates(crossover={HALF: 3000})
    assert reads_directly(3000, 4096, 4096, HALF, rates=measured)
    assert not reads_directly(3001, 4096, 4096, HALF, rates=measured)
    assert not reads_directly(2048, 4096, 4096, torch.float16, rates=measured)


def test_a_gather_costs_what_the_docstring_says() -> None:
    rates = Rates()
    for m, share in ((512, 0.72), (4096, 0.09)):
        gather = 2 * 4096 * 4096 * 2 / rates.bytes_per_second
        product = 2 * m * 4096 * 4096 / rates.half_flops
        assert gather / product == pytest.approx(share, abs=0.005)
        assert gather / product == pytest.approx(367 / m, rel=0.01)
