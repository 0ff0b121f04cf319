"""A planned move that fails, or that should never have been asked for, costs time and nothing else:
what was prepared is undone, the user hears of it once, and training goes on to plain's bits."""

from __future__ import annotations

import errno
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tensorpager as tp
from tensorpager.pager.debug.check import check_invariants
from tensorpager.pager.devices.device import PLANNED, Mark
from tensorpager.pager.disk import watch as io_watch
from tensorpager.pager.moves import residency as residency_module
from tensorpager.pager.moves.tickets import Lane
from tensorpager.pager.plan.compiled_plan import ANYWHERE, Action

from .faulty_engine import FaultyEngine
from .models import SEED, World, compare_runs, loss_of, mlp, train
from .test_compaction import FRAMES, laid_out, layout, unchanged
from .test_following import named, pages_of
from .test_planned import TIERS, PlannedWorld, planned_pager

ROWS = (64, 128, 192, 256)  # of a batch: activations of 1 to 4 pages


class BrokenCopyError(RuntimeError):
    """What the device's copies fail with here."""


def breaks(*arguments: Any, **options: Any) -> None:
    raise BrokenCopyError("no copy today")


# -- batches of another length ---------------------------------------------------------------------
class PlannedOnce(PlannedWorld):
    """Plans the first iterations, and follows that plan from then on."""

    @contextmanager
    def iteration(self) -> Iterator[None]:
        with super().iteration():
            yield
        follower = self.pager.core.follower if self.pager is not None else None
        if follower is not None and any(one.compiled for one in follower.signatures.all):
            follower.most_plans = 0


def random_shapes(steps: int, first: int) -> Callable[[World], object]:
    def script(world: World) -> object:
        model = world.module(mlp(depth=2))
        optimizer = world.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
        chance = random.Random(SEED)
        losses = []
        for step in range(steps):
            with world.iteration():
                loss = loss_of(model, first if step < 4 else chance.choice(ROWS))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        return losses, model, optimizer

    return script


LENGTHS = [20, pytest.param(200, marks=pytest.mark.slow)]


@pytest.mark.parametrize("rows", [ROWS[0], ROWS[-1]], ids=["shortest", "longest"])
@pytest.mark.parametrize("steps", LENGTHS)
def test_the_plan_of_one_length_is_followed_by_all(one_thread, steps: int, rows: int) -> None:
    """Where it was made of shorter ones, activations take more than it has places for."""
    with planned_pager(frames=24) as pager:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            compare_runs(random_shapes(steps, rows), PlannedOnce(pager))
        stats = pager.stats()
        assert stats["kinds"] <= 2  # the first one makes states
        assert stats["departures"] == 0
        assert stats["planned_iterations"] >= steps - 6
        assert pager.core.mover.error is None


@pytest.mark.slow
def test_plans_while_lengths_vary(one_thread, tmp_path) -> None:
    with planned_pager(frames=24, disk_path=tmp_path, **TIERS["both"]) as pager:
        compare_runs(random_shapes(200, ROWS[0]), PlannedWorld(pager))
        assert pager.stats()["planned_iterations"] > 150
        assert pager.core.mover.error is None


# -- moves that fail -------------------------------------------------------------------------------
def script(world: World) -> object:
    model = world.module(mlp(depth=3))
    optimizer = world.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    return train(world, model, optimizer, 5), model, optimizer


def goes_on_by_faults(pager: tp.Pager, cause: type[Exception], words: str) -> None:
    """``script`` has plain's bits, after one warning that holds the error."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compare_runs(script, PlannedWorld(pager))
    told = [w.message for w in caught if "planned move failed" in str(w.message)]
    assert len(told) == 1
    assert type(told[0].__cause__) is cause
    assert words in str(told[0])
    stats = pager.stats()
    assert stats["mode"] == "demand"
    assert words in pager.explain()
    check_invariants(pager.core)


@pytest.mark.slow  # test_planned.py has a quick one
@pytest.mark.parametrize("to_device", [True, False])
def test_the_devices_copies_fail(one_thread, monkeypatch, to_device: bool) -> None:
    with planned_pager() as pager:
        copy = pager.core.backend.copy

        def broken(copies: Any, lane: str, after: Mark, **way: bool) -> Mark:
            if lane == PLANNED and way["to_device"] == to_device:
                breaks()
            return copy(copies, lane, after, **way)

        monkeypatch.setattr(pager.core.backend, "copy", broken)
        goes_on_by_faults(pager, BrokenCopyError, "no copy today")


class BrokenBesideTraining(FaultyEngine):
    """One ``verb`` fails in the threads of ``lanes``; faults, in others, meet no error."""

    verb = ""
    lanes: tuple[Lane, ...] = ()

    def _before(self, verb: str) -> None:
        threads = [thread for lane in self.lanes for thread in lane.threads]
        if verb == self.verb and threading.current_thread() in threads:
            self.happened["refused"] += 1
            raise OSError(errno.EIO, "the drive is gone")


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["read", "write"])
def test_the_disk_fails_the_lanes(one_thread, tmp_path: Path, monkeypatch, verb: str) -> None:
    monkeypatch.setattr(io_watch, "RETRY_PAUSES_SECONDS", (0.001,))
    with planned_pager(disk_path=tmp_path, **TIERS["disk"]) as pager:
        assert pager.core.disk is not None
        watched = pager.core.disk.engine
        assert isinstance(watched, io_watch.WatchedEngine)
        watched.inner = engine = BrokenBesideTraining(watched.inner)
        engine.verb, engine.lanes = verb, tuple(pager.core.mover.lanes.values())
        goes_on_by_faults(pager, tp.PagerError, "the drive is gone")
        assert engine.happened["refused"] > 0


# -- what a failed preparation leaves --------------------------------------------------------------
@pytest.fixture
def queued() -> Iterator[Callable[..., tuple[tp.Pager, dict[str, Any]]]]:
    """A pager in which the ``coming`` letters of ``before`` were sent below, ``after`` was laid out
    over it, and all of ``coming`` were queued at once."""
    pagers = []

    def prepare(
        before: str, after: str, coming: str, **homes: int
    ) -> tuple[tp.Pager, dict[str, Any]]:
        pager = planned_pager(frames=FRAMES)
        pagers.append(pager)
        tensors = laid_out(pager, before)
        with pager.core.lock:
            for letter in coming:
                pager.core.residency.evict_pages(pages_of(tensors[letter]))
        tensors |= laid_out(pager, after)
        keys = named(pager, tensors)
        with pager.core.lock:
            counts = {letter: len(pages_of(tensors[letter])) for letter in coming}
            planned = pager.core.follower.planned
            planned._tidies = bool(homes)
            planned.homes = {keys[letter]: home for letter, home in homes.items()}
            bases = {letter: homes.get(letter, ANYWHERE) for letter in coming}
            moves = [Action("in", "host", keys[c], 0, counts[c], bases[c]) for c in coming]
            planned.issue(moves, {})
        return pager, tensors

    yield prepare
    for pager in pagers:
        pager.close()


def test_a_move_that_cannot_be_prepared_ends_the_plan(queued, monkeypatch) -> None:
    """E comes; the copy by which C, which has gone astray, would make way for A fails."""
    monkeypatch.setattr(residency_module.Residency, "_move", breaks)
    after = ".BB.CC...D"
    pager, tensors = queued("AAAAE.....", after, "EA", A=3, C=7, E=0)
    assert isinstance(pager.core.mover.error, BrokenCopyError)
    assert not pager.core.follower.planned.waiting
    others = {letter: tensor for letter, tensor in tensors.items() if letter != "E"}
    came = layout(pager, tensors).index("E")
    assert layout(pager, others) == after
    assert after[came] == "."
    check_invariants(pager.core)
    monkeypatch.undo()
    assert unchanged(tensors)
    check_invariants(pager.core)


def test_what_comes_moves_nothing_aside(queued) -> None:
    """A comes in pieces where there is room, and is put together when it is used."""
    after = ".BB.CC...D"
    pager, tensors = queued("AAAA......", after, "A")
    others = {letter: tensor for letter, tensor in tensors.items() if letter != "A"}
    assert layout(pager, others) == after
    with pager.core.lock:
        pager.core.mover.drain()
        assert pager.core.residency.is_there(tensors["A"]._storage.run)
        assert not pager.core.residency.is_whole(tensors["A"]._storage.run)
    assert unchanged(tensors)
    assert pager.core.residency.is_whole(tensors["A"]._storage.run)
    check_invariants(pager.core)


def test_pages_that_a_run_does_not_have_are_not_moved(queued) -> None:
    with planned_pager(frames=FRAMES) as pager:
        tensors = laid_out(pager, "AABB......")
        keys = named(pager, tensors)
        planned = pager.core.follower.planned
        with pager.core.lock:
            for what in ("out", "drop", "in"):
                planned.issue([Action(what, "host", keys["A"], 1, 2, ANYWHERE)], {})
            assert not planned.waiting
            assert not pager.core.mover.tickets.any
        assert layout(pager, tensors) == "AABB......"
        assert (np.asarray(pager.core.table.host[pages_of(tensors["B"])]) < 0).all()
        check_invariants(pager.core)
        assert unchanged(tensors)
