"""The bytes of one tensor, wherever they are, a few at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Protocol

import torch

from ...kernels.pieces import stretches
from ..errors import CorruptPage, PagerError
from .page_bytes import unmoved_chunks
from .paged_tensor import PagedTensor
from .slabs import fair_share, slabs

if TYPE_CHECKING:
    from ..core import Core

BUFFER_BYTES = 16 << 20
"""Of memory beside the tensors', at most."""


class Read(Protocol):
    """:func:`chunks`, or what gives the same for tensors that are elsewhere too."""

    def __call__(
        self, tensor: torch.Tensor, *, row_major: bool = False
    ) -> Iterator[memoryview]: ...


def chunks(tensor: torch.Tensor, *, row_major: bool = False) -> Iterator[memoryview]:
    """The elements of ``tensor`` as bytes, in the order in which they lie in memory where they have
    no gaps, in the order of their indices otherwise, or if ``row_major``.

    A chunk is valid until the next one is asked for. Pages come to the device a slab at a time, so
    the tensor may be larger than the arena. Only one whose order is another, or whose view starts
    amid its pages, is copied as a whole.
    """
    tensor = tensor.detach()
    if not tensor.numel():
        return
    flat = _flat(tensor, row_major=row_major)
    if type(flat) is not PagedTensor:
        yield from _dense_chunks(flat)
    else:
        yield from _chunks_in_pages(flat)


def has_no_gaps(tensor: torch.Tensor) -> bool:
    """Whether its elements, in some order, lie one after another, as they are."""
    dense = torch.ops.aten.is_non_overlapping_and_dense(tensor)
    return bool(dense) and not tensor.is_conj() and not tensor.is_neg()


def _flat(tensor: torch.Tensor, *, row_major: bool) -> torch.Tensor:
    if not has_no_gaps(tensor) or (row_major and not tensor.is_contiguous()):
        dense = tensor.to_dense() if type(tensor) is PagedTensor else tensor
        return dense.resolve_conj().resolve_neg().contiguous().view(-1)
    flat = tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    if type(flat) is PagedTensor and flat._storage.run.small is None:
        page = flat._storage.pager.page_size
        begin = int(flat.storage_offset()) * flat.element_size()
        inside = begin % page + flat.numel() * flat.element_size() <= page
        if begin % page and not inside:
            return flat.to_dense()
    return flat


def _dense_chunks(flat: torch.Tensor) -> Iterator[memoryview]:
    step = BUFFER_BYTES // flat.element_size()
    for start in range(0, flat.numel(), step):
        yield _bytes_of(flat[start : start + step])


def _chunks_in_pages(flat: PagedTensor) -> Iterator[memoryview]:
    """By way of the device; without moving a page where none can make way for another."""
    done = 0
    try:
        if not flat._storage.pager.mover.disk_refuses:
            for chunk in _moved_chunks(flat):
                done += len(chunk)
                yield chunk
            return
    except CorruptPage:
        raise
    except PagerError:  # the disk fails, or has just begun to
        pass
    start = done // flat.element_size()
    rest = PagedTensor(
        flat._storage, (flat.numel() - start,), (1,), int(flat.storage_offset()) + start, flat.dtype
    )
    yield from unmoved_chunks(rest, BUFFER_BYTES)


def _moved_chunks(flat: PagedTensor) -> Iterator[memoryview]:
    if flat._storage.run.small is None:
        yield from _paged_chunks(flat)
        return
    with flat.pin() as dense:  # less than a page
        yield _bytes_of(dense)


def _paged_chunks(flat: PagedTensor) -> Iterator[memoryview]:
    pager = flat._storage.pager
    with closing(slabs(pager, [flat], pages_at_once(pager))) as walk:  # type: ignore[type-var]
        for slab in walk:
            for (piece,) in stretches(slab.operands):
                yield _bytes_of(piece)


def pages_at_once(pager: Core) -> int:
    """Pages of a slab: few enough for the buffer, and for what others have left of the arena."""
    return max(1, min(fair_share(pager), BUFFER_BYTES // pager.page_size))


def _bytes_of(flat: torch.Tensor) -> memoryview:
    return memoryview(flat.cpu().view(torch.uint8).numpy())
