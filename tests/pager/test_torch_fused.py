"""``fused=True`` on the CPU gives the bits of PyTorch's fused kernels, at once and in parts."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import tensorpager as tp
from tensorpager.pager.debug.chaos import chaos, scattered
from tensorpager.pager.debug.check import check_invariants
from tensorpager.pager.optim import torch_fused
from tensorpager.pager.tensor.new_pages import empty_like_geometry

from .models import PAGE_BYTES, World, assert_same, compare_runs, make_pager, mlp, plain, train

pytestmark = pytest.mark.usefixtures("one_thread")

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
FRAMES = 16
LANES: dict[str, Callable[[tp.Pager], Any]] = {
    "plain": lambda pager: nullcontext(),
    "scattered": scattered,
    "chaos": chaos,
}
KINDS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda p, **k: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, **k),
    "adamw-amsgrad-maximize": lambda p, **k: torch.optim.AdamW(
        p, lr=1e-2, amsgrad=True, maximize=True, **k
    ),
    "adam": lambda p, **k: torch.optim.Adam(p, lr=torch.tensor(1e-2), weight_decay=0.1, **k),
    "sgd": lambda p, **k: torch.optim.SGD(p, lr=0.1, weight_decay=0.1, **k),
    "sgd-momentum": lambda p, **k: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, **k),
    "adagrad": lambda p, **k: torch.optim.Adagrad(
        p, lr=0.1, lr_decay=0.1, weight_decay=0.1, maximize=True, **k
    ),
}


def _sizes(kind: str, dtype: torch.dtype) -> list[int]:
    """A page and a bit, what is in one page, and more than the arena holds: with gradient and state
    for Adagrad, which makes that in its constructor, as dense memory."""
    page = PAGE_BYTES // dtype.itemsize
    large = FRAMES // 2 if kind == "adagrad" else FRAMES
    return [page + 37, 100, 1, large * page + 1037]


def _values(step: int, number: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + number)
    return torch.randn(size, generator=generator).to(dtype)


def _paged(pager: tp.Pager, values: torch.Tensor) -> torch.Tensor:
    paged = empty_like_geometry(pager.core, values.to("meta"), "user")
    paged.copy_(values)
    return paged


def _run(
    pager: tp.Pager | None, kind: str, dtype: torch.dtype, sizes: list[int], steps: int = 3
) -> Any:
    """Parameters, gradients and states after some steps with gradients that are given."""
    put = (lambda values: values) if pager is None else (lambda values: _paged(pager, values))
    parameters = [put(_values(0, i, size, dtype)).requires_grad_() for i, size in enumerate(sizes)]
    optimizer = KINDS[kind](parameters, fused=True)
    if pager is not None:
        pager.optimizer(optimizer)
    for step in range(1, steps + 1):
        for i, parameter in enumerate(parameters):
            parameter.grad = put(_values(step, i, parameter.numel(), dtype))
        optimizer.step()
    states = [dict(optimizer.state[p]) for p in parameters]
    results = [parameters, [p.grad for p in parameters], states]
    with torch.no_grad():
        return [plain(result) for result in results] if pager is not None else results


def _known() -> list[Any]:
    """In 16 bits the momentum of PyTorch's SGD differs from call to call; it is refused."""
    return [
        (kind, dtype)
        for kind in KINDS
        for dtype in (FP32, FP64, BF16, FP16)
        if kind != "sgd-momentum" or dtype in (FP32, FP64)
    ]


def _cases() -> Iterator[Any]:
    for kind, dtype in _known():
        for lane in LANES:
            quick = (kind, dtype, lane) in (
                ("adamw", FP32, "plain"),
                ("adamw-amsgrad-maximize", BF16, "scattered"),
                ("sgd-momentum", FP32, "scattered"),
                ("adagrad", FP32, "plain"),
            )
            marks = () if quick else pytest.mark.slow
            name = f"{kind}-{str(dtype).removeprefix('torch.')}-{lane}"
            yield pytest.param(kind, dtype, lane, marks=marks, id=name)


@pytest.mark.parametrize(("kind", "dtype", "lane"), list(_cases()))
def test_bits_are_those_of_fused(kind: str, dtype: torch.dtype, lane: str) -> None:
    torch.set_num_threads(2)
    sizes = _sizes(kind, dtype)
    expected = _run(None, kind, dtype, sizes)
    with make_pager(frames=FRAMES) as pager:
        with pager.iteration():
            pass
        with LANES[lane](pager.core):
            assert_same(_run(pager, kind, dtype, sizes), expected)
        assert pager.core.residency.pinned_pages() == 0
        check_invariants(pager.core)


@pytest.mark.parametrize(
    ("kind", "frames"),
    [
        ("adamw", 20),
        pytest.param("adamw", 48, marks=pytest.mark.slow),
        pytest.param("adamw", 400, marks=pytest.mark.slow),
        pytest.param("sgd-momentum", 20, marks=pytest.mark.slow),
        pytest.param("sgd-momentum", 400, marks=pytest.mark.slow),
    ],
)
def test_training(kind: str, frames: int) -> None:
    """From the first, metered iteration on; where everything fits, and where nothing does."""

    def script(world: World) -> object:
        model = world.module(mlp(depth=2))
        optimizer = world.optimizer(KINDS[kind](model.parameters(), fused=True))
        return train(world, model, optimizer, 3), model, optimizer

    with make_pager(frames=frames) as pager:
        compare_runs(script, World(pager), must_move=frames == 20)


@pytest.mark.parametrize(
    "kind",
    [
        "adamw",
        pytest.param("sgd-momentum", marks=pytest.mark.slow),
        pytest.param("adagrad", marks=pytest.mark.slow),
    ],
)
def test_grad_scaler(kind: str) -> None:
    """The kernel divides the gradients, in place; a step with an infinite one is left out."""

    def script(world: World) -> object:
        torch.manual_seed(1)
        sizes = _sizes(kind, FP32)
        put = (lambda x: x) if world.pager is None else (lambda x: _paged(world.pager, x))
        parameters = [put(_values(0, i, n, FP32)).requires_grad_() for i, n in enumerate(sizes)]
        optimizer = world.optimizer(KINDS[kind](parameters, fused=True))
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
        grads = []
        for step in range(1, 5):
            scaler.scale(torch.zeros(()))  # as a backward pass begins
            for i, parameter in enumerate(parameters):
                grad = _values(step, i, sizes[i], FP32)
                if step == 3 and i == 3:
                    grad[-1] = float("inf")
                parameter.grad = put(grad)
            scaler.step(optimizer)
            scaler.update()
            if step != 3:
                grads += [p.grad.clone() for p in parameters]
        states = [dict(optimizer.state[p]) for p in parameters]
        return [p.detach() for p in parameters], grads, states, scaler.state_dict()

    with make_pager(frames=FRAMES) as pager:
        with pager.iteration():
            pass
        with torch.no_grad():
            assert_same(plain(script(World(pager))), plain(script(World())))


@pytest.mark.parametrize(("kind", "dtype"), _known(), ids=str)
def test_where_a_tensor_may_be_cut(kind: str, dtype: torch.dtype) -> None:
    """PyTorch's kernels themselves: at ends of cache lines, whatever the number of threads."""
    choose = random.Random(3)
    unit = 64 // dtype.itemsize
    for threads in (1, 2, 3, 4):
        torch.set_num_threads(threads)
        count = choose.randint(20_000, 40_000)
        parameter = _values(0, 0, 1, dtype).requires_grad_()
        optimizer = KINDS[kind]([parameter], fused=True)
        group, step = optimizer.param_groups[0], torch.tensor(3.0)
        names = 3 if group.get("amsgrad") else 2 if "betas" in group else 1
        states = names if kind != "sgd" else 0
        whole = [_values(1, i, count, dtype).abs() for i in range(2 + states)]
        parts = [x.clone() for x in whole]
        how = {"step": step, "fresh": False, "grad_scale": torch.tensor(4.0), "found_inf": None}
        torch_fused.update(type(optimizer), group, whole, **how)
        start = 0
        while start < count:
            stop = start + unit * choose.randint(1, 150)
            views = [x[start:stop] for x in parts]
            torch_fused.update(type(optimizer), group, views, **how)
            start = stop
        assert_same(parts, whole)


# -- refusals ------------------------------------------------------------------------------------
class MyAdamW(torch.optim.AdamW):
    """A class that is not known in parts."""


def test_what_is_too_large_in_one_piece_is_refused() -> None:
    with make_pager(frames=FRAMES) as pager:
        small = [_paged(pager, torch.ones(100)).requires_grad_()]
        large = [_paged(pager, torch.ones(_sizes("adamw", FP32)[-1])).requires_grad_()]
        pager.optimizer(MyAdamW(small, fused=True))
        pager.optimizer(MyAdamW(large, fused=False))
        with pytest.raises(ValueError, match=r"MyAdamW.*parameter 0 of group 0.*fused=False"):
            pager.optimizer(MyAdamW(large, fused=True))


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_momentum_in_sixteen_bits_is_refused(dtype: torch.dtype) -> None:
    with make_pager() as pager:
        model = pager.page_module(nn.Linear(100, 100).to(dtype))
        wrong = torch.optim.SGD(model.parameters(), momentum=0.9, fused=True)
        with pytest.raises(ValueError, match=r"wrong momentum for 16-bit.*fused=False"):
            pager.optimizer(wrong)
        assert type(wrong) is torch.optim.SGD
        pager.optimizer(torch.optim.SGD(model.parameters(), momentum=0.9, fused=False))
        later = pager.optimizer(torch.optim.SGD(model.parameters(), fused=True))
        later.param_groups[0]["momentum"] = 0.5
        with pytest.raises(ValueError, match="fused=False"):
            later.step()


@pytest.mark.parametrize("kind", ["adamw", "adagrad"])
def test_made_before_the_model_is_paged(kind: str, one_thread: None) -> None:
    def train(pager: tp.Pager | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        world, model = World(pager), mlp()
        optimizer = KINDS[kind](model.parameters(), fused=True)
        world.module(model)
        world.optimizer(optimizer)
        for step in range(2):
            with world.iteration():
                model(torch.full((4, 128), step + 0.5)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return [p.detach().to_dense() for p in model.parameters()]

    with make_pager(fits=True) as pager:
        found = train(pager)
    assert all(torch.equal(a, b) for a, b in zip(found, train(None), strict=True))
