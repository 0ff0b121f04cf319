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

from .launch import tl, triton, upload, use_triton
from .pieces import Operand, dtype_name, memory_of
from .rounding import load_as, random_bits, random_key, store_as, tile_elements, tile_rows
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
    load_state,
    make_groups,
    number,
    state_dtype,
    store_state,
    table,
    warps,
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
    amsgrad: bool
    maximize: bool
    inv_scale: Number | None
    found_inf: torch.Tensor | None


@triton.jit
def _update(
    addresses_ptr,
    pieces,
    piece,
    scales_ptr,
    first,
    length,
    key,
    element,
    numbers_ptr,
    groups,
    GRAD: tl.constexpr,
    PARAM: tl.constexpr,
    STATE: tl.constexpr,
    MASTER: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    DECOUPLED: tl.constexpr,
    AMSGRAD: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    ALIGNED: tl.constexpr,
    MASKED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Update elements [first, first + TILE) of a piece; without MASKED it has so many.

    key, element : random key, and number of the piece's first element, both uint32.
    """
    rows = tile_rows(first, TILE)
    at = tile_elements(rows)
    row = addresses_ptr + piece
    grad_at = tl.load(row)
    param_at = tl.load(row + pieces)
    avg_at = tl.load(row + 2 * pieces)
    sq_at = tl.load(row + 3 * pieces)
    avg_scales = avg_at
    sq_scales = sq_at
    if STATE == "uint8":
        avg_scales = tl.load(scales_ptr + piece)
        sq_scales = tl.load(scales_ptr + pieces + piece)

    step_size = tl.load(numbers_ptr + groups)
    root_correction = tl.load(numbers_ptr + 2 * groups)
    decay = tl.load(numbers_ptr + 3 * groups)
    weight1 = tl.load(numbers_ptr + 4 * groups)
    beta2 = tl.load(numbers_ptr + 5 * groups)
    weight2 = tl.load(numbers_ptr + 6 * groups)
    eps = tl.load(numbers_ptr + 7 * groups)
    inv_scale = tl.load(numbers_ptr + 8 * groups)

    grad = load_as(grad_at, at, length, GRAD, ALIGNED, MASKED) * inv_scale
    if MASTER:
        master_at = tl.load(row + (5 if AMSGRAD else 4) * pieces)
        param = load_as(master_at, at, length, "float32", ALIGNED, MASKED)
    else:
        param = load_as(param_at, at, length, PARAM, ALIGNED, MASKED)
    avg = load_state(avg_at, avg_scales, at, rows, length, STATE, False, ALIGNED, MASKED)
    sq = load_state(sq_at, sq_scales, at, rows, length, STATE, True, ALIGNED, MASKED)

    if MAXIMIZE:
        grad = -grad
    if DECOUPLED:
        param = param * decay
    else:
        grad = tl.where(decay != 0, grad + decay * param, grad)
    # As torch's lerp, which keeps its precision at both ends.
    change = grad - avg
    avg = tl.where(weight1 < 0.5, avg + weight1 * change, grad - change * (1 - weight1))
    sq = sq * beta2 + weight2 * grad * grad

    random = at.to(tl.uint32)
    if STOCHASTIC:
        random = random_bits(key, element + random)
    low = random & 0xFFFF
    high = random >> 16
    store_state(
        avg_at, avg_scales, at, rows, avg, low, length, STATE, False, STOCHASTIC, ALIGNED, MASKED
    )
    store_state(
        sq_at, sq_scales, at, rows, sq, high, length, STATE, True, STOCHASTIC, ALIGNED, MASKED
    )
    if AMSGRAD:
        max_at = tl.load(row + 4 * pieces)
        max_scales = max_at
        if STATE == "uint8":
            max_scales = tl.load(scales_ptr + 2 * pieces + piece)
        largest = load_state(max_at, max_scales, at, rows, length, STATE, True, ALIGNED, MASKED)
        # As torch's maximum, which keeps NaN.
        sq = tl.where((largest > sq) | (largest != largest), largest, sq)
        store_state(
            max_at, max_scales, at, rows, sq, high, length, STATE, True, STOCHASTIC, ALIGNED, MASKED
        )
    if PARAM == "float64":
        denominator = tl.sqrt(sq) / root_correction + eps
        param = param - step_size * avg / denominator
    else:
        denominator = tl.div_rn(tl.sqrt_rn(sq), root_correction) + eps
        param = param - tl.div_rn(step_size * avg, denominator)
    store_as(param_at, at, param, length, PARAM, ALIGNED, MASKED)
    if MASTER:
        store_as(master_at, at, param, length, "float32", ALIGNED, MASKED)


@triton.jit(
    do_not_specialize=["pieces", "groups", "tiles"],
    do_not_specialize_on_alignment=[
        "addresses_ptr",
        "scales_ptr",
        "lengths_ptr",
        "group_ptr",
        "starts_ptr",
        "seeds_ptr",
        "numbers_ptr",
    ],
)
def _adam_step_kernel(
    addresses_ptr,
    scales_ptr,
    lengths_ptr,
    group_ptr,
    starts_ptr,
    seeds_ptr,
    numbers_ptr,
    pieces,
    groups,
    tiles,
    GRAD: tl.constexpr,
    PARAM: tl.constexpr,
    MASTER: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
    STATE: tl.constexpr,
    DECOUPLED: tl.constexpr,
    AMSGRAD: tl.constexpr,
    MAXIMIZE: tl.constexpr,
):
    """Program t updates tile t % tiles of piece t // tiles, if the piece has so many.

    addresses : int64 [operands, pieces]: gradient, parameter, exp_avg, exp_avg_sq, then
        max_exp_avg_sq and master where there are any.
    scales : int64 [8-bit states, pieces], addresses of the first scale of each piece.
    numbers : [10, groups], see `_numbers`.
    """
    piece = tl.program_id(0) // tiles
    first = tl.program_id(0) % tiles * TILE
    group = tl.load(group_ptr + piece)
    length = tl.load(lengths_ptr + piece)
    numbers_ptr += group
    found_inf = tl.load(numbers_ptr + 9 * groups)
    if (first < length) & (found_inf == 0):
        start = tl.load(starts_ptr + piece)
        key = tl.load(seeds_ptr + group).to(tl.uint32)
        if STOCHASTIC:
            key = random_key(key, tl.load(numbers_ptr).to(tl.int32), start)
        element = start.to(tl.uint32)
        if first + TILE <= length:
            _update(
                addresses_ptr,
                pieces,
                piece,
                scales_ptr,
                first,
                length,
                key,
                element,
                numbers_ptr,
                groups,
                GRAD,
                PARAM,
                STATE,
                MASTER,
                STOCHASTIC,
                DECOUPLED,
                AMSGRAD,
                MAXIMIZE,
                ALIGNED,
                False,
                TILE,
            )
        else:
            _update(
                addresses_ptr,
                pieces,
                piece,
                scales_ptr,
                first,
                length,
                key,
                element,
                numbers_ptr,
                groups,
                GRAD,
                PARAM,
                STATE,
                MASTER,
                STOCHASTIC,
                DECOUPLED,
                AMSGRAD,
                MAXIMIZE,
                ALIGNED,
                True,
                TILE,
            )


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
    returns when the step is done. Raises ValueError for operands that do not go together, before
    anything is written.
    """
    chosen = _Adam(
        *(lr, beta1, beta2, eps, weight_decay, decoupled, amsgrad, maximize, inv_scale, found_inf)
    )
    groups = _groups(
        *(params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, masters, steps),
        *(amsgrad, seeds, firsts),
    )
    if not groups:
        return
    if reference or not use_triton(memory_of(groups[0].param)):
        _run_reference(groups, steps, chosen, work)
        return
    for bucket in alike(groups):
        device = memory_of(bucket[0].param).device
        their_steps = [steps[group.number] for group in bucket]
        numbers = _numbers(their_steps, chosen, bucket[0].compute, device)
        state = state_dtype(bucket[0])
        launch_groups(
            _adam_step_kernel,
            bucket,
            numbers,
            STATE=state,
            DECOUPLED=decoupled,
            AMSGRAD=amsgrad,
            MAXIMIZE=maximize,
            num_warps=warps(state),
        )


@torch.no_grad()
def adam_step_again(
    tables: KeptTables,
    bases: npt.NDArray[np.int64],
    *,
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
) -> None:
    """`adam_step` with its kernel, for operands that are consecutive in memory, on a device.

    tables : of gradient, parameter, exp_avg, exp_avg_sq and, with amsgrad, max_exp_avg_sq.
    bases : int64 [operands, groups], the address of each one's first element.
    """
    chosen = _Adam(
        *(lr, beta1, beta2, eps, weight_decay, decoupled, amsgrad, maximize, inv_scale, found_inf)
    )
    state = dtype_name(tables.dtypes[2])
    tables.at(bases).launch(
        _adam_step_kernel,
        _numbers(steps, chosen, tables.compute, tables.device),
        grad=tables.dtypes[0],
        param=tables.dtypes[1],
        STATE=state,
        DECOUPLED=decoupled,
        AMSGRAD=amsgrad,
        MAXIMIZE=maximize,
        num_warps=warps(state),
    )


def _groups(
    params: Sequence[Operand],
    grads: Sequence[Operand],
    exp_avgs: Sequence[State],
    exp_avg_sqs: Sequence[State],
    max_exp_avg_sqs: Sequence[State] | None,
    masters: Sequence[Operand] | None,
    steps: Sequence[Number],
    amsgrad: bool,
    seeds: Sequence[int] | None,
    firsts: Sequence[int] | None,
) -> list[Group]:
    if amsgrad != (max_exp_avg_sqs is not None):
        raise ValueError(f"amsgrad is {amsgrad}; pass max_exp_avg_sqs if, and only if, it is True")
    if len(steps) != len(params):
        raise ValueError(f"steps has {len(steps)} entries for {len(params)} params; pass as many")
    states = {
        "exp_avgs": exp_avgs,
        "exp_avg_sqs": exp_avg_sqs,
        "max_exp_avg_sqs": max_exp_avg_sqs,
    }
    return make_groups(params, grads, states, masters, seeds, firsts)


def _numbers(
    steps: Sequence[Number], chosen: _Adam, compute: torch.dtype, device: torch.device
) -> torch.Tensor:
    """The kernel's table, worked out in float64, on the device if a number is there already."""
    scale = 1.0 if chosen.inv_scale is None else chosen.inv_scale
    found_inf = 0.0 if chosen.found_inf is None else chosen.found_inf
    weights = 1 - chosen.beta1, chosen.beta2, 1 - chosen.beta2, chosen.eps
    if all(is_on_host(x) for x in (*steps, chosen.lr, scale, found_inf)):
        lr, rest = float(chosen.lr), (*weights, float(scale), float(found_inf))
        decay = 1 - lr * chosen.weight_decay if chosen.decoupled else chosen.weight_decay
        columns: dict[float, list[float]] = {}  # most steps are the same
        numbers = [float(x) for x in steps]
        for n in numbers:
            if n not in columns:
                first, second = 1 - chosen.beta1**n, 1 - chosen.beta2**n
                columns[n] = [n, lr / first, math.sqrt(second), decay, *rest]
        table_ = torch.tensor([columns[n] for n in numbers], dtype=torch.float64).T
        return upload(table_.to(compute).contiguous(), device)
    step, lr_ = doubles(steps, device), doubles([chosen.lr], device)
    if step.device != lr_.device:
        step, lr_ = (x.to(device, non_blocking=True) for x in (step, lr_))
    rows: list[torch.Tensor | float] = [
        step,
        lr_ / (1 - chosen.beta1**step),
        (1 - chosen.beta2**step).sqrt(),
        1 - lr_ * chosen.weight_decay if chosen.decoupled else chosen.weight_decay,
        *weights,
        doubles([scale], device),
        doubles([found_inf], device),
    ]
    return table(rows, len(steps), compute, device)


def adam_step_reference(
    params: Sequence[Operand],
    grads: Sequence[Operand],
    exp_avgs: Sequence[State],
    exp_avg_sqs: Sequence[State],
    **options: Any,
) -> None:
    """`adam_step` in plain torch: the same bits as torch.optim's for-loop where all is float32."""
    adam_step(params, grads, exp_avgs, exp_avg_sqs, **options, reference=True)


def _run_reference(
    groups: Sequence[Group], steps: Sequence[Number], chosen: _Adam, work: torch.Tensor | None
) -> None:
    if chosen.found_inf is not None and float(chosen.found_inf):
        return
    for group in groups:
        _update_reference(group, float(steps[group.number]), chosen, work)


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
