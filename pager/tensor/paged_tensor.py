"""``PagedTensor``: an ordinary-looking tensor whose bytes live in pages; plain views and copies.

Four rules keep it correct (``pager/README.md`` says what happens without each):

1. No memory of the arena leaves ``__torch_dispatch__``: view ops return another PagedTensor over
   the same storage, and the address of every other result is checked.
2. ``chaos.py`` evicts everything after each op, in tests.
3. A dense view of a PagedTensor has a ``torch.UntypedStorage`` of its own.
4. Interop past the dispatcher (``data_ptr``, ``.data``, DLPack, …) are in ``interop.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch

from ..core import Core, PagedStorage
from .interop import Interop

T = TypeVar("T", bound=torch.Tensor)
_PRINT_LIMIT_BYTES = 1 << 20
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
    _is_complex: bool
    _shaped: int = 0  # how often its geometry was changed in place
    _opens_as: Any = None  # see open_weights.py: what it is when it is open,
    _open: Any = None  # and what it is now
    _opening: tuple[int, torch.Tensor] | None = None  # by which thread, over what
    _saved: Any = None  # of a state dict: has its `image`, once it was asked for (images.py)

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
        self._is_complex = dtype.is_complex
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
        return _ToDense.apply(self)  # type: ignore[no-any-return,no-untyped-call]

    def residency(self) -> dict[str, int]:
        """Bytes of the underlying pages per tier: ``{"device": …, "host": …, "disk": …}``.

        A page with a valid copy below counts in both tiers; a small tensor counts the page that
        it shares.
        """
        return self._storage.pager.residency_of(self._storage)

    @contextmanager
    def pin(self) -> Iterator[torch.Tensor]:
        """Context manager: keep the pages on the device; yields a dense view of them.

        The view is valid inside the block only; it is zero-copy where the frames are consecutive
        (always, unless pins of others leave no room), else a copy that is written back at the end.
        Work that uses it must be queued on the current stream.
        """
        pager, run = self._storage.pager, self._storage.run
        with pager.hold([run], write=[run]):
            try:
                if run.base >= 0:
                    yield dense_view(self, pager.address_of(self._storage))
                else:
                    buffer = pager.gather(run)
                    yield dense_view(self, buffer.data_ptr() + self._storage.offset)
                    pager.scatter(run, buffer)
            finally:
                run.writes += 1  # until now

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """The values while that is cheap, the geometry always."""
        shape = f"shape={tuple(self.size())}, dtype={self.dtype}"
        closed = self._storage.pager.closed_reason
        if closed is not None:
            return f"PagedTensor({shape}, {closed})"
        grad = ", requires_grad=True" if self.requires_grad else ""
        if self.numel() * self.element_size() > _PRINT_LIMIT_BYTES:
            return f"PagedTensor({shape}, residency={self.residency()}{grad})"
        return f"PagedTensor({plain_copy(self)!r}{grad})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As a plain tensor. What is tied stays tied, and a whole model need not be in memory
        (``images.py``)."""
        if self.device.type != "cpu" or not self.numel():
            return dense_twin(self).__reduce_ex__(protocol)
        twin = _as_leaf(self, self._storage.pager.images.plain_twin(self))
        twin.requires_grad_(self.requires_grad)  # plain ones with a history have it too
        return twin.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedTensor:
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy "
                "protocol at the moment; detach() this PagedTensor first"
            )
        copy = memo[id(self)] = _duplicate(self)
        return copy

    def _part_from_others(self) -> None:
        """Other tensors over the same pages get pages of their own, with the same values. This one
        keeps its pages, and with them its name and its place in plans."""
        shared = self._storage
        if sys.getrefcount(shared) <= 3:  # by this tensor, by `shared`, by the call
            return
        pager, nbytes = shared.pager, shared.nbytes
        theirs = blank_storage(pager, nbytes, "user")
        with torch.no_grad():
            old, new = (
                PagedTensor(storage, (nbytes,), (1,), 0, torch.uint8)
                for storage in (shared, theirs)
            )
            new.copy_(old)
        mine = theirs
        with pager.quiet():  # nothing of theirs is open
            mine.run, shared.run = shared.run, mine.run
            mine.offset, shared.offset = shared.offset, mine.offset
            mine.label, shared.label = shared.label, None
            self._storage = mine
            pager.changed_in_place += 1
            for storage in (mine, shared):
                pager.residency.settle(storage.run)  # what they have made of it is stale

    def __copy__(self) -> PagedTensor:
        alias = PagedTensor(
            self._storage, self.size(), self.stride(), int(self.storage_offset()), self.dtype
        )
        alias.requires_grad_(self.requires_grad)
        if getattr(self, "_is_param", False):
            alias._is_param = True
        return alias


def as_lazy(view: T, like: torch.Tensor) -> T:
    """``view``, conjugated or negated lazily where ``like`` is."""
    return _lazy(view, like.is_conj(), like.is_neg())


def _lazy(view: T, conj: bool, neg: bool) -> T:
    if conj:
        torch._C._set_conj(view, True)
    if neg:
        torch._C._set_neg(view, True)
    return view


class Form(NamedTuple):
    """All of a tensor but its memory. To be made and used without torch functions of subclasses."""

    offset: int
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    conj: bool
    neg: bool

    @staticmethod
    def of(tensor: torch.Tensor) -> Form:
        return Form(
            int(tensor.storage_offset()), tensor.size(), tensor.stride(), tensor.dtype,
            tensor.is_conj(), tensor.is_neg(),
        )  # fmt: skip

    def paged(self, storage: PagedStorage) -> PagedTensor:
        """In the pages of ``storage``."""
        tensor = PagedTensor(storage, self.size, self.stride, self.offset, self.dtype)
        return _lazy(tensor, self.conj, self.neg)

    def plain(self, storage: PagedStorage, address: int) -> torch.Tensor:
        """Over memory at ``address``, as large as ``storage``, in a storage of its own (rule 3)."""
        device = storage.pager.device
        memory = torch._C._construct_storage_from_data_pointer(address, device, storage.nbytes)
        view = torch.empty(0, dtype=self.dtype, device=device)
        set_memory(view, memory, self.offset, self.size, self.stride)
        return _lazy(view, self.conj, self.neg)


def blank(pager: Core, like: torch.Tensor, kind: str, apart: str = "") -> PagedTensor:
    """In new pages, with ``like``'s shape, dtype and (dense) strides; the caller writes all of it
    before anyone reads it. ``apart``: see ``Extent``."""
    if pager.closed_reason is not None:
        pager.check_open()
    dense = like.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(like)
    shape = like if dense else torch.empty(like.size(), dtype=like.dtype, device="meta")
    storage = blank_storage(pager, like.numel() * like.element_size(), kind, apart)
    return PagedTensor(storage, shape.size(), shape.stride(), 0, like.dtype)


def blank_storage(pager: Core, nbytes: int, kind: str, apart: str = "") -> PagedStorage:
    """The same for bytes."""
    with pager.lock:
        if pager.saved.lender.lends and pager.turns.is_home():
            pager.saved.lender.take_back()  # first, so that what has died of it makes room
        if pager.space.dead:
            pager.residency.collect()
        storage = PagedStorage(pager, nbytes, kind, apart)
    storage.run.overwritten = storage.run.small is None
    return storage


# -- plain copies ----------------------------------------------------------------------------------
class _ToDense(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: PagedTensor) -> torch.Tensor:
        return plain_copy(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def plain_copy(tensor: PagedTensor) -> torch.Tensor:
    """With the same strides where they leave no gaps, contiguous else. Without history."""
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        size, stride = tensor.size(), tensor.stride()
        if not (tensor.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(tensor)):
            stride = torch.empty(size, device="meta").stride()
        copy = torch.empty_strided(size, stride, dtype=tensor.dtype, device=tensor.device)
        return copy.copy_(tensor)


def dense_twin(tensor: PagedTensor) -> torch.Tensor:
    """An ordinary leaf tensor (an ``nn.Parameter`` for a parameter) with the same values."""
    return _as_leaf(tensor, plain_copy(tensor))


def _as_leaf(tensor: PagedTensor, dense: torch.Tensor) -> torch.Tensor:
    if getattr(tensor, "_is_param", False):
        return torch.nn.Parameter(dense, requires_grad=tensor.requires_grad)
    return dense.requires_grad_(tensor.requires_grad and tensor.is_leaf)


def _duplicate(tensor: PagedTensor) -> PagedTensor:
    """Its own pages, the same attributes."""
    pager, kind = tensor._storage.pager, tensor._storage.run.kind
    twin = blank(pager, tensor, kind)
    with torch.no_grad():
        twin.copy_(tensor.detach())
    if getattr(tensor, "_is_param", False):
        twin._is_param = True
    if tensor.requires_grad:
        twin.requires_grad_(True)
        if kind == "parameter":
            twin.register_post_accumulate_grad_hook(pager.page_grad)  # type: ignore[no-untyped-call]
    if tensor.grad is not None:
        grad = tensor.grad
        twin.grad = _duplicate(grad) if type(grad) is PagedTensor else grad.clone()
    return twin


# -- plain views, for the time that the pages are held ---------------------------------------------
set_memory: Any = torch._C.TensorBase.set_  # past the guard of ``interop.py``, for plain tensors


def direct_view(tensor: PagedTensor) -> torch.Tensor:
    """The zero-copy view of a tensor that is pinned in consecutive frames."""
    run = tensor._storage.run
    if tensor._view is None or tensor._view_generation != run.generation:
        storage = tensor._storage
        pager = storage.pager
        address = pager.backend.address + run.base * pager.page_size + storage.offset
        if tensor._view is not None and tensor._view.untyped_storage().data_ptr() == address:
            tensor._view_generation = run.generation  # back where it was
            return tensor._view
        if torch.is_inference_mode_enabled():  # it is kept, and training will write to it
            with torch.inference_mode(False):
                tensor._view = dense_view(tensor, address)
        else:
            tensor._view = dense_view(tensor, address)
        tensor._view_generation = run.generation
    return tensor._view


def dense_view(tensor: PagedTensor, address: int) -> torch.Tensor:
    """``tensor``'s form over memory at ``address``, in a storage of its own (rule 3)."""
    with torch._C.DisableTorchFunctionSubclass():  # or each of these calls is a trip through Python
        return Form.of(tensor).plain(tensor._storage, address)


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


# -- geometry that changes in place ---------------------------------------------------------------
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
    tensor._storage.pager.changed_in_place += 1
    tensor._storage.pager.opened.forget(tensor)
