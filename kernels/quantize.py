"""Optimizer states in 8 bits, block by block.

256 elements share one float32 scale, and each has a code of 8 bits that counts steps of a scale
which is fine for large numbers and reaches far down: "dynamic tree quantization" of Dettmers et
al., "8-bit Optimizers via Block-wise Quantization" (ICLR 2022, arXiv:2110.02861), where numbers a
decade smaller have half as many codes. Here a decade is a factor of 8 rather than 10, and the map
is continuous:

    unit(j) = 8**i + 7 * 4**i * k      where j = 2**i + k, 0 <= k < 2**i;  unit(0) = 0
    value   = scale * unit(j)

unit is an integer below 2**24, exact in float32, so plain torch, the interpreter and every device
agree in every bit of codes and values, and no table has to be read. A number is rounded to the
nearer of two neighbours, or at random to either with the expected value kept.

- *signed* (first moment): bits 0-6 are j, bit 7 the sign; scale = largest magnitude / unit(127).
  Errors are below 1/144 of the block's largest magnitude and, above unit(1), below 3.5 / 2**i of
  the number itself.
- *root* (second moment): all bits are j, of the square root; scale = largest root / unit(255).
  Errors of a root are below 1/290 of the block's largest. Adam divides by the root; coding that
  rather than its square doubles the range. It reaches down to 1/16,662,528 of the largest, where
  the signed code ends at 1/2,068,480: so what an element is divided by does not vanish before what
  is divided.

Measured, with blocks of 256 and rounding to nearest: mean error of normal numbers 1.01 % of their
mean magnitude (the original map: 1.07 %); of the root of second moments of gradients over four
decades 3.8 %, with 1 in 20,000 rounded to zero (original: 31 %, every fourth).

A block whose largest magnitude is below 1e-30 becomes zero; one with a NaN or an infinity decodes
to NaN as a whole. Codes and scale of zero are zero bytes.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from .blockwise import (
    BLOCK,
    LONGEST,
    Blockwise,
    check_blocks,
    scale_addresses,
    scales_of,
)
from .launch import launch, tl, triton, upload, use_triton
from .pieces import Operand, cut, dtype_name, memory_of, stretches
from .rounding import load_as, load_raw, store_as, store_raw, tile_elements, tile_rows

__all__ = ["dequantize", "dequantize_reference", "quantize", "quantize_reference"]

TILE = 2048
WARPS = 4
SIGNED_TOP, ROOT_TOP = 127, 255
SMALLEST = 1e-30


def _unit(j: int) -> int:
    i = max(j, 1).bit_length() - 1
    return 8**i + 7 * 4**i * (j - 2**i) if j else 0


UNITS = [_unit(j) for j in range(ROOT_TOP + 2)]  # the last is above all codes
SIGNED_UNIT, ROOT_UNIT = float(UNITS[SIGNED_TOP]), float(UNITS[ROOT_TOP])
SEVENTH = float(np.float32(1 / 7))


@triton.jit
def unit_of(j):
    """unit(j) as float32; j : int32 in [0, 256]."""
    i = (j.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
    i = tl.where(j > 0, i, 0)
    unit = (1 << (3 * i)) + ((7 * (j - (1 << i))) << (2 * i))
    return tl.where(j > 0, unit, 0).to(tl.float32)


@triton.jit
def power_of_two(exponent):
    """2 ** exponent as float32; exponent : int32 in [-126, 127]."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def encode(
    y,
    random,
    ROOT: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """Codes j, int32; y : float32 magnitudes in units of the block's scale.

    The scale puts them at the unit of the highest code, or a rounding error above it.

    random : uint32 below 2^16, only with STOCHASTIC; with ROOT it keeps the expected square.
    """
    exponent = (y.to(tl.int32, bitcast=True) >> 23) - 127
    # exponent // 3, from 0 to 23; below 1 the codes are 0 and 1, one step apart.
    i = tl.maximum(exponent, 0) * 43 >> 7
    steps = (y - power_of_two(3 * i)) * power_of_two(-2 * i) * 0.14285714924335480
    low = tl.where(exponent >= 0, (1 << i) + steps.to(tl.int32), 0)
    unit = unit_of(low)
    part = (y - unit) * power_of_two(-2 * i) * 0.14285714924335480
    part = tl.where(exponent >= 0, part, y)
    if STOCHASTIC:
        if ROOT:
            part = part * tl.div_rn(y + unit, unit_of(low + 1) + unit)
        up = random.to(tl.float32) * 1.52587890625e-05 < part
    else:
        up = part >= 0.5
    return tl.minimum(low + up.to(tl.int32), 255 if ROOT else 127)


@triton.jit
def load_blocks(
    codes,
    scales,
    at,
    rows,
    length,
    ROOT: tl.constexpr,
    ALIGNED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Decoded float32 values of a tile; codes, scales : int64 addresses.

    at : int32 [B, 256], numbers of the elements. rows : int32 [B], of their blocks. Those from
        element `length` on are zero with MASKED.
    """
    code = load_raw(codes, at, length, "uint8", ALIGNED, MASKED).to(tl.int32)
    scale = load_raw(scales, rows, (length + 255) // 256, "float32", False, MASKED)
    if ROOT:
        root = unit_of(code) * scale[:, None]
        return root * root
    else:
        value = unit_of(code & 127) * scale[:, None]
        return tl.where(code > 127, -value, value)


@triton.jit
def store_blocks(
    codes,
    scales,
    at,
    rows,
    value,
    random,
    length,
    ROOT: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ALIGNED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Encode and store a tile; value : float32 [B, 256], not negative with ROOT.

    random : uint32 [B, 256] below 2^16, used with STOCHASTIC.
    """
    magnitude = tl.sqrt_rn(value) if ROOT else tl.abs(value)
    magnitude = tl.where(magnitude == magnitude, magnitude, float("inf"))
    if MASKED:
        magnitude = tl.where(at < length, magnitude, 0.0)
    largest = tl.max(magnitude, axis=1)
    unit = tl.full(largest.shape, 16662528.0 if ROOT else 2068480.0, tl.float32)
    coded = (largest > 1e-30) & (largest < float("inf"))
    inverse = tl.where(coded, tl.div_rn(unit, tl.where(coded, largest, 1.0)), 0.0)
    scale = tl.where(coded, tl.div_rn(largest, unit), 0.0)
    scale = tl.where(largest < float("inf"), scale, float("nan"))
    magnitude = tl.where(coded[:, None], magnitude, 0.0)
    code = encode(magnitude * inverse[:, None], random, ROOT, STOCHASTIC)
    if not ROOT:
        code = code | tl.where((value < 0) & (code > 0), 128, 0)
    store_raw(codes, at, code.to(tl.uint8), length, "uint8", ALIGNED, MASKED)
    store_raw(scales, rows, scale, (length + 255) // 256, "float32", False, MASKED)


@triton.jit(
    do_not_specialize=["pieces", "tiles"],
    do_not_specialize_on_alignment=["addresses_ptr", "lengths_ptr", "scales_ptr"],
)
def _convert_kernel(
    addresses_ptr,
    lengths_ptr,
    scales_ptr,
    pieces,
    tiles,
    DTYPE: tl.constexpr,
    DECODE: tl.constexpr,
    ROOT: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program t encodes or decodes tile t % tiles of piece t // tiles, if the piece has so many."""
    piece = tl.program_id(0) // tiles
    first = tl.program_id(0) % tiles * TILE
    length = tl.load(lengths_ptr + piece)
    if first < length:
        values = tl.load(addresses_ptr + piece)
        codes = tl.load(addresses_ptr + pieces + piece)
        scales = tl.load(scales_ptr + piece)
        rows = tile_rows(first, TILE)
        at = tile_elements(rows)
        if DECODE:
            value = load_blocks(codes, scales, at, rows, length, ROOT, ALIGNED, True)
            store_as(values, at, value, length, DTYPE, ALIGNED, True)
        else:
            value = load_as(values, at, length, DTYPE, ALIGNED, True)
            store_blocks(codes, scales, at, rows, value, at, length, ROOT, False, ALIGNED, True)


def quantize(values: Sequence[Operand], out: Sequence[Blockwise], *, root: bool) -> None:
    """Encode tensors, each to the nearest codes, all in one launch for each dtype of values.

    values : float32, float16 or bfloat16, flat, paged or dense; not negative with `root`.
    out : as many elements each.
    root : whether the code is that of second moments.

    On CUDA queued on the current stream, without waiting; on a CPU done on return.
    """
    _run(values, out, root, quantize_reference, decode=False)


def dequantize(states: Sequence[Blockwise], out: Sequence[Operand], *, root: bool) -> None:
    """Decode tensors, as `quantize` encodes them; `out` is rounded to its dtype's nearest."""
    _run(out, states, root, lambda o, s, root: dequantize_reference(s, o, root), decode=True)


def _run(
    values: Sequence[Operand],
    states: Sequence[Blockwise],
    root: bool,
    reference: Callable[[Sequence[Operand], Sequence[Blockwise], bool], None],
    *,
    decode: bool,
) -> None:
    assert len(values) == len(states)
    for value, state in zip(values, states):
        assert value.dtype in (torch.float32, torch.float16, torch.bfloat16)
        check_blocks([value, state])
    if not values:
        return
    memory = memory_of(values[0])
    if not use_triton(memory):
        reference(values, states, root)
        return
    for dtype in dict.fromkeys(value.dtype for value in values):
        pairs = [(v, s) for v, s in zip(values, states, strict=True) if v.dtype == dtype]
        pieces = cut([(value, state.codes) for value, state in pairs], LONGEST)
        if not pieces.count:
            continue
        scales = scale_addresses(pieces, [[state.scales] for _, state in pairs])
        tiles = -(-pieces.longest // TILE)
        on_device = pieces.to(memory.device)
        launch(
            _convert_kernel,
            pieces.count * tiles,
            on_device.addresses,
            on_device.lengths,
            upload(scales, memory.device),
            pieces.count,
            tiles,
            DTYPE=dtype_name(dtype),
            DECODE=decode,
            ROOT=root,
            ALIGNED=pieces.aligned,
            TILE=TILE,
            num_warps=WARPS,
            enable_fp_fusion=False,
        )


def quantize_reference(values: Sequence[Operand], out: Sequence[Blockwise], root: bool) -> None:
    """`quantize` in plain torch."""
    for value, state in zip(values, out, strict=True):
        first = 0
        for part, codes in stretches([value, state.codes]):
            encode_reference(part.float(), codes, state.scales, first // BLOCK, root)
            first += codes.numel()


def dequantize_reference(states: Sequence[Blockwise], out: Sequence[Operand], root: bool) -> None:
    """`dequantize` in plain torch."""
    for state, value in zip(states, out, strict=True):
        first = 0
        for part, code in stretches([value, state.codes]):
            part.copy_(decode_reference(code, state.scales, first // BLOCK, root))
            first += code.numel()


def decode_reference(
    codes: torch.Tensor, scales: Operand, first_block: int, root: bool
) -> torch.Tensor:
    """Values of whole blocks (the last may be partial), float32 [n]; `scales` are all of them."""
    units = torch.tensor(UNITS, dtype=torch.float32, device=codes.device)
    scale = torch.cat(scales_of(scales, first_block, codes.numel()))
    scale = scale.repeat_interleave(BLOCK)[: codes.numel()]
    code = codes.to(torch.int64)
    if root:
        return (units[code] * scale).square()
    value = units[code & SIGNED_TOP] * scale
    return torch.where(code > SIGNED_TOP, -value, value)


def _root(values: torch.Tensor) -> torch.Tensor:
    """Rounded to nearest, as IEEE 754 says; torch's own on a CPU may be off by one unit."""
    if values.device.type != "cpu":
        return values.sqrt()
    with np.errstate(invalid="ignore"):
        return torch.from_numpy(np.sqrt(values.numpy()))


def encode_reference(
    values: torch.Tensor,
    codes: torch.Tensor,
    scales: Operand,
    first_block: int,
    root: bool,
    random: torch.Tensor | None = None,
) -> None:
    """Encode whole blocks; values : float32 [n], codes : uint8 [n], random : int64 below 2^16."""
    top, largest_unit = (ROOT_TOP, ROOT_UNIT) if root else (SIGNED_TOP, SIGNED_UNIT)
    units = torch.tensor(UNITS, dtype=torch.float32, device=values.device)
    magnitude = _root(values) if root else values.abs()
    magnitude = torch.where(magnitude.isnan(), torch.inf, magnitude)
    count = values.numel()
    padded = torch.zeros(-(-count // BLOCK) * BLOCK, device=values.device)
    padded[:count] = magnitude
    largest = padded.view(-1, BLOCK).amax(1)
    coded = (largest > SMALLEST) & (largest < torch.inf)
    zero = torch.zeros_like(largest)
    inverse = torch.where(coded, largest_unit / torch.where(coded, largest, 1.0), zero)
    scale = torch.where(coded, largest / largest_unit, zero)
    scale = torch.where(largest < torch.inf, scale, torch.nan)
    magnitude = torch.where(coded.repeat_interleave(BLOCK)[:count], magnitude, 0.0)
    y = magnitude * inverse.repeat_interleave(BLOCK)[:count]

    low = (torch.searchsorted(units, y, right=True) - 1).clamp(max=top)
    shrink = 7 / (units[low + 1] - units[low])  # 4 ** -i, exactly
    part = torch.where(low > 0, (y - units[low]) * shrink * SEVENTH, y)
    if random is None:
        up = part >= 0.5
    else:
        if root:
            part = part * ((y + units[low]) / (units[low + 1] + units[low]))
        up = random.float() * 2.0**-16 < part
    code = (low + up).clamp(max=top)
    if not root:
        code = code | torch.where((values < 0) & (code > 0), SIGNED_TOP + 1, 0)
    codes.copy_(code)
    for kept in scales_of(scales, first_block, count):
        kept.copy_(scale[: kept.numel()])
        scale = scale[kept.numel() :]
