"""Runs ops on pages where they are: in scattered frames, or slab by slab if larger than the arena.

::

    operands pinned, all consecutive      dense views        dense_run.py, as ever
    operands pinned, some scattered       ``run_on_pages``   a stretch of frames after the other
    more operands than the arena holds    ``run_in_slabs``   the same, slab by slab, reading ahead

``NotImplemented`` from these means that nothing was done, and that the op needs dense operands.

Elementwise ops (``page_ops.py``) have PyTorch's bits. Sums, means and norms of pages in scattered
frames differ from torch's on one dense tensor in rounding: each part is reduced by torch's op to
float32 (float64 for float64), and these are combined in float64, so that the relative error of a
norm, and that of a sum against sum |x|, is at most the largest of torch's own on the parts, and a
rounding. ``amax`` and ``amin`` are exact.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...kernels.cpu_split import Place
from ...kernels.pieces import Operand, stretches
from ..budget.fits import fits, frames_anyway
from ..budget.placement import Taken
from ..core import Core
from ..memory.space import Extent
from .operands import operand, slabs
from .page_ops import FLOATS, Elementwise, bind, elementwise_call, is_whole
from .paged_tensor import PagedTensor

aten = torch.ops.aten
_BYTES_OF_PART = 64  # of a reduction: a number of one page, and what it takes while it is made

_HOW = {
    aten.sum.default: "sum",
    aten.sum.dim_IntList: "sum",
    aten.mean.default: "mean",
    aten.mean.dim: "mean",
    aten.amax.default: "amax",
    aten.max.default: "amax",
    aten._foreach_max.default: "amax",
    aten.amin.default: "amin",
    aten.min.default: "amin",
    aten.linalg_vector_norm.default: "norm",
    aten.norm.Scalar: "norm",
    aten.norm.ScalarOpt_dim: "norm",
    aten.norm.ScalarOpt_dtype: "norm",
    aten._foreach_norm.Scalar: "norm",
}
# In place, element by element in memory order, each by itself; see `_fill_in_slabs`.
_BY_STRETCH = (aten.normal_.default, aten.uniform_.default, aten.erfinv_.default)
# Functions that the dispatcher runs as one op where nobody wants gradients.
_FUNCTIONS: dict[Any, tuple[tuple[str, ...], tuple[Any, ...]]] = {
    torch.norm: (("self", "p", "dim", "keepdim", "out", "dtype"), ("fro", None, False, None, None)),
    torch.Tensor.norm: (("self", "p", "dim", "keepdim", "dtype"), ("fro", None, False, None)),
    torch.linalg.norm: (
        ("self", "ord", "dim", "keepdim", "out", "dtype"),
        (None, None, False, None, None),
    ),
}
BY_VERDICT = frozenset((*_HOW, *_FUNCTIONS, *_BY_STRETCH))  # functions with other bits in slabs
_LISTS = (aten._foreach_norm.Scalar, aten._foreach_max.default)
_AT_ONCE = 1 << 20  # elements, of which a reduction may make a copy in another dtype


@dataclass(eq=False)
class Reduction:
    """``tensor`` to one number. ``how``: "sum", "mean", "norm" of order ``p``, "amax" or "amin".
    ``dtype``: of the result. ``in_list``: that is a list of one."""

    how: str
    tensor: PagedTensor
    p: float
    dtype: torch.dtype
    in_list: bool
    value: torch.Tensor | None = None
    parts: list[torch.Tensor] = field(default_factory=list)  # of single pages

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.tensor,)

    def run(self, operands: Sequence[Operand], place: Place | None = None) -> None:
        if place is not None:
            # Page by page: what is in frames side by side would be reduced as one, and the result
            # depend on where the pages are.
            how = "sum" if self.how == "mean" else self.how
            step = self.tensor._storage.pager.page_size // self.tensor.dtype.itemsize
            for (view,) in stretches(operands):
                self.parts += [_reduced(x, how, self.p, torch.float64) for x in view.split(step)]
            return
        views = [view for (view,) in stretches(operands)]
        if len(views) == 1:
            wanted = None if self.dtype is self.tensor.dtype else self.dtype
            self.value = _reduced(views[0], self.how, self.p, wanted)
            return
        wide = torch.promote_types(self.tensor.dtype, torch.float32)
        how = "sum" if self.how == "mean" else self.how
        parts = (part for view in views for part in view.split(_AT_ONCE))
        self.parts = [_reduced(part, how, self.p, wide).double() for part in parts]

    @property
    def result(self) -> Any:
        value = self._joined() if self.value is None else self.value
        return [value] if self.in_list else value

    def _joined(self) -> torch.Tensor:
        """From the parts, in their order."""
        values = torch.stack(self.parts)
        if self.how in ("amax", "amin"):
            value = values.amax() if self.how == "amax" else values.amin()
        elif self.how == "norm" and self.p != 0:
            value = torch.linalg.vector_norm(values, self.p)
        else:
            value = values.sum()
            if self.how == "mean":
                value = value / self.tensor.numel()
        return value.to(self.dtype)


Call = Elementwise | Reduction


def call_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Call | None:
    """How an op runs on pages (of a list op: with lists of one element)."""
    if func in _HOW or func in _FUNCTIONS:
        return _reduction_of(func, args, kwargs)
    return elementwise_call(func, args, kwargs)


def _is_float(tensor: Any) -> bool:
    return type(tensor) is PagedTensor and tensor.dtype in FLOATS and is_whole(tensor)


def _reduction_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Reduction | None:
    """``None`` for everything but a reduction of one whole paged tensor (or of a list of one)."""
    if func in _HOW:
        given = bind(func, args, kwargs)
    else:
        names, defaults = _FUNCTIONS[func]
        kwargs = {"self" if k in ("input", "A") else k: v for k, v in kwargs.items()}
        given = {**dict(zip(names[1:], defaults)), **dict(zip(names, args)), **kwargs}
    tensor = given["self"]
    if type(tensor) in (list, tuple) and len(tensor) == 1:
        tensor = tensor[0]
    if not _is_float(tensor) or tensor.dim() == 0:
        return None
    if given.get("dim") not in (None, [], ()) or given.get("keepdim") or given.get("out"):
        return None
    if func is torch.linalg.norm and given["ord"] is not None:
        return None  # of a matrix
    p = given.get("ord", given.get("p"))
    p = 2.0 if p is None or p == "fro" else p
    dtype = given.get("dtype") or tensor.dtype
    from_half = tensor.dtype in (torch.float16, torch.bfloat16) and dtype is torch.float32
    # Otherwise torch would convert every element to a dtype of another precision first.
    if not isinstance(p, int | float) or not (dtype is tensor.dtype or from_half):
        return None
    return Reduction(_HOW.get(func, "norm"), tensor, float(p), dtype, func in _LISTS)


# -- on pages that are pinned ----------------------------------------------------------------------
def run_on_pages(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The op on operands that are pinned, in any frames, and noted as about to be written."""
    with torch._C.DisableTorchFunctionSubclass():
        call = call_of(func, args, kwargs)
        if call is None:
            return NotImplemented
        call.run([operand(tensor) for tensor in call.tensors])
        return call.result


# -- larger than the arena -------------------------------------------------------------------------
def has_verdict(func: Any, tensors: Sequence[PagedTensor]) -> bool:
    """Whether ``func`` on these has other bits slab by slab, and it goes by the verdict on their
    pages (``placement.py``) whether it does. Not where that takes no less than all the pages."""
    if func not in BY_VERDICT or len(tensors) != 1:
        return False
    (tensor,) = tensors
    size, run = tensor._storage.pager.page_size, tensor._storage.run
    return run.count * size > size + _more_in_slabs(func, tensor)


def _more_in_slabs(func: Any, tensor: PagedTensor) -> int:
    """Dense bytes that it takes slab by slab: a page in float64, and a number for each."""
    if func in _BY_STRETCH:
        return 0
    wide = tensor._storage.pager.page_size // tensor.element_size() * torch.float64.itemsize
    return wide + _BYTES_OF_PART * tensor._storage.run.count


def is_too_large(pager: Core, func: Any, tensors: Sequence[PagedTensor]) -> bool:
    """Whether ``func`` is not to have all pages of ``tensors`` together, if that can be avoided: by
    the verdict on them, or because the arena has fewer frames. In a metered iteration, in which it
    is as large as it has to be: fewer than other ops need."""
    if has_verdict(func, tensors) and pager.budget.placement.known(tensors[0]._storage.run):
        return True
    runs = {t._storage.run for t in tensors}
    return sum(run.count for run in runs) > frames_anyway(pager.budget)


def _whole_by_verdict(
    func: Any, tensor: PagedTensor, action: Callable[[], Any], *, write: bool = False
) -> Any:
    """What ``action``, which is ``func`` on all of ``tensor``, gives with its pages held, if that
    is the verdict on them, which a metered iteration makes. ``NotImplemented``, and nothing done,
    where ``func`` goes slab by slab."""
    pager, run = tensor._storage.pager, tensor._storage.run
    if not pager.metering_this():
        return NotImplemented
    if not has_verdict(func, [tensor]):
        return _held(pager, run, action, write)
    budget, placement = pager.budget, pager.budget.placement
    streamed = placement.known(run)
    if not streamed:
        finds_room = fits(budget, run.count) and budget.finds_room(run.count, 0)
        if streamed is None:
            placement.judge(run, streamed=not finds_room)
        elif not finds_room:
            placement.stream(run)
        streamed = not finds_room
    noted, more = placement.weight(run, 1), _more_in_slabs(func, tensor)
    if streamed:
        placement.note_product(noted, time.perf_counter(), Taken(0, more, 0))
        return NotImplemented
    with placement.product(noted, Taken(0, more)):
        return _held(pager, run, action, write)


def _held(pager: Core, run: Extent, action: Callable[[], Any], write: bool) -> Any:
    with pager.hold([run], [run] if write else ()):
        return action()


def run_in_slabs(pager: Core, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The op on operands that are not pinned, and may all be larger than the arena.

    Results are the bits of :func:`run_on_pages`, but that partial results of reductions are of
    single pages, joined in float64 in their order (the same bits wherever the pages are). So in a
    metered iteration these are on all pages at once, if that is the verdict.
    """
    with torch._C.DisableTorchFunctionSubclass():
        if func is aten.cat.default:
            return _cat_in_turn(*args, **kwargs)
        if func in _BY_STRETCH:
            return _fill_in_slabs(pager, func, args, kwargs)
        call = call_of(func, args, kwargs)
        if call is None or any(_begins_amid(tensor) for tensor in call.tensors):
            return NotImplemented
        if isinstance(call, Reduction):
            out = _whole_by_verdict(func, call.tensor, lambda: run_on_pages(func, args, kwargs))
            if out is not NotImplemented:
                return out
            for tensor in call.tensors:  # stats()["streamed"] names them
                if type(tensor) is PagedTensor:
                    pager.space.note_in_slabs(tensor._storage.run)
        names = [_identity(tensor) for tensor in call.tensors]
        distinct = dict(zip(names, call.tensors))  # pages count once, however often they are named
        numel = call.tensors[0].numel()
        write = [not isinstance(call, Reduction) and name == names[0] for name in distinct]
        for slab in slabs(pager, list(distinct.values()), write=write):
            there = dict(zip(distinct, slab.operands))
            call.run([there[name] for name in names], Place(slab.start, numel))
        return call.result


def _reduced(x: torch.Tensor, how: str, p: float, dtype: torch.dtype | None) -> torch.Tensor:
    if how == "norm":
        norm: torch.Tensor = torch.linalg.vector_norm(x, p, dtype=dtype)
        return norm
    if how in ("amax", "amin"):
        value = x.amax() if how == "amax" else x.amin()
        return value if dtype is None else value.to(dtype)
    return x.sum(dtype=dtype) if how == "sum" else x.mean(dtype=dtype)


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

    def fill(operands: Sequence[Any]) -> PagedTensor:
        for (view,) in stretches(operands):
            func(view, *args[1:], **kwargs)
        return tensor  # type: ignore[no-any-return]

    out = _whole_by_verdict(func, tensor, lambda: fill([operand(tensor)]), write=True)
    if out is not NotImplemented:
        return out
    for slab in slabs(pager, [tensor], write=[True]):
        fill(slab.operands)
    return tensor


def _cat_in_turn(tensors: Sequence[torch.Tensor], dim: int = 0) -> Any:
    """Of matrices of one dtype, one after the other: what they give is dense in any way."""
    one = tensors[0]
    if any(t.dim() != 2 or t.dtype is not one.dtype or not t.is_contiguous() for t in tensors):
        return NotImplemented
    sizes = [t.size(dim) for t in tensors]
    if any(t.size(1 - dim % 2) != one.size(1 - dim % 2) for t in tensors) or sum(sizes) == 0:
        return NotImplemented
    shape = list(one.size())
    shape[dim] = sum(sizes)
    out = torch.empty(shape, dtype=one.dtype, device=one.device)
    for tensor, place in zip(tensors, out.split(sizes, dim)):
        place.copy_(tensor)
    return out


def _begins_amid(tensor: torch.Tensor) -> bool:
    return type(tensor) is PagedTensor and tensor._storage.offset != 0


def _identity(tensor: torch.Tensor) -> Any:
    """The same for tensors of the same elements."""
    if type(tensor) is PagedTensor:
        return id(tensor._storage), tensor.dtype
    return id(tensor)
