"""Follows iterations: logs what they access, plans each kind in the background, runs the plans.

::

                 no plan yet, or another kind came
        +----------------------------------------------+
        v                                              |
     DEMAND --- a kind is seen: planned beside it --> PLANNED
     (faults, LRU)                                 (moves ahead of need)
        ^                                              |
        +---- an access that the plan does not know ---+   (for the rest of the iteration, unless
                                                            another plan began the same way)

A plan is advice: what it does not bring in time is waited for, and what it does not bring at all is
faulted in. An iteration is compared with its plan access by access.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

import torch

from ...planner.hardware import Hardware
from ...planner.plan import Plan
from ..errors import HungDisk, PagerError
from ..memory.space import Extent
from .access_log import AccessLog, Call, Keys
from .compiled_plan import CompiledPlan, Order
from .enter_plan import enter_plan
from .optional import OptionalParts
from .planned import PlannedMoves
from .recorder import Recorder
from .signatures import Signatures, StepSignature
from .victims import by_next_use
from .ways import Taken

if TYPE_CHECKING:
    from ..core import Core
    from ..machine.calibration.measure import Calibration
    from ..tensor.segments import Segments
    from .plain_speed import OpTimes
    from .planning import PlanningProcess, Question
    from .starting import StartingPlan

_BATCH_SECONDS = 0.008  # of a channel's time: what one transfer moves
_MOST_BATCH_BYTES = 128 << 20
_TELLING_SECONDS = 1.0
_TELLING_STEPS_US = 0.2e6
_HOST_BYTES_PER_S = 20e9  # of its memory, while moves use it too
_MOST_STRAYS = 2
_RATES = {
    "host-out": "d2h_bytes_per_s",
    "host-in": "h2d_bytes_per_s",
    "disk-out": "disk_write_bytes_per_s",
    "disk-in": "disk_read_bytes_per_s",
}


class Others(Protocol):
    """Ranks that this one plans together with (``distributed/agreement.py``): whether all may
    follow plans in the next iteration, and take those that have been made."""

    @property
    def may_follow(self) -> bool: ...
    @property
    def may_take(self) -> bool: ...


class Follower:
    """Of one pager. Methods are called with its lock held. ``learned``: the kind of the latest
    iteration, if that told anything."""

    def __init__(
        self,
        pager: Core,
        recorder: Recorder,
        segments: Segments | None = None,
        starting: StartingPlan | None = None,
    ) -> None:
        self._pager = pager
        pager.host_steps.chosen = self._place_on_host
        pager.host_steps.planned = segments is not None
        self.recorder = recorder
        self.signatures = Signatures()
        self._optional = OptionalParts(pager, recorder.names)
        self.segments = segments  # where blocks may run again
        self.others: Others | None = None
        self.learned: StepSignature | None = None
        if segments is not None:
            segments.listener = self
        self.mover = pager.mover
        self.planned = PlannedMoves(pager.residency, pager.mover, recorder.names)
        self.compiled: CompiledPlan | None = None  # that it follows
        self.known: Order | None = None  # in which an iteration on demand goes
        self.starting = starting  # for iterations that have no plan yet
        self.is_ahead = False
        self.most_plans = 4  # of one kind; each from better times than the one before
        self.only_if_faster = True  # no plan is followed that promises less than paging on demand
        self.departures = 0
        self.planned_iterations = 0
        self.last_mode = "demand"
        self.stall_us_last: float | None = None  # of the last iteration
        self._issued = 0  # its moves until so many accesses have ended
        self._base: StepSignature | None = None  # of the iteration in which blocks run again
        self._called: tuple[str, int, Keys] | None = None  # the segment that runs
        self._on_demand = False  # has followed no plan at all
        # The arena is as this plan has it, whose iterations are followed from their begin.
        self._in_state: CompiledPlan | None = None
        self._began = 0.0
        self._warned = False  # that a planned move failed
        self._died: str | None = None  # a planner, which nobody was told of
        self._calibration: Calibration | None = None
        self._op_times: OpTimes | None = None  # of the iteration that runs
        self._stays_on: OpTimes | None = None  # of one before, under somebody else's mode
        self._ready: PlanningProcess | None = None  # a planner that waits for the first trace

    @property
    def log(self) -> AccessLog | None:
        """Of the iteration that runs."""
        return self.recorder.log

    @property
    def is_fixed(self) -> bool:
        """The arena is to stay as it is in the iteration that runs: it follows a plan of somebody
        else's, or its ops are timed, with more dense memory than otherwise."""
        return (self.is_ahead and self.compiled is None) or self._op_times is not None

    # -- an iteration ----------------------------------------------------------------------------
    def begin(self) -> None:
        """An iteration begins; it is expected to be of the kind that came here before."""
        pager = self._pager
        pager.residency.collect()
        others, self.learned = self.others, None
        if others is None or others.may_take:
            self._poll()
        self._began = time.perf_counter()
        log = self.recorder.open()
        signature = self._choose(self.signatures.expected(), log)
        compiled = signature.followed if signature is not None else None
        off = pager.budget.metering or self.mover.error is not None
        off = off or (others is not None and not others.may_follow)
        if compiled is not None and not off and self._enter(compiled):
            self._in_state = compiled
            self._follow(compiled, -1)
            self.planned.go_home()
            self.unpinned()
        else:
            self._leave()
        self._on_demand = self.compiled is None
        start = self.starting
        if start is not None and self._on_demand and not off:
            start.begin(pager, self.recorder, self.planned)
        if start is not None and start.runs:
            self.is_ahead, self.recorder.on_access = True, start.accessed
        elif self._on_demand and not off and signature is not None:
            self._expect(signature.accesses, -1)
        if self._on_demand and self.recorder.has_clock:
            log.clock = pager.backend
        if self._on_demand and not pager.budget.metering:
            self._time_ops()

    def _time_ops(self) -> None:
        """What plain PyTorch takes for a kind of iteration is measured once, in the next one after
        it was first seen; of the first kind at once. Beside a mode backward passes add gradients
        up in new memory, which the budget has to have room for."""
        from .plain_speed import OpTimes, can_time_ops

        if self._stays_on is not None and self._stays_on.stop():
            self._stays_on = None
        known = self.current is not None and self.current.plain_us is not None
        planning = any(one.process is not None for one in self.signatures.all)
        busy = planning or self.recorder.ops or self._stays_on
        if known or busy or not self._pager.budget.has_twice_the_dense():
            return
        if can_time_ops(self._pager):
            self._op_times = OpTimes(self._pager)
            self._op_times.start()

    def _choose(self, expected: StepSignature | None, log: AccessLog) -> StepSignature | None:
        """Which blocks run again in the iteration that begins, and what kind it is then."""
        self._base = self._called = None
        if self.segments is None:
            return expected
        if expected is not None and expected.again:
            if self.only_if_faster:
                expected.judge()
            if self._has_room(expected):
                log.again = expected.again.difference(self.segments.refused)
        self.segments.begin(log.again)
        if not log.again:
            return expected
        self._base = expected
        return self._base.variant if self._base is not None else None

    def _has_room(self, signature: StepSignature) -> bool:
        """Whether what a block makes as it runs again may be there beside what is dense anyway."""
        if signature.variant is not None:
            return True
        assert signature.recorded is not None
        budget, trace = self._pager.budget, signature.recorded.trace
        made = [trace.tensor_bytes[trace.made_by(segment)].sum() for segment in trace.segments]
        most = int(max(made, default=0))
        return budget.dense_peak + most <= budget.reserve or budget.can_give(most)

    # Segments tell of their calls, on the thread of the iteration.
    def segment_begins(self, block: str, inputs: Sequence[Extent]) -> None:
        if self.log is not None:
            self._called = block, len(self.log.keys), tuple(run.key for run in inputs)

    def segment_ended(self) -> None:
        called, self._called = self._called, None
        if self.log is not None and called is not None:
            block, begin, inputs = called
            self.log.calls.append(Call(block, begin, len(self.log.keys), inputs))

    def _enter(self, compiled: CompiledPlan) -> bool:
        """Bring the arena into the state in which ``compiled`` begins, if that can be."""
        if self._in_state is compiled:
            return True
        residency = self._pager.residency
        self.planned.clear()
        self.mover.drain()
        if residency.pinned_pages():
            return False
        try:
            missing = enter_plan(residency, self.recorder.names, compiled)
        except PagerError:
            return False
        self.planned.follow(compiled)
        self.planned.issue(missing, {})
        return True

    def _follow(self, compiled: CompiledPlan, at: int) -> None:
        """From now on; its access ``at`` is the latest one."""
        self.compiled, self._issued, self.is_ahead = compiled, at + 1, True
        self.planned.follow(compiled)
        self.recorder.plan, self.recorder.at = compiled, at
        self.recorder.on_access = self._accessed

    def _expect(self, known: Order | None, at: int) -> None:
        """On demand, what is used last leaves first, as long as the iteration goes so. Its access
        ``at`` is the latest one."""
        self.known = self.recorder.plan = known
        self.recorder.at = at
        self.recorder.on_access = None if known is None else self._accessed

    def _leave(self) -> None:
        """Follow no plan; pages are faulted in."""
        if self.is_ahead or self._in_state is not None:
            self.planned.clear()
        if self.starting is not None:
            self.starting.runs = False
        self.is_ahead = False
        self.compiled = self._in_state = self.known = None
        self.recorder.plan = self.recorder.on_access = None
        self.planned.follow(None)

    def _accessed(self, keys: Keys, of_order: Keys) -> None:
        """An access begins that is not the plan's next one. If it is not in its order, another plan
        may be followed, for an order that began so."""
        known, log = self.compiled or self.known, self.recorder.log
        assert known is not None
        assert log is not None
        at = known.find(keys, of_order, self.recorder.at, len(log.order))
        if at is not None:
            self.recorder.at = at
            return
        if self.compiled is None:
            self._leave()
            return
        self.departures += 1
        self._leave()
        other = self.signatures.with_prefix([*log.order, of_order])
        if other is not None:
            self._follow(other, other.places[len(log.order)])

    def serve_at_once(self, runs: Sequence[Extent]) -> bool:
        """:meth:`bring`, where the plan has brought them and nobody has to wait; whether."""
        if self.compiled is None or self.mover.error is not None:
            return False
        if self._pager.space.dead:
            self._pager.residency.collect()
        return self.planned.serve_at_once(runs)

    def bring(self, runs: Sequence[Extent]) -> None:
        """Bring ``runs`` onto the device and keep them: by the plan, or by a fault."""
        residency = self._pager.residency
        if self.mover.error is not None:
            self._leave()
        known = self.compiled or self.known
        if known is None:
            residency.bring(runs)
            return
        if self._pager.space.dead:
            residency.collect()
        if self.compiled is not None and self.planned.serve(runs):
            return
        compiled = self.compiled
        with by_next_use(residency, known, self.recorder.at, self._optional.often):
            if compiled is not None:
                if compiled.left:
                    self._optional.make_room(runs, compiled.uses, compiled.left)
                self.planned.make_windows(runs)
            residency.bring(runs)
        for run in runs:
            residency.touch(run)
        self.planned.faults += compiled is not None

    def unpinned(self) -> None:
        """An access has ended: what the plan queues now is queued."""
        log, compiled = self.recorder.log, self.compiled
        if not self.is_ahead or log is None:
            return
        if self._pager.space.dead:
            self._pager.residency.collect()
        if compiled is not None:
            ended = self.recorder.at + 1
            if compiled.next_actions[self._issued] <= ended or any(self.planned.queues):
                self._issue(compiled, ended, log)
            return
        assert self.starting is not None
        self.starting.go_on()

    def _issue(self, compiled: CompiledPlan, ended: int, log: AccessLog) -> None:
        """What the plan queues until so many of its accesses have ended."""
        first, self._issued = self._issued, max(self._issued, ended + 1)
        points = [where for where in range(first, self._issued) if compiled.actions[where]]
        for where in points:
            self.planned.issue(compiled.actions[where], log.newborn, where)
        if not points and any(self.planned.queues):
            self.planned.go_on()

    def _place_on_host(self, runs: Sequence[Extent]) -> int | None:
        """Of the access of ``runs`` that comes next, in the host's order, if the plan has it be a
        step of the host."""
        compiled, log = self.compiled, self.log
        if compiled is None or log is None or not self._pager.in_iteration():
            return None
        begun = len(log.order)
        where = compiled.places[begun] if begun < len(compiled.places) else -1
        place = compiled.hosted.get(where)
        known = place is not None and set(compiled.keys[where]) == {run.key for run in runs}
        return place if known else None

    def end(self, *, ok: bool) -> None:
        """The iteration is over; ``ok``: it ended by itself."""
        pager, log = self._pager, self.recorder.close()
        times, self._op_times = self._op_times, None
        if times is not None and not times.stop():
            self._stays_on = times
        if self.segments is not None:
            self.segments.end()
        if log is None:
            return
        self.stall_us_last = log.stall_seconds * 1e6
        if self.starting is not None:
            self.starting.end(ok=ok)
        compiled = self.compiled
        if not ok or compiled is None or len(log.order) != len(compiled.order):
            self._leave()
        elif self._issued <= len(compiled.keys):  # what comes last there was not here
            self._issue(compiled, len(compiled.keys), log)
        compiled, self.compiled, self.known, self.is_ahead = self.compiled, None, None, False
        self.recorder.plan = self.recorder.on_access = None
        self.last_mode = "planned" if compiled is not None else "demand"
        if ok and not pager.budget.metering and not pager.fits:
            followed = compiled is not None and compiled is self._in_state
            self._learn(log, followed=followed, times=times)

    def warn(self) -> None:
        """Tell the user, once, that plans are not followed any more, or that a planner has died.
        Without the lock, in the training thread, where everything is as it should be: a warning may
        be raised."""
        start = self.starting
        if start is not None and start.refused is not None and not start.told:
            start.told = True
            warnings.warn(f"{start}.", RuntimeWarning, stacklevel=5)
        died, self._died = self._died, None
        if died is not None:
            warnings.warn(
                f"{died}. Training goes on with the plan that there is, or brings pages in when an "
                "op needs them. Please report it, with the trace that Pager.record writes.",
                RuntimeWarning,
                stacklevel=5,
            )
        error = self.mover.error
        if error is None or self._warned:
            return
        self._warned = True
        warning = RuntimeWarning(
            f"a planned move failed: {type(error).__name__}: {error}. Its pages are where they "
            "were. No plan is followed any more: training goes on, and brings pages in when an op "
            "needs them."
        )
        warning.__cause__ = error
        warnings.warn(warning, stacklevel=5)  # the end of the user's `with` block

    def _learn(self, log: AccessLog, *, followed: bool, times: OpTimes | None) -> None:
        """``times``: of its ops, where they were timed, which has made it slower."""
        took = log.ended - self._began  # by the host's clock, as `_began` is
        of_device = log.clock is not None or not self.recorder.has_clock
        log.settle_times(self._pager.backend)
        size = log.activation_pages
        self._optional.note(log)
        signature = self.signatures.find(log)
        if signature is not None:
            signature.seen += 1
        else:
            self._look_up(log)
            self._get_ready()
            signature = self.signatures.add(log, size)
            once = [one.log for one in self.signatures.all if one.seen == 1]
            self.signatures.forget(self._optional.look_for(once))
        # The planner takes time from an iteration that it runs beside.
        planning = any(one.process is not None for one in self.signatures.all)
        if times is not None:
            signature.note_plain(times.total_us(), size)
        elif of_device and signature.seen > 1 and not (followed and planning):
            signature.sample(log, size, followed=followed)
        self._relate(signature)
        self.signatures.came(signature)
        self.planned_iterations += followed
        as_usual = times is None and not planning and not self._pager.budget.gave
        if as_usual and (followed or self._on_demand):
            stalled = log.stall_seconds if followed else sum(log.stalls.values())
            taken = Taken(took * 1e6, stalled * 1e6, size)
            alone = self.others is None if self.only_if_faster else None
            signature.choose(taken, by_plan=followed, alone=alone)
        if signature.is_shorter(size):
            self._look_up(log)
            signature.lengthen(log, size)
        self.learned = signature
        if self.others is None:
            self.plan_if_due()

    def _look_up(self, log: AccessLog) -> None:
        """What a trace says of its runs, which may be gone then."""
        log.facts = self.recorder.names.facts_of(log)
        log.newborn = {}

    def _relate(self, signature: StepSignature) -> None:
        """Of what kind an iteration was in which blocks were to run again."""
        base = self._base
        if base is None or base.variant is signature:
            return
        if signature is not base and signature.log.again and signature.is_like(base):
            signature.base, base.variant = base, signature
            return
        base.strays += 1
        if base.strays > _MOST_STRAYS:
            base.keep("was of another kind each time")

    # -- planning --------------------------------------------------------------------------------
    def is_due(self) -> bool:
        """Whether the latest iteration's kind should be planned."""
        signature = self.learned
        return (
            signature is not None and self.mover.error is None and signature.is_due(self.most_plans)
        )

    def plan_if_due(self) -> None:
        """Plan the latest iteration's kind, if it should be."""
        if self.is_due():
            assert self.learned is not None
            self._plan(self.learned)

    def to_plan(self) -> StepSignature | None:
        """The latest iteration's kind, if it may be planned as others plan theirs."""
        kind = self.learned
        if kind is None or kind.process is not None or kind.plans >= self.most_plans:
            return None
        return kind if self.is_due() or kind.compiled is not None else None

    def plan_quickly(self, kind: StepSignature | None) -> None:
        """Others wait for a plan of ``kind``: start to make a quick one, unless one is made."""
        if kind is None or kind.compiled is not None or kind.refused is not None or not kind.keys:
            return
        if kind.process is not None:
            if kind.plans == 1:
                return
            kind.cancel()
        self._plan(kind, quick=True)

    def will_enter(self) -> bool:
        """Whether the arena has to be brought into the state of a plan for the next iteration, as
        far as can be told."""
        if self.others is None or self.others.may_take:
            self._poll()
        kind = self.to_come()
        return kind is not None and kind.followed not in (None, self._in_state)

    def to_come(self) -> StepSignature | None:
        """The kind of the next iteration, as far as can be told."""
        expected = self.signatures.expected()
        if expected is not None and expected.again and expected.variant is not None:
            return expected.variant
        return expected

    @property
    def is_planning(self) -> bool:
        """A plan is being made, here."""
        from .planning import PlanningProcess

        processes = (signature.process for signature in self.signatures.all)
        return any(type(one) is PlanningProcess and not one.done() for one in processes)

    def _get_ready(self) -> None:
        """The first kind was seen for the first time: a planner loads what it needs until there is
        something to plan."""
        from .planning import PlanningProcess

        if not self.signatures.all and self._ready is None and self.most_plans:
            self._ready = PlanningProcess()

    def _plan(self, signature: StepSignature, *, quick: bool = False) -> None:
        """Start to plan ``signature`` beside the training."""
        question = self.question(signature, quick=quick)
        if question is not None:
            self.ask(signature, question)

    def ask(self, signature: StepSignature, question: Question) -> PlanningProcess:
        """A planner, beside the training."""
        from .planning import PlanningProcess

        process, self._ready = self._ready or PlanningProcess(), None
        process.ask(question.trace, question.hardware, quick=question.quick, policy=question.policy)
        signature.process = process
        return process

    def question(self, signature: StepSignature, *, quick: bool = False) -> Question | None:
        """What a planner is to be asked, for the next plan of ``signature``: by a quick search,
        unless a full one is worth it. ``None``, if it cannot be now."""
        from .planning import Question
        from .traces import trace_of_accesses

        try:
            hardware = self.hardware()
        except HungDisk:
            return None  # what goes to other tiers goes on; to be tried again when it answers
        except PagerError as error:
            signature.refused = f"this machine could not be measured: {error}"
            return None
        if self._host_holds_all():
            hardware = hardware.with_(disk_bytes=0)
        pager = self._pager
        signature.recorded = trace_of_accesses(
            signature.log, signature.seconds(), pager.page_size, str(pager.device),
            pager.budget.frames_for_all,
            fixed=self._fixed(signature),
            step_us=self._step_us if self._host_may_step(signature) else None,
        )  # fmt: skip
        quick = quick or not signature.wants_full_search
        signature.plans += 1
        signature.planned_size, signature.planned_at = signature.size, signature.seen
        signature.hardware = hardware
        signature.left_frames = self._optional.frames(signature.log, int(hardware.device_pages))
        theirs = hardware.device_bytes - signature.left_frames * pager.page_size
        return Question(
            signature.recorded.trace,
            hardware.with_(device_bytes=theirs),
            quick,
            "lp" if self.segments is None else "joint",
        )

    def _host_may_step(self, signature: StepSignature) -> bool:
        """Not on a CPU whose cores all compute already, unless it is asked for."""
        if self.segments is None:
            return False
        idle = torch.get_num_threads() < len(os.sched_getaffinity(0))
        return bool(signature.log.hosted) or idle or not self._pager.backend.host_addressable

    def _step_us(self, nbytes: int, device_us: float) -> float:
        """What the host takes for a step on pages of so many bytes: as measured, once it was at
        work for long enough; before that what a device takes that is made of its cores, or by its
        memory."""
        steps = self._pager.host_steps
        if steps.seconds * 1e6 >= _TELLING_STEPS_US:
            return nbytes * steps.seconds * 1e6 / steps.nbytes
        if self._pager.backend.host_addressable:
            return device_us
        return nbytes / _HOST_BYTES_PER_S * 1e6

    def _fixed(self, signature: StepSignature) -> set[str]:
        """Blocks that cannot run again, or of which that is decided already."""
        calls = {call.block for call in signature.log.calls}
        if self.segments is None or signature.base is not None or signature.log.again:
            return calls
        return calls & self.segments.refused.keys()

    def _host_holds_all(self) -> bool:
        """Nothing needs the disk, so no plan writes there: a weight that is only read would be
        written once more for every plan, and drives wear."""
        space = self._pager.space
        pages = space.persistent_pages + space.peak_transient_pages
        return pages <= self._pager.host.slots.count

    def _poll(self) -> None:
        for signature in self.signatures.all:
            if signature.process is not None and signature.process.done():
                before = signature.compiled
                died = signature.take_plan(only_if_faster=self.only_if_faster)
                self._died = self._died or died
                if before is not None and before is self._in_state is not signature.compiled:
                    self._leave()

    def wait_for_plans(self, timeout: float | None = None) -> None:
        """Until no plan is being made. Without the lock."""
        for signature in list(self.signatures.all):
            if signature.process is not None:
                with suppress(PagerError):  # `take_plan` meets it again
                    signature.process.result(timeout)

    def hardware(self) -> Hardware:
        """This machine as the planner sees it: measured channels, the tiers as they are now."""
        from ..machine.calibration.measure import hardware

        pager = self._pager
        calibration = self._calibration or self.calibrate()
        size = pager.page_size
        machine = hardware(
            calibration,
            device_bytes=pager.budget.frames_for_all * size,
            host_bytes=pager.host.slots.count * size,
            disk_bytes=pager.disk.slots.count * size if pager.disk is not None else 0,
            page_size=size,
        )
        return machine.with_(**self._rates_in_training(machine))

    @property
    def is_calibrated(self) -> bool:
        return self._calibration is not None

    def calibrate(self, *, fresh: bool = False) -> Calibration:
        """Measure the channels, or take what was measured within a week unless it has to be
        ``fresh``."""
        from ..machine.calibration.measure import calibrate

        pager = self._pager
        self.mover.drain()
        found = self._calibration = calibrate(
            backend=pager.backend,
            host=pager.host,
            disk=pager.disk,
            page_size=pager.page_size,
            watch=pager.io_watch,
            hold_back=pager.mover.slots.hold_back,
            fresh=fresh,
        )
        self._size_batches(found)
        return found

    def _rates_in_training(self, machine: Hardware) -> dict[str, float]:
        """Rates that channels had beside the training, where they have moved enough to tell: ops
        and moves share cores and memory, so these are lower than those of an idle machine."""
        size = self._pager.page_size
        return {
            field: min(getattr(machine, field), lane.moved_pages * size / lane.moving_seconds)
            for lane in self.mover.lanes.values()
            if lane.moving_seconds >= _TELLING_SECONDS and (field := _RATES[lane.name])
        }

    def _size_batches(self, measured: Calibration) -> None:
        for name, field in _RATES.items():
            rate = getattr(measured, field) or 0.0
            nbytes = min(_MOST_BATCH_BYTES, int(rate * _BATCH_SECONDS))
            self.mover.batch_pages[name] = max(1, nbytes // self._pager.page_size)

    # -- looking, ending -------------------------------------------------------------------------
    @property
    def mode(self) -> str:
        """ "demand", "recording" (a plan is being made) or "planned"."""
        if self.last_mode == "planned":
            return "planned"
        if any(signature.process is not None for signature in self.signatures.all):
            return "recording"
        return "demand"

    @property
    def current(self) -> StepSignature | None:
        """The latest iteration's kind."""
        return self.signatures.all[-1] if self.signatures.all else None

    def plan(self) -> Plan | None:
        """The latest kind's."""
        if self.log is None:
            self._poll()
        compiled = self.current.compiled if self.current is not None else None
        return compiled.plan if compiled is not None else None

    def pause(self) -> None:
        """Follow no plan for the rest of the iteration: the arena is about to change its size."""
        known, at = self.known, self.recorder.at
        self._leave()
        self._expect(known, at)
        self.mover.drain()

    def make_room(self, frames: int) -> bool:
        """The arena is to have so many frames in the iteration that runs; whether that follows a
        plan, and goes on to."""
        if self.compiled is None:
            return False
        if frames < self._pager.residency.frames:
            self.planned.shrink(frames, self.recorder.at + 1)
        return self.mover.error is None

    def forget_plans(self) -> None:
        """Budgets have changed: plans are made anew."""
        self.pause()
        for signature in self.signatures.all:
            signature.forget_plan()
            signature.again, signature.variant, signature.kept = frozenset(), None, None

    def arena_resized(self) -> None:
        """The border has moved, after new shapes were metered. Plans for more frames than there are
        now are forgotten; the others hold, and are made anew only if that is worth it."""
        self.pause()
        pager = self._pager
        if pager.budget.moved:
            return
        for signature in self.signatures.all:
            signature.arena_has(pager.residency.pool.count * pager.page_size)

    def stop(self) -> None:
        """Cancel what is being planned. Without the lock."""
        for signature in self.signatures.all:
            signature.cancel()
        if self._ready is not None:
            self._ready.cancel()
            self._ready = None
