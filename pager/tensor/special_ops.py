"""Ops whose results are pages, and ops that are many: they need more than dense operands."""

from __future__ import annotations

from typing import Any

import torch

from .dense_run import LISTS, paged_in, run_dense
from .geometry import meta_twin, take_over
from .new_pages import empty_like_geometry
from .op_info import OpInfo
from .paged_tensor import PagedTensor

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_OF_MODES = torch._C.DispatchKey.Python, torch._C.DispatchKey.PythonTLSSnapshot
_NOTING = torch._C.DispatchKey.ADInplaceOrView


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


def run_like(func: Any, info: OpInfo, args: Any, kwargs: dict[str, Any]) -> Any:
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
    result = empty_like_geometry(
        tensor._storage.pager,
        shape,
        "optimizer",
        overwritten=func is not torch.ops.aten.empty_like.default,
    )
    if func is torch.ops.aten.clone.default:
        result.copy_(tensor)
    elif func is torch.ops.aten.full_like.default:
        result.fill_(args[1])
    elif func is not torch.ops.aten.empty_like.default:
        result.fill_(1 if func is torch.ops.aten.ones_like.default else 0)
    return result


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
    result = empty_like_geometry(pager, shape, "activation", overwritten=True)
    result.copy_(tensor)
    return result


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
