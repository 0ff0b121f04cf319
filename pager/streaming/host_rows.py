"""Rows of a large table that are in the host tier, read there by a kernel.

Bringing a page in for one row of it moves a hundred times what is wanted, and another page has to
leave. So rows on pages of which few bytes are wanted are fetched from the page-locked slots as they
are. How few: ``calibration/rows.py`` measures from how many bytes on a copy of the page is faster,
and where pages cost more waiting than their copies take, the border is higher in proportion. ::

    rows wanted    3  4 | 91 | 170 … 176 | 300
    their pages   device  host     host     disk
                    |     read in   comes in: most of the page is wanted; on disk
                    |     place
                    pinned, like those that come in

Note: slots that kernels read
-----------------------------
The kernel is queued on *compute* under the pager's lock, together with the look at the page table,
and a valid slot loses its page only under that lock. So whoever fills the slot again took it after
the kernel was queued, and waits for it: ``copy_out`` by rule 1 of ``devices/device.py``,
``carry_out`` by its mark, which is made after slots were taken (rule 6). The empty ``copy_in``
behind the kernel makes *in* wait for it too, so that ``host_ready``, after which host memory may be
given back, does.
A page that is coming keeps its slot and may be read there; one that is leaving has none yet, and is
read in its frame.
"""

from __future__ import annotations

import statistics
import time
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from ...kernels.rows import pages_of_rows
from ...kernels.zero_copy import fetch_blocks, row_blocks_of
from ..tensor.paged_tensor import PagedTensor

if TYPE_CHECKING:
    from ..api import Pager
    from ..machine.calibration.rows import Border

_BYTES_AT_ONCE = 4 << 20  # read under one hold of the lock
_LATEST = 15  # lookups whose pages came

Int64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_borders: dict[tuple[str, int, int], Border] = {}
_page_us: weakref.WeakKeyDictionary[Pager, deque[float]] = weakref.WeakKeyDictionary()
_bytes_read: weakref.WeakKeyDictionary[Pager, int] = weakref.WeakKeyDictionary()


def host_row_bytes(pager: Pager) -> int:
    """Bytes of rows that were read in place so far."""
    return _bytes_read.get(pager, 0)


def most_bytes_of(pager: Pager, row_bytes: int) -> int:
    """Of a page, to read in place."""
    border, seen = _border_of(pager, row_bytes), _page_us.get(pager)
    if not seen:
        return border.most_bytes
    dearer = max(1.0, statistics.median(seen) / border.page_us)
    return int(min(border.most_bytes * dearer, pager.page_size // 2))


def _border_of(pager: Pager, row_bytes: int) -> Border:
    """The first call for a size of row may have to measure it, which counts as waiting."""
    from ..machine.calibration.rows import calibrate_rows, row_size

    size = row_size(row_bytes, pager.page_size)
    key = str(pager.device), pager.page_size, size
    if key not in _borders:
        began = time.perf_counter()
        _borders[key] = calibrate_rows(
            backend=pager.backend, page_size=pager.page_size, row_bytes=size
        )
        with pager.lock:
            seconds = time.perf_counter() - began
            pager.stall_us += seconds * 1e6
            if pager.follower is not None:
                pager.follower.stalled(seconds)
    return _borders[key]


@contextmanager
def paying_for_pages(pager: Pager) -> Iterator[None]:
    """Notes what was waited for pages of the host tier inside; not in a metered iteration, in which
    the arena is smaller than it will be."""
    waited, moved = pager.stall_us, dict(pager.migration.moved)
    yield
    pages = (pager.migration.moved["host-in"] - moved["host-in"]) // pager.page_size
    if pages and pager.migration.moved["disk-in"] == moved["disk-in"] and not pager.budget.metering:
        seen = _page_us.setdefault(pager, deque(maxlen=_LATEST))
        seen.append((pager.stall_us - waited) / pages)


def read_in_place(table: PagedTensor, rows: Int64, places: Int64, out: torch.Tensor) -> Bools:
    """Copy to ``out[places[i]]`` those of ``rows`` that are better read in host memory; which.

    rows : int64 [n] of the table's, ascending, none twice. places : int64 [n]. out : dense, row
        after row, of the table's dtype, on its device.

    On CUDA queued on the current stream. For the others pages have to come.
    """
    pager, nbytes = table._storage.pager, table.size(1) * table.element_size()
    chosen = _Chosen(table, rows, nbytes, most_bytes_of(pager, nbytes))
    read = np.zeros(len(rows), np.bool_)
    if not len(chosen.rows):
        return read
    step = max(1, _BYTES_AT_ONCE // nbytes)
    for start in range(0, len(chosen.rows), step):
        some = chosen.rows[start : start + step]
        with pager.lock:  # not held throughout: planned moves go on
            pager.check_open()
            pager.backend.note_compute()
            some = some[chosen.are_readable(some)]
            if len(some):
                _fetch(table, rows[some], places[some], nbytes, out)
                _bytes_read[pager] = host_row_bytes(pager) + len(some) * nbytes
        read[some] = True
    with pager.lock:
        if pager.after_op is not None:
            pager.after_op()
    return read


def may_read_in_place(pager: Pager) -> bool:
    """Whether any row may be. Not in a metered iteration, which finds out what is needed where
    pages come; nor where each page's checksum is to be looked at on its way in."""
    return (
        bool(pager.host.used_slots)
        and not pager.budget.metering
        and pager.migration.host_stamps is None
        and pager.host.device_addresses(np.empty(0, np.int64)) is not None
    )


class _Chosen:
    """Which rows are read in place.

    rows : their positions, ascending. A row is chosen if all its pages are on the device or in
    host memory with few bytes wanted of them, and one at least is the latter.
    """

    def __init__(self, table: PagedTensor, rows: Int64, nbytes: int, most_bytes: int) -> None:
        self._table = table
        size = table._storage.pager.page_size
        begin = rows * nbytes
        self._first, self._last = begin // size, (begin + nbytes - 1) // size
        self._wanted = self._bytes_by_page(begin, nbytes, size)
        self._most = most_bytes
        pager = table._storage.pager
        with pager.lock:
            self.rows = np.flatnonzero(self.are_readable(np.arange(len(rows))))

    def _bytes_by_page(self, begin: Int64, nbytes: int, size: int) -> Int64:
        """Of each of the table's pages. (Where a row covers pages, nobody asks for those.)"""
        wanted = np.zeros(self._table._storage.run.count, np.int64)
        ahead = np.minimum(nbytes, (self._first + 1) * size - begin)  # on the first page
        np.add.at(wanted, self._first, ahead)
        straddles = self._last > self._first
        np.add.at(wanted, self._last[straddles], (begin + nbytes - self._last * size)[straddles])
        return wanted

    def _columns(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Frames and host slots of the table's pages as they are now."""
        storage = self._table._storage
        pages = slice(storage.run.first, storage.run.first + storage.run.count)
        table = storage.pager.table
        return table.frame[pages], table.host[pages]

    def _on_host(self, pages: Int64) -> Bools:
        frame, host = self._columns()
        found: Bools = (frame[pages] < 0) & (host[pages] >= 0) & (self._wanted[pages] <= self._most)
        return found

    def are_readable(self, some: Int64) -> Bools:
        """Which of the rows at these positions can be read now, a part of each in host memory.
        Under the lock."""
        first, last = self._first[some], self._last[some]
        frame, _ = self._columns()
        on_host = self._on_host(first), self._on_host(last)
        there = frame[first] >= 0, frame[last] >= 0
        short = last - first <= 1  # a row that covers a page is not read in place
        readable: Bools = (
            short & (on_host[0] | there[0]) & (on_host[1] | there[1]) & (on_host[0] | on_host[1])
        )
        return readable


def _fetch(table: PagedTensor, rows: Int64, places: Int64, nbytes: int, out: torch.Tensor) -> None:
    """Under the lock, as the note says."""
    run, pager = table._storage.run, table._storage.pager
    size, backend = pager.page_size, pager.backend
    pages = pages_of_rows(rows, nbytes, size)
    frames = pager.table.frame[run.first + pages].astype(np.int64)
    slots = pager.table.host[run.first + pages].astype(np.int64)
    on_host = pager.host.device_addresses(slots)
    assert on_host is not None, "may_read_in_place let it pass"
    addresses = np.empty(run.count, np.int64)  # only these are looked at
    addresses[pages] = np.where(
        frames >= 0,
        backend.address + frames * size,
        on_host,
    )
    blocks = row_blocks_of(rows, nbytes, size, addresses, out.data_ptr(), places)
    fetch_blocks(blocks.to(out.device))
    backend.copy_in(())
