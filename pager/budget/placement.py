"""Whether a weight is on the device whole for its products, or streams: one verdict for each.

::

    the first iteration     whole where the weight, and a dense gradient of it, have room; streams
                            from the product on that finds none beside what is in use then
    before the step         all that is whole fits beside what else was measured: it stays whole;
                            if not, the largest stream from now on, or the budget is refused
    later                   the same, whatever becomes of the arena, in every mode

What is whole has PyTorch's bits, what streams has bits of its own (``linear_stream.py``), so the
verdict must not depend on what happens to be on the device. It is made by sizes, the budget and
what an iteration was found to take, and the larger the budget, the fewer weights stream. The
verdict is kept with the pages, ``Extent.streamed``; ``None`` before it is made. It changes once at
most: a weight that was whole streams if an iteration of other shapes finds no room for that, or
what others have pinned leaves none. A copy of a weight that each iteration makes anew (a cast) has
the verdict of the one before it, and so has a gradient in pages: its sums and norms go by that.

*The smallest budget* is the one that an iteration takes in which all of them stream. A budget below
it is refused, whatever was whole when that was found out; any other has room at least for that.

*What others would take.* What an iteration takes if other weights stream is known without trying:
products of whole weights are watched. The frames that they take are kept apart from other needs. Of
each dense gradient of a weight it is known how long it lives (it would be in pages), and of each
product what streaming takes in dense temporaries. A product that streams counts as just that too,
so a named minimum does not depend on what was whole when it was found out. A weight of one page
never streams: it would take that page all the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..devices.dense_meter import NO_TIMELINE, Timeline
from ..memory.space import TRANSIENT_KINDS, Extent


@dataclass(eq=False)
class Weight:
    """Of a linear in metered iterations. ``frames``: that its products have pinned, whole;
    ``least_frames``: if it streams."""

    run: Extent
    least_frames: int
    frames: int = 0


class _Gradient(NamedTuple):
    """``nbytes`` of dense memory, of which ``birth`` is known, or which was allocated last before
    ``seen``. Memory that there was at ``since`` has been another tensor until ``seen``."""

    weight: Weight
    nbytes: int
    seen: float
    birth: int
    since: float


class Taken(NamedTuple):
    """Dense bytes of a product beyond those before it: ``result`` in any way, and ``more`` slab by
    slab; or ``beside`` and what else it takes in any way, for ``None`` nothing."""

    result: int
    more: int
    beside: int | None = None


class _Product(NamedTuple):
    """Of a weight, in ``began`` … ``ended``; or an optimizer's step, of no weight."""

    weight: Weight | None
    began: float
    ended: float
    taken: Taken


class Choice(NamedTuple):
    """Which weights are whole, and what an iteration takes then."""

    whole: list[Weight]
    dense: int
    frames: int


class Placement:
    """Of one pager: its weights in metered iterations, and what they took."""

    def __init__(self, birth_at: Callable[[int], int] = lambda address: 0) -> None:
        self._birth_at = birth_at  # of dense memory at an address; 0 where that is not known
        self.weights: dict[Extent, Weight] = {}
        self.turned = False  # one that was whole began to stream in the middle of this iteration
        self._copies: dict[int, bool] = {}  # verdicts on what is no parameter, by size
        self._copies_before: dict[int, bool] = {}  # this iteration
        self._verdicts_before: dict[Extent, bool | None] = {}  # of those that it has changed
        self._gradients: list[_Gradient] = []
        self._memories: dict[int, tuple[StorageWeakRef, Weight]] = {}  # of dense gradients
        self._parts: dict[tuple[Hashable, int, int], tuple[Weight, float]] = {}  # see `note_part`
        self._products: list[_Product] = []
        self.under_way: Weight | None = None  # whose product takes place
        self._casts: dict[Extent, Weight] = {}  # that autocast has made
        self._timeline = self._left = NO_TIMELINE
        self._beside, self._rest = NO_TIMELINE.nbytes, 0
        self._dense = self._before = 0

    def start(self, dense_before: int) -> None:
        """Another iteration is metered; those before took ``dense_before`` bytes."""
        for noted in (self._verdicts_before, self._gradients, self._products, self._casts):
            noted.clear()
        self._parts.clear()
        self._memories.clear()
        self._copies_before = dict(self._copies)
        self._before, self._dense = dense_before, 0
        self._timeline = self._left = NO_TIMELINE
        self._beside, self._rest = NO_TIMELINE.nbytes, 0
        self.turned, self.under_way = False, None
        self.weights = {run: weight for run, weight in self.weights.items() if run.storages}

    def known(self, run: Extent) -> bool | None:
        """The verdict on ``run``."""
        if run.streamed is None and run.kind in TRANSIENT_KINDS:
            run.streamed = self._copies.get(run.nbytes)
        return run.streamed

    def streamed_copies(self) -> list[int]:
        """Bytes of those that stream of what each iteration makes anew: casts of weights, say."""
        return [nbytes for nbytes, streamed in self._copies.items() if streamed]

    def judge(self, run: Extent, *, streamed: bool) -> None:
        """From now on."""
        self._verdicts_before.setdefault(run, run.streamed)
        run.streamed = streamed
        if run.kind in TRANSIENT_KINDS:
            self._copies[run.nbytes] = streamed

    def stream(self, run: Extent) -> None:
        """From now on, also if it was whole so far."""
        self.turned = self.turned or not run.streamed
        self.judge(run, streamed=True)

    def withdraw(self) -> None:
        """The iteration is refused: its verdicts do not count."""
        for run, verdict in self._verdicts_before.items():
            run.streamed = verdict
        self._copies = self._copies_before

    def forget(self) -> None:
        """All fits from now on, since a budget has grown."""
        self._copies.clear()

    # -- while an iteration is metered -----------------------------------------------------------
    def weight(self, run: Extent, least_frames: int) -> Weight:
        weight = self.weights.setdefault(run, Weight(run, least_frames))
        weight.least_frames = max(weight.least_frames, least_frames)
        return weight

    @contextmanager
    def product(self, weight: Weight, taken: Taken) -> Iterator[Weight]:
        """Whole, takes place inside."""
        began, before = time.perf_counter(), self.under_way
        self.under_way = weight
        try:
            yield weight
        finally:
            self.under_way = before
            self.note_product(weight, began, taken)

    def note_product(self, weight: Weight | None, began: float, taken: Taken) -> None:
        """It has just ended. ``None``: of what streams in any case."""
        self._products.append(_Product(weight, began, time.perf_counter(), taken))

    def note_gradient(self, weight: Weight, gradient: torch.Tensor, edge: Hashable) -> None:
        """``gradient`` is a dense one, was made just now, and goes along ``edge`` of the graph."""
        self.note_part(weight, gradient.numel(), edge)
        self._note(weight, gradient, 0.0)

    def note_part(self, weight: Weight, elements: int, edge: Hashable) -> None:
        """A gradient of so many elements, dense or in pages, was made just now. Two of one edge are
        added up in a backward pass: in pages that takes a frame of each, and of the sum."""
        part = edge, elements, torch._C._current_graph_task_id()
        if part in self._parts:
            weight.least_frames = max(weight.least_frames, 3)
        self._parts.setdefault(part, (weight, time.perf_counter()))

    def note_total(self, weight: Weight | None, gradient: torch.Tensor, edge: Hashable) -> None:
        """``gradient``, a dense one, is that of ``weight`` now: perhaps a sum, in memory of its own
        or in that of one of its terms, or of another dtype. (If no product had all of the weight it
        is what an op on other gradients gives, which is dense in any way.)"""
        same = gradient.numel(), torch._C._current_graph_task_id()
        made = [
            when
            for (other, *part), (of, when) in self._parts.items()
            if (*part,) == same and (other == edge or of is weight)
        ]
        if weight is not None and made:
            self._note(weight, gradient, min(made))

    def _note(self, weight: Weight, gradient: torch.Tensor, since: float) -> None:
        nbytes = gradient.numel() * gradient.dtype.itemsize
        memory = gradient.untyped_storage()
        self._memories[memory._cdata] = StorageWeakRef(memory), weight
        birth = self._birth_at(memory.data_ptr())
        entry = _Gradient(weight, nbytes, time.perf_counter(), birth, since)
        self._gradients.append(entry)

    def whose_gradient(self, gradient: torch.Tensor) -> Weight | None:
        """Of the dense ones that were noted, and of which some memory is alive."""
        kept, weight = self._memories.get(gradient.untyped_storage()._cdata, (None, None))
        return weight if kept is not None and not kept.expired() else None

    def owner(self, runs: Collection[Extent]) -> Weight | None:
        """The weight whose product an op on ``runs`` is a part of."""
        weight = self.under_way
        if weight is None:
            return next((self._casts[run] for run in runs if run in self._casts), None)
        if weight.run not in runs:
            half = weight.run.nbytes // 2
            self._casts.update((r, weight) for r in runs if _is_cast(r) and r.nbytes == half)
        return weight

    def note_cast(self, run: Extent, weight: Weight) -> None:
        """Pages of a cast of ``weight``: ops on them are parts of its products."""
        self._casts[run] = weight

    def note_step(self, began: float) -> None:
        """One has just ended. What it takes, if it goes slab by slab, is counted by itself."""
        self._products.append(_Product(None, began, time.perf_counter(), Taken(0, 0)))

    # -- before the step, and at the end ---------------------------------------------------------
    def measure(self, timeline: Timeline, baseline: int, dense: int) -> None:
        """Dense bytes of another part of the iteration: when, beside ``baseline``, and at the
        peak."""
        if self._dense and not len(timeline.when):  # nothing is known of what it took them for
            self._before = max(self._before, dense)
            return
        timeline = timeline._replace(nbytes=timeline.nbytes + baseline)
        self._timeline = Timeline(*(np.concatenate(c) for c in zip(self._timeline, timeline)))
        self._dense = max(self._dense, dense)

    def lives_on(self, living: Timeline, rest: int) -> int:
        """``living``: when large tensors were made that live at the end of the iteration, and their
        bytes; ``rest``: of the small ones. The next iteration begins with those that this one has
        made. It has each until it has made one in its place. The peak that this gives, by the
        verdicts that hold now."""
        when = self._timeline.when
        if not len(when):
            return 0
        self._left = Timeline(*(column[living.when >= when[0]] for column in living))
        self._rest = max(0, rest - int(self._left.nbytes.sum()))
        self._beside = np.array([self.left_at(moment) for moment in when], np.int64)
        return self._dense_with(self._wholes())

    def left_at(self, moment: float) -> int:
        """Bytes of these that the next iteration has beside its own at the same place."""
        return self._rest + int(self._left.nbytes[self._left.when >= moment].sum())

    def choices(self, rigid: int) -> list[Choice]:
        """From as many whole as there are to none, the largest first to stream, equal ones
        together. ``rigid``: frames that other ops need."""
        wholes = self._wholes()
        sizes = sorted({weight.run.count for weight in wholes}, reverse=True)
        fewer = ([w for w in wholes if w.run.count < size] for size in sizes)
        return [self._choice(some, rigid) for some in (wholes, *fewer)]

    def _wholes(self) -> list[Weight]:
        return [weight for weight in self.weights.values() if not weight.run.streamed]

    def _choice(self, whole: list[Weight], rigid: int) -> Choice:
        frames = rigid
        for weight in self.weights.values():
            frames = max(frames, weight.frames if weight in whole else weight.least_frames)
        return Choice(whole, max(self._dense_with(whole), self._before), frames)

    def _dense_with(self, whole: list[Weight]) -> int:
        """The peak of dense bytes if these are whole, and the others stream."""
        when, current, birth = self._timeline
        gradients = [g for g in self._gradients if g.weight not in whole]
        if not len(when):  # at the peak there was one of them, as far as is known
            return max(0, self._dense - max((g.nbytes for g in gradients), default=0))
        level = current + self._beside if len(self._beside) else current.copy()
        grown = np.diff(current, prepend=current[0])
        lives: dict[int, int] = {}  # where each memory begins to be that of a gradient
        for gradient in gradients:
            number, begun = _life(self._timeline, grown, gradient)
            lives[number] = min(begun, lives.get(number, begun))
        lives.pop(0, None)
        for number, begun in lives.items():
            born, last = np.flatnonzero(birth == number)[[0, -1]]
            level[begun : last if grown[last] < 0 else None] -= grown[born]
        peak = 0
        for weight, began, ended, taken in self._products:
            if weight not in whole:
                first = max(0, int(np.searchsorted(when, began, "right")) - 1)
                last = max(first + 1, int(np.searchsorted(when, ended, "right")))
                before = int(level[first]) + taken.result
                peak = max(peak, before + taken.more)
                if taken.beside is not None:
                    peak = max(peak, int(level[first:last].max()) + taken.beside)
                level[first + 1 : last - 1] = np.minimum(level[first + 1 : last - 1], before)
        peak = max(peak, int(level.max()))
        return max(0, self._dense + peak - int(current.max()))


def _is_cast(run: Extent) -> bool:
    return run.kind == "activation" and run.small is None


def _life(timeline: Timeline, grown: Any, gradient: _Gradient) -> tuple[int, int]:
    """Birth of its memory, 0 where not known, and from which event on it was the gradient's."""
    seen = int(np.searchsorted(timeline.when, gradient.seen, "right"))
    mine = grown[:seen] == gradient.nbytes
    if gradient.birth:
        mine &= timeline.birth[:seen] == gradient.birth
    made = np.flatnonzero(mine)
    if not len(made):
        return 0, seen
    born = int(made[0] if gradient.birth else made[-1])
    return int(timeline.birth[born]), born if timeline.when[born] >= gradient.since else seen
