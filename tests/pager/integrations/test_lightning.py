"""``tp.lightning.TensorPagerStrategy``: Lightning's Trainer gives the losses, weights and
checkpoints that it gives without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import tensorpager as tp

from ..models import assert_same, mlp, plain

pytest.importorskip("lightning")

import lightning
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.precision import Precision

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

LIMITS = {
    "device_budget": "3MiB",
    "host_budget": "16MiB",
    "page_size": "64KiB",
    "device": "cpu",
}


class Module(lightning.LightningModule):
    """Four layers of 256 KiB, AdamW, a schedule, dropout, a buffer."""

    def __init__(self, *, manual: bool = False, dropout: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layers = mlp()
        self.register_buffer("scale", torch.tensor(0.5))
        self.automatic_optimization, self.dropout = not manual, dropout
        self.losses: list[float] = []
        self.validated: list[float] = []

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(
            self.layers(F.dropout(x, self.dropout, self.training)) * self.scale, y
        )

    def training_step(self, batch: Any, index: int) -> torch.Tensor | None:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        self.manual_backward(loss / 2)
        if index % 2:
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
            self.lr_schedulers().step()
        return None

    def validation_step(self, batch: Any, index: int) -> None:
        loss = self.loss(batch)
        self.validated.append(loss.item())
        self.log("validated", loss)

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    def _data(self, seed: int, count: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(count, 128, generator=generator)
        y = torch.randint(10, (count,), generator=generator)
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8)

    def train_dataloader(self) -> Any:
        return self._data(1, 40)

    def val_dataloader(self) -> Any:
        return self._data(2, 16)

    test_dataloader = val_dataloader


def trainer_of(folder: Path, strategy: Any, **more: Any) -> lightning.Trainer:
    options: dict[str, Any] = {
        "accelerator": "cpu",
        "max_epochs": 3,
        "default_root_dir": folder,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "callbacks": [ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)],
    }
    callbacks = [*options["callbacks"], *more.pop("callbacks", ())]
    options["callbacks"] = callbacks
    if strategy is not None:
        options["strategy"] = strategy
    return lightning.Trainer(**(options | more))


def run(
    folder: Path,
    *,
    paged: bool,
    module: Module | None = None,
    goes_on: Path | None = None,
    **more: Any,
) -> Any:
    """What came out; ``goes_on``: from this checkpoint."""
    torch.manual_seed(9)
    strategy = tp.lightning.TensorPagerStrategy(**LIMITS) if paged else None
    module = Module() if module is None else module
    trainer = trainer_of(folder, strategy, **more)
    trainer.fit(module, ckpt_path=goes_on, weights_only=False)
    trainer.test(module, verbose=False)
    found = plain([module.losses, module.validated, module.state_dict()])
    found.append(plain(trainer.optimizers[0].state_dict()) if trainer.optimizers else None)
    if strategy is not None:
        pager = strategy.pager
        stats = pager.stats()
        assert type(module.layers[0].weight) is tp.PagedTensor
        assert stats["faults"] > 0
        assert stats["peak_bytes"]["device"] <= stats["budget_bytes"]["device"]
        pager.close()
    return found


@pytest.mark.parametrize(
    "settings",
    [
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5},
        {"precision": "bf16-mixed", "val_check_interval": 2},
        {},
    ],
    ids=["accumulation", "bf16", "manual"],
)
def test_trainings(
    settings: dict[str, Any], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    manual = "manual" in request.node.name
    results = [
        run(tmp_path / name, paged=paged, module=Module(manual=manual), **settings)
        for name, paged in (("plain", False), ("paged", True))
    ]
    assert_same(results[1], results[0])
    checkpoints = []
    for name in ("paged", "plain"):
        files = sorted((tmp_path / name).glob("*.ckpt"))
        assert len(files) >= 2
        if name == "paged":  # by the pager, straight from pages
            assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
        state = [torch.load(file, weights_only=False) for file in files]
        checkpoints.append([plain([s["state_dict"], s["optimizer_states"]]) for s in state])
    assert_same(*checkpoints)


def test_resuming(tmp_path: Path) -> None:
    """From a checkpoint of either kind, in either kind of training."""

    def train(name: str, *, paged: bool, goes_on: Path | None = None) -> Any:
        module = Module(dropout=0)
        result = run(
            tmp_path / name, paged=paged, module=module, goes_on=goes_on, accumulate_grad_batches=2
        )
        return result[2:]

    expected = train("plain", paged=False)
    train("paged", paged=True)
    for saved, paged in (("plain", True), ("paged", True), ("paged", False)):
        path = tmp_path / saved / "epoch=0.ckpt"
        assert_same(train(f"{saved}-{paged}", paged=paged, goes_on=path), expected)


class Failing(Callback):
    def on_before_optimizer_step(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 1:
            raise RuntimeError("in the middle of a step")


def test_a_step_that_fails_and_a_budget_that_is_too_small(tmp_path: Path) -> None:
    strategy = tp.lightning.TensorPagerStrategy(**LIMITS)
    trainer = trainer_of(tmp_path, strategy, callbacks=[Failing()])
    with pytest.raises(RuntimeError, match="in the middle"):
        trainer.fit(Module())
    assert strategy.pager.core.running is None
    assert "in the middle" in strategy.pager.explain()
    strategy.pager.close()
    strategy = tp.lightning.TensorPagerStrategy(**(LIMITS | {"device_budget": "256KiB"}))
    with pytest.raises(tp.InfeasibleBudget, match="smallest"):
        trainer_of(tmp_path, strategy).fit(Module())
    strategy.pager.close()


class TransformerEnginePrecision(Precision):
    """By its name."""


def test_arguments(tmp_path: Path) -> None:
    with tp.Pager(**LIMITS) as pager:
        assert tp.lightning.TensorPagerStrategy(pager).pager is pager
        with pytest.raises(TypeError, match="host_budget"):
            tp.lightning.TensorPagerStrategy(pager, host_budget="1MiB")
        module, strategy = Module(), tp.lightning.TensorPagerStrategy(pager)
        trainer = trainer_of(tmp_path, strategy)
        strategy.precision_plugin = TransformerEnginePrecision()
        with pytest.raises(tp.PagerError, match="TransformerEnginePrecision"):
            trainer.fit(module)
        assert type(module.layers[0].weight) is torch.nn.Parameter
