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

from .ops_define import Call, define
from .pieces import Paged
from .row_sums import RowGroups, add_rows, group_rows, sum_rows
from .rows import gather_rows
from .softmax_slabs import softmax_grad_, softmax_update

__all__: list[str] = []


def _table(call: Call, columns: int) -> Paged:
    """The table; on a device the host does not look at its frames, so only their number is known.

    Launchers are given `frame_of` beside it, which is what kernels read.
    """
    if call.frame_of.device.type == "cpu":
        frames = call.frame_of.detach().numpy()
    else:
        frames = np.full(call.frame_of.shape, -1, np.int32)
    return Paged(call.arena, frames, call.page_bytes, call.dtype, call.rows * columns)


def _looked_up(call: Call) -> torch.Tensor:
    """Room for the rows that are looked up."""
    shape = (*call.indices.shape, call.columns)
    out: torch.Tensor = call.arena.new_empty(shape, dtype=call.dtype)
    return out


def _gather_rows(call: Call) -> torch.Tensor:
    out, flat = _looked_up(call), call.indices.reshape(-1)
    rows = out.view(flat.numel(), call.columns)
    gather_rows(_table(call, call.columns), flat, rows, call.frame_of)
    return out


def _group_rows(call: Call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    groups = group_rows(call.indices, call.padding_idx)
    return groups.ids, groups.order, groups.starts


def _group_rows_fake(call: Call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    context, indices = torch.library.get_ctx(), call.indices
    distinct = context.new_dynamic_size()
    counted = indices.numel() if call.padding_idx is None else context.new_dynamic_size()
    return (
        indices.new_empty((distinct,)),
        indices.new_empty((counted,), dtype=torch.int32),
        indices.new_empty((distinct + 1,), dtype=torch.int32),
    )


def _groups(call: Call) -> RowGroups:
    return RowGroups(call.ids, call.order, call.starts, call.grad_out.shape[0])


def _summed(call: Call) -> torch.Tensor:
    """Room for the sums."""
    shape = (call.ids.shape[0], call.grad_out.shape[1])
    out: torch.Tensor = call.grad_out.new_empty(shape, dtype=call.dtype)
    return out


def _sum_rows(call: Call) -> torch.Tensor:
    out = _summed(call)
    sum_rows(call.grad_out.detach(), _groups(call), out, call.scale_grad_by_freq)
    return out


def _add_rows(call: Call) -> None:
    table = _table(call, call.grad_out.shape[1])
    add_rows(call.grad_out.detach(), _groups(call), table, call.frame_of, call.scale_grad_by_freq)


_TABLE = "Tensor frame_of, int page_bytes, ScalarType dtype, SymInt rows"
_GROUPS = "Tensor ids, Tensor order, Tensor starts"

define(
    f"gather_rows(Tensor arena, {_TABLE}, SymInt columns, Tensor indices) -> Tensor",
    _gather_rows,
    _looked_up,
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
    _summed,
)
define(
    f"add_rows(Tensor(a!) arena, {_TABLE}, Tensor grad_out, {_GROUPS}, "
    "bool scale_grad_by_freq=False) -> ()",
    _add_rows,
)
define(
    "softmax_update(Tensor logits, SymInt begin, Tensor targets, Tensor(a!) state) -> ()",
    lambda c: softmax_update(c.logits.detach(), c.begin, c.targets, c.state.detach()),
)
define(
    "softmax_grad(Tensor(a!) logits, SymInt begin, Tensor targets, Tensor factors) -> ()",
    lambda c: softmax_grad_(c.logits.detach(), c.begin, c.targets, c.factors.detach()),
)
