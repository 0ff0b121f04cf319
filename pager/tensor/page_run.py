"""Runs ops on pages where they are: in scattered frames, or slab by slab if larger than the arena.

::

    operands pinned, all consecutive      dense views        dense_run.py, as ever
    operands pinned, some scattered       ``run_on_pages``   one launch, no copies
    more operands than the arena holds    ``run_in_slabs``   a launch per slab, reading ahead

``NotImplemented`` from these means that nothing was done, and that the op needs dense operands.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ...kernels.as_torch import elementwise_as_torch
from ...kernels.cpu_split import Place
from ...kernels.elementwise import elementwise
from ...kernels.pieces import Operand, Paged, stretches
from ...kernels.reduce import reduce
from ...kernels.unscale import non_finite_check_and_unscale
from ..budget.fits import fits, frames_anyway
from ..memory.space import Extent
from .dense_views import direct_view
from .page_ops import Elementwise, bind, element, elementwise_call, form_of
from .page_reduce import (
    LISTS,
    Reduction,
    Unscale,
    joined,
    part_of,
    reduction_of,
    unscale_of,
)
from .page_rules import is_operand
from .paged_tensor import PagedTensor
from .slabs import slabs

if TYPE_CHECKING:
    from ..core import Core

aten = torch.ops.aten

Call = Elementwise | Reduction | Unscale
# In place, element by element in memory order, each by itself; see `_fill_in_slabs`.
_BY_STRETCH = (aten.normal_.default, aten.uniform_.default, aten.erfinv_.default)


def call_of(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], *, exact: bool = True
) -> Call | None:
    """What the kernels would do for an op (of a list op: with lists of one element)."""
    form = form_of(func)
    if form is None:
        return reduction_of(func, args, kwargs) or unscale_of(func, args, kwargs)
    values = bind(form.names, form.defaults, args, kwargs)
    if form.lists:
        if any(isinstance(v, list | tuple) and len(v) != 1 for v in values):
            return None
        values = [element(v, 0) for v in values]
    return elementwise_call(form, values, exact=exact)


def _as_torch_returns(func: Any, call: Call, result: torch.Tensor | None) -> Any:
    if func in LISTS:
        return [result]
    form = form_of(func)
    if form is not None and form.lists:
        return None if form.writes else [result]
    return result


# -- on pages that are pinned ----------------------------------------------------------------------
def run_on_pages(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The op on operands that are pinned, in any frames, and noted as about to be written."""
    with torch._C.DisableTorchFunctionSubclass():
        call = call_of(func, args, kwargs)
        if call is None:
            return NotImplemented
        return _as_torch_returns(func, call, _launch(call))


def _launch(call: Call) -> torch.Tensor | None:
    """On pinned operands; its result."""
    if isinstance(call, Elementwise):
        columns = [[_input(value)] for value in call.inputs]
        elementwise_op(call.op, [_operand(call.target)], columns)
        return call.target
    operands = [_operand(call.tensor)]
    if isinstance(call, Unscale):
        non_finite_check_and_unscale(operands, call.found_inf, call.inv_scale)
        return None
    return reduce(operands, call.how, call.p, call.dtype)[0]


def elementwise_op(
    op: str, outs: Sequence[Operand], columns: Sequence[Any], places: Sequence[Place] | None = None
) -> None:
    """outs[i] = op(columns[0][i], ...) on what is on the device: torch's own op on a CPU, else the
    kernel's. ``places``: of outs that are parts of tensors."""
    if all((out.arena if isinstance(out, Paged) else out).device.type == "cpu" for out in outs):
        elementwise_as_torch(op, outs, columns, places)
    else:
        elementwise(op, outs, *columns)


def _operand(tensor: torch.Tensor) -> Operand:
    """The elements of a tensor without gaps, in memory order."""
    if type(tensor) is not PagedTensor:
        return _flat(tensor)
    storage = tensor._storage
    run, pager = storage.run, storage.pager
    if run.base >= 0:
        return _flat(direct_view(tensor))
    size, numel = pager.page_size, tensor.numel()
    pages = -(-numel * tensor.dtype.itemsize // size)
    frames = pager.table.frame[run.first : run.first + pages].copy()
    return Paged(pager.residency.arena, frames, size, tensor.dtype, numel)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def _input(value: Any) -> Any:
    if is_operand(value):
        return _operand(value)
    return direct_view(value) if type(value) is PagedTensor else value


# -- larger than the arena -------------------------------------------------------------------------
def is_too_large(pager: Core, runs: Iterable[Extent]) -> bool:
    """Whether ``runs`` are not to be on the device together, if that can be avoided: the arena has
    fewer frames. In a metered iteration, in which it is as large as it has to be: fewer than other
    ops need (:func:`run_in_slabs` refuses where that would change results)."""
    return sum(run.count for run in runs) > frames_anyway(pager.budget)


def _has_to_be_whole(pager: Core, tensors: Iterable[Any]) -> bool:
    """Whether an op with other bits in slabs is not to go so in this metered iteration: later ones
    have the frames for it. If they have not, what it would take is noted."""
    if not pager.budget.metering:
        return False
    runs = {t._storage.run for t in tensors if type(t) is PagedTensor}
    pages = sum(run.count for run in runs)
    if fits(pager.budget, pages):
        return True
    if pager.metering_this():
        pager.budget.whole_needs.note(pages)
    return False


def run_in_slabs(pager: Core, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The op on operands that are not pinned, and may all be larger than the arena.

    Results are the bits of :func:`run_on_pages`, but that partial results of reductions are of
    single pages, joined in float64 in their order (the same bits wherever the pages are). So in a
    metered iteration ``NotImplemented`` for these, where all operands fit into the budget.
    """
    with torch._C.DisableTorchFunctionSubclass():
        if func in _BY_STRETCH:
            return _fill_in_slabs(pager, func, args, kwargs)
        call = call_of(func, args, kwargs)
        exact = call is not None and not isinstance(call, Reduction)
        if call is None:
            call = call_of(func, args, kwargs, exact=False)
        if call is None or any(_begins_amid(tensor) for tensor in call.tensors):
            return NotImplemented
        if not exact:
            if _has_to_be_whole(pager, call.tensors):
                return NotImplemented
            for tensor in call.tensors:  # stats()["streamed"] names them
                if type(tensor) is PagedTensor:
                    pager.space.note_in_slabs(tensor._storage.run)
        if isinstance(call, Reduction):
            each = part_of(call)
            parts: list[torch.Tensor] = []
            for (operand,) in _walk(pager, call.tensors, writes=False):
                parts += reduce(_page_by_page(operand), each.how, each.p, each.dtype).unbind()
            return _as_torch_returns(func, call, joined(call, parts))
        if isinstance(call, Unscale):
            for operands in _walk(pager, call.tensors, writes=True):
                non_finite_check_and_unscale(operands, call.found_inf, call.inv_scale)
            return None
        inputs = [v.clone() if type(v) is PagedTensor and not v.dim() else v for v in call.inputs]
        first, numel = 0, call.target.numel()
        for out, *others in _walk(pager, call.tensors, writes=True):
            rest = iter(others)
            columns = [[next(rest) if is_operand(v) else v] for v in inputs]
            elementwise_op(call.op, [out], columns, [Place(first, numel)])
            first += out.numel if isinstance(out, Paged) else out.numel()
        return _as_torch_returns(func, call, call.target)


def _page_by_page(operand: Operand) -> list[Operand]:
    """One operand for each page: what is in frames side by side would be reduced as one, and the
    result depend on where the pages are."""
    if not isinstance(operand, Paged):
        return [operand]
    step = operand.page_bytes // operand.dtype.itemsize
    return [
        replace(
            operand, frames=operand.frames[i : i + 1], numel=min(step, operand.numel - i * step)
        )
        for i in range(len(operand.frames))
    ]


def _fill_in_slabs(pager: Core, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``normal_``, ``uniform_`` and ``erfinv_`` by torch's own ops, a stretch of consecutive frames
    after the other.

    On a CPU random numbers are those of one call for the whole tensor, but for ``normal_`` where
    the last page has fewer than 16 elements. On CUDA each stretch draws a stream of its own, so
    that the numbers depend on where the pages are.
    """
    tensor = args[0]
    if not tensor.is_contiguous() or tensor.storage_offset() or _begins_amid(tensor):
        return NotImplemented
    if _has_to_be_whole(pager, [tensor]):
        return NotImplemented
    for operands in _walk(pager, [tensor], writes=True):
        for (view,) in stretches(operands):
            func(view, *args[1:], **kwargs)
    return tensor


def _begins_amid(tensor: torch.Tensor) -> bool:
    return type(tensor) is PagedTensor and tensor._storage.offset != 0


def _walk(pager: Core, tensors: Sequence[torch.Tensor], *, writes: bool) -> Iterable[list[Operand]]:
    """Operands of all tensors, slab by slab; ``writes``: the first one is written. Each tensor's
    pages count once, however often it is named."""
    names = [_identity(tensor) for tensor in tensors]
    distinct = dict(zip(names, map(_flat_paged, tensors)))
    order = list(distinct)
    written = [writes and name == names[0] for name in order]
    for slab in slabs(pager, list(distinct.values()), write=written):
        yield [slab.operands[order.index(name)] for name in names]


def _identity(tensor: torch.Tensor) -> Any:
    """The same for tensors of the same elements."""
    if type(tensor) is PagedTensor:
        return id(tensor._storage), tensor.dtype
    return id(tensor)


def _flat_paged(tensor: torch.Tensor) -> torch.Tensor:
    if type(tensor) is not PagedTensor:
        return _flat(tensor)
    return PagedTensor(tensor._storage, (tensor.numel(),), (1,), 0, tensor.dtype)
