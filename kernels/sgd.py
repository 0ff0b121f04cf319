"""SGD with momentum on pages: one pass over all operands, one launch for a list.

20 bytes for each float32 parameter with momentum, 12 without.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .launch import use_triton
from .pieces import Operand, memory_of
from .update import (
    Group,
    Number,
    State,
    alike,
    chunks,
    doubles,
    launch_groups,
    make_groups,
    number,
    table,
)

__all__ = ["sgd_step", "sgd_step_reference"]


class _Sgd(NamedTuple):
    """What is the same for all groups of a call, named as in torch.optim."""

    lr: Number
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    maximize: bool
    inv_scale: Number | None
    found_inf: torch.Tensor | None
    step: Number


@torch.no_grad()
def sgd_step(
    params: Sequence[Operand],
    grads: Sequence[Operand],
    momentum_buffers: Sequence[State] | None,
    *,
    lr: Number,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    maximize: bool = False,
    first: Sequence[bool],
    masters: Sequence[Operand] | None = None,
    inv_scale: Number | None = None,
    found_inf: torch.Tensor | None = None,
    seeds: Sequence[int] | None = None,
    step: Number = 0,
    firsts: Sequence[int] | None = None,
    reference: bool = False,
    work: torch.Tensor | None = None,
) -> None:
    """One step of torch.optim.SGD for a list of parameters, in place.

    params, grads : float32, bfloat16 or float16 each, paged or dense; or all operands float64.
    momentum_buffers : float32, bfloat16, or `Blockwise` in 8 bits; None if, and only if, momentum
        is 0.
    first : for each parameter, whether its buffer is fresh: what is in it is not used, and it
        becomes the gradient.
    masters : float32 copies of the parameters, which are then updated and rounded into params;
        params are not read.
    lr : a number, or a tensor of one element.
    inv_scale : the gradients are multiplied by it; they are not written.
    found_inf : one element; if it is not 0, nothing is written (and `first` stays as it was).
    seeds : an integer for each parameter: bfloat16 and 8-bit buffers are rounded at random, by
        seed, `step` (which must then count up) and element number. Without it to nearest.
    firsts : for parameters updated a stretch at a time, the number of its first element, a
        multiple of 4096; only the random numbers depend on it.
    reference : in plain torch also where there is Triton.
    work : memory for the reference's temporaries, see `chunks`; not that of fresh buffers.

    Computes in float32 (float64 for float64), and rounds only what is stored. One launch for all
    groups with the same dtypes. On CUDA it is queued on the current stream of the device and the
    call does not wait, also where lr, step, inv_scale and found_inf are tensors there. On a CPU it
    returns when the step is done.
    """
    chosen = _Sgd(
        *(lr, momentum, dampening, weight_decay, nesterov, maximize, inv_scale, found_inf, step)
    )
    assert (momentum != 0) == (momentum_buffers is not None)
    assert len(first) == len(params)
    groups = make_groups(params, grads, [momentum_buffers], masters, seeds, firsts)
    if not groups:
        return
    if reference or not use_triton(memory_of(groups[0].param)):
        if found_inf is None or not float(found_inf):
            for group in groups:
                _update_reference(group, first[group.number], chosen, work)
        return
    for bucket in alike(groups):
        launch_groups(
            bucket,
            _numbers(bucket, [first[group.number] for group in bucket], chosen),
            maximize=maximize,
            MOMENTUM=momentum != 0,
            NESTEROV=nesterov,
        )


def _numbers(groups: Sequence[Group], first: Sequence[bool], chosen: _Sgd) -> torch.Tensor:
    """The kernel's table; column i is for groups[i]."""
    device = memory_of(groups[0].param).device
    rows: list[torch.Tensor | float] = [
        doubles([chosen.step], device),
        doubles([1.0 if chosen.inv_scale is None else chosen.inv_scale], device),
        doubles([0.0 if chosen.found_inf is None else chosen.found_inf], device),
        chosen.weight_decay,
        doubles([chosen.lr], device),
        chosen.momentum,
        1 - chosen.dampening,
        doubles(first, device),
    ]
    return table(rows, len(groups), groups[0].compute, device)


def sgd_step_reference(
    params: Sequence[Operand],
    grads: Sequence[Operand],
    momentum_buffers: Sequence[State] | None,
    **options: Any,
) -> None:
    """`sgd_step` in plain torch: the same bits as torch.optim's for-loop where all is float32."""
    sgd_step(params, grads, momentum_buffers, **options, reference=True)


def _update_reference(group: Group, fresh: bool, chosen: _Sgd, work: torch.Tensor | None) -> None:
    """torch.optim's operations in its order, on a chunk after the other."""
    lr, momentum = float(chosen.lr), number(chosen.momentum, group)
    for chunk in chunks(group, work):
        grad = chunk.grad.to(group.compute)
        if chosen.inv_scale is not None:
            grad = grad * chosen.inv_scale
        if chosen.maximize:
            grad = torch.neg(grad, out=chunk.rooms[0])
        param = chunk.read_param()
        if chosen.weight_decay != 0:
            grad = torch.add(grad, param, alpha=chosen.weight_decay, out=chunk.rooms[0])
        if chosen.momentum != 0:
            if fresh:
                buffer = grad.clone()
            else:
                buffer = chunk.read_state(0)
                buffer.mul_(momentum).add_(grad, alpha=1 - chosen.dampening)
            chunk.write_state(0, buffer, int(chosen.step))
            if chosen.nesterov:
                grad = torch.add(grad, buffer, alpha=chosen.momentum, out=chunk.rooms[0])
            else:
                grad = buffer
        param.add_(grad, alpha=-lr)
        chunk.write_param(param)
