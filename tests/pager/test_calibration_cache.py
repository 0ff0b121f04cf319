import json
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from tensorpager.pager.cli import main
from tensorpager.pager.devices.choice import make_device, resolve
from tensorpager.pager.devices.device import Device
from tensorpager.pager.disk.tier import DiskTier
from tensorpager.pager.machine.calibration import cache as calibration_cache
from tensorpager.pager.machine.calibration import measure as calibration
from tensorpager.pager.machine.calibration.measure import Calibration, calibrate
from tensorpager.pager.memory.host import HostTier

PAGE = 64 << 10
MIB = 1 << 20
MEASURED = Calibration(8e9, 9e9, 2.0, 1e9, 2e9, 1.5e9, 2.5e9, 40.0)
LINK_ONLY = Calibration(8e9, 9e9, 2.0)


class Machine:
    """Tiers, and a stand-in for measuring them that counts how often it is asked."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.backend: Device = make_device(torch.device("cpu"), MIB, MIB)
        self.host = HostTier(0, PAGE, self.backend)
        self.disk = DiskTier(folder, 4 * PAGE, PAGE)
        self.times = 0
        monkeypatch.setattr(calibration, "measure", self.measure)

    def measure(self, *, disk: DiskTier | None, **_: Any) -> Calibration:
        self.times += 1
        return MEASURED if disk is not None else LINK_ONLY

    def calibrate(self, **changes: Any) -> Calibration:
        tiers = {"backend": self.backend, "host": self.host, "disk": self.disk, "page_size": PAGE}
        return calibrate(**tiers | changes)  # type: ignore[arg-type]

    def close(self) -> None:
        self.disk.close()
        self.host.close()
        self.backend.close()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache's folder; not there yet, nor the one that it is in."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    return tmp_path / "xdg" / "tensorpager"


@pytest.fixture
def machine(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    machine = Machine(tmp_path, monkeypatch)
    yield machine
    machine.close()


def only_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def test_what_was_measured_is_remembered(machine: Machine, folder: Path) -> None:
    assert machine.calibrate() == MEASURED
    assert machine.calibrate() == MEASURED
    assert machine.times == 1
    assert only_file(folder).name.startswith("calibration-")


def test_the_folder_and_the_file_are_private(machine: Machine, folder: Path) -> None:
    old = os.umask(0)
    try:
        machine.calibrate()
    finally:
        os.umask(old)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(only_file(folder).stat().st_mode) == 0o600


def test_an_open_folder_is_closed(machine: Machine, folder: Path) -> None:
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    machine.calibrate()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_fresh_measures_and_remembers(machine: Machine) -> None:
    machine.calibrate(fresh=True)
    machine.calibrate(fresh=True)
    assert machine.times == 2
    machine.calibrate()
    assert machine.times == 2


@pytest.mark.parametrize("word", ["off", "OFF"])
def test_switched_off(
    machine: Machine, folder: Path, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    monkeypatch.setenv("TENSORPAGER_CALIBRATION", word)
    machine.calibrate()
    machine.calibrate()
    assert machine.times == 2
    assert not folder.exists()


def test_what_makes_another_machine_or_channel(
    machine: Machine, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.calibrate()
    assert machine.calibrate(disk=None) == LINK_ONLY
    machine.calibrate(page_size=2 * PAGE)
    buffered = DiskTier(tmp_path, 4 * PAGE, PAGE, direct=False)
    if machine.disk.direct:
        machine.calibrate(disk=buffered)
    buffered.close()
    seen = len(list(folder.iterdir()))
    assert seen == machine.times == 3 + machine.disk.direct
    for change in (
        {"__version__": "99"},
        {"_cpu_name": lambda: "another"},
        {"text_of": lambda path: "another"},
        {"mount_of": lambda folder: None},
    ):
        with monkeypatch.context() as patch:
            for name, value in change.items():
                patch.setattr(calibration_cache, name, value)
            machine.calibrate()
            seen += 1
            assert machine.times == seen, change
    machine.calibrate()
    assert machine.times == seen


def test_the_key_names_the_disks_file_system(machine: Machine) -> None:
    key = calibration_cache.machine_key(machine.backend.device, machine.disk, PAGE)
    assert key["disk_device"] == os.stat(machine.disk.directory).st_dev
    assert key["page_size"] == PAGE
    assert key["device"]
    assert key == json.loads(json.dumps(key))


@pytest.mark.parametrize(("age_s", "measured_again"), [(6.9, 0), (7.1, 1), (-0.1, 1)])
def test_a_week_is_the_age_limit(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, age_s: float, measured_again: int
) -> None:
    machine.calibrate()
    now = time.time() + age_s * 24 * 3600
    monkeypatch.setattr(calibration_cache.time, "time", lambda: now)
    machine.calibrate()
    machine.calibrate()
    assert machine.times == 1 + measured_again  # and what was measured again is remembered


def with_values(content: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return content | {"values": content["values"] | changes}


HOSTILE = {
    "nothing": lambda _: b"",
    "not JSON": lambda _: b"\x00\xff{",
    "half": lambda content: json.dumps(content).encode()[:-40],
    "a list": lambda _: b"[1, 2]",
    "a number": lambda _: b"7",
    "nested": lambda _: b"[" * 60_000,
    "huge": lambda content: json.dumps(content).encode() + b" " * (1 << 20),
    "no values": lambda content: {"key": content["key"], "measured_at": content["measured_at"]},
    "values are no object": lambda content: content | {"values": [1]},
    "another key": lambda content: content | {"key": content["key"] | {"host": "another"}},
    "no time": lambda content: content | {"measured_at": None},
    "time is NaN": lambda content: content | {"measured_at": float("nan")},
    "time is huge": lambda content: content | {"measured_at": 10**400},
    "rate 0": lambda content: with_values(content, d2h_bytes_per_s=0),
    "rate below 0": lambda content: with_values(content, h2d_bytes_per_s=-1e9),
    "rate NaN": lambda content: with_values(content, disk_read_bytes_per_s=float("nan")),
    "rate infinite": lambda content: with_values(content, disk_read_bytes_per_s=float("inf")),
    "rate tiny": lambda content: with_values(content, d2h_bytes_per_s=5e-324),
    "rate a string": lambda content: with_values(content, d2h_bytes_per_s="8e9"),
    "rate true": lambda content: with_values(content, d2h_bytes_per_s=True),
    "rate a list": lambda content: with_values(content, d2h_bytes_per_s=[8e9]),
    "latency below 0": lambda content: with_values(content, transfer_latency_us=-1),
    "one too many": lambda content: with_values(content, __class__=1),
    "no disk": lambda content: content | {"values": asdict(LINK_ONLY)},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_cannot_be_trusted_is_measured_again_and_replaced(
    machine: Machine, folder: Path, name: str
) -> None:
    machine.calibrate()
    path = only_file(folder)
    hostile = HOSTILE[name](json.loads(path.read_text()))
    path.write_bytes(hostile if isinstance(hostile, bytes) else json.dumps(hostile).encode())
    assert machine.calibrate() == MEASURED
    assert machine.times == 2
    assert machine.calibrate() == MEASURED
    assert machine.times == 2
    assert only_file(folder) == path


def test_other_good_values_are_believed(machine: Machine, folder: Path) -> None:
    machine.calibrate()
    path = only_file(folder)
    path.write_text(json.dumps(with_values(json.loads(path.read_text()), d2h_bytes_per_s=5)))
    assert machine.calibrate() == replace(MEASURED, d2h_bytes_per_s=5)
    assert machine.times == 1


@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_what_is_no_file_of_ours_is_replaced(
    machine: Machine, folder: Path, tmp_path: Path, kind: str
) -> None:
    machine.calibrate()
    path = only_file(folder)
    if kind == "link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.unlink()
        os.mkfifo(path)
    machine.calibrate()
    machine.calibrate()
    assert machine.times == 2
    assert stat.S_ISREG(path.lstat().st_mode)


def block_with_file(folder: Path) -> None:
    folder.parent.write_text("a file where a folder should be")


def block_with_link(folder: Path) -> None:
    folder.parent.mkdir()
    (folder.parent / "target").mkdir(mode=0o755)
    folder.symlink_to(folder.parent / "target")


@pytest.mark.parametrize("block", [block_with_file, block_with_link])
def test_a_folder_that_cannot_be_had_means_no_cache(
    machine: Machine, folder: Path, block: Any
) -> None:
    block(folder)
    assert machine.calibrate() == machine.calibrate() == MEASURED
    assert machine.times == 2
    if folder.is_symlink():
        assert stat.S_IMODE(folder.stat().st_mode) == 0o755
        assert list(folder.iterdir()) == []


def test_a_disk_that_is_full_means_no_cache(
    machine: Machine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(calibration_cache.os, "replace", full)
    assert machine.calibrate() == machine.calibrate() == MEASURED
    assert machine.times == 2
    assert list(folder.iterdir()) == []


def test_a_folder_in_the_files_place(machine: Machine, folder: Path) -> None:
    machine.calibrate()
    path = only_file(folder)
    path.unlink()
    path.mkdir()
    machine.calibrate()
    machine.calibrate()
    assert machine.times == 3
    assert only_file(folder) == path


def test_a_relative_xdg_folder_does_not_count(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for value in ("cache", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        machine.calibrate()
    assert machine.times == 1
    assert only_file(tmp_path / "home" / ".cache" / "tensorpager").is_file()


def test_doctor_measures_afresh_for_the_pagers_that_follow(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stored() -> dict[str, Any]:
        result = CliRunner().invoke(main, ["doctor", "--disk-path", str(tmp_path)])
        assert result.exit_code == 0, result.output
        content: dict[str, Any] = json.loads(only_file(folder).read_text())
        return content

    first, second = stored(), stored()
    assert second["measured_at"] > first["measured_at"]
    monkeypatch.setattr(calibration, "measure", None)
    size = 2 * MIB
    backend = make_device(resolve(None), size, size)
    host, disk = HostTier(size, size, backend), DiskTier(tmp_path, size, size)
    known = calibrate(backend=backend, host=host, disk=disk, page_size=size)
    assert asdict(known) == second["values"]
    disk.close()
    host.close()
    backend.close()
