"""Ops on tensors larger than the arena run slab by slab, or are refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import tensorpager as tp
from tensorpager.pager.debug.chaos import chaos, scattered
from tensorpager.pager.debug.check import check_invariants
from tensorpager.pager.tensor.new_pages import empty_like_geometry

from .models import World, assert_same, make_pager, mlp, plain, train
from .page_ops_suite import (
    BF16,
    FLOATS,
    REDUCTIONS,
    close,
    named,
    operands,
    values,
)

pytestmark = pytest.mark.usefixtures("one_thread")


FRAMES = 8
LARGE = 4 * FRAMES * FLOATS - 1000
LANES = ("plain", "chaos")


@contextmanager
def settled_pager(frames: int) -> Iterator[tp.Pager]:
    """Its first iteration is over: the arena has ``frames`` frames for good."""
    with make_pager(frames=frames) as pager:
        with pager.iteration():
            pass
        yield pager
        assert pager.core.residency.pool.count == frames


@contextmanager
def small_pager(lane: str) -> Iterator[tp.Pager]:
    with settled_pager(FRAMES) as pager, ExitStack() as stack:
        if lane == "chaos":
            stack.enter_context(scattered(pager.core))
            stack.enter_context(chaos(pager.core))
        yield pager
        assert pager.core.residency.pinned_pages() == 0
        assert pager.core.gathers == 0
        check_invariants(pager.core)


def large(pager: tp.Pager, dense: torch.Tensor) -> tp.PagedTensor:
    paged = empty_like_geometry(pager.core, dense.to("meta"), "user")
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
# torch rounds these otherwise at the end of what a thread does than before.
LARGE_HALVES = {
    "add alpha": lambda a: a.add_(a, alpha=0.3),
    "add number": lambda a: a.add_(0.1),
    "rsqrt": lambda a: a.abs_().rsqrt_(),
}
LARGE_REDUCTIONS = ("sum", "mean", "norm", "torch.norm", "norm inf", "norm 0", "foreach norm")


@pytest.mark.parametrize("lane", [pytest.param("plain", marks=pytest.mark.slow), "chaos"])
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


@pytest.mark.parametrize("threads", [1, 2, 4], ids="{}-threads".format)
@pytest.mark.parametrize("lane", LANES)
def test_halves_larger_than_the_arena(lane: str, threads: int) -> None:
    torch.set_num_threads(threads)
    dense = values(1, BF16, (2 * LARGE + 77,))
    with small_pager(lane) as pager:
        for name, script in LARGE_HALVES.items():
            with named(name):
                expected = script(dense.clone())
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
                paged = empty_like_geometry(
                    pager.core, torch.empty(shape, device="meta"), "parameter"
                )
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
        assert pager.core.gathers == 0


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_matrices_are_joined_one_after_the_other(dim: int) -> None:
    """They fit one by one, and do not fit together."""
    raw = [values(seed, shape=(FLOATS // 16, 48)) for seed in range(4)]
    with settled_pager(4) as pager:
        paged = [pager.page(t) for t in raw]
        assert torch.equal(torch.cat(paged, dim), torch.cat(raw, dim))
        assert torch.equal(torch.cat([paged[0], raw[1]], dim), torch.cat(raw[:2], dim))
        for odd in (raw[1].double(), raw[1][:3, :5]):
            with pytest.raises((tp.InfeasibleBudget, RuntimeError)):
                torch.cat([paged[0], paged[2], odd], dim)


def test_what_cannot_be_split_is_refused() -> None:
    with settled_pager(FRAMES) as pager:
        tensor = large(pager, values(1, shape=(LARGE,)))
        for script in (torch.sin, lambda t: t.sort(), lambda t: t[7:].mul_(2.0), torch.cumsum):
            with pytest.raises(tp.InfeasibleBudget):
                script(tensor, 0) if script is torch.cumsum else script(tensor)
        assert torch.equal(tensor.clone(), values(1, shape=(LARGE,)))
        assert pager.core.residency.pinned_pages() == 0


def test_a_weight_whose_mean_finds_no_room_is_named() -> None:
    """Its bits are not PyTorch's then."""
    with settled_pager(FRAMES) as pager:
        model = nn.Linear(1, LARGE, bias=False)
        pager.page_module(model)
        assert pager.stats()["streamed"] == []
        with torch.no_grad():
            model.weight.mul_(2.0)  # the same bits either way
            assert pager.stats()["streamed"] == []
            model.weight.mean()
        assert pager.stats()["streamed"] == ["weight"]
        assert "sums over them" in pager.explain()
        passing = empty_like_geometry(pager.core, torch.empty(LARGE, device="meta"), "activation")
        passing.fill_(1.0)
        assert passing.sum() == LARGE
        del passing
        assert pager.stats()["streamed"] == [f"activation of {4 * LARGE} bytes", "weight"]


def test_a_metered_iteration_that_writes_more_than_the_budget_holds() -> None:
    """A tensor that fits in no budget is walked, so its size is not what the iteration needs."""
    with make_pager(frames=FRAMES, host_budget="128MiB") as pager:
        model = pager.page_module(mlp(width=32, depth=1))
        huge = empty_like_geometry(pager.core, torch.empty(9 << 20, device="meta"), "user")
        optimizer = pager.optimizer(torch.optim.AdamW(model.parameters()))
        with pager.iteration():
            assert pager.core.budget.metering
            huge.fill_(2.0)
            assert huge.mul_(0.5).mean() == 1.0
        train(World(pager), model, optimizer, 2)
        assert pager.core.residency.largest_need <= FRAMES
        assert huge.sum() == huge.numel()
