"""Reads beside writes."""

import threading

import numpy as np
import pytest

from tensorpager.pager.disk.file import aligned_bytes
from tensorpager.pager.disk.tier import DiskTier

from .disk_suite import PAGE, SLOTS, Around, random_pages


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
