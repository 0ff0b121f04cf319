"""Ways to a tensor's memory that bypass the dispatcher: each is served, or refused by name.

``Interop`` holds the methods and properties of PagedTensor that Python can see. Other doors have
guards: ``plain.data = paged`` would take over a tensor with no memory of its own, and crash at the
next read; ``to_dlpack``, ``plain.set_(storage)`` and what TorchScript saves read any memory; and
``torch.cond`` compiles what it is given, and takes a PagedTensor for no tensor.
"""

from __future__ import annotations

import functools
import weakref
from types import FunctionType
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_leaves

from ..errors import PagerError
from ..memory.untyped import PagedTypedStorage, PagedUntypedStorage, refuse_storage

VIEW = "or use 'with tensor.pin() as dense:' for a view of the pages"

MEASURED = (
    "gradients are, in an iteration that is measured, as the first one is; .to_dense() gives a "
    "plain tensor in it, and in others the gradient itself"
)


def refuse(
    tensor: Any, what: str, remedy: str = f"call .to_dense() for a plain copy, {VIEW}"
) -> NoReturn:
    """``PagerError`` that names the tensor, the call and the remedy."""
    storage = tensor._storage
    if storage.run.kind == "gradient" and storage.pager.budget.metering:
        remedy = MEASURED
    label = storage.label
    called = f"{label!r}, a PagedTensor" if label else "a PagedTensor"
    with torch._C.DisableTorchFunctionSubclass():
        geometry = f"{[int(n) for n in tensor.size()]}, {tensor.dtype}"
    raise PagerError(
        f"{what} of {called} ({geometry}): its bytes are in pages, which may move or leave the "
        f"device at any time; {remedy}"
    )


def refuse_script(tensor: Any, what: str) -> NoReturn:
    """What TorchScript makes would read the memory of ``tensor``, and crash where it is saved."""
    refuse(tensor, what, "use a plain model that has loaded pager.state_dict(), or torch.export")


def refuse_sharding(parameter: object) -> NoReturn:
    """``parameter`` was in pages before ``fully_shard`` got it."""
    raise PagerError(
        "fully_shard was given parameters that are in pages already, and would make dense shards "
        "of them; call fully_shard(model) first, then pager.page_module(model)"
    )


class Interop:
    """Mixin of PagedTensor."""

    def numpy(self, *, force: bool = False) -> Any:
        """A read-only copy of the values (a NumPy array cannot share pages)."""
        if self.requires_grad and not force:  # type: ignore[attr-defined]
            raise RuntimeError(
                "Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() "
                "instead."
            )
        array = self.detach().to_dense().cpu().numpy(force=force)  # type: ignore[attr-defined]
        array.flags.writeable = False
        return array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        if copy is False:
            raise ValueError("a NumPy array cannot share a PagedTensor's pages; pass copy=None")
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def tolist(self) -> Any:
        return self.detach().to_dense().tolist()  # type: ignore[attr-defined]

    def data_ptr(self) -> int:
        """Where the bytes can be read: inside ``pager.saving()``, and always for what
        ``model.state_dict()`` gives. Raises ``PagerError`` elsewhere, but where a library is known
        to compare addresses only. ``saving`` says more."""
        return self._storage.pager.images.address_of(self)  # type: ignore[attr-defined,no-any-return]

    const_data_ptr = data_ptr

    def __dlpack__(self, *, copy: bool | None = None, **kwargs: Any) -> Any:
        """Of a plain copy, where the other side asks for one. Raises ``PagerError`` elsewhere."""
        if not copy:
            refuse(self, "DLPack export", f"ask for copy=True, {VIEW}")
        return self.to_dense().__dlpack__(**kwargs)  # type: ignore[attr-defined]

    # ``fully_shard`` of PyTorch 2.13 asks each parameter for this name, and takes only
    # AttributeError for a no. With others it is noticed in the first forward pass.
    _fsdp_orig_uid = property(refuse_sharding)

    def share_memory_(self) -> NoReturn:
        refuse(self, "share_memory_()")

    def is_shared(self) -> bool:
        return False

    def untyped_storage(self) -> torch.UntypedStorage:
        """To be compared with others': the same for all that share pages, with an address of its
        own and the real size. There is no memory at the address (``untyped.py``)."""
        if not self.numel() and self._storage.nbytes == 1:  # type: ignore[attr-defined]
            return torch.UntypedStorage(0, device=self.device)  # type: ignore[attr-defined]
        storage = self._storage  # type: ignore[attr-defined]
        if storage.untyped is None:
            storage.untyped = PagedUntypedStorage.of(storage.nbytes, self.device)  # type: ignore[attr-defined]
        return storage.untyped  # type: ignore[no-any-return]

    def storage(self) -> torch.TypedStorage:
        return PagedTypedStorage.of(self.untyped_storage(), self.dtype)  # type: ignore[attr-defined]

    def _typed_storage(self) -> torch.TypedStorage:
        return self.storage()

    def is_set_to(self, tensor: torch.Tensor) -> bool:
        if not isinstance(tensor, Interop):
            return False
        mine, other = (
            (id(t._storage), t.storage_offset(), t.size(), t.stride())  # type: ignore[attr-defined]
            for t in (self, tensor)
        )
        return mine == other

    def pin_memory(self, *args: Any, **kwargs: Any) -> NoReturn:
        refuse(self, "pin_memory()")

    def set_(self, source: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Of a tensor of the same shape and dtype: its values, as ``.data =`` takes them."""
        if not isinstance(source, torch.Tensor) or args or kwargs:
            refuse(self, "set_()", f"use copy_() to change the values, {VIEW}")
        self.data = source
        return self

    def __format__(self, spec: str) -> str:
        if self.dim() == 0:  # type: ignore[attr-defined]
            return format(self.item(), spec)  # type: ignore[attr-defined]
        return object.__format__(self, spec)

    @property
    def data(self) -> Any:
        """The same pages without history, with a version counter of its own."""
        alias = self.__copy__().requires_grad_(False)  # type: ignore[attr-defined]
        alias._is_param = False
        return alias

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """Take over the values of ``value`` (a copy: pages cannot be shared with plain memory).
        What shared the pages before, as what ``.data`` gave, keeps the values that it has."""
        shape = tuple(self.size()), self.dtype  # type: ignore[attr-defined]
        if (tuple(value.size()), value.dtype) != shape:
            raise PagerError(
                f".data of a PagedTensor of shape {shape[0]}, {shape[1]} cannot become shape "
                f"{tuple(value.size())}, {value.dtype}; convert a model (half(), …) before "
                "page_module, or page a new tensor with pager.page()"
            )
        if not self.is_set_to(value):  # as of ``module.to(device)`` where it is already
            self._part_from_others()  # type: ignore[attr-defined]
            self.data.copy_(value.detach())


_asked, _keys = torch._C._SetExcludeDispatchKeyGuard, torch._C.DispatchKey


def _asked_in_a_list(name: str) -> Any:
    """``torch.tensor([a, b])`` asks its elements for their values while no subclass is asked what
    an op on it does."""
    ask = getattr(torch.Tensor, name)

    @functools.wraps(ask)
    def method(self: Any) -> Any:
        with _asked(_keys.Python, False), _asked(_keys.PythonTLSSnapshot, False):
            return ask(self)

    return method


for _name in ("__bool__", "__complex__", "__float__", "__index__", "__int__", "__iter__"):
    setattr(Interop, _name, _asked_in_a_list(_name))


def serve_function(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """``__torch_function__``: composite functions that would read an operand's memory directly, and
    those that run code which has to come here again."""
    if func in _RUN_GRAPHS:
        return _RUN_GRAPHS[func](*args, **kwargs)
    if func is torch.tensor_split or func is torch.Tensor.tensor_split:
        args, kwargs = _plain_indices(args, kwargs)
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _without_overrides(func: Any) -> Any:
    """A copy of a Python function of PyTorch's that does not ask its arguments for an override."""

    def none(_: Any) -> bool:
        return False

    names = {**func.__globals__, "has_torch_function": none, "has_torch_function_unary": none}
    copy = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


# A graph runs hooks, recomputes what was checkpointed and calls functions of the user's. There
# overrides must be on, as in the forward pass: without them a linear has other nodes, for example.
_RUN_GRAPHS = {
    func: _without_overrides(func)
    for func in (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)
}


def _plain_indices(args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    def plain(value: Any) -> Any:
        return value.detach().to_dense() if isinstance(value, Interop) else value  # type: ignore[attr-defined]

    kwargs = {k: v if k in ("input", "self") else plain(v) for k, v in kwargs.items()}
    return (*args[:1], *(plain(a) for a in args[1:])), kwargs


_plain_data: Any = torch._C.TensorBase.data


_watchers: weakref.WeakSet[Any] = weakref.WeakSet()


def guard_doors() -> None:
    """Functions that ask no tensor, and would read memory that is not there, refuse by name what is
    paged. Called by every Pager; the first one puts the guards on."""
    for owner, name, look in (
        (torch, "to_dlpack", _look_at_export),
        (torch.utils.dlpack, "to_dlpack", _look_at_export),
        (torch.Tensor, "set_", _look_at_source),
        (torch.jit._recursive, "create_script_module", _look_at_module),
        (torch._higher_order_ops.utils, "_hop_compile_and_call", _look_at_operands),
    ):
        function = getattr(owner, name, None)  # the last one is not there in all versions
        if function is not None and not hasattr(function, "without_pages"):
            setattr(owner, name, _guarded(function, look))


def _guarded(function: Any, look: Any) -> Any:
    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        look(*args, **kwargs)
        return function(*args, **kwargs)

    guarded.without_pages = True  # type: ignore[attr-defined]
    return guarded


def _look_at_export(tensor: object) -> None:
    if isinstance(tensor, Interop):
        refuse(tensor, "to_dlpack()")


def _look_at_source(tensor: object, source: object = None, *_: Any, **kwargs: Any) -> None:
    refuse_storage(kwargs.get("source", source))


def _look_at_module(module: torch.nn.Module, *_: Any, **__: Any) -> None:
    for part in module.modules():
        for held in (part._parameters, part._buffers, vars(part)):
            for name, value in held.items():
                if isinstance(value, Interop):
                    whose = type(part).__name__
                    refuse_script(value, f"torch.jit of a {whose} reads {name!r}, the memory")


def _look_at_operands(_: object, args: Any, *__: Any) -> None:
    for tensor in tree_leaves([value for value in args if isinstance(value, list | tuple | dict)]):
        if isinstance(tensor, Interop):
            refuse(tensor, "torch.cond, or another operator over functions,")


def guard_data(saved: Any) -> None:
    """``plain.data = paged`` takes a dense copy of the values. Installed once, by the first Pager;
    plain tensors among themselves behave as before. ``saved`` (SavedTensors) is told whose memory
    may change through ``.data``, which counts no version."""
    _watchers.add(saved)
    if "data" in torch.Tensor.__dict__:
        return

    def get(self: torch.Tensor) -> torch.Tensor:
        if type(self) is torch.Tensor and self.layout is torch.strided:
            for watcher in _watchers:
                watcher.forget_storage(self.untyped_storage())
        return _plain_data.__get__(self)  # type: ignore[no-any-return]

    def put(self: torch.Tensor, value: Any) -> None:
        if isinstance(value, Interop):
            value = value.detach().to_dense()  # type: ignore[attr-defined]
        _plain_data.__set__(self, value)

    torch.Tensor.data = property(get, put)  # type: ignore[assignment]
