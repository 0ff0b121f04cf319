"""``PagedTensor``: an ordinary-looking tensor whose bytes live in pages.

Four rules keep it correct (``pager/README.md`` says what happens without each):

1. No memory of the arena leaves ``__torch_dispatch__``: view ops return another PagedTensor over
   the same storage, and the address of every other result is checked.
2. ``chaos.py`` evicts everything after each op, in tests.
3. A dense view of a PagedTensor has a ``torch.UntypedStorage`` of its own.
4. Interop past the dispatcher (``data_ptr``, ``.data``, DLPack, …) are in ``interop.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..core import PagedStorage
from .interop import Interop

if TYPE_CHECKING:
    from .images import Saved
    from .open_weights import OpenWeight

_STORAGE_BYTES = 1 << 50  # of the wrapper; it has no memory, but geometry is checked against it


class PagedTensor(Interop, torch.Tensor):
    """A tensor in pages. Made by ``pager.page(tensor)``, ``pager.page_module`` and by views.

    Any PyTorch op takes it. Ops read a zero-copy view where the pages are in consecutive frames
    and a gathered copy where not; in-place results land in the pages. Results of ops are plain
    dense tensors, results of view ops are PagedTensors that share the pages.

    What runs ops is in modules that need this class. ``dispatcher.py`` is above them all: it gives
    the class ``__torch_function__`` and ``__torch_dispatch__``.
    """

    _storage: PagedStorage
    _view: torch.Tensor | None
    _view_generation: int
    _shaped: int = 0  # how often its geometry was changed in place
    _open: OpenWeight | None = None  # see open_weights.py
    _opening: tuple[int, torch.Tensor] | None = None  # by which thread, over what
    _saved: Saved | None = None  # of a state dict, see images.py

    @staticmethod
    def __new__(
        cls,
        storage: PagedStorage,
        size: Any,
        stride: Any,
        offset: int,
        dtype: torch.dtype,
        requires_grad: bool = False,
    ) -> PagedTensor:
        if torch.is_inference_mode_enabled():  # views of it could not be views of normal tensors
            with torch.inference_mode(False):
                return cls.__new__(cls, storage, size, stride, offset, dtype, requires_grad)
        self: PagedTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            size,
            strides=stride,
            storage_offset=offset,
            dtype=dtype,
            device=storage.pager.device,
            requires_grad=requires_grad,
            storage_size=_STORAGE_BYTES,
        )
        # Reading the wrapper's own (absent) memory must raise, not crash.
        torch._C._set_throw_on_mutable_data_ptr(self)
        self._storage = storage
        self._view = None
        self._view_generation = -1
        return self

    __hash__ = object.__hash__  # by identity, as torch.Tensor's, which is a function in Python

    # -- public ----------------------------------------------------------------------------------
    @property
    def pager(self) -> Any:
        """The ``Pager`` that owns the pages."""
        return self._storage.pager.face

    def to_dense(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """A plain tensor with the same values, size and strides, outside the arena. Differentiable
        (its gradient flows back here)."""
        from .plain_copies import to_dense

        return to_dense(self)

    def residency(self) -> dict[str, int]:
        """Bytes of the underlying pages per tier: ``{"device": …, "host": …, "disk": …}``.

        A page with a valid copy below counts in both tiers; a small tensor counts the page that
        it shares.
        """
        return self._storage.pager.residency_of(self._storage)

    def pin(self) -> Any:
        """Context manager: keep the pages on the device; yields a dense view of them.

        The view is valid inside the block only; it is zero-copy where the frames are consecutive
        (always, unless pins of others leave no room), else a copy that is written back at the end.
        Work that uses it must be queued on the current stream.
        """
        from .dense_views import pinned_view

        return pinned_view(self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        from .plain_copies import describe_tensor

        return describe_tensor(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        from .plain_copies import pickled_twin

        return pickled_twin(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedTensor:
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy "
                "protocol at the moment; detach() this PagedTensor first"
            )
        from .new_pages import duplicate

        copy = memo[id(self)] = duplicate(self)
        return copy

    def __copy__(self) -> PagedTensor:
        alias = PagedTensor(
            self._storage, self.size(), self.stride(), int(self.storage_offset()), self.dtype
        )
        alias.requires_grad_(self.requires_grad)
        if getattr(self, "_is_param", False):
            alias._is_param = True
        return alias
