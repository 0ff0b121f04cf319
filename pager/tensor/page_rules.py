"""When the elementwise page kernels do exactly what PyTorch does: geometry and dtypes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from .paged_tensor import PagedTensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_HALVES = (torch.float16, torch.bfloat16)
_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
_SAME_DTYPE = ("addcmul", "addcdiv", "lerp", "clamp", "where")  # other mixtures: torch's own rules

Number = int | float
Value = torch.Tensor | Number


def is_operand(value: Any) -> bool:
    """Whether it is a tensor that is read element by element, in step with others."""
    return isinstance(value, torch.Tensor) and value.dim() > 0


def is_cell(value: Any) -> bool:
    """Whether it is a tensor without dimensions, the same for all elements."""
    return isinstance(value, torch.Tensor) and value.dim() == 0


def is_number(value: Any) -> bool:
    """Whether kernels take it by value."""
    return isinstance(value, int | float)


def is_near(cell: torch.Tensor, lead: PagedTensor) -> bool:
    """Whether kernels can read ``cell`` beside ``lead``."""
    known = type(cell) in (*_PLAIN_TYPES, PagedTensor) and not cell.is_neg()
    return known and (cell.device.type == "cpu" or cell.device == lead.device)


# -- geometry --------------------------------------------------------------------------------------
def common_order(
    operands: Sequence[torch.Tensor], target: torch.Tensor | None
) -> PagedTensor | None:
    """The paged operand that all others are like; ``None`` if they cannot be walked in step."""
    lead = next((t for t in operands if type(t) is PagedTensor), None)
    if lead is None or not is_whole(lead):
        return None
    size, stride = lead.size(), lead.stride()
    for tensor in operands:
        if tensor.size() != size or tensor.device.type != lead.device.type or tensor.is_neg():
            return None
        if type(tensor) is PagedTensor:
            if tensor._storage.pager is not lead._storage.pager or not is_whole(tensor):
                return None
        elif type(tensor) not in _PLAIN_TYPES or tensor.layout is not torch.strided:
            return None
        elif tensor is not target and target is not None:
            if _overlap(tensor, target):
                return None
            continue  # of any order: a dense copy of what is dense
        if tensor.stride() != stride:
            return None
    return lead


def is_whole(tensor: PagedTensor) -> bool:
    """Whether its elements are bytes ``0 …`` of its pages without a gap, in some order."""
    if tensor.dtype.is_complex or tensor.is_neg() or tensor.storage_offset() or not tensor.numel():
        return False
    storage = tensor._storage
    if storage.offset and storage.run.base < 0:
        return False
    return tensor.is_contiguous() or _has_no_gaps(tensor.size(), tensor.stride())


def _has_no_gaps(size: Sequence[int], stride: Sequence[int]) -> bool:
    expected = 1
    for step, count in sorted((s, n) for s, n in zip(stride, size) if n != 1):
        if step != expected:
            return False
        expected *= count
    return True


def _overlap(tensor: torch.Tensor, target: torch.Tensor) -> bool:
    """Two plain tensors that share memory, but are not the same elements."""
    if type(target) is PagedTensor or type(tensor) is PagedTensor:
        return False
    if tensor.untyped_storage().data_ptr() != target.untyped_storage().data_ptr():
        return False
    return (tensor.storage_offset(), tensor.stride()) != (
        target.storage_offset(),
        target.stride(),
    )


def in_order_of(lead: PagedTensor, value: Any) -> Value:
    """A plain operand in the memory order of the paged one."""
    if not is_operand(value) or value.stride() == lead.stride():
        return value  # type: ignore[no-any-return]
    twin = torch.empty_strided(lead.size(), lead.stride(), dtype=value.dtype, device=value.device)
    return twin.copy_(value)


# -- dtypes ----------------------------------------------------------------------------------------
def result_dtype(
    op: str,
    target: torch.Tensor | None,
    inputs: Sequence[Any],
    asked: torch.dtype | None,
    *,
    exact: bool,
) -> torch.dtype | None:
    """Of ``op``'s result, written to ``target`` or new; ``None`` where torch computes in other
    dtypes than the kernels, or refuses. ``asked``: of a new copy; ``exact``: of halves, no rounding
    of torch's may be left out."""
    if op == "fill":
        assert target is not None
        return target.dtype if _can_hold(target.dtype, inputs[0]) else None
    if op == "copy":
        source = inputs[0]
        wanted = asked or source.dtype if target is None else target.dtype
        return wanted if is_operand(source) and _converts(source.dtype, wanted) else None
    if op == "where":
        condition, *inputs = inputs
        if not is_operand(condition) or condition.dtype is not torch.bool:
            return None
    dtypes = {v.dtype for v in (target, *inputs) if is_operand(v)}
    if not dtypes or not all(dtype in FLOATS for dtype in dtypes):
        return None
    result = None
    for dtype in dtypes:
        result = dtype if result is None else torch.promote_types(result, dtype)
    same = op in _SAME_DTYPE
    if same and len(dtypes) > 1:
        return None
    for value in inputs:
        if is_cell(value) and value.dtype is not result and (same or value.dtype not in FLOATS):
            return None
    if not any(is_operand(v) for v in inputs):
        return None
    if exact and result in _HALVES and _rounds_in_between(inputs, result):
        return None
    return result if target is None else target.dtype


def _rounds_in_between(inputs: Sequence[Any], half: torch.dtype) -> bool:
    """Whether torch rounds to ``half`` within the op, where the kernels round the result only."""
    if any(is_operand(v) and v.device.type == "cpu" for v in inputs):
        return False  # there it is torch's own op that runs
    return any(is_cell(v) and v.dtype is not half for v in inputs)


def _converts(source: torch.dtype, target: torch.dtype) -> bool:
    if source is target:
        return not source.is_complex and source.itemsize in (1, 2, 4, 8)
    return target in FLOATS and source in (*FLOATS, *_INTEGERS)


def _can_hold(dtype: torch.dtype, value: Any) -> bool:
    """Whether filling with ``value`` is exact, or rounds as torch does."""
    if isinstance(value, torch.Tensor):
        return dtype in FLOATS and value.dtype in FLOATS and is_cell(value)
    if dtype in FLOATS:
        limit = torch.finfo(dtype).max
        return not math.isfinite(value) or abs(value) <= limit  # torch refuses what overflows
    if dtype is torch.bool:
        return value in (0, 1)
    if dtype not in _INTEGERS or not isinstance(value, int):
        return False
    return torch.iinfo(dtype).min <= value <= torch.iinfo(dtype).max
