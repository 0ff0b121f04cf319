#!/usr/bin/env python3
"""Everything that only a GPU can show, in one go, within --minutes.

    gpu_check.py --json FILE

First the smallest things that can work (gpu_smoke.py); if they do not, their error is shown whole
and nothing else runs. Then all gpu-marked tests, each file in a process of its own; a model of a
billion parameters under several memory systems side by side, in bf16 with 16,384 tokens per step,
at half of its need, with the link's rates measured beside, and with the plain run's losses where
they must be (bench_train.py); every page kernel against its floor and against torch
(bench_kernels.py); and what the pager costs where everything fits (bench_overhead.py).

Each part has a share of the time, and what a part leaves over goes to those after it. A part that
fails or runs out of time does not stop the others. The JSON file has what every part said and
measured, and all that the first failures printed; it is whole after each part.

On tests/fakecuda, where kernels do nothing, the time is CPU time of all processes: a loaded machine
fails no part. Timed steps, and memory systems that are not ours, are fewer there.

Without a GPU it says so, and runs what it can: the kernels in Triton's interpreter, their CPU
references, and a count of the kernels' ahead-of-time tests.

Exit codes: 1 if a part failed or was not run; 2 for wrong usage.
"""

import datetime
import importlib.metadata
import json
import os
import platform
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import click
import torch
from lm.processes import ROOT, TIMED_OUT, Record, ended_cpu_seconds, ending_all, run_command
from lm.report import on_fake_cuda

PYTHON = sys.executable
TEST_FOLDERS = ("tests/kernels", "tests/pager", "tests/scripts")
BENCH_MODES = "planned,demand,save_on_cpu,torchao,fsdp2,bitsandbytes"
FAKE_BENCH_MODES = "planned,demand,save_on_cpu"
WHOLE_OUTPUTS = 3  # of failures, kept in full
MOST_CHARACTERS = 200_000  # of each
LEAST_SECONDS = 10.0  # nothing is started with less
ENDING_SECONDS = 10.0  # that a benchmark takes from its last measurement to its end

Now = Callable[[], float]
Runner = Callable[[Sequence[str], float, Mapping[str, str]], Record]
"""As `run_command`: (command, most seconds, more environment) → exit_code, seconds, output."""


@dataclass
class Context:
    """What parts run in. `runner` runs a command; `now` is a clock in seconds; `of_cpu`: their
    seconds are CPU time. `whole_outputs`: of how many more failures all that it said is kept."""

    folder: Path
    runner: Runner = run_command
    now: Now = time.monotonic
    of_cpu: bool = False
    whole_outputs: int = WHOLE_OUTPUTS

    def ended(self, command: Sequence[str], ended: Record, seconds: float) -> Record:
        """What is kept of a command that ended."""
        output = ended["output"]
        record = {
            "command": " ".join(command),
            "exit_code": ended["exit_code"],
            "seconds": ended["seconds"],
            "limit_seconds": round(seconds, 1),
            "tail": output.splitlines()[-40:],
        }
        if ended["exit_code"] and self.whole_outputs > 0:
            self.whole_outputs -= 1
            record["output"] = output[-MOST_CHARACTERS:]
        return record


@dataclass(frozen=True)
class Program:
    """A part that is one program, which writes its results to a file.

    share : of the time, in seconds of the usual nine minutes.
    arguments : of `python`; the name of the file to write follows ``--json``.
    stops_itself : whether it knows ``--minutes``, by the clock on the wall.
    required : whether nothing else is worth running where it fails.
    environment : added to ours.
    """

    name: str
    share: float
    arguments: tuple[str, ...]
    stops_itself: bool = False
    required: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)

    def run(self, context: Context, seconds: float) -> Record:
        target = context.folder / f"{self.name}.json"
        command = [PYTHON, *self.arguments, "--json", str(target)]
        if self.stops_itself and not context.of_cpu:
            command += ["--minutes", f"{max(1.0, seconds - ENDING_SECONDS) / 60:.2f}"]
        record = context.ended(command, context.runner(command, seconds, self.environment), seconds)
        if target.exists():
            try:
                record["record"] = json.loads(target.read_text())
            except ValueError as error:  # it was ended while it wrote
                record["record_error"] = str(error)
        return record


@dataclass(frozen=True)
class Suite:
    """A part that is tests: those of `folders` with the marker, each file in its own process.

    file_seconds : for one file at most, or as many times more as the part has more than its share.
    workers : files at a time.
    count_only : whether they are only counted.
    """

    name: str
    share: float
    marker: str
    folders: tuple[str, ...]
    workers: int = 1
    file_seconds: float = 90.0
    count_only: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)

    def run(self, context: Context, seconds: float) -> Record:
        deadline = context.now() + seconds
        begin = [PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", self.marker]
        begin += ["--timeout=0"] if context.of_cpu else []  # by the clock on the wall
        word = self.marker.split()[0]
        places = [place for folder in self.folders for place in places_with(folder, word)]
        collect = [*begin, "--collect-only", *places]
        found = context.runner(collect, seconds, self.environment)
        files = Counter(
            line.partition("::")[0]
            for line in found["output"].splitlines()
            if "::" in line and not line.startswith(("ERROR", "FAILED"))
        )
        record = context.ended(collect, found, seconds)
        record |= {"collected": sum(files.values()), "files": []}
        if found["exit_code"] == 0:
            record["tail"] = record["tail"][-1:]
        if self.count_only:
            print(f"  {record['collected']} tests collected in {len(files)} files")
            return record

        def run_file(file: str) -> Record:
            most = self.file_seconds * max(1.0, seconds / self.share)
            left = min(most, deadline - context.now())
            if left < LEAST_SECONDS:
                return {"file": file, "exit_code": None, "not_run": "no time was left"}
            command = [*begin, file]
            ended = context.runner(command, left, self.environment)
            one = {"file": file, **counted(ended["output"]), **context.ended(command, ended, left)}
            if one["exit_code"] == 0:
                del one["tail"]
            print(f"  {file}: {_how(one)}", flush=True)
            return one

        with ThreadPoolExecutor(self.workers) as pool:
            # Those with the most tests first, so that no long one is left for the end.
            record["files"] = list(pool.map(run_file, [file for file, _ in files.most_common()]))
        for word in ("passed", "failed", "skipped"):
            record[word] = sum(one.get(word, 0) for one in record["files"])
        codes = [record["exit_code"], *(one["exit_code"] for one in record["files"])]
        record["exit_code"] = 0 if all(code == 0 for code in codes) else 1
        record["seconds"] = round(context.now() - (deadline - seconds), 1)
        return record


def places_with(folder: str, marker: str) -> list[str]:
    """Where below `folder` tests with the marker can be: in files that name it, or anywhere if the
    folder's conftest.py does. Collecting all of our tests takes most of a minute."""
    name = f"mark.{marker}"
    conftest = ROOT / folder / "conftest.py"
    if conftest.exists() and name in conftest.read_text():
        return [folder]
    files = sorted((ROOT / folder).rglob("test_*.py"))
    return [str(file.relative_to(ROOT)) for file in files if name in file.read_text()]


Part = Program | Suite


def counted(output: str) -> dict[str, int]:
    """Tests by outcome, from the last line in which pytest says it."""
    for line in reversed(output.splitlines()):
        found = re.findall(r"(\d+) (passed|failed|skipped|errors?)\b", line)
        if found and " in " in line:
            counts: Counter[str] = Counter()
            for number, word in found:
                counts["failed" if word.startswith("error") else word] += int(number)
            return dict(counts)
    return {}


def gpu_parts(cpus: int, fake: bool = False) -> tuple[Part, ...]:
    """What a GPU shows, the most important first. `fake`: there is none, so less is timed."""
    kernels, *others = TEST_FOLDERS
    workers = max(1, min(4, cpus // 4))
    threads = {"OMP_NUM_THREADS": str(max(1, cpus // workers))}
    marker = "gpu and not slow"
    side_by_side: tuple[str, ...] = ("scripts/bench_train.py", "--device", "cuda", "--preset", "1b")
    side_by_side += ("--dtype", "bf16", "--batch", "8", "--seq", "2048", "--share", "50%")
    side_by_side += ("--clip", "0", "--steps", "2" if fake else "5", "--rounds", "1")
    side_by_side += ("--modes", FAKE_BENCH_MODES if fake else BENCH_MODES)
    overhead = ("scripts/bench_overhead.py", "--device", "cuda", "--steps", "5" if fake else "20")
    overhead += ("--processes", "1")
    free_copies = {"FAKECUDA_FREE_COPIES": "1"}  # means something to tests/fakecuda only
    return (
        Program("smoke", 30, ("scripts/gpu_smoke.py",), required=True),
        Suite("other_tests", 55, marker, tuple(others)),
        Suite("kernel_tests", 140, marker, (kernels,), workers, environment=threads),
        Program("side_by_side", 190, side_by_side, stops_itself=True, environment=free_copies),
        Program("kernels", 90, ("scripts/bench_kernels.py", "--quick"), stops_itself=True),
        Program("overhead", 35, overhead),
    )


def cpu_parts(cpus: int) -> tuple[Part, ...]:
    """What can be checked without a GPU; all of it is about kernels."""
    interpret = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    folders = TEST_FOLDERS[:1]
    workers = max(1, min(8, cpus))
    references = ("scripts/bench_kernels.py", "--quick")
    marker = "interpreter and not slow"
    return (
        Program("references", 80, references, stops_itself=True),
        Suite("aot_tests", 40, "aot and not slow", folders, count_only=True),
        Suite("interpreter_tests", 420, marker, folders, workers, 180.0, environment=interpret),
    )


def allotment(parts: Sequence[Part], number: int, left: float) -> float:
    """Seconds for part `number` of the `left` ones: its share among those that are still to run."""
    return left * parts[number].share / sum(part.share for part in parts[number:])


def check(
    parts: Sequence[Part], context: Context, minutes: float, save: Callable[[Record], None]
) -> Record:
    """Run all parts, in order, within `minutes`, or up to a required one that fails; `save` gets
    the record by part after each."""
    deadline = context.now() + 60 * minutes
    record: Record = {}
    for number, part in enumerate(parts):
        seconds = allotment(parts, number, deadline - context.now())
        if seconds < LEAST_SECONDS:
            record[part.name] = {"exit_code": None, "not_run": f"{seconds:.1f} s were left for it"}
        else:
            print(f"{part.name}: {seconds:.0f} s at most", flush=True)
            try:
                record[part.name] = part.run(context, seconds)
            except Exception as error:  # the other parts may work
                record[part.name] = {"exit_code": 1, "error": f"{type(error).__name__}: {error}"}
        print(f"{part.name}: {_how(record[part.name])}", flush=True)
        save(record)
        if isinstance(part, Program) and part.required and record[part.name]["exit_code"] != 0:
            print(record[part.name].get("output", ""), end="")
            print(f"{part.name} failed, so the other parts are not run", flush=True)
            break
    return record


def _how(record: Record) -> str:
    """One line, and the end of the output of what failed."""
    if record["exit_code"] is None:
        return f"NOT RUN: {record['not_run']}"
    if "error" in record:
        return f"FAILED: {record['error']}"
    codes = {0: "ok", TIMED_OUT: "OUT OF TIME"}
    text = codes.get(record["exit_code"], f"FAILED (exit {record['exit_code']})")
    words = [f"{record[word]} {word}" for word in ("passed", "failed", "skipped") if word in record]
    text = ", ".join([text, *words, f"{record['seconds']} s"])
    if record["exit_code"] and not record.get("files"):
        text += "".join(f"\n    {line}" for line in record.get("tail", []))
    return text


def facts(cuda: bool) -> Record:
    versions = {}
    for package in ("numpy", "torch", "triton"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "system": platform.platform(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        **versions,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


@click.command(help=__doc__.replace("\n\n    gpu", "\n\n\b\n    gpu") if __doc__ else None)
@click.option("--minutes", type=click.FloatRange(0, min_open=True), default=9.0, show_default=True)
@click.option("--only", multiple=True, metavar="PART", help="Only this part; may be repeated.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path))
def main(minutes: float, only: tuple[str, ...], json_path: Path | None) -> None:
    cuda = torch.cuda.is_available()
    cpus = len(os.sched_getaffinity(0))
    fake = on_fake_cuda()
    parts = gpu_parts(cpus, fake) if cuda else cpu_parts(cpus)
    names = [part.name for part in parts]
    unknown = [name for name in only if name not in names]
    if unknown:
        raise click.UsageError(f"--only={unknown[0]!r} is no part here; use {', '.join(names)}")
    chosen = [part for part in parts if not only or part.name in only]
    about = facts(cuda)
    if not cuda:
        print("gpu_check: no CUDA device. Nothing that only a GPU can show is shown here;")
        print("what follows are CPU references and Triton's interpreter.")

    def save(record: Record) -> None:
        if json_path is not None:
            limits = "of CPU time" if fake else "on the wall"
            whole = {"facts": about, "minutes": minutes, "limits": limits, "parts": record}
            beside = json_path.with_name(f"{json_path.name}.new")
            beside.write_text(json.dumps(whole, indent=1) + "\n")
            beside.replace(json_path)  # whole at every moment

    with ending_all(), tempfile.TemporaryDirectory(prefix="gpu_check-") as folder:
        context = Context(Path(folder))
        if fake:
            by_cpu_time = partial(run_command, of_cpu=True)
            context = replace(context, runner=by_cpu_time, now=ended_cpu_seconds, of_cpu=True)
        record = check(chosen, context, minutes, save)
    bad = [name for name, one in record.items() if one["exit_code"] != 0]
    print(f"failed: {', '.join(bad)}" if bad else "all parts ok")
    sys.exit(int(bool(bad)))


if __name__ == "__main__":
    main()
