"""Linear layers over a weight in pages; gradients flow to x and to the bias.

The weight's own gradient has no tensor to flow to. It goes to pages by an op of its own,
`linear_weight_grad`, from what the caller has anyway: x, and the gradient of the result.

Backward reads the weight through the same table. Neither arena nor table are saved in autograd's
sense: pages of others come and go between forward and backward, and each such write counts up the
version of the arena that all share. As for every kernel, that W is there, unchanged, is the
caller's to see to. There is no autocast: x and grad have the weight's dtype.

Matrix arguments: `arena`, `frame_of` (int32 [pages] on the arena's device), `page_bytes`, `dtype`,
`rows` and `columns` are those of `PagedMatrix`; those that other arguments tell are left out.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from .linear import linear_forward
from .linear_grad import linear_input_grad, linear_weight_grad
from .ops_define import define
from .paged_matrix import PagedMatrix

__all__: list[str] = []


def _flat(x: torch.Tensor) -> torch.Tensor:
    """[..., K] as [M, K], each row contiguous."""
    flat = x.detach().reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return flat if flat.stride(-1) == 1 or flat.shape[1] < 2 else flat.contiguous()


def _matrix(
    arena: torch.Tensor,
    frame_of: torch.Tensor,
    page_bytes: int,
    dtype: torch.dtype,
    rows: int,
    columns: int,
) -> PagedMatrix:
    return PagedMatrix(arena, frame_of, page_bytes, dtype, rows, columns)


def _linear(
    x: torch.Tensor,
    arena: torch.Tensor,
    frame_of: torch.Tensor,
    page_bytes: int,
    dtype: torch.dtype,
    rows: int,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    flat = _flat(x)
    weight = _matrix(arena, frame_of, page_bytes, dtype, rows, flat.shape[1])
    out = torch.empty(*x.shape[:-1], rows, dtype=dtype, device=arena.device)
    linear_forward(flat, weight, out.view(flat.shape[0], rows), bias)
    return out


def _linear_fake(
    x: torch.Tensor,
    arena: torch.Tensor,
    frame_of: torch.Tensor,
    page_bytes: int,
    dtype: torch.dtype,
    rows: int,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    return arena.new_empty((*x.shape[:-1], rows), dtype=dtype)


def _linear_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, arena, frame_of, page_bytes, dtype, _rows, bias = inputs
    ctx.matrix = (arena, frame_of, page_bytes, dtype)
    ctx.columns, ctx.bias_dtype = x.shape[-1], None if bias is None else bias.dtype


def _linear_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    dx = db = None
    if ctx.needs_input_grad[0]:
        dx = torch.ops.tensorpager.linear_input_grad(grad, *ctx.matrix, ctx.columns)
    if ctx.needs_input_grad[6]:
        db = grad.reshape(-1, grad.shape[-1]).sum(0).to(ctx.bias_dtype)
    return dx, None, None, None, None, None, db


def _linear_into(
    x: torch.Tensor,
    arena: torch.Tensor,
    frame_of: torch.Tensor,
    page_bytes: int,
    dtype: torch.dtype,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
    begin: int = 0,
    end: int | None = None,
) -> None:
    weight = _matrix(arena, frame_of, page_bytes, dtype, out.shape[1], x.shape[1])
    slab = (begin, weight.rows if end is None else end)
    linear_forward(x.detach(), weight, out.detach(), bias, slab)


def _input_grad(
    grad: torch.Tensor,
    arena: torch.Tensor,
    frame_of: torch.Tensor,
    page_bytes: int,
    dtype: torch.dtype,
    columns: int,
) -> torch.Tensor:
    flat = _flat(grad)
    weight = _matrix(arena, frame_of, page_bytes, dtype, flat.shape[1], columns)
    out = torch.empty(*grad.shape[:-1], columns, dtype=dtype, device=arena.device)
    linear_input_grad(flat, weight, out.view(flat.shape[0], columns))
    return out


def _input_grad_fake(
    grad: torch.Tensor,
    arena: torch.Tensor,
    frame_of: torch.Tensor,
    page_bytes: int,
    dtype: torch.dtype,
    columns: int,
) -> torch.Tensor:
    return arena.new_empty((*grad.shape[:-1], columns), dtype=dtype)


def _input_grad_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    grad, arena, frame_of, page_bytes, dtype, _columns = inputs
    ctx.matrix, ctx.rows = (arena, frame_of, page_bytes, dtype), grad.shape[-1]


def _input_grad_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    again = torch.ops.tensorpager.linear(grad, *ctx.matrix, ctx.rows, None)
    return again, None, None, None, None, None


def _input_grad_into(
    grad: torch.Tensor,
    arena: torch.Tensor,
    frame_of: torch.Tensor,
    page_bytes: int,
    dtype: torch.dtype,
    out: torch.Tensor,
    accumulate: bool = False,
    begin: int = 0,
    end: int | None = None,
) -> None:
    weight = _matrix(arena, frame_of, page_bytes, dtype, grad.shape[1], out.shape[1])
    slab = (begin, weight.rows if end is None else end)
    linear_input_grad(grad.detach(), weight, out.detach(), slab, accumulate)


def _weight_grad(
    grad: torch.Tensor,
    x: torch.Tensor,
    arena: torch.Tensor,
    frame_of: torch.Tensor,
    page_bytes: int,
    dtype: torch.dtype,
    accumulate: bool = False,
    begin: int = 0,
    end: int | None = None,
) -> None:
    flat, flat_x = _flat(grad), _flat(x)
    if flat.shape[0] != flat_x.shape[0]:
        raise ValueError(
            f"grad is {tuple(grad.shape)} and x {tuple(x.shape)}; they must agree but for the last "
            "size"
        )
    matrix = _matrix(arena, frame_of, page_bytes, dtype, flat.shape[1], flat_x.shape[1])
    slab = (begin, matrix.rows if end is None else end)
    linear_weight_grad(flat, flat_x, matrix, slab, accumulate)


_WEIGHT = "Tensor arena, Tensor frame_of, int page_bytes, ScalarType dtype"
_SLAB = "SymInt begin=0, SymInt? end=None"

# The bias has no default: the dispatcher drops arguments that equal theirs, and autograd would see
# one input less.
define(
    f"linear(Tensor x, {_WEIGHT}, SymInt rows, Tensor? bias) -> Tensor",
    _linear,
    _linear_fake,
    backward=_linear_backward,
    setup_context=_linear_context,
)
define(
    f"linear_into(Tensor x, {_WEIGHT}, Tensor(a!) out, Tensor? bias=None, {_SLAB}) -> ()",
    _linear_into,
    instead="use tensorpager::linear, which can be, or call it under torch.no_grad()",
)
define(
    f"linear_input_grad(Tensor grad, {_WEIGHT}, SymInt columns) -> Tensor",
    _input_grad,
    _input_grad_fake,
    backward=_input_grad_backward,
    setup_context=_input_grad_context,
)
define(
    f"linear_input_grad_into(Tensor grad, {_WEIGHT}, Tensor(a!) out, bool accumulate=False, "
    f"{_SLAB}) -> ()",
    _input_grad_into,
    instead="use tensorpager::linear_input_grad, which can be, or call it under torch.no_grad()",
)
define(
    "linear_weight_grad(Tensor grad, Tensor x, Tensor(a!) arena, Tensor frame_of, int page_bytes, "
    f"ScalarType dtype, bool accumulate=False, {_SLAB}) -> ()",
    _weight_grad,
)
