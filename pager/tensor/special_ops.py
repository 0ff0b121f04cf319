"""Ops that need more than dense operands: views, changes of geometry, results in pages, ops that
are many."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from ..core import PagedStorage
from ..errors import PagerError
from .dense_run import LISTS, paged_in, run_dense
from .new_pages import empty_like_geometry, enlarge
from .op_info import OpInfo
from .paged_tensor import Form, PagedTensor, as_lazy, blank, direct_view, set_geometry, take_over

aten = torch.ops.aten
_DETACH, _ALIAS = aten.detach.default, aten.alias.default
_AS_STRIDED, _T = aten.as_strided.default, aten.t.default
_shares_memory = torch._C._is_alias_of  # type: ignore[attr-defined]
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_OF_MODES = torch._C.DispatchKey.Python, torch._C.DispatchKey.PythonTLSSnapshot
_NOTING = torch._C.DispatchKey.ADInplaceOrView


# -- views -----------------------------------------------------------------------------------------
def meta_twin(tensor: PagedTensor) -> torch.Tensor:
    """A meta tensor with ``tensor``'s geometry over a storage of the same number of bytes."""
    elements = tensor._storage.nbytes // tensor.element_size()
    storage = torch.empty(elements, dtype=tensor.dtype, device="meta")
    twin = storage.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
    return as_lazy(twin, tensor)


def _like(base: PagedTensor, shape: torch.Tensor) -> PagedTensor:
    """Another PagedTensor over the pages of ``base``, with the geometry of ``shape``."""
    view = Form.of(shape).paged(base._storage)
    if base._saved is not None:
        view._saved = base._saved
    return view


def run_view(func: Any, info: OpInfo, args: Any, kwargs: dict[str, Any]) -> Any:
    """Rule 1: same storage, other geometry, worked out on the meta device."""
    base = args[0]
    if type(base) is not PagedTensor:
        return run_dense(func, info, args, kwargs)
    pager = base._storage.pager
    if pager.closed_reason is not None:
        pager.check_open()
    if func is _DETACH or func is _ALIAS:
        opening = base._opening
        if opening is not None and opening[0] == threading.get_ident():
            return opening[1].detach()
        return _alias(base)
    if func is _T and base.dim() == 2:  # of every linear's weight
        return _transposed(base)
    twin = meta_twin(base)
    out = func(twin, *args[1:], **kwargs)
    if func is _AS_STRIDED:
        check_bounds(out, base._storage)
    parts = out if type(out) in LISTS else [out]
    shared = [_shares_memory(part, twin) for part in parts]
    if not any(shared) and shared:  # a schema says "may alias"; this call copies
        return run_dense(func, info, args, kwargs)
    if not all(shared):
        raise PagerError(
            f"{func} of a PagedTensor gives views and copies at once; call .to_dense() for a plain "
            "copy first"
        )
    return [_like(base, item) for item in out] if type(out) in LISTS else _like(base, out)


def _alias(base: PagedTensor) -> PagedTensor:
    """What autograd makes of each saved parameter: the same, with the dense view at hand."""
    with torch._C.DisableTorchFunctionSubclass():
        offset = int(base.storage_offset())
        twin = PagedTensor(base._storage, base.size(), base.stride(), offset, base.dtype)
        if base.is_conj() or base.is_neg():
            as_lazy(twin, base)
        if base._saved is not None:
            twin._saved = base._saved
        return twin if base._view is None else _share_view(base, twin, torch.Tensor.detach)


def _transposed(base: PagedTensor) -> PagedTensor:
    """``base.t()``, with the dense view at hand where ``base`` has it."""
    size, stride = base.size(), base.stride()
    offset = int(base.storage_offset())
    twin = PagedTensor(base._storage, size[::-1], stride[::-1], offset, base.dtype)
    if base._saved is not None:
        twin._saved = base._saved
    make = base._storage.run.base >= 0
    return _share_view(base, as_lazy(twin, base), torch.Tensor.t, make=make)


def _share_view(
    base: PagedTensor,
    twin: PagedTensor,
    derive: Callable[[torch.Tensor], torch.Tensor],
    *,
    make: bool = False,
) -> PagedTensor:
    """``twin`` gets the dense view that ``base`` has, or that is made. Under the lock: nothing is
    pinned here, and another thread may have the pages moved."""
    with base._storage.pager.lock:
        run = base._storage.run
        if make and run.base >= 0:
            view: torch.Tensor | None = direct_view(base)
        else:
            view = base._view if base._view_generation == run.generation else None
        if view is None:
            return twin
        if torch.is_inference_mode_enabled():  # it is kept, and training will write to it
            with torch.inference_mode(False):
                twin._view = derive(view)
        else:
            twin._view = derive(view)
        twin._view_generation = run.generation
        return twin


# -- geometry --------------------------------------------------------------------------------------
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


def run_inplace_view(func: Any, info: OpInfo, args: Any, kwargs: dict[str, Any]) -> Any:
    """``t_``, ``unsqueeze_``, …: change the wrapper's own geometry."""
    tensor = args[0]
    if type(tensor) is not PagedTensor:
        return run_dense(func, info, args, kwargs)
    shape = func(meta_twin(tensor), *args[1:], **kwargs)
    if func._schema.name == "aten::as_strided_":
        check_bounds(shape, tensor._storage)
    return set_geometry(tensor, shape)


def run_resize(func: Any, info: OpInfo, args: Any, kwargs: dict[str, Any]) -> Any:
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
    shape = aten.resize_.default(meta_twin(tensor), size, **kwargs)
    nbytes = shape.untyped_storage().nbytes()
    if nbytes > tensor._storage.nbytes:
        enlarge(tensor._storage, nbytes)
    return set_geometry(tensor, shape)


# -- ops that are many --------------------------------------------------------------------------
def run_elementwise_list(func: Any, info: OpInfo, args: Any, kwargs: dict[str, Any]) -> Any:
    """``_foreach_*``, ``_fused_*``, AMP's check: element by element, so that only one element's
    pages need to be on the device at a time. The results are the same bits."""
    lengths = {len(a) for a in args if type(a) in LISTS} - {0}  # what is not wanted may be empty
    count = max(lengths, default=0)
    if count <= 1 or len(lengths) > 1:  # which PyTorch refuses
        return run_dense(func, info, args, kwargs)

    def element(value: Any, index: int) -> Any:
        if type(value) in LISTS and len(value) == count:
            return [value[index]]
        if isinstance(value, torch.Tensor) and value.dim() == 1 and value.size(0) == count:
            return value[index : index + 1]  # scalars of addcmul and addcdiv
        return value

    results: list[Any] = []
    for index in range(count):
        part = [element(a, index) for a in args]
        named = {name: element(a, index) for name, a in kwargs.items()}
        if paged_in(part, named):
            results.append(run_dense(func, info, part, named))
        else:
            results.append(func(*part, **named))
    if not func._schema.returns:
        return None
    if results and type(results[0]) in LISTS:
        first = results[0]
        if first and type(first[0]) in LISTS:  # an op that returns several lists
            return tuple([r[k][0] for r in results] for k in range(len(first)))
        return [r[0] for r in results]
    return results[0] if results else None


def run_composite(func: Any, info: OpInfo, args: Any, kwargs: dict[str, Any]) -> Any:
    """Reached whole without autograd (inference mode): PyTorch's own C++ takes it apart, so that
    views stay views and copies are copies. (Its decompositions in Python round differently.)

    It runs as if the dispatcher had not come here, with autocast and lazy conjugation, which are
    off below a tensor subclass."""
    with torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]
        if not torch._C._len_torch_dispatch_stack():  # a mode that is at work is not asked again
            for key in _OF_MODES:
                torch._C._dispatch_tls_set_dispatch_key_included(key, False)
        if info.kind == "noted_composite":  # by the one who called
            torch._C._dispatch_tls_set_dispatch_key_excluded(_NOTING, True)
        return func._op_dk(_COMPOSITE, *args, **kwargs)


# -- results in pages ------------------------------------------------------------------------------
def run_like(func: Any, info: OpInfo, args: Any, kwargs: dict[str, Any]) -> Any:
    """``zeros_like`` and its kin inside an optimizer's step give pages: states are as big as the
    parameters. Elsewhere they give dense tensors, like other ops."""
    tensor = args[0]
    if type(tensor) is not PagedTensor or not tensor._storage.pager.stepping:
        return run_dense(func, info, args, kwargs)
    if func is aten.empty_like.default:
        shape = func(meta_twin(tensor), *args[1:], **{**kwargs, "device": "meta"})
        return empty_like_geometry(tensor._storage.pager, shape, "optimizer")
    if func is not aten.clone.default:
        kwargs = {**kwargs, "device": "meta"}
    shape = func(meta_twin(tensor), *args[1:], **kwargs)
    result = blank(tensor._storage.pager, shape, "optimizer")
    if func is aten.clone.default:
        return result.copy_(tensor)
    if func is aten.full_like.default:
        return result.fill_(args[1])
    return result.fill_(1 if func is aten.ones_like.default else 0)


def run_cast(func: Any, info: OpInfo, args: Any, kwargs: dict[str, Any]) -> Any:
    """``.to(dtype)`` of a large parameter gives pages: autocast keeps such copies for as long as
    its context lasts, which would otherwise be half a model of dense memory."""
    tensor = args[0]
    pager = tensor._storage.pager
    device = kwargs.get("device")
    elsewhere = device is not None and torch.device(device).type != pager.device.type
    no_room = pager.mover.disk_refuses  # for new pages; it is still to be read, and saved
    if tensor._storage.run.kind != "parameter" or tensor._storage.run.small or elsewhere or no_room:
        return run_dense(func, info, args, kwargs)
    shape = func(meta_twin(tensor), **{**kwargs, "device": "meta", "non_blocking": False})
    return blank(pager, shape, "activation").copy_(tensor)


def run_into_out(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """A function with ``out=``: PyTorch may resize, restride or conjugate what it is given, so it
    is given plain tensors, whose shape and values the paged ones take over."""
    given = kwargs["out"]
    targets = list(given) if type(given) in LISTS or isinstance(given, tuple) else [given]
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
                take_over(target, dense)
    if result is None:
        return None
    if alone:
        return given
    return type(result)(targets) if isinstance(result, tuple) else given
