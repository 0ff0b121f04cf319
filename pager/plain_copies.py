"""Plain tensors with a PagedTensor's values, and what ``repr`` shows of it."""

from __future__ import annotations

from typing import Any

import torch

from .dense_run import PLAIN, run_dense
from .paged_tensor import PagedTensor

_PRINT_LIMIT_BYTES = 1 << 20


def to_dense(tensor: PagedTensor) -> torch.Tensor:
    """See ``PagedTensor.to_dense``."""
    return _ToDense.apply(tensor)  # type: ignore[no-any-return,no-untyped-call]


class _ToDense(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: PagedTensor) -> torch.Tensor:
        dense: torch.Tensor = run_dense(_copy_out, PLAIN, (tensor.detach(),), {})
        return dense

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


# A copy with the same strides where they are dense, contiguous else. Page kernels know it.
_copy_out = torch.ops.aten.clone.default


def dense_twin(tensor: PagedTensor) -> torch.Tensor:
    """An ordinary leaf tensor (an ``nn.Parameter`` for a parameter) with the same values."""
    dense: torch.Tensor = run_dense(_copy_out, PLAIN, (tensor.detach(),), {})
    if getattr(tensor, "_is_param", False):
        return torch.nn.Parameter(dense, requires_grad=tensor.requires_grad)
    dense.requires_grad_(tensor.requires_grad and tensor.is_leaf)
    return dense


def describe_tensor(tensor: PagedTensor) -> str:
    """``repr``: the values while that is cheap, the geometry always."""
    pager = tensor._storage.pager
    shape = f"shape={tuple(tensor.size())}, dtype={tensor.dtype}"
    if pager.closed_reason is not None:
        return f"PagedTensor({shape}, {pager.closed_reason})"
    grad = ", requires_grad=True" if tensor.requires_grad else ""
    if tensor.numel() * tensor.element_size() > _PRINT_LIMIT_BYTES:
        return f"PagedTensor({shape}, residency={tensor.residency()}{grad})"
    with torch.no_grad():
        return f"PagedTensor({dense_twin(tensor).detach()!r}{grad})"
