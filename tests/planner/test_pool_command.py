import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tensorpager.planner.commands.pool import pool
from tensorpager.planner.offsets import check, read_csv
from tensorpager.planner.trace import make_trace
from tensorpager.planner.trace_file import write_trace

NAMES = ["ours", "smartpool", "smartpool-first-fit", "best-fit", "cnmem", "pytorch", "pages"]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(pool, [str(argument) for argument in arguments])


@pytest.fixture
def csv_path(tmp_path: Path) -> Path:
    """minimalloc's own example: 12 bytes are enough and needed."""
    path = tmp_path / "example.csv"
    rows = ["b1,0,3,4", "b2,3,9,4", "b3,0,9,4", "b4,9,21,4", "b5,0,21,4"]
    path.write_text("\n".join(["id,lower,upper,size", *rows, ""]))
    return path


def test_json_is_as_promised(csv_path: Path) -> None:
    result = run("--csv", csv_path, "--capacity", 12, "--json")
    assert result.exit_code == 0
    content: dict[str, Any] = json.loads(result.stdout)
    assert list(content) == ["peak_live_bytes", "allocators"]
    assert content["peak_live_bytes"] == 12
    assert [entry["name"] for entry in content["allocators"]] == NAMES
    for entry in content["allocators"]:
        assert list(entry) == ["name", "footprint_bytes", "seconds", "optimal"]
        assert entry["footprint_bytes"] >= 12
        assert entry["optimal"] == (entry["footprint_bytes"] == 12 or entry["name"] == "ours")
    assert content["allocators"][0]["footprint_bytes"] == 12


def test_the_offsets_written_hold(csv_path: Path, tmp_path: Path) -> None:
    out = tmp_path / "packed.csv"
    assert run("--csv", csv_path, "-o", out).exit_code == 0
    header, *rows = out.read_text().splitlines()
    assert header == "id,lower,upper,size,offset"
    offsets = [int(row.split(",")[4]) for row in rows]
    import numpy as np

    assert check(read_csv(out), np.array(offsets), 12) == []
    assert read_csv(out).ids == read_csv(csv_path).ids


def test_a_trace_is_packed_with_what_lasts_alive_throughout(tmp_path: Path) -> None:
    trace = make_trace(
        [(1, 1000, True), (2, 512, False), (3, 512, False)],
        [("a", 1.0, [1], [2]), ("b", 1.0, [2], []), ("c", 1.0, [], [3])],
        page_size=4096,
    )
    path = tmp_path / "trace.parquet"
    write_trace(path, trace)
    content = json.loads(run(path, "--json").stdout)
    assert content["peak_live_bytes"] == 1536
    assert content["allocators"][0]["footprint_bytes"] == 1536


def test_the_table_names_every_allocator(csv_path: Path) -> None:
    result = run("--csv", csv_path)
    assert result.exit_code == 0
    assert all(name in result.stdout for name in NAMES)
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_too_small_a_capacity_ends_with_1_and_says_why(csv_path: Path) -> None:
    result = run("--csv", csv_path, "--capacity", 11, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["peak_live_bytes"] == 12
    assert "12 bytes live at one time, more than --capacity 11" in result.stderr


def test_a_capacity_above_the_peak_that_nothing_fits_ends_with_1(tmp_path: Path) -> None:
    from .test_offsets import GAP

    path = tmp_path / "gap.csv"
    rows = [f"{number},{a},{b},{size}" for number, (a, b, size) in enumerate(GAP)]
    path.write_text("\n".join(["id,lower,upper,size", *rows]))
    result = run("--csv", path, "--capacity", 5)
    assert result.exit_code == 1
    assert "bytes, --capacity is 5; allow more --capacity" in result.stderr
    assert run("--csv", path, "--capacity", 8).exit_code == 0


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["trace.parquet", "--csv", "buffers.csv"],
        ["none.parquet"],
        ["--csv", "none.csv"],
        ["--csv", "bad.csv"],
        ["--csv", "bad.csv", "--capacity", "much"],
        ["--csv", "bad.csv", "--seconds", "-1"],
        ["--csv", "bad.csv", "-o", "no/folder/out.csv"],
    ],
)
def test_bad_input_ends_with_2(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.csv").write_text("id,lower,upper,size\na,3,2,1\n")
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.splitlines()[-1].startswith("Error: ")


def test_a_bad_file_is_named_with_line_and_reason(tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text("id,lower,upper,size\na,3,2,1\n")
    result = run("--csv", path)
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert f"{path}, line 2: buffer a has upper=2, which must be > lower=3" in result.stderr
