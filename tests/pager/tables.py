"""Tables ten times as large as the arena: made, read and updated a slab at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

import tensorpager as tp
from tensorpager.kernels.pieces import stretches
from tensorpager.pager.debug.chaos import chaos, scattered
from tensorpager.pager.debug.check import check_invariants
from tensorpager.pager.tensor.operands import slabs

from .models import PAGE_BYTES, make_pager

FRAMES = 4
ROWS, WIDTH = 3600, 190  # 760 bytes a row, many straddle a border: 42 pages
LANES: dict[str, Callable[[tp.Pager], Any]] = {
    "plain": lambda pager: nullcontext(),
    "chaos": chaos,
    "scattered": scattered,
}


@contextmanager
def tight(lane: str = "plain", *, may_gather: bool = False, **options: Any) -> Iterator[tp.Pager]:
    """A pager of ``FRAMES`` frames, whose first iteration is over. Afterwards: nothing is pinned,
    budgets were kept, no dense copies made but where that may be."""
    with make_pager(**({"frames": FRAMES} | options)) as pager:
        with pager.iteration():
            pass
        assert pager.core.residency.pool.count == options.get("frames", FRAMES)
        with LANES[lane](pager.core):
            yield pager
        check_invariants(pager.core)
        assert pager.core.residency.pinned_pages() == 0
        stats = pager.stats()
        assert may_gather or stats["gathers"] == 0
        assert pager.core.residency.peak_frames <= pager.core.residency.pool.count
        assert stats["peak_bytes"]["device"] <= stats["budget_bytes"]["device"]


def paged_table(pager: tp.Pager, dense: torch.Tensor) -> tp.PagedTensor:
    """A parameter with these values, of a module as ``page_module`` makes it."""
    module = torch.nn.Module()
    meta = torch.empty(dense.shape, dtype=dense.dtype, device="meta")
    module.weight = torch.nn.Parameter(meta)
    table = pager.page_module(module).weight
    assert type(table) is tp.PagedTensor
    write_table(table, dense)
    return table


def flat(table: tp.PagedTensor) -> tp.PagedTensor:
    return tp.PagedTensor(table._storage, (table.numel(),), (1,), 0, table.dtype)


def write_table(table: tp.PagedTensor, dense: torch.Tensor) -> None:
    source = dense.reshape(-1)
    for slab in slabs(table.pager.core, [flat(table)], write=[True]):
        for to, values in stretches([slab.operands[0], source[slab.start : slab.stop]]):
            to.copy_(values)


def read_table(table: torch.Tensor) -> torch.Tensor:
    """Plain; a plain one as it is."""
    if type(table) is not tp.PagedTensor:
        return table.detach()
    out = torch.empty(table.numel(), dtype=table.dtype)
    for slab in slabs(table.pager.core, [flat(table)]):
        for values, to in stretches([slab.operands[0], out[slab.start : slab.stop]]):
            to.copy_(values)
    return out.view(table.shape)


def slab_sgd(table: torch.Tensor, rate: float) -> None:
    """``table -= rate * table.grad``, in slabs where they are paged."""
    grad = table.grad
    assert grad is not None
    if type(table) is not tp.PagedTensor:
        with torch.no_grad():
            table -= grad * rate
        return
    assert type(grad) is tp.PagedTensor
    for slab in slabs(table.pager.core, [flat(table), flat(grad)], write=[True, False]):
        target, change = slab.operands
        for to, by in stretches([target, change]):
            to.sub_(by * rate)


def is_paged(tensor: Any) -> bool:
    return type(tensor) is tp.PagedTensor


def pages_of_table(table: tp.PagedTensor) -> int:
    return -(-table.numel() * table.element_size() // PAGE_BYTES)
