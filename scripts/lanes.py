"""Runs every check of the project, each lane in a process of its own; see tests/README.md.

Called by scripts/test, in the project's environment. While the longest lane runs on two workers,
the others run beside it, one after another; what these print is shown when it has ended. All lanes
run, also after a failure.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
SECOND_CHANCES = 10  # where more fail, something is broken, and the machine is not to blame
TESTS_FAILED = 1  # pytest's exit status; higher ones say that the run itself went wrong
CANNOT_BE_MADE = 75  # exit status of an interpreter whose environment is not to be had here
FAKE_GPU = (str(ROOT / "scripts" / "fake_gpu.sh"), "python")
ELSEWHERE = "not interpreter and not aot and not gpu and not simulated"  # the other lanes' marks

# The tests whose results depend on the instructions that PyTorch uses on this processor; and of
# those that Triton's interpreter runs.
NUMERIC = (
    *(
        f"tests/kernels/test_{name}"
        for name in (
            "adam.py::test_100_steps_as_torch",
            "adam.py::test_kernel_as_reference",
            "adam.py::test_pages_of_every_size_and_dense_at_any_address",
            "adam.py::test_scaled_gradients",
            "adam.py::test_masters_take_the_way_of_float32",
            "adam.py::test_float64",
            "as_torch.py",
            "quantize.py::test_map_hand_made",
            "quantize.py::test_error_of_a_round_trip",
            "quantize.py::test_special_blocks",
            "quantize.py::test_kernel_as_reference",
            "sgd.py",
        )
    ),
    *(
        f"tests/pager/test_fused.py::test_{name}"
        for name in (
            "the_same_bits",
            "masters_are_what_plain_torch_updates_in_fp32",
            "grad_scaler",
            "other_strides",
        )
    ),
    "tests/pager/test_linear.py",
    *(
        f"tests/pager/test_page_ops.py::test_{name}"
        for name in (
            "elementwise[paged-torch.float32]",
            "elementwise[paged-torch.float64]",
            "elementwise[paged-torch.bfloat16]",
            "elementwise[paged-torch.float16]",
            "elementwise_with_threads",
            "an_order_of_memory_that_has_other_bits",
            "copy_converts",
            "dtypes_that_promote",
            "permuted_memory",
            "reductions",
            "lists[scattered]",
            "norms_of_a_list",
            "unscaling",
        )
    ),
    "tests/pager/test_page_steps.py::test_a_step_makes_no_dense_copies[None-scattered]",
    "tests/pager/test_page_steps.py::test_grad_scaler",
)
AHEAD_OF_TIME = sorted(
    f"tests/kernels/{p.name}" for p in (ROOT / "tests/kernels").glob("test_aot*")
)
NUMERIC_INTERPRETED = ("tests/kernels/test_quantize.py",)


@dataclass(frozen=True)
class Lane:
    """A process. ``arguments``: of pytest, whose tests are counted, or else of python.

    interpreter : the beginning of the command. One that exits with ``CANNOT_BE_MADE`` has said why
        in its last line, and the lane is skipped.
    """

    name: str
    arguments: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    tests: bool = True
    interpreter: tuple[str, ...] = (sys.executable,)


@dataclass
class Result:
    """How a lane ended. ``outcomes``, ``reasons``: see pytest_lane.py; empty if it wrote none."""

    lane: Lane
    status: int
    seconds: float
    outcomes: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    unsteady: list[str] = field(default_factory=list)

    def named(self, *outcomes: str) -> list[str]:
        return [test for test, outcome in self.outcomes.items() if outcome in outcomes]

    @property
    def failed(self) -> list[str]:
        """What counts as failed: tests, or the lane itself where no test is to blame."""
        failed = self.named("failed", "crashed")
        silent = self.lane.tests and not self.outcomes
        explained = self.status == 0 or (self.status == TESTS_FAILED and (failed or self.unsteady))
        return failed if explained and not silent else [*failed, "the lane itself"]

    def line(self) -> str:
        how = f"FAILED (exit {self.status})" if self.failed else "ok"
        if self.status == 5:
            how = "FAILED (no test ran)"
        return f"{self.lane.name:16} {self.seconds:5.0f} s  {how}"


def every_lane(full: bool) -> tuple[Lane, list[Lane]]:
    """The longest lane, and those that run beside it."""
    slow = "" if full else " and not slow"
    beside = [
        Lane("ruff-check", ("-m", "ruff", "check"), tests=False),
        Lane("ruff-format", ("-m", "ruff", "format", "--check"), tests=False),
        Lane("mypy", ("-m", "mypy"), tests=False),
        Lane("aot", ("-m", f"aot{slow}", *AHEAD_OF_TIME)),
        Lane(
            "interpreter", ("-m", f"interpreter{slow}", "tests/kernels"), {"TRITON_INTERPRET": "1"}
        ),
    ]
    beside.append(Lane("simulated", ("-m", f"simulated{slow}", "tests/simdev")))
    for name in other_capabilities():
        forced = {"ATEN_CPU_CAPABILITY": name}
        plain = ("-m", f"{ELSEWHERE} and not slow", *NUMERIC)
        beside.append(Lane(f"numeric-{name}", plain, forced))
        if name == "default":  # the other end from what the lane interpreter runs with
            kernels = ("-m", "interpreter and not slow", *NUMERIC_INTERPRETED)
            interpreted = forced | {"TRITON_INTERPRET": "1"}
            beside.append(Lane(f"interpreter-{name}", kernels, interpreted))
    if full:
        beside.append(Lane("fake-cuda", ("tests/fakecuda",), interpreter=FAKE_GPU))
        gpu = ("-m", "gpu and not slow", "--ignore=tests/fakecuda", "--timeout=3600", "tests")
        beside.append(Lane("fake-gpu", gpu, {"FAKECUDA_ZEROS": "1"}, interpreter=FAKE_GPU))
    spread = ("-n", "2", "--dist", "worksteal")
    return Lane("cpu", (*spread, "-m", f"{ELSEWHERE}{slow}", "tests")), beside


def other_capabilities() -> list[str]:
    """Instruction sets that PyTorch has kernels for and this processor has, but not the best one,
    with which all other lanes run."""
    ladder = ["default", "avx2", "avx512"]
    best = torch.backends.cpu.get_cpu_capability().lower()
    return ladder[: ladder.index(best)] if best in ladder else []


class Runner:
    """Runs lanes in ``root``, in processes that end with it. ``folder``: for what they print and
    report."""

    def __init__(self, folder: Path, root: Path = ROOT) -> None:
        self.folder = folder
        self.root = root
        self.running: set[subprocess.Popen[bytes]] = set()
        self.lock = threading.Lock()
        self.over = False

    def run(self, lane: Lane, output: int | None = None) -> Result:
        """``output``: a file descriptor; None for ours."""
        report = self.folder / f"{lane.name}.json"
        command = [*lane.interpreter, *lane.arguments]
        if lane.tests:
            script = str(ROOT / "scripts" / "pytest_lane.py")
            quiet = ("-q", "-rfE", "-p", "no:cacheprovider", "-p", "no:anyio")
            command = [*lane.interpreter, script, str(report), *quiet, *lane.arguments]
        began = time.monotonic()
        with self.lock:
            if self.over:
                return Result(lane, -signal.SIGTERM, 0.0)
            process = subprocess.Popen(
                command,
                cwd=self.root,
                env={**os.environ, **lane.environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT if output is not None else None,
            )
            self.running.add(process)
        status = process.wait()
        with self.lock:
            self.running.discard(process)
        seconds = time.monotonic() - began
        if status == CANNOT_BE_MADE and not report.exists():
            said = self.printed(lane).read_text().splitlines()[-1:] if output is not None else []
            reason = said[0] if said else "its environment cannot be made"
            return Result(lane, 0, seconds, {lane.name: "skipped"}, {lane.name: reason})
        found = json.loads(report.read_text()) if report.exists() else {}
        return Result(lane, status, seconds, **found)

    def run_all(self, lanes: list[Lane], results: list[Result]) -> None:
        """One after another, printing into files."""
        for lane in lanes:
            with self.printed(lane).open("wb") as file:
                results.append(self.run(lane, file.fileno()))

    def printed(self, lane: Lane) -> Path:
        return self.folder / f"{lane.name}.txt"

    def stop(self) -> None:
        """Nothing starts any more, and what runs is ended."""
        with self.lock:
            self.over = True
            for process in self.running:
                process.terminate()


@contextmanager
def runner() -> Iterator[Runner]:
    with tempfile.TemporaryDirectory(prefix="tensorpager-test-") as folder:
        runner = Runner(Path(folder))
        try:
            yield runner
        finally:
            runner.stop()


def run_everything(runner: Runner, full: bool) -> list[Result]:
    longest, beside = every_lane(full)
    results: list[Result] = []
    thread = threading.Thread(target=runner.run_all, args=(beside, results), daemon=True)
    thread.start()
    say(f"\n== {longest.name}: {' '.join(longest.arguments)}")
    first = runner.run(longest)
    thread.join()
    for result in results:
        lane = result.lane
        settings = "".join(f"{name}={value} " for name, value in lane.environment.items())
        say(f"\n== {lane.name}: {settings}{' '.join(lane.arguments)}")
        say(runner.printed(lane).read_text(errors="replace").rstrip())
    results.append(first)
    if torch.cuda.is_available():  # nothing beside it: its tests measure
        say("\n== gpu")
        results.append(
            runner.run(Lane("gpu", ("-m", "gpu" if full else "gpu and not slow", "tests")))
        )
    return results


def second_chance(runner: Runner, results: list[Result]) -> None:
    """Run what failed once more, alone: with nothing beside it, in one process for each lane.

    What passes then is unsteady: it does not fail the run, and the summary names it. Not for a
    test that ended its worker, for lanes that did not end as pytest does when tests fail, nor
    where more than ``SECOND_CHANCES`` failed.
    """
    if sum(len(result.named("failed", "crashed")) for result in results) > SECOND_CHANCES:
        return
    for result in results:
        tests = result.named("failed")
        if not tests or result.status != TESTS_FAILED:
            continue
        say(f"\n== second chance, alone: {result.lane.name}")
        named = runner.folder / "second.txt"
        named.write_text("\n".join(tests) + "\n")
        environment = result.lane.environment
        again = runner.run(Lane(f"{result.lane.name}-second", (f"@{named}",), environment))
        if again.status not in (0, TESTS_FAILED):
            continue
        result.unsteady = [test for test in tests if again.outcomes.get(test) == "passed"]
        result.outcomes |= dict.fromkeys(result.unsteady, "passed")


def summarise(results: list[Result], seconds: float) -> bool:
    """Print how it went. True if all is well. The last line is for programs that read it."""
    skipped: dict[str, list[str]] = {}
    for result in results:
        for test in result.named("skipped"):
            skipped.setdefault(result.reasons.get(test, ""), []).append(test)
    if skipped:
        say("\nskipped, and why:")
    for reason, tests in sorted(skipped.items()):
        more = f" and {len(tests) - 1} more" if len(tests) > 1 else ""
        say(f"  {reason}\n    {tests[0]}{more}")
    unsteady = [f"{result.lane.name}: {test}" for result in results for test in result.unsteady]
    failed = [f"{result.lane.name}: {test}" for result in results for test in result.failed]
    if unsteady:
        say("\nUNSTEADY: passed only when run alone", *unsteady, sep="\n  ")
    if failed:
        say("\nFAILED", *failed, sep="\n  ")
    say(f"\n{machine()}")
    for result in results:
        say(result.line())
    say(f"total {seconds:.0f} s")
    passed = sum(len(result.named("passed")) for result in results)
    say(f"{passed} passed, {len(failed)} failed, {sum(map(len, skipped.values()))} skipped")
    return not failed


def write_record(path: Path, results: list[Result], seconds: float) -> None:
    """What ``summarise`` says, for ``scripts/results``."""
    lanes = [
        {
            "lane": result.lane.name,
            "seconds": round(result.seconds),
            "passed": len(result.named("passed")),
            "skipped": len(result.named("skipped")),
            "unsteady": result.unsteady,
            "failed": result.failed,
        }
        for result in results
    ]
    record = {
        "command": ["scripts/test", *sys.argv[1:]],
        "machine": machine(),
        "load_average": os.getloadavg(),
        "seconds": round(seconds),
        "passed": sum(len(result.named("passed")) for result in results),
        "failed": sum(len(result.failed) for result in results),
        "lanes": lanes,
    }
    path.write_text(json.dumps(record, indent=2) + "\n")


def machine() -> str:
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return (
        f"{names[0] if names else platform.machine()}, {len(os.sched_getaffinity(0))} cores, "
        f"{torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}, "
        f"Python {platform.python_version()}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    )


def say(*words: object, sep: str = " ") -> None:
    print(*words, sep=sep, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/test", description="Every check of the project.")
    parser.add_argument("--full", action="store_true", help="also the long tests (marked slow)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what came out there")
    options = parser.parse_args()
    full = options.full
    if full:
        os.environ["TENSORPAGER_FULL"] = "1"
    cores = len(os.sched_getaffinity(0))
    # Two workers share the cores: one thread each on two of them.
    os.environ["OMP_NUM_THREADS"] = str(cores // 2 if cores > 2 else 1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    began = time.monotonic()
    with runner() as run:
        results = run_everything(run, full)
        second_chance(run, results)
    seconds = time.monotonic() - began
    if options.json:
        write_record(options.json, results, seconds)
    return 0 if summarise(results, seconds) else 1


if __name__ == "__main__":
    sys.exit(main())
