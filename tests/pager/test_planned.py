"""Training that follows a plan: the same bits as without a pager, whatever the iterations do."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import tensorpager as tp
from tensorpager.pager.debug.chaos import chaos
from tensorpager.pager.devices.device import Mark
from tensorpager.pager.errors import PagerError, TierFull
from tensorpager.pager.moves.transfers import Transfer
from tensorpager.pager.plan import planning

from .models import World, compare_runs, loss_of, make_pager, mlp, train

FRAMES = 40


class PlannedWorld(World):
    """Waits for a plan after each iteration, so that the next one can follow it."""

    @contextmanager
    def iteration(self) -> Iterator[None]:
        with super().iteration():
            yield
        if self.pager is not None:
            self.pager.plan()


def planned_pager(**options: Any) -> tp.Pager:
    """One plan, the quick one, for each kind, followed whatever it promises: tests are about that,
    and on a busy machine no time means much."""
    pager = make_pager(**({"policy": "lp", "frames": FRAMES} | options))
    assert pager.core.follower is not None
    pager.core.follower.most_plans = 1
    pager.core.follower.only_if_faster = False
    return pager


def compare_planned(script: Any, pager: tp.Pager) -> dict[str, Any]:
    compare_runs(script, PlannedWorld(pager))
    stats = pager.stats()
    assert stats["planned_iterations"] > 0, pager.explain()
    return stats


TIERS = {
    "host": {},
    "disk": {"host_budget": 0, "disk_budget": "32MiB"},
    "both": {"host_budget": "1MiB", "disk_budget": "32MiB"},
}


@pytest.mark.parametrize("tiers", list(TIERS))
def test_plain_training(one_thread, tmp_path, tiers: str) -> None:
    options = {"disk_path": tmp_path, "verify": True, **TIERS[tiers]}

    def script(world: World) -> object:
        model = world.module(mlp(depth=6))
        optimizer = world.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
        return train(world, model, optimizer, 12), model, optimizer

    with planned_pager(**options) as pager:
        stats = compare_planned(script, pager)
        assert stats["prefetches"] > 0
        assert stats["departures"] == 0
        assert stats["mode"] == "planned"


def test_batches_whose_length_varies(one_thread) -> None:
    def script(world: World) -> object:
        model = world.module(mlp(depth=6))
        optimizer = world.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
        losses = []
        for size in (64, 32, 32, 64, 48, 32, 64, 16, 48, 32, 32, 64, 96, 64, 32):
            with world.iteration():
                loss = loss_of(model, size)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        return losses, model, optimizer

    with planned_pager() as pager:
        stats = compare_planned(script, pager)
    assert stats["kinds"] <= 2  # the first one makes states
    assert stats["planned_iterations"] >= 8


def everything(world: World, steps: int) -> object:
    """In eighths: the fourth has another batch shape, the fifth accumulates, those after it clip;
    each second one ends with an evaluation."""
    model = world.module(mlp(depth=6))
    optimizer = world.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    losses = []
    for step in range(steps):
        eighth = step * 8 // steps
        size = 32 if eighth == 3 else 64
        micro_batches = 3 if eighth == 4 else 1
        for _ in range(micro_batches - 1):
            with world.iteration():
                loss = loss_of(model, size) / micro_batches
                loss.backward()
            losses.append(loss.item())
        with world.iteration():
            loss = loss_of(model, size) / micro_batches
            loss.backward()
            if eighth > 4:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        if (step + 1) % (steps // 4) == 0:
            model.eval()
            with world.iteration(), torch.no_grad():
                losses.append(loss_of(model).item())
            model.train()
    return losses, model, optimizer


@pytest.mark.parametrize("steps", [24, pytest.param(56, marks=pytest.mark.slow)])
def test_everything_that_happens_in_training(one_thread, tmp_path, steps: int) -> None:
    with planned_pager(disk_path=tmp_path, **TIERS["both"]) as pager:
        stats = compare_planned(lambda world: everything(world, steps), pager)
    assert stats["kinds"] > 4
    assert stats["planned_iterations"] >= steps // 3


def test_under_chaos(one_thread) -> None:
    """Everything leaves after each op: nothing that a plan says holds, and nothing breaks."""

    def script(world: World) -> object:
        model = world.module(mlp(depth=6))
        optimizer = world.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
        losses = train(world, model, optimizer, 7)
        with world.iteration(), torch.no_grad():
            losses.append(loss_of(model).item())
        return losses, train(world, model, optimizer, 2), model, optimizer

    with planned_pager() as pager, chaos(pager.core):
        compare_planned(script, pager)


@pytest.mark.slow
def test_everything_under_chaos(one_thread) -> None:
    with planned_pager() as pager, chaos(pager.core):
        compare_planned(lambda world: everything(world, 16), pager)


@pytest.mark.slow
def test_evaluation_outside_of_iterations(one_thread) -> None:
    def script(world: World) -> object:
        model = world.module(mlp(depth=6))
        optimizer = world.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
        losses = []
        for _ in range(4):
            losses += train(world, model, optimizer, 4)
            with torch.no_grad():
                losses.append(loss_of(model).item())
        return losses, model, optimizer

    with planned_pager() as pager:
        compare_planned(script, pager)


@pytest.mark.slow
def test_a_skipped_layer_now_and_then(one_thread) -> None:
    def script(world: World) -> object:
        model = world.module(mlp(depth=6))
        optimizer = world.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
        losses = []
        for step in range(20):
            with world.iteration():
                inputs = torch.randn(64, 128)
                for index, layer in enumerate(model):
                    if step % 7 != 6 or index not in (4, 5):
                        inputs = layer(inputs)
                loss = inputs.square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        return losses, model, optimizer

    with planned_pager() as pager:
        stats = compare_planned(script, pager)
    assert stats["departures"] > 0


@pytest.mark.slow
def test_an_optimizer_that_is_replaced(one_thread) -> None:
    def script(world: World) -> object:
        model = world.module(mlp(depth=6))
        optimizer = world.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
        losses = train(world, model, optimizer, 6)
        optimizer = world.optimizer(torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9))
        return losses, train(world, model, optimizer, 8), model, optimizer

    with planned_pager() as pager:
        compare_planned(script, pager)


@pytest.mark.slow
def test_gradients_cleared_at_the_start(one_thread) -> None:
    def script(world: World) -> object:
        model = world.module(mlp(depth=6))
        optimizer = world.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
        losses = []
        for _ in range(10):
            with world.iteration():
                optimizer.zero_grad()
                loss = loss_of(model)
                loss.backward()
                optimizer.step()
            losses.append(loss.item())
        return losses, model, optimizer

    with planned_pager() as pager:
        compare_planned(script, pager)


def test_plans_follow_a_budget_that_grows(one_thread) -> None:
    model = mlp(depth=6)
    with planned_pager(host_budget="8MiB") as pager:
        model = pager.page_module(model)
        optimizer = pager.optimizer(torch.optim.AdamW(model.parameters()))
        world = PlannedWorld(pager)
        train(world, model, optimizer, 4)
        before = pager.plan()
        pager.grow(host_budget="16MiB")
        assert pager.plan() is None
        train(world, model, optimizer, 3)
        after = pager.plan()
        assert before is not None
        assert after is not None
        assert after.host_bytes > before.host_bytes


def test_peaks_stay_inside_budgets(one_thread, tmp_path) -> None:
    with planned_pager(disk_path=tmp_path, **TIERS["both"]) as pager:
        model = pager.page_module(mlp(depth=6))
        optimizer = pager.optimizer(torch.optim.AdamW(model.parameters()))
        train(PlannedWorld(pager), model, optimizer, 10)
        stats = pager.stats()
        assert stats["mode"] == "planned"
        for tier, peak in stats["peak_bytes"].items():
            assert peak <= stats["budget_bytes"][tier], tier
        assert pager.core.residency.peak_frames <= pager.core.residency.pool.count


# -- beside streams ------------------------------------------------------------------------------
def large_weight_losses(pager: tp.Pager, steps: int) -> tuple[list[float], list[int]]:
    """Six layers of a page each, and one of three times the arena. Losses, and of each iteration
    the accesses that its plan did not serve."""
    torch.manual_seed(1)
    layers = [layer for _ in range(6) for layer in (nn.Linear(128, 128), nn.GELU())]
    model = pager.page_module(nn.Sequential(*layers, nn.Linear(128, 36 * 128)))
    optimizer = pager.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    losses, faults = [], [0]
    for _ in range(steps):
        with PlannedWorld(pager).iteration():
            loss = model(torch.randn(2, 128)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        faults.append(0 if pager.core.follower is None else pager.core.follower.planned.faults)
    return losses, [after - before for before, after in itertools.pairwise(faults)]


@pytest.mark.parametrize("tiers", ["host", pytest.param("disk", marks=pytest.mark.slow)])
def test_frames_are_kept_free_for_a_stream(one_thread, tmp_path, tiers: str) -> None:
    """Plans know of streams: beside one, everything else is there when it is needed."""
    options = {"frames": 12, "disk_path": tmp_path, **TIERS[tiers]}
    with make_pager(**options) as pager:
        expected, _ = large_weight_losses(pager, 6)
    with planned_pager(**options) as pager:
        losses, faults = large_weight_losses(pager, 6)
        stats = pager.stats()
        assert stats["planned_iterations"] >= 3, pager.explain()
        assert pager.core.residency.peak_frames <= pager.core.residency.pool.count
        assert not pager.core.residency.workspaces
        plan = (
            pager.core.follower
            and pager.core.follower.current
            and pager.core.follower.current.recorded
        )
    assert losses == expected
    assert stats["departures"] == 0
    assert min(faults[3:]) == 0, "pages of others had to make way, which no plan foresaw"
    assert stats["peak_bytes"]["device"] <= stats["budget_bytes"]["device"]
    assert plan
    kinds = [kind for kind in plan.trace.tensor_kinds if kind == "workspace"]
    assert len(kinds) == plan.trace.op_names.count("stream") > 2


# -- failures ------------------------------------------------------------------------------------
def test_a_disk_that_fails_stops_the_plan(one_thread, tmp_path, monkeypatch) -> None:
    """Planned writes fail for a while: training goes on by faults, to the same bits."""
    count = itertools.count()

    def run(self: Transfer, after: Mark) -> Mark:
        if not self.urgent and not self.to_device and next(count) == 3:
            raise PagerError("the drive is gone for a moment")
        return original(self, after)

    original = Transfer.run
    monkeypatch.setattr(Transfer, "run", run)

    def script(world: World) -> object:
        model = world.module(mlp(depth=6))
        optimizer = world.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
        return train(world, model, optimizer, 12), model, optimizer

    with planned_pager(disk_path=tmp_path, **TIERS["disk"]) as pager:
        with pytest.warns(RuntimeWarning, match="planned move failed.*drive is gone"):
            compare_runs(script, PlannedWorld(pager))
        assert next(count) > 3
        assert "drive is gone" in pager.explain()


def test_tiers_that_are_full(one_thread) -> None:
    """A budget that just holds everything: planned or not, nothing overflows."""
    model = mlp(depth=6)
    with planned_pager(host_budget="9MiB") as pager:
        model = pager.page_module(model)
        optimizer = pager.optimizer(torch.optim.AdamW(model.parameters()))
        try:
            train(PlannedWorld(pager), model, optimizer, 8)
        except TierFull as error:
            pytest.fail(f"{error}")
        assert pager.stats()["peak_bytes"]["host"] <= 9 << 20


def interrupted_iteration(pager: tp.Pager, model: nn.Module) -> None:
    with pager.iteration():
        loss_of(model)
        raise KeyboardInterrupt


def test_close_in_the_middle_of_an_iteration(one_thread) -> None:
    """Threads and the planner end with the pager."""
    with planned_pager() as pager:
        model = pager.page_module(mlp(depth=6))
        optimizer = pager.optimizer(torch.optim.AdamW(model.parameters()))
        train(PlannedWorld(pager), model, optimizer, 5)
        with pytest.raises(KeyboardInterrupt):
            interrupted_iteration(pager, model)
        mover = pager.core.mover
        assert any(lane.threads for lane in mover.lanes.values())
    assert not any(lane.threads for lane in mover.lanes.values())


# -- what is said about it -----------------------------------------------------------------------
@pytest.mark.filterwarnings("default:the planner ended with an error")
def test_a_planner_that_dies(one_thread, monkeypatch) -> None:
    """The user hears of it, and nothing of the program is kept for it."""
    monkeypatch.setattr(planning, "write_request", lambda *_, **__: b"nonsense\n")

    class Mine:
        pass

    with planned_pager() as pager:
        model = pager.page_module(mlp())
        optimizer = pager.optimizer(torch.optim.AdamW(model.parameters()))

        def trained() -> weakref.ref[Mine]:
            mine = Mine()
            for _ in range(4):
                with pager.iteration():
                    loss_of(model).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                pager.plan()
            return weakref.ref(mine)

        with pytest.warns(RuntimeWarning, match="the planner ended with an error: .*not JSON"):
            mine = trained()
        assert mine() is None
        assert pager.stats()["mode"] == "demand"


def test_lru_never_plans(one_thread) -> None:
    with make_pager() as pager:
        model = pager.page_module(mlp())
        optimizer = pager.optimizer(torch.optim.AdamW(model.parameters()))
        train(World(pager), model, optimizer, 4)
        assert pager.plan() is None
        assert pager.stats()["mode"] == "demand"
        assert "lru" in pager.explain()


def test_when_everything_fits_nothing_is_planned(one_thread) -> None:
    with make_pager(fits=True, policy="lp") as pager:
        model = pager.page_module(mlp())
        optimizer = pager.optimizer(torch.optim.AdamW(model.parameters()))
        train(World(pager), model, optimizer, 4)
        assert pager.plan() is None
        assert "fits" in pager.explain()


def test_explain_names_times_and_limit(one_thread) -> None:
    with planned_pager() as pager:
        assert "no iteration" in pager.explain()
        model = pager.page_module(mlp(depth=6))
        optimizer = pager.optimizer(torch.optim.AdamW(model.parameters()))
        train(PlannedWorld(pager), model, optimizer, 20)
        text, stats = pager.explain(), pager.stats()
        plan = pager.plan()
        assert pager.core.follower is not None
        signature = pager.core.follower.current
        assert signature is not None
        latest = signature.ways.latest[True]
        said = []
        for times in ((1.0, 0.0), (1e12, 1e12)):  # of an iteration, and of its waiting
            latest.extend([type(latest[0])(*times)] * 50)
            said.append(pager.explain())
    assert "ops take less time by now" in said[0]
    assert "1000000000.0 ms of it waiting for pages" in said[1]
    assert "moves that end later than planned" in said[1]
    assert plan is not None
    assert plan.predicted is not None
    assert f"{plan.predicted.iteration_us / 1e3:.1f} ms by the plan" in text
    assert f"Measured: {stats['measured_us'] / 1e3:.1f} ms" in text
    assert "The limit is" in text
    assert "One more GiB" in text
