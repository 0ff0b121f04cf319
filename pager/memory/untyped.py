"""What ``untyped_storage()`` of a PagedTensor gives: an address and a size, and no memory.

Libraries compare storages to see which tensors share memory (tied weights), by ``data_ptr()`` and
``nbytes()``. So each paged storage has a range of address space of its own, as long as itself, in
which nothing is mapped: no two ranges overlap, with each other or with memory of anybody's, and an
address stays the same wherever the pages go. ``images.py`` puts bytes there for a while, for those
who read through the address.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from ..devices.memory import map_memory, unmap_memory
from ..errors import PagerError


class Range:
    """``nbytes`` of address space from ``address`` on (a multiple of the system's page), reserved
    for as long as this object lives. Reading or writing there crashes unless something is put."""

    def __init__(self, nbytes: int) -> None:
        self.span = max(1, -(-nbytes // mmap.PAGESIZE)) * mmap.PAGESIZE
        self.address = map_memory(self.span)
        self.image: weakref.ref[Any] | None = None  # what is there now (``images.py``)

    def clear(self) -> None:
        """Nothing is there any more."""
        map_memory(self.span, at=self.address)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        address = getattr(self, "address", None)
        if address is not None and not is_finalizing():
            unmap_memory(address, self.span)


def _refuse(what: str) -> NoReturn:
    """``PagerError`` for whatever needs the memory of a storage."""
    raise PagerError(
        f"{what}: the storage of a PagedTensor has an address to compare, and no memory; its bytes "
        "are in pages, which may move or leave the device at any time. Use the tensor itself, "
        "tensor.to_dense() for a plain copy, or pager.state_dict() for copies of everything"
    )


def refuse_storage(given: object) -> None:
    """``PagerError`` where ``Tensor.set_()`` was given the storage of a PagedTensor."""
    if isinstance(given, PagedUntypedStorage | PagedTypedStorage):
        _refuse("Tensor.set_()")


class PagedUntypedStorage(torch.UntypedStorage):
    """See the note above. To PyTorch it is a storage on the meta device, so that nothing can read
    or write memory that is not there: whatever needs the bytes is refused."""

    _device: torch.device
    range: Range
    held: Any = None  # what is at the address, while a ``saving()`` block wants it there

    @classmethod
    def of(cls, nbytes: int, device: torch.device) -> PagedUntypedStorage:
        self: PagedUntypedStorage = torch.UntypedStorage.__new__(cls, nbytes, device="meta")  # type: ignore[call-arg]
        self._device = device
        self.range = Range(nbytes)
        return self

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Of those who make a storage of the same type, to copy this one into it."""
        _refuse(cls.__name__)

    def data_ptr(self) -> int:
        """The address, at which there is no memory but inside ``pager.saving()``."""
        return self.range.address

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._device

    @property
    def is_cuda(self) -> bool:
        return self._device.type == "cuda"

    def get_device(self) -> int:
        return self._device.index if self._device.index is not None else -1

    @property
    def filename(self) -> None:
        return None

    def is_shared(self) -> bool:
        return False

    def is_pinned(self, device: Any = "cuda") -> bool:
        return False

    def resizable(self) -> bool:
        return False

    def new(self) -> torch.UntypedStorage:
        """An empty, ordinary one."""
        return torch.UntypedStorage(0, device=self._device)

    def __repr__(self) -> str:
        return (
            f"[{type(self).__name__}(device={self._device}) of size {self.nbytes()}; its bytes are "
            "in pages]"
        )

    __str__ = __repr__


class PagedTypedStorage(torch.TypedStorage):
    """The same for ``storage()``."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        _refuse(cls.__name__)

    @classmethod
    def of(cls, untyped: torch.UntypedStorage, dtype: torch.dtype) -> PagedTypedStorage:
        self: PagedTypedStorage = object.__new__(cls)
        self._untyped_storage = untyped
        self.dtype = dtype
        return self

    def data_ptr(self) -> int:
        return self._untyped_storage.data_ptr()

    def __repr__(self) -> str:
        return f"[{type(self).__name__}(dtype={self.dtype}) over {self._untyped_storage!r}]"

    __str__ = __repr__


def _refusing(name: str) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse(name)

    method.__name__ = name
    return method


for _name in (
    "__getitem__", "__setitem__", "__iter__", "__reduce__", "__reduce_ex__", "__deepcopy__",
    "__copy__", "_byteswap", "_set_from_file", "_share_cuda_", "_share_fd_cpu_",
    "_share_filename_cpu_", "_swap_data_ptr_", "_resize_with_addr_", "_set_cdata", "_to",
    "_write_file", "byteswap", "clone", "copy_", "cpu", "cuda", "fill_", "hpu", "mps",
    "pin_memory", "resize_", "share_memory_", "to", "tolist", "type",
):  # fmt: skip
    setattr(PagedUntypedStorage, _name, _refusing(_name))
for _name in (
    "__getitem__", "_getitem", "__setitem__", "_setitem", "__iter__", "__reduce__", "__copy__",
    "__deepcopy__", "_deepcopy", "_pickle_storage_type", "_resize_", "_to", "clone", "copy_", "cpu",
    "cuda", "fill_", "hpu", "pin_memory", "resize_", "share_memory_", "_share_memory_", "to",
    "tolist", "type",
):  # fmt: skip
    setattr(PagedTypedStorage, _name, _refusing(_name))


def bytes_at(address: int, nbytes: int, keep: object) -> Any:
    """A buffer over memory that is there for as long as ``keep`` lives, which it keeps alive."""
    raw = (ctypes.c_uint8 * nbytes).from_address(address)
    raw._keep = keep  # type: ignore[attr-defined]
    return raw
