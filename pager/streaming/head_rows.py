"""The weight of a language model's head, a slab of rows after another.

A plain weight is sliced. A paged one that fits is held for the whole walk, and sliced too. A large
one goes through the arena: while one slab is used the next one is read ahead. Its slab is a view
where its frames are consecutive, and else a copy of the slab. The bytes, and how they are aligned,
are the same each way, so the products are the same bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator, Sequence

import numpy as np
import torch

from ..memory.page_table import Int32
from ..tensor.dense_views import direct_view
from ..tensor.paged_tensor import PagedTensor
from ..tensor.slabs import Pages, fair_share, stream
from .table_gradient import pieces_of_bytes
from .table_rows import is_large, is_table, row_bytes

_LEAST_ROWS, _STEP_ROWS = 256, 64  # 64 rows of any dtype begin at a multiple of 64 bytes
_MOST_BYTES = 32 << 20  # of a slab of the weight

Slab = tuple[int, int]


def slab_rows(weight: torch.Tensor) -> int:
    """Rows of a slab: about as many as a row has elements, so that a slab of logits is as large as
    the hidden states. The arena has no say in it: results do not depend on the budget."""
    rows = -(-max(_LEAST_ROWS, weight.size(1)) // _STEP_ROWS) * _STEP_ROWS
    most = _MOST_BYTES // max(1, row_bytes(weight)) // _STEP_ROWS * _STEP_ROWS
    return max(_STEP_ROWS, min(rows, most))


class HeadRows:
    """Slabs of one weight. ``get`` them in order, upwards or downwards; ``close`` unpins all."""

    def __init__(self, weight: torch.Tensor, slabs: Sequence[Slab]) -> None:
        self._weight = weight.detach()
        self._slabs = slabs
        self._walk: Generator[torch.Tensor, None, None] | None = None
        self._order: list[Slab] = []  # still to come
        self._slab: Slab | None = None
        self._rows: torch.Tensor | None = None

    @property
    def is_over(self) -> bool:
        """The slab in use is the last one of this walk."""
        return not self._order

    @property
    def goes_up(self) -> bool:
        """It is the last one of the weight: forward ends with it."""
        return self._slab == self._slabs[-1]

    def get(self, begin: int, end: int) -> torch.Tensor:
        """Rows ``begin … end``, plain. They hold until the next slab is asked for."""
        if type(self._weight) is not PagedTensor:
            return self._weight[begin:end]
        if self._rows is not None and self._slab == (begin, end):
            return self._rows
        if not self._order or self._order[0] != (begin, end):
            self.close()
            at = self._slabs.index((begin, end))
            self._order = [*(self._slabs if at == 0 else reversed(self._slabs[: at + 1]))]
            self._walk = _walk(self._weight, tuple(self._order))
        assert self._walk is not None
        self._rows = None  # its memory may be used for the next one
        self._rows = next(self._walk)
        self._slab = self._order.pop(0)
        return self._rows

    def close(self) -> None:
        """Nothing is pinned afterwards."""
        if self._walk is not None:
            self._walk.close()
        weight, rows = self._weight, self._rows
        if type(weight) is PagedTensor and rows is not None and weight._storage.pager.holds(rows):
            rows.set_()  # type: ignore[call-overload]  # tracebacks may hold it
        self._walk = self._rows = self._slab = None
        self._order = []


def _walk(weight: PagedTensor, order: Sequence[Slab]) -> Generator[torch.Tensor, None, None]:
    if is_large(weight) and is_table(weight):
        yield from _through_the_arena(weight, order)
        return
    pager, run = weight._storage.pager, weight._storage.run
    with pager.hold([run]):
        if run.base >= 0:
            for begin, end in order:
                yield direct_view(weight)[begin:end]
            return
    yield from _through_the_arena(weight, order)  # its frames are scattered


def _through_the_arena(
    weight: PagedTensor, order: Sequence[Slab]
) -> Generator[torch.Tensor, None, None]:
    storage = weight._storage
    pager, size, nbytes = storage.pager, storage.pager.page_size, row_bytes(weight)
    limit = max(1, fair_share(pager))

    def ranges(slab: Slab) -> list[tuple[int, int]]:
        low, high = slab[0] * nbytes, slab[1] * nbytes
        inner = range((low // size + limit) * size, high, limit * size)
        borders = [low, *inner, high]
        return list(itertools.pairwise(borders))

    pages = (
        [Pages(storage, np.arange(low // size, -(-high // size), dtype=np.int32))]
        for slab in order
        for low, high in ranges(slab)
    )
    pinned = stream(pager, pages)
    try:
        for slab in order:
            yield _rows_of(weight, slab, ranges(slab), pinned)
    finally:
        pinned.close()


def _rows_of(
    weight: PagedTensor,
    slab: Slab,
    ranges: list[tuple[int, int]],
    pinned: Iterator[list[Int32]],
) -> torch.Tensor:
    """A slab from the next parts of a stream: a view where it is all of one part, in one piece."""
    pager, shape = weight._storage.pager, (slab[1] - slab[0], weight.size(1))
    low, high = ranges[0][0], ranges[-1][1]
    dense = None
    for begin, end in ranges:
        (frames,) = next(pinned)
        pieces = list(pieces_of_bytes(frames, begin, end, pager.page_size))
        if len(ranges) == len(pieces) == 1:
            return pager.residency.arena[pieces[0][1]].view(weight.dtype).view(shape)
        if dense is None:
            pager.gathers += 1
            dense = torch.empty(high - low, dtype=torch.uint8, device=pager.device)
        for at, piece in pieces:
            position = begin - low + at
            dense[position : position + piece.stop - piece.start] = pager.residency.arena[piece]
    assert dense is not None
    return dense.view(weight.dtype).view(shape)
