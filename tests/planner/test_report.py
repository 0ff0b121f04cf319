"""``tensorpager html``: the file and the data in it; ``test_report_browser.py`` draws it."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorpager.planner.hardware import Hardware, load_hardware
from tensorpager.planner.plan import Bound, Move, Plan, StartRun
from tensorpager.planner.report import rows
from tensorpager.planner.report.data import CURVE_POINTS, report_data
from tensorpager.planner.report.facts import limit
from tensorpager.planner.report.page import page
from tensorpager.planner.report.payload import decode, encode
from tensorpager.planner.report.reduce import Bars, fewer_bars, shares_over_time
from tensorpager.planner.report.remedies import remedies
from tensorpager.planner.simulator import simulate
from tensorpager.planner.sweep import Task, evaluate
from tensorpager.planner.timeline import PLACES, Span, Timeline, telling_points, timeline
from tensorpager.planner.trace import Trace, make_trace
from tensorpager.planner.trace_file import write_trace

from .command_line import HARDWARE, MOVES, PAGE, refused, run, weight_trace
from .random_plans import case_of

MIB = 1 << 20
NASTY = '</script><script>alert(1)</script><!-- \u2028 "&\x00'


@pytest.fixture
def machine(tmp_path: Path) -> Hardware:
    (tmp_path / "hw.toml").write_text(HARDWARE)
    return load_hardware(str(tmp_path / "hw.toml"))


@pytest.fixture
def line(machine: Hardware) -> Timeline:
    plan = Plan("by hand", PAGE, 4 * PAGE, 1_000_000, 0, MOVES)
    return timeline(weight_trace(), plan, machine)


def payload_of(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    found = re.search(r'<script id="payload" type="text/plain">([^<]*)</script>', path.read_text())
    assert found is not None
    return decode(found[1])


def us(header: dict[str, Any], column: Any) -> list[float]:
    return [round(float(value) * header["tick_us"], 6) for value in column]


# -- the data ------------------------------------------------------------------------------------


def test_a_weight_that_leaves_and_comes_back(line: Timeline, machine: Hardware) -> None:
    header, columns = report_data(line, machine)
    assert us(header, columns["op_start"]) == [0.0, 10.0, 40.0]
    assert us(header, columns["op_end"]) == [10.0, 20.0, 50.0]
    assert [header["op_names"][name] for name in columns["op_name"]] == [
        "forward",
        "fill",
        "update",
    ]
    assert columns["stall_op"].tolist() == [2]
    assert columns["stall_us"].tolist() == [20.0]
    assert columns["stall_tensor"].tolist() == [0]
    assert header["lanes"][columns["stall_channel"][0]] == "host-in"
    # The copy below is good, so leaving takes no transfer; two pages of 10 µs come back.
    assert {header["lanes"][channel] for channel in columns["move_channel"]} == {"host-in"}
    assert us(header, columns["move_begin"])[0] == 20.0
    assert us(header, columns["move_end"])[-1] == 40.0
    assert columns["move_pages"].sum() == 2
    assert columns["tensor_moved_in"].tolist() == [2 * PAGE, 0]
    assert columns["tensor_moved_out"].tolist() == [0, 0]
    assert columns["tensor_stall"].tolist() == [20.0, 0.0]
    assert columns["tensor_longest_gap"].tolist() == [30.0, 0.0]  # with the wait for itself
    assert columns["tensor_accesses"].tolist() == [2, 1]


def test_spans_are_those_of_the_timeline(line: Timeline, machine: Hardware) -> None:
    header, columns = report_data(line, machine)
    assert columns["row_tensor"].tolist() == [0, 1]
    assert columns["span_offset"].tolist() == [0, 4, 5]
    places = [header["places"][place] for place in columns["span_place"]]
    assert places == ["device", "host", "coming", "device", "device"]
    assert us(header, columns["span_begin"]) == [0.0, 10.0, 20.0, 40.0, 10.0]
    assert us(header, columns["span_end"]) == [10.0, 20.0, 40.0, 50.0, 20.0]
    assert columns["span_pages"].tolist() == [2, 2, 2, 2, 4]
    assert columns["access_offset"].tolist() == [0, 2, 3]
    assert columns["access_op"].tolist() == [0, 2, 1]


def test_memory_by_kind_and_its_peak(line: Timeline, machine: Hardware) -> None:
    header, columns = report_data(line, machine)
    curve = header["curve"]
    assert curve["kinds"] == ["parameter", "activation"]
    assert us(header, columns["curve_time"]) == [0.0, 10.0, 20.0, 30.0]
    assert columns["curve_0"].tolist() == [2, 0, 1, 2]
    assert columns["curve_1"].tolist() == [0, 4, 0, 0]
    assert (curve["peak_bytes"], curve["peak_us"]) == (4 * PAGE, 10.0)


def test_what_limits_the_iteration_is_said(line: Timeline) -> None:
    assert limit(line) == (
        "Ops wait 20 µs in all, 40 % of the iteration; 100 % of that for pages on their way from "
        "host memory (host-in, busy 40 % of the time)."
    )
    assert line.plan is not None
    assert line.hardware is not None
    large = line.hardware.with_(device_bytes=6 * PAGE)
    roomy = timeline(weight_trace(), replace(line.plan, moves=[]), large)
    assert limit(roomy).startswith("No op waits")
    assert limit(timeline(weight_trace())) == ""


def test_the_bound_is_shown_for_the_machine_it_is_of_only(machine: Hardware) -> None:
    trace = weight_trace()
    plan = Plan("by hand", PAGE, 4 * PAGE, 1_000_000, 0, MOVES, bound=Bound(45.0, 90.0))
    plan = replace(plan, predicted=simulate(trace, machine, plan).predicted)
    same = report_data(timeline(trace, plan, machine), machine)[0]["facts"]
    assert (same["bound_us"], same["notes"]) == (45.0, [])
    slower = machine.with_(h2d_bytes_per_s=5e7)
    other = report_data(timeline(trace, plan, slower), slower)[0]["facts"]
    assert other["bound_us"] is None
    assert "not the machine that the plan was made for" in other["notes"][0]


def test_without_a_plan_nothing_moves() -> None:
    header, columns = report_data(timeline(weight_trace()))
    assert header["facts"]["policy"] is None
    assert header["facts"]["hardware"] is None
    assert len(columns["move_begin"]) == len(columns["stall_op"]) == 0
    assert columns["span_place"].tolist() == [0, 0]
    assert columns["tensor_longest_gap"].tolist() == [10.0, 0.0]


def test_random_plans_keep_their_pages_and_their_times() -> None:
    """Pages moved, waits, and the time that pages are at each place are those of the timeline."""
    seen = 0
    for seed in range(60):
        case = case_of(seed)
        if not case.trace.ops or not simulate(case.trace, case.hardware, case.plan).feasible:
            continue
        drawn = timeline(case.trace, case.plan, case.hardware)
        header, columns = decode(encode(*report_data(drawn, case.hardware)))
        moved = sum(t.page_count for t in drawn.transfers if t.end_us > t.begin_us)
        assert int(columns["move_pages"].sum()) == moved
        waits = sum(stall.us for stall in drawn.stalls)
        assert columns["tensor_stall"].sum() <= waits + 1e-6
        assert columns["stall_us"].sum() == pytest.approx(waits)
        lasts = (columns["span_end"] - columns["span_begin"].astype(float)) * header["tick_us"]
        for number, place in enumerate(header["places"]):
            drawn_us = float((lasts * columns["span_pages"])[columns["span_place"] == number].sum())
            spans = [span for t in range(case.trace.tensors) for span in drawn.residency(t)]
            there = [s.page_count * (s.end_us - s.begin_us) for s in spans if s.place == place]
            assert drawn_us == pytest.approx(sum(there), abs=0.1)
        seen += 1
    assert seen > 10


# -- less of it ----------------------------------------------------------------------------------


def test_a_long_curve_keeps_its_peak_and_its_lows() -> None:
    rng = np.random.default_rng(0)
    levels = rng.integers(10, 1000, 200_000)
    levels[77_777], levels[133_333] = 5000, 1
    time = np.sort(rng.uniform(0, 1e6, len(levels)))
    points = telling_points(time, levels, 1e6, CURVE_POINTS)
    assert len(points) <= CURVE_POINTS
    assert (np.diff(points) > 0).all()
    assert {0, 77_777, 133_333, len(levels) - 1} <= set(points.tolist())
    assert np.array_equal(telling_points(time[:9], levels[:9], 1e6, 9), np.arange(9))


def test_many_transfers_become_fewer_bars_of_as_many_pages() -> None:
    count = 1000
    begin = np.concatenate([np.arange(990.0), np.arange(10.0)])
    numbers = np.arange(count)
    bars = Bars(
        np.repeat([0, 3], [990, 10]),
        begin,
        begin + 0.5,
        numbers,
        numbers,
        np.full(count, 2),
        numbers,
        np.ones(count, np.bool_),
    )
    assert fewer_bars(bars, count) is bars
    fewer = fewer_bars(bars, 100)
    assert len(fewer.channel) == 100
    assert fewer.pages.sum() == 2 * count
    assert fewer.begin_us[0] == 0.0
    assert fewer.end_us[0] == 9.5
    assert set(fewer.tensor.tolist()) == {-1}
    assert fewer.channel.tolist() == [0] * 99 + [3]


def test_means_over_time_are_exact() -> None:
    time, place = np.array([0.0, 2.5, 5.0, 5.0, 10.0]), np.array([0, 0, 0, 1, 1])
    change = np.array([4, 4, -8, 6, -6])
    mean = shares_over_time(time, place, change, 2, 10.0, 4)
    assert mean.tolist() == [[4.0, 8.0, 0.0, 0.0], [0.0, 0.0, 6.0, 6.0]]


def test_neighbouring_pages_at_one_place_are_one_span() -> None:
    spans = [
        Span(0, 0, 2, 0.0, 5.0, "device"),
        Span(0, 0, 2, 5.0, 9.0, "host"),
        Span(0, 2, 3, 0.0, 5.0, "device"),
        Span(0, 2, 3, 5.0, 9.0, "disk"),
        Span(0, 5, 1, 5.0, 9.0, "host"),
    ]
    assert rows.joined(spans) == [
        Span(0, 0, 5, 0.0, 5.0, "device"),
        Span(0, 0, 2, 5.0, 9.0, "host"),
        Span(0, 2, 3, 5.0, 9.0, "disk"),
        Span(0, 5, 1, 5.0, 9.0, "host"),
    ]


def test_small_tensors_without_a_row_are_counted_together(
    line: Timeline, machine: Hardware, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "MOST_ROWS", 1)
    monkeypatch.setattr(rows, "REST_BINS", 5)
    header, columns = report_data(line, machine)
    assert columns["row_tensor"].tolist() == [1]  # the larger one
    assert header["rest"] == {"tensors": 1, "bytes": 2 * PAGE}
    device, leaving, host, disk, coming, _ = columns["rest_bytes"].reshape(len(PLACES), 5).tolist()
    assert device == [2 * PAGE, 0, 0, 0, 2 * PAGE]
    assert host == [0, 2 * PAGE, 0, 0, 0]
    assert coming == [0, 0, 2 * PAGE, 2 * PAGE, 0]
    assert not any(leaving + disk)


# -- odd traces ----------------------------------------------------------------------------------


def reported(trace: Trace) -> tuple[dict[str, Any], dict[str, Any]]:
    return decode(encode(*report_data(timeline(trace))))


def test_no_ops_one_op_and_one_byte() -> None:
    header, columns = reported(make_trace([], [], page_size=PAGE))
    assert (header["facts"]["ops"], header["facts"]["tensors"]) == (0, 0)
    assert len(columns["op_start"]) == 0
    header, columns = reported(make_trace([], [("only", 0.0, [], [])], page_size=PAGE))
    assert (header["facts"]["ops"], header["facts"]["iteration_us"]) == (1, 0.0)
    header, columns = reported(make_trace([(7, 1, True)], [("only", 1.0, [7], [])], page_size=PAGE))
    assert columns["tensor_bytes"].tolist() == [1]
    assert columns["tensor_pages"].tolist() == [1]
    assert header["curve"]["peak_bytes"] == PAGE
    assert header["tensor_names"] == [None]


def test_an_hour_fits_the_unit_of_time() -> None:
    hour = 3.6e9
    header, columns = reported(make_trace([], [("long", hour, [], [])], page_size=PAGE))
    assert columns["op_end"][0] * header["tick_us"] == pytest.approx(hour)


# -- the file ------------------------------------------------------------------------------------


def test_the_file_is_whole_and_strict(
    trace_path: Path, machine_path: Path, save_plan: Callable[..., Path], tmp_path: Path
) -> None:
    out = tmp_path / "report.html"
    result = run("html", trace_path, save_plan(MOVES), "--hardware", machine_path, "-o", out)
    assert result.exit_code == 0, result.stderr
    assert str(out) in result.stdout.replace("\n", "")
    content = out.read_text()
    assert "{{" not in re.sub(r"<script>.*?</script>", "", content, flags=re.DOTALL)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', content)
    assert policy is not None
    assert "default-src 'none'" in policy[1]
    assert "unsafe" not in policy[1]
    assert not re.search(r"""(?:src|href)=["'](?!data:)""", content)
    header, _ = payload_of(out)
    assert header["files"] == {"trace": "trace.parquet", "plan": "plan.json"}
    assert header["facts"]["predicted"]["iteration_us"] == 50.0


def test_names_are_no_markup(tmp_path: Path) -> None:
    trace = make_trace(
        [(0, PAGE, True)],
        [(NASTY, 1.0, [0], [])],
        page_size=PAGE,
        names={0: NASTY},
        source=NASTY,
        device=NASTY,
    )
    header, columns = report_data(timeline(trace), files={"trace": NASTY, "plan": NASTY})
    content = page(encode(header, columns))
    assert "alert(1)" not in content
    assert "\u2028" not in content
    assert content.count("</script>") == 2
    back, _ = decode(encode(header, columns))
    assert back["tensor_names"] == [NASTY]
    assert back["op_names"] == [NASTY]


def test_equal_input_gives_equal_files(
    trace_path: Path, machine_path: Path, save_plan: Callable[..., Path], tmp_path: Path
) -> None:
    plan = save_plan(MOVES)
    options = ("--hardware", machine_path)
    for name in ("a.html", "b.html"):
        result = run("html", trace_path, plan, *options, "-o", tmp_path / name)
        assert result.exit_code == 0, result.stderr
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


def test_compare_draws_the_fastest_plan_and_all_policies(
    trace_path: Path, machine_path: Path, tmp_path: Path
) -> None:
    out = tmp_path / "compared.html"
    command = ("compare", trace_path, "--hardware", machine_path, "--quick", "--html", out)
    result = run(*command, "--policies", "lru,lp")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.endswith("open it in a browser\n")
    header, columns = payload_of(out)
    speeds = {row["policy"]: row["iteration_us"] for row in header["comparison"]["policies"]}
    assert set(speeds) == {"lru", "lp"}
    assert header["facts"]["policy"] == min(speeds, key=lambda name: speeds[name])
    assert header["facts"]["iteration_us"] == pytest.approx(min(speeds.values()))
    assert len(columns["move_begin"])
    small = run(*command, "--policies", "vdnn", "--device-bytes", "4000")
    assert small.exit_code == 0, small.stderr
    assert "open it in a browser" in small.stdout
    assert "folder" in refused(*command[:-1], tmp_path)


def test_a_plan_needs_a_machine(
    trace_path: Path, save_plan: Callable[..., Path], tmp_path: Path
) -> None:
    out = tmp_path / "report.html"
    message = refused("html", trace_path, save_plan(MOVES), "-o", out)
    assert "does not say what it was made for; give --hardware" in message
    assert not out.exists()


def test_a_plan_of_another_trace_or_page_size_is_refused(
    trace_path: Path, machine_path: Path, save_plan: Callable[..., Path], tmp_path: Path
) -> None:
    out = tmp_path / "report.html"
    other = save_plan(MOVES, trace_sha256="0" * 64)
    options = ("--hardware", machine_path, "-o", out)
    assert "another trace" in refused("html", trace_path, other, *options)
    assert "--page-size" in refused(
        "html", trace_path, save_plan(MOVES, page_size=2 * PAGE), *options
    )
    assert "infeasible" in refused("html", trace_path, save_plan([]), *options)
    trace_path.write_text(json.dumps({}))
    assert str(trace_path) in refused("html", trace_path, *options)


def layers(ops: int, mib: int = 40) -> Trace:
    """A weight and an activation per op; what the forward half saves, the backward half reads."""
    half = ops // 2
    tensors = [(i, (1 + i % mib) * MIB, True) for i in range(half)]
    tensors += [(half + i, (1 + i % mib) * MIB, False) for i in range(half)]
    steps = [(f"forward.{i}", 100.0 + i % 7, [i], [half + i]) for i in range(half)]
    steps += [(f"backward.{i}", 200.0 + i % 5, [i, half + i], [i]) for i in reversed(range(half))]
    names = {i: f"model.layers.{i % half}.{'weight' if i < half else 'out'}" for i in range(ops)}
    return make_trace(tensors, steps, page_size=2 * MIB, names=names)


def test_10_000_ops_take_less_than_5_mb(tmp_path: Path) -> None:
    write_trace(tmp_path / "t.parquet", layers(10_000))
    out = tmp_path / "report.html"
    assert run("html", tmp_path / "t.parquet", "-o", out).exit_code == 0
    assert out.stat().st_size < 5e6
    header, columns = payload_of(out)
    assert header["rest"]["tensors"] == 10_000 - rows.MOST_ROWS
    assert len(columns["row_tensor"]) == rows.MOST_ROWS


@pytest.mark.slow
def test_100_000_ops_and_as_many_tensors(tmp_path: Path) -> None:
    write_trace(tmp_path / "t.parquet", layers(100_000))
    out = tmp_path / "report.html"
    assert run("html", tmp_path / "t.parquet", "-o", out).exit_code == 0
    header, columns = payload_of(out)
    assert len(columns["op_start"]) == len(columns["tensor_bytes"]) == 100_000
    assert header["rest"]["tensors"] == 100_000 - rows.MOST_ROWS
    assert out.stat().st_size < 20e6


@pytest.mark.slow
def test_10_000_ops_and_all_that_a_plan_moves_take_less_than_5_mb(tmp_path: Path) -> None:
    write_trace(tmp_path / "t.parquet", layers(10_000, mib=6))
    machine = ("--hardware", "h200", "--device-bytes", "60%", "--policy", "lru")
    plan, out = tmp_path / "plan.json", tmp_path / "report.html"
    planned = run("plan", tmp_path / "t.parquet", *machine, "-o", plan)
    assert planned.exit_code == 0, planned.stderr
    result = run("html", tmp_path / "t.parquet", plan, *machine[:4], "-o", out)
    assert result.exit_code == 0, result.stderr
    assert out.stat().st_size < 5e6
    assert len(payload_of(out)[1]["move_begin"]) > 10_000


# --- tiers, the run without a limit, remedies -----------------------------------------------------


def test_host_and_disk_over_time_and_what_would_be_live(line: Timeline) -> None:
    header, columns = report_data(line)
    assert header["tiers"] == [{"name": "host", "peak_bytes": 2 * PAGE}]
    assert columns["host_pages"].max() == 2
    assert list(columns["unlimited"]) == [2, 6, 2]  # pages that are live at each op
    header, columns = report_data(timeline(weight_trace()))
    assert header["tiers"] == []
    assert "unlimited" not in columns


def test_remedies_are_simulated_and_sorted(line: Timeline) -> None:
    """Six frames take all: with a quarter more than four the weight leaves in part."""
    found = remedies(line)
    assert found
    speeds = [one["percent_of_ideal"] for one in found]
    assert speeds == sorted(speeds, reverse=True)
    now = line.simulation.predicted if line.simulation else None
    assert now is not None
    assert min(speeds) > now.percent_of_ideal
    for one in found:
        if one["what"].startswith("a link twice"):
            hardware = line.hardware
            assert hardware is not None
            fast = hardware.with_(
                d2h_bytes_per_s=2 * hardware.d2h_bytes_per_s,
                h2d_bytes_per_s=2 * hardware.h2d_bytes_per_s,
            )
            tasks = (Task("lp", fast, quick=False), Task("", fast, plan=line.plan))
            again = [evaluate(line.trace, task).predicted for task in tasks]
            assert one["percent_of_ideal"] == max(p.percent_of_ideal for p in again if p)
    assert remedies(timeline(weight_trace())) == []


def test_a_remedy_that_costs_nothing_is_what_the_trace_permits(tmp_path: Path) -> None:
    """The activation that a plan moves could be made again in a tenth of the time."""
    trace = make_trace(
        [(0, 4 * PAGE, False), (1, 4 * PAGE, False)],
        [("make", 1.0, [], [0]), ("fill", 50.0, [], [1]), ("use", 50.0, [0], [])],
        page_size=PAGE,
        rerun=[True, False, False],
    )
    (tmp_path / "hw.toml").write_text(HARDWARE)
    moves = [Move(0, 0, 4, "host", "out", 1), Move(0, 0, 4, "host", "in", 2)]
    plan = Plan("by hand", PAGE, 4 * PAGE, 1_000_000, 0, moves)
    line = timeline(trace, plan, load_hardware(str(tmp_path / "hw.toml")))
    found = {one["what"]: one["percent_of_ideal"] for one in remedies(line)}
    best = found["ops that run again (plan --allow recompute)"]
    assert best == pytest.approx(100 * 101 / 102)
    header, _ = report_data(line)
    assert "Ops wait" in header["facts"]["limit"]


def test_what_a_plan_does_to_a_drive_is_told(line: Timeline) -> None:
    assert report_data(line)[0]["facts"]["wear"] == ""
    assert line.simulation is not None
    assert line.simulation.predicted is not None
    predicted = replace(line.simulation.predicted, disk_bytes_written=PAGE)
    line = replace(line, simulation=replace(line.simulation, predicted=predicted))
    wear = report_data(line)[0]["facts"]["wear"]  # 1,000 bytes in 50 µs
    assert wear.startswith("1.73 TB a day are written to disk")


def test_what_the_ops_wait_for_may_be_the_host(tmp_path: Path) -> None:
    trace = make_trace(
        [(0, PAGE, True), (1, PAGE, False)],
        [("use", 10.0, [0], []), ("back", 10.0, [], [1]), ("update", 1.0, [0, 1], [0])],
        page_size=PAGE,
        host_us=[math.nan, math.nan, 30.0],
    )
    (tmp_path / "hw.toml").write_text(HARDWARE)
    moves = [
        Move(0, 0, 1, "host", "in", 0),
        Move(0, 0, 1, "host", "out", 1),
        Move(1, 0, 1, "host", "out", 2),
    ]
    start = [StartRun(0, 0, 1, "host")]
    plan = Plan("by hand", PAGE, 4 * PAGE, 1_000_000, 0, moves, start, host_steps=[2])
    header, _ = report_data(timeline(trace, plan, load_hardware(str(tmp_path / "hw.toml"))))
    assert "Ops wait" in header["facts"]["limit"]
