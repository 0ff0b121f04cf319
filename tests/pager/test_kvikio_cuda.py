"""KvikIO on device frames. Run where there is a GPU; skipped elsewhere."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tensorpager as tp
from tensorpager.pager.devices.choice import make_device, resolve
from tensorpager.pager.devices.device import Device
from tensorpager.pager.disk.kvikio import why_not
from tensorpager.pager.disk.tier import DiskTier
from tensorpager.pager.errors import CorruptPage

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MIB = 1 << 20


@pytest.fixture(autouse=True)
def kvikio() -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture
def arena() -> Iterator[Device]:
    backend = make_device(resolve("cuda"), 32 * MIB, 32 * MIB)
    yield backend
    backend.close()


@pytest.mark.parametrize("page_size", [256 << 10, 2 * MIB, 8 * MIB])
@pytest.mark.parametrize("direct", [None, False])
def test_frames_come_back(
    arena: Device, tmp_path: Path, page_size: int, direct: bool | None
) -> None:
    """Also where a transfer crosses from one mapping of device memory into the next."""
    tier = DiskTier(tmp_path, 16 * MIB, page_size, io_engine="kvikio", on_cuda=True, direct=direct)
    frames, target = arena.arena[: 16 * MIB], arena.arena[16 * MIB :]
    frames.copy_(torch.randint(0, 256, (16 * MIB,), dtype=torch.uint8, device="cuda"))
    target.zero_()
    torch.cuda.synchronize()
    tier.write([(0, frames)])
    tier.read([(0, target)])
    assert torch.equal(target, frames)
    back = torch.empty(16 * MIB, dtype=torch.uint8).numpy()
    tier.read([(0, back)])  # made on the device, checked on the host
    assert torch.equal(torch.from_numpy(back), frames.cpu())
    tier.close()


def test_a_changed_byte_is_found_on_the_device(arena: Device, tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, 4 * MIB, 2 * MIB, io_engine="kvikio", on_cuda=True, direct=False)
    frames = arena.arena[: 4 * MIB]
    frames.fill_(3)
    torch.cuda.synchronize()
    tier.write([(0, frames)])
    with open(f"/proc/self/fd/{tier.fileno()}", "r+b", buffering=0) as file:
        file.seek(3 * MIB)
        file.write(b"\x04")
        os.fsync(file.fileno())
    with pytest.raises(CorruptPage, match="slot 1 "):
        tier.read([(0, frames)])
    tier.close()


def test_a_pager_on_kvikio(tmp_path: Path) -> None:
    with tp.Pager(
        "64MiB",
        host_budget=0,
        disk_budget="1GiB",
        disk_path=tmp_path,
        device="cuda",
        dense_reserve="24MiB",
        io_engine="kvikio",
    ) as pager:
        assert pager.core.disk is not None
        assert pager.core.disk.engine.takes_device
        twins = [torch.randn(1 << 20, device="cuda") for _ in range(40)]
        paged = [pager.page(twin) for twin in twins]
        for round_ in range(3):
            for tensor, twin in zip(paged, twins):
                tensor.mul_(1.5).add_(round_)
                twin.mul_(1.5).add_(round_)
        assert all(torch.equal(p.to_dense(), twin) for p, twin in zip(paged, twins))
        assert pager.core.disk.bytes_read > 0
