"""What autograd saves for backward goes into pages.

*pack* copies a saved tensor's storage into pages and remembers it by the storage that it came
from, so that q, k and v cut from one projection, or one input of three layers, are stored once.
*unpack* lends PyTorch's own nodes a plain tensor over the pages (``lending.py``). Others get a
PagedTensor: a plain one has no end of use, and its frames would be reused under an op that still
reads it.

The memory of a storage is known by a tensor that has it, to which there is a weak reference. While
that lives the storage's identity cannot be reused, so an address that was recycled for another
tensor is never mistaken for the one that was saved.

``torch.func`` inside ``iteration()``: ``grad``, ``vjp``, ``jacrev`` and ``hessian`` work without
hooks on saved tensors, and refuse to begin while any are on, before they do anything else; PyTorch
has no way to tell them that some may be left out. ``jvp`` and ``jacfwd`` give the hooks tensors
without memory. So the first Pager puts a guard on the functions that these begin with: the hooks of
pagers are taken off until the transform is done, and what is saved meanwhile stays dense. Hooks of
others are refused as before. (A guard on ``disable_saved_tensors_hooks``, which refuses, would be
in the way of ``torch.compile``: that knows this function by its identity.)

Where everything fits and the program does what it did before, no hooks are on
(``profile_run.py``): PyTorch saves by itself.

Compiled code reads memory, not tensors, and so do kernels of others, which autograd knows as
Functions: what these have saved is a dense copy again when their backward pass asks for it.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch._functorch import eager_transforms
from torch.multiprocessing.reductions import StorageWeakRef

from ..core import PagedStorage
from ..devices.dense_meter import in_backward
from .lending import InPages, Lender
from .new_pages import store_bytes
from .paged_tensor import Form, PagedTensor

if TYPE_CHECKING:
    from ..core import Core

_autograd: Any = torch._C._autograd
_BEGIN = "grad_and_value_impl", "_vjp_with_argnums", "_jvp_with_argnums"
_Pair = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]

THRESHOLD_BYTES = 32 << 10  # smaller tensors cost more in bookkeeping than they free
_FUNCTIONS = "torch/autograd/function.py"  # ends the file name of what calls a Function
_COMPILED = "_aot_autograd"  # in the name of the module that has those of compiled parts
_ENGINE = torch.autograd.graph._engine_run_backward.__code__  # runs PyTorch's own nodes
_USE_TENSORS = "torch.", __name__.partition(".")[0]  # modules whose Functions call ops of PyTorch
# Its op fills the noise that it saves after it was saved: copied then, it would be what lay there.
_FILLS_LATER = torch.nn.functional.rrelu.__code__
_SPARSE_VIEW = 4  # a view that uses less than 1/4 of its storage is stored by itself


class Origin(NamedTuple):
    """Where the bytes of a tensor's memory are stored, as they were at its ``version``. ``root``:
    whose version counter that is."""

    root: weakref.ref[torch.Tensor]
    version: int
    storage: weakref.ref[PagedStorage]
    form: Form


class SavedTensors:
    """The pack and unpack hooks of one pager, and what they share. They are on one thread at a
    time; as all such hooks they lie on a stack of that thread, and only the topmost are asked."""

    def __init__(self, pager: Core) -> None:
        self._on: _Pair | None = None
        self._below = 0  # hooks of others, when these came on
        self._pager = pager
        self.lender = Lender(pager)
        self.device_type = pager.device.type
        # A call of a block that says what becomes of what it saves (``segments.py``).
        self.segment: Any = None
        self.again: frozenset[str] = frozenset()  # the blocks that do so in this iteration
        self._origins: dict[int, Origin] = {}
        self.threshold = THRESHOLD_BYTES  # what is smaller stays dense: see `scale`
        self.kept_all = True  # nothing of this iteration went into pages
        self.dense_allowance = 0  # bytes that may stay dense because everything fits
        self.dense_bytes = 0  # that do, at most: what died since they were counted is in it
        # Storages that stay dense, by id: their bytes, and the tensors that were kept of each. As
        # in pages, one is counted once.
        self._dense: dict[int, tuple[int, list[weakref.ref[torch.Tensor]]]] = {}
        self._uncounted = 0  # packed since they were counted
        # Storages that live on anyway (buffers) and their bytes, by id.
        self.skip: dict[int, tuple[StorageWeakRef, int]] = {}

    def _makes_room(self, nbytes: int) -> bool:
        """Whether ``nbytes`` more may stay dense if they are counted again."""
        if 4 * self._uncounted < len(self._dense):  # counting for every tensor would take too long
            self._uncounted += 1
            return False
        self._count_dense()
        return self.dense_bytes + nbytes <= self.dense_allowance

    def _count_dense(self) -> None:
        """Without those that have died. (Other threads may pack meanwhile.)"""
        self._uncounted = 0
        self._dense = {k: v for k, v in self._dense.copy().items() if _any_lives(v[1])}
        self.dense_bytes = sum(nbytes for nbytes, _ in self._dense.values())

    def forget(self) -> None:
        """Drop the memory of storages that are gone. Called between iterations."""
        self._count_dense()
        self._origins = {k: o for k, o in self._origins.items() if o.root() is not None}
        self.skip = {k: v for k, v in self.skip.items() if not v[0].expired()}

    def note_buffers(self, module: torch.nn.Module) -> None:
        """Buffers stay dense: they count beside the pages, and are not copied into these."""
        for buffer in module.buffers():
            if buffer.device.type == self.device_type and type(buffer) is not PagedTensor:
                memory = buffer.untyped_storage()
                self.skip[memory._cdata] = StorageWeakRef(memory), memory.nbytes()
        self.count()

    def count(self) -> None:
        """What lives on anyway, for the budget."""
        self.forget()
        self._pager.budget.dense_baseline = sum(nbytes for _, nbytes in self.skip.values())

    def forget_storage(self, memory: torch.UntypedStorage) -> None:
        """``memory`` may change without its version being counted."""
        self._origins.pop(memory._cdata, None)

    def scale(self, size: int, largest: int) -> None:
        """The inputs from here on have ``size`` elements, and had ``largest`` where most was
        measured. What goes into pages is what did then: if a shorter batch kept dense what a longer
        one had in pages, it could take more dense memory than that."""
        self.threshold = THRESHOLD_BYTES
        if 0 < size < largest:
            self.threshold = max(1, THRESHOLD_BYTES * size // largest)

    # -- on and off ------------------------------------------------------------------------------
    @property
    def is_on(self) -> bool:
        return self._on is not None

    def put_on(self) -> None:
        """On this thread; inside a transform they stay off."""
        self.take_off()  # what was left here when they were taken off on another thread
        self._on = self.pack, unpack
        if _autograd._saved_tensors_hooks_is_enabled():
            others = _taken()
            self._below = len(others)
            _put(others)
            _push(self._on)

    def pause(self) -> bool:
        """Off, for the rest of an iteration or until :meth:`go_on`. Whether they were on, and can
        be taken off here: not in a backward pass."""
        if self._on is None or in_backward():
            return False
        self.take_off()
        return True

    def go_on(self) -> None:
        """On again, below those of others that came on later, if an iteration goes on that has
        paused them; not in the middle of a backward pass, whose threads have what was on when it
        began."""
        pager = self._pager
        here = pager.inside and not pager.inferring and get_ident() == pager.turns.home
        if self._on is None and here and not in_backward():
            later = _taken()
            earlier = later[len(later) - self._below :] if len(later) > self._below else later
            _put(earlier)
            self.put_on()
            _put(later[: len(later) - len(earlier)])

    def take_off(self) -> None:
        """From below those of others too; nothing happens where they are not on this thread."""
        self._on = None
        _put([pair for pair in _taken() if _owner(pair) is not self])

    def are_asked(self) -> bool:
        """Whether these hooks, and nobody else's, are asked on this thread."""
        return (top := _top()) is not None and _owner(top) is self

    def _put_back(self, pair: _Pair) -> None:
        if self._on is not None:  # the iteration has not ended meanwhile
            _push(pair)

    # -- hooks -----------------------------------------------------------------------------------
    def pack(self, tensor: torch.Tensor) -> Any:
        if type(tensor) is not torch.Tensor:
            if type(tensor) is not PagedTensor:
                return keep(tensor)
            with torch._C.DisableTorchFunctionSubclass():
                return keep(tensor)
        base = tensor._base
        weight = (
            base
            if type(base) is PagedTensor
            else getattr(tensor if base is None else base, "_weight", None)
        )
        if weight is not None:
            if self._pager.opened.lent_memory and _is_compiled(sys._getframe(1)):
                return keep(tensor)  # of compiled code: the weight is pinned as long as it is kept
            return _keep_weight(weight, tensor)
        nbytes = tensor.nbytes if tensor.layout is torch.strided else 0
        if (
            nbytes < self.threshold
            or tensor.device.type != self.device_type
            or (tensor.is_leaf and tensor.requires_grad)
        ):  # most by far, so without a call: `keep`
            return tensor if tensor.is_leaf else tensor.detach(), tensor._version
        memory = tensor.untyped_storage()
        key = memory._cdata
        known = self._dense.get(key)
        if known is not None and _any_lives(known[1]):
            kept = tensor.detach()
            known[1].append(weakref.ref(kept))
            return kept, tensor._version
        if key in self.skip or key in self._pager.opened.lent_memory:
            return keep(tensor)
        if tensor.is_leaf and sys._getframe(1).f_code is _FILLS_LATER:
            return keep(tensor)
        if self.segment is not None:
            packed = self.segment.pack(tensor, memory)
        else:
            whole = memory.nbytes()
            if (
                self.dense_allowance
                and whole <= _SPARSE_VIEW * nbytes
                and (self.dense_bytes + whole <= self.dense_allowance or self._makes_room(whole))
            ):
                self.dense_bytes += whole
                self._uncounted += 1
                kept = tensor.detach()  # of a leaf too: it lives as the graph does
                self._dense[key] = whole, [weakref.ref(kept)]
                return kept, tensor._version
            packed = self.known(tensor, memory) if key in self._origins else None
            if packed is None:
                self.kept_all = False
                packed = self.store(tensor, memory)
        return packed

    # -- storing ---------------------------------------------------------------------------------
    def known(self, tensor: torch.Tensor, memory: torch.UntypedStorage) -> InPages | None:
        """Where its bytes are stored already, if they are."""
        origin = self._origins.get(memory._cdata)
        if origin is None or origin.version != tensor._version:
            return None
        root = origin.root()
        if root is None or root.untyped_storage()._cdata != memory._cdata:
            return None  # it was of other memory with this identity
        # Pieces of one storage may count versions each on its own (unsafe_chunk): trust the number
        # for views of one base, and for exactly the tensor that was stored.
        form = Form.of(tensor)
        if root is not _root(tensor) and origin.form != form:
            return None
        storage = origin.storage()
        if storage is None:
            return None
        return InPages(storage, form)

    def store(self, tensor: torch.Tensor, memory: torch.UntypedStorage) -> Any:
        """In new pages, with all that shares its memory."""
        whole, nbytes = memory.nbytes(), tensor.nbytes
        if whole > _SPARSE_VIEW * nbytes:
            return self._store_range(tensor, nbytes)
        storage = store_bytes(self._pager, memory, 0, whole, "activation")
        form = Form.of(tensor)
        self.note_origin(tensor, memory, storage, form)
        return InPages(storage, form)

    def note_origin(
        self, tensor: torch.Tensor, memory: torch.UntypedStorage, storage: PagedStorage, form: Form
    ) -> None:
        """The ``memory`` of ``tensor`` is in ``storage`` too, as it is now."""
        root, version = weakref.ref(_root(tensor)), tensor._version
        self._origins[memory._cdata] = Origin(root, version, weakref.ref(storage), form)

    def _store_range(self, tensor: torch.Tensor, nbytes: int) -> Any:
        """A small view of a big storage: keep the bytes between its first and last element."""
        size = tensor.element_size()
        reach = sum((n - 1) * s for n, s in zip(tensor.size(), tensor.stride())) + 1
        if reach * size > _SPARSE_VIEW * nbytes:
            return keep(tensor)
        start = int(tensor.storage_offset()) * size
        memory = tensor.untyped_storage()
        storage = store_bytes(self._pager, memory, start, reach * size, "activation")
        return InPages(storage, Form.of(tensor)._replace(offset=0))


def _any_lives(tensors: list[weakref.ref[torch.Tensor]]) -> bool:
    """Whether one does; some that do not are dropped."""
    while tensors and tensors[-1]() is None:
        tensors.pop()
    return bool(tensors)


def _is_compiled(frame: FrameType) -> bool:
    """Whether what saves a tensor in ``frame`` is the Function of a compiled part, or about to
    apply it: from PyTorch 2.14 on ``apply`` has no frame of its own."""
    if frame.f_code.co_filename.endswith(_FUNCTIONS) and frame.f_back is not None:
        frame = frame.f_back
    return _COMPILED in frame.f_code.co_filename


def _reads_memory(asking: FrameType | None) -> bool:
    """Whether what asks in this frame is a Function that may read memory by itself: one that is
    neither PyTorch's own nor ours, or that of a compiled part. Its context is then the first
    argument of its ``backward``, which is at the bottom of the stack or was called by it."""
    while asking is not None and asking.f_code is not _ENGINE:
        code = asking.f_code
        if code.co_argcount or code.co_flags & inspect.CO_VARARGS:
            first = asking.f_locals.get(code.co_varnames[0])
            if isinstance(first, torch.autograd.function.BackwardCFunction):
                module = first._forward_cls.__module__  # type: ignore[attr-defined]
                return _COMPILED in module or not module.startswith(_USE_TENSORS)
        asking = asking.f_back
    return False


def keep(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """A saved tensor that is not copied, and its version at pack. Never the tensor itself: an
    output that holds its own graph is a cycle nobody collects."""
    return tensor if tensor.is_leaf else tensor.detach(), tensor._version


def unpack(packed: Any) -> torch.Tensor:
    """What was packed, unless it was changed since."""
    while type(packed) is not tuple:
        if type(packed) is InPages:
            asking = sys._getframe().f_back
            lent = packed.storage.pager.saved.lender.lend(packed, asking)
            if lent is not None:
                return lent
            return packed.paged().to_dense() if _reads_memory(asking) else packed.paged()
        packed = packed.give()  # of a segment that has to run again
    if len(packed) == 3:
        return _give_weight(*packed)
    tensor: torch.Tensor
    tensor, version = packed
    if type(tensor) is torch.Tensor:
        if tensor._version != version:
            raise_modified(tensor, version)
        return tensor
    with torch._C.DisableTorchFunctionSubclass():
        if tensor._version != version:
            raise_modified(tensor, version)
        if type(tensor) is PagedTensor:
            whole = InPages(tensor._storage, Form.of(tensor))
            lent = whole.storage.pager.saved.lender.lend(whole, sys._getframe().f_back)
            return tensor if lent is None else lent
    return tensor


def _keep_weight(weight: PagedTensor, tensor: torch.Tensor) -> tuple[Any, ...]:
    """An open weight (``open_weights.py``), or a view of it, without its memory: the parameter, its
    version at pack, and size, stride and offset, or ``None`` for those of the parameter itself."""
    opened = weight._open
    whole = opened.tensor if opened is not None else None
    if whole is tensor:
        return weight, tensor._version, None
    if whole is not None:
        dtype = whole.dtype
    else:  # closed while the op ran
        with torch._C.DisableTorchFunctionSubclass():
            dtype = weight.dtype
    if tensor.dtype is not dtype or tensor.is_neg():  # no view that a geometry describes
        return keep(tensor)
    return weight, tensor._version, (tensor.size(), tensor.stride(), tensor.storage_offset())


def _give_weight(weight: PagedTensor, version: int, geometry: Any) -> torch.Tensor:
    """Plain where the weight is open: it is pinned as long as anybody has the memory."""
    opened = weight._open
    tensor: torch.Tensor | None = opened.tensor if opened is not None else None
    if tensor is not None and not weight._storage.pager.sees_ops:
        if tensor._version != version:
            raise_modified(tensor, version)
        return tensor if geometry is None else tensor.as_strided(*geometry)
    with torch._C.DisableTorchFunctionSubclass():
        if weight._version != version:
            raise_modified(weight, version)
        size, stride, offset = geometry or (weight.size(), weight.stride(), weight.storage_offset())
        return PagedTensor(weight._storage, size, stride, int(offset), weight.dtype)


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


# -- torch.func ------------------------------------------------------------------------------------
def guard_transforms() -> None:
    """See the module. Called by every Pager; the first one puts the guards on."""
    for name in _BEGIN:
        transform = getattr(eager_transforms, name, None)
        if transform is not None and not hasattr(transform, "without_pagers"):
            setattr(eager_transforms, name, _guarded(transform))


def _guarded(transform: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(transform)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        with _without_pagers():
            return transform(*args, **kwargs)

    guarded.without_pagers = True  # type: ignore[attr-defined]
    guarded._torchdynamo_inline = transform  # type: ignore[attr-defined]  # what is traced instead
    return guarded


@contextmanager
def _without_pagers() -> Iterator[None]:
    taken = []
    while (top := _top()) is not None and (owner := _owner(top)) is not None:
        _autograd._pop_saved_tensors_default_hooks()
        taken.append((owner, top))
    try:
        yield
    finally:
        for owner, pair in reversed(taken):
            owner._put_back(pair)


def _top() -> _Pair | None:
    return _autograd._top_saved_tensors_default_hooks(True)  # type: ignore[no-any-return]


def _taken() -> list[_Pair]:
    """Those of this thread, the topmost first, which are off then."""
    taken = []
    while (top := _top()) is not None:
        _autograd._pop_saved_tensors_default_hooks()
        taken.append(top)
    return taken


def _put(pairs: list[_Pair]) -> None:
    """What :func:`_taken` has given."""
    for pair in reversed(pairs):
        _push(pair)


def _push(pair: _Pair) -> None:
    _autograd._push_saved_tensors_default_hooks(*pair)


def _owner(pair: _Pair) -> SavedTensors | None:
    owner = getattr(pair[0], "__self__", None)
    return owner if isinstance(owner, SavedTensors) else None
