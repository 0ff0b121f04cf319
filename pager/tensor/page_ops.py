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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ...kernels.as_torch import can_be_cut
from ...kernels.elementwise_ops import OPS
from .page_rules import (
    Value,
    common_order,
    in_order_of,
    is_cell,
    is_near,
    is_number,
    is_operand,
    result_dtype,
)

_WITH_LISTS = "other|scalar|scalars"

# Name in aten, without "_foreach_" and "_" -> op of the kernels, and for each of its inputs the
# names that the argument has in aten's schemas (None: there is none, the op's default holds).
TABLE: dict[str, tuple[str, tuple[str | None, ...]]] = {
    "zero": ("fill", ()),
    "fill": ("fill", ("value",)),
    "copy": ("copy", ("src",)),
    "clone": ("copy", ("self",)),
    "_to_copy": ("copy", ("self",)),
    "where": ("where", ("condition", "self", "other")),
    "add": ("add", ("self", _WITH_LISTS, "alpha")),
    "sub": ("sub", ("self", _WITH_LISTS, "alpha")),
    "rsub": ("sub", (_WITH_LISTS, "self", "alpha")),
    "mul": ("mul", ("self", _WITH_LISTS)),
    "div": ("div", ("self", _WITH_LISTS)),
    "addcmul": ("addcmul", ("self", "tensor1", "tensor2", "value|scalars")),
    "addcdiv": ("addcdiv", ("self", "tensor1", "tensor2", "value|scalars")),
    "lerp": ("lerp", ("self", "end|tensors1", "weight|weights")),
    "sqrt": ("sqrt", ("self",)),
    "rsqrt": ("rsqrt", ("self",)),
    "reciprocal": ("reciprocal", ("self",)),
    "neg": ("neg", ("self",)),
    "abs": ("abs", ("self",)),
    "sign": ("sign", ("self",)),
    "maximum": ("maximum", ("self", _WITH_LISTS)),
    "minimum": ("minimum", ("self", _WITH_LISTS)),
    "clamp": ("clamp", ("self", "min", "max")),
    "clamp_min": ("clamp", ("self", f"min|{_WITH_LISTS}", None)),
    "clamp_max": ("clamp", ("self", None, f"max|{_WITH_LISTS}")),
}  # fmt: skip
_OVERLOADS = ("", "Tensor", "Scalar", "ScalarList", "List", "self")
_NO_MATTER = ("non_blocking", "memory_format", "dtype", "layout", "device", "pin_memory")


class Form(NamedTuple):
    """How an overload's arguments become inputs of a kernel's op.

    names, defaults : of all arguments in aten's schema.
    inputs : position of the argument for each input; ``None`` for the op's own default.
    writes : it is in place: the result goes to the first argument.
    lists : ``_foreach_*``.
    """

    op: str
    names: tuple[str, ...]
    defaults: tuple[Any, ...]
    inputs: tuple[int | None, ...]
    writes: bool
    lists: bool


@dataclass(frozen=True, eq=False)
class Elementwise:
    """One op of the kernels: ``target = op(*inputs)``, in any memory order that all share.

    inputs : tensors like the target, tensors without dimensions, numbers.
    """

    op: str
    target: torch.Tensor
    inputs: tuple[Value, ...]

    @property
    def result(self) -> torch.Tensor:
        return self.target

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All that have dimensions; the first one is written."""
        return (self.target, *(v for v in self.inputs if isinstance(v, torch.Tensor) and v.dim()))


_FORMS: dict[Any, Form | None] = {}


def form_of(func: Any) -> Form | None:
    """``None`` for what is not in the table."""
    if not isinstance(func, torch._ops.OpOverload):
        return None
    if func not in _FORMS:
        _FORMS[func] = _find_form(func)
    return _FORMS[func]


def _find_form(func: Any) -> Form | None:
    schema = func._schema
    if func.namespace != "aten":
        return None
    name = schema.name.removeprefix("aten::")
    lists = name.startswith("_foreach_")
    name = name.removeprefix("_foreach_")
    writes = name.endswith("_")
    found = TABLE.get(name.removesuffix("_"))
    if found is None or schema.overload_name not in _OVERLOADS:
        return None
    names = tuple(argument.name for argument in schema.arguments)
    op, labels = found
    inputs = tuple(
        next((names.index(n) for n in (label or "").split("|") if n in names), None)
        for label in labels
    )
    known = {names[i] for i in inputs if i is not None}
    if any(n not in known and n not in _NO_MATTER for n in names[1:]):
        return None
    defaults = tuple(argument.default_value for argument in schema.arguments)
    return Form(op, names, defaults, inputs, writes, lists)


def bind(
    names: Sequence[str], defaults: Sequence[Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> list[Any]:
    """All arguments of a call by position."""
    values = [*args, *defaults[len(args) :]]
    for name, value in kwargs.items():
        values[names.index(name)] = value
    return values


def element(value: Any, index: int) -> Any:
    """What element ``index`` of a list op takes of an argument."""
    if isinstance(value, list | tuple):
        return value[index]
    if isinstance(value, torch.Tensor) and value.dim() == 1:  # scalars of addcmul and addcdiv
        return value[index].item()
    return value


def elementwise_call(
    form: Form, values: Sequence[Any], *, exact: bool = True
) -> Elementwise | None:
    """The call with these arguments (of one element, for a list op), ready to run; the memory of a
    new result is there, undefined. ``None`` where the kernels may differ from PyTorch.

    ``exact=False``: on a device a half may be rounded once where PyTorch does a scalar operand
    before, and bytes of a bool that are not 0 or 1 are copied as they are.
    """
    if not _copies_as_it_is(form, values):
        return None
    target = values[0] if form.writes else None
    inputs = [None if i is None else values[i] for i in form.inputs] or [0]
    if form.op == "clamp" and inputs[1] is None and inputs[2] is None:
        return None  # torch refuses it
    inputs = _with_defaults(form.op, inputs)
    if not all(is_number(v) or isinstance(v, torch.Tensor) for v in inputs):
        return None
    operands = [v for v in (target, *inputs) if is_operand(v)]
    lead = common_order(operands, target)
    if lead is None or (target is not None and not is_operand(target)):
        return None
    asked = dict(zip(form.names, values)).get("dtype")
    dtype = result_dtype(form.op, target, inputs, asked, exact=exact)
    if dtype is None or any(is_cell(v) and not is_near(v, lead) for v in inputs):
        return None
    if exact and form.op == "copy" and dtype is torch.bool:
        return None  # PyTorch makes 1 of any true byte; kernels move bytes
    if not _has_torchs_bits(form.op, dtype, inputs, lead):
        return None
    if target is None:
        target = torch.empty_strided(lead.size(), lead.stride(), dtype=dtype, device=lead.device)
    return Elementwise(form.op, target, tuple(in_order_of(lead, v) for v in inputs))


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


def _copies_as_it_is(form: Form, values: Sequence[Any]) -> bool:
    """Of ``clone`` and ``_to_copy``: only the dtype changes."""
    if form.op != "copy" or form.writes:
        return True
    asked = dict(zip(form.names, values))
    source = values[0]
    order = asked.get("memory_format")
    contiguous = order is torch.contiguous_format and source.is_contiguous()
    device = asked.get("device")
    return (
        (order is None or order is torch.preserve_format or contiguous)
        and asked.get("layout") in (None, torch.strided)
        and not asked.get("pin_memory")
        and (device is None or torch.device(device).type == source.device.type)
    )
