"""``F.embedding`` with a large paged table: only the pages of the rows looked up are brought in.

PyTorch's own way pins the whole table, and its gradient is a dense tensor as large as that. Smaller
tables, and calls that somebody wants to see or to change the ops of, go that way. A large table's
gradient is in pages (``table_gradient.py``), or sparse, exactly as PyTorch's own, if asked for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

from ..tensor.dispatcher import serve_call
from ..tensor.paged_tensor import PagedTensor
from .table_gradient import embedding_gradient
from .table_rows import can_be_whole, is_large, is_table, look_up

EMBEDDING = torch.nn.functional.embedding
_modes = torch._C._len_torch_dispatch_stack
_functorch_level = torch._C._functorch.peek_interpreter_stack


def embedding(
    indices: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """``F.embedding``; ``NotImplemented`` where PyTorch's own way has to be taken.

    indices : int64 or int32, any shape, on the weight's device. On CUDA the call waits for them.
    weight : PagedTensor [rows, D], large, contiguous and all of its storage.
    """
    if type(weight) is not PagedTensor or max_norm is not None:
        return NotImplemented
    if not is_table(weight) or not is_large(weight) or not _are_indices(indices, weight):
        return NotImplemented
    padding = _padding(padding_idx, weight.size(0))
    if padding is None or _is_watched(weight):
        return NotImplemented
    if type(indices) is PagedTensor:
        indices = indices.detach().to_dense()
    indices = indices.long()
    if torch.is_grad_enabled() and weight.requires_grad:
        return _Lookup.apply(weight, indices, padding, scale_grad_by_freq, sparse)  # type: ignore[no-untyped-call]
    return look_up(weight, indices)


def _are_indices(indices: Any, weight: PagedTensor) -> bool:
    return (
        type(indices) in (torch.Tensor, PagedTensor)
        and indices.dtype in (torch.int64, torch.int32)
        and indices.layout is torch.strided
        and indices.device.type == weight.device.type
    )


def _padding(given: int | None, rows: int) -> int | None:
    """As a row number, -1 for none; ``None`` for what torch refuses."""
    if given is None:
        return -1
    if not -rows <= given < rows:
        return None
    return given % rows


def _is_watched(weight: PagedTensor) -> bool:
    """Somebody wants to see, or to change, the ops that it is made of. (Autocast leaves embeddings
    alone; a mode cannot see a table that is never on the device.)"""
    return bool(
        (_modes() and can_be_whole(weight))
        or _functorch_level() is not None
        or forward_ad._current_level >= 0
    )


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        weight: PagedTensor,
        indices: torch.Tensor,
        padding_idx: int,
        scale_grad_by_freq: bool,
        sparse: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(indices)
        ctx.table = weight.detach()  # its geometry; the values are not wanted any more
        ctx.options = padding_idx, scale_grad_by_freq
        ctx.sparse = sparse
        return look_up(ctx.table, indices)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (indices,) = ctx.saved_tensors
        if type(indices) is PagedTensor:
            indices = indices.to_dense()
        rows, options = ctx.table.size(0), ctx.options
        aten = torch.ops.aten
        if ctx.sparse:
            of_weight = aten.embedding_sparse_backward(grad, indices, rows, *options)
        elif torch.is_grad_enabled():  # its own history is wanted: only a dense one can have it
            of_weight = aten.embedding_dense_backward(grad, indices, rows, *options)
        else:
            flat = grad.reshape(-1, grad.size(-1)).contiguous()
            of_weight = embedding_gradient(ctx.table, flat, indices, *options)
        return of_weight, None, None, None, None


serve_call(EMBEDDING, embedding)
