"""Buckets: a list of floating-point operands by type, since one launch works on one type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from .launch import ARENA_ALIGNMENT_BYTES
from .pieces import Operand, Pieces, cut, dtype_name, memory_of, numel_of

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Bucket(NamedTuple):
    """Operands of one dtype, all 16-byte aligned or none; ``operands`` are their numbers."""

    dtype: torch.dtype
    operands: npt.NDArray[np.int64]
    pieces: Pieces


def bucketed(operands: Sequence[Operand]) -> list[Bucket]:
    """The operands that are not empty; each has pieces of its own."""
    numbers: dict[tuple[torch.dtype, bool], list[int]] = {}
    for number, operand in enumerate(operands):
        aligned = memory_of(operand).data_ptr() % ARENA_ALIGNMENT_BYTES == 0
        if numel_of(operand):
            numbers.setdefault((operand.dtype, aligned), []).append(number)
    return [
        Bucket(dtype, np.array(chosen), cut([[operands[number]] for number in chosen]))
        for (dtype, _), chosen in numbers.items()
    ]


def check_floats(operands: Sequence[Operand]) -> None:
    """Raise ValueError unless all operands are floating-point and on one device."""
    for number, operand in enumerate(operands):
        if operand.dtype not in FLOATS:
            names = ", ".join(map(dtype_name, FLOATS))
            raise ValueError(
                f"operand {number} is {operand.dtype}; this takes {names}: convert it first"
            )
        device, first = memory_of(operand).device, memory_of(operands[0]).device
        if device != first:
            raise ValueError(f"operand {number} is on {device}, operand 0 on {first}; move it")
