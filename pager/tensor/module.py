"""``page_module``: the parameters of a module become PagedTensors, one at a time.

Parameters on the meta device become pages, and a checkpoint fills them. Buffers stay dense, and
those that are not persistent (rotary tables) are in no checkpoint. So before a module that was
built there is paged its own way to set them is tried: ``reset_parameters()``, or an
``_init_weights(module)`` of it or of what it is in, as transformers' models have. Both set
parameters too, so they are only asked where nothing has values yet. What is left stays on the meta
device, is named by who pages and loads, and refused when the module is called; what a state dict
has of it gets memory when it is loaded.
"""

from __future__ import annotations

import gc
import inspect
import re
import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from ...planner.sizes import format_bytes
from ..core import Core
from ..errors import PagerError
from .dispatcher import hide_all_from_dynamo, hide_from_dynamo
from .images import mark_saved
from .new_pages import copy_in, empty_like_geometry
from .paged_tensor import PagedTensor
from .sharded import is_sharded


class CallHook:
    """Forward pre-hook that tells the pager which input shapes its model runs on, and in what;
    ``after``: forward hook that tells it when the call is over.

    Copies of the model share it; a pickled model comes back without it, with plain parameters.
    """

    def __init__(self, pager: Core | None = None) -> None:
        self._pager = weakref.ref(pager) if pager is not None else None
        self._looked = False

    def __call__(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        hide_all_from_dynamo()
        pager = self._pager() if self._pager is not None else None
        if pager is not None and pager.closed_reason is None:
            if not pager.turns.is_home():
                pager.note_guest()
            pager.profile_run.note_shapes(module, args, kwargs)
            pager.passes.enter(module)
            first, self._looked = not self._looked, True
            for note in pager.on_forward:
                note(module, first)
            pager.opened.lend(module)

    def after(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        pager = self._pager() if self._pager is not None else None
        if pager is not None and pager.closed_reason is None:
            pager.opened.called(module)
            pager.passes.leave(module)

    def __deepcopy__(self, memo: dict[int, Any]) -> CallHook:
        return self

    def __reduce__(self) -> Any:
        return CallHook, ()


hide_from_dynamo(CallHook.__call__)
hide_from_dynamo(CallHook.after)


def refuse_lazy(module: torch.nn.Module) -> None:
    """Parameters of lazy modules have no shape before the first forward pass."""
    for name, parameter in module.named_parameters():
        if torch.nn.parameter.is_lazy(parameter):
            raise TypeError(
                f"parameter {name!r} of a lazy module has no shape yet; run one forward pass (a "
                "dry run on small input will do) before page_module"
            )


def refuse_subclasses(module: torch.nn.Module) -> None:
    """Parameters of classes that change what tensors do, as bases that are quantised to 4 or 8 bits
    have (bitsandbytes' ``Params4bit``, torchao's tensors): in pages they would be plain ones, and
    their kernels would read the packed bytes as numbers, or not find them."""
    for name, parameter in module.named_parameters():
        kind: type = type(parameter)
        if kind is PagedTensor or is_sharded(parameter) or not _changes_tensors(kind):
            continue
        raise PagerError(
            f"parameter {name!r} is a {kind.__module__}.{kind.__qualname__}, a quantised tensor or "
            "another class of its own, whose ops know its memory; load the model without "
            "quantisation, in bfloat16, or leave this module out of what is paged"
        )


def _changes_tensors(kind: type) -> bool:
    """Whether ``kind`` has a way of its own for anything that plain parameters do."""
    plain = torch.nn.Parameter.__mro__
    own = {name for base in kind.__mro__ if base not in plain for name in vars(base)}
    return any(hasattr(torch.Tensor, name) for name in own - _OF_ANY_CLASS)


_OF_ANY_CLASS = frozenset(
    {"__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__annotations__",
     "__static_attributes__", "__firstlineno__"}
)  # fmt: skip


def page_module(pager: Core, module: torch.nn.Module) -> None:
    """Replace every parameter of ``module`` in place; see ``Pager.page_module``."""
    lists = lists_of(module)
    for prefix, child in module.named_modules():
        for name, parameter in list(child._parameters.items()):
            if parameter is None or type(parameter) is PagedTensor:
                continue
            if is_sharded(parameter):  # paged as it is, by ``shards.py``
                continue
            paged = known_parameter(pager, parameter)
            if paged is None:
                paged = page_parameter(pager, parameter, _join(prefix, name), lists[prefix])
                pager.replaced[id(parameter)] = (weakref.ref(parameter), weakref.ref(paged))
            _set(child, name, paged)
        if mark_saved not in child._state_dict_hooks.values():
            child.register_state_dict_post_hook(mark_saved)


def _set(module: torch.nn.Module, name: str, paged: PagedTensor) -> None:
    if "." not in name:
        setattr(module, name, paged)
        return
    tree: Any = module  # tensordict's parameters, which have a name for each leaf of a tree
    locked = tree.is_locked
    tree.unlock_()
    tree.set(tuple(name.split(".")), paged)
    if locked:
        tree.lock_()


def note_model(pager: Core, model: torch.nn.Module) -> None:
    """``model`` is paged: its checkpoints, names and input shapes are asked for."""
    if not any(known() is model for known in pager.models):
        pager.models.append(weakref.ref(model))
        hook = CallHook(pager)
        model.register_forward_pre_hook(hook, with_kwargs=True)
        model.register_forward_hook(hook.after, always_call=True)


def lists_of(model: torch.nn.Module) -> dict[str, str]:
    """By a module's prefix, what sets its small parameters apart: the list of modules that it is
    in, without numbers, which all lists like that one share. What is in a list may be used or not,
    as the experts of a mixture are (``plan/optional.py``); nothing for the list of all blocks."""
    found: dict[str, str] = {}
    for prefix, module in model.named_modules():
        found[prefix] = found.get(prefix.rpartition(".")[0], "")
        if isinstance(module, torch.nn.ModuleList) and len(module) > 1:
            name = re.sub(r"\d+", "*", prefix)
            if "*" in name:
                found[prefix] = name
    return found


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def known_parameter(pager: Core, parameter: torch.nn.Parameter) -> PagedTensor | None:
    """What ``parameter`` became, for weights tied to it and optimizers made before. The weak
    references tell it from another parameter that has its address by now."""
    old, new = pager.replaced.get(id(parameter), (None, None))
    if old is None or new is None or old() is not parameter:
        return None
    return new()  # type: ignore[no-any-return]


def warn_of_held(pager: Core) -> None:
    """Of parameters that were replaced and that the program holds all the same, before it trains:
    in a list that was made before. (A single one may be what a loop's variable has left.)"""
    if len(_held(pager)) > 1:
        gc.collect()
    held = _held(pager)
    if len(held) > 1:
        nbytes = sum({m.data_ptr(): m.nbytes() for m in map(_memory, held.values())}.values())
        warnings.warn(
            f"{len(held)} parameters that page_module has replaced, {next(iter(held))!r} among "
            "them, are still held by the program, in a list that was made before it perhaps, and "
            f"take {format_bytes(nbytes)} beside the budgets. They are not trained and get no "
            "gradients, so clip_grad_norm_ of such a list does nothing; call "
            "list(model.parameters()) after page_module(model)",
            RuntimeWarning,
            stacklevel=5,
        )


def _held(pager: Core) -> dict[str, torch.Tensor]:
    """By the names of what has replaced them."""
    pairs = ((old(), new()) for old, new in pager.replaced.values())
    return {str(new._storage.label): old for old, new in pairs if not (old is None or new is None)}


def _memory(tensor: torch.Tensor) -> torch.UntypedStorage:
    return torch.UntypedStorage(0) if tensor.is_meta else tensor.untyped_storage()


FROZEN = "frozen "  # sets apart, before what does otherwise


def page_parameter(
    pager: Core, parameter: torch.nn.Parameter, label: str, apart: str = ""
) -> PagedTensor:
    """What takes the place of ``parameter``, with its values, hooks and gradient. ``apart``: if it
    is small, what sets it apart from others."""
    # A page with nothing but frozen ones is never written, and has its copy below for good.
    apart = apart if parameter.requires_grad else FROZEN + apart
    if parameter.is_meta:
        paged = empty_like_geometry(pager, parameter, "parameter", apart=apart)
    else:
        _check_device(pager, parameter, label)
        paged = copy_in(pager, parameter.detach(), "parameter", apart=apart)
    paged._storage.label = label
    paged._is_param = True
    for key, value in parameter.__dict__.items():
        setattr(paged, key, value)
    if parameter.dtype.is_floating_point or parameter.dtype.is_complex:
        paged.requires_grad_(True)
        _take_over_hooks(pager, parameter, paged)
        paged.requires_grad_(parameter.requires_grad)
    if parameter.grad is not None:
        paged.grad = copy_in(pager, parameter.grad.detach(), "gradient")
    return paged


def _take_over_hooks(pager: Core, parameter: torch.Tensor, paged: PagedTensor) -> None:
    """The user's hooks go on working, their handles too; gradients are paged before they run."""
    if parameter._backward_hooks:
        paged._backward_hooks = parameter._backward_hooks
    theirs: Any = parameter._post_accumulate_grad_hooks  # handles refer to this very object
    if not theirs:
        paged.register_post_accumulate_grad_hook(pager.page_grad)  # type: ignore[no-untyped-call]
        return
    # Autograd reads the dict in order of insertion, whatever ``move_to_end`` made of it.
    earlier = dict(theirs)
    theirs.clear()
    paged._post_accumulate_grad_hooks = theirs
    paged.register_post_accumulate_grad_hook(pager.page_grad)  # type: ignore[no-untyped-call]
    theirs.update(earlier)


def _check_device(pager: Core, parameter: torch.Tensor, label: str) -> None:
    if parameter.device.type not in (pager.device.type, "cpu"):
        raise ValueError(
            f"parameter {label!r} is on {parameter.device} and the pager on {pager.device}; move "
            "the module there, leave it on the CPU, or build it on the meta device"
        )


# -- buffers from the meta device ------------------------------------------------------------------
def fill_buffers(pager: Core, model: torch.nn.Module) -> None:
    """Set the buffers of ``model`` that have no values, where it says how; warn of those that are
    in no checkpoint either. To be called before its parameters are paged."""
    for path, module in model.named_modules():
        if not _empty(module):
            continue
        if all(
            t.is_meta for t in (*module.parameters(), *module.buffers())
        ):  # else values are lost
            for way in _ways(model, path, module):
                _try(module, way, pager.device)
        hooks = module._forward_pre_hooks.values()
        if _empty(module) and not any(isinstance(hook, _LeftEmpty) for hook in hooks):
            hook = _LeftEmpty(pager, path)
            module.register_forward_pre_hook(hook)
            module.register_load_state_dict_pre_hook(hook.before_load)
    warn_of_empty(model, persistent=False, stacklevel=4)


def warn_of_empty(model: torch.nn.Module, *, persistent: bool = True, stacklevel: int = 3) -> None:
    """Name the buffers that have no values; only such as are in no checkpoint, or all."""
    names = [
        _join(path, name)
        for path, module in model.named_modules()
        for name in _empty(module)
        if persistent or name in module._non_persistent_buffers_set
    ]
    if names:
        what = f"{type(model).__name__} has buffers"
        warnings.warn(_words(what, names), UserWarning, stacklevel=stacklevel)


def _words(what: str, names: list[str]) -> str:
    some = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
    return (
        f"{what} without values, on the meta device: {some}. They were not in what was loaded, if "
        "anything was, and no reset_parameters() or _init_weights(module) of the model sets them. "
        f"Set them (model.{names[0]} = tensor), or build their modules outside of "
        "torch.device('meta')"
    )


def _empty(module: torch.nn.Module) -> list[str]:
    return [name for name, b in module._buffers.items() if b is not None and b.is_meta]


# -- setting them ----------------------------------------------------------------------------------
def _try(module: torch.nn.Module, way: Callable[[], Any], device: torch.device) -> None:
    """``way`` sets the buffers of ``module`` that are empty, or some of them, or none."""
    meta: dict[str, Any] = {name: module._buffers[name] for name in _empty(module)}
    if not meta:
        return
    fresh = {name: torch.zeros_like(buffer, device=device) for name, buffer in meta.items()}
    before = {name: tensor._version for name, tensor in fresh.items()}
    module._buffers.update(fresh)
    other = [] if device.type == "cpu" else [device]
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=other), device:
            way()
    except Exception:  # the user's own code, which need not work for this
        module._buffers.update(meta)
        return
    for name, tensor in fresh.items():
        if module._buffers.get(name) is tensor and tensor._version == before[name]:
            module._buffers[name] = meta[name]


def _ways(
    model: torch.nn.Module, path: str, module: torch.nn.Module
) -> Iterator[Callable[[], Any]]:
    """What may set the buffers of ``module``, its own first."""
    reset = getattr(module, "reset_parameters", None)
    if callable(reset):
        yield reset
    parts = path.split(".") if path else []
    for length in range(len(parts), -1, -1):
        owner = model.get_submodule(".".join(parts[:length]))
        init = getattr(owner, "_init_weights", None)
        if not callable(init):
            continue
        if _takes_one(init):
            yield partial(init, module)
        elif owner is module:
            yield init


def _takes_one(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind(None)
    except (TypeError, ValueError):
        return False
    return True


# -- what is left ----------------------------------------------------------------------------------
class _LeftEmpty:
    """Forward pre-hook of a module that has such buffers left. Copies of the module share it."""

    def __init__(self, pager: Core | None = None, path: str = "") -> None:
        self._pager = weakref.ref(pager) if pager is not None else None
        self._path = path

    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        names = _empty(module)
        if names:
            what = f"{type(module).__name__} is called, and has buffers"
            raise PagerError(_words(what, [_join(self._path, name) for name in names]))

    def before_load(
        self, module: torch.nn.Module, state: dict[str, Any], prefix: str, *_: Any
    ) -> None:
        """Memory for those that ``state`` has; PyTorch copies into it."""
        pager = self._pager() if self._pager is not None else None
        for name in _empty(module):
            value, buffer = state.get(prefix + name), module._buffers[name]
            if pager is None or buffer is None or not isinstance(value, torch.Tensor):
                continue
            if not value.is_meta and value.size() == buffer.size():
                module._buffers[name] = torch.zeros_like(buffer, device=pager.device)
        if pager is not None and pager.closed_reason is None:
            pager.saved.note_buffers(module)

    def __deepcopy__(self, memo: dict[int, Any]) -> _LeftEmpty:
        return self

    def __reduce__(self) -> Any:
        return _LeftEmpty, (None, self._path)
