"""What the tests of the disk tier share. The engine they run on is ``posix``, or what
TENSORPAGER_TEST_IO_ENGINE says: test_kvikio.py runs them on KvikIO in a process of its own."""

import contextlib
import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tensorpager.pager.disk import batch as disk_batch
from tensorpager.pager.disk import file as disk_io
from tensorpager.pager.disk.engine import Engine
from tensorpager.pager.disk.file import aligned_bytes
from tensorpager.pager.disk.tier import DiskTier

ENGINE = os.environ.get("TENSORPAGER_TEST_IO_ENGINE", "posix")
PAGE = 16384
SLOTS = 64
Bytes = npt.NDArray[np.uint8]

make_tier = partial(DiskTier, io_engine=ENGINE)
on_posix = pytest.mark.skipif(ENGINE != "posix", reason="about the POSIX engine")


@pytest.fixture(params=["direct", "buffered"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[DiskTier]:
    tier = make_tier(tmp_path, SLOTS * PAGE, PAGE, direct=request.param == "direct")
    assert tier.engine.name == ENGINE
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


def open_below(directory: Path) -> list[str]:
    """What this process has open in ``directory``."""
    links = []
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that lists the folder
            links.append(os.readlink(f"/proc/self/fd/{entry}"))
    return [link for link in links if link.startswith(str(directory))]


class Around:
    """An engine around another; ``before`` sees each call first, and may raise."""

    def __init__(self, inner: Engine, before: Callable[[str, int], None]) -> None:
        self.name, self.direct, self.takes_device = inner.name, inner.direct, inner.takes_device
        self._inner = inner
        self._before = before

    def write(self, buffers: Any, offset: int) -> None:
        self._before("write", offset)
        self._inner.write(buffers, offset)

    def read(self, buffers: Any, offset: int) -> None:
        self._before("read", offset)
        self._inner.read(buffers, offset)

    def close(self) -> None:
        self._inner.close()


def failing(tier: DiskTier, name: str, plan: list[OSError | None]) -> list[OSError | None]:
    """Calls of ``name`` ("write" or "read") go as ``plan`` says, which they use up: None works."""
    lock = threading.Lock()

    def step(called: str, offset: int) -> None:
        with lock:
            error = plan.pop(0) if plan and called == name else None
        if error is not None:
            raise error

    tier.engine = Around(tier.engine, step)
    return plan
