"""Trainings that leave out a line which the pager needs: it is named, once.

PyTorch tells of every optimizer's step. A step on paged parameters outside of ``iteration()``, or
of an optimizer that never was given to ``Pager.optimizer``, works, with all that it saves or makes
dense; nobody would see why.
"""

from __future__ import annotations

import warnings
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..tensor.paged_tensor import PagedTensor

if TYPE_CHECKING:
    from ..core import Core

OUTSIDE = (
    "a training step outside of pager.iteration(): what autograd saves stays dense, dense memory "
    "is not held to the budget, and nothing is planned. Put 'with pager.iteration():' around "
    "forward, backward and optimizer.step()"
)


def stepping(pager: Core, frames: int) -> None:
    """A step on parameters that are paged here, which the user began so many frames above."""
    if not pager.inside and pager.budget.note_step_outside():
        warnings.warn(OUTSIDE, UserWarning, stacklevel=frames + 1)


_watching = False


def watch_steps() -> None:
    """Be told of the steps of all optimizers, from the first call on."""
    global _watching
    if not _watching:
        _watching = True
        register_optimizer_step_pre_hook(_on_step)


def is_ours(hook: Any) -> bool:
    """Whether this is the hook before steps that :func:`watch_steps` has registered; it looks at no
    gradient."""
    return hook is _on_step


def _on_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if hasattr(optimizer, "_tp_paged"):  # a paged one says so by itself
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if type(parameter) is PagedTensor:
                pager = parameter._storage.pager
                stepping(pager, 3)
                pager.budget.unpaged = weakref.ref(optimizer)
                return
