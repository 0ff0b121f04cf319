"""Cases that pass once over elements: softmax, 8 bits."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from tensorpager.kernels.quantize import (
    dequantize,
    dequantize_reference,
    quantize,
    quantize_reference,
)
from tensorpager.kernels.softmax_slabs import (
    gradient_factors,
    loss_of,
    new_state,
    softmax_grad_,
    softmax_update,
    softmax_update_reference,
)

from .case import Case, Job, Setting, Work, close, rounding, same
from .pages import BlockwisePages, Pages


def _quantize(setting: Setting) -> Job:
    values = setting.randn(setting.elements(torch.float32))
    source = Pages(values, setting.page_bytes)
    states = BlockwisePages(torch.zeros_like(values), setting, root=False)

    return Job(
        run=lambda: quantize([source.paged], [states.state], root=False),
        expect=lambda: quantize_reference([values], [states.dense], False),
        compare=lambda: states.compare("states"),
        work=Work(values.nbytes + states.nbytes),
    )


def _dequantize(setting: Setting) -> Job:
    values = setting.randn(setting.elements(torch.float32)).square_()
    states = BlockwisePages(values, setting, root=True)
    out = Pages(torch.zeros_like(values), setting.page_bytes)
    return Job(
        run=lambda: dequantize([states.state], [out.paged], root=True),
        expect=lambda: dequantize_reference([states.dense], [values], True),
        compare=lambda: same("values", out.read(), values),
        work=Work(values.nbytes + states.nbytes),
    )


def _logits(setting: Setting) -> tuple[torch.Tensor, torch.Tensor]:
    """A slab [tokens, classes] and targets."""
    classes = 4096 if setting.nbytes >= 1 << 20 else 40
    tokens = max(1, setting.elements(torch.bfloat16) // classes)
    logits = setting.randn(tokens, classes, dtype=torch.bfloat16)
    targets = torch.arange(tokens, device=setting.device) * 7 % classes
    return logits, targets


def _softmax(setting: Setting) -> Job:
    logits, targets = _logits(setting)
    tokens, classes = logits.shape
    state = new_state(tokens, logits.dtype, logits.device)

    def compare() -> None:
        got = loss_of(state, targets, classes, reduction="none")
        for some, part, target in zip(
            got.split(4096), logits.split(4096), targets.split(4096), strict=True
        ):
            exact = F.cross_entropy(part.double(), target, reduction="none")
            close("loss", some, exact, 1e-5)  # exponents of float32, losses of about 10

    return Job(
        run=lambda: softmax_update(logits, 0, targets, state),
        peer=lambda: F.cross_entropy(logits, targets),
        expect=lambda: None,
        compare=compare,
        work=Work(logits.nbytes + 2 * state.nbytes),
    )


def _softmax_grad(setting: Setting) -> Job:
    logits, targets = _logits(setting)
    tokens, classes = logits.shape
    state = new_state(tokens, logits.dtype, logits.device)
    softmax_update_reference(logits, 0, targets, state)
    scale = torch.full((tokens,), 1.0, device=logits.device)
    factors = gradient_factors(state, scale, 0.0, classes)
    ours, dense = logits.clone(), logits.requires_grad_()

    def compare() -> None:
        grads, inputs = ours.split(4096), dense.detach().split(4096)
        for got, part, target in zip(grads, inputs, targets.split(4096), strict=True):
            exact = part.double().softmax(1)
            exact[torch.arange(len(part), device=part.device), target] -= 1
            close("gradients", got, exact, rounding(exact, 1, got.dtype) + 1e-5 * exact.abs().max())

    return Job(
        run=lambda: softmax_grad_(ours, 0, targets, factors),
        peer=lambda: torch.autograd.grad(F.cross_entropy(dense, targets), dense),
        expect=lambda: None,
        compare=compare,
        work=Work(2 * logits.nbytes + factors.nbytes),
    )


ELEMENTS = (
    Case("quantize", frozenset({"quantize.convert"}), "", _quantize),
    Case("dequantize", frozenset({"quantize.convert"}), "", _dequantize),
    Case(
        "softmax_update",
        frozenset({"softmax_slabs.softmax_update"}),
        "F.cross_entropy",
        _softmax,
    ),
    Case(
        "softmax_grad_",
        frozenset({"softmax_slabs.softmax_grad"}),
        "F.cross_entropy, both ways",
        _softmax_grad,
    ),
)
