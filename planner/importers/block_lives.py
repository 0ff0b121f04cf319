"""From lives of memory blocks to the trace of one iteration.

A block is written by the op that allocates it and read by the one that frees it. One that begins
and ends inside the iteration is a tensor of its own. Those that cross its border live on, so they
are persistent; the block that an iteration inherits and frees, and the one that it allocates and
leaves to the next one, are the same tensor S:

    freed before allocated     |---old---x . . . . o---new---|   S: read at x, written at o
    allocated before freed     |---old-----------x           |   S: read and written at x
                               |           o-----x---new-----|   T: written at o, read at x

In the second case the new block is a short-lived T until the old one goes, and then becomes S; that
is how many bytes are in use at each moment. In the first case S counts between x and o, too, though
nothing is there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..trace import READ, WRITE, Floats, Ints, Trace

Uses = Mapping[int, int]  # op → mode
NO_USES: Mapping[int, Uses] = {}


@dataclass(frozen=True, eq=False)
class Blocks:
    """Lives of blocks: ``born`` and ``freed`` are ops of the recording, −1 and the number of ops if
    they are not in it."""

    born: Ints  # [blocks]
    freed: Ints  # [blocks]
    nbytes: Ints  # [blocks]

    def freed_age(self, ops: int) -> Ints:
        """How many ops ago the oldest block that each op frees was allocated (0: it frees none;
        more than there are: before the recording), [ops]."""
        age = np.where(self.born >= 0, self.freed - self.born, ops + 1)
        oldest = np.zeros(ops + 1, np.int64)
        np.maximum.at(oldest, self.freed, age)
        return oldest[:-1]


@dataclass(frozen=True)
class Life:
    """A tensor of the iteration: ``uses`` maps each op that touches it to how."""

    nbytes: int
    persistent: bool
    uses: Uses


def lives(
    blocks: Blocks, part: slice, period: int | None, uses: Mapping[int, Uses] = NO_USES
) -> tuple[list[Life], int]:
    """The tensors of the iteration that is the ops ``part`` of the recording, with ops counted from
    its start, and the bytes of the blocks that live through it unused.

    ``uses`` are more uses of blocks by ops of the recording. ``period`` is the length of the
    iterations around this one, or ``None`` if heirs must be told by their size.
    """
    born, freed = blocks.born, blocks.freed
    begins = (born >= part.start) & (born < part.stop)
    ends = (freed >= part.start) & (freed < part.stop)
    before, after = born < part.start, freed >= part.stop
    inherited, left = np.flatnonzero(before & ends), np.flatnonzero(begins & after)
    heirs = (
        _heirs_by_size(blocks, inherited, left)
        if period is None
        else _heirs_by_birth(blocks, inherited, left, period)
    )

    def life(persistent: bool, *pieces: tuple[int, int, int]) -> Life:
        """Of what each block (first of a triple) does in the ops [second, third)."""
        merged: defaultdict[int, int] = defaultdict(int)
        for block, start, stop in pieces:
            own = [(int(born[block]), WRITE), (int(freed[block]), READ)]
            for op, mode in [*own, *uses.get(block, {}).items()]:
                if max(start, part.start) <= op < min(stop, part.stop):
                    merged[op - part.start] |= mode
        return Life(int(blocks.nbytes[pieces[0][0]]), persistent, dict(merged))

    end = part.stop
    found = [life(False, (block, 0, end)) for block in np.flatnonzero(begins & ends).tolist()]
    for old, new in heirs.items():
        gone = int(freed[old])
        if gone < born[new]:
            found.append(life(True, (old, 0, end), (new, 0, end)))
            continue
        heir = life(True, (old, 0, end), (new, gone + 1, end))
        handover = {gone - part.start: READ | WRITE}
        found.append(Life(heir.nbytes, True, {**heir.uses, **handover}))
        young = life(False, (new, 0, gone + 1))
        last = gone - part.start
        found.append(
            Life(young.nbytes, False, {**young.uses, last: young.uses.get(last, 0) | READ})
        )
    alone = (set(inherited.tolist()) | set(left.tolist())) - set(heirs) - set(heirs.values())
    through = np.flatnonzero(before & after).tolist()
    used = {block: life(True, (block, 0, end)) for block in [*sorted(alone), *through]}
    found += [tensor for tensor in used.values() if tensor.uses]
    return found, sum(tensor.nbytes for tensor in used.values() if not tensor.uses)


def _heirs_by_birth(blocks: Blocks, inherited: Ints, left: Ints, period: int) -> dict[int, int]:
    """The same allocation one iteration later, where that one is left to the next."""
    born_at = {int(blocks.born[index]): index for index in left.tolist()}
    heirs = {}
    for old in inherited.tolist():
        heir = born_at.get(int(blocks.born[old]) + period)
        if blocks.born[old] >= 0 and heir is not None:
            heirs[old] = heir
    return heirs


def _heirs_by_size(blocks: Blocks, inherited: Ints, left: Ints) -> dict[int, int]:
    """Of equal size, the first one freed with the first one allocated and so on."""
    waiting: defaultdict[int, list[int]] = defaultdict(list)
    for new in left[np.argsort(-blocks.born[left], kind="stable")].tolist():
        waiting[int(blocks.nbytes[new])].append(new)
    heirs = {}
    for old in inherited[np.argsort(blocks.freed[inherited], kind="stable")].tolist():
        if same_size := waiting[int(blocks.nbytes[old])]:
            heirs[old] = same_size.pop()
    return heirs


def trace_of(
    tensors: Sequence[Life],
    op_names: list[str],
    start_us: Floats,
    duration_us: Floats,
    *,
    page_size: int,
    source: str,
    device: str,
    metadata: dict[str, Any],
) -> Trace:
    """The trace of these tensors and ops, each access to a whole tensor of kind ``activation``."""
    tensors = sorted(tensors, key=lambda life: min(life.uses))
    rows = [(op, number, mode) for number, t in enumerate(tensors) for op, mode in t.uses.items()]
    table = np.array(sorted(rows), np.int64).reshape(-1, 3)
    nbytes = np.array([life.nbytes for life in tensors], np.int64)
    return Trace(
        page_size=page_size,
        op_names=op_names,
        op_start_us=start_us,
        op_duration_us=duration_us,
        tensor_ids=np.arange(len(tensors)),
        tensor_names=[None] * len(tensors),
        tensor_bytes=nbytes,
        tensor_kinds=["activation"] * len(tensors),
        tensor_persistent=np.array([life.persistent for life in tensors], np.bool_),
        access_op=table[:, 0].copy(),
        access_tensor=table[:, 1].copy(),
        access_mode=table[:, 2].astype(np.int8),
        access_first_page=np.zeros(len(table), np.int64),
        access_page_count=-(-nbytes // page_size)[table[:, 1]],
        source=source,
        device=device,
        metadata=metadata,
    )
