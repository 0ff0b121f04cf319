"""Which elementwise ops of aten run on pages, and when.

An op on pages in scattered frames would cost a dense copy of every operand, written back after it.
Those below run on the pages as they are: PyTorch's own op on a stretch of pages after the other,
cut such that each element has the bits that it has in one op on all (``kernels/as_torch.py``). So
do operands larger than the arena, a slab at a time.

Only calls that may be cut are matched: operands of one shape, in one memory order, that begin with
their pages, beside numbers and tensors without dimensions. Everything else is ``None``, and takes
the way over dense copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from ...kernels.as_torch import (
    can_be_cut,
    is_of_lists,
    name_of,
    operands_of,
    result_dtype,
    run_as_torch,
)
from ...kernels.cpu_split import Place
from ...kernels.pieces import Operand
from .paged_tensor import PagedTensor, plain_copy

aten = torch.ops.aten
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
_COPIES = (aten.clone.default, aten._to_copy.default)

# What is tried out before an op is cut (``can_be_cut``) stands for all values that these take.
_ARITHMETIC = frozenset(
    {
        "add", "sub", "rsub", "mul", "div", "addcmul", "addcdiv", "lerp",
        "sqrt", "rsqrt", "reciprocal", "neg", "abs", "sign", "sgn",
        "maximum", "minimum", "clamp", "clamp_min", "clamp_max", "where",
        "_amp_foreach_non_finite_check_and_unscale",
    }
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Elementwise:
    """A call of an op. In place: ``target`` is the first argument; else new memory, undefined.

    given : arguments by name. names : of those that are like the target, beside it if in place.
    result : what torch's op gives back.
    """

    func: Any
    given: dict[str, Any]
    target: torch.Tensor
    in_place: bool
    names: tuple[str, ...]
    others: tuple[torch.Tensor, ...]
    result: Any

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All that have dimensions; the first one is written."""
        return (self.target, *self.others)

    def run(self, operands: Sequence[Operand], place: Place | None = None) -> None:
        """On these of ``tensors``, which are parts at ``place`` or all of them."""
        out, *others = operands
        there: dict[str, Any] = dict(zip(self.names, others))
        if self.in_place:
            there["self"] = out
        given = {k: _like(v, there[k]) if k in there else v for k, v in self.given.items()}
        run_as_torch(self.func, given, None if self.in_place else out, place)


def _like(given: Any, operand: Operand) -> Any:
    return [operand] if isinstance(given, list | tuple) else operand


@cache
def _is_served(func: Any) -> bool:
    if not isinstance(func, torch._ops.OpOverload) or func.namespace != "aten":
        return False
    if any(a.is_out or a.name == "rounding_mode" for a in func._schema.arguments):
        return False
    name = name_of(func)
    moves = name in ("zero", "fill", "copy") and "self" in _written(func)
    return name in _ARITHMETIC or func in _COPIES or moves


@cache
def _written(func: Any) -> frozenset[str]:
    """Names of the arguments that it writes to."""
    arguments = func._schema.arguments
    return frozenset(
        a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write
    )


@cache
def _defaults(func: Any) -> dict[str, Any]:
    return {argument.name: argument.default_value for argument in func._schema.arguments}


def bind(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call of an overload."""
    known = _defaults(func)
    return {**known, **dict(zip(known, args)), **kwargs}


def elementwise_call(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Elementwise | None:
    """A call (of a list op: with lists of one element), ready to run; the memory of a new result is
    there, undefined. ``None`` where parts of it may differ from the whole."""
    if not _is_served(func):
        return None
    given = bind(func, args, kwargs)
    in_place, lists = "self" in _written(func), is_of_lists(func)
    tensors: dict[str, Any] = operands_of(func, given)
    for name, value in given.items():
        if isinstance(value, list | tuple) and (
            len(value) != 1 or (isinstance(value[0], torch.Tensor) and name not in tensors)
        ):
            return None
    target = tensors.get("self") if in_place else None
    lead = common_order([*tensors.values()], target)
    if lead is None or (in_place and target is None):
        return None
    for name, value in given.items():
        if isinstance(value, torch.Tensor) and name not in tensors:
            if not _is_near(value, lead) or (type(value) is PagedTensor and name in _written(func)):
                return None
            given[name] = plain_copy(value) if type(value) is PagedTensor else value
    if func in _COPIES:
        if not _copies_as_it_is(given):
            return None
        dtype = given.get("dtype") or lead.dtype
        target = torch.empty_strided(lead.size(), lead.stride(), dtype=dtype, device=lead.device)
        func, in_place = aten.copy_.default, True
        given = {"self": target, "src": given["self"], "non_blocking": False}
        tensors = {"self": target, "src": tensors["self"]}
    if not _has_torchs_bits(func, given, tensors, lead):
        return None
    if target is None:
        dtype = result_dtype(func, given)
        target = torch.empty_strided(lead.size(), lead.stride(), dtype=dtype, device=lead.device)
    result = target if not lists else None if in_place else [target]
    names = tuple(name for name in tensors if not (in_place and name == "self"))
    others = tuple(_beside(lead, tensors[name]) for name in names)
    return Elementwise(func, given, target, in_place, names, others, result)


def _has_torchs_bits(
    func: Any, given: dict[str, Any], tensors: dict[str, torch.Tensor], lead: torch.Tensor
) -> bool:
    """Whether ``func`` gives on parts of what is like ``lead`` what it gives on the whole."""
    name, target = name_of(func), tensors.get("self")
    dtypes = [tensor.dtype for key, tensor in tensors.items() if key != "condition"]
    if name == "copy":
        return _converts(tensors["src"].dtype, dtypes[0])
    if name in ("zero", "fill"):
        return target is not None and target.dtype in (*FLOATS, *_INTEGERS)
    condition = tensors.get("condition", given.get("condition"))
    if condition is not None and condition.dtype is not torch.bool:
        return False
    if not dtypes or not all(dtype in FLOATS for dtype in dtypes):
        return False
    reordered = any(tensor.stride() != lead.stride() for tensor in tensors.values())
    try:
        if result_dtype(func, given) not in FLOATS:
            return False
        return lead.device.type != "cpu" or can_be_cut(func, given, reordered=reordered)
    except (RuntimeError, TypeError):  # PyTorch refuses it, and says why when it gets it whole
        return False


def _copies_as_it_is(asked: dict[str, Any]) -> bool:
    """Of ``clone`` and ``_to_copy``: only the dtype changes."""
    source, order, device = asked["self"], asked.get("memory_format"), asked.get("device")
    contiguous = order is torch.contiguous_format and source.is_contiguous()
    return (
        (order is None or order is torch.preserve_format or contiguous)
        and asked.get("layout") in (None, torch.strided)
        and not asked.get("pin_memory")
        and (device is None or torch.device(device).type == source.device.type)
    )


def _converts(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether conversion is the same for each element, whatever it is beside."""
    if source is target:
        return source in (*FLOATS, *_INTEGERS)
    return target in FLOATS and source in (*FLOATS, *_INTEGERS)


# -- geometry --------------------------------------------------------------------------------------
def _is_near(cell: torch.Tensor, lead: PagedTensor) -> bool:
    """Whether kernels can read ``cell`` beside ``lead``."""
    known = type(cell) in (*_PLAIN_TYPES, PagedTensor) and not cell.is_neg()
    return known and (cell.device.type == "cpu" or cell.device == lead.device)


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
    return bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


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


def _beside(lead: PagedTensor, tensor: torch.Tensor) -> torch.Tensor:
    """An operand in the memory order of the paged one."""
    if tensor.stride() == lead.stride():
        return tensor
    twin = torch.empty_strided(lead.size(), lead.stride(), dtype=tensor.dtype, device=tensor.device)
    return twin.copy_(tensor)
