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
product what streaming takes in dense temporaries. A weight of one page never streams: it would take
that page all the same.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from ..devices.dense_meter import NO_TIMELINE, Timeline
from ..memory.space import TRANSIENT_KINDS, Extent


@dataclass(eq=False)
class Weight:
    """Of a linear in metered iterations. ``frames``: that its products have pinned, whole;
    ``least_frames``: if it streams."""

    run: Extent
    least_frames: int
    frames: int = 0


@dataclass(eq=False)
class _Gradient:
    """``nbytes`` of dense memory, allocated last before ``seen``, and given up after ``ended``."""

    weight: Weight
    nbytes: int
    seen: float
    ended: float = float("inf")


class Taken(NamedTuple):
    """Dense bytes of a product beyond those before it: ``result`` in any way, and ``more`` slab by
    slab; or ``beside`` and what else it takes in any way, for ``None`` nothing."""

    result: int
    more: int
    beside: int | None = None


class _Product(NamedTuple):
    """Of a whole weight, in ``began`` … ``ended``; or an optimizer's step, of no weight."""

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

    def __init__(self) -> None:
        self.weights: dict[Extent, Weight] = {}
        self.turned = False  # one that was whole began to stream in the middle of this iteration
        self._copies: dict[int, bool] = {}  # verdicts on what is no parameter, by size
        self._copies_before: dict[int, bool] = {}  # this iteration
        self._verdicts_before: dict[Extent, bool | None] = {}  # of those that it has changed
        self._gradients: list[_Gradient] = []
        self._products: list[_Product] = []
        self.under_way: Weight | None = None  # whose product takes place
        self._casts: dict[Extent, Weight] = {}  # that autocast has made
        self._timeline = self._left = NO_TIMELINE
        self._beside, self._rest = NO_TIMELINE[1], 0
        self._dense = self._before = 0

    def start(self, dense_before: int) -> None:
        """Another iteration is metered; those before took ``dense_before`` bytes."""
        for noted in (self._verdicts_before, self._gradients, self._products, self._casts):
            noted.clear()
        self._copies_before = dict(self._copies)
        self._before, self._dense = dense_before, 0
        self._timeline = self._left = NO_TIMELINE
        self._beside, self._rest = NO_TIMELINE[1], 0
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

    def note_product(self, weight: Weight, began: float, taken: Taken) -> None:
        """It has just ended."""
        self._products.append(_Product(weight, began, time.perf_counter(), taken))

    def note_gradient(self, weight: Weight, gradient: torch.Tensor) -> None:
        """``gradient`` is a dense one, and was made just now."""
        entry = _Gradient(weight, gradient.numel() * gradient.dtype.itemsize, time.perf_counter())
        self._gradients.append(entry)
        weakref.finalize(gradient, _end, entry).atexit = False

    def note_total(self, run: Extent, gradient: torch.Tensor) -> None:
        """The same of the gradient of a parameter: perhaps a sum, or of another dtype."""
        weight = self.weights.get(run)
        if weight is not None:
            self.note_gradient(weight, gradient)

    def owner(self, runs: Collection[Extent]) -> Weight | None:
        """The weight whose product an op on ``runs`` is a part of."""
        weight = self.under_way
        if weight is None:
            return next((self._casts[run] for run in runs if run in self._casts), None)
        if weight.run not in runs:
            half = weight.run.nbytes // 2
            self._casts.update((r, weight) for r in runs if _is_cast(r) and r.nbytes == half)
        return weight

    def note_step(self, began: float) -> None:
        """One has just ended. What it takes, if it goes slab by slab, is counted by itself."""
        self._products.append(_Product(None, began, time.perf_counter(), Taken(0, 0)))

    # -- before the step, and at the end ---------------------------------------------------------
    def measure(self, timeline: Timeline, baseline: int, dense: int) -> None:
        """Dense bytes of another part of the iteration: when, beside ``baseline``, and at the
        peak."""
        if self._dense and not len(timeline[0]):  # nothing is known of what it took them for
            self._before = max(self._before, dense)
            return
        when, current = self._timeline
        self._timeline = (
            np.concatenate([when, timeline[0]]),
            np.concatenate([current, timeline[1] + baseline]),
        )
        self._dense = max(self._dense, dense)

    def lives_on(self, living: Timeline, rest: int, step: float) -> int:
        """``living``: when large tensors were made that live at the end of the iteration, and their
        bytes; ``rest``: of the small ones. The next iteration begins with those that this one has
        made. It has each until it has made one in its place; or, of those made after the step at
        ``step``, which may stay for good (an average of weights), until then at least. The peak
        that this gives, by the verdicts that hold now."""
        when = self._timeline[0]
        if not len(when):
            return 0
        mine = living[0] >= when[0]
        self._left = np.minimum(living[0][mine], step), living[1][mine]
        self._rest = max(0, rest - int(self._left[1].sum()))
        self._beside = np.array([self.left_at(moment) for moment in when], np.int64)
        return self._dense_with(self._wholes())

    def left_at(self, moment: float) -> int:
        """Bytes of these that the next iteration has beside its own at the same place."""
        made, sizes = self._left
        return self._rest + int(sizes[made >= moment].sum())

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
        when, current = self._timeline
        gradients = [g for g in self._gradients if g.weight not in whole]
        if not len(when):  # at the peak there was one of them, as far as is known
            return max(0, self._dense - max((g.nbytes for g in gradients), default=0))
        level = current + self._beside if len(self._beside) else current.copy()
        grown = np.diff(current, prepend=current[0])
        for born, died in {_life(when, grown, gradient) for gradient in gradients}:
            level[born:died] -= grown[born]
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


def _life(when: Any, grown: Any, gradient: _Gradient) -> tuple[int, int]:
    """From which event to which one of a timeline its memory was taken. Several notes of the same
    memory give the same life; none is empty."""
    seen = int(np.searchsorted(when, gradient.seen, "right"))
    births = np.flatnonzero(grown[:seen] == gradient.nbytes)
    if not len(births):
        return 0, 0
    ended = int(np.searchsorted(when, gradient.ended))
    deaths = np.flatnonzero(grown[ended:] == -gradient.nbytes)
    return int(births[-1]), ended + int(deaths[0]) if len(deaths) else len(grown)


def _end(gradient: _Gradient) -> None:
    gradient.ended = min(gradient.ended, time.perf_counter())
