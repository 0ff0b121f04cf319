"""``tp.hf.prepare``: a loop with accelerate gives what it gives without a pager."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorpager as tp

from ..models import assert_same, plain
from .tiny import assert_half, half_of_training, llama, texts

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from accelerate import Accelerator
from accelerate.state import AcceleratorState


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """The state of accelerate, which is the process's."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


class Loop:
    """Two batches a step, clipping, a schedule."""

    def __init__(self, pager: tp.Pager | None, model: torch.nn.Module, precision: str) -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        self.pager = pager
        self.accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=2, mixed_precision=precision
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        loader = torch.utils.data.DataLoader(texts(14), batch_size=2)  # the last step has one batch
        objects = model, optimizer, loader, scheduler
        if pager is None:
            self.prepared = self.accelerator.prepare(*objects)
        else:
            self.prepared = tp.hf.prepare(self.accelerator, pager, *objects)
        self.losses: list[float] = []

    def epoch(self) -> None:
        accelerator, (model, optimizer, loader, scheduler) = self.accelerator, self.prepared
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            self.losses.append(loss.item())

    def evaluate(self) -> float:
        model, _, loader, _ = self.prepared
        with self.pager.inference() if self.pager is not None else torch.no_grad():
            return float(sum(model(**batch).loss.item() for batch in loader))

    def state(self) -> Any:
        return plain([self.losses, self.prepared[0].state_dict(), self.prepared[1].state_dict()])


@pytest.mark.parametrize("precision", ["no", pytest.param("bf16", marks=pytest.mark.slow)])
def test_a_loop(precision: str, tmp_path: Path) -> None:
    expected = Loop(None, llama(), precision)
    expected.epoch()
    expected.accelerator.save_state(tmp_path / "plain")
    evaluated = expected.evaluate()
    expected.epoch()

    model = llama()
    with tp.Pager(**half_of_training(model)) as pager:
        loop = Loop(pager, model, precision)
        loop.epoch()
        loop.accelerator.save_state(tmp_path / "paged")
        assert loop.evaluate() == evaluated
        loop.epoch()
        assert_same(loop.state(), expected.state())
        assert pager.stats()["iterations"] == 8
        assert_half(pager)
        accelerator = loop.accelerator
        assert "accumulate" in vars(accelerator)
    assert "accumulate" not in vars(accelerator)
    name = "model.safetensors"
    assert (tmp_path / "paged" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()

    model = llama(seed=3)
    with tp.Pager(**half_of_training(model)) as pager:
        loop = Loop(pager, model, precision)
        loop.accelerator.load_state(tmp_path / "paged")
        loop.epoch()
        loop.losses = expected.losses[:7] + loop.losses
        assert_same(loop.state(), expected.state())


def test_steps_that_break_off_and_iterations_of_the_users_own() -> None:
    model = llama()
    with tp.Pager(**half_of_training(model)) as pager:
        loop = Loop(pager, model, "no")
        with pytest.raises(KeyboardInterrupt), loop.accelerator.accumulate(model):
            raise KeyboardInterrupt
        assert pager.core.running is None
        with pager.iteration():
            loop.accelerator.step = 1
            with loop.accelerator.accumulate(model):
                assert loop.accelerator.sync_gradients
            assert pager.core.running is not None
        assert pager.core.running is None


def test_another_device_is_refused() -> None:
    with tp.Pager(device_budget="8MiB", device="cpu") as pager:
        accelerator = Accelerator(cpu=True)
        pager.device = torch.device("cuda")
        with pytest.raises(ValueError, match=r"device=accelerator\.device"):
            tp.hf.prepare(accelerator, pager, llama())
        pager.device = torch.device("cpu")
