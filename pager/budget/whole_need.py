"""What was streamed because it did not fit, and what it takes where it does.

A metered iteration finds the smallest budget for what it did. Under a larger budget a weight that
was streamed may fit, and is whole then, for PyTorch's own bits; and whole it takes more, so that
the larger budget may be too small again. ::

    device_budget   | streams: takes a few frames | whole: takes all of them, and perhaps
                    |                             | a dense gradient too
                    0                             its own size

So whoever streams in a metered iteration notes it here, and the budget that is named to the user is
one that works for what is whole under it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..devices.dense_meter import Timeline


class _Streamed(NamedTuple):
    """``pages`` on the device at once, and ``more_dense`` bytes from ``began`` to ``ended``
    (``time.perf_counter``), would be needed by what is whole where ``limit_bytes`` fit beside the
    reserve, or own ``dense_bytes``."""

    pages: int
    limit_bytes: int
    dense_bytes: int
    more_dense: int
    began: float
    ended: float


class WholeNeeds:
    """Of one metered iteration. Deterministic: what one notes does not depend on timing, only the
    dense bytes that were in use meanwhile are looked up by time."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._fresh: list[_Streamed] = []  # noted since dense memory was last looked at
        self._known: dict[tuple[int, int, int], int] = {}  # pages, limit, own dense → dense bytes

    def clear(self) -> None:
        self._fresh.clear()
        self._known.clear()

    def note(
        self,
        pages: int,
        *,
        share: int = 1,
        limit_pages: int | None = None,
        dense_bytes: int = 0,
        more_dense: int = 0,
        began: float = 0.0,
        ended: float = 0.0,
    ) -> None:
        """Something was streamed that would be whole where ``fits.fits(pager.budget, limit_pages,
        share=share, dense_bytes=dense_bytes)``; whole, it takes ``pages`` (default of
        ``limit_pages``) at once, and ``more_dense`` bytes more than were in use from ``began`` to
        ``ended``."""
        limit = (pages if limit_pages is None else limit_pages) * share * self._page_size
        self._fresh.append(_Streamed(pages, limit, dense_bytes, more_dense, began, ended))

    def measure(self, timeline: Timeline, baseline: int, peak: int) -> None:
        """Look up dense bytes in use. ``peak``: at most, for where no timeline is kept."""
        when, current = timeline
        for entry in self._fresh:
            dense = 0
            if entry.more_dense:
                level = peak
                if len(when):
                    first = max(0, int(np.searchsorted(when, entry.began, "right")) - 1)
                    last = int(np.searchsorted(when, entry.ended, "right"))
                    level = baseline + int(current[first : max(last, first + 1)].max())
                dense = level + entry.more_dense
            key = entry.pages, entry.limit_bytes, entry.dense_bytes
            self._known[key] = max(self._known.get(key, 0), dense)
        self._fresh.clear()

    def least(self, dense: int, frames: int, reserve: int) -> tuple[int, int]:
        """Dense bytes and frames of the smallest budget that works, if ``dense`` and ``frames`` are
        what is needed where all that was noted streams. ``reserve``: a fixed one, or 0."""
        while True:
            budget_bytes = max(dense, reserve) + frames * self._page_size
            more_dense, more_frames = dense, frames
            for (pages, limit, own), whole_dense in self._known.items():
                if limit <= budget_bytes - max(reserve, own):
                    more_dense = max(more_dense, whole_dense)
                    more_frames = max(more_frames, pages)
            if (more_dense, more_frames) == (dense, frames):
                return dense, frames
            dense, frames = more_dense, more_frames
