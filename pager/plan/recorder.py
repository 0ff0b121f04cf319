"""``Recorder``: is told of all that the pager does for a program, and writes it down.

::

    core.hold, waits, streams, deaths
              |
              v
          Recorder ---+---> AccessLog: accesses, by keys that last      --> the planner's trace
                      |     (each iteration of a pager that plans)          of a kind of iteration
                      |
                      +---> OpLog: ops, and which pages each one used   --> a trace file
                            (while somebody records)

``traces.py`` makes both traces. With neither log nobody looks on (``Core.watch``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from time import perf_counter
from typing import Any

from ...planner.trace import Trace
from ..core import Core, Watcher
from ..errors import PagerError
from ..memory.space import Extent
from .access_log import AccessLog, Keys, Names, StreamAccess, Wait, ordered
from .compiled_plan import Order
from .op_log import OpLog
from .traces import trace_of_ops

_KEY = attrgetter("key")


class Recorder(Watcher):
    """Of one pager. What it is told of comes with the lock held, and belongs to the iteration, if
    one runs. ``plan``: the one that is followed, or accesses that it is expected to have; ``at``:
    which of these is under way, or was the latest one. ``on_access``: told of each other access,
    and of what the order has of it, before it is in ``log``."""

    def __init__(self, pager: Core) -> None:
        self.pager = pager
        self.names = Names(pager.space)
        self.log: AccessLog | None = None
        self.ops: OpLog | None = None
        self.plan: Order | None = None
        self.at = -1
        self.on_access: Callable[[Keys, Keys], None] | None = None
        self.has_clock = pager.backend.stamp() is not None
        pager.space.on_death = self._died

    def _look_on(self) -> None:
        pager = self.pager
        pager.sees_ops = self.sees_ends = self.ops is not None
        pager.watch = self if self.log is not None or self.ops is not None else None

    # -- the log of an iteration -----------------------------------------------------------------
    def open(self) -> AccessLog:
        """With the lock: an iteration begins."""
        self.names.forget_dead()
        self.log = AccessLog(self.pager.space.births)
        self.pager.space.clock = 0
        self._look_on()
        return self.log

    def close(self) -> AccessLog | None:
        """With the lock: it is over. What was born in it and lives on is named for others."""
        log = self.log
        if log is None:
            return None
        self.pager.residency.collect()
        log.end()
        self.log = None
        self.pager.space.clock = 0
        self._look_on()
        self.names.settle(log)
        return log

    # -- ops -------------------------------------------------------------------------------------
    def start(self) -> OpLog:
        """Record ops until :meth:`finish`, which is called in the same thread and outside of
        backward too. Raises ``PagerError`` if they are being recorded already."""
        self.pager.check_open()
        if self.ops is not None:
            raise PagerError(
                "this Pager is being recorded already; end that recording first (one record() at "
                "a time)"
            )
        ops = OpLog(self.pager, has_clock=self.has_clock)
        ops.start()
        self.ops = ops
        self._look_on()
        return ops

    def finish(self, ops: OpLog) -> Trace:
        """Stop, and the trace of what ran since :meth:`start`. Raises ``PagerError`` if nothing
        did."""
        ended = ops.mark("")
        self.abandon(ops)
        if not ops.marks:
            raise PagerError("nothing ran while it was recorded: no PyTorch op, no page used")
        return trace_of_ops(self.pager, ops, ended)

    def abandon(self, ops: OpLog | None) -> None:
        """Stop, if these ops are being recorded; what was written down is of no use then."""
        if ops is not None and ops is self.ops:
            self.ops = None
            self._look_on()
            ops.stop()

    # -- what it is told -------------------------------------------------------------------------
    def pinning(self, runs: Sequence[Extent], stream: Keys | None = None) -> None:
        """Before each op, so in one piece. ``stream``: its key, where it is no op that begins."""
        log = self.log
        if log is not None:
            keys = stream or tuple(map(_KEY, runs))
            if 0 in keys:
                keys = self._named(runs, log)
            plan, at = self.plan, self.at + 1
            if plan is not None and at < len(plan.keys) and plan.keys[at] == keys:
                self.at, of_order = at, plan.of_order[at]
            else:
                of_order = ordered(keys)
                if self.on_access is not None:
                    self.on_access(keys, of_order)
            log.keys.append(keys)
            log.times.append(perf_counter())
            if of_order:
                log.order.append(of_order)
                log.born_here = log.others_here = 0
            if log.clock is not None:
                log.stamps.append(log.clock.stamp())
            self.pager.space.clock = len(log.keys)
        if self.ops is not None and stream is None:
            self.ops.pinning(runs)

    def _named(self, runs: Sequence[Extent], log: AccessLog) -> Keys:
        """Keys of ``runs``, some of which have none yet."""
        for run in runs:
            if not run.key:
                (log if run.born >= log.births else self.names).name(run)
        return tuple(map(_KEY, runs))

    def together(self, run: Extent) -> list[Extent]:
        """By the plan that is followed."""
        log, plan, at = self.log, self.plan, self.at + 1
        if log is None or plan is None or at >= len(plan.keys):
            return [run]
        keys = plan.keys[at]
        if run.key not in keys:
            return [run]
        runs = [self.names.run_of(key, log.newborn) for key in keys]
        return [run] if None in runs else runs  # type: ignore[return-value]

    def joining(self, runs: Sequence[Extent]) -> bool:
        """Where a plan is followed, that says what comes together."""
        log = self.log
        if log is None or not log.keys:
            return True
        before, more = log.keys[-1], self._named(runs, log)
        keys = before + more
        had, has = ordered(before), ordered(keys)
        if self.plan is not None or (had and not has):
            return False
        if self.on_access is not None:
            self.on_access(more, ordered(more))
        log.keys[-1] = keys
        if had:
            log.order[-1] = has
        elif has:
            log.order.append(has)
            log.born_here = log.others_here = 0
        return True

    def step(self, runs: Sequence[Extent], *, hosted: bool) -> None:
        """The access that comes next, of ``runs``, is a step that the host could take; ``hosted``:
        it takes it, and the access is over."""
        if hosted:
            self.pinning(runs)
        log = self.log
        if log is not None:
            where = len(log.keys) - hosted
            log.steps[where] = tuple(map(_KEY, runs))
            if hosted:
                log.hosted.add(where)

    def collective(self, what: str) -> None:
        if self.log is not None:
            if what:
                self.log.collectives[len(self.log.keys)] = what
            self.pinning((), ())

    def writing(self, run: Extent) -> None:
        if self.log is not None:
            self.log.writes.append((len(self.log.keys) - 1, run.key))
        if self.ops is not None:
            self.ops.writing(run)

    def unpinned(self, runs: Sequence[Extent]) -> None:
        if self.ops is not None:
            self.ops.unpinned(runs)

    def filling(self, run: Extent) -> AbstractContextManager[None]:
        return nullcontext() if self.ops is None else self.ops.filling(run)

    def wait_begins(self) -> Any:
        by_device = self.ops is not None or (self.log is not None and self.log.clock is not None)
        return self.pager.backend.stamp() if by_device else None

    def waited(self, seconds: float, began: Any, *, own: bool) -> None:
        stamps = None if began is None else (began, self.pager.backend.stamp())
        where = len(self.log.keys) - 1 if self.log is not None else -1
        wait = Wait(where, seconds, stamps, own)
        if self.log is not None:
            self.log.waits.append(wait)
        if self.ops is not None:
            self.ops.waited(wait)

    def stream_begins(
        self, runs: Sequence[Extent], write: Sequence[bool], frames: int
    ) -> StreamAccess | None:
        log = self.log
        if log is None:
            return None
        keys = [
            (run.key or (log if run.born >= log.births else self.names).name(run), written)
            for run, written in zip(runs, write)
        ]
        self.pinning(runs, (self.names.of_stream(keys),))
        access = StreamAccess(len(log.keys) - 1, frames)
        log.streams.append(access)
        return access

    def stream_ended(self, access: StreamAccess) -> None:
        if self.log is not None and access in self.log.streams:
            access.end = max(access.end, len(self.log.keys))

    def _died(self, run: Extent, clock: int) -> None:
        if self.log is not None and run.key < 0:
            self.log.deaths.append((clock, run.key))
