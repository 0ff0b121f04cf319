"""Buffers of models that were built on the meta device: set, loaded, or named."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensorpager as tp

from .models import make_pager

WIDTH = 8


class Rotary(nn.Module):
    """A table that is in no checkpoint, and a scale that is."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", self.values(), persistent=False)
        self.register_buffer("scale", torch.full((1,), 3.0))

    def values(self) -> torch.Tensor:
        return 1 / 10.0 ** (torch.arange(WIDTH) / WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.table * self.scale


class SetByItself(Rotary):
    def reset_parameters(self) -> None:
        self.table.copy_(self.values())
        self.scale.fill_(3)


class SetAnew(Rotary):
    def reset_parameters(self) -> None:
        self.table = self.values()
        self.scale = torch.full((1,), 3.0)


class Broken(Rotary):
    def reset_parameters(self) -> None:
        self.table.zero_()
        raise RuntimeError("not for this")


class Model(nn.Module):
    def __init__(self, kind: type[Rotary], *, outer: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.inner = nn.Sequential(kind())
        self.norm = nn.BatchNorm1d(WIDTH)
        if outer:
            self._init_weights = self.init_one

    def init_one(self, module: nn.Module) -> None:
        if isinstance(module, Rotary):
            module.table.copy_(module.values())
            module.scale.fill_(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.inner(self.linear(x)))


def on_meta(kind: type[Rotary], **options: Any) -> Model:
    with torch.device("meta"):
        return Model(kind, **options)


@pytest.fixture
def pager() -> Iterator[tp.Pager]:
    with make_pager() as pager, warnings.catch_warnings():
        warnings.simplefilter("error")
        yield pager


@pytest.fixture
def file(tmp_path: Path) -> tuple[Path, Model]:
    """A plain model, and a file of it."""
    torch.manual_seed(0)
    model = Model(Rotary)
    model.norm.running_mean.fill_(0.5)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    return tmp_path / "model.pt", model


@pytest.mark.parametrize(
    ("kind", "outer"), [(SetByItself, False), (SetAnew, False), (Rotary, True), (Broken, True)]
)
def test_modules_that_set_their_buffers(
    kind: type[Rotary], outer: bool, pager: tp.Pager, file: tuple[Path, Model]
) -> None:
    path, plain = file
    numbers = torch.get_rng_state()
    model = pager.page_module(on_meta(kind, outer=outer))
    assert torch.equal(torch.get_rng_state(), numbers)
    assert model.inner[0].scale.item() == 3
    assert torch.equal(model.norm.running_var, torch.ones(WIDTH))
    pager.load(path)
    x = torch.randn(5, WIDTH)
    assert torch.equal(model(x).detach(), plain(x))
    assert pager.core.budget.dense_baseline == sum(b.nbytes for b in model.buffers())


@pytest.mark.parametrize("kind", [Rotary, Broken])
@pytest.mark.parametrize("own", [True, False])
def test_buffers_that_nothing_sets(
    kind: type[Rotary], own: bool, pager: tp.Pager, file: tuple[Path, Model]
) -> None:
    path, plain = file
    words = r"inner\.0\.table\. .* Set them \(model\.inner\.0\.table = tensor\)"
    with pytest.warns(UserWarning, match=words) as seen:
        model = pager.page_module(on_meta(kind))
    assert seen[0].filename == __file__
    x = torch.randn(5, WIDTH)
    with pytest.raises(tp.PagerError, match=r"inner\.0\.table, inner\.0\.scale\."):
        model(x)
    if own:
        model.load_state_dict(plain.state_dict())
    else:
        with pytest.warns(UserWarning, match=words) as seen:
            pager.load(path)
        assert seen[0].filename == __file__
    assert model.inner[0].scale.item() == 3
    for same in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with pytest.raises(tp.PagerError, match=words):
            same(x)
    model.inner[0].table = model.inner[0].values()
    assert torch.equal(model(x).detach(), plain(x))


def test_what_has_values_is_not_set_again(pager: tp.Pager) -> None:
    """``reset_parameters()`` would lose them."""
    with torch.device("meta"):
        module = SetByItself()
    module.scale = torch.full((1,), 4.0)
    with pytest.warns(UserWarning, match="buffers without values"):
        pager.page_module(nn.Sequential(module))
    assert module.table.is_meta
    assert module.scale.item() == 4


def test_a_state_dict_of_another_shape(pager: tp.Pager) -> None:
    model = on_meta(Rotary)
    with pytest.warns(UserWarning, match="without values"):
        pager.page_module(model)
    state = Model(Rotary).state_dict() | {"inner.0.scale": torch.ones(2)}
    with pytest.raises(RuntimeError, match=r"inner\.0\.scale"):
        model.load_state_dict(state)
    assert model.inner[0].scale.is_meta
