"""What is freed and when, and what a closed pager says."""

import copy
import gc
import json

import pytest
import torch
from torch import nn

import tensorpager as tp
from tensorpager.pager.debug.check import check_invariants

from .models import (
    World,
    assert_same,
    batch,
    live_pages,
    loss_of,
    make_pager,
    mlp,
    plain,
    train,
)


class _StopError(Exception):
    pass


# -- what is freed -------------------------------------------------------------------------------
def test_live_pages_do_not_grow(lane_pager: tp.Pager) -> None:
    world = World(lane_pager)
    model = world.module(mlp())
    optimizer = world.optimizer(torch.optim.AdamW(model.parameters()))
    pages = []
    for _ in range(6):
        train(world, model, optimizer, 1)
        pages.append(live_pages(lane_pager))
    assert pages == [pages[0]] * 6
    assert lane_pager.core.space.persistent_pages == pages[0]


def test_gradients_are_freed_by_zero_grad(tight_pager: tp.Pager) -> None:
    model = tight_pager.page_module(mlp())
    before = live_pages(tight_pager)
    with tight_pager.iteration():
        loss = loss_of(model)
        loss.backward()
    del loss
    assert tight_pager.core.space.kind_pages["gradient"] > 0
    assert live_pages(tight_pager) > before
    model.zero_grad()
    assert live_pages(tight_pager) == before
    assert tight_pager.core.space.kind_pages["activation"] == 0
    check_invariants(tight_pager.core)


def test_a_graph_without_backward_is_freed(tight_pager: tp.Pager) -> None:
    model = tight_pager.page_module(mlp())
    before = live_pages(tight_pager)
    with tight_pager.iteration():
        loss = loss_of(model)
        assert live_pages(tight_pager) > before
        del loss
        assert live_pages(tight_pager) == before


def test_everything_is_freed_with_its_owners(lane_pager: tp.Pager) -> None:
    world = World(lane_pager)
    user = lane_pager.page(torch.randn(300, 300))
    view = user[10:]
    model = world.module(mlp())
    optimizer = world.optimizer(torch.optim.AdamW(model.parameters()))
    train(world, model, optimizer, 2)
    del model, user
    assert live_pages(lane_pager) > 6  # the optimizer still knows the parameters
    del optimizer
    assert live_pages(lane_pager) == 6  # 352 KiB: a view keeps the pages
    del view
    assert live_pages(lane_pager) == 0
    check_invariants(lane_pager.core)
    assert lane_pager.state_dict() == {"models": [], "optimizers": []}


def _with_buffer() -> nn.Module:
    model = mlp()
    model.register_buffer("table", torch.zeros(2 << 20))  # 8 MiB, beside 32 MiB of reserve
    return model


def test_buffers_of_a_model_that_is_gone_do_not_count(tight_pager: tp.Pager) -> None:
    world = World(tight_pager)
    for _ in range(6):
        model = world.module(_with_buffer())
        train(world, model, world.optimizer(torch.optim.SGD(model.parameters())), 1)
        del model
        gc.collect()
    assert live_pages(tight_pager) == 0


def test_a_model_paged_again_counts_once(tight_pager: tp.Pager) -> None:
    model = _with_buffer()
    for _ in range(6):
        tight_pager.page_module(model)
    train(World(tight_pager), model, torch.optim.SGD(model.parameters()), 1)
    assert len(tight_pager.state_dict()["models"]) == 1


# -- the end -------------------------------------------------------------------------------------
USES = {
    "op": lambda pager, model, optimizer: model(batch()[0]),
    "parameter": lambda pager, model, optimizer: model[0].weight + 1,
    "view": lambda pager, model, optimizer: model[0].weight.t(),
    "in place": lambda pager, model, optimizer: model[0].weight.data.zero_(),
    "dense": lambda pager, model, optimizer: model[0].weight.to_dense(),
    "residency": lambda pager, model, optimizer: model[0].weight.residency(),
    "pin": lambda pager, model, optimizer: model[0].weight.pin().__enter__(),
    "deepcopy": lambda pager, model, optimizer: copy.deepcopy(model[0].weight),
    "step": lambda pager, model, optimizer: optimizer.step(),
    "zero_grad": lambda pager, model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model.load_state_dict": lambda pager, model, optimizer: model.load_state_dict(
        mlp().state_dict()
    ),
    "page": lambda pager, model, optimizer: pager.page(torch.zeros(3)),
    "page_module": lambda pager, model, optimizer: pager.page_module(mlp()),
    "optimizer": lambda pager, model, optimizer: pager.optimizer(
        torch.optim.SGD(model.parameters())
    ),
    "iteration": lambda pager, model, optimizer: pager.iteration().__enter__(),
    "state_dict": lambda pager, model, optimizer: pager.state_dict(),
    "load_state_dict": lambda pager, model, optimizer: pager.load_state_dict({}),
    "grow": lambda pager, model, optimizer: pager.grow(host_budget="128MiB"),
    "enter": lambda pager, model, optimizer: pager.__enter__(),
}


def _trained(pager: tp.Pager) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = pager.page_module(mlp())
    optimizer = pager.optimizer(torch.optim.AdamW(model.parameters()))
    train(World(pager), model, optimizer, 1)
    with pager.iteration():
        loss_of(model).backward()
    return model, optimizer


def test_use_after_close_says_so(one_thread) -> None:
    """Several hundred uses of freed memory, had one been let through."""
    pager = make_pager()
    model, optimizer = _trained(pager)
    pager.close()
    for name, use in USES.items():
        with pytest.raises((tp.PagerError, RuntimeError), match="was closed") as caught:
            use(pager, model, optimizer)
        if name != "model.load_state_dict":  # PyTorch collects the errors of all parameters
            assert isinstance(caught.value, tp.PagerError), name
    assert "was closed" in repr(model[0].weight)
    assert model[0].weight.shape == (256, 128)
    pager.close()
    json.dumps(pager.stats())


def test_backward_after_close_says_so(one_thread) -> None:
    pager = make_pager()
    model = pager.page_module(mlp())
    with pager.iteration():
        loss = loss_of(model)
    pager.close()
    with pytest.raises(tp.PagerError, match="was closed"):
        loss.backward()


def test_close_inside_of_an_iteration(one_thread) -> None:
    pager = make_pager()
    model = pager.page_module(mlp())

    def close_and_go_on() -> None:
        with pager.iteration():
            loss_of(model).backward()
            pager.close()
            loss_of(model)

    with pytest.raises(tp.PagerError, match="was closed"):
        close_and_go_on()
    with make_pager() as other:  # the profiler that metered is off again
        twin = other.page_module(mlp())
        train(World(other), twin, other.optimizer(torch.optim.AdamW(twin.parameters())), 2)


def test_close_as_the_last_thing_of_an_iteration(one_thread) -> None:
    pager = make_pager()
    model = pager.page_module(mlp())
    with pager.iteration():
        loss_of(model).backward()
        pager.close()
    assert "was closed" in repr(model[0].weight)


@pytest.mark.parametrize("inside", [True, False])
def test_context_manager_closes_on_an_exception(one_thread, inside: bool) -> None:
    optimizers = []

    def fail() -> None:
        with make_pager() as pager:
            model, optimizer = _trained(pager)
            optimizers.append(optimizer)
            if inside:
                with pager.iteration():
                    loss_of(model).backward()
                    raise _StopError
            raise _StopError

    with pytest.raises(_StopError):
        fail()
    with pytest.raises(tp.PagerError, match="was closed"):
        optimizers[0].step()


def test_another_pager_after_close_takes_the_model(one_thread) -> None:
    with make_pager() as pager:
        _trained(pager)  # leaves models of its own behind
        model = pager.page_module(mlp())
        state = pager.state_dict()["models"][-1]
        assert_same(plain(state), plain(model.state_dict()))
    with make_pager() as pager:
        twin = pager.page_module(mlp())
        twin.load_state_dict(state)
        assert_same(plain(twin.state_dict()), plain(state))
        train(World(pager), twin, pager.optimizer(torch.optim.AdamW(twin.parameters())), 1)


def test_what_a_traceback_holds_can_be_printed_after_close(one_thread: None) -> None:
    with make_pager() as pager:
        weight = pager.page(torch.randn(128, 128))
        with pytest.raises(RuntimeError, match="cannot be multiplied") as caught:
            torch.mm(weight, torch.randn(3, 3))
    held = []
    frame = caught.value.__traceback__
    while frame is not None:
        for value in frame.tb_frame.f_locals.values():
            items = value if isinstance(value, list | tuple) else [value]
            held += [v for v in items if type(v) is torch.Tensor]
        frame = frame.tb_next
    assert any(v.numel() == 0 for v in held), "no view of the arena was in reach"
    assert all(isinstance(repr(v), str) for v in held)
