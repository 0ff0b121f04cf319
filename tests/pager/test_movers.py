"""A planned move that fails, or that should never have been asked for, costs time and nothing else:
what was prepared is undone, the user hears of it once, and training goes on to plain's bits."""

from __future__ import annotations

import copy
import errno
import random
import threading
import warnings
from collections.abc import Callable, Iterator
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
from tensorpager.pager.plan.access_log import newborn_index, newborn_key
from tensorpager.pager.plan.compiled_plan import ANYWHERE, Action, CompiledPlan
from tensorpager.pager.plan.signatures import StepSignature

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


# -- keys ------------------------------------------------------------------------------------------
def test_keys_of_runs_born_inside_say_which_and_how_large() -> None:
    keys = {newborn_key(index, pages) for index in range(3) for pages in range(1, 4)}
    assert len(keys) == 9
    assert max(keys) < 0
    assert newborn_index(newborn_key(7, 5)) == 7


# -- batches of another length ---------------------------------------------------------------------
class OtherShapesPlan(PlannedWorld):
    """Makes one plan, and has every other kind of iterations follow it, as if it were theirs."""

    imposed = 0

    def iteration(self) -> Any:
        if self.pager is not None:
            self._impose(self.pager)
        return super().iteration()

    def _impose(self, pager: tp.Pager) -> None:
        follower = pager.core.follower
        assert follower is not None
        planned = (one for one in follower.signatures.all if one.compiled is not None)
        made = next(planned, None)
        if made is None or made.compiled is None:
            return
        follower.most_plans = 0
        for signature in follower.signatures.all:
            if signature.compiled is None:
                signature.compiled = as_of(signature, made.compiled)
                self.imposed += 1


def as_of(signature: StepSignature, compiled: CompiledPlan) -> CompiledPlan:
    """``compiled`` with the names of ``signature``: its n-th born is the other's, of any size."""
    theirs = {newborn_index(key): key for access in signature.keys for key in access if key < 0}

    def renamed(key: int) -> int:
        return key if key > 0 else theirs.get(newborn_index(key), key)

    other = copy.copy(compiled)
    other.keys = signature.keys
    moves = [[act._replace(key=renamed(act.key)) for act in acts] for acts in compiled.actions]
    other.actions = [*moves, *([] for _ in signature.keys)][: len(signature.keys) + 1]
    other.births = {renamed(key): base for key, base in compiled.births.items()}
    other.uses = {renamed(key): positions for key, positions in compiled.uses.items()}
    return other


def random_shapes(steps: int) -> Callable[[World], object]:
    def script(world: World) -> object:
        model = world.module(mlp(depth=2))
        optimizer = world.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
        chance = random.Random(SEED)
        losses = []
        for step in range(steps):
            with world.iteration():
                loss = loss_of(model, ROWS[0] if step < 4 else chance.choice(ROWS))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        return losses, model, optimizer

    return script


LENGTHS = [20, pytest.param(200, marks=pytest.mark.slow)]


@pytest.mark.parametrize("steps", LENGTHS)
def test_a_plan_that_belongs_to_other_shapes(one_thread, steps: int) -> None:
    """It asks for pages that runs do not have, and for places that are taken."""
    with planned_pager(frames=24) as pager:
        world = OtherShapesPlan(pager)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            compare_runs(random_shapes(steps), world)
        assert world.imposed >= len(ROWS) - 1
        assert pager.stats()["departures"] > 0
        assert pager.core.mover.error is None


@pytest.mark.slow
def test_plans_for_each_of_many_shapes(one_thread, tmp_path) -> None:
    with planned_pager(frames=24, disk_path=tmp_path, **TIERS["both"]) as pager:
        compare_runs(random_shapes(200), PlannedWorld(pager))
        assert pager.stats()["planned_iterations"] > 0
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

    def prepare(before: str, after: str, coming: str) -> tuple[tp.Pager, dict[str, Any]]:
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
            moves = [Action("in", "host", keys[c], 0, counts[c], ANYWHERE) for c in coming]
            pager.core.follower.planned.issue(moves, ())
        return pager, tensors

    yield prepare
    for pager in pagers:
        pager.close()


@pytest.mark.parametrize(
    ("after", "copy"),
    [
        (".BB.CC...D", "moved"),  # C goes aside for A
        (".BB.CC.DDD", "slid"),  # nothing has another place
    ],
)
def test_a_move_that_cannot_be_prepared_ends_the_plan(
    queued, monkeypatch, after: str, copy: str
) -> None:
    """E comes; the copy that would make room for A fails."""
    if copy == "moved":
        monkeypatch.setattr(residency_module.Residency, "_move", breaks)
    else:
        monkeypatch.setattr("tensorpager.pager.devices.cpu.Cpu.slide", breaks)
    count = 4 if copy == "moved" else 2
    pager, tensors = queued("A" * count + "E" + "." * (FRAMES - 1 - count), after, "EA")
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


def test_pages_that_a_run_does_not_have_are_not_moved(queued) -> None:
    with planned_pager(frames=FRAMES) as pager:
        tensors = laid_out(pager, "AABB......")
        keys = named(pager, tensors)
        planned = pager.core.follower.planned
        with pager.core.lock:
            for what in ("out", "drop", "in"):
                planned.issue([Action(what, "host", keys["A"], 1, 2, ANYWHERE)], ())
            assert not planned.waiting
            assert not pager.core.mover.tickets.any
        assert layout(pager, tensors) == "AABB......"
        assert (np.asarray(pager.core.table.host[pages_of(tensors["B"])]) < 0).all()
        check_invariants(pager.core)
        assert unchanged(tensors)
