"""``page_module``: the parameters of a module become PagedTensors, one at a time."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from .dispatcher import hide_all_from_dynamo, hide_from_dynamo
from .images import mark_saved
from .new_pages import copy_in, empty_like_geometry
from .paged_tensor import PagedTensor

if TYPE_CHECKING:
    from ..core import Core


class ShapeHook:
    """Forward pre-hook that tells the pager which input shapes its model runs on, and in what.

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
            first, self._looked = not self._looked, True
            for note in pager.on_forward:
                note(module, first)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShapeHook:
        return self

    def __reduce__(self) -> Any:
        return ShapeHook, ()


hide_from_dynamo(ShapeHook.__call__)


def refuse_lazy(module: torch.nn.Module) -> None:
    """Parameters of lazy modules have no shape before the first forward pass."""
    for name, parameter in module.named_parameters():
        if torch.nn.parameter.is_lazy(parameter):
            raise TypeError(
                f"parameter {name!r} of a lazy module has no shape yet; run one forward pass (a "
                "dry run on small input will do) before page_module"
            )


def page_module(pager: Core, module: torch.nn.Module) -> None:
    """Replace every parameter of ``module`` in place; see ``Pager.page_module``."""
    for prefix, child in module.named_modules():
        for name, parameter in list(child._parameters.items()):
            if parameter is None or type(parameter) is PagedTensor:
                continue
            if is_dtensor(parameter):  # paged as it is, by ``shards.py``
                continue
            paged = known_parameter(pager, parameter)
            if paged is None:
                paged = page_parameter(pager, parameter, _join(prefix, name))
                pager.replaced[id(parameter)] = (weakref.ref(parameter), weakref.ref(paged))
            setattr(child, name, paged)
        if mark_saved not in child._state_dict_hooks.values():
            child.register_state_dict_post_hook(mark_saved)


def note_model(pager: Core, model: torch.nn.Module) -> None:
    """``model`` is paged: its checkpoints, names and input shapes are asked for."""
    if not any(known() is model for known in pager.models):
        pager.models.append(weakref.ref(model))
        model.register_forward_pre_hook(ShapeHook(pager), with_kwargs=True)


def is_dtensor(parameter: torch.Tensor) -> bool:
    """Whether it has a local shard, without loading ``torch.distributed.tensor`` to know."""
    return getattr(parameter, "_local_tensor", None) is not None


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def known_parameter(pager: Core, parameter: torch.nn.Parameter) -> PagedTensor | None:
    """What ``parameter`` became, for weights tied to it and optimizers made before. The weak
    references tell it from another parameter that has its address by now."""
    old, new = pager.replaced.get(id(parameter), (None, None))
    if old is None or new is None or old() is not parameter:
        return None
    return new()  # type: ignore[no-any-return]


def page_parameter(pager: Core, parameter: torch.nn.Parameter, label: str) -> PagedTensor:
    """What takes the place of ``parameter``, with its values, hooks and gradient."""
    # A page with nothing but frozen ones is never written, and has its copy below for good.
    apart = "" if parameter.requires_grad else "frozen"
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
