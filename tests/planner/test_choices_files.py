"""Traces and plans of version 2 as files: what is written, and what is refused and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tensorpager.planner.errors import PlanError, TraceError
from tensorpager.planner.hardware import PRESETS
from tensorpager.planner.plan import Deferred, Move, Plan, Recompute, plan_from_json, plan_to_json
from tensorpager.planner.trace import Trace, make_trace
from tensorpager.planner.trace_file import METADATA_KEY, decode_trace, encode_trace, write_trace

from .command_line import refused, run_json
from .test_joint import layers, machine

PAGE = 1 << 16


def small(**changes: Any) -> Trace:
    values: dict[str, Any] = {
        "rerun": [True, False, False],
        "host_us": [None, None, 7.5],
        "segments": [(0, 1, "block"), (0, 0, "block.first")],
        **changes,
    }
    tensors = [(0, PAGE, True), (1, PAGE, False)]
    ops = [("a", 1.0, [0], [1]), ("b", 2.0, [1], []), ("update", 3.0, [1], [0])]
    return make_trace(tensors, ops, page_size=PAGE, **values)


def test_a_trace_survives_its_file() -> None:
    trace = small()
    read = decode_trace(encode_trace(trace, "trace"), "trace")
    assert read.op_rerun.tolist() == [True, False, False]
    assert np.array_equal(read.op_host_us, trace.op_host_us, equal_nan=True)
    assert read.segments == trace.segments
    assert "segments" not in read.metadata


def header_of(content: bytes) -> dict[str, Any]:
    header: dict[str, Any] = json.loads(
        pq.read_schema(pa.BufferReader(content)).metadata[METADATA_KEY]
    )
    return header


def test_version_2_is_written_only_where_it_is_needed() -> None:
    assert header_of(encode_trace(small(), "trace"))["version"] == 2
    plain = small(rerun=None, host_us=None, segments=())
    content = encode_trace(plain, "trace")
    assert header_of(content)["version"] == 1
    assert not {"rerun", "host_us"} & set(pq.read_schema(pa.BufferReader(content)).names)


def changed(trace: Trace, change: Any = None, **header: Any) -> bytes:
    table = pq.read_table(pa.BufferReader(encode_trace(trace, "trace")))
    metadata = json.loads(table.schema.metadata[METADATA_KEY]) | header
    table = change(table) if change else table
    sink = pa.BufferOutputStream()
    pq.write_table(
        table.replace_schema_metadata({METADATA_KEY: json.dumps(metadata).encode()}), sink
    )
    return bytes(sink.getvalue())


def column(name: str, values: list[Any]) -> Any:
    def change(table: pa.Table) -> pa.Table:
        place = table.schema.get_field_index(name)
        return table.set_column(place, name, pa.array(values, table.schema.field(name).type))

    return change


@pytest.mark.parametrize(
    ("change", "header", "reason"),
    [
        (lambda t: t.drop_columns(["rerun"]), {}, "column rerun is missing"),
        (column("rerun", [True, False, False, False, False]), {}, "row 1: rerun differs"),
        (column("host_us", [None, None, None, 7.5, None]), {}, "row 4: host_us differs"),
        (column("host_us", [None, None, None, -1.0, -1.0]), {}, "row 3: host_us = -1"),
        (column("rerun", [True, True, False, True, True]), {}, "row 4: rerun is true, but op 2"),
        (None, {"segments": [[0, 3, "x"]]}, r"segments\[0\].*last < 3"),
        (None, {"segments": [[0, 1, "x"], [1, 2, "y"]]}, "overlap"),
        (None, {"segments": 3}, "segments = 3 is not a list"),
        (None, {"version": 3}, "version 3"),
    ],
)
def test_a_trace_is_refused(change: Any, header: dict[str, Any], reason: str) -> None:
    with pytest.raises(TraceError, match=reason):
        decode_trace(changed(small(), change, **header), "trace")


def test_version_1_permits_nothing() -> None:
    read = decode_trace(changed(small(), version=1), "trace")
    assert not read.has_choices


def plan() -> Plan:
    hardware = PRESETS["rtx4090"]
    return Plan(
        policy="joint",
        page_size=hardware.page_size,
        device_bytes=hardware.device_bytes,
        host_bytes=hardware.host_bytes,
        disk_bytes=hardware.disk_bytes,
        moves=[Move(1, 0, 1, "device", "discard", 1)],
        recompute=[Recompute(0, 0, 2)],
        host_steps=[3],
        deferred=[Deferred(4, 0)],
        hardware=hardware,
    )


def test_a_plan_survives_its_file() -> None:
    content = json.loads(json.dumps(plan_to_json(plan())))
    assert content["version"] == 2
    assert content["hardware"]["host_adam_bytes_per_s"] == 50e9
    assert plan_to_json(plan_from_json(content)) == content


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hardware": None}, "hardware|without"),
        ({"hardware": {"device_bytes": -1}}, "device_bytes = -1"),
        ({"recompute": [[0, 2]]}, r"recompute\[0\] is not a list of 3"),
        ({"recompute": [[0, -1, 2]]}, r"recompute\[0\]"),
        ({"host_steps": ["3"]}, r"host_steps\[0\]: '3' is not"),
        ({"deferred": [[1, 2, 3]]}, r"deferred\[0\] is not a list of 2"),
        ({"moves": [[1, 0, 1, "host", "discard", 1]]}, "tier of a discard"),
        ({"moves": [[1, 0, 1, "device", "out", 1]]}, "tier of a discard"),
        ({"moves": [[1, 0, 1, "device", "discard", 1]], "version": 1}, "none of host, disk"),
    ],
)
def test_a_plan_is_refused(change: dict[str, Any], reason: str) -> None:
    content = {**plan_to_json(plan()), **change}
    if change.get("hardware", 0) is None:
        del content["hardware"]
    with pytest.raises(PlanError, match=reason):
        plan_from_json(content)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    trace = layers(4)
    write_trace(tmp_path / "trace.parquet", trace)
    hardware = machine(trace, 0.5)
    lines = [f"{name} = {value}" for name, value in vars(hardware).items()]
    (tmp_path / "machine.toml").write_text("\n".join(lines))
    return tmp_path / "trace.parquet", tmp_path / "machine.toml"


def test_a_plan_is_run_on_the_machine_that_it_remembers(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    trace, hardware = files
    out = tmp_path / "plan.json"
    said = run_json("plan", trace, "--hardware", hardware, "--quick", "-o", out)
    assert run_json("simulate", trace, out)["predicted"] == said["predicted"]
    slower = run_json("simulate", trace, out, "--h2d", "2GB", "--d2h", "2GB")
    assert slower["predicted"]["iteration_us"] > said["predicted"]["iteration_us"]
    content = json.loads(out.read_text())
    del content["hardware"]
    old = tmp_path / "old.json"
    old.write_text(json.dumps({**content, "version": 1, "moves": [], "start": []}))
    assert "give --hardware" in refused("simulate", trace, old)


def test_allow(files: tuple[Path, Path], tmp_path: Path) -> None:
    trace, hardware = files
    common = ("plan", trace, "--hardware", hardware, "-o", tmp_path / "plan.json")
    run_json(*common, "--allow", "move,recompute", "--quick")
    assert json.loads((tmp_path / "plan.json").read_text()).get("host_steps", []) == []
    assert "'fly' is none of move" in refused(*common, "--allow", "move,fly")
    assert "--allow is for policy joint" in refused(*common, "--allow", "move", "--policy", "lp")


def test_compare_says_what_was_decided(files: tuple[Path, Path]) -> None:
    trace, hardware = files
    found = run_json(
        "compare", trace, "--hardware", hardware, "--policies", "lp,checkpoint", "--quick"
    )
    rows = {row["policy"]: row for row in found["policies"]}
    assert "layers" not in rows["lp"]
    layers_of = rows["checkpoint"]["layers"]
    assert [layer["names"] for layer in layers_of] == [["0", "3"]]
    assert layers_of[0]["recompute_us"] == pytest.approx(4 * 105)
