"""``tensorpager bench-io``: what it recommends, refuses and leaves behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tensorpager.pager.machine import bench
from tensorpager.pager.machine.bench import Setting, cheapest_of_the_best, together
from tensorpager.pager.machine.bench_command import bench_io
from tensorpager.pager.machine.calibration.disk_rates import DiskRates

from .disk_suite import open_below

MIB = 1 << 20


def run(*arguments: str) -> Result:
    return CliRunner().invoke(bench_io, list(arguments))


@pytest.fixture(autouse=True)
def own_cache_each(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is remembered for one test is not there in the next."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep of a second, not of a minute."""
    monkeypatch.setattr(bench, "BLOCKS", (256 << 10, 1024 << 10))
    monkeypatch.setattr(bench, "THREADS", (2, 4))


QUICK = ["--size", "16MiB", "--rounds", "1", "--seconds", "0.02"]


def test_the_table(few: None, tmp_path: Path) -> None:
    result = run(str(tmp_path), *QUICK)
    assert result.exit_code == 0, result.output
    assert "Recommended: Pager(..., page_size=" in result.output
    assert result.output.count("best") == 1
    assert list(tmp_path.iterdir()) == []
    assert open_below(tmp_path) == []


def test_json(few: None, tmp_path: Path) -> None:
    result = run(str(tmp_path), *QUICK, "--json")
    assert result.exit_code == 0, result.output
    content = json.loads(result.stdout)
    assert content["size_bytes"] == 16 * MIB
    tried = [
        {key: row[key] for key in ("engine", "block_bytes", "threads")}
        for row in content["bytes_per_s"]
    ]
    assert content["recommended"] in tried
    assert {row["block_bytes"] for row in tried} == {256 << 10, 1024 << 10}
    assert {row["threads"] for row in tried} == {2, 4}
    for row in content["bytes_per_s"]:
        ways = ("write_alone", "read_alone", "write_beside", "read_beside", "together")
        assert min(row[way] for way in ways) > 0


@pytest.mark.parametrize(
    ("path", "size", "message"),
    [
        ("nowhere", "16MiB", "nowhere does not exist; name the folder"),
        ("file", "16MiB", "file is not a folder; name the folder"),
        (".", "1MiB", "--size is less than 16.00 MiB; give that or more"),
        (".", "900000TiB", "does not fit in"),
    ],
)
def test_refusals(tmp_path: Path, path: str, size: str, message: str) -> None:
    (tmp_path / "file").touch()
    result = run(str(tmp_path / path), "--size", size)
    assert result.exit_code == 2
    assert message in result.stderr
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_nothing_is_left_after_an_error(
    few: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*given: Any) -> None:
        assert list(tmp_path.iterdir()) == []
        assert len(open_below(tmp_path)) == 1
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bench.sweep(tmp_path, 16 * MIB, ["posix"], rounds=1, seconds=0.1)
    assert open_below(tmp_path) == []


def test_the_cheaper_setting_wins_among_equals() -> None:
    settings = [Setting("posix", block, 4) for block in (1, 2, 3, 4)]
    speeds = dict(zip(settings, (60.0, 98.0, 100.0, 99.0)))
    results = {setting: DiskRates(1, 1, speed, speed, 0) for setting, speed in speeds.items()}
    assert cheapest_of_the_best(settings, results) == settings[1]


def test_reading_and_writing_equally_much() -> None:
    assert together(DiskRates(9, 9, 1.0, 3.0, 0)) == pytest.approx(1.5)
