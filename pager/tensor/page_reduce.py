"""Which reductions the page kernels do: of a whole paged tensor to one number.

Sums, means and norms of pages in scattered frames differ from torch's on one dense tensor in
rounding: ``kernels/reduce.py`` states the bound. ``amax`` and ``amin`` are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .page_ops import bind
from .page_rules import FLOATS, is_whole
from .paged_tensor import PagedTensor

aten = torch.ops.aten

_HOW = {
    aten.sum.default: "sum",
    aten.sum.dim_IntList: "sum",
    aten.mean.default: "mean",
    aten.mean.dim: "mean",
    aten.amax.default: "amax",
    aten.max.default: "amax",
    aten._foreach_max.default: "amax",
    aten.amin.default: "amin",
    aten.min.default: "amin",
    aten.linalg_vector_norm.default: "norm",
    aten.norm.Scalar: "norm",
    aten.norm.ScalarOpt_dim: "norm",
    aten.norm.ScalarOpt_dtype: "norm",
    aten._foreach_norm.Scalar: "norm",
}
# Functions that the dispatcher runs as one op where nobody wants gradients.
_FUNCTIONS: dict[Any, tuple[tuple[str, ...], tuple[Any, ...]]] = {
    torch.norm: (("self", "p", "dim", "keepdim", "out", "dtype"), ("fro", None, False, None, None)),
    torch.Tensor.norm: (("self", "p", "dim", "keepdim", "dtype"), ("fro", None, False, None)),
    torch.linalg.norm: (
        ("self", "ord", "dim", "keepdim", "out", "dtype"),
        (None, None, False, None, None),
    ),
}
LISTS = (aten._foreach_norm.Scalar, aten._foreach_max.default)
UNSCALE = aten._amp_foreach_non_finite_check_and_unscale_.default


@dataclass(frozen=True, eq=False)
class Reduction:
    """``tensor`` to one number; see ``kernels.reduce``. ``dtype``: of the result."""

    how: str
    tensor: PagedTensor
    p: float
    dtype: torch.dtype

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.tensor,)


@dataclass(frozen=True, eq=False)
class Unscale:
    """``tensor *= inv_scale``; ``found_inf`` becomes 1 if an element is not finite."""

    tensor: PagedTensor
    found_inf: torch.Tensor
    inv_scale: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.tensor,)


def reduction_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Reduction | None:
    """``None`` for everything but a reduction of one whole paged tensor (or of a list of one)."""
    how, known = _HOW.get(func), _FUNCTIONS.get(func)
    if how is not None:
        arguments = func._schema.arguments
        names = tuple(argument.name for argument in arguments)
        values = bind(names, [a.default_value for a in arguments], args, kwargs)
    elif known is not None:
        names, defaults = known
        kwargs = {"self" if k in ("input", "A") else k: v for k, v in kwargs.items()}
        values, how = bind(names, [None, *defaults], args, kwargs), "norm"
    else:
        return None
    given = dict(zip(names, values))
    tensor = given["self"]
    if type(tensor) in (list, tuple) and len(tensor) == 1:
        tensor = tensor[0]
    if type(tensor) is not PagedTensor or tensor.dtype not in FLOATS or not is_whole(tensor):
        return None
    if given.get("dim") not in (None, [], ()) or given.get("keepdim") or given.get("out"):
        return None
    if func is torch.linalg.norm and given["ord"] is not None:
        return None  # of a matrix
    p = _order(given)
    dtype = _result_dtype(tensor.dtype, given.get("dtype"))
    if p is None or dtype is None or tensor.dim() == 0:
        return None
    return Reduction(how, tensor, p, dtype)


def unscale_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Unscale | None:
    """GradScaler's check of one paged gradient (a list of one)."""
    if func is not UNSCALE or kwargs:
        return None
    tensors, found_inf, inv_scale = args
    scalars = (found_inf, inv_scale)
    if any(type(s) is not torch.Tensor or s.dtype is not torch.float32 for s in scalars):
        return None
    tensor = tensors[0] if len(tensors) == 1 else None
    if type(tensor) is not PagedTensor or tensor.dtype not in FLOATS or not is_whole(tensor):
        return None
    if any(s.numel() != 1 or s.device.type != tensor.device.type for s in scalars):
        return None
    return Unscale(tensor, found_inf, inv_scale)


def _order(given: dict[str, Any]) -> float | None:
    """Of a norm; 2 where nobody says."""
    p = given.get("ord", given.get("p"))
    if p is None or p == "fro":
        return 2.0
    return float(p) if isinstance(p, int | float) else None


def _result_dtype(own: torch.dtype, asked: torch.dtype | None) -> torch.dtype | None:
    """``None`` where torch would convert every element to a dtype of another precision first."""
    if asked is None or asked is own:
        return own
    from_half = own in (torch.float16, torch.bfloat16) and asked is torch.float32
    return asked if from_half else None


# -- of slabs --------------------------------------------------------------------------------------
def part_of(call: Reduction) -> Reduction:
    """What is to be done with each page: as ``call``, in float64."""
    return replace(call, how="sum" if call.how == "mean" else call.how, dtype=torch.float64)


def joined(call: Reduction, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The result from those of :func:`part_of`, in the order of the pages."""
    values = torch.stack(list(parts))
    if call.how in ("amax", "amin"):
        value = values.amax() if call.how == "amax" else values.amin()
    elif call.how != "norm":
        value = values.sum()
        if call.how == "mean":
            value = value / call.tensor.numel()
    elif call.p == 0:
        value = values.sum()
    else:
        value = torch.linalg.vector_norm(values, call.p)
    return value.to(call.dtype)
