"""What an iteration needs, and whether the device budget has it.

What a training step allocates beside the arena is not known before it ran, so the first iteration
is *metered*, and by the time the first parameter would change the smallest budget that works is
known exactly:

    minimum = peak of dense bytes + page_size × (frames that one op pins, at most)

(rounded up, see ``refusals.to_name``). Meanwhile the arena has what twice the dense bytes so far
leave of the budget, or, where dense memory cannot ask for frames in the middle of an op, as few as
one operation allows. If the budget is below the minimum, the step is not taken and no parameter
changes. The iteration goes on without it, so that what comes after it counts too, and
``InfeasibleBudget`` is raised at its end. Dense memory takes the frames of pages that are not
pinned, before a metered iteration goes beyond the budget; it may to find that out, but never uses
more than the minimum that it names. Otherwise the border (``border.py``) moves once, at the end of
the iteration, to what was measured plus a margin. An iteration with larger inputs than before is
metered again unless there is room for what it is expected to take.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ..devices.dense_meter import NO_TIMELINE, in_backward
from ..devices.dense_refusal import Peak
from ..devices.device import Device
from ..errors import InfeasibleBudget, TierFull
from ..memory.space import Extent
from ..moves.residency import Residency
from .border import Border, margin
from .placement import Choice, Placement, Weight
from .refusals import (
    AFTER,
    AS_PLAIN,
    CHANGED,
    UNCHANGED,
    LeftOut,
    does_not_fit,
    to_name,
    too_small,
    warn_of_excess,
)
from .steps import Measure, Room, StepRoom, Steps


class DeviceBudget(Border):
    """Moves the border by what metered iterations need, and refuses those that need too much."""

    def __init__(
        self,
        budget_bytes: int,
        page_size: int,
        reserve: int | None,
        residency: Residency,
        backend: Device,
    ) -> None:
        super().__init__(budget_bytes, page_size, reserve, residency, backend)
        self.metering = False
        self.checked = False
        self.refusal: InfeasibleBudget | None = None  # of the iteration, which goes on to its end
        self.changed = False  # a weight that was whole streams from now on
        self._before: tuple[int, Peak | str, tuple[int, int]] = 0, "", (0, 0)
        self._most_before = 0
        self.most_whole = 0  # bytes taken by an iteration that found out what has to stream
        self._carried = 0  # dense bytes that a metered iteration began with
        self._check_time = 0.0  # before the first change of a metered iteration
        self.written = False  # a parameter of this iteration, while it was not metered
        self._changed = UNCHANGED  # what a refusal says of that
        self._beside = 0  # dense bytes now, beside a step that is foreseen
        self._at_peak: Peak | str = ""  # what made it, in words, where that is known
        self._stuck = False  # the metered arena could not be made smaller
        self._is_capped = False  # dense memory, in a metered iteration
        self._frames_log: list[tuple[float, int]] = []  # while metering: when, frames in use
        self.stepped_outside = False  # of iterations
        self.unpaged: weakref.ref[Any] | None = None  # an optimizer that has stepped without pages
        self.placement = Placement()
        self._of_ops = 0  # frames that other ops than steps took, in metered iterations
        self.meter: Callable[[], None] = lambda: None  # the iteration from here on
        self.steps = Steps()
        self._due: set[int] = set()  # ids of optimizers whose step is foreseen, and to come
        # Paged optimizers that have gradients now, and what a step of one takes, ``None`` where
        # that cannot be found out.
        self.optimizers_due: Callable[[], list[Any]] = list
        self.step_room: Callable[[Any, Measure], StepRoom | None] = lambda optimizer, measure: None
        residency.make_room = self._make_room
        residency.make_way = self._make_way
        residency.before_pinning = self._give_way
        residency.weight_of = self._weight_of
        residency.minimum_bytes = lambda frames: self._minimum(frames)

    # -- asked by residency ----------------------------------------------------------------------
    def _make_room(self, frames: int) -> bool:
        """More frames for one op: allowed while the border is not settled, or where dense memory
        does not use them now and nothing was metered."""
        if self.inferring or self.takes_more:
            return self._grow(frames)
        if self.is_expected:
            if self._grow(frames):
                return True
            self.meter_instead()
        if self.settled or frames > self._most_frames():
            return False
        self.residency.resize(frames)
        self._cap_metered()
        return True

    def _make_way(self, frames: int) -> bool:
        """More frames because the tiers below are full: allowed within the budget, likewise."""
        most = min(self.bytes // self.page_size, self._most_frames())
        count = self.residency.pool.count
        if self.settled or self.inferring or self.fixed_reserve is not None or count >= most:
            return False
        self._stuck = True
        self.residency.resize(min(most, count + frames))
        self._cap_metered()
        return True

    def _weight_of(self, runs: Collection[Extent]) -> Weight | None:
        return self.placement.owner(runs) if self.metering else None

    def _most_frames(self) -> int:
        """That the arena can have now."""
        backend = self.backend
        fixed = not backend.can_unmap and self.residency.in_use()
        return (backend.arena.numel() if fixed else backend.reserved_bytes) // self.page_size

    def _give_way(self) -> None:
        """While metering, what has room beside twice the dense bytes so far stays. The arena is no
        smaller than the largest need so far. It is no larger where nothing is known of dense
        memory, or that cannot ask for frames: then both together cannot exceed the minimum,
        whatever the dense peak turns out to be."""
        if not self.metering:
            return
        if not self.residency.turns.is_home():  # an op of no iteration
            self.log_frames()
            return
        frames = max(1, self.residency.largest_need, self._frames_to_spare())
        if self.fixed_reserve is None and not self._stuck and frames < self.residency.frames:
            try:
                self.residency.resize(frames)
            except TierFull:  # the tiers below cannot take it, so it stays
                self._stuck = True
            self._cap_metered()
        self._give_way_to_dense()
        self.log_frames()

    def _give_way_to_dense(self) -> None:
        """Where the border cannot move, the arena begins larger than it is used while metering.
        What the next op makes is not known before, so it is made smaller a little before."""
        level = None if self.backend.can_unmap else self.backend.meter_level()
        if level is None:
            return
        dense = self.dense_baseline + level + margin(level)
        if self.backend.arena.numel() + dense > self.bytes:
            try:
                self.residency.fit()
            except TierFull:
                self._stuck = True

    def _frames_to_spare(self) -> int:
        """Frames beside twice the dense bytes of shapes that were metered, and of this one so far.
        0 where these are not known, or what comes beyond them could not be given frames."""
        level = self.backend.meter_level()
        asks = self.backend.host_addressable and self._is_capped
        if level is None or not (asks or self._before[0]):
            return 0
        dense = max(self.dense_peak, self.dense_baseline + level)
        return (self.bytes - 2 * dense) // self.page_size

    def dense_so_far(self) -> int:
        """Most dense bytes of this iteration, where it is metered and they are known."""
        level = self.backend.meter_level() if self.metering else None
        return 0 if level is None else self.dense_baseline + level

    def finds_room(self, frames: int, nbytes: int) -> bool:
        """Whether so many frames, and dense bytes, are to be had beside what is pinned and alive
        now in a metered iteration; where that is not known, they are."""
        if self.backend.meter_level() is None:
            return True
        dense = self.dense_baseline + self.backend.meter_alive() + nbytes
        return self.is_enough(dense, self.residency.pinned_pages() + frames)

    def log_frames(self) -> None:
        """Note how many frames are in use now, while metering."""
        if self.metering:
            self.backend.meter_sample()
            self._frames_log.append((time.perf_counter(), self.residency.frames_used))

    def _minimum(self, frames: int) -> int:
        fixed = self.fixed_reserve
        dense = self.dense_peak if fixed is None else fixed
        dense = max(dense, self.reserve if self.settled else 0)
        if self.inferring:
            dense = max(dense, self.taken())
        nbytes = dense + frames * self.page_size
        return nbytes if fixed is not None else to_name(nbytes)

    def note_step_outside(self) -> bool:
        """A step is taken outside of iterations; whether it is the first one. Dense memory is
        counted from then on, where that costs nothing."""
        first, self.stepped_outside = not self.stepped_outside, True
        if self.metering:
            return first
        frames = self.residency.peak_frames * self.page_size
        dense = self.backend.meter_level()
        if self._peak_outside is None:
            self._peak_outside = frames
            self.backend.count_anew()
        elif dense is not None:
            self._peak_outside = max(self._peak_outside, frames + self.dense_baseline + dense)
        return first

    def frames_at_least(self) -> int:
        """Frames that the arena has for good, as far as is known now."""
        if self.settled or self.fixed_reserve is not None:
            return self.residency.frames
        beside = self._frames_beside(self.dense_peak)
        # While metering it is small on purpose, and grows when the tiers below are full.
        return beside if self.metering else min(self.residency.frames, beside)

    # -- the metered iteration -------------------------------------------------------------------
    def start(self, *, go_on: bool = False) -> None:
        """Begin to meter; the border may move again. ``go_on``: the iteration has begun, and what
        it has made counts."""
        self._before = self.dense_peak, self._at_peak, self.residency.needs
        self._most_before = self._most
        self.placement.start(self.dense_peak)
        of_ops = self._of_ops  # a step takes more again when its way is chosen
        frames = self.placement.choices(of_ops)[0].frames
        self.residency.needs = max(frames, self._expected_need), of_ops
        self.metering, self.checked, self._stuck = True, False, False
        self.refusal, self.steps.foreseen, self._due = None, [], set()
        self.settled, self._expected_frames, self.takes_more = False, 0, False
        self.backend.limit_dense(None)
        if not go_on:
            self.written = False
            self.backend.cap_dense(None, self.make_dense_room)
        self.backend.meter_start(go_on=go_on)
        self._carried = self.backend.meter_alive()
        self._is_capped = self.fixed_reserve is None
        self._cap_metered()
        self._give_way()

    def _cap_metered(self) -> None:
        """Dense memory has what the frames leave of the budget, while it is metered too. What goes
        beyond that asks ``make_dense_room``."""
        if self.metering and self._is_capped:
            self._cap = max(0, self.bytes - self.residency.frames * self.page_size)
            self._cap = max(0, self._cap - self.dense_baseline)
            self.backend.raise_cap(self._cap)

    def give_while_metering(self, missing: int) -> None:
        """Frames that are not pinned, for ``missing`` bytes, with no page moving but by the caller.
        If that is not enough, or the tiers below have no room for what should leave, there is no
        cap any more: the budget is refused when it is known which one would do, or weights stream
        from then on."""
        residency = self.residency
        frames = residency.frames - -(-missing // self.page_size)
        pinned = residency.pinned_pages()
        try:
            self._is_capped = frames >= pinned
            residency.shrink(max(frames, pinned))
        except TierFull:
            self._is_capped = False
        self.log_frames()
        self._cap_metered()
        if not self._is_capped:
            self.backend.raise_cap(None)

    def check(self, optimizer: Any = None, *, before: str = "") -> bool:
        """Before parameters change, by ``optimizer``'s step or in another way (``before``, in
        words): whether the budget has what the iteration took so far, and what the steps will take
        that it has gradients for, of all optimizers.

        ``False``: the step must not be taken. The iteration goes on without it, for what comes
        after it, and is refused at its end. Before another change :class:`LeftOut` is raised; or
        ``InfeasibleBudget`` where parameters were changed before, which others should follow."""
        if not self.metering:
            self.written = True
            self.backend.look_at_dense()
            return True
        again = optimizer is not None and not in_backward()  # where it cannot be measured
        if id(optimizer) in self._due:
            self._due.remove(id(optimizer))
        elif again or not self.checked or self.refusal is not None:
            self._check([optimizer] if self.checked and again else None, before)
            self._due.discard(id(optimizer))
        if self.refusal is not None and optimizer is None:
            if self._changed is UNCHANGED:
                raise LeftOut(str(self.refusal), minimum=self.refusal.minimum)
            raise self.refusal
        return self.refusal is None

    def _check(self, optimizers: list[Any] | None, before: str) -> None:
        """``optimizers``: whose steps are to be foreseen; ``None`` for all that are due."""
        self._note_peak()
        self._beside = self.dense_baseline + self.backend.meter_alive()
        if optimizers is None:
            optimizers = [] if in_backward() else self.optimizers_due()
        if self.refusal is None:
            self._changed = CHANGED if self.checked or self.written else UNCHANGED
        if not self.checked:
            self.checked, self._check_time = True, time.perf_counter()
        then = self._changed
        if before:
            then += f" What comes after {before} is not counted yet."
        self._due.update(map(id, optimizers))
        self._decide(then, optimizers)
        self.backend.meter_start(go_on=True)  # the rest of the iteration

    @contextmanager
    def trying_out(self) -> Iterator[None]:
        """What happens inside is no part of the iteration, if one is metered."""
        if self.metering:
            self._note_peak()
        yield
        if self.metering:
            self.backend.meter_start(go_on=True)

    @contextmanager
    def stepping(self, optimizer: Any) -> Iterator[None]:
        """Its step takes place inside."""
        self.residency.step = self.steps.of(optimizer)
        began = time.perf_counter()
        try:
            yield
        finally:
            self.residency.step = None
            if self.metering and self.steps.goes_by_slabs(optimizer):
                self.placement.note_step(began)

    def _choices(self, optimizers: Sequence[Any] = ()) -> list[Choice]:
        """Beside what ops need, and steps but those of this iteration, and of ``optimizers``."""
        steps = self.steps.most_frames_but(optimizers)
        return self.placement.choices(max(self.residency.rigid_need, steps))

    def _decide(self, then: str, optimizers: Sequence[Any] = (), *, least: bool = False) -> None:
        """The first of ``Placement.choices`` that has room, beside the steps of this iteration and
        those of ``optimizers``, is what holds from now on. If none has, all weights stream, and
        there is a ``refusal`` with what that takes, in a text that ends with ``then``. ``least``:
        all steps go slab by slab that can."""
        before = self.steps.foreseen
        for choice in self._choices(optimizers):
            self.steps.foreseen = list(before)
            self._count(choice, least=least)
            for optimizer in optimizers:
                room = self.step_room(optimizer, self.backend.dense_of)
                self.steps.foresee(optimizer, self._beside, room)
                peak = self.dense_peak
                self._count(choice, least=least)
                if self.dense_peak > peak:
                    name = type(optimizer).__name__
                    self._at_peak = f"The peak of dense memory is a step of {name}."
            if self.is_enough(self.dense_peak, self.residency.largest_need):
                break
        else:
            self._count(choice, least=True)
            self.refusal = too_small(self, self._hints(), then)
            for weight in self.placement.weights.values():
                self.placement.stream(weight.run)
            return
        self.steps.go(least=least)
        for weight in self.placement.weights.values():
            if weight not in choice.whole:
                self.placement.stream(weight.run)
        self.changed = self.placement.turned

    def _count(self, choice: Choice, *, least: bool) -> None:
        """What is needed if these weights are whole, and the steps go so."""
        frames, dense = self.steps.beside(Room(choice.frames, choice.dense), least=least)
        if frames < self._expected_need:
            weights = self.placement.weights.values()
            # That was with the weights whole that are whole now.
            if all(weight in choice.whole or weight.run.streamed for weight in weights):
                frames = self._expected_need
        self.dense_peak, self.residency.needs = dense, (frames, self.residency.rigid_need)

    def _hints(self) -> str:
        found = f"{self._at_peak} " if self._at_peak else ""
        unpaged = self.unpaged() if self.unpaged is not None else None
        if unpaged is None or not any(unpaged.state.values()) or hasattr(unpaged, "_tp_paged"):
            return found
        return (
            "This optimizer is not paged: wrap it with pager.optimizer(...); the states of "
            f"{type(unpaged).__name__} are dense. {found}"
        )

    def has_room(self, room: Room) -> bool:
        """Whether an optimizer's step finds ``room`` beside what was measured so far."""
        dense = max(self.dense_peak, self._beside + room.dense)
        return self.is_enough(dense, max(self.residency.largest_need, room.frames))

    def end(self) -> None:
        """End of a metered iteration: all that it took is known now. (Steps for which gradients are
        there are made in a later one.)

        What came after the step was not known when it was checked: a copy of the parameters, an
        average of them. Where the largest op finds no room beside that, the next iteration could
        not go as this one did, and ``InfeasibleBudget`` is raised here, before it begins.
        """
        if not self.checked:
            self._check(None, "")
        self._note_peak()
        self._tell_of_excess()
        self._count_what_lives_on()
        self.backend.cap_dense(None)
        before = self.refusal
        if before is None:
            if self.placement.turned:  # perhaps since the check
                self._count(self._choices()[0], least=False)
                self.changed = True
            self._least_frames = max(1, self.residency.largest_need)
            self._of_ops = self.residency.rigid_need
            if self.is_enough(self.dense_peak, self.residency.largest_need):
                return
        self._decide(AFTER if before is None else self._changed, least=True)
        if self.refusal is not None:
            raise self.refusal
        self.changed = True  # the next step goes slab by slab, if no weight streams from now on

    def _count_what_lives_on(self) -> None:
        grown = self.backend.meter_alive() - self._carried
        # Where it began with some, that is in what was measured already.
        living = NO_TIMELINE if self._carried else self.backend.living()
        peak = self.placement.lives_on(living, grown)
        left = self.placement.left_at(self._check_time)
        self.steps.note_left(left)
        self.dense_peak = max(self.dense_peak, peak)

    def _tell_of_excess(self) -> None:
        held = self.dense_baseline + self.backend.most_held()
        if held > self.bytes:
            warn_of_excess(self, held)
            self._most = max(self._most, held)

    def settle(self, dense_extra: int, *, spare: int = 0, roomy: bool) -> None:
        """After :meth:`end`: put the border where it belongs.

        ``dense_extra``: bytes beside the measured peak that may stay dense from now on; ``spare``:
        more that dense memory should have, where the tiers below have room for what then leaves;
        ``roomy``: see ``Device.limit_dense``.
        """
        self.metering, self.settled = False, True
        self.placement.forget_iteration()
        self.backend.meter_forget()
        self.place(dense_extra, spare=spare, roomy=roomy)
        if self.changed:  # what streams from now on was not metered so
            self.settled, self._expected_need = False, 0
            if self._most > self.bytes:
                self.most_whole = max(self.most_whole, self._most)
                self._most = self._most_before

    def abandon(self) -> None:
        """The iteration raised. If it was metered the next one is instead."""
        self.backend.cap_dense(None)
        if self.metering:  # what it needed does not count for others
            self.backend.meter_stop()
            self.metering, self.refusal = False, None
            self.placement.withdraw()
            self.dense_peak, self._at_peak, self.residency.needs = self._before
            self._limit()

    def _note_peak(self) -> None:
        """The peak of dense bytes since the meter was started."""
        dense = self.dense_baseline + self.backend.meter_stop()
        if dense > self.dense_peak:
            self.dense_peak = dense
            self._at_peak = self.backend.meter_peak() or ""
        self._most = max(self._most, self._peak_of_both(dense))
        timeline = self.backend.meter_timeline()
        self.placement.measure(timeline, self.dense_baseline, dense)
        self._frames_log.clear()

    def _peak_of_both(self, dense: int) -> int:
        """Peak of frames and dense bytes together, from the two logs of the same clock."""
        size = self.page_size
        if not self._frames_log:
            return 0
        when, current, _ = self.backend.meter_timeline()
        frames = np.array([count for _, count in self._frames_log])
        if not len(when):  # only the peaks are known
            return int(frames.max()) * size + dense
        turns = np.array([moment for moment, _ in self._frames_log])
        # Frames in use when dense memory changed, and dense memory when the frames did.
        at_alloc = frames[np.maximum(np.searchsorted(turns, when, "right") - 1, 0)]
        at_turn = current[np.maximum(np.searchsorted(when, turns, "right") - 1, 0)]
        both = max(int((at_alloc * size + current).max()), int((frames * size + at_turn).max()))
        return both + self.dense_baseline

    # -- the other iterations --------------------------------------------------------------------
    def begin(self) -> bool:
        """An iteration begins that is not metered. ``False`` where earlier iterations have left so
        much more than when one was metered that this one has to be."""
        self.open()
        self.written = False
        more = self.backend.meter_alive() - self._carried + self.placement.kept_bytes()
        return more <= 0 or self.is_enough(self.dense_peak + more, self._least_frames)

    def grown(self) -> int:
        """The end of what :meth:`begin` began: dense bytes at its peak, if they went beyond the
        reserve and the border can follow, else 0."""
        self._note_both()
        dense = self.taken()
        self.backend.cap_dense(None)
        if self.is_expected:
            self._expected_need = max(self._expected_need, self.residency.rigid_need)
            self._least_frames = max(self._least_frames, self._expected_need)
        room = self.bytes - self._least_frames * self.page_size
        most = room if self.fixed_reserve is None else self.reserve
        if self.settled and self.backend.most_held() and dense > most:  # nothing could refuse it
            raise does_not_fit(
                self,
                f"{dense} bytes of tensors were in use at once, and there is room for {most}. "
                f"This iteration is done, and what it changed is {AS_PLAIN}",
            )
        follows = self.settled and self.fixed_reserve is None
        return dense if follows and (self.gave or self.reserve < dense) and dense <= room else 0

    def refused(self, error: Exception) -> InfeasibleBudget:
        """What a dense allocation that was refused is told as."""
        return does_not_fit(self, self.backend.refusal() or str(error))

    def meter_instead(self) -> None:
        """This iteration takes more than it was expected to: it is metered from here on."""
        self.dense_peak = max(self.dense_peak, self.taken())
        self.meter()

    def count_from_here(self) -> None:
        """What this iteration has allocated so far is part of ``dense_baseline``."""
        if not self.metering:
            self.backend.count_anew()
            self.begin()
        elif not self.checked:
            self.backend.count_anew()
            self.backend.meter_start()
