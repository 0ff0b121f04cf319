"""Parameters updated during backward: the bits of plain training, and off where it is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tensorpager as tp
from tensorpager.pager.debug.chaos import chaos, scattered
from tensorpager.pager.debug.check import check_invariants

from .models import World, batch, compare_runs, loss_of, make_pager, mlp, train

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=False),
    "adam-amsgrad": lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True, foreach=False),
    "adam-maximize": lambda p: torch.optim.Adam(p, maximize=True, weight_decay=0.1, foreach=False),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, foreach=False),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=False),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5, foreach=False),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, lr_decay=0.1, foreach=False),
    "tensor-lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-3), foreach=False),
}
adamw = OPTIMIZERS["adamw"]
NEVER = pytest.mark.filterwarnings("error:the overlap of backward")


class Early(World):
    """The paged world with ``overlap=True``."""

    def optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return self.pager.optimizer(optimizer, overlap=True)


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    pass


@pytest.fixture
def early() -> Iterator[Early]:
    with make_pager() as pager:
        yield Early(pager)


def updates(world: World) -> int:
    return 0 if world.pager is None else world.pager.core.in_backward.updates


def reason(optimizer: Any) -> str | None:
    """Why its overlap is off for good."""
    return optimizer._tp_paged.in_backward.off


def step(world: World, optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor]) -> float:
    """One iteration in the way that overlap is for."""
    with world.iteration():
        value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
    return value.item()


# -- the same bits -------------------------------------------------------------------------------
@NEVER
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizer(early: Early, kind: str) -> None:
    def script(world: World) -> object:
        model = world.module(mlp())
        optimizer = world.optimizer(OPTIMIZERS[kind](model.parameters()))
        return train(world, model, optimizer, 8), model, optimizer

    compare_runs(script, early)
    assert updates(early) == 6 * 8, "all 8 parameters in all steps after the first two"


@NEVER
@pytest.mark.parametrize("lane", ["chaos", "scattered", "one op at a time", "disk"])
def test_under_pressure(lane: str, tmp_path: Any) -> None:
    options: dict[str, Any] = {"frames": 11 if lane == "one op at a time" else 20}
    if lane == "disk":
        options |= {"host_budget": "256KiB", "disk_budget": "16MiB", "disk_path": tmp_path}
    lanes: dict[str, Callable[[Any], Any]] = {"chaos": chaos, "scattered": scattered}

    def script(world: World) -> object:
        model = world.module(mlp())
        optimizer = world.optimizer(OPTIMIZERS["adam-amsgrad"](model.parameters()))
        return train(world, model, optimizer, 5), model, optimizer

    with make_pager(**options) as pager, lanes.get(lane, lambda pager: nullcontext())(pager.core):
        compare_runs(script, Early(pager))
        assert pager.core.in_backward.updates == 3 * 8
        assert not pager.core.stepping


@NEVER
def test_no_gradient_goes_into_pages(early: Early) -> None:
    pager = early.pager
    model = early.module(mlp())
    optimizer = early.optimizer(adamw(model.parameters()))
    train(early, model, optimizer, 2)
    pages = []

    def look(*_: Any) -> None:
        with pager.core.lock:
            pager.core.residency.collect()
        pages.append(pager.core.space.kind_pages.get("gradient", 0))

    for layer in model[1:]:
        layer.register_full_backward_hook(look)
    for _ in range(3):
        with early.iteration():
            loss_of(model).backward()
            look()
            assert all(p.grad is None for p in model.parameters())
            optimizer.step()
    assert len(pages) == 3 * len(model)
    assert not any(pages)
    assert pager.stats()["bytes_out"] > 0


@NEVER
def test_groups_frozen_and_unused_parameters_and_a_schedule(early: Early) -> None:
    def script(world: World) -> object:
        model = mlp()
        model[2].weight.requires_grad_(False)
        model = world.module(model)
        unused = world.module(nn.Linear(256, 256))
        groups = [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() < 2], "lr": 1e-2},
            {"params": list(unused.parameters()), "amsgrad": True},
        ]
        optimizer = world.optimizer(torch.optim.AdamW(groups, lr=1e-3, foreach=False))
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        losses = []
        for number in range(8):
            if number == 5:
                model.requires_grad_(True)
            losses.append(step(world, optimizer, lambda: loss_of(model)))
            schedule.step()
        return losses, model, unused, optimizer, schedule.state_dict()

    compare_runs(script, early)
    assert updates(early) == 7 * 3 + 7 + 8 + 8, "the unfrozen one takes its first step as usual"


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(500, 128)
        self.mix = nn.Linear(128, 128)
        self.head = nn.Linear(128, 500, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.mix(self.table((x[:, 0].abs() * 500).long() % 500)).relu())


@NEVER
def test_tied_weights_and_two_losses_in_one_backward_pass(early: Early) -> None:
    def script(world: World) -> object:
        model = world.module(_Tied())
        beside = world.module(mlp())  # so that pages must move
        optimizer = world.optimizer(adamw([*model.parameters(), *beside.parameters()]))
        both = lambda: loss_of(model) + 0.5 * loss_of(model) + loss_of(beside)  # noqa: E731
        return [step(world, optimizer, both) for _ in range(5)], model, optimizer

    compare_runs(script, early)
    assert updates(early) == 3 * 11


@NEVER
def test_checkpointed_layers(early: Early) -> None:
    def script(world: World) -> object:
        model = world.module(mlp())
        optimizer = world.optimizer(adamw(model.parameters()))

        def loss() -> torch.Tensor:
            inputs, labels = batch()
            half = torch.utils.checkpoint.checkpoint(model[:3], inputs, use_reentrant=False)
            return F.cross_entropy(model[3:](half), labels)

        return [step(world, optimizer, loss) for _ in range(5)], model, optimizer

    compare_runs(script, early)
    assert updates(early) == 3 * 8


@NEVER
def test_two_optimizers_of_one_backward_pass(early: Early) -> None:
    def script(world: World) -> object:
        model = world.module(mlp())
        first = world.optimizer(adamw(model[:3].parameters()))
        second = world.optimizer(OPTIMIZERS["momentum"](model[3:].parameters()))
        losses = []
        for _ in range(5):
            with world.iteration():
                first.zero_grad()
                second.zero_grad()
                loss = loss_of(model)
                loss.backward()
                first.step()
                second.step()
            losses.append(loss.item())
        first.zero_grad()
        second.zero_grad()
        return losses, model, first, second

    compare_runs(script, early)
    assert updates(early) == 3 * 8


@NEVER
def test_hooks_and_counts_of_step(early: Early) -> None:
    model = early.module(mlp())
    optimizer = early.optimizer(adamw(model.parameters()))
    seen: list[str] = []
    optimizer.register_step_post_hook(lambda opt, args, kwargs: seen.append("post"))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(4):
        step(early, optimizer, lambda: loss_of(model))
        schedule.step()  # warns if it sees no step before
    assert seen == ["post"] * 4
    assert {float(s["step"]) for s in optimizer.state.values()} == {4.0}


# -- held for one backward pass, or one parameter ------------------------------------------------
@NEVER
def test_a_new_shape_is_metered_and_steps_as_usual(early: Early) -> None:
    def script(world: World) -> object:
        model = world.module(mlp())
        optimizer = world.optimizer(adamw(model.parameters()))
        sizes = [64, 64, 64, 80, 64]
        return [step(world, optimizer, lambda n=n: loss_of(model, n)) for n in sizes], model

    compare_runs(script, early)
    assert updates(early) == 2 * 8


@NEVER
def test_everything_fits() -> None:
    def script(world: World) -> object:
        model = world.module(mlp())
        optimizer = world.optimizer(adamw(model.parameters()))
        return train(world, model, optimizer, 5), model, optimizer

    with make_pager(fits=True) as pager:
        compare_runs(script, Early(pager), must_move=False)
        assert pager.core.fits
        assert pager.core.in_backward.updates == 0


@NEVER
def test_no_dense_room_for_an_update(early: Early, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest matrices are left to step()."""

    def script(world: World) -> object:
        model = world.module(mlp())
        optimizer = world.optimizer(adamw(model.parameters()))
        losses = train(world, model, optimizer, 2)
        if world.pager is not None:
            has_room = world.pager.core.in_backward.has_room
            small = lambda p, n: n < 300_000 and has_room(p, n)  # noqa: E731
            monkeypatch.setattr(world.pager.core.in_backward, "has_room", small)
        return losses, train(world, model, optimizer, 2), model, optimizer

    compare_runs(script, early)
    assert updates(early) == 2 * 6


@NEVER
def test_temporaries_of_updates_are_known_and_stay_in_the_reserve(early: Early) -> None:
    model = early.module(mlp())
    optimizer = early.optimizer(adamw(model.parameters()))
    train(early, model, optimizer, 3)
    overlap, (weight, *_) = early.pager.core.in_backward, list(model.parameters())
    assert 2 <= optimizer._tp_paged.in_backward.needs[0] < 2.5, (
        "AdamW makes two tensors of its size"
    )
    assert overlap.has_room(weight, 0)
    assert not overlap.has_room(weight, early.pager.core.budget.reserve + 1)


@NEVER
def test_the_reserve_foresees_updates_of_large_matrices() -> None:
    def script(world: World) -> object:
        model = world.module(mlp(1024))
        optimizer = world.optimizer(adamw(model.parameters()))
        return train(world, model, optimizer, 4), model, optimizer

    with make_pager(device_budget="32MiB", dense_reserve="auto") as pager:
        compare_runs(script, Early(pager))
        largest = 4 << 20
        assert not pager.core.fits
        assert pager.core.in_backward.updates == 2 * 8
        # Its gradient and AdamW's two tensors of its size, where backward alone took two.
        assert pager.stats()["dense_peak_bytes"] < 3 * largest <= pager.core.in_backward.dense_peak
        assert pager.core.in_backward.dense_peak <= pager.core.budget.reserve


@NEVER
def test_a_step_skipped_for_a_gradient_that_is_not_finite(early: Early) -> None:
    def script(world: World) -> object:
        model = world.module(mlp())
        optimizer = world.optimizer(adamw(model.parameters()))
        losses = train(world, model, optimizer, 3)
        before = updates(world)
        with world.iteration():
            loss = loss_of(model) * float("nan")
            loss.backward()
            if torch.isfinite(loss):
                optimizer.step()
            optimizer.zero_grad()
        assert updates(world) == before
        return losses, train(world, model, optimizer, 2), model, optimizer

    compare_runs(script, early)
    assert updates(early) == 3 * 8


@NEVER
def test_a_step_taken_with_gradients_that_are_not_finite(early: Early) -> None:
    def script(world: World) -> object:
        model = world.module(mlp())
        optimizer = world.optimizer(adamw(model.parameters()))
        train(world, model, optimizer, 3)
        nan = lambda: loss_of(model[:3]) + float("inf") * loss_of(model)  # noqa: E731
        step(world, optimizer, nan)
        return model, optimizer

    compare_runs(script, early)


@NEVER
def test_gradients_from_before_are_added_to_and_wait(early: Early) -> None:
    def script(world: World) -> object:
        model = world.module(mlp())
        optimizer = world.optimizer(adamw(model.parameters()))
        losses = train(world, model, optimizer, 3)
        loss_of(model).backward()  # outside of an iteration
        losses += train(world, model, optimizer, 1)
        return losses, train(world, model, optimizer, 2), model, optimizer

    compare_runs(script, early)
    assert updates(early) == 3 * 8


@NEVER
def test_sparse_gradients_and_hooks_of_the_users_wait_alone(early: Early) -> None:
    def script(world: World) -> object:
        seen = []
        table = world.module(nn.Embedding(300, 128, sparse=True))
        model = world.module(mlp())
        optimizer = world.optimizer(
            torch.optim.SGD([*table.parameters(), *model.parameters()], lr=0.1, foreach=False)
        )

        def loss() -> torch.Tensor:
            inputs, labels = batch()
            return F.cross_entropy(model(inputs + table(labels)), labels)

        losses = [step(world, optimizer, loss) for _ in range(3)]
        hook = lambda p: seen.append(p.grad.sum().item())  # noqa: E731
        model[2].weight.register_post_accumulate_grad_hook(hook)
        return losses, [step(world, optimizer, loss) for _ in range(2)], seen, table, model

    compare_runs(script, early)
    assert updates(early) == 8 + 2 * 7


@NEVER
@pytest.mark.filterwarnings("ignore:Using backward")  # PyTorch says it once in a process
def test_gradients_with_a_graph(early: Early) -> None:
    def script(world: World) -> object:
        model = world.module(mlp())
        optimizer = world.optimizer(OPTIMIZERS["momentum"](model.parameters()))
        losses = train(world, model, optimizer, 3)
        with world.iteration():
            loss_of(model).backward(create_graph=True)
            optimizer.step()
            optimizer.zero_grad()
        return losses, train(world, model, optimizer, 1), model

    compare_runs(script, early)
    assert updates(early) == 2 * 8


@NEVER
def test_a_parameter_of_two_optimizers_waits(early: Early) -> None:
    def script(world: World) -> object:
        model = world.module(mlp())
        first = world.optimizer(adamw(model.parameters()))
        second = world.optimizer(OPTIMIZERS["sgd"](model[2].parameters()))
        losses = []
        for _ in range(4):
            with world.iteration():
                loss = loss_of(model)
                loss.backward()
                first.step()
                second.step()
                first.zero_grad()
            losses.append(loss.item())
        return losses, model, first

    compare_runs(script, early)
    assert updates(early) == 2 * 6


@NEVER
def test_no_room_below_to_bring_states_in(early: Early, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiers are too full for all of a parameter at once: it is updated op by op."""

    def script(world: World) -> object:
        model = world.module(mlp())
        optimizer = world.optimizer(adamw(model.parameters()))
        losses = train(world, model, optimizer, 3)
        if world.pager is not None:
            take = world.pager.core.take

            def full(runs: Any, write: Any = (), **how: Any) -> None:
                if len(runs) >= 3 and sum(run.count for run in runs) >= 12:
                    raise tp.TierFull("full")
                take(runs, write, **how)

            monkeypatch.setattr(world.pager.core, "take", full)
        return losses, train(world, model, optimizer, 2), model, optimizer

    compare_runs(script, early)
    assert updates(early) == 3 * 8


# -- off for good, by itself ---------------------------------------------------------------------
def _clip(world: World, model: nn.Module, optimizer: Any) -> None:
    loss_of(model).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=False)
    optimizer.step()


def _look(world: World, model: nn.Module, optimizer: Any) -> None:
    loss_of(model).backward()
    assert model[0].bias.grad.abs().sum().isfinite()
    optimizer.step()


def _replace(world: World, model: nn.Module, optimizer: Any) -> None:
    loss_of(model).backward()
    model[0].bias.grad = torch.ones(256)
    optimizer.step()


def _accumulate(world: World, model: nn.Module, optimizer: Any) -> None:
    for _ in range(2):
        loss_of(model).backward()
    optimizer.step()


def _keep_zeros(world: World, model: nn.Module, optimizer: Any) -> None:
    loss_of(model).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def _late_lr(world: World, model: nn.Module, optimizer: Any) -> None:
    loss_of(model).backward()
    optimizer.param_groups[0]["lr"] *= 0.5
    optimizer.step()


def _read_weights(world: World, model: nn.Module, optimizer: Any) -> None:
    loss_of(model).backward()
    model[2].weight.detach().sum()
    optimizer.step()


def _detached(world: World, model: nn.Module, optimizer: Any) -> None:
    """The weight of a later layer is read once more at the end of the backward pass."""
    inputs, labels = batch()
    other = F.linear(model[:2](inputs), model[2].weight.detach())
    F.cross_entropy(model[3:](model[2](other)), labels).backward()
    optimizer.step()


def _twice(world: World, model: nn.Module, optimizer: Any) -> None:
    loss_of(model).backward()
    optimizer.step()
    optimizer.step()


def _closure(world: World, model: nn.Module, optimizer: Any) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    optimizer.step(closure)


def _pre_hook(world: World, model: nn.Module, optimizer: Any) -> None:
    if not optimizer._optimizer_step_pre_hooks:
        hook = lambda opt, *_: model[0].bias.grad.mul_(0.5)  # noqa: E731
        optimizer.register_step_pre_hook(lambda *given: (hook(*given), None)[1])
    loss_of(model).backward()
    optimizer.step()


def _other_backward(world: World, model: nn.Module, optimizer: Any) -> None:
    """Gradients that are thrown away, as of a discriminator."""
    loss_of(model).backward()
    optimizer.step()
    optimizer.zero_grad()
    loss_of(model).backward()


OFF = {
    "clipping": (_clip, "gradients are used"),
    "a look": (_look, "gradients are used"),
    "another gradient": (_replace, "gradients are used"),
    "accumulation": (_accumulate, "several passes"),
    "zeros": (_keep_zeros, "set_to_none"),
    "late lr": (_late_lr, r"\['lr'\] changed"),
    "weights read": (_read_weights, "parameters are used"),
    "weights used detached": (_detached, "parameters are used"),
    "two steps": (_twice, "more than once"),
    "closure": (_closure, "closure"),
    "pre-hook": (_pre_hook, "pre-hook"),
    "other backward": (_other_backward, "without a step"),
}


@pytest.mark.parametrize("name", OFF)
def test_off_by_itself(early: Early, name: str) -> None:
    body, why = OFF[name]

    def script(world: World) -> object:
        model = world.module(mlp())
        optimizer = world.optimizer(adamw(model.parameters()))
        for _ in range(5):
            with world.iteration():
                body(world, model, optimizer)
                if name != "zeros":
                    optimizer.zero_grad()
        return model, optimizer

    with pytest.warns(UserWarning, match=why) as warned:
        compare_runs(script, early)
    assert len([w for w in warned if "overlap" in str(w.message)]) == 1
    assert updates(early) == 0


@pytest.mark.parametrize("where", ["step after", "pass in each"])
def test_off_where_steps_are_not_in_the_iteration(early: Early, where: str) -> None:
    def script(world: World) -> object:
        model = world.module(mlp())
        optimizer = world.optimizer(adamw(model.parameters()))
        for _ in range(3):
            for _ in range(2 if where == "pass in each" else 1):
                with world.iteration():
                    loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    with pytest.warns(UserWarning, match="without a step"):
        compare_runs(script, early)
    assert updates(early) == 0


def test_off_with_a_grad_scaler(early: Early) -> None:
    def script(world: World) -> object:
        model = world.module(mlp())
        optimizer = world.optimizer(adamw(model.parameters()))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=2)
        for _ in range(5):
            with world.iteration():
                scaler.scale(loss_of(model)).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        return model, optimizer, scaler.state_dict()

    with pytest.warns(UserWarning, match="gradients are used"):
        compare_runs(script, early)
    assert updates(early) == 0


class _Own(torch.optim.SGD):
    """Might look at all gradients, so it cannot be taken apart."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_off_for_optimizers_of_the_users_own(early: Early) -> None:
    def script(world: World) -> object:
        model = world.module(mlp())
        optimizer = world.optimizer(_Own(model.parameters(), lr=0.1))
        return train(world, model, optimizer, 4), model

    with pytest.warns(UserWarning, match="_Own is not of torch.optim"):
        compare_runs(script, early)
    assert updates(early) == 0


def test_off_where_checkpointing_nests_backward_passes(early: Early) -> None:
    def script(world: World) -> object:
        model = world.module(mlp())
        optimizer = world.optimizer(adamw(model.parameters()))

        def loss() -> torch.Tensor:
            inputs, labels = batch()
            inputs.requires_grad_(True)
            half = torch.utils.checkpoint.checkpoint(model[:3], inputs, use_reentrant=True)
            return F.cross_entropy(model[3:](half), labels)

        return [step(world, optimizer, loss) for _ in range(4)], model

    with pytest.warns(UserWarning, match="several passes"):
        compare_runs(script, early)
    assert updates(early) == 0


def test_switched_off_again(early: Early) -> None:
    model = early.module(mlp())
    optimizer = early.optimizer(adamw(model.parameters()))
    assert early.pager.core.in_backward.watching
    train(early, model, optimizer, 3)
    assert not early.pager.core.in_backward.watching
    early.pager.optimizer(optimizer)
    train(early, model, optimizer, 2)
    assert updates(early) == 8


def test_an_iteration_that_raises_while_watched(early: Early) -> None:
    model = early.module(mlp())
    optimizer = early.optimizer(adamw(model.parameters()))
    other = early.optimizer(OPTIMIZERS["sgd"](early.module(mlp()).parameters()))
    train(early, model, optimizer, 1)

    def broken() -> None:
        with early.iteration():
            loss_of(model).backward()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        broken()

    def late() -> None:
        with early.iteration():
            other.step()
            optimizer.step()
            optimizer.zero_grad()

    with pytest.warns(UserWarning, match="more than once"):
        late()
    train(early, model, optimizer, 2)
    check_invariants(early.pager.core)


# -- a program that changes its ways -------------------------------------------------------------
def _after_three_steps(early: Early) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = early.module(mlp())
    optimizer = early.optimizer(adamw(model.parameters()))
    train(early, model, optimizer, 3)
    assert updates(early) == 8
    return model, optimizer


def test_a_setting_changed_between_backward_and_step(early: Early) -> None:
    model, optimizer = _after_three_steps(early)
    match = r"\[0\]\['lr'\] changed from 0.001 to 0.0005 .* overlap=False"
    with pytest.raises(tp.PagerError, match=match), early.iteration():
        _late_lr(early, model, optimizer)
    check_invariants(early.pager.core)
    train(early, model, optimizer, 1)


def test_an_iteration_without_a_step(early: Early) -> None:
    model, optimizer = _after_three_steps(early)
    match = r"ended without a step\(\) of AdamW, but 8 .* overlap=False"
    with pytest.raises(tp.PagerError, match=match), early.iteration():
        loss_of(model).backward()
    train(early, model, optimizer, 1)
    assert updates(early) == 3 * 8


def test_a_second_backward_pass(early: Early) -> None:
    model, optimizer = _after_three_steps(early)
    match = r"another backward pass .* 8 of them .* overlap=False"
    with pytest.raises(tp.PagerError, match=match), early.iteration():
        _accumulate(early, model, optimizer)
    check_invariants(early.pager.core)
    optimizer.zero_grad()
    train(early, model, optimizer, 1)


def test_the_old_value_is_still_wanted(early: Early) -> None:
    """Autograd's own check sees an early update."""
    model, optimizer = _after_three_steps(early)
    with pytest.raises(RuntimeError, match="modified by an inplace"), early.iteration():
        _detached(early, model, optimizer)


def test_a_backward_pass_that_breaks_off(early: Early) -> None:
    """What was updated stays so, and the next step() finishes what has a gradient."""
    model, optimizer = _after_three_steps(early)

    def broken(grad: torch.Tensor) -> None:
        raise tp.TierFull("full")

    handle = model[2].weight.register_hook(broken)
    with pytest.raises(tp.TierFull), early.iteration():
        loss_of(model).backward()
    handle.remove()
    assert updates(early) > 8
    assert not early.pager.core.stepping
    assert [len(g["params"]) for g in optimizer.param_groups] == [8]
    counts = {name: int(optimizer.state[p]["step"]) for name, p in model.named_parameters()}
    assert counts["6.weight"] == 4
    assert counts["0.weight"] == 3
    optimizer.step()
    optimizer.zero_grad()
    check_invariants(early.pager.core)
    train(early, model, optimizer, 2)


def test_an_update_that_raises_puts_everything_back(early: Early) -> None:
    model, optimizer = _after_three_steps(early)
    betas = optimizer.param_groups[0]["betas"]
    optimizer.param_groups[0]["betas"] = (0.9,)
    with pytest.raises((ValueError, IndexError)):
        step(early, optimizer, lambda: loss_of(model))
    assert not early.pager.core.stepping
    assert set(optimizer.state) == set(model.parameters())
    assert [len(g["params"]) for g in optimizer.param_groups] == [8]
    optimizer.param_groups[0]["betas"] = betas
    optimizer.zero_grad()
    train(early, model, optimizer, 1)
    check_invariants(early.pager.core)
