"""Where everything fits with much to spare, calls of known shapes save as in plain PyTorch: no
hooks on saved tensors are on. Whatever takes more than before has them on."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import tensorpager as tp
from tensorpager.pager import core

from .models import assert_same, plain

WIDTH, ROWS = 256, 256
MIB = 1 << 20


class Rounds(nn.Module):
    """Its layers run as often as ``rounds`` says, those of ``more`` where ``deeper`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.more = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.rounds, self.deeper, self.plain_rounds = 1, False, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, more in zip(self.layers, self.more):
            for _ in range(self.rounds):
                x = torch.tanh(layer(x) + x)
            for _ in range(self.plain_rounds):
                x = x * torch.sigmoid(x)
            x = more(x).tanh() if self.deeper else x
        return x


class Training:
    def __init__(self, budget: int | None, **options: Any) -> None:
        torch.manual_seed(0)
        self.model, self.losses = Rounds(), []
        self.pager = None
        if budget is not None:
            options = {"host_budget": "512MiB", "policy": "lru", "page_size": "64KiB", **options}
            self.pager = tp.Pager(budget, device="cpu", **options)
            self.pager.page_module(self.model)
        optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.optimizer = optimizer if self.pager is None else self.pager.optimizer(optimizer)
        self.were_on: list[bool] = []

    def step(self, rows: int = ROWS) -> torch.Tensor:
        if self.pager is None:
            return self._step(rows)
        with self.pager.iteration():
            loss = self._step(rows)
        stats = self.pager.stats()
        assert stats["peak_bytes"]["device"] <= stats["budget_bytes"]["device"]
        return loss

    def _step(self, rows: int) -> torch.Tensor:
        loss = self.model(torch.randn(rows, WIDTH)).square().mean()
        if self.pager is not None:
            self.were_on.append(self.pager.core.saved.are_asked())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())
        return loss


def both(script: Callable[[Training], object], budget: int) -> list[bool]:
    """``script`` ends as in plain PyTorch; whether hooks were on after each forward pass."""
    ends = []
    for given in (None, budget):
        training = Training(given)
        script(training)
        ends.append([training.losses, plain(training.model)])
        if training.pager is not None:
            training.pager.close()
    assert_same(ends[1], ends[0])
    return training.were_on


@contextmanager
def after_three_steps(budget: int) -> Iterator[tuple[Training, tp.Pager]]:
    training = Training(budget)
    assert training.pager is not None
    with training.pager as pager:
        for _ in range(3):
            training.step()
        yield training, pager


@pytest.fixture(autouse=True)
def nothing_stays_on() -> Iterator[None]:
    yield
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


@pytest.fixture(scope="module")
def need() -> int:
    with_room = Training(256 * MIB)
    assert with_room.pager is not None
    with with_room.pager:
        with_room.step()
        return with_room.pager.core.profile_run.needed_bytes


def test_hooks_are_off_once_the_shapes_are_known(one_thread: None, need: int) -> None:
    def script(training: Training) -> None:
        for rows in (ROWS, ROWS, ROWS, ROWS // 2, ROWS + 8, ROWS + 8, ROWS):
            training.step(rows)

    metered, first, larger = [True], [True], [True]  # in the first one weights are opened
    assert both(script, 4 * need) == [*metered, *first, False, False, *larger, False, False]
    assert all(both(script, int(1.2 * need)))  # not much is left
    assert all(both(script, need // 2))


@pytest.mark.parametrize("share", [1.34, 2.0])
@pytest.mark.parametrize("rounds", [2, 6, 12])
@pytest.mark.parametrize("what", ["rounds", "plain_rounds"])
def test_more_rounds_than_before(one_thread: None, need: int, what: str, rounds: int, share: float):
    def script(training: Training) -> None:
        for some in (1, 1, 1, rounds, 1, rounds):
            setattr(training.model, what, some if what == "rounds" else 4 * (some - 1))
            training.step()

    both(script, int(share * need))


def test_they_stay_on_in_an_iteration_that_did_more(one_thread: None, need: int) -> None:
    with after_three_steps(4 * need) as (training, pager):
        saved = pager.core.saved
        with pager.iteration():
            for rounds, on in ((1, False), (2, True), (1, True)):
                training.model.rounds = rounds
                training.model(torch.randn(ROWS // 4, WIDTH))
                assert saved.are_asked() is on
        training.step()
        assert not training.were_on[-1]


def test_layers_that_were_not_used_before(one_thread: None, need: int) -> None:
    def script(training: Training) -> None:
        for deeper in (False, False, False, True, True, False):
            training.model.deeper = deeper
            training.step()

    assert both(script, 4 * need) == [True, True, False, True, True, False]


def test_layers_that_are_thawed(one_thread: None, need: int) -> None:
    def script(training: Training) -> None:
        training.model.layers.requires_grad_(False)
        training.model.deeper = True
        for thaw in (False, False, False, True, False):
            if thaw:
                training.model.layers.requires_grad_(True)
            training.step()

    assert both(script, 6 * need) == [True, True, False, True, False]


def test_hooks_of_the_user_are_asked(one_thread: None, need: int) -> None:
    packed = []

    def script(training: Training) -> None:
        training.step()
        training.step()
        with saved_tensors_hooks(lambda t: packed.append(t.shape) or t, lambda t: t):
            training.step()
        training.step()

    both(script, 4 * need)
    half = len(packed) // 2
    assert half
    assert packed[:half] == packed[half:]


def test_they_come_on_again_below_those_of_others(one_thread: None, need: int) -> None:
    """Which end theirs by taking off the topmost."""

    def script(training: Training) -> None:
        for _ in range(4):
            training.step()
        if training.pager is None:
            training.model.deeper = True
            training.losses.append(training.model(torch.randn(ROWS, WIDTH)).sum().item())
            return
        saved = training.pager.core.saved
        with training.pager.iteration(), saved_tensors_hooks(torch.Tensor.detach, lambda t: t):
            with saved_tensors_hooks(torch.Tensor.detach, lambda t: t):
                training.model(torch.zeros(ROWS, WIDTH))
                assert not saved.is_on
                training.model.deeper = True
                training.losses.append(training.model(torch.randn(ROWS, WIDTH)).sum().item())
                assert saved.is_on
            assert not saved.are_asked()

    both(script, 4 * need)


def test_hooks_that_were_on_before_are_below(one_thread: None, need: int) -> None:
    with after_three_steps(4 * need) as (training, pager):
        saved = pager.core.saved
        before, after = (saved_tensors_hooks(torch.Tensor.detach, lambda t: t) for _ in range(2))
        with before, pager.iteration():
            with after:
                training.model(torch.zeros(ROWS, WIDTH))
                assert not saved.is_on
                training.model.deeper = True
                training.model(torch.zeros(ROWS, WIDTH))
                assert saved.is_on
                assert not saved.are_asked()
            assert saved.are_asked()


def test_a_weight_that_was_changed_is_pytorchs_error(one_thread: None, need: int) -> None:
    errors = []
    for budget in (None, 4 * need):
        training = Training(budget)
        for _ in range(3):
            training.step()
        loss = None
        try:
            if training.pager is None:
                loss = training.model(torch.randn(ROWS, WIDTH)).sum()
            else:
                with training.pager.iteration():
                    loss = training.model(torch.randn(ROWS, WIDTH)).sum()
                    assert not training.pager.core.saved.is_on
            training.step()
            with pytest.raises(RuntimeError, match="modified by an inplace") as error:
                loss.backward()
            errors.append(str(error.value).partition(" is at version")[0])
        finally:
            if training.pager is not None:
                del loss
                training.pager.close()
    assert errors[1] == errors[0]


def test_an_arena_goes_when_the_last_graph_has_gone(one_thread: None, need: int) -> None:
    gc.collect()
    core.close_arenas()  # of other tests
    training = Training(4 * need)
    for _ in range(3):
        training.step()
    assert training.pager is not None
    x = torch.randn(ROWS, WIDTH).requires_grad_()
    with training.pager.iteration():
        result = training.model(x)
        assert not training.pager.core.saved.is_on
    weights = [plain(p) for p in training.model.parameters()]
    training.pager.close()
    assert len(core._left_to_others) == 1
    result.sum().backward(inputs=[x])
    expected = Rounds()
    with torch.no_grad():
        for parameter, weight in zip(expected.parameters(), weights, strict=True):
            parameter.copy_(weight)
    again = x.detach().requires_grad_()
    expected(again).sum().backward()
    assert torch.equal(x.grad, again.grad)
    del result
    gc.collect()
    Training(4 * need).pager.close()
    assert not core._left_to_others
