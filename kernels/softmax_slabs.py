"""Softmax over slabs of classes: the running sums of the loss, and the gradient of the logits.

Forward takes one slab of logits after the other into a state of four numbers for each token;
backward turns each slab, computed once more, into its gradient in place. Arithmetic is in fp32, in
fp64 for fp64; each token's sums are in a fixed order, so runs agree to the bit.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch

from .launch import launch, tl, triton, use_triton
from .masked import load_floats, store_floats

__all__ = ["gradient_factors", "loss_of", "new_state", "softmax_grad_", "softmax_update"]

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
TILE = 4096
GRAD_TILE = 2048
SMALL_TILE = 512  # for slabs that have no more classes
REFERENCE_ELEMENTS = 1 << 18  # of a temporary
MAXIMUM, EXPS, PICKED, LOGITS = range(4)


def new_state(tokens: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What `softmax_update` starts from: [4, tokens], fp64 for fp64 logits and else fp32.

    Rows: largest logit, sum of exp(logit - largest), the target's logit, sum of the logits. The
    target's logit is NaN until its slab comes by, so a target that is in no slab gives NaN.
    """
    state = torch.zeros(4, tokens, dtype=_computed(dtype), device=device)
    state[MAXIMUM] = -torch.inf
    state[PICKED] = torch.nan
    return state


@triton.jit(
    do_not_specialize=["begin", "columns", "tokens"],
    do_not_specialize_on_alignment=["logits_ptr", "targets_ptr", "state_ptr"],
)
def _softmax_update_kernel(
    logits_ptr,
    targets_ptr,
    state_ptr,
    begin,
    columns,
    tokens,
    TILE: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """One token's logits of a slab."""
    dtype: tl.constexpr = logits_ptr.dtype.element_ty
    size: tl.constexpr = dtype.primitive_bitwidth // 8
    compute: tl.constexpr = state_ptr.dtype.element_ty
    token = tl.program_id(0)
    row = logits_ptr.to(tl.int64) + token.to(tl.int64) * columns * size
    of_token = state_ptr + token
    maximum = tl.load(of_token)
    exps = tl.load(of_token + tokens)
    logits = tl.load(of_token + 3 * tokens)
    start = 0
    while start < columns:
        at = start + tl.arange(0, TILE)
        inside = at // TOGETHER < columns // TOGETHER
        x = load_floats(row, at, inside, dtype, compute, TOGETHER > 1)
        logits += tl.sum(x, axis=0)  # what is outside is 0
        x = tl.where(inside, x, -float("inf"))
        larger = tl.maximum(maximum, tl.max(x, axis=0))
        shift = tl.where(larger == -float("inf"), 0.0, larger)
        exps = exps * tl.exp(maximum - shift) + tl.sum(tl.exp(x - shift), axis=0)
        maximum = larger
        start += TILE
    tl.store(of_token, maximum)
    tl.store(of_token + tokens, exps)
    tl.store(of_token + 3 * tokens, logits)
    target = tl.load(targets_ptr + token) - begin
    here = (target >= 0) & (target < columns)
    picked = load_floats(row, target, here, dtype, compute, False)
    tl.store(of_token + 2 * tokens, picked, mask=here)


def softmax_update(
    logits: torch.Tensor, begin: int, targets: torch.Tensor, state: torch.Tensor
) -> None:
    """Take classes [begin, begin + C) into the running state.

    logits : [T, C], fp32, fp16, bf16 or fp64, contiguous; column c is class begin + c.
    targets : int64 [T], contiguous; each token's class.
    state : [4, T] from `new_state`, updated in place.

    On CUDA queued on the current stream of the logits' device without waiting. Raises ValueError
    for arguments that are not as above, before anything is written.
    """
    _check(logits, targets, "state", state)
    if not logits.numel():
        return
    if not use_triton(logits):
        softmax_update_reference(logits, begin, targets, state)
        return
    small = logits.shape[1] <= SMALL_TILE
    launch(
        _softmax_update_kernel,
        logits.shape[0],
        logits,
        targets,
        state,
        begin,
        logits.shape[1],
        logits.shape[0],
        TILE=SMALL_TILE if small else TILE,
        TOGETHER=_together(logits),
        num_warps=2 if small else 8,
    )


def softmax_update_reference(
    logits: torch.Tensor, begin: int, targets: torch.Tensor, state: torch.Tensor
) -> None:
    """`softmax_update` in plain torch, some tokens at a time."""
    step = max(1, REFERENCE_ELEMENTS // logits.shape[1])
    parts = zip(logits.split(step), targets.split(step), state.split(step, dim=1), strict=True)
    for part, target, (maximum, exps, picked, total) in parts:
        x = part.to(state.dtype)
        larger = torch.maximum(maximum, x.amax(dim=1))
        shift = larger.masked_fill(larger == -torch.inf, 0)
        total += x.sum(dim=1)
        column = target - begin
        here = (column >= 0) & (column < x.shape[1])
        target_logit = x.gather(1, column.clamp(0, x.shape[1] - 1).unsqueeze(1)).squeeze(1)
        picked.copy_(torch.where(here, target_logit, picked))
        exps.mul_((maximum - shift).exp_()).add_((x - shift.unsqueeze(1)).exp_().sum(dim=1))
        maximum.copy_(larger)


@triton.jit(
    do_not_specialize=["begin", "columns", "tokens", "tiles"],
    do_not_specialize_on_alignment=["logits_ptr", "targets_ptr", "factors_ptr"],
)
def _softmax_grad_kernel(
    logits_ptr,
    targets_ptr,
    factors_ptr,
    begin,
    columns,
    tokens,
    tiles,
    TILE: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """One tile of one token's logits of a slab."""
    dtype: tl.constexpr = logits_ptr.dtype.element_ty
    size: tl.constexpr = dtype.primitive_bitwidth // 8
    compute: tl.constexpr = factors_ptr.dtype.element_ty
    token = tl.program_id(0) // tiles
    at = tl.program_id(0) % tiles * TILE + tl.arange(0, TILE)
    inside = at // TOGETHER < columns // TOGETHER
    of_token = factors_ptr + token
    maximum = tl.load(of_token)
    scale = tl.load(of_token + tokens)
    everywhere = tl.load(of_token + 2 * tokens)
    on_target = tl.load(of_token + 3 * tokens)
    target = tl.load(targets_ptr + token) - begin
    row = logits_ptr.to(tl.int64) + token.to(tl.int64) * columns * size
    x = load_floats(row, at, inside, dtype, compute, TOGETHER > 1)
    grad = tl.exp(x - maximum) * scale - everywhere
    grad = tl.where(at == target, grad - on_target, grad)
    store_floats(row, at, grad, inside, dtype, TOGETHER > 1)


def softmax_grad_(
    logits: torch.Tensor, begin: int, targets: torch.Tensor, factors: torch.Tensor
) -> None:
    """Turn logits of classes [begin, begin + C) into their gradients, in place.

    logits, targets : as for `softmax_update`.
    factors : [4, T] from `gradient_factors`.

    Streams and errors as for `softmax_update`.
    """
    _check(logits, targets, "factors", factors)
    if not logits.numel():
        return
    if not use_triton(logits):
        softmax_grad_reference(logits, begin, targets, factors)
        return
    small = logits.shape[1] <= SMALL_TILE
    tiles = 1 if small else -(-logits.shape[1] // GRAD_TILE)
    launch(
        _softmax_grad_kernel,
        logits.shape[0] * tiles,
        logits,
        targets,
        factors,
        begin,
        logits.shape[1],
        logits.shape[0],
        tiles,
        TILE=SMALL_TILE if small else GRAD_TILE,
        TOGETHER=_together(logits),
        num_warps=2 if small else 4,
    )


def softmax_grad_reference(
    logits: torch.Tensor, begin: int, targets: torch.Tensor, factors: torch.Tensor
) -> None:
    """`softmax_grad_` in plain torch, some tokens at a time."""
    step = max(1, REFERENCE_ELEMENTS // logits.shape[1])
    parts = zip(logits.split(step), targets.split(step), factors.split(step, dim=1), strict=True)
    for part, target, factor in parts:
        maximum, scale, everywhere, on_target = factor.unsqueeze(2)
        grad = part.to(factors.dtype) - maximum
        grad.exp_().mul_(scale).sub_(everywhere)
        column = (target - begin).unsqueeze(1)
        here = (column >= 0) & (column < part.shape[1])
        grad.scatter_add_(1, column.clamp(0, part.shape[1] - 1), -on_target * here)
        part.copy_(grad)


def gradient_factors(
    state: torch.Tensor, scale: torch.Tensor, label_smoothing: float, classes: int
) -> torch.Tensor:
    """What `softmax_grad_` needs of each token, [4, T] in the state's dtype.

    state : after all slabs. scale : [T], d (what is differentiated) / d (this token's loss); 0 for
        tokens that do not count.

    With the rows called m, a, b, c: d / d logit = exp(logit - m) * a - b, less c for the target.
    """
    return torch.stack(
        [
            state[MAXIMUM],
            scale / state[EXPS],
            scale * (label_smoothing / classes),
            scale * (1 - label_smoothing),
        ]
    )


def loss_of(
    state: torch.Tensor,
    targets: torch.Tensor,
    classes: int,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> torch.Tensor:
    """The loss, as `F.cross_entropy` defines it, from the state after all slabs.

    Returns [T] for reduction "none", else a scalar; in the state's dtype.
    """
    log_sum = state[EXPS].log()
    loss = log_sum + (state[MAXIMUM] - state[PICKED])
    if label_smoothing:
        smooth = log_sum + (state[MAXIMUM] - state[LOGITS] / classes)
        loss = loss * (1 - label_smoothing) + smooth * label_smoothing
    ignored = targets == ignore_index
    loss = loss.masked_fill(ignored, 0)
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    return loss.sum() / (~ignored).sum()


def _computed(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _together(logits: torch.Tensor) -> int:
    """Elements of 16 bytes, where rows begin at multiples of 16 bytes; else 1."""
    elements = 16 // logits.element_size()
    aligned = logits.data_ptr() % 16 == 0 and logits.shape[1] % elements == 0
    return elements if aligned else 1


def _check(logits: torch.Tensor, targets: torch.Tensor, name: str, rows: torch.Tensor) -> None:
    if logits.dtype not in FLOATS or logits.dim() != 2 or not logits.is_contiguous():
        raise ValueError(
            f"logits is {logits.dtype} {tuple(logits.shape)} with stride {logits.stride()}; pass "
            "[tokens, classes], contiguous, in float32, float16, bfloat16 or float64"
        )
    tokens = logits.shape[0]
    wanted = {
        "targets": (targets, torch.int64, (tokens,)),
        name: (rows, _computed(logits.dtype), (4, tokens)),
    }
    for each, (tensor, dtype, shape) in wanted.items():
        if (
            (tensor.dtype, tuple(tensor.shape), tensor.device) != (dtype, shape, logits.device)
        ) or not tensor.is_contiguous():
            raise ValueError(
                f"{each} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}; pass {dtype} "
                f"{shape}, contiguous, on {logits.device}"
            )
