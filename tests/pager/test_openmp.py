"""OpenMP's threads sleep where a thread that moves pages needs their core."""

import os
import subprocess
import sys

import pytest

CHILD = """
import os, pathlib, threading
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
import torch
from tensorpager.pager.moves.tickets import Lane

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

lane, ended = Lane("test", 1), threading.Event()

class Ticket:
    def carry(self, run):
        ended.set()

lane.add(None, Ticket())
ended.wait()
print(of_ops(200))
"""


def test_threads_of_ops_sleep_between_them_beside_one_that_moves_pages() -> None:
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
    assert int(done.stdout) >= 100, done.stdout  # without the lane it spins: a few of 200
