"""Cases of the paged matrix products, in bfloat16, with 1,024 rows of x."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from tensorpager.kernels.linear import linear_forward
from tensorpager.kernels.linear_grad import linear_input_grad, linear_weight_grad

from .case import Case, Job, Setting, Work, close
from .pages import Pages

DTYPE = torch.bfloat16
UNIT = 2.0**-8


def shape(setting: Setting) -> tuple[int, int, int]:
    """M, N and K of a product with a weight [N, K] of so many bytes."""
    if setting.nbytes < 1 << 20:
        m, k = 5, 64
    else:
        m, k = 1024, 4096 if setting.nbytes >= 32 << 20 else 1024
    return m, max(16, setting.elements(DTYPE) // k), k


def assert_product(got: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """`got` is a @ b to within what adding up in float32 and rounding to bfloat16 may lose.

    References add up in torch's way, which on a CPU may round to bfloat16 on the way.
    """
    a, b = a.float(), b.float()
    exact, magnitude = a @ b, a.abs() @ b.abs()
    sums = 2 * (a.shape[1] + 2) * 2.0**-24  # one of ours, one of what is compared with
    halves = exact.abs() if got.is_cuda else 2 * magnitude
    close("product", got, exact, (sums * magnitude + 1.01 * UNIT * halves).view(-1))


def _work(m: int, n: int, k: int) -> Work:
    return Work(2 * (m * k + m * n + n * k), flop=2 * m * n * k, dtype=DTYPE)


def _forward(setting: Setting) -> Job:
    m, n, k = shape(setting)
    weight, x = setting.randn(n, k, dtype=DTYPE), setting.randn(m, k, dtype=DTYPE, salt=1)
    pages = Pages(weight, setting.page_bytes, setting.seed)
    matrix = pages.matrix()
    out = torch.full((m, n), torch.nan, dtype=DTYPE, device=setting.device)
    return Job(
        run=lambda: linear_forward(x, matrix, out),
        peer=lambda: F.linear(x, weight),
        expect=lambda: None,
        compare=lambda: assert_product(out, x, weight.t()),
        work=_work(m, n, k),
    )


def _input_grad(setting: Setting) -> Job:
    m, n, k = shape(setting)
    weight, grad = setting.randn(n, k, dtype=DTYPE), setting.randn(m, n, dtype=DTYPE, salt=1)
    matrix = Pages(weight, setting.page_bytes, setting.seed).matrix()
    out = torch.full((m, k), torch.nan, dtype=DTYPE, device=setting.device)
    return Job(
        run=lambda: linear_input_grad(grad, matrix, out),
        peer=lambda: grad @ weight,
        expect=lambda: None,
        compare=lambda: assert_product(out, grad, weight),
        work=_work(m, n, k),
    )


def _weight_grad(setting: Setting) -> Job:
    m, n, k = shape(setting)
    grad, x = setting.randn(m, n, dtype=DTYPE), setting.randn(m, k, dtype=DTYPE, salt=1)
    nothing = torch.full((n, k), torch.nan, dtype=DTYPE, device=setting.device)
    pages = Pages(nothing, setting.page_bytes, setting.seed)
    matrix = pages.matrix()
    return Job(
        run=lambda: linear_weight_grad(grad, x, matrix),
        peer=lambda: grad.t() @ x,
        expect=lambda: None,
        compare=lambda: assert_product(pages.read(), grad.t(), x),
        work=_work(m, n, k),
    )


LINEAR = (
    Case("linear", frozenset({"linear.linear_forward"}), "F.linear", _forward),
    Case("linear_input_grad", frozenset({"linear_grad.linear_input_grad"}), "mm", _input_grad),
    Case("linear_weight_grad", frozenset({"linear_grad.linear_weight_grad"}), "mm", _weight_grad),
)
