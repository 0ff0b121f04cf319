"""Calls of elementwise ops: arguments of any kind, sorted into batches that one launch can do.

A batch is the part of a list whose operands have the same dtypes; most lists are one batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple, TypeAlias, cast

import torch

from .elementwise_ops import Op, op_named
from .pieces import Operand, Paged, dtype_name, memory_of, numel_of

__all__ = ["Batch", "Input", "Kind", "Slot", "batches"]

Input: TypeAlias = Sequence[Operand] | Sequence[float] | torch.Tensor | float | None
Value: TypeAlias = Operand | float

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Kind(Enum):
    """What an input is: one value for each element, one in device memory, one on the host."""

    OPERAND = "operand"
    CELL = "cell"
    NUMBER = "number"


class Slot(NamedTuple):
    """An input of a batch; a number has the batch's own dtype."""

    kind: Kind
    dtype: torch.dtype


@dataclass(frozen=True)
class Batch:
    """Groups that one launch does.

    compute : what the op is computed in: float32, float64, or, where it only moves bits, a signed
        integer of their width, which is then the dtype of all operands too.
    out : dtype of the outputs.
    slots : one for each input of the op.
    outs : one for each group.
    values : what fills the slots, for each group.
    """

    op: Op
    compute: torch.dtype
    out: torch.dtype
    slots: tuple[Slot, ...]
    outs: list[Operand]
    values: list[list[Value]]

    def groups(self) -> list[list[Operand]]:
        """For each group its output and its inputs of kind OPERAND, in order."""
        which = [i for i, slot in enumerate(self.slots) if slot.kind is Kind.OPERAND]
        return [
            [out, *(cast(Operand, values[i]) for i in which)]
            for out, values in zip(self.outs, self.values, strict=True)
        ]


def batches(name: str, outs: Sequence[Operand], inputs: Sequence[Input]) -> list[Batch]:
    """Sort the arguments of `elementwise`; groups without elements are left out.

    Raises ValueError, naming the argument, for what `elementwise` does not take.
    """
    op = op_named(name)
    if isinstance(outs, torch.Tensor) or not isinstance(outs, Sequence):
        raise ValueError(f"outs of {name} is {_described(outs)}; pass a list of operands")
    columns = _columns(name, op, inputs, len(outs))
    found: dict[tuple[torch.dtype, tuple[Slot, ...]], Batch] = {}
    for number, out in enumerate(outs):
        where = f"{number} of {name}"
        if memory_of(out).device != memory_of(outs[0]).device:
            raise ValueError(
                f"out {where} is on {memory_of(out).device}, out 0 on {memory_of(outs[0]).device}; "
                "call it once for each device"
            )
        compute, slots, group = _typed(
            name, op, where, [out, *(column[number] for column in columns)]
        )
        if numel_of(out):
            key = (slots[0].dtype, slots[1:])
            batch = found.setdefault(key, Batch(op, compute, *key, [], []))
            batch.outs.append(cast(Operand, group[0]))
            batch.values.append(group[1:])
    return list(found.values())


def _columns(name: str, op: Op, inputs: Sequence[Input], count: int) -> list[list[Value]]:
    """For each input of the op one value for each group."""
    required = len(op.inputs) - len(op.defaults)
    if not required <= len(inputs) <= len(op.inputs):
        optional = f", the last {len(op.defaults)} if wanted" if op.defaults else ""
        raise ValueError(f"{name} got {len(inputs)} inputs; pass {', '.join(op.inputs)}{optional}")
    columns: list[list[Value]] = []
    for i, label in enumerate(op.inputs):
        given = inputs[i] if i < len(inputs) else None
        if given is None and i >= required:
            given = op.defaults[i - required]
        if isinstance(given, int | float) or (isinstance(given, torch.Tensor) and not given.dim()):
            columns.append([given] * count)
        elif isinstance(given, torch.Tensor) or not isinstance(given, Sequence):
            raise ValueError(
                f"{label} of {name} is {_described(given)}; pass a list of operands or numbers, "
                "one number, or a 0-dim tensor"
            )
        elif len(given) != count:
            raise ValueError(
                f"{label} of {name} has {len(given)} entries and outs {count}; pass one for each"
            )
        else:
            columns.append(list(given))
    return columns


def _typed(
    name: str, op: Op, where: str, group: list[Value]
) -> tuple[torch.dtype, tuple[Slot, ...], list[Value]]:
    """What a group is computed in, the slots of its output and inputs, and what fills them."""
    out = cast(Operand, group[0])
    labels = ["out", *op.inputs]
    slots: list[Slot] = []
    for i, value in enumerate(group):
        if not isinstance(value, int | float | Paged | torch.Tensor):
            raise ValueError(f"{labels[i]} {where} is {_described(value)}; pass an operand")
        parameter = i >= len(labels) - op.parameters
        if _is_on_host(value) and memory_of(out).device.type != "cpu":
            group[i] = value = cast(torch.Tensor, value).item()
        slots.append(_slot(f"{labels[i]} {where}", value, out, parameter))
    if op.condition:
        mask = group[1]
        if slots[1].kind is not Kind.OPERAND or slots[1].dtype not in (torch.bool, torch.uint8):
            raise ValueError(
                f"condition {where} is {_described(mask)}; pass bool or uint8 elements"
            )
        group[1], slots[1] = _viewed(mask, torch.uint8), Slot(Kind.OPERAND, torch.uint8)
    data = [i for i in range(len(group)) if not (op.condition and i == 1)]
    dtypes = {slots[i].dtype for i in data if slots[i].kind is not Kind.NUMBER}
    if op.moves and len(dtypes) == 1 and out.dtype.itemsize in BITS:
        compute = BITS[out.dtype.itemsize]
        for i in data:
            group[i] = _bits(f"{labels[i]} {where}", group[i], out.dtype)
            slots[i] = Slot(slots[i].kind, compute)
        return compute, tuple(slots), group
    for i in data:
        integers = slots[i].kind is Kind.CELL or (i > 0 and name == "copy")
        allowed = FLOATS + INTEGERS if integers else FLOATS
        if slots[i].kind is not Kind.NUMBER and slots[i].dtype not in allowed:
            raise ValueError(
                f"{labels[i]} {where} is {slots[i].dtype}; convert it to one of "
                + ", ".join(map(dtype_name, allowed))
            )
    wide = any(slot.kind is Kind.OPERAND and slot.dtype is torch.float64 for slot in slots)
    compute = torch.float64 if wide else torch.float32
    for i in data:
        if slots[i].kind is Kind.NUMBER:
            slots[i], group[i] = Slot(Kind.NUMBER, compute), float(cast(float, group[i]))
    return compute, tuple(slots), group


def _is_on_host(value: Value) -> bool:
    return isinstance(value, torch.Tensor) and not value.dim() and value.device.type == "cpu"


def _slot(label: str, value: Value, out: Operand, parameter: bool) -> Slot:
    if isinstance(value, int | float):
        return Slot(Kind.NUMBER, torch.float64)
    here, there = memory_of(value).device, memory_of(out).device
    if here != there:
        raise ValueError(f"{label} is on {here}, its out on {there}; move it there")
    if isinstance(value, torch.Tensor) and not value.dim():
        broadcast = parameter or not (isinstance(out, torch.Tensor) and not out.dim())
        return Slot(Kind.CELL if broadcast else Kind.OPERAND, value.dtype)
    if parameter:
        raise ValueError(f"{label} is {_described(value)}; pass a number or a 0-dim tensor")
    if numel_of(value) != numel_of(out):
        raise ValueError(
            f"{label} has {numel_of(value)} elements and its out {numel_of(out)}; they must agree"
        )
    return Slot(Kind.OPERAND, value.dtype)


def _bits(label: str, value: Value, dtype: torch.dtype) -> Value:
    """The same as a signed integer, or as an operand of such."""
    bits = BITS[dtype.itemsize]
    if not isinstance(value, int | float):
        return _viewed(value, bits)
    info = None if dtype.is_floating_point or dtype.is_complex else _integer_info(dtype)
    if info and not (math.isfinite(value) and value == int(value) and info[0] <= value <= info[1]):
        raise ValueError(
            f"{label} is {value}; {dtype} holds whole numbers from {info[0]} to {info[1]}"
        )
    exact = int(value) if info else value
    source = torch.tensor([exact], dtype=dtype if info else torch.float64)
    return int(source.to(dtype).view(bits))


def _integer_info(dtype: torch.dtype) -> tuple[int, int]:
    """Least and greatest value."""
    if dtype is torch.bool:
        return 0, 1
    info = torch.iinfo(dtype)
    return int(info.min), int(info.max)


def _viewed(value: Value, dtype: torch.dtype) -> Operand:
    """An operand with its bytes read as another dtype of the same width."""
    if isinstance(value, Paged):
        return replace(value, dtype=dtype)
    return cast(torch.Tensor, value).detach().view(dtype)


def _described(value: object) -> str:
    if isinstance(value, Paged):
        return f"a paged {value.dtype} of {value.numel} elements"
    if isinstance(value, torch.Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    return repr(value)
