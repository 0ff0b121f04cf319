"""How PyTorch's calls reach a PagedTensor, and which function runs which kind of op.

It is above all that runs ops in this room, and gives the class its two hooks when it is imported:
the modules below need the class, and the hooks need the modules. Rooms above say here which
functions and ops they run. ``api.py`` imports them all, and nobody can make a PagedTensor without a
Pager.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from .activations import SavedTensors, unpack
from .dense_run import NOT_QUICK, PLAIN, paged_in, run_dense, run_quickly
from .interop import refuse_script, serve_function
from .op_info import BRANCHES_ON_SUBCLASS, OpInfo, describe
from .open_weights import NATIVE, TAKE_OPEN, run_opened
from .paged_tensor import PagedTensor
from .special_ops import (
    run_cast,
    run_composite,
    run_elementwise_list,
    run_inplace_view,
    run_into_out,
    run_like,
    run_resize,
    run_view,
)

_INFO: dict[Any, OpInfo] = {}
_FUNCTIONS: dict[Any, tuple[Callable[..., Any], Callable[[], Any]]] = {}
_OPS: dict[Any, Callable[..., Any]] = {}
_NAMESPACES: dict[str, str] = {}  # of ops → their kind
_NOT_TRACED = (  # what PyTorch says where a graph must be whole (torch.cond, strict export)
    "a PagedTensor, or a module with parameters in pages: its bytes may move at any time, and "
    "torch.compile cannot trace that. Call it outside of torch.cond, while_loop and fullgraph; "
    "give them tensor.to_dense(); export with strict=False"
)
_ATTRIBUTE = type(vars(torch._C.TensorBase)["requires_grad"].__get__)  # of what gets or sets one
_is_tracing = torch._C._is_tracing
_functorch_level = torch._C._functorch.peek_interpreter_stack
_modes = torch._C._len_torch_dispatch_stack
_get_mode: Any = torch._C._get_dispatch_mode
_FAKE, _PROXY = torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY
_SPECIAL: dict[str, Callable[[Any, OpInfo, Any, dict[str, Any]], Any]] = {
    "view": run_view,
    "inplace_view": run_inplace_view,
    "resize": run_resize,
    "elementwise_list": run_elementwise_list,
    "composite": run_composite,
    "noted_composite": run_composite,
    "like": run_like,
    "cast": run_cast,
}


def _torch_function(
    cls: type, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
) -> Any:
    """Composite functions that must not be taken apart; all others reach ``_torch_dispatch``."""
    if type(func) is _ATTRIBUTE:  # most calls by far: .grad, .requires_grad, .is_leaf
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args)
    try:
        if _is_tracing():
            for tensor in paged_in(args, kwargs or {}):
                refuse_script(tensor, "torch.jit.trace (or torch.onnx.export with dynamo=False)")
        if NATIVE and func in TAKE_OPEN:
            result = run_opened(func, args, kwargs)
            if result is not NotImplemented:
                return result
        served = _FUNCTIONS.get(func)
        if served is not None and not (kwargs and "out" in kwargs):
            run, guard = served
            with guard():
                result = run(*args, **kwargs) if kwargs else run(*args)
            if result is not NotImplemented:
                return result
        kwargs = kwargs or {}
        if kwargs.get("out") is not None and paged_in((), {"out": kwargs["out"]}):
            return run_into_out(func, args, kwargs)
        if func in BRANCHES_ON_SUBCLASS and not _is_differentiated(args, kwargs):
            with torch._C.DisableTorchFunctionSubclass():
                return run_dense(func, PLAIN, args, kwargs)
        return serve_function(func, args, kwargs)
    except torch.OutOfMemoryError as error:
        refusal = _refusal(args, kwargs, error)
        if refusal is None:
            raise
        raise refusal from error


def _torch_dispatch(
    cls: type, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
) -> Any:
    """Every op on a PagedTensor, below autograd."""
    if _modes() and (_get_mode(_PROXY) is not None or _get_mode(_FAKE) is not None):
        return _without_values(func, args, kwargs or {})
    run = _OPS.get(func)
    if run is not None:
        out = run(*args, **(kwargs or {}))
        if out is not NotImplemented:
            return out
    info = _INFO.get(func)
    if info is None:
        kind = _NAMESPACES.get(func.namespace)
        info = _INFO[func] = describe(func) if kind is None else OpInfo(kind, (), ())
    kind = info.kind
    if kind == "plain":
        if not info.writes_named:
            out = run_quickly(func, args, kwargs or {})
            if out is not NOT_QUICK:
                return out
        return run_dense(func, info, args, kwargs or {})
    return _SPECIAL[kind](func, info, args, kwargs or {})


def _without_values(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An op that is traced into a graph of ops, or that gives no values: modes leave both to those
    whose tensor it is. A graph holds the PagedTensor, as it would a plain parameter; where nothing
    has values, pages have none either."""
    proxies = _get_mode(_PROXY)
    if proxies is not None:
        from torch.fx import Proxy
        from torch.fx.experimental.proxy_tensor import has_proxy_slot, track_tensor

        tracer = proxies.tracer
        for tensor in paged_in(args, kwargs):
            if not has_proxy_slot(tensor, tracer):
                known = Proxy(tracer.create_arg(tensor), tracer)
                track_tensor(tensor, known, constant=None, tracer=tracer)
    else:
        args, kwargs = tree_map_only(PagedTensor, _get_mode(_FAKE).from_tensor, (args, kwargs))
    return func(*args, **kwargs)


def serve_call(func: Any, run: Callable[..., Any], guard: Callable[[], Any] = nullcontext) -> None:
    """``run`` is what runs ``func``, a function of ``torch.nn.functional``, inside ``guard()``.
    ``NotImplemented``, and nothing done, where PyTorch's own way has to be taken."""
    _FUNCTIONS[func] = run, guard


def serve_op(func: Any, run: Callable[..., Any]) -> None:
    """The same for an op below autograd."""
    _OPS[func] = run


def serve_kind(
    kind: str, run: Callable[..., Any], *, ops: Iterable[Any] = (), namespaces: Iterable[str] = ()
) -> None:
    """``run`` runs these ops, and those of these namespaces."""
    _SPECIAL[kind] = run
    _INFO.update((func, OpInfo(kind, (), ())) for func in ops)
    _NAMESPACES.update((name, kind) for name in namespaces)


def _refusal(args: Any, kwargs: Any, error: torch.OutOfMemoryError) -> Exception | None:
    paged = paged_in(args, kwargs or {})
    return paged[0]._storage.pager.refusal_of(error) if paged else None


def _is_differentiated(args: Any, kwargs: dict[str, Any]) -> bool:
    """In either direction, or its operands are those of a function transform."""
    if forward_ad._current_level >= 0 or _functorch_level() is not None:
        return True
    values = (*args, *kwargs.values())
    return torch.is_grad_enabled() and any(
        isinstance(value, torch.Tensor) and value.requires_grad for value in values
    )


def hide_from_dynamo(function: Any) -> None:
    """``torch.compile`` traces neither this nor anything that it calls. For places where PyTorch or
    the user comes in. As ``torch.compiler.disable``, but no wrapper that each call would pay."""
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = _NOT_TRACED
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    strategy = frames._FrameExecStrategy(skip, skip)
    frames.set_code_exec_strategy(function.__code__, strategy)


class OpWatcher(TorchDispatchMode):
    """A mode that looks at ops as they come, and changes none of them. Compiled code stays
    compiled: the same bits as without it."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # its wrapper would cost more than the rest; see hide_from_dynamo

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


def hide_all_from_dynamo() -> None:
    """No code of ours is traced any more, wherever PyTorch calls it (hooks, backward passes). To be
    called where a program comes in: its list is there once PyTorch has loaded ``torch.compile``, as
    the first optimizer does."""
    rules = sys.modules.get("torch._dynamo.trace_rules")
    if rules is not None and not hasattr(rules, "without_tensorpager"):
        rules.without_tensorpager = True  # type: ignore[attr-defined]
        rules.add(__name__.partition(".")[0])


PagedTensor.__torch_function__ = classmethod(_torch_function)  # type: ignore[method-assign, assignment]
PagedTensor.__torch_dispatch__ = classmethod(_torch_dispatch)  # type: ignore[assignment]
for _entry in (_torch_function, _torch_dispatch, SavedTensors.pack, unpack):
    hide_from_dynamo(_entry)
