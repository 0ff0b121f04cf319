"""Disk I/O straight on device frames, with plain memory in place of the device's: the tier's
checksums there, and the order of disk I/O and of what ops have queued."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorpager.pager.disk import kvikio as kvikio_engine
from tensorpager.pager.disk import tier as disk
from tensorpager.pager.disk.engine import make_engine
from tensorpager.pager.disk.file import aligned_bytes
from tensorpager.pager.disk.tier import DiskTier
from tensorpager.pager.errors import CorruptPage, PagerError

from .disk_suite import ENGINE, PAGE, SLOTS, open_below, random_pages

if ENGINE != "posix":
    pytest.skip("needs PyTorch, and no KvikIO", allow_module_level=True)

import torch

from tensorpager.pager.disk.integrity import device_sums

from .fake_streams import Event, Streams, streams  # noqa: F401
from .models import PAGE_BYTES, make_pager


class OnDevice:
    """An engine whose device is the CPU: buffers may be tensors, and how many were is counted."""

    name = "kvikio"
    takes_device = True

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.direct = inner.direct
        self.tensors = 0

    def _arrays(self, buffers: Sequence[Any]) -> list[Any]:
        self.tensors += sum(isinstance(buffer, torch.Tensor) for buffer in buffers)
        return [b.numpy() if isinstance(b, torch.Tensor) else b for b in buffers]

    def write(self, buffers: Sequence[Any], offset: int) -> None:
        self._inner.write(self._arrays(buffers), offset)

    def read(self, buffers: Sequence[Any], offset: int) -> None:
        self._inner.read(self._arrays(buffers), offset)

    def close(self) -> None:
        self._inner.close()


@pytest.fixture
def device_tier(tmp_path: Path) -> Iterator[DiskTier]:
    tier = DiskTier(tmp_path, SLOTS * PAGE, PAGE, engine=OnDevice)
    yield tier
    tier.close()


def on_device(count: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(random_pages(count, seed))


def test_pages_of_device_memory(device_tier: DiskTier) -> None:
    pages, back = on_device(SLOTS), on_device(SLOTS, seed=1)
    device_tier.write([(40, pages[: 24 * PAGE]), (0, pages[24 * PAGE :])])
    device_tier.read([(0, back[24 * PAGE :]), (40, back[: 24 * PAGE])])
    assert torch.equal(back, pages)
    assert isinstance(device_tier.engine, OnDevice)
    assert device_tier.engine.tensors >= 4


@pytest.mark.parametrize("to_device", [True, False])
def test_a_page_comes_back_in_the_other_memory(device_tier: DiskTier, to_device: bool) -> None:
    pages, back = random_pages(3), aligned_bytes(3 * PAGE)
    tensors = torch.from_numpy(pages), torch.from_numpy(back)
    device_tier.write([(2, pages if to_device else tensors[0])])
    device_tier.read([(2, tensors[1] if to_device else back)])
    np.testing.assert_array_equal(back, pages)
    os.pwrite(device_tier.fileno(), random_pages(1, seed=9), 3 * PAGE)
    with pytest.raises(CorruptPage, match="slot 3 "):
        device_tier.read([(2, tensors[1] if to_device else back)])


def test_checksums_depend_on_the_bytes_alone() -> None:
    pages = random_pages(3)
    sums = device_sums(torch.from_numpy(pages), PAGE)
    np.testing.assert_array_equal(sums, device_sums(pages, PAGE))
    np.testing.assert_array_equal(sums[1:2], device_sums(pages[PAGE : 2 * PAGE], PAGE))
    assert len(np.unique(sums)) == 3


@pytest.mark.parametrize(
    ("io_engine", "error", "message"),
    [
        ("uring", ValueError, "io_engine='uring' is unknown; choose one of auto, kvikio, posix"),
        ("kvikio", PagerError, "io_engine='kvikio': no driver, or pass io_engine='posix'"),
    ],
)
def test_an_engine_that_cannot_be_had(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    io_engine: str,
    error: type[Exception],
    message: str,
) -> None:
    monkeypatch.setattr(kvikio_engine, "why_not", lambda: "no driver")
    with pytest.raises(error, match=message):
        make_pager(disk_budget="16MiB", disk_path=tmp_path, io_engine=io_engine)
    assert open_below(tmp_path) == []


# Under a pager, with the CUDA backend's own order of work


@pytest.fixture
def engines(
    streams: Streams,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> list[OnDevice]:
    made: list[OnDevice] = []

    def make(*given: Any, **named: Any) -> OnDevice:
        made.append(OnDevice(make_engine("posix", *given[1:], **named)))
        return made[-1]

    monkeypatch.setattr(disk, "make_engine", make)
    return made


def test_frames_move_without_staging(
    engines: list[OnDevice], tmp_path: Path, one_thread: None
) -> None:
    with make_pager(frames=4, host_budget=0, disk_budget="16MiB", disk_path=tmp_path) as pager:
        twins = [torch.randn(PAGE_BYTES // 4) for _ in range(10)]
        paged = [pager.page(twin) for twin in twins]
        for round_ in range(3):
            for tensor, twin in zip(paged, twins):
                tensor.mul_(1.5).add_(round_)
                twin.mul_(1.5).add_(round_)
        assert all(torch.equal(p.to_dense(), twin) for p, twin in zip(paged, twins))
        assert pager.stats()["disk_bytes_written"] >= 10 * PAGE_BYTES
        assert pager.core.disk is not None
        assert pager.core.disk.bytes_read >= 10 * PAGE_BYTES
        assert engines[0].tensors >= 20


@pytest.mark.parametrize("forgetful", [False, True])
def test_a_page_leaves_after_what_ops_have_queued(
    engines: list[OnDevice],
    streams: Streams,  # noqa: F811
    tmp_path: Path,
    one_thread: None,
    monkeypatch: pytest.MonkeyPatch,
    forgetful: bool,
) -> None:
    with make_pager(frames=4, host_budget=0, disk_budget="16MiB", disk_path=tmp_path) as pager:
        tensor = pager.page(torch.zeros(PAGE_BYTES // 4))
        others = [pager.page(torch.zeros(PAGE_BYTES // 4)) for _ in range(6)]
        tensor.add_(1)
        run = tensor._storage.run
        frame = pager.core.backend.frames_view(
            int(pager.core.table.frame[run.first]) * PAGE_BYTES, 4
        )
        streams.defer(lambda: frame.fill_(7))
        if forgetful:  # would it be noticed?
            monkeypatch.setattr(Event, "synchronize", lambda event: None)
        for other in others:
            other.add_(1)
        assert pager.core.table.frame[run.first] < 0
        streams.run_before(streams.compute)
        came = tensor.to_dense().view(torch.uint8)[:4].tolist()
    assert (came == [7] * 4) is not forgetful
