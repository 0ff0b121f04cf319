"""Optimizer steps and 8-bit states as ops. None can be differentiated.

Lists are as `ops_define` says, and `numels` are the parameters'. States and scales are in one list
each, kind after kind: for Adam all exp_avgs, then all exp_avg_sqs, then, with amsgrad, all
max_exp_avg_sqs. A state in 8 bits is uint8 codes, and has float32 scales, one for each block of 256
elements, in the same place of `scales`; a state that is not has an empty tensor there. `scales` and
`masters` may be empty lists.

Numbers that change from step to step are tensors of one element, so that a compiled function need
not be compiled again: on the host they are read at the call, on the device in stream order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .adam import adam_step
from .blockwise import BLOCK, Blockwise
from .ops_define import decoded, define, operand_list
from .pieces import Operand
from .quantize import dequantize, quantize
from .sgd import sgd_step
from .update import Number, State

__all__: list[str] = []

_Tensors = Sequence[torch.Tensor]


def _adam(
    arena: torch.Tensor,
    page_bytes: int,
    numels: Sequence[int],
    params: _Tensors,
    params_frames: _Tensors,
    grads: _Tensors,
    grads_frames: _Tensors,
    states: _Tensors,
    states_frames: _Tensors,
    scales: _Tensors,
    scales_frames: _Tensors,
    masters: _Tensors,
    masters_frames: _Tensors,
    steps: _Tensors,
    lr: torch.Tensor,
    inv_scale: torch.Tensor | None,
    found_inf: torch.Tensor | None,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    amsgrad: bool = False,
    maximize: bool = False,
    seeds: Sequence[int] | None = None,
    firsts: Sequence[int] | None = None,
) -> None:
    kinds = _states(
        *(arena, page_bytes, numels, states, states_frames, scales, scales_frames),
        kinds=3 if amsgrad else 2,
    )
    adam_step(
        decoded("params", arena, page_bytes, numels, params, params_frames),
        decoded("grads", arena, page_bytes, numels, grads, grads_frames),
        kinds[0],
        kinds[1],
        max_exp_avg_sqs=kinds[2] if amsgrad else None,
        masters=_masters(arena, page_bytes, numels, masters, masters_frames),
        steps=[_number(step) for step in steps],
        lr=_number(lr),
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        decoupled=decoupled,
        amsgrad=amsgrad,
        maximize=maximize,
        inv_scale=None if inv_scale is None else _number(inv_scale),
        found_inf=found_inf,
        seeds=seeds,
        firsts=firsts,
    )


def _sgd(
    arena: torch.Tensor,
    page_bytes: int,
    numels: Sequence[int],
    params: _Tensors,
    params_frames: _Tensors,
    grads: _Tensors,
    grads_frames: _Tensors,
    states: _Tensors,
    states_frames: _Tensors,
    scales: _Tensors,
    scales_frames: _Tensors,
    masters: _Tensors,
    masters_frames: _Tensors,
    step: torch.Tensor,
    lr: torch.Tensor,
    inv_scale: torch.Tensor | None,
    found_inf: torch.Tensor | None,
    first: Sequence[bool],
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    maximize: bool = False,
    seeds: Sequence[int] | None = None,
    firsts: Sequence[int] | None = None,
) -> None:
    kinds = _states(
        *(arena, page_bytes, numels, states, states_frames, scales, scales_frames),
        kinds=1 if momentum else 0,
    )
    sgd_step(
        decoded("params", arena, page_bytes, numels, params, params_frames),
        decoded("grads", arena, page_bytes, numels, grads, grads_frames),
        kinds[0] if momentum else None,
        lr=_number(lr),
        momentum=momentum,
        dampening=dampening,
        weight_decay=weight_decay,
        nesterov=nesterov,
        maximize=maximize,
        first=list(first),
        masters=_masters(arena, page_bytes, numels, masters, masters_frames),
        inv_scale=None if inv_scale is None else _number(inv_scale),
        found_inf=found_inf,
        seeds=seeds,
        step=_number(step),
        firsts=firsts,
    )


def _quantize(
    arena: torch.Tensor,
    page_bytes: int,
    numels: Sequence[int],
    values: _Tensors,
    values_frames: _Tensors,
    codes: _Tensors,
    codes_frames: _Tensors,
    scales: _Tensors,
    scales_frames: _Tensors,
    root: bool,
) -> None:
    quantize(
        decoded("values", arena, page_bytes, numels, values, values_frames),
        _blockwise(arena, page_bytes, numels, codes, codes_frames, scales, scales_frames),
        root=root,
    )


def _dequantize(
    arena: torch.Tensor,
    page_bytes: int,
    numels: Sequence[int],
    codes: _Tensors,
    codes_frames: _Tensors,
    scales: _Tensors,
    scales_frames: _Tensors,
    values: _Tensors,
    values_frames: _Tensors,
    root: bool,
) -> None:
    dequantize(
        _blockwise(arena, page_bytes, numels, codes, codes_frames, scales, scales_frames),
        decoded("values", arena, page_bytes, numels, values, values_frames),
        root=root,
    )


def _states(
    arena: torch.Tensor,
    page_bytes: int,
    numels: Sequence[int],
    states: _Tensors,
    states_frames: _Tensors,
    scales: _Tensors,
    scales_frames: _Tensors,
    kinds: int,
) -> list[list[State]]:
    """The states of each kind."""
    count = len(numels)
    all_numels = list(numels) * kinds
    found: list[State] = [*decoded("states", arena, page_bytes, all_numels, states, states_frames)]
    if scales:
        blocks = [
            -(-numel // BLOCK) if state.dtype == torch.uint8 else 0
            for numel, state in zip(all_numels, states, strict=True)
        ]
        given = decoded("scales", arena, page_bytes, blocks, scales, scales_frames)
        found = [
            Blockwise(state, scale)
            if not isinstance(state, Blockwise) and state.dtype == torch.uint8
            else state
            for state, scale in zip(found, given, strict=True)
        ]
    return [found[kind * count : (kind + 1) * count] for kind in range(kinds)]


def _blockwise(
    arena: torch.Tensor,
    page_bytes: int,
    numels: Sequence[int],
    codes: _Tensors,
    codes_frames: _Tensors,
    scales: _Tensors,
    scales_frames: _Tensors,
) -> list[Blockwise]:
    blocks = [-(-numel // BLOCK) for numel in numels]
    pairs = zip(
        decoded("codes", arena, page_bytes, numels, codes, codes_frames),
        decoded("scales", arena, page_bytes, blocks, scales, scales_frames),
        strict=True,
    )
    return [Blockwise(code, scale) for code, scale in pairs]


def _masters(
    arena: torch.Tensor,
    page_bytes: int,
    numels: Sequence[int],
    masters: _Tensors,
    masters_frames: _Tensors,
) -> list[Operand] | None:
    if not masters:
        return None
    return decoded("masters", arena, page_bytes, numels, masters, masters_frames)


def _number(tensor: torch.Tensor) -> Number:
    """A tensor on the device as it is; one on the host as the number that it holds now."""
    if tensor.numel() != 1:
        raise ValueError(f"a number is a tensor of shape {tuple(tensor.shape)}; pass one element")
    return float(tensor) if tensor.device.type == "cpu" else tensor


_CALL = "Tensor(a!) arena, int page_bytes, SymInt[] numels"
_STEP = ", ".join(
    [
        _CALL,
        operand_list("params", "b"),
        operand_list("grads"),
        operand_list("states", "c"),
        operand_list("scales", "d"),
        operand_list("masters", "e"),
    ]
)

define(
    f"adam_step({_STEP}, Tensor[] steps, Tensor lr, Tensor? inv_scale, Tensor? found_inf, "
    "float beta1, float beta2, float eps, float weight_decay, bool decoupled, "
    "bool amsgrad=False, bool maximize=False, int[]? seeds=None, SymInt[]? firsts=None) -> ()",
    _adam,
)
define(
    f"sgd_step({_STEP}, Tensor step, Tensor lr, Tensor? inv_scale, Tensor? found_inf, "
    "bool[] first, float momentum, float dampening, float weight_decay, bool nesterov, "
    "bool maximize=False, int[]? seeds=None, SymInt[]? firsts=None) -> ()",
    _sgd,
)
define(
    f"quantize({_CALL}, {operand_list('values')}, {operand_list('codes', 'b')}, "
    f"{operand_list('scales', 'c')}, bool root) -> ()",
    _quantize,
)
define(
    f"dequantize({_CALL}, {operand_list('codes')}, {operand_list('scales')}, "
    f"{operand_list('values', 'b')}, bool root) -> ()",
    _dequantize,
)
