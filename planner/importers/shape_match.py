"""A guess at which blocks an op reads, from the shapes of its inputs.

A PyTorch profile names the shape and type of an op's inputs, not their addresses. An input is
taken to be a live block of exactly as many bytes as its elements take (on a GPU rounded up to 512,
as its allocator does), of several the one that was used last. So this is a heuristic: it mistakes
blocks of the same size for each other, and does not find an input that is part of a block, or whose
block was allocated before the recording and outlives it. What it did not find is counted.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..trace import READ, WRITE
from .block_lives import Blocks

ROUNDING = 512  # bytes, of the CUDA caching allocator
_ELEMENT_BYTES = {
    "double": 8,
    "float": 4,
    "c10::Half": 2,
    "c10::BFloat16": 2,
    "c10::complex<double>": 16,
    "c10::complex<float>": 8,
    "c10::complex<c10::Half>": 4,
    "long int": 8,
    "long": 8,
    "long long": 8,
    "__int64": 8,
    "int": 4,
    "short int": 2,
    "short": 2,
    "signed char": 1,
    "unsigned char": 1,
    "bool": 1,
    "c10::Float8_e4m3fn": 1,
    "c10::Float8_e5m2": 1,
    "c10::Float8_e4m3fnuz": 1,
    "c10::Float8_e5m2fnuz": 1,
}
_LIST_ELEMENT_BYTES = 4  # a list of tensors comes without their type; most are float32


@dataclass(frozen=True)
class Call:
    """One call of an operator within an op: the bytes of its tensor inputs, and how many of the
    first of them it writes."""

    at_us: float
    sizes: tuple[int, ...]
    written: int = 0


@dataclass
class Match:
    """``uses`` maps block → op → mode; ``missed`` counts inputs without a block."""

    uses: dict[int, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    found: int = 0
    missed: int = 0


def input_bytes(name: str, arguments: dict[str, Any]) -> tuple[tuple[int, ...], int]:
    """Bytes of each tensor input of the operator ``name``, from its event's arguments, and how many
    of the first it writes: those of its first argument, if its name says in-place."""
    dims, types = arguments.get("Input Dims"), arguments.get("Input type")
    if not isinstance(dims, list) or not isinstance(types, list):
        return (), 0
    in_place = name.endswith("_") and not name.endswith("__")
    sizes: list[int] = []
    written = 0
    for number, (shape, kind) in enumerate(zip(dims, types)):
        if isinstance(kind, str) and kind in _ELEMENT_BYTES:
            sizes += _tensor_bytes([shape], _ELEMENT_BYTES[kind])
        elif kind == "TensorList" and isinstance(shape, list):
            sizes += _tensor_bytes(shape, _LIST_ELEMENT_BYTES)
        if number == 0 and in_place:
            written = len(sizes)
    return tuple(sizes), written


def _tensor_bytes(shapes: list[Any], element_bytes: int) -> list[int]:
    sizes = []
    for shape in shapes:
        if isinstance(shape, list) and all(isinstance(d, int) and d > 0 for d in shape):
            nbytes = element_bytes
            for extent in shape:
                nbytes *= extent
            sizes.append(nbytes)
    return sizes


def match_inputs(
    blocks: Blocks, born_us: list[float], calls: Iterable[list[Call]], *, rounded: bool
) -> Match:
    """Which blocks the ops use. ``calls`` has the calls within each op, in order; ``blocks`` has
    lives in ops, and ``born_us`` their times of birth, [blocks]."""
    match = Match()
    born_in, freed_in = _by_op(blocks.born.tolist()), _by_op(blocks.freed.tolist())
    nbytes = blocks.nbytes.tolist()
    live: defaultdict[int, dict[int, None]] = defaultdict(dict)  # size → blocks, last used last
    for block in born_in[-1]:
        live[nbytes[block]][block] = None
    for op, inside in enumerate(calls):
        young = [(nbytes[block], born_us[block]) for block in born_in[op]]
        for size, (reads, writes) in _needs(inside, young, rounded).items():
            candidates = live[size]
            chosen = list(candidates)[-reads:] if reads else []
            match.found += len(chosen)
            match.missed += reads - len(chosen)
            for rank, block in enumerate(reversed(chosen)):
                match.uses[block][op] = READ | WRITE if rank < writes else READ
            for block in chosen:
                candidates[block] = candidates.pop(block)
        for block in born_in[op]:
            live[nbytes[block]][block] = None
        for block in freed_in[op]:
            live[nbytes[block]].pop(block, None)
    return match


def _by_op(ops: list[int]) -> defaultdict[int, list[int]]:
    blocks: defaultdict[int, list[int]] = defaultdict(list)
    for block, op in enumerate(ops):
        blocks[op].append(block)
    return blocks


def _needs(
    calls: list[Call], young: list[tuple[int, float]], rounded: bool
) -> dict[int, tuple[int, int]]:
    """Per size, how many older blocks the op reads, and how many of them it writes.

    The calls within an op hand the same inputs on, so the most that one call needs counts. A call
    takes blocks that were allocated earlier within the op first.
    """
    most: dict[int, tuple[int, int]] = {}
    for call in calls:
        sizes = [_round(size) if rounded else size for size in call.sizes]
        written = Counter(sizes[: call.written])
        for size, count in Counter(sizes).items():
            fresh = sum(1 for bytes_, at_us in young if bytes_ == size and at_us < call.at_us)
            older = max(count - fresh, 0)
            before = most.get(size, (0, 0))
            most[size] = (
                max(before[0], older),
                max(before[1], min(max(written[size] - fresh, 0), older)),
            )
    return most


def _round(size: int) -> int:
    return int(np.ceil(size / ROUNDING)) * ROUNDING
