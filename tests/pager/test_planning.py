"""The planning process, from the side of the training."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tensorpager.pager.errors import PagerError
from tensorpager.pager.plan import planning
from tensorpager.pager.plan.planning import Awaited, PlanningProcess, PlanRefused
from tensorpager.planner.background import plan_with_layout
from tensorpager.planner.hardware import Hardware
from tensorpager.planner.trace import Trace, make_trace

from .. import programs

ROOT = Path(__file__).parents[2]
PAGE = 64 << 10


def chain(count: int = 6, *, pages: int = 8) -> Trace:
    """Forward and backward of ``count`` layers."""
    tensors = [(n, pages * PAGE, n < count) for n in range(3 * count)]
    ops = []
    for n in range(count):
        before = [count + n - 1] if n else []
        ops.append((f"forward.{n}", 900.0, [n, *before], [count + n]))
    ops += [
        (f"backward.{n}", 1800.0, [n, count + n], [2 * count + n]) for n in reversed(range(count))
    ]
    ops.append(("step", 900.0, [0, 2 * count], [0]))
    return make_trace(tensors, ops, page_size=PAGE)


def machine(pages: int) -> Hardware:
    return Hardware(pages * PAGE, float("inf"), 0, 1e9, 1e9, page_size=PAGE)


def asked(trace: Trace, hardware: Hardware, *, quick: bool = False) -> PlanningProcess:
    process = PlanningProcess()
    process.ask(trace, hardware, quick=quick)
    return process


def planners() -> list[psutil.Process]:
    """Planners that this process started, reaped ones apart."""
    return [
        child
        for child in psutil.Process().children(recursive=True)
        if planning.MODULE in " ".join(child.cmdline() or ["zombie " + planning.MODULE])
    ]


def wait_until(condition: Callable[[], object], seconds: float = 300.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "did not happen"
        time.sleep(0.02)


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A planner that reads its request and never answers."""
    start = planning.subprocess.Popen

    def start_sleeper(command: list[str], **options: object) -> "subprocess.Popen[bytes]":
        code = f"import sys, time; '{planning.MODULE}'; sys.stdin.buffer.read(); time.sleep(600)"
        return start([command[0], "-c", code], **options)  # type: ignore[call-overload]

    with monkeypatch.context() as patch:
        patch.setattr(planning.subprocess, "Popen", start_sleeper)
        yield
    assert not planners()


def test_the_plan_is_that_of_this_process() -> None:
    trace, hardware = chain(), machine(70)
    process = asked(trace, hardware, quick=True)
    planned = process.result(300)
    assert process.done()
    plan, layout = plan_with_layout(trace, hardware, quick=True)
    assert plan.moves
    assert planned.plan == plan
    assert planned.layout == layout
    assert process.result() is planned
    assert not planners()
    process.cancel()  # what is there stays
    assert process.result() is planned


def test_what_it_has_said_is_a_plan_elsewhere_too() -> None:
    process, awaited = asked(chain(), machine(70), quick=True), Awaited()
    with pytest.raises(PagerError, match="another rank"):
        awaited.result()
    planned = process.result(300)
    awaited.told(process.said)
    assert awaited.done()
    assert awaited.result() == planned
    refused, awaited = asked(chain(), machine(5), quick=True), Awaited()
    with pytest.raises(PlanRefused) as refusal:
        refused.result(300)
    awaited.told(refused.said)
    with pytest.raises(PlanRefused, match="too small") as other:
        awaited.result()
    assert other.value.minimum == refusal.value.minimum


def test_what_was_cancelled_has_said_nothing(endless: None) -> None:
    process = asked(chain(), machine(70))
    assert not process.said
    process.cancel()
    with pytest.raises(PagerError, match="cancelled"):
        process.result(300)
    assert not process.said


def test_one_that_was_started_early_answers() -> None:
    trace, hardware = chain(), machine(70)
    process = PlanningProcess()
    wait_until(planners)
    assert not process.done()
    process.ask(trace, hardware, quick=True)
    assert process.result(300).plan == plan_with_layout(trace, hardware, quick=True)[0]
    assert not planners()


def test_one_that_is_never_asked_goes_when_it_is_cancelled() -> None:
    process = PlanningProcess()
    wait_until(planners)
    process.cancel()
    assert not planners()
    with pytest.raises(PagerError, match="cancelled"):
        process.result(0)


def test_a_refusal() -> None:
    process = asked(chain(), machine(5), quick=True)
    with pytest.raises(PlanRefused, match="too small") as refusal:
        process.result(300)
    assert refusal.value.minimum is not None
    assert refusal.value.minimum > 5 * PAGE
    with pytest.raises(PlanRefused):
        process.result()


def test_starting_takes_no_time_of_the_caller(
    endless: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the request's bytes nor the fork are waited for."""
    proceed = threading.Event()
    write = planning.write_request

    def write_later(*arguments: object, **options: object) -> bytes:
        assert proceed.wait(300)
        return write(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(planning, "write_request", write_later)
    process = asked(chain(), machine(70))
    assert not process.done()
    proceed.set()
    wait_until(planners)
    process.cancel()


def test_result_can_be_waited_for_a_while(endless: None) -> None:
    process = asked(chain(), machine(70))
    with pytest.raises(TimeoutError, match="still being made"):
        process.result(0.05)
    assert not process.done()
    process.cancel()


def test_cancel_leaves_no_process(endless: None) -> None:
    process = asked(chain(), machine(70))
    wait_until(planners)
    process.cancel()
    assert not planners()
    assert process.done()
    process.cancel()
    with pytest.raises(PagerError, match="cancelled"):
        process.result(0)


def test_cancel_before_it_has_started(endless: None) -> None:
    for _ in range(5):
        process = asked(chain(), machine(70))
        process.cancel()
        assert process.done()
        assert not planners()


def test_a_forgotten_one_is_cancelled(endless: None) -> None:
    process = asked(chain(), machine(70))
    wait_until(planners)
    del process
    gc.collect()
    assert not planners()


def test_a_planner_that_dies() -> None:
    process = asked(chain(), machine(70))
    wait_until(planners)
    planners()[0].send_signal(signal.SIGKILL)
    with pytest.raises(PagerError, match=r"the planner died \(signal 9\)"):
        process.result(300)


def test_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "write_request", lambda *_, **__: b"nonsense\n")
    process = asked(chain(), machine(70))
    with pytest.raises(PagerError, match=r"\(exit code 2\): .*not JSON"):
        process.result(300)


def test_an_interpreter_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    process = asked(chain(), machine(70))
    with pytest.raises(PagerError, match="cannot be started: /nowhere/python"):
        process.result(300)


SCRIPT = """
import os, sys, threading, time
import psutil
from tests.pager.test_planning import *

code = "import sys, time; '" + planning.MODULE + "'; time.sleep(600)"
start = planning.subprocess.Popen
planning.subprocess.Popen = lambda command, **o: start([command[0], "-c", code], **o)
process = asked(chain(), machine(70))
wait_until(planners)
print(planners()[0].pid, flush=True)
{end}
"""


@pytest.mark.parametrize("end", ["", "sys.exit(3)", "raise KeyboardInterrupt"])
def test_none_outlives_the_interpreter(end: str) -> None:
    script = SCRIPT.format(end=end)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = programs.run("-c", script, env=environment)
    assert done.stdout, done.stderr
    assert not psutil.pid_exists(int(done.stdout))


def test_a_killed_training_takes_its_planner_along() -> None:
    """A real planner with a real request, while forked children hold copies of its pipes."""
    script = """
import os, sys, time
from tests.pager.test_planning import asked, chain, machine, planners, wait_until
process = asked(chain(60), machine(500))
wait_until(planners)
wait_until(lambda: planners()[0].nice() >= 10)
holder = os.fork()
if not holder:
    time.sleep(600)
print(planners()[0].pid, holder, flush=True)
time.sleep(600)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    training = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment
    )
    assert training.stdout is not None
    planner, holder = (int(pid) for pid in training.stdout.readline().split())
    training.kill()
    training.wait()
    training.stdout.close()
    wait_until(lambda: not psutil.pid_exists(planner))
    os.kill(holder, signal.SIGKILL)


def test_a_thread_that_starts_one_may_end() -> None:
    """The planner dies with the training, not with the thread that asked for it."""
    found: list[PlanningProcess] = []

    def ask() -> None:
        found.append(asked(chain(), machine(70), quick=True))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert found[0].result(300).plan.moves


def test_a_forked_copy_does_not_cancel_it(endless: None) -> None:
    process = asked(chain(), machine(70))
    wait_until(planners)
    child = os.fork()
    if not child:
        process.cancel()
        os._exit(0)
    os.waitpid(child, 0)
    assert len(planners()) == 1
    process.cancel()


# --- what it costs the training ------------------------------------------------------------------

TRAINING = """
import sys
import torch
import tensorpager as tp
options = dict(host_budget="64MiB", page_size="64KiB", dense_reserve="1MiB", device="cpu")
with tp.Pager(device_budget="3MiB", **options) as pager:
    layers = [torch.nn.Linear(256, 256) for _ in range(6)]
    model = pager.page_module(torch.nn.Sequential(*layers))
    optimizer = pager.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    pager.core.follower.only_if_faster = False
    for _ in range(5):
        with pager.iteration():
            model(torch.ones(32, 256)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        pager.plan()
    stats = pager.stats()
assert stats["mode"] == "planned" and stats["planned_iterations"], stats
assert stats["peak_bytes"]["host"], stats  # there was something to plan
print([name for name in ("pyarrow", "highspy", "pandas") if name in sys.modules])
"""


ASKING = """
import sys
from tests.pager.test_planning import asked, chain, machine
assert asked(chain(), machine(70), quick=True).result(300).plan.moves
print([name for name in ("pyarrow", "highspy", "pandas", "torch") if name in sys.modules])
"""


@pytest.mark.parametrize(
    "script",
    [ASKING, pytest.param(TRAINING, marks=pytest.mark.slow)],
    ids=["asking", "training"],
)
def test_a_plan_loads_no_arrow_here(script: str) -> None:
    """It would map 50 MiB, which no budget counts: only trace files are worth that."""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().strip() == "[]"
