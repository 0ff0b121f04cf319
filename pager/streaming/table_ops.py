"""Ops below autograd that a large table and its gradient get a way of their own for.

Autograd sums and copies gradients; sparse optimizers read and add to some rows of the table and of
their states. All other ops are for ``dense_run.py``.
"""

from __future__ import annotations

from contextlib import closing
from typing import Any

import numpy as np
import torch

from ...kernels.launch import upload
from ...kernels.rows import gather_rows
from ..tensor.dispatcher import serve_op
from ..tensor.paged_tensor import PagedTensor
from .table_gradient import add_gradients, copy_gradient, is_gradient
from .table_rows import is_large, is_table, look_up, put_rows, row_groups

aten = torch.ops.aten


def _add(one: Any, other: Any, *, alpha: Any = 1) -> Any:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return NotImplemented
    if not (is_gradient(one) or is_gradient(other)):
        return NotImplemented
    for gradient, rows in ((one, other), (other, one)):
        if alpha == 1 and is_gradient(gradient) and _are_rows_of(rows, gradient):
            return _add_sparse(copy_gradient(gradient), rows)
    return add_gradients(one, other, alpha)


def _clone(tensor: Any, *, memory_format: Any = None) -> Any:
    if not is_gradient(tensor) or tensor._storage.pager.stepping:
        return NotImplemented
    return copy_gradient(tensor)


def _add_sparse(table: Any, values: Any, *, alpha: Any = 1) -> Any:
    """``table.add_(sparse)``, as torch adds it, on the pages of the rows that it has."""
    if not _are_rows_of(values, table):
        return NotImplemented
    indices = values._indices()[0]
    host = indices.cpu().numpy()
    rows = np.unique(host)
    with closing(row_groups(table, rows, write=True)) as groups:
        for group in groups:
            mine = rows[group.start : group.stop]
            some = upload(torch.from_numpy(mine), table.device)
            dense = torch.empty(len(mine), table.size(1), dtype=table.dtype, device=table.device)
            gather_rows(group.table, some, dense)
            places = np.flatnonzero((host >= mine[0]) & (host <= mine[-1]))
            numbers = torch.from_numpy(np.searchsorted(mine, host[places])[None])
            part = torch.sparse_coo_tensor(
                upload(numbers, table.device),
                values._values()[upload(torch.from_numpy(places), table.device)],
                dense.size(),
                is_coalesced=values.is_coalesced(),
                check_invariants=False,
            )
            dense.add_(part, alpha=alpha)
            put_rows(group.table, some, dense)
    return table


def _sparse_mask(table: Any, mask: Any) -> Any:
    """The table's values in the rows that ``mask`` has."""
    if not _are_rows_of(mask, table):
        return NotImplemented
    indices = mask._indices()
    return torch.sparse_coo_tensor(
        indices,
        look_up(table, indices[0]),
        mask.size(),
        is_coalesced=mask.is_coalesced(),
        check_invariants=False,
    )


def _are_rows_of(values: Any, table: Any) -> bool:
    """Whether ``values`` is sparse, whole rows each, like the large ``table``."""
    return (
        type(values) is torch.Tensor
        and values.layout is torch.sparse_coo
        and type(table) is PagedTensor
        and values.size() == table.size()
        and values.sparse_dim() == 1
        and values.device == table.device
        and is_table(table)
        and is_large(table)
    )


for _op, _run in (
    (aten.add.Tensor, _add),
    (aten.add_.Tensor, _add_sparse),
    (aten.clone.default, _clone),
    (aten.sparse_mask.default, _sparse_mask),
):
    serve_op(_op, _run)
