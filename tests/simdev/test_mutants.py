"""The tests of these tests: faults in the runtime's ordering are found, each by one training."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .device import Machine
from .mutants import MUTANTS, ROOT, broken_copy

pytestmark = pytest.mark.simulated
QUICK = (
    "an out-copy waits for no op",
    "an op does not wait for in-copies",
    "the host does not wait for out-copies",
)
# Which planned moves there are depends on time, so one training may not have the one that shows it.
MORE = ("tight", "streaming", "lp-disk", "lp", "lp", "lp")


def found(folder: Path, *cases: str) -> dict[str, str | None]:
    """What a process with the package in ``folder`` finds in these trainings."""
    done = subprocess.run(
        [sys.executable, "-m", "simdev.mutants", *cases],
        env={**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT / 'tests'}"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, str | None] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in MUTANTS]
)
def test_a_fault_is_found(machine: Machine, name: str, tmp_path: Path) -> None:
    mutant = MUTANTS[name]
    broken_copy(mutant, tmp_path)
    assert found(tmp_path, mutant.case, *MORE)["how"] is not None


@pytest.mark.slow
def test_nothing_is_found_where_there_is_no_fault(machine: Machine, tmp_path: Path) -> None:
    broken_copy(None, tmp_path)
    cases = {mutant.case for mutant in MUTANTS.values()}
    assert found(tmp_path, *sorted(cases))["how"] is None
