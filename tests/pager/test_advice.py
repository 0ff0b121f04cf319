"""Trainings that leave out a line are told which."""

import warnings

import pytest
import torch
from torch import nn

import tensorpager as tp
from tensorpager.pager.devices.dense_allocator import DenseAllocator

SIZE = 64 << 10
LINE = r"Put .with pager.iteration\(\):. around"
pytestmark = pytest.mark.usefixtures("one_thread")


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(64, 256)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def make_pager(budget: str = "64MiB") -> tp.Pager:
    return tp.Pager(budget, "64MiB", page_size=SIZE, device="cpu", policy="lru")


@pytest.mark.parametrize("paged", [True, False])
def test_steps_outside_of_iterations_are_warned_of_once(paged: bool) -> None:
    for _ in range(2):  # of each pager
        with make_pager() as pager:
            model = pager.page_module(nn.Linear(256, 256))
            optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
            if paged:
                pager.optimizer(optimizer)
            with pytest.warns(UserWarning, match=LINE):
                step(model, optimizer)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                step(model, optimizer)


def test_nobody_else_is_warned() -> None:
    with make_pager() as pager, warnings.catch_warnings():
        warnings.simplefilter("error")
        model = pager.page_module(nn.Linear(256, 256))
        optimizer = pager.optimizer(torch.optim.AdamW(model.parameters()))
        for _ in range(2):
            with pager.iteration():
                step(model, optimizer)
        with torch.no_grad():
            model(torch.ones(2, 256))
        plain = nn.Linear(256, 256)
        step(plain, torch.optim.AdamW(plain.parameters()))


def test_peaks_outside_of_iterations_are_counted(allocator: DenseAllocator) -> None:
    with make_pager() as pager:
        model = pager.page_module(nn.Linear(256, 256, bias=False))
        optimizer = pager.optimizer(torch.optim.SGD(model.parameters()))
        with pytest.warns(UserWarning, match=LINE):
            step(model, optimizer)
        torch.empty(32 << 20, dtype=torch.uint8)
        step(model, optimizer)
        peak = pager.stats()["peak_bytes"]["device"]
        assert 32 << 20 < peak < 40 << 20


@pytest.mark.usefixtures("no_allocator")
def test_without_an_allocator_of_our_own_frames_are_counted() -> None:
    with make_pager() as pager:
        model = pager.page_module(nn.Linear(256, 256, bias=False))
        with pytest.warns(UserWarning, match=LINE):
            step(model, pager.optimizer(torch.optim.SGD(model.parameters())))
        assert pager.stats()["peak_bytes"]["device"] >= 4 * SIZE


def test_a_refusal_says_that_the_optimizer_is_not_paged() -> None:
    with make_pager("1536KiB") as pager:
        model = pager.page_module(nn.Sequential(*(nn.Linear(256, 256) for _ in range(6))))
        dense = torch.optim.AdamW(model.parameters(), foreach=False)
        with pytest.raises(tp.InfeasibleBudget) as refused, pager.iteration():
            step(model, dense)
        assert "This optimizer is not paged: wrap it with pager.optimizer(...)" in str(
            refused.value
        )
        assert "AdamW" in str(refused.value)
        assert "self._op(" not in str(refused.value)  # how PyTorch calls an op


def test_optimizers_without_states_are_not_blamed() -> None:
    with make_pager("1536KiB") as pager:
        model = pager.page_module(nn.Sequential(*(nn.Linear(256, 256) for _ in range(6))))
        optimizer = torch.optim.SGD(model.parameters(), foreach=False)

        def train() -> torch.Tensor:
            with pager.iteration():
                step(model, optimizer)
                return torch.empty(32 << 20, dtype=torch.uint8)

        with pytest.raises(tp.InfeasibleBudget) as refused:
            train()
        assert "not paged" not in str(refused.value)
