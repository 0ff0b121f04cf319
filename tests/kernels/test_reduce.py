"""reduce on every implementation, against exact sums and torch's own rules.

Bounds are those of `reduce`'s docstring: 48 roundings deep in float32 (80 in float64), and one more
for the result.
"""

import math

import numpy as np
import pytest
import torch
from page_suite import MIB, Backend, distant_frame
from reduce_suite import (
    DTYPES,
    Held,
    exact_power_sum,
    held,
    mixed_list,
    random_values,
    run,
    scattered,
)

from tensorpager.kernels.pieces import Paged
from tensorpager.kernels.reduce import reduce

SIZES = [2049, 1025, 1025, 1023, 1, 5]
NORMS = [0.0, 0.5, 1.0, 2.0, 3.0, math.inf, -math.inf, -1.0]
HOWS = ["sum", "mean", "amax", "amin", "norm"]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).split(".")[1])

norms = pytest.mark.parametrize(
    ("dtype", "p"),
    [
        pytest.param(
            *(dtype, p),
            id=f"{str(dtype).split('.')[1]}-{p}",
            marks=() if p == 2 or dtype == torch.float32 else pytest.mark.slow,
        )
        for dtype in DTYPES
        for p in NORMS
    ],
)


def _values(dtype: torch.dtype) -> list[torch.Tensor]:
    return [random_values(n, dtype, seed=n) for n in SIZES]


def _accumulated(dtype: torch.dtype) -> float:
    """Relative error of an accumulation of numbers of one sign."""
    return 80 * 2**-53 if dtype == torch.float64 else 48 * 2**-24


def _rounded(dtype: torch.dtype) -> float:
    """Relative error of a result that is rounded to `dtype`, by way of float32."""
    return torch.finfo(dtype).eps / 2 * (1 + 2**-12)


def _torch(x: torch.Tensor, how: str, p: float = 2.0) -> torch.Tensor:
    """torch's own op on a dense tensor."""
    if how == "norm":
        return torch.linalg.vector_norm(x, p)
    return torch.isfinite(x).all() if how == "isfinite" else getattr(x, how)()


@dtypes
@pytest.mark.parametrize("how", ["sum", "mean"])
def test_sums_keep_to_their_bound(backend: Backend, dtype: torch.dtype, how: str) -> None:
    values = _values(dtype)
    results = run(backend, reduce, mixed_list(values, backend), how)
    assert results.dtype == dtype
    for x, got in zip(values, results.tolist(), strict=True):
        count = x.numel() if how == "mean" else 1
        exact = math.fsum(x.double().tolist()) / count
        error = _accumulated(dtype) * exact_power_sum(x, 1) / count
        assert abs(got - exact) <= error + _rounded(dtype) * (abs(exact) + error)


@norms
def test_norms_keep_to_their_bound(backend: Backend, dtype: torch.dtype, p: float) -> None:
    values = _values(dtype)
    holders = mixed_list(values, backend)
    results = run(backend, reduce, holders, "norm", p, dtype=torch.float64)
    for x, got in zip(values, results.tolist(), strict=True):
        sizes = x.double().abs().tolist()
        if p == 0:
            assert got == sum(size != 0 for size in sizes)
        elif math.isinf(p):
            assert got == (max(sizes) if p > 0 else min(sizes))
        elif p < 0 and 0.0 in sizes:
            assert got == 0
        else:
            exact = exact_power_sum(x, p) ** (1 / p)
            assert abs(got - exact) <= _accumulated(dtype) * max(1, 1 / abs(p)) * exact


@dtypes
@pytest.mark.parametrize("how", ["amax", "amin"])
def test_extremes_are_exact(backend: Backend, dtype: torch.dtype, how: str) -> None:
    values = _values(dtype)
    results = run(backend, reduce, mixed_list(values, backend), how)
    assert results.dtype == dtype
    pick = max if how == "amax" else min
    assert results.tolist() == [pick(x.tolist()) for x in values]


SPECIAL = [[math.nan], [math.inf], [-math.inf], [math.inf, -math.inf], [math.nan, math.inf], []]


@dtypes
@pytest.mark.parametrize("how", [*HOWS, "isfinite"])
def test_nan_and_inf_do_as_in_torch(backend: Backend, dtype: torch.dtype, how: str) -> None:
    values = []
    for number, special in enumerate(SPECIAL):
        x = random_values(1100, dtype, seed=number)
        at = [17, 1099][: len(special)]
        x[at] = torch.tensor(special, dtype=dtype)
        values.append(x)
    holders = [held(x, backend, scattered(1100, dtype)) for x in values]
    for p in [*NORMS[:4], math.inf] if how == "norm" and dtype == torch.float32 else [2.0]:
        got = run(backend, reduce, holders, how, p, dtype=torch.float64).tolist()
        for x, result in zip(values[:-1], got[:-1], strict=True):
            expected = _torch(x.double(), how, p).item()
            if math.isfinite(expected):
                assert result == pytest.approx(expected, rel=0.01)
            else:
                assert str(result) == str(expected)
        assert math.isfinite(got[-1])


def test_isfinite_finds_one_number(backend: Backend) -> None:
    sizes = [1, 1024, 1025, 5000]
    for bad, where in ((math.nan, 0), (math.inf, -1), (-math.inf, 1000)):
        values = [torch.full((n,), 3e38) for n in sizes]
        values[2][where] = values[3][where] = bad
        got = run(backend, reduce, mixed_list(values, backend), "isfinite")
        assert got.dtype == torch.bool
        assert got.tolist() == [True, True, False, False]


def test_mixed_types_are_promoted(backend: Backend) -> None:
    values = [torch.full((3000,), 0.1).to(dtype) for dtype in DTYPES]
    holders = mixed_list(values, backend)
    sums = run(backend, reduce, holders, "sum")
    assert sums.dtype == torch.float64
    for x, got in zip(values, sums.tolist(), strict=True):
        exact = math.fsum(x.double().tolist())
        assert abs(got - exact) <= _accumulated(x.dtype) * exact
    assert run(backend, reduce, holders[:2], "sum").dtype == torch.float32
    assert run(backend, reduce, holders[1:2], "sum").dtype == torch.bfloat16
    assert run(backend, reduce, holders[1:2], "sum", dtype=torch.float32).dtype == torch.float32


def test_long_sums_do_not_drift(backend: Backend) -> None:
    """The bound holds for 200,000 equal numbers, where adding one after another breaks it."""
    x = torch.full((200_000,), 0.1)
    exact = math.fsum(x.double().tolist())
    bound = _accumulated(x.dtype) * exact + _rounded(x.dtype) * exact
    one_by_one = float(np.cumsum(x.numpy(), dtype=np.float32)[-1])
    assert abs(one_by_one - exact) > bound
    frames = scattered(200_000, x.dtype, 64 << 10)
    for holder in (held(x, backend), held(x, backend, frames, page_bytes=64 << 10)):
        got = run(backend, reduce, [holder], "sum", real_tiles=True).item()
        assert abs(got - exact) <= bound


@pytest.mark.parametrize("how", HOWS)
def test_consecutive_frames_give_the_bits_of_torch(backend: Backend, how: str) -> None:
    """What makes training on a CPU bit-identical to training without pages."""
    if backend.name in ("interpreter", "cuda"):
        pytest.skip("kernels have their own order of additions")
    for dtype in DTYPES:
        for numel in (1, 1000, 100_003):
            x = random_values(numel, dtype, seed=numel)
            pages = -(-x.nbytes // 4096)
            paged = held(x, backend, list(range(3, 3 + pages)))
            for p in NORMS if how == "norm" else [2.0]:
                got = run(backend, reduce, [paged], how, p)
                expected = _torch(x, how, p)
                assert got.dtype == expected.dtype
                assert torch.equal(got[0].nan_to_num(), expected.nan_to_num())


def test_frames_and_pages_do_not_change_the_bits(backend: Backend) -> None:
    """Of a kernel's result: nor does being dense, for pages of 64 KiB or more."""
    if backend.name in ("reference", "cpu"):
        pytest.skip("torch's order of additions depends on the stretches")
    x = random_values(40_000, torch.float32, seed=3)
    page = 64 << 10
    layouts = [
        held(x, backend),
        held(x, backend, [0, 1, 2], page_bytes=page),
        held(x, backend, [6, 2, 0], page_bytes=page),
        held(x, backend, [3, 1], page_bytes=2 * page),
    ]
    alone = [run(backend, reduce, [x], "sum", real_tiles=True).item() for x in layouts]
    together = run(backend, reduce, layouts, "sum", real_tiles=True).tolist()
    assert len({*alone, *together}) == 1


def test_empty_operands_do_as_in_torch(backend: Backend) -> None:
    empty = torch.empty(0)
    holders = [held(empty, backend), held(torch.ones(3), backend), held(empty, backend, [])]
    assert run(backend, reduce, holders, "sum").tolist() == [0, 3, 0]
    assert str(run(backend, reduce, holders, "mean").tolist()) == "[nan, 1.0, nan]"
    assert run(backend, reduce, holders, "norm", 1).tolist() == [0, 3, 0]
    assert run(backend, reduce, holders, "isfinite").tolist() == [True] * 3
    only_empty = [holders[0], holders[2]]
    assert run(backend, reduce, only_empty, "norm").tolist() == [0, 0]
    for how, p in (("amax", 2), ("amin", 2), ("norm", math.inf), ("norm", -1.0)):
        with pytest.raises(ValueError, match=r"operand 0 is empty and has no .*leave it out"):
            run(backend, reduce, holders, how, p)


def test_no_operands(backend: Backend) -> None:
    nothing: list[Held] = []
    assert run(backend, reduce, nothing, "sum").shape == (0,)
    assert run(backend, reduce, nothing, "sum").dtype == torch.float32
    assert run(backend, reduce, nothing, "isfinite").dtype == torch.bool


def test_gradients_are_not_tracked(backend: Backend) -> None:
    x = torch.ones(5, device=backend.device, requires_grad=True)
    assert not reduce([x], "norm").requires_grad


def test_distant_frame(backend: Backend) -> None:
    arena, frame = distant_frame(backend, MIB)
    arena[frame * MIB :][:4000].view(torch.float32).fill_(0.5)
    paged = Paged(arena, np.array([frame], np.int32), MIB, torch.float32, 1000)
    view = arena[frame * MIB :][:4000]
    holder = Held(paged, None, [view])  # type: ignore[arg-type]
    assert run(backend, reduce, [holder], "sum").item() == 500


def test_hand_made(backend: Backend) -> None:
    x = torch.zeros(2050)
    x[[0, 1024, 2049]] = torch.tensor([3.0, -4.0, 12.0])
    paged = [held(x, backend, [5, 0, 2])]
    assert run(backend, reduce, paged, "sum").tolist() == [11]
    assert run(backend, reduce, paged, "norm").tolist() == [13]
    assert run(backend, reduce, paged, "norm", 1.0).tolist() == [19]
    assert run(backend, reduce, paged, "amax").tolist() == [12]
    assert run(backend, reduce, paged, "amin").tolist() == [-4]


@pytest.mark.parametrize(
    ("operands", "how", "message"),
    [
        ([torch.ones(2)], "median", "how is 'median'; use one of sum, mean, norm"),
        ([torch.ones(2), torch.ones(2).int()], "sum", "operand 1 is torch.int32; this takes"),
        ([torch.ones(2), torch.ones(2).to("meta")], "sum", "operand 1 is on meta, operand 0 on"),
        ([torch.ones(4, 4).t()[:2]], "sum", "stride"),
        ([Paged(torch.zeros(8192, dtype=torch.uint8), np.array([2], np.int32), 4096,
                torch.float32, 9)], "norm", "page 0 is in frame 2, but the arena has 2 frames"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(backend: Backend, operands: list, how: str, message: str) -> None:
    if backend.name == "cuda":
        pytest.skip("the arguments are on the CPU")
    with pytest.raises(ValueError, match=message):
        run(backend, reduce, [Held(x, None, []) for x in operands], how)  # type: ignore[arg-type]


@pytest.mark.gpu
def test_a_launch_does_not_wait() -> None:
    x = [torch.ones(100_000, device="cuda"), torch.ones(7, device="cuda").bfloat16()]
    reduce(x, "norm")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = [reduce(x, how) for how in (*HOWS, "isfinite")]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert results[0].tolist() == [100_000, 7]
