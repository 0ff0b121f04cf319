"""Any ``torch.optim.Optimizer`` on paged parameters, one parameter at a time.

Each parameter is updated by itself, so that at most one with its gradient and states must be on the
device (``dense_step.py`` says in which ways); states go into pages as they are made. Optimizers
update each parameter by itself, so the result is bit for bit that of one ``step`` over all of them
with ``foreach=False``. Those that kernels on pages know (``fused.py``) are updated by these where
that is better: then not even one parameter has to be on the device as a whole.

The optimizer stays the object that it is, of its own class. ``step`` and ``load_state_dict`` are
attributes of it, as a learning-rate scheduler's are, and so is what copies and pickles it.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ..errors import PagerError
from ..tensor.dispatcher import hide_from_dynamo
from ..tensor.module import is_dtensor, known_parameter
from ..tensor.paged_tensor import PagedTensor
from ..tensor.sharded import local_state
from . import fused, torch_fused
from .advice import stepping
from .dense_step import step_as_dense, update_one
from .fused_states import Format, check_format, convert_state, page_state
from .optimizer_states import one_at_a_time
from .paged_optimizer import PagedOptimizer, paged_of
from .step_need import check_states, step_room

if TYPE_CHECKING:
    from ..core import Core

OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)


# -- a step --------------------------------------------------------------------------------------
@torch.optim.Optimizer.profile_hook_step
def _step(optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
    """One update of all parameters; of those of FSDP2, on their local shards.

    Room for new states is checked before anything changes. If a step is interrupted all the same
    (``TierFull``, a failing disk), the parameters updated so far keep their update, and the next
    ``step`` finishes the others only; of a parameter that is updated slab by slab, the elements
    that are left. Where the device budget is too small nothing is updated: the iteration is
    refused at its end.
    """
    paged = paged_of(optimizer)
    assert paged is not None
    pager, ahead = paged.pager, paged.in_backward
    optimizer._opt_called = True  # type: ignore[attr-defined]  # as schedulers note it
    loss = None
    if closure is not None:
        if ahead is not None:
            ahead.stop("step() is given a closure")
        with torch.enable_grad():
            loss = closure()
    with _on_shards(paged):
        if ahead is not None:
            ahead.before_step()
        fused.refuse(paged)
        fused.number_parameters(paged)
        pager.check_open()
        stepping(pager, 4)
        if not pager.budget.check(optimizer, step_room):
            if ahead is not None:
                ahead.stepped()
            return loss
        check_states(paged)
        if ahead is not None:
            ahead.measure()
        with pager.in_backward.step_of(paged):
            _step_all(paged)
        if ahead is not None:
            ahead.stepped()
    return loss


def _step_all(paged: PagedOptimizer) -> None:
    pager = paged.pager
    with pager.budget.stepping(paged.optimizer):
        try:
            pager.stepping = True
            by_kernels = fused.always(paged)
            if by_kernels and fused.is_left_out(paged):
                return
            if by_kernels or paged.done or paged.progress or not step_as_dense(paged):
                for group in paged.optimizer.param_groups:
                    _step_group(paged, group, by_kernels)
                paged.stepped = True
        finally:
            pager.stepping = False
    paged.done.clear()


def _step_group(paged: PagedOptimizer, group: dict[str, Any], by_kernels: bool) -> None:
    batch = fused.Batch(paged)
    with torch._C.DisableTorchFunctionSubclass():
        to_update = [p for p in group["params"] if p.grad is not None and id(p) not in paged.done]
    at = 0
    while at < len(to_update):
        count = batch.again(group, to_update, at) if by_kernels else 0
        parameter = to_update[at]
        if not count and not (by_kernels and batch.add(group, parameter)):
            update_one(paged, group, parameter)
            paged.done.add(id(parameter))
        at += max(1, count)
    batch.flush()


# -- shards --------------------------------------------------------------------------------------
def _on_shards(paged: PagedOptimizer) -> Any:
    """Within it the optimizer has the local shards of FSDP2's parameters."""
    if not _is_sharded(paged):
        return nullcontext()
    from .shards import on_shards  # torch.distributed, which others need not load

    return on_shards(paged)


def _is_sharded(paged: PagedOptimizer) -> bool:
    if "torch.distributed.tensor" not in sys.modules:
        return False
    return any(is_dtensor(p) for group in paged.optimizer.param_groups for p in group["params"])


# -- what an optimizer gets ----------------------------------------------------------------------
class _Doors:
    """Attributes of an optimizer that steps on pages."""

    def __init__(self, paged: PagedOptimizer) -> None:
        self._paged = paged

    def step(self, *args: Any, **kwargs: Any) -> Any:
        return _step(self._paged.optimizer, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # a scheduler need not do it

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As PyTorch's; loaded states go into pages one by one, kept as this optimizer keeps them.

        A step that was interrupted is forgotten.
        """
        paged, optimizer = self._paged, self._paged.optimizer
        if _is_sharded(paged):
            state_dict = local_state(optimizer, state_dict)
        with _on_shards(paged), one_at_a_time(optimizer), torch.no_grad():
            paged.kind.load_state_dict(optimizer, state_dict)
            paged.done.clear()
            paged.progress.clear()
            paged.versions.clear()
            for state in optimizer.state.values():
                page_state(paged.pager, state)

    def __getstate__(self) -> dict[str, Any]:
        """Pickled it is an optimizer without pages, with states as torch itself keeps them."""
        paged = self._paged
        kept: dict[str, Any] = paged.kind.__getstate__(paged.optimizer)
        if not paged.format.chosen:
            return kept
        plain = {
            parameter: convert_state(paged.pager, state, parameter, Format(), dense=True)
            for parameter, state in kept["state"].items()
        }
        return {**kept, "state": plain}

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.optim.Optimizer:
        paged, optimizer = self._paged, self._paged.optimizer
        twin = memo[id(optimizer)] = object.__new__(paged.kind)
        twin.__setstate__(copy.deepcopy(paged.kind.__getstate__(optimizer), memo))
        return paged_optimizer(paged.pager, twin, chosen=paged.format)


_DOORS = ("step", "load_state_dict", "__getstate__", "__deepcopy__")
hide_from_dynamo(_Doors.step)  # with PyTorch's step: what is compiled keeps its operands


# -- paging one ----------------------------------------------------------------------------------
def paged_optimizer(
    pager: Core, optimizer: OptimizerT, *, overlap: bool = False, chosen: Format
) -> OptimizerT:
    """See ``Pager.optimizer``."""
    pager.check_open()
    inner = unwrapped(optimizer)
    pager.in_backward.switch(_page(pager, inner, chosen), overlap)
    refresh_wrapper(optimizer)
    pager.optimizers.append(weakref.ref(inner))
    return optimizer


def _page(pager: Core, optimizer: torch.optim.Optimizer, chosen: Format) -> PagedOptimizer:
    """Make ``optimizer`` step on pages."""
    check_format(type(optimizer), fused.SUPPORTED, chosen)
    known = paged_of(optimizer)
    if known is not None:
        if known.pager is not pager:
            raise PagerError("this optimizer already belongs to another Pager")
        if chosen.chosen and chosen != known.format:
            raise PagerError(
                f"this optimizer is paged already, with {known.format}, and now {chosen} is asked "
                "for; load its state_dict() into a new optimizer that is paged so"
            )
        return known
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError(
            "LBFGS needs all parameters and a history of them at once, as one dense vector, so it "
            "cannot run in pages; use another optimizer, or keep this model unpaged"
        )
    torch_fused.refuse(pager, type(optimizer), optimizer.param_groups)
    _take_over_replaced(pager, optimizer)
    paged = PagedOptimizer(pager, optimizer, chosen)
    if chosen.chosen:
        with torch.no_grad():
            for parameter, state in optimizer.state.items():
                fresh = convert_state(pager, state, parameter, chosen)
                state.clear()
                state.update(fresh)
    for state in optimizer.state.values():
        page_state(pager, state)
    doors = _Doors(paged)
    for name in _DOORS:  # over what a scheduler, or accelerate, has put there of the plain step
        setattr(optimizer, name, getattr(doors, name))
    optimizer._tp_paged = paged  # type: ignore[attr-defined]
    return paged


def _take_over_replaced(pager: Core, optimizer: torch.optim.Optimizer) -> None:
    """An optimizer made before ``page_module`` gets the paged parameters instead."""
    for group in optimizer.param_groups:
        for index, parameter in enumerate(group["params"]):
            paged = known_parameter(pager, parameter)
            if paged is None:
                continue
            group["params"][index] = paged
            if parameter in optimizer.state:
                optimizer.state[paged] = optimizer.state.pop(parameter)


def refuse_earlier(pager: Core, model: torch.nn.Module) -> None:
    """``PagerError`` if an optimizer was paged with parameters that are about to be replaced: it
    would go on with the old ones, which get no gradients any more."""
    dense = (p for p in model.parameters() if not isinstance(p, PagedTensor))
    replaced = {id(p) for p in dense if not is_dtensor(p)}  # shards stay the objects that they are
    for known in pager.optimizers:
        optimizer = known()
        groups = optimizer.param_groups if optimizer is not None else []
        if any(id(p) in replaced for group in groups for p in group["params"]):
            raise PagerError(
                f"pager.optimizer() was given a {type(optimizer).__name__} with parameters of this "
                f"{type(model).__name__}, which page_module would replace; call "
                "page_module(model) first, then pager.optimizer(optimizer)"
            )


# -- wrappers ------------------------------------------------------------------------------------
def unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer that steps: what ``optimizer`` wraps, as accelerate's does, or itself.

    Raises ``TypeError`` for what is no optimizer, or never was initialised as one.
    """
    inner = optimizer
    while not hasattr(inner, "_optimizer_step_pre_hooks"):
        if not isinstance(getattr(inner, "optimizer", None), torch.optim.Optimizer):
            raise TypeError(
                f"{type(optimizer).__name__} is no torch.optim.Optimizer that was initialised, nor "
                "a wrapper with one in its attribute 'optimizer'; pass pager.optimizer() the "
                "optimizer itself, before it is wrapped"
            )
        inner = inner.optimizer
    return inner  # type: ignore[no-any-return]


def refresh_wrapper(wrapper: Any) -> None:
    """accelerate's wrapper keeps the ``step`` of what it wraps, for its GradScaler; unpickling it
    looks it up anew."""
    while not hasattr(wrapper, "_optimizer_step_pre_hooks"):
        if hasattr(wrapper, "_optimizer_original_step_method"):
            wrapper.__setstate__(wrapper.__getstate__())
        wrapper = wrapper.optimizer
