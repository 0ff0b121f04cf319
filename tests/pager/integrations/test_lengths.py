"""Batches of another length each, and experts that are chosen by what they are given: plain's bits
at half of the need, and a memory that does not grow with the number of lengths."""

from __future__ import annotations

import random
from typing import Any

import psutil
import pytest
import torch

import tensorpager as tp

from ..models import assert_same, plain
from .tiny import PAGE_BYTES, VOCABULARY, assert_half, llama, mixtral

pytest.importorskip("transformers")

LONGEST = 200


MODELS = {"llama": llama, "mixtral": mixtral}


def batches(count: int, seed: int = 0) -> list[torch.Tensor]:
    chosen = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    lengths = [chosen.randint(LONGEST // 8, LONGEST) for _ in range(count)]
    return [torch.randint(3, VOCABULARY, (2, n), generator=generator) for n in lengths]


def train(model: Any, data: list[torch.Tensor], limits: dict[str, Any] | None) -> list[Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    pager = tp.Pager(**limits) if limits is not None else None
    losses = []

    def step(ids: torch.Tensor) -> None:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    if pager is None:
        for ids in data:
            step(ids)
        return [losses, plain(model.state_dict())]
    pager.page_module(model)
    pager.optimizer(optimizer)
    follower = pager.core.follower
    for number, ids in enumerate(data):
        with pager.iteration():
            step(ids)
        if follower is not None and number == len(data) // 2:
            follower.only_if_faster = False
            follower.wait_for_plans()
    assert_half(pager)
    stats = pager.stats()
    assert follower is None or stats["planned_iterations"] > 0
    assert stats["peak_bytes"]["device"] <= stats["budget_bytes"]["device"]
    assert pager.stats()["kinds"] <= 8
    found = [losses, plain(model.state_dict())]
    pager.close()
    return found


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("policy", ["lp", pytest.param("lru", marks=pytest.mark.slow)])
def test_training(kind: str, policy: str, one_thread: None) -> None:
    data = batches(12)
    expected = train(MODELS[kind](), data, None)
    model = MODELS[kind]()
    need = 4 * sum(p.nbytes for p in model.parameters())
    limits = {
        "device_budget": need // 2 + (4 << 20),
        "host_budget": 8 * need,
        "page_size": PAGE_BYTES,
        "device": "cpu",
        "policy": policy,
    }
    assert_same(train(model, data, limits), expected)


def test_experts_generate(one_thread: None) -> None:
    """Of which other ones are used for each token."""
    model = mixtral().eval()
    prompt = torch.randint(3, VOCABULARY, (1, 11), generator=torch.Generator().manual_seed(1))
    how = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
    expected = model.generate(prompt, **how)
    weights = sum(p.nbytes for p in model.parameters())
    with tp.Pager(
        device_budget=weights // 2 + (2 << 20),
        host_budget=2 * weights,
        page_size=PAGE_BYTES,
        device="cpu",
    ) as pager:
        pager.page_module(model)
        for _ in range(2):
            assert torch.equal(model.generate(prompt, **how), expected)
        stats = pager.stats()
        assert stats["bytes_in"] > 0
        assert stats["channel_bytes"]["host-out"] <= 1.1 * weights
        assert stats["peak_bytes"]["device"] <= stats["budget_bytes"]["device"]


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_lengths(one_thread: None) -> None:
    model = llama(layers=2, width=32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    used = []
    with tp.Pager(
        device_budget="3MiB", host_budget="32MiB", page_size=PAGE_BYTES, device="cpu"
    ) as pager:
        pager.page_module(model)
        pager.optimizer(optimizer)
        for number, ids in enumerate(batches(2000)):
            with pager.iteration():
                model(input_ids=ids[:1], labels=ids[:1]).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            if number % 100 == 99:
                used.append(psutil.Process().memory_info().rss)
        assert pager.stats()["kinds"] <= 8
    later = used[len(used) // 2 :]
    assert max(later) <= 1.02 * max(used[: len(used) // 2]), used
