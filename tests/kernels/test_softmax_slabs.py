"""Running softmax over slabs of logits and its gradient, on every implementation.

The oracle is numpy in float64, on all logits at once.
"""

import contextlib
import itertools

import numpy as np
import pytest
import torch
from address_checker import checked_addresses
from page_suite import Backend, Guarded

from tensorpager.kernels.softmax_slabs import (
    gradient_factors,
    loss_of,
    new_state,
    softmax_grad_,
    softmax_grad_reference,
    softmax_update,
    softmax_update_reference,
)

FP32, FP16, BF16, FP64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
REFERENCES = {softmax_update: softmax_update_reference, softmax_grad_: softmax_grad_reference}
TYPES = pytest.mark.parametrize(
    "dtype",
    [FP32, BF16, *(pytest.param(slow, marks=pytest.mark.slow) for slow in (FP16, FP64))],
    ids=str,
)
SLABS = {
    "one": [0, 16],
    "aligned": [0, 16, 40, 48],
    "odd": [0, 1, 14, 45],
    "over_a_tile": [0, 4104],
}
slabs = pytest.mark.parametrize(
    ("slab", "offset"),
    [("one", 0), ("aligned", 0), ("aligned", 8), ("odd", 0), ("over_a_tile", 0)],
)
TOKENS = 4
STEP = {FP32: 2**-24, FP16: 2**-24, BF16: 2**-24, FP64: 2**-53}  # of what is computed
ROUNDING = {FP32: 2**-24, FP16: 2**-11, BF16: 2**-8, FP64: 2**-53}  # of what is stored


def _run(backend: Backend, launcher, logits: Guarded, *args) -> None:
    matrix, begin, targets, rows = args
    if backend.name == "reference":
        launcher = REFERENCES[launcher]
    checker = contextlib.nullcontext()
    if backend.name == "interpreter":
        grad = launcher is softmax_grad_
        reads, writes = [logits.tensor, targets, rows], [logits.tensor if grad else rows]
        checker = checked_addresses(reads, writes)
    with checker:
        launcher(matrix, begin, targets, rows)


def _logits(classes: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(classes)
    return (3 * torch.randn(TOKENS, classes, generator=generator, dtype=FP64) + 5).to(dtype)


def _targets(classes: int) -> torch.Tensor:
    """The first class, the last, one between, and one to be ignored."""
    return torch.tensor([0, classes - 1, classes // 2, -100])


def _guarded(matrix: torch.Tensor, backend: Backend, offset: int) -> tuple[Guarded, torch.Tensor]:
    memory = Guarded(matrix.nbytes, backend, offset=offset)
    view = memory.tensor.view(matrix.dtype).view(matrix.shape)
    view.copy_(matrix)
    return memory, view


def _sweep(backend: Backend, logits: torch.Tensor, edges: list[int], offset: int) -> torch.Tensor:
    """The state after all slabs."""
    targets = _targets(logits.shape[1]).to(backend.device)
    state = new_state(TOKENS, logits.dtype, torch.device(backend.device))
    for begin, end in itertools.pairwise(edges):
        memory, slab = _guarded(logits[:, begin:end].contiguous(), backend, offset)
        before = memory.bytes()
        _run(backend, softmax_update, memory, slab, begin, targets, state)
        memory.assert_is(before)
    return state


@TYPES
@slabs
def test_state(backend: Backend, dtype: torch.dtype, slab: str, offset: int) -> None:
    """Maximum and target's logit exact; sums within u * (32 + range of the logits), relative."""
    edges = SLABS[slab]
    logits = _logits(edges[-1], dtype)
    state = _sweep(backend, logits, edges, offset).cpu().to(FP64).numpy()
    x = logits.to(FP64).numpy()
    maximum = x.max(axis=1)
    bound = STEP[dtype] * (32 + np.ptp(x))
    exps = np.exp(x - maximum[:, None]).sum(axis=1)
    assert (state[0] == maximum).all()
    assert (abs(state[1] - exps) <= bound * exps).all()
    assert (abs(state[3] - x.sum(axis=1)) <= bound * abs(x).sum(axis=1)).all()
    target = _targets(edges[-1]).numpy()
    assert (state[2][:3] == x[np.arange(3), target[:3]]).all()
    assert np.isnan(state[2][3]), "a target that is no class"


@TYPES
@slabs
def test_gradient(backend: Backend, dtype: torch.dtype, slab: str, offset: int) -> None:
    """Within u * (64 + range of the logits) * scale, and one rounding of what is stored."""
    edges, smoothing = SLABS[slab], 0.1
    logits = _logits(edges[-1], dtype)
    x = logits.to(FP64).numpy()
    maximum = x.max(axis=1)
    exps = np.exp(x - maximum[:, None])
    state = new_state(TOKENS, dtype, torch.device(backend.device))
    state[:2] = torch.from_numpy(np.stack([maximum, exps.sum(axis=1)]))
    scale = torch.tensor([1.0, 0.5, -2.0, 0.0], dtype=state.dtype, device=backend.device)
    targets = _targets(edges[-1])
    factors = gradient_factors(state, scale, smoothing, edges[-1])

    exact = exps / exps.sum(axis=1, keepdims=True) - smoothing / edges[-1]
    for token, target in enumerate(targets.tolist()):
        if target >= 0:
            exact[token, target] -= 1 - smoothing
    weight = scale.cpu().to(FP64).numpy()[:, None]
    exact = exact * weight
    bound = STEP[dtype] * (64 + np.ptp(x)) * abs(weight) + ROUNDING[dtype] * abs(exact) + 2**-25
    if dtype in (FP32, FP64):
        bound -= 2**-25  # half precision below its smallest normal number only
    for begin, end in itertools.pairwise(edges):
        memory, part = _guarded(logits[:, begin:end].contiguous(), backend, offset)
        _run(backend, softmax_grad_, memory, part, begin, targets.to(backend.device), factors)
        memory.assert_is(memory.bytes())
        found = part.cpu().to(FP64).numpy()
        assert (abs(found - exact[:, begin:end]) <= bound[:, begin:end]).all()
        assert (found[3] == 0).all()


def test_large_offset_costs_no_accuracy(backend: Backend) -> None:
    """Logits near 1000 give the loss of those near 0: exponents are of differences only."""
    logits = torch.tensor([[1000.0, 1001.0, 999.5, 1000.0]])
    targets = torch.tensor([1], device=backend.device)
    state = new_state(1, FP32, torch.device(backend.device))
    for begin in (0, 2):
        memory, slab = _guarded(logits[:, begin : begin + 2].contiguous(), backend, 0)
        _run(backend, softmax_update, memory, slab, begin, targets, state)
    exact = np.log(np.exp([-1.0, 0.0, -1.5, -1.0]).sum())
    assert abs(float(loss_of(state, targets, 4)) - exact) < 1e-6


def test_slabs_of_minus_infinity(backend: Backend) -> None:
    """Masked classes count for nothing, also where a whole slab is masked, or the first one."""
    infinity = float("inf")
    rows = [[-infinity] * 4 + [0.0] * 4, [0.0] * 4 + [-infinity] * 4]
    targets = torch.tensor([4, 0], device=backend.device)
    state = new_state(2, FP32, torch.device(backend.device))
    logits = torch.tensor(rows)
    for begin in (0, 4):
        memory, slab = _guarded(logits[:, begin : begin + 4].contiguous(), backend, 0)
        _run(backend, softmax_update, memory, slab, begin, targets, state)
    assert state[:2].tolist() == [[0, 0], [4, 4]]
    factors = gradient_factors(state, torch.ones(2, device=state.device), 0.0, 8)
    memory, slab = _guarded(logits[:, :4].contiguous(), backend, 0)
    _run(backend, softmax_grad_, memory, slab, 0, targets, factors)
    assert slab.tolist() == [[0, 0, 0, 0], [-0.75, 0.25, 0.25, 0.25]]


def test_a_nan_reaches_the_loss_of_its_token_alone(backend: Backend) -> None:
    logits = torch.zeros(2, 4)
    logits[1, 2] = torch.nan
    targets = torch.tensor([0, 0], device=backend.device)
    state = new_state(2, FP32, torch.device(backend.device))
    memory, slab = _guarded(logits, backend, 0)
    _run(backend, softmax_update, memory, slab, 0, targets, state)
    assert loss_of(state, targets, 4, reduction="none").isnan().tolist() == [False, True]


def test_a_target_that_no_slab_has_is_nan(backend: Backend) -> None:
    state = new_state(1, FP32, torch.device(backend.device))
    targets = torch.tensor([9], device=backend.device)
    memory, slab = _guarded(torch.zeros(1, 4), backend, 0)
    _run(backend, softmax_update, memory, slab, 0, targets, state)
    assert loss_of(state, targets, 4).isnan()


def test_no_tokens() -> None:
    state = new_state(0, FP32, torch.device("cpu"))
    softmax_update(torch.empty(0, 4), 0, torch.empty(0, dtype=torch.int64), state)
    assert loss_of(state, torch.empty(0, dtype=torch.int64), 4, reduction="sum") == 0


@pytest.mark.parametrize(
    ("logits", "targets", "state", "message"),
    [
        (torch.zeros(2, 4), torch.zeros(2).int(), torch.zeros(4, 2), "targets is torch.int32"),
        (torch.zeros(2, 4), torch.zeros(3).long(), torch.zeros(4, 2), r"pass torch.int64 \(2,\)"),
        (torch.zeros(2, 4), torch.zeros(2).long(), torch.zeros(4, 3), r"state .*\(4, 2\)"),
        (torch.zeros(2, 4).double(), torch.zeros(2).long(), torch.zeros(4, 2), "float64"),
        (torch.zeros(4, 2).t(), torch.zeros(2).long(), torch.zeros(4, 2), "contiguous"),
        (torch.zeros(2, 4).long(), torch.zeros(2).long(), torch.zeros(4, 2), "bfloat16"),
    ],
)
def test_wrong_arguments(
    logits: torch.Tensor, targets: torch.Tensor, state: torch.Tensor, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        softmax_update(logits, 0, targets, state)
