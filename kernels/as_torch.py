"""Elementwise ops on pages of a CPU: PyTorch's own op, in the tensors' own dtypes, piece by piece.

The page kernels compute in float32 and round once. PyTorch on a CPU does otherwise with halves,
and its roots come from a library of vector mathematics, so its bits are its own op's only.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch

from .cpu_split import Place, Run, block_of, runs
from .elementwise_ops import OPS, Op
from .pieces import Operand, Paged, stretches

__all__ = ["can_be_cut", "elementwise_as_torch"]

Column = Operand | float  # a tensor without dimensions is the same for all elements
_NUMBERS = (0.37, -0.73)  # to try ops with; lerp has a formula for each
_INFINITE = (float("inf"), float("-inf"))


@torch.no_grad()
def elementwise_as_torch(
    op: str,
    outs: Sequence[Operand],
    columns: Sequence[Sequence[Column]],
    places: Sequence[Place] | None = None,
) -> None:
    """outs[i] = op(columns[0][i], columns[1][i], ...) on a CPU, bit for bit what PyTorch gives for
    whole contiguous tensors with as many threads as it has now.

    op : a name in `elementwise_ops.OPS`.
    outs : operands; one may be an input too, if it is the very same elements.
    columns : operands as long as their outs, numbers, or 0-dim tensors, of dtypes that PyTorch's op
        takes; float tensors' results are cast to their outs.
    places : where each out lies in its tensor; None: each is a whole one.
    """
    for i, out in enumerate(outs):
        values = [column[i] for column in columns]
        count = out.numel if isinstance(out, Paged) else out.numel()
        if count:
            _one(op, out, values, Place(0, count) if places is None else places[i])


def can_be_cut(op: str, out: torch.dtype, values: Sequence[Any], *, reordered: bool) -> bool:
    """Whether `elementwise_as_torch` gives PyTorch's bits for `op`; if `reordered`, also where
    PyTorch walks through memory in another order.

    values : tensors or numbers; dtypes and kinds matter only.
    """
    if OPS[op].moves:
        return True
    block = _block(op, out, _kinds(OPS[op], values))
    return block == 0 or (block is not None and not reordered)


def _one(op: str, out: Operand, values: Sequence[Column], place: Place) -> None:
    which = [i for i, value in enumerate(values) if _is_operand(value)]
    block = 0 if OPS[op].moves else _block(op, out.dtype, _kinds(OPS[op], values)) or 0
    threads = torch.get_num_threads()
    inputs: list[Any] = list(values)
    for views in stretches([out, *(values[i] for i in which)]):  # type: ignore[list-item]
        count = views[0].numel()
        todo = runs(count, place, block, threads) if block else [Run(0, count, False)]
        for start, stop, padded in todo:
            parts = [view[start:stop] for view in views]
            used = [_padded(part, block) for part in parts] if padded else parts
            for i, part in zip(which, used[1:], strict=True):
                inputs[i] = part
            _call(op, inputs, used[0])
            if padded:
                parts[0].copy_(used[0][: stop - start])
        place = place._replace(first=place.first + count)


def _padded(part: torch.Tensor, block: int) -> torch.Tensor:
    whole = torch.ones(block, dtype=part.dtype)
    whole[: part.numel()] = part
    return whole


def _is_operand(value: Any) -> bool:
    return isinstance(value, Paged) or (isinstance(value, torch.Tensor) and value.dim() > 0)


Kinds = tuple[torch.dtype | str, ...]


def _kinds(op: Op, values: Sequence[Any]) -> Kinds:
    """What decides how PyTorch computes: an operand's dtype, "cell <dtype>", "number" or "one"."""
    found: list[torch.dtype | str] = []
    for i, value in enumerate(values):
        parameter = i >= len(op.inputs) - op.parameters
        if _is_operand(value):
            found.append(value.dtype)
        elif isinstance(value, torch.Tensor):
            found.append(f"cell {value.dtype}")
        else:
            found.append("one" if parameter and value == 1 else "number")
    return tuple(found)


@cache
def _block(op: str, out: torch.dtype, kinds: Kinds) -> int | None:
    """`block_of` the op with such arguments; found out once in a process."""
    dtypes = [kind for kind in kinds if isinstance(kind, torch.dtype)]

    def sample(tensors: Sequence[torch.Tensor], number: float) -> torch.Tensor:
        given = iter(tensors)
        values: list[Any] = []
        for kind in kinds:
            if isinstance(kind, torch.dtype):
                values.append(next(given))
            elif kind.startswith("cell"):
                values.append(torch.tensor(number, dtype=getattr(torch, kind.split(".")[1])))
            else:
                values.append(1 if kind == "one" else number)
        result = torch.empty(tensors[0].numel(), dtype=out)
        _call(op, values, result)
        return result

    with torch.no_grad():
        found = [block_of(partial(sample, number=x), dtypes, x * x) for x in _NUMBERS]
    return None if None in found else max(filter(None, found), default=0)


def _call(op: str, values: Sequence[Any], out: torch.Tensor) -> None:
    """PyTorch's op as its callers reach it: numbers stay numbers where it takes them."""
    if op == "fill":
        out.fill_(values[0])
    elif op == "copy":
        out.copy_(values[0])
    elif op == "clamp":
        _clamp(values[0], values[1], values[2], out)
    else:
        given = list(values)
        tensors = {"maximum": 2, "minimum": 2, "where": 3}.get(op, 1)
        for i, value in enumerate(given[:tensors]):
            if not isinstance(value, torch.Tensor):
                given[i] = torch.tensor(value, dtype=torch.float64)  # as PyTorch wraps a number
        OPS[op].torch(*given, out=out)


def _clamp(x: torch.Tensor, low: Any, high: Any, out: torch.Tensor) -> None:
    if isinstance(high, float) and high in _INFINITE and high > 0:
        torch.clamp_min(x, low, out=out)
    elif isinstance(low, float) and low in _INFINITE and low < 0:
        torch.clamp_max(x, high, out=out)
    elif isinstance(low, torch.Tensor) == isinstance(high, torch.Tensor):
        torch.clamp(x, low, high, out=out)
    else:
        bounds = [torch.as_tensor(bound, dtype=x.dtype) for bound in (low, high)]
        torch.clamp(x, bounds[0], bounds[1], out=out)
