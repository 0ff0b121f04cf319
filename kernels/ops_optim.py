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

from typing import Any

import torch

from .adam import adam_step
from .blockwise import BLOCK, Blockwise
from .ops_define import Call, define, operand_list
from .quantize import dequantize, quantize
from .sgd import sgd_step
from .update import Number, State

__all__: list[str] = []

# What both steps call as the launchers do.
_SAME = ("weight_decay", "maximize", "found_inf", "seeds", "firsts")


def _adam(call: Call) -> None:
    kinds = _states(call, 3 if call.amsgrad else 2)
    adam_step(
        call.operands("params"),
        call.operands("grads"),
        kinds[0],
        kinds[1],
        max_exp_avg_sqs=kinds[2] if call.amsgrad else None,
        steps=[_number(step) for step in call.steps],
        **call.named("beta1", "beta2", "eps", "decoupled", "amsgrad", *_SAME),
        **_numbers_and_masters(call),
    )


def _sgd(call: Call) -> None:
    kinds = _states(call, 1 if call.momentum else 0)
    sgd_step(
        call.operands("params"),
        call.operands("grads"),
        kinds[0] if call.momentum else None,
        step=_number(call.step),
        **call.named("momentum", "dampening", "nesterov", "first", *_SAME),
        **_numbers_and_masters(call),
    )


def _numbers_and_masters(call: Call) -> dict[str, Any]:
    return {
        "masters": call.operands("masters") if call.masters else None,
        "lr": _number(call.lr),
        "inv_scale": None if call.inv_scale is None else _number(call.inv_scale),
    }


def _states(call: Call, kinds: int) -> list[list[State]]:
    """The states of each kind."""
    count = len(call.numels)
    numels = list(call.numels) * kinds
    found: list[State] = [*call.operands("states", numels)]
    if call.scales:
        blocks = [
            -(-numel // BLOCK) if state.dtype == torch.uint8 else 0
            for numel, state in zip(numels, call.states, strict=True)
        ]
        given = call.operands("scales", blocks)
        found = [
            Blockwise(state, scale)
            if not isinstance(state, Blockwise) and state.dtype == torch.uint8
            else state
            for state, scale in zip(found, given, strict=True)
        ]
    return [found[kind * count : (kind + 1) * count] for kind in range(kinds)]


def _blockwise(call: Call) -> list[Blockwise]:
    scales = call.operands("scales", [-(-numel // BLOCK) for numel in call.numels])
    return [Blockwise(*each) for each in zip(call.operands("codes"), scales, strict=True)]


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
    lambda c: quantize(c.operands("values"), _blockwise(c), root=c.root),
)
define(
    f"dequantize({_CALL}, {operand_list('codes')}, {operand_list('scales')}, "
    f"{operand_list('values', 'b')}, bool root) -> ()",
    lambda c: dequantize(_blockwise(c), c.operands("values"), root=c.root),
)
