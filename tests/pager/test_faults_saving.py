"""Saving while the disk fails: by the model's own ``state_dict()``, and as it begins to fail."""

from __future__ import annotations

import copy
import errno
import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorpager as tp
from tensorpager.pager.debug.check import check_invariants
from tensorpager.pager.disk import watch as io_watch

from .faulty_engine import FaultyEngine, break_disk
from .models import PAGE_BYTES, assert_same, make_pager, mlp, plain
from .test_faults import Training, disk_pager, evict_all, saved


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io_watch, "RETRY_PAUSES_SECONDS", (0.001,) * 3)


def own_states(training: Training) -> Any:
    """What a program without a pager would save."""
    return [training.model.state_dict(), training.optimizer.state_dict()]


def by_torch_save(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def fill_the_arena(pager: tp.Pager) -> list[torch.Tensor]:
    """New pages until none can leave the device for another."""
    kept: list[torch.Tensor] = []

    def fill() -> None:
        while True:
            kept.append(pager.page(torch.rand(PAGE_BYTES // 4)))

    with pytest.raises(tp.PagerError, match=r"could not be written.*stay where they were"):
        fill()
    return kept


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_torch_save_after_training_has_stopped(one_thread: None, tmp_path: Path, code: int) -> None:
    """The model and the optimizer as they were; when the disk is back training goes on from it."""
    with disk_pager(tmp_path) as pager:
        training = Training(pager)
        training.steps(2)
        engine = break_disk(pager)
        engine.fail("write", code)
        with pytest.raises(tp.PagerError, match="stay where they were"):
            training.steps(4)
        assert any(t.residency()["device"] == 0 for t in training.model.parameters())
        calls = engine.happened.total()
        state = by_torch_save(own_states(training))
        assert engine.happened.total() == calls, "nothing is written that could fail"
        check_invariants(pager.core)
        assert_same(saved(pager), plain(state))
        engine.heal()
        assert_same(plain(own_states(training)), plain(state))
        training.model.load_state_dict(state[0])
        training.optimizer.load_state_dict(state[1])
        training.optimizer.zero_grad()
        losses = training.steps(2)
        assert all(torch.isfinite(torch.tensor(losses)))


@pytest.fixture
def full(one_thread: None, tmp_path: Path) -> Iterator[tuple[tp.Pager, FaultyEngine, Any, Any]]:
    """A model that is on disk only, under an arena from which nothing can leave."""
    with make_pager(host_budget=0, disk_budget="32MiB", disk_path=tmp_path, frames=8) as pager:
        model = pager.page_module(mlp(depth=4))
        evict_all(pager)
        values = plain(model.state_dict())
        evict_all(pager)
        engine = break_disk(pager)
        engine.fail("write", errno.EIO)
        kept = fill_the_arena(pager)
        yield pager, engine, model, values
        check_invariants(pager.core)
        assert len(kept) == pager.core.residency.pool.count


COPIES: dict[str, Callable[[Any], torch.Tensor]] = {
    "to_dense": lambda t: t.to_dense(),
    "clone": lambda t: t.clone(),
    "to": lambda t: t.to(torch.float64).float(),
    "copy_": lambda t: torch.empty(t.shape).copy_(t),
    "pickle": lambda t: pickle.loads(pickle.dumps(t)),
    "numpy": lambda t: torch.from_numpy(t.numpy().copy()),
    "rows": lambda t: t[3:7].clone(),
    "columns": lambda t: t[:, 2:9:3].clone(),
    "transposed": lambda t: t.t().clone(),
    "stretched": lambda t: t[:1].expand(5, -1).clone(),
    "nothing": lambda t: t[:0].clone(),
}


@pytest.mark.parametrize("how", COPIES)
def test_copies_take_no_frame(how: str, full: Any) -> None:
    pager, engine, model, values = full
    frames, calls = pager.core.table.frame.copy(), engine.happened.total()
    for name, tensor in model.state_dict().items():
        if tensor.dim() == 2:
            found, expected = COPIES[how](tensor), COPIES[how](values[name])
            assert type(found) is torch.Tensor
            assert torch.equal(found, expected), name
            assert found.stride() == expected.stride(), name
    assert (pager.core.table.frame == frames).all(), "no page was moved"
    assert engine.happened.total() == calls


def test_a_plain_twin_takes_the_values(full: Any) -> None:
    _, _, model, values = full
    twin = mlp(depth=4)
    twin.load_state_dict(model.state_dict())
    assert_same(plain(twin.state_dict()), values)
    with pytest.raises(tp.PagerError, match="could not be written"):
        copy.deepcopy(model)  # which would take pages
    with pytest.raises(tp.PagerError, match="could not be written"):
        model(torch.randn(4, 128))


def test_a_disk_that_begins_to_fail_while_it_is_saved(one_thread: None, tmp_path: Path) -> None:
    """Half of a file is written from frames, the rest without."""
    limits = {"host_budget": 0, "disk_budget": "32MiB", "disk_path": tmp_path}
    for suffix in ("pt", "safetensors"):
        with make_pager(frames=8, **limits) as pager:
            model = pager.page_module(mlp(depth=4))
            values = plain(model.state_dict())
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.0)  # pages whose only copy is on the device, or was
            engine = break_disk(pager)
            engine.fail("write", errno.EIO)
            assert not pager.core.mover.disk_refuses
            pager.save(tmp_path / f"a.{suffix}", dict(model.state_dict()))
            assert pager.core.mover.disk_refuses
            with torch.no_grad():
                engine.heal()
                for parameter in model.parameters():
                    parameter.zero_()
            pager.load(tmp_path / f"a.{suffix}")
            assert_same(plain(model.state_dict()), values)
            check_invariants(pager.core)


def test_what_cannot_be_read_is_named(full: Any, tmp_path: Path) -> None:
    pager, engine, model, values = full
    engine.fail("read", errno.EIO)
    name = r"'2\.weight' cannot be read: .*Input/output error.*still on the disk only"
    with pytest.raises(tp.PagerError, match=name):
        torch.save({"w": model[2].weight.detach()}, io.BytesIO())
    with pytest.raises(tp.PagerError, match=name):
        pager.save(tmp_path / "a.pt", {"w": model[2].weight.detach()})
    with pytest.raises(tp.PagerError, match=name):
        model[2].weight.detach().clone()
    assert list(tmp_path.iterdir()) == []
    engine.heal()
    engine.fail("write", errno.EIO)
    assert_same(plain(by_torch_save(model.state_dict())), values)


def test_a_closed_pager_still_says_so() -> None:
    pager = make_pager()
    tensor = pager.page(torch.ones(3))
    pager.close()
    for use in (tensor.to_dense, tensor.clone, lambda: pickle.dumps(tensor)):
        with pytest.raises(tp.PagerError, match="was closed"):
            use()
