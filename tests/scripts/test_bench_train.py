"""bench_train.py: a small real run of it, and what it makes of measurements, by hand."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench_train import MOST_SHARES, Bench, make_cases, run_child
from lm.bench_tables import show
from lm.measure import MOST_WARM_UP_STEPS, Case, Spec
from lm.options import UsageError
from lm.peers import UnavailableError, make_peer
from lm.summary import exit_code, summarise, verdicts

from .. import programs

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_train.py"
TINY = ("--preset=tiny", "--batch=2", "--seq=32", "--page-size=64KiB", "--rounds=1")

PLANNED, DEMAND = Case("planned", "50%", 200.0), Case("demand", "50%", 200.0)
PLAIN, PEER = Case("plain"), Case("torchao")


def bench(path: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """Record and output of a run that must succeed."""
    command = [sys.executable, str(SCRIPT), *TINY, *arguments, f"--disk-path={path.parent}"]
    result = subprocess.run(
        [*command, f"--json={path}"], capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, result.stdout + result.stderr
    record: dict[str, Any] = json.loads(path.read_text())
    return record, result.stdout


def by_mode(record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {summary["case"]["mode"]: summary for summary in record["summaries"]}


@pytest.mark.slow
def test_modes_train_the_same_side_by_side(tmp_path: Path) -> None:
    modes = "--modes=demand,overlap,save_on_cpu,fsdp2,torchao"
    record, output = bench(tmp_path / "out.json", modes, "--share=60%", "--steps=2")
    found = by_mode(record)
    assert list(found) == ["plain", "demand", "overlap", "save_on_cpu", "fsdp2", "torchao"]
    for mode in ("plain", "demand", "save_on_cpu"):
        assert found[mode]["losses_identical"], mode
        assert found[mode]["step_seconds"] > 0
        assert len(record["records"][Case(**found[mode]["case"]).name][0]["losses"]) == 5
        assert found[mode]["peak_bytes"]["device"] > 0
    assert found["plain"]["speed_percent"] == 100
    assert found["plain"]["losses_sha256"] == found["demand"]["losses_sha256"]

    demand = found["demand"]
    needed = record["needed_bytes"]
    assert demand["budget_bytes"]["device"] == int(0.6 * needed)
    assert demand["counted_peak_bytes"]["device"] <= demand["budget_bytes"]["device"]
    assert demand["disk_file_bytes"] == 2 * needed // (64 << 10) * (64 << 10)
    assert demand["channel_bytes"]["disk-in"] > 0
    assert demand["channel_bytes"]["host-in"] == 0

    assert "--clip 0" in found["overlap"]["error"]  # the default clips
    assert "--device cuda" in found["torchao"]["error"]
    assert all(found[mode]["error"] in output.replace("\n", " ") for mode in ("overlap", "torchao"))
    assert "error" in found["fsdp2"] or found["fsdp2"]["rounds"] == 1
    assert {"command", "date", "machine", "torch", "threads"} <= record["facts"].keys()


@pytest.mark.slow
def test_a_planned_run_waits_for_its_plan(tmp_path: Path) -> None:
    record, output = bench(tmp_path / "out.json", "--modes=planned", "--share=60%", "--steps=2")
    planned = by_mode(record)["planned"]
    assert planned["losses_identical"]
    assert 3 < planned["warm_up_steps"][0] <= MOST_WARM_UP_STEPS
    assert planned["predicted_us"] > 0
    assert 0 < planned["bound_us"] <= planned["predicted_us"] * 1.001
    assert "of the bound's speed" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--modes=planned,magic"], "'magic'"),
        pytest.param(["--share=ten%"], "not a percentage", marks=pytest.mark.slow),
        pytest.param(["--disk=lots"], "--disk", marks=pytest.mark.slow),
        pytest.param(["--disk-path=/no/such"], "/no/such", marks=pytest.mark.slow),
        pytest.param(["--json=/no/such/file"], "no folder /no/such", marks=pytest.mark.slow),
        pytest.param(["--seq=100000"], "positions", marks=pytest.mark.slow),
    ],
)
def test_wrong_usage_is_code_2(arguments: list[str], message: str) -> None:
    result = programs.run(str(SCRIPT), *arguments)
    assert result.returncode == 2
    assert message in " ".join(result.stderr.split())


def test_cases_are_ours_by_share_and_rate_and_the_rest_once() -> None:
    cases = make_cases("demand,save_on_cpu,planned", "cpu", ["50%", "25%"], [0.0, 200.0])
    assert len(cases) == 1 + 2 * 2 * 2 + 1
    assert cases[0] == PLAIN
    assert len(set(cases)) == len({case.name for case in cases}) == len(cases)
    assert DEMAND in cases
    assert PLANNED.name == "planned 50% 200 MB/s"
    assert "fsdp2" in {case.mode for case in make_cases(None, "cpu", ["50%"], [0.0])}
    with pytest.raises(UsageError, match="'x'"):
        make_cases("plain,x", "cpu", ["50%"], [0.0])


def test_what_a_peer_lacks_is_said() -> None:
    from lm.options import parse_options

    options = parse_options(["--no-pager"])
    for mode in ("torchao", "bitsandbytes"):
        with pytest.raises(UnavailableError, match="--device cuda"):
            make_peer(mode, options)


def test_a_child_that_breaks_or_has_no_time_is_one_line() -> None:
    spec = Spec(PLAIN, ["--preset=tiny", "--no-such-flag=1"], 1, 1)
    record = run_child(spec, None)
    assert "--no-such-flag" in record["error"]
    assert "\n" not in record["error"]
    assert "--minutes" in run_child(spec, time.monotonic() - 1)["error"]
    late = run_child(replace(spec, flags=["--preset=tiny"]), time.monotonic() + 0.05)
    assert late == {"error": "did not end within 0 s of --minutes", "refused": True}


# -- by hand ---------------------------------------------------------------------------------------
def measured(turn: int, seconds: float, losses: list[float], **pager: Any) -> dict[str, Any]:
    stats = {
        **dict.fromkeys(("predicted_us", "measured_us", "bound_us", "ideal_us")),
        "budget_bytes": {"device": 8, "host": 0, "disk": 16},
        "peak_bytes": {"device": 7, "host": 0, "disk": 5},
        **pager,
    }
    ours = {
        "timed": {"prefetches": 8, "prefetch_hits": 6},
        "per_step": {"stall_us": 1500.0},
        "channel_bytes_per_step": {"disk-in": 64.0},
        "notes": [],
        "disk_file_bytes": 16,
        "disk_direct": True,
        "stats": stats,
    }
    return {
        "round": turn,
        "step_seconds": [seconds] * 3,
        "step_cpu_seconds": seconds,
        "warm_up_steps": 2,
        "losses": losses,
        "peak_bytes": {"device": 100 + turn},
        "pager": ours if pager else None,
    }


LOSSES = [5.0, 4.0, 3.0, 2.0, 1.0]
ON_PLAN = {"predicted_us": 2.9e6, "measured_us": 3e6, "bound_us": 2.4e6}


def summaries_of(**records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    cases = {"plain": PLAIN, "planned": PLANNED, "demand": DEMAND, "torchao": PEER}
    cases["joint"] = replace(PLANNED, mode="joint")
    plain = {record["round"]: record for record in records.get("plain", [])}
    return [summarise(cases[name], found, plain, LOSSES) for name, found in records.items()]


def test_medians_are_of_all_steps_and_speeds_of_the_same_round() -> None:
    plain = [measured(turn, seconds, LOSSES[:3]) for turn, seconds in enumerate((1.0, 2.0, 1.0))]
    planned = [
        measured(turn, seconds, LOSSES, **ON_PLAN) for turn, seconds in enumerate((2.0, 4.0, 3.0))
    ]
    _, summary = summaries_of(plain=plain, planned=planned)
    assert summary["step_seconds"] == 3.0
    assert summary["speed_percent"] == 50.0
    assert summary["losses_identical"]
    assert summary["peak_bytes"] == {"device": 102}
    assert summary["percent_of_bound"] == pytest.approx(80)
    assert summary["prefetch_hit_percent"] == 75
    assert summary["channel_bytes"] == {"disk-in": 64}


@pytest.mark.parametrize("wrong", [4.0000001, float("nan")])
def test_a_loss_that_differs_is_code_1_where_it_must_not(wrong: float) -> None:
    good = measured(0, 1.0, LOSSES)
    bad = measured(0, 1.0, [5.0, wrong, 3.0], **ON_PLAN)
    assert exit_code(summaries_of(plain=[good], planned=[good | {"losses": LOSSES[:2]}])) == 0
    found = summaries_of(plain=[good], planned=[bad])
    assert not found[1]["losses_identical"]
    assert exit_code(found) == 1
    assert exit_code(summaries_of(plain=[good], torchao=[bad])) == 0


def test_refusals_are_listed_and_what_breaks_is_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    good = measured(0, 1.0, LOSSES)
    for refused, code in ((True, 0), (False, 1)):
        error = {"error": "InfeasibleBudget: [no] way", "refused": refused, "round": 0}
        found = summaries_of(plain=[good], planned=[error])
        assert exit_code(found) == code
        record = {"flags": [], "needed_bytes": 1, "rounds": 1, "steps": 3}
        show({**record, "summaries": found, "verdicts": []})
        assert "InfeasibleBudget: [no] way" in capsys.readouterr().out


def test_claims() -> None:
    plain = [measured(0, 1.0, LOSSES)]
    demand = [measured(0, 4.5, LOSSES, measured_us=None)]

    def holds(**stats: float) -> list[bool | None]:
        planned = [measured(0, 3.0, LOSSES, **{**ON_PLAN, **stats})]
        found = verdicts(summaries_of(plain=plain, planned=planned, demand=demand))
        assert all(PLANNED.name in verdict["claim"] for verdict in found)
        return [verdict["holds"] for verdict in found]

    assert holds() == [True, False, True]  # 1.5 × demand, 80 % of the bound, 3 % off
    assert holds(bound_us=2.8e6) == [True, True, True]
    assert holds(predicted_us=2.5e6) == [True, False, False]
    demand = [measured(0, 3.3, LOSSES, measured_us=None)]
    assert holds() == [False, False, True]
    assert holds(bound_us=2.9e6) == [None, True, True]  # the bound is only 1.14 × demand
    joint = [measured(0, 2.0, LOSSES, predicted_us=2e6, measured_us=2e6, bound_us=1.9e6)]
    planned = [measured(0, 3.0, LOSSES, **ON_PLAN)]
    found = verdicts(summaries_of(plain=plain, planned=planned, joint=joint))
    assert "1.50 × planned's speed" in found[2]["claim"], "joint is compared with moves alone"
    assert found[2]["holds"]


def test_peers_are_compared_at_no_higher_peak() -> None:
    plain = [measured(0, 1.0, LOSSES)]
    planned = [measured(0, 3.0, LOSSES, **ON_PLAN)]
    for device, claim in ((99, "none of ours"), (100, "1.33 × torchao")):
        peaks = {"device": device, "device_reserved": device}
        peer = [measured(0, 4.0, [9.0]) | {"peak_bytes": peaks}]
        found = verdicts(summaries_of(plain=plain, planned=planned, torchao=peer))
        assert claim in found[-1]["claim"]


def test_cases_take_turns_and_failures_are_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def fake(spec: Spec, deadline: float | None) -> dict[str, Any]:
        ran.append(spec.case.name)
        if spec.case == PEER:
            return {"error": "no", "refused": True}
        return {"step_seconds": [1.0], "losses": LOSSES, "needed_bytes": 1000}

    monkeypatch.setattr("bench_train.run_child", fake)
    sizes = {"host": "0", "disk": "200%"}
    cases = [PLAIN, DEMAND, PEER]
    one = Bench([], 1, 3, cases, sizes, "/tmp", "64KiB", None, reference={}, records={})
    one.run(lambda: None)
    names = [PLAIN.name, DEMAND.name]
    assert ran == ["plain", *names, "torchao", *reversed(names), *names]
    assert [len(one.records[case.name]) for case in cases] == [3, 3, 1]
    assert one.spec(DEMAND).budgets == {"device": 500, "host": 0, "disk": 2000}


def test_one_slow_case_leaves_the_others_time(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed: list[float] = []

    def fake(_spec: Spec, deadline: float | None) -> dict[str, Any]:
        assert deadline is not None
        allowed.append(deadline - time.monotonic())
        return {"step_seconds": [1.0], "losses": LOSSES, "needed_bytes": 1000}

    monkeypatch.setattr("bench_train.run_child", fake)
    cases = [PLAIN, DEMAND, PEER, replace(PEER, mode="fsdp2")]
    sizes = {"host": "0", "disk": "200%"}
    end = time.monotonic() + 1000
    Bench([], 1, 1, cases, sizes, "/tmp", "64KiB", end, reference={}, records={}).run(lambda: None)
    shares = [min(1.0, MOST_SHARES / children) for children in (5, 4, 3, 2, 1)]
    assert allowed == pytest.approx([1000 * share for share in shares], rel=0.05)
