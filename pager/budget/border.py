"""The border between the arena and dense memory, inside one byte-hard device budget.

::

    0                                    border                                 device_budget
    |--------------- arena (frames) --------|------ dense reserve (temporaries) ------|

It is placed where a metered iteration (``budget.py``) has found that it belongs: at the dense bytes
that were measured, and a margin. In iterations that are not metered dense memory has the reserve.
What goes beyond that asks, in the middle of an op, and the border moves, where the device can ask.
Batches of other lengths, and inference, have a border of their own for as long as they last.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from ..devices.device import Device
from ..errors import TierFull
from ..moves.residency import Residency

_MARGIN = 16
_MARGIN_BYTES = 1 << 20
_FEWER, _MORE = 3 / 4, 8 / 7  # times the frames before: about as many


def margin(dense: int) -> int:
    """Bytes to have beside ``dense``."""
    return max(dense // _MARGIN, _MARGIN_BYTES)


class Border:
    """Of ``residency``'s arena. ``reserve`` is dense bytes, or ``None`` (auto)."""

    def __init__(
        self,
        budget_bytes: int,
        page_size: int,
        reserve: int | None,
        residency: Residency,
        backend: Device,
    ) -> None:
        self.bytes = budget_bytes
        self.page_size = page_size
        self.fixed_reserve = reserve
        self.reserve = budget_bytes - residency.pool.count * page_size
        self.residency = residency
        self.backend = backend
        self.settled = False  # it is where a metered iteration has found that it belongs
        self.dense_baseline = 0  # dense tensors that live on: buffers of paged modules
        self.made_anew = 0  # bytes of these that are freed, and counted when they are made again
        self.dense_peak = 0  # of metered iterations
        self.make_dense_room: Callable[[int], bool] = lambda missing: False
        self.gave = False  # frames to dense memory, since the border was placed
        self.inferring = False
        self.takes_more = False  # this iteration, than one of its kind did before
        self.moved = False  # the border is where inference has it, or shorter batches
        self._placed = 0  # frames of the arena where batches of all lengths have room
        self._for_steps = 0  # likewise, in which an optimizer's step finds room
        self._extra = 0  # dense bytes beside what was measured
        self._inference_peak = 0  # dense bytes in inference, at most
        self._cap = 0  # of dense memory
        self.lacking = 0  # bytes, when it was last asked for more
        self._most = 0  # bytes of frames and dense memory at once, so far
        self._peak_outside: int | None = None  # in steps outside of iterations
        self._least_frames = 1  # that one op needs where not everything fits, as metered
        self._expected_need = 0  # likewise, in larger iterations that were not metered (`expect`)
        self._expected_frames = 0  # of this iteration, where its inputs are larger

    # -- where it belongs ------------------------------------------------------------------------
    def _frames_beside(self, reserve: int) -> int:
        frames = (self.bytes - reserve) // self.page_size
        frames -= frames % max(1, self.backend.granularity // self.page_size)
        return max(1, frames)

    def _frames_for(self, reserve: int, margin: int) -> int:
        """Beside ``reserve`` dense bytes, and a margin where ops can do without its frames."""
        with_margin = max(self._frames_beside(reserve + margin), self.residency.largest_need)
        return min(with_margin, self._frames_beside(reserve))

    def is_enough(self, dense: int, frames: int) -> bool:
        """Whether ``dense`` bytes and ``frames`` frames can be had side by side."""
        reserve = self.fixed_reserve
        if reserve is not None and dense > reserve:
            return False
        return max(dense, reserve or 0) + frames * self.page_size <= self.bytes

    def has_twice_the_dense(self) -> bool:
        """Whether iterations could take twice the dense bytes that a metered one took."""
        return self.is_enough(2 * self.dense_peak - self.dense_baseline, self._least_frames)

    def place(self, dense_extra: int = 0, *, spare: int = 0, roomy: bool = False) -> None:
        """Move the border to the measured dense peak plus a margin."""
        self.gave = self.moved = False
        self._extra = dense_extra
        reserve = self.fixed_reserve
        if reserve is None:
            reserve = self.dense_peak + dense_extra
        least = self._frames_beside(reserve)
        frames = least
        if self.fixed_reserve is None:
            frames = self._frames_for(reserve, spare + margin(self.dense_peak))
        held = self.backend.arena.numel() // self.page_size
        try:
            try:
                self.residency.resize(frames)
                self.residency.fit()
            except TierFull:  # the tiers below are full: the margin's frames must hold pages
                stays = not self.backend.can_unmap and self.residency.largest_need <= held <= least
                self.residency.resize(held if stays else least)
                if not stays:
                    self.residency.fit()
        finally:  # if there is no memory for the arena, it is what it was before
            self._note_resized()
            self._placed = self.residency.frames
            self._limit(roomy=roomy)

    def _limit(self, *, roomy: bool = False) -> None:
        self.backend.limit_dense(self.reserve, counted=self.dense_baseline, roomy=roomy)

    def _note_resized(self) -> None:
        """The arena may have another size: the rest of the budget is dense memory's, and frames in
        use are counted anew."""
        self.residency.peak_frames = self.residency.frames_used
        self.reserve = self.bytes - self.residency.frames * self.page_size

    # -- of one batch ----------------------------------------------------------------------------
    @property
    def frames_for_all(self) -> int:
        """Of the arena beside what batches of all lengths take: how ops go, and in which order they
        use pages, depends on these, and not on a batch's length."""
        frames = self.residency.frames
        return min(self._placed, frames) if self.moved else frames

    @property
    def frames_for_steps(self) -> int:
        """The same, as it was before if they have become a few more or fewer: an optimizer's step
        takes together what these have room for, and steps that go otherwise are another kind."""
        frames = self.frames_for_all
        if not self.settled:
            return frames
        if not _FEWER * self._for_steps <= frames <= _MORE * self._for_steps:
            self._for_steps = frames
        return self._for_steps

    def frames_for_batch(self, dense: int | None) -> int | None:
        """Of the arena in this iteration, which is not metered, beside so many dense bytes, or what
        batches of all lengths take; ``None`` where it is to stay as it is."""
        frames = self._placed
        if dense is not None:
            frames = max(frames, self._frames_for(dense + self._extra, margin(self.dense_peak)))
        reserve = self.bytes - frames * self.page_size
        stays = frames in (0, self.residency.frames) or self.taken() > reserve
        return None if stays else frames

    def place_for_batch(self, frames: int) -> None:
        """The border goes there, and the rest of the budget is for dense memory in this iteration.
        If it takes more, it asks. With no page moving but by the caller."""
        residency, reserve = self.residency, self.bytes - frames * self.page_size
        self._note_both()
        self.backend.raise_cap(None)  # moving pages takes some
        if frames > residency.frames:  # what dense memory keeps goes first
            self.backend.limit_dense(reserve)
        try:
            residency.resize(frames)
        finally:
            self.moved = residency.frames != self._placed
            self._note_resized()
            self.backend.limit_dense(self.reserve)
            self._cap_as_foreseen()

    # -- in an iteration that is not metered ------------------------------------------------------
    def open(self) -> None:
        """Dense memory has the reserve. What goes beyond it asks ``make_dense_room``, in the middle
        of an op."""
        self._cap, self._expected_frames, self.takes_more = self._foreseen, 0, False
        self.backend.cap_dense(self._cap, self.make_dense_room)

    @property
    def _foreseen(self) -> int:
        """Dense bytes that are counted in an iteration, at most, as far as they were foreseen."""
        return self.reserve - self.dense_baseline + self.made_anew

    def _cap_as_foreseen(self) -> None:
        self._cap = self._foreseen
        self.backend.raise_cap(self._cap)

    def cap_as_measured(self, allowance: int) -> None:
        """What is beyond the measured peak, ``allowance`` and half of the margin asks
        ``make_dense_room`` too, until :meth:`take_more`."""
        dense = self.dense_peak + allowance
        beyond = self.reserve - dense - margin(dense) // 2
        if beyond > 0:
            self._cap = self._foreseen - beyond
            self.backend.raise_cap(self._cap)

    def take_more(self, missing: int) -> int:
        """This iteration may have the whole reserve, and an op frames that dense memory does not
        use. How many of ``missing`` bytes are missing beside that."""
        missing = self._beyond(missing)
        self.takes_more = True
        self._cap_as_foreseen()
        return missing

    def expect(self, dense: int, frames: int) -> int | None:
        """This iteration, which is not metered, has larger inputs than those that were, and takes
        about so many dense bytes, and frames in one op. How many bytes beyond the cap that is;
        ``None`` where there may be no room for it. If it takes more than there is in the end, it is
        metered from there on."""
        dense, frames = max(dense, self.dense_peak), max(frames, self._least_frames)
        if self.fixed_reserve is not None or not self.is_enough(dense, frames):
            return None
        self._expected_frames = max(self._expected_frames, frames)
        return dense - self.dense_baseline - self._cap

    @property
    def is_expected(self) -> bool:
        """Whether this iteration goes by what it was expected to take."""
        return self._expected_frames > 0

    def _grow(self, frames: int) -> bool:
        """More frames for one op, as far as dense memory has not used them so far."""
        if self.fixed_reserve is not None or not self.backend.can_unmap:
            return False
        if frames * self.page_size + self.taken() > self.bytes:
            return False
        self._note_both()
        self.residency.resize(frames)
        self.gave = True
        self.reserve = self.bytes - self.residency.frames * self.page_size
        self._cap_as_foreseen()
        return True

    def can_give(self, missing: int) -> bool:
        """Whether dense memory may have so many bytes more than its cap, beside the frames that one
        op needs and what is pinned now."""
        frames = 0 if self.fixed_reserve is not None else self.residency.frames
        room = max(0, frames - self._frames_to_stay()) * self.page_size
        self.lacking = self._beyond(missing) - room
        return self.lacking <= 0

    def _beyond(self, missing: int) -> int:
        """Bytes beyond the reserve, where ``missing`` are wanted beyond the cap."""
        return self._cap + missing - self._foreseen

    def _frames_to_stay(self) -> int:
        need = self.residency.largest_need if self.inferring else self._least_frames
        return max(need, self._expected_frames, self.residency.pinned_pages())

    def give(self, missing: int) -> bool:
        """Frames for ``missing`` bytes and a margin, with no page moving but by the caller.
        ``False`` if they cannot be had, or the tiers below have no room for what should leave."""
        if not self.can_give(missing):
            return False
        self._note_both()
        residency, frames = self.residency, self.residency.frames
        if self.fixed_reserve is None:
            self.backend.raise_cap(None)  # moving pages takes some
            more = self._beyond(missing) + margin(self.dense_peak)
            least = min(frames, self._frames_to_stay())
            try:
                residency.shrink(max(least, frames - -(-more // self.page_size)))
                residency.fit()
            except TierFull:
                return False
            finally:
                self.gave = self.gave or residency.frames < frames
                self._note_resized()
                self.backend.limit_dense(self.reserve)
                self.backend.raise_cap(self._cap)
        self._cap_as_foreseen()
        return True

    def let_pass(self, missing: int) -> None:
        """In the middle of a move of pages, which are not to be moved otherwise then."""
        self._cap += missing
        self.backend.raise_cap(self._cap)
        both = self.residency.frames_used * self.page_size + self.dense_baseline + self._cap
        self._most = max(self._most, both)

    def taken(self) -> int:
        """Dense bytes that this iteration has taken at once so far, if it is not metered."""
        return self.dense_baseline + self.backend.dense_peak()

    def _note_both(self) -> None:
        """Frames in use and dense bytes, at their peaks since the border was moved."""
        both = self.residency.peak_frames * self.page_size + self.taken()
        self._most = max(self._most, both)

    def peak_bytes(self) -> int:
        """Most device bytes in use so far: frames in use and dense bytes beside them."""
        size = self.page_size
        steady = 0
        if self.settled and not self.moved:
            steady = self.residency.peak_frames * size + self.dense_peak
        return max(steady, self._most, self._peak_outside or 0)

    # -- inference -------------------------------------------------------------------------------
    def begin_inference(self, *, as_before: bool = False) -> None:
        """With no page moving but by the caller: dense memory has what it had in inference before,
        and takes from the arena what it asks for beyond that. Nothing is metered. ``as_before``:
        the border is where inference has left it, and pages may move."""
        self._most = max(self._most, self.peak_bytes())
        self.inferring = True
        if self.fixed_reserve is None and self.backend.can_unmap and not as_before:
            dense = max(self._inference_peak, self.dense_baseline)
            frames = self._frames_beside(dense + margin(dense))
            with suppress(TierFull):  # where the tiers below cannot take what leaves, it stays
                self.residency.resize(max(frames, self._least_frames))
            self.moved = self.gave = True
            self._note_resized()
            self._limit()
        self.open()

    def end_inference(self) -> None:
        """The border stays, until an iteration begins."""
        self._note_both()
        self._inference_peak = max(self._inference_peak, self.taken())
        self.inferring = False
        self.backend.cap_dense(None)
