"""``tensorpager perfetto``: valid, the same each time, and what the plan does."""

import gzip
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from tensorpager.planner.importers import torch_profiler
from tensorpager.planner.perfetto.clock import Clock, steady
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


class Flow(NamedTuple):
    name: str
    source: Event
    target: Event


class Checked(NamedTuple):
    """The slices of each thread by its name, flows, and counters as (ts, values)."""

    slices: dict[str, list[Event]]
    flows: list[Flow]
    counters: dict[str, list[tuple[float, dict[str, float]]]]


def check(events: Iterable[Event]) -> Checked:
    """Reads events by the rules of the Trace Event Format, as strictly as Perfetto does: it turns
    times into whole nanoseconds rounded down, drops slices of a thread that overlap without one
    being inside the other, and ties a flow to the slice that is open on its thread when it comes.
    """
    names: dict[tuple[int, int], str] = {}
    processes: set[int] = set()
    open_: defaultdict[tuple[int, int], list[Slice]] = defaultdict(list)
    slices: defaultdict[str, list[Event]] = defaultdict(list)
    sources: dict[tuple[Any, ...], Event] = {}
    flows: dict[tuple[Any, ...], Flow] = {}
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
        elif event["ph"] == "C":
            key = event["pid"], event["name"]
            assert list(event["args"]) == series.setdefault(key, list(event["args"]))
            for value in event["args"].values():
                assert type(value) in (int, float)
                assert 0 <= value < math.inf
            samples = counters[event["name"]]
            assert not samples or samples[-1][0] < event["ts"]
            samples.append((event["ts"], event["args"]))
        else:
            assert event["ph"] in ("s", "f")
            assert stack, event
            assert stack[-1].begin_ns <= now <= stack[-1].end_ns, (event, stack[-1])
            identity = event["cat"], event["name"], event["id"]
            if event["ph"] == "s":
                assert identity not in sources
                sources[identity] = stack[-1].event
            else:
                assert event["bp"] == "e"  # to the slice around it, not to the next one
                assert identity not in flows
                flows[identity] = Flow(event["name"], sources[identity], stack[-1].event)
    assert flows.keys() == sources.keys()
    return Checked(slices, list(flows.values()), counters)


def _check_metadata(event: Event) -> None:
    (key, value), *more = event["args"].items()
    assert not more
    expected = {
        "process_name": ("name", str),
        "process_labels": ("labels", str),
        "process_sort_index": ("sort_index", int),
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
    assert [(f.name, f.source["name"], f.target["name"]) for f in found.flows] == [
        ("waits for it", "weight", "update")
    ]
    assert found.counters["device bytes"] == [
        (0.0, {"parameter": 2000, "activation": 0}),
        (10.0, {"parameter": 0, "activation": 4000}),
        (20.0, {"parameter": 1000, "activation": 0}),
        (30.0, {"parameter": 2000, "activation": 0}),
        (50.0, {"parameter": 2000, "activation": 0}),
    ]
    assert found.counters["device budget"] == [(0.0, {"bytes": 4000}), (50.0, {"bytes": 4000})]
    assert found.counters["host bytes"] == [(0.0, {"bytes": 2000}), (50.0, {"bytes": 2000})]
    assert found.counters["link in, GB/s"] == [
        (0.0, {"host": 0.0}), (20.0, {"host": 0.1}), (40.0, {"host": 0.0}), (50.0, {"host": 0.0}),
    ]  # fmt: skip


def test_an_out_leads_to_the_op_that_waits_for_its_frames(
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
    document = perfetto(
        tmp_path / "t.parquet", plan, "--hardware", machine_path, "--iterations", 2,
        output=tmp_path / "o.json.gz",
    )  # fmt: skip
    found = check(document["traceEvents"])
    assert spans(found.slices["host-out"]) == [("tensor 0", 10.0, 30.0), ("tensor 0", 80.0, 100.0)]
    assert [e["name"] for e in found.slices["stalls"]] == 2 * [
        "waits for free frames", "waits for tensor 0",
    ]  # fmt: skip
    assert sorted((f.name, f.source["ts"], f.target["name"]) for f in found.flows) == [
        ("waits for it", 40.0, "update"),
        ("waits for it", 110.0, "update"),
        ("waits for its frames", 10.0, "fill"),
        ("waits for its frames", 80.0, "fill"),
    ]
    assert [e["args"]["iteration"] for e in found.slices["ops"]] == [0, 0, 0, 1, 1, 1]
    host = dict(found.counters["host bytes"])
    assert [host[us]["bytes"] for us in (0.0, 10.0, 20.0, 70.0)] == [0, 1000, 2000, 0]


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
    assert [(f.source["ts"], f.target["ts"]) for f in found.flows] == [(0.0, 15.0)]
    two = (*arguments, "--iterations", 2)
    found = check(perfetto(*two, output=tmp_path / "o.json")["traceEvents"])
    assert [span[1:] for span in spans(found.slices["host-in"])] == [
        (0.0, 15.0), (55.0, 75.0), (115.0, 120.0),
    ]  # fmt: skip
    assert [(f.source["ts"], f.target["ts"]) for f in found.flows] == [(0.0, 15.0), (55.0, 75.0)]


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
    assert (90.0, {"disk": 0.025}) in found.counters["link out, GB/s"]
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
    assert "name the plan's file too" in refused(
        "perfetto", trace_path, "--hardware", machine_path, *out
    )
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
        for iterations in (1, 3):
            picture = Picture(line, steady(line, iterations), iterations)
            found = check(picture.events())
            assert len(found.slices["ops"]) == iterations * case.trace.ops
            assert len(found.slices["stalls"]) == iterations * len(line.stalls)
            drawn.update({name: len(slices) for name, slices in found.slices.items()})
            drawn.update(flow.name for flow in found.flows)
            for flow in found.flows:
                assert flow.source["ts"] + flow.source["dur"] <= flow.target["ts"]
    tracks = {"ops", "stalls", "host-out", "disk-out", "disk-in", "host-in"}
    assert set(drawn) >= {*tracks, "waits for it", "uses it"}


def test_slots_agree_with_the_simulators_peaks() -> None:
    """Counted from the transfers, the writes and the drops alone."""
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


def test_clock_keeps_to_its_knots() -> None:
    clock = Clock(np.array([0.0, 10.0, 10.0, 20.0]), np.array([5.0, 15.0, 40.0, 60.0]))
    at = np.array([-1.0, 0.0, 5.0, 10.0, 15.0, 20.0, 21.0])
    assert clock.begin(at).tolist() == [4.0, 5.0, 10.0, 40.0, 50.0, 60.0, 61.0]
    assert clock.end(at).tolist() == [4.0, 5.0, 10.0, 15.0, 50.0, 60.0, 61.0]


# --- joined with a profile -------------------------------------------------------------------


def gpu_profile() -> list[Event]:
    """Three calls in 6 µs whose kernels run much later, the second call without any."""

    def call(number: int, name: str, ts: float) -> Event:
        return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 7, "tid": 7, "ts": ts, "dur": 1.0,
                "args": {"External id": number, "Input Dims": [], "Input type": []}}  # fmt: skip

    def kernel(number: int, ts: float, dur: float) -> Event:
        return {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": ts, "dur": dur,
                "args": {"External id": number}}  # fmt: skip

    def block(ts: float, nbytes: int) -> Event:
        args = {"Addr": 1, "Bytes": nbytes, "Device Type": 1, "Device Id": 0}
        return {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "pid": 7, "tid": 7,
                "s": "t", "ts": ts, "args": args}  # fmt: skip

    return [
        call(1, "aten::mm", 10.0), block(10.5, 5000), call(2, "aten::view", 12.0),
        call(3, "aten::add", 15.0), block(15.5, -5000),
        kernel(1, 100.0, 30.0), kernel(1, 140.0, 10.0), kernel(3, 160.0, 5.0),
    ]  # fmt: skip


def test_join_with_gpu_kernels(tmp_path: Path) -> None:
    """Ops are where their kernels ran, not where they were called."""
    profile = tmp_path / "p.json"
    profile.write_text(json.dumps({"traceEvents": gpu_profile(), "traceName": "p"}))
    trace = tmp_path / "t.parquet"
    write_trace(trace, torch_profiler.load(profile, PAGE))
    document = perfetto(trace, "--join", profile, output=tmp_path / "o.json")
    assert document["traceEvents"][:8] == gpu_profile()
    assert list(document) == ["traceEvents", "traceName"]
    found = check(document["traceEvents"][8:])
    assert spans(found.slices["ops"]) == [
        ("aten::mm", 100.0, 140.0), ("aten::view", 140.0, 140.0), ("aten::add", 160.0, 165.0),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def real_profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch = pytest.importorskip("torch")
    layers = [layer for _ in range(6) for layer in (torch.nn.Linear(64, 64), torch.nn.GELU())]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step() -> None:
        loss = model(torch.randn(256, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    train_step()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, record_shapes=True
    ) as recording:
        for _ in range(3):
            train_step()
    path: Path = tmp_path_factory.mktemp("profile") / "profile.json.gz"
    recording.export_chrome_trace(str(path))
    return path


def test_join_with_a_real_profile(real_profile: Path, tmp_path: Path) -> None:
    """Import, plan, join: the profile as it was, its ops where it has them, the plan's where it has
    them plus what they wait."""
    trace, plan, output = tmp_path / "t.parquet", tmp_path / "plan.json", tmp_path / "o.json.gz"
    machine = tmp_path / "slow.toml"
    machine.write_text(
        "device_bytes = 1000000\nhost_bytes = 100000000\npage_size = 4096\n"
        "d2h_bytes_per_s = 2e8\nh2d_bytes_per_s = 2e8\n"
    )
    hardware = ("--hardware", machine, "--device-bytes", "70%")
    result = run("import", "torch-profiler", real_profile, "-o", trace, "--page-size", 4096)
    assert result.exit_code == 0, result.stderr
    result = run("plan", trace, *hardware, "--policy", "lru", "-o", plan)
    assert result.exit_code == 0, result.stderr
    document = perfetto(trace, plan, *hardware, "--join", real_profile, output=output)
    original = read(real_profile)
    theirs = original["traceEvents"]
    assert document["traceEvents"][: len(theirs)] == theirs
    assert {**document, "traceEvents": []} == {**original, "traceEvents": []}
    ours = document["traceEvents"][len(theirs) :]
    pids = sorted({event["pid"] for event in ours})
    assert len(pids) == 2
    assert not set(pids) & {event.get("pid") for event in theirs}
    recorded = check(e for e in ours if e["pid"] == pids[0]).slices["ops"]
    planned = check(e for e in ours if e["pid"] == pids[1])
    starts = {(e["name"], round(e["ts"], 3)) for e in theirs if e.get("cat") == "cpu_op"}
    assert all((event["name"], event["ts"]) in starts for event in recorded)
    stalls = {event["args"]["op"]: event["args"]["us"] for event in planned.slices["stalls"]}
    assert stalls
    waited = 0.0
    for op, (was, now) in enumerate(zip(recorded, planned.slices["ops"], strict=True)):
        waited += stalls.get(op, 0.0)
        assert now["ts"] - was["ts"] == pytest.approx(waited, abs=0.01 + op * 1e-3)
    assert planned.slices["host-in"]
    for flow in planned.flows:
        assert flow.source["ts"] <= flow.target["ts"]


def test_a_trace_is_joined_with_its_own_profile_only(
    real_profile: Path, trace_path: Path, tmp_path: Path
) -> None:
    out = ("-o", tmp_path / "o.json")
    remedy = f"run 'tensorpager import torch-profiler {real_profile}"
    message = refused("perfetto", trace_path, "--join", real_profile, *out)
    assert "was not imported from a profile (its source: 'by hand')" in message
    assert remedy in message
    profile = read(real_profile)
    for event in profile["traceEvents"]:
        if event.get("cat") == "cpu_op":
            event["dur"] += 0.25
    (tmp_path / "other.json").write_text(json.dumps(profile))
    trace = tmp_path / "other.parquet"
    write_trace(trace, torch_profiler.load(tmp_path / "other.json", PAGE))
    assert remedy in refused("perfetto", trace, "--join", real_profile, *out)
    write_trace(trace, replace(torch_profiler.load(real_profile, PAGE), metadata={}))
    assert remedy in refused("perfetto", trace, "--join", real_profile, *out)
    assert "no list 'traceEvents'" in _refused_profile(trace, tmp_path / "a.json", "{}", *out)
    assert "not JSON" in _refused_profile(trace, tmp_path / "b.json", "nonsense", *out)
    assert "leave --iterations away" in refused(
        "perfetto", trace, "--join", real_profile, "--iterations", 2, *out
    )
    assert "is the profile itself" in refused(
        "perfetto", trace, "--join", real_profile, "-o", real_profile
    )


def _refused_profile(trace: Path, profile: Path, content: str, *out: object) -> str:
    profile.write_text(content)
    return refused("perfetto", trace, "--join", profile, *out)


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
