"""What the runtime has to wait for, one small program each; see orders.py and mutants.py."""

from pathlib import Path

import pytest

from .device import Machine
from .orders import SCRIPTS

pytestmark = [pytest.mark.simulated, pytest.mark.usefixtures("kernels")]


@pytest.mark.parametrize("schedule", ["lazy", "random"])
@pytest.mark.parametrize("name", SCRIPTS)
def test_right_bytes_and_no_race(
    machine: Machine, name: str, schedule: str, tmp_path: Path
) -> None:
    machine.schedule(schedule, 1)
    SCRIPTS[name](machine, tmp_path)
    assert not machine.races()
