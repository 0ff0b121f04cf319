"""Many what-ifs on one trace, side by side: plans by any policy, or a given plan, on any machine.

They do not depend on each other, so they run in processes of their own. These are started afresh
("spawn": no locks or threads are inherited), give way to other work, leave Ctrl-C to the process
that started them, and end with it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from types import TracebackType

from .errors import InfeasibleBudget, PagerError, PolicyRefusal
from .hardware import Hardware
from .lifetimes import require_working_sets
from .plan import Plan, Predicted
from .registry import make_plan
from .simulator import simulate
from .trace import Trace

NICE = 10
SMALL_OPS = 200  # traces that plan sooner than a process starts
MOST_PROCESSES = 8  # each holds the trace and a linear program: gigabytes for the longest traces


@dataclass(frozen=True)
class Task:
    """A plan by ``policy`` for ``hardware``; or this very ``plan``, made for whatever machine."""

    policy: str
    hardware: Hardware
    quick: bool = False
    plan: Plan | None = None
    keep_plan: bool = False  # hand the plan back with the outcome
    allow: tuple[str, ...] | None = None  # what policy joint may choose; all if not given


@dataclass(frozen=True)
class Outcome:
    """``predicted`` is ``None`` where nothing runs, and ``reason`` says why; ``minimum`` is then
    the smallest device budget in bytes that works, if the policy knows it."""

    policy: str
    hardware: Hardware
    predicted: Predicted | None
    seconds: float
    reason: str = ""
    minimum: int | None = None
    bound_us: float | None = None  # no plan is faster; policy lp only
    plan: Plan | None = None


def evaluate(
    trace: Trace, task: Task, progress: Callable[[str, float], None] | None = None
) -> Outcome:
    """Plans if there is no plan yet, and runs the machine model. A refusal is an outcome too."""
    began = time.perf_counter()
    try:
        # Asked first, because ``lp`` would search for the smallest budget that works.
        require_working_sets(trace, task.hardware)
        plan = task.plan or make_plan(
            task.policy,
            trace,
            task.hardware,
            quick=task.quick,
            allow=task.allow,
            progress=progress,
        )
    except (PolicyRefusal, InfeasibleBudget) as refusal:
        reason = str(refusal).removeprefix(f"{task.policy}: ")
        minimum = refusal.minimum if isinstance(refusal, InfeasibleBudget) else None
        seconds = time.perf_counter() - began
        return Outcome(task.policy, task.hardware, None, seconds, reason, minimum)
    predicted, reason = plan.predicted, ""
    if task.plan is not None or predicted is None:
        result = simulate(trace, task.hardware, plan)
        predicted, reason = (result.predicted if result.feasible else None), result.reason
    return Outcome(
        task.policy,
        task.hardware,
        predicted,
        time.perf_counter() - began,
        reason,
        bound_us=plan.bound.iteration_us if plan.bound and task.plan is None else None,
        plan=plan if task.keep_plan else None,
    )


def cores() -> int:
    """How many this process may use."""
    with suppress(AttributeError):  # not on every system
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Evaluator:
    """Runs tasks on one trace; a context manager, whose processes are gone when it is left, at once
    if it is left by an error or Ctrl-C.

    ``jobs`` processes; 1 means in this process; ``None``: in this process for short traces, and
    otherwise as many as there are cores, up to ``MOST_PROCESSES``.
    """

    def __init__(self, trace: Trace, jobs: int | None = None) -> None:
        self.trace = trace
        self.here = jobs == 1 or (jobs is None and trace.ops < SMALL_OPS)
        self.jobs = 1 if self.here else jobs or min(cores(), MOST_PROCESSES)
        self._pool: ProcessPoolExecutor | None = None
        self._others = set(multiprocessing.active_children())

    def __enter__(self) -> Evaluator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._pool is None:
            return
        self._pool.shutdown(wait=kind is None, cancel_futures=True)
        for process in set(multiprocessing.active_children()) - self._others:
            process.kill()

    def run(
        self, tasks: Sequence[Task], done: Callable[[Outcome], None] | None = None
    ) -> list[Outcome]:
        """The outcomes in the order of ``tasks``; ``done`` is called with each when it is there.

        Raises ``PagerError`` if a process is killed from outside."""
        done = done or (lambda outcome: None)
        if self.here:
            return [_told(evaluate(self.trace, task), done) for task in tasks]
        if self._pool is None:
            self._pool = ProcessPoolExecutor(
                self.jobs,
                multiprocessing.get_context("spawn"),
                initializer=_begin,
                initargs=(self.trace,),
            )
        try:
            with _interrupts_held():
                futures = [self._pool.submit(_evaluate_there, task) for task in tasks]
            for future in as_completed(futures):
                done(future.result())
            return [future.result() for future in futures]
        except BrokenProcessPool as error:
            raise PagerError(
                f"one of {self.jobs} planning processes was killed, perhaps for want of memory; "
                "try fewer of them: --jobs 1"
            ) from error


def _told(outcome: Outcome, done: Callable[[Outcome], None]) -> Outcome:
    done(outcome)
    return outcome


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Ctrl-C reaches every process of a terminal; one that is only just starting would answer it
    with a traceback. Processes started in here never get it; this one does when it is left."""
    if not hasattr(signal, "pthread_sigmask"):  # not on every system
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# --- in the processes ----------------------------------------------------------------------------

_trace: Trace  # what this process works on, set once when it begins


def _begin(trace: Trace) -> None:
    global _trace
    _trace = trace
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(AttributeError, OSError):
        os.nice(NICE)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _evaluate_there(task: Task) -> Outcome:
    return evaluate(_trace, task)
