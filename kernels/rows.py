"""Rows of a table in pages: which pages hold them, and looking them up.

A table W [V, D] lies row after row in its pages, so a row may straddle borders. A lookup touches
the pages that hold its rows and no other: all others may be off the device (frame -1).
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from .launch import check_arena, launch, tl, triton, upload, use_triton
from .pieces import Paged

__all__ = ["gather_rows", "pages_of_rows"]

TILE_WORDS = 2048
REFERENCE_ELEMENTS = 1 << 20  # of a temporary
REFERENCE_BLOCKS = 1 << 13  # that are placed at a time


def pages_of_rows(
    indices: npt.NDArray[np.int64], row_bytes: int, page_bytes: int
) -> npt.NDArray[np.int32]:
    """The pages that hold the rows `indices` (any shape, repeats allowed), sorted, each once.

    Raises IndexError for a row below 0.
    """
    if indices.size == 0 or row_bytes == 0:
        return np.empty(0, np.int32)
    if (lowest := int(indices.min())) < 0:
        raise IndexError(f"row {lowest} is looked up; rows count from 0")
    begin = indices.reshape(-1).astype(np.int64) * row_bytes
    first, last = begin // page_bytes, (begin + row_bytes - 1) // page_bytes
    steps = range(int((last - first).max()) + 1)
    pages = np.concatenate([(first + step)[first + step <= last] for step in steps])
    pages.sort()  # np.unique would load numpy's masked arrays, a MiB of code
    return pages[np.diff(pages, prepend=-1) > 0].astype(np.int32)


@triton.jit(
    do_not_specialize=["count", "row_words", "tiles_per_row", "page_shift"],
    do_not_specialize_on_alignment=["arena_ptr", "frame_of_ptr", "indices_ptr", "out_ptr"],
)
def _gather_rows_kernel(
    arena_ptr,
    frame_of_ptr,
    indices_ptr,
    out_ptr,
    count,
    row_words,
    tiles_per_row,
    page_shift,
    WORD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Copy one tile of ROWS rows; it is at most 4 KiB wide, so a row's part is on two pages."""
    # Masks hold for 16 bytes at a time where rows are aligned, so accesses stay 128 bits wide.
    together: tl.constexpr = 16 // WORD if ALIGNED else 1
    rows = tl.program_id(0) // tiles_per_row * ROWS + tl.arange(0, ROWS)
    start = tl.program_id(0) % tiles_per_row * COLUMNS
    live = rows < count
    begin = (tl.load(indices_ptr + rows, mask=live, other=0) * row_words + start) * WORD
    page = begin >> page_shift
    inside = begin - (page << page_shift)
    words = tl.where(live, tl.minimum(row_words - start, COLUMNS), 0)
    page_words = (tl.full([], 1, tl.int32) << page_shift) // WORD
    border = tl.minimum(page_words - inside.to(tl.int32) // WORD, words)

    group = (tl.arange(0, COLUMNS) // together)[None, :]
    border_group, end_group = (border // together)[:, None], (words // together)[:, None]
    to = out_ptr.to(tl.int64) + (rows.to(tl.int64) * row_words + start) * WORD
    frame = tl.load(frame_of_ptr + page, mask=live, other=0).to(tl.int64)
    at = arena_ptr.to(tl.int64) + (frame << page_shift) + inside
    to_words = _words(to, WORD, COLUMNS, ALIGNED)
    here = group < border_group
    tl.store(to_words, tl.load(_words(at, WORD, COLUMNS, ALIGNED), mask=here), mask=here)
    straddles = border < words
    if tl.max(straddles.to(tl.int32), axis=0) > 0:
        frame = tl.load(frame_of_ptr + page + 1, mask=straddles, other=0).to(tl.int64)
        at = arena_ptr.to(tl.int64) + (frame << page_shift) - border * WORD
        there = (group >= border_group) & (group < end_group)
        tl.store(to_words, tl.load(_words(at, WORD, COLUMNS, ALIGNED), mask=there), mask=there)


@triton.jit
def _words(addresses, WORD: tl.constexpr, COLUMNS: tl.constexpr, ALIGNED: tl.constexpr):
    """Pointers [rows, COLUMNS] to the words from each address on."""
    if WORD == 4:
        pointers = addresses.to(tl.pointer_type(tl.int32))
    elif WORD == 2:
        pointers = addresses.to(tl.pointer_type(tl.int16))
    else:
        pointers = addresses.to(tl.pointer_type(tl.int8))
    if ALIGNED:
        pointers = tl.multiple_of(pointers, 16)
    return pointers[:, None] + tl.arange(0, COLUMNS)[None, :]


def gather_rows(
    weight: Paged,
    indices: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Copy rows of a table in pages: out[i] = weight[indices[i]].

    weight : V * D elements of any dtype. Frames of pages that hold no row looked up may be -1.
    indices : int64 [n], contiguous, on the arena's device; 0 <= index < V.
    out : [n, D] of weight's dtype, contiguous, outside the pages.

    On CUDA queued on the current stream of the arena's device without waiting; an index outside
    the table, or a row on a page off the device, is the caller's bug (`pages_of_rows` tells what to
    bring in). On a CPU these are an IndexError and a ValueError. Raises ValueError for other
    arguments that are not as above. Nothing is written before an error.
    """
    check_table("weight", weight, "out", out)
    n = out.shape[0]
    if indices.dtype != torch.int64:
        raise ValueError(f"indices is {indices.dtype}, not torch.int64; pass indices.long()")
    if tuple(indices.shape) != (n,) or not indices.is_contiguous() or indices.device != out.device:
        raise ValueError(
            f"indices is {tuple(indices.shape)} with stride {indices.stride()} on "
            f"{indices.device}; pass ({n},), contiguous, on {out.device}"
        )
    if out.dtype != weight.dtype:
        raise ValueError(f"out is {out.dtype}, weight {weight.dtype}; they must agree")
    if not out.numel():
        return
    if not use_triton(weight.arena):
        gather_rows_reference(weight, indices, out)
        return
    row_bytes = out.shape[1] * out.element_size()
    word = math.gcd(4, row_bytes)
    row_words = row_bytes // word
    columns = next(c for c in (64, 256, 1024) if row_words <= c or c == 1024)
    tiles_per_row = -(-row_words // columns)
    launch(
        _gather_rows_kernel,
        -(-n * columns // TILE_WORDS) * tiles_per_row,
        weight.arena,
        frame_table(weight),
        indices,
        out,
        n,
        row_words,
        tiles_per_row,
        weight.page_bytes.bit_length() - 1,
        WORD=word,
        ROWS=TILE_WORDS // columns,
        COLUMNS=columns,
        ALIGNED=row_bytes % 16 == 0 and out.data_ptr() % 16 == 0,
    )


def gather_rows_reference(
    weight: Paged,
    indices: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """`gather_rows` in plain torch."""
    for blocks, numbers, part in row_blocks(weight, indices, out):
        torch.index_select(blocks, 0, numbers, out=part)


def row_blocks(
    table: Paged, rows: torch.Tensor, dense: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """What a reference copies: rows as the largest blocks that divide both a row and a page.

    rows : int64 [n]. dense : [n, D], whose row i goes with row rows[i] of the table.

    Yields, for each run of rows, the arena as [blocks, elements], which of those blocks, in
    order, and the same part of `dense` as [blocks, elements]. Raises before the first one:
    IndexError for a row that the table has not, ValueError for one on a page off the device.
    """
    row_numel, itemsize = dense.shape[1], table.dtype.itemsize
    frames = upload(torch.from_numpy(table.frames), rows.device).long()
    for some in rows.split(REFERENCE_BLOCKS):
        _check_rows(table, frames, some, row_numel)
    block_bytes = math.gcd(row_numel * itemsize, table.page_bytes)
    elements = block_bytes // itemsize
    blocks = table.arena.view(table.dtype).view(-1, elements)
    per_row, per_page = row_numel // elements, table.page_bytes // block_bytes
    step = max(1, min(REFERENCE_ELEMENTS // row_numel, REFERENCE_BLOCKS // per_row))
    within = torch.arange(per_row, device=rows.device)
    for some, part in zip(rows.split(step), dense.split(step), strict=True):
        block = (some.unsqueeze(1) * per_row + within).view(-1)
        numbers = frames[block // per_page] * per_page + block % per_page
        yield blocks, numbers, part.view(-1, elements)


def _check_rows(table: Paged, frames: torch.Tensor, rows: torch.Tensor, row_numel: int) -> None:
    """That the table has these rows, on pages in the arena."""
    table_rows = table.numel // row_numel
    outside = (rows < 0) | (rows >= table_rows)
    if outside.any():
        row = int(rows[outside][0])
        raise IndexError(f"row {row} is looked up, but the table has rows 0 to {table_rows - 1}")
    row_bytes = row_numel * table.dtype.itemsize
    frames_in_arena = table.arena.numel() // table.page_bytes
    first = rows * row_bytes // table.page_bytes
    last = ((rows + 1) * row_bytes - 1) // table.page_bytes
    for step in range(int((last - first).max()) + 1 if len(rows) else 0):
        page = torch.minimum(first + step, last)
        frame = frames[page]
        outside = (frame < 0) | (frame >= frames_in_arena)
        if outside.any():
            bad = int(outside.int().argmax())
            raise ValueError(
                f"row {int(rows[bad])} is on page {int(page[bad])}, which is in frame "
                f"{int(frame[bad])}, but the arena has {frames_in_arena} frames; bring the page in "
                "first (-1 means not on the device)"
            )


def frame_table(table: Paged) -> torch.Tensor:
    """The table's frames on the arena's device."""
    return upload(torch.from_numpy(table.frames), table.arena.device)


def check_table(name: str, table: Paged, matrix_name: str, matrix: torch.Tensor) -> None:
    """Raise ValueError unless `matrix` is [n, D], contiguous, and `table` is rows of D elements."""
    check_arena(table.arena, table.page_bytes)
    if matrix.dim() != 2 or not matrix.is_contiguous() or matrix.device != table.arena.device:
        raise ValueError(
            f"{matrix_name} is {tuple(matrix.shape)} with stride {matrix.stride()} on "
            f"{matrix.device}; pass [n, D], contiguous, on {table.arena.device}"
        )
    row_numel = matrix.shape[1]
    if row_numel and table.numel % row_numel:
        raise ValueError(
            f"{name} has {table.numel} elements, which are not whole rows of {row_numel}; pass "
            f"{matrix_name} as wide as a row"
        )
    pages = -(-table.numel * table.dtype.itemsize // table.page_bytes)
    if len(table.frames) != pages or table.frames.dtype != np.int32:
        raise ValueError(
            f"{name} has {pages} pages, but frames has {len(table.frames)} entries of "
            f"{table.frames.dtype}; pass one int32 for each page"
        )
