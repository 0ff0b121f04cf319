"""``PagedTensor``: an ordinary-looking tensor whose bytes live in pages.

Four rules keep it correct (``pager/README.md`` says what happens without each):

1. No memory of the arena leaves ``__torch_dispatch__``: view ops return another PagedTensor over
   the same storage, and the address of every other result is checked.
2. ``chaos.py`` evicts everything after each op, in tests.
3. A dense view of a PagedTensor has a ``torch.UntypedStorage`` of its own.
4. Doors past the dispatcher (``data_ptr``, ``.data``, DLPack, …) are in ``doors.py``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from .doors import Doors, serve_function
from .errors import PagerError
from .op_info import BRANCHES_ON_SUBCLASS, OpInfo, describe
from .space import PagedStorage, PageRun

if TYPE_CHECKING:
    from .runtime import Pager

_STORAGE_BYTES = 1 << 50  # of the wrapper; it has no memory, but geometry is checked against it
_INFO: dict[Any, OpInfo] = {}
_LISTS = (list, tuple)


class PagedTensor(Doors, torch.Tensor):
    """A tensor in pages. Made by ``pager.page(tensor)``, ``pager.page_module`` and by views.

    Any PyTorch op takes it. Ops read a zero-copy view where the pages are in consecutive frames
    and a gathered copy where not; in-place results land in the pages. Results of ops are plain
    dense tensors, results of view ops are PagedTensors that share the pages.
    """

    _storage: PagedStorage
    _view: torch.Tensor | None
    _view_generation: int

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

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("out") is not None and _paged_in((), {"out": kwargs["out"]}):
            return _into_out(cls, func, args, kwargs)
        if func in BRANCHES_ON_SUBCLASS and not _needs_grad(args, kwargs):
            with torch._C.DisableTorchFunctionSubclass():
                return run_dense(func, _PLAIN, args, kwargs)
        return serve_function(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        info = _INFO.get(func)
        if info is None:
            info = _INFO[func] = describe(func)
        kind = info.kind
        if kind == "plain":
            if not kwargs and not info.writes_named:
                out = _run_quickly(func, args)
                if out is not _NOT_QUICK:
                    return out
            return run_dense(func, info, args, kwargs or {})
        return _SPECIAL[kind](func, info, args, kwargs or {})

    # -- public ----------------------------------------------------------------------------------
    @property
    def pager(self) -> Pager:
        """The pager that owns the pages."""
        return self._storage.pager

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

    def pin(self) -> Any:
        """Context manager: keep the pages on the device; yields a dense view of them.

        The view is valid inside the block only; it is zero-copy where the frames are consecutive
        (always, unless pins of others leave no room), else a copy that is written back at the end.
        Work that uses it must be queued on the current stream.
        """
        return self._storage.pager.pinned(self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return describe_tensor(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dense_twin(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedTensor:
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy "
                "protocol at the moment; detach() this PagedTensor first"
            )
        copy = memo[id(self)] = self._storage.pager.duplicate(self)
        return copy

    def __copy__(self) -> PagedTensor:
        alias = PagedTensor(
            self._storage, self.size(), self.stride(), int(self.storage_offset()), self.dtype
        )
        alias.requires_grad_(self.requires_grad)
        if getattr(self, "_is_param", False):
            alias._is_param = True
        return alias


class _ToDense(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: PagedTensor) -> torch.Tensor:
        dense: torch.Tensor = run_dense(_COPY_OUT, _PLAIN, (tensor.detach(),), {})
        return dense

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def _copy_out(dense: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides where they are dense (as ``clone`` does), contiguous else."""
    return dense.clone()


_COPY_OUT = _copy_out
_PLAIN = OpInfo("plain", (), ())


def _needs_grad(args: Any, kwargs: dict[str, Any]) -> bool:
    values = (*args, *kwargs.values())
    return torch.is_grad_enabled() and any(
        isinstance(value, torch.Tensor) and value.requires_grad for value in values
    )


# -- dense execution -----------------------------------------------------------------------------
class _Operands:
    """The paged operands of one op, pinned while it runs, seen as dense tensors."""

    __slots__ = ("buffers", "pager", "runs", "twins", "views")

    def __init__(self, pager: Pager) -> None:
        self.pager = pager
        self.runs: list[PageRun] = []
        self.twins: dict[int, PagedTensor] = {}  # id(dense view) -> its PagedTensor
        self.views: list[torch.Tensor] = []
        self.buffers: dict[int, torch.Tensor] = {}  # run id -> gathered bytes

    def dense(self, tensor: PagedTensor) -> torch.Tensor:
        run = tensor._storage.run
        if run.base >= 0:
            view = direct_view(tensor)
        else:
            buffer = self.buffers.get(run.id)
            if buffer is None:
                buffer = self.buffers[run.id] = self.pager.gather(run)
            view = dense_view(tensor, buffer.data_ptr() + tensor._storage.offset)
        self.twins[id(view)] = tensor
        self.views.append(view)
        return view

    def scatter_back(self, written: list[PageRun]) -> None:
        for run in written:
            buffer = self.buffers.get(run.id)
            if buffer is not None:
                self.pager.scatter(run, buffer)


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


def withdraw(tensors: Iterable[PagedTensor], views: Iterable[torch.Tensor]) -> None:
    """Take the memory from ``views`` of ``tensors``: after an error the frames of its traceback
    hold them, and a debugger may print them when the arena is gone."""
    for tensor in tensors:
        tensor._view = None
    for view in views:
        view.set_()  # type: ignore[call-overload]


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


def _paged_in(args: Any, kwargs: dict[str, Any]) -> list[PagedTensor]:
    found = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if type(value) is PagedTensor:
            found.append(value)
        elif type(value) in _LISTS:
            found.extend(item for item in value if type(item) is PagedTensor)
    return found


def _written_by(info: OpInfo, args: Any, kwargs: dict[str, Any]) -> list[PagedTensor]:
    values = [args[position] for position in info.writes if position < len(args)]
    values += [kwargs[name] for name in info.writes_named if name in kwargs]
    return _paged_in(values, {})


def run_dense(func: Any, info: OpInfo, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run ``func`` on dense views of its paged operands; results never alias the arena."""
    paged = _paged_in(args, kwargs)
    pagers = {id(t._storage.pager): t._storage.pager for t in paged}
    if len(pagers) > 1:  # operands of another pager become plain copies; written ones must not
        return _run_across(func, info, args, kwargs, list(pagers.values()))
    pager = paged[0]._storage.pager
    operands = _Operands(pager)
    runs = operands.runs
    for tensor in paged:
        run = tensor._storage.run
        if run not in runs:
            runs.append(run)
    writes = _written_by(info, args, kwargs) if info.writes_named else ()
    pager.pin(runs)
    try:
        written = []
        for tensor in writes:
            run = tensor._storage.run
            if run not in written:
                written.append(run)
                pager.will_write(run)
        dense = operands.dense
        new_args = [
            dense(a)
            if type(a) is PagedTensor
            else [dense(x) if type(x) is PagedTensor else x for x in a]
            if type(a) in _LISTS
            else a
            for a in args
        ]
        new_kwargs = {}
        for name, a in kwargs.items():
            if type(a) is PagedTensor:
                a = dense(a)
            elif type(a) in _LISTS:
                a = [dense(x) if type(x) is PagedTensor else x for x in a]
            new_kwargs[name] = a
        try:
            out = _call(func, paged, new_args, new_kwargs)
        except RuntimeError as error:
            if not writes or "not resizable" not in str(error):
                raise
            return _run_resizing(func, args, kwargs, list(writes))
        if operands.buffers:
            operands.scatter_back(written)
        for tensor in writes:
            _follow(tensor, operands)
        return _restore(out, operands)
    except BaseException:
        withdraw(paged, operands.views)
        raise
    finally:
        pager.unpin(runs)


_NOT_QUICK = object()


def _run_quickly(func: Any, args: Any) -> Any:
    """``run_dense`` for the commonest case: an op that only reads tensors of one pager, all of them
    on the device with their dense views at hand. ``_NOT_QUICK``, and nothing done, otherwise."""
    paged: list[PagedTensor] = []
    runs: list[PageRun] = []
    plain = []
    pager = None
    for value in args:
        kind = type(value)
        if kind is PagedTensor:
            storage = value._storage
            run = storage.run
            if pager is None:
                pager = storage.pager
            view = value._view
            if (
                view is None
                or run.base < 0
                or value._view_generation != run.generation
                or storage.pager is not pager
                or value.dtype.is_complex
            ):
                return _NOT_QUICK
            if run not in runs:
                runs.append(run)
            paged.append(value)
            plain.append(view)
        elif kind in _LISTS and any(type(item) is PagedTensor for item in value):
            return _NOT_QUICK
        else:
            plain.append(value)
    if pager is None:
        return _NOT_QUICK
    pager.pin(runs)
    try:
        for tensor in paged:
            if tensor._view_generation != tensor._storage.run.generation:
                return _NOT_QUICK  # it moved just before it was pinned
        out = func(*plain)
        strided = type(out) is torch.Tensor and out.layout is torch.strided
        if strided and not 0 <= out.data_ptr() - pager.backend.address < pager.reach_bytes:
            return out
        operands = _Operands(pager)
        operands.twins = {id(t._view): t for t in paged}
        return _restore(out, operands)
    except BaseException:
        withdraw(
            paged, [view for view in plain if type(view) is torch.Tensor and pager.holds(view)]
        )
        raise
    finally:
        pager.unpin(runs)


def _call(func: Any, paged: list[PagedTensor], args: Any, kwargs: dict[str, Any]) -> Any:
    """``func`` on dense operands, with lazy conjugation at work where there are complex numbers
    (the dispatcher switches it off below a tensor subclass)."""
    if not any(tensor.dtype.is_complex for tensor in paged):
        return func(*args, **kwargs)
    keys = torch._C.DispatchKey
    guard = torch._C._SetExcludeDispatchKeyGuard
    with guard(keys.Conjugate, False), guard(keys.Negative, False):
        return func(*args, **kwargs)


def _follow(tensor: PagedTensor, operands: _Operands) -> None:
    """A written operand whose dense view the op has given another shape, or conjugated."""
    view = next((v for v in operands.views if operands.twins.get(id(v)) is tensor), None)
    if view is None:
        return
    if view.size() != tensor.size() or view.stride() != tensor.stride():
        _set_geometry(tensor, view)
    if view.is_conj() != tensor.is_conj():
        torch._C._set_conj(tensor, view.is_conj())


def _run_resizing(func: Any, args: Any, kwargs: dict[str, Any], writes: list[PagedTensor]) -> Any:
    """The op enlarges what it writes: run it on plain copies that can grow, and take them over."""
    plain = {id(t): t.detach().to_dense() for t in writes}

    def swap(value: Any) -> Any:
        if type(value) in _LISTS:
            return [swap(item) for item in value]
        return plain.get(id(value), value)

    new_args, new_kwargs = [swap(a) for a in args], {k: swap(v) for k, v in kwargs.items()}
    if _paged_in(new_args, new_kwargs):
        out = run_dense(func, _PLAIN, new_args, new_kwargs)
    else:
        out = func(*new_args, **new_kwargs)
    for tensor in writes:
        _take_over(tensor, plain[id(tensor)])
    back = {id(dense): tensor for tensor in writes if (dense := plain[id(tensor)]) is not None}
    return back.get(id(out), out)


def _take_over(tensor: PagedTensor, dense: torch.Tensor) -> None:
    """``tensor`` gets the shape and the values of plain ``dense``."""
    if tensor.size() != dense.size():
        tensor.resize_(dense.size())
    if tensor.stride() != dense.stride() and torch.ops.aten.is_non_overlapping_and_dense(dense):
        shape = torch.empty(0, dtype=dense.dtype, device="meta")
        _set_geometry(
            tensor, shape.as_strided(dense.size(), dense.stride(), tensor.storage_offset())
        )
    if tensor.is_conj() != dense.is_conj():
        torch._C._set_conj(tensor, dense.is_conj())
        tensor._view = None
    tensor.copy_(dense)


def _into_out(cls: type, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """A function with ``out=``: PyTorch may resize, restride or conjugate what it is given, so it
    is given plain tensors, whose shape and values the paged ones take over."""
    given = kwargs["out"]
    targets = list(given) if type(given) in _LISTS or isinstance(given, tuple) else [given]
    plain = [
        torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=t.device).copy_(t.detach())
        if type(t) is PagedTensor
        else t
        for t in targets
    ]
    alone = type(given) is PagedTensor
    result = func(*args, **{**kwargs, "out": plain[0] if alone else tuple(plain)})
    with torch.no_grad():
        for target, dense in zip(targets, plain):
            if type(target) is PagedTensor:
                _take_over(target, dense)
    if result is None:
        return None
    if alone:
        return given
    return type(result)(targets) if isinstance(result, tuple) else given


def _restore(out: Any, operands: _Operands) -> Any:
    """Dense views among the results become their PagedTensors again; aliases are copied."""
    if isinstance(out, torch.Tensor):
        twin = operands.twins.get(id(out))
        if twin is not None:
            return twin
        return out.clone() if operands.pager.holds(out) else out
    if type(out) in _LISTS:
        return type(out)(_restore(item, operands) for item in out)
    if isinstance(out, tuple):  # torch.return_types
        return type(out)([_restore(item, operands) for item in out])
    return out


def _run_across(
    func: Any, info: OpInfo, args: Any, kwargs: dict[str, Any], pagers: list[Pager]
) -> Any:
    """Operands of several pagers: those only read become plain copies, one pager's stay."""
    writes = _written_by(info, args, kwargs)
    keep = writes[0]._storage.pager if writes else pagers[0]
    if any(t._storage.pager is not keep for t in writes):
        raise PagerError(
            f"{func} writes to PagedTensors of two pagers at once; page both with the same Pager"
        )

    def foreign(value: Any) -> Any:
        if type(value) is PagedTensor and value._storage.pager is not keep:
            return value.detach().to_dense()
        if type(value) in _LISTS:
            return [foreign(item) for item in value]
        return value

    return run_dense(
        func, info, [foreign(a) for a in args], {k: foreign(v) for k, v in kwargs.items()}
    )


# -- ops that need more than dense operands ------------------------------------------------------
def _view(func: Any, info: OpInfo, args: Any, kwargs: dict[str, Any]) -> Any:
    """Rule 1: same storage, other geometry, worked out on the meta device."""
    base = args[0]
    if type(base) is not PagedTensor:
        return run_dense(func, info, args, kwargs)
    base._storage.pager.check_open()
    if func is _DETACH or func is _ALIAS:
        return _like_geometry(base, base)
    if func is _T and base.dim() == 2:  # of every linear's weight
        return _transposed(base)
    out = func(meta_twin(base), *args[1:], **kwargs)
    if func is _AS_STRIDED:
        _check_bounds(out, base._storage)
    if type(out) in _LISTS:
        return [_like_geometry(base, item) for item in out]
    return _like_geometry(base, out)


_DETACH = torch.ops.aten.detach.default
_ALIAS = torch.ops.aten.alias.default
_AS_STRIDED = torch.ops.aten.as_strided.default
_T = torch.ops.aten.t.default


def _transposed(base: PagedTensor) -> PagedTensor:
    """``base.t()``, with the dense view at hand where ``base`` has it."""
    rows, columns = base.size()
    along, across = base.stride()
    twin = PagedTensor(
        base._storage, (columns, rows), (across, along), int(base.storage_offset()), base.dtype
    )
    if base.is_conj():
        torch._C._set_conj(twin, True)
    if base.is_neg():
        torch._C._set_neg(twin, True)
    if base._storage.run.base >= 0:
        view = direct_view(base)
        if torch.is_inference_mode_enabled():  # it is kept, and training will write to it
            with torch.inference_mode(False):
                twin._view = view.t()
        else:
            twin._view = view.t()
        twin._view_generation = base._view_generation
    return twin


def _check_bounds(shape: torch.Tensor, storage: PagedStorage) -> None:
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


def _like_geometry(base: PagedTensor, shape: torch.Tensor) -> PagedTensor:
    view = PagedTensor(
        base._storage, shape.size(), shape.stride(), int(shape.storage_offset()), shape.dtype
    )
    if shape.is_conj():
        torch._C._set_conj(view, True)
    if shape.is_neg():
        torch._C._set_neg(view, True)
    return view


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


def _inplace_view(func: Any, info: OpInfo, args: Any, kwargs: dict[str, Any]) -> Any:
    """``t_``, ``unsqueeze_``, …: change the wrapper's own geometry."""
    tensor = args[0]
    if type(tensor) is not PagedTensor:
        return run_dense(func, info, args, kwargs)
    shape = func(meta_twin(tensor), *args[1:], **kwargs)
    if func._schema.name == "aten::as_strided_":
        _check_bounds(shape, tensor._storage)
    return _set_geometry(tensor, shape)


def _set_geometry(tensor: PagedTensor, shape: torch.Tensor) -> PagedTensor:
    with torch._C._DisableTorchDispatch():
        torch.ops.aten.as_strided_.default(
            tensor, shape.size(), shape.stride(), shape.storage_offset()
        )
    tensor._view = None
    return tensor


def _resize(func: Any, info: OpInfo, args: Any, kwargs: dict[str, Any]) -> Any:
    """``resize_``: as PyTorch's, the storage grows where it must and never shrinks."""
    tensor = args[0]
    if type(tensor) is not PagedTensor:  # a plain tensor takes a paged one's shape
        return run_dense(func, info, args, kwargs)
    name = func._schema.name.removeprefix("aten::")
    if name == "set_":
        raise PagerError(
            "set_() on a PagedTensor: it cannot take over other memory; use copy_() for the values"
        )
    size = args[1].size() if name == "resize_as_" else args[1]
    layout = kwargs.get("memory_format") or torch.contiguous_format
    if layout is torch.preserve_format:
        layout = torch.contiguous_format
    if tuple(size) == tuple(tensor.size()) and kwargs.get("memory_format") is None:
        return tensor
    shape = torch.empty(size, dtype=tensor.dtype, device="meta", memory_format=layout)
    nbytes = (int(tensor.storage_offset()) + shape.numel()) * tensor.element_size()
    if nbytes > tensor._storage.nbytes:
        tensor._storage.pager.enlarge(tensor._storage, nbytes)
    with_offset = torch.empty(0, dtype=tensor.dtype, device="meta").as_strided(
        shape.size(), shape.stride(), tensor.storage_offset()
    )
    return _set_geometry(tensor, with_offset)


def _elementwise_list(func: Any, info: OpInfo, args: Any, kwargs: dict[str, Any]) -> Any:
    """``_foreach_*``, ``_fused_*``, AMP's check: element by element, so that only one element's
    pages need to be on the device at a time. The results are the same bits."""
    count = max((len(a) for a in args if type(a) in _LISTS), default=0)
    if count <= 1:
        return run_dense(func, info, args, kwargs)

    def element(value: Any, index: int) -> Any:
        if type(value) in _LISTS and len(value) == count:
            return [value[index]]
        return value

    results = []
    for index in range(count):
        part = [element(a, index) for a in args]
        named = {name: element(a, index) for name, a in kwargs.items()}
        if _paged_in(part, named):
            results.append(run_dense(func, info, part, named))
        else:
            results.append(func(*part, **named))
    if results and type(results[0]) in _LISTS:
        first = results[0]
        if first and type(first[0]) in _LISTS:  # an op that returns several lists
            return tuple([r[k][0] for r in results] for k in range(len(first)))
        return [r[0] for r in results]
    return results[0] if results else None


def _composite(func: Any, info: OpInfo, args: Any, kwargs: dict[str, Any]) -> Any:
    """Reached without autograd (inference mode): decompose, so that views stay views."""
    out = func.decompose(*args, **kwargs)
    return run_dense(func, info, args, kwargs) if out is NotImplemented else out


def _like(func: Any, info: OpInfo, args: Any, kwargs: dict[str, Any]) -> Any:
    """``zeros_like`` and its kin inside an optimizer's step give pages: states are as big as the
    parameters. Elsewhere they give dense tensors, like other ops."""
    tensor = args[0]
    if type(tensor) is not PagedTensor or not tensor._storage.pager.stepping:
        return run_dense(func, info, args, kwargs)
    shape = (
        func(meta_twin(tensor), *args[1:], **{**kwargs, "device": "meta"})
        if (func is not torch.ops.aten.clone.default)
        else func(meta_twin(tensor), *args[1:], **kwargs)
    )
    result = tensor._storage.pager.empty_like_geometry(shape, "optimizer")
    if func is torch.ops.aten.clone.default:
        result.copy_(tensor)
    elif func is torch.ops.aten.full_like.default:
        result.fill_(args[1])
    elif func is not torch.ops.aten.empty_like.default:
        result.fill_(1 if func is torch.ops.aten.ones_like.default else 0)
    return result


def _cast(func: Any, info: OpInfo, args: Any, kwargs: dict[str, Any]) -> Any:
    """``.to(dtype)`` of a large parameter gives pages: autocast keeps such copies for as long as
    its context lasts, which would otherwise be half a model of dense memory."""
    tensor = args[0]
    pager = tensor._storage.pager
    device = kwargs.get("device")
    elsewhere = device is not None and torch.device(device).type != pager.device.type
    if tensor._storage.run.kind != "parameter" or tensor._storage.run.small or elsewhere:
        return run_dense(func, info, args, kwargs)
    shape = func(meta_twin(tensor), **{**kwargs, "device": "meta", "non_blocking": False})
    result = pager.empty_like_geometry(shape, "activation")
    result.copy_(tensor)
    return result


_SPECIAL = {
    "view": _view,
    "inplace_view": _inplace_view,
    "resize": _resize,
    "elementwise_list": _elementwise_list,
    "composite": _composite,
    "like": _like,
    "cast": _cast,
}


def _hide_from_dynamo(function: Any) -> None:
    """``torch.compile`` must not trace the dispatcher, nor anything that it calls."""
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    strategy = frames._FrameExecStrategy(skip, skip)
    frames.set_code_exec_strategy(function.__code__, strategy)


_hide_from_dynamo(PagedTensor.__torch_dispatch__)


# -- plain copies and text -----------------------------------------------------------------------
def dense_twin(tensor: PagedTensor) -> torch.Tensor:
    """An ordinary leaf tensor (an ``nn.Parameter`` for a parameter) with the same values."""
    dense: torch.Tensor = run_dense(_COPY_OUT, _PLAIN, (tensor.detach(),), {})
    if getattr(tensor, "_is_param", False):
        return torch.nn.Parameter(dense, requires_grad=tensor.requires_grad)
    dense.requires_grad_(tensor.requires_grad and tensor.is_leaf)
    return dense


_PRINT_LIMIT_BYTES = 1 << 20


def describe_tensor(tensor: PagedTensor) -> str:
    """``repr``: the values while that is cheap, the geometry always."""
    pager = tensor._storage.pager
    shape = f"shape={tuple(tensor.size())}, dtype={tensor.dtype}"
    if pager.closed_reason is not None:
        return f"PagedTensor({shape}, {pager.closed_reason})"
    grad = ", requires_grad=True" if tensor.requires_grad else ""
    if tensor.numel() * tensor.element_size() > _PRINT_LIMIT_BYTES:
        return f"PagedTensor({shape}, residency={tensor.residency()}{grad})"
    with torch.no_grad():
        return f"PagedTensor({dense_twin(tensor).detach()!r}{grad})"
