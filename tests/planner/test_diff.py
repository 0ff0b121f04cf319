"""``tensorpager diff``: two traces, two plans."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tensorpager.planner.plan import Bound, Move, Plan, Predicted, StartRun, plan_to_json
from tensorpager.planner.trace import Trace, make_trace
from tensorpager.planner.trace_file import write_trace

from .command_line import PAGE, refused, run, run_json, weight_trace


def grown_trace() -> Trace:
    """``weight_trace`` with an op and a tensor more, 'fill' twice as long, its tensor larger."""
    return make_trace(
        [(0, 2 * PAGE, True), (1, 5 * PAGE, False), (2, 3 * PAGE, False)],
        [
            ("forward", 10.0, [0], []),
            ("fill", 20.0, [], [1]),
            ("new <op>", 5.0, [1], [2]),
            ("update", 10.0, [0], []),
        ],
        page_size=PAGE,
        names={0: "weight", 2: "extra"},
        kinds={2: "gradient"},
    )


@pytest.fixture
def grown_path(tmp_path: Path) -> Path:
    write_trace(tmp_path / "grown.parquet", grown_trace())
    return tmp_path / "grown.parquet"


def named(rows: list[dict[str, Any]]) -> dict[str, tuple[Any, Any]]:
    return {row["name"]: (row["a"], row["b"]) for row in rows}


def test_traces(trace_path: Path, grown_path: Path) -> None:
    found = run_json("diff", trace_path, grown_path)
    assert found["kind"] == "traces"
    assert found["identical"] is False
    assert named(found["measures"]) == {
        "peak": (6000, 10000),
        "time": (30.0, 45.0),
        "working-set": (4000, 8000),
        # The weight, from the end of 'forward' to the begin of 'update': 10 of 30 µs, 25 of 45.
        "idle": (pytest.approx(2000 * 10 / 30), pytest.approx(2000 * 25 / 45)),
        "tensor-bytes": (6000, 10000),
        "tensors": (2, 3),
        "ops": (3, 4),
        "accesses": (3, 5),
    }
    peak = next(row for row in found["measures"] if row["name"] == "peak")
    assert (peak["change"], peak["percent"]) == (4000, pytest.approx(66.67, abs=0.01))
    lists = found["lists"]
    assert named(lists["bytes at the peak"]) == {"activation": (4000, 5000), "gradient": (0, 3000)}
    assert list(named(lists["time of ops"]).items()) == [("fill", (10, 20)), ("new <op>", (0, 5))]
    tensors = named(lists["bytes of tensors"])
    assert list(tensors.items()) == [("extra", (0, 3000)), ("of fill", (4000, 5000))]


def test_traces_as_text(trace_path: Path, grown_path: Path) -> None:
    result = run("diff", trace_path, grown_path, "--top", 1)
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= 80
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["time", "30", "µs", "45", "µs", "+15", "µs", "+50.0", "%"] in lines
    assert "time of ops; 1 more" in result.stdout
    assert ["extra", "0", "B", "2.93", "KiB", "+2.93", "KiB"] in lines
    back = run("diff", grown_path, trace_path)
    assert ["time", "45", "µs", "30", "µs", "-15", "µs", "-33.3", "%"] in [
        line.split() for line in back.stdout.splitlines()
    ]


def test_identical_traces_are_one_line(trace_path: Path, tmp_path: Path) -> None:
    write_trace(tmp_path / "again.parquet", replace(weight_trace(), source="another machine"))
    result = run("diff", trace_path, tmp_path / "again.parquet")
    assert result.exit_code == 0
    assert result.stdout.count("\n") == 1
    assert "hold the same trace" in result.stdout
    assert run_json("diff", trace_path, trace_path)["identical"] is True


def test_what_no_measure_shows_is_named(trace_path: Path, tmp_path: Path) -> None:
    trace = weight_trace()
    mode = trace.access_mode.copy()
    mode[0] = 3
    write_trace(tmp_path / "b.parquet", replace(trace, access_mode=mode))
    result = run("diff", trace_path, tmp_path / "b.parquet")
    assert "access mode" in result.stdout


@pytest.mark.parametrize(
    ("threshold", "fails"),
    [
        ("peak+66%", True),
        ("peak+67%", False),
        ("peak+3999", True),
        ("peak+4000", False),
        ("peak+4KB", False),
        ("peak-1%", False),
        ("time+14.9us", True),
        ("time+0.015ms", False),
        ("time+50%", False),
        ("working-set+99.99%", True),
        ("tensors+0", True),
        ("tensors+1", False),
    ],
)
def test_thresholds(trace_path: Path, grown_path: Path, threshold: str, fails: bool) -> None:
    result = run("diff", trace_path, grown_path, "--fail-if", threshold, "--top", 0)
    assert result.exit_code == int(fails), result.stderr
    if fails:
        assert f"--fail-if {threshold} allows at most" in result.stderr
        assert result.stderr.count("\n") == 1


def test_a_fall_can_fail_too_and_all_failures_are_named(trace_path: Path, grown_path: Path) -> None:
    checks = ("--fail-if", "time-10%", "--fail-if", "peak-100", "--fail-if", "ops-1")
    result = run("diff", grown_path, trace_path, *checks)
    assert result.exit_code == 1
    assert "time was 45 µs and is 30 µs; --fail-if time-10% allows at least 40.5 µs" in (
        result.stderr
    )
    assert "--fail-if peak-100 allows" in result.stderr
    assert "ops-1" not in result.stderr
    failed = json.loads(run("diff", grown_path, trace_path, *checks, "--json").stdout)["failed"]
    assert len(failed) == 2


@pytest.mark.parametrize(
    ("threshold", "reason"),
    [
        ("peak", "not METRIC+X%"),
        ("speed+5%", "are peak, time"),
        ("peak+", "not METRIC+X%"),
        ("peak+5x", "is no amount"),
        ("time+5GiB", "is no amount"),
        ("peak+-5%", "not METRIC+X%"),
        ("peak-device+5%", "are peak, time"),
    ],
)
def test_bad_thresholds(trace_path: Path, grown_path: Path, threshold: str, reason: str) -> None:
    assert reason in refused("diff", trace_path, grown_path, "--fail-if", threshold)


# --- plans -----------------------------------------------------------------------------------

PREDICTED = Predicted(100.0, 80.0, 20.0, 4000, 3000, 2000, 5000, 5000, 1000)
MOVES = [
    Move(0, 0, 2, "host", "out", 1),
    Move(0, 0, 2, "host", "in", 2),
    Move(1, 0, 1, "disk", "out", 1),
    Move(1, 0, 1, "disk", "in", 2),
]


@pytest.fixture
def plans(tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    def save(**changes: Any) -> tuple[Path, Path]:
        a = Plan("g10", PAGE, 4000, 8000, float("inf"), MOVES, predicted=PREDICTED)
        a = replace(a, bound=Bound(90.0, 90.0))
        paths = tmp_path / "a.json", tmp_path / "b.json"
        for path, plan in zip(paths, (a, replace(a, **changes))):
            path.write_text("\n" + json.dumps(plan_to_json(plan)))
        return paths

    return save


def test_plans(plans: Callable[..., tuple[Path, Path]]) -> None:
    a, b = plans(
        policy="lp",
        device_bytes=5000,
        moves=[*MOVES[:2], Move(0, 2, 1, "host", "in", 2)],
        predicted=replace(PREDICTED, iteration_us=90.0, stall_us=10.0, disk_bytes_written=0),
        start=[StartRun(0, 0, 2, "host")],
    )
    found = run_json("diff", a, b)
    assert found["kind"] == "plans"
    assert found["differs_in"] == ["policy", "device_bytes", "moves", "start", "predicted"]
    measures = named(found["measures"])
    assert measures["time"] == (100.0, 90.0)
    assert measures["stall"] == (20.0, 10.0)
    assert measures["bound"] == (90.0, 90.0)
    assert measures["disk-written"] == (1000, 0)
    assert measures["moves"] == (4, 3)
    assert measures["off at the start"] == (0, 2000)
    moved = named(found["lists"]["bytes moved of tensor"])
    assert list(moved.items()) == [("1", (2000, 0)), ("0", (4000, 5000))]
    text = run("diff", a, b).stdout
    assert max(map(len, text.splitlines())) <= 80
    assert "policy, device bytes" in text
    assert run("diff", a, b, "--fail-if", "time+0%").exit_code == 0
    assert "disk-written" not in run("diff", a, b, "--fail-if", "disk-written+1KiB").stderr
    assert "stall was 20 µs" in run("diff", a, b, "--fail-if", "stall-10%").stderr


def test_identical_plans(plans: Callable[..., tuple[Path, Path]]) -> None:
    a, b = plans(extra={"seconds": 3})
    result = run("diff", a, b)
    assert result.exit_code == 0
    assert result.stdout == f"{a} and {b} hold the same plan.\n"
    assert run_json("diff", a, b)["identical"] is True


def test_a_plan_without_prediction(plans: Callable[..., tuple[Path, Path]]) -> None:
    a, b = plans(predicted=None)
    measures = named(run_json("diff", a, b)["measures"])
    assert "time" not in measures
    assert measures["moves"] == (4, 4)


def test_what_is_no_pair(
    trace_path: Path, plans: Callable[..., tuple[Path, Path]], tmp_path: Path
) -> None:
    a, _ = plans()
    assert "is a trace and" in refused("diff", trace_path, a)
    assert "give two traces, or two plans" in refused("diff", a, trace_path)
    assert "no-such: No such file" in refused("diff", trace_path, tmp_path / "no-such")
    (tmp_path / "empty").touch()
    assert "an empty file is neither a trace" in refused("diff", tmp_path / "empty", trace_path)
    (tmp_path / "text").write_text("hello")
    assert "neither a trace (Parquet) nor a plan" in refused("diff", a, tmp_path / "text")
    assert "a folder; name the trace or the plan in it" in refused("diff", trace_path, tmp_path)
    (tmp_path / "cut.parquet").write_bytes(trace_path.read_bytes()[:100])
    assert "cut.parquet" in refused("diff", trace_path, tmp_path / "cut.parquet")
    assert "a folder; name the trace" in refused("diff", tmp_path, trace_path)


def test_any_name_fits(tmp_path: Path) -> None:
    """Control characters, HTML and very long names, in 80 columns."""
    odd = ["\x1b[31mred\n", "<b>bold</b>" * 30, "Größe 張量 🙂" * 8, " "]
    traces = [
        make_trace(
            [(number, 10**12 * factor + number, False) for number in range(4)],
            [(name, 1e9 * factor, [], [number]) for number, name in enumerate(odd)],
            page_size=2 << 20,
            names=dict(enumerate(odd)),
        )
        for factor in (1, 3)
    ]
    for name, trace in zip("ab", traces):
        write_trace(tmp_path / name, trace)
    text = run("diff", tmp_path / "a", tmp_path / "b").stdout
    assert "\x1b" not in text
    rows = [line for line in text.splitlines() if str(tmp_path) not in line]
    assert max(map(len, rows)) <= 80
