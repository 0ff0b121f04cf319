"""Trainings on the simulated device: the bits of the plain run on it, no race, nothing left."""

from pathlib import Path

import pytest

from .device import Machine
from .trainings import CASES, Outcome, expected_of, nothing_is_left, run

pytestmark = [
    pytest.mark.simulated,
    pytest.mark.usefixtures("kernels"),
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream"),  # the user's side stream
]
SLOW = pytest.mark.slow
SCHEDULES = [("lazy", 0), ("random", 1), ("random", 2), ("random", 3), ("threads", 0)]
RUNS = [
    # One of the first two in the quick run, in turns.
    pytest.param(*schedule, name, marks=() if turn == number % 2 else SLOW)
    for turn, schedule in enumerate(SCHEDULES)
    for number, name in enumerate(CASES)
]


@pytest.fixture(scope="module")
def expected() -> dict[str, Outcome]:
    return {}


@pytest.mark.parametrize(("schedule", "seed", "name"), RUNS)
def test_same_bits_no_race_nothing_left(
    machine: Machine,
    schedule: str,
    seed: int,
    name: str,
    expected: dict[str, Outcome],
    tmp_path: Path,
) -> None:
    case = CASES[name]
    if name not in expected:
        expected[name] = expected_of(case, machine, tmp_path)
    machine.schedule(schedule, seed)
    with nothing_is_left(machine):
        outcome = run(case, machine, tmp_path)
        assert not machine.races()
    assert outcome.same(expected[name])
    if case.must_move:
        assert outcome.stats["faults"] > 0
        assert outcome.stats["bytes_out"] > 0
    if "disk_budget" in case.tiers:
        assert outcome.stats["disk_bytes_written"] > 0
    if name.startswith("again"):
        assert outcome.stats["reruns"] > 0
    if name == "activations":
        assert outcome.stats["activation pages"] > 0
