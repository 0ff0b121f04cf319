"""A training that goes on from its checkpoint in a process of its own ends as the one that was not
interrupted and had no pager, at half of the need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tensorpager as tp

from ... import programs
from ..models import assert_same, plain
from .tiny import assert_half, half_of_training, llama

ROOT = Path(__file__).parents[3]
BEST = {"load_best_model_at_end": True, "metric_for_best_model": "loss"}
PROGRAM = """
import sys
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.pager.integrations import test_new_process
test_new_process.{kind}(Path({folder!r}), Path({checkpoint!r}))
"""
RESULT = "result.pt"


def trainer(folder: Path, checkpoint: Path | None) -> list[Any]:
    """transformers' Trainer, which ends with the best of its checkpoints."""
    from .test_trainer import trainer_of

    made = trainer_of(folder, llama(seed=5 if checkpoint else 0), **BEST)
    pager = tp.hf.attach(made, **half_of_training(made.model)) if checkpoint else None
    made.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    found = [made.state.best_metric, plain([made.model.state_dict(), made.optimizer.state_dict()])]
    if pager is not None:
        assert_half(pager)
        torch.save(found, folder / RESULT)
        pager.close()
    return found


def strategy(folder: Path, checkpoint: Path | None) -> list[Any]:
    """Lightning's, with the strategy."""
    from .test_lightning import Module, run

    found: list[Any] = run(
        folder,
        paged=checkpoint is not None,
        module=Module(dropout=0),
        goes_on=checkpoint,
        accumulate_grad_batches=2,
    )[2:]
    if checkpoint is not None:
        torch.save(found, folder / RESULT)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "library", "name"),
    [
        (trainer, "transformers", "checkpoint-2"),
        (strategy, "lightning", "epoch=0.ckpt"),
    ],
)
def test_going_on(kind: Any, library: str, name: str, tmp_path: Path) -> None:
    pytest.importorskip(library)
    whole, rest = tmp_path / "whole", tmp_path / "rest"
    rest.mkdir()
    expected = kind(whole, None)

    code = PROGRAM.format(
        root=str(ROOT), kind=kind.__name__, folder=str(rest), checkpoint=str(whole / name)
    )
    ended = programs.run("-c", code)
    assert ended.returncode == 0, ended.stderr
    assert_same(torch.load(rest / RESULT, weights_only=False), expected)
