"""Pages through the disk tier, on either engine: round trips, batches, growing, the end."""

import errno
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tensorpager.pager.disk.batch import split
from tensorpager.pager.disk.file import aligned_bytes
from tensorpager.pager.disk.tier import DiskTier
from tensorpager.pager.errors import PagerError

from .disk_suite import PAGE, SLOTS, Around, make_tier, random_pages, unaligned

# What it is for


def test_pages_come_back_as_they_were(tier: DiskTier, small_tasks: None) -> None:
    pages = random_pages(SLOTS)
    tier.write([(0, pages)])
    back = aligned_bytes(pages.nbytes)
    tier.read([(0, back)])
    np.testing.assert_array_equal(back, pages)
    assert tier.bytes_written == tier.bytes_read == SLOTS * PAGE


def test_scattered_runs_in_any_order(tier: DiskTier, small_tasks: None) -> None:
    pages = random_pages(20).reshape(20, PAGE)
    tier.write([(40, pages[:7]), (3, pages[7:8]), (10, pages[8:17]), (4, pages[17:])])
    back = random_pages(20, seed=1).reshape(20, PAGE)
    tier.read([(3, back[7:8]), (40, back[:5]), (45, back[5:7]), (4, back[17:]), (10, back[8:17])])
    np.testing.assert_array_equal(back, pages)


@pytest.mark.parametrize("mixed", [True, False])
def test_unaligned_buffers(tier: DiskTier, small_tasks: None, mixed: bool) -> None:
    pages = random_pages(9)
    halves = [pages[: 3 * PAGE], unaligned(pages[3 * PAGE :])]
    tier.write([(5, halves[0] if mixed else unaligned(halves[0])), (8, halves[1])])
    back = [aligned_bytes(3 * PAGE), unaligned(random_pages(6, seed=1))]
    tier.read([(5, back[0]), (8, back[1])])
    np.testing.assert_array_equal(np.concatenate(back), pages)


@pytest.mark.parametrize("page_size", [1 << 16, 8 << 20])
def test_other_page_sizes(tmp_path: Path, page_size: int) -> None:
    tier = make_tier(tmp_path, 3 * page_size, page_size)
    pages = np.random.default_rng(0).integers(0, 256, (3, page_size), dtype=np.uint8)
    tier.write([(slot, page) for slot, page in enumerate(pages)])
    back = np.zeros_like(pages)
    tier.read([(0, back)])
    tier.close()
    np.testing.assert_array_equal(back, pages)


def test_a_page_size_that_o_direct_cannot_do(tmp_path: Path) -> None:
    tier = make_tier(tmp_path, 5 * 1000, 1000)
    assert not tier.direct
    page = np.arange(1000, dtype=np.uint8)
    back = np.zeros_like(page)
    tier.write([(4, page)])
    tier.read([(4, back)])
    tier.close()
    np.testing.assert_array_equal(back, page)


def test_an_empty_batch(tier: DiskTier) -> None:
    tier.write([])
    tier.read([])


def test_overwriting(tier: DiskTier) -> None:
    back = aligned_bytes(2 * PAGE)
    for seed in range(5):
        pages = random_pages(2, seed)
        tier.write([(6, pages)])
        tier.read([(6, back)])
        np.testing.assert_array_equal(back, pages)


def test_many_callers_at_once(tier: DiskTier, small_tasks: None) -> None:
    def use(caller: int) -> None:
        rng = np.random.default_rng(caller)
        first = caller * 8
        for round_ in range(20):
            count = int(rng.integers(1, 9))
            pages = random_pages(count, seed=100 * caller + round_)
            back = aligned_bytes(pages.nbytes)
            tier.submit_write([(first, pages)]).result(300)
            tier.submit_read([(first, back)]).result(300)
            np.testing.assert_array_equal(back, pages)

    with ThreadPoolExecutor(8) as callers:
        list(callers.map(use, range(8)))


def test_the_future_keeps_the_buffers(tier: DiskTier) -> None:
    futures = [tier.submit_write([(slot, random_pages(1, seed=slot))]) for slot in range(SLOTS)]
    for future in futures:
        assert not future.cancel()
        future.result(300)
    back = aligned_bytes(SLOTS * PAGE)
    tier.read([(0, back)])
    expected = np.concatenate([random_pages(1, seed=slot) for slot in range(SLOTS)])
    np.testing.assert_array_equal(back, expected)


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no /dev/shm")
@pytest.mark.parametrize("direct", [None, False])
def test_tmpfs(direct: bool | None) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        tier = make_tier(directory, 8 * PAGE, PAGE, direct=direct)
        pages, back = random_pages(8), aligned_bytes(8 * PAGE)
        tier.write([(0, pages)])
        tier.read([(0, back)])
        tier.close()
        np.testing.assert_array_equal(back, pages)


# How a batch is cut up


def test_small_neighbours_share_a_task_and_large_runs_are_cut(small_tasks: None) -> None:
    pages = np.zeros((12, PAGE), np.uint8)
    runs = [(20, pages[:6]), (2, pages[6:7]), (1, pages[7:8]), (3, pages[8:9]), (5, pages[9:12])]
    tasks = split(runs, PAGE)
    assert [(task.first_slot, task.page_count) for task in tasks] == [
        (1, 3),
        (5, 3),
        (20, 4),
        (24, 2),
    ]
    for task in tasks:
        assert sum(buffer.nbytes for buffer in task.buffers) == task.page_count * PAGE
    assert [len(task.buffers) for task in tasks] == [3, 1, 1, 1]


# Growing


def test_growing_keeps_pages_and_adds_slots(tier: DiskTier) -> None:
    assert tier.slots.allocate(SLOTS) == [(0, SLOTS)]
    pages = random_pages(SLOTS)
    tier.write([(0, pages)])
    tier.grow((SLOTS + 10) * PAGE + 1)
    assert os.fstat(tier.fileno()).st_size == tier.capacity_bytes == (SLOTS + 10) * PAGE
    assert tier.slots.runs() == [(SLOTS, 10)]
    more = random_pages(10, seed=1)
    tier.write([(SLOTS, more)])
    back = aligned_bytes((SLOTS + 10) * PAGE)
    tier.read([(0, back)])
    np.testing.assert_array_equal(back, np.concatenate([pages, more]))


def test_growing_that_fails_changes_nothing(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages, back = random_pages(SLOTS), aligned_bytes(SLOTS * PAGE)
    tier.write([(0, pages)])
    real = os.posix_fallocate

    def half(fd: int, offset: int, length: int) -> None:
        real(fd, offset, length // 2)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", half)
    with pytest.raises(PagerError, match="No space left"):
        tier.grow(2 * SLOTS * PAGE)
    with pytest.raises(PagerError, match="does not fit"):
        tier.grow(1 << 60)
    assert os.fstat(tier.fileno()).st_size == tier.capacity_bytes == SLOTS * PAGE
    assert tier.slots.count == SLOTS
    tier.read([(0, back)])
    np.testing.assert_array_equal(back, pages)


def test_a_tier_does_not_shrink(tier: DiskTier) -> None:
    with pytest.raises(ValueError, match="less than the disk tier has"):
        tier.grow(PAGE)
    tier.grow(SLOTS * PAGE + 1)
    assert tier.slots.count == SLOTS


# The end


def test_after_close(tier: DiskTier) -> None:
    fd = tier.fileno()
    tier.close()
    tier.close()
    assert not os.path.exists(f"/proc/self/fd/{fd}")
    for use in (tier.write, tier.read, tier.submit_write, tier.submit_read):
        with pytest.raises(PagerError, match="is closed"):
            use([(0, random_pages(1))])
    with pytest.raises(PagerError, match="is closed"):
        tier.grow(1 << 30)


def test_close_waits(tier: DiskTier) -> None:
    tier.engine = Around(tier.engine, lambda name, offset: time.sleep(0.2))
    future = tier.submit_write([(0, random_pages(1))])
    tier.close()
    assert future.done()
    assert future.exception() is None
