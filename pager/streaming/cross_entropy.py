"""The loss of a language model's head, without the full logits and without the whole weight.

``F.cross_entropy(F.linear(hidden, weight, bias), targets)`` a slab of the vocabulary at a time
(``kernels/cross_entropy.py``). The weight may be larger than the arena: its rows go through it slab
by slab, in forward and once more in backward, and so does its gradient, which is in pages then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch

from ...kernels.cross_entropy import chunked_cross_entropy, equal_slabs
from ..tensor.dispatcher import hide_from_dynamo
from ..tensor.paged_tensor import PagedTensor
from .head_rows import HeadRows, Slab, slab_rows
from .table_gradient import new_gradient, write_rows
from .table_rows import is_large, is_table

T = TypeVar("T")


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> torch.Tensor:
    """``F.cross_entropy(F.linear(hidden, weight, bias), targets, …)`` without the full logits.

    Args:
        hidden: ``[..., features]``, floats.
        weight: ``[classes, features]``, paged or plain; it may be larger than the device budget.
        targets: int64 ``[...]``, classes or ``ignore_index``.
        bias: ``[classes]``, paged or plain.

    Returns the loss in float32 (float64 for float64), for ``reduction="none"`` in the targets'
    shape. Memory beside hidden states and their gradient: a slab of logits, about as large as the
    hidden states, and a slab of the weight and of its gradient, 32 MiB each at most.

    The same bits whether ``weight`` is paged or plain, from run to run, whatever the budget (on one
    machine, with one number of threads). The gradient of a weight that takes more than a third of
    the arena is in pages. Differentiable once; class weights and probabilities are not supported.
    """
    _check(hidden, weight, bias)
    hidden, targets = _plain(hidden), _plain(targets)
    if type(weight) is PagedTensor and not is_table(weight):
        weight = _plain(weight)  # a small one, or a view
    if bias is not None:
        bias = _plain(bias)
    head = _PagedHead(weight, bias)
    anchors = [t for t in (weight, bias) if t is not None and t.requires_grad]
    with torch.autograd.graph.saved_tensors_hooks(_keep, _give):
        return chunked_cross_entropy(
            hidden, targets, head, *anchors,
            ignore_index=ignore_index, label_smoothing=label_smoothing, reduction=reduction,
        )  # fmt: skip


hide_from_dynamo(linear_cross_entropy)


def _check(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    if weight.dim() != 2 or not weight.size(0):
        raise ValueError(f"weight is {tuple(weight.shape)}; pass [classes, features]")
    if not hidden.dim() or hidden.size(-1) != weight.size(1):
        raise ValueError(
            f"hidden is {tuple(hidden.shape)} and weight {tuple(weight.shape)}; the last dimension "
            "of both is the features"
        )
    if bias is not None and tuple(bias.shape) != (weight.size(0),):
        raise ValueError(f"bias is {tuple(bias.shape)}; pass ({weight.size(0)},), one for a class")


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_dense() if type(tensor) is PagedTensor else tensor


# -- what backward needs stays dense: backward begins with it --------------------------------------
class _Kept(NamedTuple):
    tensor: torch.Tensor
    version: int


def _keep(tensor: torch.Tensor) -> _Kept:
    return _Kept(tensor if tensor.is_leaf else tensor.detach(), tensor._version)


def _give(kept: _Kept) -> torch.Tensor:
    _check_version(kept.tensor, kept.version)
    return kept.tensor


def _check_version(tensor: torch.Tensor, version: int) -> None:
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: a tensor of shape {tuple(tensor.shape)} is at version {tensor._version}; "
            f"expected version {version} instead. Change it after backward."
        )


# -- the head --------------------------------------------------------------------------------------
class _PagedHead:
    """A ``Head`` (``kernels/cross_entropy.py``). Anchors: those of weight and bias that require a
    gradient, in this order. The walk over the weight ends with the last slab, or with an error."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = weight, None if bias is None else bias.detach()
        self._version = weight._version
        self._slabs = equal_slabs(weight.size(0), slab_rows(weight))
        self._rows = HeadRows(weight, self._slabs)
        self._large = type(weight) is PagedTensor and is_large(weight)
        self._wants = weight.requires_grad, bias is not None and bias.requires_grad
        self._of_weight: torch.Tensor | None = None
        self._of_bias: torch.Tensor | None = None

    def slabs(self) -> Sequence[Slab]:
        return self._slabs

    def logits(self, hidden: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        _check_version(self._weight, self._version)
        bias = None if self._bias is None else self._bias[begin:end]

        def product() -> torch.Tensor:
            return torch.nn.functional.linear(hidden, self._rows.get(begin, end), bias)

        logits = self._guarded(product)
        if self._rows.is_over and self._rows.goes_up:  # forward asks for nothing more
            self._rows.close()
        return logits

    def input_grad(
        self, d_logits: torch.Tensor, begin: int, end: int, dhidden: torch.Tensor
    ) -> None:
        def product() -> None:
            dhidden.add_(d_logits @ self._rows.get(begin, end))

        self._guarded(product)
        if self._rows.is_over:
            self._rows.close()

    def weight_grad(
        self, d_logits: torch.Tensor, begin: int, end: int, hidden: torch.Tensor
    ) -> None:
        self._guarded(lambda: self._add_weight_grad(d_logits, begin, end, hidden))

    def _add_weight_grad(
        self, d_logits: torch.Tensor, begin: int, end: int, hidden: torch.Tensor
    ) -> None:
        wants_weight, wants_bias = self._wants
        weight, bias = self._weight, self._bias
        if wants_weight:
            if self._of_weight is None:
                self._of_weight = (
                    new_gradient(weight)
                    if self._large
                    else torch.empty(weight.size(), dtype=weight.dtype, device=weight.device)
                )
            of_slab = (d_logits.t() @ hidden).to(weight.dtype)
            if type(self._of_weight) is PagedTensor:
                write_rows(self._of_weight, begin, of_slab)
            else:
                self._of_weight[begin:end] = of_slab
        if wants_bias:
            assert bias is not None
            if self._of_bias is None:
                self._of_bias = torch.empty_like(bias)
            self._of_bias[begin:end] = d_logits.sum(dim=0)

    def gradients(self) -> Sequence[torch.Tensor | None]:
        self._rows.close()
        both = self._of_weight, self._of_bias
        self._of_weight = self._of_bias = None
        return [grad for grad, wanted in zip(both, self._wants) if wanted]

    def _guarded(self, action: Callable[[], T]) -> T:
        try:
            return action()
        except BaseException:
            self._rows.close()
            self._of_weight = self._of_bias = None
            raise
