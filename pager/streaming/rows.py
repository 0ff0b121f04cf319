"""A contiguous matrix in pages, some whole rows after others.

A *block* is the rows of one page, or one row if it is longer than a page; a *slab* is some blocks
that are on the device together. ::

    pages    |    p0    |    p1    |    p2    |    p3    | ...
    blocks   | rows 0 to 4 | rows 5 to 9 | rows 10 to 14 | ...     a row may straddle two pages
    slabs    |------------ in use -------|---- coming ---|
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing
from typing import NamedTuple

import torch

from ..core import PagedStorage
from ..tensor.operands import begin_of
from ..tensor.paged_tensor import PagedTensor
from ..tensor.slabs import Held, fair_share, walk


class Matrix(NamedTuple):
    """Row 0 begins at byte ``begin`` of its run."""

    storage: PagedStorage
    begin: int
    dtype: torch.dtype
    rows: int
    columns: int

    @classmethod
    def of(cls, tensor: PagedTensor) -> Matrix:
        rows, columns = tensor.size()
        return cls(tensor._storage, begin_of(tensor), tensor.dtype, rows, columns)

    @property
    def page_bytes(self) -> int:
        return self.storage.pager.page_size

    @property
    def row_bytes(self) -> int:
        return self.columns * self.dtype.itemsize

    @property
    def block_rows(self) -> int:
        return max(1, self.page_bytes // self.row_bytes)

    def byte(self, row: int) -> int:
        return self.begin + row * self.row_bytes

    def page_count(self, first: int, stop: int) -> int:
        """In how many pages rows ``first … stop`` are."""
        return -(-self.byte(stop) // self.page_bytes) - self.byte(first) // self.page_bytes

    def pages_of_blocks(self) -> Iterator[int]:
        """How many pages each block is in."""
        for start in range(0, self.rows, self.block_rows):
            yield self.page_count(start, min(start + self.block_rows, self.rows))

    def slabs(self, frames: int, block: int) -> Iterator[tuple[int, int]]:
        """Rows ``first … stop`` of each: as many whole blocks as ``frames`` hold, but one at
        least."""
        first, size = 0, self.page_bytes
        while first < self.rows:
            end = (self.byte(first) // size + frames) * size
            whole = (end - self.begin) // self.row_bytes // block * block
            stop = min(self.rows, max(first + block, whole))
            if end >= self.byte(self.rows):
                stop = self.rows
            yield first, stop
            first = stop

    def walk(
        self,
        *,
        write: bool = False,
        frames: int | None = None,
        block: int | None = None,
    ) -> Generator[HeldRows, None, None]:
        """One slab after another, each held until the next is asked for. ``frames``, ``block``: as
        :meth:`slabs` has them, if not a fair share and a block."""
        frames = fair_share(self.storage.pager) if frames is None else frames
        slabs = list(self.slabs(frames, self.block_rows if block is None else block))
        ranges = [(self.byte(first), self.byte(stop)) for first, stop in slabs]
        with closing(walk(self.storage, ranges, write=write)) as held:
            for (first, stop), some in zip(slabs, held):
                yield HeldRows(self, first, stop, some)


class HeldRows(NamedTuple):
    """Rows ``first … stop`` of a matrix, for as long as they are held."""

    matrix: Matrix
    first: int
    stop: int
    held: Held

    def blocks(self) -> Iterator[tuple[int, int]]:
        step = self.matrix.block_rows
        for first in range(self.first, self.stop, step):
            yield first, min(first + step, self.stop)

    def block(self, first: int, stop: int) -> torch.Tensor:
        """Rows ``first … stop``: a view of the arena, or a copy as well aligned as a view. Where
        its frames will lie is not known in advance, so a metered iteration takes the copy."""
        matrix, pager = self.matrix, self.matrix.storage.pager
        low, high = matrix.byte(first), matrix.byte(stop)
        pieces = self.held.pieces(low, high)
        flat = pieces[0]
        if len(pieces) > 1 or (matrix.page_count(first, stop) > 1 and pager.metering_this()):
            pager.gathers += 1
            ahead = low % pager.backend.alignment
            flat = torch.empty(ahead + high - low, dtype=torch.uint8, device=flat.device)[ahead:]
            torch.cat(pieces, out=flat)
        return flat.view(matrix.dtype).view(stop - first, matrix.columns)

    def store(self, first: int, values: torch.Tensor) -> None:
        """Write rows from ``first`` on."""
        source = values.to(self.matrix.dtype).reshape(-1).view(torch.uint8)
        self.held.put(source, self.matrix.byte(first))
