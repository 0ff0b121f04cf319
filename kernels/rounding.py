"""Rounding to bf16, to nearest even or at random, and loads and stores that widen and round.

bf16 is handled as 16-bit integers everywhere: the interpreter's own bf16 is silently wrong, and
so one code gives the same bits there, on every device, and in plain torch.

Stochastic rounding adds 16 random bits below the last bit that is kept, so the expected value of
the result is the value rounded. The random bits are a hash of (seed, step, element number): no
state, and nothing depends on how elements are spread over pages, programs or launches.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch

from .launch import tl, triton

__all__ = [
    "hash32_reference",
    "random_bits_reference",
    "round_bf16_reference",
    "stochastic_bf16_reference",
]

_MASK32 = 0xFFFFFFFF


@triton.jit
def hash32(x):
    """A permutation of uint32 with little bias (C. Wellons' lowbias32)."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def random_key(seed, step, first):
    """The part of `random_bits` that is the same for a run of elements.

    seed : uint32. step : int32. first : int64, number of an element; elements with the same upper
        half of theirs share a key.
    """
    key = hash32(hash32(seed) + step.to(tl.uint32))
    return hash32(key + (first >> 32).to(tl.uint32))


@triton.jit
def random_bits(key, element):
    """32 random bits for each element; element : uint32, lower halves of their numbers."""
    return hash32(element ^ key)


@triton.jit
def widen_bf16(bits):
    """uint16 bits of bf16 -> float32."""
    return (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def round_bf16(x):
    """float32 -> uint16 bits of the nearest bf16, ties to even; any NaN becomes 0x7FC0."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x != x, 0x7FC0, rounded).to(tl.uint16)


@triton.jit
def stochastic_bf16(x, random):
    """float32 -> uint16 bits of one of the two bf16 around it; random : uint32 below 2^16."""
    rounded = (x.to(tl.uint32, bitcast=True) + random) >> 16
    return tl.where(x != x, 0x7FC0, rounded).to(tl.uint16)


@triton.jit
def typed_pointer(address, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """An int64 address as a pointer to bits, with ALIGNED one to a multiple of 16 bytes."""
    if DTYPE == "uint8":
        pointer = address.to(tl.pointer_type(tl.uint8))
    elif DTYPE == "bfloat16":
        pointer = address.to(tl.pointer_type(tl.uint16))
    elif DTYPE == "float16":
        pointer = address.to(tl.pointer_type(tl.float16))
    elif DTYPE == "float32":
        pointer = address.to(tl.pointer_type(tl.float32))
    else:
        pointer = address.to(tl.pointer_type(tl.float64))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def tile_rows(first, TILE: tl.constexpr):
    """Numbers of the rows of 256 elements, blocks of 8-bit states, of a tile; int32 [B]."""
    return first // 256 + tl.arange(0, TILE // 256)


@triton.jit
def tile_elements(rows):
    """Numbers of the elements of rows of 256, int32 [B, 256]."""
    return rows[:, None] * 256 + tl.arange(0, 256)[None, :]


@triton.jit
def load_raw(address, at, length, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr):
    """Elements `at` of the memory at `address`; with MASKED zero for those from `length` on.

    bfloat16 comes as uint16 bits.
    """
    pointers = typed_pointer(address, DTYPE, ALIGNED) + at
    if MASKED:
        return tl.load(pointers, mask=at < length, other=0)
    else:
        return tl.load(pointers)


@triton.jit
def store_raw(
    address, at, value, length, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr
):
    """Store elements `at` of the memory at `address`; with MASKED only those before `length`."""
    pointers = typed_pointer(address, DTYPE, ALIGNED) + at
    if MASKED:
        tl.store(pointers, value, mask=at < length)
    else:
        tl.store(pointers, value)


@triton.jit
def load_as(address, at, length, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr):
    """`load_raw` of floats, as float32; float64 stays as it is."""
    value = load_raw(address, at, length, DTYPE, ALIGNED, MASKED)
    if DTYPE == "bfloat16":
        return widen_bf16(value)
    elif DTYPE == "float16":
        return value.to(tl.float32)
    else:
        return value


@triton.jit
def store_as(
    address, at, value, length, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr
):
    """Store what `load_as` gives, rounded to the nearest, ties to even."""
    if DTYPE == "bfloat16":
        store_raw(address, at, round_bf16(value), length, DTYPE, ALIGNED, MASKED)
    elif DTYPE == "float16":
        store_raw(address, at, value.to(tl.float16), length, DTYPE, ALIGNED, MASKED)
    else:
        store_raw(address, at, value, length, DTYPE, ALIGNED, MASKED)


def hash32_reference(x: torch.Tensor) -> torch.Tensor:
    """`hash32` of int64 numbers below 2^32; products wrap, their lower 32 bits are right."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _MASK32
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _MASK32
    return x ^ (x >> 16)


def random_bits_reference(
    seed: int, step: int, first: int, count: int, device: torch.device | None = None
) -> torch.Tensor:
    """The 32 random bits of elements [first, first + count), int64 [count], below 2^32."""
    element = torch.arange(first, first + count, device=device)

    def scalar(x: int) -> torch.Tensor:
        return torch.tensor(x & _MASK32, device=device)

    key = hash32_reference((hash32_reference(scalar(seed)) + (step & _MASK32)) & _MASK32)
    key = hash32_reference((key + (element >> 32)) & _MASK32)
    return hash32_reference((element & _MASK32) ^ key)


def round_bf16_reference(x: torch.Tensor) -> torch.Tensor:
    """float32 -> bf16, to nearest even: what torch does itself."""
    return x.to(torch.bfloat16)


def stochastic_bf16_reference(x: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """float32 -> one of the two bf16 around it; random : int64 in [0, 2^16), as many."""
    bits = (x.view(torch.int32).to(torch.int64) + random) >> 16 & 0xFFFF
    signed = torch.where(bits >= 1 << 15, bits - (1 << 16), bits).to(torch.int16)
    rounded = signed.view(torch.bfloat16)
    return torch.where(x.isnan(), torch.nan, rounded)
