"""An update by PyTorch's own code, on plain views of pages where that can be.

::

    all parameters at once on views        everything is on the device anyway
    else one parameter at a time:
        kernels on pages (``fused.py``)    slab by slab, or in scattered frames, which have no view
        on views                           where it takes a share of the arena, and has its states
        op by op on pages                  anything

An update is many small ops (Adam: 14 for a parameter), and each one on a PagedTensor goes through
Python. So pages are held for a whole update and the optimizer is given plain views of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..errors import InfeasibleBudget, TierFull
from ..tensor.dense_views import direct_view, withdraw
from ..tensor.paged_tensor import PagedTensor
from . import fused
from .fused_states import page_state
from .paged_optimizer import PagedOptimizer, alone, in_place

_LEAST_FRAMES_PER_PAGE = 3  # so many in the arena for each page that an update holds


def step_as_dense(paged: PagedOptimizer) -> bool:
    """The optimizer's own step with all paged parameters, gradients and states seen as plain views.
    Values, states and groups are as after a step on the paged ones.

    ``False``, and nothing done, where not everything is kept on the device or has a plain view,
    where states would be made (one parameter at a time is less at once), or where the class is a
    user's own, which may look at what it is given.
    """
    with torch._C.DisableTorchFunctionSubclass():
        if not paged.pager.fits or not _step_on_views(paged):
            return False
        for state in paged.optimizer.state.values():  # some make one later, when a setting changes
            page_state(paged.pager, state)
    return True


def update_one(
    paged: PagedOptimizer, group: dict[str, Any], parameter: torch.Tensor, most: int | None = None
) -> None:
    """One parameter's part of the step. On views if it takes no more than ``most`` pages, a share
    of the arena unless said otherwise; ops one by one take less."""
    with torch._C.DisableTorchFunctionSubclass():
        if fused.is_due(paged, group, parameter):
            fused.update_one(paged, group, parameter)
            return
    if most is None:
        most = paged.pager.residency.pool.count // _LEAST_FRAMES_PER_PAGE
    with alone(paged.optimizer, group, parameter):
        with torch._C.DisableTorchFunctionSubclass():
            done = _step_on_views(paged, most)
        if not done:
            paged.run()
    state = paged.optimizer.state
    if parameter in state:
        page_state(paged.pager, state[parameter])


def _may_see_views(paged: PagedOptimizer, stepped: list[torch.Tensor]) -> bool:
    """Not where states would be made; and only a gradient of the parameter's own dtype can be a
    plain view's."""
    pager, state = paged.pager, paged.optimizer.state
    if pager.budget.metering or pager.after_op is not None or not paged.is_torchs:
        return False
    has_states = all(state.get(p) for p in stepped) if state else paged.stepped
    return has_states and all(p.grad.dtype == p.dtype for p in stepped)  # type: ignore[union-attr]


def _step_on_views(paged: PagedOptimizer, most: int | None = None) -> bool:
    """``False``, and nothing done, if what the optimizer has to update may not be seen so, takes
    more than ``most`` pages or cannot be held on the device at once (the user pins too much, tiers
    are full), or something has no plain view, and kernels on pages have not PyTorch's bits."""
    pager, states = paged.pager, paged.optimizer.state
    parameters = [parameter for _, parameter in paged.stepped_now()]
    if not _may_see_views(paged, parameters):
        return False
    tensors: list[PagedTensor] = []
    for parameter in parameters:
        values = (parameter, parameter.grad, *states.get(parameter, {}).values())
        tensors += [value for value in values if type(value) is PagedTensor]
    runs = list({tensor._storage.run.id: tensor._storage.run for tensor in tensors}.values())
    if most is not None and sum(run.count for run in runs) > most:
        return False
    try:
        pager.take(runs)
    except (InfeasibleBudget, TierFull):
        return False
    try:
        if any(run.base < 0 for run in runs):  # in scattered frames
            return fused.update_held(paged)
        pager.will_write(runs)
        views: dict[torch.Tensor, torch.Tensor] = {t: direct_view(t) for t in tensors}
        try:
            with _shown(paged, parameters, views):
                paged.run()
        except BaseException:
            withdraw(tensors, views.values())
            raise
    finally:
        pager.release(runs)
    # Autograd must notice if a graph still wants the old values.
    torch.autograd.graph.increment_version(parameters)
    return True


@contextmanager
def _shown(
    paged: PagedOptimizer, parameters: list[torch.Tensor], views: dict[torch.Tensor, torch.Tensor]
) -> Iterator[None]:
    """The optimizer sees ``views``; what it does to them is done to the paged tensors."""
    optimizer = paged.optimizer
    tensors = {view: tensor for tensor, view in views.items()}
    loops = [g for g in optimizer.param_groups if g.get("foreach", False) is None]
    twins = {parameter: views[parameter] for parameter in parameters if parameter in views}

    def there(key: str, value: Any, _: Any) -> Any:
        return views.get(value, value) if type(value) is PagedTensor else value

    def back(key: str, value: Any, _: Any) -> Any:
        return tensors.get(value, value) if type(value) is torch.Tensor else value

    with in_place(optimizer, twins, there, back):
        for group in loops:
            group["foreach"] = False  # what it decides for a PagedTensor
        try:
            yield
        finally:
            for group in loops:
                group["foreach"] = None
