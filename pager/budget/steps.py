"""What the steps of optimizers take: foreseen in a metered iteration, and known from then on."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

Measure = Callable[[Callable[[], None]], int]  # bytes that were alive at once, at most


@dataclass(eq=False)
class StepFrames:
    """Frames that one op in a step of one optimizer takes, at most, the way that its steps go now.
    (With little room they go slab by slab, and take fewer.)"""

    frames: int = 0


class Room(NamedTuple):
    """What the step of an optimizer takes at once: ``frames``, and ``dense`` bytes."""

    frames: int
    dense: int

    def with_(self, other: Room) -> Room:
        return Room(max(self.frames, other.frames), max(self.dense, other.dense))


class StepRoom(NamedTuple):
    """``room``: of the step as it will be taken. ``least``: of one in which all goes slab by slab
    that can, if any can (``by_slabs``)."""

    room: Room
    least: Room
    by_slabs: bool


class _Step(NamedTuple):
    """In a metered iteration: foreseen ``beside`` so many dense bytes of what was made before.
    ``room``: ``None`` where it cannot be found out; then its ops say what it takes."""

    frames: StepFrames
    beside: int
    room: StepRoom | None

    def takes(self, *, least: bool) -> Room:
        if self.room is None:
            return Room(self.frames.frames, 0)
        return self.room.least if least else self.room.room


class Steps:
    """``foreseen``: those of this iteration, if it is metered."""

    def __init__(self) -> None:
        self.foreseen: list[_Step] = []
        self._known: weakref.WeakKeyDictionary[Any, StepFrames] = weakref.WeakKeyDictionary()

    def of(self, optimizer: Any) -> StepFrames:
        """What its steps take, for as long as they go the same way."""
        return self._known.setdefault(optimizer, StepFrames())

    def foresee(self, optimizer: Any, beside: int, room: StepRoom | None) -> None:
        """``room``: ``None`` where that cannot be found out."""
        self.foreseen.append(_Step(self.of(optimizer), beside, room))

    def goes_by_slabs(self, optimizer: Any) -> bool:
        """Its step of this iteration, or it may from now on."""
        rooms = (step.room for step in self.foreseen if step.frames is self.of(optimizer))
        return any(room is not None and room.by_slabs for room in rooms)

    def most_frames_but(self, optimizers: Iterable[Any]) -> int:
        """That steps take, but those of this iteration, and of ``optimizers``."""
        mine = [step.frames for step in self.foreseen] + [self.of(each) for each in optimizers]
        return max((s.frames for s in self._known.values() if s not in mine), default=0)

    def beside(self, room: Room, *, least: bool) -> Room:
        """What is needed with them, and with ``room`` that others take. ``least``: all go slab by
        slab that can."""
        for step in self.foreseen:
            frames, dense = step.takes(least=least)
            room = room.with_(Room(frames, step.beside + dense))
        return room

    def note_left(self, nbytes: int) -> None:
        """Of what came after they were foreseen, so much will be there."""
        self.foreseen = [s._replace(beside=s.beside + nbytes) for s in self.foreseen]

    def go(self, *, least: bool) -> None:
        """So from now on."""
        for step in self.foreseen:
            step.frames.frames = step.takes(least=least).frames
