"""Mixed precision: autocast casts and caches paged weights, GradScaler looks into paged gradients.

Everything runs in bfloat16 or float16 on the CPU, and is compared with the plain run bit for bit.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tensorpager as tp

from .models import World, batch, live_pages, mlp, plain


class _Shared(nn.Module):
    """Uses each of its weights twice, so that autocast's cache is read."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(128, 256)
        self.middle = nn.Linear(256, 256)
        self.last = nn.Linear(256, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).relu() + self.first(-x).relu()
        x = self.middle(self.middle(x).relu()).relu()
        return self.last(x)


def _train(world: World, model: nn.Module, optimizer, dtype: torch.dtype, **options) -> list[float]:
    losses = []
    for _ in range(3):
        with world.iteration():
            inputs, labels = batch()
            with torch.autocast("cpu", dtype, **options):
                loss = F.cross_entropy(model(inputs).float(), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("kind", [mlp, _Shared])
def test_autocast(same, kind, dtype: torch.dtype) -> None:
    def script(world: World) -> object:
        model = world.module(kind())
        optimizer = world.optimizer(torch.optim.AdamW(model.parameters()))
        return _train(world, model, optimizer, dtype), model, optimizer

    same(script)


def test_autocast_without_its_cache(same) -> None:
    def script(world: World) -> object:
        model = world.module(_Shared())
        optimizer = world.optimizer(torch.optim.AdamW(model.parameters()))
        losses = _train(world, model, optimizer, torch.bfloat16, cache_enabled=False)
        return losses, model

    same(script)


def test_autocast_keeps_its_casts_in_pages_and_only_until_it_ends(tight_pager: tp.Pager) -> None:
    model = tight_pager.page_module(_Shared())
    before = live_pages(tight_pager)
    with torch.autocast("cpu", torch.bfloat16):
        model(batch()[0])
        # 256 × 256 and 256 × 128 in bfloat16: 2 pages and 1.
        assert tight_pager.core.space.kind_pages["activation"] == 3
    assert live_pages(tight_pager) == before


def test_backward_inside_of_autocast(same) -> None:
    def script(world: World) -> object:
        model = world.module(_Shared())
        optimizer = world.optimizer(torch.optim.AdamW(model.parameters()))
        for _ in range(2):
            with world.iteration(), torch.autocast("cpu", torch.bfloat16):
                inputs, labels = batch()
                F.cross_entropy(model(inputs).float(), labels).backward()
                optimizer.step()
                optimizer.zero_grad()
        return model

    same(script)


def test_parameters_in_bfloat16(same) -> None:
    def script(world: World) -> object:
        model = world.module(mlp(width=384).to(torch.bfloat16))
        optimizer = world.optimizer(torch.optim.AdamW(model.parameters()))
        losses = []
        for _ in range(3):
            with world.iteration():
                inputs, labels = batch()
                loss = F.cross_entropy(model(inputs.bfloat16()).float(), labels)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        return losses, model, optimizer

    same(script)


OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3),
    "adamw-fused": lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(
    ("name", "clip"),
    [
        ("adamw", False),
        ("adamw", True),
        pytest.param("adamw-fused", False, marks=pytest.mark.slow),
        ("adamw-fused", True),
        ("sgd", False),
        pytest.param("sgd", True, marks=pytest.mark.slow),
    ],
)
def test_grad_scaler(same, name: str, clip: bool, dtype: torch.dtype) -> None:
    """The gradient of the third of five steps is infinite: that step is left out."""

    def script(world: World) -> object:
        model = world.module(mlp())
        optimizer = world.optimizer(OPTIMIZERS[name](model.parameters()))
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        seen = []
        for step in range(5):
            with world.iteration():
                inputs, labels = batch()
                with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
                    loss = F.cross_entropy(model(inputs).float(), labels)
                scaler.scale(loss).backward()
                if step == 2:
                    with torch.no_grad():
                        model[2].weight.grad[3, 5] = float("inf")
                before = plain(model[2].weight)
                if clip:
                    scaler.unscale_(optimizer)
                    seen.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
                scaler.step(optimizer)
                scaler.update()
                assert torch.equal(plain(model[2].weight), before) == (step == 2)
                optimizer.zero_grad()
            seen.append((loss, scaler.get_scale()))
        assert scaler.get_scale() == 2048.0  # doubled, halved by the infinity, doubled again
        return seen, model, optimizer, scaler.state_dict()

    same(script)


def test_one_scaler_for_two_optimizers(same) -> None:
    def script(world: World) -> object:
        models = [world.module(mlp()) for _ in range(2)]
        optimizers = [world.optimizer(torch.optim.Adam(m.parameters())) for m in models]
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        for _ in range(2):
            with world.iteration():
                inputs, labels = batch()
                loss = sum(F.cross_entropy(model(inputs), labels) for model in models)
                scaler.scale(loss).backward()
                for optimizer in optimizers:
                    scaler.unscale_(optimizer)
                for optimizer in optimizers:
                    scaler.step(optimizer)
                    optimizer.zero_grad()
                scaler.update()
        return models, scaler.get_scale()

    same(script)
