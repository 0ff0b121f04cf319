"""View ops give another PagedTensor over the same pages; some ops change the geometry in place."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from ..errors import PagerError
from .dense_run import LISTS, run_dense
from .dense_views import direct_view
from .geometry import check_bounds, like_geometry, meta_twin, set_geometry
from .new_pages import enlarge
from .op_info import OpInfo
from .paged_tensor import PagedTensor

_DETACH = torch.ops.aten.detach.default
_ALIAS = torch.ops.aten.alias.default
_AS_STRIDED = torch.ops.aten.as_strided.default
_T = torch.ops.aten.t.default
_shares_memory = torch._C._is_alias_of  # type: ignore[attr-defined]


def run_view(func: Any, info: OpInfo, args: Any, kwargs: dict[str, Any]) -> Any:
    """Rule 1: same storage, other geometry, worked out on the meta device."""
    base = args[0]
    if type(base) is not PagedTensor:
        return run_dense(func, info, args, kwargs)
    base._storage.pager.check_open()
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
    if type(out) in LISTS:
        return [like_geometry(base, item) for item in out]
    return like_geometry(base, out)


def _alias(base: PagedTensor) -> PagedTensor:
    """What autograd makes of each saved parameter: the same, with the dense view at hand."""
    with torch._C.DisableTorchFunctionSubclass():
        twin = like_geometry(base, base)
        _share_view(base, twin, torch.Tensor.detach)
        return twin


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
    if base._saved is not None:
        twin._saved = base._saved
    if base._storage.run.base >= 0:
        _share_view(base, twin, torch.Tensor.t, make=True)
    return twin


def _share_view(
    base: PagedTensor,
    twin: PagedTensor,
    derive: Callable[[torch.Tensor], torch.Tensor],
    *,
    make: bool = False,
) -> None:
    """``twin`` gets the dense view that ``base`` has, or that is made. Under the lock: nothing is
    pinned here, and another thread may have the pages moved."""
    with base._storage.pager.lock:
        run = base._storage.run
        if make and run.base >= 0:
            view: torch.Tensor | None = direct_view(base)
        else:
            view = base._view if base._view_generation == run.generation else None
        if view is None:
            return
        if torch.is_inference_mode_enabled():  # it is kept, and training will write to it
            with torch.inference_mode(False):
                twin._view = derive(view)
        else:
            twin._view = derive(view)
        twin._view_generation = run.generation


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
    layout = kwargs.get("memory_format") or torch.contiguous_format
    if layout is torch.preserve_format:
        layout = torch.contiguous_format
    if tuple(size) == tuple(tensor.size()) and kwargs.get("memory_format") is None:
        return tensor
    shape = torch.empty(size, dtype=tensor.dtype, device="meta", memory_format=layout)
    nbytes = (int(tensor.storage_offset()) + shape.numel()) * tensor.element_size()
    if nbytes > tensor._storage.nbytes:
        enlarge(tensor._storage, nbytes)
    with_offset = torch.empty(0, dtype=tensor.dtype, device="meta").as_strided(
        shape.size(), shape.stride(), tensor.storage_offset()
    )
    return set_geometry(tensor, with_offset)
