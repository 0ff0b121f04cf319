import contextlib
import errno
import os
import select
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tensorpager.pager import disk_batch, disk_io
from tensorpager.pager.disk import DiskTier
from tensorpager.pager.disk_batch import split
from tensorpager.pager.disk_io import aligned_bytes
from tensorpager.pager.errors import CorruptPage, PagerError

PAGE = 16384
SLOTS = 64
Bytes = npt.NDArray[np.uint8]


@pytest.fixture(params=["direct", "buffered"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[DiskTier]:
    tier = DiskTier(
        tmp_path, SLOTS * PAGE, PAGE, direct=None if request.param == "direct" else False
    )
    if request.param == "direct" and not tier.direct:
        tier.close()
        pytest.skip(f"no O_DIRECT in {tmp_path}")
    yield tier
    tier.close()


@pytest.fixture
def small_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_batch, "TASK_BYTES", 4 * PAGE)


def random_pages(count: int, seed: int = 0) -> Bytes:
    """``count`` pages of random bytes in aligned memory."""
    pages = aligned_bytes(count * PAGE)
    pages[:] = np.random.default_rng(seed).integers(0, 256, count * PAGE, dtype=np.uint8)
    return pages


def unaligned(pages: Bytes) -> Bytes:
    """A copy of ``pages`` at an address that O_DIRECT does not take."""
    copy = aligned_bytes(pages.nbytes + disk_io.ALIGNMENT)[64 : 64 + pages.nbytes]
    copy[:] = pages
    return copy


def run_in_child(body: Callable[[], None]) -> None:
    """Runs ``body`` in a forked child; fails if it raises there or takes a minute."""
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            body()
        except BaseException as error:
            os.write(writable, repr(error).encode()[:4000])
        finally:
            os._exit(0)
    os.close(writable)
    in_time = bool(select.select([readable], [], [], 60)[0])
    if not in_time:
        os.kill(child, signal.SIGKILL)
    message = os.read(readable, 4096).decode()
    os.close(readable)
    os.waitpid(child, 0)
    assert in_time, "the child hangs"
    assert not message, message


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
    tier = DiskTier(tmp_path, 3 * page_size, page_size)
    pages = np.random.default_rng(0).integers(0, 256, (3, page_size), dtype=np.uint8)
    tier.write([(slot, page) for slot, page in enumerate(pages)])
    back = np.zeros_like(pages)
    tier.read([(0, back)])
    tier.close()
    np.testing.assert_array_equal(back, pages)


def test_a_page_size_that_o_direct_cannot_do(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, 5 * 1000, 1000)
    assert not tier.direct
    page = np.arange(1000, dtype=np.uint8)
    back = np.zeros_like(page)
    tier.write([(4, page)])
    tier.read([(4, back)])
    tier.close()
    np.testing.assert_array_equal(back, page)
    with pytest.raises(PagerError, match="page_size=1000"):
        DiskTier(tmp_path, 5 * 1000, 1000, direct=True)


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
            tier.submit_write([(first, pages)]).result(60)
            tier.submit_read([(first, back)]).result(60)
            np.testing.assert_array_equal(back, pages)

    with ThreadPoolExecutor(8) as callers:
        list(callers.map(use, range(8)))


def test_the_future_keeps_the_buffers(tier: DiskTier) -> None:
    futures = [tier.submit_write([(slot, random_pages(1, seed=slot))]) for slot in range(SLOTS)]
    for future in futures:
        assert not future.cancel()
        future.result(60)
    back = aligned_bytes(SLOTS * PAGE)
    tier.read([(0, back)])
    expected = np.concatenate([random_pages(1, seed=slot) for slot in range(SLOTS)])
    np.testing.assert_array_equal(back, expected)


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no /dev/shm")
@pytest.mark.parametrize("direct", [None, False])
def test_tmpfs(direct: bool | None) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        tier = DiskTier(directory, 8 * PAGE, PAGE, direct=direct)
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
    assert len(open_below(tmp_path)) == 1


def test_capacity_is_rounded_down_to_whole_slots(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, 3 * PAGE + 5, PAGE)
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
    tier = DiskTier(tmp_path, 4 * PAGE, PAGE)
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
        "import sys, time; from tensorpager.pager.disk import DiskTier; "
        f"tier = DiskTier(sys.argv[1], 8 << 20, {PAGE}); print('ready', flush=True); time.sleep(60)"
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
    tier = DiskTier(tmp_path, 4 * PAGE, PAGE)
    tier.write([(0, random_pages(4))])
    fd = tier.fileno()
    del tier
    deadline = time.monotonic() + 10
    while os.path.exists(f"/proc/self/fd/{fd}") and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not os.path.exists(f"/proc/self/fd/{fd}")


# Refusals at start


def open_below(directory: Path) -> list[str]:
    links = []
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that lists the folder
            links.append(os.readlink(f"/proc/self/fd/{entry}"))
    return [link for link in links if link.startswith(str(directory))]


def test_a_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(PagerError, match=r"disk_path='.*/nowhere' does not exist; create it"):
        DiskTier(tmp_path / "nowhere", 4 * PAGE, PAGE)


def test_a_file_instead_of_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PagerError, match="/file' is not a directory"):
        DiskTier(tmp_path / "file", 4 * PAGE, PAGE)


def test_a_directory_that_is_not_writable() -> None:
    directory = Path(tempfile.mkdtemp(dir="/tmp"))  # tmp_path is closed to other users
    directory.chmod(0o555)

    def refused() -> None:
        if os.geteuid() == 0:
            os.seteuid(65534)
        with pytest.raises(PagerError, match=f"disk_path='{directory}'.*Permission denied.*writ"):
            DiskTier(directory, 4 * PAGE, PAGE)

    run_in_child(refused)
    assert list(directory.iterdir()) == []
    directory.rmdir()


def test_more_than_the_disk_has(tmp_path: Path) -> None:
    status = os.statvfs(tmp_path)
    free = status.f_bavail * status.f_frsize
    wanted = (free + (1 << 40)) // PAGE * PAGE
    with pytest.raises(PagerError, match=rf"disk_budget={wanted} .*'{tmp_path}': [0-9]+ bytes"):
        DiskTier(tmp_path, wanted, PAGE)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_reservation_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(fd: int, offset: int, length: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(PagerError, match=rf"cannot be reserved .*{os.strerror(code)}"):
        DiskTier(tmp_path, 4 * PAGE, PAGE)
    assert open_below(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_o_direct_demanded_where_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, buffers: list[Bytes], offset: int) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "pwritev", refuse)
    with pytest.raises(PagerError, match="does not take O_DIRECT"):
        DiskTier(tmp_path, 4 * PAGE, PAGE, direct=True)
    assert open_below(tmp_path) == []
    tier = DiskTier(tmp_path, 4 * PAGE, PAGE)
    monkeypatch.undo()
    assert not tier.direct
    tier.write([(0, unaligned(random_pages(4)))])
    tier.close()


def test_less_than_a_page(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"disk_budget={PAGE - 1} is less than one page"):
        DiskTier(tmp_path, PAGE - 1, PAGE)


@pytest.mark.parametrize(("page_size", "threads"), [(0, 4), (PAGE, 0)])
def test_senseless_settings(tmp_path: Path, page_size: int, threads: int) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        DiskTier(tmp_path, 4 * PAGE, page_size, threads=threads)


# Corruption


@pytest.mark.parametrize("aligned", [True, False])
def test_a_changed_byte_is_found(tier: DiskTier, small_tasks: None, aligned: bool) -> None:
    pages = random_pages(10)
    tier.write([(20, pages)])
    damaged = pages[7 * PAGE : 8 * PAGE].copy()
    damaged[1234] ^= 1
    block = aligned_bytes(PAGE)
    block[:] = damaged
    assert os.pwrite(tier.fileno(), block, 27 * PAGE) == PAGE
    back = aligned_bytes(pages.nbytes) if aligned else unaligned(pages)
    with pytest.raises(CorruptPage, match=rf"slot 27 .*'{tier.directory}'.*checkpoint"):
        tier.read([(20, back)])
    tier.read([(20, back[: 7 * PAGE]), (28, back[8 * PAGE :])])
    np.testing.assert_array_equal(back[: 7 * PAGE], pages[: 7 * PAGE])


def test_a_page_in_the_wrong_slot_is_found(tier: DiskTier) -> None:
    pages = random_pages(2)
    tier.write([(0, pages)])
    assert os.pwrite(tier.fileno(), pages[:PAGE], PAGE) == PAGE
    with pytest.raises(CorruptPage, match="slot 1 "):
        tier.read([(0, aligned_bytes(2 * PAGE))])


def test_a_slot_never_written(tier: DiskTier) -> None:
    tier.write([(0, random_pages(2))])
    back = random_pages(3, seed=1)
    with pytest.raises(CorruptPage, match=r"slot 2 .*never written"):
        tier.read([(0, back)])
    np.testing.assert_array_equal(back, random_pages(3, seed=1))


@pytest.mark.parametrize("slot", [-1, SLOTS - 1, SLOTS])
def test_slots_outside_are_our_bug(tier: DiskTier, slot: int) -> None:
    with pytest.raises(AssertionError):
        tier.write([(slot, random_pages(2))])
    with pytest.raises(AssertionError):
        tier.read([(slot, random_pages(2))])


def test_writing_a_slot_twice_in_a_batch_is_our_bug(tier: DiskTier) -> None:
    with pytest.raises(AssertionError, match="twice"):
        tier.write([(0, random_pages(3)), (2, random_pages(1))])


def test_arrays_that_are_not_pages_are_our_bug(tier: DiskTier) -> None:
    with pytest.raises(AssertionError, match="bytes for slot 3"):
        tier.write([(3, np.zeros(PAGE + 1, np.uint8))])
    with pytest.raises(AssertionError, match="scattered"):
        tier.write([(3, np.zeros(2 * PAGE, np.uint8)[::2])])


# Transfers that fail, or end early


class Flaky:
    """Replaces os.pwritev or os.preadv; ``plan`` has an errno, a byte limit or None per call."""

    def __init__(self, real: Callable[..., int], plan: list[OSError | int | None]) -> None:
        self.real = real
        self.plan = plan
        self.lock = threading.Lock()

    def __call__(self, fd: int, buffers: list[Bytes], offset: int) -> int:
        with self.lock:
            step = self.plan.pop(0) if self.plan else None
        if isinstance(step, OSError):
            raise step
        if step is None:
            return self.real(fd, buffers, offset)
        if step == 0:
            return 0
        first = buffers[0][:step]
        assert first.nbytes == step
        return self.real(fd, [first], offset)


def flaky(
    monkeypatch: pytest.MonkeyPatch, name: str, plan: list[OSError | int | None]
) -> list[OSError | int | None]:
    monkeypatch.setattr(os, name, Flaky(getattr(os, name), plan))
    return plan


@pytest.mark.parametrize("aligned", [True, False])
def test_short_transfers_and_interruptions_are_continued(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch, aligned: bool
) -> None:
    pages = random_pages(6) if aligned else unaligned(random_pages(6))
    back = aligned_bytes(pages.nbytes) if aligned else unaligned(random_pages(6, seed=1))
    for name in ("pwritev", "preadv"):
        plan = flaky(monkeypatch, name, [4096, InterruptedError(), 8192, InterruptedError(), 4096])
        if name == "pwritev":
            tier.write([(3, pages[: 2 * PAGE]), (5, pages[2 * PAGE :])])
        else:
            tier.read([(3, back[:PAGE]), (4, back[PAGE:])])
        assert plan == []
    np.testing.assert_array_equal(back, pages)


def test_a_short_transfer_in_mid_block(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd(Flaky):
        """Says that 5000 bytes were moved, as a device may; more were."""

        def __call__(self, fd: int, buffers: list[Bytes], offset: int) -> int:
            moved = self.real(fd, buffers, offset)
            return 5000 if self.plan and self.plan.pop() else moved

    monkeypatch.setattr(os, "pwritev", Odd(os.pwritev, [True]))
    monkeypatch.setattr(os, "preadv", Odd(os.preadv, [True]))
    pages, back = random_pages(2), aligned_bytes(2 * PAGE)
    tier.write([(0, pages)])
    tier.read([(0, back)])
    np.testing.assert_array_equal(back, pages)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_write_that_fails(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch, small_tasks: None, code: int
) -> None:
    pages = random_pages(12)
    tier.write([(0, pages)])
    plan = flaky(monkeypatch, "pwritev", [None, OSError(code, os.strerror(code))])
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


def test_a_read_that_fails_can_be_repeated(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch, small_tasks: None
) -> None:
    pages, back = random_pages(12), aligned_bytes(12 * PAGE)
    tier.write([(0, pages)])
    flaky(monkeypatch, "preadv", [OSError(errno.EIO, os.strerror(errno.EIO))])
    with pytest.raises(PagerError, match=r"Input/output error.*still on the disk"):
        tier.read([(0, back)])
    tier.read([(0, back)])
    np.testing.assert_array_equal(back, pages)


@pytest.mark.parametrize("name", ["pwritev", "preadv"])
def test_no_progress_is_an_error_not_a_loop(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    pages = random_pages(1)
    tier.write([(0, pages)])
    flaky(monkeypatch, name, [0])
    with pytest.raises(PagerError, match="stopped 16384 bytes early"):
        (tier.write if name == "pwritev" else tier.read)([(0, pages)])


def test_a_failed_batch_ends_only_when_all_its_tasks_have(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch, small_tasks: None
) -> None:
    failed, go_on = threading.Event(), threading.Event()
    real = os.pwritev

    def write(fd: int, buffers: list[Bytes], offset: int) -> int:
        if offset == 0:
            failed.set()
            raise OSError(errno.EIO, "Input/output error")
        assert go_on.wait(60)
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", write)
    future = tier.submit_write([(0, random_pages(8))])
    assert failed.wait(60)
    time.sleep(0.05)
    assert not future.done()
    go_on.set()
    assert isinstance(future.exception(60), PagerError)


# Reads beside writes, and a rate limit


def test_reads_do_not_queue_behind_writes(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch, small_tasks: None
) -> None:
    pages, back = random_pages(4), aligned_bytes(4 * PAGE)
    tier.write([(0, pages)])
    go_on = threading.Event()
    real = os.pwritev

    def held(fd: int, buffers: list[Bytes], offset: int) -> int:
        assert go_on.wait(60)
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", held)
    writing = tier.submit_write([(4, random_pages(SLOTS - 4, seed=1))])  # more tasks than threads
    try:
        tier.submit_read([(0, back)]).result(60)
        assert not writing.done()
    finally:
        go_on.set()
    writing.result(60)
    np.testing.assert_array_equal(back, pages)


def test_a_limited_tier_takes_its_time_each_way(tmp_path: Path) -> None:
    rate = 10 * SLOTS * PAGE  # a tenth of a second for all of it
    tier = DiskTier(tmp_path, SLOTS * PAGE, PAGE, bytes_per_s=rate)
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
    flaky(monkeypatch, "pwritev", [OSError(errno.EIO, os.strerror(errno.EIO))])
    with pytest.raises(PagerError, match="Input/output error"):
        tier.submit_write([(0, random_pages(1))]).result(60)


def test_a_rate_that_is_none_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"bytes_per_s=-1.* is not a rate"):
        DiskTier(tmp_path, 4 * PAGE, PAGE, bytes_per_s=-1)
    assert open_below(tmp_path) == []


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


def test_close_waits(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwritev

    def slow(fd: int, buffers: list[Bytes], offset: int) -> int:
        time.sleep(0.2)
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", slow)
    future = tier.submit_write([(0, random_pages(1))])
    tier.close()
    assert future.done()
    assert future.exception() is None


# Forks


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
from tensorpager.pager.disk import DiskTier

tier = DiskTier(sys.argv[1], 256 << 16, 1 << 16)
pages = np.random.default_rng(0).integers(0, 256, (256, 1 << 16), dtype=np.uint8)
children = []
for round in range(20):
    future = tier.submit_write([(0, pages)])
    child = os.fork()
    if child == 0:
        sys.exit(0)  # a full interpreter shutdown, with the executor's exit handler
    children.append(child)
    future.result(60)
    back = np.zeros_like(pages)
    tier.read([(0, back)])
    assert (back == pages).all()
assert all(os.waitpid(child, 0)[1] == 0 for child in children)
tier.close()
"""


def test_forks_while_writing(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKS_WHILE_WRITING, str(tmp_path)],
        check=True,
        timeout=120,
    )
