"""The loss of a language model's head, without the full logits and without the whole weight.

``F.cross_entropy(F.linear(hidden, weight, bias), targets)`` a slab of the vocabulary at a time
(``kernels/cross_entropy.py``). The weight may be larger than the arena: its rows go through it slab
by slab, in forward and once more in backward, and so does its gradient, which is in pages then.

A plain weight is sliced. A paged one that fits is held for the whole walk, and sliced too. Of a
large one a slab is a view where its frames are consecutive, and else a copy of the slab. The bytes,
and how they are aligned, are the same each way, so the products are the same bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from typing import TypeVar

import torch

from ...kernels.cross_entropy import chunked_cross_entropy, equal_slabs
from ..tensor.activations import keep, raise_modified, unpack
from ..tensor.dispatcher import hide_from_dynamo
from ..tensor.operands import begin_of
from ..tensor.paged_tensor import PagedTensor, direct_view
from ..tensor.slabs import cut, fair_share, put_bytes, walk
from .gradients import note_gradient
from .tables import (
    has_room,
    is_large,
    is_read_by_rows,
    is_table,
    new_gradient,
    noted_as,
    row_bytes,
)

T = TypeVar("T")
Slab = tuple[int, int]
_LEAST_ROWS, _STEP_ROWS = 256, 64  # 64 rows of any dtype begin at a multiple of 64 bytes
_MOST_BYTES = 32 << 20  # of a slab of the weight


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
    # What backward needs stays dense: backward begins with it.
    with torch.autograd.graph.saved_tensors_hooks(keep, unpack):
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


# -- the head --------------------------------------------------------------------------------------
def _slab_rows(weight: torch.Tensor) -> int:
    """Rows of a slab: about as many as a row has elements, so that a slab of logits is as large as
    the hidden states. The arena has no say in it: results do not depend on the budget."""
    rows = -(-max(_LEAST_ROWS, weight.size(1)) // _STEP_ROWS) * _STEP_ROWS
    most = _MOST_BYTES // max(1, row_bytes(weight)) // _STEP_ROWS * _STEP_ROWS
    return max(_STEP_ROWS, min(rows, most))


class _PagedHead:
    """A ``Head`` (``kernels/cross_entropy.py``). Anchors: those of weight and bias that require a
    gradient, in this order. The walk over the weight ends with the last slab, or with an error."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._rows_of = weight, weight.detach()
        self._bias = None if bias is None else bias.detach()
        self._version = weight._version
        self._slabs = equal_slabs(weight.size(0), _slab_rows(weight))
        self._wants = weight.requires_grad, bias is not None and bias.requires_grad
        self._of_weight: torch.Tensor | None = None
        self._of_bias: torch.Tensor | None = None
        self._walk: Generator[torch.Tensor, None, None] | None = None
        self._order: list[Slab] = []  # still to come
        self._slab: Slab | None = None
        self._rows: torch.Tensor | None = None

    def slabs(self) -> Sequence[Slab]:
        return self._slabs

    def logits(self, hidden: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        if self._weight._version != self._version:
            raise_modified(self._weight, self._version)
        bias = None if self._bias is None else self._bias[begin:end]
        linear = torch.nn.functional.linear
        logits = self._guarded(lambda: linear(hidden, self._get(begin, end), bias))
        if not self._order and self._slab == self._slabs[-1]:  # forward asks for nothing more
            self._close()
        return logits

    def input_grad(
        self, d_logits: torch.Tensor, begin: int, end: int, dhidden: torch.Tensor
    ) -> None:
        self._guarded(lambda: dhidden.add_(d_logits @ self._get(begin, end)))
        if not self._order:
            self._close()

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
                self._of_weight = _new_gradient(weight)
            of_slab = (d_logits.t() @ hidden).to(weight.dtype)
            if type(self._of_weight) is PagedTensor:
                source = of_slab.reshape(-1).view(torch.uint8)
                put_bytes(self._of_weight._storage, source, begin * row_bytes(weight))
            else:
                self._of_weight[begin:end] = of_slab
        if wants_bias:
            assert bias is not None
            if self._of_bias is None:
                self._of_bias = torch.empty_like(bias)
            self._of_bias[begin:end] = d_logits.sum(dim=0)

    def gradients(self) -> Sequence[torch.Tensor | None]:
        both = self._of_weight, self._of_bias
        self._close(drop=True)
        return [grad for grad, wanted in zip(both, self._wants) if wanted]

    def _guarded(self, action: Callable[[], T]) -> T:
        try:
            return action()
        except BaseException:
            self._close(drop=True)
            raise

    def _get(self, begin: int, end: int) -> torch.Tensor:
        """Rows ``begin … end``, plain. They hold until the next slab is asked for. They are asked
        for in order, upwards or downwards."""
        if type(self._rows_of) is not PagedTensor:
            return self._rows_of[begin:end]
        if self._rows is not None and self._slab == (begin, end):
            return self._rows
        if not self._order or self._order[0] != (begin, end):
            self._close()
            at = self._slabs.index((begin, end))
            self._order = [*(self._slabs if at == 0 else reversed(self._slabs[: at + 1]))]
            self._walk = _walk(self._rows_of, tuple(self._order))
        assert self._walk is not None
        self._rows = None  # its memory may be used for the next one
        self._rows = next(self._walk)
        self._slab = self._order.pop(0)
        return self._rows

    def _close(self, *, drop: bool = False) -> None:
        """Nothing is pinned afterwards. ``drop``: nor are there gradients."""
        if self._walk is not None:
            self._walk.close()
            if self._rows is not None and self._rows_of._storage.pager.holds(self._rows):  # type: ignore[attr-defined]
                self._rows.set_()  # type: ignore[call-overload]  # tracebacks may hold it
        self._walk = self._rows = self._slab = None
        self._order = []
        if drop:
            self._of_weight = self._of_bias = None


def _new_gradient(weight: torch.Tensor) -> torch.Tensor:
    if type(weight) is not PagedTensor:
        return torch.empty(weight.size(), dtype=weight.dtype, device=weight.device)
    if is_large(weight) or not has_room(weight):
        return new_gradient(weight)
    found = torch.empty(weight.size(), dtype=weight.dtype, device=weight.device)
    pager = weight._storage.pager
    if pager.metering_this() and weight._storage.run.count > 1:
        note_gradient(weight, noted_as(weight), found)
    return found


def _walk(weight: PagedTensor, order: Sequence[Slab]) -> Generator[torch.Tensor, None, None]:
    if is_read_by_rows(weight) and is_table(weight):
        yield from _through_the_arena(weight, order)
        return
    pager, run = weight._storage.pager, weight._storage.run
    with pager.hold([run]):
        if run.base >= 0:
            for begin, end in order:
                yield direct_view(weight)[begin:end]
            return
    yield from _through_the_arena(weight, order)  # its frames are scattered


def _through_the_arena(
    weight: PagedTensor, order: Sequence[Slab]
) -> Generator[torch.Tensor, None, None]:
    pager, nbytes = weight._storage.pager, row_bytes(weight)
    limit, start = max(1, fair_share(pager)), begin_of(weight)
    parts = [cut(start + a * nbytes, start + b * nbytes, limit, pager.page_size) for a, b in order]
    with closing(walk(weight._storage, list(itertools.chain.from_iterable(parts)))) as held:
        for (begin, end), mine in zip(order, parts):
            dense, at = None, 0
            for low, high in mine:
                pieces = next(held).pieces(low, high)
                if len(mine) == len(pieces) == 1:
                    dense = pieces[0]
                    break
                if dense is None:
                    pager.gathers += 1
                    total = (end - begin) * nbytes
                    dense = torch.empty(total, dtype=torch.uint8, device=pager.device)
                for piece in pieces:
                    dense[at : at + piece.numel()] = piece
                    at += piece.numel()
            assert dense is not None
            yield dense.view(weight.dtype).view(end - begin, weight.size(1))
