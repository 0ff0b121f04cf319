#!/usr/bin/env python3
"""Every language model of transformers, made small, is trained and sampled plain and in pages.

    check_models.py
    check_models.py llama mamba2 t5 --json FILE

Each is trained for five steps in plain PyTorch, with room for everything, with what the pager says
is needed for that, and with half of it, by a plan where one is there in time; then it completes a
prompt, with half of its weights on the device. Losses, parameters and tokens have to be the same
bits, and device memory, as the pager counts it, inside the budget. What transformers cannot build
or train so small is left out, with its error; an error in pages ends the run.
"""

from __future__ import annotations

import copy
import logging
import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import click
import torch
from lm.report import run_facts, write_json

import tensorpager as tp

PAGE = 64 << 10
STEPS, ROWS, LENGTH = 5, 2, 24
MOST_PARAMETERS = 12_000_000
PLENTY = 256 << 20
WAIT_SECONDS = 30.0
PROMPT, TOKENS = 9, 8

# Of any configuration that has such a setting.
WIDTHS: dict[str, int] = {
    "hidden_size": 64, "n_embd": 64, "d_model": 64, "dim": 64, "embedding_size": 64,
    "head_dim": 16, "d_kv": 16, "rotary_dim": 8, "attention_hidden_size": 64,
    "intermediate_size": 128, "ffn_dim": 128, "d_ff": 128, "hidden_dim": 128, "n_inner": 128,
    "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "ffn_hidden_size": 128,
    "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 16, "qk_head_dim": 16, "lru_width": 64, "mamba_d_head": 16,
}  # fmt: skip
COUNTS: dict[str, int] = {
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2,
    "encoder_layers": 2, "decoder_layers": 2, "num_decoder_layers": 2, "num_encoder_layers": 2,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_key_value_heads": 2,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "moe_k": 2, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "num_nextn_predict_layers": 0,
    "state_size": 8, "expand": 2, "conv_kernel": 4, "time_step_rank": 8,
    "mamba_n_heads": 8, "mamba_n_groups": 1, "mamba_d_state": 16,
    "vocab_size": 256, "max_position_embeddings": 128, "n_positions": 128, "max_seq_len": 128,
}  # fmt: skip
TOKEN_IDS = {
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip


class LeftOutError(Exception):
    """This model cannot be made, or used in plain PyTorch, so small."""


def classes() -> dict[str, str]:
    """By the name of its configuration, a class for each model of transformers."""
    from transformers.models.auto import modeling_auto as auto

    found: dict[str, str] = {}
    for names in (
        auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    ):
        found.update((kind, n if isinstance(n, str) else n[0]) for kind, n in names.items())
    return dict(sorted(found.items()))


def build(kind: str, name: str, wide: int = 1) -> Any:
    """``wide``: so many times the least widths."""
    import transformers

    try:
        config = transformers.CONFIG_MAPPING[kind]()
        layers = vars(config).get("layer_types") or ()
        two = [*layers[:2]] if len({*layers[:2]}) > 1 else [*layers[-2:]]
        own = vars(config)
        small: dict[str, Any] = {**COUNTS, "layer_types": two}
        small |= {key: wide * width for key, width in WIDTHS.items()}
        if "qk_rope_head_dim" in own:
            small["head_dim"] = small["qk_rope_head_dim"]
        if "expand" in own:
            small["num_heads"] = small["expand"] * small["hidden_size"] // small["head_dim"]
        for key, value in small.items():
            if key in own:
                with suppress(AttributeError):  # it follows from others
                    setattr(config, key, value)
        for key, value in TOKEN_IDS.items():
            setattr(config, key, value)
        model = getattr(transformers, name)
        with torch.device("meta"):
            parameters = sum(p.numel() for p in model(config).parameters())
    except Exception as error:
        raise LeftOutError(f"{type(error).__name__}: {error}") from error
    if parameters > wide * MOST_PARAMETERS:
        raise LeftOutError(f"{parameters / 1e6:.0f} million parameters")
    torch.manual_seed(0)
    return model(config).train()


def train(model: Any, pager: tp.Pager | None) -> tuple[list[float], dict[str, torch.Tensor]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if pager is not None:
        pager.page_module(model)
        pager.optimizer(optimizer)
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(2)

    def step() -> float:
        ids = torch.randint(3, 250, (ROWS, LENGTH), generator=generator)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    losses = []
    for number in range(STEPS):
        if pager is None:
            losses.append(step())
            continue
        with pager.iteration():
            losses.append(step())
        follower = pager.core.follower
        if number and follower is not None:
            follower.only_if_faster = False  # so small a model is seldom faster by a plan
            follower.wait_for_plans(WAIT_SECONDS)
    return losses, dict(model.state_dict())


def complete(model: Any, prompt: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model.generate(prompt, do_sample=False, max_new_tokens=TOKENS)
    return found


def plainly(use: Any, *given: Any) -> Any:
    try:
        return use(*given)
    except Exception as error:
        raise LeftOutError(f"{type(error).__name__}: {error}") from error


def check(kind: str, name: str, number: int) -> dict[str, Any]:
    """What came of it. Raises ``LeftOutError``."""
    policy = ("lp", "joint")[number % 2]
    losses, values = plainly(train, build(kind, name), None)
    row: dict[str, Any] = {"model": name, "policy": policy, "trained": "same bits"}
    stats: dict[str, Any] = {}
    for share in (None, 1.0, 0.5):
        budget = PLENTY if share is None else int(share * stats["needed_bytes"])
        found, paged, stats = enough(partial(train_paged, kind, name, policy), budget)
        same = all(torch.equal(paged[key], value) for key, value in values.items())
        if not same or found != losses:
            row["trained"] = f"DIFFERS with {stats['budget_bytes']['device']} bytes"
    row |= {"planned steps": stats["planned_iterations"], "moved in": stats["bytes_in"]}
    row["sampled"] = sampled(build(kind, name).eval())
    return row


def enough(use: Callable[[int], Any], budget: int) -> Any:
    """With ``budget``, or what a refusal says is enough."""
    while True:
        try:
            return use(budget)
        except tp.InfeasibleBudget as refusal:
            if refusal.minimum is None or refusal.minimum <= budget:
                raise
            budget = refusal.minimum


def train_paged(kind: str, name: str, policy: str, budget: int) -> Any:
    with tp.Pager(budget, "1GiB", page_size=PAGE, device="cpu", policy=policy) as pager:
        losses, values = train(build(kind, name), pager)
        stats = pager.stats()
        assert 0 < stats["peak_bytes"]["device"] <= budget
        dense = {k: v.to_dense() if type(v) is tp.PagedTensor else v for k, v in values.items()}
        return losses, dense, stats


def sampled(model: Any) -> str:
    torch.manual_seed(3)
    prompt = torch.randint(3, 250, (2, PROMPT))
    try:
        expected = plainly(complete, model, prompt)
    except LeftOutError as error:
        return f"left out: {error}"
    sizes = [p.nbytes for p in model.parameters()]
    found = enough(partial(complete_paged, model, prompt), max(sum(sizes) // 2, 2 * max(sizes)))
    return "same tokens" if torch.equal(found, expected) else "DIFFERS"


def complete_paged(model: Any, prompt: torch.Tensor, budget: int) -> torch.Tensor:
    model = copy.deepcopy(model)
    with tp.Pager(budget, "1GiB", page_size=PAGE, device="cpu") as pager:
        pager.page_module(model)
        with pager.inference():
            found = complete(model, prompt)
        assert 0 < pager.stats()["peak_bytes"]["device"] <= budget
        return found


def check_each(
    kinds: tuple[str, ...], check: Callable[[str, str, int], dict[str, Any]], column: str
) -> list[dict[str, Any]]:
    """A printed row for each of ``kinds``, or of all; ``column`` says why one is left out."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    known = classes()
    if unknown := [kind for kind in kinds if kind not in known]:
        raise click.UsageError(f"{unknown[0]!r} is none of {', '.join(known)}")
    rows: list[dict[str, Any]] = []
    for number, kind in enumerate(kinds or known):
        try:
            row = check(kind, known[kind], number)
        except LeftOutError as error:
            row = {"model": known[kind], column: f"left out: {str(error)[:120]}"}
        rows.append(row)
        click.echo("  ".join(map(str, row.values())))
    return rows


def finish(
    json_path: Path | None, totals: dict[str, Any], rows: list[dict[str, Any]], *, bad: bool
) -> None:
    click.echo(totals)
    if json_path is not None:
        write_json(json_path, {**run_facts("cpu"), "totals": totals, "rows": rows})
    if bad:
        raise SystemExit(1)


@click.command(help=__doc__)
@click.argument("kinds", nargs=-1)
@click.option("--json", "json_path", type=click.Path(path_type=Path))
def main(kinds: tuple[str, ...], json_path: Path | None) -> None:
    rows = check_each(kinds, check, "trained")
    trained = [row for row in rows if "left out" not in row["trained"]]
    bad = [row for row in trained if "DIFFERS" in f"{row['trained']} {row['sampled']}"]
    totals = {
        "models": len(rows),
        "trained": len(trained),
        "by a plan": sum(row["planned steps"] > 0 for row in trained),
        "sampled": sum("left out" not in row["sampled"] for row in trained),
        "different": len(bad),
    }
    finish(json_path, totals, rows, bad=bool(bad))


if __name__ == "__main__":
    main()
