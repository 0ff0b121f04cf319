"""The bytes of one tensor, wherever they are, a few at a time.

Pages come to the device a slab at a time. Where no page can leave it any more, because the disk
fails, there are no frames for that: then bytes are read from wherever the pages are, without moving
one. A model must still be savable then, by its own ``state_dict()`` too: so ops that copy one paged
tensor into plain memory (``clone``, ``to``, ``plain.copy_(paged)``, and with them ``to_dense`` and
pickling) are done here too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from ...kernels.pieces import stretches
from ..core import Core
from ..devices.device import Bytes
from ..disk.file import aligned_bytes
from ..errors import CorruptPage, HungDisk, PagerError
from ..memory.frame_pool import Numbers
from ..memory.space import Extent
from .names import run_name
from .operands import begin_of, flat, has_no_gaps, slabs
from .paged_tensor import PagedTensor, as_lazy
from .slabs import fair_share

aten = torch.ops.aten

BUFFER_BYTES = 16 << 20
"""Of memory beside the tensors', at most."""

_KEEPS_FORMAT = (None, torch.preserve_format)


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
    elements = _elements(tensor, row_major=row_major)
    if type(elements) is PagedTensor:
        yield from _chunks_in_pages(elements)
        return
    step = BUFFER_BYTES // elements.element_size()
    for start in range(0, elements.numel(), step):
        yield _bytes_of(elements[start : start + step])


def fill(target: Any, pieces: Iterable[memoryview]) -> None:
    """Put the bytes of ``pieces`` into ``target``, one after the other."""
    at = 0
    for piece in pieces:
        target[at : at + len(piece)] = piece
        at += len(piece)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements, in some order, lie one after another, as they are."""
    dense = aten.is_non_overlapping_and_dense(tensor)
    return bool(dense) and not tensor.is_conj() and not tensor.is_neg()


def _elements(tensor: torch.Tensor, *, row_major: bool) -> torch.Tensor:
    """[n], sharing its memory or pages where these can be walked in the order that is asked for."""
    if not is_dense(tensor) or (row_major and not tensor.is_contiguous()):
        plain = tensor.to_dense() if type(tensor) is PagedTensor else tensor
        return plain.resolve_conj().resolve_neg().contiguous().view(-1)
    return flat(tensor) if has_no_gaps(tensor) else flat(tensor).to_dense()


def _chunks_in_pages(elements: PagedTensor) -> Iterator[memoryview]:
    """By way of the device; without moving a page where none can make way for another."""
    done = 0
    try:
        if not elements._storage.pager.mover.disk_refuses:
            for chunk in _moved_chunks(elements):
                done += len(chunk)
                yield chunk
            return
    except CorruptPage:
        raise
    except PagerError:  # the disk fails, or has just begun to
        pass
    yield from unmoved_chunks(elements, done)


def _moved_chunks(elements: PagedTensor) -> Iterator[memoryview]:
    pager = elements._storage.pager
    walk = slabs(pager, [elements], pages_at_once(pager))
    with closing(walk):  # type: ignore[type-var]
        for slab in walk:
            for (piece,) in stretches(slab.operands):  # type: ignore[arg-type]
                yield _bytes_of(piece)


def pages_at_once(pager: Core) -> int:
    """Pages of a slab: few enough for the buffer, and for what others have left of the arena."""
    return max(1, min(fair_share(pager), BUFFER_BYTES // pager.page_size))


def _bytes_of(flat: torch.Tensor) -> memoryview:
    return memoryview(array_of(flat.view(torch.uint8)))


def array_of(plain: torch.Tensor) -> npt.NDArray[Any]:
    """Its values, to be read: its memory itself, if that is the CPU's. (``Tensor.numpy`` would make
    it a storage that nobody can resize any more, and it may be the user's.)"""
    return np.from_dlpack(plain.detach().cpu())


# -- without moving a page -------------------------------------------------------------------------
def unmoved_chunks(
    elements: PagedTensor,
    done: int = 0,
    *,
    copy: Callable[[Extent, Numbers, Bytes], None] | None = None,
    most_bytes: int = BUFFER_BYTES,
) -> Iterator[memoryview]:
    """The bytes of ``elements``, one-dimensional, from ``done`` on, in pieces that are valid until
    the next one is asked for. ``copy``: puts some pages of an extent into memory, by default as
    they are now.

    Raises ``PagerError``, which names the tensor, if its only copy is on a disk that cannot be
    read, ``CorruptPage`` and ``HungDisk``.
    """
    storage = elements._storage
    pager, run, size = storage.pager, storage.run, storage.pager.page_size
    pager.check_open()
    begin = begin_of(elements) + done
    end = begin_of(elements) + elements.numel() * elements.element_size()
    step = max(1, most_bytes // size)
    buffer = aligned_bytes(min(step, -(-end // size)) * size)  # or disk threads need their own
    for first in range(begin // size, -(-end // size), step):
        pages = run.pages[first : min(first + step, -(-end // size))]
        try:
            out = buffer[: len(pages) * size]
            if copy is not None:
                copy(run, pages, out)
            else:
                with pager.lock:
                    pager.residency.let_go()
                    pager.mover.copy_of(pages, out)
        except (CorruptPage, HungDisk):  # which name it themselves
            raise
        except PagerError as error:
            raise PagerError(f"{run_name(pager, run)!r} cannot be read: {error}") from error
        start, stop = max(begin, first * size), min(end, (first + len(pages)) * size)
        yield memoryview(buffer[start - first * size : stop - first * size])


def copy_unmoved(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What ``func`` gives, an op that copies a PagedTensor into plain memory and takes no frame for
    it; ``NotImplemented`` for other ops. Raises as :func:`unmoved_chunks`."""
    if func is aten.copy_.default:
        target, source, *rest = args
        if type(source) is not PagedTensor or type(target) is PagedTensor:
            return NotImplemented
        return func(target, _unmoved_copy(source), *rest, **kwargs)
    if func not in (aten.clone.default, aten._to_copy.default):
        return NotImplemented
    dense = _unmoved_copy(args[0])
    if func is aten.clone.default and kwargs.get("memory_format") in _KEEPS_FORMAT:
        return dense
    return func(dense, *args[1:], **kwargs)


def _unmoved_copy(tensor: PagedTensor) -> torch.Tensor:
    """A copy on the tensor's device, with its strides if these leave no gaps."""
    tensor._storage.pager.check_open()
    if not tensor.numel():
        return torch.empty(tensor.size(), dtype=tensor.dtype, device=tensor.device)
    # From its first element to its last one.
    count = 1 + sum((n - 1) * step for n, step in zip(tensor.size(), tensor.stride()))
    span = PagedTensor(tensor._storage, (count,), (1,), int(tensor.storage_offset()), tensor.dtype)
    elements = torch.empty(count, dtype=tensor.dtype)
    fill(elements.view(torch.uint8).numpy(), unmoved_chunks(span))
    dense = as_lazy(elements.as_strided(tensor.size(), tensor.stride()), tensor)
    if not aten.is_non_overlapping_and_dense(dense):
        dense = dense.clone()
    return dense.resolve_conj().resolve_neg().to(tensor.device)
