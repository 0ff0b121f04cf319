"""Where every page is. The only module that writes page states.

States of a live page, by its columns (``frame``, ``host``, ``disk``; −1 means none)::

                 place              evict (copy valid)
        BLANK ---------> DIRTY ---+------------------> BELOW (host and/or disk slot)
     (nowhere yet)      ^  |  ^   | write_back            |
                        |  |  |   v                       | fetch
                        |  |  +-- CLEAN <-----------------+
                        |  |  write (copies dropped)
                        +--+ write

* BLANK: never written; holds no memory anywhere, so nothing is lost by it.
* DIRTY: on the device, no copy below.  * CLEAN: on the device and a valid copy below.
* BELOW: not on the device; at least one valid copy below.

All of it in the order of the program: bytes that a transfer has yet to move have a ticket
(``moves/tickets.py``), and whoever needs them, or the frame or the slot, waits for it.

Rules: a slot holds a valid copy or is free; a write drops every copy; ``frame_page`` is the exact
inverse of ``frame``. ``check.py`` proves them.
"""

from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt
import torch

from ...kernels.launch import upload
from .frame_pool import FramePool, Numbers, are_consecutive, consecutive

NONE = -1

DIRTY = np.uint8(1)  # newer than every copy below (on the device, no valid copy)
BLANK = np.uint8(2)  # never written: contents undefined, no memory held
LIVE = np.uint8(4)  # belongs to a run

_GROWTH = 1024
_UNBORN, _BORN = LIVE | BLANK, LIVE | DIRTY  # worked out once


# Bytes are compared in a tenth of the time that NumPy takes for a few numbers.
_NONE_BYTES = np.int64(NONE).tobytes()


def none_of(places: Numbers) -> bool:
    """Whether there is none among frames, or slots, of pages."""
    return places.tobytes() == _NONE_BYTES * len(places)


class PageTable:
    """Structure of arrays over virtual pages, and the inverse map from frames to pages.

    ``owner`` is the id of the run that a page belongs to (−1 for a free page). ``version`` counts
    up whenever a page becomes DIRTY: all copies of a page are of one version, and no version comes
    twice for the same page.
    """

    def __init__(self, frames: int, device: torch.device) -> None:
        self._device = device
        self.pages = FramePool(0)
        # Of so many pages, that were a run's: their first, as heaps: the lowest goes first, so
        # that the same tensors get the same pages in one iteration after another.
        self._spare: dict[int, list[int]] = {}
        self.frame: Numbers = np.empty(0, np.int64)
        self.host: Numbers = np.empty(0, np.int64)
        self.disk: Numbers = np.empty(0, np.int64)
        self.owner: Numbers = np.empty(0, np.int64)
        self.flags: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        self.version: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self.frame_page: Numbers = np.full(frames, NONE)

    # -- virtual pages ---------------------------------------------------------------------------
    def allocate(self, count: int, owner: int) -> int:
        """``count`` consecutive virtual pages for run ``owner``, all BLANK; the first's number."""
        spare = self._spare.get(count)
        first = heappop(spare) if spare else self.pages.allocate_run(count)
        if first is None:
            for length, firsts in self._spare.items():
                for one in firsts:
                    self.pages.free(one, length)
            self._spare.clear()
            first = self.pages.allocate_run(count)
        if first is None:
            self._grow(max(_GROWTH, count, self.pages.count))
            first = self.pages.allocate_run(count)
            assert first is not None
        rows = slice(first, first + count)
        self.owner[rows] = owner
        self.flags[rows] = _UNBORN
        return first

    def release(self, first: int, count: int) -> None:
        """Forget pages that hold nothing any more (frames and slots were given back before)."""
        rows = slice(first, first + count)
        for column in (self.frame, self.host, self.disk):
            assert none_of(column[rows])
        self.end(first, count)

    def end(self, first: int, count: int, base: int = -1) -> None:
        """:meth:`release` of pages that are DIRTY, in the frames from ``base`` on, which are empty
        then; the caller gives these back."""
        rows = slice(first, first + count)
        if base >= 0:
            self.frame[rows] = NONE
            self.frame_page[base : base + count] = NONE
        self.owner[rows] = NONE
        self.flags[rows] = 0
        try:
            heappush(self._spare[count], first)
        except KeyError:
            self._spare[count] = [first]

    def _grow(self, more: int) -> None:
        total = self.pages.count + more
        for name in ("frame", "host", "disk", "owner"):
            column = np.full(total, NONE)
            old = getattr(self, name)
            column[: len(old)] = old
            setattr(self, name, column)
        flags = np.zeros(total, np.uint8)
        flags[: len(self.flags)] = self.flags
        self.flags = flags
        version = np.zeros(total, np.int64)
        version[: len(self.version)] = self.version
        self.version = version
        self.pages.resize(total)

    def resize_frames(self, frames: int) -> None:
        """The border of the arena moved; frames behind a lowered border must be empty."""
        old = self.frame_page
        assert (old[frames:] < 0).all(), "a frame behind the new border is in use"
        self.frame_page = np.full(frames, NONE)
        keep = min(frames, len(old))
        self.frame_page[:keep] = old[:keep]

    # -- transitions -----------------------------------------------------------------------------
    def place(self, pages: Numbers, frames: Numbers) -> None:
        """BLANK → DIRTY, BELOW → CLEAN: ``pages[i]`` is now in ``frames[i]``."""
        assert none_of(self.frame[pages])
        assert none_of(self.frame_page[frames])
        self.frame[pages] = frames
        self.frame_page[frames] = pages
        flags = self.flags[pages]
        if np.bitwise_or.reduce(flags) & BLANK:
            blank = pages[(flags & BLANK) != 0]
            self.flags[blank] = _BORN
            self.version[blank] += 1

    def bear(self, first: int, pages: Numbers, base: int) -> None:
        """BLANK → DIRTY: all ``pages`` of a run, from ``first`` on, which has none anywhere, are in
        frames from ``base`` on."""
        count = len(pages)
        rows, frames = slice(first, first + count), slice(base, base + count)
        theirs, versions = self.frame_page[frames], self.version[rows]
        assert none_of(theirs)
        self.frame[rows] = consecutive(base, count)
        theirs[:] = pages
        self.flags[rows] = _BORN
        versions += 1

    def move(self, pages: Numbers, frames: Numbers) -> None:
        """Resident ``pages`` are now in ``frames`` (which were empty, or emptied by this move)."""
        self.frame_page[self.frame[pages]] = NONE
        assert none_of(self.frame_page[frames])
        self.frame[pages] = frames
        self.frame_page[frames] = pages

    def unplace(self, pages: Numbers) -> Numbers:
        """CLEAN → BELOW (or any → freed): take ``pages`` off the device; the frames they had."""
        frames: Numbers = self.frame[pages]
        assert np.minimum.reduce(frames, initial=0) == 0
        self.frame[pages] = NONE
        self.frame_page[frames] = NONE
        return frames

    def copied(self, pages: Numbers, slots: Numbers, tier: str) -> None:
        """DIRTY → CLEAN: ``pages`` have a valid copy in ``slots`` of ``tier``."""
        column = self.host if tier == "host" else self.disk
        assert none_of(column[pages])
        column[pages] = slots
        self.flags[pages] &= ~DIRTY

    def drop_copies(self, pages: Numbers, tier: str) -> Numbers:
        """The copies of ``pages`` in ``tier`` are void; the slots that they had.

        A resident page left with no copy becomes DIRTY. The caller gives the slots back.
        """
        column, other = self.host, self.disk
        if tier != "host":
            column, other = other, column
        slots: Numbers = column[pages]
        column[pages] = NONE
        bare = pages[(other[pages] < 0) & (self.frame[pages] >= 0)]
        if len(bare):
            self.flags[bare] |= DIRTY
            self.version[bare] += 1
        return slots[slots >= 0]

    def rewritten_below(self, pages: Numbers) -> None:
        """BELOW → BELOW: the host is about to write the one copy of ``pages``, which it has."""
        assert (self.frame[pages] < 0).all()
        assert (self.host[pages] >= 0).all()
        assert (self.disk[pages] < 0).all()
        self.version[pages] += 1

    # -- where pages are -------------------------------------------------------------------------
    def base(self, first: int, count: int) -> int:
        """The frame of page ``first``, where as many pages from there on as ``count`` are in
        consecutive frames; ``NONE`` where they are not."""
        frames = self.frame[first : first + count]
        base = int(frames[0])
        return base if base >= 0 and are_consecutive(frames) else NONE

    # -- what kernels read -----------------------------------------------------------------------
    def device_frames(self, first: int, count: int) -> torch.Tensor:
        """Frames of pages ``first … first+count`` as int32 [count] on the device.

        On an accelerator a copy, made in the current stream's order: whatever becomes of the pages
        later, what is queued now reads where they are now.
        """
        frames = self.frame[first : first + count].astype(np.int32)
        return upload(torch.from_numpy(frames), self._device)
