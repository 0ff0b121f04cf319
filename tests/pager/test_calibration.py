import math
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tensorpager.pager.devices.choice import make_device, resolve
from tensorpager.pager.devices.dense_allocator import DenseAllocator
from tensorpager.pager.devices.device import Device
from tensorpager.pager.disk.tier import DiskTier
from tensorpager.pager.disk.watch import IoWatch
from tensorpager.pager.errors import CorruptPage, PagerError
from tensorpager.pager.machine.calibration import disk_rates as calibration_disk
from tensorpager.pager.machine.calibration import measure as calibration
from tensorpager.pager.machine.calibration.disk_rates import DiskRates, Waiter, cut, measure_disk
from tensorpager.pager.machine.calibration.measure import Calibration, hardware, measure
from tensorpager.pager.memory.host import HostTier

PAGE = 64 << 10
MIB = 1 << 20
FULL = Calibration(8e9, 9e9, 2.0, 1e9, 2e9, 1.5e9, 2.5e9, 40.0)


@pytest.fixture
def backend() -> Iterator[Device]:
    backend = make_device(torch.device("cpu"), 64 * MIB, MIB)
    yield backend
    backend.close()


@pytest.fixture
def host(backend: Device) -> Iterator[HostTier]:
    host = HostTier(2 * MIB, PAGE, backend)
    yield host
    host.close()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskTier]:
    disk = DiskTier(tmp_path, 8 * MIB, PAGE)
    yield disk
    disk.close()
    assert list(tmp_path.iterdir()) == []


def assert_possible(rates: Calibration) -> None:
    for name, value in asdict(rates).items():
        assert math.isfinite(value), name
        assert value > 0 if name.endswith("_per_s") else value >= 0, name


# What is measured


def test_every_rate_is_measured_and_every_slot_given_back(
    backend: Device, host: HostTier, disk: DiskTier
) -> None:
    rates = measure(backend=backend, host=host, disk=disk, page_size=PAGE)
    assert_possible(rates)
    assert host.slots.runs() == [(0, host.slots.count)]
    assert disk.slots.runs() == [(0, disk.slots.count)]
    assert disk.bytes_measured > disk.bytes_written == 0  # counted apart from pages
    assert disk.bytes_read > 0


def test_slots_in_use_are_not_touched(backend: Device, host: HostTier, disk: DiskTier) -> None:
    rng = np.random.default_rng(0)
    taken = [3, 4, 20]
    pages = rng.integers(0, 256, (len(taken), PAGE), dtype=np.uint8)
    for slot, page in zip(taken, pages):
        host.slots.take(slot, 1)
        disk.slots.take(slot, 1)
        host.view(slot, 1)[:] = page
        disk.write([(slot, page)])
    free = host.slots.runs(), disk.slots.runs()
    measure(backend=backend, host=host, disk=disk, page_size=PAGE)
    assert (host.slots.runs(), disk.slots.runs()) == free
    for slot, page in zip(taken, pages):
        back = np.empty(PAGE, np.uint8)
        disk.read([(slot, back)])
        np.testing.assert_array_equal(back, page)
        np.testing.assert_array_equal(host.view(slot, 1), page)


def test_without_a_disk(backend: Device, host: HostTier) -> None:
    rates = measure(backend=backend, host=host, disk=None, page_size=PAGE)
    assert not rates.has_disk
    assert rates.d2h_bytes_per_s > 0
    assert rates.h2d_bytes_per_s > 0
    assert {value for name, value in asdict(rates).items() if name.startswith("disk")} == {None}


@pytest.mark.parametrize(("page_size", "slots"), [(PAGE, 1), (PAGE, 2), (PAGE, 5), (4 * MIB, 3)])
def test_small_tiers_and_large_pages_without_a_host_tier(
    backend: Device, tmp_path: Path, page_size: int, slots: int
) -> None:
    host = HostTier(0, page_size, backend)
    disk = DiskTier(tmp_path, slots * page_size, page_size)
    rates = measure(backend=backend, host=host, disk=disk, page_size=page_size)
    assert disk.slots.free_count == slots
    disk.close()
    assert_possible(rates)


def test_a_full_disk_tier_is_refused(backend: Device, host: HostTier, disk: DiskTier) -> None:
    assert disk.slots.allocate(disk.slots.count) is not None
    with pytest.raises(PagerError, match=r"none of its 128 slots is free; raise disk_budget"):
        measure(backend=backend, host=host, disk=disk, page_size=PAGE)
    assert host.slots.free_count == host.slots.count


@pytest.mark.parametrize(
    ("arena", "page_size", "most"),
    [
        (MIB, PAGE, 2 * PAGE),
        (64 * MIB, PAGE, 4 * MIB),
        (1 << 30, PAGE, 8 * MIB),
        (1 << 30, 2 * MIB, 8 * MIB),
        (1 << 30, 16 * MIB, 32 * MIB),
    ],
)
def test_scratch_memory_is_small_and_smaller_for_small_budgets(
    monkeypatch: pytest.MonkeyPatch, arena: int, page_size: int, most: int
) -> None:
    made: list[int] = []
    real = calibration.private_bytes

    def counted(nbytes: int) -> npt.NDArray[np.uint8]:
        made.append(nbytes)
        return real(nbytes)

    monkeypatch.setattr(calibration, "private_bytes", counted)
    backend = make_device(torch.device("cpu"), arena, page_size)
    host = HostTier(0, page_size, backend)
    measure(backend=backend, host=host, disk=None, page_size=page_size)
    backend.close()
    assert len(made) == 1
    assert 2 * page_size <= made[0] <= most


def test_scratch_memory_is_what_dense_memory_has_idle(
    allocator: DenseAllocator, backend: Device
) -> None:
    """``backend``: 64 MiB, of which the arena has one."""
    reserve = 20 * MIB
    others = allocator.totals().free  # of pagers that are open elsewhere
    backend.limit_dense(reserve)
    backend.cap_dense(reserve, lambda missing: False)
    live = [torch.empty(5 * MIB, dtype=torch.uint8) for _ in range(4)]
    del live[1:]  # 5 MiB are in use, 15 idle
    mapped = allocator.totals().free + 5 * MIB
    for most, lent in ((8 * MIB, 8 * MIB), (64 * MIB, 15 * MIB)):
        with backend.lend_idle(most) as room:
            assert room == lent
            assert allocator.totals().free <= others + 15 * MIB - lent
            with pytest.raises(torch.OutOfMemoryError):
                torch.empty(reserve, dtype=torch.uint8)  # the cap is what it was
        live.append(torch.empty(15 * MIB, dtype=torch.uint8))
        live.pop()
        assert allocator.totals().free + 5 * MIB == mapped, "kept for reuse as before"


def test_rates_to_count_on_are_the_lower_ones(
    backend: Device, host: HostTier, disk: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = DiskRates(
        read_alone=3e9, write_alone=1e9, read_beside=2e9, write_beside=4e9, latency_us=7
    )
    monkeypatch.setattr(calibration, "measure_disk", lambda *_: found)
    rates = measure(backend=backend, host=host, disk=disk, page_size=PAGE)
    assert (rates.disk_read_bytes_per_s, rates.disk_write_bytes_per_s) == (2e9, 1e9)
    assert (rates.disk_read_alone_bytes_per_s, rates.disk_write_alone_bytes_per_s) == (3e9, 1e9)
    assert rates.disk_latency_us == 7


# The disk, both ways at once


class SharedDisk:
    """A stand-in for a disk with simulated time, ``total`` bytes per second for both directions
    together, of which writes get ``write_share`` while both run."""

    total, write_share = 1e9, 0.25

    def __init__(self) -> None:
        self.reading = threading.Barrier(2, timeout=300)
        self.amounts: dict[str, int] = {}

    def both(self, mine: str, nbytes: int) -> float:
        """Seconds that ``mine`` takes when the two start together."""
        self.amounts[mine] = nbytes
        self.reading.wait()
        amounts = dict(self.amounts)
        self.reading.wait()
        rates = {
            "write": self.total * self.write_share,
            "read": self.total * (1 - self.write_share),
        }
        alone = {name: amounts[name] / rates[name] for name in rates}
        first = min(alone.values())
        if alone[mine] == first:
            return first
        return first + (amounts[mine] - first * rates[mine]) / self.total


def test_rates_beside_each_other_count_only_while_both_run() -> None:
    disk, size = SharedDisk(), 1 << 20
    pieces = [(slot, 1) for slot in range(32)]
    read, write = calibration_disk._both_ways(
        lambda runs: disk.both("read", len(runs) * size),
        lambda runs: disk.both("write", len(runs) * size),
        pieces,
        size,
        (disk.total, disk.total),
    )
    assert read == pytest.approx(0.75 * disk.total)
    assert write == pytest.approx(0.25 * disk.total)


def test_noise_does_not_make_a_rate_negative() -> None:
    assert calibration_disk._rate_beside(100, 10.0, 1.0, alone=50.0) == 10.0


def test_runs_are_cut_into_pieces() -> None:
    assert cut([(0, 5), (9, 2)], 2) == [(0, 2), (2, 2), (4, 1), (9, 2)]


def test_a_failing_disk_leaves_nothing_in_flight_and_no_slot_taken(
    backend: Device, host: HostTier, disk: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others are still being read when the first read fails: they end before anything is freed."""
    running = calls = 0
    lock, beside = threading.Lock(), threading.Event()
    real = os.preadv

    def fail_first(fd: int, buffers: list[Any], offset: int) -> int:
        nonlocal running, calls
        with lock:
            running += 1
            calls += 1
            is_first = calls == 1
        try:
            if is_first:
                assert beside.wait(300)
                raise OSError(5, "Input/output error")
            beside.set()
            time.sleep(0.2)
            return real(fd, buffers, offset)
        finally:
            with lock:
                running -= 1

    monkeypatch.setattr(os, "preadv", fail_first)
    with pytest.raises(PagerError, match="Input/output error"):
        measure(backend=backend, host=host, disk=disk, page_size=PAGE)
    assert (running, calls > 1) == (0, True)
    assert disk.slots.runs() == [(0, disk.slots.count)]
    assert host.slots.runs() == [(0, host.slots.count)]


def test_a_disk_that_gives_other_bytes_is_found(
    backend: Device, host: HostTier, disk: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.preadv

    def damage(fd: int, buffers: list[Any], offset: int) -> int:
        moved = real(fd, buffers, offset)
        buffers[0][17] ^= 1
        return moved

    monkeypatch.setattr(os, "preadv", damage)
    with pytest.raises(CorruptPage):
        measure(backend=backend, host=host, disk=disk, page_size=PAGE)


def test_no_two_reads_share_memory(disk: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device may put something else there before the bytes (decryption in place)."""
    busy: set[int] = set()
    lock = threading.Lock()
    real = os.preadv

    def watched(fd: int, buffers: list[Any], offset: int) -> int:
        address = buffers[0].ctypes.data
        with lock:
            assert address not in busy
            busy.add(address)
        try:
            return real(fd, buffers, offset)
        finally:
            with lock:
                busy.remove(address)

    monkeypatch.setattr(os, "preadv", watched)
    source, *lanes = np.split(calibration.private_bytes(8 * PAGE), 4)
    source[:] = np.arange(len(source)) % 251
    rates = measure_disk(disk, [(0, 40), (50, 30)], source, lanes, Waiter(IoWatch(math.inf)))
    assert min(rates[:4]) > 0


# What it is for


def test_hardware_has_the_measured_rates() -> None:
    machine = hardware(
        FULL, device_bytes=10 * MIB, host_bytes=MIB, disk_bytes=5 * MIB, page_size=PAGE
    )
    assert asdict(machine) == {
        "device_bytes": 10 * MIB,
        "host_bytes": MIB,
        "disk_bytes": 5 * MIB,
        "d2h_bytes_per_s": 8e9,
        "h2d_bytes_per_s": 9e9,
        "disk_read_bytes_per_s": 1e9,
        "disk_write_bytes_per_s": 2e9,
        "transfer_latency_us": 2.0,
        "page_size": PAGE,
        "host_adam_bytes_per_s": 50e9,
    }


def test_the_latency_is_the_disks_where_there_is_only_the_disk() -> None:
    assert hardware(FULL, 10 * MIB, 0, 5 * MIB, PAGE).transfer_latency_us == 40.0
    assert hardware(FULL, 10 * MIB, MIB, 0, PAGE).transfer_latency_us == 2.0


def test_hardware_without_a_disk() -> None:
    link = Calibration(8e9, 9e9, 2.0)
    assert hardware(link, 10 * MIB, MIB, 0, PAGE).disk_bytes == 0
    with pytest.raises(ValueError, match="disk_bytes=1, but the disk was not measured"):
        hardware(link, 10 * MIB, MIB, 1, PAGE)


@pytest.mark.parametrize(
    "change",
    [
        {"d2h_bytes_per_s": 0},
        {"h2d_bytes_per_s": math.nan},
        {"h2d_bytes_per_s": math.inf},
        {"disk_read_bytes_per_s": -1.0},
        {"disk_read_bytes_per_s": None},
        {"disk_write_alone_bytes_per_s": None},
        {"disk_write_bytes_per_s": "1e9"},
        {"disk_latency_us": -0.5},
        {"transfer_latency_us": True},
        {"transfer_latency_us": None},
        {"d2h_bytes_per_s": 10**400},
    ],
)
def test_rates_that_no_machine_has(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        replace(FULL, **change)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu(tmp_path: Path) -> None:
    page = 2 * MIB
    backend = make_device(resolve("cuda"), 64 * MIB, 16 * MIB)
    host, disk = HostTier(32 * MIB, page, backend), DiskTier(tmp_path, 32 * MIB, page)
    try:
        rates = measure(backend=backend, host=host, disk=disk, page_size=page)
        assert_possible(rates)
        without_host = measure(
            backend=backend, host=HostTier(0, page, backend), disk=None, page_size=page
        )
        assert without_host.d2h_bytes_per_s > 0
    finally:
        host.close()
        disk.close()
        backend.close()
