"""Training on scattered frames: no dense copies of gradients, of states, or for an update."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tensorpager as tp

from .models import World, assert_same, batch, mlp, plain
from .page_ops_suite import (
    U,
    named,
    scattered_pager,
)

pytestmark = pytest.mark.usefixtures("one_thread")


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
            before = world.pager.core.gathers if world.pager else 0
            if clip is not None:
                seen.append(nn.utils.clip_grad_norm_(model.parameters(), clip).item())
            optimizer.step()
            gathers.append(world.pager.core.gathers - before if world.pager else 0)
            optimizer.zero_grad()
    return seen, [model, optimizer], gathers


@contextmanager
def gathered_kinds(pager: tp.Pager, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Kinds of the runs of which dense copies are made."""
    kinds: list[str] = []
    gather = pager.core.gather
    monkeypatch.setattr(pager.core, "gather", lambda run: (kinds.append(run.kind), gather(run))[1])
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
                    before = world.pager.core.gathers if world.pager else 0
                    optimizer.step()
                    counts.append(world.pager.core.gathers - before if world.pager else 0)
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
                before = world.pager.core.gathers if world.pager else 0
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_value_(model.parameters(), 1e-3)
                scaler.step(optimizer)
                scaler.update()
                assert world.pager is None or world.pager.core.gathers == before
                optimizer.zero_grad()
            losses.append(loss.item())
        return losses, plain(model), scaler.get_scale()

    with scattered_pager(frames=24) as pager:
        torch.manual_seed(5)
        expected = script(World())
        torch.manual_seed(5)
        assert_same(plain(script(World(pager))), plain(expected))
