"""``F.linear`` with a paged weight, as one node of the graph.

PyTorch makes a linear of a transposed view and a product, in both directions; each is a trip
through the dispatcher, and the view a new wrapper. Here the function is caught before it is taken
apart: the product runs on plain views, and backward runs the same products as PyTorch's own
formulas (``mm_mat1_backward``, ``mm_mat2_backward`` in its FunctionsManual.cpp), so that every bit
is the same.

Which way a product takes:

| the weight | is read |
|---|---|
| takes more than the device budget | slab by slab (``linear_stream.py``) |
| is in consecutive frames, as nearly always | by a plain view: PyTorch's bits |
| is in scattered frames | gathered |
| fits, but not beside what others have pinned, or a copy has no room | slab by slab |
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from ..budget.placement import Taken, Weight
from ..errors import InfeasibleBudget
from ..tensor.activations import raise_modified
from ..tensor.dense_run import NOT_QUICK, PLAIN, Operands, run_dense, run_quickly
from ..tensor.dispatcher import serve_call
from ..tensor.lending import lend_to
from ..tensor.op_info import our_modes
from ..tensor.paged_tensor import PagedTensor, direct_view, withdraw
from .gradients import Geometry, in_pages
from .linear_stream import (
    WeightGrad,
    finds_room,
    input_grad,
    is_cast,
    is_streamed,
    is_watched,
    linear_in_slabs,
    plain,
    product,
    streaming_takes,
    watched,
)

LINEAR = torch.nn.functional.linear
_PRODUCTS = "AddmmBackward", "MmBackward", "BmmBackward"  # names of PyTorch's nodes
_data: Any = torch._C.TensorBase.data  # without the guard that looks who keeps this memory
_STRIDED, _mm, _MM = torch.strided, torch.mm, torch.ops.aten.mm.default
_MATRIX = "_tensorpager_matrix"  # on a dense view: what `_note_matrix` found
# Asked before each linear, so without the way through `torch` and `torch._C`.
_modes = torch._C._len_torch_dispatch_stack
_any_autocast = torch._C._is_any_autocast_enabled
_functorch_level = torch._C._functorch.peek_interpreter_stack
_grad_is_on = torch.is_grad_enabled
# A number in the order of nodes that no other node has: making any takes the next one.
_take_sequence_nr = torch._C._functions.UndefinedGrad


def linear(input: Any, weight: Any, bias: Any = None) -> Any:
    """``F.linear``; ``NotImplemented`` where PyTorch's own way has to be taken.

    input : [..., in_features], contiguous where it has more than two dimensions. Paged ones come
        from checkpointing, which must see the same node as in the first forward pass.
    weight : PagedTensor [out_features, in_features], contiguous.
    bias : ``None``, or [out_features], paged or plain.
    """
    inputs = input
    if type(weight) is not PagedTensor or not isinstance(inputs, torch.Tensor):
        return NotImplemented
    storage = weight._storage
    pager = storage.pager
    streams = storage.run.streamed is not False and is_streamed(inputs, weight)
    taken = _is_ours(inputs, weight, bias)
    if streams:
        return linear_in_slabs(inputs, weight, bias, native=not taken)
    if not pager.budget.metering or not is_watched(weight):
        return _whole(inputs, weight, bias) if taken else NotImplemented
    nbytes = inputs.numel() // max(1, inputs.size(-1)) * weight.size(0) * inputs.dtype.itemsize
    if not finds_room(weight, inputs, nbytes, pages=storage.run.count):
        return linear_in_slabs(inputs, weight, bias, native=not taken)
    if not taken:
        return _as_pytorch_has_it(inputs, weight, bias)
    with watched(weight, inputs, bias):
        return _whole(inputs, weight, bias)


def _as_pytorch_has_it(inputs: torch.Tensor, weight: PagedTensor, bias: Any) -> Any:
    """A whole one in a metered iteration, by PyTorch's own nodes: under autocast. What these take
    for the weight is watched, as it is for :class:`_Linear`."""
    kind = weight.device.type
    seen = _functorch_level() is not None or _modes() > our_modes.count
    if seen or not torch.is_autocast_enabled(kind):
        return NotImplemented
    with watched(weight, inputs, bias) as noted:
        out = LINEAR(inputs, weight, bias)
    node = out.grad_fn
    while node is not None and not node.name().startswith(_PRODUCTS):
        node = node.next_functions[0][0] if node.next_functions else None
    if node is not None:
        _watch_gradients(node, weight, noted, out.numel() // out.size(-1), out.dtype)
    return out


def _watch_gradients(
    node: Any, weight: PagedTensor, noted: Weight, rows: int, dtype: torch.dtype
) -> None:
    """``node``, of PyTorch's, is that of a product of so many ``rows`` with ``weight``."""
    placement = weight._storage.pager.budget.placement
    began = [0.0]

    def begin(_: Any) -> None:
        began[0] = time.perf_counter()

    def end(made: tuple[Any, ...], _: Any) -> tuple[Any, ...] | None:
        if not weight._storage.pager.metering_this():
            return None
        of_inputs, of_weight = made[-2:]
        result = 0
        if of_inputs is not None:
            placement.note_product(noted, began[0], streaming_takes(weight, dtype, rows, "inputs"))
            result = of_inputs.numel() * dtype.itemsize
            twice = of_inputs.grad_fn
            if twice is not None and twice.name().startswith(_PRODUCTS):
                _watch_second_gradient(twice, weight, dtype, rows, noted)
        if of_weight is None:
            return None
        taken = streaming_takes(weight, dtype, rows, "weight")
        placement.note_product(noted, began[0], taken._replace(result=result))
        return *made[:-1], in_pages(of_weight, weight, noted)

    node.register_prehook(begin)
    node.register_hook(end)


def _whole(inputs: torch.Tensor, weight: PagedTensor, bias: Any) -> torch.Tensor:
    if _grad_is_on() and (
        weight.requires_grad
        or inputs.requires_grad
        or (bias is not None and bias.requires_grad)
    ):  # fmt: skip
        rows = inputs if inputs.dim() == 2 else inputs.view(-1, inputs.size(-1))
        return _apply(rows, bias, weight, (inputs,))  # type: ignore[no-any-return]
    out: Any = _on_views_at_hand(LINEAR, inputs, weight, bias)
    return _product_otherwise(inputs, weight, bias) if out is NOT_QUICK else out


def _is_ours(inputs: torch.Tensor, weight: PagedTensor, bias: Any) -> bool:
    """Whether the product may run on plain views: nobody wants to see, or to change, the ops that a
    linear is made of, and the operands are of the common kind. No more of them than has to be
    known: what PyTorch refuses, it refuses when the product runs."""
    pager = weight._storage.pager
    if (
        pager.sees_ops
        or _modes() > our_modes.count
        or (_any_autocast() and is_cast(weight))
        or _functorch_level() is not None
        or forward_ad._current_level >= 0
    ):
        return False
    matrix: Any = getattr(weight._view, _MATRIX, NOT_QUICK)
    if matrix is NOT_QUICK:
        matrix = _note_matrix(weight)
    if matrix is None or inputs.dtype is not matrix.dtype or inputs.layout is not _STRIDED:
        return False
    dims = inputs.dim()
    if dims != 2 and (dims < 2 or not inputs.is_contiguous()):
        return False
    if not inputs.numel():
        return False
    if bias is None:
        return True
    return (
        isinstance(bias, torch.Tensor)
        and bias.dtype is matrix.dtype
        and bias.numel() == matrix.rows
        and bias.dim() == 1
    )


class _Matrix(NamedTuple):
    """Of a weight that a linear can take as it is."""

    rows: int
    dtype: torch.dtype


def _note_matrix(weight: PagedTensor) -> _Matrix | None:
    """``None`` for no such weight. Remembered on its dense view, which does not outlive a change
    of its geometry."""
    view = weight._view
    found = None
    with torch._C.DisableTorchFunctionSubclass():
        if weight.dim() == 2 and weight.dtype.is_floating_point and weight.is_contiguous():
            found = _Matrix(weight.size(0), weight.dtype)
    if view is not None:
        setattr(view, _MATRIX, found)
    return found


def _product_otherwise(inputs: torch.Tensor, weight: PagedTensor, bias: Any) -> torch.Tensor:
    """Where no views are at hand: pages are brought in, views made; or it goes slab by slab."""
    out = _brought_in(LINEAR, inputs, weight, bias)
    if out is not NOT_QUICK:
        return out  # type: ignore[no-any-return]
    x, b = plain(inputs), plain(bias)
    flat = product(x.reshape(-1, x.size(-1)), weight, b)
    return flat.view(*inputs.shape[:-1], weight.size(0))


def _brought_in(func: Callable[..., torch.Tensor], *given: Any) -> Any:
    """``func``, which gives new memory, of a weight (the second of ``given``) that is brought in,
    and perhaps of other paged operands. In scattered frames they are gathered. ``NOT_QUICK``, and
    nothing done, where there is no room for the weight beside what others have pinned, or for a
    copy: from now on it goes slab by slab, one way or the other."""
    weight = given[1]
    pager, run = weight._storage.pager, weight._storage.run
    operands, paged = Operands(pager), [t for t in given if type(t) is PagedTensor]
    if any(tensor._storage.pager is not pager for tensor in paged):
        return run_dense(func, PLAIN, given, {})
    runs = list({t._storage.run.id: t._storage.run for t in paged}.values())
    try:
        pager.take(runs)
    except InfeasibleBudget:
        run.streamed = True
        return NOT_QUICK
    try:
        room = _room_bytes(weight) if run.base < 0 else None
        if room is not None and weight.numel() * weight.dtype.itemsize > room:
            run.streamed = True
            return NOT_QUICK
        return func(*(operands.dense(t) if type(t) is PagedTensor else t for t in given))
    except BaseException:
        withdraw(paged, operands.views)
        raise
    finally:
        pager.release(runs)


def _room_bytes(weight: PagedTensor) -> int | None:
    """Dense memory that a gathered copy may take; ``None`` while the border is not settled. On a
    CPU how much of it is in use is not known: all that there is beside the arena for the longest
    batches, since what streams does so for good."""
    pager, budget = weight._storage.pager, weight._storage.pager.budget
    if not budget.settled:
        return None
    if pager.backend.host_addressable:
        return max(budget.reserve, budget.dense_peak)
    return max(0, budget.reserve - pager.backend.dense_now())


def _times(rows: torch.Tensor, weight: PagedTensor) -> torch.Tensor:
    """rows @ weight: the gradient of the inputs."""
    if not is_watched(weight):
        return _times_whole(rows, weight)
    nbytes = rows.size(0) * weight.size(1) * rows.dtype.itemsize
    if not finds_room(weight, rows, nbytes, pages=weight._storage.run.count):
        return input_grad(plain(rows), weight)
    with watched(weight, rows, way="inputs") as noted:
        found = _times_whole(rows, weight)
    if found.grad_fn is not None and not weight._storage.run.streamed:
        _watch_second_gradient(found.grad_fn, weight, rows.dtype, rows.size(0), noted)
    return found


def _watch_second_gradient(
    node: Any, weight: PagedTensor, dtype: torch.dtype, rows: int, noted: Weight
) -> None:
    """``node``, of PyTorch's rows @ weight, is that of a second derivative: it reads the weight
    again, and gives a dense gradient of it, which :func:`_of_weight` does not see."""
    budget = weight._storage.pager.budget
    of_weight = streaming_takes(weight, dtype, rows, "weight")
    of_rows = Taken(0, streaming_takes(weight, dtype, rows, "forward").more)

    def begin(_: Any) -> None:
        if budget.metering:
            budget.placement.under_way = noted

    def end(made: tuple[Any, ...], _: Any) -> tuple[Any, ...] | None:
        budget.placement.under_way = None
        if not budget.metering:
            return None
        if made[0] is not None:
            budget.placement.note_product(noted, time.perf_counter(), of_rows)
        if type(made[-1]) is not torch.Tensor:
            return None
        budget.placement.note_product(noted, time.perf_counter(), of_weight)
        return *made[:-1], in_pages(made[-1], weight, noted)

    node.register_prehook(begin)
    node.register_hook(end)


def _times_whole(rows: torch.Tensor, weight: PagedTensor) -> torch.Tensor:
    if _grad_is_on() or not _is_ours(rows, weight, None):
        try:
            return rows.mm(weight)
        except InfeasibleBudget:
            weight._storage.run.streamed = True
            return input_grad(rows, weight)
    out = _on_views_at_hand(_mm, rows, weight)
    if out is NOT_QUICK:
        out = _brought_in(_mm, rows, weight)
    return input_grad(rows, weight) if out is NOT_QUICK else out


def _of_weight(rows: torch.Tensor, inputs: torch.Tensor, metered: Any) -> torch.Tensor:
    """rows.T @ inputs: the gradient of the weight, which is ``metered`` in a metered iteration."""
    if metered is None or not is_watched(metered):
        if type(inputs) is PagedTensor and not _grad_is_on() and _is_ours(rows, inputs, None):
            operands = rows.t(), inputs
            out = run_quickly(_MM, operands, {})
            return run_dense(_MM, PLAIN, operands, {}) if out is NOT_QUICK else out  # type: ignore[no-any-return]
        return rows.t().mm(inputs)
    nbytes = metered.numel() * metered.dtype.itemsize
    if metered._storage.run.streamed or not finds_room(metered, inputs, nbytes, pages=0):
        return WeightGrad.apply(plain(rows), plain(inputs), Geometry.of(metered))  # type: ignore[no-any-return,no-untyped-call]
    with watched(metered, inputs, way="weight") as noted:
        return in_pages(rows.t().mm(inputs), metered, noted)


def _on_views_at_hand(
    func: Callable[..., torch.Tensor], inputs: torch.Tensor, weight: PagedTensor, bias: Any = None
) -> Any:
    """``func`` of plain inputs and a weight (and a bias) on the device whose dense views are at
    hand: by far the commonest case. ``NOT_QUICK``, and nothing done, otherwise.

    ``func`` gives new memory, never its operands'.
    """
    run = weight._storage.run
    if weight._view_generation != run.generation or run.base < 0 or isinstance(inputs, PagedTensor):
        return NOT_QUICK
    pager, runs = weight._storage.pager, [run]
    paged = bias is not None and type(bias) is PagedTensor
    if paged:
        other = bias._storage.run
        if bias._view_generation != other.generation or other.base < 0:
            return NOT_QUICK
        if bias._storage.pager is not pager:
            return NOT_QUICK
        if other is not run:
            runs.append(other)
    pager.take(runs)
    try:
        if run.base < 0 or (paged and other.base < 0):
            return NOT_QUICK  # to scattered frames, just before it was pinned
        # Views that are at hand are taken as they are, unless they were withdrawn, or it has moved.
        view = weight._view
        if view is None or weight._view_generation != run.generation:
            view = direct_view(weight)
        if not paged:
            return func(inputs, view) if bias is None else func(inputs, view, bias)
        of_bias = bias._view
        if of_bias is None or bias._view_generation != other.generation:
            of_bias = direct_view(bias)
        return func(inputs, view, of_bias)
    except BaseException:
        tensors = [weight, bias] if paged else [weight]
        withdraw(tensors, [t._view for t in tensors if t._view is not None])
        raise
    finally:
        pager.release(runs)


# -- the graph -------------------------------------------------------------------------------------
class _Linear(torch.autograd.Function):
    """Saves what PyTorch's own nodes do: the inputs for the weight's gradient, the weight for that
    of the inputs. A parameter is kept as it is: autograd would make another wrapper of it for each
    backward pass."""

    # Arguments as PyTorch's addmm has them, but for its first two: a bias' gradient is then ready
    # before the weight's, and DistributedDataParallel fills its buckets in that order.
    # ``given``: the inputs before they were viewed as rows. (As in PyTorch, first and second
    # derivatives of the inputs meet at that view.)
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, bias: Any, weight: PagedTensor, given: tuple[torch.Tensor]
    ) -> Any:
        _take_sequence_nr()  # for `_Late`
        for_inputs, _, for_weight, _ = ctx.needs_input_grad
        kept = ctx.parameter = ctx.again = None
        ctx.is_addmm = bias is not None
        pager = weight._storage.pager
        ctx.metered = weight if pager.budget.metering and pager.metering_this() else None
        if for_inputs:
            if weight.is_leaf:
                ctx.parameter = weight, weight._version
            else:
                kept = weight
        ctx.save_for_backward(rows if for_weight else None, kept)
        ctx.is_column_major = _is_column_major(rows)
        (inputs,) = given
        out = _on_views_at_hand(LINEAR, inputs, weight, bias)
        if out is NOT_QUICK:
            out = _product_otherwise(inputs, weight, bias)
        # Of more than two dimensions it is a view of rows, which users could not change in place.
        return _data.__get__(out) if out._is_view() else out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        for_inputs, for_bias, for_weight, _ = ctx.needs_input_grad
        twice = _grad_is_on()
        inputs: Any = None
        weight: Any = None
        if twice or ctx.parameter is None:
            inputs, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.size(-1)) if grad.dim() > 2 else grad
        of_inputs = of_weight = of_bias = more = None
        if ctx.again is not None:
            more = ctx.again.taken(torch._C._current_graph_task_id())
        # In PyTorch's order, as second derivatives are summed in the order of these products: its
        # mm begins with the weight, its addmm with the inputs. Otherwise the weight may leave
        # before there is a gradient of its size.
        if twice and for_weight and not ctx.is_addmm:
            of_weight = _of_weight(rows, inputs, ctx.metered)
        if for_inputs:
            if weight is None:
                weight, version = ctx.parameter
                with torch._C.DisableTorchFunctionSubclass():
                    now = weight._version
                if now != version:
                    raise_modified(weight, version)
            if twice and for_weight:
                if ctx.again is None:
                    ctx.again = _Again()
                weight = ctx.again.of(weight, ctx)
            if ctx.is_column_major:
                of_inputs = weight.t().mm(rows.t()).t()
            elif type(weight) is PagedTensor:
                of_inputs = _times(rows, weight)
            else:  # a view of a parameter, which is lent too
                of_inputs = rows.mm(weight)
        if for_weight:
            if of_weight is None:
                if inputs is None:  # only now: they are lent until the weight's pages are used
                    inputs, _ = ctx.saved_tensors
                of_weight = _of_weight(rows, inputs, ctx.metered)
            if more is not None:
                of_weight = more + of_weight
        if for_bias:
            of_bias = rows.sum(0)
        return of_inputs, of_bias, of_weight, None


class _Again:
    """Where second derivatives of one linear meet its first ones, before both go on to the weight.

    PyTorch's linear is a product with ``weight.t()``, and it is at that view's node that all its
    contributions to the weight's gradient are added up; where the weight has a third use, another
    order of additions has other bits. ::

        PyTorch's     weight <- t() <- mm, and what the backward pass of mm made of weight.t()
        here          weight <- _Linear, to which _Late brings what its backward pass has made

    ``_Late`` runs right before ``_Linear`` in a pass that runs both, and leaves its gradient here;
    where ``_Linear`` has no part in the pass, it goes straight to the weight.
    """

    __slots__ = ("_brought", "_late")

    def __init__(self) -> None:
        self._late: PagedTensor | None = None
        self._brought: tuple[int, torch.Tensor] | None = None

    def of(self, weight: PagedTensor, node: Any) -> PagedTensor:
        """``weight`` for the backward pass of ``node``, whose context this is."""
        if self._late is None:
            late: Any = _Late.apply(weight, node)  # type: ignore[no-untyped-call]
            late.grad_fn._set_sequence_nr(node._sequence_nr() + 1)  # higher ones run first
            self._late = late
        return self._late

    def bring(self, grad: torch.Tensor) -> None:
        self._brought = torch._C._current_graph_task_id(), grad

    def taken(self, graph_task: int) -> torch.Tensor | None:
        """What was brought in this pass; once."""
        brought, self._brought = self._brought, None
        return brought[1] if brought is not None and brought[0] == graph_task else None


class _Late(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: PagedTensor, node: Any) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.node = weakref.ref(node)  # which has this node's result: no cycle
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> Any:
        node = ctx.node()
        if grad is None or node is None or not torch._C._will_engine_execute_node(node):
            return grad, None
        node.again.bring(grad)
        return None, None


lend_to(_Linear.backward)

# Past what `Function.apply` does for functorch, which is refused above.
_apply: Any = super(torch.autograd.Function, _Linear).apply


def _is_column_major(matrix: torch.Tensor) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return matrix.stride() == (1, matrix.size(0))


serve_call(LINEAR, linear, torch._C.DisableTorchFunctionSubclass)
