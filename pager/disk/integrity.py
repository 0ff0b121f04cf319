"""Whose page each slot holds, which version of it, and a checksum of its bytes.

A *stamp* binds the three together. It is in memory and not in the slot, so a drive that loses,
tears, misplaces or changes a write cannot change the stamp with it, and a mistake in the page table
is found too, because the owner is written down in two places. One stamp is of what a slot holds,
another of what it held before; from these and from eight words of each page it is told what went
wrong:

=========  ======================================  ================================================
kind       what was read                           how that is known
=========  ======================================  ================================================
damaged    a flipped bit, or more                  it is none of the following
torn       a part is new, the rest was there       some of the words are the new page's, and some
           before                                  are those of what was there
stale      what was there before: a lost write;    the old stamp's checksum; another version in
           or another version than is wanted       the stamp than in the page table
misplaced  the page of another owner: a write or   the checksum of another slot; another owner in
           a read went astray                      the stamp than in the page table
unwritten  a slot that was not written             there is no stamp
=========  ======================================  ================================================
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import xxhash

from ..errors import CorruptPage

Bytes = npt.NDArray[np.uint8]
Rows = npt.NDArray[np.uint64]
Slots = npt.NDArray[np.integer]

WORDS = 8
ROW = 1 + WORDS
"""uint64 numbers of a stamp's row: xxh3 of the page, and eight of its words, evenly spaced."""

_WORD_BYTES = 8
_NOBODY = -1


def word_starts(page_size: int) -> npt.NDArray[np.int64]:
    """Where in a page its stamp's words begin, int64 [WORDS]."""
    return np.linspace(0, max(0, page_size - _WORD_BYTES), WORDS).astype(np.int64)


@functools.cache
def _bytes_of_words(page_size: int) -> npt.NDArray[np.int64]:
    return (word_starts(page_size)[:, None] + np.arange(_WORD_BYTES)).ravel()


def page_rows(pages: Bytes) -> Rows:
    """Rows, uint64 [n, ROW], of ``pages``, C-contiguous uint8 [n, page_size]."""
    rows = np.empty((len(pages), ROW), np.uint64)
    rows.view(np.uint8)[:, _WORD_BYTES:] = pages[:, _bytes_of_words(pages.shape[1])]
    for index, page in enumerate(pages):
        rows[index, 0] = xxhash.xxh3_64_intdigest(page)
    return rows


class Stamps:
    """Of all slots of one tier. Any thread may call; each slot has one user at a time.

    ``tier``: ``"host"`` or ``"disk"``; ``where``: the directory of the disk tier, for messages.
    ``name_of``: what to call a virtual page (``page_names.py``).
    """

    def __init__(self, count: int, page_size: int, tier: str, where: str = "") -> None:
        self.name_of: Callable[[int], str] = lambda page: f"page {page}"
        self._tier = f"{tier} tier in {where!r}" if where else f"{tier} tier"
        self._is_disk = tier == "disk"
        self._page_size = page_size
        self._lock = threading.Lock()
        self._written = np.zeros(count, np.bool_)
        self._rows, self._old_rows = (np.zeros((count, ROW), np.uint64) for _ in range(2))
        self._pages, self._old_pages = (np.full(count, _NOBODY, np.int32) for _ in range(2))
        self._versions, self._old_versions = (np.zeros(count, np.int64) for _ in range(2))

    def resize(self, count: int) -> None:
        """More slots. What the others hold stays."""
        with self._lock:
            more = count - len(self._written)
            self._written = np.concatenate([self._written, np.zeros(more, np.bool_)])
            rows = np.zeros((more, ROW), np.uint64)
            self._rows = np.concatenate([self._rows, rows])
            self._old_rows = np.concatenate([self._old_rows, rows])
            nobody, none = np.full(more, _NOBODY, np.int32), np.zeros(more, np.int64)
            self._pages = np.concatenate([self._pages, nobody])
            self._old_pages = np.concatenate([self._old_pages, nobody])
            self._versions = np.concatenate([self._versions, none])
            self._old_versions = np.concatenate([self._old_versions, none])

    # -- writing ---------------------------------------------------------------------------------
    def claim(self, slots: Slots, pages: Slots, versions: Slots) -> None:
        """``slots[i]`` is about to be written with that version of ``pages[i]``."""
        with self._lock:
            known = slots[self._written[slots]]
            self._old_pages[known] = self._pages[known]
            self._old_versions[known] = self._versions[known]
            self._old_rows[known] = self._rows[known]
            self._pages[slots] = pages
            self._versions[slots] = versions
            self._written[slots] = False

    def begin(self, slots: Slots) -> None:
        """Bytes of ``slots`` are about to change: what they held cannot be read any more."""
        with self._lock:
            known = slots[self._written[slots]]  # of those who write without a claim
            self._old_rows[known] = self._rows[known]
            self._written[slots] = False

    def wrote(self, slots: Slots, rows: Rows) -> None:
        """All of ``slots`` were written, with pages of these rows."""
        with self._lock:
            self._rows[slots] = rows
            self._written[slots] = True

    # -- reading ---------------------------------------------------------------------------------
    def rows(self, slots: Slots) -> Rows:
        """Of what ``slots`` hold. Raises ``CorruptPage`` if one was not written."""
        with self._lock:
            unwritten = slots[~self._written[slots]]
            rows = self._rows[slots]
        if unwritten.size:
            raise self._error(int(unwritten[0]), "unwritten", "was never written")
        return rows

    def expect(self, slots: Slots, pages: Slots, versions: Slots) -> None:
        """Raises ``CorruptPage`` unless ``slots[i]`` was written with this version of this page."""
        with self._lock:
            owners, found = self._pages[slots], self._versions[slots]
        wrong = np.flatnonzero((owners != pages) | (found != versions))
        if not wrong.size:
            return
        at = int(wrong[0])
        slot, page, owner = int(slots[at]), int(pages[at]), int(owners[at])
        if owner != page:
            raise self._error(
                slot, "misplaced", f"is said to be {self.name_of(page)}, but what was written "
                f"there is {self._name(owner)}", page=page,
            )  # fmt: skip
        raise self._error(
            slot, "stale", f"is version {found[at]} of {self.name_of(page)}, and the page table "
            f"wants version {versions[at]}", page=page,
        )  # fmt: skip

    def mismatch(
        self, slot: int, page: Bytes, rows_of: Callable[[Bytes], Rows] = page_rows
    ) -> CorruptPage:
        """What is wrong with ``page``, the bytes that were read from ``slot``; its row differs.
        ``rows_of``: how the rows of this tier's pages were made."""
        found = rows_of(page.reshape(1, -1))[0]
        with self._lock:
            new, old = self._rows[slot].copy(), self._old_rows[slot].copy()
            old_page, old_version = int(self._old_pages[slot]), int(self._old_versions[slot])
            owner, version = int(self._pages[slot]), int(self._versions[slot])
            same = np.flatnonzero(self._written & (self._rows[:, 0] == found[0]))
            others = [(int(other), int(self._pages[other])) for other in same if other != slot]
        if not old[0]:  # a new file is zeros
            old[0] = rows_of(np.zeros((1, self._page_size), np.uint8))[0, 0]
        if found[0] == old[0]:
            before = "zeros, as in a new file" if old_page == _NOBODY else self._name(old_page)
            if old_page == owner != _NOBODY:
                before = f"an older version of it ({old_version}, not {version})"
            return self._error(slot, "stale", f"is stale: the last write was lost, and it holds "
                               f"what was there before: {before}")  # fmt: skip
        if others:
            other, its_page = others[0]
            return self._error(slot, "misplaced", "is the page of another owner: it holds "
                               f"{self._name(its_page)}, of slot {other}, so a write or a read "
                               "went to the wrong place")  # fmt: skip
        telling = new[1:] != old[1:]
        is_new, is_old = (found == new)[1:] & telling, (found == old)[1:] & telling
        if is_new.any() and is_old.any():
            return self._error(slot, "torn", "is torn: a part of it was written and a part is what "
                               "was there before")  # fmt: skip
        return self._error(
            slot, "damaged", "is not what was written (checksum differs): flipped bits or worse"
        )

    def page_of(self, slot: int) -> int:
        """Whose page it holds or is about to; −1 for nobody's."""
        return int(self._pages[slot])

    def check_owners(self, slots: Slots, pages: Slots, versions: Slots) -> None:
        """For ``check.py``: the stamps say what the page table says."""
        with self._lock:
            assert (self._pages[slots] == pages).all(), "a stamp names another page"
            assert (self._versions[slots] == versions).all(), "a stamp is of another version"
            assert self._written[slots].all(), "a slot in use has no stamp"

    def _name(self, page: int) -> str:
        return "something else" if page == _NOBODY else self.name_of(page)

    def _error(self, slot: int, kind: str, what: str, page: int | None = None) -> CorruptPage:
        if page is None:
            with self._lock:
                page = int(self._pages[slot])
        name = None if page == _NOBODY else self.name_of(page)
        remedy = (
            "Check the drive (dmesg, smartctl) and go on from the last checkpoint"
            if self._is_disk
            else "Something wrote into the pager's host memory: test the machine's memory, and go "
            "on from the last checkpoint"
        )
        of = f" ({name})" if name else ""
        return CorruptPage(
            f"the page in slot {slot} of the {self._tier}{of} {what}; it was not used. {remedy}",
            kind=kind,
            tier="disk" if self._is_disk else "host",
            slot=slot,
            page=page,
            tensor=name,
        )
