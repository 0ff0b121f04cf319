#!/usr/bin/env python3
"""Kill -9 a paged training at random points, many times, and look at what is left.

    kill_test.py                  100 runs, half of them with forked DataLoader workers
    kill_test.py --runs 3 --json found.json

Each run trains a tiny model whose pages are on device, host and disk, follows a plan, and writes a
checkpoint after each step. It is killed after a random part of the time that an unharmed run takes.
Then, while its DataLoader workers may still live:

- no process has the paging file open, which has no name: so its space is free again;
- the folder of the paging file, /dev/shm and XDG_RUNTIME_DIR hold what they held before;
- none of its processes lives on, once the workers have noticed;
- a run that resumes from the last checkpoint has the losses of the unharmed run, bit for bit.

Beside them another process trains in the same folder all the time; its losses must be the
undisturbed ones too. Exit code 1 if anything was found.
"""

import argparse
import json
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch
import torch._dynamo  # which optimizers import when they are made: once here, not in each child
from lm.checkpoint import load_checkpoint, save_checkpoint
from lm.data import Corpus, load_corpus
from lm.memory import PagedMemory
from lm.model import PRESETS, ModelShape, Preset
from lm.options import parse_options
from lm.trainer import Trainer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import tensorpager as tp

STEPS = 6
PLANNED_FROM = 3  # the step before which a run waits for its plan
DISK_BYTES = 64 << 20  # of a run's paging file: far more than it uses, so that a leak is seen
PRESETS["mini"] = Preset(ModelShape(width=128, layers=1, heads=2, context=32), 1, 32, 3e-3)
TRAINING = ("--preset=mini", f"--steps={STEPS}", "--page-size=64KiB")
BUDGETS = ("--device-budget=4MiB", "--host-budget=512KiB", f"--disk-budget={DISK_BYTES}")
GONE_SECONDS = 2.0  # within which the kernel and a worker that was being forked let go of the file
WORKERS_SECONDS = 30.0  # workers look for their parent every 5 s
OTHERS_SECONDS = 60.0  # what other programs have in shared memory meanwhile goes away by then
PAUSE_SECONDS = 1.0  # of the bystander between steps, to leave time for the others
GOLDEN = 0.618034  # its multiples, less whole numbers, are spread evenly, however many there are
Say = Callable[[str], None]


class Batches(Dataset[tuple[Tensor, Tensor]]):
    """Item ``n`` is the batch of step ``n``."""

    def __init__(self, corpus: Corpus, options: Any) -> None:
        self.corpus, self.options = corpus, options

    def __len__(self) -> int:
        return int(self.options.steps)

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        options = self.options
        return self.corpus.batch(options.seed, step, options.batch, options.seq)


class LoadedCorpus:
    """A corpus as the trainer wants one, whose batches come from forked DataLoader workers."""

    def __init__(self, corpus: Corpus, options: Any, first_step: int) -> None:
        self.sha256 = corpus.sha256
        loader = DataLoader(
            Batches(corpus, options),
            batch_size=None,
            sampler=range(first_step, options.steps),
            num_workers=2,
            multiprocessing_context="fork",
        )
        self._batches = iter(loader)  # forks them: after the pager was opened

    def batch(self, seed: int, step: int, batch: int, seq: int) -> tuple[Tensor, Tensor]:
        tokens, targets = next(self._batches)
        return tokens, targets


@dataclass(frozen=True)
class Job:
    """One training. ``checkpoint``: where it goes on from, if there is one, and saves to."""

    folder: Path
    checkpoint: Path | None = None
    workers: bool = False
    policy: str = "lp"
    pause: float = 0.0


def train(job: Job, corpus: Corpus, say: Say) -> None:
    """Says ``opened``, and for each step ``step``, its loss in hexadecimal, ``saved``."""
    arguments = [*TRAINING, *BUDGETS, f"--disk-path={job.folder}", f"--policy={job.policy}"]
    options = parse_options(arguments)
    with ExitStack() as stack:
        pager = stack.enter_context(
            tp.Pager(
                *(options.budget_bytes(tier, None) for tier in ("device", "host", "disk")),
                disk_path=job.folder, page_size=options.page_size, policy=job.policy, device="cpu",
            )
        )  # fmt: skip
        say("opened")
        content = None
        if job.checkpoint is not None and job.checkpoint.exists():
            content = load_checkpoint(job.checkpoint)
        first_step = 0 if content is None else int(content["step"])
        data: Any = LoadedCorpus(corpus, options, first_step) if job.workers else corpus
        trainer = Trainer(options, PagedMemory(pager), data)
        if content is not None:
            trainer.restore(content)
        if pager.core.follower is not None:
            pager.core.follower.only_if_faster = False
        for step in range(first_step, STEPS):
            if step == first_step + PLANNED_FROM:
                pager.plan()
            time.sleep(job.pause)
            say(f"step {step}")
            say(f"loss {step} {trainer.step().hex()}")
            if job.checkpoint is not None:
                save_checkpoint(job.checkpoint, trainer.checkpoint())
                say(f"saved {step}")
        stats = pager.stats()
        say(f"stats {json.dumps({k: stats[k] for k in ('planned_iterations', 'peak_bytes')})}")
    say("closed")


class Child:
    """A forked process that runs ``action(say)``; ``lines``: what it has said so far."""

    def __init__(self, action: Callable[[Say], None]) -> None:
        self._read, write = os.pipe()
        os.set_blocking(self._read, False)
        self._said = b""
        self.started = time.monotonic()
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            code = 1
            try:
                action(lambda line: (os.write(write, f"{line}\n".encode()), None)[1])
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        os.close(write)

    @property
    def lines(self) -> list[str]:
        """Whole lines only. Workers may hold the other end open: this never waits for its end."""
        while select.select([self._read], [], [], 0)[0]:
            more = os.read(self._read, 1 << 16)
            if not more:
                break
            self._said += more
        return self._said.decode().split("\n")[:-1]

    def kill(self) -> int | None:
        """Its exit code if it had come to its end before; ``None`` if it was killed."""
        os.kill(self.pid, signal.SIGKILL)
        return self.wait()

    def wait(self) -> int | None:
        _, status = os.waitpid(self.pid, 0)
        return None if os.WIFSIGNALED(status) else os.waitstatus_to_exitcode(status)

    def losses(self) -> dict[int, str]:
        words = (line.split() for line in self.lines)
        return {int(word[1]): word[2] for word in words if word[0] == "loss"}

    def close(self) -> None:
        os.close(self._read)


def holders(folder: Path) -> dict[int, list[str]]:
    """Open files without a name in ``folder``, by the processes that have them (of this user)."""
    found: dict[int, list[str]] = {}
    for entry in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            target = os.readlink(entry)
        except OSError:  # ended meanwhile, or somebody else's
            continue
        if target.startswith(f"{folder}/") and target.endswith("(deleted)"):
            found.setdefault(int(entry.parts[2]), []).append(target)
    return found


def session(leader: int) -> list[int]:
    """Living processes of the session that ``leader`` began."""
    members = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            after_name = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(after_name[3]) == leader and after_name[0] not in "ZX":
            members.append(int(entry.parts[2]))
    return members


def wait_until(fine: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not fine():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def names(folders: list[Path]) -> set[str]:
    """All that is in ``folders`` and looks as if PyTorch, Python or the pager had made it."""
    return {
        str(path)
        for folder in folders
        for path in (folder.iterdir() if folder.is_dir() else ())
        if folder != SHARED_MEMORY or path.name.startswith(("torch", "tensorpager", "sem.", "psm"))
    }


SHARED_MEMORY = Path("/dev/shm")


@dataclass
class Found:
    """``clean``: kills after which nothing was wrong. ``phases``: what was going on at the kill.
    ``too_late``: runs that had come to their end before, which do not count."""

    kills: int = 0
    with_workers: int = 0
    clean: int = 0
    too_late: int = 0
    phases: dict[str, int] = field(default_factory=dict)
    resumed: int = 0
    bystander_trainings: int = 0
    planned_iterations: int = 0
    half_written_checkpoints: int = 0
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0


class KillTest:
    """All runs, in folders below ``root``."""

    def __init__(self, root: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.disk, self.saves = root / "disk", root / "checkpoints"
        self.runtime = Path(os.environ["XDG_RUNTIME_DIR"])
        for folder in (self.disk, self.saves):
            folder.mkdir()
        self.corpus = load_corpus(None, 32)
        self.found = Found()
        self.expected: dict[int, str] = {}
        self.seconds = 0.0  # that an unharmed run takes
        self.watched = [self.disk, self.runtime, SHARED_MEMORY]

    def run(self, runs: int) -> Found:
        began = time.monotonic()
        before = names(self.watched)
        self._reference()
        leaders: list[int] = []
        with self._bystander() as bystander:
            number = 0
            while self.found.kills < runs and number < 2 * runs + 10:
                problems = self._one(number, runs, bystander.pid, leaders)
                self.found.problems += [f"run {number}: {problem}" for problem in problems]
                number += 1
        if not wait_until(lambda: not any(map(session, leaders)), WORKERS_SECONDS):
            alive = {leader: left for leader in leaders if (left := session(leader))}
            self.found.problems.append(f"processes that live on, by run's process: {alive}")
        wait_until(lambda: not names(self.watched) - before, OTHERS_SECONDS)
        if left := names(self.watched) - before:
            self.found.problems.append(f"left behind: {sorted(left)}")
        self.found.seconds = round(time.monotonic() - began, 1)
        return self.found

    def _reference(self) -> None:
        """An unharmed run: its losses, how long it takes, and that it is of the kind meant."""
        child = self._start(Job(self.disk, self.saves / "reference", workers=True))
        code = child.wait()
        self.seconds = time.monotonic() - child.started
        self.expected, lines = child.losses(), child.lines
        child.close()
        if code != 0:
            raise SystemExit(f"an unharmed run failed: {lines}")
        stats = next(line for line in lines if line.startswith("stats "))
        facts = json.loads(stats.removeprefix("stats "))
        self.found.planned_iterations = facts["planned_iterations"]
        if not (facts["planned_iterations"] and all(facts["peak_bytes"].values())):
            raise SystemExit(f"the run uses no plan, or not all tiers: {facts}")

    def _start(self, job: Job) -> Child:
        return Child(lambda say: train(job, self.corpus, say))

    @contextmanager
    def _bystander(self) -> Iterator[Child]:
        """Trains in the same folder, again and again, until the end of the block."""
        stop_read, stop_write = os.pipe()

        def again(say: Say) -> None:
            os.close(stop_write)
            while not select.select([stop_read], [], [], 0)[0]:
                train(Job(self.disk, policy="lru", pause=PAUSE_SECONDS), self.corpus, say)
                say("again")

        child = Child(again)
        os.close(stop_read)
        try:
            wait_until(lambda: "opened" in child.lines, WORKERS_SECONDS)
            yield child
        finally:
            # Closing it would not do: processes of killed runs that live on have it too.
            os.write(stop_write, b"stop")
            os.close(stop_write)
            code = child.wait()
        if code != 0:
            self.found.problems.append(f"the other process in the folder ended with {code}")
        trained = [line.split()[1:] for line in child.lines if line.startswith("loss ")]
        if any(self.expected[int(step)] != loss for step, loss in trained):
            self.found.problems.append("the other process in the folder had other losses")
        self.found.bystander_trainings = child.lines.count("again")
        child.close()

    def _one(self, number: int, runs: int, bystander: int, leaders: list[int]) -> list[str]:
        """Start, kill, look and resume; what was wrong. Kill times are spread over the whole run,
        each random within its part."""
        workers = number % 2 == 1
        job = Job(self.disk, self.saves / str(number), workers=workers)
        child = self._start(job)
        leaders.append(child.pid)
        place = (number * GOLDEN + self.random.random() / runs) % 1.0
        time.sleep(max(0.0, place * self.seconds - (time.monotonic() - child.started)))
        code = child.kill()
        problems = []
        if code:
            problems.append(f"the run failed by itself, exit code {code}: {child.lines}")
        # The file of a bystander between two trainings is gone too, so it is the only one allowed.
        if not wait_until(lambda: not set(holders(self.disk)) - {bystander}, GONE_SECONDS):
            problems.append(f"paging files that still take space: {holders(self.disk)}")
        wrong = {s for s, loss in child.losses().items() if loss != self.expected[s]}
        if wrong:
            problems.append(f"other losses before the kill, in steps {sorted(wrong)}")
        last = child.lines[-1].split()[0] if child.lines else "start"
        child.close()
        problems += self._resume(job)
        if code is None:
            self._count(last, workers, clean=not problems)
        else:
            self.found.too_late += 1
        return problems

    def _count(self, last: str, workers: bool, *, clean: bool) -> None:
        found = self.found
        found.kills += 1
        found.clean += clean
        found.with_workers += workers
        phase = _PHASES[last]
        found.phases[phase] = found.phases.get(phase, 0) + 1

    def _resume(self, job: Job) -> list[str]:
        assert job.checkpoint is not None
        for left in self.saves.glob(f".{job.checkpoint.name}.*"):
            self.found.half_written_checkpoints += 1
            left.unlink()
        first = 0
        if job.checkpoint.exists():
            first = int(load_checkpoint(job.checkpoint)["step"])
            self.found.resumed += first < STEPS
        if first == STEPS:
            return []
        again = self._start(Job(job.folder, job.checkpoint, policy="lru"))
        code = again.wait()
        losses, lines = again.losses(), again.lines
        again.close()
        job.checkpoint.unlink()
        expected = {step: loss for step, loss in self.expected.items() if step >= first}
        if code != 0 or losses != expected:
            return [f"resumed from step {first}, exit code {code}, other losses: {lines}"]
        return []


_PHASES = {
    "start": "opening",
    "opened": "building the model",
    "step": "training",
    "loss": "writing a checkpoint",
    "saved": "between steps",
    "stats": "closing",
    "closed": "ending the process",
}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", 1)[0])
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where to work (default: a temporary folder)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found")
    options = parser.parse_args(arguments)
    if options.runs < 1:
        parser.error(f"--runs={options.runs} must be at least 1")
    torch.set_num_threads(1)
    root = Path(tempfile.mkdtemp(prefix="kill-test-", dir=options.folder)).resolve()
    try:
        for variable in ("XDG_RUNTIME_DIR", "XDG_CACHE_HOME"):
            (root / variable).mkdir(mode=0o700)
            os.environ[variable] = str(root / variable)
        found = KillTest(root, options.seed).run(options.runs)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    text = json.dumps(asdict(found), indent=1)
    if options.json is not None:
        options.json.write_text(text + "\n")
    print(text)
    print(f"{found.clean} of {found.kills} kills clean")
    return 1 if found.problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
