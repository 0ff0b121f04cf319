"""Reads beside writes, and the disk tier's rate limit."""

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tensorpager.pager.disk.file import aligned_bytes
from tensorpager.pager.disk.tier import DiskTier
from tensorpager.pager.errors import PagerError

from .disk_suite import PAGE, SLOTS, Around, failing, make_tier, open_below, random_pages


def test_reads_do_not_queue_behind_writes(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch, small_tasks: None
) -> None:
    pages, back = random_pages(4), aligned_bytes(4 * PAGE)
    tier.write([(0, pages)])
    go_on = threading.Event()

    def held(name: str, offset: int) -> None:
        assert name == "read" or go_on.wait(300)

    tier.engine = Around(tier.engine, held)
    writing = tier.submit_write([(4, random_pages(SLOTS - 4, seed=1))])  # more tasks than threads
    try:
        tier.submit_read([(0, back)]).result(300)
        assert not writing.done()
    finally:
        go_on.set()
    writing.result(300)
    np.testing.assert_array_equal(back, pages)


def test_a_limited_tier_takes_its_time_each_way(tmp_path: Path) -> None:
    rate = 10 * SLOTS * PAGE  # a tenth of a second for all of it
    tier = make_tier(tmp_path, SLOTS * PAGE, PAGE, bytes_per_s=rate)
    assert tier.rate_limit == rate
    pages, back = random_pages(SLOTS), aligned_bytes(SLOTS * PAGE)
    for move, buffer in ((tier.write, pages), (tier.read, back)):
        began = time.monotonic()
        move([(0, buffer)])
        assert time.monotonic() - began >= 0.1
    tier.close()
    np.testing.assert_array_equal(back, pages)


class Spy:
    """What a tier's two limiters were asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tier: DiskTier) -> None:
        self.reads: list[int] = []
        self.writes: list[int] = []
        for name, asked in (("_read_limit", self.reads), ("_write_limit", self.writes)):
            limit = getattr(tier, name)
            monkeypatch.setattr(limit, "reserve", self.noting(limit.reserve, asked))

    @staticmethod
    def noting(reserve: Callable[[int], float], asked: list[int]) -> Callable[[int], float]:
        def reserve_and_note(nbytes: int) -> float:
            asked.append(nbytes)
            return reserve(nbytes)

        return reserve_and_note


def test_each_way_has_a_limit_of_its_own_and_tasks_their_slots_in_order(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch, small_tasks: None
) -> None:
    spy = Spy(monkeypatch, tier)
    tier.write([(0, random_pages(10))])
    assert (spy.writes, spy.reads) == ([4 * PAGE, 4 * PAGE, 2 * PAGE], [])
    tier.read([(1, aligned_bytes(5 * PAGE))])
    assert (len(spy.writes), spy.reads) == (3, [4 * PAGE, PAGE])


def test_the_limit_can_be_changed_between_transfers(tier: DiskTier) -> None:
    assert tier.rate_limit is None
    tier.set_rate_limit(PAGE / 0.05)
    began = time.monotonic()
    tier.write([(0, random_pages(1))])
    assert time.monotonic() - began >= 0.05
    with pytest.raises(ValueError, match="is not a rate"):
        tier.set_rate_limit(0)
    assert tier.rate_limit == PAGE / 0.05
    tier.set_rate_limit(None)
    assert tier.rate_limit is None
    tier.read([(0, aligned_bytes(PAGE))])


def test_a_limit_does_not_hold_up_a_failure(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier.set_rate_limit(PAGE / 3600)  # an hour for a page
    failing(tier, "write", [OSError(errno.EIO, os.strerror(errno.EIO))])
    with pytest.raises(PagerError, match="Input/output error"):
        tier.submit_write([(0, random_pages(1))]).result(300)


def test_a_rate_that_is_none_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"bytes_per_s=-1.* is not a rate"):
        make_tier(tmp_path, 4 * PAGE, PAGE, bytes_per_s=-1)
    assert open_below(tmp_path) == []
