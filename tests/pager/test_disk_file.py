"""The disk tier's file: private, nameless, allocated; and what is refused at start."""

import errno
import os
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorpager.pager.disk.file import aligned_bytes
from tensorpager.pager.disk.tier import DiskTier
from tensorpager.pager.errors import PagerError

from .disk_suite import ENGINE, PAGE, SLOTS, make_tier, open_below, random_pages, run_in_child

# The file


def test_the_file_is_private_nameless_and_fully_allocated(tier: DiskTier, tmp_path: Path) -> None:
    link = f"/proc/self/fd/{tier.fileno()}"
    status = os.stat(link)
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_nlink == 0
    assert status.st_size == tier.capacity_bytes == SLOTS * PAGE
    assert status.st_blocks * 512 >= SLOTS * PAGE
    assert os.readlink(link).endswith("(deleted)")
    assert list(tmp_path.iterdir()) == []
    assert len(set(open_below(tmp_path))) == 1


def test_capacity_is_rounded_down_to_whole_slots(tmp_path: Path) -> None:
    tier = make_tier(tmp_path, 3 * PAGE + 5, PAGE)
    assert (tier.slots.count, tier.capacity_bytes) == (3, 3 * PAGE)
    assert os.fstat(tier.fileno()).st_size == 3 * PAGE
    tier.close()


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EISDIR])
def test_without_o_tmpfile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    real_open = os.open

    def no_tmpfile(path: Any, flags: int, mode: int = 0o777, **rest: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(code, os.strerror(code))
        return real_open(path, flags, mode, **rest)

    monkeypatch.setattr(os, "open", no_tmpfile)
    tier = make_tier(tmp_path, 4 * PAGE, PAGE)
    status = os.fstat(tier.fileno())
    assert (status.st_nlink, stat.S_IMODE(status.st_mode)) == (0, 0o600)
    assert list(tmp_path.iterdir()) == []
    pages, back = random_pages(4), aligned_bytes(4 * PAGE)
    tier.write([(0, pages)])
    tier.read([(0, back)])
    tier.close()
    np.testing.assert_array_equal(back, pages)


def test_a_killed_process_leaves_nothing(tmp_path: Path) -> None:
    script = (
        "import sys, time; from tensorpager.pager.disk.tier import DiskTier; "
        f"tier = DiskTier(sys.argv[1], 8 << 20, {PAGE}, io_engine={ENGINE!r}); "
        "print('ready', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.kill()
    process.wait()
    process.stdout.close()
    assert list(tmp_path.iterdir()) == []


def test_a_tier_that_is_forgotten_closes_its_file(tmp_path: Path) -> None:
    tier = make_tier(tmp_path, 4 * PAGE, PAGE)
    tier.write([(0, random_pages(4))])
    fd = tier.fileno()
    del tier
    deadline = time.monotonic() + 300
    while os.path.exists(f"/proc/self/fd/{fd}") and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not os.path.exists(f"/proc/self/fd/{fd}")


# Refusals at start


def test_a_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(PagerError, match=r"disk_path='.*/nowhere' does not exist; create it"):
        make_tier(tmp_path / "nowhere", 4 * PAGE, PAGE)


def test_a_file_instead_of_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PagerError, match="/file' is not a directory"):
        make_tier(tmp_path / "file", 4 * PAGE, PAGE)


def test_a_directory_that_is_not_writable() -> None:
    directory = Path(tempfile.mkdtemp(dir="/tmp"))  # tmp_path is closed to other users
    directory.chmod(0o555)

    def refused() -> None:
        if os.geteuid() == 0:
            os.seteuid(65534)
        with pytest.raises(PagerError, match=f"disk_path='{directory}'.*Permission denied.*writ"):
            make_tier(directory, 4 * PAGE, PAGE)

    run_in_child(refused)
    assert list(directory.iterdir()) == []
    directory.rmdir()


def test_more_than_the_disk_has(tmp_path: Path) -> None:
    status = os.statvfs(tmp_path)
    free = status.f_bavail * status.f_frsize
    wanted = (free + (1 << 40)) // PAGE * PAGE
    with pytest.raises(PagerError, match=rf"disk_budget={wanted} .*'{tmp_path}': [0-9]+ bytes"):
        make_tier(tmp_path, wanted, PAGE)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_reservation_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(fd: int, offset: int, length: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(PagerError, match=rf"cannot be reserved .*{os.strerror(code)}"):
        make_tier(tmp_path, 4 * PAGE, PAGE)
    assert open_below(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_less_than_a_page(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"disk_budget={PAGE - 1} is less than one page"):
        make_tier(tmp_path, PAGE - 1, PAGE)


@pytest.mark.parametrize(("page_size", "threads"), [(0, 4), (PAGE, 0)])
def test_senseless_settings(tmp_path: Path, page_size: int, threads: int) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        make_tier(tmp_path, 4 * PAGE, page_size, threads=threads)
