"""Files that are nearly right, or made to do harm: read, or refused in one line, soon and cheaply.

``scripts/fuzz.py`` does the same for as long as it is let, guided by coverage.
"""

import gzip
import importlib.util
import json
import pickle
import resource
import struct
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorpager.planner.errors import HardwareError, PlanError, TraceError
from tensorpager.planner.hardware import decode_hardware
from tensorpager.planner.plan import decode_plan
from tensorpager.planner.shown import shown
from tensorpager.planner.trace import MAX_PAGES, make_trace
from tensorpager.planner.trace_file import METADATA_KEY, decode_trace, encode_trace, write_trace

ROOT = Path(__file__).parents[2]
EXAMPLES = 20
LIMIT_S, LIMIT_BYTES = 10, 2 << 30  # of a process that reads a small file


def _targets() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fuzz_targets", ROOT / "scripts/fuzz_targets.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


fuzz = _targets()
NAMES = tuple(fuzz.TARGETS)


@pytest.mark.parametrize("name", NAMES)
def test_the_seed_is_read(name: str) -> None:
    target = fuzz.TARGETS[name]
    assert fuzz.verdict(target, target.seed) == "read"


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=EXAMPLES)
@given(seed=st.integers(0, 1 << 32))
def test_what_is_nearly_right(name: str, seed: int) -> None:
    target = fuzz.TARGETS[name]
    fuzz.verdict(target, target.mutate(Random(seed)))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=3000)
@given(seed=st.integers(0, 1 << 62))
def test_what_is_nearly_right_at_length(name: str, seed: int) -> None:
    target = fuzz.TARGETS[name]
    fuzz.verdict(target, target.mutate(Random(seed)))


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=EXAMPLES // 3)
@given(content=st.binary(max_size=200))
def test_anything_at_all(name: str, content: bytes) -> None:
    fuzz.verdict(fuzz.TARGETS[name], content)


def test_mutations_reach_both_answers() -> None:
    for target in fuzz.TARGETS.values():
        answers = {fuzz.verdict(target, target.mutate(Random(seed))) for seed in range(25)}
        assert answers == {"read", "refused"}, target.name


def test_a_finding_is_a_finding() -> None:
    def broken(content: bytes) -> None:
        raise (KeyError if content == b"key" else TraceError)(content.decode())

    target = fuzz.Target("broken", b"", broken, lambda random: b"")
    assert fuzz.verdict(target, b"one line") == "refused"
    for content, finding in ((b"key", KeyError), (b"two\nlines", AssertionError)):
        with pytest.raises(finding):
            fuzz.verdict(target, content)
    with pytest.raises(AssertionError, match="characters"):
        fuzz.verdict(target, b"x" * 5000)


# What fuzzing has found, and what was made to do harm


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (f'device_bytes = {"9" * 5000}', "not TOML"),
        (f"device_bytes = {'9' * 400}", "more than a float holds"),
        (f'device_bytes = "{"9" * 400}.0GiB"', "too large"),
        (f'device_bytes = "{"x" * 5000}"', "is no size"),
        ("device_bytes = " + "[" * 5000, "not TOML"),
        ("device_bytes = 1\npage_size = 0.5", "page_size"),
        ("device_bytes = 1\nd2h_bytes_per_s = 1e-320", "less than a byte"),
        ("device_bytes = nan", "not a number"),
    ],
)  # fmt: skip
def test_hardware(content: str, reason: str) -> None:
    with pytest.raises(HardwareError, match=reason) as caught:
        decode_hardware(content.encode(), "machine.toml")
    assert len(str(caught.value)) < 500


def test_a_page_size_in_scientific_notation_is_whole() -> None:
    machine = decode_hardware(b"device_bytes = 1e10\npage_size = 2e6", "machine.toml")
    assert (machine.page_size, type(machine.page_size)) == (2_000_000, int)


def plan(**changes: Any) -> bytes:
    return json.dumps(json.loads(fuzz.TARGETS["plan"].seed) | changes).encode()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"version": ' + b"1" * 5000 + b"}", "not whole JSON"),
        (b"[" * 100_000, "JSON, not a plan"),
        (plan(device_bytes=10**400), "not a size in bytes"),
        (plan(device_bytes=float("nan")), "not a size in bytes"),
        (plan(page_size=10**30), "not a whole number"),
        (plan(moves=[[1 << 70, 0, 1, "host", "out", 0]]), "not a whole number"),
        (plan(moves=[[7, -1, 1, "host", "out", 0]]), "not a whole number"),
        (plan(moves=[[7, 0, 1, ["host"], "out", 0]]), "none of host, disk"),
        (plan(predicted={"iteration_us": 5}), "predicted is not an object with"),
        (plan(bound={"iteration_us": "fast", "percent_of_bound": 1}), "not a finite number"),
        (plan(extra=[1]), "extra .* is not an object"),
        (plan(policy=["lp"]), "policy .* is not a string"),
        (plan(start={"a": 1}), "'start' is not a list"),
        (plan(moves=[["x" * 9000]]), "is not a list of 6 values"),
    ],
)
def test_plans(content: bytes, reason: str) -> None:
    with pytest.raises(PlanError, match=reason) as caught:
        decode_plan(content, "plan.json")
    assert len(str(caught.value)) < 500


def test_sizes_that_add_up_to_more_than_64_bits() -> None:
    tensors, ops = [(0, 1 << 62, True), (1, 1 << 62, True)], [("op", 1.0, [0, 1], [])]
    trace = make_trace(tensors, ops, page_size=1 << 40)
    content = encode_trace(trace, "a trace")
    with pytest.raises(TraceError, match=r"tensors of 9\.22e\+18 bytes altogether"):
        decode_trace(content, "a trace")


def test_more_pages_than_can_be_counted() -> None:
    trace = make_trace([(0, MAX_PAGES, True)], [("op", 1.0, [0], [])], page_size=1)
    assert trace.countable_pages(1).tolist() == [MAX_PAGES]
    larger = make_trace([(0, MAX_PAGES + 1, True)], [("op", 1.0, [0], [])], page_size=1)
    with pytest.raises(TraceError, match=f"{MAX_PAGES + 1} pages of 1 bytes.*give larger pages"):
        larger.countable_pages(1)
    assert larger.countable_pages(2).tolist() == [MAX_PAGES // 2 + 1]


def test_values_in_messages_are_short() -> None:
    for value in ("a" * 9000, [["b" * 9000] * 90] * 90, {"c": [1] * 900}, 10**9000, b"d" * 9000):
        assert len(shown(value)) < 200
    assert shown("two\nlines") == "'two\\nlines'"
    assert shown(5) == "5"


# Small files that would take much: each read by a process with little memory and time


def write_bomb(path: Path, rows: int) -> None:
    """A trace of ``rows`` equal rows, which a few bytes say."""
    table = pq.read_table(pa.BufferReader(fuzz.TARGETS["trace"].seed))
    header = table.schema.metadata
    one = table.slice(0, 1)
    columns = {name: pa.repeat(one[name][0], rows) for name in one.column_names}
    large = pa.table(columns).replace_schema_metadata(header)
    pq.write_table(large, path, compression="zstd", write_statistics=False)


def claim_pages(path: Path) -> None:
    trace = make_trace([(0, 1 << 59, True)], [("op", 1.0, [0], [])], page_size=1)
    write_trace(path, replace(trace, access_page_count=np.array([1])))


def long_strings(path: Path) -> None:
    table = pq.read_table(pa.BufferReader(fuzz.TARGETS["trace"].seed))
    names = pa.array(["a" * (8 << 20)] * len(table), pa.large_string())
    index = table.column_names.index("op_name")
    table = table.set_column(index, "op_name", names).replace_schema_metadata(
        {METADATA_KEY: table.schema.metadata[METADATA_KEY]}
    )
    pq.write_table(table, path, compression="zstd", use_dictionary=["op_name"],
                   write_statistics=False)  # fmt: skip


def packed_zeros(path: Path) -> None:
    path.write_bytes(gzip.compress(b'{"schema": "' + bytes(16 << 20) + b'"}', 9))


def deep_json(path: Path) -> None:
    path.write_bytes(b'{"a":' * 100_000)


def long_claims(path: Path) -> None:
    path.write_bytes(b"\x80\x05" + pickle.BINBYTES8 + struct.pack("<Q", 1 << 62) + b"x.")


def huge_plan(path: Path) -> None:
    path.write_bytes(plan(moves=[[7, 0, 10**18, "host", "out", 1]], start=[[7, 0, 10**18, "disk"]]))


READ_TRACE = "from tensorpager.planner.trace_file import read_trace; t = read_trace(path)"
BOMBS: dict[str, tuple[Callable[[Path], None], str, int]] = {
    "rows": (lambda path: write_bomb(path, 1_000_000), READ_TRACE, 40 << 10),
    "pages": (claim_pages, f"{READ_TRACE}; t.countable_pages(t.page_size)", 10 << 10),
    "strings": (long_strings, READ_TRACE, 40 << 10),
    "gzip": (
        packed_zeros,
        "from tensorpager.planner.importers.g10 import load; load(path)",
        100 << 10,
    ),
    "nesting": (
        deep_json,
        "from tensorpager.planner.importers.torch_profiler import load; load(path)",
        1 << 20,
    ),
    "pickle": (
        long_claims,
        "from tensorpager.planner.importers.torch_snapshot import load; load(path)",
        1 << 10,
    ),
    "plan": (
        huge_plan,
        "import sys; sys.path.insert(0, 'scripts'); import fuzz_targets as f; "
        "f.TARGETS['plan'].read(path.read_bytes()); "
        "raise f.PagerError('infeasible, as it should be')",
        10 << 10,
    ),
}


def test_small_files_take_little(tmp_path: Path) -> None:
    """Memory by RLIMIT_DATA, time by RLIMIT_CPU: a process that needs more dies of it."""
    work = []
    for name, (make, read, most_bytes) in BOMBS.items():
        path = tmp_path / name
        make(path)
        assert path.stat().st_size <= most_bytes, name
        work.append((str(path), read))
    script = textwrap.dedent(
        """
        import json, sys
        from pathlib import Path
        from tensorpager.planner.errors import PagerError
        for name, code in json.loads(sys.argv[1]):
            path = Path(name)
            try:
                exec(code)
                print(f"{path.name} was read")
            except PagerError as error:
                print(f"{path.name} refused: {error}")
        """
    )

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (LIMIT_BYTES, LIMIT_BYTES))
        resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S))

    result = subprocess.run(
        [sys.executable, "-c", script, json.dumps(work)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        preexec_fn=limit,
        timeout=600,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == [f"{name} refused" for name in BOMBS]
    assert max(map(len, lines)) < 500


def test_rows_that_are_many_for_their_bytes_are_still_a_trace(tmp_path: Path) -> None:
    """A trace as regular as one can be is far from what is refused as a bomb."""
    ops = [("op", 1.0, [number % 7], []) for number in range(20_000)]
    tensors = [(number, 1000, True) for number in range(7)]
    trace = write_trace(tmp_path / "t", make_trace(tensors, ops, page_size=1000))
    assert np.array_equal(trace.access_tensor, np.arange(20_000) % 7)
    assert (tmp_path / "t").stat().st_size * 16 > 20_000
