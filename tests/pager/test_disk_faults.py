"""Transfers that fail: where the pages are afterwards, on either engine."""

import errno
import os
import threading
import time

import numpy as np
import pytest

from tensorpager.pager.disk.file import aligned_bytes
from tensorpager.pager.disk.tier import DiskTier
from tensorpager.pager.errors import CorruptPage, PagerError

from .disk_suite import PAGE, Around, failing, random_pages


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_write_that_fails(tier: DiskTier, small_tasks: None, code: int) -> None:
    pages = random_pages(12)
    tier.write([(0, pages)])
    plan = failing(tier, "write", [None, OSError(code, os.strerror(code))])
    with pytest.raises(PagerError, match=rf"{tier.directory}.*{os.strerror(code)}.*stay where"):
        tier.write([(0, pages)])
    assert plan == []
    for slot in (0, 11):
        with pytest.raises(CorruptPage, match=f"slot {slot} "):
            tier.read([(slot, aligned_bytes(PAGE))])
    tier.write([(0, pages)])
    back = aligned_bytes(pages.nbytes)
    tier.read([(0, back)])
    np.testing.assert_array_equal(back, pages)


def test_a_read_that_fails_can_be_repeated(tier: DiskTier, small_tasks: None) -> None:
    pages, back = random_pages(12), aligned_bytes(12 * PAGE)
    tier.write([(0, pages)])
    failing(tier, "read", [OSError(errno.EIO, os.strerror(errno.EIO))])
    with pytest.raises(PagerError, match=r"Input/output error.*still on the disk"):
        tier.read([(0, back)])
    tier.read([(0, back)])
    np.testing.assert_array_equal(back, pages)


def test_a_failed_batch_ends_only_when_all_its_tasks_have(
    tier: DiskTier, small_tasks: None
) -> None:
    failed, go_on = threading.Event(), threading.Event()

    def write(name: str, offset: int) -> None:
        if offset == 0:
            failed.set()
            raise OSError(errno.EIO, "Input/output error")
        assert go_on.wait(300)

    tier.engine = Around(tier.engine, write)
    future = tier.submit_write([(0, random_pages(8))])
    assert failed.wait(300)
    time.sleep(0.05)
    assert not future.done()
    go_on.set()
    assert isinstance(future.exception(60), PagerError)
