"""A forked child has no disk tier, and takes up none of its space."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tensorpager.pager.disk.file import aligned_bytes
from tensorpager.pager.disk.tier import DiskTier
from tensorpager.pager.errors import PagerError

from .disk_suite import ENGINE, PAGE, random_pages, run_in_child


def test_a_forked_child_has_no_tier(tier: DiskTier) -> None:
    fd = tier.fileno()
    pages = random_pages(1)
    tier.write([(0, pages)])

    def child() -> None:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
        for use in (tier.write, tier.read):
            with pytest.raises(PagerError, match=f"belongs to process {parent}"):
                use([(0, pages)])
        tier.close()
        os.dup2(os.open(os.devnull, os.O_RDONLY), fd)
        tier.close()  # the number is another file's by now
        os.fstat(fd)

    parent = os.getpid()
    run_in_child(child)
    back = aligned_bytes(PAGE)
    tier.read([(0, back)])
    np.testing.assert_array_equal(back, pages)


def test_the_parent_sees_it_closed_in_the_child(tier: DiskTier) -> None:
    target = os.readlink(f"/proc/self/fd/{tier.fileno()}")
    ready_read, ready_write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(ready_write, b"x")
        time.sleep(60)
        os._exit(0)
    try:
        os.read(ready_read, 1)
        folder = Path(f"/proc/{child}/fd")
        assert target not in {os.readlink(entry) for entry in folder.iterdir()}
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready_read)
        os.close(ready_write)


def test_a_child_can_make_its_own(tmp_path: Path, tier: DiskTier) -> None:
    def child() -> None:
        own = DiskTier(tmp_path, 4 * PAGE, PAGE)
        pages, back = random_pages(4), aligned_bytes(4 * PAGE)
        own.write([(0, pages)])
        own.read([(0, back)])
        own.close()
        np.testing.assert_array_equal(back, pages)

    run_in_child(child)


FORKS_WHILE_WRITING = """
import os, sys
import numpy as np
from tensorpager.pager.disk.tier import DiskTier

tier = DiskTier(sys.argv[1], 256 << 16, 1 << 16, io_engine=sys.argv[2])
pages = np.random.default_rng(0).integers(0, 256, (256, 1 << 16), dtype=np.uint8)
children = []
for round in range(int(sys.argv[3])):
    future = tier.submit_write([(0, pages)])
    child = os.fork()
    if child == 0:
        sys.exit(0)  # a full interpreter shutdown, with the executor's exit handler
    children.append(child)
    future.result(300)
    back = np.zeros_like(pages)
    tier.read([(0, back)])
    assert (back == pages).all()
assert all(os.waitpid(child, 0)[1] == 0 for child in children)
tier.close()
"""


def test_forks_while_writing(tmp_path: Path) -> None:
    rounds = "20" if ENGINE == "posix" else "5"
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKS_WHILE_WRITING, str(tmp_path), ENGINE, rounds],
        check=True,
        timeout=300,
    )
