"""Blocks that run again in backward: the same bits, whatever they do, and which ones may."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tensorpager as tp
from tensorpager.pager.debug.chaos import chaos
from tensorpager.pager.errors import PagerError

from .models import ByAddress, World, compare_runs, make_pager, run_again
from .test_plan_choice import MANY, on_machine
from .test_planned import PlannedWorld, planned_pager

WIDTH, LAYERS, ROWS = 128, 4, 256
ALL = [f"blocks.{number}" for number in range(LAYERS)]


class Block(nn.Module):
    """``inner`` is what tests put into it."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.inner = inner or nn.Dropout(0.2)

    def forward(self, x: torch.Tensor, scale: float = 1.0, also: Any = None) -> torch.Tensor:
        made = self.narrow(F.gelu(self.wide(self.norm(x))))
        return x + scale * self.inner(made)


class Net(nn.Module):
    def __init__(self, make: Any = Block) -> None:
        super().__init__()
        self.first = nn.Linear(32, WIDTH)
        self.blocks = nn.ModuleList(make() for _ in range(LAYERS))
        self.last = nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, scale=0.5)
        return self.last(x)


def steps(world: World, model: nn.Module, count: int, loss: Any = None) -> list[torch.Tensor]:
    """Two backward passes a step, and clipping. Steps are the device's, as these tests are about
    blocks: a plan that may choose steps of the host too takes twice as long to make."""
    optimizer = world.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), host_step=False)
    losses = []
    for _ in range(count):
        with world.iteration():
            for _ in range(2):
                out = model(torch.randn(ROWS, 32)).square().mean() if loss is None else loss(model)
                out.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(out.detach())
    return losses


def training(count: int = 8, make: Any = Block, loss: Any = None) -> Any:
    def script(world: World) -> object:
        model = world.module(Net(make))
        return steps(world, model, count, loss), model

    return script


def again_pager(**options: Any) -> tp.Pager:
    pager = planned_pager(**({"policy": "joint", "frames": 60} | options))
    run_again(pager.core)
    return pager


# -- the same bits -------------------------------------------------------------------------------
def test_dropout_accumulation_and_clipping_by_a_plan(one_thread) -> None:
    with again_pager() as pager:
        compare_runs(training(), PlannedWorld(pager))
        stats = pager.stats()
        assert stats["reruns"] == 8 * 2 * LAYERS
        assert stats["recomputed_bytes"] > 0 < stats["recompute_us"]
        assert stats["planned_iterations"] > 0, pager.explain()
        assert "4 of 4 blocks run again" in pager.explain()


def test_nothing_of_a_block_is_stored_in_forward(one_thread) -> None:
    """But its input."""
    most: dict[bool, int] = {}
    for again in (False, True):
        with planned_pager(policy="joint", frames=400) as pager:
            if again:
                run_again(pager.core)
            model = pager.page_module(Net())
            with pager.iteration():
                loss = model(torch.randn(ROWS, 32)).square().mean()
                most[again] = pager.core.space.kind_pages["activation"]
                loss.backward()
    row = ROWS * 4 * WIDTH >> 16  # pages of what goes from block to block
    assert most[True] <= (LAYERS + 1) * row + 1
    assert most[False] >= LAYERS * 4 * row


def test_under_chaos(one_thread) -> None:
    with again_pager(frames=120) as pager, chaos(pager.core):
        compare_runs(training(3), World(pager))
        assert pager.stats()["reruns"] == 3 * 2 * LAYERS


def test_kernels_of_others_read_what_they_have_saved(one_thread) -> None:
    class Squares(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return ByAddress.apply(x)

    with again_pager() as pager:
        compare_runs(training(2, make=lambda: Block(Squares())), World(pager))
        assert pager.stats()["reruns"] == 2 * 2 * LAYERS


def test_autocast(one_thread) -> None:
    def loss(model: nn.Module) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(torch.randn(ROWS, 32)).float().square().mean()

    with again_pager() as pager:
        compare_runs(training(4, loss=loss), PlannedWorld(pager))
        assert pager.stats()["reruns"] > 0


def test_backward_twice_and_gradients_of_gradients(one_thread) -> None:
    def loss(model: nn.Module) -> torch.Tensor:
        x = torch.randn(ROWS, 32, requires_grad=True)
        out = model(x).square().mean()
        (grad,) = torch.autograd.grad(out, x, create_graph=True)
        out.backward(retain_graph=True)
        return out + grad.square().sum()

    with again_pager(frames=120) as pager:
        compare_runs(training(3, loss=loss), World(pager))
        assert pager.stats()["reruns"] == 3 * 2 * LAYERS


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = torch.utils.checkpoint.checkpoint(self.part, x, use_reentrant=False)
        return made + torch.func.vmap(torch.sin)(x)


def test_a_block_that_makes_activations_again_by_itself(one_thread) -> None:
    with again_pager() as pager:
        compare_runs(training(4, lambda: Block(Checkpointed())), World(pager))
        assert pager.stats()["reruns"] > 0


def test_inputs_that_change_before_backward(one_thread) -> None:
    """What a block was given is kept as it was."""

    def loss(model: nn.Module) -> torch.Tensor:
        x = torch.randn(ROWS, WIDTH)
        out = model.blocks[0](x).square().mean()  # type: ignore[index]
        x.zero_()
        small = torch.randn(2, WIDTH)
        out = out + model.blocks[1](small).square().mean()  # type: ignore[index]
        small.zero_()
        return out

    def frozen() -> Block:
        """So that PyTorch itself has no need of what is given."""
        block = Block()
        block.norm.requires_grad_(False)
        block.wide.requires_grad_(False)
        return block

    with again_pager() as pager:
        compare_runs(training(3, frozen, loss), World(pager), must_move=False)


# -- departures ----------------------------------------------------------------------------------
class Stumbles(nn.Module):
    """Fails in backward when it is told to."""

    fail = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.requires_grad:
            x.register_hook(self._stumble)
        return x

    def _stumble(self, grad: torch.Tensor) -> None:
        if Stumbles.fail:
            raise ZeroDivisionError("in backward")


def test_an_exception_in_the_middle_of_backward(one_thread) -> None:
    def script(world: World) -> object:
        model = world.module(Net(lambda: Block(Stumbles())))
        losses = steps(world, model, 4)
        Stumbles.fail = True
        with pytest.raises(ZeroDivisionError):
            steps(world, model, 1)
        Stumbles.fail = False
        model.zero_grad()
        return [*losses, *steps(world, model, 3)], model

    with again_pager() as pager:
        compare_runs(script, World(pager))
        assert pager.core.saved.segment is None


def test_other_shapes_and_passes_without_gradients(one_thread) -> None:
    sizes = iter([])

    def loss(model: nn.Module) -> torch.Tensor:
        with torch.no_grad():
            model(torch.randn(8, 32))
        model.eval()
        model(torch.randn(8, 32))  # its graph is dropped
        model.train()
        return model(torch.randn(next(sizes), 32)).square().mean()

    def script(world: World) -> object:
        nonlocal sizes
        sizes = iter([64, 256, 128, 256, 64, 64] * 2)
        return training(6, loss=loss)(world)

    with again_pager(frames=120) as pager:
        compare_runs(script, PlannedWorld(pager), must_move=False)


def test_a_block_that_does_other_things_is_named(one_thread) -> None:
    calls = []

    class Whim(Block):
        def forward(self, x: torch.Tensor, scale: float = 1.0, also: Any = None) -> torch.Tensor:
            calls.append(0)
            return super().forward(x[: ROWS // 2] if len(calls) > LAYERS else x)

    with again_pager() as pager:
        model = pager.page_module(Net(Whim))
        with (
            pytest.raises(PagerError, match=r"block 'blocks.\d' did other things when it ran"),
            pager.iteration(),
        ):
            model(torch.randn(ROWS, 32)).square().mean().backward()
        assert pager.core.saved.segment is None


def test_a_copy_of_the_model_knows_nothing_of_it(one_thread) -> None:
    with again_pager() as pager:
        model = pager.page_module(Net())
        with pager.iteration():
            twin = copy.deepcopy(model)
            model(torch.randn(ROWS, 32)).sum().backward()
            before = pager.stats()["reruns"]
            twin(torch.randn(ROWS, 32)).sum().backward()
            assert pager.stats()["reruns"] == before == LAYERS
        assert not model.blocks[0]._forward_hooks


# -- which may -----------------------------------------------------------------------------------
class Calls(nn.Module):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(1.0)
        return x


class Draws(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * random.random()


class Observes(nn.Module):
    """As observers of quantization do, per channel: the buffer gets its size in the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.largest.resize_(WIDTH).copy_(x.detach().amax(0))
        return x


class InPlace(Block):
    def forward(self, x: torch.Tensor, scale: float = 1.0, also: Any = None) -> torch.Tensor:
        x += self.narrow(F.gelu(self.wide(x))).detach()
        return x


FIXED = {
    "batch statistics": (
        lambda: Block(nn.BatchNorm1d(WIDTH)),
        "changes inner.running_mean in place",
    ),
    "a buffer of another size": (lambda: Block(Observes()), "changes inner.largest in place"),
    "an attribute": (lambda: Block(Calls()), "changes inner.calls"),
    "a list": (lambda: Block(Remembers()), "changes inner.seen"),
    "random numbers": (lambda: Block(Draws()), "changes Python's random numbers"),
    "an argument": (InPlace, "changes its argument 0 in place"),
}


@pytest.mark.parametrize("name", FIXED)
def test_blocks_that_may_not_run_again_are_found(one_thread, name: str) -> None:
    make, reason = FIXED[name]
    with planned_pager(policy="joint", frames=60) as pager:
        script = training(4, make)

        def seeded(world: World) -> object:
            random.seed(0)
            return script(world)

        compare_runs(seeded, PlannedWorld(pager), must_move=False)
        assert pager.core.follower.segments.refused == dict.fromkeys(ALL, reason)
        assert f"4 cannot run again: 'blocks.0' {reason}." in pager.explain()


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (object(), "is given an object of object"),
        (torch.ones(1, 4).expand(8, 4), "is given a view with gaps, or an expanded one"),
    ],
)
def test_arguments_that_cannot_be_kept(one_thread, more: Any, reason: str) -> None:
    def loss(model: Any) -> torch.Tensor:
        x = model.first(torch.randn(ROWS, 32))
        return model.blocks[0](x, also=[more]).square().mean()

    with again_pager() as pager:
        compare_runs(training(3, loss=loss), World(pager), must_move=False)
        assert pager.core.follower.segments.refused == {"blocks.0": reason}


def test_inside_of_torch_compile_all_is_stored(one_thread) -> None:
    def script(world: World) -> object:
        model = world.module(Net())
        compiled = torch.compile(model, backend="eager")
        return steps(world, model, 3, lambda _: compiled(torch.randn(ROWS, 32)).square().mean())

    with again_pager() as pager:
        compare_runs(script, World(pager), must_move=False)
        assert pager.stats()["reruns"] == 0


def test_what_is_filled_once_is_no_reason(one_thread) -> None:
    class Cached(nn.Module):
        table: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.table is None:
                self.table = torch.linspace(0, 1, WIDTH)
            return x + self.table

    with planned_pager(policy="joint", frames=60) as pager:
        compare_runs(training(3, lambda: Block(Cached())), PlannedWorld(pager))
        assert not pager.core.follower.segments.refused


# -- whether it is worth it ----------------------------------------------------------------------
def test_where_the_link_is_slow_the_planner_says_which(one_thread, monkeypatch) -> None:
    with planned_pager(policy="joint", frames=70) as pager:
        on_machine(pager, monkeypatch, host=2e6, disk=MANY)
        compare_runs(training(12), PlannedWorld(pager))
        stats = pager.stats()
        assert stats["reruns"] > 0, pager.explain()
        assert stats["mode"] == "planned", pager.explain()
        assert "of 4 blocks run again in backward" in pager.explain()


def test_where_nothing_waits_all_is_stored(one_thread, monkeypatch) -> None:
    with planned_pager(policy="joint", frames=70) as pager:
        on_machine(pager, monkeypatch, host=MANY, disk=MANY)
        compare_runs(training(8), PlannedWorld(pager))
        assert pager.stats()["reruns"] == 0
        assert "The activations of all 4 blocks are stored." in pager.explain()


def test_what_disappoints_is_left(one_thread, monkeypatch) -> None:
    with planned_pager(policy="joint", frames=70) as pager:
        follower = pager.core.follower
        on_machine(pager, monkeypatch, host=2e6, disk=MANY)

        def has_room(signature: Any) -> bool:
            """It is chosen: from now on nothing is as fast as this kind was without."""
            follower.only_if_faster, signature.before_us = True, 1.0
            return True

        monkeypatch.setattr(follower, "_has_room", has_room)
        compare_runs(training(14), PlannedWorld(pager))
        kinds = follower.signatures.all
        assert any(kind.kept and "was tried" in kind.kept for kind in kinds)
        assert "The activations of all blocks are stored" in pager.explain()


def test_lp_and_lru_watch_no_block() -> None:
    for policy in ("lp", "lru"):
        with make_pager(policy=policy) as pager:
            model = pager.page_module(Net())
            with pager.iteration():
                assert not model.blocks[0]._forward_hooks
            assert pager.stats()["reruns"] == 0
