"""Values that pages had when a save began, while training goes on.

::

    save begins     saver (another thread)      training
        |           reads page after page       forward, backward: nobody writes
        |           …                           step: is about to write pages
        |                                         not saved yet: copied first, into a file
        |           reads the copy              writes
        v           done: watches no more

No copy is made before somebody writes: a step writes what is saved last, and most is saved by then.
Where there is no disk for copies the step waits until its pages are saved. Both are counted as
waiting for pages (``stall_us``).
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..disk.file import open_scratch_files
from ..errors import PagerError
from ..tensor.operands import flat, has_no_gaps
from ..tensor.paged_tensor import PagedTensor
from ..tensor.sharded import is_sharded, local_of, with_local
from ..tensor.tensor_bytes import chunks, is_dense, unmoved_chunks
from .tree import tensors_of, with_tensors

if TYPE_CHECKING:
    from ..core import Core
    from ..devices.device import Bytes
    from ..memory.page_table import Int32
    from ..memory.space import Extent

STEP_BYTES = 1 << 20  # read at a time, under the pager's lock


class Frozen:
    """``tree``: a state with the tensors of one pager and others. ``staged``: the same, to be saved
    by :meth:`chunks`; what is not in pages is copied at once.

    Raises ``PagerError`` if the pager's values are frozen already.
    """

    def __init__(self, tree: Any) -> None:
        self._lock = threading.Condition(threading.RLock())
        self._left: Counter[Extent] = Counter()  # tensors of each that are not saved yet
        self._copies: dict[Extent, int] = {}  # where in the file
        self._pager: Core | None = None
        self._file: int | None = None
        self._file_bytes = 0
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

    def _copy(self, run: Extent, pages: Int32, out: Bytes) -> None:
        assert self._pager is not None
        with self._lock:
            start = self._copies.get(run)
            if start is None:
                with self._pager.lock:
                    self._pager.mover.copy_of(pages, out)
                return
            assert self._file is not None
            place = start + (int(pages[0]) - run.first) * self._pager.page_size
            rest = memoryview(out)
            while rest:
                count = os.preadv(self._file, [rest], place)
                if not count:
                    raise PagerError("the file of copies was cut off")
                rest, place = rest[count:], place + count

    def end(self) -> None:
        """All is saved, or it is given up."""
        with self._lock:
            self._left.clear()
            self._copies.clear()
            if self._file is not None:
                os.close(self._file)
                self._file = None
            self._lock.notify_all()
        if self._pager is not None:
            self._pager.before_write = None

    # -- training --------------------------------------------------------------------------------
    def about_to_write(self, pager: Core, extents: Iterable[Extent]) -> None:
        """Called without the pager's lock."""
        for extent in extents:
            if self._left[extent] <= 0 or extent in self._copies:
                continue
            began = time.perf_counter()
            with self._lock:
                if self._left[extent] > 0 and extent not in self._copies:
                    self._keep(pager, extent)
            seconds, watch = time.perf_counter() - began, pager.watcher()
            pager.stall_us += seconds * 1e6
            if watch is not None:
                watch.waited(seconds, None, own=False)

    def _keep(self, pager: Core, extent: Extent) -> None:
        """Copy it, or wait until it has been saved."""
        if self._file is None:
            pages = sum(run.count for run, left in self._left.items() if left > 0)
            folder = pager.disk.directory if pager.disk is not None else None
            self._file = next(open_scratch_files(folder, pages * pager.page_size), None)
        if self._file is None:
            self._lock.wait_for(lambda: self._left[extent] <= 0)
            return
        start, at_once = self._file_bytes, max(1, STEP_BYTES // pager.page_size)
        buffer = bytearray(at_once * pager.page_size)
        for first in range(0, extent.count, at_once):
            rows = extent.pages[first : first + at_once]
            rest = memoryview(buffer)[: len(rows) * pager.page_size]
            with pager.lock:
                pager.mover.copy_of(rows, np.frombuffer(rest, np.uint8))
            place = start + first * pager.page_size
            while rest:
                count = os.pwritev(self._file, [rest], place)
                rest, place = rest[count:], place + count
        self._file_bytes += extent.count * pager.page_size
        self.copied_bytes += extent.count * pager.page_size
        self._copies[extent] = start


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
