"""Runs of pages and the storages inside them.

A *run* is the unit of placement: consecutive virtual pages that are used together. A *storage* is
what several PagedTensors (a tensor and its views) share: a byte range of one run. A storage of
more than half a page has a run of its own; smaller ones share a page with others of their kind,
aligned as PyTorch's allocator aligns on that device (other alignments change the last bits of some
BLAS routines, and which kernel is taken).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from .frame_pool import FramePool, Numbers, consecutive, distinct
from .page_table import PageTable

generations = itertools.count()  # never the same for two placements, of one run or of two
TRANSIENT_KINDS = ("activation", "gradient")  # the others live on from iteration to iteration


class Extent:
    """Consecutive virtual pages ``first … first+count``.

    ``base``: frame of the first page while all pages are resident in consecutive frames, else −1.
    ``pins``: how often it is held whole. ``generation``: changes whenever dense views go stale;
    ``unplaced``: what it is as long as no page was anywhere.
    ``apart``: of small storages, what sets them apart from others of their kind.
    ``settled``: all pages are known DIRTY, so that another write changes no state.
    ``born``: how many runs were born before it. ``key``: its name in access logs, 0 for none yet;
    ``optional``: of a parameter that not every iteration uses.
    ``pages``: int64 [count], all of them; not to be written to.
    ``nbytes``: bytes in use, of shared pages all. ``parts``: pages of it that are held by
    themselves, ``None`` for none. ``overwritten``: its maker writes every byte before anyone
    reads one, so frames need not be erased for it. ``writes``: counts what may have changed
    its bytes. ``streamed``: the verdict of ``placement.py``. ``in_slabs``: an op has gone slab by
    slab that has other bits so.
    """

    __slots__ = (
        "apart", "base", "born", "count", "first", "generation", "id", "in_slabs", "key", "kind",
        "nbytes", "optional", "overwritten", "pages", "parts", "pins", "settled", "small",
        "storages", "streamed", "unplaced", "writes",
    )  # fmt: skip

    def __init__(self, run_id: int, first: int, count: int, kind: str) -> None:
        self.id = run_id
        self.first = first
        self.count = count
        self.pages = consecutive(first, count)
        self.nbytes = 0
        self.kind = kind
        self.base = -1
        self.pins = 0
        self.parts: list[Numbers] | None = None
        self.generation = self.unplaced = next(generations)
        self.overwritten = False
        self.settled = False
        self.small: FramePool | None = None
        self.apart = ""
        self.storages = 0
        self.streamed: bool | None = None
        self.in_slabs = False
        self.born = 0
        self.key = 0
        self.optional = False
        self.writes = 0

    @property
    def held_pages(self) -> Numbers:
        """That are held by themselves, in order."""
        if self.parts is None:
            return np.empty(0, np.int64)
        return distinct(np.concatenate(self.parts))


class Part(NamedTuple):
    """Some virtual ``pages`` of ``run``, in order, none twice."""

    run: Extent
    pages: Numbers


class Space:
    """Allocates storages in runs of virtual pages. Holds no memory of any tier itself."""

    def __init__(self, table: PageTable, page_size: int, alignment: int) -> None:
        self.table = table
        self.page_size = page_size
        self.alignment = alignment  # bytes, of storages that share a page
        self.runs: dict[int, Extent] = {}
        self.dead: deque[tuple[Extent, int, int, int]] = deque()
        self.clock = 0  # accesses of the iteration so far, for those who want to know of deaths
        self.on_death: Callable[[Extent, int], None] = lambda run, clock: None
        self.births = 0
        self.live_pages = 0
        self.kind_pages: dict[str, int] = dict.fromkeys(TRANSIENT_KINDS, 0)
        self.peak_transient_pages = 0
        self.passed_in_slabs: set[str] = set()  # what transient runs were whose ops went in slabs
        self._open: dict[tuple[str, str], dict[int, Extent]] = {}
        self._free_ids: list[int] = []  # ids stay small: they index arrays

    def pages_for(self, nbytes: int) -> int:
        return max(1, -(-nbytes // self.page_size))

    def is_small(self, nbytes: int) -> bool:
        return nbytes <= self.page_size // 2

    @property
    def persistent_pages(self) -> int:
        """Live pages of parameters, optimizer states and what the user paged."""
        return self.live_pages - self.transient_pages

    @property
    def transient_pages(self) -> int:
        return self.kind_pages["activation"] + self.kind_pages["gradient"]

    def allocate(self, nbytes: int, kind: str, apart: str = "") -> tuple[Extent, int]:
        """The run and the offset of a new storage of at least one byte, whose contents are
        undefined; takes no frame until it is used. To be given back by :attr:`dead`. ``apart``: it
        shares a page only with others that are so."""
        if nbytes > self.page_size // 2:  # not `is_small`, which with `pages_for` is two more calls
            run = self._new_run(-(-nbytes // self.page_size), kind)
            run.nbytes = nbytes
            offset = 0
        else:
            run, offset = self._small(nbytes, kind, apart)
        run.storages += 1
        return run, offset

    def _small(self, nbytes: int, kind: str, apart: str) -> tuple[Extent, int]:
        units = -(-nbytes // self.alignment)
        group = self._open.setdefault((kind, apart), {})
        for run in group.values():
            assert run.small is not None
            unit = run.small.allocate_run(units)
            if unit is not None:
                return run, unit * self.alignment
        run = self._new_run(1, kind)
        run.nbytes, run.apart = self.page_size, apart
        run.small = FramePool(self.page_size // self.alignment)
        group[run.id] = run
        unit = run.small.allocate_run(units)
        assert unit is not None
        return run, unit * self.alignment

    def _new_run(self, count: int, kind: str) -> Extent:
        run_id = self._free_ids.pop() if self._free_ids else len(self.runs)
        run = Extent(run_id, self.table.allocate(count, run_id), count, kind)
        self.runs[run_id] = run
        run.born = self.births
        self.births += 1
        self.live_pages += count
        kinds = self.kind_pages
        kinds[kind] = kinds.get(kind, 0) + count
        if kind in TRANSIENT_KINDS:
            pages = kinds["activation"] + kinds["gradient"]  # `transient_pages`
            if pages > self.peak_transient_pages:
                self.peak_transient_pages = pages
        return run

    def note_in_slabs(self, run: Extent) -> None:
        """An op on ``run`` goes slab by slab that has other bits so."""
        run.in_slabs = True
        if run.kind in TRANSIENT_KINDS:
            self.passed_in_slabs.add(f"{run.kind} of {run.nbytes} bytes")

    def drain(self) -> Iterator[Extent]:
        """Runs that nobody refers to any more. The caller gives back their frames, slots and
        virtual pages, then calls :meth:`forget`."""
        while self.dead:
            run, offset, nbytes, clock = self.dead.popleft()
            run.storages -= 1
            if run.small is not None and run.storages:
                run.small.free(offset // self.alignment, -(-nbytes // self.alignment))
            if run.storages == 0:
                if run.small is not None:  # it gets no more: somebody may hold it for a while yet
                    del self._open[run.kind, run.apart][run.id]
                self.on_death(run, clock)
                yield run

    def forget(self, run: Extent) -> None:
        del self.runs[run.id]
        self._free_ids.append(run.id)
        self.live_pages -= run.count
        self.kind_pages[run.kind] -= run.count
