"""``tp.hf.attach``: transformers' Trainer gives the losses, weights and files that it gives without
a pager."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tensorpager as tp

from ..models import assert_same, plain
from .tiny import assert_half, half_of_training, llama, texts

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import Trainer, TrainerCallback, TrainingArguments


def trainer_of(folder: Path, model: Any = None, **more: Any) -> Trainer:
    """Clipping, accumulation, a schedule, evaluation and a checkpoint after every second step."""
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 3,
        "gradient_accumulation_steps": 2,
        "learning_rate": 3e-3,
        "warmup_steps": 2,
        "max_grad_norm": 0.5,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "logging_steps": 1,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
    }
    options = {k: more.pop(k) for k in ("callbacks", "optimizers") if k in more}
    return Trainer(
        llama() if model is None else model,
        TrainingArguments(**(settings | more)),
        train_dataset=texts(20),
        eval_dataset=texts(5, seed=2),
        **options,
    )


def history(trainer: Trainer) -> list[dict[str, float]]:
    """What was logged, without times."""
    timed = ("runtime", "per_second", "preparation_time")
    return [
        {k: v for k, v in entry.items() if not k.endswith(timed)}
        for entry in trainer.state.log_history
    ]


def assert_same_checkpoint(result: Path, expected: Path) -> None:
    weights = [(folder / "model.safetensors").read_bytes() for folder in (result, expected)]
    assert weights[0] == weights[1]
    for name in ("optimizer.pt", "scheduler.pt"):
        states = [torch.load(f / name, weights_only=True) for f in (result, expected)]
        assert_same(*states, where=name)
    assert {p.name for p in result.iterdir()} == {p.name for p in expected.iterdir()}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """A training without a pager, which the tests compare with."""
    trainer = trainer_of(tmp_path_factory.mktemp("plain"))
    trainer.train()
    return trainer


def test_training_with_everything(expected: Trainer, tmp_path: Path) -> None:
    """Losses, norms, learning rates, evaluations, weights and checkpoints; and a training that goes
    on from the checkpoint in the middle."""
    trainer = trainer_of(tmp_path)
    pager = tp.hf.attach(trainer, **half_of_training(trainer.model))
    trainer.train()
    assert history(trainer) == history(expected)
    assert_same(plain(trainer.model.state_dict()), plain(expected.model.state_dict()))
    for step in (2, 4, 6):
        name = f"checkpoint-{step}"
        assert_same_checkpoint(tmp_path / name, Path(expected.args.output_dir) / name)
    assert_half(pager)
    states = trainer.optimizer.state.values()
    assert all(type(s["exp_avg"]) is tp.PagedTensor for s in states)
    pager.close()

    again = trainer_of(tmp_path / "again", llama(seed=5))
    pager = tp.hf.attach(again, **half_of_training(again.model))
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_same(plain(again.model.state_dict()), plain(expected.model.state_dict()))
    assert_same(plain(again.optimizer.state_dict()), plain(expected.optimizer.state_dict()))
    assert_half(pager)
    pager.close()


@pytest.mark.parametrize(
    "settings",
    [
        {"optim": "sgd", "activation_checkpointing": True, "bf16": True, "eval_on_start": True},
        {"optim": "adamw_torch", "max_grad_norm": 0.0, "learning_rate": 0.3}
        | {"load_best_model_at_end": True, "metric_for_best_model": "loss"},
    ],
    ids=["checkpointing-bf16", "best-model"],
)
def test_settings(settings: dict[str, Any], tmp_path: Path) -> None:
    results = []
    for paged in (False, True):
        trainer = trainer_of(tmp_path / f"{paged}", **settings, max_steps=4)
        pager = None
        if paged:
            pager = tp.hf.attach(trainer, **half_of_training(trainer.model))
        trainer.train()
        results.append([history(trainer), plain(trainer.model.state_dict())])
        if pager is not None:
            assert_half(pager)
            pager.close()
    assert_same(results[1], results[0])


def test_a_pager_and_an_optimizer_of_the_users_own(expected: Trainer, tmp_path: Path) -> None:
    model = llama()
    arguments = half_of_training(model)
    with tp.Pager(**arguments) as pager:
        pager.page_module(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
        trainer = trainer_of(tmp_path, model, optimizers=(optimizer, None), max_steps=2)
        assert tp.hf.attach(trainer, pager) is pager
        trainer.train()
        assert type(optimizer.state[model.lm_head.weight]["exp_avg"]) is tp.PagedTensor
        trainer.args.max_steps = 4
        trainer.train()
        assert pager.stats()["iterations"] > 5


class Failing(TrainerCallback):
    def on_pre_optimizer_step(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        if state.global_step == 1:
            raise KeyboardInterrupt


def test_an_interrupted_training_leaves_nothing_running(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, callbacks=[Failing()], save_strategy="no")
    with tp.hf.attach(trainer, **half_of_training(trainer.model)) as pager:
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        assert pager.core.running is None
        assert "KeyboardInterrupt" in pager.explain()
        with pager.iteration():
            pass


def test_closing_gives_the_trainer_its_methods_back(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    callbacks = list(trainer.callback_handler.callbacks)
    before = dict(vars(trainer))
    pager = tp.hf.attach(trainer, **half_of_training(trainer.model))
    with pytest.raises(tp.PagerError, match="has a pager already"):
        tp.hf.attach(trainer, pager)
    pager.close()
    assert vars(trainer).keys() == before.keys()
    assert trainer.callback_handler.callbacks == callbacks


def test_a_budget_that_is_too_small_is_refused_in_the_first_step(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    arguments = half_of_training(trainer.model) | {"device_budget": "400KiB"}
    with tp.hf.attach(trainer, **arguments) as pager:
        before = plain(trainer.model.state_dict())
        with pytest.raises(tp.InfeasibleBudget, match="smallest"):
            trainer.train()
        assert pager.core.running is None
        assert_same(plain(trainer.model.state_dict()), before)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"bf16_full_eval": True}, "bf16_full_eval"),
        ({"use_liger_kernel": True}, "use_liger_kernel"),
    ],
)
def test_what_cannot_work_is_refused_by_name(
    settings: dict[str, Any], named: str, tmp_path: Path
) -> None:
    trainer = trainer_of(tmp_path)
    for name, value in settings.items():
        setattr(trainer.args, name, value)
    with pytest.raises(tp.PagerError, match=named):
        tp.hf.attach(trainer, device_budget="8MiB", device="cpu")
    assert type(trainer.model.lm_head.weight) is torch.nn.Parameter


def test_arguments(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    with tp.Pager(device_budget="8MiB", device="cpu") as pager:
        with pytest.raises(TypeError, match="host_budget"):
            tp.hf.attach(trainer, pager, host_budget="1MiB")
        with pytest.raises(TypeError, match=r"transformers\.Trainer"):
            tp.hf.attach(trainer.model, pager)
    with pytest.raises(AttributeError, match="attachh"):
        tp.hf.attachh  # noqa: B018
