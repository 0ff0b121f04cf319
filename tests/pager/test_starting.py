"""Training that starts from an estimated plan: the same bits, and nothing lost by a wrong one."""

from __future__ import annotations

import json
import runpy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import tensorpager as tp
from tensorpager.pager.cli import main
from tensorpager.pager.errors import PagerError

from .models import World, compare_runs, loss_of, make_pager, mlp, train

FRAMES = 44  # of the 132 pages of 64 KiB that weights, gradients and states of `deep` have
MODULE = """
import torch
from torch import nn

def deep():
    with torch.device("meta"):
        layers = [nn.Linear(128, 256), nn.GELU()]
        for _ in range(5):
            layers += [nn.Linear(256, 256), nn.GELU()]
        return nn.Sequential(*layers, nn.Linear(256, 10)), torch.zeros(64, 128)

class Transposed(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((256, 256), 0.01))
    def forward(self, x):
        return torch.addmm(x, x, self.weight)

def transposed():
    layers = [nn.Linear(128, 256), *(Transposed() for _ in range(5)), nn.Linear(256, 10)]
    return nn.Sequential(*layers), torch.zeros(64, 128)

def one_is_large():
    layers = [nn.Linear(128, 256), nn.Linear(256, 704), nn.Linear(704, 64), nn.Linear(64, 10)]
    return nn.Sequential(*layers), torch.zeros(64, 128)
"""


def deep() -> nn.Module:
    return mlp(depth=6)


def training(world: World, steps: int, make: Callable[[], nn.Module] = deep) -> object:
    model = world.module(make())
    optimizer = world.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    return train(world, model, optimizer, steps), model, optimizer


def estimated(folder: Path, function: str) -> Path:
    (folder / "model.py").write_text(MODULE)
    words = ["estimate", f"{folder / 'model.py'}:{function}", "--hardware", "cpu"]
    words += ["--page-size", "64KiB", "--device-budget", f"{FRAMES * 64}KiB", "--no-speeds"]
    words += ["--out", str(folder / "t.parquet"), "--plan", str(folder / "plan.json")]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    return folder / "plan.json"


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return estimated(tmp_path_factory.mktemp("plan"), "deep")


def starting(plan: Path | None, **options: Any) -> tp.Pager:
    """Without plans of its own."""
    pager = make_pager(**({"policy": "lp", "frames": FRAMES, "plan": plan} | options))
    assert pager.core.follower is not None
    pager.core.follower.most_plans = 0
    return pager


def test_moves_of_the_file_are_made_and_the_bits_are_the_same(one_thread, plan_file: Path) -> None:
    with starting(plan_file) as pager:
        compare_runs(lambda world: training(world, 6), World(pager))
        follower = pager.core.follower
        assert follower.starting.refused is None
        assert follower.starting.iterations == 5  # the first one is metered
        assert follower.starting.moves > 0
        assert follower.planned.prefetched > 0
        assert "plan.json was followed in 5 iterations" in pager.explain()
        assert pager.stats()["planned_iterations"] == 0


@pytest.mark.parametrize("function", ["transposed", "one_is_large"])
def test_nodes_of_autograd_and_streams_use_what_they_are_lent(
    one_thread, tmp_path: Path, function: str
) -> None:
    """A backward pass of PyTorch's own reads a weight, a step goes slab by slab."""
    plan = estimated(tmp_path, function)
    make = runpy.run_path(str(tmp_path / "model.py"))[function]

    def made() -> nn.Module:
        torch.manual_seed(0)
        return make()[0]

    with starting(plan, frames=FRAMES - 6) as pager:  # too few for the largest step
        compare_runs(lambda world: training(world, 4, made), World(pager))
        follower = pager.core.follower
        assert follower.starting.refused is None
        assert follower.starting.iterations == 3
        assert follower.starting.moves > 0


def test_a_plan_of_the_training_takes_its_place(one_thread, plan_file: Path) -> None:
    with make_pager(policy="lp", frames=FRAMES, plan=plan_file) as pager:
        pager.core.follower.only_if_faster = False
        before = []

        def script(world: World) -> object:
            model = world.module(deep())
            optimizer = world.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
            losses = []
            for _ in range(6):
                losses += train(world, model, optimizer, 1)
                if world.pager is not None:
                    world.pager.plan()
                    before.append(world.pager.core.follower.starting.iterations)
            return losses, model, optimizer

        compare_runs(script, World(pager))
        assert pager.stats()["planned_iterations"] == 6 - 1 - before[-1]
        assert 0 < before[-1] < 5
        assert pager.core.follower.starting.refused is None


class Backwards(nn.Module):
    """The layers of ``deep`` by the same names, called in another order."""

    def __init__(self) -> None:
        super().__init__()
        for name, layer in deep().named_children():
            self.add_module(name, layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, *middle, last = [m for m in self.children() if isinstance(m, nn.Linear)]
        x = first(x)
        for layer in reversed(middle):
            x = torch.tanh(layer(x))
        return last(x)


def test_another_order_is_named_once_and_costs_nothing_else(one_thread, plan_file: Path) -> None:
    with starting(plan_file) as pager:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            compare_runs(lambda world: training(world, 5, Backwards), World(pager))
        refused = pager.core.follower.starting.refused
        assert refused is not None
        assert refused.startswith("op 2 of ")
        assert refused.endswith("'10.weight' is used where the plan uses '2.weight'")
        texts = [str(each.message) for each in said if "is not followed" in str(each.message)]
        assert len(texts) == 1
        assert refused in texts[0]
        assert refused in pager.explain()


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (lambda: mlp(depth=3), "it has '8.weight', which this training has not"),
        (lambda: mlp(width=512, depth=6), "'0.weight' has 131072 bytes there, and 262144 here"),
    ],
    ids=["fewer", "larger"],
)
def test_other_tensors_are_named(
    one_thread, plan_file: Path, other: Callable[[], nn.Module], says: str
) -> None:
    with (
        starting(plan_file) as pager,
        pytest.warns(RuntimeWarning, match=f"is not followed: .*{says}"),
    ):
        compare_runs(lambda world: training(world, 3, other), World(pager))


def test_an_iteration_that_ends_early_is_another_one(one_thread, plan_file: Path) -> None:
    with starting(plan_file) as pager:
        world = World(pager)
        model = world.module(deep())

        def forward_only() -> None:
            with world.iteration():
                loss_of(model)

        forward_only()
        with pytest.warns(RuntimeWarning, match="it ends where the plan uses"):
            forward_only()


def test_an_iteration_that_raises_is_none(one_thread, plan_file: Path) -> None:
    def cut_short(model: nn.Module, world: World) -> None:
        with world.iteration():
            loss_of(model).backward()
            raise KeyError("cut short")

    def script(world: World) -> object:
        model = world.module(deep())
        optimizer = world.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
        losses = train(world, model, optimizer, 2)
        with pytest.raises(KeyError):
            cut_short(model, world)
        optimizer.zero_grad()
        return losses + train(world, model, optimizer, 2), model, optimizer

    with starting(plan_file) as pager:
        compare_runs(script, World(pager))
        assert pager.core.follower.starting.refused is None
        assert pager.core.follower.starting.iterations == 3


def changed(content: dict[str, Any], **extra: Any) -> dict[str, Any]:
    return {**content, "extra": {**content["extra"], **extra}}


@pytest.mark.parametrize(
    ("change", "options", "says"),
    [
        pytest.param(lambda c: {**c, "extra": {}}, {}, "in which order", id="no order"),
        pytest.param(lambda c: changed(c, accesses=[1]), {}, "in which order", id="not an order"),
        pytest.param(
            lambda c: changed(c, accesses={"tensors": {"1": ["w", 4]}, "uses": [[0, [2]]]}), {},
            "in which order", id="a use of nothing",
        ),
        pytest.param(lambda c: {**c, "page_size": 1 << 30}, {}, "--page-size 65536", id="pages"),
        pytest.param(lambda c: {"version": 99}, {}, "version 99", id="not a plan"),
        pytest.param(lambda c: c, {"policy": "lru"}, "policy='lru'", id="no plans"),
    ],
)  # fmt: skip
def test_what_is_no_plan_to_start_from(
    plan_file: Path, tmp_path: Path, change: Any, options: dict[str, Any], says: str
) -> None:
    path = tmp_path / "changed.json"
    path.write_text(json.dumps(change(json.loads(plan_file.read_text()))))
    with pytest.raises(PagerError, match=says):
        make_pager(**({"policy": "lp", "frames": FRAMES, "plan": path} | options))
