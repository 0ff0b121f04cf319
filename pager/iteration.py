"""One training iteration: what it switches on, and how it ends.

::

    begin() --> running --> end()        its step is whole: measured, recorded, planned
                   |
                   +------> abandon()    it was cut short: what was measured and recorded is dropped
                   |
                   +------> dropped      as abandon(), when the next one begins or the pager closes

However it ends, the pager is as before the begin and the next iteration may begin. What the step
has changed (parameters, gradients, states) is not undone.
"""

from __future__ import annotations

import sys
import threading
import warnings
import weakref
from collections.abc import Iterator
from contextlib import ContextDecorator, ExitStack
from types import TracebackType
from typing import Self

import torch

from .core import Core
from .errors import PagerError
from .metrics.publisher import Metrics
from .tensor.dispatcher import hide_all_from_dynamo, hide_from_dynamo
from .tensor.module import warn_of_held


class Iteration(ContextDecorator):
    """What ``pager.iteration()`` gives: a context manager, and the same in two calls, ``begin()``
    and ``end()``, for trainers that call back where a step begins and where it ends. One object
    may run many times, one time after another.

    The pager forgets one that is dropped while it runs. At the end of the interpreter nothing
    happens any more.
    """

    # Kept here: a module's names are gone when the interpreter ends.
    _at_exit = staticmethod(sys.is_finalizing)

    def __init__(self, pager: Core, metrics: Metrics) -> None:
        self._pager, self._metrics = pager, metrics

    def begin(self) -> Self:
        """Begin, on this thread. Raises ``PagerError`` if an iteration of this pager is running,
        ``DiskWriteLimit`` if as much was written to disk as may be in a day; nothing has begun
        then."""
        hide_all_from_dynamo()
        pager = self._pager
        pager.check_open()
        before = pager.running
        if before is not None:
            if before.is_held:
                raise PagerError(
                    "iteration() is already running; iterations do not nest. End the one that "
                    "runs first: with end(), or with abandon() if its step was cut short"
                )
            drop(pager)
        pager.wear.check()
        running = pager.running = self._make_running()
        try:
            running.start()
        except BaseException as error:
            running.cut(error)
            raise
        return self

    def _make_running(self) -> Running:
        return Running(self._pager, self._metrics, self)

    def end(self) -> None:
        """The step is done. In the first iteration the budget is settled now.

        Raises ``PagerError`` where it does not run, or was begun on another thread; else what it
        raises comes from the end itself, and the iteration is over all the same."""
        running = self._running()
        if running.thread != threading.get_ident():
            raise PagerError(
                "end() of an iteration that another thread began; call it on that thread, or "
                "abandon() here"
            )
        running.end()

    def abandon(self) -> None:
        """The step was cut short: what was measured and recorded of it is dropped; what it changed
        stays. ``pager.explain()`` says what that was. Raises ``PagerError`` where it does not
        run."""
        self._running().cut(None)

    def _running(self) -> Running:
        running: Running | None = self._pager.running
        if running is None or not running.belongs_to(self):
            raise PagerError("this iteration is not running; begin() it first")
        return running

    # -- as a context manager --------------------------------------------------------------------
    def _recreate_cm(self) -> Self:
        # As a decorator: each call is an iteration by itself.
        return type(self)(self._pager, self._metrics)

    def __enter__(self) -> None:
        self.begin()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._at_exit():
            return
        running = self._pager.running
        if running is None or not running.belongs_to(self):  # ended inside of its block
            return
        if error is None:
            running.end()
            return
        refusal = self._pager.budget.refusal
        running.cut(error)
        if isinstance(error, torch.OutOfMemoryError):
            refusal = refusal or self._pager.budget.refused(error)
        if refusal is not None and isinstance(error, Exception) and error is not refusal:
            raise refusal from error


for _entry in (Iteration.begin, Iteration.end, Iteration.__enter__, Iteration.__exit__):
    hide_from_dynamo(_entry)


class Running:
    """What one iteration has switched on. The pager holds it; the user holds the Iteration."""

    def __init__(self, pager: Core, metrics: Metrics, handle: Iteration) -> None:
        self._pager, self._metrics = pager, metrics
        self._handle = weakref.ref(handle)
        self.thread = threading.get_ident()

    @property
    def is_held(self) -> bool:
        """Whether somebody can still end it."""
        return self._handle() is not None

    def belongs_to(self, handle: Iteration) -> bool:
        return self._handle() is handle

    def start(self) -> None:
        pager = self._pager
        pager.passes.stop()
        if not pager.iterations:
            warn_of_held(pager)
        pager.inside = True
        with pager.lock:
            pager.turns.move_home()
        self._metrics.begin()
        pager.saved.count()
        pager.profile_run.begin()
        with pager.lock:
            pager.begin_guests()
        pager.in_backward.begin()
        if pager.follower is not None and not pager.fits:
            with pager.lock:
                pager.follower.begin()
        for listener in list(pager.on_iteration):
            listener.begin()
        pager.opened.begin()
        pager.saved.kept_all = True
        pager.saved.put_on()

    def end(self) -> None:
        pager = self._pager
        try:
            self._stop(ok=True)
            pager.profile_run.end()
        except BaseException:
            pager.budget.abandon()
            raise
        pager.cut_short = None
        pager.iterations += 1
        for ended in pager.on_ended:
            ended()
        self._metrics.end()

    def cut(self, error: BaseException | None, how: str = "abandon()") -> None:
        """Switch everything off; ``error`` is told what is dropped with it."""
        by = how if error is None else f"{type(error).__name__}: {error}".strip(": ")
        dropped = " and ".join(self._at_stake()) or "nothing of the pager's"
        said = (
            f"An iteration was cut short by {by}. Dropped: {dropped}. What it had changed "
            "(parameters, gradients, optimizer states) stays as it is."
        )
        self._pager.cut_short = said
        if isinstance(error, Exception):
            error.add_note(f"tensorpager: {said}")
        self._stop(ok=False)

    def _at_stake(self) -> Iterator[str]:
        pager = self._pager
        if pager.budget.metering:
            yield "the measurement of its dense memory, which the next iteration repeats"
        if pager.sees_ops:
            yield "the trace that was recorded of it"
        follower = pager.follower
        if follower is not None and not pager.fits:
            if follower.compiled is not None:
                yield "the rest of its plan, which the next iteration begins anew"
            else:
                yield "the log of its accesses, of which plans are made"

    def _stop(self, *, ok: bool) -> None:
        """Every part of it, also where one raises."""
        pager = self._pager
        pager.running = None
        pager.inside = False
        pager.saved.take_off()
        with ExitStack() as stack:  # the last one first
            stack.callback(self._stop_following, ok=ok)
            for listener in reversed(pager.on_iteration):
                stack.callback(listener.end, ok)
            stack.callback(pager.opened.end)
            stack.callback(pager.backend.limit_guests, None)
            if not ok:
                stack.callback(pager.budget.abandon)
            stack.callback(pager.saved.lender.end)

    def _stop_following(self, *, ok: bool) -> None:
        pager, follower = self._pager, self._pager.follower
        if follower is not None:
            with pager.lock:
                follower.end(ok=ok)
        pager.in_backward.end(ok)
        if follower is not None and ok:
            follower.warn()


def drop(pager: Core) -> None:
    """End an iteration that nobody holds any more, if there is one, with a warning."""
    running = pager.running
    if running is not None and not running.is_held:
        running.cut(None, "being dropped: begun and never ended")
        warnings.warn(str(pager.cut_short), RuntimeWarning, stacklevel=3)
