"""TRL's trainers are Trainers of transformers': ``tp.hf.attach`` does for them too. Importing TRL
takes seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tensorpager as tp

from ..models import assert_same, plain
from .tiny import half_of_training, llama

pytest.importorskip("trl")
pytest.importorskip("datasets")

import datasets
from make_tiny_model import make_tokenizer
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

STEPS = 6
# TRL's loss takes a buffer of [tokens, 16384], however few words there are.
LOSS_BYTES = {"sft": 20 << 20, "dpo": 48 << 20}


def words(count: int, generator: torch.Generator) -> str:
    letters = torch.randint(97, 123, (count,), generator=generator)
    return "".join(chr(int(letter)) for letter in letters)


def rows(kind: str) -> Any:
    """Texts of 8 to 60 tokens."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(8, 60, (2 * STEPS * 2,), generator=generator).tolist()
    if kind == "sft":
        return datasets.Dataset.from_list([{"text": words(n, generator)} for n in lengths])
    return datasets.Dataset.from_list(
        [
            {
                "prompt": words(6, generator),
                "chosen": words(n, generator),
                "rejected": words(n // 2, generator),
            }
            for n in lengths
        ]
    )


def trainer_of(kind: str, folder: Path) -> Any:
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "max_length": 80,
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "disable_tqdm": True,
    }
    tokens: Any = make_tokenizer()
    if kind == "sft":
        return SFTTrainer(
            llama(vocabulary=len(tokens)),
            SFTConfig(**settings),
            train_dataset=rows(kind),
            processing_class=tokens,
        )
    return DPOTrainer(
        llama(vocabulary=len(tokens)),
        ref_model=llama(vocabulary=len(tokens)),
        args=DPOConfig(**settings),
        train_dataset=rows(kind),
        processing_class=tokens,
    )


@pytest.mark.parametrize("kind", ["sft", pytest.param("dpo", marks=pytest.mark.slow)])
def test_losses_and_weights(kind: str, tmp_path: Path) -> None:
    results = []
    for paged in (False, True):
        trainer = trainer_of(kind, tmp_path)
        pager = None
        if paged:
            limits = half_of_training(trainer.model)
            limits["device_budget"] += LOSS_BYTES[kind]
            pager = tp.hf.attach(trainer, **limits)
            if kind == "dpo":
                assert type(trainer.ref_model.lm_head.weight) is tp.PagedTensor
                assert not trainer.ref_model.lm_head.weight.requires_grad
        trainer.train()
        logged = [entry.get("loss") for entry in trainer.state.log_history]
        results.append([logged, plain(trainer.model.state_dict())])
        if pager is not None:
            stats = pager.stats()
            assert stats["iterations"] == STEPS
            assert stats["faults"] > 0
            assert stats["peak_bytes"]["device"] <= stats["budget_bytes"]["device"]
            pager.close()
    assert_same(results[1], results[0])
    assert len(set(results[0][0])) > STEPS // 2
