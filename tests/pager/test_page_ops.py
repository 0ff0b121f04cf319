"""Ops on pages in scattered frames make no dense copy, and give what they give on plain tensors.

Elementwise ops: the same bits. Sums and norms: within 48 units of float32's 2^-24 of the exact
value (relative to the sum of the absolute values) for orders 2 and inf; torch's own norm of order 1
or 3 on the CPU is less exact, so those are compared with 2^-16.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

import tensorpager as tp
from tensorpager.pager.debug.check import check_invariants

from .models import assert_same, make_pager, plain
from .page_ops_suite import (
    BF16,
    FP16,
    FP32,
    FP64,
    LESS_EXACT,
    REDUCTIONS,
    SHAPE,
    U,
    check_script,
    close,
    named,
    no_gathers,
    operands,
    scattered_pager,
    values,
    zero_dim,
)

pytestmark = pytest.mark.usefixtures("one_thread")


Script = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]
ELEMENTWISE: dict[str, Script] = {
    "zero_": lambda a, b, c: a.zero_(),
    "fill_": lambda a, b, c: a.fill_(0.3),
    "fill_ 0-dim": lambda a, b, c: a.fill_(zero_dim(0.3)),
    "fill_ large 0-dim": lambda a, b, c: a.fill_(zero_dim(1e39, FP64)),
    "copy_": lambda a, b, c: a.copy_(b),
    "clone": lambda a, b, c: a.clone(),
    "add": lambda a, b, c: a + b,
    "add_": lambda a, b, c: a.add_(b),
    "sub": lambda a, b, c: a - b,
    "mul": lambda a, b, c: a * b,
    "mul_ number": lambda a, b, c: a.mul_(0.1),
    "mul 0-dim": lambda a, b, c: a * zero_dim(0.3, a.dtype),
    "mul wide 0-dim": lambda a, b, c: a * zero_dim(0.3, FP64),
    "div": lambda a, b, c: a / c,
    "div number": lambda a, b, c: a / 3.1,
    "div_": lambda a, b, c: a.div_(c),
    "addcmul": lambda a, b, c: a.addcmul(b, c),
    "addcmul_ value": lambda a, b, c: a.addcmul_(b, b, value=1 - 0.999),
    "addcdiv": lambda a, b, c: a.addcdiv(b, c),
    "addcdiv_ value": lambda a, b, c: a.addcdiv_(b, c, value=-0.01),
    "lerp number": lambda a, b, c: a.lerp(b, 0.1),
    "lerp_ number": lambda a, b, c: a.lerp_(b, 0.9),
    "lerp": lambda a, b, c: a.lerp(b, c),
    "lerp_ 0-dim": lambda a, b, c: a.lerp_(b, zero_dim(0.1, a.dtype)),
    "sqrt": lambda a, b, c: c.sqrt(),
    "sqrt_": lambda a, b, c: c.sqrt_(),
    "reciprocal": lambda a, b, c: c.reciprocal(),
    "neg": lambda a, b, c: -a,
    "abs": lambda a, b, c: a.abs(),
    "abs_": lambda a, b, c: a.abs_(),
    "sign": lambda a, b, c: a.sign(),
    "sgn_": lambda a, b, c: a.sgn_(),
    "maximum": lambda a, b, c: torch.maximum(a, b),
    "minimum": lambda a, b, c: torch.minimum(a, b),
    "clamp": lambda a, b, c: a.clamp(-0.3, 0.3),
    "clamp_": lambda a, b, c: a.clamp_(-0.3, 0.3),
    "clamp tensors": lambda a, b, c: a.clamp(b, c),
    "clamp min": lambda a, b, c: a.clamp(min=0.3),
    "clamp_min": lambda a, b, c: a.clamp_min(0.1),
    "clamp_max_": lambda a, b, c: a.clamp_max_(0.1),
    "clamp_min tensor": lambda a, b, c: a.clamp_min(b),
    "to float16": lambda a, b, c: a.to(FP16),
    "to bfloat16": lambda a, b, c: a.to(BF16),
    "to float64": lambda a, b, c: a.to(FP64),
    "add alpha": lambda a, b, c: a.add(b, alpha=-0.7),
    "add_ alpha": lambda a, b, c: a.add_(b, alpha=0.3),
    "sub alpha": lambda a, b, c: a.sub(b, alpha=0.3),
    "add number": lambda a, b, c: a + 0.1,
    "rsub number": lambda a, b, c: 1 - a,
    "rsub": lambda a, b, c: torch.rsub(a, b, alpha=0.3),
    "add 0-dim": lambda a, b, c: a + zero_dim(0.3),
    "sub from 0-dim": lambda a, b, c: zero_dim(0.3) - a,
    "div 0-dim by": lambda a, b, c: zero_dim(0.3) / c,
    "rsqrt": lambda a, b, c: c.rsqrt(),
    "where": lambda a, b, c: torch.where(values(9) > 0, a, b.to(a.dtype)),
    "where number": lambda a, b, c: torch.where(values(9) > 0, a, 0.5),
}
IN_PAGES = {
    "paged": (True, True, True),
    "mixed": (True, False, True),
    "into dense": (False, True, True),
}


@pytest.mark.parametrize(
    ("where", "dtype"),
    [
        pytest.param(
            where,
            dtype,
            marks=pytest.mark.slow if where != "paged" and dtype in (FP64, FP16) else (),
        )
        for where in IN_PAGES
        for dtype in (FP32, FP64, BF16, FP16)
    ],
    ids=str,
)
def test_elementwise(where: str, dtype: torch.dtype) -> None:
    raw = operands(dtype)
    with scattered_pager(poisoned=where == "paged") as pager:
        for name, script in ELEMENTWISE.items():
            with named(name):
                check_script(pager, script, raw, IN_PAGES[where])
        check_invariants(pager.core)


@pytest.mark.parametrize("threads", [2, 4], ids="{}-threads".format)
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16, FP64], ids=str)
def test_elementwise_with_threads(dtype: torch.dtype, threads: int) -> None:
    """torch cuts an op into a chunk for each thread, at elements amid pages and vectors."""
    names = ["add alpha", "rsub", "add number", "sqrt", "rsqrt", "lerp_ number", "addcdiv_ value"]
    torch.set_num_threads(threads)
    with scattered_pager() as pager:
        for name in names:
            with named(name):
                check_script(pager, ELEMENTWISE[name], operands(dtype), (True,) * 3)
        scalar = lambda a: a.add(0.7, alpha=0.3)  # noqa: E731
        check_script(pager, scalar, operands(dtype)[:1], [True])


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_an_order_of_memory_that_has_other_bits(dtype: torch.dtype) -> None:
    """torch walks operands of different orders one element at a time, and so does the pager."""
    script = lambda a, b: a.add_(b, alpha=-0.7)  # noqa: E731
    raw = [values(1, dtype), values(2, dtype, SHAPE[::-1]).t()]
    expected = script(raw[0].clone(), raw[1])
    with scattered_pager() as pager:
        assert torch.equal(plain(script(pager.page(raw[0]), raw[1])), expected)


CONVERSIONS = [
    (BF16, FP32),
    (FP32, BF16),
    (FP64, FP16),
    (FP16, FP64),
    (torch.int64, FP32),
    (torch.bool, BF16),
    (torch.int32, torch.int32),
]


@pytest.mark.parametrize(("source", "target"), CONVERSIONS, ids=str)
def test_copy_converts(source: torch.dtype, target: torch.dtype) -> None:
    raw = [torch.zeros(SHAPE, dtype=target), (values(5) * 3).to(source)]
    with scattered_pager() as pager:
        for paged in [(True, True), (True, False), (False, True)]:
            check_script(pager, lambda a, b: a.copy_(b), raw, paged)
            check_script(pager, lambda a, b: b.to(a.dtype), raw, paged)


def test_dtypes_that_promote() -> None:
    """Computed in the wider dtype, and rounded to that of what is written."""
    scripts = {
        "add_": lambda a, b: a.add_(b),
        "mul": lambda a, b: a * b,
        "maximum": torch.maximum,
        "sub_": lambda a, b: a.sub_(b, alpha=0.3),
    }
    with scattered_pager() as pager:
        for left, right in [(FP32, BF16), (BF16, FP32), (FP32, FP64), (FP64, FP16), (BF16, FP16)]:
            raw = [values(1, left), values(2, right)]
            for name, script in scripts.items():
                with named(f"{name} {left} {right}"):
                    check_script(pager, script, raw, (True, True))


def test_filling_integers() -> None:
    with scattered_pager() as pager:
        for dtype, value in [(torch.int64, -3), (torch.uint8, 200), (torch.bool, True)]:
            raw = [torch.ones(70000, dtype=dtype)]
            check_script(pager, lambda a, v=value: a.fill_(v), raw, [True])
            check_script(pager, lambda a: a.zero_(), raw, [True])


def test_one_tensor_as_several_operands() -> None:
    with scattered_pager() as pager:
        for script in (
            lambda a: a.add_(a),
            lambda a: a * a,
            lambda a: a.addcmul_(a, a),
            lambda a: torch.lerp(a, a.detach(), a),
            lambda a: a.copy_(a),
        ):
            check_script(pager, script, [values(1)], [True])


def test_permuted_memory() -> None:
    """Operands in one memory order, which is not that of their indices; dense ones in any."""
    order = values(1, shape=(20, 30, 8, 9)).to(memory_format=torch.channels_last)
    other = values(2, shape=(20, 30, 8, 9))
    with scattered_pager() as pager:
        for paged in [(True, False), (True, True)]:
            in_order = other.to(memory_format=torch.channels_last)
            check_script(pager, lambda a, b: a.add_(b), [order, in_order], paged)
            check_script(pager, lambda a, b: a * b, [order, in_order], paged)
        check_script(pager, lambda a, b: a.add_(b), [order, other], (True, False))
        transposed = [values(3, shape=(200, 200)), values(4, shape=(200, 200))]
        check_script(pager, lambda a, b: a.addcdiv_(b.t(), b.t()), transposed, (True, False))


FALLBACKS: dict[str, tuple[Callable[..., Any], Callable[[], list[Any]]]] = {
    "a view amid the pages": (lambda a: a[7:].mul_(2.0), lambda: [values(1)]),
    "a transposed view": (
        lambda a, b: a.add_(b.t()),
        lambda: [values(1, shape=(200, 200)), values(2, shape=(200, 200))],
    ),
    "every other column": (lambda a: a[:, ::2] + 1.0, lambda: [values(1)]),
    "broadcasting": (lambda a, b: a.add_(b[0]), lambda: operands()[:2]),
    "complex numbers": (lambda a: a.mul_(2j), lambda: [values(1).to(torch.complex64)]),
    "integers": (lambda a: a.add_(1), lambda: [torch.arange(70000)]),
    "integers made floats": (lambda a: a / 2, lambda: [torch.arange(70000)]),
    "floats made integers": (
        lambda a, b: a.copy_(b),
        lambda: [torch.zeros(SHAPE, dtype=torch.int64), values(1)],
    ),
    "a rounding mode": (lambda a, b: a.div(b, rounding_mode="floor"), lambda: operands()[:2]),
    "a sum along rows": (lambda a: a.sum(0), lambda: [values(1)]),
    "a wider sum": (lambda a: a.sum(dtype=FP64), lambda: [values(1)]),
    "a matrix norm": (lambda a: torch.linalg.norm(a, 1), lambda: [values(1)]),
    "an op not in the table": (torch.sin, lambda: [values(1)]),
    "another memory order": (
        lambda a: a.clone(memory_format=torch.contiguous_format),
        lambda: [values(1, shape=(20, 30, 8, 9)).to(memory_format=torch.channels_last)],
    ),
}


@pytest.mark.parametrize("name", list(FALLBACKS))
def test_what_takes_dense_copies(name: str) -> None:
    script, make = FALLBACKS[name]
    raw = make()
    with scattered_pager() as pager:
        check_script(pager, script, raw, [True] * len(raw), gathers=True)


def test_what_torch_refuses_is_refused() -> None:
    with scattered_pager() as pager:
        paged, other = pager.page(values(1)), pager.page(values(2))
        before = plain(paged)
        refused = [
            lambda: paged.lerp_(other.to(FP64), 0.5),
            lambda: paged.clamp_(),
            lambda: paged.add_(torch.zeros(3, 3)),
            lambda: pager.page(values(1, BF16)).fill_(1e39),
            lambda: torch._foreach_add_([paged, other], [1.0]),
        ]
        for script in refused:
            with pytest.raises(RuntimeError):
                script()
        assert torch.equal(plain(paged), before)
        assert pager.core.residency.pinned_pages() == 0


def test_consecutive_frames_take_the_way_over_views(monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorpager.pager.tensor import dense_run

    def never(*args: Any) -> None:
        raise AssertionError("a page kernel ran on consecutive frames")

    for name in ("run_on_pages", "run_in_slabs"):
        monkeypatch.setattr(dense_run, name, never)
    with make_pager(frames=80) as pager:
        tensors = [pager.page(values(i)) for i in range(3)]
        tensors[0].add_(tensors[1]).mul_(0.5).addcdiv_(tensors[1], tensors[2])
        assert tensors[0].norm() > 0
        torch._foreach_mul_(tensors, 2.0)
        assert torch._foreach_norm(tensors)[0] > 0
        assert pager.core.gathers == 0


# -- reductions ------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [FP32, FP64, BF16], ids=str)
def test_reductions(dtype: torch.dtype) -> None:
    raw = values(4, dtype)
    with scattered_pager() as pager:
        for name, script in (REDUCTIONS | LESS_EXACT).items():
            with named(name):
                paged = pager.page(raw)
                with no_gathers(pager):
                    result = script(paged)
                exact, torchs = script(raw.double()), script(raw)
                assert type(result) is torch.Tensor
                assert (result.shape, result.dtype) == (torchs.shape, torchs.dtype)
                scale = {"sum": raw.double().abs().sum(), "mean": raw.double().abs().mean()}
                units = 2.0**-16 if name in LESS_EXACT else 48 * U
                assert close(result, exact, float(scale.get(name.split()[0], exact.abs())), units)
        paged = pager.page(raw)
        paged[200, 17] = math.nan
        for name in ("sum", "norm", "max", "amin"):
            assert REDUCTIONS[name](paged).isnan(), name


# -- lists -----------------------------------------------------------------------------------------
@cache
def _dense_lists() -> list[list[torch.Tensor]]:
    shapes = [(300, 401), (70000,), (5,), (200, 200), (90000,), (17000,)]
    return [
        [values(10 * seed + i, shape=s).abs() + 0.1 for i, s in enumerate(shapes)]
        for seed in range(3)
    ]


def lists(pager: tp.Pager | None) -> list[list[torch.Tensor]]:
    """Three lists of tensors of 1 to 8 pages; one element of each is dense, one is small."""
    return [
        [t.clone() if pager is None or i == 4 else pager.page(t) for i, t in enumerate(dense)]
        for dense in _dense_lists()
    ]


FOREACH: dict[str, Callable[..., Any]] = {
    "zero_": lambda a, b, c: torch._foreach_zero_(a),
    "copy_": lambda a, b, c: torch._foreach_copy_(a, b),
    "add list": lambda a, b, c: torch._foreach_add(a, b, alpha=0.3),
    "add_ number": lambda a, b, c: torch._foreach_add_(a, 0.3),
    "add_ numbers": lambda a, b, c: torch._foreach_add_(a, [0.1 * i for i in range(len(a))]),
    "add 0-dim": lambda a, b, c: torch._foreach_add(a, zero_dim(0.3)),
    "sub_": lambda a, b, c: torch._foreach_sub_(a, b),
    "mul_": lambda a, b, c: torch._foreach_mul_(a, zero_dim(0.3)),
    "mul": lambda a, b, c: torch._foreach_mul(a, b),
    "div_ numbers": lambda a, b, c: torch._foreach_div_(a, [1.0 + i for i in range(len(a))]),
    "addcmul_": lambda a, b, c: torch._foreach_addcmul_(a, b, c, 0.3),
    "addcmul numbers": lambda a, b, c: torch._foreach_addcmul(a, b, c, [0.1] * len(a)),
    "addcdiv_ tensor": lambda a, b, c: torch._foreach_addcdiv_(
        a, b, c, torch.arange(1.0, 1.0 + len(a))
    ),
    "lerp_": lambda a, b, c: torch._foreach_lerp_(a, b, 0.1),
    "lerp": lambda a, b, c: torch._foreach_lerp(a, b, c),
    "sqrt": lambda a, b, c: torch._foreach_sqrt(a),
    "rsqrt_": lambda a, b, c: torch._foreach_rsqrt_(a),
    "reciprocal": lambda a, b, c: torch._foreach_reciprocal(a),
    "neg_": lambda a, b, c: torch._foreach_neg_(a),
    "abs": lambda a, b, c: torch._foreach_abs(a),
    "sign": lambda a, b, c: torch._foreach_sign(a),
    "maximum_": lambda a, b, c: torch._foreach_maximum_(a, b),
    "minimum": lambda a, b, c: torch._foreach_minimum(a, b),
    "clamp_min_": lambda a, b, c: torch._foreach_clamp_min_(a, 0.5),
    "clamp_max": lambda a, b, c: torch._foreach_clamp_max(a, b),
    "max": lambda a, b, c: torch._foreach_max(a),
    "one tensor twice": lambda a, b, c: torch._foreach_add_(
        [a[0], a[0], a[4], a[4]], [b[0], b[0], b[4], b[4]]
    ),
}


@pytest.mark.parametrize("lane", ["scattered", "chaos", "tight"])
def test_lists(lane: str) -> None:
    """``tight``: two of the largest elements do not fit; few of the others go together."""
    with scattered_pager(frames=26 if lane == "tight" else 120, poisoned=lane == "chaos") as pager:
        for name, script in FOREACH.items():
            with named(name):
                expected_in = lists(None)
                expected = script(*expected_in)
                given = lists(pager)
                with no_gathers(pager):
                    result = script(*given)
                assert_same(plain([result, given]), plain([expected, expected_in]))


def test_norms_of_a_list() -> None:
    with scattered_pager() as pager:
        given, dense = lists(pager)[0], lists(None)[0]
        with no_gathers(pager):
            norms = torch._foreach_norm(given)
        for norm, tensor in zip(norms, dense, strict=True):
            exact = tensor.double().norm()
            assert norm.dtype == FP32
            assert norm.shape == ()
            assert close(norm, exact, float(exact))


@pytest.mark.parametrize("broken", [None, math.inf, math.nan])
def test_unscaling(broken: float | None) -> None:
    check = torch._amp_foreach_non_finite_check_and_unscale_
    found, expected_found = torch.zeros(1), torch.zeros(1)
    with scattered_pager() as pager:
        given, dense = lists(pager)[0], lists(None)[0]
        if broken is not None:
            given[3][100, 3] = dense[3][100, 3] = broken
        with no_gathers(pager):
            check(given, found, torch.tensor(0.125))
        check(dense, expected_found, torch.tensor(0.125))
        assert found.item() == expected_found.item() == float(broken is not None)
        assert_same(plain(given), plain(dense))
