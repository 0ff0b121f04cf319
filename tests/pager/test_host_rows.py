"""Rows read where they are in the host tier: the same bits, and no page moves for them."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import tensorpager as tp
from tensorpager.pager.debug.check import check_invariants
from tensorpager.pager.machine.calibration import rows as calibration_rows
from tensorpager.pager.machine.calibration.rows import Border
from tensorpager.pager.moves.channel import Job
from tensorpager.pager.moves.transfers import PAGEWISE
from tensorpager.pager.plan.guide import Action
from tensorpager.pager.streaming import host_rows
from tensorpager.pager.streaming.host_rows import host_row_bytes
from tensorpager.pager.streaming.slabs import page_set, pages_of

from .models import PAGE_BYTES, make_pager
from .tables import ROWS, WIDTH, paged_table, read_table, tight, write_table
from .test_embedding import a_table_and_a_model, lookups, scramble
from .test_planned import compare_planned, planned_pager
from .test_stress import slow_channels  # noqa: F401

ROW_BYTES = WIDTH * 4
TURNS = 100 if os.environ.get("TENSORPAGER_FULL") else 9
TIERS: dict[str, Any] = {"host_budget": "1MiB", "disk_budget": "8MiB"}  # 16 host slots of 42 pages


@pytest.fixture(autouse=True)
def _seed(one_thread: None) -> None:
    torch.manual_seed(3)


@pytest.fixture
def most(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets how many bytes of a page are read in place; half a page, until it is called."""

    def set_to(nbytes: int) -> None:
        monkeypatch.setattr(host_rows, "most_bytes_of", lambda pager, row_bytes: nbytes)

    set_to(PAGE_BYTES // 2)
    return set_to


def look_up(table: tp.PagedTensor, indices: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return F.embedding(indices, table)


def tiers_of(table: tp.PagedTensor) -> tuple[int, int, int]:
    """Pages on the device, in host memory only, on disk only."""
    pager, run = table.pager, table._storage.run
    pages = slice(run.first, run.first + run.count)
    frame, host = pager.table.frame[pages] >= 0, pager.table.host[pages] >= 0
    return int(frame.sum()), int((host & ~frame).sum()), int((~host & ~frame).sum())


def first_rows(pages: range) -> torch.Tensor:
    """A row that lies whole in each of ``pages``."""
    return torch.tensor([page * PAGE_BYTES // ROW_BYTES + 1 for page in pages])


# -- the same bits ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("lane", "dtype"),
    [("plain", torch.bfloat16), ("chaos", torch.float32), ("scattered", torch.float16)],
)
@pytest.mark.parametrize("policy", ["lru", "lp"])
def test_pages_on_all_tiers(
    most: Callable[[int], None], tmp_path: Path, policy: str, lane: str, dtype: torch.dtype
) -> None:
    """Repeated rows, rows on two pages, the last page, which is partial."""
    dense = torch.randn(ROWS, WIDTH * 4 // dtype.itemsize).to(dtype)
    with tight(lane, policy=policy, disk_path=tmp_path, **TIERS) as pager:
        table = paged_table(pager, dense)
        for turn in range(3):
            on_device, on_host, on_disk = tiers_of(table)
            assert on_device > 0 or lane == "chaos"
            assert min(on_host, on_disk) > 4
            indices = lookups(40 + 100 * turn)
            before = host_row_bytes(pager)
            assert torch.equal(look_up(table, indices), dense[indices])
            read = host_row_bytes(pager) - before
            assert 0 < read < len(indices.unique()) * ROW_BYTES
        assert torch.equal(read_table(table), dense)


def test_rows_on_two_pages(most: Callable[[int], None]) -> None:
    """Of both pages little is wanted, or of one much; or one is on the device."""
    dense = torch.randn(30, 12_000)  # 0.73 pages
    with tight(host_budget="8MiB") as pager:
        table = paged_table(pager, dense)
        scramble(pager)
        begin = torch.arange(30) * 48_000
        ahead = PAGE_BYTES - begin % PAGE_BYTES
        halves = ((ahead < 32_000) & (ahead > 16_000)).nonzero().view(-1)
        assert len(halves) > 3
        faults = pager.residency.faults
        assert torch.equal(look_up(table, halves), dense[halves])
        assert pager.residency.faults == faults
        assert host_row_bytes(pager) == len(halves) * 48_000
        first = int(begin[halves[0]]) // PAGE_BYTES
        with page_set(pager, pages_of(table, [first])):
            assert torch.equal(look_up(table, halves[:1]), dense[halves[:1]])
        assert host_row_bytes(pager) == (len(halves) + 1) * 48_000
        whole = ((ahead >= 48_000) | (ahead < 8_000)).nonzero().view(-1)
        assert torch.equal(look_up(table, whole), dense[whole])
        assert host_row_bytes(pager) == (len(halves) + 1) * 48_000


def test_rows_of_several_pages(most: Callable[[int], None]) -> None:
    dense = torch.randn(40, 40_000)  # 2.4 pages
    with tight() as pager:
        table = paged_table(pager, dense)
        indices = torch.tensor([3, 39, 0, 17, 17])
        assert torch.equal(look_up(table, indices), dense[indices])
        assert host_row_bytes(pager) == 0


# -- which rows, and what moves --------------------------------------------------------------------
def test_sparse_lookups_bring_no_page_in(most: Callable[[int], None]) -> None:
    """Each row is fetched once, however often it is looked up."""
    indices = first_rows(range(40)).repeat(3)
    moved = []
    dense = torch.randn(ROWS, WIDTH)
    for nbytes in (0, PAGE_BYTES // 2):
        most(nbytes)
        with tight() as pager:
            table = paged_table(pager, dense)
            scramble(pager)
            before = pager.stats()
            assert torch.equal(look_up(table, indices), dense[indices])
            after = pager.stats()
            moved.append(
                [
                    after["bytes_in"] - before["bytes_in"],
                    pager.residency.faults - before["faults"] + pager.residency.pages_ahead,
                    host_row_bytes(pager),
                ]
            )
    (pages, faults, none), (no_pages, no_faults, rows) = moved
    assert pages == 40 * PAGE_BYTES
    assert faults > 0
    assert none == no_pages == no_faults == 0
    assert rows == 40 * ROW_BYTES


def test_pages_of_which_much_is_wanted_come(most: Callable[[int], None]) -> None:
    """To the byte."""
    most(10 * ROW_BYTES)
    dense = torch.randn(ROWS, WIDTH)
    with tight() as pager:
        table = paged_table(pager, dense)
        few = first_rows(range(3, 4)) + torch.arange(10)
        many = first_rows(range(9, 10)) + torch.arange(11)
        indices = torch.cat([few, many])[torch.randperm(21)]
        scramble(pager)
        before = pager.stats()["bytes_in"]
        assert torch.equal(look_up(table, indices), dense[indices])
        assert pager.stats()["bytes_in"] - before == PAGE_BYTES
        assert host_row_bytes(pager) == 10 * ROW_BYTES


def test_where_pages_always_come(most: Callable[[int], None]) -> None:
    """Where checksums are to be looked at, and while it is found out what is needed."""
    dense = torch.randn(ROWS, WIDTH)
    indices = first_rows(range(40))
    with tight(verify=True) as pager:
        table = paged_table(pager, dense)
        assert torch.equal(look_up(table, indices), dense[indices])
        assert host_row_bytes(pager) == 0
    with make_pager(frames=4) as pager:
        table = paged_table(pager, dense)
        for metered in (True, False):
            with pager.iteration():
                assert pager.budget.metering == metered
                assert torch.equal(look_up(table, indices), dense[indices])
            assert (host_row_bytes(pager) == 0) == metered


def test_errors(most: Callable[[int], None]) -> None:
    with tight() as pager:
        table = paged_table(pager, torch.randn(ROWS, WIDTH))
        scramble(pager)
        for row in (-1, ROWS):
            with pytest.raises(IndexError, match="index out of range in self"):
                look_up(table, torch.tensor([5, row]))
        assert host_row_bytes(pager) == 0
    with pytest.raises(tp.PagerError, match="was closed"):
        look_up(table, torch.tensor([5]))


def test_the_border_is_measured_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And counts as waiting; what it is decides what is read in place."""
    asked: list[int] = []

    def measure(backend: Any, page_size: int, row_bytes: int) -> Border:
        asked.append(row_bytes)
        time.sleep(0.01)
        return Border(2 * ROW_BYTES, 1e6)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(calibration_rows, "measure_rows", measure)
    monkeypatch.setattr(host_rows, "_borders", {})
    dense = torch.randn(ROWS, WIDTH)
    for _ in range(2):
        with tight() as pager:
            table = paged_table(pager, dense)
            scramble(pager)
            before = pager.stall_us
            indices = first_rows(range(2)).repeat_interleave(3) + torch.tensor([0, 1, 1, 0, 1, 2])
            assert torch.equal(look_up(table, indices), dense[indices])
            assert host_row_bytes(pager) == 2 * ROW_BYTES
            assert len(asked) == 1
    assert asked == [512]
    assert pager.stall_us > before
    monkeypatch.setattr(host_rows, "_borders", {})
    with make_pager(frames=4) as pager:
        assert host_rows.most_bytes_of(pager, ROW_BYTES) == 2 * ROW_BYTES
    assert len(asked) == 1


def test_the_border_is_higher_where_pages_are_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In proportion, by the median of what was seen; not beyond half a page."""
    monkeypatch.setattr(host_rows, "_border_of", lambda pager, row_bytes: Border(1000, 10.0))
    with tight(disk_path=tmp_path, **TIERS) as pager:
        assert host_rows.most_bytes_of(pager, ROW_BYTES) == 1000
        moved = pager.migration.moved
        for us, expected in ((5, 1000), (50, 2750), (50, 5000), (1e6, 5000)):
            with host_rows.paying_for_pages(pager):
                pager.stall_us += us * 4
                moved["host-in"] += 4 * PAGE_BYTES
            assert host_rows.most_bytes_of(pager, ROW_BYTES) == expected
        for other in ("disk-in", "host-out"):  # from disk, or none at all: that says nothing
            with host_rows.paying_for_pages(pager):
                pager.stall_us += 1e9
                moved[other] += PAGE_BYTES
                moved["host-in"] += PAGE_BYTES * (other == "disk-in")
            assert host_rows.most_bytes_of(pager, ROW_BYTES) == 5000
        for _ in range(5):
            with host_rows.paying_for_pages(pager):
                pager.stall_us += 1e6
                moved["host-in"] += PAGE_BYTES
        assert host_rows.most_bytes_of(pager, ROW_BYTES) == PAGE_BYTES // 2


def test_a_lookup_is_the_same_access_whether_pages_come_or_not(most: Callable[[int], None]) -> None:
    """So that iterations that look up other rows follow one plan."""
    dense = torch.randn(ROWS, WIDTH)
    with tight(policy="lp") as pager:
        table = paged_table(pager, dense)
        assert pager.follower is not None
        found = []
        for nbytes in (0, PAGE_BYTES // 2):
            most(nbytes)
            scramble(pager)
            with pager.iteration():
                assert not pager.budget.metering
                look_up(table, first_rows(range(5)))
                assert pager.follower.log is not None
                found.append(list(pager.follower.log.keys))
        assert host_row_bytes(pager) == 5 * ROW_BYTES
        assert found[0] == found[1] != []


# -- beside moves ----------------------------------------------------------------------------------
def test_beside_moves_by_other_threads(
    most: Callable[[int], None],
    slow_channels: None,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Pages come and leave at random, with random delays, and others are written to their slots."""
    chance = random.Random(1)
    dense = torch.randn(ROWS, WIDTH)
    other = torch.randn(300, WIDTH)
    with tight(policy="lp", frames=12, disk_path=tmp_path, **TIERS) as pager:
        table, beside = paged_table(pager, dense), paged_table(pager, other)
        assert pager.follower is not None
        executor, over = pager.follower.executor, threading.Event()

        def move() -> None:
            while not over.is_set():
                run = table._storage.run
                tier, what = chance.choice(("host", "disk")), chance.choice(("in", "out", "drop"))
                first = chance.randrange(run.count - 3)
                action = Action(what, tier, run.key, first, chance.randint(1, 3), PAGEWISE)
                with pager.lock:
                    if what == "drop":
                        executor._drop(run, action)
                    elif what == "out":
                        run.leaving += 1
                        executor._outs[tier].add(Job(action, run))
                    else:
                        run.coming += 1
                        executor._ins[tier].add(Job(action, run))
                time.sleep(chance.random() * 0.002)

        mover = threading.Thread(target=move)
        mover.start()
        try:
            for turn in range(TURNS):
                indices = torch.randint(ROWS, (chance.choice((5, 60)),))
                assert torch.equal(look_up(table, indices), dense[indices]), turn
                if turn % 3 == 0:  # copies below become void, and their slots free
                    other = other + 1
                    write_table(beside, other)
                elif turn % 3 == 1:
                    rows = slice(chance.randrange(ROWS - 50), ROWS)
                    dense[rows] += 1
                    write_table(table, dense)
        finally:
            over.set()
            mover.join()
        with pager.lock:
            executor.drain()
        assert executor.error is None
        assert host_row_bytes(pager) > 0
        check_invariants(pager)
        assert torch.equal(read_table(table), dense)
        assert torch.equal(read_table(beside), other)


def test_no_page_changes_between_the_look_and_the_kernel(
    most: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel is queued with the lock held: nobody else has it."""
    dense = torch.randn(ROWS, WIDTH)
    locked: list[bool] = []
    fetch = host_rows.fetch_blocks

    def try_to_lock() -> None:
        found = pager.lock.acquire(timeout=0.01)
        locked.append(not found)
        if found:
            pager.lock.release()

    def fetch_blocks(blocks: Any) -> None:
        thread = threading.Thread(target=try_to_lock)
        thread.start()
        thread.join()
        fetch(blocks)

    monkeypatch.setattr(host_rows, "fetch_blocks", fetch_blocks)
    monkeypatch.setattr(host_rows, "_BYTES_AT_ONCE", 10 * ROW_BYTES)
    with tight() as pager:
        table = paged_table(pager, dense)
        scramble(pager)
        indices = first_rows(range(25))
        assert torch.equal(look_up(table, indices), dense[indices])
    assert locked == [True] * 3


def test_pages_that_change_between_two_holds_of_the_lock(
    most: Callable[[int], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is on disk by then comes in, like others on disk."""
    dense = torch.randn(ROWS, WIDTH)
    fetch, calls = host_rows._fetch, []

    def then_to_disk(table: tp.PagedTensor, *rest: Any) -> None:
        fetch(table, *rest)
        calls.append(rest)
        if len(calls) > 1:
            return
        with page_set(pager, pages_of(table, [20], write=True)):
            pass  # as if something else had been written: its copy is void
        free = pager.host.slots.allocate(pager.host.slots.free_count)
        scramble(pager)
        for start, length in free or ():
            pager.host.slots.free(start, length)
        run = table._storage.run
        assert pager.table.frame[run.first + 20] == pager.table.host[run.first + 20] == -1

    monkeypatch.setattr(host_rows, "_fetch", then_to_disk)
    monkeypatch.setattr(host_rows, "_BYTES_AT_ONCE", 10 * ROW_BYTES)
    with tight(disk_path=tmp_path, host_budget="4MiB", disk_budget="1MiB") as pager:
        table = paged_table(pager, dense)
        scramble(pager)
        indices = first_rows(range(25))
        assert torch.equal(look_up(table, indices), dense[indices])
        assert len(calls) == 3
        assert host_row_bytes(pager) == 24 * ROW_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("delays", [False, True])
def test_planned_training(
    most: Callable[[int], None], request: pytest.FixtureRequest, delays: bool
) -> None:
    if delays:
        request.getfixturevalue("slow_channels")
    with planned_pager() as pager:
        compare_planned(a_table_and_a_model, pager)
        assert host_row_bytes(pager) > 0
        assert pager.residency.pinned_pages() == 0


def test_a_page_that_comes_may_be_read_in_its_slot(
    most: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The transfer waits until the lookup is over, and the lookup does not wait for it."""
    from tensorpager.pager.moves.transfers import Transfer

    dense = torch.randn(ROWS, WIDTH)
    looked_up, run_transfer = threading.Event(), Transfer.run

    def run(self: Transfer) -> None:
        assert looked_up.wait(300)
        run_transfer(self)

    with tight(policy="lp") as pager:
        table = paged_table(pager, dense)
        scramble(pager)
        assert pager.follower is not None
        executor, pages = pager.follower.executor, table._storage.run
        monkeypatch.setattr(Transfer, "run", run)
        with pager.lock:
            pages.coming += 1
            executor._ins["host"].add(Job(Action("in", "host", 0, 5, 2, PAGEWISE), pages))
        deadline = time.monotonic() + 300
        while not pager.residency.in_flight:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        indices = first_rows(range(4, 8))
        assert torch.equal(look_up(table, indices), dense[indices])
        assert host_row_bytes(pager) == 4 * ROW_BYTES
        looked_up.set()
        with pager.lock:
            executor.drain()
        assert np.flatnonzero(pager.table.frame[pages.first : pages.first + 10] >= 0).tolist() == [
            5, 6,
        ]  # fmt: skip
        assert torch.equal(look_up(table, indices), dense[indices])
        assert host_row_bytes(pager) == 6 * ROW_BYTES


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu(most: Callable[[int], None], dtype: torch.dtype) -> None:
    """Page-locked slots are read by the kernel; they are written over right behind it."""
    page, width = 2 << 20, 512
    most(page // 2)
    dense = torch.randn(20 * page // (width * dtype.itemsize) - 7, width).to(dtype).cuda()
    with make_pager(frames=4, page_size=page, device="cuda", host_budget="64MiB") as pager:
        with pager.iteration():
            pass
        table = paged_table(pager, dense)
        for turn in range(5):
            scramble(pager)
            before = host_row_bytes(pager)
            indices = torch.randint(len(dense), (300,), device="cuda")
            out = look_up(table, indices)
            expected = dense[indices]
            dense += 1
            write_table(table, dense)
            assert torch.equal(out.cpu(), expected.cpu()), turn
            assert host_row_bytes(pager) > before
