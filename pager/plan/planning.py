"""A plan from a process of its own: training goes on while it is made.

The planner is Python and a linear program: in this process it would take the GIL from the training
thread. So it gets the trace through a pipe and gives the plan back through another; a thread of
this process feeds and empties them, and is asleep otherwise.

Note on the end of it. The planner asks the kernel to kill it when the *thread* that started it is
gone. So the thread that starts it is that daemon thread, which lives exactly as long: it ends with
the planner, or with this process, however that ends.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ...planner.errors import PlanError
from ...planner.hardware import Hardware
from ...planner.places.layout import Layout, layout_from_json
from ...planner.plan import Plan, plan_from_json
from ...planner.request import write_request
from ...planner.trace import Trace
from ..devices.heap import give_back_idle
from ..errors import PagerError

MODULE = "tensorpager.planner.background"
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
STDERR_LINES = 5  # of a planner that died, in the error
CANCEL_SECONDS = 10.0  # within which a killed process is gone


class Planned(NamedTuple):
    """``again``: blocks whose activations should rather be made again; an iteration takes
    ``again_us`` then."""

    plan: Plan
    layout: Layout
    again: frozenset[str] = frozenset()
    again_us: float = 0.0


class PlanRefused(PagerError):  # noqa: N818 (an honest answer of the planner, not a fault)
    """No plan works for this trace on this machine; the message says why.

    ``minimum``: the smallest device budget in bytes that would, if it is known.
    """

    def __init__(self, message: str, *, minimum: int | None) -> None:
        super().__init__(message)
        self.minimum = minimum


class PlanningProcess:
    """Starts at once: it loads what a planner needs, and waits to be asked."""

    def __init__(self) -> None:
        self._run = _Run()
        self._thread = threading.Thread(
            target=self._run.go, name="tensorpager-planning", daemon=True
        )
        self._thread.start()
        self._finalizer = weakref.finalize(self, _cancel, self._run, self._thread)

    def ask(self, trace: Trace, hardware: Hardware, *, quick: bool, policy: str = "lp") -> None:
        """Once. The arguments are those of :func:`plan_with_layout`; neither may be changed until
        it is ``done``."""
        self._asked = time.perf_counter()
        self._run.question = Question(trace, hardware, quick, policy)
        self._run.asked.set()

    @property
    def seconds(self) -> float:
        """Since it was asked."""
        return time.perf_counter() - self._asked

    def done(self) -> bool:
        """Whether ``result`` returns, or raises, at once."""
        return self._run.answer.done()

    def result(self, timeout: float | None = None) -> Planned:
        """Waits for the plan, ``timeout`` seconds at most, then raises ``TimeoutError``.

        Raises ``PlanRefused`` if no plan works, and ``PagerError`` if the planner died (with its
        exit code and last words) or was cancelled. The same again on each call.
        """
        try:
            return self._run.answer.result(timeout)
        except TimeoutError as error:
            raise TimeoutError(f"no plan after {timeout} s; it is still being made") from error

    @property
    def said(self) -> bytes:
        """What it has answered, for :class:`Awaited` ones elsewhere; nothing if it is not done, or
        was cancelled."""
        return self._run.said

    def cancel(self) -> None:
        """The process is gone when this returns. What was there already stays; may be repeated."""
        _cancel(self._run, self._thread)


class Question(NamedTuple):
    """What a planner is asked."""

    trace: Trace
    hardware: Hardware
    quick: bool
    policy: str


class Awaited:
    """A plan that somebody else's :class:`PlanningProcess` makes, in its place."""

    def __init__(self) -> None:
        self._answer: Future[Planned] = Future()
        self._since = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Since it is awaited."""
        return time.perf_counter() - self._since

    def told(self, said: bytes) -> None:
        """It has answered so."""
        try:
            self._answer.set_result(_read(said, b"", 1))
        except PagerError as error:
            self._answer.set_exception(error)

    def done(self) -> bool:
        return self._answer.done()

    def result(self, timeout: float | None = None) -> Planned:
        """Raises as the other one does, and ``PagerError`` as long as it is not there: this process
        hears of it at the end of an iteration only, so nobody waits here."""
        if not self.done():
            raise PagerError("the plan is made by another rank, and is not there yet")
        return self._answer.result()

    def cancel(self) -> None:
        """Nobody wants it any more."""


@dataclass(eq=False)
class _Run:
    """What the thread and its owner share; the thread knows no owner, which may so be collected."""

    question: Question | None = None
    asked: threading.Event = field(default_factory=threading.Event)
    owner_pid: int = field(default_factory=os.getpid)
    answer: Future[Planned] = field(default_factory=Future)
    lock: threading.Lock = field(default_factory=threading.Lock)
    process: subprocess.Popen[bytes] | None = None
    cancelled: bool = False
    said: bytes = b""

    def go(self) -> None:
        """The thread."""
        try:
            planned = self._plan()
        except PagerError as error:
            if not self.cancelled and not self.said:
                self.said = json.dumps({"error": str(error)}).encode()
            self.answer.set_exception(error)
        except Exception as error:  # or nobody would hear of it
            failure = PagerError(f"planning failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self.answer.set_exception(failure)
        else:
            self.answer.set_result(planned)

    def _plan(self) -> Planned:
        with self.lock:
            if self.cancelled:
                raise PagerError("planning was cancelled")
            try:
                process = self.process = _start()
            except OSError as error:
                raise PagerError(
                    f"the planner cannot be started: {sys.executable}: {error.strerror}"
                ) from error
        try:
            self.asked.wait()
            if self.question is not None:
                self._write_to(process, self.question)
                self.question = None
            give_back_idle()
            answer, complaints = process.communicate()
        except BaseException:
            process.kill()
            process.communicate()
            raise
        if self.cancelled:
            raise PagerError("planning was cancelled")
        if process.returncode == 0:
            self.said = answer
        return _read(answer, complaints, process.returncode)

    def _write_to(self, process: subprocess.Popen[bytes], question: Question) -> None:
        request = write_request(
            question.trace, question.hardware, quick=question.quick, policy=question.policy,
            parent_pid=self.owner_pid,
        )  # fmt: skip
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # it has died: what it says of that is read
            process.stdin.write(request)
            process.stdin.flush()


def _start() -> subprocess.Popen[bytes]:
    """The planner of the package that this file belongs to, wherever that was imported from."""
    root = str(Path(__file__).absolute().parents[3])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        **dict.fromkeys(ONE_THREAD, "1"),
    }
    return subprocess.Popen(
        # -P: a folder of the user's that happens to be the current one has no say in imports.
        [sys.executable, "-P", "-m", MODULE, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        close_fds=True,
        env=environment,
        process_group=0,  # Ctrl-C at the terminal goes to the training only
    )


def _read(answer: bytes, complaints: bytes, code: int) -> Planned:
    try:
        content: dict[str, Any] = json.loads(answer)
    except ValueError:
        content = {}
    if "refused" in content:
        raise PlanRefused(content["refused"], minimum=content["minimum"])
    if "plan" not in content:
        lines = complaints.decode(errors="replace").strip().splitlines()[-STDERR_LINES:]
        words = content.get("error") or "; ".join(lines) or "without a word"
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        raise PagerError(f"the planner died ({how}): {words}")
    try:
        blocks, again_us = content.get("again") or ((), 0.0)
        return Planned(
            plan_from_json(content["plan"]), layout_from_json(content["layout"]),
            frozenset(blocks), again_us,
        )  # fmt: skip
    except PlanError as error:
        raise PagerError(f"the planner's answer cannot be read: {error}") from error


def _cancel(run: _Run, thread: threading.Thread) -> None:
    """Kills the process; the thread reaps it. Not in a forked copy of the process."""
    if os.getpid() != run.owner_pid:
        return
    with run.lock:
        run.cancelled = True
        if run.process is not None and run.process.returncode is None:
            run.process.kill()
    run.asked.set()  # the thread need not wait for a question any more
    if thread is not threading.current_thread():
        thread.join(CANCEL_SECONDS)
