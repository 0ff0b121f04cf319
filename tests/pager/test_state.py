"""State goes from paged to plain and back: what was saved by one is loaded by the other."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.optim import swa_utils

import tensorpager as tp

from .models import World, assert_same, batch, mlp, plain, train


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, amsgrad=True)


def _saved(state: object) -> object:
    """``state`` through a file, as a checkpoint is."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("to_file", [False, True])
def test_paged_state_in_a_plain_run(lane_pager: tp.Pager, to_file: bool) -> None:
    paged = World(lane_pager)
    model = paged.module(mlp())
    optimizer = paged.optimizer(_adamw(model))
    train(paged, model, optimizer, 2)
    states = model.state_dict(), optimizer.state_dict()
    states = _saved(states) if to_file else copy.deepcopy(states)

    twin = mlp()
    twin.load_state_dict(states[0])
    twin_optimizer = _adamw(twin)
    twin_optimizer.load_state_dict(states[1])
    _train_alike((World(), twin, twin_optimizer), (paged, model, optimizer))


@pytest.mark.parametrize("to_file", [False, True])
def test_plain_state_in_a_paged_run(lane_pager: tp.Pager, to_file: bool) -> None:
    twin = mlp()
    twin_optimizer = _adamw(twin)
    train(World(), twin, twin_optimizer, 2)
    states = twin.state_dict(), twin_optimizer.state_dict()
    states = _saved(states) if to_file else copy.deepcopy(states)

    paged = World(lane_pager)
    model = paged.module(mlp())
    optimizer = paged.optimizer(_adamw(model))
    model.load_state_dict(states[0])
    optimizer.load_state_dict(states[1])
    assert isinstance(optimizer.state[model[2].weight]["exp_avg"], tp.PagedTensor)
    _train_alike((World(), twin, twin_optimizer), (paged, model, optimizer))


def _train_alike(*runs: tuple[World, nn.Module, torch.optim.Optimizer]) -> None:
    results = []
    for world, model, optimizer in runs:
        torch.manual_seed(11)
        losses = train(world, model, optimizer, 2)
        results.append(plain((losses, model, optimizer)))
    assert_same(results[1], results[0])


def test_optimizer_state_dict_does_not_change_when_training_goes_on(same) -> None:
    """As in PyTorch: model and optimizer states are references, a deepcopy of them is not."""

    def script(world: World) -> object:
        model = world.module(mlp())
        optimizer = world.optimizer(_adamw(model))
        train(world, model, optimizer, 1)
        states = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        train(world, model, optimizer, 2)
        model.load_state_dict(states[0])
        optimizer.load_state_dict(states[1])
        return train(world, model, optimizer, 2), model, optimizer

    same(script)


def test_state_of_the_pager(lane_pager: tp.Pager) -> None:
    world = World(lane_pager)
    model, other = world.module(mlp()), world.module(mlp(depth=2))
    optimizer = world.optimizer(_adamw(model))
    train(world, model, optimizer, 2)
    state = _saved(lane_pager.state_dict())
    torch.manual_seed(5)
    losses = train(world, model, optimizer, 2)
    after = plain((model, other, optimizer))

    lane_pager.load_state_dict(state)
    torch.manual_seed(5)
    assert train(world, model, optimizer, 2) == losses
    assert_same(plain((model, other, optimizer)), after)
    del other
    with pytest.raises(ValueError, match="2 models and this pager 1"):
        lane_pager.load_state_dict(state)


def test_whole_model_saved_is_plain_when_loaded(lane_pager: tp.Pager) -> None:
    world = World(lane_pager)
    model = world.module(mlp())
    train(world, model, world.optimizer(_adamw(model)), 2)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert all(type(p) is nn.Parameter for p in loaded.parameters())
    assert_same(plain(loaded.state_dict()), plain(model.state_dict()))
    train(World(), loaded, _adamw(loaded), 1)


def test_deepcopy_of_a_model_trains_the_same(lane_pager: tp.Pager) -> None:
    world = World(lane_pager)
    model = world.module(mlp())
    train(world, model, world.optimizer(_adamw(model)), 2)
    twin = copy.deepcopy(model)
    assert all(isinstance(p, tp.PagedTensor) for p in twin.parameters())
    assert not any(p is q for p, q in zip(twin.parameters(), model.parameters()))
    runs = [(world, m, world.optimizer(_adamw(m))) for m in (model, twin)]
    _train_alike(*runs)
    if not lane_pager.core.fits:
        with lane_pager.iteration():
            twin(batch()[0]).sum().backward()
        assert isinstance(twin[2].weight.grad, tp.PagedTensor)


def test_moving_average_of_a_model(same) -> None:
    def script(world: World) -> object:
        model = world.module(mlp())
        optimizer = world.optimizer(_adamw(model))
        average = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
        for _ in range(3):
            train(world, model, optimizer, 1)
            average.update_parameters(model)
        with torch.no_grad():
            return average(batch()[0]), average.module, model

    same(script)


def test_deepcopy_of_an_optimizer(lane_pager: tp.Pager) -> None:
    """A copied pair steps on the copy, and the first goes on as before."""
    world = World(lane_pager)
    model = world.module(mlp())
    optimizer = world.optimizer(_adamw(model))
    train(world, model, optimizer, 1)
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    assert twin_optimizer.param_groups[0]["params"][0] is twin[0].weight
    _train_alike((world, model, optimizer), (world, twin, twin_optimizer))


def test_load_with_assign(same) -> None:
    """``assign=True`` replaces the parameters by plain ones: training goes on beside the pages."""

    def script(world: World) -> object:
        state = mlp().state_dict()
        model = world.module(mlp())
        optimizer = world.optimizer(_adamw(model))
        losses = train(world, model, optimizer, 2)
        model.load_state_dict({**state, "0.bias": state["0.bias"] * 2}, assign=True)
        optimizer = world.optimizer(_adamw(model))
        return losses, train(world, model, optimizer, 2), model

    same(script)
