#!/usr/bin/env python3
"""Train a byte-level language model inside a memory budget.

    train_lm.py --preset 125m --device-budget 600MiB --host-budget 2GiB
    train_lm.py --preset 10m --no-pager
    train_lm.py --preset 10m --compare --device-budget 40% --host-budget 100%

Runs are deterministic: the same options give the same losses and final parameters, bit for bit,
with the pager and without it.
"""

import os
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import NoReturn

# Read by libraries when they load, hence before the imports below.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the profiler's, about older memory

from lm.checkpoint import load_checkpoint, save_checkpoint
from lm.compare import ChildError, compare
from lm.data import load_corpus
from lm.memory import Memory, PagedMemory, PlainMemory
from lm.options import Options, UsageError, parse_options
from lm.report import StepPrinter, make_record, print_summary, write_json
from lm.scalars import Scalars
from lm.trainer import Trainer

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
        )
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error
    return PagedMemory(stack.enter_context(pager)), pager


class Stop:
    """Within it Ctrl-C and SIGTERM end a run after the step they meet, a second one at once."""

    def __init__(self) -> None:
        self.signal = 0

    def __enter__(self) -> "Stop":
        self._before = {
            number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal:
            _stop(number, frame)
        self.signal = number
        print("train_lm: ends after this step; once more: at once", file=sys.stderr, flush=True)


def train(options: Options) -> int:
    """One run: train, show, and write what was asked for. Returns the exit code: that of a signal
    which ended it, where the checkpoint says how far it came."""
    try:
        corpus = load_corpus(options.data, options.seq)
    except (ValueError, OSError) as error:
        raise UsageError(f"--data: {error}") from None
    losses: list[float] = []
    step_seconds: list[float] = []
    with ExitStack() as stack:
        scalars = stack.enter_context(Scalars(options.tensorboard))
        memory, pager = open_memory(options, stack)
        trainer = Trainer(options, memory, corpus)
        if options.resume is not None:
            trainer.restore(load_checkpoint(options.resume))
        first_step = trainer.next_step
        name = "paged" if options.pager else "plain"
        with StepPrinter(name, options, first_step) as printer, ExitStack() as stopping:
            stop = stopping.enter_context(Stop()) if options.save is not None else None
            for step in range(first_step, options.steps):
                started = time.perf_counter()
                losses.append(trainer.step())
                step_seconds.append(time.perf_counter() - started)
                stats = None if pager is None else pager.stats()
                rate = options.batch * options.seq / step_seconds[-1]
                if pager is not None:
                    pager.metrics.log("loss", losses[-1])
                    pager.metrics.log("tokens/s", rate)
                scalars.step(step, losses[-1], rate, step_seconds[-1], stats)
                peaks = None if stats is None else stats["peak_bytes"]
                printer.step(step, losses[-1], step_seconds[-1], peaks)
                if stop is not None and stop.signal:
                    break
        if options.save is not None:
            try:
                save_checkpoint(options.save, trainer.checkpoint())
            except OSError as error:
                raise UsageError(f"--save={options.save}: {error}") from error
        if stop is not None and stop.signal:
            print(
                f"train_lm: stopped after step {trainer.next_step} of {options.steps} and saved; "
                f"the same command with --resume={options.save} goes on",
                file=sys.stderr,
            )
            return 128 + stop.signal
        record = make_record(
            options, first_step, losses, step_seconds, memory.report(), trainer.parameters_sha256()
        )
    print_summary(record)
    if options.json is not None:
        write_json(options.json, record)
    return 0


def _stop(signal_number: int, frame: FrameType | None) -> NoReturn:
    """Leave through the ``with`` blocks, so that children and files go too."""
    sys.exit(128 + signal_number)


def main(arguments: list[str]) -> int:
    signal.signal(signal.SIGTERM, _stop)
    try:
        options = parse_options(arguments)
        if options.compare:
            return compare(Path(__file__).resolve(), options)
        return train(options)
    except (UsageError, tp.InfeasibleBudget, tp.TierFull) as error:
        return _fail(str(error))
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
    print("train_lm: " + " ".join(message.split()), file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
