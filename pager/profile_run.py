"""Which iterations are metered, and what is decided when one was.

The first iteration is, and so is every one in which a paged module is called in another way than
before. Where it is given larger inputs than it ever was, what that takes is foreseen, by a fit
(:class:`Needs`). If there is room for it, the border moves before the call and nothing is metered:
what is needed beyond that is asked for in the middle of an op, as in any iteration. If there is no
room, or more is asked for than there is, it is metered, from there on.
"""

from __future__ import annotations

import gc
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .errors import TierFull
from .optim.optimizer import optimizers_due, room_of_step
from .plan.signatures import Growth

if TYPE_CHECKING:
    from .core import Core


class Shapes:
    """Input shapes that were metered. Of each kind of call, what no other one exceeds in every
    dimension."""

    def __init__(self) -> None:
        self._largest: dict[Hashable, list[tuple[int, ...]]] = {}

    def cover(self, kind: Hashable, dims: tuple[int, ...]) -> bool:
        """Whether a call of this kind was added that was as large in every dimension."""
        return any(_is_within(dims, other) for other in self._largest.get(kind, ()))

    def add(self, kind: Hashable, dims: tuple[int, ...]) -> None:
        if not self.cover(kind, dims):
            others = [d for d in self._largest.get(kind, ()) if not _is_within(d, dims)]
            self._largest[kind] = [*others, dims]


def _is_within(dims: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return all(mine <= theirs for mine, theirs in zip(dims, other, strict=True))


class Needs:
    """What iterations take by the largest input of one kind of call in them: dense bytes, frames
    that one op pins, and transient bytes, which may be dense or in pages. All are taken to grow by
    the square of that (as attention does), and by less where larger inputs than the first ones have
    taken less."""

    def __init__(self) -> None:
        self._growth = Growth()
        self._growth.add(0, [0.0] * 3)
        self._largest = 0
        self._taken = 0, 0, 0

    def add(self, size: int, dense: int, frames: int, transient: int) -> None:
        if size > self._largest:
            self._largest, self._taken = size, (dense, frames, transient)
            self._growth.add(size**2, self._taken)

    def foresee(self, size: int) -> tuple[int, int, int]:
        """Of a larger input than any so far."""
        more = self._growth.ratio(self._largest**2, size**2)
        dense, frames, transient = (int(np.ceil(taken)) for taken in more * self._taken)
        return dense, frames, transient


class ProfileRun:
    """Of one pager."""

    def __init__(self, pager: Core) -> None:
        self._pager = pager
        self._shapes = Shapes()
        self._needs: dict[Hashable, Needs] = {}  # by kinds of calls
        self._fresh_shapes: set[tuple[Hashable, tuple[int, ...]]] = set()  # of the iteration now
        self._sizes: dict[Hashable, int] = {}  # of its largest inputs, by kinds
        pager.budget.make_dense_room = self._make_dense_room
        pager.budget.optimizers_due = lambda: optimizers_due(pager)
        pager.budget.step_room = room_of_step
        pager.budget.meter = lambda: self._meter(go_on=True)

    def begin(self) -> None:
        """An iteration begins."""
        self._fresh_shapes.clear()
        self._sizes.clear()
        budget = self._pager.budget
        if not budget.settled:
            self._meter(go_on=False)
            return
        if budget.gave:  # to an iteration that was cut short
            self._place()
        if not budget.begin():
            self._meter(go_on=False)

    def note_shapes(self, module: Any, args: Any, kwargs: Any) -> None:
        """A paged module is called. Shapes that it never ran on may need more, for which there has
        to be room."""
        tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)]
        kind = (
            id(module),
            torch.is_grad_enabled(),
            module.training,
            self._pager.saved.again,
            tuple((t.dim(), t.dtype) for t in tensors),
        )
        dims = tuple(size for t in tensors for size in t.shape)
        if not self._pager.in_iteration() or self._pager.inferring:
            return
        size = max((t.numel() for t in tensors), default=0)
        self._sizes[kind] = max(size, self._sizes.get(kind, 0))
        if self._shapes.cover(kind, dims):
            return
        self._fresh_shapes.add((kind, dims))
        if self._pager.budget.settled and not self._has_room(kind, size):
            self._meter(go_on=True)

    def _has_room(self, kind: Hashable, size: int) -> bool:
        """Whether a larger input than before finds room, as far as can be foreseen; beside all
        pages where everything fits. Not where dense memory cannot ask in the middle of an op."""
        pager, needs = self._pager, self._needs.get(kind)
        if needs is None or pager.backend.meter_level() is None:
            return False
        dense, frames, transient = needs.foresee(size)
        if pager.fits:
            dense, frames = dense + transient, max(frames, self._most_pages())
        missing = pager.budget.expect(dense, frames)
        if missing is None or (missing > 0 and not self._make_dense_room(missing)):
            return False
        if pager.fits:
            pager.saved.dense_allowance = max(pager.saved.dense_allowance, transient)
        return True

    def _meter(self, *, go_on: bool) -> None:
        with self._about_to_resize():
            self._pager.budget.start(go_on=go_on)

    @contextmanager
    def _about_to_resize(self) -> Iterator[None]:
        """Inside, in the middle of an iteration, the arena may get smaller: nothing counts on
        what it holds any more."""
        pager = self._pager
        pager.saved.dense_allowance = 0
        pager.fits = False
        with pager.lock:
            pager.opened.close()
            if pager.follower is not None:
                pager.follower.pause()
            with pager.quiet():
                yield

    def _make_dense_room(self, missing: int) -> bool:
        """On the training thread, in the middle of an op that asks for dense memory which was not
        foreseen: the arena gives frames away, so that both together stay inside the budget.
        ``False`` where that cannot be."""
        pager, budget = self._pager, self._pager.budget
        if budget.metering:
            if pager.lock._is_owned():  # type: ignore[attr-defined]
                budget.let_pass(missing)
                return True
            with pager.quiet():
                budget.give_while_metering(missing)
            return True
        has_room = budget.can_give(missing)
        if not has_room and not budget.is_expected:
            return self._collect_garbage(missing)
        if pager.lock._is_owned():  # type: ignore[attr-defined]
            budget.let_pass(missing)  # until the pages are there that are being moved now
            return True
        if not has_room:
            budget.meter_instead()
            return self._make_dense_room(missing)
        before = pager.fits, pager.saved.dense_allowance
        with self._about_to_resize():
            given = budget.give(missing)
        if not given or self._most_pages() <= pager.residency.frames:
            pager.fits, pager.saved.dense_allowance = before
        if budget.gave and pager.follower is not None and not pager.inferring:
            with pager.lock:
                pager.follower.arena_resized()
        return given

    def _collect_garbage(self, missing: int) -> bool:
        """Whether so many dense bytes were held by nothing but Python's garbage. When that goes is
        no matter of the program, so it is no reason to refuse one."""
        before = self._pager.backend.dense_now()
        gc.collect()
        return self._pager.backend.dense_now() <= before - missing

    def end(self) -> None:
        """End of an iteration: where it was metered, or took more dense memory than was known,
        place the border, and keep things dense if all fits."""
        pager, budget = self._pager, self._pager.budget
        taken = budget.taken()
        if budget.metering:
            budget.end()
            taken = budget.dense_peak
            self._place()
        else:
            dense = budget.grown()
            if self._fresh_shapes and pager.fits:  # saved tensors were dense, and are part of it
                transient = pager.saved.dense_bytes
                pages = pager.space.pages_for(transient)
                pager.space.peak_transient_pages = max(pager.space.peak_transient_pages, pages)
                taken = max(0, taken - transient)
                budget.dense_peak = max(budget.dense_peak, taken)
                self._place()
            elif (dense or budget.gave) and not self._still_fits(dense):
                budget.dense_peak = max(budget.dense_peak, dense)
                self._place()
            budget.gave = False  # where all still fits the border may stay where it is
        transient = pager.space.peak_transient_pages * pager.page_size
        for kind, dims in self._fresh_shapes:
            self._shapes.add(kind, dims)
            needs = self._needs.setdefault(kind, Needs())
            needs.add(self._sizes[kind], taken, pager.residency.largest_need, transient)

    def _still_fits(self, dense: int) -> bool:
        """Whether everything fits, beside so many dense bytes too."""
        pager = self._pager
        nbytes = self._most_pages() * pager.page_size + dense
        return pager.fits and nbytes <= pager.budget.bytes

    def _most_pages(self) -> int:
        """That the arena has to hold at once where everything fits."""
        return max(self._pager.space.persistent_pages, self._pager.residency.largest_need)

    def _place(self) -> None:
        pager, budget, space = self._pager, self._pager.budget, self._pager.space
        residency = pager.residency
        transient = space.peak_transient_pages * pager.page_size
        arena = self._most_pages() * pager.page_size
        dense = budget.dense_peak + budget.dense_peak // 8 + (1 << 20)
        pager.fits = budget.fixed_reserve is None and arena + transient + dense <= budget.bytes
        if pager.fits:  # since a budget has grown
            for run in space.runs.values():
                run.streamed = False if run.streamed else run.streamed
                run.in_slabs = False
            space.passed_in_slabs.clear()
            budget.placement.forget()
        with pager.lock:
            frames = residency.pool.count
            roomy = pager.fits and 4 * (arena + transient + dense) <= 3 * budget.bytes
            extra = transient if pager.fits else pager.in_backward.extra_dense()
            spare = 0
            if pager.fits and not pager.backend.host_addressable:
                # Its allocator's fragments are not known before the first iteration with all dense.
                spare = max(0, budget.bytes - arena - arena // 16 - dense - extra)
            with pager.quiet():
                try:
                    budget.settle(extra, spare=spare, roomy=roomy)
                except TierFull:
                    if not pager.fits or pager.backend.can_unmap:
                        raise
                    pager.fits = False  # the arena cannot be made anew: all that was in it stays so
                    extra = spare = 0
                    budget.settle(pager.in_backward.extra_dense(), roomy=False)
            least = budget.dense_peak if budget.fixed_reserve is None else budget.fixed_reserve
            if budget.reserve < least:  # pins of other threads were in the way
                pager.turns.alone()
                with pager.quiet():
                    budget.place(extra, spare=spare, roomy=roomy)
            if pager.follower is not None and residency.pool.count != frames:
                pager.follower.arena_resized()
        pager.saved.dense_allowance = transient if pager.fits else 0
