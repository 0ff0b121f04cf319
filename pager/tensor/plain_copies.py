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
    return _as_leaf(tensor, run_dense(_copy_out, PLAIN, (tensor.detach(),), {}))


def _as_leaf(tensor: PagedTensor, dense: torch.Tensor) -> torch.Tensor:
    if getattr(tensor, "_is_param", False):
        return torch.nn.Parameter(dense, requires_grad=tensor.requires_grad)
    dense.requires_grad_(tensor.requires_grad and tensor.is_leaf)
    return dense


def pickled_twin(tensor: PagedTensor) -> torch.Tensor:
    """The same to be pickled: what is tied stays tied, and a whole model need not be in memory
    (``images.py``)."""
    images = tensor._storage.pager.images
    if tensor.device.type != "cpu" or not tensor.numel():
        return dense_twin(tensor)
    twin = _as_leaf(tensor, images.plain_twin(tensor))
    return twin.requires_grad_(tensor.requires_grad)  # plain ones with a history have it too


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
