"""Cross-entropy over slabs of the vocabulary, without the full logits.

Logits [T, V] of a language model's head are often the largest tensor of a step. Here they exist a
slab of classes at a time::

    forward   for each slab:  logits = hidden @ W[slab].T        the head's, any way it likes
                              softmax_update                     running maximum and sum of exps
    backward  for each slab:  logits once more
                              softmax_grad_                      in place: d loss / d logits
                              dhidden += d_logits @ W[slab];  dW[slab] += d_logits.T @ hidden

Memory beside the head's own: one slab of logits, T * (classes in the longest slab) * itemsize
bytes; some 16 numbers for each token; and in backward dhidden in fp32 (fp64). The head is asked for
a slab only after the last slab's logits are gone. Backward goes from the last slab to the first,
since what forward read last may still be on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from .softmax_slabs import gradient_factors, loss_of, new_state, softmax_grad_, softmax_update

__all__ = ["Head", "SlabbedCrossEntropy", "chunked_cross_entropy", "equal_slabs"]


class Head(Protocol):
    """A matrix [classes, D] in slabs of rows, wherever it is.

    Slabs are half-open, ascending, without gaps from 0 to the number of classes. For 128-bit
    accesses begin each at a multiple of 8.
    """

    def slabs(self) -> Sequence[tuple[int, int]]: ...

    def logits(self, hidden: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        """hidden @ W[begin:end].T, [T, end - begin], contiguous; new memory, to be overwritten."""

    def input_grad(
        self, d_logits: torch.Tensor, begin: int, end: int, dhidden: torch.Tensor
    ) -> None:
        """dhidden += d_logits @ W[begin:end]; dhidden is [T, D] in fp32 (fp64)."""

    def weight_grad(
        self, d_logits: torch.Tensor, begin: int, end: int, hidden: torch.Tensor
    ) -> None:
        """Add d_logits.T @ hidden to rows [begin, end) of the weight's gradient."""

    def gradients(self) -> Sequence[torch.Tensor | None]:
        """After the last slab: what autograd is to add to each of the anchors.

        None where `weight_grad` has put the gradient in its place.
        """


class SlabbedCrossEntropy(torch.autograd.Function):
    """`chunked_cross_entropy` for autograd. Differentiable once; backward may run repeatedly."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        targets: torch.Tensor,
        head: Head,
        ignore_index: int,
        label_smoothing: float,
        reduction: str,
        *anchors: torch.Tensor,
    ) -> torch.Tensor:
        classes = head.slabs()[-1][1]
        state = new_state(hidden.shape[0], hidden.dtype, hidden.device)
        for begin, end in head.slabs():
            logits = head.logits(hidden, begin, end)
            softmax_update(logits, begin, targets, state)
            del logits  # before the next slab's are made
        ctx.save_for_backward(hidden, targets, state)
        ctx.head, ctx.classes = head, classes
        ctx.ignore_index, ctx.label_smoothing = ignore_index, label_smoothing
        ctx.reduction = reduction
        kind = hidden.device.type
        ctx.autocast = (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        return loss_of(state, targets, classes, ignore_index, label_smoothing, reduction)

    @staticmethod
    def backward(ctx: Any, grad_loss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the loss over slabs is differentiable once; backward was called with "
                "create_graph=True: leave it out, or use F.cross_entropy on all logits"
            )
        hidden, targets, state = ctx.saved_tensors
        head: Head = ctx.head
        ignored = targets == ctx.ignore_index
        scale = grad_loss.to(state.dtype).expand(targets.shape)
        if ctx.reduction == "mean":
            scale = scale / (~ignored).sum()
        scale = scale.masked_fill(ignored, 0)
        factors = gradient_factors(state, scale, ctx.label_smoothing, ctx.classes)

        for_hidden, for_anchors = ctx.needs_input_grad[0], ctx.needs_input_grad[6:]
        for_weight = any(for_anchors) or not for_anchors
        dhidden = None
        if for_hidden:
            dhidden = torch.zeros(hidden.shape, dtype=state.dtype, device=hidden.device)
        enabled, dtype = ctx.autocast
        with torch.autocast(hidden.device.type, dtype=dtype, enabled=enabled):
            for begin, end in reversed(head.slabs()):
                logits = head.logits(hidden, begin, end)
                softmax_grad_(logits, begin, targets, factors)
                if dhidden is not None:
                    head.input_grad(logits, begin, end, dhidden)
                if for_weight:
                    head.weight_grad(logits, begin, end, hidden)
                del logits
        gradients = head.gradients() if for_anchors and for_weight else [None] * len(for_anchors)
        return (
            None if dhidden is None else dhidden.to(hidden.dtype),
            *(None, None, None, None, None),
            *gradients,
        )


def chunked_cross_entropy(
    hidden: torch.Tensor,
    targets: torch.Tensor,
    head: Head,
    *anchors: torch.Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> torch.Tensor:
    """F.cross_entropy(hidden @ W.T, targets) without the full logits.

    hidden : [..., D], floats.
    targets : int64 [...]; 0 <= target < classes, or ignore_index.
    head : the weight, slab by slab.
    anchors : tensors that the head's weight gradient belongs to, so that autograd asks for it.
        Without any, backward calls `weight_grad` always, and runs only if hidden needs a gradient.

    Returns the loss in fp32, also for fp16 and bf16 (as under autocast); in fp64 for fp64. With
    "none" it has the targets' shape. A mean over no tokens is NaN, and its gradients are 0, as
    F.cross_entropy's. On a CPU a target that is no class is an IndexError; on CUDA, where that is
    not looked at, it makes the loss NaN. Class weights and class probabilities are not supported.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction is {reduction!r}; use 'mean', 'sum' or 'none'")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing is {label_smoothing}; use 0 to 1")
    if targets.dtype != torch.int64 or targets.shape != hidden.shape[:-1]:
        raise ValueError(
            f"targets is {targets.dtype} {tuple(targets.shape)}; pass int64 "
            f"{tuple(hidden.shape[:-1])}, a class for each row of hidden"
        )
    flat = targets.reshape(-1)
    classes = head.slabs()[-1][1]
    if flat.device.type == "cpu":
        outside = ((flat < 0) | (flat >= classes)) & (flat != ignore_index)
        if outside.any():
            target = int(flat[outside][0])
            raise IndexError(f"target {target} is out of bounds; the head has {classes} classes")
    loss: torch.Tensor = SlabbedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden.reshape(flat.numel(), hidden.shape[-1]),
        flat,
        head,
        ignore_index,
        label_smoothing,
        reduction,
        *anchors,
    )
    return loss.view(targets.shape) if reduction == "none" else loss


def equal_slabs(classes: int, slab_rows: int) -> list[tuple[int, int]]:
    """[0, classes) in half-open slabs of `slab_rows`; the last may be shorter."""
    return [(i, min(i + slab_rows, classes)) for i in range(0, classes, slab_rows)]
