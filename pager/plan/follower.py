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
from ..memory.space import PageRun
from .access_log import AccessLog, Keys, Names, StreamAccess, newborn_key
from .guide import Guide
from .kinds import Kind, Kinds
from .next_use import by_next_use
from .planned import PlannedMoves
from .reconcile import reconcile
from .sequence_trace import RunFacts, make_recorded

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
        self.kinds = Kinds()
        self.mover = pager.mover
        self.planned = PlannedMoves(pager.residency, pager.mover, self.names)
        self.log: AccessLog | None = None  # of the iteration that runs
        self.guide: Guide | None = None  # that it follows
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
        self._in_state: Guide | None = None  # the arena is as this plan left it
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
        kind = self.kinds.expected()
        guide = kind.guide if kind is not None else None
        if guide is None or pager.budget.metering or self.mover.error is not None:
            self._leave()
        elif self._enter(guide):
            self._whole = True
            self._issue(0)
        self._on_demand = self.guide is None
        self._stamps = self._on_demand and self._has_clock

    def _enter(self, guide: Guide) -> bool:
        """Bring the arena into the state in which ``guide`` begins, and follow it."""
        residency = self._pager.residency
        if self._in_state is not guide:
            self.planned.clear()
            self.mover.drain()
            if residency.pinned_pages():
                self._leave()
                return False
            try:
                missing = reconcile(residency, self.names, guide)
            except (TierFull, PagerError):
                self._leave()
                return False
            self.planned.births = guide.births
            self.planned.issue(missing, ())
        self.guide, self._expected = guide, guide.keys
        self._in_state = guide
        return True

    def pinning(self, runs: Sequence[PageRun]) -> None:
        """An access begins."""
        log = self.log
        if log is None:
            return
        self._accessed(log, tuple([self._key_of(run, log) for run in runs]))

    def _key_of(self, run: PageRun, log: AccessLog) -> int:
        return run.key or self.names.name(run, log, self._births_before)

    def _accessed(self, log: AccessLog, keys: Keys) -> None:
        if self.guide is not None:
            position = len(log.keys)
            if position >= len(self._expected) or self._expected[position] != keys:
                self._depart(keys)
        log.began(keys)
        if self._stamps:
            log.stamps.append(self._pager.backend.stamp())
        self._pager.space.clock = len(log.keys)

    def pin(self, runs: Sequence[PageRun]) -> None:
        """Bring ``runs`` onto the device and pin them: by the plan, or by a fault."""
        residency = self._pager.residency
        if self.mover.error is not None:
            self._leave()
        if self.guide is None:
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
        self, runs: Sequence[PageRun], write: Sequence[bool], frames: int, space: Workspace
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
        if self.guide is None:
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
        if self.guide is None or self.log is None:
            return
        if self._pager.space.dead:
            self._pager.residency.collect()
        self._issue(len(self.log.keys))

    def _issue(self, upto: int) -> None:
        guide, log = self.guide, self.log
        if guide is None or log is None:
            return
        first = self._issued
        self._issued = max(first, upto + 1)
        actions = [action for some in guide.actions[first : upto + 1] for action in some]
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

    def wrote(self, run: PageRun) -> None:
        if self.log is not None and self._pager.turns.is_home():
            self.log.writes.append((len(self.log.keys) - 1, run.key))

    def _died(self, run: PageRun, clock: int) -> None:
        if self.log is not None and run.key < 0:
            self.log.deaths.append((clock, run.key))

    def _depart(self, keys: Keys) -> None:
        """The plan does not know this access. Another one may, that began the same way."""
        assert self.log is not None
        self.departures += 1
        self._leave()
        other = self.kinds.with_prefix([*self.log.keys, keys])
        if other is None or other.guide is None:
            return
        self.guide, self._expected = other.guide, other.keys
        self.planned.births = other.guide.births
        self._issued = len(self.log.keys) + 1

    def _leave(self) -> None:
        """Follow no plan; pages are faulted in."""
        if self.guide is not None or self._in_state is not None:
            self.planned.clear()
        self.guide = self._in_state = None
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
        finished = self.guide is not None and len(log.keys) == len(self._expected)
        self.stall_us_last = sum(log.stalls.values()) * 1e6
        if not ok or (self.guide is not None and not finished):
            self._leave()
        self.names.settle(log)
        self.last_mode = "planned" if self.guide is not None else "demand"
        if ok and not pager.budget.metering and not pager.fits:
            self._learn(log, followed=finished and self._whole)
        self.guide = None
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
        kind = self.kinds.find(log)
        if kind is None:
            kind = self.kinds.add(log, self._facts(log))
            log.newborn = []
        else:
            kind.seen += 1
            if self._stamps or not self._has_clock:
                kind.samples.append(log.seconds())
        self.kinds.came(kind)
        if followed:
            self.planned_iterations += 1
            kind.measured_us.append((log.ended - self._began) * 1e6)
        elif self._on_demand:
            kind.demand_stall_us.append(sum(log.stalls_of_plans().values()) * 1e6)
        self._plan(kind)

    # -- planning --------------------------------------------------------------------------------
    def _plan(self, kind: Kind) -> None:
        """Start to plan ``kind`` beside the training if that promises something."""
        if kind.process is not None or kind.refused is not None:
            return
        if self.mover.error is not None or kind.plans >= self.most_plans or not kind.keys:
            return
        if kind.guide is None:
            if kind.seen < max(_RECORDED, kind.again_at):
                return
        elif not self._is_off(kind):
            return
        from .planning import PlanningProcess

        try:
            hardware = self.hardware()
        except HungDisk:
            return  # what goes to other tiers goes on; to be tried again when it answers
        except PagerError as error:
            kind.refused = f"this machine could not be measured: {error}"
            return
        if self._host_holds_all():
            hardware = hardware.with_(disk_bytes=0)
        size, device = self._pager.page_size, str(self._pager.device)
        kind.recorded = make_recorded(
            kind.log,
            kind.facts,
            size,
            kind.seconds(),
            device,
            frames=self._pager.residency.pool.count,
        )
        kind.plans += 1
        kind.hardware = hardware
        kind.process = PlanningProcess(kind.recorded.trace, hardware, quick=kind.plans == 1)

    def _host_holds_all(self) -> bool:
        """Nothing needs the disk, so no plan writes there: a weight that is only read would be
        written once more for every plan, and drives wear."""
        space = self._pager.space
        pages = space.persistent_pages + space.peak_transient_pages
        return pages <= self._pager.host.slots.count

    def _is_off(self, kind: Kind) -> bool:
        """Whether a new plan is worth its time: the first one is a quick one, and times change."""
        if len(kind.measured_us) < _MEASURED or kind.guide is None or kind.measured is None:
            return False
        if kind.plans == 1:
            return True
        return abs(kind.measured - kind.guide.predicted_us) > _OFF_BY * kind.guide.predicted_us

    def _poll(self) -> None:
        for kind in self.kinds.all:
            if kind.process is not None and kind.process.done():
                self._install(kind)

    def _install(self, kind: Kind) -> None:
        from .planning import PlanRefused

        process, recorded = kind.process, kind.recorded
        if process is None or recorded is None:
            return
        kind.process = None
        try:
            planned = process.result()
        except PlanRefused as refusal:
            kind.refused = str(refusal)
            return
        except PagerError as error:
            kind.refused = f"the planner ended with an error: {error}"
            return
        kind.measured_us.clear()
        guide = Guide(recorded, planned.plan, planned.layout, kind.keys)
        no_better = self._no_better(kind, guide)
        if no_better is not None:  # the plan that is followed, if there is one, may do better
            kind.turned_down = no_better if kind.guide is None else None
            kind.again_at = _AGAIN * kind.seen
            return
        if kind.guide is not None and kind.guide is self._in_state:
            self._leave()
        kind.guide, kind.turned_down = guide, None

    def _no_better(self, kind: Kind, guide: Guide) -> str | None:
        """Why ``guide`` should not be followed: on demand an iteration takes less."""
        promised, measured = kind.promised_us(guide), kind.on_demand_us
        if not self.only_if_faster or measured is None or promised <= measured:
            return None
        return (
            f"the one that was made promises {promised / 1e3:.1f} ms an iteration, and bringing "
            f"pages in when an op needs them takes {measured / 1e3:.1f} ms"
        )

    def wait_for_plans(self, timeout: float | None = None) -> None:
        """Until no plan is being made. Without the lock."""
        from .planning import PlanRefused

        for kind in list(self.kinds.all):
            if kind.process is not None:
                with suppress(PlanRefused, PagerError):  # `_install` meets them again
                    kind.process.result(timeout)

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
        if any(kind.process is not None for kind in self.kinds.all):
            return "recording"
        return "demand"

    @property
    def current(self) -> Kind | None:
        """The latest iteration's kind."""
        return self.kinds.all[-1] if self.kinds.all else None

    def plan(self) -> Plan | None:
        """The latest kind's."""
        if self.log is None:
            self._poll()
        kind = self.current
        return kind.guide.plan if kind is not None and kind.guide is not None else None

    def pause(self) -> None:
        """Follow nothing for the rest of the iteration: the arena is about to change its size."""
        self._leave()
        self.mover.drain()

    def forget_plans(self) -> None:
        """Budgets have changed: plans are made anew."""
        self.pause()
        for kind in self.kinds.all:
            self._forget(kind)

    def arena_resized(self) -> None:
        """The border has moved, after new shapes were metered. Plans for more frames than there are
        now are forgotten; the others hold, and are made anew only if that is worth it."""
        self.pause()
        pager = self._pager
        nbytes = pager.residency.pool.count * pager.page_size
        for kind in self.kinds.all:
            if kind.hardware is None or kind.hardware.device_bytes != nbytes:
                kind.demand_stall_us.clear()
                if kind.hardware is None or kind.hardware.device_bytes > nbytes:
                    self._forget(kind)
                elif kind.process is None:
                    kind.plans = min(kind.plans, 1)
                    kind.refused = kind.turned_down = None

    def _forget(self, kind: Kind) -> None:
        if kind.process is not None:
            kind.process.cancel()
        kind.process = kind.guide = kind.refused = kind.turned_down = None
        kind.plans = kind.again_at = 0
        kind.measured_us.clear()
        kind.demand_stall_us.clear()

    def stop(self) -> None:
        """Cancel what is being planned. Without the lock."""
        for kind in self.kinds.all:
            if kind.process is not None:
                kind.process.cancel()
                kind.process = None
