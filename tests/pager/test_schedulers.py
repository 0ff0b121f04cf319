"""Learning rate schedulers on paged optimizers, made before and after paging; and wrappers."""

import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import tensorpager as tp

from .models import World, mlp, train


def test_scheduler_made_before_the_optimizer_is_paged(same) -> None:
    def script(world: World) -> object:
        model = world.module(mlp())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        optimizer = world.optimizer(optimizer)
        losses = []
        for _ in range(3):
            losses += train(world, model, optimizer, 1)
            scheduler.step()
        state = optimizer.state[model[2].weight]["exp_avg"]
        assert world.pager is None or isinstance(state, tp.PagedTensor)
        return losses, model, optimizer

    same(script)


SCHEDULERS = {
    "lambda": lambda opt: lr_scheduler.LambdaLR(opt, lambda epoch: 0.9**epoch),
    "one cycle": lambda opt: lr_scheduler.OneCycleLR(opt, max_lr=0.1, total_steps=8),
    "cosine": lambda opt: lr_scheduler.CosineAnnealingLR(opt, 5),
    "sequential": lambda opt: lr_scheduler.SequentialLR(
        opt,
        [lr_scheduler.LinearLR(opt, 0.1, total_iters=2), lr_scheduler.ExponentialLR(opt, 0.9)],
        milestones=[2],
    ),
}


@pytest.mark.parametrize("name", list(SCHEDULERS))
@pytest.mark.filterwarnings("error")  # PyTorch warns of a scheduler that sees no step
def test_scheduler(same, name: str) -> None:
    def script(world: World) -> object:
        model = world.module(mlp())
        optimizer = world.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        assert isinstance(optimizer, torch.optim.SGD)
        scheduler = SCHEDULERS[name](optimizer)
        losses, rates = [], []
        for _ in range(6):
            losses += train(world, model, optimizer, 1)
            scheduler.step()
            rates.append((scheduler.get_last_lr(), optimizer.param_groups[0]["momentum"]))
        return losses, rates, model, optimizer

    same(script)


def test_plateau_scheduler(same) -> None:
    def script(world: World) -> object:
        model = world.module(mlp())
        optimizer = world.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        for _ in range(4):
            scheduler.step(train(world, model, optimizer, 1)[0])
        return model, scheduler.state_dict()

    same(script)


def test_an_optimizer_keeps_its_class_and_goes_when_it_is_dropped(tight_pager: tp.Pager) -> None:
    """Nothing of the pager holds it, and no circle: its states go at once."""
    model = tight_pager.page_module(nn.Linear(200, 200))
    optimizer = tight_pager.optimizer(torch.optim.AdamW(model.parameters()))
    assert type(optimizer) is torch.optim.AdamW
    lr_scheduler.StepLR(optimizer, 1)
    model(torch.ones(2, 200)).sum().backward()
    optimizer.step()
    assert type(pickle.loads(pickle.dumps(optimizer))) is torch.optim.AdamW
    known = weakref.ref(optimizer)
    gc.collect()
    gc.disable()
    try:
        del optimizer
        assert known() is None
    finally:
        gc.enable()


def test_all_ways_to_step_go_through_pages(tight_pager: tp.Pager) -> None:
    """A scheduler made before had put the plain step on the object; hooks run once a step."""
    model = tight_pager.page_module(nn.Linear(200, 200))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    tight_pager.optimizer(optimizer)
    for take in (optimizer.step, lambda: optimizer.step(closure=None)):
        model(torch.ones(2, 200)).sum().backward()
        take()
        scheduler.step()
    assert seen == ["before"] * 2
    assert type(optimizer.state[model.weight]["exp_avg"]) is tp.PagedTensor


class Wrapper(torch.optim.Optimizer):
    """As accelerate's: an optimizer in name, which has one."""

    def __init__(self, optimizer: torch.optim.Optimizer | None) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups


def test_wrappers_are_opened(tight_pager: tp.Pager) -> None:
    model = tight_pager.page_module(nn.Linear(40, 40))
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    outer = Wrapper(Wrapper(inner))
    assert tight_pager.optimizer(outer) is outer
    model(torch.ones(2, 40)).sum().backward()
    inner.step()
    assert type(inner.state[model.weight]["momentum_buffer"]) is tp.PagedTensor
    assert tight_pager.state_dict()["optimizers"][0]["param_groups"][0]["lr"] == 0.1
    for nothing in (Wrapper(None), object()):
        with pytest.raises(TypeError, match=r"pass pager\.optimizer\(\) the optimizer itself"):
            tight_pager.optimizer(nothing)


def test_an_optimizer_before_its_module(tight_pager: tp.Pager) -> None:
    """It would step on parameters that nobody uses any more."""
    model = nn.Linear(40, 40)
    optimizer = tight_pager.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(tp.PagerError, match=r"a SGD with .* Linear, .* page_module\(model\) first"):
        tight_pager.page_module(model)
    assert type(model.weight) is nn.Parameter
    tight_pager.page_module(nn.Linear(40, 40))
    del optimizer
    assert type(tight_pager.page_module(model).weight) is tp.PagedTensor
