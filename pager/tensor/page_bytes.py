"""The bytes of a paged tensor from wherever its pages are, without moving one.

For when no page can leave the device any more, because the disk fails: reading in the usual way
takes frames, and these would have to be written out first. A model must still be savable then, by
its own ``state_dict()`` too: so ops that copy one paged tensor into plain memory (``clone``,
``to``, ``plain.copy_(paged)``, and with them ``to_dense`` and pickling) are done here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from ..errors import CorruptPage, HungDisk, PagerError
from .names import run_name
from .paged_tensor import PagedTensor

aten = torch.ops.aten

_PIECE_BYTES = 16 << 20
_KEEPS_FORMAT = (None, torch.preserve_format)


def unmoved_chunks(flat: PagedTensor, most_bytes: int) -> Iterator[memoryview]:
    """The elements of ``flat``, one-dimensional and without gaps, as bytes, in pieces of about
    ``most_bytes`` that are valid until the next one is asked for.

    Raises ``PagerError``, which names the tensor, if its only copy is on a disk that cannot be
    read, ``CorruptPage`` and ``HungDisk``.
    """
    storage = flat._storage
    pager, run, size = storage.pager, storage.run, storage.pager.page_size
    pager.check_open()
    begin = storage.offset + int(flat.storage_offset()) * flat.element_size()
    end = begin + flat.numel() * flat.element_size()
    step = max(1, most_bytes // size)
    buffer = np.empty(min(step, -(-end // size)) * size, np.uint8)
    for first in range(begin // size, -(-end // size), step):
        count = min(step, -(-end // size) - first)
        pages = np.arange(run.first + first, run.first + first + count, dtype=np.int32)
        try:
            with pager.lock:
                pager.residency.let_go()
                pager.mover.copy_of(pages, buffer[: count * size])
        except (CorruptPage, HungDisk):  # which name it themselves
            raise
        except PagerError as error:
            raise PagerError(f"{run_name(pager, run)!r} cannot be read: {error}") from error
        start, stop = max(begin, first * size), min(end, (first + count) * size)
        yield memoryview(buffer[start - first * size : stop - first * size])


def copy_unmoved(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What ``func`` gives, an op that copies a PagedTensor into plain memory and takes no frame for
    it; ``NotImplemented`` for other ops. Raises as :func:`unmoved_chunks`."""
    if func is aten.copy_.default:
        target, source, *rest = args
        if type(source) is not PagedTensor or type(target) is PagedTensor:
            return NotImplemented
        return func(target, _plain(source), *rest, **kwargs)
    if func not in (aten.clone.default, aten._to_copy.default):
        return NotImplemented
    dense = _plain(args[0])
    if func is aten.clone.default and kwargs.get("memory_format") in _KEEPS_FORMAT:
        return dense
    return func(dense, *args[1:], **kwargs)


def _plain(tensor: PagedTensor) -> torch.Tensor:
    """A copy on the tensor's device, with its strides if these leave no gaps."""
    tensor._storage.pager.check_open()
    if not tensor.numel():
        return torch.empty(tensor.size(), dtype=tensor.dtype, device=tensor.device)
    # From its first element to its last one.
    count = 1 + sum((n - 1) * step for n, step in zip(tensor.size(), tensor.stride()))
    flat = PagedTensor(tensor._storage, (count,), (1,), int(tensor.storage_offset()), tensor.dtype)
    elements = torch.empty(count, dtype=tensor.dtype)
    target, at = elements.view(torch.uint8), 0
    for chunk in unmoved_chunks(flat, _PIECE_BYTES):
        target[at : at + len(chunk)] = torch.frombuffer(chunk, dtype=torch.uint8)
        at += len(chunk)
    dense = elements.as_strided(tensor.size(), tensor.stride())
    if not aten.is_non_overlapping_and_dense(dense):
        dense = dense.clone()
    if tensor.is_conj():
        dense = dense.conj_physical()
    if tensor.is_neg():
        dense = dense.neg()
    return dense.to(tensor.device)
