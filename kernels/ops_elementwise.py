"""Ops on lists of operands, each paged or dense: elementwise, reductions, GradScaler's check.

Lists are as `ops_define` says. None can be differentiated.

`elementwise` does outs[i] = op(input 0's i, input 1's i, ...) for the ops of `elementwise_ops`. Its
inputs are of any kind, so `kinds` has one letter for each, in order:

===  =============================================================================
t    a list of tensors as long as outs: the next so many of `inputs`; a 0-dim one
     stands for as many elements as its out has
c    one 0-dim tensor for all: the next of `inputs`
m    a list of numbers as long as outs: the next so many of `numbers`
n    one number for all: the next of `numbers`
===  =============================================================================

p += 0.5 * g on pages, then p *= c, where c is on the device and was just computed::

    ops.elementwise("add", arena, page_bytes, [numel], [none], [p_frames], "ttn",
                    [none, none], [p_frames, g_frames], [0.5])
    ops.elementwise("mul", arena, page_bytes, [numel], [none], [p_frames], "tc",
                    [none, c], [p_frames, no_frames], [])

where ``none = torch.empty(0, dtype=..., device=...)`` and ``no_frames = torch.empty(0,
dtype=torch.int32)``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import cast

import torch

from .elementwise import elementwise
from .elementwise_call import Input
from .norm import total_norm
from .ops_define import Call, decoded, define, operand_list
from .reduce import reduce
from .unscale import non_finite_check_and_unscale

__all__: list[str] = []


def _elementwise(call: Call) -> None:
    """See the module; the table of kinds is there."""
    op, kinds, numels, numbers = call.op, call.kinds, call.numels, call.numbers
    inputs, inputs_frames = call.inputs, call.inputs_frames
    count = len(numels)
    tensors, letters = {"t": count, "c": 1}, {"m": count, "n": 1}
    wrong = set(kinds) - {*tensors, *letters}
    if wrong:
        raise ValueError(f"kinds is {kinds!r}; use one of t, c, m, n for each input of {op}")
    wanted = sum(tensors.get(kind, 0) for kind in kinds), sum(letters.get(k, 0) for k in kinds)
    if (len(inputs), len(numbers)) != wanted:
        raise ValueError(
            f"kinds {kinds!r} of {count} outs takes {wanted[0]} inputs and {wanted[1]} numbers, "
            f"but there are {len(inputs)} and {len(numbers)}"
        )
    columns: list[Input] = []
    tensor = number = 0
    for kind in kinds:
        if kind in letters:
            some = list(numbers[number : number + letters[kind]])
            columns.append(some[0] if kind == "n" else some)
            number += letters[kind]
            continue
        here = slice(tensor, tensor + tensors[kind])
        sizes = numels if kind == "t" else [1]
        column = decoded(
            *("inputs", call.arena, call.page_bytes, sizes, inputs[here], inputs_frames[here]),
            cells=True,
        )
        columns.append(cast(Input, column[0] if kind == "c" else column))
        tensor += tensors[kind]
    elementwise(op, call.operands("outs"), *columns)


def _reduce(call: Call) -> torch.Tensor:
    found = reduce(call.operands("xs"), call.how, call.p, call.dtype)
    return found.to(call.arena.device)


def _reduce_fake(call: Call) -> torch.Tensor:
    dtype = torch.bool if call.how == "isfinite" else call.dtype or _promoted(call.xs)
    result: torch.Tensor = call.arena.new_empty((len(call.xs),), dtype=dtype)
    return result


def _promoted(xs: Sequence[torch.Tensor]) -> torch.dtype:
    dtypes = [x.dtype for x in xs]
    return functools.reduce(torch.promote_types, dtypes) if dtypes else torch.get_default_dtype()


define(
    f"elementwise(str op, Tensor(a!) arena, int page_bytes, SymInt[] numels, "
    f"{operand_list('outs', 'b')}, str kinds, {operand_list('inputs')}, float[] numbers) -> ()",
    _elementwise,
)
define(
    f"reduce(Tensor arena, int page_bytes, SymInt[] numels, {operand_list('xs')}, str how, "
    "float p=2.0, ScalarType? dtype=None) -> Tensor",
    _reduce,
    _reduce_fake,
)
define(
    f"total_norm(Tensor arena, int page_bytes, SymInt[] numels, {operand_list('xs')}, "
    "float p=2.0, ScalarType? dtype=None) -> Tensor",
    lambda c: total_norm(c.operands("xs"), c.p, c.dtype).to(c.arena.device),
    lambda c: c.arena.new_empty((), dtype=c.dtype or _promoted(c.xs)),
)
define(
    "non_finite_check_and_unscale(Tensor(a!) arena, int page_bytes, SymInt[] numels, "
    f"{operand_list('xs', 'b')}, Tensor(c!) found_inf, Tensor inv_scale) -> ()",
    lambda c: non_finite_check_and_unscale(c.operands("xs"), c.found_inf, c.inv_scale),
)
