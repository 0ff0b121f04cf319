"""Dense gradients of weights in metered iterations, and what they would take in pages.

A weight that streams has its gradients in pages. Those of one that is whole are plain tensors, of
which no op reaches us. If the budget is then refused, the smallest one that works is that under
which all weights stream, and it has to have the frames of such ops too. Which they are is known of
the nodes between a view or a cast of a weight and the weight itself. What the program does with a
gradient that it gets, in a hook or from ``torch.autograd.grad``, is not: all of its pages count.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from ..budget.placement import Weight
from ..core import Core
from ..tensor.dense_run import paged_in
from ..tensor.dispatcher import serve_call
from ..tensor.interop import serve_function
from ..tensor.paged_tensor import PagedTensor

# Nodes, by their names without a number. Of a gradient in pages these give a view ...
_VIEWS = {"View", "UnsafeView", "ReshapeAlias", "Unsqueeze", "Squeeze", "Alias", "_Late"}
# ... and these a dense tensor, a part after the other. All others take all of its pages at once.
_IN_PARTS = {"ToCopy", "Clone", "Split", "SplitWithSizes"}


def edge_of(weight: PagedTensor) -> Hashable:
    """Along which its gradients go, added up where there are several. (A tensor that checkpointing
    has made again has the edge of the first one.)"""
    node = weight.grad_fn
    while node is not None and node.name() == "_LateBackward":  # of `linear.py`
        node = node.next_functions[0][0]
    if node is None or hasattr(node, "variable"):  # of a parameter
        return weight._storage.run.id
    return node._sequence_nr(), weight.storage_offset()


def note_gradient(weight: PagedTensor, noted: Weight, gradient: torch.Tensor) -> None:
    """``gradient``, a dense one of ``weight``, was made just now. Autograd may sum up several, and
    run ops on them before they are those of a parameter."""
    pager = weight._storage.pager
    pager.budget.placement.note_gradient(noted, gradient, edge_of(weight))
    node = weight.grad_fn
    while node is not None and _name(node) in _VIEWS:
        node = node.next_functions[0][0]
    if node is not None and node.next_functions and _name(node) not in _IN_PARTS:
        _note_pages(pager, noted, gradient)
    for tensor in (weight, weight._base):
        if type(tensor) is PagedTensor and tensor.requires_grad:
            _note_total_later(pager, tensor, noted)


def _name(node: Any) -> str:
    name: str = node.name().rstrip("0123456789").removesuffix("Backward")
    return name


def _note_pages(pager: Core, noted: Weight, gradient: torch.Tensor) -> None:
    pages = pager.space.pages_for(gradient.numel() * gradient.dtype.itemsize)
    noted.least_frames = max(noted.least_frames, pages)


def _note_total_later(pager: Core, weight: PagedTensor, noted: Weight) -> None:
    budget, edge = pager.budget, edge_of(weight)

    def note(total: torch.Tensor) -> None:
        handle.remove()
        if type(total) is not PagedTensor and budget.metering:
            budget.placement.note_total(noted, total, edge)
            if of_the_user:
                _note_pages(pager, noted, total)

    handle = weight.register_hook(note)  # type: ignore[no-untyped-call]
    # Before those of the user: what they make of it is dense in any way.
    hooks: dict[int, Any] = weight._backward_hooks  # type: ignore[assignment]
    others = {key: hooks.pop(key) for key in [*hooks] if key != handle.id}
    hooks.update(others)
    of_the_user = [h for h in others.values() if getattr(h, "__code__", None) is not note.__code__]


def _grad(*args: Any, **kwargs: Any) -> Any:
    found = serve_function(torch.autograd.grad, args, kwargs)
    for pager in {tensor._storage.pager for tensor in paged_in(args, kwargs)}:
        for gradient in found if pager.metering_this() else ():
            if type(gradient) is torch.Tensor and gradient.layout is torch.strided:
                noted = pager.budget.placement.whose_gradient(gradient)
                if noted is not None:
                    _note_pages(pager, noted, gradient)
    return found


serve_call(torch.autograd.grad, _grad)
