"""Steps that the host takes on pages in host memory: the same bits, and nothing seen too early."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import tensorpager as tp
from tensorpager.pager.debug.chaos import chaos
from tensorpager.pager.debug.check import check_invariants
from tensorpager.pager.errors import PagerError
from tensorpager.pager.optim import host_steps

from .models import (
    PAGE_BYTES,
    SEED,
    World,
    assert_same,
    compare_runs,
    loss_of,
    make_pager,
    mlp,
    train,
)
from .models import plain as plain_of
from .test_planned import PlannedWorld, planned_pager

OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "adamw-amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-3, amsgrad=True, maximize=True),
    "adam-l2": lambda p: torch.optim.Adam(p, lr=1e-3, weight_decay=0.1),
    "adam-lr-tensor": lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-3)),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01),
    "sgd-nesterov": lambda p: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, maximize=True
    ),
}


class HostWorld(World):
    """Its optimizers have the host step what it can."""

    def optimizer(self, optimizer: torch.optim.Optimizer, **options: Any) -> torch.optim.Optimizer:
        return super().optimizer(optimizer, host_step=True, **options)


def training(make: Any = OPTIMIZERS["adamw"], steps: int = 6, **options: Any) -> Any:
    """Accumulation, clipping and a schedule."""

    def script(world: World) -> object:
        model = world.module(mlp(**options))
        optimizer = world.optimizer(make(model.parameters()))
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        losses = []
        for _ in range(steps):
            with world.iteration():
                for _ in range(2):
                    loss = loss_of(model)
                    loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            schedule.step()
            losses.append(loss.item())
        return losses, model, optimizer

    return script


@pytest.mark.parametrize("kind", list(OPTIMIZERS))
def test_the_same_bits(one_thread, kind: str) -> None:
    with make_pager(verify=True) as pager:
        compare_runs(training(OPTIMIZERS[kind]), HostWorld(pager))
        stats = pager.stats()
        assert stats["host_steps"] >= 5 * 2, pager.core.host_steps.left
        assert stats["host_step_bytes"] > 0 < stats["host_step_us"]


def test_over_all_cores() -> None:
    with make_pager(frames=200) as pager:
        compare_runs(training(width=1024, steps=3), HostWorld(pager))
        assert pager.stats()["host_steps"] > 0, pager.core.host_steps.left


def test_under_chaos(one_thread) -> None:
    with make_pager(frames=40) as pager, chaos(pager.core):
        compare_runs(training(steps=4), HostWorld(pager))
        assert pager.stats()["host_steps"] > 0


# -- by plans --------------------------------------------------------------------------------------
@pytest.mark.parametrize("policy", ["lp", "joint"])
def test_by_a_plan(one_thread, policy: str) -> None:
    class Planned(HostWorld, PlannedWorld):
        pass

    with planned_pager(policy=policy, frames=40) as pager:
        compare_runs(training(steps=10, depth=6), Planned(pager))
        stats = pager.stats()
        assert stats["planned_iterations"] > 0, pager.explain()
        assert stats["host_steps"] >= 9 * 6, pager.core.host_steps.left
        plan = pager.core.follower.current.compiled.plan
        assert len(plan.host_steps) == (6 if policy == "joint" else 0)
        if policy == "joint":
            assert stats["departures"] == 0


# -- while they run --------------------------------------------------------------------------------
@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The host's steps wait until it is set."""
    event, run = threading.Event(), host_steps._Step.run

    def gated(self: Any, after: Any) -> Any:
        assert event.wait(60)
        return run(self, after)

    monkeypatch.setattr(host_steps._Step, "run", gated)
    yield event
    event.set()


def prepared(pager: tp.Pager) -> tuple[nn.Module, Any, nn.Module, Any]:
    """A model and its twin without pages, after three steps; gradients for a fourth are there."""
    torch.manual_seed(0)
    model, twin = mlp(), mlp()
    twin.load_state_dict(model.state_dict())
    model = pager.page_module(model)
    optimizer = pager.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), host_step=True)
    plain = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    inputs = torch.randn(64, 128)
    for number in range(4):
        for which, stepping in ((model, optimizer), (twin, plain)):
            context = pager.iteration() if which is model and number < 3 else nullcontext()
            with context:
                which(inputs).square().mean().backward()
                if number < 3:
                    stepping.step()
                    stepping.zero_grad()
    return model, optimizer, twin, plain


@pytest.mark.filterwarnings("ignore:a training step outside")
@pytest.mark.parametrize("how", ["forward", "state_dict", "save", "optimizer", "close"])
def test_step_returns_at_once_and_whoever_reads_waits(one_thread, gate, tmp_path, how: str) -> None:
    gate.set()
    with make_pager() as pager:
        model, optimizer, twin, plain = prepared(pager)
        gate.clear()
        before = pager.stats()["host_steps"]
        optimizer.step()
        plain.step()
        assert pager.stats()["host_steps"] > before
        assert pager.core.mover.tickets.any  # it is not done
        optimizer.zero_grad()
        threading.Timer(0.2, gate.set).start()
        if how == "forward":
            inputs = torch.randn(64, 128)
            assert torch.equal(model(inputs).detach(), twin(inputs).detach())
        elif how == "state_dict":
            assert_same(plain_of(model.state_dict()), plain_of(twin.state_dict()))
        elif how == "optimizer":
            mine, others = (o.state_dict()["state"] for o in (optimizer, plain))
            assert_same(plain_of(mine), plain_of(others))
        elif how == "save":
            pager.save(tmp_path / "all.pt")
            saved = torch.load(tmp_path / "all.pt")
            assert_same(saved["models"][0], dict(twin.state_dict()))
            assert_same(saved["optimizers"][0]["state"], plain.state_dict()["state"])
        if how != "close":
            assert gate.is_set()
            check_invariants(pager.core)


def test_a_step_that_fails_is_told_by_whoever_waits_for_it(one_thread, monkeypatch) -> None:
    with make_pager() as pager:
        model, optimizer, _, _ = prepared(pager)

        def fails(self: Any, after: Any) -> Any:
            raise MemoryError("of the test")

        monkeypatch.setattr(host_steps._Step, "run", fails)
        with pager.iteration():
            model(torch.randn(64, 128)).square().mean().backward()
            optimizer.step()
        for _ in range(2):  # it does not pass with being told once
            with pytest.raises(PagerError, match="on the host failed"), pager.iteration():
                model(torch.randn(64, 128))


@pytest.mark.parametrize("pages", [4, 12, 20, 30])
def test_a_host_that_is_short_of_slots_leaves_steps_to_the_device(
    one_thread, tmp_path, pages: int
) -> None:
    budgets = {"host_budget": pages * PAGE_BYTES, "disk_budget": "32MiB", "disk_path": tmp_path}
    with make_pager(**budgets) as pager:
        compare_runs(training(steps=4), HostWorld(pager))
        stats = pager.stats()
        assert stats["peak_bytes"]["host"] <= stats["budget_bytes"]["host"]
        assert pager.core.host_steps.left


def test_updates_in_backward(one_thread) -> None:
    def script(world: World) -> object:
        model = world.module(mlp(depth=5))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        if world.pager is not None:
            world.pager.optimizer(optimizer, overlap=True, host_step=True)
        return train(world, model, optimizer, 6), model, optimizer

    with make_pager() as pager:
        compare_runs(script, HostWorld(pager))
        assert pager.stats()["overlap_updates"] > 0
        assert pager.stats()["host_steps"] >= 5 * 4, pager.core.host_steps.left


@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler(one_thread, fused: bool) -> None:
    def script(world: World) -> object:
        model = world.module(mlp())
        optimizer = world.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**7, growth_interval=2)
        for number in range(5):
            with world.iteration():
                loss = loss_of(model) * (math.inf if number == 3 else 1.0)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        return model, optimizer, scaler.get_scale()

    with make_pager() as pager:
        compare_runs(script, HostWorld(pager))
        assert (pager.stats()["host_steps"] > 0) != fused
        if fused:
            assert "GradScaler" in str(pager.core.host_steps.left)


def test_an_exception_after_step_undoes_nothing(one_thread) -> None:
    def script(world: World) -> object:
        model = world.module(mlp())
        optimizer = world.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
        for number in range(6):
            try:
                with world.iteration():
                    loss_of(model).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    if number % 2:
                        raise KeyError(number)
            except KeyError:
                pass
        return model, optimizer

    with make_pager() as pager:
        compare_runs(script, HostWorld(pager))
        assert pager.stats()["host_steps"] > 0


def test_while_values_are_saved_beside_the_training_steps_are_the_devices(one_thread) -> None:
    """What saves is told before a page is written; of a step of the host nobody would tell it."""
    with make_pager() as pager:
        pager.core.before_write = lambda runs: None
        compare_runs(training(steps=3), HostWorld(pager))
        assert pager.stats()["host_steps"] == 0
        assert "saved beside" in str(pager.core.host_steps.left)


def test_what_the_device_is_left_with(one_thread) -> None:
    """Where all fits, in the first iteration, and where nobody asked for it."""
    with make_pager(fits=True) as pager:
        compare_runs(training(steps=3), HostWorld(pager), must_move=False)
        assert pager.stats()["host_steps"] == 0
    with make_pager() as pager:
        compare_runs(training(steps=3), World(pager))
        assert pager.stats()["host_steps"] == 0
    with make_pager() as pager, pytest.raises(ValueError, match="host_step='often'; choose"):
        pager.optimizer(torch.optim.SGD(mlp().parameters(), lr=1.0), host_step="often")


# -- all at once -----------------------------------------------------------------------------------
class Deep(nn.Module):
    """Blocks with dropout, whose parameters and activations take about as much as each other."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual() for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(128), nn.Dropout(0.1)
        self.wide, self.narrow = nn.Linear(128, 512), nn.Linear(512, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.narrow(nn.functional.gelu(self.wide(self.norm(x)))))


def deep_training(count: int) -> Any:
    def script(world: World) -> object:
        model = world.module(Deep())
        optimizer = world.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
        losses = []
        for _ in range(count):
            with world.iteration():
                for _ in range(2):
                    loss = model(torch.randn(512, 128)).square().mean()
                    loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        return losses, model, optimizer

    return script


@pytest.mark.slow
@pytest.mark.parametrize("hosted", [False, True, "auto"])
@pytest.mark.parametrize("share", [0.5, 0.35])
def test_fifty_steps_with_dropout_accumulation_and_clipping(
    one_thread, monkeypatch, share: float, hosted: bool | str
) -> None:
    """Over a slow link, blocks run again, with and without the host's steps."""
    with make_pager(fits=True) as pager:
        torch.manual_seed(SEED)
        deep_training(2)(World(pager))
        needed = pager.stats()["needed_bytes"]
    rate = 50e6  # bytes per second: an iteration of moves alone takes some 2 s

    class Planned(PlannedWorld):
        def optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
            if self.pager is None:
                return optimizer
            return self.pager.optimizer(optimizer, host_step=hosted)

    budget = {"device_budget": int(share * needed), "dense_reserve": "auto"}
    with planned_pager(policy="joint", **budget) as pager:
        backend = pager.core.backend
        copy = backend.copy

        def slowly(copies: Any, lane: str, after: Any, *, to_device: bool) -> Any:
            time.sleep(sum(len(each.host) for each in copies) / rate)
            return copy(copies, lane, after, to_device=to_device)

        follower = pager.core.follower
        assert follower is not None
        machine = follower.hardware

        def with_slow_link() -> Any:
            return machine().with_(d2h_bytes_per_s=rate, h2d_bytes_per_s=rate)

        monkeypatch.setattr(backend, "copy", slowly)
        monkeypatch.setattr(follower, "hardware", with_slow_link)
        compare_runs(deep_training(50), Planned(pager))
        stats = pager.stats()
        assert stats["planned_iterations"] > 20, pager.explain()
        assert stats["reruns"] > 0, pager.explain()
        assert (stats["host_steps"] > 0) is bool(hosted), pager.core.host_steps.left
        for tier, peak in stats["peak_bytes"].items():
            assert peak <= stats["budget_bytes"][tier], tier
