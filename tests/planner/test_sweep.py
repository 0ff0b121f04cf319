"""``simulate --sweep`` and ``--target``: other machines, and how little memory is enough.

The small trace takes 30 µs where all its 6 pages fit. A page takes 10 µs on the link, so ``lp``, to
which the weight's copy below stays clean, waits 10 µs for each page that is missing; ``lru`` sends
its victim out before, and waits for that too.
"""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
import pytest

from tensorpager.planner.commands.axes import parse_axis
from tensorpager.planner.hardware import Hardware
from tensorpager.planner.plan import Predicted
from tensorpager.planner.sweep import Outcome, Task
from tensorpager.planner.target import Answer, between, least_memory
from tensorpager.planner.trace import Trace, make_trace

from .command_line import MOVES, PAGE, refused, run, run_json

GiB = 1 << 30


# --- what is asked -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "labels"),
    [
        ("device=8GiB:64GiB:8", [f"{n}.00 GiB" for n in range(8, 65, 8)]),  # not over 8 times
        ("host=1GiB:16GiB:5", [f"{1 << n}.00 GiB" for n in range(5)]),
        ("host=0:128GiB:3", ["0 B", "64.00 GiB", "128.00 GiB"]),  # no factor leads away from 0
        ("host=0,1.5GiB,inf", ["0 B", "1.50 GiB", "no limit"]),
        ("device=20%:100%:5", ["20 %", "40 %", "60 %", "80 %", "100 %"]),
        ("device=5%:100%:2", ["5 %", "100 %"]),
        ("h2d=1GB:100GB:3", ["1 GB/s", "10 GB/s", "100 GB/s"]),
        ("disk-read=500MB/s,6.5GB/s", ["0.5 GB/s", "6.5 GB/s"]),
        ("latency-us=0:100:3", ["0 µs", "50 µs", "100 µs"]),
        ("page-size=64KiB:16MiB:3", ["64.00 KiB", "1.00 MiB", "16.00 MiB"]),
        (" link = 8GB , 8GB, 16GB ", ["8 GB/s", "16 GB/s"]),
    ],
)
def test_sweeps_that_are_meant(text: str, labels: list[str]) -> None:
    assert list(parse_axis(text).labels) == labels


def test_spacing_hits_both_ends() -> None:
    values = parse_axis(f"device=3333333333:{100 * GiB}:7").values
    assert values[0] == 3333333333
    assert values[-1] == 100 * GiB
    factors = [b / a for a, b in pairwise(values)]  # type: ignore[operator]
    assert max(factors) == pytest.approx(min(factors))
    assert parse_axis("link=1GB,2GB").fields == ("d2h_bytes_per_s", "h2d_bytes_per_s")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("speed=1:2:3", "no 'speed' to sweep; NAME is one of device, host"),
        ("device", "no values; write for example 'device=20%:100%:9'"),
        ("device=,", "no values"),
        ("device=1GiB:2GiB", "LOW:HIGH:STEPS"),
        ("device=1:2:3:4", "LOW:HIGH:STEPS"),
        ("device=2GiB:1GiB:4", "LOW 2GiB is not below HIGH 1GiB"),
        ("device=1GiB:2GiB:one", "2 to 1000 STEPS"),
        ("device=1GiB:2GiB:1", "2 to 1000 STEPS"),
        ("device=1GiB:2GiB:1000000000", "2 to 1000 STEPS"),
        ("device=10%:2GiB:4", "both in % or both in bytes"),
        ("device=lots", "not a byte count"),
        ("device=0:5:3", "0 is too little"),
        ("h2d=0", "0 is too little"),
        ("host=1GiB:inf:3", "HIGH has no end"),
        ("device=" + "9" * 400, "more than any machine has"),
        ("latency-us=-1", "no number of µs"),
        ("latency-us=nan:1:2", "no number of µs"),
    ],
)
def test_sweeps_that_are_not(text: str, said: str) -> None:
    with pytest.raises(click.BadParameter) as error:
        parse_axis(text)
    assert said in error.value.message
    assert repr(text)[1:-1] in error.value.message


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--sweep", "link=1GB", "--sweep", "h2d=2GB"), "link and h2d: both set h2d_bytes_per_s"),
        (("--sweep", "host=1,2", "--sweep", "host=3"), "both set host_bytes"),
        (("--sweep", "device=1:999:999", "--sweep", "link=1,2"), "1696 plans; at most 1000"),
        (("--sweep", "link=1GB", "--target", "95%"), "leave out --sweep"),
        (("--target", "95%", "--device-bytes", "50%"), "looks for a device budget"),
        (("PLAN", "--target", "95%"), "and PLAN"),
        (("PLAN", "--quick"), "--quick is for planning"),
        (("PLAN", "--sweep", "page-size=1000,2000"), "pages of one size"),
        (("--policies", "magic"), "magic"),
        (("--policies", ","), "--policies names none of lru"),
    ],
)
def test_what_does_not_go_together(
    arguments: tuple[str, ...],
    said: str,
    trace_path: Path,
    machine_path: Path,
    save_plan: Callable[..., Path],
) -> None:
    given = [save_plan(MOVES) if word == "PLAN" else word for word in arguments]
    assert said in refused("simulate", trace_path, *given, "--hardware", machine_path)


# --- sweeps --------------------------------------------------------------------------------------


def swept(trace: Path, machine: Path, *arguments: object) -> Any:
    return run_json("simulate", trace, "--hardware", machine, *arguments)


def test_each_point_is_planned_by_each_policy(trace_path: Path, machine_path: Path) -> None:
    found = swept(trace_path, machine_path, "--sweep", "device=3000:6000:4")
    assert found["ideal_us"] == 30.0
    assert found["peak_bytes"] == 6 * PAGE
    (axis,) = found["axes"]
    assert (axis["name"], axis["fields"], len(axis["labels"])) == ("device", ["device_bytes"], 4)
    points = [(p["policy"], p["device_bytes"], p["iteration_us"]) for p in found["points"]]
    lp = [("lp", 3000, None), ("lp", 4000, 50.0), ("lp", 5000, 40.0), ("lp", 6000, 30.0)]
    assert points[:4] == [(a, b, c if c is None else pytest.approx(c)) for a, b, c in lp]
    assert [policy for policy, _, _ in points[4:]] == ["lru"] * 4
    assert all(b >= a - 1e-9 for (_, _, a), (_, _, b) in zip(points[1:4], points[5:]))
    first = found["points"][0]
    assert (first["feasible"], first["reason"]) == (False, "op 1 'fill' alone needs 3.91 KiB")
    assert first["disk_bytes"] == "inf"
    assert all(
        p["peak_device_bytes"] <= p["device_bytes"] for p in found["points"] if p["feasible"]
    )


def test_a_grid_with_shares_and_page_sizes(trace_path: Path, machine_path: Path) -> None:
    arguments = ("--sweep", "page-size=1000,3000", "--sweep", "device=70%,100%")
    found = swept(trace_path, machine_path, *arguments, "--policies", "lru")
    # In pages of 3000 bytes the weight has 1 page, the activation 2: 70 % are 2 pages.
    sizes = [(p["page_size"], p["device_bytes"]) for p in found["points"]]
    assert sizes == [(1000, 4000), (1000, 6000), (3000, 6000), (3000, 9000)]


def test_a_plan_on_other_machines(
    trace_path: Path, machine_path: Path, save_plan: Callable[..., Path]
) -> None:
    """Its two pages come back while nothing else goes on: 2 · 1000 bytes at the link's rate."""
    plan = save_plan(MOVES)
    arguments = ("simulate", trace_path, plan, "--hardware", machine_path, "--sweep")
    found = run_json(*arguments, "link=50MB,100MB,1GB")
    times = [p["iteration_us"] for p in found["points"]]
    assert times == pytest.approx([70.0, 50.0, 32.0])
    assert {p["policy"] for p in found["points"]} == {"by hand"}
    result = run(*arguments, "device=1000,2000")
    assert result.exit_code == 1
    assert "nothing runs at any of 2 points" in result.stderr
    assert result.stdout.count("no plan") == 2


def test_no_sweep_is_one_point(trace_path: Path, machine_path: Path) -> None:
    found = swept(trace_path, machine_path)
    assert [(p["policy"], p["device_bytes"]) for p in found["points"]] == [
        ("lp", 4000),
        ("lru", 4000),
    ]


def test_tables(trace_path: Path, machine_path: Path) -> None:
    sweep = ("--sweep", "device=3000:6000:4")
    result = run("simulate", trace_path, "--hardware", machine_path, *sweep)
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert max(map(len, lines[4:])) <= 80
    assert "2.93 KiB: op 1 'fill' alone needs 3.91 KiB" in lines
    assert any(line.endswith("████████") for line in lines)  # all of the speed
    assert "\x1b" not in result.stdout


# --- targets -------------------------------------------------------------------------------------


def test_least_memory_by_hand(trace_path: Path, machine_path: Path) -> None:
    found = swept(trace_path, machine_path, "--target", "75%")
    assert (found["ideal_us"], found["peak_bytes"], found["target_percent"]) == (30.0, 6000, 75.0)
    lp, lru = found["policies"]
    assert (lp["policy"], lp["reached"], lp["device_bytes"]) == ("lp", True, 5000)
    assert lp["predicted"]["percent_of_ideal"] == pytest.approx(75.0)
    assert (lru["reached"], lru["device_bytes"]) == (True, 6000)
    assert [p["device_bytes"] for p in lp["points"]] == [4000, 5000, 6000]
    text = run("simulate", trace_path, "--hardware", machine_path, "--target", "75%").stdout
    assert "lp: 4.88 KiB is enough for 75 % of the ideal speed (83.3 % of the peak)" in text
    assert max(map(len, text.splitlines()[3:])) <= 80


def test_a_target_that_is_out_of_reach(
    trace_path: Path, machine_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy that sends the weight out at any budget, and waits 20 µs for it."""
    from tensorpager.planner import registry
    from tensorpager.planner.plan import Plan

    def idle(trace: Any, hardware: Hardware) -> Plan:
        device = hardware.device_bytes
        return Plan("idle", PAGE, device, hardware.host_bytes, hardware.disk_bytes, MOVES)

    monkeypatch.setitem(registry.POLICIES, "idle", idle)
    asked = ("simulate", trace_path, "--hardware", machine_path, "--policies", "idle", "--target")
    result = run(*asked, "90%")
    assert result.exit_code == 1
    assert "idle: no device budget reaches 90 % of the ideal speed" in result.stderr
    assert "60.00 %" in result.stdout
    for text in ("0%", "101%", "often", "0.95", "%"):
        assert "write for example '95%'" in refused(*asked, text)


def found(speed: Callable[[int], float | None], target: float) -> tuple[Answer, int]:
    """``speed`` gives percent of the ideal by pages of device memory, ``None``: nothing runs. The
    trace has 2,000 pages, of which each op needs 10. The answer, and how many budgets were tried.
    """
    tensors = [(n, 10, True) for n in range(200)]
    trace = make_trace(tensors, [(f"op {n}", 1.0, [n], []) for n in range(200)], page_size=1)

    def outcome(trace: Trace, task: Task) -> Outcome:
        percent = speed(int(task.hardware.device_bytes))
        if percent is None:
            return Outcome(task.policy, task.hardware, None, 0.0, "too little")
        predicted = Predicted(20000.0 / percent, 200.0, 0.0, 0, 0, 0, 0, 0, 0)
        return Outcome(task.policy, task.hardware, predicted, 0.0)

    with patch("tensorpager.planner.sweep.evaluate", outcome):
        answer = least_memory(trace, "any", Hardware(1, page_size=1), target)
    return answer, len(answer.tried)


def budget(outcome: Outcome | None) -> float | None:
    return None if outcome is None else outcome.hardware.device_bytes


def test_the_search_finds_the_page() -> None:
    answer, tried = found(lambda pages: pages / 20, 60)
    assert budget(answer.enough) == 1200
    assert 1199 in map(budget, answer.tried)
    assert tried < 25
    least, tried = found(lambda pages: pages / 20 if pages >= 777 else None, 10)
    assert budget(least.enough) == 777
    assert tried < 25


def test_the_search_where_more_may_be_slower() -> None:
    """Good from 500 to 800 pages and from 1,700 on: the samples show the lower range."""
    answer, _ = found(lambda pages: 90.0 if 500 <= pages < 800 or pages >= 1700 else 20.0, 50)
    assert budget(answer.enough) == 500
    nowhere, tried = found(lambda pages: min(pages / 20, 70.0), 80)
    assert nowhere.enough is None
    assert tried < 12


def test_intervals() -> None:
    assert between(0, 10, 4) == [2, 4, 6, 8]
    assert between(3, 5, 7) == [4]
    assert between(3, 4, 7) == []


def test_json_is_strict(trace_path: Path, machine_path: Path) -> None:
    result = run(
        "simulate", trace_path, "--hardware", machine_path, "--sweep", "host=1MB,inf", "--json"
    )

    def refuse(name: str) -> None:
        raise AssertionError(name)

    json.loads(result.stdout, parse_constant=refuse)
