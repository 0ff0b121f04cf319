"""Size, strides and offset of a PagedTensor: worked out on the meta device, read and changed."""

from __future__ import annotations

import torch

from ..core import PagedStorage
from .paged_tensor import PagedTensor


def meta_twin(tensor: PagedTensor) -> torch.Tensor:
    """A meta tensor with ``tensor``'s geometry over a storage of the same number of bytes."""
    elements = tensor._storage.nbytes // tensor.element_size()
    storage = torch.empty(elements, dtype=tensor.dtype, device="meta")
    twin = storage.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
    if tensor.is_conj():
        torch._C._set_conj(twin, True)
    if tensor.is_neg():
        torch._C._set_neg(twin, True)
    return twin


def like_geometry(base: PagedTensor, shape: torch.Tensor) -> PagedTensor:
    """Another PagedTensor over the pages of ``base``, with the geometry of ``shape``."""
    view = PagedTensor(
        base._storage, shape.size(), shape.stride(), int(shape.storage_offset()), shape.dtype
    )
    if shape.is_conj():
        torch._C._set_conj(view, True)
    if shape.is_neg():
        torch._C._set_neg(view, True)
    if base._saved is not None:
        view._saved = base._saved
    return view


def set_geometry(tensor: PagedTensor, shape: torch.Tensor) -> PagedTensor:
    """``tensor`` itself, with the geometry of ``shape`` over the same pages."""
    with torch._C._DisableTorchDispatch():
        torch.ops.aten.as_strided_.default(
            tensor, shape.size(), shape.stride(), shape.storage_offset()
        )
    _forget_views(tensor)
    return tensor


def take_over(tensor: PagedTensor, dense: torch.Tensor) -> None:
    """``tensor`` gets the shape and the values of plain ``dense``."""
    if tensor.size() != dense.size():
        tensor.resize_(dense.size())
    if tensor.stride() != dense.stride() and torch.ops.aten.is_non_overlapping_and_dense(dense):
        shape = torch.empty(0, dtype=dense.dtype, device="meta")
        set_geometry(
            tensor, shape.as_strided(dense.size(), dense.stride(), tensor.storage_offset())
        )
    if tensor.is_conj() != dense.is_conj():
        torch._C._set_conj(tensor, dense.is_conj())
        _forget_views(tensor)
    tensor.copy_(dense)


def _forget_views(tensor: PagedTensor) -> None:
    tensor._view = None
    tensor._shaped += 1
    tensor._storage.pager.opened.forget(tensor)


def check_bounds(shape: torch.Tensor, storage: PagedStorage) -> None:
    """``as_strided`` may not reach past the storage."""
    if shape.numel() == 0:
        return
    last = sum((n - 1) * s for n, s in zip(shape.size(), shape.stride()))
    nbytes = (int(shape.storage_offset()) + last + 1) * shape.element_size()
    if nbytes > storage.nbytes:
        raise RuntimeError(
            f"setStorage: sizes {list(shape.size())}, strides {list(shape.stride())}, storage "
            f"offset {shape.storage_offset()}, and itemsize {shape.element_size()} requiring a "
            f"storage size of {nbytes} are out of bounds for storage of size {storage.nbytes}"
        )
