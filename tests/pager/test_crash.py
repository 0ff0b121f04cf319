"""kill -9 at random points: nothing is left behind, and training goes on from the checkpoint."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from .. import programs

SCRIPT = Path(__file__).parents[2] / "scripts" / "kill_test.py"

if sys.platform != "linux":
    pytest.skip("looks for open files in /proc, which only Linux has", allow_module_level=True)


def kill(tmp_path: Path, runs: int, *, seed: int = 0) -> dict[str, Any]:
    report = tmp_path / "found.json"
    environment = {k: v for k, v in os.environ.items() if k != "LOCAL_WORLD_SIZE"}
    arguments = (f"--runs={runs}", f"--seed={seed}", f"--folder={tmp_path}", f"--json={report}")
    result = programs.run(str(SCRIPT), *arguments, env=environment, timeout=600 + 30 * runs)
    found: dict[str, Any] = json.loads(report.read_text()) if report.exists() else {}
    assert result.returncode == 0, (found.get("problems"), result.stderr[-3000:])
    assert list(tmp_path.iterdir()) == [report]
    return found


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_kills(tmp_path: Path) -> None:
    found = kill(tmp_path, 100, seed=1)
    assert found["problems"] == []
    assert found["kills"] == found["clean"] == sum(found["phases"].values()) == 100
    assert found["planned_iterations"] > 0
    assert found["with_workers"] > 20
    assert found["resumed"] > 20
    assert {"training", "writing a checkpoint"} <= found["phases"].keys()
    assert found["bystander_trainings"] > 0
