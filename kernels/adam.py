"""Adam and AdamW on pages: one pass over parameter, gradient and states, one launch for a list.

28 bytes for each float32 parameter: four numbers read, three written.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from .launch import upload, use_triton
from .pieces import Operand, dtype_name, memory_of
from .update import (
    Group,
    KeptTables,
    Number,
    State,
    alike,
    chunks,
    doubles,
    is_on_host,
    launch_groups,
    make_groups,
    number,
    table,
)

__all__ = ["adam_step", "adam_step_again", "adam_step_reference"]


class _Adam(NamedTuple):
    """What is the same for all groups of a call, named as in torch.optim."""

    lr: Number
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    amsgrad: bool = False
    maximize: bool = False
    inv_scale: Number | None = None
    found_inf: torch.Tensor | None = None


@torch.no_grad()
def adam_step(
    params: Sequence[Operand],
    grads: Sequence[Operand],
    exp_avgs: Sequence[State],
    exp_avg_sqs: Sequence[State],
    *,
    max_exp_avg_sqs: Sequence[State] | None = None,
    masters: Sequence[Operand] | None = None,
    steps: Sequence[Number],
    lr: Number,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    amsgrad: bool = False,
    maximize: bool = False,
    inv_scale: Number | None = None,
    found_inf: torch.Tensor | None = None,
    seeds: Sequence[int] | None = None,
    firsts: Sequence[int] | None = None,
    reference: bool = False,
    work: torch.Tensor | None = None,
) -> None:
    """One step of torch.optim's Adam (or AdamW: decoupled) for a list of parameters, in place.

    params, grads : float32, bfloat16 or float16 each, paged or dense; or all operands float64.
    exp_avgs, exp_avg_sqs, max_exp_avg_sqs : float32, bfloat16, or `Blockwise` in 8 bits; all the
        same for one parameter. max_exp_avg_sqs goes with amsgrad.
    masters : float32 copies of the parameters, which are then updated and rounded into params;
        params are not read.
    steps : number of this step for each parameter, 1 for the first. Tensors of one element are
        read on their device. They are not written: count them up before the call, and back down by
        found_inf after it, as torch does around its fused Adam.
    lr : a number, or a tensor of one element.
    inv_scale : the gradients are multiplied by it; they are not written.
    found_inf : one element; if it is not 0, nothing is written.
    seeds : an integer for each parameter: bfloat16 and 8-bit states are rounded at random, by seed,
        step and element number. Without it to nearest.
    firsts : for parameters updated a stretch at a time, the number of its first element, a
        multiple of 4096; only the random numbers depend on it.
    reference : in plain torch also where there is Triton.
    work : memory for the reference's temporaries, see `chunks`.

    Computes in float32 (float64 for float64), and rounds only what is stored. One launch for all
    groups with the same dtypes. On CUDA it is queued on the current stream of the device and the
    call does not wait, also where steps, lr, inv_scale and found_inf are tensors there. On a CPU it
    returns when the step is done.
    """
    chosen = _Adam(
        *(lr, beta1, beta2, eps, weight_decay, decoupled, amsgrad, maximize, inv_scale, found_inf)
    )
    assert amsgrad == (max_exp_avg_sqs is not None)
    assert len(steps) == len(params)
    states = [exp_avgs, exp_avg_sqs, max_exp_avg_sqs]
    groups = make_groups(params, grads, states, masters, seeds, firsts)
    if not groups:
        return
    if reference or not use_triton(memory_of(groups[0].param)):
        if found_inf is None or not float(found_inf):
            for group in groups:
                _update_reference(group, float(steps[group.number]), chosen, work)
        return
    for bucket in alike(groups):
        device = memory_of(bucket[0].param).device
        their_steps = [steps[group.number] for group in bucket]
        numbers = _numbers(their_steps, chosen, bucket[0].compute, device)
        launch_groups(bucket, numbers, **_rule(chosen))


@torch.no_grad()
def adam_step_again(
    tables: KeptTables,
    bases: npt.NDArray[np.int64],
    *,
    steps: Sequence[torch.Tensor],
    **options: Any,
) -> None:
    """`adam_step` with its kernel, for operands that are consecutive in memory, on a device.

    steps : number of this step for each group: tensors of one element, or one of all.
    tables : of gradient, parameter, exp_avg, exp_avg_sq and, with amsgrad, max_exp_avg_sq.
    bases : int64 [operands, groups], the address of each one's first element.
    options : lr, betas, … of `adam_step`.
    """
    chosen = _Adam(**options)
    tables.at(bases).launch(
        _numbers(steps, chosen, tables.compute, tables.device),
        grad=tables.dtypes[0],
        param=tables.dtypes[1],
        state=dtype_name(tables.dtypes[2]),
        **_rule(chosen),
    )


def _rule(chosen: _Adam) -> dict[str, bool]:
    names = {"DECOUPLED": chosen.decoupled, "AMSGRAD": chosen.amsgrad}
    return {"ADAM": True, "maximize": chosen.maximize, **names}


def _numbers(
    steps: Sequence[Number], chosen: _Adam, compute: torch.dtype, device: torch.device
) -> torch.Tensor:
    """The kernel's table, worked out in float64, on the device if a number is there already."""
    scale = 1.0 if chosen.inv_scale is None else chosen.inv_scale
    found_inf = 0.0 if chosen.found_inf is None else chosen.found_inf
    weights = 1 - chosen.beta1, chosen.beta2, 1 - chosen.beta2, chosen.eps
    if all(map(is_on_host, (*steps, chosen.lr, scale, found_inf))):
        lr, told = float(chosen.lr), (float(scale), float(found_inf))
        decay = 1 - lr * chosen.weight_decay if chosen.decoupled else chosen.weight_decay
        columns: dict[float, list[float]] = {}  # most steps are the same
        numbers = [n for x in steps for n in _floats(x)]
        for n in numbers:
            if n not in columns:
                first, second = 1 - chosen.beta1**n, 1 - chosen.beta2**n
                columns[n] = [n, *told, decay, lr / first, math.sqrt(second), *weights]
        place_of = {n: place for place, n in enumerate(columns)}
        table_ = np.array([*columns.values()]).T[:, [place_of[n] for n in numbers]]
        return upload(torch.from_numpy(np.ascontiguousarray(table_)).to(compute), device)
    singly = [
        y for x in steps for y in (x.unbind() if isinstance(x, torch.Tensor) and x.dim() else [x])
    ]
    step, lr_ = doubles(singly, device), doubles([chosen.lr], device)
    if step.device != lr_.device:
        step, lr_ = (x.to(device, non_blocking=True) for x in (step, lr_))
    rows: list[torch.Tensor | float] = [
        step,
        doubles([scale], device),
        doubles([found_inf], device),
        1 - lr_ * chosen.weight_decay if chosen.decoupled else chosen.weight_decay,
        lr_ / (1 - chosen.beta1**step),
        (1 - chosen.beta2**step).sqrt(),
        *weights,
    ]
    return table(rows, len(singly), compute, device)


def _floats(number: Number) -> list[float]:
    values: list[float]
    values = number.reshape(-1).tolist() if isinstance(number, torch.Tensor) else [float(number)]
    return values


def adam_step_reference(
    params: Sequence[Operand],
    grads: Sequence[Operand],
    exp_avgs: Sequence[State],
    exp_avg_sqs: Sequence[State],
    **options: Any,
) -> None:
    """`adam_step` in plain torch: the same bits as torch.optim's for-loop where all is float32."""
    adam_step(params, grads, exp_avgs, exp_avg_sqs, **options, reference=True)


def _update_reference(group: Group, step: float, chosen: _Adam, work: torch.Tensor | None) -> None:
    """torch.optim's operations in its order, on a chunk after the other."""
    lr = chosen.lr.squeeze() if isinstance(chosen.lr, torch.Tensor) else chosen.lr
    step_size = -lr / (1 - chosen.beta1**step)
    root_correction = number((1 - chosen.beta2**step) ** 0.5, group)
    decay = number(1 - lr * chosen.weight_decay, group)
    beta2, eps = number(chosen.beta2, group), number(chosen.eps, group)
    for chunk in chunks(group, work):
        grad = chunk.grad.to(group.compute)
        if chosen.inv_scale is not None:
            grad = grad * chosen.inv_scale
        if chosen.maximize:
            grad = torch.neg(grad, out=chunk.rooms[0])
        param = chunk.read_param()
        avg, sq = chunk.read_state(0), chunk.read_state(1, root=True)
        if chosen.weight_decay != 0:
            if chosen.decoupled:
                param.mul_(decay)
            else:
                grad = torch.add(grad, param, alpha=chosen.weight_decay, out=chunk.rooms[0])
        avg.lerp_(grad, 1 - chosen.beta1)
        sq.mul_(beta2).addcmul_(grad, grad, value=1 - chosen.beta2)
        largest = sq
        if chosen.amsgrad:
            largest = chunk.read_state(2, root=True)
            torch.maximum(largest, sq, out=largest)
            chunk.write_state(2, largest, int(step), root=True, upper=True)
        denominator = torch.sqrt(largest, out=chunk.rooms[1])
        denominator.div_(root_correction).add_(eps)
        param.addcdiv_(avg, denominator, value=step_size)
        chunk.write_state(0, avg, int(step))
        chunk.write_state(1, sq, int(step), root=True, upper=True)
        chunk.write_param(param)
