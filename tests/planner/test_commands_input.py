"""Bad input ends in one line on stderr and exit code 2, never in a traceback."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from .command_line import refused


def test_budget_under_a_working_set(trace_path: Path, machine_path: Path, tmp_path: Path) -> None:
    for command in (("plan", "-o", tmp_path / "p.json"), ("compare",)):
        line = refused(
            command[0], trace_path, *command[1:], "--hardware", machine_path, "--device-bytes", 3999
        )
        assert "'fill'" in line
        assert "smallest device budget is 4000 bytes" in line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--hardware", "h300"), "presets: g10"),
        (("--hardware", "g10", "--device-bytes", "0"), "device_bytes = 0"),
        (("--hardware", "g10", "--device-bytes", "-5GB"), "--device-bytes"),
        (("--hardware", "g10", "--device-bytes", "nan%"), "share of the peak"),
        (("--hardware", "g10", "--device-bytes", "0%"), "share of the peak"),
        (("--hardware", "g10", "--host-bytes", "lots"), "--host-bytes"),
        (("--hardware", "g10", "--h2d", "0"), "h2d_bytes_per_s = 0"),
        (("--hardware", "g10", "--latency-us", "nan"), "not a number"),
        (("--hardware", "g10", "--latency-us", "-1"), "negative"),
        (("--hardware", "g10", "--page-size", "0"), "at least 1 byte"),
        (("--hardware", "g10", "--policies", "magic"), "magic"),
        (("--hardware", "g10", "--policies", ","), "--policies"),
        (("--hardware", "g10", "--speed", "9"), "--speed"),
        ((), "Missing option '--hardware'"),
    ],
)
def test_bad_usage(trace_path: Path, arguments: tuple[str, ...], said: str) -> None:
    assert said in refused("compare", trace_path, *arguments)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("device_bytes = ", "machine.toml"),
        ("host_bytes = 5", "device_bytes is missing"),
        ("device_bytes = -1", "negative"),
        ("device_bytes = nan", "not a number"),
        ("device_bytes = 'many'", "many"),
        ("device_bytes = 5\nspeed = 3", "unknown key 'speed'"),
        ("device_bytes = [5]", "not a number"),
    ],
)
def test_bad_machine(trace_path: Path, machine_path: Path, text: str, said: str) -> None:
    machine_path.write_text(text)
    assert said in refused("compare", trace_path, "--hardware", machine_path)


def rewritten(path: Path, column: str, change: Callable[[list[Any]], None]) -> None:
    """The trace file with some values of a column changed, its metadata kept."""
    table = pq.read_table(path)
    values = table[column].to_pylist()
    change(values)
    place = table.schema.get_field_index(column)
    field = table.schema.field(column)
    pq.write_table(table.set_column(place, field, pa.array(values, field.type)), path)


def test_bad_traces(trace_path: Path, tmp_path: Path) -> None:
    good = trace_path.read_bytes()

    def line(content: bytes | None = None, column: str = "", value: Any = None) -> str:
        trace_path.write_bytes(good if content is None else content)
        if column:
            rewritten(trace_path, column, lambda values: values.__setitem__(1, value))
        return refused("show", trace_path)

    assert "not a whole Parquet file" in line(good[: len(good) // 2])
    assert "a text file, not a trace" in line(b"op,name\n0,conv\n")
    assert "an empty file, not a trace" in line(b"")
    assert "a plan, not a trace" in line(b'{"moves": []}')
    assert "row 1" in line(column="nbytes", value=-5)
    assert "row 1" in line(column="duration_us", value=float("nan"))
    assert "row " in line(column="op", value=5)
    assert "no such file" in refused("show", tmp_path / "nothing.parquet")
    assert str(tmp_path) in refused("show", tmp_path)


def test_outputs_that_cannot_be_are_refused_before_the_work(
    trace_path: Path, tmp_path: Path
) -> None:
    arguments = ("plan", trace_path, "--hardware", "g10", "-o")
    assert "no folder" in refused(*arguments, tmp_path / "missing" / "p.json")
    assert "is a folder" in refused(*arguments, tmp_path)


def test_unknown_policy_and_command(trace_path: Path, tmp_path: Path) -> None:
    arguments = ("plan", trace_path, "--hardware", "g10", "-o", tmp_path / "p.json")
    assert "magic" in refused(*arguments, "--policy", "magic")
    assert "shwo" in refused("shwo", trace_path)
    assert "'excel'" in refused("import", "excel", trace_path, "-o", tmp_path / "t.parquet")
