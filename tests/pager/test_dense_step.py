"""Where everything fits, an optimizer's step runs on plain views: same bits, no paged op."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tensorpager as tp
from tensorpager.pager.optim.paged_optimizer import PagedOptimizer

from .models import World, batch, make_pager, mlp, plain

KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
}


class OnPages(TorchDispatchMode):
    """Counts the ops that were given a PagedTensor."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += any(type(t) is tp.PagedTensor for t in tree_leaves((args, kwargs)))
        return func(*args, **(kwargs or {}))


def step(world: World, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """One iteration; how many ops of the optimizer's step were given a PagedTensor."""
    with world.iteration():
        model(batch()[0]).square().mean().backward()
        with OnPages() as seen:
            optimizer.step()
        optimizer.zero_grad()
    return seen.count


@pytest.mark.parametrize("kind", KINDS)
def test_no_op_of_a_step_is_on_pages_once_everything_fits(kind: str, one_thread: None) -> None:
    with make_pager(fits=True) as pager:
        world = World(pager)
        model = world.module(mlp())
        optimizer = world.optimizer(KINDS[kind](model.parameters()))
        counts = [step(world, model, optimizer) for _ in range(3)]
        assert pager.stats()["fits"]
        assert counts[0] > 0, "the first step makes its states one parameter at a time"
        assert counts[2] == 0
        assert all(type(p) is tp.PagedTensor for g in optimizer.param_groups for p in g["params"])
        kept = [v for state in optimizer.state.values() for v in state.values()]
        big = [v for v in kept if isinstance(v, torch.Tensor) and v.numel() * v.itemsize >= 512]
        assert all(type(v) is tp.PagedTensor for v in big)
        assert all(type(p) is tp.PagedTensor for p in optimizer.state)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits(same: Callable[..., None], kind: str) -> None:
    def script(world: World) -> object:
        model = world.module(mlp())
        optimizer = world.optimizer(KINDS[kind](model.parameters()))
        for _ in range(4):
            step(world, model, optimizer)
        return model, optimizer

    same(script)


def test_a_setting_that_starts_a_state_later(same: Callable[..., None]) -> None:
    def script(world: World) -> object:
        model = world.module(mlp())
        optimizer = world.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for number in range(4):
            optimizer.param_groups[0]["momentum"] = 0.9 if number >= 2 else 0.0
            step(world, model, optimizer)
        if world.pager is not None:
            states = [s["momentum_buffer"] for s in optimizer.state.values()]
            big = [s for s in states if s.numel() * s.itemsize >= 512]
            assert big
            assert all(type(s) is tp.PagedTensor for s in big)
        return model, optimizer

    same(script)


def test_an_optimizer_of_the_users_own_sees_paged_parameters(one_thread: None) -> None:
    seen, emptied = set(), []

    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            seen.update(type(p) for group in self.param_groups for p in group["params"])
            super().step(closure)

        def zero_grad(self) -> None:
            emptied.append(True)
            super().zero_grad()

    with make_pager(fits=True) as pager:
        world = World(pager)
        model = world.module(mlp())
        optimizer = world.optimizer(Own(model.parameters(), lr=0.1))
        for _ in range(3):
            seen.clear()  # the first step also tries itself on a small plain stand-in
            step(world, model, optimizer)
        optimizer.zero_grad()
    assert seen == {tp.PagedTensor}
    assert emptied


def test_a_step_that_raises_puts_everything_back(one_thread: None) -> None:
    with make_pager(fits=True) as pager:
        world = World(pager)
        model = world.module(mlp())
        optimizer = world.optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
        for _ in range(2):
            step(world, model, optimizer)
        optimizer.param_groups[0]["betas"] = (0.9,)  # too few
        with pytest.raises((ValueError, IndexError)):
            step(world, model, optimizer)
        assert all(type(p) is tp.PagedTensor for g in optimizer.param_groups for p in g["params"])
        assert set(optimizer.state) == set(model.parameters())
        optimizer.param_groups[0]["betas"] = (0.9, 0.95)
        optimizer.zero_grad()
        assert step(world, model, optimizer) == 0


def test_fewer_frames_than_a_kernel_takes(one_thread: None) -> None:
    """An AdamW update by kernels holds a page of four tensors; PyTorch's ops take two at a time."""
    losses = []
    for paged in (False, True):
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(nn.Linear(128, 128, bias=False), nn.ReLU())
        found = []
        with make_pager(frames=2) as pager:
            world = World(pager if paged else None)
            model = world.module(model)
            optimizer = world.optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
            for _ in range(3):
                with world.iteration():
                    loss = model(torch.ones(4, 128)).square().mean()
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                found.append(loss.item())
            assert not paged or pager.stats()["bytes_out"] > 0
        losses.append(found)
    assert losses[0] == losses[1]


def test_small_parameters_are_updated_together(
    monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    """In one call of PyTorch's code, also where not everything fits; the same bits."""
    calls: list[int] = []
    run = PagedOptimizer.run
    monkeypatch.setattr(
        PagedOptimizer,
        "run",
        lambda paged, *a: (calls.append(len(paged.stepped_now())), run(paged, *a)),
    )
    losses = []
    for paged in (False, True):
        torch.manual_seed(0)
        norms = [nn.LayerNorm(128) for _ in range(4)]
        found = []
        with make_pager(frames=40) as pager:
            world = World(pager if paged else None)
            model = world.module(nn.Sequential(*norms, *mlp(depth=4)))
            optimizer = world.optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
            for _ in range(3):
                calls.clear()
                with world.iteration():
                    loss = model(batch()[0]).square().mean()
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                found.append(loss.item())
            assert not paged or pager.stats()["faults"] > 0
        losses.append(found)
    assert losses[0] == losses[1]
    assert sum(calls) == 18
    assert max(calls) >= 8, "the norms' weights and biases"


@pytest.mark.parametrize("frames", [40, 400])
def test_a_step_that_breaks_off_goes_on_after_what_it_has_updated(
    frames: int, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    """Of parameters that are updated together: no update is made twice."""
    addcdiv, calls = torch.Tensor.addcdiv_, []

    def broken(*args: object, **kwargs: object) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 5:
            raise MemoryError("the fifth update")
        return addcdiv(*args, **kwargs)

    inputs, found = batch()[0], []
    for paged in (False, True):
        torch.manual_seed(0)
        with make_pager(frames=frames) as pager:
            world = World(pager if paged else None)
            model = world.module(nn.Sequential(*[nn.LayerNorm(128) for _ in range(4)]))
            optimizer = world.optimizer(torch.optim.Adam(model.parameters(), foreach=False))
            for number in range(3):
                with world.iteration():
                    model(inputs).pow(4).mean().backward()
                    if paged and number == 2:
                        with monkeypatch.context() as context:
                            context.setattr(torch.Tensor, "addcdiv_", broken)
                            with pytest.raises(MemoryError):
                                optimizer.step()
                    optimizer.step()
                    optimizer.zero_grad()
            found.append(plain(list(model.parameters())))
    assert len(calls) >= 5
    same = [torch.equal(one, other) for one, other in zip(*found)]
    assert same == [True] * 4 + [False] + [True] * 3, "the fifth was amid its update"


def test_states_that_come_after_the_first_iteration(one_thread: None) -> None:
    """Gradients of two iterations are added up before a step: in the first, which is measured,
    everything fits, and the states of the second take more than there is."""

    def train(pager: tp.Pager | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        world, model = World(pager), nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 64))
        world.module(model)
        optimizer = world.optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
        for count in range(6):
            with world.iteration():
                model(torch.full((8, 256), 0.1 * count)).square().mean().backward()
                if count % 2:
                    optimizer.step()
                    optimizer.zero_grad()
        return [p.detach().to_dense() for p in model.parameters()]

    with tp.Pager("3MiB", "64MiB", page_size="64KiB", device="cpu", policy="lru") as pager:
        found = train(pager)
    assert all(torch.equal(a, b) for a, b in zip(found, train(None), strict=True))
