"""``tensorpager plan``, ``simulate`` and ``compare``."""

import hashlib
import json
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tensorpager.planner.errors import PolicyRefusal
from tensorpager.planner.plan import Move, Plan

from .command_line import MOVES, PAGE, PREDICTED, refused, run, run_json


def test_simulate_by_hand(
    trace_path: Path, machine_path: Path, save_plan: Callable[..., Path]
) -> None:
    found = run_json("simulate", trace_path, save_plan(MOVES), "--hardware", machine_path)
    assert set(found["predicted"]) == PREDICTED
    assert found["feasible"] is True
    assert found["predicted"]["iteration_us"] == pytest.approx(50.0)
    assert found["predicted"]["percent_of_ideal"] == pytest.approx(60.0)
    assert found["predicted"]["bytes_out"] == 0
    assert found["predicted"]["bytes_in"] == 2 * PAGE
    (stall,) = found["stalls"]
    assert stall == {
        "op": 2,
        "op_name": "update",
        "us": pytest.approx(20.0),
        "tensor": 0,
        "tensor_name": "weight",
        "channel": "host-in",
    }


def test_simulate_lists_as_many_stalls_as_asked(
    trace_path: Path, machine_path: Path, save_plan: Callable[..., Path]
) -> None:
    arguments = ("simulate", trace_path, save_plan(MOVES), "--hardware", machine_path)
    assert "1 longest of 1 stalls" in run(*arguments).stdout
    assert "update" in run(*arguments).stdout


def test_simulate_on_another_machine(
    trace_path: Path, machine_path: Path, save_plan: Callable[..., Path]
) -> None:
    arguments = ("simulate", trace_path, save_plan(MOVES), "--hardware", machine_path)
    slow = run_json(*arguments, "--h2d", "50MB/s")
    assert slow["predicted"]["iteration_us"] == pytest.approx(70.0)
    late = run_json(*arguments, "--latency-us", "3")
    assert late["predicted"]["iteration_us"] == pytest.approx(53.0)


def test_simulate_says_why_a_plan_is_infeasible(
    trace_path: Path, machine_path: Path, save_plan: Callable[..., Path]
) -> None:
    arguments = ("simulate", trace_path, save_plan(MOVES[:1]), "--hardware", machine_path)
    result = run(*arguments)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert "infeasible" in result.stderr
    assert "weight" in result.stderr
    answer = json.loads(run(*arguments, "--json").stdout)
    assert answer["feasible"] is False
    assert answer["predicted"] is None
    assert answer["reason"] in result.stderr


def test_simulate_refuses_plans_that_are_not_for_this(
    trace_path: Path, machine_path: Path, save_plan: Callable[..., Path], tmp_path: Path
) -> None:
    def line(plan: Path, *more: object) -> str:
        return refused("simulate", trace_path, plan, "--hardware", machine_path, *more)

    assert "plan for another trace" in line(save_plan(MOVES, trace_sha256="0" * 64))
    assert "names tensor 5" in line(save_plan([Move(5, 0, 1, "host", "out", 1)]))
    assert "--page-size 1000" in line(save_plan(MOVES), "--page-size", 500)
    assert "version" in line(_text(tmp_path, '{"version": 9}'))
    assert "not whole JSON" in line(_text(tmp_path, '{"version": '))
    assert "no-such" in line(tmp_path / "no-such.json")


def _text(folder: Path, text: str) -> Path:
    path = folder / "text.json"
    path.write_text(text)
    return path


@pytest.mark.parametrize("policy", ["lru", "lp"])
def test_plan_is_written_and_keeps_its_promise(
    policy: str, trace_path: Path, machine_path: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    arguments = ("--hardware", machine_path, "--policy", policy, "--quick", "-o", out)
    said = run_json("plan", trace_path, *arguments)
    assert sorted(said) == ["bound", "notes", "predicted"]
    assert set(said["predicted"]) == PREDICTED
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    written = json.loads(out.read_text())
    assert written["trace_sha256"] == weight_trace_sha256(trace_path)
    assert written["policy"] == policy
    again = run_json("simulate", trace_path, out, "--hardware", machine_path)
    assert again["predicted"] == said["predicted"]
    more = {"percent_of_ideal": again["predicted"]["percent_of_ideal"]}
    assert {**written["predicted"], **more, "recompute_us": 0.0, "host_us": 0.0} == again[
        "predicted"
    ]
    assert again["predicted"]["peak_device_bytes"] <= 4 * PAGE
    assert (written["bound"] is not None) == (policy == "lp")


def weight_trace_sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_plan_prints_a_table(trace_path: Path, machine_path: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    result = run("plan", trace_path, "--hardware", machine_path, "--policy", "lru", "-o", out)
    assert result.exit_code == 0, result.stderr
    assert "of the ideal" in result.stdout
    assert "moves by lru" in result.stdout


def test_plan_for_a_share_of_the_peak(trace_path: Path, machine_path: Path, tmp_path: Path) -> None:
    """The peak is 6 pages: 100 % is room for everything, 83 % for 4 pages (4.98)."""
    out = tmp_path / "out.json"
    arguments = ("plan", trace_path, "--hardware", machine_path, "--policy", "lru", "-o", out)
    everything = run_json(*arguments, "--device-bytes", "100%")
    assert everything["predicted"]["percent_of_ideal"] == 100.0
    assert json.loads(out.read_text())["moves"] == []
    run_json(*arguments, "--device-bytes", "83%")
    assert json.loads(out.read_text())["device_bytes"] == 4 * PAGE


@pytest.mark.parametrize("broken", ["infeasible", "slower"])
def test_plan_that_the_validator_doubts_is_not_written(
    broken: str,
    trace_path: Path,
    machine_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tensorpager.planner import validator

    honest = validator.validate

    def doubt(*arguments: Any) -> Any:
        result = honest(*arguments)
        if broken == "infeasible":
            return replace(result, feasible=False, reason="no frame for 'weight'", predicted=None)
        assert result.predicted is not None
        slower = replace(result.predicted, iteration_us=result.predicted.iteration_us * 1.01)
        return replace(result, predicted=slower)

    monkeypatch.setattr(validator, "validate", doubt)
    out = tmp_path / "out.json"
    result = run("plan", trace_path, "--hardware", machine_path, "--policy", "lru", "-o", out)
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert "validator" in result.stderr
    assert not out.exists()


def test_compare_gives_what_the_design_says(trace_path: Path, machine_path: Path) -> None:
    found = run_json(
        "compare", trace_path, "--hardware", machine_path, "--policies", "lp,lru", "--quick"
    )
    assert list(found) == ["ideal_us", "bound", "policies"]
    assert sorted(found["bound"]) == ["iteration_us", "percent_of_ideal"]
    assert found["ideal_us"] == 30.0
    assert [entry["policy"] for entry in found["policies"]] == ["lp", "lru"]
    for entry in found["policies"]:
        assert list(entry) == [
            "policy",
            "feasible",
            "reason",
            "iteration_us",
            "percent_of_ideal",
            "percent_of_bound",
            "stall_us",
            "peak_device_bytes",
            "peak_host_bytes",
            "peak_disk_bytes",
            "bytes_out",
            "bytes_in",
            "disk_bytes_written",
            "plan_seconds",
        ]
        assert entry["feasible"] is True
        assert entry["iteration_us"] >= found["bound"]["iteration_us"] - 1e-6
        expected = 100 * found["bound"]["iteration_us"] / entry["iteration_us"]
        assert entry["percent_of_bound"] == pytest.approx(expected)


def test_compare_with_all_policies_by_default(trace_path: Path, machine_path: Path) -> None:
    from tensorpager.planner.registry import CHOOSERS, POLICIES

    found = run_json("compare", trace_path, "--hardware", machine_path, "--quick")
    named = [entry["policy"] for entry in found["policies"]]
    assert named == [name for name in POLICIES if name not in CHOOSERS]
    assert {"lru", "vdnn-all", "vdnn++", "autoswap-doa", "appobmem", "g10", "lp"} <= set(POLICIES)


def test_compare_tells_why_a_policy_has_no_plan(
    trace_path: Path, machine_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorpager.planner import registry

    def refuse(*_: Any) -> Plan:
        raise PolicyRefusal("cannot split 'weight'")

    find = registry.find
    monkeypatch.setattr(registry, "find", lambda name: refuse if name == "vdnn" else find(name))
    arguments = ("compare", trace_path, "--hardware", machine_path, "--policies", "vdnn,lru")
    entry = run_json(*arguments)["policies"][0]
    assert (entry["feasible"], entry["reason"]) == (False, "cannot split 'weight'")
    assert entry["plan_seconds"] >= 0
    kept = ("policy", "feasible", "reason", "plan_seconds")
    assert {entry[name] for name in entry if name not in kept} == {None}
    result = run(*arguments)
    assert "no plan" in result.stdout
    assert "vdnn: cannot split 'weight'" in result.stdout
    assert max(map(len, result.stdout.splitlines()[4:])) <= 80
