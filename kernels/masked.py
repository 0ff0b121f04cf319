"""Masked loads and stores of floats at an int64 address, widened and rounded.

A mask that holds for 16 bytes at a time (`at // TOGETHER < count // TOGETHER`) keeps accesses
128 bits wide. bf16 goes through integers, since Triton's interpreter gets bf16 silently wrong.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from .launch import tl, triton
from .rounding import round_bf16, widen_bf16


@triton.jit
def float_pointer(address, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """An int64 address as a pointer, for bf16 to uint16; ALIGNED: to a multiple of 16 bytes."""
    if DTYPE.is_bf16():
        pointer = address.to(tl.pointer_type(tl.uint16))
    else:
        pointer = address.to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def load_floats(
    address, at, mask, DTYPE: tl.constexpr, COMPUTE: tl.constexpr, ALIGNED: tl.constexpr
):
    """Elements `at` from `address` on, as COMPUTE (float32 or float64); 0 where not in the mask."""
    value = tl.load(float_pointer(address, DTYPE, ALIGNED) + at, mask=mask, other=0)
    if DTYPE.is_bf16():
        value = widen_bf16(value)
    return value.to(COMPUTE)


@triton.jit
def store_floats(address, at, value, mask, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Store float32 (float64 for float64) as DTYPE, rounded to the nearest, ties to even."""
    if DTYPE.is_bf16():
        value = round_bf16(value)
    else:
        value = value.to(DTYPE)
    tl.store(float_pointer(address, DTYPE, ALIGNED) + at, value, mask=mask)
