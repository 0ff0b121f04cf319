"""OpenMP's threads sleep as they wait while threads that move pages have to wait for cores."""

import os
import subprocess
import sys

import pytest

from tensorpager.pager.devices.openmp import OpenMPWaits

CHILD = """
import os, pathlib
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
import torch
from tensorpager.pager.devices.openmp import OpenMPWaits

torch.set_num_threads(2)
here = pathlib.Path("/proc/self/task")
before = {*here.iterdir()}
values = torch.ones(1 << 16)
values.add_(1)
(worker,) = {*here.iterdir()} - before  # of the team that ops have

def sleeps():
    status = (worker / "status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("voluntary"))

def of_ops(count):
    began = sleeps()
    for _ in range(count):
        values.add_(1)
        sum(range(2000))
    return sleeps() - began

waits = OpenMPWaits(lambda: True)
mine = {*here.iterdir()}
waits.judge(0.9)
busy = of_ops(200)
added = {*here.iterdir()} - mine
waits.judge(0.0)
while any(task.exists() for task in added):  # the kernel forgets them later
    pass
print(busy, of_ops(200))
"""


def test_threads_of_ops_sleep_between_them_as_long_as_cores_are_busy() -> None:
    maps = subprocess.run(
        [sys.executable, "-c", "import torch; print(open('/proc/self/maps').read())"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    if "/libgomp.so.1" not in maps:
        pytest.skip("PyTorch has another OpenMP than GNU's here")
    # As in a user's program: with these, which our scripts set, they would sleep anyway.
    waits = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    done = subprocess.run(
        [sys.executable, "-c", CHILD], capture_output=True, text=True, check=True,
        env={name: value for name, value in os.environ.items() if name not in waits},
    )  # fmt: skip
    busy, idle = map(int, done.stdout.split())
    assert busy >= 100, done.stdout
    assert idle < 100, done.stdout  # a few of 200


def test_spinning_is_tried_again_ever_more_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = OpenMPWaits(lambda: True)
    monkeypatch.setattr(waits, "_manage", lambda begun: begun.set())
    waits.judge(0.3)
    assert not waits.asleep
    for idle in (1, 2, 4):
        waits.judge(0.5)
        for share in (
            *[0.1] * (idle - 1),
            0.3,
            *[0.1] * (idle - 1),
        ):  # one that is not idle between
            waits.judge(share)
            assert waits.asleep
        waits.judge(0.1)
        assert not waits.asleep


def test_what_threads_waited_is_of_one_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    """And of those that there were when it began; nothing while nothing moves."""
    moves, found, shares = [True], {"1": 5, "2": 10**18}, []
    monkeypatch.setattr("tensorpager.pager.devices.openmp._delays", lambda: dict(found))
    waits = OpenMPWaits(lambda: moves[0])
    monkeypatch.setattr(waits, "_openmp", object())
    monkeypatch.setattr(waits, "judge", shares.append)
    monkeypatch.setattr(waits, "_known", dict(found))
    found.update({"1": 10**18, "3": 10**19})
    waits.iteration_ended()
    assert shares[0] > 1e3
    waits.iteration_ended()
    assert shares[1] == 0
    moves[0] = False
    waits.iteration_ended()
    assert len(shares) == 2
