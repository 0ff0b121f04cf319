"""Which iterations are metered, and what is decided when one was.

The first iteration is, and so is every one in which a paged module sees input shapes that may need
more dense memory than those it ran on: no dimension of what it is given now is larger than when it
was metered, or it is metered again.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .runtime import Pager


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


class Settling:
    """Of one pager."""

    def __init__(self, pager: Pager) -> None:
        self._pager = pager
        self._shapes = Shapes()
        self._fresh_shapes: set[tuple[Hashable, tuple[int, ...]]] = set()  # of the iteration now

    def begin(self) -> None:
        """An iteration begins."""
        self._fresh_shapes.clear()
        if not self._pager.budget.settled:
            self._meter()
        else:
            self._pager.budget.begin()

    def note_shapes(self, module: Any, args: Any, kwargs: Any) -> None:
        """See ``Pager.note_shapes``."""
        tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)]
        kind = (
            id(module),
            torch.is_grad_enabled(),
            module.training,
            tuple((t.dim(), t.dtype) for t in tensors),
        )
        dims = tuple(size for t in tensors for size in t.shape)
        if self._shapes.cover(kind, dims) or not self._pager.in_iteration():
            return
        self._fresh_shapes.add((kind, dims))
        if self._pager.budget.settled:
            self._meter()

    def _meter(self) -> None:
        pager = self._pager
        pager.saved.dense_allowance = 0
        pager.fits = False
        with pager.lock:
            pager.opened.close()
            if pager.follower is not None:
                pager.follower.pause()
            with pager.quiet():
                pager.budget.start()

    def end(self) -> None:
        """End of an iteration: where it was metered, or took more dense memory than was known,
        place the border, and keep things dense if all fits."""
        budget = self._pager.budget
        if budget.metering:
            budget.end()
            self._place()
            for kind, dims in self._fresh_shapes:
                self._shapes.add(kind, dims)
        elif (dense := budget.grown()) and not self._still_fits(dense):
            budget.dense_peak = max(budget.dense_peak, dense)
            self._place()

    def _still_fits(self, dense: int) -> bool:
        """Whether everything fits, beside so many dense bytes too."""
        pager = self._pager
        pages = max(pager.space.persistent_pages, pager.residency.largest_need)
        return pager.fits and pages * pager.page_size + dense <= pager.budget.bytes

    def _place(self) -> None:
        pager, budget, space = self._pager, self._pager.budget, self._pager.space
        residency = pager.residency
        transient = space.peak_transient_pages * pager.page_size
        persistent = space.persistent_pages * pager.page_size
        arena = max(persistent, residency.largest_need * pager.page_size)
        dense = budget.dense_peak + budget.dense_peak // 8 + (1 << 20)
        pager.fits = budget.fixed_reserve is None and arena + transient + dense <= budget.bytes
        if pager.fits:  # since a budget has grown
            for run in space.runs.values():
                run.streamed = False if run.streamed else run.streamed
        with pager.lock:
            frames = residency.pool.count
            roomy = pager.fits and 4 * (arena + transient + dense) <= 3 * budget.bytes
            extra = transient if pager.fits else pager.overlap.extra_dense()
            if pager.fits and not pager.backend.host_addressable:
                # Its allocator's fragments are not known before the first iteration with all dense.
                extra = max(extra, budget.bytes - arena - arena // 16 - dense)
            with pager.quiet():
                budget.settle(extra, roomy=roomy)
            least = budget.dense_peak if budget.fixed_reserve is None else budget.fixed_reserve
            if budget.reserve < least:  # pins of other threads were in the way
                pager.turns.alone()
                with pager.quiet():
                    budget.place(extra, roomy=roomy)
            if pager.follower is not None and residency.pool.count != frames:
                pager.follower.arena_resized()
        pager.saved.dense_allowance = transient if pager.fits else 0
