"""Elementwise ops of PyTorch on tensors in pages: its own op, a stretch of frames after the other.

On an accelerator each element is computed by itself, so the bits are those of the op on all. On a
CPU they are too, if the op is cut where PyTorch cuts it itself, or nowhere that matters
(``cpu_split.py``).

Arguments of an op are passed by the names that its schema has for them; those of an op on lists
(``_foreach_*``) are lists of one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch

from .cpu_split import Place, Run, block_of, runs
from .pieces import Operand, Paged, memory_of, stretches

__all__ = ["can_be_cut", "is_of_lists", "name_of", "operands_of", "result_dtype", "run_as_torch"]

Given = Mapping[str, Any]

MOVES = frozenset({"zero", "fill", "copy", "where"})  # no arithmetic: no bits to lose
_NUMBERS = (0.37, -0.73)  # to try ops with; lerp has a formula for each
_PARAMETERS = ("alpha", "value")  # of which 1 has a formula of its own
_ELEMENTS = 1 << 16  # of a result that the op puts beside where it belongs


@torch.no_grad()
def run_as_torch(
    func: Any, given: Given, out: Operand | None = None, place: Place | None = None
) -> None:
    """``out = func(**given)``, or what ``func`` writes to its first argument, bit for bit what
    PyTorch gives for whole contiguous tensors (on a CPU: with as many threads as it has now).

    func : elementwise, an OpOverload of aten. given : all of its arguments; its operands
        (:func:`operands_of`) are in pages or dense and contiguous, of one length.
    out : an operand too, of the dtype that ``func`` gives; ``None`` where it works in place.
    place : where the operands lie in whole tensors, ``None`` if they are whole ones.

    Work of an accelerator is queued on the current stream.
    """
    operands = operands_of(func, given)
    column = [*([] if out is None else [out]), *operands.values()]
    block = 0
    if memory_of(column[0]).device.type == "cpu" and name_of(func) not in MOVES:
        block = _block(func, _kinds(func, given)) or 0
    direct = None if out is None else _writing_to_out(func)
    most = None if out is None or direct is not None else _ELEMENTS
    for views in stretches(column):
        count = views[0].numel()
        if place is None:
            numel = column[0].numel if isinstance(column[0], Paged) else column[0].numel()
            place = Place(0, numel)
        threads = torch.get_num_threads()
        todo = runs(count, place, block, threads, most) if block else _pieces(count, most)
        for start, stop, padded in todo:
            parts = [view[start:stop] for view in views]
            used = [_padded(part, block) for part in parts] if padded else parts
            here = _with(func, given, dict(zip(operands, used[-len(operands) :])))
            if direct is not None:
                one = {k: v[0] if isinstance(v, list) else v for k, v in here.items()}
                direct(**(one if is_of_lists(func) else here), out=used[0])
            else:
                made = func(**here)
                if out is not None:
                    used[0].copy_(made[0] if is_of_lists(func) else made)
            if padded:
                parts[0].copy_(used[0][: stop - start])
        place = place._replace(first=place.first + count)


def can_be_cut(func: Any, given: Given, *, reordered: bool) -> bool:
    """Whether :func:`run_as_torch` gives PyTorch's bits on a CPU; if ``reordered``, also where
    PyTorch walks through memory in another order. Of tensors only kinds and dtypes matter."""
    if name_of(func) in MOVES:
        return True
    block = _block(func, _kinds(func, given))
    return block == 0 or (block is not None and not reordered)


def result_dtype(func: Any, given: Given) -> torch.dtype:
    """Of what ``func`` gives. Raises ``RuntimeError`` for what PyTorch refuses."""
    return _result_dtype(func, _kinds(func, given))


@cache
def name_of(func: Any) -> str:
    """Of an op of aten, without what says that it is one of lists or works in place."""
    name: str = func._schema.name.removeprefix("aten::")
    return name.removeprefix("_foreach_").removesuffix("_")


def operands_of(func: Any, given: Given) -> dict[str, Any]:
    """Its tensors that are read or written element by element; of lists of one the elements."""
    found: dict[str, Any] = {}
    for name, value in given.items():
        if is_of_lists(func):
            value = value[0] if isinstance(value, list | tuple) and value else None
        if isinstance(value, Paged) or (isinstance(value, torch.Tensor) and value.dim()):
            found[name] = value
    return found


@cache
def is_of_lists(func: Any) -> bool:
    return bool(func._schema.name.startswith(("aten::_foreach_", "aten::_amp_foreach_")))


def _with(func: Any, given: Given, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    lists = is_of_lists(func)
    return {**given, **{name: [x] if lists else x for name, x in tensors.items()}}


@cache
def _writing_to_out(func: Any) -> Any:
    """The overload with ``out=`` that needs no memory beside it, of an op on lists that of the op
    on each element; ``None`` where there is none."""
    packet = getattr(torch.ops.aten, name_of(func)) if is_of_lists(func) else func.overloadpacket
    mine = [(a.name, str(a.type).replace("List[Tensor]", "Tensor")) for a in func._schema.arguments]
    for overload in packet.overloads():
        form = getattr(packet, overload)
        arguments = form._schema.arguments
        rest = [(a.name, str(a.type)) for a in arguments if a.name != "out"]
        known = torch._C._dispatch_has_kernel_for_dispatch_key
        if len(rest) < len(arguments) and rest == mine and known(form.name(), "CPU"):
            return form
    return None


def _pieces(count: int, most: int | None) -> list[Run]:
    step = count if most is None else most
    return [Run(start, min(start + step, count), False) for start in range(0, count, step)]


def _padded(part: torch.Tensor, block: int) -> torch.Tensor:
    whole = torch.ones(block, dtype=part.dtype)
    whole[: part.numel()] = part
    return whole


# -- what decides how PyTorch computes -------------------------------------------------------------
class _Kind:
    """Of an argument. ``OPERAND``, ``CELL`` (a tensor, the same for all elements) and ``NUMBER``
    have a representative each; others are what they are."""

    OPERAND, CELL, NUMBER, OTHER = range(4)


Kinds = tuple[tuple[str, int, Any], ...]


def _kinds(func: Any, given: Given) -> Kinds:
    operands = operands_of(func, given)
    found: list[tuple[str, int, Any]] = []
    for name, value in given.items():
        if name in operands:
            found.append((name, _Kind.OPERAND, operands[name].dtype))
        elif isinstance(value, torch.Tensor):
            found.append((name, _Kind.CELL, (value.dtype, value.dim())))
        elif isinstance(value, list | tuple):
            found.append((name, _Kind.NUMBER, True))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            one = name in _PARAMETERS and value == 1
            found.append((name, _Kind.OTHER, value) if one else (name, _Kind.NUMBER, False))
        else:
            found.append((name, _Kind.OTHER, value))
    return tuple(found)


def _sample(func: Any, kinds: Kinds, tensors: Sequence[torch.Tensor], number: float) -> Any:
    """``func`` of arguments of these kinds, in memory of their own."""
    given: dict[str, Any] = {}
    left = iter(tensors)
    operands = {}
    for name, kind, value in kinds:
        if kind == _Kind.OPERAND:
            operands[name] = next(left).clone()
        elif kind == _Kind.CELL:
            dtype, dims = value
            value = torch.full((1,) * dims, number, dtype=dtype)
        elif kind == _Kind.NUMBER:
            value = [number] if value else number
        given[name] = value
    result = func(**_with(func, given, operands))
    if result is None:  # of lists, in place
        return operands["self"]
    return result[0] if is_of_lists(func) else result


@cache
def _block(func: Any, kinds: Kinds) -> int | None:
    """``block_of`` the op with such arguments; found out once in a process."""
    dtypes = [value for _, kind, value in kinds if kind == _Kind.OPERAND]
    with torch.no_grad():
        tries = ((partial(_sample, func, kinds, number=x), x * x) for x in _NUMBERS)
        found = [block_of(run, dtypes, product) for run, product in tries]
    return None if None in found else max(filter(None, found), default=0)


@cache
def _result_dtype(func: Any, kinds: Kinds) -> torch.dtype:
    dtypes = [value for _, kind, value in kinds if kind == _Kind.OPERAND]
    with torch.no_grad():
        tensors = [torch.ones(1, dtype=dtype) for dtype in dtypes]
        dtype: torch.dtype = _sample(func, kinds, tensors, _NUMBERS[0]).dtype
    return dtype
