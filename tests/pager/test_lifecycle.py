"""Evaluation, other shapes, exceptions and threads between iterations of training."""

import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tensorpager as tp

from .models import World, batch, loss_of, mlp, plain, train


# -- other things than training ------------------------------------------------------------------
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("inside", [True, False])
def test_evaluation(same, mode, inside: bool) -> None:
    def script(world: World) -> object:
        model = world.module(nn.Sequential(mlp(), nn.Dropout(0.1), nn.BatchNorm1d(10)))
        optimizer = world.optimizer(torch.optim.AdamW(model.parameters()))
        results = []
        for _ in range(3):
            results.append(train(world, model, optimizer, 1))
            model.eval()
            if inside:
                with world.iteration(), mode():
                    results.append(plain(model(batch(96)[0])))
            else:
                with mode():
                    results.append(plain(model(batch(96)[0])))
            model.train()
        return results, model

    same(script)


def test_training_after_inference_mode(same) -> None:
    """Tensors touched first in inference mode can still be trained."""

    def script(world: World) -> object:
        model = world.module(mlp())
        with torch.inference_mode():
            first = plain(model(batch()[0]))
        optimizer = world.optimizer(torch.optim.AdamW(model.parameters()))
        return first.tolist(), train(world, model, optimizer, 2), model

    same(script)


def test_batches_of_other_shapes(same) -> None:
    def script(world: World) -> object:
        model = world.module(mlp())
        optimizer = world.optimizer(torch.optim.AdamW(model.parameters()))
        losses = []
        for size in (32, 64, 7, 200, 64):
            with world.iteration():
                loss = loss_of(model, size)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        return losses, model

    same(script)


# -- exceptions ----------------------------------------------------------------------------------
class _StopError(Exception):
    pass


PLACES = ("forward", "backward", "before the step", "after the step")


@pytest.mark.parametrize(
    ("after", "where"),
    [
        (0, "backward"),
        *((2, place) for place in PLACES),
        *(
            pytest.param(0, place, marks=pytest.mark.slow)
            for place in PLACES
            if place != "backward"
        ),
    ],
)
def test_exception_in_an_iteration(same, where: str, after: int) -> None:
    """``after`` good iterations; the ones after the exception are as if it were caught plainly."""

    def fail(here: str) -> None:
        if here == where:
            raise _StopError

    def script(world: World) -> object:
        model = world.module(mlp())
        optimizer = world.optimizer(torch.optim.AdamW(model.parameters()))
        losses = train(world, model, optimizer, after)
        hook = model[0].weight.register_hook(lambda grad: fail("backward"))

        def failing() -> None:
            with world.iteration():
                inputs, labels = batch()
                hidden = model[:3](inputs)
                fail("forward")
                F.cross_entropy(model[3:](hidden), labels).backward()
                fail("before the step")
                optimizer.step()
                fail("after the step")

        with pytest.raises(_StopError):
            failing()
        hook.remove()
        optimizer.zero_grad()
        return losses, train(world, model, optimizer, 2), model, optimizer

    same(script)


def test_exception_in_a_step_leaves_the_groups_whole(same) -> None:
    def script(world: World) -> object:
        model = world.module(mlp())
        optimizer = world.optimizer(torch.optim.AdamW(model.parameters()))
        train(world, model, optimizer, 1)

        def closure() -> None:
            raise _StopError

        with pytest.raises(_StopError):
            optimizer.step(closure)
        assert sum(len(g["params"]) for g in optimizer.param_groups) == 8
        return train(world, model, optimizer, 1), model

    same(script)


def test_iterations_do_not_nest(lane_pager: tp.Pager) -> None:
    with (
        lane_pager.iteration(),
        pytest.raises(tp.PagerError, match="nest"),
        lane_pager.iteration(),
    ):
        pass
    with lane_pager.iteration():
        pass


# -- threads -------------------------------------------------------------------------------------
def test_training_in_another_thread(same) -> None:
    def script(world: World) -> object:
        model = world.module(mlp())
        optimizer = world.optimizer(torch.optim.AdamW(model.parameters()))
        losses: list[float] = []
        worker = threading.Thread(
            target=lambda: losses.extend(train(world, model, optimizer)), daemon=True
        )
        worker.start()
        worker.join(300)
        return losses, model

    same(script)


def test_forward_passes_in_other_threads(same) -> None:
    """PyTorch's hooks on saved tensors are those of one thread: what others save stays dense."""

    def script(world: World) -> object:
        model = world.module(mlp())
        optimizer = world.optimizer(torch.optim.AdamW(model.parameters()))
        losses = []
        for _ in range(3):
            inputs = [batch() for _ in range(3)]
            outputs: dict[int, torch.Tensor] = {}

            def forward(index: int, x: torch.Tensor, outputs=outputs) -> None:
                outputs[index] = model(x)

            with world.iteration():
                workers = [
                    threading.Thread(target=forward, args=(i, x), daemon=True)
                    for i, (x, _) in enumerate(inputs)
                ]
                for worker in workers:
                    worker.start()
                for worker in workers:
                    worker.join(300)
                for i, (_, y) in enumerate(inputs):
                    # One by one: nodes that several threads made have no order of their own, so
                    # in one backward pass gradients would be summed in any order.
                    loss = F.cross_entropy(outputs[i], y)
                    loss.backward()
                    losses.append(loss.item())
                optimizer.step()
                optimizer.zero_grad()
        return losses, model

    same(script, frames=28)


@pytest.mark.parametrize("around", ["run", "backward"])
def test_under_the_profiler_of_the_user(same, around: str) -> None:
    """Metering uses PyTorch's profiler too; there is one only. One that is started around part of
    an iteration works from the second iteration on (the first: see the test below)."""

    def script(world: World) -> object:
        model = world.module(mlp())
        optimizer = world.optimizer(torch.optim.AdamW(model.parameters()))
        if around == "backward":
            train(world, model, optimizer, 1)
        if around == "run":
            with torch.profiler.profile(profile_memory=True) as profiler:
                losses = train(world, model, optimizer, 2)
        else:
            with world.iteration():
                loss = loss_of(model)
                with torch.profiler.profile() as profiler:
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            losses = train(world, model, optimizer, 2)
        assert len(profiler.events()) > 10
        return losses, model

    same(script)


def profiled_metered_iteration(pager: tp.Pager) -> None:
    model = pager.page_module(mlp())
    optimizer = pager.optimizer(torch.optim.AdamW(model.parameters()))
    try:
        with pager.iteration(), torch.profiler.profile() as profiler:
            loss_of(model).backward()
        assert len(profiler.events()) > 10
    finally:
        train(World(pager), model, optimizer, 2)
        assert pager.core.budget.settled


def test_a_profiler_works_inside_the_metered_iteration(allocator, tight_pager) -> None:
    profiled_metered_iteration(tight_pager)


def test_without_an_allocator_it_is_refused(no_allocator, tight_pager) -> None:
    """By PyTorch, in its words; nothing is lost and the next iteration is metered instead."""
    with pytest.raises(RuntimeError, match="Profiler is already enabled"):
        profiled_metered_iteration(tight_pager)
