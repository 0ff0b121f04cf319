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


def check_blocks(operands: Sequence[Operand | Blockwise]) -> None:
    """Each block of a group has a scale, no page cuts one, and scales of a piece are together."""
    blockwise = [x for x in operands if isinstance(x, Blockwise)]
    for state in blockwise:
        assert (state.codes.dtype, state.scales.dtype) == (torch.uint8, torch.float32)
        assert numel_of(state.scales) == -(-numel_of(state.codes) // BLOCK)
        if isinstance(state.scales, Paged):
            assert state.scales.page_bytes >= SCALE_BYTES * LONGEST // BLOCK
        next(stretches([state.scales]), None)  # checks that the pages are there
    for operand in operands if blockwise else ():
        paged = operand.codes if isinstance(operand, Blockwise) else operand
        if isinstance(paged, Paged):
            assert paged.page_bytes // paged.dtype.itemsize % BLOCK == 0


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
                where = operand.frames[page] * operand.page_bytes + inside
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
