"""The parsers that read other people's files, as targets for fuzzing: seeds, mutations, verdicts.

A target reads bytes. Reading them and using what was read may raise a ``PagerError`` of one short
line; anything else that is raised, a warning too, is a finding. Used by ``scripts/fuzz.py`` and by
``tests/planner/test_fuzz.py``.
"""

from __future__ import annotations

import copy
import io
import json
import math
import pickle
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tensorpager.planner import lifetimes
from tensorpager.planner.errors import PagerError
from tensorpager.planner.hardware import Hardware, decode_hardware, describe
from tensorpager.planner.importers import g10, torch_profiler, torch_snapshot
from tensorpager.planner.plan import Move, Plan, decode_plan, plan_to_json
from tensorpager.planner.simulator import simulate
from tensorpager.planner.trace import Trace, make_trace
from tensorpager.planner.trace_file import SCHEMA, decode_trace, encode_trace
from tensorpager.planner.validator import validate

PAGE = 1000
MAX_MESSAGE = 2000
MACHINE = Hardware(4 * PAGE, 10**6, math.inf, 1e8, 1e8, 25e6, 25e6, page_size=PAGE)
WHERE = "the file"
ODD: tuple[Any, ...] = (
    *(0, 1, -1, 2, 255, 1 << 31, 1 << 53, 1 << 62, (1 << 63) - 1, 1 << 63, 1 << 64, 10**18),
    *(10**400, 0.5, -0.0, 1e-320, 1e18, 1e308, -1e308, math.inf, -math.inf, math.nan),
    *("", "inf", "nan", "host", "two\nlines", "\x00", "é" * 50, "a" * 3000, "9" * 400 + ".0"),
    *(None, True, False, [], {}, [[]], {"": None}, [0] * 50, {"a": {"b": [1, {"c": 2}]}}),
)


@dataclass(frozen=True)
class Target:
    """``read`` parses bytes and uses the result; ``mutate`` makes bytes that are nearly right."""

    name: str
    seed: bytes
    read: Callable[[bytes], object]
    mutate: Callable[[Random], bytes]


def verdict(target: Target, content: bytes) -> str:
    """``"read"``, or ``"refused"``; raises what the target should not have raised."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            target.read(content)
        except PagerError as error:
            message = str(error)
            assert message.strip(), "an error without a message"
            assert len(message.splitlines()) == 1, f"more than one line: {message!r}"
            assert len(message) <= MAX_MESSAGE, f"{len(message)} characters: {message[:200]!r}"
            return "refused"
    return "read"


# --- mutations -------------------------------------------------------------------------------


def odd_tree(tree: Any, random: Random) -> Any:
    """A copy of a JSON tree with one to three things wrong."""
    tree = json.loads(json.dumps(tree))
    for _ in range(random.choice((1, 1, 2, 3))):
        places = list(_places(tree))
        if not places:
            return _odd(random)
        parent, key = random.choice(places)
        change = random.randrange(6)
        if change == 0:
            del parent[key]
        elif change == 1:
            other, its_key = random.choice(places)
            parent[key] = json.loads(json.dumps(other[its_key]))
        elif change == 2 and isinstance(parent, list):
            parent.insert(key, json.loads(json.dumps(parent[key])))
        elif change == 3 and isinstance(parent[key], int | float):
            parent[key] = parent[key] * random.choice((-1, 2, 10**3, 10**9)) + random.randrange(3)
        else:
            parent[key] = _odd(random)
        if not isinstance(tree, list | dict):
            break
    return tree


def _odd(random: Random) -> Any:
    return copy.deepcopy(random.choice(ODD))


def _places(tree: Any) -> Any:
    pairs = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else ()
    )
    for key, value in list(pairs):
        yield tree, key
        yield from _places(value)


def odd_bytes(content: bytes, random: Random) -> bytes:
    """``content`` with a few bytes changed, left out or put in; often with none."""
    data = bytearray(content)
    for _ in range(random.choice((0, 0, 0, 1, 3))):
        at = random.randrange(len(data) + 1)
        match random.randrange(4):
            case 0:
                data[at : at + 1] = bytes([random.randrange(256)])
            case 1:
                del data[at : at + random.choice((1, 4, 40))]
            case 2:
                data[at:at] = random.randbytes(random.choice((1, 4)))
            case _:
                del data[at:]
    return bytes(data)


def _json_mutation(tree: Any) -> Callable[[Random], bytes]:
    return lambda random: odd_bytes(json.dumps(odd_tree(tree, random)).encode(), random)


# --- traces ----------------------------------------------------------------------------------


def small_trace() -> Trace:
    return make_trace(
        [(7, 2500, True), (3, 4 * PAGE, False), (5, 1, False)],
        [
            ("first", 2.0, [7], [3]),
            ("idle", 1.0, [], []),
            ("both", 0.0, [3, 7], [7, 5]),
            ("last", 3.5, [5], []),
        ],
        page_size=PAGE,
        names={7: "layer.weight"},
        source="by hand",
        metadata={"note": {"a": [1, 2]}},
    )


def use_trace(trace: Trace) -> None:
    """What every command does with a trace."""
    lifetimes.live_pages(trace, trace.page_size)
    lifetimes.gaps(trace, trace.page_size)
    decode_trace(encode_trace(trace, WHERE), WHERE)
    simulate(
        trace,
        MACHINE.with_(page_size=trace.page_size),
        Plan("none", trace.page_size, *[math.inf] * 3, []),
    )


def _read_trace(content: bytes) -> None:
    use_trace(decode_trace(content, WHERE))


_TABLE = pq.read_table(pa.BufferReader(encode_trace(small_trace(), WHERE)))


def odd_trace(random: Random) -> bytes:
    """A Parquet file with an odd value, column, type or header; then perhaps odd bytes."""
    columns = {name: _TABLE[name].to_pylist() for name in SCHEMA.names}
    header = json.loads(_TABLE.schema.metadata[b"tensorpager"])
    for _ in range(random.choice((0, 1, 1, 2))):
        name = random.choice(SCHEMA.names)
        values = columns[name]
        if random.random() < 0.3:
            values[:] = [random.choice(ODD)] * len(values)
        else:
            values[random.randrange(len(values))] = random.choice((*ODD, *values))
    if random.random() < 0.4:
        header = odd_tree(header, random)
    arrays = {name: _array(values, name) for name, values in columns.items()}
    if random.random() < 0.1:
        del arrays[random.choice(SCHEMA.names)]
    table = pa.table(arrays)
    table = table.replace_schema_metadata({"tensorpager": json.dumps(header)})
    sink = io.BytesIO()
    packing = random.choice(("zstd", "none", "snappy"))
    pq.write_table(table, sink, compression=packing, write_page_checksum=random.random() < 0.5)
    return odd_bytes(sink.getvalue(), random)


def _array(values: list[Any], name: str) -> pa.Array:
    for kind in (SCHEMA.field(name).type, pa.int64(), pa.uint64(), pa.float64(), pa.string()):
        try:
            return pa.array(values, kind)
        except (pa.ArrowException, OverflowError, TypeError, ValueError):
            continue
    return pa.array([str(value)[:5000] for value in values])


# --- plans and machines ----------------------------------------------------------------------

_MOVES = [Move(7, 0, 3, "host", "out", 1), Move(7, 0, 3, "host", "in", 2)]
_PLAN = plan_to_json(Plan("by hand", PAGE, 4 * PAGE, 10**6, math.inf, _MOVES, extra={"a": 1}))
_PLAN["predicted"] = dict.fromkeys(
    ("iteration_us", "ideal_us", "stall_us", "peak_device_bytes", "peak_host_bytes",
     "peak_disk_bytes", "bytes_out", "bytes_in", "disk_bytes_written"), 5
)  # fmt: skip
_PLAN["bound"] = {"iteration_us": 1.5, "percent_of_bound": 99.0}
_PLAN["start"] = [[7, 0, 1, "disk"]]


def _read_plan(content: bytes) -> None:
    plan = decode_plan(content, WHERE)
    again = decode_plan(
        json.dumps(plan_to_json(replace(plan, extra={})), allow_nan=False).encode(), WHERE
    )
    assert again.moves == plan.moves
    assert simulate(small_trace(), MACHINE, plan).feasible in (True, False)
    validate(small_trace(), MACHINE, plan)
    if plan.predicted is not None and plan.bound is not None:
        f"{plan.predicted.percent_of_ideal:.2f} {plan.bound.percent_of_bound:.2f}"


_MACHINE_KEYS = (
    *("device_bytes", "host_bytes", "disk_bytes", "d2h_bytes_per_s", "h2d_bytes_per_s"),
    *("disk_read_bytes_per_s", "disk_write_bytes_per_s", "transfer_latency_us", "page_size"),
)
_VALUES = ('"24GiB"', "1e10", "65536", '"inf"', "1.5", "25e9", "2000")
_ODD_TOML = (
    *("0", "-1", "nan", "inf", "-inf", "1e400", "1979-05-27", "true", "[1]", "{a = 1}", '""'),
    *("9" * 400, "9" * 5000, f'"{"9" * 400}.0 GiB"', f'"{"9" * 5000}"', "0x" + "f" * 40, "'a\tb'"),
    *("[" * 3000, "{a=" * 3000, '"""a\nb"""', "1e308", "1e-320"),
)
_HARDWARE = "\n".join(
    f"{key} = {value}" for key, value in zip(_MACHINE_KEYS, [*_VALUES, "10", "65536"], strict=True)
)


def odd_hardware(random: Random) -> bytes:
    keys = random.sample(_MACHINE_KEYS, random.randrange(1, len(_MACHINE_KEYS) + 1))
    lines = [f"{key} = {random.choice(_VALUES)}" for key in keys]
    for _ in range(random.choice((0, 1, 1, 2))):
        key = random.choice((*_MACHINE_KEYS, "a.b", '"two\\nlines"', "[x", "b" * 4000))
        lines.append(f"{key} = {random.choice(_ODD_TOML)}")
    return odd_bytes("\n".join(lines).encode(), random)


def _read_hardware(content: bytes) -> None:
    machine = decode_hardware(content, WHERE)
    describe(machine)
    assert all(n >= 0 for n in (machine.device_pages, machine.host_pages, machine.disk_pages))
    if machine.page_size >= PAGE:
        plan = Plan("none", int(machine.page_size), *[math.inf] * 3, [])
        simulate(small_trace(), machine, plan)


# --- importers -------------------------------------------------------------------------------

_FOLDER = tempfile.TemporaryDirectory(prefix="tensorpager-fuzz-")


def _imported(load: Callable[[Path, int], Trace]) -> Callable[[bytes], None]:
    path = Path(_FOLDER.name, "input")

    def read(content: bytes) -> None:
        path.write_bytes(content)
        use_trace(load(path, PAGE))

    return read


_G10 = {
    "schema": "g10-neutral-1",
    "workload": "tiny",
    "tensors": [[4, 2500, 1], [2, 1000, 0], [9, 7, 0], [8, 50, 1]],
    "kernels": [
        [0, "Gather", 5.5, 50.0, 70.0, 4096, [4], [2]],
        [1, "Add", 2, 3.0, 4.0, 0, [2, 4], [2, 8]],
    ],
}


def _call(name: str, ts: float, dur: float, *shapes: list[int]) -> dict[str, Any]:
    arguments = {
        "Input Dims": list(shapes),
        "Input type": ["float"] * len(shapes),
        "External id": 3,
    }
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 1, "ts": ts, "dur": dur,
            "args": arguments}  # fmt: skip


def _memory(ts: float, address: int, nbytes: int, total: int = 0) -> dict[str, Any]:
    arguments = {"Addr": address, "Bytes": nbytes, "Device Type": 0, "Device Id": 0}
    return {
        "ph": "i",
        "name": "[memory]",
        "ts": ts,
        "args": {**arguments, "Total Allocated": total},
    }


_PROFILE = {
    "traceEvents": [
        _call("aten::randn", 100.0, 10.0),
        _memory(105.0, 1, 400, 900),
        _call("aten::linear", 120.0, 30.0, [10, 10], [5, 10]),
        _call("aten::addmm", 125.0, 20.0, [10, 10], [10, 5]),
        _memory(126.0, 2, 200),
        _call("aten::relu_", 145.0, 10.0, [10, 5]),
        _memory(160.0, 1, -400),
        {
            "ph": "X",
            "cat": "kernel",
            "name": "k",
            "ts": 130.0,
            "dur": 4.0,
            "args": {"External id": 3},
        },
        {"ph": "X", "name": "ProfilerStep#1", "ts": 90.0, "dur": 100.0},
    ]
}


def _events() -> list[dict[str, Any]]:
    events, open_ = [], []
    for step in range(24):
        size = 512 + 64 * (step % 4)
        frames = [{"name": "forward", "filename": "/src/model.py", "line": step % 4}]
        event = {"action": "alloc", "addr": 4096 * step, "size": size, "time_us": 10**15 + step}
        events.append({**event, "frames": frames})
        open_.append(event)
        if len(open_) == 4:
            events += [{**old, "action": "free_completed"} for old in reversed(open_)]
            open_ = []
    return events


_BLOCK = {"address": 1, "size": 600, "requested_size": 512, "state": "active_allocated"}
_SNAPSHOT = {
    "segments": [{"device": 0, "address": 1, "blocks": [_BLOCK]}],
    "device_traces": [_events(), []],
}


def odd_snapshot(random: Random) -> bytes:
    tree = odd_tree(_SNAPSHOT, random) if random.random() < 0.8 else _SNAPSHOT
    return odd_bytes(pickle.dumps(tree, random.choice((2, 3, 4, 5))), random)


TARGETS = {
    target.name: target
    for target in (
        Target("trace", encode_trace(small_trace(), WHERE), _read_trace, odd_trace),
        Target("plan", json.dumps(_PLAN).encode(), _read_plan, _json_mutation(_PLAN)),
        Target("hardware", _HARDWARE.encode(), _read_hardware, odd_hardware),
        Target("g10", json.dumps(_G10).encode(), _imported(g10.load), _json_mutation(_G10)),
        Target("torch-profiler", json.dumps(_PROFILE).encode(), _imported(torch_profiler.load),
               _json_mutation(_PROFILE)),
        Target("torch-snapshot", pickle.dumps(_SNAPSHOT), _imported(torch_snapshot.load),
               odd_snapshot),
    )
}  # fmt: skip
