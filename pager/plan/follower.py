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

import time
import warnings
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

from ...planner.hardware import Hardware
from ...planner.plan import Plan
from ..errors import HungDisk, PagerError, TierFull
from ..memory.space import Extent
from .access_log import AccessLog, Keys, Names, StreamAccess, newborn_key
from .belady import by_next_use
from .compiled_plan import CompiledPlan
from .enter_plan import enter_plan
from .planned import PlannedMoves
from .sequence_trace import RunFacts, make_recorded
from .signatures import Signatures, StepSignature

if TYPE_CHECKING:
    from ..core import Core
    from ..machine.calibration.measure import Calibration
    from ..tensor.workspace import Workspace

_BATCH_SECONDS = 0.008  # of a channel's time: what one transfer moves
_MOST_BATCH_BYTES = 128 << 20
_RECORDED = 2  # iterations before the first plan: what happens once would be taken for work
_AGAIN = 2  # times as many iterations seen, until there is another plan after one turned down
_MEASURED = 3  # iterations that follow a plan before it is judged
_OFF_BY = 0.05
_TELLING_SECONDS = 1.0
_RATES = {
    "host-out": "d2h_bytes_per_s",
    "host-in": "h2d_bytes_per_s",
    "disk-out": "disk_write_bytes_per_s",
    "disk-in": "disk_read_bytes_per_s",
}


class Follower:
    """Of one pager. Methods are called with its lock held."""

    def __init__(self, pager: Core) -> None:
        self._pager = pager
        self.names = Names(pager.space)
        self.signatures = Signatures()
        self.mover = pager.mover
        self.planned = PlannedMoves(pager.residency, pager.mover, self.names)
        self.log: AccessLog | None = None  # of the iteration that runs
        self.compiled: CompiledPlan | None = None  # that it follows
        self.most_plans = 4  # of one kind; each from better times than the one before
        self.only_if_faster = True  # no plan is followed that promises less than paging on demand
        self.departures = 0
        self.planned_iterations = 0
        self.last_mode = "demand"
        self.stall_us_last: float | None = None  # of the last iteration
        self._expected: list[Keys] = []
        self._issued = 0
        self._whole = False  # has followed one plan from its begin
        self._on_demand = False  # has followed no plan at all
        self._has_clock = pager.backend.stamp() is not None  # of the device
        self._stamps = False  # this iteration is timed by it
        self._in_state: CompiledPlan | None = None  # the arena is as this plan left it
        self._births_before = 0
        self._began = 0.0
        self._warned = False  # that a planned move failed
        self._calibration: Calibration | None = None
        pager.space.on_death = self._died

    # -- an iteration ----------------------------------------------------------------------------
    def begin(self) -> None:
        """An iteration begins; it is expected to be of the kind that came here before."""
        pager = self._pager
        pager.residency.collect()
        self._poll()
        self._began = time.perf_counter()
        self.log = AccessLog()
        self._births_before = pager.space.births
        pager.space.clock = 0
        self._issued = 0
        self._whole = False
        signature = self.signatures.expected()
        compiled = signature.compiled if signature is not None else None
        if compiled is None or pager.budget.metering or self.mover.error is not None:
            self._leave()
        elif self._enter(compiled):
            self._whole = True
            self._issue(0)
        self._on_demand = self.compiled is None
        self._stamps = self._on_demand and self._has_clock

    def _enter(self, compiled: CompiledPlan) -> bool:
        """Bring the arena into the state in which ``compiled`` begins, and follow it."""
        residency = self._pager.residency
        if self._in_state is not compiled:
            self.planned.clear()
            self.mover.drain()
            if residency.pinned_pages():
                self._leave()
                return False
            try:
                missing = enter_plan(residency, self.names, compiled)
            except (TierFull, PagerError):
                self._leave()
                return False
            self.planned.births = compiled.births
            self.planned.issue(missing, ())
        self.compiled, self._expected = compiled, compiled.keys
        self._in_state = compiled
        return True

    def pinning(self, runs: Sequence[Extent]) -> None:
        """An access begins."""
        log = self.log
        if log is None:
            return
        self._accessed(log, tuple([self._key_of(run, log) for run in runs]))

    def _key_of(self, run: Extent, log: AccessLog) -> int:
        return run.key or self.names.name(run, log, self._births_before)

    def _accessed(self, log: AccessLog, keys: Keys) -> None:
        if self.compiled is not None:
            position = len(log.keys)
            if position >= len(self._expected) or self._expected[position] != keys:
                self._depart(keys)
        log.began(keys)
        if self._stamps:
            log.stamps.append(self._pager.backend.stamp())
        self._pager.space.clock = len(log.keys)

    def pin(self, runs: Sequence[Extent]) -> None:
        """Bring ``runs`` onto the device and pin them: by the plan, or by a fault."""
        residency = self._pager.residency
        if self.mover.error is not None:
            self._leave()
        if self.compiled is None:
            residency.pin(runs)
            return
        if self._pager.space.dead:
            residency.collect()
        if self.planned.serve(runs):
            return
        with ExitStack() as stack:
            if self.log is not None:
                now = len(self.log.keys) - 1
                stack.enter_context(by_next_use(residency, self._expected, now))
            self.planned.make_windows(runs)
            residency.pin(runs)
        for run in runs:
            residency.touch(run)
        self.planned.faults += 1

    def stream_begins(
        self, runs: Sequence[Extent], write: Sequence[bool], frames: int, space: Workspace
    ) -> StreamAccess | None:
        """An access by itself, until :meth:`stream_ended`: a stream through ``runs`` that fills
        ``frames`` at once. Where a plan is followed it has them free for ``space``, or soon."""
        log = self.log
        if log is None or not self._pager.turns.is_home():
            return None
        keys = [(self._key_of(run, log), written) for run, written in zip(runs, write)]
        self._accessed(log, (self.names.of_stream(keys),))
        access = StreamAccess(len(log.keys) - 1, frames)
        log.streams.append(access)
        if self.compiled is None:
            return access
        self._pager.residency.workspaces.append(space)
        return access

    def stream_ended(self, access: StreamAccess | None, space: Workspace) -> None:
        """What was kept for it is free."""
        workspaces = self._pager.residency.workspaces
        if space in workspaces:
            workspaces.remove(space)
        if access is not None and self.log is not None and access in self.log.streams:
            access.end = max(access.end, len(self.log.keys))
            self.unpinned()

    def unpinned(self) -> None:
        """An access has ended: what the plan queues now is queued."""
        if self.compiled is None or self.log is None:
            return
        if self._pager.space.dead:
            self._pager.residency.collect()
        self._issue(len(self.log.keys))

    def _issue(self, upto: int) -> None:
        compiled, log = self.compiled, self.log
        if compiled is None or log is None:
            return
        first = self._issued
        self._issued = max(first, upto + 1)
        actions = [action for some in compiled.actions[first : upto + 1] for action in some]
        if actions or self.planned.waiting:
            self.planned.issue(actions, log.newborn)

    def stalled(self, seconds: float, *, own: bool = False) -> None:
        """The access that began last has waited; ``own``: a stream, for pages of its slabs."""
        if self.log is not None and self.log.keys and self._pager.turns.is_home():
            where = len(self.log.keys) - 1
            for stalls in (self.log.stalls, self.log.own_stalls)[: 1 + own]:
                stalls[where] = stalls.get(where, 0.0) + seconds
            if self._stamps and seconds and not own:
                self.log.ready[where] = self._pager.backend.stamp()

    def wrote(self, run: Extent) -> None:
        if self.log is not None and self._pager.turns.is_home():
            self.log.writes.append((len(self.log.keys) - 1, run.key))

    def _died(self, run: Extent, clock: int) -> None:
        if self.log is not None and run.key < 0:
            self.log.deaths.append((clock, run.key))

    def _depart(self, keys: Keys) -> None:
        """The plan does not know this access. Another one may, that began the same way."""
        assert self.log is not None
        self.departures += 1
        self._leave()
        other = self.signatures.with_prefix([*self.log.keys, keys])
        if other is None or other.compiled is None:
            return
        self.compiled, self._expected = other.compiled, other.keys
        self.planned.births = other.compiled.births
        self._issued = len(self.log.keys) + 1

    def _leave(self) -> None:
        """Follow no plan; pages are faulted in."""
        if self.compiled is not None or self._in_state is not None:
            self.planned.clear()
        self.compiled = self._in_state = None
        self._whole = False
        self.planned.births = {}

    def end(self, *, ok: bool) -> None:
        """The iteration is over; ``ok``: it ended by itself."""
        log = self.log
        if log is None:
            return
        pager = self._pager
        pager.residency.collect()
        log.ended = time.perf_counter()
        if log.stamps:
            log.stamps.append(pager.backend.stamp())
        self.log = None
        pager.space.clock = 0
        finished = self.compiled is not None and len(log.keys) == len(self._expected)
        self.stall_us_last = sum(log.stalls.values()) * 1e6
        if not ok or (self.compiled is not None and not finished):
            self._leave()
        self.names.settle(log)
        self.last_mode = "planned" if self.compiled is not None else "demand"
        if ok and not pager.budget.metering and not pager.fits:
            self._learn(log, followed=finished and self._whole)
        self.compiled = None
        self.names.forget_dead()

    def warn(self) -> None:
        """Tell the user, once, that plans are not followed any more. Without the lock, in the
        training thread, where everything is as it should be: a warning may be raised."""
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

    def _learn(self, log: AccessLog, *, followed: bool) -> None:
        log.take_times(self._pager.backend.elapsed)
        signature = self.signatures.find(log)
        if signature is None:
            signature = self.signatures.add(log, self._facts(log))
            log.newborn = []
        else:
            signature.seen += 1
            if self._stamps or not self._has_clock:
                signature.samples.append(log.seconds())
        self.signatures.came(signature)
        if followed:
            self.planned_iterations += 1
            signature.measured_us.append((log.ended - self._began) * 1e6)
        elif self._on_demand:
            signature.demand_stall_us.append(sum(log.stalls_of_plans().values()) * 1e6)
        self._plan(signature)

    # -- planning --------------------------------------------------------------------------------
    def _plan(self, signature: StepSignature) -> None:
        """Start to plan ``signature`` beside the training if that promises something."""
        if signature.process is not None or signature.refused is not None:
            return
        if self.mover.error is not None or signature.plans >= self.most_plans or not signature.keys:
            return
        if signature.compiled is None:
            if signature.seen < max(_RECORDED, signature.again_at):
                return
        elif not self._is_off(signature):
            return
        from .planning import PlanningProcess

        try:
            hardware = self.hardware()
        except HungDisk:
            return  # what goes to other tiers goes on; to be tried again when it answers
        except PagerError as error:
            signature.refused = f"this machine could not be measured: {error}"
            return
        if self._host_holds_all():
            hardware = hardware.with_(disk_bytes=0)
        size, device = self._pager.page_size, str(self._pager.device)
        signature.recorded = make_recorded(
            signature.log,
            signature.facts,
            size,
            signature.seconds(),
            device,
            frames=self._pager.residency.pool.count,
        )
        signature.plans += 1
        signature.hardware = hardware
        signature.process = PlanningProcess(
            signature.recorded.trace, hardware, quick=signature.plans == 1
        )

    def _host_holds_all(self) -> bool:
        """Nothing needs the disk, so no plan writes there: a weight that is only read would be
        written once more for every plan, and drives wear."""
        space = self._pager.space
        pages = space.persistent_pages + space.peak_transient_pages
        return pages <= self._pager.host.slots.count

    def _is_off(self, signature: StepSignature) -> bool:
        """Whether a new plan is worth its time: the first one is a quick one, and times change."""
        if (
            len(signature.measured_us) < _MEASURED
            or signature.compiled is None
            or signature.measured is None
        ):
            return False
        if signature.plans == 1:
            return True
        return (
            abs(signature.measured - signature.compiled.predicted_us)
            > _OFF_BY * signature.compiled.predicted_us
        )

    def _poll(self) -> None:
        for signature in self.signatures.all:
            if signature.process is not None and signature.process.done():
                self._install(signature)

    def _install(self, signature: StepSignature) -> None:
        from .planning import PlanRefused

        process, recorded = signature.process, signature.recorded
        if process is None or recorded is None:
            return
        signature.process = None
        try:
            planned = process.result()
        except PlanRefused as refusal:
            signature.refused = str(refusal)
            return
        except PagerError as error:
            signature.refused = f"the planner ended with an error: {error}"
            return
        signature.measured_us.clear()
        compiled = CompiledPlan(recorded, planned.plan, planned.layout, signature.keys)
        no_better = self._no_better(signature, compiled)
        if no_better is not None:  # the plan that is followed, if there is one, may do better
            signature.turned_down = no_better if signature.compiled is None else None
            signature.again_at = _AGAIN * signature.seen
            return
        if signature.compiled is not None and signature.compiled is self._in_state:
            self._leave()
        signature.compiled, signature.turned_down = compiled, None

    def _no_better(self, signature: StepSignature, compiled: CompiledPlan) -> str | None:
        """Why ``compiled`` should not be followed: on demand an iteration takes less."""
        promised, measured = signature.promised_us(compiled), signature.on_demand_us
        if not self.only_if_faster or measured is None or promised <= measured:
            return None
        return (
            f"the one that was made promises {promised / 1e3:.1f} ms an iteration, and bringing "
            f"pages in when an op needs them takes {measured / 1e3:.1f} ms"
        )

    def wait_for_plans(self, timeout: float | None = None) -> None:
        """Until no plan is being made. Without the lock."""
        from .planning import PlanRefused

        for signature in list(self.signatures.all):
            if signature.process is not None:
                with suppress(PlanRefused, PagerError):  # `_install` meets them again
                    signature.process.result(timeout)

    def hardware(self) -> Hardware:
        """This machine as the planner sees it: measured channels, the tiers as they are now."""
        from ..machine.calibration.measure import calibrate, hardware

        pager = self._pager
        if self._calibration is None:
            self.mover.drain()
            self._calibration = calibrate(
                backend=pager.backend,
                host=pager.host,
                disk=pager.disk,
                page_size=pager.page_size,
                watch=pager.io_watch,
                hold_back=pager.migration.hold_back,
            )
            self._size_batches(self._calibration)
        size = pager.page_size
        machine = hardware(
            self._calibration,
            device_bytes=pager.residency.pool.count * size,
            host_bytes=pager.host.slots.count * size,
            disk_bytes=pager.disk.slots.count * size if pager.disk is not None else 0,
            page_size=size,
        )
        return machine.with_(**self._rates_in_training(machine))

    def _rates_in_training(self, machine: Hardware) -> dict[str, float]:
        """Rates that channels had beside the training, where they have moved enough to tell: ops
        and moves share cores and memory, so these are lower than those of an idle machine."""
        rates = {}
        for lane in self.mover.lanes.values():
            nbytes = lane.moved_pages * self._pager.page_size
            if lane.moving_seconds < _TELLING_SECONDS:
                continue
            field = _RATES[lane.name]
            seen = nbytes / lane.moving_seconds
            rates[field] = min(getattr(machine, field), seen)
        return rates

    def _size_batches(self, measured: Calibration) -> None:
        for name, field in _RATES.items():
            rate = getattr(measured, field) or 0.0
            nbytes = min(_MOST_BATCH_BYTES, int(rate * _BATCH_SECONDS))
            self.mover.batch_pages[name] = max(1, nbytes // self._pager.page_size)

    def _facts(self, log: AccessLog) -> dict[int, RunFacts]:
        """Of every run that ``log`` may name."""
        facts = {key: RunFacts(run.count, run.kind) for key, run in self.names.runs.items()}
        for index, run in enumerate(log.newborn):
            facts[newborn_key(index, run.count)] = RunFacts(run.count, run.kind)
        return facts

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
        signature = self.current
        return (
            signature.compiled.plan
            if signature is not None and signature.compiled is not None
            else None
        )

    def pause(self) -> None:
        """Follow nothing for the rest of the iteration: the arena is about to change its size."""
        self._leave()
        self.mover.drain()

    def forget_plans(self) -> None:
        """Budgets have changed: plans are made anew."""
        self.pause()
        for signature in self.signatures.all:
            self._forget(signature)

    def arena_resized(self) -> None:
        """The border has moved, after new shapes were metered. Plans for more frames than there are
        now are forgotten; the others hold, and are made anew only if that is worth it."""
        self.pause()
        pager = self._pager
        nbytes = pager.residency.pool.count * pager.page_size
        for signature in self.signatures.all:
            if signature.hardware is None or signature.hardware.device_bytes != nbytes:
                signature.demand_stall_us.clear()
                if signature.hardware is None or signature.hardware.device_bytes > nbytes:
                    self._forget(signature)
                elif signature.process is None:
                    signature.plans = min(signature.plans, 1)
                    signature.refused = signature.turned_down = None

    def _forget(self, signature: StepSignature) -> None:
        if signature.process is not None:
            signature.process.cancel()
        signature.process = signature.compiled = signature.refused = signature.turned_down = None
        signature.plans = signature.again_at = 0
        signature.measured_us.clear()
        signature.demand_stall_us.clear()

    def stop(self) -> None:
        """Cancel what is being planned. Without the lock."""
        for signature in self.signatures.all:
            if signature.process is not None:
                signature.process.cancel()
                signature.process = None
