"""Buffers of modules that were built on the meta device: they have no values.

Parameters there become pages, and a checkpoint fills them. Buffers stay dense, and those that are
not persistent (rotary tables) are in no checkpoint. So before a module is paged its own way to set
them is tried: ``reset_parameters()``, or an ``_init_weights(module)`` of it or of what it is in, as
transformers' models have. Both set parameters too, so they are only asked where nothing has values
yet. What is left stays on the meta device, is named by who pages and loads, and refused when the
module is called; what a state dict has of it gets memory when it is loaded.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ..errors import PagerError

if TYPE_CHECKING:
    from ..core import Core


def fill_buffers(pager: Core, model: torch.nn.Module) -> None:
    """Set the buffers of ``model`` that have no values, where it says how; warn of those that are
    in no checkpoint either. To be called before its parameters are paged."""
    for path, module in model.named_modules():
        empty = _empty(module)
        if not empty:
            continue
        _fill(model, path, module, empty, pager.device)
        if _empty(module) and not any(
            isinstance(hook, _LeftEmpty) for hook in module._forward_pre_hooks.values()
        ):
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


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


# -- setting them ----------------------------------------------------------------------------------
def _fill(
    model: torch.nn.Module,
    path: str,
    module: torch.nn.Module,
    names: list[str],
    device: torch.device,
) -> None:
    if any(not t.is_meta for t in (*module.parameters(), *module.buffers())):
        return  # which would be lost
    meta: dict[str, Any] = {name: module._buffers[name] for name in names}
    other = [] if device.type == "cpu" else [device]
    for way in _ways(model, path, module):
        fresh = {name: torch.zeros_like(meta[name], device=device) for name in _empty(module)}
        module._buffers.update(fresh)
        before = {name: tensor._version for name, tensor in fresh.items()}
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=other), device:
                way()
        except Exception:  # the user's own code, which need not work for this
            module._buffers.update({name: meta[name] for name in fresh})
            continue
        for name, tensor in fresh.items():
            if module._buffers.get(name) is tensor and tensor._version == before[name]:
                module._buffers[name] = meta[name]
        if not _empty(module):
            return


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
