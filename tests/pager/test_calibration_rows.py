"""How many bytes of a page are read in place: measured, remembered, never out of range."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tensorpager.pager.devices.choice import make_device, resolve
from tensorpager.pager.devices.device import Device
from tensorpager.pager.machine.calibration import measure as calibration
from tensorpager.pager.machine.calibration import rows as calibration_rows
from tensorpager.pager.machine.calibration.rows import (
    NEVER,
    Border,
    calibrate_rows,
    measure_rows,
    row_size,
)
from tensorpager.pager.memory.host import HostTier

PAGE = 64 << 10
MIB = 1 << 20


@pytest.fixture
def backend() -> Iterator[Device]:
    backend = make_device(torch.device("cpu"), 8 * MIB, MIB)
    yield backend
    backend.close()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "tensorpager"


class Machine:
    """Stands in for measuring: a row costs ``row_s`` beyond its bytes, a page ``page_s``."""

    rate = 10e9

    def __init__(self, monkeypatch: pytest.MonkeyPatch, row_s: float, page_s: float) -> None:
        self.row_s, self.page_s = row_s, page_s
        self.calls = 0
        machine = self

        def seconds(lookups: Any, way: str, nbytes: int, count: int) -> float:
            machine.calls += 1
            if way == "engine":
                return count * (machine.page_s + PAGE / machine.rate)
            rows = nbytes // lookups._row_bytes
            return count * rows * (machine.row_s + lookups._row_bytes / machine.rate)

        monkeypatch.setattr(calibration_rows._Lookups, "seconds", seconds)


@pytest.mark.parametrize(
    ("row_bytes", "expected"),
    [(1, 16), (16, 16), (760, 512), (1024, 1024), (PAGE // 2, PAGE // 2), (10 * PAGE, PAGE // 2)],
)
def test_sizes_of_rows(row_bytes: int, expected: int) -> None:
    assert row_size(row_bytes, PAGE) == expected


@pytest.mark.parametrize("row_bytes", [512, PAGE // 2])
def test_it_is_measured(backend: Device, row_bytes: int) -> None:
    found = measure_rows(backend, PAGE, row_bytes)
    assert found.most_bytes == 0 or row_bytes <= found.most_bytes <= PAGE // 2
    assert found.page_us > 0


def test_both_ways_fetch_what_they_should(backend: Device) -> None:
    with calibration.scratch(backend, 3 * PAGE) as memory:
        lookups = calibration_rows._Lookups(backend, memory, PAGE, 1024)
        memory[:] = np.arange(len(memory)) // 1024 % 251
        rows = lookups._rows_of(4, 3)
        assert [(rows // 64 == page).sum() for page in range(3)] == [4, 4, 4]
        assert lookups.seconds("kernel", 4096, 3) > 0
        found = lookups._here[: 12 * 1024].view(12, 1024)
        assert torch.equal(found, torch.from_numpy(rows % 251).byte()[:, None].expand(12, 1024))
        assert lookups.seconds("engine", 4096, 2) > 0
        assert torch.equal(lookups._here[:PAGE], torch.from_numpy(memory[PAGE : 2 * PAGE]))


def test_where_rows_and_a_page_take_as_long(
    backend: Device, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page: 6.55 µs and 1; a row of 512 bytes: 0.4 µs, 18 of them."""
    Machine(monkeypatch, row_s=0.35e-6, page_s=1e-6)
    found = calibrate_rows(backend=backend, page_size=PAGE, row_bytes=512)
    assert 17 * 512 <= found.most_bytes < 20 * 512
    assert found.page_us == pytest.approx(7.55, rel=0.01)


@pytest.mark.parametrize(("row_s", "most"), [(0.0, PAGE // 2), (1e-3, 0)])
def test_never_more_than_half_a_page(
    backend: Device, folder: Path, monkeypatch: pytest.MonkeyPatch, row_s: float, most: int
) -> None:
    Machine(monkeypatch, row_s=row_s, page_s=1e-6)
    assert calibrate_rows(backend=backend, page_size=PAGE, row_bytes=512).most_bytes == most


def test_it_is_remembered_for_each_size_of_row(
    backend: Device, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch, row_s=0.35e-6, page_s=1e-6)
    found = [calibrate_rows(backend=backend, page_size=PAGE, row_bytes=n) for n in (512, 1024)]
    calls = machine.calls
    again = [calibrate_rows(backend=backend, page_size=PAGE, row_bytes=n) for n in (512, 1024)]
    assert again == found
    assert machine.calls == calls
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [("most_bytes", v) for v in (-1, PAGE // 2 + 1, "512", 1.5, True)]
    + [("page_us", v) for v in (0.0, -1.0, float("nan"), float("inf"), "7", None)]
    + [("other", 1)],
)
def test_what_cannot_be_is_not_believed(
    backend: Device, folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: Any
) -> None:
    machine = Machine(monkeypatch, row_s=0.35e-6, page_s=1e-6)
    found = calibrate_rows(backend=backend, page_size=PAGE, row_bytes=512)
    (path,) = folder.iterdir()
    content = json.loads(path.read_text())
    assert Border(**content["values"]) == found
    path.write_text(json.dumps(content | {"values": content["values"] | {name: value}}))
    calls = machine.calls
    assert calibrate_rows(backend=backend, page_size=PAGE, row_bytes=512) == found
    assert machine.calls > calls


def test_no_room_to_measure(backend: Device, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Border:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(calibration_rows, "measure_rows", refuse)
    assert calibrate_rows(backend=backend, page_size=PAGE, row_bytes=512) == NEVER
    assert not folder.exists()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("page", [PAGE, 2 * MIB])
def test_on_a_gpu(page: int) -> None:
    backend = make_device(resolve("cuda"), 256 * MIB, 2 * MIB)
    host = HostTier(2 * page, page, backend)
    try:
        found = measure_rows(backend, page, 1024)
        assert found.most_bytes == 0 or 1024 <= found.most_bytes <= page // 2
    finally:
        host.close()
        backend.close()
