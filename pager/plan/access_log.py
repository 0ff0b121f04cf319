"""What one iteration accesses, in order, by keys that mean the same in every iteration.

A run of pages that lived before the iteration has a positive key for as long as it lives. One that
is born inside has a negative one, which says where that was: when so many accesses of the order had
begun. That of an activation says nothing of how large it is: batches of another length make
activations of another size, at the same places of the program. That of another run (a gradient) is
of its size too. A stream (``slabs.py``) is an access as well, with a key of its own for the runs
that it goes through. A run that outlives its iteration gets the positive key that the run born at
the same place of an earlier iteration had, if that one is dead by now: gradients that are kept for
several iterations come back under their names.

The *order* of an iteration is its accesses of runs that lived before it. It is the same for batches
of every length, though small activations have no pages of their own, so that long batches have more
accesses than short ones: by their orders one iteration is found in another
(``compiled_plan.py``). Accesses of *optional* parameters, which some iterations use and others do
not (``optional.py``), are not in it. ::

    long batch    w1 | a1 | w2 | a2 | a3 | w2 a3 | g1 | w1 a1 | g2 | ...
    short batch   w1 | a1 | w2 | a2      | w2    | g1 | w1 a1 | g2 | ...
    both orders   w1      | w2           | w2         | w1         | ...
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..devices.device import Device
from ..memory.space import Extent, Space

Keys = tuple[int, ...]
FIRST_STREAM = 1 << 40  # keys of streams are not less, those of runs are
FIRST_OPTIONAL = 1 << 39  # keys of optional runs are not less, but less than those of streams
_MOST_NEWBORN = 1 << 14  # runs that are no activations, born between two accesses of the order
_MOST_PLACES = 1 << 22  # accesses of the order
LAST_ACTIVATION = -(1 << 61)  # keys of activations are less, those of other runs are not
_MOST_AT_ONE_PLACE = 1 << 24  # activations that are born between two accesses of the order


def newborn_key(place: int, index: int, pages: int) -> int:
    """Of the run of ``pages`` pages that is the ``index``-th, from 0, of those that are no
    activations to be born when ``place`` accesses of the order have begun."""
    return -((pages * _MOST_PLACES + place) * _MOST_NEWBORN + index + 1)


def activation_key(place: int, index: int) -> int:
    """Of the ``index``-th activation, from 0, to be born when ``place`` accesses of the order have
    begun."""
    return LAST_ACTIVATION - (place * _MOST_AT_ONE_PLACE + index + 1)


def is_activation(key: int) -> bool:
    """Whether it is of an activation that was born in the iteration."""
    return key < LAST_ACTIVATION


def ordered(keys: Keys) -> Keys:
    """What the order has of an access; nothing where that is of newborn runs only, or has to do
    with an optional one."""
    if len(keys) == 1:
        return keys if 0 < keys[0] < FIRST_OPTIONAL or keys[0] >= FIRST_STREAM else ()
    if is_optional(keys):
        return ()
    return tuple([key for key in keys if key > 0])


def is_optional(keys: Keys) -> bool:
    """Whether an optional run is among these."""
    return any(FIRST_OPTIONAL <= key < FIRST_STREAM for key in keys)


class StreamAccess:
    """Access number ``begin`` is a stream, which ended when ``end`` accesses had begun; ``frames``:
    of its workspace."""

    __slots__ = ("begin", "end", "frames")

    def __init__(self, begin: int, frames: int) -> None:
        self.begin = begin
        self.end = begin + 1
        self.frames = frames


class Facts(NamedTuple):
    """What a trace says of a run."""

    pages: int
    kind: str


class Wait(NamedTuple):
    """What access number ``access`` waited for its pages. ``stamps``: of a device's clock, at the
    begin and at the end; ``own``: of a stream, for pages of its slabs, which no plan can bring."""

    access: int
    host_seconds: float
    stamps: tuple[Any, Any] | None
    own: bool

    def seconds(self, device: Device) -> float:
        """By the device's clock, if it was asked."""
        return self.host_seconds if self.stamps is None else device.elapsed(*self.stamps)


class Call(NamedTuple):
    """A segment (``tensor/segments.py``): accesses ``begin`` to ``end``, exclusive, are a call of
    ``block``; ``inputs``: keys of what was stored of its arguments."""

    block: str
    begin: int
    end: int
    inputs: Keys


class AccessLog:
    """The accesses of one iteration, and their ``order``. ``births``: runs born before it.
    ``began``: seconds at which it began; ``times``: at which each access did; ``stalls``: position
    → seconds that it waited for what a plan can bring; ``stall_seconds``: all waiting; ``writes``
    and ``deaths``: (position, key). ``steps``: position of an access that is an optimizer's step,
    which the host could take → its keys; ``hosted``: those that it has taken. ``collectives``:
    position of an access, of no pages, in which ranks meet → what in.

    ``stamps``: of ``clock``, a device that has one, or ``None``: as each access began, and one at
    the end. ``settle_times`` puts its times in the place of the host's: when ops began and ended
    there, not when they were queued.
    """

    def __init__(self, births: int = 0) -> None:
        self.births = births
        self.began = time.perf_counter()
        self.keys: list[Keys] = []
        self.order: list[Keys] = []
        self.times: list[float] = []
        self.waits: list[Wait] = []
        self.stalls: dict[int, float] = {}
        self.stall_seconds = 0.0
        self.streams: list[StreamAccess] = []
        self.calls: list[Call] = []
        self.again: frozenset[str] = frozenset()  # blocks that run again in it
        self.steps: dict[int, Keys] = {}
        self.hosted: set[int] = set()
        self.collectives: dict[int, str] = {}
        self.writes: list[tuple[int, int]] = []
        self.deaths: list[tuple[int, int]] = []
        self.newborn: dict[int, Extent] = {}  # by key
        # Since the latest access of the order, of these: activations, and others.
        self.born_here = self.others_here = 0
        self.facts: dict[int, Facts] = {}  # once it is known that a trace is made of it
        self.ended = 0.0
        self.clock: Device | None = None
        self.stamps: list[Any] = []

    def name(self, run: Extent) -> int:
        """Key of a run that was born in this iteration."""
        if run.kind == "activation":
            run.key = activation_key(len(self.order), self.born_here)
            self.born_here += 1
        else:
            run.key = newborn_key(len(self.order), self.others_here, run.count)
            self.others_here += 1
        self.newborn[run.key] = run
        return run.key

    @property
    def activation_pages(self) -> int:
        """Of all activations that were born in it, from its end until its runs are forgotten."""
        return sum(run.count for key, run in self.newborn.items() if is_activation(key))

    def end(self) -> None:
        self.ended = time.perf_counter()
        if self.clock is not None:
            self.stamps.append(self.clock.stamp())
        self.stall_seconds = sum(wait.host_seconds for wait in self.waits)

    def settle_times(self, device: Device) -> None:
        """Once, after the end. Waits for the device where it was the clock."""
        stamps = self.stamps
        if stamps:
            *self.times, self.ended = (device.elapsed(stamps[0], stamp) for stamp in stamps)
            self.began = 0.0
        for wait in self.waits:
            if not wait.own:
                seconds = wait.seconds(device) if stamps else wait.host_seconds
                self.stalls[wait.access] = self.stalls.get(wait.access, 0.0) + seconds
        self.waits, self.stamps, self.clock = [], [], None

    def seconds(self) -> list[float]:
        """Of each access up to the next one, of the first one from the begin of the iteration,
        without the time that it waited for what a plan can bring: the reads of a stream are a part
        of it."""
        starts = [self.began, *self.times[1:]] if self.times else []
        ends = [*self.times[1:], self.ended]
        return [
            max(0.0, end - start - self.stalls.get(position, 0.0))
            for position, (start, end) in enumerate(zip(starts, ends))
        ]


class Names:
    """Gives runs their keys."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._last = 0
        self._last_optional = FIRST_OPTIONAL - 1
        self.runs: dict[int, Extent] = {}  # by positive key
        self._heirs: dict[tuple[int, int, str], list[int]] = {}
        self._streams: dict[tuple[tuple[int, bool], ...], int] = {}

    def is_live(self, run: Extent) -> bool:
        return self._space.runs.get(run.id) is run

    def run_of(self, key: int, newborn: Mapping[int, Extent]) -> Extent | None:
        """The live run called ``key``, or ``None``."""
        run = (newborn if key < 0 else self.runs).get(key)
        return run if run is not None and self._space.runs.get(run.id) is run else None

    def name(self, run: Extent) -> int:
        """Key of a run that has none yet, and was there before the iteration."""
        self._last += 1
        run.key = self._last
        self.runs[run.key] = run
        return run.key

    def make_optional(self, run: Extent) -> None:
        """Some iterations do not use it: it has a key that says so from now on."""
        self.runs.pop(run.key, None)
        self._last_optional += 1
        run.key, run.optional = self._last_optional, True
        self.runs[run.key] = run

    def of_stream(self, runs: Sequence[tuple[int, bool]]) -> int:
        """Key of a stream through runs with these keys, each written or not."""
        return self._streams.setdefault(tuple(runs), FIRST_STREAM + len(self._streams))

    def through(self, key: int) -> Keys:
        """Of the runs that the access with this key goes through, if it is a stream; or the key."""
        if key < FIRST_STREAM:
            return (key,)
        return next(
            tuple(run for run, _ in runs) for runs, of in self._streams.items() if of == key
        )

    def facts_of(self, log: AccessLog) -> dict[int, Facts]:
        """Of every run that ``log`` may name; those that are gone until ``forget_dead``."""
        runs = self.runs | log.newborn
        return {key: Facts(run.count, run.kind) for key, run in runs.items()}

    def settle(self, log: AccessLog) -> None:
        """End of an iteration: runs that outlive it are named for the next ones."""
        live = self._space.runs
        for born, run in log.newborn.items():
            if live.get(run.id) is not run:
                continue
            place = (born, run.count, run.kind)
            known = self._heirs.setdefault(place, [])
            free = next((key for key in known if not self._is_taken(key)), None)
            if free is None:
                known.append(self.name(run))
            else:
                run.key = free
                self.runs[free] = run

    def forget_dead(self) -> None:
        """Drop what the map holds of runs that are gone."""
        live = self._space.runs
        self.runs = {key: run for key, run in self.runs.items() if live.get(run.id) is run}

    def _is_taken(self, key: int) -> bool:
        run = self.runs.get(key)
        return run is not None and self.is_live(run)
