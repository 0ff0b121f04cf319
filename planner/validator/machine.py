"""An independent judge of plans: the machine model, page by page.

It shares no code with the simulator that plans are made with, and is written to be easily believed
rather than fast. One page is one transfer, every frame and slot is counted, and the ledger
(``ledger``) is audited all along. What happens at one instant happens in this order:

1. pages arrive;
2. the host's step ends;
3. the running op ends, dead tensors give everything back, the next op's moves are queued, that op
   starts or joins the host's queue if it can; the host's next step starts if it can (what takes no
   time ends at once, so this may repeat);
4. transfers begin: outs, then the disk in-queue, then the host in-queue.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..hardware import Hardware
from ..plan import Plan, Predicted
from ..simulation import HostRun, Rerun, Simulation
from ..trace import Trace
from .host import HostQueue
from .ledger import (
    DISCARDED,
    DISK,
    HERE,
    HOST,
    NOWHERE,
    TIER_NAME,
    VALID,
    Infeasible,
    Ledger,
)
from .link import INSTANT, TICKS_PER_US, Direction, Job, Queue, ticks
from .schedule import ON_DEVICE, ON_HOST, ONCE_MORE, Act, make_schedule

MIN_ITERATIONS, MAX_ITERATIONS = 3, 40  # one that never settles is judged by its last
HOST_ITERATIONS = 400  # instead, with host steps; if the host falls further behind, it is refused
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
    """The state at ``now`` (ticks): act ``at`` runs, or waits while ``op_end`` is None."""

    def __init__(self, trace: Trace, hardware: Hardware, plan: Plan) -> None:
        self.trace = trace
        self.schedule = make_schedule(trace, hardware, plan)
        self.page_size = int(hardware.page_size)
        caps = (hardware.device_pages, hardware.host_pages, hardware.disk_pages)
        self.pages = Ledger(trace, self.page_size, caps)
        self._make_channels(hardware)
        self._place_start()
        self.now = 0
        self.at = 0
        self.op_queued = False
        self.op_end: int | None = None  # tick; None: the op waits
        self.missing: set[int] = set()  # pages that the waiting op lacks
        self.iteration_began = 0
        self.durations: list[float] = []  # of past iterations, µs
        self.settled = False
        # Of the recomputation that goes on: pages that it has written, and the temporary ones.
        self.remade: set[int] = set()
        self.temporary: dict[int, int] = {}  # page → version
        self.versions = list(self.schedule.versions)
        self.host = HostQueue(self.schedule)
        self.doomed: set[tuple[int, int]] = set()  # pages of tensors that only host steps still use
        self.host_left_us = 0.0
        self.op_times: dict[int, tuple[int, int]] = {}
        self.queued_at: dict[int, int] = {}
        self.again_times: list[tuple[int, int, int, int]] = []  # op, before op, from, to
        self.last: _Iteration | None = None

    @property
    def act(self) -> Act:
        return self.schedule.acts[self.at]

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
        for begin, end in self.schedule.lasting:
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
                self.pages.audit(len(self.temporary))
            self.now = self._next_event()
            self._arrive()
            self._end_host_step()
            self._run_ops()
        self.pages.audit(len(self.temporary))

    def _next_event(self) -> int:
        busy = (queue for queue in self.queues.values() if queue.jobs)
        times = [queue.next_event(self.now) for queue in busy]
        ahead = [time for time in (*times, self.op_end, self.host.end) if time is not None]
        if not ahead:
            raise Infeasible(f"{self._where()} {self._deadlock()}")
        return max(self.now, min(ahead))

    def _arrive(self) -> None:
        latest = self.now + INSTANT
        for queue in self.queues.values():
            if queue.arrival is None or queue.arrival > latest:
                continue
            page = queue.finish(self.now)
            try:
                if queue.action == "out":
                    self.pages.end_out(page, queue.tier)
                else:
                    self.pages.end_in(page)
                    self.missing.discard(page)
            except Infeasible as problem:
                raise Infeasible(f"{self._where()} {problem}") from problem

    def _begin_transfers(self) -> None:
        pages, now = self.pages, self.now
        for (tier, action), queue in self.queues.items():  # both outs, disk in, host in
            if queue.page is not None or not queue.jobs:
                continue
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
            if self._op_goes_on():
                continue
            if not self._start_host_step():
                return
            self._end_host_step()  # where it takes no time

    def _op_goes_on(self) -> bool:
        """Whether the act before ended or the next one started."""
        if self.op_end is not None:
            if self.op_end > self.now + INSTANT:
                return False
            self._end_op()
            return True
        if not self.op_queued:
            self._queue_moves()
            self._look_for_missing_pages()
            self.op_queued = True
        if (
            self.missing
            or self.pages.free_frames() < self._new_frames()
            or self._host_is_in_the_way()
        ):
            return False
        self._start_op()
        return True

    def _new_frames(self) -> int:
        act = self.act
        if act.how == ONCE_MORE:
            return sum(self._is_new(page) for page in self._written_pages(act.op))
        return self.schedule.new_pages[self.at]

    def _written_pages(self, op: int) -> set[int]:
        return {page for span in self.schedule.written[op] for page in range(*span)}

    def _is_new(self, page: int) -> bool:
        """Whether the recomputation has not written it before."""
        return page not in self.temporary and page not in self.remade

    def _host_is_in_the_way(self) -> bool:
        """An op writes what a host step uses, or makes a tensor that one still uses."""
        if not self.schedule.host_order or self.act.how != ON_DEVICE:
            return False
        if not self.doomed.isdisjoint(self.schedule.born[self.at]):
            return True
        users = self.pages.users
        return any(
            users[page] for span in self.schedule.written[self.act.op] for page in range(*span)
        )

    def _start_op(self) -> None:
        act = self.act
        began, took_us = self.now, float(self.trace.op_duration_us[act.op])
        if act.how == ON_HOST:
            self._check_reads(act)
            self._join(act)
            took_us = 0.0
        elif act.how == ONCE_MORE:
            self._check_reads(act)
            self._make_again(act)
        else:
            for begin, end in self.schedule.born[self.at]:
                self.pages.give_birth(begin, end)
                if self.versions:
                    self.versions[begin:end] = [None] * (end - begin)
            for begin, end in self.schedule.touched[act.op]:
                assert self.pages.place.count(HERE, begin, end) == max(0, end - begin)
            self._check_reads(act)
            for begin, end in self.schedule.written[act.op]:
                self.pages.write(begin, end)
        if self.versions and act.how != ONCE_MORE:
            for begin, end in self.schedule.written[act.op]:
                self.versions[begin:end] = [self._stamp(act)] * (end - begin)
        self.op_end = self.now + ticks(took_us)
        if act.how == ONCE_MORE:
            self.again_times.append((act.op, act.for_op, began, self.op_end))
        else:
            self.op_times[act.op] = (began, self.op_end)

    def _stamp(self, act: Act) -> int:
        """The version of what it writes."""
        return act.op + (len(self.durations) + act.turn) * self.trace.ops

    def _check_reads(self, act: Act) -> None:
        """Raises ``Infeasible`` if it finds another version than in the trace."""
        late = self._stamp(act) - act.op
        for begin, end, versions in self.schedule.reads[act.op]:
            wanted = [None if version is None else version + late for version in versions]
            found = self.versions[begin:end]
            if act.how == ONCE_MORE and self.temporary:
                found = [
                    self.temporary.get(page, self.versions[page]) for page in range(begin, end)
                ]
            if found != wanted:
                page = next(p for p in range(begin, end) if found[p - begin] != wanted[p - begin])
                raise Infeasible(
                    f"{self._where()} it reads {self.pages.name(page)}, which "
                    f"{self._written_by(found[page - begin])}; in the trace "
                    f"{self._written_by(wanted[page - begin])}"
                )

    def _written_by(self, version: int | None) -> str:
        return "nobody has written" if version is None else f"op {version % self.trace.ops} wrote"

    def _make_again(self, act: Act) -> None:
        """Discarded pages are their tensors' own again, others are temporary."""
        for page in sorted(self._written_pages(act.op)):
            if self._is_new(page):
                if self.pages.place[page] == DISCARDED:
                    self.pages.make_again(page)
                    self.remade.add(page)
                else:
                    self.pages.spare_frames(1)
                    self.temporary[page] = self._stamp(act)
            if page in self.temporary:
                self.temporary[page] = self._stamp(act)
            else:
                self.versions[page] = self._stamp(act)

    def _join(self, act: Act) -> None:
        try:
            self.pages.host_step_joins(*self.host.pages_of(act.op))
        except Infeasible as problem:
            raise Infeasible(f"{self._where()} as a host step: {problem}") from problem
        self.host.join(act.op)

    def _start_host_step(self) -> bool:
        op = self.host.candidate()
        if op is None:
            return False
        used, written = self.host.pages_of(op)
        if any(self.pages.copy[HOST][page] != VALID for page in used):
            return False
        self.pages.host_step_starts(written)
        self.host.begin(self.now)
        return True

    def _end_host_step(self) -> None:
        if self.host.end is None or self.host.end > self.now + INSTANT:
            return
        self.pages.host_step_ends(*self.host.pages_of(self.host.finish()))
        for span in [s for s in self.doomed if not self._used_by_host(s)]:
            self.doomed.remove(span)
            self._bury(span)

    def _used_by_host(self, span: tuple[int, int]) -> bool:
        return any(self.pages.users[page] for page in range(*span))

    def _bury(self, span: tuple[int, int]) -> None:
        self._cancel_moves(*span)
        self.pages.bury(*span)

    def _end_op(self) -> None:
        for span in self.schedule.parting[self.at]:
            gone = [page for page in self.temporary if span[0] <= page < span[1]]
            self.pages.spare_frames(-len(gone))
            for page in gone:
                del self.temporary[page]
        for span in self.schedule.dying[self.at]:
            if self._used_by_host(span):
                self.doomed.add(span)
            else:
                self._bury(span)
        self.op_end, self.op_queued = None, False
        self.at += 1
        if self.at == len(self.schedule.acts):
            self._end_iteration()

    def _cancel_moves(self, begin: int, end: int) -> None:
        """A tensor gives everything back when its last op ends, pages on their way too.

        Only pages that this last op does not touch can still be on their way.
        """
        if self.pages.has_moves(begin, end):
            for queue in self.queues.values():
                queue.forget(begin, end, self.now)

    def _queue_moves(self) -> None:
        if not self.act.opens:
            return
        self.remade.clear()
        assert not self.temporary
        self.queued_at[self.act.for_op] = self.now
        for number, pages, tier, action in self.schedule.moves[self.act.for_op]:
            try:
                transferred = self._queue_pages(pages, action, tier)
            except Infeasible as problem:
                whither = "" if tier == NOWHERE else f" with {TIER_NAME[tier]}"
                text = f"moves[{number}], '{action}'{whither}: {problem}"
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
            if action == "discard":
                self.pages.discard(page)
            else:
                self.pages.queue_drop(page, tier)
        return []

    def _look_for_missing_pages(self) -> None:
        """Which pages the next op must wait for. Raises ``Infeasible`` if one will never come."""
        assert not self.missing
        act = self.act
        if act.how == ON_HOST:
            return
        spans = self.schedule.touched[act.op]
        if act.how == ONCE_MORE:
            spans = [(begin, end) for begin, end, _ in self.schedule.reads[act.op]]
        born = set(self.schedule.born[self.at])
        for begin, end in spans:
            if self.pages.place.count(HERE, begin, end) >= end - begin:
                continue
            if any(a <= begin < b for a, b in born):  # this op makes the tensor
                continue
            for page in range(begin, end):
                if self.pages.place[page] == HERE or page in self.temporary:
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
        before_us, self.host_left_us = self.host_left_us, self.host.left_us(self.now)
        self.durations.append((self.now - self.iteration_began) / TICKS_PER_US)
        self.last = _Iteration(
            self.iteration_began, self._moved(), self.op_times, self.queued_at, self.again_times,
            self.host.log,
        )  # fmt: skip
        self.iteration_began = self.now
        for queue in self.queues.values():
            queue.moved = 0
        self.op_times, self.queued_at, self.again_times = {}, {}, []
        self.host.log = []
        self.at = 0
        last = self.durations[-1]
        behind_us = self.host_left_us - before_us
        keeps_up = abs(behind_us) < SETTLED * last or behind_us == 0
        if len(self.durations) >= MIN_ITERATIONS and keeps_up:
            before = self.durations[-2]
            self.settled = last == before or abs(last - before) < SETTLED * before
        most = HOST_ITERATIONS if self.schedule.host_order else MAX_ITERATIONS
        if len(self.durations) == most and not self.settled:
            if not keeps_up:
                raise Infeasible(
                    f"after {most} iterations the host is {self.host_left_us:.0f} µs behind, "
                    f"{behind_us:.3f} µs more than one iteration before"
                )
            self.settled = True

    def _moved(self) -> dict[tuple[int, str], int]:
        return {key: queue.moved for key, queue in self.queues.items()}

    def _check_end_state(self) -> None:
        """After all queued moves have arrived, pages are where ``start`` says."""
        pages = self.pages
        for begin, end in self.schedule.lasting:
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
        op, again = self.act.op, " once more" if self.act.how == ONCE_MORE else ""
        return f"iteration {len(self.durations) + 1}, op {op} ({self.trace.op_names[op]}){again}:"

    def _deadlock(self) -> str:
        """What the op waits for, with nothing on its way that could bring it."""
        if self.missing:
            page = min(self.missing)
            wanted = f"{self.pages.name(page)}, which {self.pages.whereabouts(page)}"
        elif self._host_is_in_the_way():
            wanted = "a host step"
        else:
            wanted = (
                f"{self._new_frames()} frames for its new tensors, of which "
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
        if self.pages.steppers[page]:
            return f"a host step that writes {self.pages.name(page)}"
        if not self.pages.may_begin_in(page, queue.tier):
            return f"the copy of {self.pages.name(page)} in {TIER_NAME[queue.tier]}"
        return f"a frame for {self.pages.name(page)}"

    def result(self) -> Simulation:
        ideal_us, iteration_us = self.trace.ideal_us, self.durations[-1]
        size, last = self.page_size, self.last
        moved = last.moved if last else self._moved()
        acts = self.schedule.acts
        took_us = self.trace.op_duration_us
        again_us = sum(float(took_us[act.op]) for act in acts if act.how == ONCE_MORE)
        here_us = sum(float(took_us[act.op]) for act in acts if act.how == ON_DEVICE)
        predicted = Predicted(
            iteration_us=iteration_us,
            ideal_us=ideal_us,
            stall_us=iteration_us - here_us - again_us,
            peak_device_bytes=self.pages.peak_frames * size,
            peak_host_bytes=self.pages.peak_slots[HOST] * size,
            peak_disk_bytes=self.pages.peak_slots[DISK] * size,
            bytes_out=(moved[HOST, "out"] + moved[DISK, "out"]) * size,
            bytes_in=(moved[HOST, "in"] + moved[DISK, "in"]) * size,
            disk_bytes_written=moved[DISK, "out"] * size,
            recompute_us=again_us,
            host_us=sum(self.schedule.host_us.values()),
        )
        if last is None:
            return Simulation(feasible=True, predicted=predicted, iterations=len(self.durations))

        def since(tick: int) -> float:
            return (tick - last.began) / TICKS_PER_US

        ops = range(self.trace.ops)
        return Simulation(
            feasible=True,
            predicted=predicted,
            iterations=len(self.durations),
            op_start_us=np.array([since(last.op_times[op][0]) for op in ops], np.float64),
            op_end_us=np.array([since(last.op_times[op][1]) for op in ops], np.float64),
            queued_us=np.array([since(last.queued_at[op]) for op in ops], np.float64),
            reruns=[Rerun(op, by, since(a), since(b)) for op, by, a, b in last.again_times],
            host_runs=[HostRun(op, since(a), since(b)) for op, a, b in last.host_log],
        )


class _Iteration(NamedTuple):
    """What happened in one, in ticks."""

    began: int
    moved: dict[tuple[int, str], int]
    op_times: dict[int, tuple[int, int]]
    queued_at: dict[int, int]
    again_times: list[tuple[int, int, int, int]]
    host_log: list[tuple[int, int, int]]
