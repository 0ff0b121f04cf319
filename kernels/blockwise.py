"""Tensors in 8 bits with a scale for each block: where the parts are, and where blocks may lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .pieces import Operand, Paged, Pieces, numel_of, stretches

__all__ = ["BLOCK", "Blockwise", "check_blocks", "scale_addresses"]

BLOCK = 256
SCALE_BYTES = 4
LONGEST = 1 << 16  # elements of a piece: few enough that a small tensor wastes few programs


@dataclass(frozen=True, eq=False)
class Blockwise:
    """A flat float32 tensor in 8 bits; block b is elements [b * BLOCK, (b + 1) * BLOCK).

    codes : uint8, one for each element.
    scales : float32, one for each block, the last of which may be partial.
    """

    codes: Operand
    scales: Operand


def check_blocks(operands: Sequence[Operand | Blockwise], number: int) -> None:
    """Raise ValueError unless group `number` has a scale for each block, and no page cuts one."""
    blockwise = [x for x in operands if isinstance(x, Blockwise)]
    for state in blockwise:
        codes, scales = numel_of(state.codes), numel_of(state.scales)
        if state.codes.dtype != torch.uint8 or state.scales.dtype != torch.float32:
            raise ValueError(
                f"group {number} has codes of {state.codes.dtype} and scales of "
                f"{state.scales.dtype}; use uint8 and float32"
            )
        if scales != -(-codes // BLOCK):
            raise ValueError(
                f"group {number} has {scales} scales for {codes} codes; use one for each {BLOCK}"
            )
        if (
            isinstance(state.scales, Paged)
            and state.scales.page_bytes < SCALE_BYTES * LONGEST // BLOCK
        ):
            raise ValueError(
                f"group {number} has scales in pages of {state.scales.page_bytes} bytes; use pages "
                f"of at least {SCALE_BYTES * LONGEST // BLOCK}"
            )
        next(stretches([state.scales]), None)  # checks that the pages are there
    if not blockwise:
        return
    for operand in operands:
        paged = operand.codes if isinstance(operand, Blockwise) else operand
        if isinstance(paged, Paged) and paged.page_bytes // paged.dtype.itemsize % BLOCK:
            raise ValueError(
                f"group {number} has pages of {paged.page_bytes // paged.dtype.itemsize} elements, "
                f"not a multiple of the {BLOCK} that share a scale; use pages of at least "
                f"{BLOCK * paged.dtype.itemsize} bytes"
            )


def scale_addresses(pieces: Pieces, scales: Sequence[Sequence[Operand]]) -> torch.Tensor:
    """Address of the first scale of each piece, int64 [operands, pieces], on the host.

    scales : for each group, those of its blockwise operands.

    The scales of a piece are consecutive: its first element is a multiple of its longest possible
    length, a power of two up to LONGEST, and a page holds the scales of LONGEST elements.
    """
    starts, groups = pieces.starts.numpy(), pieces.group.numpy()
    table = np.empty((len(scales[0]) if scales else 0, pieces.count), np.int64)
    bounds = np.searchsorted(groups, np.arange(len(scales) + 1)).tolist()
    for number, operands in enumerate(scales):
        chosen = slice(bounds[number], bounds[number + 1])
        offset = starts[chosen] // BLOCK * SCALE_BYTES
        for row, operand in enumerate(operands):
            if isinstance(operand, Paged):
                page, inside = np.divmod(offset, operand.page_bytes)
                where = operand.frames[page].astype(np.int64) * operand.page_bytes + inside
                table[row, chosen] = operand.arena.data_ptr() + where
            else:
                table[row, chosen] = operand.data_ptr() + offset
    return torch.from_numpy(table)


def scales_of(scales: Operand, first_block: int, elements: int) -> list[torch.Tensor]:
    """Views of the scales of `elements` elements from block `first_block` on, in order."""
    views, begin = [], 0
    last_block = first_block + -(-elements // BLOCK)
    for (stretch,) in stretches([scales]):
        end = begin + stretch.numel()
        if begin < last_block and end > first_block:
            views.append(stretch[max(first_block - begin, 0) : last_block - begin])
        begin = end
    return views
