"""Lookups in a table in pages, their gradients, and softmax over slabs of classes, as ops.

Nothing here is differentiated by autograd. An embedding's gradient has no tensor to flow to, since
its weight is pages. Let the looked-up rows require a gradient, and put it where it belongs::

    rows = ops.gather_rows(arena, frame_of, page_bytes, dtype, V, D, indices).requires_grad_()
    loss_of(rows).backward()
    ops.add_rows(arena, frames_of_gradient, page_bytes, dtype, V,
                 rows.grad.view(-1, D), *ops.group_rows(indices), False)

`frame_of` is int32 [pages] on the arena's device; pages without a row looked up may be at -1.
"""

from __future__ import annotations

import numpy as np
import torch

from .ops_define import define
from .pieces import Paged
from .row_sums import RowGroups, add_rows, group_rows, sum_rows
from .rows import gather_rows
from .softmax_slabs import softmax_grad_, softmax_update

__all__: list[str] = []


def _table(
    arena: torch.Tensor,
    frame_of: torch.Tensor,
    page_bytes: int,
    dtype: torch.dtype,
    numel: int,
) -> Paged:
    """The table; on a device the host does not look at its frames, so only their number is known.

    Launchers are given `frame_of` beside it, which is what kernels read.
    """
    if frame_of.device.type == "cpu":
        frames = frame_of.detach().numpy()
    else:
        frames = np.full(frame_of.shape, -1, np.int32)
    return Paged(arena, frames, page_bytes, dtype, numel)


def _gather_rows(
    arena: torch.Tensor,
    frame_of: torch.Tensor,
    page_bytes: int,
    dtype: torch.dtype,
    rows: int,
    columns: int,
    indices: torch.Tensor,
) -> torch.Tensor:
    flat = indices.reshape(-1)
    out = torch.empty(*indices.shape, columns, dtype=dtype, device=arena.device)
    table = _table(arena, frame_of, page_bytes, dtype, rows * columns)
    gather_rows(table, flat, out.view(flat.numel(), columns), frame_of)
    return out


def _gather_rows_fake(
    arena: torch.Tensor,
    frame_of: torch.Tensor,
    page_bytes: int,
    dtype: torch.dtype,
    rows: int,
    columns: int,
    indices: torch.Tensor,
) -> torch.Tensor:
    return arena.new_empty((*indices.shape, columns), dtype=dtype)


def _group_rows(
    indices: torch.Tensor, padding_idx: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    groups = group_rows(indices, padding_idx)
    return groups.ids, groups.order, groups.starts


def _group_rows_fake(
    indices: torch.Tensor, padding_idx: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    context = torch.library.get_ctx()
    distinct = context.new_dynamic_size()
    counted = indices.numel() if padding_idx is None else context.new_dynamic_size()
    return (
        indices.new_empty((distinct,)),
        indices.new_empty((counted,), dtype=torch.int32),
        indices.new_empty((distinct + 1,), dtype=torch.int32),
    )


def _sum_rows(
    grad_out: torch.Tensor,
    ids: torch.Tensor,
    order: torch.Tensor,
    starts: torch.Tensor,
    dtype: torch.dtype | None = None,
    scale_grad_by_freq: bool = False,
) -> torch.Tensor:
    out = grad_out.new_empty((ids.numel(), grad_out.shape[1]), dtype=dtype)
    groups = RowGroups(ids, order, starts, grad_out.shape[0])
    sum_rows(grad_out.detach(), groups, out, scale_grad_by_freq)
    return out


def _sum_rows_fake(
    grad_out: torch.Tensor,
    ids: torch.Tensor,
    order: torch.Tensor,
    starts: torch.Tensor,
    dtype: torch.dtype | None = None,
    scale_grad_by_freq: bool = False,
) -> torch.Tensor:
    return grad_out.new_empty((ids.shape[0], grad_out.shape[1]), dtype=dtype)


def _add_rows(
    arena: torch.Tensor,
    frame_of: torch.Tensor,
    page_bytes: int,
    dtype: torch.dtype,
    rows: int,
    grad_out: torch.Tensor,
    ids: torch.Tensor,
    order: torch.Tensor,
    starts: torch.Tensor,
    scale_grad_by_freq: bool = False,
) -> None:
    table = _table(arena, frame_of, page_bytes, dtype, rows * grad_out.shape[1])
    groups = RowGroups(ids, order, starts, grad_out.shape[0])
    add_rows(grad_out.detach(), groups, table, frame_of, scale_grad_by_freq)


def _softmax_update(
    logits: torch.Tensor, begin: int, targets: torch.Tensor, state: torch.Tensor
) -> None:
    softmax_update(logits.detach(), begin, targets, state.detach())


def _softmax_grad(
    logits: torch.Tensor, begin: int, targets: torch.Tensor, factors: torch.Tensor
) -> None:
    softmax_grad_(logits.detach(), begin, targets, factors.detach())


_TABLE = "Tensor frame_of, int page_bytes, ScalarType dtype, SymInt rows"
_GROUPS = "Tensor ids, Tensor order, Tensor starts"

define(
    f"gather_rows(Tensor arena, {_TABLE}, SymInt columns, Tensor indices) -> Tensor",
    _gather_rows,
    _gather_rows_fake,
)
define(
    "group_rows(Tensor indices, SymInt? padding_idx=None) -> (Tensor, Tensor, Tensor)",
    _group_rows,
    _group_rows_fake,
)
define(
    f"sum_rows(Tensor grad_out, {_GROUPS}, ScalarType? dtype=None, "
    "bool scale_grad_by_freq=False) -> Tensor",
    _sum_rows,
    _sum_rows_fake,
)
define(
    f"add_rows(Tensor(a!) arena, {_TABLE}, Tensor grad_out, {_GROUPS}, "
    "bool scale_grad_by_freq=False) -> ()",
    _add_rows,
)
define(
    "softmax_update(Tensor logits, SymInt begin, Tensor targets, Tensor(a!) state) -> ()",
    _softmax_update,
)
define(
    "softmax_grad(Tensor(a!) logits, SymInt begin, Tensor targets, Tensor factors) -> ()",
    _softmax_grad,
)
