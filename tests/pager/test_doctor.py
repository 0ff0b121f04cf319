"""``tensorpager doctor``: on this machine, and on machines made of a few text files."""

import ctypes
import json
import re
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from tensorpager.pager.cli import main
from tensorpager.pager.disk import kvikio as kvikio_engine
from tensorpager.pager.disk import mounts
from tensorpager.pager.disk import watch as disk_watch
from tensorpager.pager.disk.engine import Engine
from tensorpager.pager.disk.mounts import Mount
from tensorpager.pager.disk.tier import DiskTier
from tensorpager.pager.disk.watch import IoWatch, WatchedEngine
from tensorpager.pager.machine import free_memory
from tensorpager.pager.machine.calibration.measure import Calibration
from tensorpager.pager.machine.doctor import disk as doctor_disk
from tensorpager.pager.machine.doctor import gds as doctor_gds
from tensorpager.pager.machine.doctor import gpu as doctor_gpu
from tensorpager.pager.machine.doctor import rates as doctor_rates
from tensorpager.pager.machine.doctor.finding import Finding, lines_of
from tensorpager.pager.machine.doctor.memory import memory_findings

from .disk_suite import open_below
from .faulty_engine import FaultyEngine

GIB = 1 << 30
RATES = Calibration(2e10, 1e10, 1.5, 3e9, 2e9, 6e9, 4e9, 10.0)
Files = Callable[[dict[str, str]], None]


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> Files:
    """Puts texts in the place of the system's files; the others are not there."""

    def put(texts: dict[str, str]) -> None:
        def text_of(path: object) -> str:
            return texts.get(str(path), "")

        def number_in(path: object) -> int | None:
            text = text_of(path).strip()
            return int(text) if text.isdigit() else None

        for module in (free_memory, doctor_disk, doctor_gds, doctor_gpu, mounts):
            monkeypatch.setattr(module, "text_of", text_of)
        for module in (free_memory, doctor_disk):
            monkeypatch.setattr(module, "number_in", number_in)

    return put


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> None:
    def known(tier: DiskTier | None, watch: IoWatch) -> Calibration:
        if tier is not None:
            tier.close()
        return RATES

    monkeypatch.setattr(doctor_rates, "_calibrated", known)


def states(findings: list[Finding]) -> dict[str, str]:
    return {finding.what: finding.state for finding in findings}


def doctor(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["doctor", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


# This machine


def test_it_measures_this_machine(tmp_path: Path) -> None:
    code, output = doctor("--disk-path", tmp_path, "--json")
    findings = [Finding(**found) for found in json.loads(output)]
    found = {finding.what: finding for finding in findings}
    assert code == ("problem" in states(findings).values()), output
    assert found["PyTorch"].detail.startswith(torch.__version__)
    for what in ("GPU", "Triton", "KvikIO", "page-locked memory", "memory limit (cgroup)"):
        assert what in found
    for what in (f"disk path {tmp_path}", "file system", "free space", "link"):
        assert found[what].state in ("ok", "warning")
    rate = r"[0-9]+\.[0-9]{2} [GM]B/s"
    assert re.fullmatch(
        rf"{rate} out, {rate} in, [0-9]+\.[0-9] µs per transfer", found["link"].detail
    )
    for what in ("disk, one way at a time", "disk, both at once"):
        assert re.fullmatch(rf"{rate} write, {rate} read", found[what].detail)
    assert all(finding.remedy for finding in findings if finding.state == "warning")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("rates")
def test_it_is_readable_at_80_columns(tmp_path: Path) -> None:
    code, output = doctor("--disk-path", tmp_path)
    lines = output.splitlines()
    assert max(map(len, lines)) <= 80 + len(str(tmp_path))
    assert all(re.match(r"ok {7}|warning {2}|problem {2}| {9}|$", line) for line in lines[:-1])
    assert re.fullmatch(r"\d+ ok, \d+ warnings?, \d+ problems?", lines[-1])
    assert code == (not lines[-1].endswith(" 0 problems"))
    assert "ok       link: 20.00 GB/s out, 10.00 GB/s in, 1.5 µs per transfer" in lines
    assert "ok       disk, both at once: 2.00 GB/s write, 3.00 GB/s read" in lines


@pytest.mark.usefixtures("rates")
def test_a_disk_with_hardly_any_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=5 << 20))
    _, output = doctor("--disk-path", tmp_path)
    assert "warning  disk rates: not measured: less than 8.00 MiB is free" in output
    assert "warning  free space: 5.00 MiB" in output
    assert "ok       link: " in output


def test_a_disk_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other findings are there, and the memory and file of the call that hangs still are."""
    made: list[FaultyEngine] = []

    def hanging(engine: Engine, watch: IoWatch) -> WatchedEngine:
        made.append(FaultyEngine(engine))
        made[-1].hang("read")
        return WatchedEngine(made[-1], watch)

    monkeypatch.setattr(disk_watch, "WatchedEngine", hanging)
    monkeypatch.setattr(doctor_rates, "_IO_SECONDS", 0.2)
    left: list[tuple[Any, ...]] = []
    monkeypatch.setattr(doctor_rates, "_left_to_the_disk", left)
    code, output = doctor("--disk-path", tmp_path, "--json")
    (finding,) = [Finding(**f) for f in json.loads(output) if f["what"] == "disk rates"]
    assert (code, finding.state) == (1, "problem")
    assert f"the disk tier in '{tmp_path}' could not be measured: the disk does" in finding.detail
    assert "name another disk" in finding.remedy
    assert open_below(tmp_path)
    made[0].heal()
    left.pop()[-1].close()
    assert open_below(tmp_path) == []


@pytest.mark.usefixtures("rates")
def test_a_path_that_will_not_work() -> None:
    code, output = doctor("--disk-path", "/no/such/folder")
    assert code == 1
    assert "problem  disk path /no/such/folder: " in output
    assert "ok       link: " in output
    assert "free space" not in output


def test_long_findings_are_wrapped() -> None:
    lines = lines_of(Finding("what", "warning", "word " * 30, "do " * 40), 80)
    assert max(map(len, lines)) <= 80
    words = ["         wor"] * 2
    assert [line[:12] for line in lines] == ["warning  wha", *words, "         -> ", " " * 12]


# Memory


def test_the_tightest_container_counts(files: Files) -> None:
    files(
        {
            "/proc/self/cgroup": "0::/outer/inner\n",
            "/sys/fs/cgroup/outer/memory.max": str(8 * GIB),
            "/sys/fs/cgroup/outer/memory.current": str(6 * GIB),
            "/sys/fs/cgroup/outer/memory.stat": f"anon 5\ninactive_file {GIB}\n",
            "/sys/fs/cgroup/outer/inner/memory.max": "max\n",
            "/sys/fs/cgroup/outer/inner/memory.current": "1",
        }
    )
    found = {f.what: f for f in memory_findings(on_gpu=False)}["memory limit (cgroup)"]
    assert (found.state, found.detail) == ("ok", "8.00 GiB, of which 3.00 GiB are free")


@pytest.mark.parametrize(("limit", "free"), [(GIB, "1.00 GiB, of"), ((1 << 63) - 4096, "none")])
def test_control_groups_of_version_1(files: Files, limit: int, free: str) -> None:
    folder = "/sys/fs/cgroup/memory/job"
    files(
        {
            "/proc/self/cgroup": "4:memory:/job\n3:cpu:/\n0::/\n",
            f"{folder}/memory.limit_in_bytes": f"{limit}\n",
            f"{folder}/memory.usage_in_bytes": "0",
        }
    )
    found = {f.what: f for f in memory_findings(on_gpu=False)}["memory limit (cgroup)"]
    assert found.state == "ok"
    assert found.detail.startswith(free)


def test_a_limit_of_page_locked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, on_gpu, state in (
        (8 << 20, True, "warning"),
        (8 << 20, False, "ok"),
        (resource.RLIM_INFINITY, True, "ok"),
    ):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, limit=limit: (limit, limit))
        found = memory_findings(on_gpu=on_gpu)
        by_what = {finding.what: finding for finding in found}["page-locked memory"]
        assert by_what.state == state
        assert ("--ulimit memlock=-1" in by_what.remedy) == (state == "warning")


# The disk


def test_the_mount_is_the_innermost_one(files: Files, tmp_path: Path) -> None:
    inner = str(tmp_path).replace(" ", "\\040")
    files(
        {
            "/proc/self/mountinfo": "1 0 8:1 / / rw,relatime - ext4 /dev/sda1 rw,data=journal\n"
            f"2 1 0:50 / {inner} rw,noatime shared:5 - btrfs /dev/my\\040disk rw,ssd\n"
            "3 1 8:2 / /elsewhere rw - xfs /dev/sda2 rw\nnonsense\n"
        }
    )
    mount = doctor_disk.mount_of(tmp_path / "folder")
    assert mount == Mount(str(tmp_path), "btrfs", "/dev/my disk", "rw,noatime,ssd", None)
    outer = doctor_disk.mount_of(Path("/etc"))
    assert outer is not None
    assert (outer.kind, outer.options) == ("ext4", "rw,relatime,data=journal")


@pytest.mark.parametrize(
    ("kind", "state"),
    [("ext4", "ok"), ("xfs", "ok"), ("tmpfs", "warning"), ("nfs4", "warning"),
     ("overlay", "warning"), ("zfs", "warning")],
)  # fmt: skip
def test_file_systems(kind: str, state: str) -> None:
    finding = doctor_disk._file_system(Mount("/", kind, "source", "rw", None))
    assert finding.state == state
    assert bool(finding.remedy) == (state == "warning")


def test_endurance(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    files(
        {
            "/sys/block/nvme0n1/size": str(2 * 10**12 // 512),
            "/sys/block/nvme0n1/device/model": "Make 980 \n",
            "/sys/block/nvme0n1/queue/rotational": "0",
            "/sys/block/sda/size": "1000",
            "/sys/block/sda/device/model": "Old",
            "/sys/block/sda/queue/rotational": "1",
        }
    )

    def lasts(drive: str | None, rate: float | None = 1e9) -> list[Finding]:
        mount = Mount("/", "ext4", "source", "rw", drive)
        monkeypatch.setattr(doctor_disk, "mount_of", lambda folder: mount)
        return doctor_disk.endurance(Path(), rate)

    (fast,) = lasts("nvme0n1")  # 600 · 2 TB at 86.4 TB a day
    assert fast.state == "warning"
    assert "nvme0n1 (Make 980), 2000 GB" in fast.detail
    assert "86.4 TB a day" in fast.detail
    assert "lasts 14 days" in fast.detail
    assert "an estimate" in fast.detail
    (slow,) = lasts("nvme0n1", 1e8)
    assert slow.state == "ok"
    assert "nothing to estimate" in lasts("sda")[0].detail
    assert lasts(None) == lasts("nvme0n1", None) == []


# KvikIO and GPUDirect Storage


@pytest.fixture
def with_gds(monkeypatch: pytest.MonkeyPatch, files: Files) -> None:
    """A machine on which everything works."""
    files({"/proc/driver/nvidia-fs/version": "version: 2.17.3\n"})
    monkeypatch.delenv("KVIKIO_COMPAT_MODE", raising=False)
    monkeypatch.setattr(doctor_gds, "installed", lambda name: "26.10.0")
    monkeypatch.setattr(doctor_gds, "_kvikio_mode", lambda: "AUTO")
    monkeypatch.setattr(doctor_gds.os, "access", lambda path, mode: True)
    monkeypatch.setattr(kvikio_engine, "why_not", lambda: None)
    monkeypatch.setattr(kvikio_engine, "has_gds", lambda: True)
    on_nvme(monkeypatch)


def on_nvme(
    monkeypatch: pytest.MonkeyPatch, kind: str = "ext4", options: str = "rw", drive: str = "nvme0n1"
) -> None:
    mount = Mount("/", kind, "source", options, drive)
    monkeypatch.setattr(doctor_gds, "mount_of", lambda folder: mount)


@pytest.mark.usefixtures("with_gds")
def test_gds_works() -> None:
    kvikio, gds = doctor_gds.gds_findings(Path(), on_gpu=True)
    assert kvikio.state == gds.state == "ok"
    assert "directly (nvidia-fs 2.17.3)" in gds.detail


@pytest.mark.usefixtures("with_gds")
@pytest.mark.parametrize(
    ("mount", "reason"),
    [
        ({"kind": "btrfs"}, "cuFile does not know btrfs"),
        ({"options": "rw,data=journal"}, "ext4 is mounted with data=journal"),
        ({"drive": "sda"}, "sda is no NVMe drive"),
    ],
)
def test_why_gds_does_not_work(
    monkeypatch: pytest.MonkeyPatch, mount: dict[str, str], reason: str
) -> None:
    on_nvme(monkeypatch, **mount)
    gds = doctor_gds.gds_findings(Path(), on_gpu=True)[1]
    assert gds.state == "warning"
    assert gds.detail == f"compatibility mode: {reason}"
    assert gds.remedy


@pytest.mark.usefixtures("with_gds")
def test_gds_is_switched_off_or_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvikio_engine, "has_gds", lambda: False)
    assert "cuFile says no" in doctor_gds.gds_findings(Path(), on_gpu=True)[1].detail
    monkeypatch.setenv("KVIKIO_COMPAT_MODE", "ON")
    finding = doctor_gds.gds_findings(Path(), on_gpu=True)[1]
    assert (finding.state, finding.remedy) == ("warning", "unset KVIKIO_COMPAT_MODE")


@pytest.mark.parametrize("on_gpu", [True, False])
def test_kvikio_is_missing_or_unusable(monkeypatch: pytest.MonkeyPatch, on_gpu: bool) -> None:
    state = "warning" if on_gpu else "ok"
    monkeypatch.setattr(kvikio_engine, "why_not", lambda: "no library; install it")
    monkeypatch.setattr(doctor_gds, "installed", lambda name: "1.0")
    (finding,) = doctor_gds.gds_findings(Path(), on_gpu=on_gpu)
    assert (finding.state, finding.remedy) == (state, "install it" if on_gpu else "")
    assert finding.detail.endswith("not used: no library")
    monkeypatch.setattr(doctor_gds, "installed", lambda name: None)
    (finding,) = doctor_gds.gds_findings(Path(), on_gpu=on_gpu)
    assert finding.state == state
    assert "not installed" in finding.detail


# The GPU


def test_a_driver_that_pytorch_cannot_use(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    files({"/proc/driver/nvidia/version": "NVRM version: NVIDIA Kernel Module  470.57.02  Tue"})
    monkeypatch.setattr(doctor_gpu, "driver_cuda", lambda: (11, 4))
    old = doctor_gpu._no_gpu("13.0")
    assert old.state == "problem"
    assert "PyTorch wants CUDA 13.0, the driver serves 11.4" in old.detail
    assert "--gpus all" in doctor_gpu._no_gpu("11.8").remedy
    assert doctor_gpu._no_gpu(None).remedy == "install a CUDA build of PyTorch"
    assert doctor_gpu._driver().detail == "470.57.02, serves CUDA up to 11.4"
    monkeypatch.setattr(torch.version, "cuda", None)
    assert doctor_gpu._torch().state == "warning"


def test_there_is_no_driver_without_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert doctor_gpu.driver_cuda() is None
