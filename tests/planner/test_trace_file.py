"""Trace files: what is written is read back, and what is no trace is refused by row and reason."""

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorpager.planner.errors import TraceError
from tensorpager.planner.trace import READ, READWRITE, WRITE, Trace, make_trace
from tensorpager.planner.trace_check import number_by_appearance
from tensorpager.planner.trace_file import SCHEMA, read_trace, write_trace

from .examples import examples

PAGE = 1000
HEADER = {"version": 1, "page_size": PAGE, "device": "cpu", "iteration_us": 9.0, "source": "test"}


def sample() -> Trace:
    return make_trace(
        [(7, 2500, True), (3, 1000, False), (5, 1, False)],
        [
            ("first", 2.0, [7], [3]),
            ("idle", 1.0, [], []),
            ("both", 0.0, [3, 7], [7, 5]),
            ("last", 3.5, [5], []),
        ],
        page_size=PAGE,
        names={7: "layer.weight"},
        kinds={7: "parameter"},
        source="by hand",
        device="cpu",
        metadata={"note": {"a": [1, 2]}},
    )


def assert_same(left: Trace, right: Trace) -> None:
    for name in Trace.__dataclass_fields__:
        if name in ("sha256", "metadata"):
            continue
        a, b = getattr(left, name), getattr(right, name)
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype, name
            np.testing.assert_array_equal(a, b, err_msg=name)
        else:
            assert a == b, name


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    written = write_trace(path, sample())
    trace = read_trace(path)
    assert_same(sample(), trace)
    assert_same(written, trace)
    assert written.sha256 == trace.sha256 != ""
    assert trace.metadata == {"note": {"a": [1, 2]}, "iteration_us": 6.5} == written.metadata
    assert trace.tensor_ids.tolist() == [7, 3, 5]
    assert trace.tensor_names == ["layer.weight", None, None]
    assert trace.access_mode.tolist() == [READ, WRITE, READ, READWRITE, WRITE, READ]


def test_columns_as_documented(tmp_path: Path) -> None:
    write_trace(tmp_path / "a.parquet", sample())
    table = pq.read_table(tmp_path / "a.parquet")
    assert table.schema.remove_metadata() == SCHEMA
    rows = table.to_pylist()
    assert [row["op"] for row in rows] == [0, 0, 1, 2, 2, 2, 3]
    assert rows[0] == {
        "op": 0,
        "op_name": "first",
        "start_us": 0.0,
        "duration_us": 2.0,
        "tensor": 7,
        "tensor_name": "layer.weight",
        "nbytes": 2500,
        "kind": "parameter",
        "access": "read",
        "first_page": 0,
        "page_count": 3,
        "persistent": True,
    }
    nothing = {"op": 1, "op_name": "idle", "start_us": 2.0, "duration_us": 1.0}
    assert rows[2] == {name: nothing.get(name) for name in SCHEMA.names}
    header = json.loads(table.schema.metadata[b"tensorpager"])
    assert header["version"] == 1
    assert header["page_size"] == PAGE
    assert header["source"] == "by hand"


def test_same_trace_same_bytes_private_and_atomic(tmp_path: Path) -> None:
    first, second = tmp_path / "a.parquet", tmp_path / "b.parquet"
    write_trace(first, sample())
    write_trace(second, read_trace(first))
    assert first.read_bytes() == second.read_bytes()
    assert stat.S_IMODE(first.stat().st_mode) == 0o600
    bad = sample()
    bad.op_duration_us[1] = -1.0
    with pytest.raises(TraceError, match=r"row 2: duration_us = -1"):
        write_trace(first, bad)
    assert first.read_bytes() == second.read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["a.parquet", "b.parquet"]
    with pytest.raises(TraceError, match="cannot be written"):
        write_trace(tmp_path / "nowhere" / "a.parquet", sample())


def table_of(changes: Callable[[dict[str, list[Any]]], None] | None = None) -> pa.Table:
    """Two ops on tensor 4 (two pages), one op without tensors, one op on tensor 9."""
    columns: dict[str, list[Any]] = {
        "op": [0, 1, 2, 3],
        "op_name": ["a", "b", "c", "d"],
        "start_us": [0.0, 1.0, 2.0, 3.0],
        "duration_us": [1.0, 1.0, 1.0, 1.0],
        "tensor": [4, 4, None, 9],
        "tensor_name": ["w", "w", None, None],
        "nbytes": [1500, 1500, None, 10],
        "kind": ["parameter", "parameter", None, "activation"],
        "access": ["read", "readwrite", None, "write"],
        "first_page": [0, 1, None, 0],
        "page_count": [2, 1, None, 1],
        "persistent": [True, True, None, False],
    }
    if changes:
        changes(columns)
    arrays = [pa.array(columns[field.name], field.type) for field in SCHEMA]
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


def save(path: Path, table: pa.Table, header: Any = HEADER) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    pq.write_table(table.replace_schema_metadata({"tensorpager": raw}), path)
    return path


def put(column: str, row: int, value: Any) -> Callable[[dict[str, list[Any]]], None]:
    def change(columns: dict[str, list[Any]]) -> None:
        columns[column][row] = value

    return change


def append(**values: Any) -> Callable[[dict[str, list[Any]]], None]:
    """Another row: the last one with other values."""

    def change(columns: dict[str, list[Any]]) -> None:
        for name, column in columns.items():
            column.append(values.get(name, column[-1]))

    return change


BROKEN_ROWS = {
    "row 2: op 0 after op 1; rows come in op order": put("op", 2, 0),
    "row 3: op 5 after op 2; an op that touches nothing has a row": put("op", 3, 5),
    "row 0: op = -1; the first op": put("op", 0, -1),
    "row 0: op = 1; the first op": put("op", 0, 1),
    "row 1: op is null": put("op", 1, None),
    "row 1: op_name is null": put("op_name", 1, None),
    "row 1: start_us is null": put("start_us", 1, None),
    "row 1: start_us = -1; times are finite": put("start_us", 1, -1.0),
    "row 1: start_us = nan": put("start_us", 1, float("nan")),
    "row 2: duration_us = inf": put("duration_us", 2, float("inf")),
    "row 2: duration_us = -0.5": put("duration_us", 2, -0.5),
    "row 2: op 2 starts at 0.5 µs, before op 1 at 1 µs": put("start_us", 2, 0.5),
    "row 4: op_name differs from the row before, of the same op 3": append(op_name="x", tensor=2),
    "row 4: start_us differs": append(start_us=3.5, tensor=2),
    "row 4: duration_us differs": append(duration_us=7.0, tensor=2),
    "row 4: op 3 touches the same pages of tensor 9": append(),
    "row 4: tensor is null, but op 3 has other rows": append(tensor=None),
    "row 0: tensor = -4; numbers are": put("tensor", 0, -4),
    "row 1: nbytes of tensor 4 differs from that in row 0": put("nbytes", 1, 1501),
    "row 1: kind of tensor 4 differs": put("kind", 1, "gradient"),
    "row 1: persistent of tensor 4 differs": put("persistent", 1, False),
    "row 1: tensor_name of tensor 4 differs": put("tensor_name", 1, None),
    "row 3: nbytes = 0; sizes are at least 1": put("nbytes", 3, 0),
    "row 3: nbytes = -10; sizes": put("nbytes", 3, -10),
    "row 2: nbytes = -10; sizes": put("nbytes", 2, -10),
    "row 3: kind = 'weights' is unknown .known: parameter": put("kind", 3, "weights"),
    "row 1: access = 'modify' is unknown": put("access", 1, "modify"),
    "row 1: access is null, but tensor 4": put("access", 1, None),
    "row 3: persistent is null": put("persistent", 3, None),
    "row 0: first_page = 1, page_count = 2, outside tensor 4 of 2 pages": put("first_page", 0, 1),
    "row 0: first_page = -1": put("first_page", 0, -1),
    "row 3: first_page = 0, page_count = 0": put("page_count", 3, 0),
}


@pytest.mark.parametrize("reason", BROKEN_ROWS)
def test_broken_rows_are_named(tmp_path: Path, reason: str) -> None:
    path = save(tmp_path / "bad.parquet", table_of(BROKEN_ROWS[reason]))
    with pytest.raises(TraceError, match=reason) as caught:
        read_trace(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_sample_table_is_fine(tmp_path: Path) -> None:
    trace = read_trace(save(tmp_path / "good.parquet", table_of()))
    assert trace.ops == 4
    assert trace.tensor_ids.tolist() == [4, 9]
    assert trace.access_op.tolist() == [0, 1, 3]
    assert trace.access_first_page.tolist() == [0, 1, 0]
    assert trace.metadata == {"iteration_us": 9.0}


def test_one_tensor_in_two_ranges_or_modes_of_an_op(tmp_path: Path) -> None:
    def rows(columns: dict[str, list[Any]]) -> None:
        columns["op"][1] = 0
        columns["op_name"][1], columns["start_us"][1] = "a", 0.0
        columns["op"][2:] = [1, 2]

    trace = read_trace(save(tmp_path / "a.parquet", table_of(rows)))
    assert trace.access_op.tolist() == [0, 0, 2]


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ({**HEADER, "version": 3}, "version 3, but this program reads up to version 2; update"),
        ({**HEADER, "version": 0}, "version = 0"),
        ({**HEADER, "version": "1"}, "version = '1'"),
        ({k: v for k, v in HEADER.items() if k != "version"}, "version = None"),
        ({k: v for k, v in HEADER.items() if k != "page_size"}, "page_size = None"),
        ({**HEADER, "page_size": 0}, "page_size = 0"),
        ({**HEADER, "page_size": 2.5}, "page_size = 2.5"),
        ({**HEADER, "page_size": True}, "page_size = True"),
        ({**HEADER, "device": 3}, "device = 3"),
        ({**HEADER, "iteration_us": -1}, "iteration_us = -1"),
        ({**HEADER, "iteration_us": float("nan")}, "iteration_us = nan"),
        ([1], "not a JSON object"),
        (b"{", "not JSON"),
        (b"\xff", "not JSON"),
    ],
)
def test_broken_metadata(tmp_path: Path, header: Any, reason: str) -> None:
    with pytest.raises(TraceError, match=reason):
        read_trace(save(tmp_path / "bad.parquet", table_of(), header))


def test_broken_schema(tmp_path: Path) -> None:
    path = tmp_path / "bad.parquet"
    for name in SCHEMA.names:
        with pytest.raises(TraceError, match=f"column {name} is missing"):
            read_trace(save(path, table_of().drop_columns([name])))
    place = SCHEMA.get_field_index("nbytes")
    for values, reason in (
        (["1500"] * 4, "column nbytes is string; it must be int64"),
        ([1500.0] * 4, "column nbytes is double"),
    ):
        with pytest.raises(TraceError, match=reason):
            read_trace(save(path, table_of().set_column(place, "nbytes", pa.array(values))))
    huge = pa.array([2**64 - 1] * 4, pa.uint64())
    with pytest.raises(TraceError, match="column nbytes"):
        read_trace(save(path, table_of().set_column(place, "nbytes", huge)))
    pq.write_table(table_of(), path)
    with pytest.raises(TraceError, match="no 'tensorpager' metadata"):
        read_trace(path)
    with pytest.raises(TraceError, match="no rows"):
        read_trace(save(path, table_of().slice(0, 0)))


def test_other_writers_encodings(tmp_path: Path) -> None:
    """Wider integers, dictionaries, large strings, several row groups, more columns."""
    table = table_of()
    for name, kind in (
        ("op", pa.int64()),
        ("tensor", pa.uint16()),
        ("op_name", pa.large_string()),
        ("duration_us", pa.float32()),
    ):
        column = table[name].cast(kind)
        table = table.set_column(table.schema.get_field_index(name), name, column)
    kind_column = table["kind"].dictionary_encode()
    table = table.set_column(table.schema.get_field_index("kind"), "kind", kind_column)
    table = table.append_column("extra", pa.array([1, 2, 3, 4]))
    table = table.replace_schema_metadata({"tensorpager": json.dumps(HEADER)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=1, use_dictionary=["kind"])
    assert_same(
        read_trace(tmp_path / "a.parquet"), read_trace(save(tmp_path / "b.parquet", table_of()))
    )


def test_no_file_no_parquet(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    with pytest.raises(TraceError, match="no such file"):
        read_trace(path)
    with pytest.raises(TraceError, match="a folder; name the trace in it"):
        read_trace(tmp_path)
    for content, what in (
        (b"", "an empty file, not a trace"),
        (b"PAR1", "not a whole Parquet file"),
        (b"op,tensor\n0,1\n" * 100, "a text file, not a trace"),
        (b'{"moves": []}', "a plan, not a trace"),
        (b"\x1f\x8b\x00", "a gzip file, not a trace"),
        (b"\x00\x01", "a binary file, not a trace"),
    ):
        path.write_bytes(content)
        with pytest.raises(TraceError, match=what):
            read_trace(path)


def test_unfinished_or_damaged_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_trace(path, sample())
    whole = path.read_bytes()
    for length in range(4, len(whole), 37):
        path.write_bytes(whole[:length])
        with pytest.raises(TraceError, match="not a whole Parquet file"):
            read_trace(path)
    generator = np.random.default_rng(0)
    refused = 0
    for _ in range(300):
        damaged = bytearray(whole)
        damaged[generator.integers(len(whole))] ^= int(generator.integers(1, 256))
        path.write_bytes(damaged)
        try:
            read_trace(path)
        except TraceError:
            refused += 1
    assert refused > 150  # the rest hit bytes without meaning, such as statistics and names


@given(st.lists(st.integers(0, 60), max_size=60), st.sampled_from([1, 10**6]))
@settings(derandomize=True, deadline=None)
def test_numbers_by_appearance(values: list[int], spread: int) -> None:
    numbers, first = number_by_appearance(np.array(values, np.int64) * spread)
    seen = list(dict.fromkeys(values))
    assert numbers.tolist() == [seen.index(value) for value in values]
    assert first.tolist() == [values.index(value) for value in seen]


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    count = draw(st.integers(1, 6))
    tensors = [
        (identity, draw(st.integers(1, 5000)), draw(st.booleans()))
        for identity in draw(st.permutations(range(count)))
    ]
    some = st.lists(st.integers(0, count - 1), max_size=3)
    ops = [
        (draw(st.sampled_from(["a", "b", ""])), draw(st.floats(0, 1e9)), draw(some), draw(some))
        for _ in range(draw(st.integers(1, 8)))
    ]
    names = {0: draw(st.text(max_size=5).filter(lambda text: text.isprintable()))}
    return make_trace(tensors, ops, page_size=draw(st.sampled_from([1, 999, 4096])), names=names)


@given(traces())
@examples(60)
def test_any_trace_comes_back(tmp_path_factory: pytest.TempPathFactory, trace: Trace) -> None:
    path = tmp_path_factory.mktemp("traces") / "a.parquet"
    write_trace(path, trace)
    assert_same(trace, read_trace(path))


def test_many_accesses(tmp_path: Path) -> None:
    """Columns at work: a fifth of a million accesses, compared as a whole."""
    ops, width = 40_000, 5
    accesses = ops * width
    number = np.arange(accesses) % 9_973
    nbytes = np.arange(9_973) * 1000 + 1
    trace = Trace(
        page_size=4096,
        op_names=[f"op {index % 50}" for index in range(ops)],
        op_start_us=np.arange(ops) * 2.0,
        op_duration_us=np.full(ops, 2.0),
        tensor_ids=np.arange(9_973)[::-1] * 3,
        tensor_names=[f"tensor.{index}" for index in range(9_973)],
        tensor_bytes=nbytes,
        tensor_kinds=["activation"] * 9_973,
        tensor_persistent=np.arange(9_973) % 2 == 0,
        access_op=np.repeat(np.arange(ops), width),
        access_tensor=number,
        access_mode=(np.arange(accesses) % 3 + 1).astype(np.int8),
        access_first_page=np.zeros(accesses, np.int64),
        access_page_count=-(-nbytes // 4096)[number],
    )
    write_trace(tmp_path / "a.parquet", trace)
    assert_same(trace, read_trace(tmp_path / "a.parquet"))
