"""Plain views of a PagedTensor's pages, for the time that these are pinned."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from .paged_tensor import PagedTensor


def direct_view(tensor: PagedTensor) -> torch.Tensor:
    """The zero-copy view of a tensor that is pinned in consecutive frames."""
    run = tensor._storage.run
    if tensor._view is None or tensor._view_generation != run.generation:
        address = tensor._storage.pager.address_of(tensor._storage)
        if torch.is_inference_mode_enabled():  # it is kept, and training will write to it
            with torch.inference_mode(False):
                tensor._view = dense_view(tensor, address)
        else:
            tensor._view = dense_view(tensor, address)
        tensor._view_generation = run.generation
    return tensor._view


def dense_view(tensor: PagedTensor, address: int) -> torch.Tensor:
    """``tensor``'s geometry over memory at ``address``, in a storage of its own (rule 3)."""
    storage = torch._C._construct_storage_from_data_pointer(
        address, tensor._storage.pager.device, tensor._storage.nbytes
    )
    view = torch.empty(0, dtype=tensor.dtype, device=tensor._storage.pager.device)
    view.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
    if tensor.dtype.is_complex and tensor.is_conj():
        torch._C._set_conj(view, True)
    if tensor.is_neg():
        torch._C._set_neg(view, True)
    return view


def withdraw(tensors: Sequence[PagedTensor], views: Iterable[torch.Tensor]) -> None:
    """Take the memory from ``views`` of ``tensors``: after an error the frames of its traceback
    hold them, and a debugger may print them when the arena is gone."""
    if not tensors:
        return
    with tensors[0]._storage.pager.lock:
        for tensor in tensors:
            tensor._view = None
        if any(tensor._storage.run.pins > 1 for tensor in tensors):
            return  # other threads may be using the same views
        for view in views:
            view.set_()  # type: ignore[call-overload]


@contextmanager
def pinned_view(tensor: PagedTensor) -> Iterator[torch.Tensor]:
    """See ``PagedTensor.pin``."""
    pager, run = tensor._storage.pager, tensor._storage.run
    with pager.hold([run], write=[run]):
        try:
            if run.base >= 0:
                yield dense_view(tensor, pager.address_of(tensor._storage))
            else:
                buffer = pager.gather(run)
                yield dense_view(tensor, buffer.data_ptr() + tensor._storage.offset)
                pager.scatter(run, buffer)
        finally:
            run.writes += 1  # until now
