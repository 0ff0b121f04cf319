"""Cross-entropy over slabs against F.cross_entropy over all logits.

Bounds, u = 2^-24 being fp32's rounding and V the number of classes:

- loss of one token, given its logits: 8u * (largest |logit| + log V) from exact, in every dtype
  of logits; a mean or sum of T of them a rounding of log2 T additions more, here 16u in all.
- against F.cross_entropy in the same dtype: twice that, and in bf16 F's rounding of its own result.
- gradients, end to end: 1e-5 of the largest in fp32; in bf16 2^-6 of the largest, as logits and
  their gradients are rounded to bf16 there, by F.cross_entropy no less.
"""

import math
import weakref
from collections.abc import Sequence

import pytest
import torch
from torch.nn import functional as F

from tensorpager.kernels import launch
from tensorpager.kernels.cross_entropy import (
    chunked_cross_entropy,
    equal_slabs,
)

FP32, BF16, FP64 = torch.float32, torch.bfloat16, torch.float64
U = 2**-24
REDUCTIONS = ("mean", "sum", "none")
settings = pytest.mark.parametrize(
    ("reduction", "smoothing"), [("mean", 0.0), ("mean", 0.1), ("sum", 0.1), ("none", 0.0)]
)


CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
INTERPRETER = pytest.param("interpreter", marks=pytest.mark.interpreter)


class DenseHead:
    """A `Head` over a plain weight [classes, D] and bias [classes]; they are its anchors, in order.

    Gradients are added up in the weight's dtype, one term for each slab.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, slab_rows: int = 4096
    ) -> None:
        self._weight, self._bias = weight.detach(), None if bias is None else bias.detach()
        self._slabs = equal_slabs(weight.shape[0], slab_rows)
        self._grads: list[torch.Tensor] = []

    def slabs(self) -> Sequence[tuple[int, int]]:
        return self._slabs

    def logits(self, hidden: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        bias = None if self._bias is None else self._bias[begin:end]
        return torch.nn.functional.linear(hidden, self._weight[begin:end], bias)

    def input_grad(
        self, d_logits: torch.Tensor, begin: int, end: int, dhidden: torch.Tensor
    ) -> None:
        dhidden += d_logits @ self._weight[begin:end]

    def weight_grad(
        self, d_logits: torch.Tensor, begin: int, end: int, hidden: torch.Tensor
    ) -> None:
        if not self._grads:
            tensors = [self._weight] if self._bias is None else [self._weight, self._bias]
            self._grads = [torch.zeros_like(tensor) for tensor in tensors]
        self._grads[0][begin:end] += d_logits.t() @ hidden
        if self._bias is not None:
            self._grads[1][begin:end] += d_logits.sum(dim=0)

    def gradients(self) -> Sequence[torch.Tensor]:
        grads, self._grads = self._grads, []
        return grads


@pytest.fixture(params=["cpu", INTERPRETER, CUDA])
def every_device(request: pytest.FixtureRequest) -> str:
    """For what kernels compute: also the interpreter's CPU."""
    if request.param == "cpu" and launch.INTERPRETED:
        pytest.skip("launchers use the interpreter in this process")
    return "cuda" if request.param == "cuda" else "cpu"


@pytest.fixture(params=["cpu", CUDA])
def device(request: pytest.FixtureRequest) -> str:
    """For what is the same whatever computes."""
    return request.param


class GivenLogits:
    """A head whose logits are given, so that only the loss rounds; hidden is not looked at."""

    def __init__(self, logits: torch.Tensor, slab: int) -> None:
        self._logits, self._slabs = logits, equal_slabs(logits.shape[1], slab)
        self.d_logits = torch.full_like(logits, torch.nan)

    def slabs(self) -> list[tuple[int, int]]:
        return self._slabs

    def logits(self, hidden: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        return self._logits[:, begin:end].clone(memory_format=torch.contiguous_format)

    def input_grad(
        self, d_logits: torch.Tensor, begin: int, end: int, dhidden: torch.Tensor
    ) -> None:
        self.d_logits[:, begin:end] = d_logits

    def weight_grad(
        self, d_logits: torch.Tensor, begin: int, end: int, hidden: torch.Tensor
    ) -> None:
        pass

    def gradients(self) -> list[torch.Tensor | None]:
        return []


def _problem(
    device: str, dtype: torch.dtype, tokens: int = 6, columns: int = 8, classes: int = 43
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """hidden, weight, bias, and targets of which some are ignored."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(tokens, columns), (classes, columns), (classes,)]
    floats = [torch.randn(shape, generator=generator, dtype=FP64) for shape in shapes]
    hidden, weight, bias = (x.to(dtype).to(device).requires_grad_() for x in floats)
    targets = torch.randint(classes, (tokens,), generator=generator)
    targets[:5] = torch.tensor([0, classes - 1, -100, 16, -100])
    return hidden, weight, bias, targets.to(device)


@settings
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_loss_of_given_logits(
    every_device: str, dtype: torch.dtype, reduction: str, smoothing: float
) -> None:
    device = every_device
    generator = torch.Generator().manual_seed(2)
    logits = (6 * torch.randn(6, 53, generator=generator)).to(dtype).to(device)
    targets = _problem(device, dtype)[3]
    hidden = torch.zeros(6, 1, dtype=dtype, device=device)
    options = {"reduction": reduction, "label_smoothing": smoothing}
    found = chunked_cross_entropy(hidden, targets, GivenLogits(logits, 27), **options)
    exact = F.cross_entropy(logits.to(FP64), targets, **options)
    dense = F.cross_entropy(logits, targets, **options).to(FP64)
    assert found.dtype == FP32
    tokens = 4 if reduction == "sum" else 1
    bound = 16 * U * tokens * (float(logits.abs().max()) + math.log(53))
    assert (found.to(FP64) - exact).abs().max() <= bound
    rounding = 2**-7 * dense.abs().max() if dtype == BF16 else 0.0
    assert (found.to(FP64) - dense).abs().max() <= 2 * bound + rounding


@settings
def test_gradient_of_given_logits(device: str, reduction: str, smoothing: float) -> None:
    generator = torch.Generator().manual_seed(2)
    logits = (6 * torch.randn(6, 53, generator=generator)).to(device)
    targets = _problem(device, FP32)[3]
    hidden = torch.zeros(6, 1, device=device, requires_grad=True)
    options = {"reduction": reduction, "label_smoothing": smoothing}
    head = GivenLogits(logits, 27)
    loss = chunked_cross_entropy(hidden, targets, head, **options)
    weights = torch.linspace(0.5, 1.5, loss.numel(), device=device).view(loss.shape)
    loss.backward(weights)
    exact_logits = logits.to(FP64).requires_grad_()
    F.cross_entropy(exact_logits, targets, **options).backward(weights.to(FP64))
    bound = U * (64 + 2 * float(logits.abs().max())) * float(weights.max())
    assert (head.d_logits - exact_logits.grad).abs().max() <= bound
    assert (head.d_logits[targets == -100] == 0).all()


@settings
@pytest.mark.parametrize("dtype", [FP32, BF16, pytest.param(FP64, marks=pytest.mark.slow)], ids=str)
def test_end_to_end(
    every_device: str, dtype: torch.dtype, reduction: str, smoothing: float
) -> None:
    device = every_device
    hidden, weight, bias, targets = _problem(device, dtype)
    options = {"reduction": reduction, "label_smoothing": smoothing}
    head = DenseHead(weight, bias, 16)
    loss = chunked_cross_entropy(hidden, targets, head, weight, bias, **options)
    weights = torch.linspace(0.5, 1.5, loss.numel(), device=device, dtype=loss.dtype)
    loss.backward(weights.view(loss.shape))

    exact = [x.detach().to(FP64).requires_grad_() for x in (hidden, weight, bias)]
    logits = F.linear(*exact)
    exact_loss = F.cross_entropy(logits, targets, **options)
    exact_loss.backward(weights.to(FP64).view(loss.shape))
    relative = {FP32: 1e-5, BF16: 2**-6, FP64: 1e-14}[dtype]
    assert (loss - exact_loss).abs().max() <= relative * logits.abs().max() * targets.numel()
    for tensor, wanted in zip((hidden, weight, bias), exact, strict=True):
        assert tensor.grad.dtype == dtype
        assert (tensor.grad - wanted.grad).abs().max() <= relative * wanted.grad.abs().max()


def test_gradcheck(every_device: str) -> None:
    device = every_device
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(3, 2, generator=generator, dtype=FP64).to(device).requires_grad_()
    weight = torch.randn(5, 2, generator=generator, dtype=FP64).to(device).requires_grad_()
    targets = torch.tensor([4, -100, 1], device=device)

    def loss(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        head = DenseHead(weight, slab_rows=3)
        return chunked_cross_entropy(
            hidden, targets, head, weight, reduction="none", label_smoothing=0.2
        )

    assert torch.autograd.gradcheck(loss, (hidden, weight), fast_mode=launch.INTERPRETED)


class CountingHead(DenseHead):
    """Asserts that at most one slab of logits lives at a time, and notes the largest."""

    largest_bytes = 0
    asked = 0
    _last: weakref.ref | None = None

    def logits(self, hidden: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        assert self._last is None or self._last() is None, "the last slab's logits are still there"
        logits = super().logits(hidden, begin, end)
        self._last = weakref.ref(logits)
        self.largest_bytes = max(self.largest_bytes, logits.untyped_storage().nbytes())
        self.asked += 1
        return logits


def test_one_slab_of_logits_at_a_time(device: str) -> None:
    hidden, weight, bias, targets = _problem(device, FP32)
    head = CountingHead(weight, bias, slab_rows=16)
    chunked_cross_entropy(hidden, targets, head, weight, bias).backward()
    assert head.asked == 2 * 3
    assert head.largest_bytes == 6 * 16 * 4


def test_graph_keeps_no_logits(device: str) -> None:
    hidden, weight, _, targets = _problem(device, FP32)
    loss = chunked_cross_entropy(hidden, targets, DenseHead(weight), weight)
    saved = sum(x.numel() for x in loss.grad_fn.saved_tensors)
    assert saved == hidden.numel() + 5 * targets.numel()


def test_runs_agree_to_the_bit(device: str) -> None:
    results = []
    for _ in range(2):
        hidden, weight, bias, targets = _problem(device, BF16)
        head = DenseHead(weight, bias, 16)
        loss = chunked_cross_entropy(hidden, targets, head, weight, bias)
        loss.backward(retain_graph=True)
        first = [x.grad.clone() for x in (hidden, weight, bias)]
        loss.backward()
        for tensor, grad in zip((hidden, weight, bias), first, strict=True):
            assert torch.equal(tensor.grad, 2 * grad)
        results.append([loss.detach(), *first])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_frozen_weight_and_frozen_input(device: str) -> None:
    for frozen in ("hidden", "weight"):
        hidden, weight, _, targets = _problem(device, FP32)
        {"hidden": hidden, "weight": weight}[frozen].requires_grad_(False)
        chunked_cross_entropy(hidden, targets, DenseHead(weight, None, 16), weight).backward()
        assert (hidden.grad is None) == (frozen == "hidden")
        assert (weight.grad is None) == (frozen == "weight")


def test_without_anchors_the_head_keeps_its_gradient(device: str) -> None:
    hidden, weight, _, targets = _problem(device, FP32)
    head = DenseHead(weight, None, 16)
    chunked_cross_entropy(hidden, targets, head).backward()
    F.cross_entropy(F.linear(hidden.detach(), weight), targets).backward()
    (kept,) = head.gradients()
    assert torch.allclose(kept, weight.grad, rtol=1e-5, atol=1e-7)


def test_shapes_and_other_ignore_index(device: str) -> None:
    hidden, weight, _, targets = _problem(device, FP32, tokens=12)
    targets = targets.clamp(0).view(2, 2, 3)
    hidden = hidden.detach().view(2, 2, 3, 8)
    found = chunked_cross_entropy(
        hidden, targets, DenseHead(weight), ignore_index=16, reduction="none"
    )
    logits = F.linear(hidden, weight).movedim(-1, 1)
    expected = F.cross_entropy(logits, targets, ignore_index=16, reduction="none")
    assert found.shape == targets.shape
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6)
    one = chunked_cross_entropy(hidden[0, 0, 0], targets[0, 0, 0], DenseHead(weight))
    assert torch.allclose(one, F.cross_entropy(logits[0, :, 0, 0], targets[0, 0, 0]), rtol=1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_all_tokens_ignored(device: str, reduction: str, smoothing: float) -> None:
    hidden, weight, _, targets = _problem(device, FP32)
    targets = torch.full_like(targets, -100)
    options = {"reduction": reduction, "label_smoothing": smoothing}
    loss = chunked_cross_entropy(hidden, targets, DenseHead(weight), weight, **options)
    expected = F.cross_entropy(F.linear(hidden, weight), targets, **options)
    assert torch.allclose(loss, expected, equal_nan=True)
    loss.sum().backward()
    assert (hidden.grad == 0).all()
    assert (weight.grad == 0).all()


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_no_tokens(device: str, reduction: str) -> None:
    hidden, weight, _, targets = _problem(device, FP32)
    loss = chunked_cross_entropy(
        hidden[:0], targets[:0], DenseHead(weight), weight, reduction=reduction
    )
    expected = F.cross_entropy(F.linear(hidden[:0], weight), targets[:0], reduction=reduction)
    assert torch.allclose(loss, expected, equal_nan=True)
    loss.sum().backward()
    assert (weight.grad == 0).all()


def test_autocast_is_that_of_forward(device: str) -> None:
    hidden, weight, _, targets = _problem(device, FP32)
    kinds = []

    class Noting(DenseHead):
        def logits(self, hidden: torch.Tensor, begin: int, end: int) -> torch.Tensor:
            logits = super().logits(hidden, begin, end)
            kinds.append(logits.dtype)
            return logits

    with torch.autocast(device, dtype=BF16):
        loss = chunked_cross_entropy(hidden, targets, Noting(weight, None, 16), weight)
    loss.backward()
    assert kinds == [BF16] * 6
    assert loss.dtype == hidden.grad.dtype == weight.grad.dtype == FP32
    exact = F.cross_entropy(F.linear(hidden.detach(), weight.detach()), targets)
    assert abs(float(loss.detach() - exact)) <= 2**-6 * float(exact)


def test_second_derivatives_are_refused(device: str) -> None:
    hidden, weight, _, targets = _problem(device, FP32)
    loss = chunked_cross_entropy(hidden, targets, DenseHead(weight), weight)
    with pytest.raises(RuntimeError, match=r"differentiable once.*create_graph=True: leave it out"):
        torch.autograd.grad(loss, hidden, create_graph=True)


def test_wrong_arguments() -> None:
    hidden, weight, _, targets = _problem("cpu", FP32)
    head = DenseHead(weight)
    with pytest.raises(ValueError, match="reduction is 'avg'; use"):
        chunked_cross_entropy(hidden, targets, head, reduction="avg")
    with pytest.raises(ValueError, match="label_smoothing is 2"):
        chunked_cross_entropy(hidden, targets, head, label_smoothing=2.0)
    with pytest.raises(ValueError, match=r"targets is torch.int64 \(5,\); pass int64 \(6,\)"):
        chunked_cross_entropy(hidden, targets[1:], head)
    for target in (43, -1):
        targets[3] = target
        with pytest.raises(IndexError, match=f"target {target} is out of bounds.*43 classes"):
            chunked_cross_entropy(hidden, targets, head)
