"""transformers' ``Trainer``, and what is derived from it (TRL's trainers), on a paged model.

::

    on_step_begin                       on_step_end
         |  training_step × accumulation     |
         |  clip, optimizer.step, zero_grad  |  save, evaluate
         +--------- one iteration -----------+--- evaluation_loop: inference
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch.distributed.fsdp import CPUOffloadPolicy
from transformers import Trainer, TrainerCallback
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from ..api import Pager
from ..errors import PagerError
from ..tensor.module import refuse_subclasses
from .replaced import Replaced


class TensorPagerCallback(TrainerCallback):  # type: ignore[misc]
    """One iteration of ``pager`` around each optimizer step of a ``Trainer``.

    ``attach`` adds it. By itself it is for a trainer whose model and optimizer were paged by hand.
    """

    def __init__(self, pager: Pager) -> None:
        self.pager = pager

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.pager.begin()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.pager.end()

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        if self.pager.is_begun:  # a callback has stopped it between two batches
            self.pager.end(PagerError("the Trainer stopped in the middle of a step"))


def attach(trainer: Trainer, pager: Pager | None = None, **arguments: Any) -> Pager:
    """Train ``trainer.model`` in pages: call it before ``trainer.train()``, and nothing else
    changes. ::

        pager = tp.hf.attach(trainer, device_budget="8GiB", host_budget="40GiB")
        trainer.train()

    Parameters, gradients, optimizer states and saved activations go into the pages of ``pager``, or
    of a new ``Pager(**arguments)`` on the trainer's device, which is returned; close it when the
    model is not needed any more. Losses and weights are those of the same training without it.
    Gradient accumulation, clipping, mixed precision, schedulers, evaluation, checkpoints,
    ``resume_from_checkpoint`` and ``load_best_model_at_end`` work as ever, and checkpoints are the
    files that the trainer writes anyway. The reference model of a trainer of TRL's is paged too.

    ``Trainer(model)`` itself moves the model to the device. One that does not fit there is paged
    before (``pager.page_module``, or ``tensorpager.hf.from_pretrained``) and goes through as it is;
    or ``TrainingArguments(place_model_on_device=False)`` leaves it where it is until it is paged.

    With ``TrainingArguments(fsdp=…)``, under ``torchrun``, each rank's shards go into pages in
    ``train()``, as soon as accelerate has divided the model by FSDP2; a device or host budget is of
    all ranks of a node.

    Raises ``PagerError`` for what cannot work in pages, by name, and ``TypeError`` for arguments
    beside a pager. Nothing of the trainer has changed then.
    """
    if not isinstance(trainer, Trainer):
        raise TypeError(f"attach() is for a transformers.Trainer, and got a {_kind(trainer)}")
    if pager is not None and arguments:
        raise TypeError(
            f"attach() was given a pager and also {', '.join(arguments)}, which are for a new one; "
            "leave out one of the two"
        )
    _refuse(trainer)
    own = pager is None
    if pager is None:
        pager = Pager(**{"device": trainer.args.device, **arguments})
    if trainer.is_fsdp_enabled:
        _attach(trainer, pager)
        return pager
    try:
        pager.page_module(trainer.model)
        reference = getattr(trainer, "ref_model", None)  # of TRL's: it is only read
        if isinstance(reference, torch.nn.Module):
            pager.page_module(reference.requires_grad_(False))
        if trainer.optimizer is not None:
            pager.optimizer(trainer.optimizer)
    except BaseException:
        if own:
            pager.close()
        raise
    _attach(trainer, pager)
    return pager


def _kind(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _attach(trainer: Trainer, pager: Pager) -> None:
    replaced = Replaced()
    callback = TensorPagerCallback(pager)

    def train(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except BaseException as error:
            if pager.is_begun:
                pager.end(error)
            raise

    def create_optimizer(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        optimizer = original(*args, **kwargs)
        _refuse_optimizer(optimizer)
        return optimizer if trainer.is_fsdp_enabled else pager.optimizer(optimizer)

    def prepare(original: Callable[..., Any], *objects: Any, **kwargs: Any) -> Any:
        prepared = original(*objects, **kwargs)
        found = prepared if isinstance(prepared, tuple | list) else (prepared,)
        models = [one for one in found if isinstance(one, torch.nn.Module)]
        for model in models:
            pager.page_module(model)
        for one in found if models else ():
            if isinstance(one, AcceleratedOptimizer):
                one.optimizer = pager.optimizer(one.optimizer)
        return prepared

    def evaluation_loop(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if pager.core.running is not None:
            return original(*args, **kwargs)
        with pager.inference():
            return original(*args, **kwargs)

    if trainer.is_fsdp_enabled:  # its files are accelerate's
        replaced.wrap(trainer.accelerator, "prepare", prepare)
    else:
        files = _Files(trainer, pager)
        replaced.wrap(trainer, "_save_optimizer_and_scheduler", files.save_states)
        replaced.wrap(trainer, "_load_optimizer_and_scheduler", files.load_states)
        replaced.wrap(trainer, "_load_from_checkpoint", files.load_weights)
    replaced.wrap(trainer, "train", train)
    replaced.wrap(trainer, "create_optimizer", create_optimizer)
    replaced.wrap(trainer, "evaluation_loop", evaluation_loop)
    trainer.add_callback(callback)

    def detach() -> None:
        replaced.undo()
        trainer.remove_callback(callback)

    pager.core.on_close.append(detach)


class _Files:
    """A checkpoint's states and weights, from pages to files and back, without the copies of all of
    them that Trainer makes in memory. The same files."""

    def __init__(self, trainer: Trainer, pager: Pager) -> None:
        self._trainer, self._pager = trainer, pager

    def save_states(self, original: Callable[..., Any], output_dir: str) -> None:
        trainer, folder = self._trainer, Path(output_dir)
        if not trainer.args.should_save:
            original(output_dir)
            return
        self._pager.save(folder / OPTIMIZER_NAME, trainer.optimizer.state_dict())
        torch.save(trainer.lr_scheduler.state_dict(), folder / SCHEDULER_NAME)

    def load_states(self, original: Callable[..., Any], checkpoint: str | None) -> None:
        folder = Path(checkpoint or "")
        names = folder / OPTIMIZER_NAME, folder / SCHEDULER_NAME
        if checkpoint is None or not all(name.is_file() for name in names):
            original(checkpoint)
            return
        try:
            states = torch.load(names[0], map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # of an old format, that is no map
            original(checkpoint)
            return
        self._trainer.optimizer.load_state_dict(states)
        self._trainer.lr_scheduler.load_state_dict(torch.load(names[1], weights_only=True))

    def load_weights(
        self, original: Callable[..., Any], checkpoint: str, model: Any = None
    ) -> None:
        whole = any((Path(checkpoint) / name).is_file() for name in _WEIGHTS)
        if model is not None or not whole or hasattr(self._trainer.model, "peft_config"):
            original(checkpoint, model)
            return
        result = self._pager.load(checkpoint, self._trainer.model, strict=False)
        self._trainer._issue_warnings_after_load(result)


_WEIGHTS = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)


# -- what cannot work ------------------------------------------------------------------------------
def _refuse(trainer: Trainer) -> None:
    """``PagerError`` for settings with which a step would fail, or not be what it says."""
    for found, what, remedy in _REFUSED:
        if found(trainer):
            raise PagerError(f"attach(): {what} cannot work on a paged model; {remedy}")
    if any(isinstance(c, TensorPagerCallback) for c in trainer.callback_handler.callbacks):
        raise PagerError("attach(): this trainer has a pager already; close() that one first")
    for model in (trainer.model, getattr(trainer, "ref_model", None)):
        if isinstance(model, torch.nn.Module):
            refuse_subclasses(model)
    if trainer.optimizer is not None:
        _refuse_optimizer(trainer.optimizer)


def _refuse_optimizer(optimizer: Any) -> None:
    inner = optimizer
    while isinstance(getattr(inner, "optimizer", None), torch.optim.Optimizer):
        inner = inner.optimizer
    package = type(inner).__module__.split(".")[0]
    if package in _OPTIMIZERS:
        raise PagerError(
            f"attach(): {_kind(inner)} runs kernels on its states' own memory; choose optim="
            '"adamw_torch", whose states are in pages (for 8-bit states give attach() a pager and '
            'the trainer pager.optimizer(torch.optim.AdamW(…), states="8bit"))'
        )


_OPTIMIZERS = ("bitsandbytes", "torchao", "lomo_optim", "galore_torch", "apollo_torch", "apex")


def _is_quantised(trainer: Trainer) -> bool:
    return getattr(trainer.model, "is_quantized", False) is True


def _plugin(trainer: Trainer) -> Any:
    return trainer.accelerator.state.fsdp_plugin


def _is_fsdp2(trainer: Trainer) -> bool:
    return bool(trainer.is_fsdp_enabled and _plugin(trainer).fsdp_version == 2)


_Found = Callable[[Any], Any]
_REFUSED: tuple[tuple[_Found, str, str], ...] = (
    (lambda t: t.is_deepspeed_enabled, "DeepSpeed", "leave out deepspeed="),
    (
        lambda t: t.args.fsdp and not _is_fsdp2(t),
        "fsdp= with which accelerate shards nothing by FSDP2 (on CPUs, on XLA, or with version 1)",
        "on accelerators leave version and xla out of fsdp_config; on CPUs leave out fsdp=, or "
        "call fully_shard(model) and pager.page_module(model) in a loop of your own",
    ),
    (
        lambda t: t.is_fsdp_enabled and isinstance(_plugin(t).cpu_offload, CPUOffloadPolicy),
        "fsdp_config's cpu_offload",
        "leave it out: pages are the pager's way to the same end",
    ),
    (
        lambda t: t.is_fsdp_enabled and getattr(t, "ref_model", None) is not None,
        "a reference model beside fsdp=",
        "leave out fsdp=",
    ),
    (
        lambda t: t.args.n_gpu > 1 and not t.is_model_parallel,
        "DataParallel, which Trainer uses for several GPUs in one process,",
        "set CUDA_VISIBLE_DEVICES to one, or start one process for each with torchrun",
    ),
    (
        lambda t: t.is_model_parallel,
        "a model that is spread over devices (device_map)",
        "load it without device_map",
    ),
    (_is_quantised, "a quantised model", "load it in bfloat16"),
    (
        lambda t: t.args.auto_find_batch_size,
        "auto_find_batch_size, which waits for an out-of-memory error that a pager does not let "
        "happen,",
        "leave it out: a budget that is too small is refused in the first step",
    ),
    (
        lambda t: t.args.fp16_full_eval or t.args.bf16_full_eval,
        "fp16_full_eval and bf16_full_eval, which convert the whole model in place,",
        "use bf16=True, or load the model in bfloat16",
    ),
    (
        lambda t: t.args.use_liger_kernel,
        "use_liger_kernel, whose kernels read weights through their addresses,",
        "leave it out",
    ),
    (
        lambda t: t.model_init is not None,
        "model_init, with which each train() makes a new model,",
        "pass model= instead",
    ),
    (
        lambda t: str(t.args.optim.value).startswith(("lomo", "adalomo")) or
        "layerwise" in str(t.args.optim.value),
        "an optimizer that updates layer by layer through hooks on gradients",
        'choose optim="adamw_torch"',
    ),
)  # fmt: skip
