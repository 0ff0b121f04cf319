"""Fixed addresses for a plan: a base frame for every stay of a tensor on the device.

An op wants the pages of a tensor in consecutive frames. The machine model counts frames only, but a
plan is the same in each iteration, so addresses are a packing problem that is solved once: frames
× circular time. What is packed are *stays*, from when a tensor's first page takes a frame until its
last page has left. A stay has one base for as long as it lasts, page ``i`` is at ``base + i``, and
frames of pages that are away meanwhile are free for others. A stay for which no base is free as
long as it lasts has several, one after the other: it is *shifted* between two uses, which is a copy
inside the device.

Time is the order of the program, in *ticks*: a page holds its frame from the tick that takes it to
the tick that gives it back. So a runtime that keeps the order of each queue, and lets what takes a
frame wait for what held it, cannot deadlock: in that order every wait comes to an end.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ..hardware import Hardware
from ..plan import Plan
from ..trace import Trace
from .pieces import in_pieces
from .spells import Spells, spells_in_order
from .stays import Part, Stays, find_stays, packings

MIN_SLOTS, MAX_SLOTS = 256, 16_384  # of time; if there are no more ticks, one for each
MAX_CELLS = 96 << 20  # frames × slots, two bytes each
HOPELESS = 16  # more pages than one of so many without a place: no other packing is tried


@dataclass(frozen=True)
class Layout:
    """Base frames, of 0 … ``frames`` − 1; a base is the frame that the tensor's page 0 has or would
    have. Tensors by their numbers (``trace.tensor_ids``), moves by their index in ``plan.moves``.

    ``start``: persistent tensors with pages that ``plan.start`` has on the device. While an
    iteration begins, pages of others may still be leaving frames that these will take.
    ``births``: other tensors, when they are born. ``ins``: moves in. What is in none of them has no
    base: no room was found, ``unplaced_pages`` in all, or (``ins``) its tensor dies before a page
    of the move begins. ``shifts``: (op, tensor, base), in this order: when what leaves before the
    op has left, and before anything comes, what is there of the tensor goes to another base.
    """

    frames: int
    start: dict[int, int]
    births: dict[int, int]
    ins: dict[int, int]
    unplaced_pages: int
    shifts: list[tuple[int, int, int]] = field(default_factory=list)


def layout_to_json(layout: Layout) -> dict[str, Any]:
    """An object that JSON can hold; the dicts are lists of pairs, as JSON has no other keys than
    strings."""
    return {
        "frames": layout.frames,
        "start": [list(pair) for pair in layout.start.items()],
        "births": [list(pair) for pair in layout.births.items()],
        "ins": [list(pair) for pair in layout.ins.items()],
        "unplaced_pages": layout.unplaced_pages,
        "shifts": layout.shifts,
    }


def layout_from_json(content: dict[str, Any]) -> Layout:
    """What :func:`layout_to_json` was given."""
    bases = {name: dict(content[name]) for name in ("start", "births", "ins")}
    shifts = [(op, tensor, base) for op, tensor, base in content["shifts"]]
    return Layout(
        content["frames"], **bases, unplaced_pages=content["unplaced_pages"], shifts=shifts
    )


def frames_of(trace: Trace, hardware: Hardware) -> int:
    """Whole pages of the device; of one without limit, as many as there are pages."""
    unlimited = math.isinf(hardware.device_pages)
    return int(trace.pages(hardware.page_size).sum() if unlimited else hardware.device_pages)


def place(trace: Trace, plan: Plan, frames: int) -> Layout:
    """Base frames of ``frames`` for ``plan``, for whoever decides moves in the order of the program
    (:func:`spells_in_order`)."""
    if not trace.ops:
        return Layout(frames, {}, {}, {}, 0)
    max_slots = min(MAX_SLOTS, max(MIN_SLOTS, MAX_CELLS // max(1, frames)))
    spells = spells_in_order(trace, plan, frames)
    stays = find_stays(trace, plan, spells, max_slots)
    found: list[Layout] = []
    for bases in packings(stays, frames):
        parts = in_pieces(trace, plan, spells, stays, bases, frames)
        found.append(_named(trace, frames, spells, stays, parts))
        if found[0].unplaced_pages > frames // HOPELESS:
            break
    return min(found, key=lambda layout: (layout.unplaced_pages, len(layout.shifts)))


def _named(
    trace: Trace, frames: int, spells: Spells, stays: Stays, bases: dict[Part, int]
) -> Layout:
    """By the numbers of tensors and moves that plans use."""
    number = trace.tensor_ids.tolist()
    parts: dict[int, list[Part]] = {}
    for part in sorted(bases):
        parts.setdefault(part.stay, []).append(part)

    def base_at(stay: int, tick: int) -> int:
        """Of the part that there is at ``tick`` of an iteration, or is the first one."""
        its, tick = parts[stay], tick + stays.ticks * int(tick < stays.begin[stay])
        return bases[next((part for part in its if part.begin <= tick < part.end), its[0])]

    def placed(found: Iterable[tuple[int, int]]) -> dict[int, int]:
        return {key: base for key, base in found if base >= 0}

    shifts = []
    for its in parts.values():
        goes_on = its[-1].end - its[0].begin >= stays.ticks  # in the next iteration
        for before, part in itertools.pairwise([*its, *its[: int(goes_on)]]):
            if bases[part] not in (-1, bases[before]):
                op = int(spells.times[part.begin % stays.ticks])
                shifts.append((op, number[stays.tensor[part.stay]], bases[part]))
    missing = {part.stay for part, base in bases.items() if base < 0}
    births = [(number[tensor], bases[parts[stay][0]]) for tensor, stay in stays.of_birth.items()]
    start = [(number[tensor], base_at(stay, 0)) for tensor, stay in stays.of_start.items()]
    ins = [(move, base_at(stay, spells.ins[move][0])) for move, stay in stays.of_in.items()]
    return Layout(
        frames,
        placed(start),
        placed(births),
        placed(ins),
        int(stays.held[[*missing]].sum()),
        sorted(shifts),
    )
