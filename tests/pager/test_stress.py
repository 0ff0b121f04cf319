"""Random small models under random budgets, with delays in every channel: no hang, no difference.

A few of them in each run of the tests; ``--full`` runs 500 iterations.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tensorpager.pager.transfers import Transfer

from .models import World, compare_runs, make_pager
from .test_planned import PlannedWorld

ITERATIONS = 10
SEEDS = 50 if os.environ.get("TENSORPAGER_FULL") else 2
LONGEST_DELAY_SECONDS = 0.02


@pytest.fixture
def slow_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each transfer may take long, at random, before and after its bytes move."""
    run = Transfer.run
    chance = random.Random(5)

    def delayed(self: Transfer) -> None:
        time.sleep(chance.choice((0, 0, chance.random())) * LONGEST_DELAY_SECONDS)
        run(self)
        time.sleep(chance.choice((0, 0, chance.random())) * LONGEST_DELAY_SECONDS)

    monkeypatch.setattr(Transfer, "run", delayed)


class Branching(nn.Module):
    """Layers of random widths; one of them is sometimes left out."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        widths = [chance.choice((64, 128, 256, 384)) for _ in range(chance.randint(3, 7))]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))
        self.square = nn.ModuleList(nn.Linear(w, w) for w in widths[1:])

    def forward(self, inputs: torch.Tensor, skip: int) -> torch.Tensor:
        for index, (layer, square) in enumerate(zip(self.layers, self.square)):
            inputs = F.gelu(layer(inputs))
            if index != skip:
                inputs = inputs + torch.tanh(square(inputs))
        return inputs.square().mean()


def script_of(seed: int) -> Any:
    def script(world: World) -> object:
        chance = random.Random(seed)
        model = world.module(Branching(chance))
        width = model.layers[0].in_features
        kind = chance.choice((torch.optim.AdamW, torch.optim.Adam, torch.optim.RMSprop))
        optimizer = world.optimizer(kind(model.parameters(), lr=1e-3))
        batch = chance.choice((16, 64, 200))
        losses = []
        for _ in range(ITERATIONS):
            what = chance.random()
            skip = 0 if what < 0.15 else -1
            rows = batch // 2 if 0.15 < what < 0.25 else batch
            with world.iteration():
                loss = model(torch.randn(rows, width), skip)
                loss.backward()
                if not 0.25 < what < 0.35:  # accumulate
                    optimizer.step()
                    optimizer.zero_grad()
            losses.append(loss.item())
            if what > 0.9:
                with torch.no_grad(), world.iteration():
                    losses.append(model(torch.randn(rows, width), -1).item())
        return losses, model, optimizer

    return script


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_training(one_thread, slow_channels, tmp_path, seed: int) -> None:
    chance = random.Random(1000 + seed)
    page = chance.choice((64, 64, 128)) << 10
    frames = chance.randint(44, 70) * (64 << 10) // page
    host, disk = chance.choice((("64MiB", 0), (0, "64MiB"), ("1MiB", "64MiB")))
    budget = (32 << 20) + frames * page
    with make_pager(
        device_budget=budget, page_size=page, host_budget=host, disk_budget=disk,
        disk_path=tmp_path, policy="lp", verify=True,
    ) as pager:  # fmt: skip
        assert pager.follower is not None
        pager.follower.most_plans = 1
        compare_runs(script_of(seed), PlannedWorld(pager), must_move=False)
