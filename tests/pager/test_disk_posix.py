"""The POSIX engine: transfers that end early, are interrupted or make no progress."""

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tensorpager.pager.disk.file import aligned_bytes
from tensorpager.pager.disk.tier import DiskTier
from tensorpager.pager.errors import PagerError

from .disk_suite import PAGE, Bytes, make_tier, on_posix, random_pages, unaligned

pytestmark = on_posix


def test_a_disk_without_o_direct(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, buffers: list[Bytes], offset: int) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "pwritev", refuse)
    tier = make_tier(tmp_path, 4 * PAGE, PAGE)
    monkeypatch.undo()
    assert not tier.direct
    tier.write([(0, unaligned(random_pages(4)))])
    tier.close()


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


@pytest.mark.parametrize("name", ["pwritev", "preadv"])
def test_no_progress_is_an_error_not_a_loop(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    pages = random_pages(1)
    tier.write([(0, pages)])
    flaky(monkeypatch, name, [0])
    with pytest.raises(PagerError, match="stopped 16384 bytes early"):
        (tier.write if name == "pwritev" else tier.read)([(0, pages)])
