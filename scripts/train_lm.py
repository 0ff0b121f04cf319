#!/usr/bin/env python3
"""Train a byte-level language model inside a memory budget.

    train_lm.py --preset 125m --device-budget 600MiB --host-budget 2GiB
    train_lm.py --preset 10m --no-pager
    train_lm.py --preset 10m --compare --device-budget 40% --host-budget 100%
    torchrun --nproc-per-node 2 train_lm.py --preset 10m --device-budget 200MiB --host-budget 1GiB

Runs are deterministic: the same options give the same losses and final parameters, bit for bit,
with the pager and without it.
"""

import os
import signal
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

# Read by libraries when they load, hence before the imports below.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the profiler's, about older memory

from lm.checkpoint import load_checkpoint, save_checkpoint
from lm.compare import ChildError, compare
from lm.data import load_corpus
from lm.memory import Memory, PagedMemory, PlainMemory
from lm.options import Options, UsageError, parse_options
from lm.ranks import LostRankError, Ranks, ranks_of
from lm.report import StepPrinter, make_record, print_summary, write_json
from lm.scalars import Scalars
from lm.trainer import Trainer, refuse_other_training

import tensorpager as tp


def open_memory(options: Options, stack: ExitStack) -> tuple[Memory, tp.Pager | None]:
    """The pager with the options' budgets, closed by ``stack``; or none."""
    if not options.pager:
        return PlainMemory(options.device), None
    budgets = {tier: options.budget_bytes(tier, options.needed) for tier in ("host", "disk")}
    try:
        pager = tp.Pager(
            device_budget=options.budget_bytes("device", options.needed),
            host_budget=budgets["host"],
            disk_budget=budgets["disk"],
            disk_path=options.disk_path,
            page_size=options.page_size,
            policy=options.policy,
            device=options.device,
            metrics=options.metrics,
            disk_write_limit=options.disk_write_limit,
        )
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error
    return PagedMemory(stack.enter_context(pager)), pager


LAUNCHER_SECONDS = 5.0  # within which torchrun passes a signal on


class Stop:
    """Within it Ctrl-C and SIGTERM end a run after the step they meet, a second one at once; of
    several ranks only one that comes ``seconds`` later, since torchrun passes on what all have."""

    def __init__(self, seconds: float, *, quiet: bool) -> None:
        self.signal = 0
        self._seconds, self._quiet = seconds, quiet

    def __enter__(self) -> "Stop":
        self._before = {
            number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signal:
            if now - self._began >= self._seconds:
                _stop(number, frame)
            return
        self.signal, self._began = number, now
        if not self._quiet:
            print("train_lm: ends after this step; once more: at once", file=sys.stderr, flush=True)


def train(options: Options, ranks: Ranks) -> int:
    """One run: train, show, and write what was asked for. Returns the exit code: that of a signal
    which ended it, where the checkpoint says how far it came."""
    try:
        corpus = load_corpus(options.data, options.seq)
    except (ValueError, OSError) as error:
        raise UsageError(f"--data: {error}") from None
    if ranks.place.restarts and options.save is not None and options.save.exists():
        options = replace(options, resume=options.save)
    content = None
    if options.resume is not None:  # read before anything is built, and by one rank as a whole
        content = load_checkpoint(options.resume, whole=ranks.is_first)
        refuse_other_training(content, options, corpus)
        ranks.all(None)
    losses: list[float] = []
    norms: list[float | None] = []
    step_seconds: list[float] = []
    with ExitStack() as stack:
        scalars = stack.enter_context(Scalars(options.tensorboard if ranks.is_first else None))
        memory, pager = open_memory(options, stack)
        trainer = Trainer(options, memory, corpus, ranks)
        if content is not None and (told := trainer.restore(content)) and ranks.is_first:
            print(told)
        content = None
        first_step = trainer.next_step
        name = "paged" if options.pager else "plain"
        printer = StepPrinter(name, options, first_step, quiet=not ranks.is_first)
        with printer, ExitStack() as stopping:
            stop: Stop | None = None
            if options.save is not None:
                seconds = 0.0 if ranks.parallel is None else LAUNCHER_SECONDS
                stop = stopping.enter_context(Stop(seconds, quiet=not ranks.is_first))
            for step in range(first_step, options.steps):
                started = time.perf_counter()
                losses.append(trainer.step())
                step_seconds.append(time.perf_counter() - started)
                norms.append(trainer.gradient_norm)
                stats = None if pager is None else pager.stats()
                rate = options.batch * options.seq / step_seconds[-1]
                if pager is not None:
                    pager.metrics.log("loss", losses[-1])
                    pager.metrics.log("tokens/s", rate)
                scalars.step(step, losses[-1], rate, step_seconds[-1], stats)
                peaks = None if stats is None else stats["peak_bytes"]
                printer.step(step, losses[-1], step_seconds[-1], peaks)
                stopped = 0 if stop is None else ranks.most(stop.signal or _WORN * _is_worn(stats))
                last = stopped or step + 1 == options.steps
                due = options.save_every and (step + 1) % options.save_every == 0
                if options.save is not None and (last or due):
                    _save(options.save, trainer, ranks)
                if stopped:
                    if ranks.is_first:
                        why = ", as --disk-write-limit is reached," if stopped == _WORN else ""
                        print(
                            f"train_lm: stopped after step {trainer.next_step} of {options.steps}"
                            f"{why} and saved; the same command with --resume={options.save} goes "
                            "on",
                            file=sys.stderr,
                        )
                    return 2 if stopped == _WORN else 128 + stopped
        reports = ranks.all(memory.report())
        sha256 = trainer.parameters_sha256()
    record = make_record(options, first_step, losses, norms, step_seconds, reports, sha256)
    if ranks.is_first:
        print_summary(record)
        if options.json is not None:
            write_json(options.json, record)
    return 0


_WORN = 1000  # above all signals: more was written to disk than may be in a day


def _is_worn(stats: dict[str, Any] | None) -> bool:
    """Whether the pager begins no further iteration today."""
    wear = {"limit": None} if stats is None else stats["disk_wear"]
    return wear["limit"] is not None and wear["written_today"] >= wear["limit"]


def _save(path: Path, trainer: Trainer, ranks: Ranks) -> None:
    try:
        save_checkpoint(path, trainer.checkpoint(), ranks)
    except OSError as error:
        raise UsageError(f"--save={path}: {error}") from error


def _stop(signal_number: int, frame: FrameType | None) -> NoReturn:
    """Leave through the ``with`` blocks, so that children and files go too."""
    sys.exit(128 + signal_number)


def main(arguments: list[str]) -> int:
    signal.signal(signal.SIGTERM, _stop)
    try:
        options = parse_options(arguments)
        if options.compare:
            return compare(Path(__file__).resolve(), options)
        with ranks_of(options) as ranks:
            return train(options, ranks)
    except (UsageError, tp.PagerError) as error:
        return _fail(str(error))
    except LostRankError as error:
        _fail(f"stopped, because {error}")
        return 1
    except ChildError as error:
        if error.exit_code == 2:  # and the child has said why
            return 2
        _fail(str(error))
        return 1
    except KeyboardInterrupt:
        print("train_lm: interrupted; --save=PATH keeps what was learned", file=sys.stderr)
        return 130


def _fail(message: str) -> int:
    """One line on stderr, whatever the message holds."""
    rank = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
    print(f"train_lm: {rank}" + " ".join(message.split()), file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
