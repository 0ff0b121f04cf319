"""Gradients of weights in pages, and what autograd makes of several of them.

A weight or a table that streams has its gradient in pages: no more than a slab of it is on the
device at a time. Sums of such gradients, and copies, are in pages again, while
``param.grad += gradient`` is an ordinary op, which ``page_run.py`` does in slabs.

The gradient of one that is whole is a plain tensor, of which no op reaches us. In a metered
iteration it goes on in pages too (:func:`in_pages`). So what becomes of it, in the graph, in hooks
or in the program, takes what it takes where the weight streams, and the named minimum has that. For
a budget under which the weight stays whole ``placement.py`` adds the dense memory that it takes.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple, TypeGuard

import torch

from ...kernels.as_torch import run_as_torch
from ...kernels.cpu_split import Place
from ..budget.fits import fits
from ..budget.placement import Weight
from ..core import Core, PagedStorage
from ..errors import TierFull
from ..tensor.dispatcher import serve_op
from ..tensor.new_pages import copy_in
from ..tensor.operands import begin_of, slabs
from ..tensor.paged_tensor import PagedTensor, blank

aten = torch.ops.aten
_gradients: weakref.WeakSet[PagedStorage] = weakref.WeakSet()


class Geometry(NamedTuple):
    """Of a weight, for a gradient that is made when the weight itself may be gone."""

    pager: Core
    size: torch.Size
    dtype: torch.dtype

    @staticmethod
    def of(weight: PagedTensor) -> Geometry:
        return Geometry(weight._storage.pager, weight.size(), weight.dtype)

    def new_gradient(self) -> PagedTensor:
        like = torch.empty(self.size, dtype=self.dtype, device="meta")
        gradient = blank(self.pager, like, "gradient")
        _gradients.add(gradient._storage)
        return gradient


def new_gradient(weight: torch.Tensor) -> PagedTensor:
    """In pages, with the weight's geometry; the caller writes all of its values."""
    assert type(weight) is PagedTensor
    return Geometry.of(weight).new_gradient()


def is_gradient(value: Any) -> TypeGuard[PagedTensor]:
    """Whether it was made here, or is one that can never be on the device whole; all of it."""
    if type(value) is not PagedTensor or value._storage.run.kind != "gradient":
        return False
    if value._storage not in _gradients and can_be_whole(value):
        return False
    nbytes = value.numel() * value.element_size()
    return value.is_contiguous() and nbytes == value._storage.nbytes


def can_be_whole(tensor: PagedTensor) -> bool:
    """Whether all of it can be on the device at once."""
    return fits(tensor._storage.pager.budget, tensor._storage.run.count)


# -- of whole weights, in metered iterations -------------------------------------------------------
def in_pages(gradient: torch.Tensor, weight: PagedTensor, noted: Weight) -> torch.Tensor:
    """A copy in pages, differentiable, of ``gradient``, which was made just now, of a whole
    ``weight`` that is ``noted``. Itself, where the tiers have no room for that."""
    if gradient.requires_grad and torch.is_grad_enabled():
        return _InPages.apply(gradient, weight, noted)  # type: ignore[no-any-return,no-untyped-call]
    return _copy_in(gradient, weight, noted)


class _InPages(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gradient: torch.Tensor, weight: PagedTensor, noted: Weight
    ) -> torch.Tensor:
        return _copy_in(gradient, weight, noted)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None, None


def _copy_in(gradient: torch.Tensor, weight: PagedTensor, noted: Weight) -> torch.Tensor:
    pager = weight._storage.pager
    try:
        with torch.no_grad():
            paged = copy_in(pager, gradient, "gradient")
    except TierFull:
        return gradient
    _gradients.add(paged._storage)
    copied = pager.backend.birth_at(gradient.untyped_storage().data_ptr())
    # Slab by slab it is made in the weight's dtype at once.
    to = None if paged.dtype is weight.dtype else weight.dtype
    pager.budget.placement.note_gradient(noted, paged._storage, copied, to)
    return paged


def _cast(tensor: Any, *, dtype: Any = None, **kwargs: Any) -> Any:
    """By autograd, of the gradient of a cast that autocast has made."""
    if type(tensor) is not PagedTensor or dtype is None:
        return NotImplemented
    budget = tensor._storage.pager.budget
    if not budget.metering or budget.placement.becomes(tensor._storage) != dtype:
        return NotImplemented
    result = Geometry(tensor._storage.pager, tensor.size(), dtype).new_gradient()
    budget.placement.note_derived(result._storage, [tensor._storage])
    return result.copy_(tensor)


# -- sums and copies -------------------------------------------------------------------------------
def add_gradients(one: torch.Tensor, other: torch.Tensor, alpha: Any) -> Any:
    """``one + alpha * other`` in new pages; one of them is such a gradient. ``NotImplemented`` if
    the other one is something else."""
    gradient = one if is_gradient(one) else other
    assert type(gradient) is PagedTensor
    for tensor in (one, other):
        if (
            tensor.size() != gradient.size()
            or tensor.dtype != gradient.dtype
            or tensor.layout is not torch.strided
            or not tensor.is_contiguous()
        ):
            return NotImplemented
        if type(tensor) is PagedTensor and (
            tensor._storage.pager is not gradient._storage.pager or begin_of(tensor)
        ):
            return NotImplemented
    return _in_new_pages(gradient, one, other, alpha)


def copy_gradient(gradient: PagedTensor) -> PagedTensor:
    """In new pages."""
    return _in_new_pages(gradient, gradient)


def _in_new_pages(
    like: PagedTensor, one: torch.Tensor, other: torch.Tensor | None = None, alpha: Any = 1
) -> PagedTensor:
    """``one``, or ``one + alpha * other``, slab by slab."""
    result, pager = new_gradient(like), like._storage.pager
    tensors = [result, one] if other is None else [result, one, other]
    if pager.budget.metering:
        of = [tensor._storage for tensor in tensors[1:] if type(tensor) is PagedTensor]
        pager.budget.placement.note_derived(result._storage, of)
    write = [tensor is result for tensor in tensors]
    for slab in slabs(pager, tensors, write=write):
        place = Place(slab.start, result.numel())
        out, source, *more = slab.operands
        if other is None:
            run_as_torch(aten.copy_.default, {"self": out, "src": source}, None, place)
        else:
            given = {"self": source, "other": more[0], "alpha": alpha}
            run_as_torch(aten.add.Tensor, given, out, place)  # type: ignore[arg-type]
    return result


def _clone(tensor: Any, *, memory_format: Any = None) -> Any:
    if not is_gradient(tensor) or tensor._storage.pager.stepping:
        return NotImplemented
    return copy_gradient(tensor)


serve_op(aten.clone.default, _clone)
serve_op(aten._to_copy.default, _cast)
