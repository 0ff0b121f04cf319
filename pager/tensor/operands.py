"""Tensors as operands of kernels over pieces: held on the device whole, or a slab at a time.

A kernel over pieces (``kernels/pieces.py``) takes pages in any frames, so nothing is gathered here.
Elements count in memory order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch

from ...kernels.blockwise import BLOCK, Blockwise
from ...kernels.pieces import Operand, Paged
from ...kernels.update import State
from ..errors import InfeasibleBudget, TierFull
from ..memory.space import Extent
from .paged_tensor import PagedTensor
from .slabs import fair_share, operand, part, slabs

if TYPE_CHECKING:
    from ..core import Core


class Coded(NamedTuple):
    """A tensor in 8 bits: ``codes`` uint8 with its geometry, ``scales`` float32 [blocks of 256]."""

    codes: torch.Tensor
    scales: torch.Tensor


Value = torch.Tensor | Coded


class NotAtOnce(Exception):  # noqa: N818 (not an error: there are other ways)
    """What was to be held does not fit on the device together. Nothing is pinned."""


class Span(NamedTuple):
    """Elements ``start … stop`` of each of some values, on the device."""

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


def pages_of(values: Iterable[Value]) -> int:
    """Pages of these runs."""
    return sum(run.count for run in runs_of(values))


def same_order(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape have their elements in the same order in memory."""
    return one.stride() == other.stride() or (one.is_contiguous() and other.is_contiguous())


def has_no_gaps(tensor: torch.Tensor) -> bool:
    """Whether it can be an operand: its elements fill a stretch of memory or pages, which begins at
    a page border or lies in one page."""
    if not tensor.is_contiguous():
        twin = torch.empty_strided(tensor.size(), tensor.stride(), device="meta")
        if not torch.ops.aten.is_non_overlapping_and_dense(twin):
            return False
    if type(tensor) is not PagedTensor:
        return True
    size = tensor._storage.pager.page_size
    begin, end = _bytes_of(tensor)
    return begin % size == 0 or begin // size == (end - 1) // size


def _bytes_of(tensor: PagedTensor) -> tuple[int, int]:
    """Of the run: where the elements begin and end."""
    begin = tensor._storage.offset + int(tensor.storage_offset()) * tensor.dtype.itemsize
    return begin, begin + max(1, tensor.numel()) * tensor.dtype.itemsize


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
    if runs:
        try:
            pager.take(runs)
        except (InfeasibleBudget, TierFull) as error:
            raise NotAtOnce from error
    try:
        yield held(pager, values, write)
    finally:
        if runs:
            pager.release(runs)


def held(pager: Core, values: Sequence[Value], write: Sequence[bool]) -> list[State]:
    """:func:`whole` for values that the caller has pinned."""
    pager.will_write(runs_of(value for value, written in zip(values, write) if written))
    return [as_operand(value) for value in values]


def as_operand(value: Value) -> State:
    """Of what is dense, or on the device and pinned."""
    if isinstance(value, Coded):
        return Blockwise(_operand(value.codes), _operand(value.scales))
    return _operand(value)


def _operand(tensor: torch.Tensor) -> Operand:
    if type(tensor) is not PagedTensor:
        return flat(tensor)
    size = tensor._storage.pager.page_size
    begin, end = _bytes_of(tensor)
    first = begin // size
    found: Operand = operand(flat(tensor), first, -(-end // size) - first)  # type: ignore[arg-type]
    return found


# -- slab by slab --------------------------------------------------------------------------------
def pages_per_slab(pager: Core, values: Sequence[Value]) -> int:
    """For :func:`in_slabs`: what fits beside others, such that slabs are a power of two of pages.

    So the scales of a slab lie in one page, or are whole pages, and of two sizes of slabs the
    smaller divides the larger.
    """
    main = [value.codes if isinstance(value, Coded) else value for value in values]
    sizes = [tensor.dtype.itemsize for tensor in main if type(tensor) is PagedTensor]
    share = fair_share(pager)
    cost = sum(size // min(sizes) for size in sizes)
    return cost << (share // cost).bit_length() - 1 if 0 < cost <= share else share


def in_slabs(
    pager: Core, values: Sequence[Value], write: Sequence[bool], pages: int
) -> Iterator[Span]:
    """Spans of all elements, in order, a few ``pages`` at a time; the next ones are read ahead.

    What is yielded holds until the next is asked for. Raises what a fault raises, with nothing
    pinned: spans before are complete then.
    """
    main = [flat(value.codes if isinstance(value, Coded) else value) for value in values]
    with closing(slabs(pager, main, pages, write=write)) as walk:  # type: ignore[type-var]
        for slab in walk:
            with ExitStack() as stack:
                operands: list[State] = []
                for value, one, written in zip(values, slab.operands, write):
                    if isinstance(value, Coded):
                        blocks = slab.start // BLOCK, -(-slab.stop // BLOCK)
                        scales = stack.enter_context(
                            _stretch(pager, value.scales, *blocks, written)
                        )
                        operands.append(Blockwise(one, scales))
                    else:
                        operands.append(one)
                yield Span(slab.start, slab.stop, operands)


@contextmanager
def _stretch(
    pager: Core, tensor: torch.Tensor, start: int, stop: int, write: bool
) -> Iterator[Operand]:
    """Elements ``start … stop`` of a contiguous tensor, in one page or from a page border on."""
    if type(tensor) is not PagedTensor:
        yield tensor[start:stop]
        return
    size, itemsize = pager.page_size, tensor.dtype.itemsize
    begin = _bytes_of(tensor)[0]
    low, high = begin + start * itemsize, begin + stop * itemsize
    first, last = low // size, -(-high // size)
    with part(pager, tensor, first, last - first, write=write) as frames:
        arena = pager.residency.arena
        if low % size == 0:
            yield Paged(arena, frames, size, tensor.dtype, stop - start)
        else:
            at = int(frames[0]) * size + low % size
            yield arena[at : at + high - low].view(tensor.dtype)


def spans(pager: Core, values: Sequence[Value], write: Sequence[bool]) -> Iterator[Span]:
    """All elements at once where that takes a share of the arena at most, else slab by slab."""
    first = next(tensors_of(values))
    if not first.numel():
        return
    if pages_of(values) <= fair_share(pager):
        with whole(pager, values, write) as operands:
            yield Span(0, first.numel(), operands)
    else:
        yield from in_slabs(pager, values, write, pages_per_slab(pager, values))
