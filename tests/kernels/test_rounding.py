"""Rounding to bf16: kernels' helpers and their references, bit for bit, and no bias."""

import math

import pytest
import torch
from page_suite import Backend

from tensorpager.kernels import launch
from tensorpager.kernels.launch import tl, triton
from tensorpager.kernels.rounding import (
    hash32_reference,
    random_bits,
    random_bits_reference,
    random_key,
    round_bf16,
    round_bf16_reference,
    stochastic_bf16,
    stochastic_bf16_reference,
    widen_bf16,
)

SPECIAL = [
    *(0x00000000, 0x80000000, 0x00000001, 0x00008000, 0x00018000, 0x3F800000, 0x3F808000),
    *(0x3F808001, 0x3F818000, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7F800001, 0x7FFFFFFF),
    *(0xFFFFFFFF, 0x007FFFFF, 0x807FFFFF, 0x7F7F8000, 0x7F7F7FFF),
]


def _floats(count: int = 4096) -> torch.Tensor:
    """Any bits at all, and those at which rounding goes wrong."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(0, 1 << 32, (count,), generator=generator)
    bits[: len(SPECIAL)] = torch.tensor(SPECIAL)
    return (bits - ((bits >> 31) << 32)).to(torch.int32).view(torch.float32)


@triton.jit
def _round(x_ptr, nearest_ptr, random_ptr, bits_ptr, seed, step, first, N: tl.constexpr):
    at = tl.arange(0, N)
    x = tl.load(x_ptr + at)
    start = tl.load(first)
    key = random_key(tl.load(seed).to(tl.uint32), tl.load(step).to(tl.int32), start)
    bits = random_bits(key, start.to(tl.uint32) + at.to(tl.uint32))
    tl.store(nearest_ptr + at, round_bf16(x).to(tl.int16, bitcast=True))
    tl.store(random_ptr + at, stochastic_bf16(x, bits >> 16).to(tl.int16, bitcast=True))
    tl.store(bits_ptr + at, bits.to(tl.int64))
    tl.store(x_ptr + at, widen_bf16(round_bf16(x)))


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param(Backend("interpreter"), marks=pytest.mark.interpreter, id="interpreter"),
        pytest.param(Backend("cuda"), marks=pytest.mark.gpu, id="cuda"),
    ],
)
@pytest.mark.parametrize("first", [0, (7 << 32) + 4096])
def test_kernels_as_references(backend: Backend, first: int) -> None:
    assert launch.HAVE_TRITON
    x = _floats()
    on_device = x.clone().to(backend.device)
    nearest, random = (torch.empty(4096, dtype=torch.int16).to(backend.device) for _ in range(2))
    bits = torch.empty(4096, dtype=torch.int64).to(backend.device)
    numbers = [torch.tensor([n]).to(backend.device) for n in (-5, 3, first)]
    _round[(1,)](on_device, nearest, random, bits, *numbers, N=4096)
    expected = random_bits_reference(-5, 3, first, 4096)
    assert torch.equal(bits.cpu(), expected)
    assert _same(nearest.cpu().view(torch.bfloat16), round_bf16_reference(x))
    assert _same(random.cpu().view(torch.bfloat16), stochastic_bf16_reference(x, expected >> 16))
    assert _same(on_device.cpu(), x.to(torch.bfloat16).float())


def _same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """All bits; any NaN for a NaN."""
    kind = torch.int16 if found.dtype == torch.bfloat16 else torch.int32
    same = found.view(kind) == expected.view(kind)
    return bool((same | (found.isnan() & expected.isnan())).all())


def test_hash_hand_made() -> None:
    """lowbias32 of 1, worked out in Python's own integers."""
    x = 1
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x ^= x >> shift
        x = x * factor % (1 << 32)
    x ^= x >> 16
    assert hash32_reference(torch.tensor([1])).tolist() == [x]


def test_random_bits_do_not_depend_on_stretches() -> None:
    whole = random_bits_reference(1, 2, (1 << 32) - 10, 20)
    parts = [random_bits_reference(1, 2, (1 << 32) - 10 + i, 1) for i in range(20)]
    assert torch.equal(whole, torch.cat(parts))
    assert not torch.equal(whole, random_bits_reference(2, 2, (1 << 32) - 10, 20))
    assert not torch.equal(whole, random_bits_reference(1, 3, (1 << 32) - 10, 20))


@pytest.mark.parametrize("shift", [0, 16])
def test_random_bits_are_even(shift: int) -> None:
    """Both halves fall into 256 bins evenly: chi-square within 4 sigma of its mean."""
    for step in (1, 2, 1000):
        bits = random_bits_reference(9, step, 0, 1 << 16) >> shift & 0xFFFF
        counts = torch.bincount(bits >> 8, minlength=256).double()
        chi = float(((counts - 256) ** 2 / 256).sum())
        assert abs(chi - 255) < 4 * math.sqrt(2 * 255)


def test_stochastic_rounding_takes_a_neighbour() -> None:
    x = _floats()
    x = x[x.isfinite() & (x.abs() < 3e38)]
    random = random_bits_reference(1, 1, 0, len(x)) & 0xFFFF
    found = stochastic_bf16_reference(x, random).float()
    towards_zero = (x.view(torch.int32) & -0x10000).view(torch.float32)
    away = ((towards_zero.view(torch.int32)) + 0x10000).view(torch.float32)
    assert ((found == towards_zero) | (found == away)).all()
    exact = x.to(torch.bfloat16)
    assert torch.equal(stochastic_bf16_reference(exact.float(), random), exact)


def test_stochastic_rounding_has_no_bias() -> None:
    """2,000 draws: the mean error of all within 4 sigma, that of each number within 5."""
    x = torch.randn(256, generator=torch.Generator().manual_seed(0))
    draws = [
        stochastic_bf16_reference(x, random_bits_reference(1, step, 0, 256) & 0xFFFF).float()
        for step in range(2000)
    ]
    low = (x.view(torch.int32) & -0x10000).view(torch.float32).double()
    high = ((x.view(torch.int32) & -0x10000) + 0x10000).view(torch.float32).double()
    deviation = ((x - low) * (high - x)).sqrt() / math.sqrt(2000)
    error = torch.stack(draws).double().mean(0) - x
    assert (error.abs() <= 5 * deviation + 1e-12).all()
    assert abs(float(error.sum())) <= 4 * float(deviation.square().sum().sqrt())
