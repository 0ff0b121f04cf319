"""One suite for every implementation of the machine model: cases worked out by hand, and random
plans on which the implementations must agree."""

from __future__ import annotations

import importlib
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, note

from tensorpager.planner.hardware import from_mapping
from tensorpager.planner.plan import Move, Plan, StartRun
from tensorpager.planner.simulation import Simulation
from tensorpager.planner.trace import make_trace

from . import choice_cases as by_hand
from .examples import examples
from .machine_cases import FEASIBLE, INFEASIBLE, HandCase
from .random_plans import Case, cases, choice_case_of, choice_cases

Run = Callable[..., Simulation]
CASE_FILE = Path(__file__).resolve().parents[3] / "shared" / "data" / "machine_model_cases.json"
FILED: list[dict[str, Any]] = json.loads(CASE_FILE.read_text()) if CASE_FILE.exists() else []
NO_FILE = [pytest.param({}, marks=pytest.mark.skip(f"{CASE_FILE} is not there"), id="no case file")]


def implementation(name: str) -> Run:
    """Imported late: a broken one must not take the other's tests with it."""
    module = importlib.import_module(f"tensorpager.planner.{name}")
    run: Run = getattr(module, {"validator": "validate", "simulator": "simulate"}[name])
    return run


@pytest.fixture(params=["validator", "simulator"])
def run(request: pytest.FixtureRequest) -> Run:
    return implementation(request.param)


def check(result: Simulation, expect: dict[str, float]) -> None:
    """``expect``: fields of ``Predicted``; ``feasible`` is true unless given."""
    expect = dict(expect)
    assert result.feasible == expect.pop("feasible", True), result.reason
    if not result.feasible:
        assert result.reason
        assert result.predicted is None
        return
    assert result.predicted is not None
    found = {name: getattr(result.predicted, name) for name in expect}
    assert found == pytest.approx(expect, abs=1e-6)
    if not (result.predicted.recompute_us or result.predicted.host_us or "host_us" in expect):
        waited = result.predicted.iteration_us - result.predicted.ideal_us
        assert result.predicted.stall_us == pytest.approx(max(waited, 0.0), abs=1e-6)


@pytest.mark.parametrize("filed", FILED or NO_FILE, ids=lambda filed: filed.get("name", "none"))
def test_case_file(run: Run, filed: dict[str, Any]) -> None:
    hardware = from_mapping(filed["hardware"], filed["name"])
    trace = make_trace(
        [(number, nbytes, lasting) for number, nbytes, lasting in filed["tensors"]],
        [(f"op{number}", *op) for number, op in enumerate(filed["ops"])],
        page_size=int(hardware.page_size),
    )
    plan = Plan(
        policy="case",
        page_size=int(hardware.page_size),
        device_bytes=hardware.device_bytes,
        host_bytes=hardware.host_bytes,
        disk_bytes=hardware.disk_bytes,
        moves=[Move(*move) for move in filed["moves"]],
        start=[StartRun(*start) for start in filed["start"]],
    )
    check(run(trace, hardware, plan), filed["expect"])


@pytest.mark.parametrize("case", [*FEASIBLE, *by_hand.FEASIBLE], ids=lambda case: case.name)
def test_feasible_by_hand(run: Run, case: HandCase) -> None:
    built = case.build()
    check(run(built.trace, built.hardware, built.plan), case.expect)


@pytest.mark.parametrize("case", [*INFEASIBLE, *by_hand.INFEASIBLE], ids=lambda case: case.name)
def test_infeasible_by_hand(run: Run, case: HandCase) -> None:
    built = case.build()
    check(run(built.trace, built.hardware, built.plan), {"feasible": False})


FIELDS = (
    "iteration_us",
    "ideal_us",
    "stall_us",
    "peak_device_bytes",
    "peak_host_bytes",
    "peak_disk_bytes",
    "bytes_out",
    "bytes_in",
    "disk_bytes_written",
    "recompute_us",
    "host_us",
)


@examples(600)
@given(case=cases())
def test_simulator_and_validator_agree(case: Case) -> None:
    agree(case)


@examples(600)
@given(case=choice_cases())
def test_they_agree_on_choices(case: Case) -> None:
    agree(case)


def test_random_choices_are_often_possible() -> None:
    """Or the test before would say little."""
    feasible: Counter[str] = Counter()
    for seed in range(300):
        case = choice_case_of(seed)
        if implementation("simulator")(case.trace, case.hardware, case.plan).feasible:
            plan = case.plan
            feasible["recompute"] += bool(plan.recompute)
            feasible["host"] += bool(plan.host_steps)
            feasible["deferred"] += bool(plan.deferred)
    assert min(feasible[kind] for kind in ("recompute", "host", "deferred")) >= 5, feasible


def agree(case: Case) -> None:
    note(repr(case))
    validated = implementation("validator")(case.trace, case.hardware, case.plan)
    simulated = implementation("simulator")(case.trace, case.hardware, case.plan)
    assert simulated.feasible == validated.feasible, (simulated.reason, validated.reason)
    if validated.feasible:
        expected = {name: getattr(validated.predicted, name) for name in FIELDS}
        found = {name: getattr(simulated.predicted, name) for name in FIELDS}
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-3)
        assert simulated.iterations == validated.iterations
