"""Whether a weight is on the device whole for its products, or streams: one verdict for each.

::

    the first iteration     whole where the weight, and a dense gradient of it, fit into the budget
    before the step         all that is whole fits beside what else was measured: it stays whole;
                            if not, the largest stream from now on, or the budget is refused
    later                   the same, whatever becomes of the arena, in every mode

What is whole has PyTorch's bits, what streams has bits of its own (``linear_stream.py``), so the
verdict must not depend on what happens to be on the device. It is made by sizes, the budget and
what an iteration was found to take, and the larger the budget, the fewer weights stream. The
verdict is kept with the pages, ``Extent.streamed``; ``None`` before it is made. It changes once at
most: a weight that was whole streams if an iteration of other shapes finds no room for that, or
what others have pinned leaves none.

*The smallest budget.* If all weights streamed, some budget would do. Under it some may be whole, by
their sizes, and whole they take more: a larger budget then, under which others may be whole, and so
on, until it does for all that are whole under it. That number is named; every larger budget works,
for where a larger weight may be whole and finds no room, it streams. ::

    budget    | too small     | works: the weight streams                       | works: it is whole
              0               named      its size and a gradient's   what it takes whole

*What the others take.* What an iteration would take is known without trying it: products of whole
weights are watched, and the frames that they take are kept apart from other needs
(``Residency.whole``). Of each gradient of a weight it is known how long it lives, dense where the
weight is whole, else in pages; and what streaming takes in dense temporaries.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from ..devices.dense_meter import Timeline
from ..memory.space import Extent


@dataclass(eq=False)
class Weight:
    """Of a linear in metered iterations. ``limit_bytes``: of the smallest budget under which it may
    be whole. ``frames``: that its products have pinned, whole; ``least_frames``: if it streams."""

    run: Extent
    limit_bytes: int
    least_frames: int
    frames: int = 0


@dataclass(eq=False)
class _Gradient:
    """``nbytes``, of dense memory or in pages, made after ``began`` and given up at ``ended``."""

    weight: Weight
    nbytes: int
    dense: bool
    began: float
    made: weakref.ref[Any]
    ended: float = float("inf")


class _Product(NamedTuple):
    """Of a whole weight, in ``began`` … ``ended``; slab by slab it takes ``more`` dense bytes."""

    weight: Weight
    began: float
    ended: float
    more: int


class Choice(NamedTuple):
    """Which weights are whole, and what an iteration takes then."""

    whole: list[Weight]
    dense: int
    frames: int


class Placement:
    """Of one pager: its weights in metered iterations, and what they took."""

    def __init__(self) -> None:
        self.weights: dict[Extent, Weight] = {}
        self._made: list[Extent] = []  # those whose verdict is of this iteration
        self._gradients: list[_Gradient] = []
        self._products: list[_Product] = []
        self._timeline: Timeline = (np.empty(0), np.empty(0, np.int64))
        self._dense = self._before = 0

    def start(self, dense_before: int) -> None:
        """Another iteration is metered; those before took ``dense_before`` bytes."""
        self._made.clear()
        self._gradients.clear()
        self._products.clear()
        self._before = dense_before
        self.weights = {run: weight for run, weight in self.weights.items() if run.storages}

    def judge(self, run: Extent, *, streamed: bool) -> None:
        """Its first verdict."""
        run.streamed = streamed
        self._made.append(run)

    def withdraw(self) -> None:
        """The iteration is refused: its verdicts do not count."""
        for run in self._made:
            run.streamed = None
        self._made.clear()

    # -- while an iteration is metered -----------------------------------------------------------
    def weight(self, run: Extent, limit_bytes: int, least_frames: int) -> Weight:
        weight = self.weights.get(run)
        if weight is None:
            weight = self.weights[run] = Weight(run, limit_bytes, least_frames)
        weight.limit_bytes = max(weight.limit_bytes, limit_bytes)
        weight.least_frames = max(weight.least_frames, least_frames)
        return weight

    @contextmanager
    def product(self, weight: Weight, more: int) -> Iterator[Weight]:
        """Whole, takes place inside. Slab by slab it would take ``more`` dense bytes."""
        began = time.perf_counter()
        try:
            yield weight
        finally:
            self._products.append(_Product(weight, began, time.perf_counter(), more))

    def note_gradient(self, weight: Weight, gradient: Any, nbytes: int, began: float) -> None:
        """``gradient``: a dense tensor, or the storage of pages; made since ``began``."""
        dense = isinstance(gradient, torch.Tensor)
        entry = _Gradient(weight, nbytes, dense, began, weakref.ref(gradient))
        self._gradients.append(entry)
        weakref.finalize(gradient, _end, entry).atexit = False

    def note_made_of(self, gradient: Any, parts: Sequence[Any], nbytes: int, began: float) -> None:
        """``gradient``, the storage of pages, is a sum or a copy of ``parts``, storages too: where
        the weight is whole it is dense as they are."""
        entries = [e for e in self._gradients if any(e.made() is part for part in parts)]
        if entries:
            # A linear sums up inside of its backward node, with the last part's operands there.
            began = min(began, max(entry.began for entry in entries))
            self.note_gradient(entries[0].weight, gradient, nbytes, began)

    def gradient_is_kept(self, weight: Extent) -> None:
        """As the parameter's: what is dense goes into pages now, what is in pages would."""
        for gradient in self._gradients:
            if gradient.weight.run is weight and not gradient.dense:
                _end(gradient)

    # -- before the step -------------------------------------------------------------------------
    def measure(self, timeline: Timeline, baseline: int, dense: int) -> None:
        """Dense bytes of the iteration so far: when, beside ``baseline``, and at the peak."""
        self._timeline = timeline[0], timeline[1] + baseline
        self._dense = dense

    def took(self, dense: int) -> None:
        """All of the iteration took so many bytes, what came after its step included."""
        self._before = max(self._before, dense)

    def choices(self, rigid: int) -> list[Choice]:
        """From as many whole as there are to none, the largest first to stream, equal ones
        together. ``rigid``: frames that other ops need."""
        wholes = [weight for weight in self.weights.values() if not weight.run.streamed]
        limits = sorted({weight.limit_bytes for weight in wholes}, reverse=True)
        fewer = ([w for w in wholes if w.limit_bytes < limit] for limit in limits)
        return [self.choice(some, rigid) for some in (wholes, *fewer)]

    def choice(self, whole: list[Weight], rigid: int) -> Choice:
        frames = rigid
        for weight in self.weights.values():
            frames = max(frames, weight.frames if weight in whole else weight.least_frames)
        return Choice(whole, max(self._dense_with(whole), self._before), frames)

    def under(self, budget_bytes: int) -> list[Weight]:
        """Those that may be whole."""
        return [w for w in self.weights.values() if w.limit_bytes <= budget_bytes]

    def _dense_with(self, whole: list[Weight]) -> int:
        """The peak of dense bytes if these are whole, and the others stream."""
        when, current = self._timeline
        changed = [g for g in self._gradients if g.dense is not (g.weight in whole)]
        products = [p for p in self._products if p.more and p.weight not in whole]
        if not len(when):
            return self._dense + sum(g.nbytes for g in changed if not g.dense)
        level = current.copy()
        grown = np.diff(current, prepend=current[0])
        for gradient in changed:
            first = int(np.searchsorted(when, gradient.began))
            last = int(np.searchsorted(when, gradient.ended, "right"))
            if gradient.dense:  # from the allocation to the release
                births = np.flatnonzero(grown[first:] == gradient.nbytes)
                deaths = np.flatnonzero(grown[last:] == -gradient.nbytes)
                if len(births):
                    last = last + int(deaths[0]) if len(deaths) else len(level)
                    level[first + int(births[0]) : last] -= gradient.nbytes
            else:
                first = max(0, first - 1)
                level[first : max(last, first + 1)] += gradient.nbytes
        peak = int(level.max())
        for product in products:
            first = max(0, int(np.searchsorted(when, product.began, "right")) - 1)
            last = max(first + 1, int(np.searchsorted(when, product.ended, "right")))
            peak = max(peak, int(level[first:last].max()) + product.more)
        return max(0, self._dense + peak - int(current.max()))


def _end(gradient: _Gradient) -> None:
    gradient.ended = min(gradient.ended, time.perf_counter())
