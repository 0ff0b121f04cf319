"""Cases that pass once over elements: elementwise ops, reductions, unscaling, softmax, 8 bits."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional as F

from tensorpager.kernels.combine import combine
from tensorpager.kernels.elementwise import elementwise
from tensorpager.kernels.quantize import (
    dequantize,
    dequantize_reference,
    quantize,
    quantize_reference,
)
from tensorpager.kernels.reduce import reduce
from tensorpager.kernels.softmax_slabs import (
    gradient_factors,
    loss_of,
    new_state,
    softmax_grad_,
    softmax_update,
    softmax_update_reference,
)
from tensorpager.kernels.unscale import non_finite_check_and_unscale

from .case import Case, Job, Setting, Work, close, rounding, same
from .pages import BlockwisePages, Pages

LIST = 16  # tensors in a list
RANGES = 16
UNIT = 2.0**-24
REDUCED_ERROR = 64 * UNIT  # `reduce` allows 48, and the result is rounded


def _add(setting: Setting) -> Job:
    x = setting.randn(setting.elements(torch.float32))
    y, out = x.flip(0), torch.zeros_like(x)
    paged = [Pages(values, setting.page_bytes, seed) for seed, values in enumerate((x, y, out))]
    operands = [one.paged for one in paged]
    return Job(
        run=lambda: elementwise("add", [operands[2]], [operands[0]], [operands[1]]),
        peer=lambda: torch.add(x, y, out=out),
        compare=lambda: same("sums", paged[2].read(), out),
        work=Work(3 * x.nbytes),
    )


def _convert(setting: Setting) -> Job:
    x = setting.randn(setting.elements(torch.float32))
    out = torch.zeros_like(x, dtype=torch.bfloat16)
    source, target = Pages(x, setting.page_bytes), Pages(out, setting.page_bytes, 1)
    return Job(
        run=lambda: elementwise("copy", [target.paged], [source.paged]),
        peer=lambda: out.copy_(x),
        compare=lambda: same("copies", target.read(), out),
        work=Work(x.nbytes + out.nbytes),
    )


def _lerp(setting: Setting) -> Job:
    x = setting.randn(max(LIST, setting.elements(torch.float32)))
    ends = x.flip(0)
    values, toward = list(x.chunk(LIST)), list(ends.chunk(LIST))
    lists = [
        [Pages(one, setting.page_bytes, seed) for seed, one in enumerate(many)]
        for many in (values, toward)
    ]
    ours, others = ([one.paged for one in many] for many in lists)

    def compare() -> None:
        for page, dense in zip(lists[0], values, strict=True):
            # Both round the product and the sum, or fuse them: magnitudes are below 8.
            close("values", page.read(), dense, rounding(dense, 2, dense.dtype) + 8 * 4 * UNIT)

    return Job(
        run=lambda: elementwise("lerp", ours, ours, others, 0.25),
        peer=lambda: torch._foreach_lerp_(values, toward, 0.25),
        compare=compare,
        work=Work(3 * x.nbytes),
    )


def _unscale(setting: Setting) -> Job:
    dense = setting.randn(setting.elements(torch.float32))
    pages = Pages(dense, setting.page_bytes)
    inverse = torch.full((1,), -1.0, device=setting.device)  # any number of times
    found = torch.zeros(2, 1, device=setting.device)

    def compare() -> None:
        same("gradients", pages.read(), dense)
        same("found_inf", found[0], found[1])

    return Job(
        run=lambda: non_finite_check_and_unscale([pages.paged], found[0], inverse),
        peer=lambda: torch._amp_foreach_non_finite_check_and_unscale_([dense], found[1], inverse),
        compare=compare,
        work=Work(2 * dense.nbytes),
    )


def _sum(setting: Setting) -> Job:
    x = setting.randn(setting.elements(torch.bfloat16), dtype=torch.bfloat16)
    pages = Pages(x, setting.page_bytes)
    got: list[torch.Tensor] = []

    def run() -> None:
        got[:] = [reduce([pages.paged], "sum", dtype=torch.float32)]

    def compare() -> None:
        magnitude = x.abs().sum(dtype=torch.float64)
        close("sum", got[0], x.sum(dtype=torch.float64), float(REDUCED_ERROR * magnitude))

    return Job(
        run=run,
        peer=lambda: x.sum(dtype=torch.float32),
        compare=compare,
        work=Work(x.nbytes),
    )


def _combine(setting: Setting) -> Job:
    partials = setting.randn(max(RANGES, setting.nbytes // 8), dtype=torch.float64)
    partials = partials[: partials.numel() // RANGES * RANGES]
    bounds = np.linspace(0, partials.numel(), RANGES + 1).astype(np.int64)
    got: list[torch.Tensor] = []

    def run() -> None:
        got[:] = [combine(partials, bounds, "sum")]

    def compare() -> None:
        rows = partials.view(RANGES, -1)
        close("sums", got[0], rows.sum(1), 2.0**-40 * rows.abs().sum(1))

    return Job(
        run=run,
        peer=lambda: partials.view(RANGES, -1).sum(1),
        compare=compare,
        work=Work(partials.nbytes),
    )


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


ELEMENTWISE = frozenset({"elementwise.elementwise"})
REDUCED = frozenset({"reduce.reduce", "combine.combine"})
ELEMENTS = (
    Case("add", ELEMENTWISE, "add", _add),
    Case("copy_to_bf16", ELEMENTWISE, "copy_", _convert),
    Case("foreach_lerp_", ELEMENTWISE, "_foreach_lerp_", _lerp),
    Case(
        "unscale",
        frozenset({"unscale.non_finite_check_and_unscale"}),
        "_amp_foreach_…unscale_",
        _unscale,
    ),
    Case("sum", REDUCED, "sum", _sum),
    Case("combine", frozenset({"combine.combine"}), "sum", _combine),
    Case("quantize", frozenset({"quantize.quantize"}), "", _quantize),
    Case("dequantize", frozenset({"quantize.dequantize"}), "", _dequantize),
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
