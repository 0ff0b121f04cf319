"""Recordings into trace files: ``Pager.record(path)``, and those that ``tensorpager record`` asks
for through the environment.

Only what a program needs that is never recorded is imported at the top.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import PagerError

if TYPE_CHECKING:
    from ...planner.trace import Trace
    from .op_log import OpLog
    from .recorder import Recorder

PATH_VARIABLE = "TENSORPAGER_RECORD"  # where the trace goes; unset: nothing is recorded
ITERATION_VARIABLE = "TENSORPAGER_RECORD_ITERATION"
EVERY_VARIABLE = "TENSORPAGER_RECORD_EVERY"  # optimizer steps of an iteration; unset: found out
REPORT_VARIABLE = "TENSORPAGER_RECORD_REPORT"  # folder of the command, for what became of it
DEFAULT_ITERATION = 3  # the 1st is metered, the 2nd is the first with optimizer states
CLAIM = "claim"


# -- Pager.record --------------------------------------------------------------------------------
@contextmanager
def record_iterations(recorder: Recorder, path: str | os.PathLike[str]) -> Iterator[None]:
    """Record the first whole iteration that runs inside the block, and write its trace to ``path``
    (all or nothing, mode 0600) when the block ends.

    Where no ``pager.iteration()`` begins inside the block, the block is the iteration. Nothing is
    written if the block raises. Raises ``PagerError`` if ``path`` cannot be written, if the pager
    is being recorded already, if iterations began and none was completed, or if nothing ran.
    """
    target = Path(path)
    _check_target(target)
    first = _FirstIteration(recorder)
    listeners = recorder.pager.on_iteration
    listeners.append(first)
    try:
        yield
        if first.trace is None and first.begun:
            raise PagerError(
                f"{target} was not written: {first.begun} iteration() began inside record() and "
                "none was completed; keep the whole iteration inside the block"
            )
        trace = first.trace or recorder.finish(first.ops)
    finally:
        listeners.remove(first)
        recorder.abandon(first.ops)
    write(target, trace)


class _FirstIteration:
    """Listens for the first iteration that is completed; until one begins it records already."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.ops = recorder.start()
        self.trace: Trace | None = None
        self.begun = 0

    def begin(self) -> None:
        if self.trace is None:
            self.begun += 1
            self._recorder.abandon(self.ops)
            self.ops = self._recorder.start()

    def end(self, ok: bool) -> None:
        if self.trace is not None or not self.begun:
            return  # done, or an iteration that had begun before the block
        if ok:
            self.trace = self._recorder.finish(self.ops)
        else:
            self._recorder.abandon(self.ops)


def _check_target(target: Path) -> None:
    """Refuse before the iteration what could not be written after it."""
    if target.is_dir():
        raise PagerError(f"cannot record to {target}: it is a folder; name a file in it")
    folder = target.absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise PagerError(
            f"cannot record to {target}: there is no folder {folder} that can be written to"
        )


def write(target: Path, trace: Trace) -> Trace:
    """See ``write_trace``; pyarrow is imported here and not while an iteration runs."""
    from ...planner.trace_file import write_trace

    return write_trace(target, trace)


# -- tensorpager record --------------------------------------------------------------------------
class Report:
    """What ``tensorpager record`` asks of the program that it runs, and what it is told: a file for
    each Pager, and for the program without one. Trouble with it never ends a training."""

    _made = 0

    def __init__(
        self, target: Path, number: int, folder: Path | None, every: int | None = None
    ) -> None:
        type(self)._made += 1
        self.target, self.number, self.every = target, number, every
        self._path = folder / f"{os.getpid()}-{self._made}.json" if folder else None
        self._file = -1
        self._claim = folder / CLAIM if folder else None

    @classmethod
    def from_environment(cls) -> Report | None:
        """``None`` where nothing is to be recorded."""
        path = os.environ.get(PATH_VARIABLE)
        if not path:
            return None
        number = _number(ITERATION_VARIABLE) or DEFAULT_ITERATION
        folder = os.environ.get(REPORT_VARIABLE)
        return cls(Path(path), number, Path(folder) if folder else None, _number(EVERY_VARIABLE))

    def claim(self) -> bool:
        """Whether nobody else of this run has begun to record."""
        if self._claim is None:
            return True
        try:
            self._claim.open("x").close()
        except FileExistsError:
            return False
        except OSError:
            return True
        self._claim = None
        return True

    def tell(self, **facts: object) -> None:
        """``iterations`` that were completed, and more. The file stays open: this is called in each
        iteration until one is recorded."""
        with suppress(OSError):
            if self._path is not None:
                self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
                self._path = None
            if self._file >= 0:
                text = json.dumps(facts).encode()
                os.pwrite(self._file, text, 0)
                os.ftruncate(self._file, len(text))

    def fail(self, error: Exception, iterations: int) -> None:
        """To the user too."""
        reason = str(error) or type(error).__name__
        print(f"tensorpager: {self.target} was not written: {reason}", file=sys.stderr)
        self.tell(iterations=iterations, error=reason)


def _number(variable: str) -> int | None:
    """Of the environment, if it is there."""
    text = os.environ.get(variable)
    if text is None:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise PagerError(f"{variable}={text!r} is not a whole number ≥ 1")
    return int(text)


def recording_from_environment(recorder: Recorder) -> None:
    """Called for each new Pager: record one of its iterations if the environment says so."""
    report = Report.from_environment()
    if report is not None:
        recorder.pager.on_iteration.append(_NumberedIteration(recorder, report))


class _NumberedIteration:
    """Records the iteration that is asked for, or the next one that is completed; one of a
    program's pagers and processes does."""

    def __init__(self, recorder: Recorder, report: Report) -> None:
        self._recorder, self._report = recorder, report
        self._ops: OpLog | None = None
        self._completed = 0
        self._done = False
        report.tell(iterations=0)

    def begin(self) -> None:
        if self._done or self._completed + 1 < self._report.number:
            return
        if not self._report.claim():
            self._done = True
            return
        try:
            if self._report.every is not None:
                raise PagerError(
                    "--every is for scripts without a Pager; this one has one, and marks its "
                    "iterations itself"
                )
            self._ops = self._recorder.start()
        except Exception as error:
            self._fail(error)

    def end(self, ok: bool) -> None:
        ops, self._ops = self._ops, None
        if not ok:
            self._recorder.abandon(ops)
            return
        if self._done:
            return
        self._completed += 1
        if ops is None:
            self._report.tell(iterations=self._completed)
            return
        self._done = True
        try:
            trace = write(self._report.target, self._recorder.finish(ops))
            facts = {"written": True, "ops": trace.ops, "tensors": trace.tensors}
            self._report.tell(iterations=self._completed, **facts)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._done = True
        self._report.fail(error, self._completed)
