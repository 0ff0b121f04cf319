"""What autograd saves for backward goes into pages.

*pack* copies a saved tensor's storage into pages and remembers it by the storage that it came
from, so that q, k and v cut from one projection, or one input of three layers, are stored once.
*unpack* returns a PagedTensor, never a dense view: a dense view has no end of use, and its frames
would be reused under a backward op that still reads it.

The memory of a storage is known by a weak reference to it (``StorageWeakRef``). While such a
reference is held the storage's identity cannot be reused, so an address that was recycled for
another tensor is never mistaken for the one that was saved.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import TensorWeakRef

from .paged_tensor import PagedTensor
from .space import PagedStorage

if TYPE_CHECKING:
    from .runtime import Pager

THRESHOLD_BYTES = 32 << 10  # smaller tensors cost more in bookkeeping than they free
_SPARSE_VIEW = 4  # a view that uses less than 1/4 of its storage is stored by itself


class _Kept:
    """A saved tensor that was not copied, and its version at pack. ``counted``: bytes that it
    takes of the dense allowance for as long as it lives."""

    __slots__ = ("counted", "owner", "tensor", "version")

    def __init__(
        self, tensor: torch.Tensor, owner: SavedTensors | None = None, counted: int = 0
    ) -> None:
        # Never the tensor itself: an output that holds its own graph is a cycle nobody collects.
        self.tensor = tensor if tensor.is_leaf else tensor.detach()
        self.version = tensor._version
        self.owner = owner
        self.counted = counted

    def __del__(self) -> None:
        owner = getattr(self, "owner", None)  # torch.compile makes one without __init__
        if owner is not None:
            owner.dense_bytes -= self.counted


class _Origin(NamedTuple):
    weak: StorageWeakRef
    version: int
    storage: Any  # weakref to the PagedStorage
    first_byte: int
    root: TensorWeakRef  # whose version counter it is
    geometry: tuple[Any, ...]


class SavedTensors:
    """The pack and unpack hooks of one pager, and what they share."""

    def __init__(self, pager: Pager) -> None:
        self._pager = pager
        self._origins: dict[int, _Origin] = {}
        self.dense_allowance = 0  # bytes that may stay dense because everything fits
        self.dense_bytes = 0
        # Storages that live on anyway (buffers) and their bytes, by id.
        self.skip: dict[int, tuple[StorageWeakRef, int]] = {}

    def hooks(self) -> Any:
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    def forget(self) -> None:
        """Drop the memory of storages that are gone. Called between iterations."""
        self._origins = {k: o for k, o in self._origins.items() if not o.weak.expired()}
        self.skip = {k: v for k, v in self.skip.items() if not v[0].expired()}

    def forget_storage(self, memory: torch.UntypedStorage) -> None:
        """``memory`` may change without its version being counted."""
        self._origins.pop(memory._cdata, None)

    # -- hooks -----------------------------------------------------------------------------------
    def pack(self, tensor: torch.Tensor) -> Any:
        if type(tensor) is PagedTensor:
            with torch._C.DisableTorchFunctionSubclass():
                return _Kept(tensor)
        nbytes = tensor.numel() * tensor.element_size()
        if (
            type(tensor) is not torch.Tensor
            or nbytes < THRESHOLD_BYTES
            or tensor.layout is not torch.strided
            or tensor.device.type != self._pager.device.type
            or (tensor.is_leaf and tensor.requires_grad)
        ):
            return _Kept(tensor)
        memory = tensor.untyped_storage()
        if memory._cdata in self.skip:
            return _Kept(tensor)
        if self.dense_bytes + nbytes <= self.dense_allowance:
            self.dense_bytes += nbytes
            return _Kept(tensor, self, nbytes)
        known = self._known(tensor, memory)
        if known is not None:
            return known
        return self._store(tensor, memory, nbytes)

    def unpack(self, packed: Any) -> torch.Tensor:
        if type(packed) is PagedTensor:
            return packed
        tensor: torch.Tensor = packed.tensor
        with torch._C.DisableTorchFunctionSubclass():
            version = tensor._version
        if version != packed.version:
            raise_modified(tensor, packed.version)
        return tensor

    # -- storing ---------------------------------------------------------------------------------
    def _known(self, tensor: torch.Tensor, memory: torch.UntypedStorage) -> PagedTensor | None:
        origin = self._origins.get(memory._cdata)
        if origin is None or origin.version != tensor._version:
            return None
        # Pieces of one storage may count versions each on its own (unsafe_chunk): trust the number
        # for views of one base, and for exactly the tensor that was stored.
        if origin.root() is not _root(tensor) and origin.geometry != _geometry(tensor):
            return None
        storage: PagedStorage | None = origin.storage()
        if storage is None:
            return None
        return _view_of(storage, tensor, origin.first_byte)

    def _store(self, tensor: torch.Tensor, memory: torch.UntypedStorage, nbytes: int) -> Any:
        whole = memory.nbytes()
        if whole > _SPARSE_VIEW * nbytes:
            return self._store_range(tensor, nbytes)
        source = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(memory)
        storage = self._pager.store_bytes(source, "activation")
        self._origins[memory._cdata] = _Origin(
            StorageWeakRef(memory),
            tensor._version,
            weakref.ref(storage),
            0,
            TensorWeakRef(_root(tensor)),
            _geometry(tensor),
        )
        return _view_of(storage, tensor, 0)

    def _store_range(self, tensor: torch.Tensor, nbytes: int) -> Any:
        """A small view of a big storage: keep the bytes between its first and last element."""
        size = tensor.element_size()
        reach = sum((n - 1) * s for n, s in zip(tensor.size(), tensor.stride())) + 1
        if reach * size > _SPARSE_VIEW * nbytes:
            return _Kept(tensor)
        start = int(tensor.storage_offset()) * size
        span = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        span.set_(tensor.untyped_storage(), start, (reach * size,), (1,))
        storage = self._pager.store_bytes(span, "activation")
        return _view_of(storage, tensor, int(tensor.storage_offset()) * size)


def raise_modified(tensor: torch.Tensor, expected: int) -> NoReturn:
    """PyTorch's error for a saved tensor that is not at the version at which it was saved."""
    raise RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: [{tensor.type()} {list(tensor.size())}] is at version {tensor._version}; "
        f"expected version {expected} instead. Hint: enable anomaly detection to find the "
        "operation that failed to compute its gradient, with "
        "torch.autograd.set_detect_anomaly(True)."
    )


def _root(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor._base is None else tensor._base


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.dtype


def _view_of(storage: PagedStorage, tensor: torch.Tensor, first_byte: int) -> PagedTensor:
    offset = int(tensor.storage_offset()) - first_byte // tensor.element_size()
    view = PagedTensor(storage, tensor.size(), tensor.stride(), offset, tensor.dtype)
    if tensor.is_conj():
        torch._C._set_conj(view, True)
    if tensor.is_neg():
        torch._C._set_neg(view, True)
    return view
