"""The planner as a process: the same plan as in this process, and honest ends."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorpager.planner import background
from tensorpager.planner.background import plan_with_layout
from tensorpager.planner.errors import InfeasibleBudget, PagerError
from tensorpager.planner.hardware import Hardware, from_mapping
from tensorpager.planner.lp.policy import bound
from tensorpager.planner.places.layout import layout_from_json, layout_to_json
from tensorpager.planner.plan import Bound, Plan, plan_from_json, plan_to_json
from tensorpager.planner.registry import find
from tensorpager.planner.request import ARRAYS, read_header, read_trace, write_request
from tensorpager.planner.simulator import simulate
from tensorpager.planner.trace import Trace, make_trace
from tensorpager.planner.trace_file import decode_trace, encode_trace
from tensorpager.planner.validator import validate

from .examples import examples
from .random_plans import random_trace

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-P", "-m", "tensorpager.planner.background"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
PAGE = 64 << 10


def layers(count: int, *, pages: int = 8) -> Trace:
    """Forward, backward and step of ``count`` layers: a weight, a state and an activation each."""
    tensors = [(n, pages * PAGE, True) for n in range(2 * count)]
    tensors += [(n, pages * PAGE // 2, False) for n in range(2 * count, 4 * count)]
    ops = []
    for n in range(count):
        before = [2 * count + n - 1] if n else []
        ops.append((f"forward.{n}", 900.0, [n, *before], [2 * count + n]))
    for n in reversed(range(count)):
        ops.append((f"backward.{n}", 1800.0, [n, 2 * count + n], [3 * count + n]))
        ops.append((f"step.{n}", 200.0, [n, count + n, 3 * count + n], [n, count + n]))
    return make_trace(tensors, ops, page_size=PAGE)


def machine(pages: int) -> Hardware:
    return Hardware(
        pages * PAGE, float("inf"), 0, 1e9, 1e9, transfer_latency_us=5.0, page_size=PAGE
    )


def ask(request: bytes, **options: Any) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        COMMAND, input=request, capture_output=True, env=ENVIRONMENT, timeout=300, **options
    )


def request_for(trace: Trace, hardware: Hardware, **changes: Any) -> bytes:
    options = {"quick": True, "policy": "lp", "parent_pid": os.getpid()} | changes
    return write_request(trace, hardware, **options)


@pytest.mark.parametrize(
    ("device", "quick", "us", "left"),
    [
        ("cuda:0", False, 5000.0, 63),
        ("cuda:0", False, 8000.0, 64),  # it would wait for that
        ("cuda:0", True, 5000.0, 62),  # no try with more of it
        ("cuda:0", True, 8000.0, 64),
        ("cpu", False, 5000.0, 56),  # one try
        ("cpu", True, 5000.0, 56),
        ("cpu", True, 8000.0, 64),
    ],
)
def test_frames_are_spared_where_that_saves_time(
    monkeypatch: pytest.MonkeyPatch, device: str, quick: bool, us: float, left: int
) -> None:
    """The plan for all 64 frames takes 4 ms, and has no place for one page: others have."""
    monkeypatch.setattr(background, "NEARLY", 0.0)
    trace, hardware = replace(layers(6), device=device), machine(64)

    made = background._plan(trace, hardware, True, "lp")[1]
    assert made.predicted is not None

    def plan(trace: Trace, hardware: Hardware, *_: Any) -> Any:
        frames = int(hardware.device_bytes // hardware.page_size)
        predicted = replace(made.predicted, iteration_us=4000.0 if frames == 64 else us)
        return trace, replace(made, policy=str(frames), predicted=predicted)

    monkeypatch.setattr(background, "_plan", plan)
    monkeypatch.setattr(
        background,
        "simulate",
        lambda trace, hardware, plan: SimpleNamespace(predicted=plan.predicted),
    )
    monkeypatch.setattr(
        background,
        "place",
        lambda trace, plan, frames: SimpleNamespace(
            unplaced_pages=max(0, int(plan.policy) - 63), shifts=[]
        ),
    )
    found = plan_with_layout(trace, hardware, quick=quick)[0]
    assert found.policy == str(left)
    assert found.device_bytes == hardware.device_bytes


def test_for_a_cpu_a_quick_plan_with_frames_to_spare_may_be_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where it is hardly slower than a device without limit: then no other one is made."""
    trace, hardware = replace(layers(6), device="cpu"), machine(64)
    asked = []
    make = background._plan

    def plan(trace: Trace, hardware: Hardware, *rest: Any) -> Any:
        asked.append(hardware.device_bytes // hardware.page_size)
        return make(trace, hardware, *rest)

    monkeypatch.setattr(background, "_plan", plan)
    monkeypatch.setattr(background, "NEARLY", 100.0)
    found = plan_with_layout(trace, hardware, quick=True)[0]
    assert asked == [56]
    assert found.bound is not None
    assert found.bound.iteration_us == trace.ideal_us
    assert found.device_bytes == hardware.device_bytes
    asked.clear()
    pages = int(trace.pages(PAGE).sum())
    assert not plan_with_layout(trace, machine(pages), quick=True)[0].moves
    assert asked == [pages]  # where everything fits, none is spared


@pytest.mark.parametrize(
    ("us", "moves", "taken"),
    [(100.2, 3, True), (100.4, 3, False), (99.0, 4, False)],
    ids=["fewer, hardly slower", "slower", "not fewer"],
)
def test_a_plan_of_fewer_moves_is_taken(
    monkeypatch: pytest.MonkeyPatch, us: float, moves: int, taken: bool
) -> None:
    """If it takes hardly longer; with the bound that the full search has found."""
    trace, hardware = layers(6), machine(64)
    made = background._plan(trace, hardware, True, "lp")[1]
    assert made.predicted is not None

    def plan(its: Trace, _hardware: Hardware, quick: bool, _policy: str) -> tuple[Trace, Plan]:
        predicted = replace(made.predicted, iteration_us=us if quick else 100.0)
        kept = made.moves[: moves if quick else 4]
        return its, replace(made, predicted=predicted, moves=kept, bound=Bound(90.0, 90.0))

    monkeypatch.setattr(background, "_plan", plan)
    monkeypatch.setattr(
        background, "place", lambda *_: SimpleNamespace(unplaced_pages=0, shifts=[])
    )
    found = plan_with_layout(trace, hardware, quick=False)[0]
    assert len(found.moves) == (3 if taken else 4)
    assert found.bound is not None
    assert found.bound.iteration_us == 90.0
    assert found.predicted is not None
    assert found.bound.percent_of_bound == pytest.approx(9000 / found.predicted.iteration_us)


def test_the_same_plan_as_in_this_process() -> None:
    trace, hardware = layers(6), machine(64)
    plan, layout = plan_with_layout(trace, hardware, quick=True)
    done = ask(request_for(trace, hardware))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(b"\n") == 1
    answer = json.loads(done.stdout)
    assert answer == json.loads(
        json.dumps({"plan": plan_to_json(plan), "layout": layout_to_json(layout), "again": None})
    )
    assert layout_from_json(answer["layout"]) == layout
    assert list(plan_from_json(answer["plan"]).moves) == list(plan.moves)
    assert plan.moves
    assert layout.frames == 64


@pytest.mark.parametrize("pages", [40, 48, 56, 64, 80])
@pytest.mark.parametrize("policy", ["lp", "g10"])
def test_plans_are_the_whole_device_s(pages: int, policy: str) -> None:
    """With the prediction and the bound of all of it."""
    trace, hardware = layers(6), machine(pages)
    plan, layout = plan_with_layout(trace, hardware, quick=False, policy=policy)
    assert layout.frames == pages
    assert plan.device_bytes == hardware.device_bytes
    assert simulate(trace, hardware, plan).predicted == plan.predicted
    assert validate(trace, hardware, plan).feasible
    if policy == "lp":
        assert plan.bound is not None
        assert plan.bound.iteration_us == pytest.approx(bound(trace, hardware), rel=1e-6)


def test_a_refusal_names_the_smallest_budget() -> None:
    trace = layers(3)
    with pytest.raises(InfeasibleBudget) as refusal:
        plan_with_layout(trace, machine(6), quick=True)
    done = ask(request_for(trace, machine(6)))
    assert done.returncode == 0
    assert json.loads(done.stdout) == {
        "refused": str(refusal.value),
        "minimum": refusal.value.minimum,
    }
    plan_with_layout(trace, machine(refusal.value.minimum // PAGE), quick=True)


def test_a_refusal_without_a_smallest_budget() -> None:
    done = ask(request_for(layers(3), machine(30).with_(host_bytes=PAGE), policy="vdnn-all"))
    answer = json.loads(done.stdout)
    assert set(answer) == {"refused", "minimum"}
    assert answer["minimum"] is None


# --- requests ------------------------------------------------------------------------------------


def sent(trace: Trace) -> Trace:
    """What the planner process reads."""
    stream = io.BytesIO(request_for(trace, machine(8)))
    return read_trace(stream, read_header(stream))


@examples(25)
@given(st.integers(0, 10**6))
def test_the_trace_arrives_as_a_trace_file_would_have_it(seed: int) -> None:
    trace = replace(random_trace(Random(seed)), device="cpu")
    arrived, filed = sent(trace), decode_trace(encode_trace(trace, "it"), "it")
    for name, kind, _ in ARRAYS:
        assert getattr(arrived, name).dtype == kind
        assert getattr(arrived, name).flags.aligned
        np.testing.assert_array_equal(getattr(arrived, name), getattr(filed, name))
    for name in ("page_size", "device", "op_names", "tensor_names", "tensor_kinds"):
        assert getattr(arrived, name) == getattr(filed, name)
    assert arrived.sha256 == trace.sha256


def test_the_plan_is_that_of_the_trace_file() -> None:
    trace = replace(layers(4), sha256="ab" * 32)
    filed = replace(decode_trace(encode_trace(trace, "it"), "it"), sha256=trace.sha256)
    answers = [plan_with_layout(t, machine(48), quick=True) for t in (sent(trace), filed)]
    assert answers[0] == answers[1]
    assert answers[0][0].moves
    assert answers[0][0].trace_sha256 == trace.sha256


def test_names_may_be_any_text() -> None:
    trace = replace(layers(1), tensor_names=["ü\n\ud800", None, "", "\x00"])
    assert sent(trace).tensor_names == trace.tensor_names


GOOD = request_for(layers(2), machine(30))
HEADER, ARRAY_BYTES = GOOD.split(b"\n", 1)
BAD = [
    (b"", "not JSON"),
    (b"\x00\xff garbage", "not JSON"),
    (b"[" * 100_000, "not JSON"),
    (b"[]\n", "not a JSON object"),
    (
        HEADER.replace(b'"page_size": 65536, "host', b'"pages": 1, "host') + b"\n",
        "unknown key 'pages'",
    ),
    (HEADER.replace(b'"lp"', b'"belady"') + b"\n" + ARRAY_BYTES, "no policy 'belady'"),
    (GOOD[:-10], "the trace ends after"),
]


@pytest.mark.parametrize(("request_bytes", "reason"), BAD, ids=[reason for _, reason in BAD])
def test_what_is_no_request_is_refused(request_bytes: bytes, reason: str) -> None:
    def read() -> None:
        stream = io.BytesIO(request_bytes)
        header = read_header(stream)
        from_mapping(header["hardware"], "hardware")
        read_trace(stream, header)
        find(header["policy"])

    with pytest.raises(PagerError, match=re.escape(reason)):
        read()


@pytest.mark.parametrize(("request_bytes", "reason"), [BAD[0], BAD[-1]])
def test_no_request_is_one_line_and_exit_code_2(request_bytes: bytes, reason: str) -> None:
    done = ask(request_bytes)
    lines = done.stderr.decode().splitlines()
    assert (done.returncode, done.stdout, len(lines)) == (2, b"", 1), lines
    assert reason in lines[0]


def test_it_needs_neither_torch_nor_arrow() -> None:
    code = (
        "import sys, tensorpager.planner.background, tensorpager.planner.lp.policy;"
        "sys.exit('torch' in sys.modules or 'pyarrow' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, check=True, timeout=300)


def test_a_reader_that_is_gone_ends_it() -> None:
    process = subprocess.Popen(
        COMMAND,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    process.stdin.write(GOOD)
    process.stdin.close()
    assert process.wait(300) == 1
    assert b"Traceback" not in process.stderr.read()
    process.stderr.close()


def test_interrupts_are_not_for_it() -> None:
    process = subprocess.Popen(
        COMMAND,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
    )
    wait_until(lambda: runs(psutil.Process(process.pid)))  # the interrupt is ignored by then
    process.send_signal(signal.SIGINT)
    answer, complaints = process.communicate(GOOD, timeout=300)
    assert "plan" in json.loads(answer)
    assert complaints == b""


PARENT = """
import subprocess, sys, time
child = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
print(child.pid, flush=True)
time.sleep(600)
"""


def test_it_dies_with_its_parent() -> None:
    """The pipes stay open: this process has copies of them."""
    reader, writer = os.pipe()
    script = PARENT.replace("stdin=subprocess.PIPE", f"stdin={reader}")
    parent = subprocess.Popen(
        [sys.executable, "-c", script, *COMMAND],
        stdout=subprocess.PIPE,
        env=ENVIRONMENT,
        pass_fds=[reader],
    )
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    wait_until(lambda: runs(child))  # and waits for the request
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
    parent.stdout.close()
    os.close(reader)
    os.close(writer)


def test_a_request_of_a_dead_parent_is_not_worked_on() -> None:
    done = ask(request_for(layers(2), machine(30), parent_pid=1 << 22))
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def runs(process: psutil.Process) -> bool:
    """It is past its import of the planner: it ignores Ctrl-C by now."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    ignored = int(status.split("SigIgn:")[1].split()[0], 16)
    return bool(ignored >> (signal.SIGINT - 1) & 1)


def wait_until(condition: Any, seconds: float = 300.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "did not happen"
        time.sleep(0.05)


def test_one_whose_parent_is_gone_waits_for_nothing() -> None:
    """Though somebody holds the other end of its pipe."""
    process = subprocess.Popen([*COMMAND, "-1"], stdin=subprocess.PIPE, env=ENVIRONMENT)
    try:
        assert process.wait(300) == 0
    finally:
        assert process.stdin is not None
        process.stdin.close()
