"""Random small models under random budgets, with delays in every channel: no hang, no difference,
and plans that are really followed.

A few of them in each run of the tests; ``--full`` runs 500 iterations.
"""

from __future__ import annotations

import faulthandler
import itertools
import math
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tensorpager.pager.devices.device import Mark
from tensorpager.pager.moves.transfers import Transfer

from .models import RESERVE_BYTES, World, compare_runs, make_pager
from .test_planned import PlannedWorld

UNRULY, CALM = 6, 4  # iterations: of any kind, then all of the same
QUICK_SEEDS = (2, 3)  # one with a host tier, one with a disk
SEEDS = range(50) if os.environ.get("TENSORPAGER_FULL") else QUICK_SEEDS
LONGEST_DELAY_SECONDS = 0.02
TENSORS_OF_AN_UPDATE = 4  # a parameter, its gradient and two states
SHARED_PAGES = 6  # of biases, beside them
MANY = 10  # prefetches: of so many some come in time, whatever the delays
HANG_SECONDS = 240  # a run takes some 5; machines may be busy
PLENTY = 64 << 20


@pytest.fixture
def slow_channels(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Each transfer may take long, at random, before and after its bytes move. How many did, by
    the names of channels."""
    run = Transfer.run
    chance = random.Random(5)
    delayed_transfers: Counter[str] = Counter()

    def delay(name: str) -> None:
        if chance.random() < 1 / 3:
            delayed_transfers[name] += 1
            time.sleep(chance.random() * LONGEST_DELAY_SECONDS)

    def delayed(self: Transfer, after: Mark) -> Mark:
        name = f"{self.tier}-{'in' if self.to_device else 'out'}"
        delay(name)
        mark = run(self, after)
        delay(name)
        return mark

    monkeypatch.setattr(Transfer, "run", delayed)
    return delayed_transfers


@pytest.fixture
def watchdog(request: pytest.FixtureRequest) -> Iterator[None]:
    """For a hang that not even pytest's own limit ends, because the main thread is stuck in C: the
    stacks of all threads, and the end of this process."""
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        stderr = os.dup(2)
    faulthandler.dump_traceback_later(HANG_SECONDS + 30, exit=True, file=stderr)
    yield
    faulthandler.cancel_dump_traceback_later()
    os.close(stderr)


class Branching(nn.Module):
    """Layers of random widths; one of them is sometimes left out."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        widths = [chance.choice((64, 128, 256, 384)) for _ in range(chance.randint(2, 5))]
        widths += 4 * [max(256, *widths)]  # so that one update takes a small part of everything
        chance.shuffle(widths)
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
        for step in range(UNRULY + CALM):
            what = chance.random() if step < UNRULY else 0.5
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


def random_budget(seed: int, chance: random.Random) -> tuple[int, int]:
    """Page size, and frames for less than what the model of ``seed`` has in pages, but for no less
    than one update of its largest matrix takes."""
    matrices = [p.nbytes for p in Branching(random.Random(seed)).parameters() if p.dim() == 2]
    while True:
        page_size = chance.choice((64, 64, 128, 256)) << 10
        # Those of less than half a page share pages.
        pages = [n / page_size if 2 * n <= page_size else -(-n // page_size) for n in matrices]
        least = TENSORS_OF_AN_UPDATE * math.ceil(max(pages)) + SHARED_PAGES
        most = int(0.75 * (TENSORS_OF_AN_UPDATE - 1) * sum(pages))  # RMSprop has one less
        if least <= most:  # with 64 KiB at the latest
            return page_size, chance.randint(least, most)


@pytest.mark.timeout(HANG_SECONDS)
@pytest.mark.parametrize("seed", SEEDS)
def test_random_training(
    one_thread: None, slow_channels: Counter[str], watchdog: None, tmp_path: Any, seed: int
) -> None:
    chance = random.Random(1000 + seed)
    page_size, frames = random_budget(seed, chance)
    tiers = chance.choice((("host",), ("disk",), ("host", "disk")))
    some = chance.randint(2, 40) * page_size
    host = {("host",): PLENTY, ("disk",): 0, ("host", "disk"): some}[tiers]
    on_disk = {"disk_budget": PLENTY + some, "disk_path": tmp_path} if "disk" in tiers else {}
    with make_pager(
        device_budget=RESERVE_BYTES + frames * page_size, host_budget=host, **on_disk,
        page_size=page_size, policy="lp", verify=True,
    ) as pager:  # fmt: skip
        assert pager.core.follower is not None
        pager.core.follower.most_plans = 1
        pager.core.follower.only_if_faster = False
        compare_runs(script_of(seed), PlannedWorld(pager))
        stats = pager.stats()
        why = "" if stats["planned_iterations"] and stats["prefetches"] else pager.explain()
        channels = {lane.name: lane.moved_pages for lane in pager.core.mover.lanes.values()}
    assert stats["planned_iterations"] > 0, why
    assert stats["prefetches"] > 0, why
    assert stats["prefetches"] < MANY or stats["prefetch_hits"] > 0
    moved = {name for name, pages in channels.items() if pages}
    assert moved <= {f"{tier}-{way}" for tier in tiers for way in ("in", "out")}
    assert any(name.endswith("in") for name in moved), channels
    assert any(name.endswith("out") for name in moved), channels
    assert slow_channels, "no transfer was delayed"
    for name, peak in stats["peak_bytes"].items():
        assert peak <= stats["budget_bytes"][name], name
