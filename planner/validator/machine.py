"""An independent judge of plans: the machine model, page by page.

It shares no code with the simulator that plans are made with, and is written to be easily believed
rather than fast. One page is one transfer, every frame and slot is counted, and the ledger
(``ledger``) is audited all along. What happens at one instant happens in this order:

1. pages arrive;
2. the running op ends, its dead tensors give everything back, the next op's moves are queued, that
   op starts if it can (an op that takes no time ends at once, so this may repeat);
3. transfers begin: outs, then the disk in-queue, then the host in-queue.
"""

from __future__ import annotations

import numpy as np

from ..hardware import Hardware
from ..plan import Plan, Predicted
from ..simulation import Simulation
from ..trace import Floats, Trace
from .ledger import (
    ABSENT,
    DISK,
    HERE,
    HOST,
    NOWHERE,
    TIER_NAME,
    Infeasible,
    Ledger,
)
from .link import INSTANT, TICKS_PER_US, Direction, Job, Queue, ticks
from .schedule import make_schedule

MIN_ITERATIONS, MAX_ITERATIONS = 3, 40  # one that never settles is judged by its last
SETTLED = 1e-4  # share by which two successive iterations may differ
AUDIT_SHARE = 16  # audit after as many changes as a sixteenth of all pages: cost stays linear


def validate(trace: Trace, hardware: Hardware, plan: Plan) -> Simulation:
    """Runs ``plan`` for as many iterations as it takes to settle.

    Never raises for a bad plan: ``feasible`` is false then, and ``reason`` says what and where.
    """
    machine: _Machine | None = None
    try:
        machine = _Machine(trace, hardware, plan)
        machine.run()
    except Infeasible as problem:
        done = len(machine.durations) if machine else 0
        return Simulation(feasible=False, reason=str(problem), iterations=done)
    return machine.result()


class _Machine:
    """The state at ``now`` (ticks): op ``op`` runs, or waits while ``op_end`` is None."""

    def __init__(self, trace: Trace, hardware: Hardware, plan: Plan) -> None:
        self.trace = trace
        self.schedule = make_schedule(trace, hardware, plan)
        self.page_size = int(hardware.page_size)
        caps = (hardware.device_pages, hardware.host_pages, hardware.disk_pages)
        self.pages = Ledger(trace, self.page_size, caps)
        self._make_channels(hardware)
        self._place_start()
        self.now = 0
        self.op = 0
        self.op_queued = False
        self.op_end: int | None = None  # tick; None: the op waits
        self.missing: set[int] = set()  # pages that the waiting op lacks
        self.iteration_began = self.last_began = 0  # this one and the one before
        self.durations: list[float] = []  # of past iterations, µs
        self.moved = dict.fromkeys(((t, a) for t in (HOST, DISK) for a in ("out", "in")), 0)
        self.moved_before = dict(self.moved)  # in the last whole iteration, pages
        self.op_times: list[tuple[int, int]] = []
        self.last_op_times: list[tuple[int, int]] = []
        self.settled = False

    def _make_channels(self, hardware: Hardware) -> None:
        latency_us = hardware.transfer_latency_us
        self.queues = {
            (tier, action): Queue(tier, action, latency_us, self.page_size)
            for action in ("out", "in")
            for tier in (DISK, HOST)
        }
        out = Direction(
            self.queues[DISK, "out"],
            self.queues[HOST, "out"],
            hardware.d2h_bytes_per_s / 1e6,
            hardware.disk_write_bytes_per_s / 1e6,
        )
        back = Direction(
            self.queues[DISK, "in"],
            self.queues[HOST, "in"],
            hardware.h2d_bytes_per_s / 1e6,
            hardware.disk_read_bytes_per_s / 1e6,
        )
        self.directions = (out, back)

    def _place_start(self) -> None:
        for page, tier in self.schedule.start.items():
            self.pages.place_below(page, tier)
        for begin, end in self.schedule.persistent:
            for page in range(begin, end):
                if page not in self.schedule.start:
                    self.pages.place_here(page)

    # The loop over events.

    def run(self) -> None:
        """Raises ``Infeasible`` where the plan breaks a rule."""
        if not self.trace.ops:
            self.settled, self.durations = True, [0.0]
            return
        self._run_ops()
        while not self.settled:
            self._begin_transfers()
            if self.pages.changes * AUDIT_SHARE >= self.pages.total:
                self.pages.audit()
            self.now = self._next_event()
            self._arrive()
            self._run_ops()
        self.pages.audit()

    def _next_event(self) -> int:
        times = [queue.next_event(self.now) for queue in self.queues.values()]
        ahead = [time for time in (*times, self.op_end) if time is not None]
        if not ahead:
            raise Infeasible(f"{self._where()} {self._deadlock()}")
        return max(self.now, min(ahead))

    def _arrive(self) -> None:
        for (tier, action), queue in self.queues.items():
            if queue.arrival is None or queue.arrival > self.now + INSTANT:
                continue
            page = queue.finish(self.now)
            self.moved[tier, action] += 1
            try:
                if action == "out":
                    self.pages.end_out(page, tier)
                else:
                    self.pages.end_in(page)
                    self.missing.discard(page)
            except Infeasible as problem:
                raise Infeasible(f"{self._where()} {problem}") from problem

    def _begin_transfers(self) -> None:
        pages, now = self.pages, self.now
        for (tier, action), queue in self.queues.items():  # both outs, disk in, host in
            page = queue.candidate(now)
            if page is None:
                continue
            if action == "out" and pages.free_slots(tier) >= 1:
                pages.begin_out(page, tier)
                queue.begin(now)
            elif action == "in" and pages.may_begin_in(page, tier) and pages.free_frames() >= 1:
                pages.begin_in(page, tier)
                queue.begin(now)
        for direction in self.directions:
            direction.share(now)

    # Ops.

    def _run_ops(self) -> None:
        while not self.settled:
            if self.op_end is not None:
                if self.op_end > self.now + INSTANT:
                    return
                self._end_op()
                continue
            if not self.op_queued:
                self._queue_moves()
                self._look_for_missing_pages()
                self.op_queued = True
            if self.missing or self.pages.free_frames() < self.schedule.new_pages[self.op]:
                return
            self._start_op()

    def _start_op(self) -> None:
        for begin, end in self.schedule.born[self.op]:
            self.pages.give_birth(begin, end)
        for begin, end in self.schedule.touched[self.op]:
            assert self.pages.place.count(HERE, begin, end) == max(0, end - begin)
        for begin, end in self.schedule.written[self.op]:
            self.pages.write(begin, end)
        self.op_end = self.now + ticks(float(self.trace.op_duration_us[self.op]))
        self.op_times.append((self.now, self.op_end))

    def _end_op(self) -> None:
        for begin, end in self.schedule.dying[self.op]:
            self._cancel_moves(begin, end)
            self.pages.bury(begin, end)
        self.op_end, self.op_queued = None, False
        self.op += 1
        if self.op == self.trace.ops:
            self._end_iteration()

    def _cancel_moves(self, begin: int, end: int) -> None:
        """A tensor gives everything back when its last op ends, pages on their way too.

        Only pages that this last op does not touch can still be on their way.
        """
        if self.pages.has_moves(begin, end):
            for queue in self.queues.values():
                queue.forget(begin, end, self.now)

    def _queue_moves(self) -> None:
        for number, pages, tier, action in self.schedule.moves[self.op]:
            try:
                transferred = self._queue_pages(pages, action, tier)
            except Infeasible as problem:
                text = f"moves[{number}], '{action}' with {TIER_NAME[tier]}: {problem}"
                raise Infeasible(f"{self._where()} {text}") from problem
            if transferred:
                self.queues[tier, action].add(Job(number, transferred), self.now)

    def _queue_pages(self, pages: range, action: str, tier: int) -> list[int]:
        """Those of ``pages`` that must be transferred."""
        if action == "out":
            return [page for page in pages if self.pages.queue_out(page, tier)]
        if action == "in":
            for page in pages:
                self.pages.queue_in(page, tier)
            return list(pages)
        for page in pages:
            self.pages.queue_drop(page, tier)
        return []

    def _look_for_missing_pages(self) -> None:
        """Which pages the next op must wait for. Raises ``Infeasible`` if one will never come."""
        assert not self.missing
        for begin, end in self.schedule.touched[self.op]:
            if self.pages.place.count(HERE, begin, end) >= end - begin:
                continue
            for page in range(begin, end):
                if self.pages.place[page] in (HERE, ABSENT):  # absent: this op makes the tensor
                    continue
                if self.pages.coming_from[page] == NOWHERE:
                    raise Infeasible(
                        f"{self._where()} it accesses {self.pages.name(page)}, which "
                        f"{self.pages.whereabouts(page)} with no 'in' queued"
                    )
                self.missing.add(page)

    # Iterations.

    def _end_iteration(self) -> None:
        self._check_end_state()
        self.durations.append((self.now - self.iteration_began) / TICKS_PER_US)
        self.last_began, self.iteration_began = self.iteration_began, self.now
        self.moved_before = dict(self.moved)
        self.moved = dict.fromkeys(self.moved, 0)
        self.last_op_times, self.op_times = self.op_times, []
        self.op = 0
        if len(self.durations) >= MIN_ITERATIONS:
            before, last = self.durations[-2:]
            self.settled = last == before or abs(last - before) < SETTLED * before
        self.settled = self.settled or len(self.durations) == MAX_ITERATIONS

    def _check_end_state(self) -> None:
        """After all queued moves have arrived, pages are where ``start`` says."""
        pages = self.pages
        for begin, end in self.schedule.persistent:
            for page in range(begin, end):
                wanted = self.schedule.start.get(page)
                if pages.settles_here(page):
                    if wanted is not None:
                        self._refuse_end(page, "on the device")
                    continue
                tiers = pages.settled_tiers(page)
                if wanted is None or wanted not in tiers:
                    names = " and ".join(TIER_NAME[tier] for tier in sorted(tiers))
                    self._refuse_end(
                        page, f"in {names}" if names else "nowhere: its copy is dropped"
                    )

    def _refuse_end(self, page: int, ends: str) -> None:
        wanted = self.schedule.start.get(page)
        starts = "on the device" if wanted is None else f"in {TIER_NAME[wanted]}"
        raise Infeasible(
            f"end of iteration {len(self.durations) + 1}: {self.pages.name(page)} ends {ends} "
            f"but starts {starts}; 'start' must be the state that the moves end in"
        )

    # Words.

    def _where(self) -> str:
        return (
            f"iteration {len(self.durations) + 1}, op {self.op} ({self.trace.op_names[self.op]}):"
        )

    def _deadlock(self) -> str:
        """What the op waits for, with nothing on its way that could bring it."""
        if self.missing:
            page = min(self.missing)
            wanted = f"{self.pages.name(page)}, which {self.pages.whereabouts(page)}"
        else:
            wanted = (
                f"{self.schedule.new_pages[self.op]} frames for its new tensors, of which "
                f"{self.pages.free_frames():g} are free"
            )
        heads = [
            f"moves[{queue.jobs[0].move}] waits for {self._obstacle(queue)}"
            for queue in self.queues.values()
            if queue.jobs
        ]
        return "; ".join([f"waits for ever for {wanted}; nothing runs or moves", *heads])

    def _obstacle(self, queue: Queue) -> str:
        page = queue.jobs[0].pages[0]
        if queue.action == "out":
            return f"a slot in {TIER_NAME[queue.tier]} for {self.pages.name(page)}"
        if not self.pages.may_begin_in(page, queue.tier):
            return f"the copy of {self.pages.name(page)} in {TIER_NAME[queue.tier]}"
        return f"a frame for {self.pages.name(page)}"

    def result(self) -> Simulation:
        ideal_us, iteration_us = self.trace.ideal_us, self.durations[-1]
        size, moved = self.page_size, self.moved_before
        predicted = Predicted(
            iteration_us=iteration_us,
            ideal_us=ideal_us,
            stall_us=iteration_us - ideal_us,
            peak_device_bytes=self.pages.peak_frames * size,
            peak_host_bytes=self.pages.peak_slots[HOST] * size,
            peak_disk_bytes=self.pages.peak_slots[DISK] * size,
            bytes_out=(moved[HOST, "out"] + moved[DISK, "out"]) * size,
            bytes_in=(moved[HOST, "in"] + moved[DISK, "in"]) * size,
            disk_bytes_written=moved[DISK, "out"] * size,
        )
        return Simulation(
            feasible=True,
            predicted=predicted,
            iterations=len(self.durations),
            op_start_us=self._relative([start for start, _ in self.last_op_times]),
            op_end_us=self._relative([end for _, end in self.last_op_times]),
        )

    def _relative(self, times: list[int]) -> Floats:
        """µs since the last iteration began."""
        return np.array([(time - self.last_began) / TICKS_PER_US for time in times], np.float64)
