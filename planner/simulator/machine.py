"""The machine model, run: when each op starts, what it waited for, what the plan moves.

Time advances from one instant to the next at which a page arrives, a latency is over or an op ends.
Pages of one move that nothing can wait for in between arrive together (``coast``): the times
are the same, and a plan of 300 GiB in pages of 2 MiB takes a second or two. Times count from the
begin of the iteration, so that an iteration that begins in the state in which the one before began
is the same to the last bit, and need not be run.
"""

from __future__ import annotations

import math

import numpy as np

from ..hardware import Hardware
from ..plan import DISCARD, Plan, Predicted
from ..simulation import EPSILON_US, Below, Rerun, Simulation, Stall, Transfer
from ..trace import Trace
from .coast import coast
from .drops import drop
from .host import Host
from .log import Log, transfers
from .ops import Ops
from .pages import Infeasible, Pages
from .program import AGAIN, HOST, make_program
from .queue import Queue

MIN_ITERATIONS, MAX_ITERATIONS = 3, 40
MOST_WITH_HOST = 400  # a host that is a little too slow needs many to be felt
LAST_STEPS = 3  # an op that waits for frames: the last come one by one, to see what it waited for
SETTLED = 1e-4  # two successive iterations differ by less


def simulate(
    trace: Trace, hardware: Hardware, plan: Plan, *, log_transfers: bool = False
) -> Simulation:
    """Run ``plan`` until its iterations repeat. Never raises for a bad plan: ``reason`` says what
    is wrong and where. ``plan.page_size`` must be the hardware's.

    ``log_transfers`` also gives ``transfers``; where the last iteration leaves some on their way,
    the next one is run until they have arrived.
    """
    if plan.page_size != hardware.page_size:
        return Simulation(
            False,
            f"the plan has pages of {plan.page_size} bytes, the hardware of {hardware.page_size}",
        )
    try:
        return _Machine(trace, hardware, plan).run(log_transfers)
    except Infeasible as error:
        return Simulation(False, str(error))


class _Machine:
    """One run. ``now`` in µs since the begin of the iteration."""

    def __init__(self, trace: Trace, hardware: Hardware, plan: Plan) -> None:
        self.trace = trace
        page = hardware.page_size
        trace.countable_pages(page)
        program = make_program(trace, plan, page)
        self.pages = Pages(trace, hardware, plan, program)
        self.moves = self.pages.moves
        self.queues = tuple(  # begin in this order
            Queue(tier, action, hardware, self.pages)
            for tier, action in (("host", "out"), ("disk", "out"), ("disk", "in"), ("host", "in"))
        )
        self.host_out, self.disk_out, self.disk_in, self.host_in = self.queues
        self.moving = [False] * 4  # which of them, when the link was last shared
        self.ops = Ops(trace, self.pages, page, program)
        self.host = Host(trace, self.pages, list(plan.host_steps), program)
        self.over: set[int] = set()  # tensors of which only host steps are left
        self.last_step = len(self.ops.op) - 1
        self.step = -1  # the running step, or the one that waits
        self.waiting = False
        self.wait_since = 0.0
        self.wait_for: tuple[int, str] = (-1, "")
        self.op_end = math.inf
        self.now = 0.0
        self.stalls: list[Stall] = []
        self.log: Log | None = None  # gets the transfers of moves that are queued now
        self.below: list[Below] = []  # of the iteration that is logged
        self.starts = [0.0] * len(self.ops.op)
        self.ends = [0.0] * len(self.ops.op)
        self.queued = [0.0] * len(self.ops.op)

    # -- the run ---------------------------------------------------------------------------------
    def run(self, log_transfers: bool) -> Simulation:
        pages, trace = self.pages, self.trace
        if trace.ops == 0:
            zero = Predicted(0.0, 0.0, 0.0, *pages.peaks_bytes(), 0, 0, 0)
            return Simulation(True, predicted=zero, transfers=[] if log_transfers else None)
        times: list[float] = []
        left_us = 0.0  # of the host's work
        state, repeats, settled = self._state(), False, False
        most = MOST_WITH_HOST if self.host.steps else MAX_ITERATIONS
        while len(times) < most and not settled:
            before_us = left_us
            if not repeats:
                self._count_from_now()
                pages.start_counting()
                self.stalls.clear()
                self.log = [] if log_transfers else None
                self.below = [Below(0.0, 0.0, *pages.used)] if log_transfers else []
                self._iteration()
                pages.check_end()
                before, state = state, self._state()
                repeats = state == before
                left_us = self.host.left_us(self.now)
            times.append(self.now)
            steady = abs(left_us - before_us) <= SETTLED * self.now
            settled = len(times) >= MIN_ITERATIONS and steady and _settled(*times[-2:])
        if not settled and self.host.steps and not steady:
            raise Infeasible(
                f"the host's steps take {left_us - before_us:.3f} µs more than an iteration lasts: "
                f"after {most} iterations it is {left_us:.0f} µs behind"
            )
        return self._result(times, log_transfers)

    def _result(self, times: list[float], log_transfers: bool) -> Simulation:
        """Of the last iteration."""
        ops, pages, trace = self.ops, self.pages, self.trace
        again = [step for step, kind in enumerate(ops.kind) if kind == AGAIN]
        again_us = sum(ops.durations[step] for step in again)
        host_us = sum(step.us for step in self.host.steps)
        predicted = Predicted(
            times[-1],
            trace.ideal_us,
            max(0.0, times[-1] - sum(ops.durations)),
            *pages.peaks_bytes(),
            *pages.counted_bytes(),
            again_us,
            host_us,
        )
        starts, ends, queued = (np.zeros(trace.ops) for _ in range(3))
        reruns: list[Rerun] = []
        waiting: list[int] = []  # steps that ran again before the op that follows
        began = 0.0
        for step, (kind, op) in enumerate(zip(ops.kind, ops.op)):
            if not waiting:
                began = self.queued[step]
            if kind == AGAIN:
                waiting.append(step)
                continue
            starts[op], ends[op], queued[op] = self.starts[step], self.ends[step], began
            reruns += [
                Rerun(ops.op[each], op, self.starts[each], self.ends[each]) for each in waiting
            ]
            waiting = []
        stalls, host_runs = list(self.stalls), list(self.host.runs)
        moved = self._transfers() if log_transfers else None
        return Simulation(
            True,
            "",
            predicted,
            len(times),
            stalls,
            starts,
            ends,
            moved,
            queued,
            reruns,
            host_runs,
            self.below,
        )

    def _state(self) -> tuple[object, ...]:
        """What the next iteration depends on."""
        queues = (queue.state(self.now) for queue in self.queues)
        return (self.pages.state(), *queues, self.host.state(self.now), frozenset(self.over))

    def _count_from_now(self) -> None:
        for queue in self.queues:
            queue.count_from(self.now)
        self.host.count_from(self.now)
        self.now = 0.0

    def _transfers(self) -> list[Transfer]:
        """Of the moves queued in the iteration that has just ended. No move can last longer than
        until it is queued again, so they arrive within one more iteration."""
        log, self.log = self.log, None
        assert log is not None
        if self._any_logged():
            self._iteration(until_logged=True)
        return transfers(log, self.pages)

    def _any_logged(self) -> bool:
        """Whether a move whose transfers are logged is still queued; such are at the head."""
        return any(queue.entries and queue.entries[0].log is not None for queue in self.queues)

    def _iteration(self, until_logged: bool = False) -> None:
        """From the end of the last op to the end of the last op of the next iteration, or until
        all transfers that are logged have arrived."""
        self._next_step(0)
        while True:
            if self._settle_instant():
                return  # the next iteration's moves are queued at this same instant
            if until_logged and not self._any_logged():
                return
            self._begin_transfers()
            self._advance()
            if self.host.event_us <= self.now + EPSILON_US:
                self._end_host_step()
            if self.waiting:
                self._try_start()

    def _settle_instant(self) -> bool:
        """All that happens at this instant before transfers begin. ``True`` if the iteration ends:
        steps that take no time follow each other, on the device and on the host."""
        horizon = self.now + EPSILON_US
        while True:
            if self.op_end <= horizon:
                self._end_step()
                if self.step == self.last_step:
                    return True
                self._next_step(self.step + 1)
            elif self.host.try_start(self.now):
                if self.host.event_us <= horizon:
                    self._end_host_step()
                    if self.waiting:
                        self._try_start()
            else:
                return False

    def _advance(self) -> None:
        """On to the next instant, at which pages arrive."""
        queues = self.queues
        time = min(self.op_end, self.host.event_us)
        for queue in queues:
            if queue.event_us < time:
                time = queue.event_us
        if time == math.inf:
            self._deadlock()
        self.now = time
        horizon = time + EPSILON_US
        for queue in queues:
            if queue.event_us <= horizon:
                if queue.moving:
                    queue.arrive()
                else:
                    queue.event_us = math.inf  # its latency is over

    def _end_step(self) -> None:
        step, pages = self.step, self.pages
        self.op_end = math.inf
        self.ends[step] = self.now
        pages.free += self.ops.dead_pages[step]
        for tensor in self.ops.dead[step]:
            if self.host.holds[tensor]:
                self.over.add(tensor)
            else:
                pages.die(tensor, self.queues, self.now)

    def _end_host_step(self) -> None:
        for tensor in self.host.ended(self.now) or ():
            if tensor in self.over:
                self.over.remove(tensor)
                self.pages.die(tensor, self.queues, self.now)

    # -- steps -----------------------------------------------------------------------------------
    def _next_step(self, step: int) -> None:
        ops, pages = self.ops, self.pages
        self.step = step
        self.queued[step] = self.now
        if not ops.quiet[step]:
            for index in ops.issued[step]:
                self._queue_move(index)
            for tensor, first, last, _ in ops.accesses[step]:
                if 0 < pages.missing[tensor] < pages.unborn and tensor not in ops.born[step]:
                    pages.check_coming(first, last, ops.op[step])
        if ops.kind[step] == HOST:
            self.host.join(ops.op[step])
        self.waiting = True
        self.wait_since = self.now
        self.wait_for = (-1, "")
        self._try_start()

    def _try_start(self) -> None:
        pages, step, ops = self.pages, self.step, self.ops
        for tensor in ops.born[step]:
            if pages.missing[tensor] < pages.unborn:  # a host step uses what was there before
                self.wait_for = (tensor, "host-step")
                return
        for tensor, first, last, whole in ops.accesses[step]:
            if not 0 < pages.missing[tensor] < pages.unborn:
                continue
            if whole or pages.there.find(0, first, last) >= 0:
                self.wait_for = (tensor, pages.channel_of(first, last))
                return
        if self.host.steps and pages.host_uses(ops.writes[step]):
            self.wait_for = (pages.tensor_of(ops.writes[step][0][0]), "host-step")
            return
        new_pages = ops.new_pages[step]
        if pages.free < new_pages:
            self.wait_for = (-1, "disk-out" if self.disk_out.moving else "host-out")
            return
        if new_pages:
            pages.take_frames(new_pages)
        for tensor in ops.born[step]:
            pages.bear(tensor)
        for first, last in ops.writes[step]:
            pages.write(first, last)
        for tensor, first, last in ops.remade.get(step, ()):
            pages.remake(tensor, first, last)
        now = self.now
        if now - self.wait_since > EPSILON_US:
            self.stalls.append(Stall(ops.op[step], now - self.wait_since, *self.wait_for))
        self.waiting = False
        self.starts[step] = now
        self.op_end = now + ops.durations[step]

    def _queue_move(self, index: int) -> None:
        move = self.moves[index]
        if move.action == "drop":
            drop(self.pages, move)
            return
        if move.action == DISCARD:
            self.pages.discard(move)
            return
        disk = move.tier == "disk"
        if move.action == "out":
            todo = self.pages.queue_out(move)
            queue = self.disk_out if disk else self.host_out
        else:
            todo = self.pages.queue_in(move)
            queue = self.disk_in if disk else self.host_in
        if todo:
            queue.append(index, move.tensor, todo, self.now, self.log)

    # -- transfers -------------------------------------------------------------------------------
    def _begin_transfers(self) -> None:
        now = self.now
        begun = blocked = False
        for queue in self.queues:
            if queue.entries and not queue.moving:
                if queue.begin(now):
                    begun = True
                elif queue.event_us == math.inf and not queue.waits_for_host():
                    blocked = True  # its head waits: for a frame, a slot or a copy
        moving = [queue.moving for queue in self.queues]
        if begun or moving != self.moving:
            self.moving = moving
            self._share_link(self.host_out, self.disk_out)
            self._share_link(self.host_in, self.disk_in)
        self._note_below(self.now, self.now)
        if blocked or not any(moving) or self.host.waiting:
            return
        limit_us = min(self.op_end, self.host.event_us)
        if not self.waiting:
            self._coast(limit_us)
        elif self.wait_for[0] < 0:
            most_out = self.ops.new_pages[self.step] - self.pages.free - LAST_STEPS
            if most_out > 0:
                self._coast(limit_us, most_out)
        elif not self.ops.partial[self.step]:
            self._coast(limit_us)

    def _coast(self, limit_us: float, most_out: int | None = None) -> None:
        first_us = min(queue.event_us for queue in self.queues)
        coast(self.queues, self.pages, limit_us, most_out)
        self._note_below(first_us, max(queue.began for queue in self.queues))

    def _note_below(self, since: float, until: float) -> None:
        """Slots in use have changed between these times, if they have."""
        if self.log is not None and tuple(self.pages.used) != self.below[-1][2:]:
            self.below.append(Below(since, until, *self.pages.used))

    def _share_link(self, host: Queue, disk: Queue) -> None:
        """The disk queue has its rate, the host queue what is left of the link."""
        if disk.moving:
            disk.set_pace(disk.alone_us, self.now)
        if host.moving:
            pace = host.alone_us
            if disk.moving:
                left = 1 / host.alone_us - 1 / disk.alone_us
                pace = 1 / left if left > 1e-12 / host.alone_us else math.inf
            host.set_pace(pace, self.now)

    def _deadlock(self) -> None:
        waits = [queue.why_blocked() for queue in self.queues if queue.entries]
        tensor, _ = self.wait_for
        need = (
            f"for '{self.trace.name_of(tensor)}'"
            if tensor >= 0
            else f"for {self.ops.new_pages[self.step]} free frames ({self.pages.free} free)"
        )
        op = self.ops.op[self.step]
        raise Infeasible(
            f"op {op} '{self.trace.op_names[op]}' waits {need} while nothing is running "
            f"or in flight" + (f"; {'; '.join(waits)}" if waits else "")
        )


def _settled(before: float, after: float) -> bool:
    return abs(after - before) <= SETTLED * before
