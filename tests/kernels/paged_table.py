"""A table [V, D] in guarded pages of which only some are on the device."""

from collections.abc import Iterable

import numpy as np
import torch
from page_suite import Backend, Guarded

from tensorpager.kernels.pieces import Paged

PAGE = 4096


class Table:
    """Random rows in scattered frames; pages without one of `needed` are in frame -1.

    dense : [V, D] on the CPU, what the table holds; `raw` the same as bytes.
    """

    def __init__(
        self,
        backend: Backend,
        shape: tuple[int, int],
        dtype: torch.dtype,
        needed: Iterable[int],
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.dense = (50 * torch.randn(shape, generator=generator)).to(dtype)
        self.row_bytes = shape[1] * dtype.itemsize
        self.raw = bytes(self.dense.view(torch.uint8).numpy())
        pages = -(-len(self.raw) // PAGE)
        # Never two consecutive pages in consecutive frames, and a frame of nobody's at both ends.
        self.frame_of_page = [2 * (pages - page) - 1 for page in range(pages)]
        self.memory = Guarded((2 * pages + 1) * PAGE, backend, seed=seed + 1)
        self.needed = sorted(set(needed))
        kept = {page for row in self.needed for page, _, _ in self._pieces(row)}
        frames = [f if p in kept else -1 for p, f in enumerate(self.frame_of_page)]
        arena = self.memory.tensor
        for page in kept:
            data = torch.frombuffer(bytearray(self.raw[page * PAGE :][:PAGE]), dtype=torch.uint8)
            at = self.frame_of_page[page] * PAGE
            arena[at : at + len(data)] = data.to(arena.device)
        table = np.array(frames, np.int64)
        self.paged = Paged(arena, table, PAGE, dtype, self.dense.numel())

    def row(self, row: int) -> bytes:
        return self.raw[row * self.row_bytes : (row + 1) * self.row_bytes]

    def places(self) -> list[torch.Tensor]:
        """The bytes of the needed rows in the arena, and nothing between them."""
        return [
            self.memory.tensor[at : at + stop - start]
            for row in self.needed
            for page, start, stop in self._pieces(row)
            for at in [self.frame_of_page[page] * PAGE + start % PAGE]
        ]

    def assert_is(self, before: bytes, rows: dict[int, bytes]) -> None:
        """The arena holds `rows`, all else is as it was `before`, and the guards stand."""
        expected = bytearray(before)
        for row, data in rows.items():
            for page, start, stop in self._pieces(row):
                at = self.frame_of_page[page] * PAGE + start % PAGE
                begin = row * self.row_bytes
                expected[at : at + stop - start] = data[start - begin : stop - begin]
        self.memory.assert_is(bytes(expected))

    def _pieces(self, row: int) -> list[tuple[int, int, int]]:
        """(page, first byte, end) of each part of a row; bytes count in the table."""
        start, end = row * self.row_bytes, (row + 1) * self.row_bytes
        return [
            (page, max(start, page * PAGE), min(end, (page + 1) * PAGE))
            for page in range(start // PAGE, -(-end // PAGE))
        ]
