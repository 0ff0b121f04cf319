"""Small models, and *scripts*: functions that train one, plain or paged, on the same lines."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import tensorpager as tp
from tensorpager.pager.debug.check import check_invariants
from tensorpager.pager.tensor.names import named_models
from tensorpager.pager.tensor.paged_tensor import dense_twin
from tensorpager.pager.tensor.segments import repeated

SEED = 7
PAGE_BYTES = 64 << 10
FRAMES = 20  # an AdamW step of a 256 × 256 matrix touches 4 tensors of 4 pages
RESERVE_BYTES = 32 << 20


def make_pager(*, fits: bool = False, frames: int = FRAMES, **options: Any) -> tp.Pager:
    """A pager of ``frames`` frames beside plenty of dense memory; ``fits``: room for everything."""
    if fits:
        limits: dict[str, Any] = {"device_budget": "256MiB"}
    else:
        budget = RESERVE_BYTES + frames * options.get("page_size", PAGE_BYTES)
        limits = {"device_budget": budget, "dense_reserve": RESERVE_BYTES}
    limits |= {"host_budget": "64MiB", "page_size": PAGE_BYTES, "device": "cpu", "policy": "lru"}
    return tp.Pager(**(limits | options))


def know_that_all_fits(pager: tp.Pager) -> None:
    """As after a metered iteration in a budget with room to spare; new shapes are not metered."""
    with pager.iteration():
        (pager.page(torch.ones(8)).requires_grad_() * 2).sum().backward()
    pager.core.saved.dense_allowance = 64 << 20
    pager.core.residency.resize(128 << 20 >> 16)
    pager.core.budget.reserve = 128 << 20
    pager.core.profile_run.note_shapes = lambda *args: None  # type: ignore[method-assign]
    assert pager.core.fits


class World:
    """Where a script runs: ``pager`` is None in the plain world. Both have the same methods."""

    def __init__(self, pager: tp.Pager | None = None) -> None:
        self.pager = pager

    def module(self, module: nn.Module) -> nn.Module:
        return module if self.pager is None else self.pager.page_module(module)

    def optimizer(self, optimizer: torch.optim.Optimizer, **options: Any) -> torch.optim.Optimizer:
        return optimizer if self.pager is None else self.pager.optimizer(optimizer, **options)

    def page(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.pager is None else self.pager.page(tensor)

    @contextmanager
    def iteration(self) -> Iterator[None]:
        if self.pager is None:
            yield
            return
        with self.pager.iteration():
            yield
        check_invariants(self.pager.core)


Script = Callable[[World], Any]


def compare_runs(script: Script, world: World, *, must_move: bool = True) -> None:
    """``script`` gives the same bits in the plain world and in ``world``; there pages have moved if
    they must, and none is live at the end."""
    assert world.pager is not None
    torch.manual_seed(SEED)
    expected = plain(script(World()))
    torch.manual_seed(SEED)
    result = plain(script(world))
    check_invariants(world.pager.core)
    assert_same(result, expected)
    stats = world.pager.stats()
    if must_move:
        assert stats["faults"] > 0, "the budget was not tight: no page was brought back"
        assert stats["bytes_out"] > 0, "the budget was not tight: no page left the device"
    assert live_pages(world.pager) == 0, "the script is over and pages are still live"


def live_pages(pager: tp.Pager) -> int:
    gc.collect()
    with pager.core.lock:
        pager.core.residency.collect()
    return pager.core.space.live_pages


def plain(value: Any) -> Any:
    """Modules and optimizers as state dicts with gradients, PagedTensors as plain tensors."""
    if isinstance(value, nn.Module):
        gradients = {name: p.grad for name, p in value.named_parameters()}
        return plain({"state": value.state_dict(), "gradients": gradients})
    if isinstance(value, torch.optim.Optimizer):
        return plain(value.state_dict())
    if isinstance(value, tp.PagedTensor):
        return dense_twin(value).detach()
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def assert_same(result: Any, expected: Any, where: str = "result") -> None:
    """The same structure, and the same bits in every tensor (any NaN equals any NaN)."""
    if isinstance(expected, torch.Tensor):
        assert isinstance(result, torch.Tensor), where
        assert (result.shape, result.dtype) == (expected.shape, expected.dtype), where
        if torch.equal(result, expected):
            return
        torch.testing.assert_close(
            result, expected, rtol=0, atol=0, equal_nan=True, msg=lambda text: f"{where}: {text}"
        )
    elif isinstance(expected, dict):
        assert result.keys() == expected.keys(), where
        for key in expected:
            assert_same(result[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, list):
        assert len(result) == len(expected), where
        for index, item in enumerate(expected):
            assert_same(result[index], item, f"{where}[{index}]")
    else:
        assert result == expected, where


def mlp(width: int = 256, depth: int = 3) -> nn.Sequential:
    """``[batch, 128]`` to ``[batch, 10]``; each matrix in the middle takes 4 pages."""
    layers: list[nn.Module] = [nn.Linear(128, width), nn.GELU()]
    for _ in range(depth - 1):
        layers += [nn.Linear(width, width), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def batch(size: int = 64, features: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, features), torch.randint(10, (size,))


def loss_of(model: nn.Module, size: int = 64) -> torch.Tensor:
    inputs, labels = batch(size)
    return F.cross_entropy(model(inputs), labels)


class ByAddress(torch.autograd.Function):
    """Squares, as by somebody's kernel: what it has saved it reads where it lies."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        values = (ctypes.c_float * x.numel()).from_address(x.data_ptr())
        return 2 * torch.frombuffer(values, dtype=torch.float32).view(x.shape) * grad


def train(
    world: World, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4
) -> list[float]:
    """``steps`` iterations; the losses."""
    losses = []
    for _ in range(steps):
        with world.iteration():
            loss = loss_of(model)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def beside_a_model(script: Script) -> Script:
    """``script`` with a model trained before and after it, whose pages press its own out."""

    def pressed(world: World) -> Any:
        model = world.module(mlp())
        optimizer = world.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        train(world, model, optimizer, 1)
        result = script(world)
        return result, train(world, model, optimizer, 1)

    return pressed


def run_again(core: Any) -> None:
    """From now on all blocks run again in each iteration, whatever that promises."""
    follower = core.follower

    def choose(expected: Any, log: Any) -> Any:
        models = named_models(core)
        log.again = frozenset(path for at, model in models for path, _ in repeated(model, at))
        follower.segments.begin(log.again)
        return expected

    follower._choose = choose
