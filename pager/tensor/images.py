"""The bytes of paged storages at their own addresses, for those who read through pointers.

safetensors, and with it transformers' ``save_pretrained``, first asks every tensor for its
``data_ptr()`` and then reads all of them at once; ``torch.save`` takes storages the same way. A
model that does not fit cannot be there then. So what is at an address is an *image*: a copy made a
slab at a time, in a file without a name that is mapped there, as ``state_dict()`` copies are. It
takes no memory that the kernel could not have back at once. Only the first few are memory.

::

    nobody reads    nothing is mapped at the address of a storage
    data_ptr()      the image is made, or made anew if the pages were written since
    held by         a ``pager.saving()`` block, a tensor of a ``state_dict()``, a pickled tensor
    held by nobody  nothing is mapped again

An image may die in any thread at any moment, while another thread makes a new one in the same
place. So whoever drops the last reference only says so, and waits for no lock. Its range is cleared
under the lock of all images, by whoever has that or gets it at once, unless a new image is there.

The address is that of ``untyped_storage().data_ptr()``, so tensors compare as plain ones do.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from types import SimpleNamespace

import torch

from ..core import PagedStorage
from ..devices.memory import make_read_only, map_bytes, map_memory
from ..disk.file import open_scratch_files, transfer
from ..memory.untyped import PagedUntypedStorage, Range, bytes_at
from .interop import VIEW, refuse
from .paged_tensor import PagedTensor, as_lazy
from .tensor_bytes import BUFFER_BYTES, chunks, fill

IN_MEMORY_BYTES = BUFFER_BYTES
"""Of all images of a pager together; those beyond are in files."""

_COMPARE = ("peft.tuners.tuners_utils",)
"""Modules that ask for addresses to see which tensors are the same, and read nothing there: peft's
does as it merges adapters into a model whose embeddings are tied."""


class Image:
    """A copy of a storage's bytes in its address range, until this object is gone."""

    def __init__(self, images: Images, where: Range) -> None:
        self._images = images
        self._range = where
        self._writes = -1  # of the run, when the copy was made
        self._plain: weakref.ref[torch.UntypedStorage] | None = None
        where.image = weakref.ref(self)
        weakref.finalize(self, images.let_go, where).atexit = False

    def refresh(self, storage: PagedStorage) -> None:
        """Make it what the pages hold now. Raises as reading the tensor does."""
        writes = storage.run.writes
        if writes == self._writes:
            return
        self._writes = -1
        self._images.clear(self._range)
        flat = PagedTensor(storage, (storage.nbytes,), (1,), 0, torch.uint8)
        if not self._images.has_room(self._range.span) and self._fill_file(flat):
            self._writes = writes
            return
        self._images.in_memory[self._range.address] = self._range.span
        try:
            fill(map_bytes(self._range.span, self._range.address), chunks(flat))
            make_read_only(self._range.span, self._range.address)
        except BaseException:
            self._images.clear(self._range)
            raise
        self._writes = writes

    def plain(self, storage: PagedStorage) -> torch.UntypedStorage:
        """An ordinary storage over the bytes, to be read; they stay there as long as it lives."""
        known = self._plain() if self._plain is not None else None
        if known is None or known.data_ptr() != self._range.address:  # moved, to be shared
            raw = bytes_at(self._range.address, storage.nbytes, self)
            known = torch.frombuffer(raw, dtype=torch.uint8).untyped_storage()
            self._plain = weakref.ref(known)
        return known

    def _fill_file(self, flat: PagedTensor) -> bool:
        """``False`` where no disk has room, or all of them fail."""
        disk = flat._storage.pager.disk
        folder = disk.directory if disk is not None else None
        for descriptor in open_scratch_files(folder, self._range.span):
            try:
                with closing(chunks(flat)) as pieces:  # type: ignore[type-var]
                    if _write(descriptor, pieces):
                        map_memory(self._range.span, at=self._range.address, file=descriptor)
                        return True
            finally:
                os.close(descriptor)
        return False


def _write(descriptor: int, pieces: Iterable[memoryview]) -> bool:
    offset = 0
    for piece in pieces:
        try:
            transfer(os.pwritev, descriptor, [piece], offset)
        except OSError:
            return False
        offset += len(piece)
    return True


class Images:
    """Of one pager. ``in_memory``: bytes of those that are in no file, by their addresses."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._blocks = 0
        self._held: list[weakref.ref[PagedUntypedStorage]] = []  # their images, by the blocks
        self._gone: deque[Range] = deque()  # whose images have died
        self.in_memory: dict[int, int] = {}

    def has_room(self, nbytes: int) -> bool:
        """Whether ``nbytes`` more may be memory."""
        return sum(list(self.in_memory.values())) + nbytes <= IN_MEMORY_BYTES

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """No other thread makes or clears an image inside."""
        try:
            with self._lock:
                yield
        finally:
            self._clear_gone()

    def let_go(self, where: Range) -> None:
        """The image in ``where`` is gone. Any thread, with any lock held."""
        self._gone.append(where)
        self._clear_gone()

    def _clear_gone(self) -> None:
        while self._gone and self._lock.acquire(blocking=False):
            try:
                with suppress(IndexError):
                    where = self._gone.popleft()
                    if where.image is not None and where.image() is None:
                        self.clear(where)
            finally:
                self._lock.release()

    def clear(self, where: Range) -> None:
        """Nothing is there any more. Under the lock."""
        self.in_memory.pop(where.address, None)
        where.clear()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """See ``Pager.saving``."""
        with self._alone():
            self._blocks += 1
        try:
            yield
        finally:
            with self._alone():
                self._blocks -= 1
                if not self._blocks:
                    held, self._held = self._held, []
                    for reference in held:
                        untyped = reference()
                        if untyped is not None:
                            untyped.held = None

    def address_of(self, tensor: PagedTensor) -> int:
        """See ``PagedTensor.data_ptr``."""
        if not tensor.numel():
            return 0
        tensor._storage.pager.check_open()
        saved = tensor._saved
        untyped: PagedUntypedStorage = tensor.untyped_storage()  # type: ignore[assignment]
        if saved is None and not self._blocks:
            if sys._getframe(2).f_globals.get("__name__") not in _COMPARE:  # who asks `data_ptr`
                remedy = "read it inside 'with pager.saving():', as libraries that save do"
                refuse(tensor, "data_ptr()", f"{remedy}, {VIEW}")
        elif tensor.device.type == "cpu":
            with self._alone():
                image = self._image(tensor._storage, untyped)
                if saved is not None:
                    saved.image = image
                elif untyped.held is None:
                    untyped.held = image
                    self._held.append(weakref.ref(untyped))
        return untyped.data_ptr() + int(tensor.storage_offset()) * tensor.element_size()

    def plain_twin(self, tensor: PagedTensor) -> torch.Tensor:
        """A plain tensor over the image, to be read; two tensors that share pages share it."""
        tensor._storage.pager.check_open()
        with self._alone():
            untyped: PagedUntypedStorage = tensor.untyped_storage()  # type: ignore[assignment]
            memory = self._image(tensor._storage, untyped).plain(tensor._storage)
        twin = torch.empty(0, dtype=tensor.dtype)
        twin.set_(memory, int(tensor.storage_offset()), tensor.size(), tensor.stride())
        return as_lazy(twin, tensor)

    def _image(self, storage: PagedStorage, untyped: PagedUntypedStorage) -> Image:
        known = untyped.range.image() if untyped.range.image is not None else None
        image = Image(self, untyped.range) if known is None else known
        image.refresh(storage)
        return image


def mark_saved(module: torch.nn.Module, state: dict[str, object], prefix: str, _: object) -> None:
    """State dict hook: the tensors of a state dict can be read through ``data_ptr()``, as those who
    save it do."""
    for name, parameter in module._parameters.items():
        value = state.get(prefix + name)
        if value is None or value is parameter:
            continue
        value = getattr(value, "_local_tensor", value)
        if type(value) is PagedTensor and value is not getattr(parameter, "_local_tensor", None):
            value._saved = SimpleNamespace(image=None)  # shared with its views
