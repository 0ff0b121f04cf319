"""accelerate's ``Accelerator`` on a paged model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType

from ..api import Pager
from ..errors import PagerError
from .replaced import Replaced

_REFUSED = ("DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA")


def prepare(accelerator: Accelerator, pager: Pager, *objects: Any) -> Any:
    """``accelerator.prepare(*objects)`` with the models and optimizers among them in pages. ::

        pager = tp.Pager(device_budget="8GiB", host_budget="40GiB")
        model, optimizer, loader = tp.hf.prepare(accelerator, pager, model, optimizer, loader)
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                ...

    From the first batch of an accumulation to the step, ``accelerator.accumulate`` is one iteration
    of the pager; a loop that does without it has ``with pager.iteration():`` around each step.
    ``backward``, ``clip_grad_norm_``, ``save_state`` and ``load_state`` work as ever. Evaluate
    inside of ``pager.inference()``.

    Raises ``PagerError`` for DeepSpeed, FSDP, Megatron-LM and XLA, which place parameters
    themselves, and ``ValueError`` where the two are on different devices; nothing has changed then.
    """
    _refuse(accelerator, pager)
    for model in objects:
        if isinstance(model, torch.nn.Module):
            pager.page_module(model)
    for optimizer in objects:
        if isinstance(optimizer, torch.optim.Optimizer):
            pager.optimizer(optimizer)
    prepared = accelerator.prepare(*objects)
    if getattr(accelerator.accumulate, "pager", None) is not pager:
        _accumulate_in_iterations(accelerator, pager)
    return prepared


def _refuse(accelerator: Accelerator, pager: Pager) -> None:
    pager.core.check_open()
    kind = accelerator.distributed_type
    if kind in {getattr(DistributedType, name) for name in _REFUSED}:
        raise PagerError(
            f"prepare(): {kind.value} places parameters itself and cannot work on a paged model; "
            "leave it out of the accelerator's configuration"
        )
    if accelerator.device.type != pager.device.type:
        raise ValueError(
            f"prepare(): the accelerator is on {accelerator.device} and the pager on "
            f"{pager.device}; give Pager(device=accelerator.device)"
        )


def _accumulate_in_iterations(accelerator: Accelerator, pager: Pager) -> None:
    replaced = Replaced()
    open_step = False  # of ours, over several batches perhaps

    @contextmanager
    def accumulate(original: Callable[..., Any], *models: Any) -> Iterator[None]:
        nonlocal open_step
        if pager.core.running is None:
            pager.begin()
            open_step = True
        elif not open_step:  # the user's own iteration
            with original(*models):
                yield
            return
        try:
            with original(*models):
                yield
        except BaseException as error:
            open_step = False
            pager.end(error)
            raise
        if accelerator.sync_gradients:
            open_step = False
            pager.end()

    replaced.wrap(accelerator, "accumulate", accumulate)
    accelerator.accumulate.pager = pager
    pager.core.on_close.append(replaced.undo)
