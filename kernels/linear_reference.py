"""The three paged matrix products in plain torch: what runs on a CPU, and what kernels must equal.

Each stretch of whole rows that lies in consecutive frames is multiplied where it is, by torch's own
product; only rows that two runs of frames share are assembled, one at a time. With all frames
consecutive there is one stretch, and the result is bit for bit that of torch's linear layer.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .linear_tile import check_dense
from .paged_matrix import DTYPES, PagedMatrix, RowStretch, row_stretches

CAST_BYTES = 16 << 20  # largest float32 copy made of a piece of a half-precision weight


def linear_forward_reference(
    x: torch.Tensor,
    weight: PagedMatrix,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
    rows: tuple[int, int] | None = None,
) -> None:
    """`linear_forward` in plain torch: one product per stretch.

    In the weight's dtype if `out` and `bias` have it too, else in float32.
    """
    slab = weight.slab(rows)
    check_forward(x, weight, out, bias)
    if weight.columns == 0:
        out[:, slab[0] : slab[1]] = 0 if bias is None else bias[slab[0] : slab[1]]
        return
    cast = weight.dtype != out.dtype or (bias is not None and bias.dtype != weight.dtype)
    dtype = torch.float32 if cast else weight.dtype
    x = x.to(dtype)
    for stretch in _stretches(weight, slab, cast):
        here = slice(stretch.begin, stretch.end)
        part = None if bias is None else bias[here].to(dtype)
        product = torch.nn.functional.linear(x, stretch.dense().to(dtype), part)
        out[:, here].copy_(product)


def linear_input_grad_reference(
    grad: torch.Tensor,
    weight: PagedMatrix,
    out: torch.Tensor,
    rows: tuple[int, int] | None = None,
    accumulate: bool = False,
) -> None:
    """`linear_input_grad` in plain torch: one product per stretch, added up in order.

    In the weight's dtype if there is one stretch and nothing to add to, else in float32.
    """
    slab = weight.slab(rows)
    check_input_grad(grad, weight, out)
    parts = list(_stretches(weight, slab, cast=False))
    if not parts:
        if not accumulate:
            out.zero_()
        return
    if len(parts) == 1 and not accumulate and out.dtype == weight.dtype:
        torch.mm(grad[:, slice(*slab)], parts[0].dense(), out=out)
        return
    total = out if out.dtype == torch.float32 else out.float()
    if not accumulate:
        total.zero_()
    for stretch in _stretches(weight, slab, weight.dtype != torch.float32):
        here = grad[:, stretch.begin : stretch.end]
        total.addmm_(here.float(), stretch.dense().float())
    if total is not out:
        out.copy_(total)


def linear_weight_grad_reference(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight_grad: PagedMatrix,
    rows: tuple[int, int] | None = None,
    accumulate: bool = False,
) -> None:
    """`linear_weight_grad` in plain torch: one product per stretch, written where it belongs.

    In the operands' dtype if the gradient has it too and nothing is added to, else in float32.
    """
    slab = weight_grad.slab(rows)
    check_weight_grad(grad, x, weight_grad)
    cast = weight_grad.dtype != torch.float32 or grad.dtype != weight_grad.dtype
    cast = cast and (accumulate or grad.dtype != weight_grad.dtype)
    dtype = torch.float32 if cast else grad.dtype
    x = x.to(dtype)
    for stretch in _stretches(weight_grad, slab, cast):
        product = grad[:, stretch.begin : stretch.end].to(dtype).t() @ x
        if accumulate:
            product += stretch.dense()
        stretch.store(product)


def check_forward(
    x: torch.Tensor, weight: PagedMatrix, out: torch.Tensor, bias: torch.Tensor | None
) -> None:
    """Raise ValueError for operands that `linear_forward` does not take."""
    m = x.shape[0] if x.dim() == 2 else 1
    either = (weight.dtype, torch.float32)
    check_dense("x", x, (m, weight.columns), weight)
    check_dense("out", out, (m, weight.rows), weight, either)
    if bias is not None:
        if bias.dim() != 1 or not bias.is_contiguous():
            raise ValueError(
                f"bias has shape {tuple(bias.shape)} and stride {bias.stride()}; "
                f"pass {weight.rows} contiguous elements"
            )
        check_dense("bias", bias[None], (1, weight.rows), weight, either)


def check_input_grad(grad: torch.Tensor, weight: PagedMatrix, out: torch.Tensor) -> None:
    """Raise ValueError for operands that `linear_input_grad` does not take."""
    m = grad.shape[0] if grad.dim() == 2 else 1
    check_dense("grad", grad, (m, weight.rows), weight)
    check_dense("out", out, (m, weight.columns), weight, (weight.dtype, torch.float32))


def check_weight_grad(grad: torch.Tensor, x: torch.Tensor, weight_grad: PagedMatrix) -> None:
    """Raise ValueError for operands that `linear_weight_grad` does not take."""
    m = x.shape[0] if x.dim() == 2 else 1
    single = weight_grad.dtype == torch.float32
    dtypes = DTYPES if single else (weight_grad.dtype,)
    check_dense("x", x, (m, weight_grad.columns), weight_grad, dtypes)
    check_dense("grad", grad, (m, weight_grad.rows), weight_grad, (x.dtype,))


def _stretches(weight: PagedMatrix, slab: tuple[int, int], cast: bool) -> Iterator[RowStretch]:
    """Stretches, cut so that float32 copies of them stay small if there are going to be any."""
    longest = max(1, CAST_BYTES // (4 * weight.columns)) if cast and weight.columns else None
    return row_stretches(weight, slab, longest)
