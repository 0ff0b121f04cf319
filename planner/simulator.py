"""The machine model, run: when each op starts, what it waited for, what the plan moves.

Time advances from one instant to the next at which a page arrives, a latency is over or an op ends.
Pages of one move that nothing can wait for in between arrive together (``_Queue.coast``): the
times are the same, and a plan of 300 GiB in pages of 2 MiB takes seconds.
"""

from __future__ import annotations

import itertools
import math

import numpy as np

from .hardware import Hardware
from .plan import Move, Plan, Predicted
from .sim_pages import EPSILON_US, Infeasible, Pages
from .sim_queue import Logged, Queue
from .simulation import Simulation, Stall, Transfer
from .trace import WRITE, Trace

MIN_ITERATIONS, MAX_ITERATIONS = 3, 40
SETTLED = 1e-4  # two successive iterations differ by less


def simulate(
    trace: Trace, hardware: Hardware, plan: Plan, *, log_transfers: bool = False
) -> Simulation:
    """Run ``plan`` until its iterations repeat. Never raises for a bad plan: ``reason`` says what
    is wrong and where. ``plan.page_size`` must be the hardware's.

    ``log_transfers`` also gives ``transfers``, at the price of one more iteration, in which those
    that the last one queued arrive.
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
    """One run. ``now`` in µs since its begin."""

    def __init__(self, trace: Trace, hardware: Hardware, plan: Plan) -> None:
        self.trace, self.hardware = trace, hardware
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
        self._index_ops()
        self.op = -1  # the running op, or the one that waits
        self.waiting = False
        self.wait_since = 0.0
        self.wait_for: tuple[int, str] = (-1, "")
        self.op_end = math.inf
        self.now = 0.0
        self.stalls: list[Stall] = []
        self.log: list[Logged] | None = None  # gets the transfers of moves that are queued now
        self.starts = np.zeros(trace.ops)
        self.ends = np.zeros(trace.ops)

    def _index_ops(self) -> None:
        """Per op: what it accesses, the tensors that it is the first or the last to touch."""
        trace, base = self.trace, self.pages.base
        begin, end = trace.access_ranges(self.hardware.page_size)
        offsets = trace.access_offsets.tolist()
        tensors = trace.access_tensor.tolist()
        first = (base[trace.access_tensor] + begin).tolist()
        last = (base[trace.access_tensor] + end).tolist()
        whole = (end - begin == self.pages.count[trace.access_tensor]).tolist()
        writes = (trace.access_mode & WRITE != 0).tolist()
        self.accesses = [
            list(zip(tensors[a:b], first[a:b], last[a:b], whole[a:b], writes[a:b]))
            for a, b in itertools.pairwise(offsets)
        ]
        self.born: list[list[int]] = [[] for _ in range(trace.ops)]
        self.dead: list[list[int]] = [[] for _ in range(trace.ops)]
        for tensor in np.flatnonzero(~trace.tensor_persistent).tolist():
            self.born[trace.first_op[tensor]].append(tensor)
            self.dead[trace.last_op[tensor]].append(tensor)
        self.new_pages = [sum(int(self.pages.count[t]) for t in born) for born in self.born]
        self.partial = not all(whole)
        self.durations = trace.op_duration_us.tolist()
        self.issued: list[list[int]] = [[] for _ in range(trace.ops)]
        for index, move in enumerate(self.moves):
            self.issued[move.issue_op].append(index)

    # -- the run ---------------------------------------------------------------------------------
    def run(self, log_transfers: bool) -> Simulation:
        pages, trace = self.pages, self.trace
        if trace.ops == 0:
            zero = Predicted(0.0, 0.0, 0.0, *pages.peaks_bytes(), 0, 0, 0)
            return Simulation(True, predicted=zero, transfers=[] if log_transfers else None)
        times: list[float] = []
        began = 0.0
        while len(times) < MAX_ITERATIONS:
            pages.start_counting()
            self.stalls.clear()
            self.log = [] if log_transfers else None
            self._iteration()
            pages.check_end()
            times.append(self.now - began)
            if len(times) >= MIN_ITERATIONS and _settled(*times[-2:]):
                break
            began = self.now
        moved = pages.counted_bytes()
        ideal = trace.ideal_us
        predicted = Predicted(
            times[-1], ideal, max(0.0, times[-1] - ideal), *pages.peaks_bytes(), *moved
        )
        began = self.now - times[-1]
        starts, ends = self.starts - began, self.ends - began
        stalls = list(self.stalls)
        transfers = self._transfers(began) if log_transfers else None
        return Simulation(True, "", predicted, len(times), stalls, starts, ends, transfers)

    def _transfers(self, began: float) -> list[Transfer]:
        """Of the moves queued in the iteration that began at ``began``, just ended. No move can
        last longer than until it is queued again, so one more iteration completes them."""
        log, self.log = self.log, None
        assert log is not None
        self._iteration()
        self.pages.check_end()
        return [self._transfer(self.moves[noted.move], noted, began) for noted in log]

    def _transfer(self, move: Move, noted: Logged, began: float) -> Transfer:
        first = noted.first - int(self.pages.base[move.tensor])
        return Transfer(
            noted.move,
            move.action == "out",
            move.tier,
            move.tensor,
            first,
            noted.last - noted.first,
            noted.begin_us - began,
            noted.end_us - began,
            noted.arrived,
        )

    def _iteration(self) -> None:
        """From the end of the last op to the end of the last op of the next iteration."""
        last = self.trace.ops - 1
        self._next_op(0)
        while True:
            # Ops that take no time follow each other before transfers begin.
            while self.op_end <= self.now + EPSILON_US and self.op < last:
                self._end_op()
                self._next_op(self.op + 1)
            if self.op_end <= self.now + EPSILON_US:
                self._end_op()
                return  # the next iteration's moves are queued at this same instant
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
        self.op_end = math.inf
        self.ends[self.op] = self.now
        for tensor in self.dead[self.op]:
            self.pages.die(tensor, self.queues, self.now)

    # -- ops -------------------------------------------------------------------------------------
    def _next_op(self, op: int) -> None:
        pages = self.pages
        self.op = op
        for index in self.issued[op]:
            self._queue_move(index)
        for tensor, first, last, _, _ in self.accesses[op]:
            if pages.missing[tensor] and pages.missing[tensor] < pages.unborn:
                pages.check_coming(tensor, first, last, op)
        self.waiting = True
        self.wait_since = self.now
        self.wait_for = (-1, "")
        self._try_start()

    def _try_start(self) -> None:
        pages, op = self.pages, self.op
        for tensor, first, last, whole, _ in self.accesses[op]:
            missing = pages.missing[tensor]
            if not missing or missing >= pages.unborn:
                continue
            if whole or pages.there.find(0, first, last) >= 0:
                self.wait_for = (tensor, pages.channel_of(first, last))
                return
        if pages.free < self.new_pages[op]:
            self.wait_for = (-1, "disk-out" if self.disk_out.moving else "host-out")
            return
        for tensor in self.born[op]:
            pages.bear(tensor)
        for _, first, last, _, writes in self.accesses[op]:
            if writes:
                pages.write(first, last)
        waited = self.now - self.wait_since
        if waited > EPSILON_US:
            self.stalls.append(Stall(op, waited, *self.wait_for))
        self.waiting = False
        self.starts[op] = self.now
        self.op_end = self.now + self.durations[op]

    def _queue_move(self, index: int) -> None:
        move = self.moves[index]
        if move.action == "drop":
            self.pages.drop(move)
            return
        disk = move.tier == "disk"
        if move.action == "out":
            todo = self.pages.queue_out(move)
            queue = self.disk_out if disk else self.host_out
        else:
            todo = self.pages.queue_in(move)
            queue = self.disk_in if disk else self.host_in
        if todo:
            queue.append(index, todo, self.now, self.log)

    # -- transfers -------------------------------------------------------------------------------
    def _begin_transfers(self) -> None:
        now = self.now
        for queue in self.queues:
            if not queue.moving and queue.entries:
                queue.begin(now)
        self._share_link(self.host_out, self.disk_out)
        self._share_link(self.host_in, self.disk_in)
        if not (self.waiting and (self.wait_for[0] < 0 or self.partial)):
            self._coast()

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

    def _coast(self) -> None:
        """Let the pages of moves arrive that nobody can notice before the next other event."""
        blocked = False
        limit = self.op_end
        for queue in self.queues:
            if queue.entries and not queue.moving:
                blocked = True  # its head waits: for a frame, a slot, a copy or its latency
                if queue.event_us < limit:
                    limit = queue.event_us
        if blocked or self.pages.drops:
            return
        moving = [queue for queue in self.queues if queue.moving]
        for queue in moving:
            limit = min(limit, queue.last_page_us())
        counts = [queue.pages_before(limit) for queue in moving]
        if not all(queue.can_coast(count) for queue, count in zip(moving, counts)):
            return
        taken = sum(count for queue, count in zip(moving, counts) if not queue.is_out)
        if taken > self.pages.free or not any(counts):
            return
        self._note_peak(moving, counts)
        for queue, count in zip(moving, counts):
            if count:
                queue.coast(count)
        self.pages.free -= taken

    def _note_peak(self, moving: list[Queue], counts: list[int]) -> None:
        """Fewest free frames while pages coast: ins begin, outs arrive, in the order of time."""
        pages = self.pages
        taken = sum(count for queue, count in zip(moving, counts) if not queue.is_out)
        if pages.free - taken >= pages.least_free:
            return
        ins, outs = (
            np.sort(
                np.concatenate(
                    [np.zeros(0)]
                    + [q.arrivals_us(n) for q, n in zip(moving, counts) if q.is_out == is_out]
                )
            )
            for is_out in (False, True)
        )
        given = np.searchsorted(outs, ins + EPSILON_US, "right")
        least = pages.free - int((np.arange(1, len(ins) + 1) - given).max())
        pages.least_free = min(pages.least_free, least)

    def _deadlock(self) -> None:
        waits = [queue.why_blocked() for queue in self.queues if queue.entries]
        tensor, _ = self.wait_for
        need = (
            f"for '{self.trace.name_of(tensor)}'"
            if tensor >= 0
            else f"for {self.new_pages[self.op]} free frames ({self.pages.free} free)"
        )
        raise Infeasible(
            f"op {self.op} '{self.trace.op_names[self.op]}' waits {need} while nothing is running "
            f"or in flight" + (f"; {'; '.join(waits)}" if waits else "")
        )


def _settled(before: float, after: float) -> bool:
    return abs(after - before) <= SETTLED * before
