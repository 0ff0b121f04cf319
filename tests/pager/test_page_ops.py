"""Ops on pages in scattered frames make no dense copy, and give what they give on plain tensors.

Elementwise ops: the same bits. Sums and norms: within 48 units of float32's 2^-24 of the exact
value (relative to the sum of the absolute values), as ``kernels/reduce.py`` says for orders 2 and
inf; torch's own norm of order 1 or 3 on the CPU is less exact, so those are compared with 2^-16.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tensorpager as tp
from tensorpager.pager.chaos import chaos, scattered
from tensorpager.pager.check import check_invariants
from tensorpager.pager.page_lists import knows_list

from .models import PAGE_BYTES, World, assert_same, batch, make_pager, mlp, plain, train

U = 2.0**-24
FLOATS = PAGE_BYTES // 4
SHAPE = (300, 401)  # 8 pages of float32, the last one partial
FP32, BF16, FP16, FP64 = torch.float32, torch.bfloat16, torch.float16, torch.float64

pytestmark = pytest.mark.usefixtures("one_thread")


@contextmanager
def scattered_pager(*, frames: int = 80, poisoned: bool = False, **options: Any) -> Iterator[Any]:
    with make_pager(frames=frames, **options) as pager, ExitStack() as stack:
        stack.enter_context(scattered(pager))
        if poisoned:
            stack.enter_context(chaos(pager))
        yield pager


@contextmanager
def no_gathers(pager: tp.Pager) -> Iterator[None]:
    before = pager.gathers
    yield
    assert pager.gathers == before, f"{pager.gathers - before} dense copies were made"
    check_invariants(pager)
    assert pager.residency.pinned_pages() == 0


def values(seed: int, dtype: torch.dtype = FP32, shape: Any = SHAPE) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def operands(dtype: torch.dtype = FP32) -> list[torch.Tensor]:
    """Two of any sign; one positive, far from 0."""
    return [values(1, dtype), values(2, dtype), (values(3).abs() + 0.1).to(dtype)]


def zero_dim(value: float, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.tensor(value, dtype=dtype)


Script = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]
ELEMENTWISE: dict[str, Script] = {
    "zero_": lambda a, b, c: a.zero_(),
    "fill_": lambda a, b, c: a.fill_(0.3),
    "fill_ 0-dim": lambda a, b, c: a.fill_(zero_dim(0.3)),
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
}
# torch rounds these twice for halves on the CPU, so they are the kernels' for wide dtypes only.
WIDE: dict[str, Script] = {
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
    "where": lambda a, b, c: torch.where(values(9) > 0, a, b),
    "where number": lambda a, b, c: torch.where(values(9) > 0, a, 0.5),
}
IN_PAGES = {
    "paged": (True, True, True),
    "mixed": (True, False, True),
    "into dense": (False, True, True),
}


def check_script(
    pager: tp.Pager,
    script: Callable[..., Any],
    raw: list[Any],
    paged: Any,
    *,
    gathers: bool = False,
) -> None:
    """``script`` gives the same bits, and leaves the same in its operands, without dense copies (or
    with them)."""
    expected_in = [t.clone() for t in raw]
    expected = script(*expected_in)
    given = [pager.page(t) if p else t.clone() for t, p in zip(raw, paged, strict=True)]
    before = pager.gathers
    result = script(*given)
    assert (pager.gathers > before) == gathers, f"{pager.gathers - before} dense copies"
    assert pager.residency.pinned_pages() == 0
    assert_same(plain([result, given]), plain([expected, expected_in]))
    if type(expected) is torch.Tensor:
        assert result.stride() == expected.stride()
        assert expected.device != pager.device or not pager.holds(result)


@contextmanager
def named(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(f"in {name!r}")
        raise


@pytest.mark.parametrize("dtype", [FP32, FP64, BF16, FP16], ids=str)
@pytest.mark.parametrize("where", list(IN_PAGES))
def test_elementwise(where: str, dtype: torch.dtype) -> None:
    scripts = ELEMENTWISE | (WIDE if dtype in (FP32, FP64) else {})
    raw = operands(dtype)
    with scattered_pager(poisoned=where == "paged") as pager:
        for name, script in scripts.items():
            with named(name):
                check_script(pager, script, raw, IN_PAGES[where])
        check_invariants(pager)


def test_rounding_of_halves_is_torchs() -> None:
    """Where torch rounds a scalar or a product first, the op runs on dense copies."""
    with scattered_pager() as pager:
        for dtype in (BF16, FP16):
            for name in ("add alpha", "add number", "add 0-dim", "div 0-dim by", "rsqrt"):
                with named(name):
                    check_script(pager, WIDE[name], operands(dtype), (True,) * 3, gathers=True)


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
        assert pager.residency.pinned_pages() == 0


def test_consecutive_frames_take_the_way_over_views(monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorpager.pager import page_run

    def never(*args: Any) -> None:
        raise AssertionError("a page kernel ran on consecutive frames")

    for name in ("elementwise", "reduce", "non_finite_check_and_unscale"):
        monkeypatch.setattr(page_run, name, never)
    with make_pager(frames=80) as pager:
        tensors = [pager.page(values(i)) for i in range(3)]
        tensors[0].add_(tensors[1]).mul_(0.5).addcdiv_(tensors[1], tensors[2])
        assert tensors[0].norm() > 0
        torch._foreach_mul_(tensors, 2.0)
        assert torch._foreach_norm(tensors)[0] > 0
        assert pager.gathers == 0


# -- reductions ------------------------------------------------------------------------------------
REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda a: a.sum(),
    "sum of all dims": lambda a: torch.ops.aten.sum.dim_IntList(a, None),
    "mean": lambda a: a.mean(),
    "norm": lambda a: a.norm(),
    "vector_norm": lambda a: torch.linalg.vector_norm(a),
    "linalg.norm": lambda a: torch.linalg.norm(a),
    "torch.norm": lambda a: torch.norm(a, 2),
    "norm inf": lambda a: torch.linalg.vector_norm(a, math.inf),
    "norm 0": lambda a: torch.linalg.vector_norm(a, 0),
    "amax": lambda a: a.amax(),
    "max": lambda a: a.max(),
    "amin": lambda a: a.amin(),
    "min": lambda a: a.min(),
    "foreach norm": lambda a: torch._foreach_norm([a])[0],
    "foreach max": lambda a: torch._foreach_max([a])[0],
}
LESS_EXACT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "norm 1": lambda a: torch.linalg.vector_norm(a, 1),
    "norm 3": lambda a: torch.norm(a, 3),
}


def close(result: torch.Tensor, exact: torch.Tensor, scale: float, units: float = 48 * U) -> bool:
    rounding = torch.finfo(result.dtype).eps * exact.abs()
    return bool((result.double() - exact).abs() <= units * scale + rounding)


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
def lists(pager: tp.Pager | None) -> list[list[torch.Tensor]]:
    """Three lists of tensors of 1 to 8 pages; one element of each is dense, one is small."""
    shapes = [(300, 401), (70000,), (5,), (200, 200), (90000,), (17000,)]
    found = []
    for seed in range(3):
        dense = [values(10 * seed + i, shape=s).abs() + 0.1 for i, s in enumerate(shapes)]
        found.append([t if pager is None or i == 4 else pager.page(t) for i, t in enumerate(dense)])
    return found


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


def test_a_list_takes_few_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorpager.pager import page_run

    launches = []
    kernel = page_run.elementwise
    monkeypatch.setattr(
        page_run, "elementwise", lambda *args: (launches.append(len(args[1])), kernel(*args))
    )
    with scattered_pager(frames=120) as pager:
        tensors = [pager.page(values(i, shape=(4 * FLOATS,))) for i in range(12)]
        torch._foreach_mul_(tensors, 0.5)
        assert launches == [10, 2]  # of 4 pages each, and a third of the arena is 40
        launches.clear()
        pager.residency.largest_need = 0
        torch._foreach_addcmul_(tensors[:6], tensors[6:], tensors[6:])
        assert launches == [5, 1]
        assert pager.residency.largest_need <= 40


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


def test_which_lists_are_known() -> None:
    aten = torch.ops.aten
    assert knows_list(aten._foreach_lerp_.Scalar)
    assert knows_list(aten._foreach_norm.Scalar)
    assert not knows_list(aten._foreach_exp_.default)
    assert not knows_list(aten._fused_adamw_.default)


# -- training --------------------------------------------------------------------------------------
def train_in_phases(
    world: World, clip: float | None, steps: int = 3, **options: Any
) -> tuple[list[float], list[Any], list[int]]:
    """Two micro-batches a step; losses and norms, model and optimizer, and how many dense copies
    clipping and the update made in each step."""
    model = world.module(mlp(depth=2))
    optimizer = world.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3, **options))
    gathers = []
    seen = []
    for _ in range(steps):
        with world.iteration():
            for _ in range(2):
                inputs, labels = batch()
                loss = F.cross_entropy(model(inputs), labels) / 2
                loss.backward()
                seen.append(loss.item())
            before = world.pager.gathers if world.pager else 0
            if clip is not None:
                seen.append(nn.utils.clip_grad_norm_(model.parameters(), clip).item())
            optimizer.step()
            gathers.append(world.pager.gathers - before if world.pager else 0)
            optimizer.zero_grad()
    return seen, [model, optimizer], gathers


@contextmanager
def gathered_kinds(pager: tp.Pager, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Kinds of the runs of which dense copies are made."""
    kinds: list[str] = []
    gather = pager.gather
    monkeypatch.setattr(pager, "gather", lambda run: (kinds.append(run.kind), gather(run))[1])
    yield kinds


@pytest.mark.parametrize("lane", ["scattered", "chaos", "planned"])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_a_step_makes_no_dense_copies(
    lane: str, clip: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradient accumulation, clipping and AdamW of scattered tensors gather nothing: without
    clipping the bits are the plain run's, with it losses differ by the rounding of the norm."""
    torch.manual_seed(7)
    seen, state, _ = train_in_phases(World(), clip)
    options = {"policy": "lp" if lane == "planned" else "lru"}
    with scattered_pager(frames=20, poisoned=lane == "chaos", **options) as pager:
        torch.manual_seed(7)
        with gathered_kinds(pager, monkeypatch) as kinds:
            paged_seen, paged_state, gathers = train_in_phases(World(pager), clip)
        assert gathers == [0, 0, 0]
        assert not {"gradient", "optimizer"} & set(kinds)
        assert pager.stats()["faults"] > 0
        paged_state = plain(paged_state)
    if clip is None:
        assert paged_seen == seen
        assert_same(paged_state, plain(state))
    else:
        assert paged_seen[:2] == seen[:2]  # nothing was clipped before
        torch.testing.assert_close(paged_seen, seen, rtol=1e-5, atol=0)
        assert abs(paged_seen[2] - seen[2]) <= 96 * U * seen[2]  # two norms, each within 48


def test_other_optimizers_make_none_either() -> None:
    makers = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        "adam": lambda p: torch.optim.Adam(p, weight_decay=0.1, foreach=True),
        "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.9),
        "adagrad": lambda p: torch.optim.Adagrad(p),
    }
    for name, make in makers.items():

        def script(world: World, make: Any = make) -> Any:
            model = world.module(mlp(depth=2))
            optimizer = world.optimizer(make(model.parameters()))
            counts = []
            for _ in range(2):
                with world.iteration():
                    F.cross_entropy(model(batch()[0]), batch()[1]).backward()
                    before = world.pager.gathers if world.pager else 0
                    optimizer.step()
                    counts.append(world.pager.gathers - before if world.pager else 0)
            assert counts == [0, 0]
            return plain([model, optimizer])

        with named(name), scattered_pager(frames=24) as pager:
            torch.manual_seed(3)
            expected = script(World())
            torch.manual_seed(3)
            assert_same(script(World(pager)), expected)


def test_grad_scaler() -> None:
    """Unscaling and clipping by value: the plain run's bits, and no dense copies."""

    def script(world: World) -> Any:
        model = world.module(mlp(depth=2))
        optimizer = world.optimizer(torch.optim.AdamW(model.parameters()))
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        losses = []
        for _ in range(2):
            with world.iteration():
                inputs, labels = batch()
                loss = F.cross_entropy(model(inputs), labels)
                scaler.scale(loss).backward()
                before = world.pager.gathers if world.pager else 0
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_value_(model.parameters(), 1e-3)
                scaler.step(optimizer)
                scaler.update()
                assert world.pager is None or world.pager.gathers == before
                optimizer.zero_grad()
            losses.append(loss.item())
        return losses, plain(model), scaler.get_scale()

    with scattered_pager(frames=24) as pager:
        torch.manual_seed(5)
        expected = script(World())
        torch.manual_seed(5)
        assert_same(plain(script(World(pager))), plain(expected))


# -- larger than the arena -------------------------------------------------------------------------
FRAMES = 8
LARGE = 4 * FRAMES * FLOATS - 1000
LANES = ("plain", "scattered", "chaos")


@contextmanager
def settled_pager(frames: int) -> Iterator[tp.Pager]:
    """Its first iteration is over: the arena has ``frames`` frames for good."""
    with make_pager(frames=frames) as pager:
        with pager.iteration():
            pass
        yield pager
        assert pager.residency.pool.count == frames


@contextmanager
def small_pager(lane: str) -> Iterator[tp.Pager]:
    with settled_pager(FRAMES) as pager, ExitStack() as stack:
        if lane != "plain":
            stack.enter_context({"scattered": scattered, "chaos": chaos}[lane](pager))
        yield pager
        assert pager.residency.pinned_pages() == 0
        assert pager.gathers == 0
        check_invariants(pager)


def large(pager: tp.Pager, dense: torch.Tensor) -> tp.PagedTensor:
    paged = pager.empty_like_geometry(dense.to("meta"), "user")
    paged.copy_(dense)
    return paged


LARGE_SCRIPTS: dict[str, Callable[..., Any]] = {
    "zero_": lambda a, b: a.zero_(),
    "fill_": lambda a, b: a.fill_(0.5),
    "copy_": lambda a, b: a.copy_(b),
    "clone": lambda a, b: a.clone(),
    "add_": lambda a, b: a.add_(b, alpha=0.3),
    "mul_": lambda a, b: a.mul_(0.3),
    "add": lambda a, b: a + b,
    "addcdiv_": lambda a, b: a.addcdiv_(b, b.abs().add_(1.0), value=-0.1),
    "lerp_ self": lambda a, b: a.lerp_(a, 0.1),
    "amax": lambda a, b: a.amax(),
    "min": lambda a, b: b.min(),
    "foreach": lambda a, b: torch._foreach_mul_([a, b], 3.0),
    "unscale": lambda a, b: torch._amp_foreach_non_finite_check_and_unscale_(
        [a, b], torch.zeros(1), torch.tensor(0.25)
    ),
}
# Halves on the CPU too, in which torch would round twice.
LARGE_HALVES = {"add number": lambda a: a.add_(0.1), "rsqrt": lambda a: a.abs_().rsqrt_()}
LARGE_REDUCTIONS = ("sum", "mean", "norm", "torch.norm", "norm inf", "norm 0", "foreach norm")


@pytest.mark.parametrize("lane", LANES)
def test_larger_than_the_arena(lane: str) -> None:
    dense = [values(i, shape=(LARGE,)) for i in range(2)]
    with small_pager(lane) as pager:
        for name, script in LARGE_SCRIPTS.items():
            with named(name):
                given = [large(pager, t) for t in dense]
                expected_in = [t.clone() for t in dense]
                expected, result = script(*expected_in), script(*given)
                if isinstance(expected, list):  # what is written, again
                    expected = result = None
                if type(result) is tp.PagedTensor:
                    result = result.clone()
                after = [t.clone() for t in given]
                assert_same(plain([result, after]), plain([expected, expected_in]))
        for name in LARGE_REDUCTIONS:
            with named(name):
                exact = REDUCTIONS[name](dense[0].double())
                size = dense[0].double().abs()
                scale = {"sum": size.sum(), "mean": size.mean()}
                result = REDUCTIONS[name](large(pager, dense[0]))
                assert close(result, exact, float(scale.get(name, exact.abs())))
                again = REDUCTIONS[name](large(pager, dense[0]))
                assert torch.equal(result, again)


def test_halves_larger_than_the_arena_are_rounded_once() -> None:
    dense = values(1, BF16, (2 * LARGE,))
    with small_pager("plain") as pager:
        for name, script in LARGE_HALVES.items():
            with named(name):
                expected = script(dense.float()).to(BF16)
                assert torch.equal(script(large(pager, dense)).clone(), expected)


@pytest.mark.parametrize("lane", LANES)
def test_initialising_what_is_larger_than_the_arena(lane: str) -> None:
    shape = (4 * FRAMES * 64, 256)
    scripts = {
        "normal_": lambda t: nn.init.normal_(t, 0.5, 0.1),
        "uniform_": lambda t: nn.init.uniform_(t, -1.0, 2.0),
        "kaiming": lambda t: nn.init.kaiming_uniform_(t, a=math.sqrt(5)),
        "xavier": lambda t: nn.init.xavier_normal_(t),
        "erfinv_": lambda t: nn.init.uniform_(t, -0.9, 0.9).erfinv_(),
        "ones": lambda t: nn.init.ones_(t),
    }
    with small_pager(lane) as pager:
        for name, script in scripts.items():
            with named(name):
                paged = pager.empty_like_geometry(torch.empty(shape, device="meta"), "parameter")
                torch.manual_seed(1)
                with torch.no_grad():
                    assert script(paged) is paged
                torch.manual_seed(1)
                assert torch.equal(paged.clone(), script(torch.empty(shape)))


def test_operands_that_fit_one_by_one_only() -> None:
    """Four tensors of half an arena each; and one beside what the user has pinned."""
    raw = [*operands(), values(8)]
    with settled_pager(16) as pager:
        paged = [pager.page(t) for t in raw]
        paged[0].add_(paged[1])
        expected = raw[0].add_(raw[1]).addcmul_(raw[1], raw[2], value=0.3)
        paged[0].addcmul_(paged[1], paged[2], value=0.3)
        assert torch.equal(plain(paged[0]), expected)
        with paged[3].pin():
            paged[0].mul_(paged[1])
            assert torch.equal(plain(paged[0]), expected.mul_(raw[1]))
        assert pager.gathers == 0


def test_what_cannot_be_split_is_refused() -> None:
    with settled_pager(FRAMES) as pager:
        tensor = large(pager, values(1, shape=(LARGE,)))
        for script in (torch.sin, lambda t: t.sort(), lambda t: t[7:].mul_(2.0), torch.cumsum):
            with pytest.raises(tp.InfeasibleBudget):
                script(tensor, 0) if script is torch.cumsum else script(tensor)
        assert torch.equal(tensor.clone(), values(1, shape=(LARGE,)))
        assert pager.residency.pinned_pages() == 0


def test_a_metered_iteration_that_writes_more_than_the_budget_holds() -> None:
    """A tensor that fits in no budget is walked, so its size is not what the iteration needs."""
    with make_pager(frames=FRAMES, host_budget="128MiB") as pager:
        model = pager.page_module(mlp(width=32, depth=1))
        huge = pager.empty_like_geometry(torch.empty(12 << 20, device="meta"), "user")
        optimizer = pager.optimizer(torch.optim.AdamW(model.parameters()))
        with pager.iteration():
            assert pager.budget.metering
            huge.fill_(2.0)
            assert huge.mul_(0.5).mean() == 1.0
        train(World(pager), model, optimizer, 2)
        assert pager.residency.largest_need <= FRAMES
        assert huge.sum() == huge.numel()
