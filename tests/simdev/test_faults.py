"""Faults in the middle of a step on the simulated device: the step fails, nothing else does."""

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorpager as tp

from ..pager.faulty_engine import FaultyEngine, break_disk
from .device import Machine
from .trainings import CASES, Case, Outcome, Training, expected_of, nothing_is_left

pytestmark = [
    pytest.mark.simulated,
    pytest.mark.usefixtures("kernels"),
    pytest.mark.filterwarnings("ignore"),
]
SCHEDULES = ["lazy", "random", pytest.param("threads", marks=pytest.mark.slow)]
Break = Callable[[Machine, tp.Pager], Callable[[], None]]


def copy_fails(machine: Machine, pager: tp.Pager) -> Callable[[], None]:
    """The first copies of a step bring its batch; a later one is of a page."""
    machine.fail_copy(4)
    return lambda: machine.fail_copy(-1)


def allocation_fails(machine: Machine, pager: tp.Pager) -> Callable[[], None]:
    machine.fail_allocation(12)
    return lambda: machine.fail_allocation(-1)


def disk_fails(machine: Machine, pager: tp.Pager) -> Callable[[], None]:
    engine = break_disk(pager)
    engine.fail("read", errno.ENXIO)

    def heal() -> None:
        watched: Any = pager.core.disk.engine
        assert isinstance(watched.inner, FaultyEngine)
        assert watched.inner.happened
        watched.inner = watched.inner._inner

    return heal


FAULTS: dict[str, tuple[Break, Case]] = {
    "copy": (copy_fails, CASES["tight"]),
    "allocation": (allocation_fails, CASES["tight"]),
    "disk": (disk_fails, CASES["disk"]),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", FAULTS)
def test_a_step_that_failed_is_done_again(
    machine: Machine, name: str, schedule: str, tmp_path: Path
) -> None:
    """With the bits of a training in which nothing failed."""
    fault, case = FAULTS[name]
    expected = expected_of(case, machine, tmp_path)
    machine.schedule(schedule, 1)
    with nothing_is_left(machine):
        with case.pager(tmp_path) as pager:
            training = Training(case, pager)
            losses = [training.step(0), training.step(1)]
            heal = fault(machine, pager)
            with pytest.raises((RuntimeError, OSError, tp.PagerError)):
                training.step(2)
            heal()
            training.optimizer.zero_grad()
            losses += [training.step(number) for number in range(2, case.steps)]
            found = Outcome([loss.item() for loss in losses], training.parameters())
            del training, losses
        assert not machine.races()
    torch.accelerator.synchronize()
    assert found.same(expected)
