"""Blockwise codes of 8 bits: the map, its errors, and kernels against references."""

import math

import pytest
import torch
from optimizer_suite import Arena, bits, dense, place_of, run, zeros
from page_suite import Backend

from tensorpager.kernels.blockwise import Blockwise
from tensorpager.kernels.pieces import Operand
from tensorpager.kernels.quantize import (
    ROOT_TOP,
    SIGNED_TOP,
    UNITS,
    dequantize,
    encode_reference,
    quantize,
)
from tensorpager.kernels.rounding import random_bits_reference

U8 = torch.uint8
both = pytest.mark.parametrize("root", [False, True], ids=["signed", "root"])


def _values(n: int, root: bool) -> torch.Tensor:
    """Over nine decades, also within a block; zeros too."""
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(n, generator=generator) * 10.0 ** (
        -torch.arange(n) % 7 - torch.arange(n) // 512
    )
    x[::11] = 0
    return x.square() if root else x


def _round_trip(x: torch.Tensor, root: bool) -> torch.Tensor:
    state = zeros(len(x), U8, lambda tensor: tensor)
    out = torch.empty(len(x))
    quantize([x], [state], root=root)
    dequantize([state], [out], root=root)
    return out


def test_map_hand_made() -> None:
    assert UNITS[:9] == [0, 1, 8, 36, 64, 176, 288, 400, 512]
    assert UNITS[SIGNED_TOP] == 2_068_480
    assert UNITS[ROOT_TOP] == 16_662_528 < 2**24
    assert sorted(set(UNITS)) == UNITS


@both
def test_error_of_a_round_trip(root: bool) -> None:
    """In every block below 1/144 (of roots 1/290) of its largest, and by segment of the number."""
    x = _values(256 * 40 + 17, root)
    found = _round_trip(x, root)
    if root:
        x, found = x.sqrt(), found.sqrt()
    error, top = (found - x).abs(), ROOT_TOP if root else SIGNED_TOP
    for block in range(0, len(x), 256):
        part, wrong = x[block : block + 256].abs(), error[block : block + 256]
        largest = part.max()
        assert (wrong <= largest / (290 if root else 144)).all()
        units = part / largest * UNITS[top]
        segment = torch.log2(units.clamp(min=1)).div(3).add(1e-6).floor()
        relative = 3.5 / 2**segment * part + 1e-6 * part
        assert (wrong <= torch.where(units >= 1, relative, largest / UNITS[top] * 0.5001)).all()


def _original_map(x: torch.Tensor, signed: bool) -> torch.Tensor:
    """A round trip through dynamic tree codes in decades of ten, as their authors define them."""
    units = [torch.tensor([0.0, 1.0])]
    for decade in range(7):
        borders = torch.linspace(0.1, 1, 2**decade * (1 if signed else 2) + 1)
        middles = (borders[:-1] + borders[1:]) / 2 * 10.0 ** (decade - 6)
        units += [middles, -middles] if signed else [middles]
    table = torch.cat(units).sort().values
    assert len(table) == 256
    blocks = x.view(-1, 256)
    largest = blocks.abs().amax(1, keepdim=True)
    codes = torch.bucketize(blocks / largest, (table[1:] + table[:-1]) / 2)
    return (table[codes] * largest).view(-1)


def test_no_worse_than_the_original_map() -> None:
    """The figures of the module's docstring."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256 * 400, generator=generator)

    def mean_error(found: torch.Tensor) -> float:
        return float((found - x).abs().mean() / x.abs().mean())

    assert mean_error(_round_trip(x, False)) == pytest.approx(0.0101, abs=2e-4)
    assert mean_error(_original_map(x, True)) == pytest.approx(0.0107, abs=2e-4)

    decades = torch.rand(len(x), generator=generator) * -4
    squares = (torch.randn(len(x), generator=generator) * 10**decades).square()
    ours, theirs = _round_trip(squares, True), _original_map(squares, False)
    for found, error, zero in ((ours, 0.038, 5e-5), (theirs, 0.31, 0.27)):
        relative = (found.sqrt() - squares.sqrt()).abs() / squares.sqrt()
        assert float(relative.mean()) == pytest.approx(error, rel=0.05)
        assert float((found == 0).double().mean()) == pytest.approx(zero, rel=0.5)


@both
def test_again_gives_the_same(root: bool) -> None:
    once = _round_trip(_values(2000, root), root)
    torch.testing.assert_close(_round_trip(once, root), once, rtol=1e-6, atol=0)


@both
def test_random_codes_have_no_bias(root: bool) -> None:
    """1,000 draws of a block: each mean within 5 sigma, their sum within 4."""
    x = _values(256, root) + 1e-9
    draws = []
    for step in range(1000):
        state = zeros(256, U8, lambda tensor: tensor)
        random = random_bits_reference(3, step, 0, 256) & 0xFFFF
        encode_reference(x, state.codes, state.scales, 0, root, random)
        draws.append(state)
    out = [torch.empty(256) for _ in draws]
    dequantize(draws, out, root=root)
    found = torch.stack(out).double()
    error, deviation = found.mean(0) - x, found.std(0) / math.sqrt(1000)
    rounding = 1e-6 * x.abs() + 1e-6 * x.abs().max() / UNITS[SIGNED_TOP]
    seen = found.std(0) > 0
    assert seen.sum() > 200
    assert (error.abs() <= 5 * deviation + rounding)[seen].all()
    # Numbers of each size weigh the same in the sum.
    z = (error / deviation)[seen & (deviation > rounding)]
    assert abs(float(z.sum())) <= 4 * math.sqrt(len(z))


@both
def test_special_blocks(backend: Backend, root: bool) -> None:
    x = torch.ones(5 * 256)
    x[0:256] = 0
    x[256:512] = 1e-38 if not root else 0
    x[512 + 3] = torch.nan
    x[768 + 3] = torch.inf
    state = zeros(len(x), U8, place_of(backend, Arena(backend), False))
    out = torch.empty(len(x)).to(backend.device)
    run(backend, quantize, [x.to(backend.device)], [state], root=root)
    run(backend, dequantize, [state], [out], root=root)
    found = out.cpu()
    assert (found[:512] == 0).all()
    assert found[512:1024].isnan().all()
    torch.testing.assert_close(found[1024:], torch.ones(256), rtol=1e-6, atol=0)


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernel_as_reference(backend: Backend, dtype: torch.dtype, root: bool) -> None:
    """Codes, scales and decoded values bit for bit, paged and dense, and no stray writes."""
    results = []
    for lane in (backend, Backend("reference")):
        arena = Arena(lane)
        places = [place_of(lane, arena, True), place_of(lane, arena, False)]
        xs = [_values(n, root).to(dtype) for n in (2300, 300)]
        inputs = [place(x) for place, x in zip(places, xs, strict=True)]
        states: list[Blockwise] = [zeros(len(x), U8, p) for x, p in zip(xs, places, strict=True)]
        outputs: list[Operand] = [
            place(torch.zeros_like(x)) for x, place in zip(xs, places, strict=True)
        ]
        run(lane, quantize, inputs, states, root=root)
        run(lane, dequantize, states, outputs, root=root)
        arena.assert_rest_untouched()
        results.append([bits(x) for x in (*states, *outputs)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_scales_in_pages_of_their_own() -> None:
    """More scales than a page holds, in scattered frames."""
    arena, n = Arena(Backend("cpu"), 400), 256 * 1100 + 5
    x = _values(n, False)
    paged, flat = zeros(n, U8, arena.page), zeros(n, U8, lambda tensor: tensor)
    for state in (paged, flat):
        quantize([x], [state], root=False)
    assert torch.equal(dense(paged.scales), flat.scales)
    assert torch.equal(dense(paged.codes), flat.codes)
    arena.assert_rest_untouched()
