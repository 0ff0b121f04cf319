"""Values that pages had when a save began, while training goes on.

::

    save begins     saver (another thread)      training
        |           reads page after page       forward, backward: nobody writes
        |           …                           step: is about to write pages
        |                                         not saved yet: copied first, into free slots
        |           reads the copy              writes
        v           done: watches no more

No copy is made before somebody writes: a step writes what is saved last, and most is saved by
then. Copies are in slots of the host tier, or else of the disk's, that pages have not wanted so
far. Where there are none the step waits until its pages are saved. Both are counted as waiting for
pages (``stall_us``). Should pages want these slots meanwhile, a fault waits for the save's end.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch

from ..core import Core
from ..devices.device import Bytes
from ..disk.file import aligned_bytes
from ..errors import PagerError
from ..memory.frame_pool import Numbers, merge
from ..memory.space import Extent
from ..moves.mover import TIERS
from ..tensor.operands import flat, has_no_gaps
from ..tensor.paged_tensor import PagedTensor
from ..tensor.sharded import is_sharded, local_of, with_local
from ..tensor.tensor_bytes import chunks, is_dense, unmoved_chunks
from .tree import tensors_of, with_tensors

STEP_BYTES = 1 << 20  # read at a time, under the pager's lock


class Frozen:
    """``tree``: a state with the tensors of one pager and others. ``staged``: the same, to be saved
    by :meth:`chunks`; what is not in pages is copied at once.

    Raises ``PagerError`` if the pager's values are frozen already.
    """

    def __init__(self, tree: Any) -> None:
        self._lock = threading.Condition()  # nobody who has it asks for the pager's
        self._left: Counter[Extent] = Counter()  # tensors of each that are not saved yet
        self._copies: dict[Extent, tuple[str, Numbers]] = {}  # slots; under the pager's lock
        self._writes: list[Future[None]] = []  # of the disk, that may go on
        self._pager: Core | None = None
        self.copied_bytes = 0
        paged = [local_of(tensor) for tensor in tensors_of(tree)]
        pagers = {t._storage.pager for t in paged if type(t) is PagedTensor}
        if len(pagers) > 1:
            raise PagerError("tensors of several pagers are saved one pager at a time")
        for pager in pagers:
            if pager.before_write is not None:
                raise PagerError(
                    "an asynchronous save of this pager goes on; wait for its result() first"
                )
            self._pager = pager
            self._left.update(_extents(paged))
            pager.before_write = _Watch(self, pager)
        self.staged = with_tensors(tree, self._stage)

    def _stage(self, tensor: torch.Tensor) -> torch.Tensor:
        local = local_of(tensor)
        if type(local) is not PagedTensor:
            mine = local.detach().clone()
        else:
            mine = local.detach() if _is_plain(local) else local.detach().to_dense()
        return with_local(tensor, mine) if is_sharded(tensor) else mine

    # -- the saver -------------------------------------------------------------------------------
    def limit(self, tensors: Sequence[torch.Tensor]) -> None:
        """Only ``tensors``, of ``staged``, will be saved, each once; other ranks save the rest."""
        with self._lock:
            self._left = Counter(_extents(tensors))
            self._lock.notify_all()

    def chunks(self, tensor: torch.Tensor, *, row_major: bool = False) -> Iterator[memoryview]:
        """As ``tensor_bytes.chunks``, of a tensor of ``staged``, with the values that it had."""
        if type(tensor) is not PagedTensor:
            yield from chunks(tensor, row_major=row_major)
            return
        elements: Any = flat(tensor)
        yield from unmoved_chunks(elements, copy=self._copy, most_bytes=STEP_BYTES)
        with self._lock:
            self._left[tensor._storage.run] -= 1
            self._lock.notify_all()

    def _copy(self, run: Extent, pages: Numbers, out: Bytes) -> None:
        pager = self._pager
        assert pager is not None
        with pager.lock:
            if run not in self._copies:
                pager.mover.copy_of(pages, out)
                return
            tier, slots = self._copies[run]
            first = int(pages[0]) - run.first
            slots = slots[first : first + len(pages)]
            if tier == "disk":
                assert pager.disk is not None
                pieces = _pieces(slots, out, pager.page_size)
                pager.io_watch.wait(pager.disk.submit_read(pieces))
                return
            for place, view in pager.host.stretches(_numbers(slots), slots):
                start = place * pager.page_size
                out[start : start + len(view)] = view

    def end(self) -> None:
        """All is saved, or it is given up."""
        pager = self._pager
        with self._lock:
            self._left.clear()
            self._lock.notify_all()
        if pager is not None:
            with pager.lock:
                pager.before_write = None
                for tier, slots in self._copies.values():
                    pager.mover.slots.give_back(tier, slots)
                self._copies.clear()

    # -- training --------------------------------------------------------------------------------
    def about_to_write(self, pager: Core, extents: Iterable[Extent]) -> None:
        """Called without the pager's lock."""
        for extent in extents:
            if self._left[extent] <= 0 or extent in self._copies:
                continue
            began = time.perf_counter()
            if not self._keep(pager, extent):
                with self._lock:
                    while self._left[extent] > 0:
                        self._lock.wait()
            seconds, watch = time.perf_counter() - began, pager.watcher()
            pager.stall_us += seconds * 1e6
            if watch is not None:
                watch.waited(seconds, None, own=False)

    def _keep(self, pager: Core, extent: Extent) -> bool:
        """Copy it, if there are slots for that; whether it need not be waited for."""
        with pager.lock:
            if self._left[extent] <= 0 or extent in self._copies:
                return True
            lend = pager.mover.slots.lend
            places = ((tier, lend(tier, extent.count)) for tier in TIERS)
            tier, slots = next(((t, some) for t, some in places if some is not None), ("", None))
            if slots is None:
                return False
            try:
                self._fill(pager, extent.pages, tier, slots)
            except PagerError:  # of the disk: what it did not finish it may still be at
                pager.mover.slots.give_back(tier, slots, self._writes)
                return False
            self._copies[extent] = tier, slots
            self.copied_bytes += extent.count * pager.page_size
            return True

    def _fill(self, pager: Core, pages: Numbers, tier: str, slots: Numbers) -> None:
        size = pager.page_size
        self._writes = []
        if tier == "host":
            for place, view in pager.host.stretches(_numbers(slots), slots):
                pager.mover.copy_of(pages[place : place + len(view) // size], view)
            return
        assert pager.disk is not None
        at_once = max(1, STEP_BYTES // size)
        for first in range(0, len(pages), at_once):
            some = slots[first : first + at_once]
            buffer = aligned_bytes(len(some) * size)
            pager.mover.copy_of(pages[first : first + at_once], buffer)
            self._writes = [pager.disk.submit_write(_pieces(some, buffer, size))]
            pager.io_watch.wait(self._writes[0])


def _numbers(slots: Numbers) -> Numbers:
    return np.arange(len(slots))


def _pieces(slots: Numbers, buffer: Bytes, size: int) -> list[tuple[int, Bytes]]:
    """Slots of the disk, and the parts of ``buffer`` that belong there."""
    return [
        (slot, buffer[place * size : (place + count) * size])
        for slot, place, count in merge(slots, _numbers(slots))
    ]


class _Watch:
    """``Core.before_write``, as long as somebody saves."""

    def __init__(self, frozen: Frozen, pager: Core) -> None:
        self._frozen, self._pager = weakref.ref(frozen), weakref.ref(pager)

    def __call__(self, extents: Sequence[Extent]) -> None:
        frozen, pager = self._frozen(), self._pager()
        if pager is not None and frozen is not None:
            frozen.about_to_write(pager, extents)
        elif pager is not None:
            pager.before_write = None


def _is_plain(tensor: torch.Tensor) -> bool:
    """Its elements lie in pages in the order of their indices."""
    return is_dense(tensor) and tensor.is_contiguous() and has_no_gaps(tensor)


def _extents(tensors: Sequence[torch.Tensor]) -> Iterator[Extent]:
    for tensor in tensors:
        if type(tensor) is PagedTensor and _is_plain(tensor) and tensor.numel():
            yield tensor._storage.run
