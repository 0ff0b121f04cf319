"""The one table of elementwise ops: for each its Triton expression and the torch op that it is.

An expression is a device function of four values, all of one type; it ignores those that it does
not need. Products that are added are fused explicitly, where torch's CUDA kernels fuse them, and
launches turn all other fusion off: what is written here is what is rounded.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .launch import tl, triton

__all__ = ["OPS", "Op", "op_named"]


@dataclass(frozen=True)
class Op:
    """An elementwise op of 1 to 4 inputs.

    inputs : their names, in order.
    expression : the device function.
    torch : the same on tensors of one dtype and length, with ``out=``; numbers for `parameters`.
    defaults : of the last inputs.
    parameters : how many of the last inputs are numbers or 0-dim tensors, never one per element.
    moves : whether it only moves values, so that any dtype will do that all operands share.
    condition : whether the first input is true or false.
    """

    inputs: tuple[str, ...]
    expression: Any
    torch: Callable[..., torch.Tensor]
    defaults: tuple[float, ...] = ()
    parameters: int = 0
    moves: bool = False
    condition: bool = False


@triton.jit
def _divide(x, y):
    if x.dtype == tl.float64:
        return x / y
    else:
        return tl.math.div_rn(x, y)


@triton.jit
def _root(x):
    if x.dtype == tl.float64:
        return tl.math.sqrt(x)
    else:
        return tl.math.sqrt_rn(x)


@triton.jit
def _smaller(x, y):
    return tl.where((x <= y) | (x != x), x, y)


@triton.jit
def _larger(x, y):
    return tl.where((x >= y) | (x != x), x, y)


@triton.jit
def _first_of(x, y, z, w):
    return x


@triton.jit
def _add_of(x, y, z, w):
    return tl.fma(z, y, x)


@triton.jit
def _sub_of(x, y, z, w):
    return tl.fma(z * -1.0, y, x)


@triton.jit
def _mul_of(x, y, z, w):
    return x * y


@triton.jit
def _div_of(x, y, z, w):
    return _divide(x, y)


@triton.jit
def _addcmul_of(x, y, z, w):
    return tl.where(w == 1.0, tl.fma(y, z, x), tl.fma(w, y * z, x))


@triton.jit
def _addcdiv_of(x, y, z, w):
    return tl.fma(w, _divide(y, z), x)


@triton.jit
def _lerp_of(x, y, z, w):
    way = y - x
    return tl.where(tl.abs(z) < 0.5, tl.fma(z, way, x), tl.fma(way * -1.0, 1.0 - z, y))


@triton.jit
def _sqrt_of(x, y, z, w):
    return _root(x)


@triton.jit
def _rsqrt_of(x, y, z, w):
    return _divide(tl.full(x.shape, 1.0, x.dtype), _root(x))


@triton.jit
def _reciprocal_of(x, y, z, w):
    return _divide(tl.full(x.shape, 1.0, x.dtype), x)


@triton.jit
def _neg_of(x, y, z, w):
    return x * -1.0  # Triton's -x is 0 - x, which loses the sign of 0


@triton.jit
def _abs_of(x, y, z, w):
    return tl.abs(x)


@triton.jit
def _sign_of(x, y, z, w):
    return tl.where(x > 0.0, 1.0, tl.where(x < 0.0, -1.0, 0.0)).to(x.dtype)


@triton.jit
def _maximum_of(x, y, z, w):
    return _larger(x, y)


@triton.jit
def _minimum_of(x, y, z, w):
    return _smaller(x, y)


@triton.jit
def _clamp_of(x, y, z, w):
    return _smaller(_larger(x, y), z)


@triton.jit
def _where_of(x, y, z, w):
    return tl.where(x != 0, y, z)


def _copy(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    return x if out is None else out.copy_(x)


def _fill(value: float, out: torch.Tensor | None = None) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64) if out is None else out.fill_(value)


_UNARY, _BINARY = ("x",), ("x", "other")
_INFINITE = (-math.inf, math.inf)

OPS: dict[str, Op] = {
    "fill": Op(("value",), _first_of, _fill, parameters=1, moves=True),
    "copy": Op(_UNARY, _first_of, _copy, moves=True),
    "where": Op(("condition", "x", "other"), _where_of, torch.where, moves=True, condition=True),
    "add": Op(
        (*_BINARY, "alpha"),
        _add_of,
        lambda x, y, alpha, out=None: torch.add(x, y, alpha=alpha, out=out),
        defaults=(1.0,),
        parameters=1,
    ),
    "sub": Op(
        (*_BINARY, "alpha"),
        _sub_of,
        lambda x, y, alpha, out=None: torch.sub(x, y, alpha=alpha, out=out),
        defaults=(1.0,),
        parameters=1,
    ),
    "mul": Op(_BINARY, _mul_of, torch.mul),
    "div": Op(_BINARY, _div_of, torch.div),
    "addcmul": Op(
        ("x", "tensor1", "tensor2", "value"),
        _addcmul_of,
        lambda x, y, z, value, out=None: torch.addcmul(x, y, z, value=value, out=out),
        defaults=(1.0,),
        parameters=1,
    ),
    "addcdiv": Op(
        ("x", "tensor1", "tensor2", "value"),
        _addcdiv_of,
        lambda x, y, z, value, out=None: torch.addcdiv(x, y, z, value=value, out=out),
        defaults=(1.0,),
        parameters=1,
    ),
    "lerp": Op(("x", "end", "weight"), _lerp_of, torch.lerp),
    "sqrt": Op(_UNARY, _sqrt_of, torch.sqrt),
    "rsqrt": Op(_UNARY, _rsqrt_of, torch.rsqrt),
    "reciprocal": Op(_UNARY, _reciprocal_of, torch.reciprocal),
    "neg": Op(_UNARY, _neg_of, torch.neg),
    "abs": Op(_UNARY, _abs_of, torch.abs),
    "sign": Op(_UNARY, _sign_of, torch.sign),
    "maximum": Op(_BINARY, _maximum_of, torch.maximum),
    "minimum": Op(_BINARY, _minimum_of, torch.minimum),
    "clamp": Op(("x", "min", "max"), _clamp_of, torch.clamp, defaults=_INFINITE),
}


def op_named(name: str) -> Op:
    """Raises ValueError for an op that is not in the table."""
    if name not in OPS:
        raise ValueError(f"there is no elementwise op {name!r}; choose from {', '.join(OPS)}")
    return OPS[name]
