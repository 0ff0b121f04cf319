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
from threading import get_ident
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from .errors import TierFull
from .optim.optimizer import optimizers_due, room_of_step
from .plan.ways import Growth

if TYPE_CHECKING:
    from .core import Core


_CLASSES = 8
_NEARLY = 15 / 16  # of what the longest take: no border of its own


class Shapes:
    """Input shapes that were metered of one kind of call: what no other one exceeds in every
    dimension."""

    def __init__(self) -> None:
        self._largest: list[tuple[int, ...]] = []

    def cover(self, dims: tuple[int, ...]) -> bool:
        """Whether one was added that was as large in every dimension."""
        return any(_is_within(dims, other) for other in self._largest)

    def add(self, dims: tuple[int, ...]) -> None:
        if not self.cover(dims):
            self._largest = [d for d in self._largest if not _is_within(d, dims)] + [dims]


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
        self.largest = 0
        self._taken = 0, 0, 0

    def add(self, size: int, dense: int, frames: int, transient: int) -> None:
        if size > self.largest:
            self.largest, self._taken = size, (dense, frames, transient)
            self._growth.add(size**2, self._taken)

    @property
    def is_known(self) -> bool:
        return self.largest > 0

    def foresee(self, size: int) -> tuple[int, int, int]:
        """Of a larger input than any so far."""
        more = self._growth.ratio(self.largest**2, size**2)
        dense, frames, transient = (int(np.ceil(taken)) for taken in more * self._taken)
        return dense, frames, transient


class Lengths:
    """Dense bytes that iterations take which begin with one kind of call, by the size of its
    inputs: in at most eight classes of equally many sizes each."""

    def __init__(self) -> None:
        self._width = 1
        self._seen: dict[int, tuple[int, int]] = {}  # by class: the largest, and its dense bytes
        self._given: dict[int, int] = {}  # by class: what it has room for

    def longest(self, size: int) -> int:
        """Of its class."""
        return -(-size // self._width) * self._width

    def add(self, size: int, dense: int) -> None:
        width = 1 << (-(-size // _CLASSES) - 1).bit_length()
        if width > self._width:
            self._width, seen, self._seen = width, self._seen, {}
            self._given.clear()
            for before in seen.values():
                self._note(*before)
        self._note(size, dense)

    def _note(self, size: int, dense: int) -> None:
        which = self.longest(size)
        largest, most = self._seen.get(which, (0, 0))
        self._seen[which] = max(size, largest), max(dense, most)

    def dense(self, size: int) -> int | None:
        """What any of its class takes; the same as before as long as none has taken more. ``None``
        where there was none. What comes between those that were seen is taken to lie on a line."""
        which = self.longest(size)
        if which not in self._seen:
            return None
        own = self._seen[which][1]
        if self._given.get(which, 0) < own:
            sizes, dense = zip(*sorted(self._seen.values()))
            between = float(np.interp(which, sizes, dense))
            self._given[which] = max(own, int(between))
        return self._given[which]


class Calls:
    """Of one kind, of one module."""

    def __init__(self) -> None:
        self.shapes, self.needs, self.lengths = Shapes(), Needs(), Lengths()


class ProfileRun:
    """Of one pager."""

    def __init__(self, pager: Core) -> None:
        self._pager = pager
        # By modules, for as long as they live, and by what tells their calls apart.
        self._calls: WeakKeyDictionary[Any, dict[Hashable, Calls]] = WeakKeyDictionary()
        # Of the iteration now: its fresh shapes, its largest inputs, its first call and its size.
        self._fresh_shapes: set[tuple[Calls, tuple[int, ...]]] = set()
        self._sizes: dict[Calls, int] = {}
        self._first: tuple[Calls, int] | None = None
        self._is_roomy = False  # all fits, and much is left
        self._allowance: int | None = None  # of other iterations, where this one has less
        pager.budget.make_dense_room = self._make_dense_room
        pager.budget.optimizers_due = lambda: optimizers_due(pager)
        pager.budget.step_room = room_of_step
        pager.budget.meter = lambda: self._meter(go_on=True)

    def begin(self) -> None:
        """An iteration begins."""
        self._fresh_shapes.clear()
        self._sizes.clear()
        self._first = None
        self._pager.saved.scale(0, 0)
        self._give_back_allowance()
        budget = self._pager.budget
        if not budget.settled:
            self._meter(go_on=False)
            return
        if budget.gave:  # to an iteration that was cut short
            self._place()
        elif budget.moved and self._will_enter():
            with self._about_to_resize():
                budget.place_for_batch(budget.frames_for_all)
        if not budget.begin():
            self._meter(go_on=False)

    def _will_enter(self) -> bool:
        follower = self._pager.follower
        if follower is None:
            return False
        with self._pager.lock:
            return follower.will_enter()

    def note_shapes(self, module: Any, args: Any, kwargs: Any) -> None:
        """A paged module is called. Shapes that it never ran on may need more, for which there has
        to be room."""
        if not self._pager.in_iteration() or self._pager.inferring:
            return
        tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)]
        kind = (
            torch.is_grad_enabled(),
            module.training,
            self._pager.saved.again,
            tuple((t.dim(), t.dtype) for t in tensors),
        )
        calls = self._calls.setdefault(module, {}).setdefault(kind, Calls())
        dims = tuple(size for t in tensors for size in t.shape)
        size = max((t.numel() for t in tensors), default=0)
        if not self._sizes:
            self._begins_with(calls, size)
        self._sizes[calls] = max(size, self._sizes.get(calls, 0))
        if not self._pager.fits:
            self._pager.saved.scale(size, calls.needs.largest)
        covered = calls.shapes.cover(dims)
        if covered and size and not self._fresh_shapes and self._needs_no_pages():
            if self._pager.saved.pause():
                self._pager.budget.cap_as_measured(self._pager.saved.dense_allowance)
        else:
            self.does_more()
        if covered:
            return
        self._fresh_shapes.add((calls, dims))
        if self._pager.budget.settled and not self._has_room(calls.needs, size):
            self._meter(go_on=True)

    def _needs_no_pages(self) -> bool:
        """Whether all that autograd saves stays dense, in calls of known shapes, so that no hooks
        have to see it. A graph holds open weights then: not where their pages may have to move."""
        pager, opened = self._pager, self._pager.opened
        known = pager.fits and pager.budget.settled and opened.native and opened.as_before
        usual = self._is_roomy and self._allowance is None
        return known and usual and pager.turns.is_home()

    def does_more(self, missing: int = 0) -> int:
        """This iteration takes more than others with inputs of these shapes (more layers, or
        rounds), or may do so: what autograd saves from here on stays dense only beside what it has
        saved so far. How many of ``missing`` dense bytes are missing then."""
        pager, saved = self._pager, self._pager.saved
        if saved.is_on or not pager.fits or self._allowance is not None:
            return missing
        if pager.inferring or get_ident() != pager.turns.home:
            return missing
        self._allowance = saved.dense_allowance
        saved.dense_allowance = max(0, saved.dense_allowance - pager.backend.meter_alive())
        saved.go_on()
        return pager.budget.take_more(missing)

    def _give_back_allowance(self) -> None:
        if self._allowance is not None:
            self._pager.saved.dense_allowance, self._allowance = self._allowance, None

    def _begins_with(self, calls: Calls, size: int) -> None:
        """The first call of the iteration. Where not everything fits, the border goes to where
        batches as long as this one have room, so shorter ones have more frames. Not where dense
        memory cannot ask for more in the middle of an op, nor has to leave room for guests."""
        pager, budget = self._pager, self._pager.budget
        if not pager.turns.is_home() or pager.had_guests or budget.fixed_reserve is not None:
            return
        if pager.backend.meter_level() is None:
            return
        self._first = calls, size
        follower = pager.follower
        if pager.fits or not budget.settled or (follower is not None and follower.is_fixed):
            return
        dense = calls.lengths.dense(size)
        if dense is not None and dense > _NEARLY * budget.dense_peak:
            dense = None
        frames = budget.frames_for_batch(dense)
        if frames is None:
            return
        if follower is not None:
            with pager.lock:
                if follower.make_room(frames):
                    with pager.quiet():
                        budget.place_for_batch(frames)
                    return
        with self._about_to_resize():
            budget.place_for_batch(frames)

    def _has_room(self, needs: Needs, size: int) -> bool:
        """Whether a larger input than before finds room, as far as can be foreseen; beside all
        pages where everything fits. Not where dense memory cannot ask in the middle of an op."""
        pager = self._pager
        if not needs.is_known or pager.backend.meter_level() is None:
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
        pager.saved.go_on()
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
        missing = self.does_more(missing)
        if missing <= 0:
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
        self._give_back_allowance()
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
            if budget.gave:  # where all still fits the border may stay where it is
                budget.gave = False
                self._tell_follower()
        if self._first is not None:
            calls, size = self._first
            calls.lengths.add(size, taken)
        transient = pager.space.peak_transient_pages * pager.page_size
        for calls, dims in self._fresh_shapes:
            calls.shapes.add(dims)
            calls.needs.add(self._sizes[calls], taken, pager.residency.largest_need, transient)

    def _still_fits(self, dense: int) -> bool:
        """Whether everything fits, beside so many dense bytes too."""
        pager = self._pager
        nbytes = self._most_pages() * pager.page_size + dense
        return pager.fits and nbytes <= pager.budget.bytes

    def _most_pages(self) -> int:
        """That the arena has to hold at once where everything fits."""
        return max(self._pager.space.persistent_pages, self._pager.residency.largest_need)

    def _needs(self) -> tuple[int, int, int]:
        """Bytes of the arena where everything fits, of what is dense then and in pages now, and of
        what is dense anyway, with what an allocator may need beside that."""
        size, dense = self._pager.page_size, self._pager.budget.dense_peak
        transient = self._pager.space.peak_transient_pages * size
        return self._most_pages() * size, transient, dense + dense // 8 + (1 << 20)

    @property
    def needed_bytes(self) -> int:
        """The device budget in which everything fits, as far as iterations have shown it."""
        return sum(self._needs())

    def _place(self) -> None:
        pager, budget, space = self._pager, self._pager.budget, self._pager.space
        residency = pager.residency
        arena, transient, dense = self._needs()
        pager.fits = budget.fixed_reserve is None and arena + transient + dense <= budget.bytes
        if pager.fits:  # since a budget has grown
            for run in space.runs.values():
                run.streamed = False if run.streamed else run.streamed
                run.in_slabs = False
            space.passed_in_slabs.clear()
            budget.placement.forget()
        with pager.lock:
            frames, gave = residency.pool.count, budget.gave
            roomy = pager.fits and 4 * (arena + transient + dense) <= 3 * budget.bytes
            self._is_roomy = roomy
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
            if gave or residency.pool.count != frames:
                self._tell_follower()
        pager.saved.dense_allowance = transient if pager.fits else 0

    def _tell_follower(self) -> None:
        """The border is in another place than before the iteration, or was meanwhile."""
        if self._pager.follower is not None:
            with self._pager.lock:
                self._pager.follower.arena_resized()
