"""The KvikIO engine: its own rules on a stand-in for KvikIO, and the disk tier's tests on the real
one, which does real file I/O on host memory in a process that has a stand-in for the driver."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tensorpager.pager.disk import engine as io_engine
from tensorpager.pager.disk import kvikio as kvikio_engine
from tensorpager.pager.disk.file import aligned_bytes
from tensorpager.pager.disk.kvikio import KvikioEngine
from tensorpager.pager.disk.tier import DiskTier
from tensorpager.pager.errors import PagerError

from . import kvikio_stub
from .disk_suite import ENGINE, PAGE, make_tier, open_below, random_pages, run_in_child

FOLDER = Path(__file__).parent
on_kvikio = pytest.mark.skipif(ENGINE != "kvikio", reason="runs in the process that has KvikIO")


@pytest.mark.skipif(ENGINE == "kvikio", reason="this is that process")
def test_the_tests_of_the_disk_tier_on_kvikio(tmp_path: Path) -> None:
    reason = kvikio_stub.why_not()
    if reason is not None:
        pytest.skip(reason)
    library = kvikio_stub.build(tmp_path)
    environment = {
        **os.environ,
        "LD_PRELOAD": str(library),
        "TENSORPAGER_TEST_IO_ENGINE": "kvikio",
        "CUDA_VISIBLE_DEVICES": "",
    }
    environment.pop("PYTEST_XDIST_WORKER", None)
    command = [sys.executable, "-m", "pytest", "-q", "-x", f"--basetemp={tmp_path / 'kvikio'}"]
    command += ["-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not gpu"]
    command += ["--noconftest", "-p", "tests.pager.disk_suite"]  # without PyTorch: in half the time
    files = [f for f in sorted(FOLDER.glob("test_disk*.py")) if "disk_suite" in f.read_text()]
    report = subprocess.run(
        [*command, *map(str, files), __file__],
        env=environment,
        cwd=FOLDER.parents[1],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert report.returncode == 0, report.stdout[-6000:] + report.stderr[-2000:]
    assert " passed" in report.stdout


# On the real one


@on_kvikio
def test_kvikio_moves_the_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = make_tier(tmp_path, 8 * PAGE, PAGE)
    pages, back = random_pages(8), aligned_bytes(8 * PAGE)

    def refuse(*_: Any) -> int:
        raise AssertionError("the POSIX engine was used")

    monkeypatch.setattr(os, "pwritev", refuse)
    monkeypatch.setattr(os, "preadv", refuse)
    tier.write([(0, pages)])
    tier.read([(0, back)])
    monkeypatch.undo()
    np.testing.assert_array_equal(back, pages)
    outside = aligned_bytes(8 * PAGE)
    assert os.preadv(tier.fileno(), [outside], 0) == 8 * PAGE
    np.testing.assert_array_equal(outside, pages)
    tier.close()


@on_kvikio
def test_its_descriptors_end_with_the_tier(tmp_path: Path) -> None:
    for direct in (None, False):
        tier = make_tier(tmp_path, 4 * PAGE, PAGE, direct=direct)
        assert len(open_below(tmp_path)) == (3 if tier.direct else 2)
        tier.close()
        assert open_below(tmp_path) == []
    forgotten = make_tier(tmp_path, 4 * PAGE, PAGE)
    gone = weakref.ref(forgotten)
    del forgotten
    assert gone() is None
    assert open_below(tmp_path) == []


@on_kvikio
def test_an_error_of_the_kernel_keeps_its_number(tmp_path: Path) -> None:
    tier = make_tier(tmp_path, 4 * PAGE, PAGE)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * PAGE, before[1]))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            tier.engine.write([random_pages(2)], 3 * PAGE)
        assert caught.value.errno == errno.EFBIG
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    with pytest.raises(OSError, match="the file ended early"):
        tier.engine.read([random_pages(2)], 3 * PAGE)
    tier.close()


@on_kvikio
def test_a_file_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    named = os.open(tmp_path / "named", os.O_RDWR | os.O_CREAT, 0o600)
    with pytest.raises(PagerError, match="is not the paging file"):
        KvikioEngine(named, direct=False, callers=1, task_bytes=PAGE, takes_device=False)
    os.close(named)
    assert open_below(tmp_path) == []
    with pytest.raises(PagerError, match="cannot be opened"):
        KvikioEngine(named, direct=False, callers=1, task_bytes=PAGE, takes_device=False)


@on_kvikio
def test_a_child_ends_although_it_has_none_of_kvikios_threads(tmp_path: Path) -> None:
    tier = make_tier(tmp_path, 4 * PAGE, PAGE)
    tier.write([(0, random_pages(4))])
    child = os.fork()
    if child == 0:
        ctypes.CDLL(None).exit(7)  # with the C library's exit handlers, as at an interpreter's end
    deadline = time.monotonic() + 300
    ended = (0, 0)
    while not ended[0] and time.monotonic() < deadline:
        time.sleep(0.02)
        ended = os.waitpid(child, os.WNOHANG)
    if not ended[0]:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(ended[1]) == 7
    assert ended[0] == child, "the child hangs"
    tier.close()


@on_kvikio
def test_a_child_that_lost_kvikios_threads_is_told_so(tmp_path: Path) -> None:
    make_tier(tmp_path, 4 * PAGE, PAGE).close()

    def child() -> None:
        with pytest.raises(PagerError, match=r"threads did not come along.*'spawn'"):
            make_tier(tmp_path, 4 * PAGE, PAGE)

    run_in_child(child)


@on_kvikio
def test_threads_for_all_callers(tmp_path: Path) -> None:
    import kvikio.defaults

    tier = make_tier(tmp_path, 4 * PAGE, PAGE, threads=5)
    assert kvikio.defaults.get("num_threads") >= 10
    smaller = make_tier(tmp_path, 4 * PAGE, PAGE, threads=1)
    assert kvikio.defaults.get("num_threads") >= 10
    tier.close()
    smaller.close()


@on_kvikio
def test_device_memory_may_pass_host_memory(tmp_path: Path) -> None:
    """There is no GPUDirect Storage here, although the pages seem to be in device memory."""
    tier = make_tier(tmp_path, 4 * PAGE, PAGE, on_cuda=True)
    assert tier.engine.takes_device
    assert tier.describe() == {
        "engine": "kvikio",
        "direct": tier.direct,
        "threads": 4,
        "moves_frames": True,
    }
    tier.close()


# On a stand-in


class Future:
    def __init__(self, move: Callable[[], int]) -> None:
        self.move = move
        self.waited = False

    def get(self) -> int:
        self.waited = True
        return self.move()


class File:
    """A file of KvikIO's; ``plan`` has an exception, a number of bytes or None for each call."""

    def __init__(self, plan: list[Any]) -> None:
        self.plan = plan
        self.futures: list[Future] = []
        self.calls: list[tuple[int, int]] = []

    def pwrite(self, buffer: Any, size: int, offset: int, task_size: int) -> Future:
        step = self.plan.pop(0) if self.plan else None
        self.calls.append((offset, size))
        if step == "refused":
            raise RuntimeError("no thread")

        def move() -> int:
            if isinstance(step, Exception):
                raise step
            return size if step is None else step

        self.futures.append(Future(move))
        return self.futures[-1]


def engine_on(file: File) -> KvikioEngine:
    engine = object.__new__(KvikioEngine)
    engine.__dict__.update(_file=file, _task_bytes=PAGE)
    return engine


def kvikio_error(reason: str) -> RuntimeError:
    return RuntimeError(
        f"KvikIO failure at: /kvikio/posix_io.hpp:90: POSIX error on pwrite: {reason}"
    )


def test_a_failure_waits_for_all_the_others() -> None:
    file = File([None, kvikio_error("No space left on device"), None, None])
    with pytest.raises(OSError, match="No space left") as caught:
        engine_on(file).write([np.zeros(PAGE, np.uint8)] * 4, 0)
    assert caught.value.errno == errno.ENOSPC
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert [future.waited for future in file.futures] == [True] * 4


def test_what_was_submitted_is_waited_for_when_the_next_is_refused() -> None:
    file = File([None, None, "refused"])
    with pytest.raises(OSError, match="KvikIO: no thread"):
        engine_on(file).write([np.zeros(PAGE, np.uint8)] * 4, 0)
    assert [future.waited for future in file.futures] == [True] * 2


def test_an_interruption_is_repeated_and_nothing_else_is() -> None:
    file = File([None, kvikio_error("Interrupted system call"), None])
    engine_on(file).write([np.zeros(PAGE, np.uint8)] * 3, 5 * PAGE)
    assert file.calls == [(5 * PAGE, PAGE), (6 * PAGE, PAGE), (7 * PAGE, PAGE), (6 * PAGE, PAGE)]


def test_a_short_transfer_is_an_error() -> None:
    with pytest.raises(OSError, match="stopped 5 bytes early"):
        engine_on(File([PAGE - 5])).write([np.zeros(PAGE, np.uint8)], 0)


def test_a_signal_handlers_exception_comes_after_the_wait() -> None:
    file = File([None, None])
    waiting, engine = file.pwrite(np.zeros(1, np.uint8), 1, 0, 1), engine_on(file)

    def interrupted() -> int:
        raise KeyboardInterrupt

    waiting.move = interrupted
    submitted = iter([waiting, Future(lambda: PAGE)])
    file.futures = []

    def submit(*_: Any) -> Future:
        file.futures.append(next(submitted))
        return file.futures[-1]

    with pytest.raises(KeyboardInterrupt):
        engine._once(submit, [(np.zeros(PAGE, np.uint8), 0), (np.zeros(PAGE, np.uint8), PAGE)])
    assert [future.waited for future in file.futures] == [True, True]


def test_buffers_live_until_the_future_is_done() -> None:
    alive = threading.Event()

    class Buffer(np.ndarray):
        pass

    buffer = np.zeros(PAGE, np.uint8).view(Buffer)
    weakref.finalize(buffer, alive.clear)
    alive.set()
    file = File([])
    file.plan = [None]
    seen: list[bool] = []
    real = file.pwrite

    def pwrite(*given: Any) -> Future:
        future = real(*given)
        future.move = lambda: seen.append(alive.is_set()) or PAGE
        return future

    file.pwrite = pwrite  # type: ignore[method-assign]
    buffers = [buffer]
    del buffer
    engine_on(file).write(buffers, 0)
    assert seen == [True]


@pytest.mark.parametrize(("start", "sizes"), [(0, [2, 1]), (1 << 20, [1, 2])])
def test_device_memory_is_cut_where_mappings_end(start: int, sizes: list[int]) -> None:
    class OnDevice(np.ndarray):
        def data_ptr(self) -> int:
            return (7 << 30) + start

    buffer = np.zeros(3 << 20, np.uint8).view(OnDevice)
    file = File([])
    engine_on(file).write([buffer], 0)
    assert file.calls == [(0, sizes[0] << 20), (sizes[0] << 20, sizes[1] << 20)]


# Which engine


def test_without_kvikio_the_remedy_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent() -> None:
        raise RuntimeError("DynamicLibNotFoundError: cufile")

    monkeypatch.setattr(kvikio_engine, "_kvikio", absent)
    with pytest.raises(PagerError, match=r"io_engine='kvikio'.*pip install 'tensorpager\[gds\]'"):
        DiskTier(tmp_path, 4 * PAGE, PAGE, io_engine="kvikio")
    assert open_below(tmp_path) == []
    tier = DiskTier(tmp_path, 4 * PAGE, PAGE, on_cuda=True)
    assert tier.engine.name == "posix"
    tier.close()


def test_without_a_driver_the_remedy_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kvikio_engine, "_kvikio", lambda: SimpleNamespace())
    monkeypatch.setattr(kvikio_engine, "_LIBRARY", "libnothing-of-that-name.so.1")
    with pytest.raises(PagerError, match=r"there is no CUDA driver .*io_engine='posix'"):
        DiskTier(tmp_path, 4 * PAGE, PAGE, io_engine="kvikio")
    assert open_below(tmp_path) == []


def test_auto_takes_kvikio_for_device_memory_with_gds_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io_engine, "why_not", lambda: None)
    monkeypatch.setattr(io_engine, "has_gds", lambda: True)
    monkeypatch.setattr(io_engine, "KvikioEngine", lambda fd, **given: given)

    def made(name: str, *, on_cuda: bool) -> Any:
        return io_engine.make_engine(
            name, 0, direct=True, callers=2, task_bytes=PAGE, on_cuda=on_cuda
        )

    assert made("auto", on_cuda=True)["takes_device"] is True  # type: ignore[index]
    assert made("kvikio", on_cuda=False)["takes_device"] is False  # type: ignore[index]
    assert made("auto", on_cuda=False).name == "posix"
    assert made("posix", on_cuda=True).name == "posix"
    monkeypatch.setattr(io_engine, "has_gds", lambda: False)
    assert made("auto", on_cuda=True).name == "posix"


def test_an_unknown_engine(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="io_engine='uring' is unknown; choose one of auto"):
        DiskTier(tmp_path, 4 * PAGE, PAGE, io_engine="uring")
