"""bench_kernels.py without a GPU: what every case computes, claims and records.

The path of a GPU run is walked with a CPU's clock and tiny operands; its figures mean nothing.
"""

import dataclasses
import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import bench_kernels
import pytest
import torch
from click.testing import CliRunner
from kernels_bench import link_sweep, rates
from kernels_bench.case import Case, Job, Rates, ResultError, Setting, Work, close, same
from kernels_bench.cases import CASES
from kernels_bench.clock import CpuClock, CudaClock, summary, take_turns
from kernels_bench.goals import GOALS, Found, judge
from kernels_bench.measure import Bench, Sizes
from kernels_bench.pages import Pages

from tensorpager.kernels import launch

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
from page_suite import kernels_in_folder

PAGE = 4096
ODD = Setting("cpu", 5 * PAGE - 36, PAGE)
WHOLE = Setting("cpu", 8 * PAGE, PAGE)
FLAT_RATES = Rates(1e9, 1e9)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def launched(run: Callable[[], Any]) -> set[str]:
    """Names of the kernels that `run` would launch on a device."""
    names = set()

    def remember(kernel: Any, programs: int, *_args: Any, **_constants: Any) -> None:
        assert programs > 0
        module = kernel.fn.__module__.rpartition(".")[2]
        names.add(f"{module}.{kernel.fn.__name__.removesuffix('_kernel').strip('_')}")

    stand_ins = {"use_triton": lambda _arena: True, "launch": remember}
    originals = {name: getattr(launch, name) for name in stand_ins}
    with pytest.MonkeyPatch.context() as patch:
        for module_name, module in list(sys.modules.items()):
            if module_name.startswith("tensorpager.kernels."):
                for name, stand_in in stand_ins.items():
                    if getattr(module, name, None) is originals[name]:
                        patch.setattr(module, name, stand_in)
        run()
    return names


@each_case
def test_cases_are_right_on_the_references(case: Case) -> None:
    for setting in (ODD, WHOLE):
        case.make(setting).check()


@each_case
def test_checks_notice_a_kernel_that_does_nothing(case: Case) -> None:
    job = case.make(ODD)
    with pytest.raises((ResultError, IndexError)):
        dataclasses.replace(job, run=lambda: None).check()


@pytest.mark.gpu
@needs_gpu
@each_case
def test_cases_are_right_on_a_gpu(case: Case) -> None:
    case.make(Setting("cuda", (4 << 20) + 3 * PAGE, 64 << 10)).check()


@pytest.mark.gpu
@needs_gpu
def test_cuda_clock_on_a_gpu() -> None:
    """Kernels take some of a call's time, and torch's own ops have none that are told apart."""
    clock = CudaClock()
    job = next(case for case in CASES if case.name == "gather").make(
        Setting("cuda", 64 << 20, 64 << 10)
    )
    job.check()
    turns = {
        "call": lambda: clock.call(job.run),
        "kernels": lambda: clock.kernels(job.run),
        "peer": lambda: clock.kernels(job.peer or job.run),
    }
    times = take_turns(turns, 0.0)
    assert set(times) == {"call", "kernels"}
    assert 0 < times["kernels"].median < 2 * times["call"].median


def test_every_kernel_has_a_case() -> None:
    assert set().union(*(case.kernels for case in CASES)) == kernels_in_folder()


@pytest.mark.skipif(not launch.HAVE_TRITON or launch.INTERPRETED, reason="needs Triton's compiler")
@each_case
def test_cases_launch_what_they_say(case: Case) -> None:
    assert launched(case.make(WHOLE).run) == case.kernels


@each_case
def test_cases_may_be_repeated(case: Case) -> None:
    """Timing calls them hundreds of times: no overflow, no error."""
    job = case.make(ODD)
    for _ in range(3):
        job.run()
        if job.peer is not None:
            job.peer()
    assert case.peer if job.peer is not None else not case.peer


def test_names_are_unique() -> None:
    assert len(set(bench_kernels.NAMES)) == len(bench_kernels.NAMES)


def test_pages_notice_stray_writes() -> None:
    pages = Pages(torch.arange(3000.0), PAGE)
    assert torch.equal(pages.read(), torch.arange(3000.0))
    taken = set(pages.frame_of.tolist())
    spare = next(frame for frame in range(len(taken) + 1) if frame not in taken)
    pages.arena[spare * PAGE + 7] ^= 1
    with pytest.raises(ResultError, match="outside"):
        pages.read()


def test_pages_notice_writes_behind_the_end() -> None:
    pages = Pages(torch.arange(3000.0), PAGE)
    last = int(pages.frame_of[-1])
    pages.arena[(last + 1) * PAGE - 1] ^= 1
    with pytest.raises(ResultError, match="outside"):
        pages.read()


def test_comparisons() -> None:
    one = torch.tensor([1.0, 2.0])
    same("x", one, one.clone())
    close("x", one, torch.tensor([1.0, 2.5]), 0.5)
    with pytest.raises(ResultError, match=r"element 1 is 2\.0, not 3\.0"):
        same("x", one, torch.tensor([1.0, 3.0]))
    with pytest.raises(ResultError, match="1 of 2 elements"):
        close("x", one, torch.tensor([1.0, 2.5]), 0.4)
    with pytest.raises(ResultError):
        close("x", torch.tensor([float("nan")]), torch.tensor([0.0]), 1.0)


def test_floor_is_the_longest_of_its_parts() -> None:
    measured = Rates(memory=100.0, link=10.0)
    assert measured.floor_seconds(Work(memory_bytes=200)) == 2
    assert measured.floor_seconds(Work(memory_bytes=200, link_bytes=50)) == 5


def test_turns_alternate_and_keep_time() -> None:
    order: list[str] = []
    ticks = iter(range(1000))

    def one(name: str, seconds: float | None) -> Callable[[], float | None]:
        def measure() -> float | None:
            order.append(name)
            return seconds

        return measure

    contenders = {"a": one("a", 1.0), "none": one("none", None), "b": one("b", 3.0)}
    found = take_turns(contenders, seconds=5, least=2, most=50, now=lambda: float(next(ticks)))
    assert set(found) == {"a", "b"}
    assert found["a"].median == 1.0
    assert found["b"].repetitions == found["a"].repetitions
    assert 2 <= found["a"].repetitions <= 8
    assert order[:7] == ["a", "none", "b", "a", "b", "b", "a"]


def test_turns_take_at_least_what_is_asked() -> None:
    found = take_turns({"a": lambda: 1.0}, seconds=0, least=4, now=lambda: 0.0)
    assert found["a"].repetitions == 4


def test_quartiles() -> None:
    assert summary([1.0, 2.0, 3.0, 4.0, 5.0]) == (3.0, 2.0, 4.0, 5)
    assert summary([2.0]) == (2.0, 2.0, 2.0, 1)


class FakeDevice:
    """A device's queue: a time that work, flushes and waits advance."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.ms = 0.0
        self.flushes = self.waits = 0
        device = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.ms = device.ms

            def synchronize(self) -> None:
                pass

            def elapsed_time(self, other: "Event") -> float:
                return other.ms - self.ms

        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "_sleep", self._sleep)
        patch.setattr(torch.cuda, "synchronize", lambda: None)

    def _sleep(self, _cycles: int) -> None:
        self.waits += 1
        self.ms += 1000

    def amax(self) -> None:
        self.flushes += 1
        self.ms += 100


def test_cuda_clock_times_calls_and_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flushes and waits are outside of the time, work between launches only in the call's."""
    device = FakeDevice(monkeypatch)
    clock = object.__new__(CudaClock)
    clock._flush = device  # type: ignore[assignment]
    module = importlib.import_module("tensorpager.kernels.copies")

    def fake_launch(*_args: Any, **_constants: Any) -> None:
        device.ms += 5

    monkeypatch.setattr(launch, "launch", fake_launch)
    monkeypatch.setattr(module, "launch", fake_launch)

    def run() -> None:
        device.ms += 2  # a copy of a table
        module.launch("kernel", 1, torch.empty(0))
        module.launch("kernel", 1, torch.empty(0))

    assert clock.call(run) == pytest.approx(12e-3)
    assert (device.flushes, device.waits) == (1, 1)
    assert clock.kernels(run) == pytest.approx(10e-3)
    assert (device.flushes, device.waits) == (2, 3)
    assert clock.kernels(lambda: None) is None
    assert module.launch is fake_launch


def failing(error: Exception) -> Case:
    def make(setting: Setting) -> Job:
        def compare() -> None:
            raise error

        return Job(run=lambda: None, compare=compare, work=Work(1))

    return Case("failing", frozenset(), "", make)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ResultError("element 3 differs"), "wrong"),
        (RuntimeError("no"), "broken"),
        (torch.OutOfMemoryError("full"), "not run"),
    ],
)
def test_what_is_not_right_is_not_timed(error: Exception, status: str) -> None:
    rows: list[dict[str, Any]] = []
    bench = Bench(CpuClock(), FLAT_RATES, 0.0, 1.0, now=lambda: 0.0, least=1)
    gather = next(case for case in CASES if case.name == "gather")
    bench.run([failing(error), gather], Sizes((8 * PAGE,), (PAGE,)), rows.append)
    assert [row["status"] for row in rows] == [status, "right"]
    assert "call" not in rows[0]
    assert rows[0]["why"]
    assert rows[1]["call"]["repetitions"] == 1


def test_nothing_starts_after_the_deadline() -> None:
    times = iter([0.0, 2.0])
    bench = Bench(CpuClock(), FLAT_RATES, 0.0, 1.0, now=lambda: next(times), least=1)
    gather = next(case for case in CASES if case.name == "gather")
    bench.run([gather, gather], Sizes((8 * PAGE,), (PAGE,)), lambda _row: None)
    assert [row["status"] for row in bench.rows] == ["right", "not run"]
    assert "--minutes" in bench.rows[1]["why"]


def test_pages_larger_than_the_operand_are_left_out() -> None:
    assert Sizes((10, 100), (5, 50)).pairs() == [(10, 5), (100, 5), (100, 50)]


def gpu_row(case: str, share: float, ratio: float, nbytes: int = 256 << 20) -> dict[str, Any]:
    row = {"case": case, "nbytes": nbytes, "page_bytes": 2 << 20, "status": "right"}
    return {**row, "share_of_floor": share, "peer_over_call": ratio}


def test_goals_take_the_worst_figure() -> None:
    rows = [
        gpu_row("gather", 0.95, 1.0),
        gpu_row("gather", 0.91, 1.0),
        gpu_row("gather", 0.10, 1.0, nbytes=1 << 20),  # too small to count
        gpu_row("scatter", 0.89, 1.0),
        gpu_row("adamw", 0.90, 0.99),
    ]
    link = {"share_in": 0.96, "page_bytes": 2 << 20}
    outcomes = {goal["goal"]: goal for goal in judge(Found(rows, link))}
    assert [goal["outcome"] for goal in outcomes.values()] == [
        *("reached", "missed", "reached", "missed", "reached")
    ]
    first = next(iter(outcomes.values()))
    assert first["figure"] == 0.91
    assert first["where"] == "256 MiB, pages of 2048 KiB"


def test_goals_without_figures_are_not_measured() -> None:
    found = judge(Found([], None))
    assert [goal["outcome"] for goal in found] == ["not measured"] * len(GOALS)
    assert bench_kernels.exit_code([], [], found) == 0


def test_exit_code() -> None:
    right, wrong = {"status": "right"}, {"status": "wrong"}
    missed = {"outcome": "missed"}
    assert bench_kernels.exit_code([right, {"status": "not run"}], [], []) == 0
    assert bench_kernels.exit_code([right, wrong], [], []) == 1
    assert bench_kernels.exit_code([right], ["link: broke"], []) == 1
    assert bench_kernels.exit_code([right], [], [missed]) == 1


def test_copies_between_host_and_device_are_checked() -> None:
    copies, check = link_sweep.page_copies(Setting("cpu", 8 * PAGE, PAGE))
    check()
    assert set(copies) == {
        f"{kind} {way}" for kind in ("one copy", "pages") for way in ("in", "out")
    }


TINY = bench_kernels.Extent(
    seconds=0.0,
    sizes=Sizes((5 * PAGE,), (PAGE,)),
    page_bytes=PAGE,
    link_bytes=8 * PAGE,
    repeats=1,
)


def test_gpu_run_from_end_to_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a CPU's clock: the order, the record after each step, and the exit code."""
    monkeypatch.setitem(rates.COPY_BYTES, "cpu", 1 << 16)
    records: list[dict[str, Any]] = []
    chosen = ("link", "gather", "adamw")
    choice = bench_kernels.Choice(chosen, time.monotonic() + 600, peers=True)
    run = bench_kernels.GpuRun(
        "a CPU",
        choice,
        TINY,
        CpuClock(),
        lambda record: records.append(json.loads(json.dumps(record))),
    )
    code = run.run()
    assert len(records) == 1 + 2 + 1
    assert records[0]["link"]
    last = records[-1]
    assert [row["case"] for row in last["rows"]] == ["adamw", "gather"]
    assert all(row["status"] == "right" for row in last["rows"])
    assert {"call", "peer", "floor_ms", "share_of_floor", "peer_over_call"} <= set(last["rows"][0])
    assert last["failures"] == []
    missed = [goal for goal in last["goals"] if goal["outcome"] == "missed"]
    assert code == int(bool(missed))
    shown = capsys.readouterr().out
    assert "goals" in shown


def test_a_broken_sweep_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rates.COPY_BYTES, "cpu", 1 << 16)

    def broken(*_args: Any, **_more: Any) -> None:
        raise RuntimeError("no such copy")

    monkeypatch.setattr(link_sweep, "sweep_link", broken)
    choice = bench_kernels.Choice(("link", "gather"), time.monotonic() + 600, peers=False)
    run = bench_kernels.GpuRun("a CPU", choice, TINY, CpuClock(), lambda _record: None)
    assert run.run() == 1
    assert "no such copy" in run.record["failures"][0]
    assert [row["status"] for row in run.record["rows"]] == ["right"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    target = tmp_path / "kernels.json"
    arguments = ["--quick", "--only", "gather", "--json", str(target)]
    done = CliRunner().invoke(bench_kernels.main, arguments)
    assert done.exit_code == 0, done.output
    assert "No CUDA device" in done.output
    assert "CPU reference of gather" in done.output
    record = json.loads(target.read_text())
    assert record["gpu"] is None
    assert record["what"] == "CPU references, not kernels"
    assert [row["status"] for row in record["checked"]] == ["right"] * 3
    assert record["references"][0]["share_of_floor"] > 0
    assert record["facts"]["torch"] == torch.__version__


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "nothing"], "'nothing' is not"),
        (["--minutes", "0"], "--minutes"),
        (["--json", "/"], "is a directory"),
    ],
)
def test_wrong_usage(arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(bench_kernels.main, arguments)
    assert done.exit_code == 2
    assert said in done.output


def test_the_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "INTERPRETED", True)
    done = CliRunner().invoke(bench_kernels.main, ["--only", "gather"])
    assert done.exit_code == 2
    assert "TRITON_INTERPRET" in done.output
