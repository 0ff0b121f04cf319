"""Tensors as operands of kernels over pieces: held on the device whole, or a slab at a time.

A kernel over pieces (``kernels/pieces.py``) takes pages in any frames, so nothing is gathered here.
Elements count in memory order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import NamedTuple

import torch

from ...kernels.blockwise import BLOCK, Blockwise
from ...kernels.pieces import Operand, Paged
from ...kernels.update import State
from ..core import Core
from ..errors import InfeasibleBudget, TierFull
from ..memory.frame_pool import Numbers
from ..memory.space import Extent
from .paged_tensor import PagedTensor
from .slabs import Pages, fair_share, pages_of, stream


class Coded(NamedTuple):
    """A tensor in 8 bits: ``codes`` uint8 with its geometry, ``scales`` float32 [blocks of 256]."""

    codes: torch.Tensor
    scales: torch.Tensor


Value = torch.Tensor | Coded


class NotAtOnce(Exception):  # noqa: N818 (not an error: there are other ways)
    """What was to be held does not fit on the device together. Nothing is pinned."""


class Slab(NamedTuple):
    """Elements ``start … stop`` of each of the values that are walked, as operands for kernels over
    pieces; those in pages are on the device. Valid until the next slab is asked for."""

    start: int
    stop: int
    operands: list[State]


# -- looking -------------------------------------------------------------------------------------
def tensors_of(values: Iterable[Value]) -> Iterator[torch.Tensor]:
    """All tensors; of coded ones both."""
    for value in values:
        if isinstance(value, Coded):
            yield from value
        else:
            yield value


def runs_of(values: Iterable[Value]) -> list[Extent]:
    """The runs that ``values`` are in, none twice."""
    paged = (t for t in tensors_of(values) if type(t) is PagedTensor)
    return list({t._storage.run.id: t._storage.run for t in paged}.values())


def count_pages(values: Iterable[Value]) -> int:
    """Pages of these runs."""
    return sum(run.count for run in runs_of(values))


def same_order(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape have their elements in the same order in memory."""
    return one.stride() == other.stride() or (one.is_contiguous() and other.is_contiguous())


def has_no_gaps(tensor: torch.Tensor) -> bool:
    """Whether it can be an operand: its elements fill a stretch of memory or pages, which begins at
    a page border or lies in one page."""
    if not torch.ops.aten.is_non_overlapping_and_dense(tensor):
        return False
    if type(tensor) is not PagedTensor:
        return True
    size = tensor._storage.pager.page_size
    begin = begin_of(tensor)
    return begin % size == 0 or begin % size + tensor.numel() * tensor.dtype.itemsize <= size


def begin_of(tensor: PagedTensor) -> int:
    """At which byte of its run."""
    return tensor._storage.offset + int(tensor.storage_offset()) * tensor.dtype.itemsize


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Its elements in memory order, [n], sharing its memory or pages."""
    if type(tensor) is not PagedTensor:
        return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    offset = int(tensor.storage_offset())
    return PagedTensor(tensor._storage, (tensor.numel(),), (1,), offset, tensor.dtype)


# -- whole ---------------------------------------------------------------------------------------
@contextmanager
def whole(pager: Core, values: Sequence[Value], write: Sequence[bool]) -> Iterator[list[State]]:
    """Hold all of ``values``, and note which will be written; their operands.

    Raises ``NotAtOnce`` where they do not fit, and what a fault raises; nothing is pinned then.
    """
    runs = runs_of(values)
    if not runs:
        yield [as_operand(value) for value in values]
        return
    try:
        pager.take(runs)
    except (InfeasibleBudget, TierFull) as error:
        raise NotAtOnce from error
    try:
        pager.will_write(runs_of(value for value, written in zip(values, write) if written))
        yield [as_operand(value) for value in values]
    finally:
        pager.release(runs)


def as_operand(value: Value) -> State:
    """Of what is dense, or on the device and pinned."""
    if isinstance(value, Coded):
        return Blockwise(operand(value.codes), operand(value.scales))
    return operand(value)


def operand(tensor: torch.Tensor) -> Operand:
    """One that is dense, or on the device and pinned."""
    if type(tensor) is not PagedTensor:
        return flat(tensor)
    run, begin = tensor._storage.run, begin_of(tensor)
    end = begin + max(1, tensor.numel()) * tensor.dtype.itemsize
    size = tensor._storage.pager.page_size
    rows = slice(run.first + begin // size, run.first - (-end // size))
    frames = tensor._storage.pager.table.frame[rows].copy()
    return _in_frames(tensor, frames, begin, tensor.numel())


def _in_frames(tensor: PagedTensor, frames: Numbers, begin: int, numel: int) -> Operand:
    """``numel`` elements from byte ``begin`` of the run on: pages, or a view where they are inside
    one page and do not begin with it."""
    pager, dtype = tensor._storage.pager, tensor.dtype
    size, arena = pager.page_size, pager.residency.arena
    if begin % size == 0:
        return Paged(arena, frames, size, dtype, numel)
    start = int(frames[0]) * size + begin % size
    return arena[start : start + numel * dtype.itemsize].view(dtype)


# -- slab by slab --------------------------------------------------------------------------------
def pages_per_slab(pager: Core, values: Sequence[Value]) -> int:
    """For :func:`slabs`: what fits beside others, such that slabs are a power of two of pages.

    So the scales of a slab lie in one page, or are whole pages, and of two sizes of slabs the
    smaller divides the larger.
    """
    main = [value.codes if isinstance(value, Coded) else value for value in values]
    sizes = [tensor.dtype.itemsize for tensor in main if type(tensor) is PagedTensor]
    share = fair_share(pager)
    cost = sum(size // min(sizes) for size in sizes)
    return cost << (share // cost).bit_length() - 1 if 0 < cost <= share else share


def slabs(
    pager: Core,
    values: Sequence[Value],
    pages_per_slab: int | None = None,
    *,
    write: Sequence[bool] | None = None,
) -> Iterator[Slab]:
    """Walk ``values`` in step from the first element to the last, as many at once as
    ``pages_per_slab`` frames hold of all of them together (but never less than a page of the widest
    dtype); the next ones are read ahead.

    values : all with the same number of elements, paged here or dense, in one memory order.
    pages_per_slab : default a third of the frames that nobody else has pinned.
    write : which values will be written; default none.

    Raises as ``slabs.stream`` does, with nothing pinned and the slabs before complete, and
    ``ValueError`` for tensors that cannot be walked.
    """
    main = [value.codes if isinstance(value, Coded) else value for value in values]
    counts = {tensor.numel() for tensor in main}
    if len(counts) > 1:
        raise ValueError(f"tensors have {sorted(counts)} elements; those walked in step must agree")
    columns: list[_Column] = []
    for value, written in zip(values, write or [False] * len(values), strict=True):
        columns.append(_Column.of(value.codes if isinstance(value, Coded) else value, written))
        if isinstance(value, Coded):
            columns.append(_Column.of(value.scales, written, BLOCK))
    numel = counts.pop() if counts else 0
    step = _step(
        pager, main, numel, fair_share(pager) if pages_per_slab is None else pages_per_slab
    )
    return _walk(pager, values, columns, numel, step)


def _walk(
    pager: Core, values: Sequence[Value], columns: Sequence[_Column], numel: int, step: int
) -> Iterator[Slab]:
    borders = [(start, min(start + step, numel)) for start in range(0, numel, step)]
    wanted = ([c.pages(*border) for c in columns if c.is_paged] for border in borders)
    with closing(stream(pager, wanted)) as pinned:
        for (start, stop), frames in zip(borders, pinned):
            there = iter(frames)
            found = iter([c.operand(start, stop, there) for c in columns])
            operands: list[State] = [
                Blockwise(next(found), next(found)) if isinstance(value, Coded) else next(found)
                for value in values
            ]
            yield Slab(start, stop, operands)


def _step(pager: Core, tensors: Sequence[torch.Tensor], numel: int, frames: int) -> int:
    """Elements of a slab: a power of two below a page of the narrowest dtype, else a multiple of
    such a page, so that each slab begins at a page border of each tensor, or lies in one page."""
    sizes = [tensor.dtype.itemsize for tensor in tensors if type(tensor) is PagedTensor]
    if not sizes:
        return max(1, numel)
    page = pager.page_size
    step, whole = page // max(sizes), page // min(sizes)

    def cost(step: int) -> int:
        return sum(max(1, step * size // page) for size in sizes)

    while step < whole and cost(2 * step) <= frames:
        step *= 2
    if step == whole:
        step *= max(1, frames // cost(whole))
    return step


class _Column(NamedTuple):
    """A tensor that is walked: from byte ``begin`` of its run, or of dense memory, in memory order.
    ``each``: elements of the values for one of its own, which is a scale."""

    tensor: torch.Tensor
    begin: int
    write: bool
    each: int

    @classmethod
    def of(cls, tensor: torch.Tensor, write: bool, each: int = 1) -> _Column:
        if not has_no_gaps(tensor):
            raise ValueError(
                f"a tensor of shape {tuple(tensor.shape)}, stride {tensor.stride()} and offset "
                f"{tensor.storage_offset()} cannot be walked: it has to lie in memory without gaps "
                "and begin at a page border; walk the tensor that it is a view of"
            )
        begin = begin_of(tensor) if type(tensor) is PagedTensor else 0
        return cls(flat(tensor), begin, write, each)

    @property
    def is_paged(self) -> bool:
        return type(self.tensor) is PagedTensor

    def _span(self, start: int, stop: int) -> tuple[int, int]:
        return start // self.each, -(-stop // self.each)

    def pages(self, start: int, stop: int) -> Pages:
        """Those that hold these elements."""
        storage = self.tensor._storage  # type: ignore[attr-defined]
        size = storage.pager.page_size
        low, high = (self.begin + n * self.tensor.dtype.itemsize for n in self._span(start, stop))
        return pages_of(storage, range(low // size, -(-high // size)), write=self.write)

    def operand(self, start: int, stop: int, frames: Iterator[Numbers]) -> Operand:
        """These elements; ``frames``: of paged columns, those of this one come next."""
        start, stop = self._span(start, stop)
        if type(self.tensor) is not PagedTensor:
            return self.tensor[start:stop]
        begin = self.begin + start * self.tensor.dtype.itemsize
        return _in_frames(self.tensor, next(frames), begin, stop - start)


def spans(pager: Core, values: Sequence[Value], write: Sequence[bool]) -> Iterator[Slab]:
    """All elements at once where that takes a share of the arena at most, else slab by slab."""
    first = next(tensors_of(values))
    if not first.numel():
        return
    if count_pages(values) <= fair_share(pager):
        with whole(pager, values, write) as operands:
            yield Slab(0, first.numel(), operands)
    else:
        yield from slabs(pager, values, pages_per_slab(pager, values), write=write)
