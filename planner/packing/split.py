"""Cut a packing problem into independent ones.

A buffer that lives as long as its whole group can lie at the bottom: whatever lies under it in some
packing can change places with it. Where no lifetime of the rest crosses, the group falls apart.
Both steps are repeated as long as they find something.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..trace import Ints
from .buffers import Buffers
from .sections import Sections


@dataclass(frozen=True, eq=False)
class Piece:
    """Buffers that are packed on top of ``base_bytes`` with no regard to other pieces."""

    which: Ints  # numbers of its buffers, in order of birth
    base_bytes: int


@dataclass(frozen=True, eq=False)
class Split:
    """``settled`` has the offset of every buffer that needs no search, and -1 for the others, each
    of which is in one piece."""

    settled: Ints  # [buffers], bytes or -1
    pieces: list[Piece]


def split(buffers: Buffers) -> Split:
    """Some packing of the pieces is as small as any packing of ``buffers``."""
    settled = np.full(len(buffers), -1, np.int64)
    pieces: list[Piece] = []
    sections = Sections(buffers)
    by_birth = np.argsort(buffers.lower, kind="stable")
    open_groups = _groups(by_birth, sections, 0)
    while open_groups:
        group = open_groups.pop()
        first, last = sections.first[group.which], sections.last[group.which]
        lasting = (first == first.min()) & (last == last.max())
        if not lasting.any():
            pieces.append(group)
            continue
        sizes = buffers.size[group.which[lasting]]
        tops = group.base_bytes + np.cumsum(sizes)
        settled[group.which[lasting]] = tops - sizes
        open_groups += _groups(group.which[~lasting], sections, int(tops[-1]))
    return Split(settled, pieces)


def _groups(which: Ints, sections: Sections, base_bytes: int) -> list[Piece]:
    """``which`` (in order of birth) cut where no lifetime crosses."""
    if not len(which):
        return []
    reach = np.maximum.accumulate(sections.last[which])
    cuts = np.flatnonzero(sections.first[which[1:]] > reach[:-1]) + 1
    return [Piece(part, base_bytes) for part in np.split(which, cuts)]
