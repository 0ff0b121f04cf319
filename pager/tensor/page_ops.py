"""Which aten ops the elementwise page kernels do, and when.

An op on pages in scattered frames would cost a dense copy of every operand, written back after it.
Those below run on the pages as they are: one kernel reads and writes through the page table
(``kernels/elementwise.py``), which also serves operands larger than the arena, a slab at a time.

On a CPU that kernel is PyTorch's own op on a stretch of pages after the other, cut such that each
element has the bits that it has in one op on all (``kernels/as_torch.py``).

Only calls that a kernel does exactly as PyTorch are matched: operands of one shape, in one memory
order, that begin with their pages, beside numbers and tensors without dimensions; floating-point
dtypes that promote as the kernels compute. Everything else is ``None``, and takes the way over
dense copies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch

from ...kernels.as_torch import can_be_cut, elementwise_as_torch
from ...kernels.cpu_split import Place
from ...kernels.elementwise import elementwise
from ...kernels.elementwise_ops import OPS
from ...kernels.pieces import Operand, memory_of
from .paged_tensor import PagedTensor, plain_copy

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_HALVES = (torch.float16, torch.bfloat16)
_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
_SAME_DTYPE = ("addcmul", "addcdiv", "lerp", "clamp", "where")  # other mixtures: torch's own rules

Value = torch.Tensor | int | float

_WITH_LISTS = "other|scalar|scalars"

# Ops of aten that are named as the kernels' are take their inputs in the order of the schema.
# Others, without "_foreach_" and "_": the op of the kernels, and for each of its inputs the names
# that the argument has in aten's schemas (None: there is none, the op's default holds).
_OTHERWISE: dict[str, tuple[str, tuple[str | None, ...]]] = {
    "zero": ("fill", ()),
    "fill": ("fill", ("value",)),
    "copy": ("copy", ("src",)),
    "clone": ("copy", ("self",)),
    "_to_copy": ("copy", ("self",)),
    "rsub": ("sub", (_WITH_LISTS, "self", "alpha")),
    "clamp_min": ("clamp", ("self", f"min|{_WITH_LISTS}", None)),
    "clamp_max": ("clamp", ("self", None, f"max|{_WITH_LISTS}")),
}
_OVERLOADS = ("", "Tensor", "Scalar", "ScalarList", "List", "self")
_NO_MATTER = ("non_blocking", "memory_format", "dtype", "layout", "device", "pin_memory")


class Form(NamedTuple):
    """How an overload's arguments become inputs of a kernel's op.

    inputs : name of the argument for each input; ``None`` for the op's own default.
    writes : it is in place: the result goes to ``self``.
    lists : ``_foreach_*``.
    """

    op: str
    inputs: tuple[str | None, ...]
    writes: bool
    lists: bool


@dataclass(frozen=True, eq=False)
class Elementwise:
    """One op of the kernels: ``target = op(*inputs)``, in any memory order that all share.

    inputs : tensors like the target, tensors without dimensions, numbers.
    result : what torch's op gives back.
    """

    op: str
    target: torch.Tensor
    inputs: tuple[Value, ...]
    result: Any

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All that have dimensions; the first one is written."""
        return (self.target, *(v for v in self.inputs if isinstance(v, torch.Tensor) and v.dim()))

    def run(self, operands: Sequence[Operand], place: Place | None = None) -> None:
        """On these of ``tensors``, which are parts at ``place`` or all of them."""
        out, *others = operands
        rest = iter(others)
        columns = [[next(rest) if is_operand(v) else v] for v in self.inputs]
        elementwise_op(self.op, out, columns, place)


def elementwise_op(
    op: str, out: Operand, columns: Sequence[Any], place: Place | None = None
) -> None:
    """out = op(columns[0][0], ...) on what is on the device: torch's own op on a CPU, else the
    kernel's. ``place``: of an out that is a part of a tensor."""
    if memory_of(out).device.type == "cpu":
        elementwise_as_torch(op, [out], columns, None if place is None else [place])
    else:
        elementwise(op, [out], *columns)


@cache
def form_of(func: Any) -> Form | None:
    """``None`` for what is no op of the kernels."""
    if not isinstance(func, torch._ops.OpOverload) or func.namespace != "aten":
        return None
    schema = func._schema
    name = schema.name.removeprefix("aten::")
    lists = name.startswith("_foreach_")
    name = name.removeprefix("_foreach_")
    op, labels = _OTHERWISE.get(name.removesuffix("_"), (name.removesuffix("_"), None))
    if op not in OPS or schema.overload_name not in _OVERLOADS:
        return None
    names = [argument.name for argument in schema.arguments]
    inputs: tuple[str | None, ...]
    if labels is None:
        inputs = tuple(n for n in names if n not in _NO_MATTER)[: len(OPS[op].inputs)]
    else:
        inputs = tuple(
            next((n for n in (label or "").split("|") if n in names), None) for label in labels
        )
    if any(n not in inputs and n not in _NO_MATTER for n in names[1:]):
        return None
    return Form(op, inputs, name.endswith("_"), lists)


@cache
def _defaults(func: Any) -> dict[str, Any]:
    return {argument.name: argument.default_value for argument in func._schema.arguments}


def bind(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call of an overload."""
    known = _defaults(func)
    return {**known, **dict(zip(known, args)), **kwargs}


def _element(value: Any) -> Any:
    """What the only element of a list op takes of an argument."""
    if isinstance(value, list | tuple):
        return value[0]
    if isinstance(value, torch.Tensor) and value.dim() == 1:  # scalars of addcmul and addcdiv
        return value[0].item()
    return value


def elementwise_call(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], *, exact: bool = True
) -> Elementwise | None:
    """A call (of a list op: with lists of one element), ready to run; the memory of a new result is
    there, undefined. ``None`` where the kernels may differ from PyTorch.

    ``exact=False``: on a device a half may be rounded once where PyTorch does a scalar operand
    before, and bytes of a bool that are not 0 or 1 are copied as they are.
    """
    form = form_of(func)
    if form is None:
        return None
    given = bind(func, args, kwargs)
    if form.lists:
        if any(isinstance(v, list | tuple) and len(v) != 1 for v in given.values()):
            return None
        given = {name: _element(value) for name, value in given.items()}
    if form.op == "copy" and not form.writes and not _copies_as_it_is(given):
        return None
    target = given["self"] if form.writes else None
    inputs = [None if name is None else given[name] for name in form.inputs] or [0]
    if form.op == "clamp" and inputs[1] is None and inputs[2] is None:
        return None  # torch refuses it
    inputs = _with_defaults(form.op, inputs)
    if not all(isinstance(v, int | float | torch.Tensor) for v in inputs):
        return None
    lead = common_order([v for v in (target, *inputs) if is_operand(v)], target)
    if lead is None or (target is not None and not is_operand(target)):
        return None
    dtype = _result_dtype(form.op, target, inputs, given.get("dtype"), exact=exact)
    if dtype is None or any(is_cell(v) and not _is_near(v, lead) for v in inputs):
        return None
    if exact and form.op == "copy" and dtype is torch.bool:
        return None  # PyTorch makes 1 of any true byte; kernels move bytes
    if not _has_torchs_bits(form.op, dtype, inputs, lead):
        return None
    if target is None:
        target = torch.empty_strided(lead.size(), lead.stride(), dtype=dtype, device=lead.device)
    result = target if not form.lists else None if form.writes else [target]
    return Elementwise(form.op, target, tuple(_beside(lead, v) for v in inputs), result)


def _has_torchs_bits(op: str, out: torch.dtype, inputs: Sequence[Any], lead: torch.Tensor) -> bool:
    """Whether torch's op gives on parts of what is like ``lead`` what it gives on the whole."""
    if lead.device.type != "cpu":
        return True
    reordered = any(v.stride() != lead.stride() for v in inputs if is_operand(v))
    return can_be_cut(op, out, inputs, reordered=reordered)


def _with_defaults(op: str, inputs: Sequence[Any]) -> list[Any]:
    """Every input given, those that torch leaves out too."""
    wanted = OPS[op]
    required = len(wanted.inputs) - len(wanted.defaults)
    filled = [*inputs, *[None] * (len(wanted.inputs) - len(inputs))]
    return [
        wanted.defaults[i - required] if value is None and i >= required else value
        for i, value in enumerate(filled)
    ]


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


# -- geometry --------------------------------------------------------------------------------------
def is_operand(value: Any) -> bool:
    """Whether it is a tensor that is read element by element, in step with others."""
    return isinstance(value, torch.Tensor) and value.dim() > 0


def is_cell(value: Any) -> bool:
    """Whether it is a tensor without dimensions, the same for all elements."""
    return isinstance(value, torch.Tensor) and value.dim() == 0


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


def _beside(lead: PagedTensor, value: Any) -> Value:
    """An operand in the memory order of the paged one, and what is no operand outside of pages."""
    if not is_operand(value):
        return plain_copy(value) if type(value) is PagedTensor else value
    if value.stride() == lead.stride():
        return value  # type: ignore[no-any-return]
    twin = torch.empty_strided(lead.size(), lead.stride(), dtype=value.dtype, device=value.device)
    return twin.copy_(value)


# -- dtypes ----------------------------------------------------------------------------------------
def _result_dtype(
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
    # On a device torch rounds to the half within the op, where the kernels round the result only.
    on_cpu = any(is_operand(v) and v.device.type == "cpu" for v in inputs)
    other = any(is_cell(v) and v.dtype is not result for v in inputs)
    if exact and result in _HALVES and other and not on_cpu:
        return None
    return result if target is None else target.dtype


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
