"""``F.linear`` with a weight that is never on the device whole: it streams through, slab by slab.

A slab is some whole rows of the weight, on the device together; the next one is read ahead. Inside
it the product goes *block* by block (``rows.py``). ::

    forward          out[:, block]  = x @ W[block].T + bias[block]
    input gradient   total         += grad[:, block] @ W[block]          in order
    weight gradient  dW[block]      = grad[:, block].T @ x               written into pages

*Bits.* Blocks depend on the weight's shape and the page size alone: not on the budget, nor on where
pages are, nor on how many fit in a slab. So results are the same bits from run to run, in metered
and planned iterations, and under any budget under which the weight streams. They may differ from
those of one whole product, as those of any two shapes of a matrix product may:

* forward: the same sums of K terms, perhaps in another order;
* input gradient: one partial sum for each block, added up in order, in float32 for half precision
  (so that it is rounded to the dtype once);
* weight gradient: the same sums over the rows of x.

Each result is within ``2 * terms * eps * sum(abs(products))`` of the whole product's.

The weight's gradient is a PagedTensor of kind "gradient": no more than a slab of it is on the
device, and no dense copy of it is ever made. Accumulating into it is an in-place addition, which
goes slab by slab as well.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from ...kernels.launch import runs_triton
from ..budget.fits import streams
from ..budget.placement import Taken, Weight
from ..core import PagedStorage
from ..memory.space import Extent
from ..tensor.activations import raise_modified
from ..tensor.paged_tensor import PagedTensor, blank
from .gradients import Geometry
from .rows import Matrix

_HALVES = (torch.float16, torch.bfloat16)
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter, PagedTensor)
_functorch_level = torch._C._functorch.peek_interpreter_stack


def is_streamed(inputs: torch.Tensor, weight: PagedTensor) -> bool:
    """Whether a linear reads ``weight`` slab by slab, by the verdict on it. Its inputs and its
    result are dense in any way."""
    own = weight.numel() * weight.dtype.itemsize if weight.requires_grad else 0
    columns = max(1, weight.size(-1))
    dense = inputs.numel() * (columns + weight.numel() // columns) // columns
    return streams(
        weight._storage.pager.budget, weight._storage.run, gradient_bytes=own,
        dense_bytes=dense * inputs.element_size(),
    )  # fmt: skip


# -- whole ones, while an iteration is metered (``placement.py``) ----------------------------------
def is_watched(weight: PagedTensor) -> bool:
    """Whether a product of it is watched. (One of a single page takes that in any way.)"""
    return weight._storage.run.count > 1 and weight._storage.pager.metering_this()


def finds_room(weight: PagedTensor, inputs: torch.Tensor, nbytes: int, *, pages: int) -> bool:
    """Whether a product of ``nbytes``, with ``pages`` of ``weight`` beside ``inputs``, stays in the
    budget. If it does not, the weight streams from now on."""
    pager = weight._storage.pager
    pages += inputs._storage.run.count if type(inputs) is PagedTensor else 0
    if pager.budget.finds_room(pages, nbytes):
        return True
    pager.budget.placement.stream(weight._storage.run)
    return False


@contextmanager
def watched(
    weight: PagedTensor, inputs: torch.Tensor, bias: Any = None, *, way: str = "forward"
) -> Iterator[Weight]:
    """Inside, a product takes place. ``way``: see :func:`streaming_takes`."""
    others = [t for t in (inputs, bias) if type(t) is PagedTensor]  # which are copied
    dtype = torch.get_autocast_dtype(weight.device.type) if is_cast(weight) else weight.dtype
    taken = streaming_takes(weight, dtype, inputs.numel() // max(1, inputs.size(-1)), way)
    result = taken.result
    if dtype is not weight.dtype:
        given = [t for t in (inputs, bias) if t is not None and t.dtype is not dtype]
        result += sum(t.numel() * dtype.itemsize for t in given)
    more = taken.more + sum(t.numel() * t.dtype.itemsize for t in others)
    noted = noted_as(weight, *(t._storage.run.count for t in others))
    taken = taken._replace(result=result, more=more)
    with weight._storage.pager.budget.placement.product(noted, taken):
        yield noted


def is_cast(weight: PagedTensor) -> bool:
    """By autocast, to another dtype."""
    low = torch.get_autocast_dtype(weight.device.type)
    on = torch.is_autocast_enabled(weight.device.type)
    return on and weight.dtype not in (low, torch.float64)


def noted_as(weight: PagedTensor, *pages: int) -> Weight:
    """What is known of it in this metered iteration. ``pages``: that its operands take."""
    least = max([*Matrix.of(weight).pages_of_blocks(), *pages], default=1)
    return weight._storage.pager.budget.placement.weight(weight._storage.run, least)


def streaming_takes(weight: PagedTensor, dtype: torch.dtype, rows: int, way: str) -> Taken:
    """What a product with ``rows`` in ``dtype`` takes slab by slab: with the weight ("forward"),
    with its transposed ("inputs"), or its gradient ("weight")."""
    matrix, size = Matrix.of(weight), dtype.itemsize
    elements = min(matrix.block_rows, matrix.rows) * matrix.columns
    wide = elements * weight.dtype.itemsize
    cast = elements * size if dtype is not weight.dtype else 0
    if way == "weight":
        return Taken(0, elements * size + (wide if cast else 0))
    copied = max(matrix.pages_of_blocks(), default=1) > 1
    copy = wide + weight._storage.pager.backend.alignment if copied else 0
    if way == "forward":
        return Taken(rows * matrix.rows * size, cast + copy, cast or copy)
    total = rows * matrix.columns
    if dtype not in _HALVES:
        return Taken(total * size, cast + copy, cast or copy)
    more = (total + rows * matrix.block_rows + elements) * torch.float32.itemsize  # added up so
    return Taken(0, max(cast + copy + more, total * (torch.float32.itemsize + size)))


def linear_in_slabs(inputs: torch.Tensor, weight: PagedTensor, bias: Any, *, native: bool) -> Any:
    """``F.linear``, under autocast too; ``NotImplemented`` for what PyTorch has to refuse, or to
    take apart.

    native : a whole one would be nodes of PyTorch's (see :class:`_Product`).
    inputs : [..., in_features], plain or paged, of the weight's dtype (or what autocast makes one).
    weight : PagedTensor [out_features, in_features], contiguous; perhaps a view of some rows.
    bias : ``None``, or [out_features], paged or plain.

    Raises ``InfeasibleBudget`` with nothing pinned if not even one block's pages fit.
    """
    if _functorch_level() is not None or forward_ad._current_level >= 0:
        return NotImplemented  # somebody has to see the ops that a linear is made of
    if type(inputs) not in _PLAIN_TYPES:
        return NotImplemented
    if bias is not None and type(bias) not in _PLAIN_TYPES:
        return NotImplemented
    if weight.dim() != 2 or not weight.is_contiguous() or not weight.numel():
        return NotImplemented
    inputs, dtype, bias = _as_autocast_has_it(inputs, weight, bias)
    if not _go_together(inputs, weight, dtype, bias):
        return NotImplemented
    if not inputs.is_contiguous():
        inputs = plain(inputs)
    flat = inputs.reshape(-1, weight.size(1))
    one_each = bias is None or tuple(bias.shape) == (weight.size(0),)
    saved = _as_pytorch_saves(inputs, weight, bias) if native and inputs.requires_grad else None
    out = product(flat, weight, plain(bias) if one_each else None, saved)
    out = out.view(*inputs.shape[:-1], weight.size(0))
    return out if one_each else out + bias


def product(
    x: torch.Tensor, weight: PagedTensor, bias: torch.Tensor | None, saved: _Saved | None = None
) -> torch.Tensor:
    """x @ weight.T + bias for x [M, K], plain or paged, and plain bias [N] of one dtype;
    differentiable, twice. A paged x is saved as it is."""
    tensors = (x, weight) if bias is None else (x, weight, bias)
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return _Product.apply(x, bias, weight, saved)  # type: ignore[no-any-return,no-untyped-call]
    return _product(plain(x), weight, bias)


def input_grad(grad: torch.Tensor, weight: PagedTensor) -> torch.Tensor:
    """grad @ weight for plain grad [M, N]; differentiable."""
    return _InputGrad.apply(grad, weight)  # type: ignore[no-any-return,no-untyped-call]


# -- what is taken ---------------------------------------------------------------------------------
def _as_autocast_has_it(
    inputs: torch.Tensor, weight: PagedTensor, bias: Any
) -> tuple[torch.Tensor, torch.dtype, Any]:
    """Operands as autocast casts them, where it is on. The weight is cast block by block, so only
    its dtype changes here: the second result."""
    kind = weight.device.type
    if not torch.is_autocast_enabled(kind):
        return inputs, weight.dtype, bias
    low = torch.get_autocast_dtype(kind)

    def becomes_low(tensor: torch.Tensor) -> bool:
        return tensor.is_floating_point() and tensor.dtype is not torch.float64

    if becomes_low(inputs):
        inputs = inputs.to(low)
    if bias is not None and becomes_low(bias):
        bias = bias.to(low)
    return inputs, low if becomes_low(weight) else weight.dtype, bias


def _go_together(
    inputs: torch.Tensor, weight: PagedTensor, dtype: torch.dtype, bias: torch.Tensor | None
) -> bool:
    """``False`` for operands of no product here. Raises PyTorch's own errors for what it refuses:
    shapes that disagree, and dtypes."""
    if not weight.dtype.is_floating_point or inputs.layout is not torch.strided:
        return False
    if inputs.device != weight.device:
        return False
    linear = torch.nn.functional.linear
    with torch.no_grad():
        matrix = torch.empty(weight.size(), dtype=inputs.dtype, device="meta")
        out = linear(inputs.new_empty(inputs.size(), device="meta"), matrix)
        if bias is not None:
            out + bias.new_empty(bias.size(), device="meta")
        if inputs.dtype is dtype and (bias is None or bias.dtype is dtype):
            return True
        cell = torch.ones(1, 1)
        linear(
            cell.to(inputs.dtype), cell.to(dtype), None if bias is None else cell[0].to(bias.dtype)
        )
    return False


def plain(tensor: Any) -> Any:
    return tensor.clone() if type(tensor) is PagedTensor else tensor


# -- the graph -------------------------------------------------------------------------------------
class _Product(torch.autograd.Function):
    """Saves what the node of a whole product does (``linear.py``): a weight may stream from the
    backward pass on, where activation checkpointing looks for what the forward pass has saved.
    ``saved``: where that would be a node of PyTorch's."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, bias: Any, weight: PagedTensor, saved: _Saved | None
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        for_x, _, for_weight, _ = ctx.needs_input_grad
        ctx.geometry, ctx.is_addmm = Geometry.of(weight), bias is not None
        here = for_x and (saved is not None or weight.is_leaf)
        ctx.parameter = (weight, weight._version) if here else None
        factor, ctx.turned = x if for_weight else None, saved is not None and saved.first
        kept = weight if saved is None and for_x and not here else saved and saved.weight
        ctx.save_for_backward(*((kept, factor) if ctx.turned else (factor, kept)))
        return _product(plain(x), weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> Any:
        if grad is None:
            return None, None, None, None
        grad = plain(grad)
        x, weight = reversed(ctx.saved_tensors) if ctx.turned else ctx.saved_tensors
        for_x, for_bias, for_weight, _ = ctx.needs_input_grad
        if ctx.parameter is not None:
            weight, version = ctx.parameter
            if weight._version != version:
                raise_modified(weight, version)
        of_weight = None
        if for_weight and torch.is_grad_enabled() and not ctx.is_addmm:  # as a whole one has it
            of_weight = WeightGrad.apply(grad, x, ctx.geometry)  # type: ignore[no-untyped-call]
        of_x = input_grad(grad, weight) if for_x else None
        if for_weight and of_weight is None:
            of_weight = WeightGrad.apply(grad, x, ctx.geometry)  # type: ignore[no-untyped-call]
        return of_x, grad.sum(0) if for_bias else None, of_weight, None


class _Saved(NamedTuple):
    """``weight``: what nodes of PyTorch's save of it; ``first``: before the inputs."""

    weight: torch.Tensor
    first: bool


def _as_pytorch_saves(inputs: torch.Tensor, weight: PagedTensor, bias: Any) -> _Saved:
    """The transposed weight. Nobody reads it here, so a cast is not made yet. Where the weight was
    whole in the first pass of a checkpointed block, the nodes of that pass read what the second one
    saves."""
    dtype, storage, offset = inputs.dtype, weight._storage, int(weight.storage_offset())
    if dtype is not weight.dtype:
        storage, offset = _CastLater(weight, dtype), 0
    turned = PagedTensor(storage, weight.size()[::-1], weight.stride()[::-1], offset, dtype)
    if bias is not None and (inputs.dim() == 2 or inputs.is_contiguous()):
        return _Saved(turned, False)
    if not weight.requires_grad and inputs.dim() > 2 and not _are_rows(inputs):
        count = math.prod(inputs.shape[:-2])
        return _Saved(turned.expand(count, *turned.size()), True)
    return _Saved(turned, True)


def _are_rows(inputs: torch.Tensor) -> bool:
    """Whether a view of them is a matrix."""
    sizes, strides = inputs.size(), inputs.stride()
    return all(strides[i] == strides[i + 1] * sizes[i + 1] for i in range(inputs.dim() - 2))


class _CastLater(PagedStorage):
    """A cast of ``weight``, which is made when somebody asks for its pages."""

    __slots__ = ("_dtype", "_made", "_version", "_weight")

    def __init__(self, weight: PagedTensor, dtype: torch.dtype) -> None:
        self.pager, self.label, self.untyped = weight._storage.pager, None, None
        self.nbytes, self.offset = weight.numel() * dtype.itemsize, 0
        self._dtype = dtype
        alias: Any = weight.detach()
        self._weight: PagedTensor = alias
        self._version = weight._version
        self._made: PagedStorage | None = None

    @property
    def run(self) -> Extent:  # type: ignore[override]
        if self._made is None:
            weight = self._weight
            if weight._version != self._version:
                raise_modified(weight, self._version)
            shape = torch.empty(weight.size(), dtype=self._dtype, device="meta")
            with torch.no_grad():
                cast = blank(self.pager, shape, "activation")
                cast.copy_(weight)
            self._made, self.offset = cast._storage, cast._storage.offset
            if is_watched(weight):
                self.pager.budget.placement.note_cast(self._made.run, noted_as(weight))
        return self._made.run

    def __del__(self) -> None:
        pass  # its pages are of another storage


def _save_factors(ctx: Any, left: torch.Tensor, right: torch.Tensor) -> None:
    """Of a product, as PyTorch's own node does: one for the gradient of the other, if that wants
    one. Then dense memory lives as long as beside a whole product."""
    for_left, for_right = ctx.needs_input_grad[:2]
    ctx.save_for_backward(left if for_right else None, right if for_left else None)


class _InputGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: torch.Tensor, weight: PagedTensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        _save_factors(ctx, grad, weight)
        return _input_grad(plain(grad), weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> Any:
        if grad is None:
            return None, None
        grad = plain(grad)
        factor, weight = ctx.saved_tensors
        for_factor, for_weight = ctx.needs_input_grad
        of_factor = product(grad, weight, None) if for_factor else None
        if not for_weight:
            return of_factor, None
        return of_factor, WeightGrad.apply(factor, grad, Geometry.of(weight))  # type: ignore[no-untyped-call]


class WeightGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: torch.Tensor, x: torch.Tensor, geometry: Geometry) -> PagedTensor:
        ctx.set_materialize_grads(False)
        _save_factors(ctx, grad, x)
        ctx.dtype = x.dtype
        return _weight_grad(plain(grad), plain(x), geometry)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> Any:
        if grad is None:
            return None, None, None
        factor, x = (plain(tensor) for tensor in ctx.saved_tensors)
        grad = grad.to(ctx.dtype)
        for_factor, for_x, _ = ctx.needs_input_grad
        if type(grad) is not PagedTensor or not grad.is_contiguous():
            return x.mm(grad.t()) if for_factor else None, factor.mm(grad) if for_x else None, None
        of_factor = product(x, grad, None) if for_factor else None
        return of_factor, input_grad(factor, grad) if for_x else None, None


# -- the products ----------------------------------------------------------------------------------
def _product(x: torch.Tensor, weight: PagedTensor, bias: torch.Tensor | None) -> torch.Tensor:
    matrix = Matrix.of(weight)
    _count(weight, x, "forward")
    out = x.new_empty(x.size(0), matrix.rows)
    with torch.no_grad(), _as_it_is(x), closing(matrix.walk()) as slabs:
        for slab in slabs:
            for first, stop in slab.blocks():
                rows = slab.block(first, stop).to(x.dtype).t()
                if bias is None:
                    torch.mm(x, rows, out=out[:, first:stop])
                else:
                    torch.addmm(bias[first:stop], x, rows, out=out[:, first:stop])
                del rows  # before there is the next one
    return out


def _input_grad(grad: torch.Tensor, weight: PagedTensor) -> torch.Tensor:
    matrix = Matrix.of(weight)
    _count(weight, grad, "inputs")
    wide = torch.float32 if grad.dtype in _HALVES else grad.dtype
    total = grad.new_zeros(grad.size(0), matrix.columns, dtype=wide)
    with torch.no_grad(), _as_it_is(grad), closing(matrix.walk()) as slabs:
        for slab in slabs:
            for first, stop in slab.blocks():
                rows, here = slab.block(first, stop), grad[:, first:stop]
                if wide is not grad.dtype and runs_triton(grad.device):  # CUDA alone has it
                    total += torch.mm(here, rows.to(grad.dtype), out_dtype=wide)
                else:
                    total.addmm_(here.to(wide), rows.to(grad.dtype).to(wide))
                del rows
    return total.to(grad.dtype)


def _weight_grad(grad: torch.Tensor, x: torch.Tensor, geometry: Geometry) -> PagedTensor:
    """In new pages. If they find no room in the tiers (``TierFull``), none of them stays."""
    with torch.no_grad():
        result = geometry.new_gradient()
    matrix = Matrix.of(result)
    _count(result, x, "weight")
    with torch.no_grad(), _as_it_is(x), closing(matrix.walk(write=True)) as slabs:
        for slab in slabs:
            for first, stop in slab.blocks():
                slab.store(first, grad[:, first:stop].t().mm(x))
    return result


def _count(weight: PagedTensor, x: torch.Tensor, way: str) -> None:
    """A product slab by slab begins. In a metered iteration it counts as what a whole one is said
    to take slab by slab (:func:`watched`), so that a minimum does not depend on what is whole."""
    if is_watched(weight):
        taken = streaming_takes(weight, x.dtype, x.size(0), way)
        noted = noted_as(weight) if way != "weight" else None
        weight._storage.pager.budget.placement.note_product(noted, time.perf_counter(), taken)


def _as_it_is(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """No autocast: operands have the dtype that they shall have."""
    return torch.autocast(tensor.device.type, enabled=False)
