"""gpu_check.py: shares of the time, what happens after failures, and its JSON, by a fake clock."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gpu_check
import pytest
import torch
from click.testing import CliRunner
from gpu_check import (
    LEAST_SECONDS,
    Context,
    Program,
    Suite,
    allotment,
    check,
    counted,
    cpu_parts,
    gpu_parts,
)
from lm import processes
from lm.processes import TIMED_OUT, run_command

COLLECTED = (
    "tests/a/test_x.py::test_1[cuda]\ntests/a/test_y.py::test_2\ntests/a/test_x.py::test_3\n"
)


@dataclass
class World:
    """A clock that commands advance: each takes as long as it is told to, or as it may."""

    answers: dict[str, tuple[float, int, str]] = field(default_factory=dict)
    now: float = 0.0
    ran: list[tuple[str, float]] = field(default_factory=list)
    environments: list[Mapping[str, str]] = field(default_factory=list)

    def run(
        self, command: Sequence[str], seconds: float, environment: Mapping[str, str]
    ) -> dict[str, Any]:
        text = " ".join(command[1:])
        self.ran.append((text, seconds))
        self.environments.append(environment)
        answers = [answer for key, answer in self.answers.items() if key in text]
        takes, code, output = answers[0] if answers else (1.0, 0, "")
        self.now += min(takes, seconds)
        if takes > seconds:
            code = TIMED_OUT
        if "--json" in command and code == 0:
            Path(command[command.index("--json") + 1]).write_text('{"figure": 3}')
        return {"exit_code": code, "seconds": min(takes, seconds), "output": output}

    def context(self, folder: Path) -> Context:
        return Context(folder, self.run, lambda: self.now)


def program(name: str, share: float, **more: bool) -> Program:
    return Program(name, share, (f"{name}.py",), **more)


def test_shares_pass_on_what_is_left_over() -> None:
    parts = [program("a", 1), program("b", 1), program("c", 2)]
    assert allotment(parts, 0, 100) == 25
    assert allotment(parts, 1, 90) == 30
    assert allotment(parts, 2, 7) == 7


def test_all_parts_run_within_the_minutes(tmp_path: Path) -> None:
    """Also if each takes all that it may."""
    world = World({".py": (1e9, 0, "")})
    parts = [program("a", 1), program("b", 2), program("c", 1)]
    saved: list[str] = []
    record = check(parts, world.context(tmp_path), 2, lambda r: saved.append(json.dumps(r)))
    assert [seconds for _, seconds in world.ran] == [30, 60, 30]
    assert world.now == 120
    assert [one["exit_code"] for one in record.values()] == [TIMED_OUT] * 3
    assert [len(json.loads(text)) for text in saved] == [1, 2, 3]


def test_a_failure_does_not_stop_the_others(tmp_path: Path) -> None:
    world = World({"a.py": (1, 3, "what\nbroke")})
    record = check([program("a", 1), program("b", 1)], world.context(tmp_path), 1, lambda _r: None)
    assert record["a"]["exit_code"] == 3
    assert record["a"]["tail"] == ["what", "broke"]
    assert "record" not in record["a"]
    assert record["b"]["exit_code"] == 0
    assert record["b"]["record"] == {"figure": 3}
    assert record["b"]["limit_seconds"] == 59


def test_a_required_part_that_fails_is_the_last_and_says_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "\n".join(f"line {n}" for n in range(100))
    world = World({"a.py": (1, 1, said)})
    parts = [program("a", 1, required=True), program("b", 1)]
    record = check(parts, world.context(tmp_path), 1, lambda _r: None)
    assert list(record) == ["a"]
    assert record["a"]["output"] == said
    assert said in capsys.readouterr().out
    world.answers.clear()
    assert list(check(parts, world.context(tmp_path), 1, lambda _r: None)) == ["a", "b"]


def test_all_that_the_first_failures_said_is_kept(tmp_path: Path) -> None:
    world = World({".py": (1, 1, "\n".join(f"line {n}" for n in range(100)))})
    parts = [program(name, 1) for name in "abcdef"]
    record = check(parts, world.context(tmp_path), 1, lambda _r: None)
    kept = [name for name, one in record.items() if "output" in one]
    assert kept == list("abcdef")[: gpu_check.WHOLE_OUTPUTS]
    assert record["a"]["output"].startswith("line 0\n")
    assert all(len(one["tail"]) == 40 for one in record.values())


def test_an_error_of_ours_does_not_stop_the_others(tmp_path: Path) -> None:
    world = World()
    context = world.context(tmp_path)

    def run(command: Sequence[str], seconds: float, more: Mapping[str, str]) -> dict[str, Any]:
        if "a.py" in command:
            raise OSError("no memory")
        return world.run(command, seconds, more)

    context = Context(tmp_path, run, context.now)
    record = check([program("a", 1), program("b", 1)], context, 1, lambda _r: None)
    assert "no memory" in record["a"]["error"]
    assert record["a"]["exit_code"] == 1
    assert record["b"]["exit_code"] == 0


def test_a_record_cut_short_is_said_to_be(tmp_path: Path) -> None:
    def run(command: Sequence[str], _seconds: float, _more: Mapping[str, str]) -> dict[str, Any]:
        Path(command[command.index("--json") + 1]).write_text('{"half')
        return {"exit_code": TIMED_OUT, "seconds": 1.0, "output": ""}

    found = program("a", 1).run(Context(tmp_path, run), 60)
    assert "record" not in found
    assert found["record_error"]


def test_nothing_starts_without_time(tmp_path: Path) -> None:
    world = World()
    minutes = 1.5 * LEAST_SECONDS / 60
    record = check(
        [program("a", 1), program("b", 9)], world.context(tmp_path), minutes, lambda _r: None
    )
    assert record["a"]["exit_code"] is None
    assert "left" in record["a"]["not_run"]
    assert record["b"]["exit_code"] == 0


def test_programs_that_can_are_told_when_to_stop(tmp_path: Path) -> None:
    world = World()
    program("a", 1, stops_itself=True).run(world.context(tmp_path), 130)
    program("b", 1).run(world.context(tmp_path), 130)
    assert "--minutes 2.00" in world.ran[0][0]
    assert "--minutes" not in world.ran[1][0]


def suite(*, share: float = 100, **more: Any) -> Suite:
    return Suite("tests", share, "gpu", ("tests/a",), **more)


def test_each_file_has_its_own_process_and_limit(tmp_path: Path) -> None:
    world = World(
        {
            "--collect-only": (5, 0, COLLECTED),
            "test_x.py": (1e9, 0, "..F"),
            "test_y.py": (2, 0, "== 1 passed, 2 skipped in 1.5s =="),
        }
    )
    found = suite(file_seconds=20.0, environment={"A": "1"}).run(world.context(tmp_path), 100)
    assert found["collected"] == 3
    assert [one["file"] for one in found["files"]] == ["tests/a/test_x.py", "tests/a/test_y.py"]
    assert [one["exit_code"] for one in found["files"]] == [TIMED_OUT, 0]
    assert (found["passed"], found["skipped"], found["failed"]) == (1, 2, 0)
    assert found["exit_code"] == 1
    assert found["seconds"] == 27
    assert [seconds for _, seconds in world.ran] == [100, 20, 20]
    assert world.environments == [{"A": "1"}] * 3


def test_files_have_longer_where_their_part_has(tmp_path: Path) -> None:
    world = World({"--collect-only": (5, 0, COLLECTED), "test_": (60, 0, "1 passed in 60s")})
    found = suite(share=50, file_seconds=20.0).run(world.context(tmp_path), 200)
    assert [one["exit_code"] for one in found["files"]] == [0, 0]
    assert [seconds for _, seconds in world.ran] == [200, 80, 80]


def test_files_without_time_are_not_run(tmp_path: Path) -> None:
    world = World({"--collect-only": (5, 0, COLLECTED), "test_x.py": (15, 0, "1 passed in 15s")})
    found = suite().run(world.context(tmp_path), 25)
    assert found["files"][1]["exit_code"] is None
    assert found["files"][1]["not_run"]
    assert found["exit_code"] == 1


def test_what_cannot_be_collected_is_a_failure(tmp_path: Path) -> None:
    output = f"{COLLECTED}ERROR tests/a/test_z.py::no - ModuleNotFoundError: No module named 'x'\n"
    world = World({"--collect-only": (5, 2, output), "test_": (1, 0, "1 passed in 1s")})
    found = suite().run(world.context(tmp_path), 100)
    assert len(found["files"]) == 2
    assert found["exit_code"] == 1
    assert "No module named 'x'" in found["tail"][-1]


def test_only_files_that_can_have_the_marker_are_collected() -> None:
    assert gpu_check.places_with("tests/kernels", "gpu") == ["tests/kernels"]
    files = gpu_check.places_with("tests/pager", "gpu")
    assert "tests/pager/test_cuda.py" in files
    assert "tests/pager/test_slabs.py" not in files


def test_count_only(tmp_path: Path) -> None:
    world = World({"--collect-only": (5, 0, COLLECTED)})
    found = suite(count_only=True).run(world.context(tmp_path), 100)
    assert found["collected"] == 3
    assert found["exit_code"] == 0
    assert len(world.ran) == 1


def test_outcomes_are_read_from_the_last_line() -> None:
    text = (
        "1 failed in the way\n=== 2 failed, 10 passed, 3 skipped, 4 deselected, 1 error in 2.1s ==="
    )
    assert counted(text) == {"failed": 3, "passed": 10, "skipped": 3}
    assert counted("nothing here") == {}


@pytest.mark.parametrize("parts", [gpu_parts(16), gpu_parts(1), gpu_parts(2, True), cpu_parts(2)])
def test_parts_are_there(parts: Sequence[gpu_check.Part]) -> None:
    assert len({part.name for part in parts}) == len(parts)
    for part in parts:
        if isinstance(part, Program):
            assert (processes.ROOT / part.arguments[0]).is_file()
        else:
            assert all((processes.ROOT / folder).is_dir() for folder in part.folders)
            assert part.workers >= 1


def test_shares_leave_every_part_of_nine_minutes_time_to_work(tmp_path: Path) -> None:
    world = World({"": (1e9, 0, COLLECTED)})
    record = check(gpu_parts(16), world.context(tmp_path), 9, lambda _r: None)
    assert world.now <= 9 * 60 + 1e-6
    assert min(one["limit_seconds"] for one in record.values()) >= LEAST_SECONDS


def test_programs_accept_their_arguments() -> None:
    """Option errors come before the work, so a device that is not there would not hide them."""
    commands = {part.name: part.arguments for part in gpu_parts(16) if isinstance(part, Program)}
    import bench_kernels
    import bench_overhead
    import bench_train

    more = ["--json", "x.json"]
    limited = [*more, "--minutes", "1"]
    bench_kernels.main.make_context("x", [*commands["kernels"][1:], *limited])
    bench_train.main.make_context("x", [*commands["side_by_side"][1:], *limited])
    bench_overhead.main.make_context("x", [*commands["overhead"][1:], *more])


def test_a_command_sees_the_package_and_its_environment() -> None:
    code = "import os; print(os.environ['PYTHONPATH'].split(os.pathsep)[0], os.environ['EXTRA'])"
    found = run_command([sys.executable, "-S", "-c", code], 60, {"EXTRA": "7"})
    assert found["exit_code"] == 0
    assert found["output"].split() == [str(processes.ROOT), "7"]


def test_a_late_command_is_interrupted_and_its_children_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = tmp_path / "child"
    script = (
        "import os, signal, subprocess, sys, time\n"
        "def interrupted(*_):\n"
        "    print('interrupted', flush=True)\n"
        "    sys.exit(3)\n"
        "signal.signal(signal.SIGINT, interrupted)\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        "print('began', flush=True)\n"
        f"open('{child}.new', 'w').write(str(child.pid))\n"
        f"os.rename('{child}.new', '{child}')\n"
        "time.sleep(600)\n"
    )

    class LateOnceReady(subprocess.Popen[str]):
        """Its time is over as soon as it has a child, however slow the machine is."""

        def wait(self, timeout: float | None = None) -> int:
            if timeout == pytest.approx(1000 - processes.GRACE_SECONDS):
                while not child.exists():
                    time.sleep(0.01)
                raise subprocess.TimeoutExpired(self.args, timeout)
            return super().wait(None)

    monkeypatch.setattr(subprocess, "Popen", LateOnceReady)
    found = run_command([sys.executable, "-S", "-c", script], 1000, {})
    assert found["exit_code"] == TIMED_OUT
    assert found["output"].split() == ["began", "interrupted"]
    assert not processes._running
    pid = int(child.read_text())
    for _ in range(1000):
        if not _alive(pid):
            break
        time.sleep(0.01)
    assert not _alive(pid)


def test_a_command_that_ignores_the_interrupt_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0.1)
    script = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(600)"
    found = run_command([sys.executable, "-S", "-c", script], 0.5, {})
    assert found["exit_code"] == TIMED_OUT
    assert found["seconds"] < 600


SPINS = "import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', 'while True: pass'])"


@pytest.mark.parametrize(
    ("script", "seconds", "idle", "code"),
    [
        ("import time; time.sleep(1.5)", 1.0, 300.0, 0),  # longer than its time, and does nothing
        (SPINS, 1.0, 300.0, TIMED_OUT),  # in a process that it has not waited for
        ("import time; time.sleep(600)", 1000.0, 0.5, TIMED_OUT),  # stuck
    ],
)
def test_a_limit_of_cpu_time(
    script: str, seconds: float, idle: float, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0.1)
    monkeypatch.setattr(processes, "IDLE_SECONDS", idle)
    before = processes.ended_cpu_seconds()
    found = run_command([sys.executable, "-S", "-c", script], seconds, {}, of_cpu=True)
    assert found["exit_code"] == code
    assert processes.ended_cpu_seconds() > before


def test_by_cpu_time_nothing_has_a_limit_of_its_own_by_the_wall(tmp_path: Path) -> None:
    world = World({"--collect-only": (5, 0, COLLECTED), "test_": (1, 0, "1 passed in 1s")})
    context = replace(world.context(tmp_path), of_cpu=True)
    program("a", 1, stops_itself=True).run(context, 130)
    suite().run(context, 100)
    assert not any("--minutes" in text for text, _ in world.ran)
    assert all("--timeout=0" in text for text, _ in world.ran[1:])


def _alive(pid: int) -> bool:
    """Whether it runs; one that ended and was not waited for does not."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World({"--collect-only": (1, 0, COLLECTED), "test_": (1, 0, "1 passed in 1s")})
    monkeypatch.setattr(gpu_check, "Context", lambda folder: world.context(folder))
    target = tmp_path / "all.json"
    done = CliRunner().invoke(gpu_check.main, ["--json", str(target)])
    assert done.exit_code == 0, done.output
    assert "no CUDA device" in done.output
    record = json.loads(target.read_text())
    assert record["facts"]["gpu"] is None
    assert record["facts"]["torch"]
    assert set(record["parts"]) == {"references", "aot_tests", "interpreter_tests"}
    assert record["parts"]["references"]["record"] == {"figure": 3}


def test_a_failed_part_fails_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = (gpu_parts if torch.cuda.is_available() else cpu_parts)(2)[0].name
    world = World({"": (1, 2, "")})
    monkeypatch.setattr(gpu_check, "Context", lambda folder: world.context(folder))
    done = CliRunner().invoke(gpu_check.main, ["--only", name])
    assert done.exit_code == 1
    assert f"failed: {name}" in done.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--only", "nothing"], "is no part"), (["--minutes", "0"], "--minutes")],
)
def test_wrong_usage(arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(gpu_check.main, arguments)
    assert done.exit_code == 2
    assert said in done.output
