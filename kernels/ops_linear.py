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
from .ops_define import Call, define
from .paged_matrix import PagedMatrix

__all__: list[str] = []


def _flat(x: torch.Tensor) -> torch.Tensor:
    """[..., K] as [M, K], each row contiguous."""
    flat = x.detach().reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return flat if flat.stride(-1) == 1 or flat.shape[1] < 2 else flat.contiguous()


def _matrix(call: Call, rows: int, columns: int) -> PagedMatrix:
    """The weight, or its gradient."""
    return PagedMatrix(call.arena, call.frame_of, call.page_bytes, call.dtype, rows, columns)


def _slab(call: Call, weight: PagedMatrix) -> tuple[int, int]:
    return call.begin, weight.rows if call.end is None else call.end


def _products(call: Call) -> torch.Tensor:
    """Room for x Wᵀ."""
    out: torch.Tensor = call.arena.new_empty((*call.x.shape[:-1], call.rows), dtype=call.dtype)
    return out


def _linear(call: Call) -> torch.Tensor:
    out, flat = _products(call), _flat(call.x)
    weight = _matrix(call, call.rows, flat.shape[1])
    linear_forward(flat, weight, out.view(flat.shape[0], call.rows), call.bias)
    return out


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


def _linear_into(call: Call) -> None:
    weight = _matrix(call, call.out.shape[1], call.x.shape[1])
    linear_forward(call.x.detach(), weight, call.out.detach(), call.bias, _slab(call, weight))


def _gradients(call: Call) -> torch.Tensor:
    """Room for the gradient of x."""
    shape = (*call.grad.shape[:-1], call.columns)
    out: torch.Tensor = call.arena.new_empty(shape, dtype=call.dtype)
    return out


def _input_grad(call: Call) -> torch.Tensor:
    out, flat = _gradients(call), _flat(call.grad)
    weight = _matrix(call, flat.shape[1], call.columns)
    linear_input_grad(flat, weight, out.view(flat.shape[0], call.columns))
    return out


def _input_grad_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    grad, arena, frame_of, page_bytes, dtype, _columns = inputs
    ctx.matrix, ctx.rows = (arena, frame_of, page_bytes, dtype), grad.shape[-1]


def _input_grad_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    again = torch.ops.tensorpager.linear(grad, *ctx.matrix, ctx.rows, None)
    return again, None, None, None, None, None


def _input_grad_into(call: Call) -> None:
    weight = _matrix(call, call.grad.shape[1], call.out.shape[1])
    slab = _slab(call, weight)
    linear_input_grad(call.grad.detach(), weight, call.out.detach(), slab, call.accumulate)


def _weight_grad(call: Call) -> None:
    flat, flat_x = _flat(call.grad), _flat(call.x)
    if flat.shape[0] != flat_x.shape[0]:
        raise ValueError(
            f"grad is {tuple(call.grad.shape)} and x {tuple(call.x.shape)}; they must agree but "
            "for the last size"
        )
    matrix = _matrix(call, flat.shape[1], flat_x.shape[1])
    linear_weight_grad(flat, flat_x, matrix, _slab(call, matrix), call.accumulate)


_WEIGHT = "Tensor arena, Tensor frame_of, int page_bytes, ScalarType dtype"
_SLAB = "SymInt begin=0, SymInt? end=None"

# The bias has no default: the dispatcher drops arguments that equal theirs, and autograd would see
# one input less.
define(
    f"linear(Tensor x, {_WEIGHT}, SymInt rows, Tensor? bias) -> Tensor",
    _linear,
    _products,
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
    _gradients,
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
