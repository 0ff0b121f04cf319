"""Every optimizer of PyTorch's database: the same parameters and states after some steps."""

import zlib
from collections.abc import Iterator
from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.testing._internal.common_optimizers import (
    OptimizerInfo,
    OptimizerInput,
    _get_optim_inputs_including_global_cliquey_kwargs,
    optim_db,
)

from .lanes import FULL
from .left_out import REFUSED_OPTIMIZERS
from .trials import Trials
from .worlds import World

pytestmark = pytest.mark.filterwarnings("ignore")

STEPS = 5 if FULL else 3


def _configs(refused: bool) -> Iterator[pytest.param]:
    """Every configuration for the CPU, each as a for-loop, with foreach and with fused; in quick
    runs the default ones and a third of the others, the same each time.

    Not differentiable: it is made for parameters that are no leaves, which nobody pages.
    """
    for info in optim_db:
        if (info.name in REFUSED_OPTIMIZERS) == refused:
            seen: dict[str, int] = {}
            for config in _get_optim_inputs_including_global_cliquey_kwargs(
                "cpu", torch.float32, info, skip=("differentiable",)
            ):
                name = f"{info.name}-{config.desc}".replace(" ", "_")
                seen[name] = seen.get(name, 0) + 1
                suffix = f"_{seen[name]}" if seen[name] > 1 else ""
                name += suffix
                quick = refused or "default" in name or zlib.crc32(name.encode()) % 3 == 0
                marks = () if quick else (pytest.mark.slow,)
                yield pytest.param(info, config, id=name, marks=marks)


@pytest.mark.parametrize(("info", "config"), list(_configs(refused=False)))
def test_optimizer(info: OptimizerInfo, config: OptimizerInput, pager, tally) -> None:
    def call(world: World, make_model) -> object:
        model = world.page_module(make_model())
        optimizer = info.optim_cls(model.parameters(), **deepcopy(config.kwargs))
        if world.pager is not None:
            optimizer = world.pager.optimizer(optimizer)
        losses = [_train_step(model, optimizer) for _ in range(STEPS)]
        return {
            "losses": losses,
            "parameters": dict(model.named_parameters()),
            "state": optimizer.state_dict()["state"],
        }

    trials = Trials(pager, tally, "optimizers", info.name, "float32")
    models = [_SparseModel] if info.only_supports_sparse_grads else [_matrices]
    if info.name != "Muon" and not info.only_supports_sparse_grads:
        models.append(_vectors)
    if info.supports_sparse and not info.only_supports_sparse_grads:
        models.append(_SparseModel)
    trials.compare(
        ((None, lambda world, model=model: call(world, model)) for model in models),
        quick=len(models),
        full=None,
    )


@pytest.mark.parametrize(("info", "config"), list(_configs(refused=True)))
def test_optimizer_is_refused_by_name(
    info: OptimizerInfo, config: OptimizerInput, pager, tally
) -> None:
    reason = f"{REFUSED_OPTIMIZERS[info.name]}: {info.name}"
    tally["optimizers", "", "float32", "left out", reason] += 1
    model = pager.page_module(_vectors())
    optimizer = info.optim_cls(model.parameters(), **deepcopy(config.kwargs))
    with pytest.raises(TypeError, match=info.name):
        pager.optimizer(optimizer)


def _train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    loss = model(torch.randn(4, 160)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def _matrices() -> nn.Module:
    """Matrices only, which is what Muon takes; the first is larger than a page."""
    return nn.Sequential(nn.Linear(160, 128, bias=False), nn.Tanh(), nn.Linear(128, 3, bias=False))


def _vectors() -> nn.Module:
    return nn.Sequential(nn.Linear(160, 7), nn.LayerNorm(7), nn.PReLU(), nn.Linear(7, 2))


class _SparseModel(nn.Module):
    """An embedding larger than a page, whose gradients are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(300, 64, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = (x * 100).long().remainder(300)
        return self.table(rows)
