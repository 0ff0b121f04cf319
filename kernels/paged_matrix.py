"""A weight matrix in pages, and what CPU references read of it: stretches of whole rows.

Pages hold the plain bytes of the matrix, row after row, so row r begins at byte r * row_bytes and
may go on in the next page, which is in any frame::

    rows      |  0  |  1  |  2  |  3  |  4  |  5  |  6  |
    pages     |      p0       |      p1       |    p2   |
    frames            7               8            3
    stretches |==== rows 0 to 4 ====|  4  |== 5, 6 =====|   row 5 begins a new run of frames: were
                                                            it cut, it would be assembled alone
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from .launch import check_arena, check_frames, check_page_count

__all__ = ["PagedMatrix", "RowStretch", "row_stretches"]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, eq=False)
class PagedMatrix:
    """A contiguous matrix [rows, columns] in pages: torch's layout [out_features, in_features].

    arena : uint8 [frames * page_bytes], contiguous, 16-byte aligned.
    frame_of : int32 [pages], contiguous, on the arena's device; page i is in frame frame_of[i].
        An operation on some rows reads only the entries of the pages that hold these rows, so the
        others may be -1: a matrix larger than the arena streams through it, slab by slab. On a
        device the entries are read by the kernel, in stream order.
    page_bytes : a power of two, 4 KiB to 16 MiB.
    dtype : float32, float16 or bfloat16.
    """

    arena: torch.Tensor
    frame_of: torch.Tensor
    page_bytes: int
    dtype: torch.dtype
    rows: int
    columns: int

    def __post_init__(self) -> None:
        check_arena(self.arena, self.page_bytes)
        check_frames("frame_of", self.frame_of, self.arena)
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype}; use one of {', '.join(map(str, DTYPES))}")
        if not (0 <= self.rows < 2**31 and 0 <= self.columns < 2**31):
            raise ValueError(
                f"the matrix is {self.rows} x {self.columns}; both are 0 or more and below 2**31"
            )
        nbytes = self.rows * self.row_bytes
        check_page_count("the matrix", nbytes, self.frame_of.numel(), self.page_bytes)

    @property
    def row_bytes(self) -> int:
        return self.columns * self.dtype.itemsize

    @property
    def page_elements(self) -> int:
        return self.page_bytes // self.dtype.itemsize

    @property
    def rows_per_page(self) -> int:
        """Rows in a page where no row straddles two, else 0."""
        whole = self.row_bytes and self.page_bytes % self.row_bytes == 0
        return self.page_bytes // self.row_bytes if whole else 0

    def slab(self, rows: tuple[int, int] | None) -> tuple[int, int]:
        """`rows`, half-open, or all of them."""
        begin, end = (0, self.rows) if rows is None else rows
        if not 0 <= begin <= end <= self.rows:
            raise ValueError(
                f"rows is [{begin}, {end}), but the matrix has {self.rows} rows; "
                "pass 0 <= begin <= end <= rows"
            )
        return begin, end

    def pages_of(self, rows: tuple[int, int]) -> range:
        """Pages that hold rows [begin, end): what must be on the device for them."""
        first, stop = (row * self.row_bytes for row in rows)
        if first == stop:
            return range(0)
        return range(first // self.page_bytes, -(-stop // self.page_bytes))


@dataclass(frozen=True, eq=False)
class RowStretch:
    """Rows [begin, end) as views of the arena: one, or for a row that is cut, its parts."""

    begin: int
    end: int
    columns: int
    parts: list[torch.Tensor]

    def dense(self) -> torch.Tensor:
        """[end - begin, columns]: the arena's own memory, or a copy of a row that is cut."""
        whole = self.parts[0] if len(self.parts) == 1 else torch.cat(self.parts)
        return whole.view(self.end - self.begin, self.columns)

    def store(self, values: torch.Tensor) -> None:
        """Write [end - begin, columns] of any dtype into the pages."""
        if len(self.parts) == 1:
            self.dense().copy_(values)
            return
        sizes = [part.numel() for part in self.parts]
        for part, value in zip(self.parts, values.reshape(-1).split(sizes), strict=True):
            part.copy_(value)


def row_stretches(
    matrix: PagedMatrix, rows: tuple[int, int], longest: int | None = None
) -> Iterator[RowStretch]:
    """The longest stretches of whole rows in consecutive frames, in order; cut rows alone.

    longest : most rows in a stretch.

    Reads the table on the host, so it synchronises with a device. Raises ValueError for a frame
    outside the arena, before anything is yielded.
    """
    begin, end = matrix.slab(rows)
    pages = matrix.pages_of((begin, end))
    if not pages:
        return
    frames = matrix.frame_of[pages.start : pages.stop].cpu().numpy().astype(np.int64)
    _check_on_device(matrix, pages, frames)
    breaks = np.flatnonzero(np.diff(frames) != 1) + 1 + pages.start
    # Bytes at which a run of frames ends, and the rows that they cut or that begin there.
    borders = breaks * matrix.page_bytes
    edges = {begin, end}
    for border in borders.tolist():
        row, inside = divmod(border, matrix.row_bytes)
        edges.update((row, row + 1) if inside else (row,))
    if longest is not None:
        edges.update(range(begin, end, longest))
    for first, stop in pairwise(sorted(edge for edge in edges if begin <= edge <= end)):
        yield RowStretch(
            first, stop, matrix.columns, _parts(matrix, first, stop, borders, frames, pages.start)
        )


def _parts(
    matrix: PagedMatrix,
    first: int,
    stop: int,
    borders: npt.NDArray[np.int64],
    frames: npt.NDArray[np.int64],
    first_page: int,
) -> list[torch.Tensor]:
    start_byte, stop_byte = first * matrix.row_bytes, stop * matrix.row_bytes
    inner = slice(*np.searchsorted(borders, [start_byte + 1, stop_byte]))
    parts = []
    for begin, end in pairwise([start_byte, *borders[inner].tolist(), stop_byte]):
        page, inside = divmod(begin, matrix.page_bytes)
        where = int(frames[page - first_page]) * matrix.page_bytes + inside
        parts.append(matrix.arena[where : where + end - begin].view(matrix.dtype))
    return parts


def _check_on_device(matrix: PagedMatrix, pages: range, frames: npt.NDArray[np.int64]) -> None:
    in_arena = matrix.arena.numel() // matrix.page_bytes
    outside = (frames < 0) | (frames >= in_arena)
    if outside.any():
        bad = int(np.argmax(outside))
        raise ValueError(
            f"page {pages[bad]} is in frame {frames[bad]}, but the arena has {in_arena} frames; "
            "bring the page in first (-1 means not on the device)"
        )
