"""``tensorpager perfetto``: valid, the same each time, and what the plan does."""

import gzip
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from tensorpager.planner.perfetto.picture import Picture
from tensorpager.planner.plan import Move, StartRun
from tensorpager.planner.simulator import simulate
from tensorpager.planner.tier_usage import tier_usage
from tensorpager.planner.timeline import timeline
from tensorpager.planner.trace import make_trace
from tensorpager.planner.trace_file import write_trace

from .command_line import MOVES, PAGE, refused, run
from .random_plans import case_of, choice_case_of

Event = dict[str, Any]


# --- the format ------------------------------------------------------------------------------


class Slice(NamedTuple):
    begin_ns: int
    end_ns: int
    event: Event


class Checked(NamedTuple):
    """The slices of each thread by its name, and counters as (ts, values)."""

    slices: dict[str, list[Event]]
    counters: dict[str, list[tuple[float, dict[str, float]]]]


def check(events: Iterable[Event]) -> Checked:
    """Reads events by the rules of the Trace Event Format, as strictly as Perfetto does: it turns
    times into whole nanoseconds rounded down, and drops slices of a thread that overlap without one
    being inside the other.
    """
    names: dict[tuple[int, int], str] = {}
    processes: set[int] = set()
    open_: defaultdict[tuple[int, int], list[Slice]] = defaultdict(list)
    slices: defaultdict[str, list[Event]] = defaultdict(list)
    counters: defaultdict[str, list[tuple[float, dict[str, float]]]] = defaultdict(list)
    series: dict[tuple[int, str], list[str]] = {}
    last = 0.0
    for event in events:
        assert isinstance(event["name"], str)
        assert event["name"].isprintable()
        assert event["name"]
        for key in ("pid", "tid"):
            assert type(event[key]) is int
            assert 0 <= event[key] < 1 << 32
        thread = event["pid"], event["tid"]
        if event["ph"] == "M":
            assert last == 0.0  # a name comes before what it names
            _check_metadata(event)
            if event["name"] == "process_name":
                assert event["pid"] not in processes
                processes.add(event["pid"])
            if event["name"] == "thread_name":
                assert thread not in names
                names[thread] = event["args"]["name"]
            continue
        assert event["pid"] in processes
        assert thread in names
        assert type(event["ts"]) is float
        assert math.isfinite(event["ts"])
        assert event["ts"] >= last >= 0
        last = event["ts"]
        now = int(event["ts"] * 1000.0)
        stack = open_[thread]
        if event["ph"] == "X":
            assert type(event["dur"]) is float
            assert event["dur"] >= 0
            end = now + int(event["dur"] * 1000.0)
            while stack and stack[-1].end_ns <= now:
                stack.pop()
            assert not stack or end <= stack[-1].end_ns, (event, stack[-1])
            stack.append(Slice(now, end, event))
            slices[names[thread]].append(event)
            _check_args(event["args"])
        else:
            assert event["ph"] == "C"
            key = event["pid"], event["name"]
            assert list(event["args"]) == series.setdefault(key, list(event["args"]))
            for value in event["args"].values():
                assert type(value) in (int, float)
                assert 0 <= value < math.inf
            samples = counters[event["name"]]
            assert not samples or samples[-1][0] < event["ts"]
            samples.append((event["ts"], event["args"]))
    return Checked(slices, counters)


def _check_metadata(event: Event) -> None:
    (key, value), *more = event["args"].items()
    assert not more
    expected = {
        "process_name": ("name", str),
        "process_labels": ("labels", str),
        "thread_name": ("name", str),
        "thread_sort_index": ("sort_index", int),
    }[event["name"]]
    assert (key, type(value)) == expected
    assert value != ""


def _check_args(args: Event) -> None:
    for key, value in args.items():
        assert type(key) is str
        assert type(value) in (str, int, float)
        assert not isinstance(value, float) or math.isfinite(value)


def read(path: Path) -> dict[str, Any]:
    def no_constants(text: str) -> None:
        raise AssertionError(f"{text} is no JSON")

    content = path.read_bytes()
    if path.suffix == ".gz":
        content = gzip.decompress(content)
    document = json.loads(content, parse_constant=no_constants)
    assert isinstance(document, dict)
    return document


# --- a plan by hand --------------------------------------------------------------------------


def perfetto(*arguments: object, output: Path) -> dict[str, Any]:
    result = run("perfetto", *arguments, "-o", output)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith(f"{output}: ")
    return read(output)


def spans(slices: list[Event]) -> list[tuple[str, float, float]]:
    return [(e["name"], e["ts"], round(e["ts"] + e["dur"], 2)) for e in slices]


def test_a_plan_by_hand(
    trace_path: Path, machine_path: Path, save_plan: Callable[..., Path], tmp_path: Path
) -> None:
    """The weight leaves for nothing while 'fill' runs (its copy is good), and comes back in 20 µs,
    for which 'update' waits."""
    plan = save_plan(MOVES)
    document = perfetto(trace_path, plan, "--hardware", machine_path, output=tmp_path / "o.json")
    assert document["displayTimeUnit"] == "ms"
    assert document["otherData"]["policy"] == "by hand"
    found = check(document["traceEvents"])
    assert {name: spans(slices) for name, slices in found.slices.items()} == {
        "ops": [("forward", 0.0, 10.0), ("fill", 10.0, 20.0), ("update", 40.0, 50.0)],
        "stalls": [("waits for weight", 20.0, 40.0)],
        "host-in": [("weight", 20.0, 40.0)],
    }
    assert found.slices["host-in"][0]["args"] == {
        "tensor": "weight",
        "number": 0,
        "kind": "parameter",
        "tensor bytes": 2 * PAGE,
        "bytes": 2 * PAGE,
        "pages": "0 to 1",
        "place": "host → device",
        "move": 1,
        "queued before op": 2,
    }
    assert found.slices["ops"][1]["args"] == {
        "op": 1, "tensors": 1, "bytes": 4 * PAGE, "writes": "tensor 1",
    }  # fmt: skip
    assert found.slices["ops"][2]["args"]["waited us"] == 20.0
    assert found.counters["device bytes"] == [
        (0.0, {"parameter": 2000, "activation": 0}),
        (10.0, {"parameter": 0, "activation": 4000}),
        (20.0, {"parameter": 1000, "activation": 0}),
        (30.0, {"parameter": 2000, "activation": 0}),
        (50.0, {"parameter": 2000, "activation": 0}),
    ]
    assert found.counters["device budget"] == [(0.0, {"bytes": 4000}), (50.0, {"bytes": 4000})]
    assert found.counters["host bytes"] == [(0.0, {"bytes": 2000}), (50.0, {"bytes": 2000})]


def test_an_op_that_waits_for_the_frames_of_an_out(
    tmp_path: Path, machine_path: Path, save_plan: Callable[..., Path]
) -> None:
    """The weight is written, so it has to be copied out; 'fill' waits for its frames."""
    trace = make_trace(
        [(0, 2 * PAGE, True), (1, 4 * PAGE, False)],
        [("forward", 10.0, [], [0]), ("fill", 10.0, [], [1]), ("update", 10.0, [0], [])],
        page_size=PAGE,
    )
    write_trace(tmp_path / "t.parquet", trace)
    plan = save_plan(MOVES)
    arguments = (tmp_path / "t.parquet", plan, "--hardware", machine_path)
    found = check(perfetto(*arguments, output=tmp_path / "o.json.gz")["traceEvents"])
    assert spans(found.slices["host-out"]) == [("tensor 0", 10.0, 30.0)]
    assert [e["name"] for e in found.slices["stalls"]] == [
        "waits for free frames", "waits for tensor 0",
    ]  # fmt: skip
    host = dict(found.counters["host bytes"])
    assert [host[us]["bytes"] for us in (0.0, 10.0, 20.0)] == [0, 1000, 2000]


def test_what_goes_on_into_the_next_iteration_is_seen_at_its_begin(
    tmp_path: Path, machine_path: Path, save_plan: Callable[..., Path]
) -> None:
    """Each iteration ends 5 µs after its last 20 µs transfer began; 'use' waits for the rest."""
    trace = make_trace(
        [(0, 2 * PAGE, True)],
        [("use", 10.0, [], [0]), ("rest", 30.0, [], []), ("last", 5.0, [], [])],
        page_size=PAGE,
    )
    write_trace(tmp_path / "t.parquet", trace)
    plan = save_plan([Move(0, 0, 2, "host", "out", 1), Move(0, 0, 2, "host", "in", 2)])
    arguments = (tmp_path / "t.parquet", plan, "--hardware", machine_path)
    found = check(perfetto(*arguments, output=tmp_path / "o.json")["traceEvents"])
    assert spans(found.slices["stalls"]) == [("waits for tensor 0", 0.0, 15.0)]
    assert spans(found.slices["host-out"]) == [("tensor 0", 25.0, 45.0)]
    assert [span[1:] for span in spans(found.slices["host-in"])] == [(0.0, 15.0), (55.0, 60.0)]


def test_a_disk_is_slower_than_the_link(
    tmp_path: Path, machine_path: Path, save_plan: Callable[..., Path]
) -> None:
    trace = make_trace([(0, 2 * PAGE, True)], [("use", 10.0, [], [0]), ("rest", 90.0, [], [])],
                       page_size=PAGE)  # fmt: skip
    write_trace(tmp_path / "t.parquet", trace)
    moves = [Move(0, 0, 2, "disk", "out", 1), Move(0, 0, 2, "disk", "in", 0)]
    plan = save_plan(moves, start=[StartRun(0, 0, 2, "disk")])
    document = perfetto(
        tmp_path / "t.parquet", plan, "--hardware", machine_path, output=tmp_path / "o.json"
    )
    found = check(document["traceEvents"])
    assert spans(found.slices["disk-in"]) == [("tensor 0", 0.0, 80.0)]
    assert spans(found.slices["disk-out"]) == [("tensor 0", 90.0, 170.0)]
    assert spans(found.slices["stalls"]) == [("waits for tensor 0", 0.0, 80.0)]
    assert found.slices["stalls"][0]["args"]["channel"] == "disk-in"
    assert [row["bytes"] for _, row in found.counters["disk bytes"]] == [2000, 0, 1000, 2000, 2000]


def test_without_a_plan(trace_path: Path, tmp_path: Path) -> None:
    document = perfetto(trace_path, output=tmp_path / "o.json")
    found = check(document["traceEvents"])
    assert spans(found.slices["ops"]) == [
        ("forward", 0.0, 10.0), ("fill", 10.0, 20.0), ("update", 20.0, 30.0),
    ]  # fmt: skip
    assert set(found.slices) == {"ops"}
    assert set(found.counters) == {"device bytes", "device bytes, all kinds"}
    assert [row["bytes"] for _, row in found.counters["device bytes, all kinds"]] == [
        2000, 6000, 2000, 2000,
    ]  # fmt: skip


def test_the_same_file_each_time(
    trace_path: Path, machine_path: Path, save_plan: Callable[..., Path], tmp_path: Path
) -> None:
    plan = save_plan(MOVES)
    for name in ("o.json", "o.json.gz"):
        contents = []
        for _ in range(2):
            perfetto(trace_path, plan, "--hardware", machine_path, output=tmp_path / name)
            contents.append((tmp_path / name).read_bytes())
        assert contents[0] == contents[1]


def test_odd_names_and_tiny_things(tmp_path: Path) -> None:
    names = ["\x1b[31mred\n", "<script>alert(1)</script>", "Größe 張量 🙂", ""]
    trace = make_trace(
        [(number, 1, number == 0) for number in range(4)],
        [(name, number * 1e-4, [], [number]) for number, name in enumerate(names)],
        page_size=2 << 20,
        names={number: name for number, name in enumerate(names) if name},
    )
    write_trace(tmp_path / "t.parquet", trace)
    document = perfetto(tmp_path / "t.parquet", output=tmp_path / "o.json")
    found = check(document["traceEvents"])
    shown = [event["name"] for event in found.slices["ops"]]
    assert shown == ["?[31mred?", "<script>alert(1)</script>", "Größe 張量 🙂", "op 3"]


def test_refusals(
    trace_path: Path, machine_path: Path, save_plan: Callable[..., Path], tmp_path: Path
) -> None:
    plan, out = save_plan(MOVES), ("-o", tmp_path / "o.json")
    assert "give --hardware too" in refused("perfetto", trace_path, plan, *out)
    assert "name it with --hardware" in refused("perfetto", trace_path, "--d2h", "3GB", *out)
    assert f"{plan}: the plan is infeasible on this machine: op 1" in refused(
        "perfetto", trace_path, save_plan([]), "--hardware", machine_path, *out
    )
    save_plan(MOVES, page_size=2 * PAGE)
    assert "--page-size 2000" in refused(
        "perfetto", trace_path, plan, "--hardware", machine_path, *out
    )
    assert "no such file" in refused("perfetto", tmp_path / "no.parquet", *out)
    assert "there is no folder" in refused("perfetto", trace_path, "-o", tmp_path / "no" / "o.json")
    assert not (tmp_path / "o.json").exists()


# --- random plans ----------------------------------------------------------------------------


def test_random_plans_are_drawn_by_the_rules() -> None:
    """And the bytes drawn on the channels are those that the simulator counts."""
    drawn: Counter[str] = Counter()
    for seed in range(80):
        case = case_of(seed)
        result = simulate(case.trace, case.hardware, case.plan)
        if not result.feasible:
            continue
        assert result.predicted is not None
        line = timeline(case.trace, case.plan, case.hardware)
        found = check(Picture(line).events())
        assert len(found.slices["ops"]) == case.trace.ops
        assert len(found.slices["stalls"]) == len(line.stalls)
        drawn.update({name: len(slices) for name, slices in found.slices.items()})
    assert set(drawn) >= {"ops", "stalls", "host-out", "disk-out", "disk-in", "host-in"}


def test_slots_agree_with_the_simulators_peaks() -> None:
    """Their curve has the same peak, whatever went at once on the way to it."""
    compared = 0
    for seed in range(150):
        case = case_of(seed)
        result = simulate(case.trace, case.hardware, case.plan)
        if result.predicted is None:
            continue
        used = tier_usage(timeline(case.trace, case.plan, case.hardware))
        for tier in ("host", "disk"):
            peak = getattr(result.predicted, f"peak_{tier}_bytes")
            times, bytes_used = used.get(tier, (np.zeros(1), np.zeros(1, np.int64)))
            assert bytes_used.max() == peak, (seed, tier)
            assert bytes_used.min() >= 0
            assert times[0] == 0.0
            assert (np.diff(times) > 0).all()
            compared += peak > 0
    assert compared > 60


def test_slots_of_choices_are_within_the_simulators_peaks() -> None:
    """What is discarded gives its slot back, what the host writes keeps its own; some plans have
    their peak before they are steady."""
    same = compared = 0
    for seed in range(600):
        case = choice_case_of(seed)
        result = simulate(case.trace, case.hardware, case.plan)
        if result.predicted is None or not case.plan.has_choices:
            continue
        used = tier_usage(timeline(case.trace, case.plan, case.hardware))
        for tier in ("host", "disk"):
            peak = getattr(result.predicted, f"peak_{tier}_bytes")
            times, bytes_used = used.get(tier, (np.zeros(1), np.zeros(1, np.int64)))
            assert 0 <= bytes_used.min() <= bytes_used.max() <= peak, (seed, tier)
            assert times[0] == 0.0
            same += int(bytes_used.max() == peak > 0)
            compared += int(peak > 0)
    assert same >= 0.9 * compared > 30


@pytest.mark.slow
def test_many_ops(tmp_path: Path) -> None:
    """100,000 ops and 50,000 tensors; counters are thinned."""
    trace = make_trace(
        [(number, 5 * PAGE, number == 0) for number in range(50_000)],
        [(f"op {k}", 1.0, [k // 2], [k // 2 + 1][: k < 99_998]) for k in range(100_000)],
        page_size=PAGE,
    )
    write_trace(tmp_path / "t.parquet", trace)
    found = check(perfetto(tmp_path / "t.parquet", output=tmp_path / "o.json.gz")["traceEvents"])
    assert len(found.slices["ops"]) == 100_000
    assert 10_000 < len(found.counters["device bytes"]) <= 20_001
