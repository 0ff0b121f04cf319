"""A tiny language model, texts for it, and a budget in which about half of its training fits."""

from __future__ import annotations

from typing import Any

import torch

import tensorpager as tp

VOCABULARY, PAGE_BYTES = 256, 64 << 10


def llama(
    *,
    layers: int = 3,
    width: int = 96,
    tied: bool = False,
    seed: int = 0,
    vocabulary: int = VOCABULARY,
) -> Any:
    """A ``LlamaForCausalLM``, 0.4 M parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def mixtral() -> Any:
    """A ``MixtralForCausalLM`` of four experts."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=512,
    )
    return MixtralForCausalLM(config)


def texts(count: int, length: int = 32, seed: int = 1) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (count, length), generator=generator)
    return [{"input_ids": row, "labels": row} for row in ids]


def half_of_training(model: torch.nn.Module) -> dict[str, Any]:
    """Arguments of a Pager: on the device half of what parameters, gradients and AdamW's states
    take, the rest below."""
    need = 4 * sum(p.numel() * p.element_size() for p in model.parameters())
    return {
        "device_budget": need // 2,
        "host_budget": 2 * need,
        "page_size": PAGE_BYTES,
        "device": "cpu",
    }


def assert_half(pager: tp.Pager) -> None:
    """Pages had to move, and the budget has held."""
    stats = pager.stats()
    assert not stats["fits"]
    assert stats["faults"] > 0
    assert stats["peak_bytes"]["device"] <= stats["budget_bytes"]["device"]
