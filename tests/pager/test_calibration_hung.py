"""Rates of a disk that stops answering while it is measured: the wait ends, and what the calls that
hang may still use is nobody else's until they have returned."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorpager as tp
from tensorpager.pager.debug.check import check_invariants
from tensorpager.pager.devices.choice import make_device
from tensorpager.pager.disk.tier import DiskTier
from tensorpager.pager.disk.watch import IoWatch, WatchedEngine
from tensorpager.pager.errors import HungDisk
from tensorpager.pager.machine.calibration import cache, disk_rates
from tensorpager.pager.machine.calibration.measure import measure
from tensorpager.pager.memory.frame_pool import Run
from tensorpager.pager.memory.host import HostTier
from tensorpager.pager.plan import planning

from .faulty_engine import FaultyEngine, break_disk
from .models import PAGE_BYTES, make_pager

MIB = 1 << 20
SECONDS = 1.0  # a call that does not hang takes less, on a busy machine too
LONG = 60.0  # a test's patience; nothing here is that slow


@pytest.fixture(autouse=True)
def measured_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "load", lambda key: None)


class Sudden(FaultyEngine):
    """Hangs when the calls have been ``verbs`` in turn, each once or many times."""

    verbs: tuple[str, ...] = ()
    seen: tuple[str, ...] = ()

    def _before(self, verb: str) -> None:
        with self._lock:
            if self.seen[-1:] != (verb,):
                self.seen += (verb,)
            if self.seen == self.verbs:
                self.verbs = ()
                self.hang("write")
                self.hang("read")
        super()._before(verb)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskTier]:
    watch = IoWatch(SECONDS)

    def faulty(engine):  # type: ignore[no-untyped-def]
        return WatchedEngine(Sudden(engine), watch)

    disk = DiskTier(tmp_path, 8 * MIB, PAGE_BYTES, engine=faulty)
    yield disk
    engine_of(disk).heal()
    disk.close()


def engine_of(disk: DiskTier) -> Sudden:
    assert isinstance(disk.engine, WatchedEngine)
    assert isinstance(disk.engine.inner, Sudden)
    return disk.engine.inner


@pytest.mark.parametrize(
    "verbs", [("write",), ("write", "read"), ("write", "read", "write")], ids="-".join
)
def test_the_wait_ends_and_what_is_in_use_is_held_back(
    disk: DiskTier, monkeypatch: pytest.MonkeyPatch, verbs: tuple[str, ...]
) -> None:
    """In the first write, in reads alone, or while both ways run."""
    monkeypatch.setattr(disk_rates, "PHASE_S", LONG)  # two pieces at least, however slow
    backend = make_device(torch.device("cpu"), MIB, MIB)
    host = HostTier(2 * MIB, PAGE_BYTES, backend)
    held: list[tuple[list[Future[None]], dict[str, list[Run]]]] = []

    def hold_back(futures: Sequence[Future[None]], runs: dict[str, list[Run]]) -> None:
        held.append((list(futures), runs))

    engine_of(disk).verbs = verbs
    watch = disk.engine.watch  # type: ignore[attr-defined]
    began = time.monotonic()
    pattern = rf"'{disk.directory}' could not be measured: the disk .*disk_path to another disk"
    with pytest.raises(HungDisk, match=pattern):
        measure(backend=backend, host=host, disk=disk, page_size=PAGE_BYTES, watch=watch,
                hold_back=hold_back)  # fmt: skip
    assert SECONDS <= time.monotonic() - began < LONG
    ((futures, runs),) = held
    assert not any(future.done() for future in futures)
    for tier, pool in (("host", host.slots), ("disk", disk.slots)):
        taken = sum(count for _, count in runs[tier])
        if verbs[-1] == "read" or tier == "disk":  # the second read goes to a host slot
            assert taken > 0
        assert pool.free_count == pool.count - taken
        assert all(not pool.is_free(*run) for run in runs[tier])
    engine_of(disk).heal()
    for future in futures:
        assert future.exception(LONG) is None
    host.close()
    backend.close()


def test_a_disk_that_is_slow_but_answers_is_measured(disk: DiskTier) -> None:
    backend = make_device(torch.device("cpu"), 64 * MIB, MIB)
    host = HostTier(0, PAGE_BYTES, backend)
    engine_of(disk).delay_seconds = SECONDS / 20
    watch = disk.engine.watch  # type: ignore[attr-defined]
    watch.timeout_seconds = LONG
    rates = measure(backend=backend, host=host, disk=disk, page_size=PAGE_BYTES, watch=watch)
    assert rates.has_disk
    assert disk.slots.free_count == disk.slots.count
    backend.close()


class Asked:
    """Stands for the planner's process: only whether it was started matters here."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def ask(self, *_: Any, **__: Any) -> None:
        pass

    def done(self) -> bool:
        return False

    def cancel(self) -> None:
        pass


@pytest.mark.parametrize("verb", ["write", "read"])
def test_training_goes_on_and_plans_when_the_disk_is_back(
    one_thread: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.setattr(planning, "PlanningProcess", Asked)
    options = {"disk_budget": "8MiB", "disk_path": tmp_path, "io_timeout": SECONDS, "policy": "lp"}
    with make_pager(host_budget="4MiB", **options) as pager:
        assert pager.core.follower is not None
        weight = pager.page(torch.randn(256, 256))
        expected = weight.to_dense()
        engine = break_disk(pager)
        engine.hang(verb)
        for _ in range(4):
            step(pager, weight)
        assert not any(kind.refused or kind.process for kind in pager.core.follower.signatures.all)
        assert torch.equal(weight.to_dense(), expected)
        assert pager.stats()["faults"] > 0
        held = pager.stats()["used_bytes"]["disk"]
        assert held > 0, "slots of calls that have not returned"
        with pytest.raises(HungDisk, match="could not be measured: the disk still does not answer"):
            pager.core.follower.hardware()
        assert pager.stats()["used_bytes"]["disk"] == held, "trying again takes no more"
        engine.heal()
        deadline = time.monotonic() + LONG
        while pager.core.io_watch.calls:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        step(pager, weight)
        assert any(kind.process for kind in pager.core.follower.signatures.all)
        assert pager.stats()["used_bytes"]["disk"] == 0
        assert torch.equal(weight.to_dense(), expected)
        check_invariants(pager.core)


def step(pager: tp.Pager, weight: tp.PagedTensor) -> None:
    """Pages that do not fit beside each other, in the host's room."""
    with pager.iteration():
        others = [pager.page(torch.randn(256, 256)) for _ in range(6)]
        for other in others:
            weight.matmul(other)
