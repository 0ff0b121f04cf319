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
products of whole weights are watched. The frames that they take are kept apart from other needs,
and of each product it is known what streaming takes in dense temporaries. A product that streams
counts as just that too, so a named minimum does not depend on what was whole when it was found out.
Gradients of whole weights are in pages in such an iteration, as if they streamed; how long each
would be dense is known. A weight of one page never streams: it would take that page all the same.
"""

from __future__ import annotations

import math
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
    """In pages; where ``weight`` is whole it is ``nbytes`` of dense memory from ``born`` to
    ``ended``. ``copied``: the birth of dense memory that it was copied from, 0 where that is not
    known, ``None`` for none. ``becomes``: autocast's cast of it is in pages too. ``is_kept``: since
    an earlier iteration."""

    weight: Weight
    nbytes: int
    copied: int | None
    becomes: torch.dtype | None
    born: float
    ended: float = math.inf
    is_kept: bool = False
    storage: Any = None  # weakref

    def end(self, _: Any = None) -> None:
        self.ended = min(self.ended, time.perf_counter())

    @property
    def is_new(self) -> bool:
        """Whether it would be dense now if its weight stays whole."""
        return self.ended == math.inf


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

    def __init__(self) -> None:
        self.weights: dict[Extent, Weight] = {}
        self.turned = False  # one that was whole began to stream in the middle of this iteration
        self._copies: dict[int, bool] = {}  # verdicts on what is no parameter, by size
        self._copies_before: dict[int, bool] = {}  # this iteration
        self._verdicts_before: dict[Extent, bool | None] = {}  # of those that it has changed
        self._gradients: list[_Gradient] = []
        # Of those that live. (Small ones may share their pages with others.)
        self._newest: weakref.WeakKeyDictionary[Any, _Gradient] = weakref.WeakKeyDictionary()
        self._products: list[_Product] = []
        self.under_way: Weight | None = None  # whose product takes place
        self._casts: dict[Extent, Weight] = {}  # that autocast has made
        self._timeline = self._left = NO_TIMELINE
        self._beside, self._rest = NO_TIMELINE.nbytes, 0
        self._dense = self._before = 0
        self._over = False  # the iteration that was metered

    def start(self, dense_before: int) -> None:
        """Another iteration is metered; those before took ``dense_before`` bytes."""
        self._verdicts_before.clear()
        kept = [(storage, g) for storage, g in self._newest.items() if g.is_new]
        self._gradients.clear()
        for storage, g in kept:
            self._add(storage, _Gradient(g.weight, g.nbytes, None, g.becomes, g.born, is_kept=True))
        self._copies_before = dict(self._copies)
        self._before, self._dense = dense_before, 0
        self.forget_iteration()
        self.turned, self.under_way, self._over = False, None, False

    def forget_iteration(self) -> None:
        """What the metered iteration took: its verdicts hold."""
        self._products.clear()
        self._casts.clear()
        self._timeline = self._left = NO_TIMELINE
        self._beside, self._rest = NO_TIMELINE.nbytes, 0
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

    def note_gradient(
        self, weight: Weight, storage: Any, copied: int | None, becomes: torch.dtype | None
    ) -> None:
        """``storage`` is that of a gradient of whole ``weight``, which was made just now."""
        made = _Gradient(weight, storage.nbytes, copied, becomes, time.perf_counter())
        self._add(storage, made)

    def _add(self, storage: Any, gradient: _Gradient) -> None:
        gradient.storage = weakref.ref(storage, gradient.end)
        self._gradients.append(gradient)
        self._newest[storage] = gradient

    def note_derived(self, storage: Any, storages: Collection[Any]) -> None:
        """``storage``, in new pages, is dense where a gradient in one of ``storages`` is: it is a
        sum, a copy or a cast of it."""
        of = next((self._newest[one] for one in storages if one in self._newest), None)
        if of is not None:
            becomes = of.becomes if storage.nbytes == of.nbytes else None
            self.note_gradient(of.weight, storage, None, becomes)

    def becomes(self, storage: Any) -> torch.dtype | None:
        """The dtype of a cast of the gradient in ``storage`` that is in pages too."""
        known = self._newest.get(storage)
        return None if known is None else known.becomes

    def is_new(self, storage: Any) -> bool:
        """Whether a gradient in ``storage`` would be dense now if its weight stays whole."""
        known = self._newest.get(storage)
        return known is not None and known.is_new

    def note_arrived(self, storage: Any) -> None:
        """It is a parameter's now, and in pages in any way."""
        self._newest[storage].end()

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
        """One has just ended that may go slab by slab. What it takes then is counted by itself."""
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
        self._over = True
        self._left = Timeline(*(column[living.when >= when[0]] for column in living))
        self._rest = max(0, rest - int(self._left.nbytes.sum()))
        self._beside = np.array([self.left_at(moment) for moment in when], np.int64)
        return self._dense_with(self._wholes())

    def kept_bytes(self) -> int:
        """Of gradients that somebody has kept since the metered iteration, and which are dense in
        later ones."""
        kept = (g for g in self._newest.values() if g.is_new and not g.weight.run.streamed)
        return sum(gradient.nbytes for gradient in kept)

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
        when, current, _ = self._timeline
        if not len(when):  # at the peak there was one that was copied, as far as is known
            streams = [g.nbytes for g in self._gradients if g.weight not in whole]
            return max(0, self._dense - max(streams, default=0)) + self._at_once(whole)
        level = current + self._beside if len(self._beside) else current.copy()
        grown = np.diff(current, prepend=current[0])
        for gradient in self._gradients:
            is_dense = gradient.weight in whole or self._is_replaced(gradient)
            self._count(gradient, level, grown, is_dense=is_dense)
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

    def _count(self, gradient: _Gradient, level: Any, grown: Any, *, is_dense: bool) -> None:
        """In ``level``, the dense bytes after each event."""
        when, _, birth = self._timeline
        begun = max(0, int(np.searchsorted(when, gradient.born, "right")) - 1)
        copied = self._copied_from(gradient, grown[: begun + 1])
        if copied:
            events = np.flatnonzero(birth == copied)
            made, freed = events[0], events[-1] if len(events) > 1 else len(when)
            if not is_dense:
                level[made:freed] -= grown[made]
            begun = freed
        if is_dense:
            lives_on = self._over and gradient.is_new
            ended = np.searchsorted(when, gradient.ended)
            level[0 if lives_on else begun : ended] += gradient.nbytes

    def _is_replaced(self, gradient: _Gradient) -> bool:
        """Whether the program has kept it until it had something else, which is dense: so it will
        be in the next iteration. (At the end of this one that is known: ``lives_on``.)"""
        if not gradient.is_kept or gradient.is_new or self._over:
            return False
        later = (g for g in self._gradients if not g.is_kept and g.is_new)
        return all(g.nbytes != gradient.nbytes for g in later if g.copied is None)

    def _copied_from(self, gradient: _Gradient, grown: Any) -> int:
        """The birth of the dense memory; 0 for none."""
        birth = self._timeline.birth
        if gradient.copied:
            return gradient.copied if (birth == gradient.copied).any() else 0
        alike = np.flatnonzero(grown == gradient.nbytes)  # the last one, where it is not known
        return int(birth[alike[-1]]) if gradient.copied == 0 and len(alike) else 0

    def _at_once(self, whole: list[Weight]) -> int:
        """Bytes of dense gradients of these at once, at most."""
        dense = [g for g in self._gradients if g.weight in whole]
        return max((_alive(dense, gradient.born) for gradient in dense), default=0)


def _alive(gradients: list[_Gradient], moment: float) -> int:
    return sum(g.nbytes for g in gradients if g.born <= moment < g.ended)


def _is_cast(run: Extent) -> bool:
    return run.kind == "activation" and run.small is None
