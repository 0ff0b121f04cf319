"""Experts: parameters that some iterations use and others do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tensorpager as tp
from tensorpager.pager.debug.check import check_invariants

from .models import assert_same, plain

WIDTH, EXPERTS, STEPS = 160, 4, 14


class Block(nn.Module):
    """A layer that every row goes through, and one of some experts for each row."""

    def __init__(self, biases: bool) -> None:
        super().__init__()
        self.mix, self.router = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, EXPERTS)
        experts = [nn.Linear(WIDTH, WIDTH, bias=biases) for _ in range(EXPERTS)]
        self.experts = nn.ModuleList(experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mix(x).tanh()
        weight, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == number)
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        return x + out


def train(pager: tp.Pager | None, biases: bool) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(biases) for _ in range(4)), nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    if pager is not None:
        pager.page_module(model)
        pager.optimizer(optimizer)
    losses = []

    def step() -> None:
        loss = model(torch.randn(3, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    for _ in range(STEPS):
        if pager is None:
            step()
            continue
        with pager.iteration():
            step()
        follower = pager.core.follower
        assert follower is not None
        follower.wait_for_plans()
        check_invariants(pager.core)
    if pager is not None:
        optional = {
            name
            for name, parameter in model.named_parameters()
            if type(parameter) is tp.PagedTensor and parameter._storage.run.optional
        }
        named = {name for name, _ in model.named_parameters() if ".experts." in name}
        assert optional == named
    return [losses, plain(model.state_dict())]


@pytest.mark.parametrize("biases", [False, True])
def test_iterations_that_use_other_experts_are_one_kind_and_planned(
    biases: bool, one_thread: None
) -> None:
    """Plain's bits, too; no expert that was not used leaves the plan. Small parameters of experts
    share pages with nothing else."""
    expected = train(None, biases)
    with tp.Pager(
        device_budget="5MiB", host_budget="32MiB", page_size="64KiB", device="cpu"
    ) as pager:
        follower = pager.core.follower
        assert follower is not None
        follower.only_if_faster = False
        assert_same(train(pager, biases), expected)
        stats = pager.stats()
        assert not stats["fits"]
        assert stats["planned_iterations"] >= STEPS // 3
        assert stats["departures"] == 0
        assert stats["kinds"] <= 3
        assert stats["peak_bytes"]["device"] <= stats["budget_bytes"]["device"]
