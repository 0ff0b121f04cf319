"""The machine model, run: when each op starts, what it waited for, what the plan moves.

Time advances from one instant to the next at which a page arrives, a latency is over or an op ends.
Pages of one move that nothing can wait for in between arrive together (``sim_coast``): the times
are the same, and a plan of 300 GiB in pages of 2 MiB takes a second or two. Times count from the
begin of the iteration, so that an iteration that begins in the state in which the one before began
is the same to the last bit, and need not be run.
"""

from __future__ import annotations

import math

import numpy as np

from .hardware import Hardware
from .plan import Plan, Predicted
from .sim_coast import coast
from .sim_drops import drop
from .sim_log import Log, transfers
from .sim_ops import Ops
from .sim_pages import EPSILON_US, Infeasible, Pages
from .sim_queue import Queue
from .simulation import Simulation, Stall, Transfer
from .trace import Trace

MIN_ITERATIONS, MAX_ITERATIONS = 3, 40
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
        self.pages = Pages(trace, hardware, plan)
        self.moves = self.pages.moves
        page = hardware.page_size
        out_us, in_us = page / hardware.d2h_bytes_per_s * 1e6, page / hardware.h2d_bytes_per_s * 1e6
        write_us = max(out_us, page / hardware.disk_write_bytes_per_s * 1e6)
        read_us = max(in_us, page / hardware.disk_read_bytes_per_s * 1e6)
        latency = hardware.transfer_latency_us
        self.host_out = Queue("host-out", 0, True, out_us, latency, self.pages)
        self.disk_out = Queue("disk-out", 1, True, write_us, latency, self.pages)
        self.disk_in = Queue("disk-in", 1, False, read_us, latency, self.pages)
        self.host_in = Queue("host-in", 0, False, in_us, latency, self.pages)
        self.queues = (self.host_out, self.disk_out, self.disk_in, self.host_in)  # begin in order
        self.moving = [False] * 4  # which of them, when the link was last shared
        self.ops = Ops(trace, self.pages, page)
        self.last_op = trace.ops - 1
        self.op = -1  # the running op, or the one that waits
        self.waiting = False
        self.wait_since = 0.0
        self.wait_for: tuple[int, str] = (-1, "")
        self.op_end = math.inf
        self.now = 0.0
        self.stalls: list[Stall] = []
        self.log: Log | None = None  # gets the transfers of moves that are queued now
        self.starts = [0.0] * trace.ops
        self.ends = [0.0] * trace.ops

    # -- the run ---------------------------------------------------------------------------------
    def run(self, log_transfers: bool) -> Simulation:
        pages, trace = self.pages, self.trace
        if trace.ops == 0:
            zero = Predicted(0.0, 0.0, 0.0, *pages.peaks_bytes(), 0, 0, 0)
            return Simulation(True, predicted=zero, transfers=[] if log_transfers else None)
        times: list[float] = []
        state, repeats = self._state(), False
        while len(times) < MAX_ITERATIONS:
            if not repeats:
                self._count_from_now()
                pages.start_counting()
                self.stalls.clear()
                self.log = [] if log_transfers else None
                self._iteration()
                pages.check_end()
                before, state = state, self._state()
                repeats = state == before
            times.append(self.now)
            if len(times) >= MIN_ITERATIONS and _settled(*times[-2:]):
                break
        last_us, ideal_us = times[-1], trace.ideal_us
        measured = (*pages.peaks_bytes(), *pages.counted_bytes())
        predicted = Predicted(last_us, ideal_us, max(0.0, last_us - ideal_us), *measured)
        starts, ends = np.array(self.starts), np.array(self.ends)
        stalls = list(self.stalls)
        moved = self._transfers() if log_transfers else None
        return Simulation(True, "", predicted, len(times), stalls, starts, ends, moved)

    def _state(self) -> tuple[object, ...]:
        """What the next iteration depends on."""
        return (self.pages.state(), *(queue.state(self.now) for queue in self.queues))

    def _count_from_now(self) -> None:
        for queue in self.queues:
            queue.count_from(self.now)
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
        last = self.last_op
        self._next_op(0)
        while True:
            # Ops that take no time follow each other before transfers begin.
            while self.op_end <= self.now + EPSILON_US and self.op < last:
                self._end_op()
                self._next_op(self.op + 1)
            if self.op_end <= self.now + EPSILON_US:
                self._end_op()
                return  # the next iteration's moves are queued at this same instant
            if until_logged and not self._any_logged():
                return
            self._begin_transfers()
            ended = self._advance()
            if ended and self.op == last:
                return
            if ended:
                self._next_op(self.op + 1)
            elif self.waiting:
                self._try_start()

    def _advance(self) -> bool:
        """On to the next instant; pages arrive, and ``True`` if the running op ends."""
        queues = self.queues
        time = self.op_end
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
        if self.op_end > horizon:
            return False
        self._end_op()
        return True

    def _end_op(self) -> None:
        op, pages = self.op, self.pages
        self.op_end = math.inf
        self.ends[op] = self.now
        pages.free += self.ops.dead_pages[op]
        for tensor in self.ops.dead[op]:
            pages.die(tensor, self.queues, self.now)

    # -- ops -------------------------------------------------------------------------------------
    def _next_op(self, op: int) -> None:
        ops, pages = self.ops, self.pages
        self.op = op
        if not ops.quiet[op]:
            for index in ops.issued[op]:
                self._queue_move(index)
            for tensor, first, last, _ in ops.accesses[op]:
                if 0 < pages.missing[tensor] < pages.unborn:
                    pages.check_coming(first, last, op)
        self.waiting = True
        self.wait_since = self.now
        self.wait_for = (-1, "")
        self._try_start()

    def _try_start(self) -> None:
        pages, op, ops = self.pages, self.op, self.ops
        for tensor, first, last, whole in ops.accesses[op]:
            if not 0 < pages.missing[tensor] < pages.unborn:
                continue
            if whole or pages.there.find(0, first, last) >= 0:
                self.wait_for = (tensor, pages.channel_of(first, last))
                return
        new_pages = ops.new_pages[op]
        if pages.free < new_pages:
            self.wait_for = (-1, "disk-out" if self.disk_out.moving else "host-out")
            return
        if new_pages:
            pages.take_frames(new_pages)
        for tensor in ops.born[op]:
            pages.bear(tensor)
        for first, last in ops.writes[op]:
            pages.write(first, last)
        now = self.now
        if now - self.wait_since > EPSILON_US:
            self.stalls.append(Stall(op, now - self.wait_since, *self.wait_for))
        self.waiting = False
        self.starts[op] = now
        self.op_end = now + ops.durations[op]

    def _queue_move(self, index: int) -> None:
        move = self.moves[index]
        if move.action == "drop":
            drop(self.pages, move)
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
                elif queue.event_us == math.inf:
                    blocked = True  # its head waits: for a frame, a slot or a copy
        moving = [queue.moving for queue in self.queues]
        if begun or moving != self.moving:
            self.moving = moving
            self._share_link(self.host_out, self.disk_out)
            self._share_link(self.host_in, self.disk_in)
        if blocked or not any(moving):
            return
        if not self.waiting:
            coast(self.queues, self.pages, self.op_end)
        elif self.wait_for[0] < 0:
            most_out = self.ops.new_pages[self.op] - self.pages.free - LAST_STEPS
            if most_out > 0:
                coast(self.queues, self.pages, math.inf, most_out)
        elif not self.ops.partial:
            coast(self.queues, self.pages, math.inf)

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
            else f"for {self.ops.new_pages[self.op]} free frames ({self.pages.free} free)"
        )
        raise Infeasible(
            f"op {self.op} '{self.trace.op_names[self.op]}' waits {need} while nothing is running "
            f"or in flight" + (f"; {'; '.join(waits)}" if waits else "")
        )


def _settled(before: float, after: float) -> bool:
    return abs(after - before) <= SETTLED * before
