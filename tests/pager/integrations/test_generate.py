"""``model.generate`` inside of ``pager.inference()``: plain's tokens, with half of the weights on
the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tensorpager as tp

from .tiny import PAGE_BYTES, VOCABULARY, llama

pytest.importorskip("transformers")

DENSE_BYTES = 2 << 20  # for the cache, and what comes and goes


def weights_of(model: torch.nn.Module) -> int:
    return sum(-(-p.nbytes // PAGE_BYTES) * PAGE_BYTES for p in model.parameters() if p.dim() > 1)


def answer(model: Any, length: int, tokens: int, *, sample: bool = False) -> torch.Tensor:
    """To two prompts, the longer one of this length."""
    torch.manual_seed(length)
    prompt = torch.randint(3, VOCABULARY, (2, length))
    mask = torch.ones_like(prompt)
    mask[0, : length // 3] = 0
    settings = {"max_new_tokens": tokens, "do_sample": sample, "eos_token_id": None}
    result: torch.Tensor = model.generate(prompt, attention_mask=mask, **settings)
    return result


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_tokens(tied: bool) -> None:
    model = llama(layers=4, width=128, tied=tied).eval()
    asked: list[dict[str, Any]] = [
        {"length": 9, "tokens": 4},
        {"length": 30, "tokens": 64},
        {"length": 12, "tokens": 8, "sample": True},
    ]
    expected = [answer(model, **how) for how in asked]
    weights = weights_of(model)
    with tp.Pager(
        device_budget=weights // 2 + DENSE_BYTES,
        host_budget="8MiB",
        page_size=PAGE_BYTES,
        device="cpu",
    ) as pager:
        pager.page_module(model)
        with pager.inference():
            assert torch.equal(answer(model, **asked[0]), expected[0])
            before = pager.stats()
            assert torch.equal(answer(model, **asked[1]), expected[1])
        with pager.inference():
            assert torch.equal(answer(model, **asked[2]), expected[2])
        after = pager.stats()
        passes = 64 + 8
        assert (after["bytes_in"] - before["bytes_in"]) / passes <= 0.7 * weights
        assert before["channel_bytes"]["host-out"] == after["channel_bytes"]["host-out"] <= weights
        assert after["peak_bytes"]["device"] <= after["budget_bytes"]["device"]
