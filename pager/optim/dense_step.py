"""An optimizer's step on plain views, past the dispatcher.

An update is many small ops (Adam: 14 for a parameter), and each one on a PagedTensor goes through
Python. So pages are held for a whole update and the optimizer is given plain views of them: of
all parameters at once where everything stays on the device anyway, else of one parameter with its
gradient and states. Pages in scattered frames have no plain view; kernels on pages (``fused.py``)
update those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ..errors import InfeasibleBudget
from ..tensor.dense_views import direct_view, withdraw
from ..tensor.paged_tensor import PagedTensor
from . import fused

if TYPE_CHECKING:
    from ..core import Core

_LEAST_FRAMES_PER_PAGE = 3  # so many in the arena for each page that an update holds


def step_as_dense(optimizer: Any, raw: Callable[..., Any]) -> bool:
    """Run ``raw`` (the optimizer's own step) with all paged parameters, gradients and states seen
    as plain views. Values, states and groups are as after a step on the paged ones.

    ``False``, and nothing done, where not everything is kept on the device, where states would be
    made (one parameter at a time is less at once), or where the class is a user's own, which may
    look at what it is given.
    """
    if not optimizer._tp_pager.fits or not _may_see_views(optimizer):
        return False
    with torch._C.DisableTorchFunctionSubclass():
        return _step_if_it_fits(optimizer, raw)


def step_alone_as_dense(optimizer: Any, raw: Callable[..., Any]) -> bool:
    """The same for an optimizer whose groups name one parameter at the moment: its gradient and
    states are brought onto the device with it. ``False``, and nothing done, where that would take
    more than a share of the arena; ops one by one take less."""
    pager: Core = optimizer._tp_pager
    if not _may_see_views(optimizer):
        return False
    with torch._C.DisableTorchFunctionSubclass():
        runs = {t._storage.run.id: t._storage.run for t in paged_operands(optimizer)}
        pages = sum(run.count for run in runs.values())
        if pages > pager.residency.pool.count // _LEAST_FRAMES_PER_PAGE:
            return False
        return _step_if_it_fits(optimizer, raw)


def _step_if_it_fits(optimizer: Any, raw: Callable[..., Any]) -> bool:
    try:
        return step_on_views(optimizer, raw)
    except InfeasibleBudget:  # states are newer than what was measured, or the user pins too much
        return False


def _may_see_views(optimizer: Any) -> bool:
    pager: Core = optimizer._tp_pager
    if pager.budget.metering or pager.after_op is not None:
        return False
    if not f"{type(optimizer).__mro__[2].__module__}.".startswith("torch.optim."):
        return False
    with torch._C.DisableTorchFunctionSubclass():
        return _has_its_states(optimizer) and _grads_match(optimizer)


def step_on_views(optimizer: Any, raw: Callable[..., Any]) -> bool:
    """Run ``raw`` with all that the groups of ``optimizer`` name (parameters that have a gradient,
    their states, paged gradients) held on the device at once and seen as plain views.

    Where the frames of one of them are scattered, kernels on pages do it; ``False``, and nothing
    done, if they cannot. Raises what pinning raises, before anything changed. To be called without
    torch functions of subclasses.
    """
    with _views(optimizer._tp_pager, paged_operands(optimizer)) as views:
        if views is None:
            return fused.step_held(optimizer)
        parameters = list(_stepped(optimizer))
        with _in_place_of_paged(optimizer, views):
            raw(optimizer)
        # Autograd must notice if a graph still wants the old values.
        torch.autograd.graph.increment_version(parameters)
    return True


def _stepped(optimizer: Any) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from (p for p in group["params"] if p.grad is not None)


def _has_its_states(optimizer: Any) -> bool:
    state = optimizer.state
    if not state:  # of the kind that keeps none, if it has stepped before
        return bool(optimizer._tp_stepped)
    return all(state.get(parameter) for parameter in _stepped(optimizer))


def _grads_match(optimizer: Any) -> bool:
    """Only a gradient of the parameter's own dtype can be a plain view's."""
    return all(p.grad is None or p.grad.dtype == p.dtype for p in _stepped(optimizer))


def paged_operands(optimizer: Any) -> list[PagedTensor]:
    """The paged parameters to be stepped, with their paged gradients and states."""
    found = []
    for parameter in _stepped(optimizer):
        values = (parameter, parameter.grad, *optimizer.state.get(parameter, {}).values())
        found += [value for value in values if type(value) is PagedTensor]
    return found


@contextmanager
def _views(
    pager: Core, tensors: list[PagedTensor]
) -> Iterator[dict[PagedTensor, torch.Tensor] | None]:
    """Zero-copy views, about to be written, of tensors held on the device; ``None`` if the frames
    of one of them are scattered."""
    runs = list({tensor._storage.run.id: tensor._storage.run for tensor in tensors}.values())
    pager.pin(runs)
    try:
        if any(run.base < 0 for run in runs):
            yield None
            return
        for run in runs:
            pager.will_write(run)
        views = {tensor: direct_view(tensor) for tensor in tensors}
        try:
            yield views
        except BaseException:
            withdraw(tensors, views.values())
            raise
    finally:
        pager.unpin(runs)


@contextmanager
def _in_place_of_paged(optimizer: Any, views: dict[Any, torch.Tensor]) -> Iterator[None]:
    """The optimizer sees ``views``; what it does to them is done to the paged tensors."""
    groups, states = optimizer.param_groups, optimizer.state
    before = [(group, group["params"], group.get("foreach")) for group in groups]
    twins = {views[p]: p for p in _stepped(optimizer) if p in views}
    for twin, parameter in twins.items():
        twin.grad = views.get(parameter.grad, parameter.grad)
        if parameter in states:
            states[twin] = {
                key: views.get(value, value) if type(value) is PagedTensor else value
                for key, value in states[parameter].items()
            }
    for group in groups:
        group["params"] = [views.get(parameter, parameter) for parameter in group["params"]]
        if group.get("foreach", False) is None:
            group["foreach"] = False  # what it decides for a PagedTensor
    paged = {view: tensor for tensor, view in views.items()}
    try:
        yield
    finally:
        for group, parameters, foreach in before:
            group["params"] = parameters
            if "foreach" in group:
                group["foreach"] = foreach
        for twin, parameter in twins.items():
            twin.grad = None
            made = states.pop(twin, None)
            if made is not None:
                states[parameter].update(
                    {k: paged.get(v, v) if type(v) is torch.Tensor else v for k, v in made.items()}
                )
