"""Layouts: no two pages have a frame at the same time, as an executor carries out the plan, page by
page. And the simulator's log of transfers, as the validator, which shares no code with it, replays
the plan: its ledger reports each page that takes or gives back a frame.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import pytest

from tensorpager.planner.errors import InfeasibleBudget, PolicyRefusal
from tensorpager.planner.hardware import Hardware
from tensorpager.planner.lp.policy import plan as lp_plan
from tensorpager.planner.places.layout import (
    Layout,
    frames_of,
    layout_from_json,
    layout_to_json,
    place,
)
from tensorpager.planner.places.spells import Order, spells_in_order
from tensorpager.planner.places.stays import find_stays
from tensorpager.planner.plan import Move, Plan, StartRun
from tensorpager.planner.simulator import simulate
from tensorpager.planner.trace import READ, WRITE, Trace
from tensorpager.planner.validator import machine as validator
from tensorpager.planner.validator.ledger import ARRIVING, HERE, NOWHERE, Ledger
from tensorpager.planner.validator.link import TICKS_PER_US

from .random_plans import PAGE, Access, case_of, paged_trace, plan_of, random_hardware, random_trace

ITERATIONS = 7
STEADY = 4  # iterations that may pass before frames must be right


def lay_out(trace: Trace, hardware: Hardware, plan: Plan) -> Layout:
    """Base frames for ``plan`` on all of the device."""
    return place(trace, plan, frames_of(trace, hardware))


@dataclass(frozen=True)
class Event:
    iteration: int
    us: float  # since the run began
    what: str  # "take", "give"
    why: str  # "start", "birth", "in", "out", "valid", "death"
    page: int
    move: int = -1


class Recorder(Ledger):
    """A ledger that says when pages take frames and give them back. A page that still leaves for
    one tier while it comes back from the other has two."""

    machine: Any = None

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.events: list[Event] = []
        self.arrived_in: list[Event] = []

    def _event(self, what: str, why: str, page: int, move: int = -1) -> Event:
        machine = self.machine
        iteration = len(machine.durations) if machine else 0
        us = machine.now / TICKS_PER_US if machine else 0.0
        return Event(iteration, us, what, why, page, move)

    def _note(self, what: str, why: str, page: int, move: int = -1) -> None:
        self.events.append(self._event(what, why, page, move))

    def place_here(self, page: int) -> None:
        super().place_here(page)
        self._note("take", "start", page)

    def give_birth(self, begin: int, end: int) -> None:
        super().give_birth(begin, end)
        for page in range(begin, end):
            self._note("take", "birth", page)

    def begin_in(self, page: int, tier: int) -> None:
        super().begin_in(page, tier)
        self._note("take", "in", page, self.machine.queues[tier, "in"].jobs[0].move)

    def end_in(self, page: int) -> None:
        super().end_in(page)
        self.arrived_in.append(self._event("arrive", "in", page))

    def queue_out(self, page: int, tier: int) -> bool:
        transferred = super().queue_out(page, tier)
        if not transferred:
            self._note("give", "valid", page)
        return transferred

    def end_out(self, page: int, tier: int) -> None:
        super().end_out(page, tier)
        self._note("give", "out", page)

    def bury(self, begin: int, end: int) -> None:
        for page in range(begin, end):
            here = self.place[page] in (HERE, ARRIVING)
            for _ in range(here + (self.leaving_to[page] != NOWHERE)):
                self._note("give", "death", page)
        super().bury(begin, end)


def replay(trace: Trace, hardware: Hardware, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The validator's machine after ``ITERATIONS``, or ``None`` if its iterations do not repeat."""
    with monkeypatch.context() as patch:
        patch.setattr(validator, "Ledger", Recorder)
        patch.setattr(validator, "MIN_ITERATIONS", ITERATIONS)
        patch.setattr(validator, "MAX_ITERATIONS", ITERATIONS)
        machine = validator._Machine(trace, hardware, plan)
        machine.pages.machine = machine
        machine.run()
    steady = machine.durations[STEADY - 1 :]
    return machine if max(steady) - min(steady) < 1e-6 else None


def total_pages(trace: Trace) -> int:
    return int(trace.pages(PAGE).sum())


def planned(count: int) -> Iterator[tuple[Trace, Hardware, Plan]]:
    """Random traces and machines for which there is a plan."""
    for seed in range(count):
        rng = Random(seed)
        trace = random_trace(rng, zero_durations=seed % 3 == 0)
        hardware = random_hardware(rng, trace)
        try:
            plan = lp_plan(trace, hardware, quick=True)
        except (InfeasibleBudget, PolicyRefusal):
            continue
        yield trace, hardware, plan


# --- in the order of the program -----------------------------------------------------------------


class Executor:
    """Carries out a plan page by page as the runtime does, and puts pages where a layout says."""

    def __init__(self, trace: Trace, plan: Plan, layout: Layout) -> None:
        self.trace, self.plan, self.layout = trace, plan, layout
        self.pages = trace.pages(PAGE).tolist()
        away = {
            (run.tensor, page)
            for run in plan.start
            for page in range(run.first_page, run.first_page + run.page_count)
        }
        self.frame: dict[tuple[int, int], int] = {}
        for tensor, number in enumerate(trace.tensor_ids.tolist()):
            if trace.tensor_persistent[tensor]:
                for page in range(self.pages[tensor]):
                    if (number, page) not in away:
                        self.frame[number, page] = layout.start[number] + page
        self.living = {n for n, p in zip(trace.tensor_ids.tolist(), trace.tensor_persistent) if p}
        self.queues: dict[str, list[int]] = {"host": [], "disk": []}
        self.taken = self.shifted = 0

    def iteration(self) -> None:
        trace = self.trace
        numbers = trace.tensor_ids.tolist()
        made = [t for t in range(trace.tensors) if not trace.tensor_persistent[t]]
        for op in range(trace.ops + 1):
            for index, move in enumerate(self.plan.moves):
                if move.issue_op == op and move.action == "out":
                    for page in range(move.first_page, move.first_page + move.page_count):
                        self.frame.pop((move.tensor, page), None)
                elif move.issue_op == op and move.action == "in":
                    self.queues[move.tier].append(index)
            for at, number, base in self.layout.shifts:
                if at == op:
                    there = [page for owner, page in self.frame if owner == number]
                    self.frame |= {(number, page): base + page for page in there}
                    self.shifted += len(there)
            self.bring()
            for tensor in made:
                if min(int(trace.last_op[tensor]) + 4, trace.ops) == op:
                    self.living.discard(numbers[tensor])
                    for page in range(self.pages[tensor]):
                        self.frame.pop((numbers[tensor], page), None)
            self.bring()
            for tensor in made:
                if int(trace.first_op[tensor]) == op < trace.ops:
                    self.living.add(numbers[tensor])
                    for page in range(self.pages[tensor]):
                        self.put(numbers[tensor], page, self.layout.births[numbers[tensor]])
            frames = list(self.frame.values())
            assert len(set(frames)) == len(frames), "two pages in one frame"
            assert all(0 <= frame < self.layout.frames for frame in frames)

    def bring(self) -> None:
        for queue in self.queues.values():
            while queue:
                move = self.plan.moves[queue[0]]
                span = range(move.first_page, move.first_page + move.page_count)
                wanted = [p for p in span if (move.tensor, p) not in self.frame]
                if move.tensor not in self.living:
                    wanted = []
                if len(self.frame) + len(wanted) > self.layout.frames:
                    break
                for page in wanted:
                    self.put(move.tensor, page, self.layout.ins[queue[0]])
                queue.pop(0)

    def put(self, tensor: int, page: int, base: int) -> None:
        self.frame[tensor, page] = base + page
        self.taken += 1


def comes_as_often_as_it_goes(trace: Trace, plan: Plan, frames: int) -> bool:
    """Also where frames are short for a moment: what an op uses is there, so that nothing comes an
    iteration later each time."""
    count = trace.pages(PAGE)
    order = Order(trace, plan, frames, np.cumsum(count) - count, count)
    for _ in range(6):
        order.run()
    page, _, change, _ = order.events()
    return not np.bincount(page, change, 1).any()


def carried_out(plans: Iterable[tuple[Trace, Hardware, Plan]], spare: bool = True) -> Counter[str]:
    """Each page that comes finds its frame free, in each iteration, where all have a place."""
    seen: Counter[str] = Counter()
    for trace, hardware, plan in plans:
        assert comes_as_often_as_it_goes(trace, plan, frames_of(trace, hardware))
        # Room for what came earlier than in the simulated order, and for what has just died.
        frames = frames_of(trace, hardware) + spare * total_pages(trace)
        layout = place(trace, plan, frames)
        if layout.unplaced_pages or not plan.moves:
            continue
        executor = Executor(trace, plan, layout)
        for _ in range(4):
            executor.iteration()
        seen["cases"] += 1
        seen["taken"] += executor.taken
        seen["shifted"] += executor.shifted
    return seen


def test_in_the_order_of_the_program() -> None:
    seen = carried_out(planned(400))
    assert seen["cases"] > 30
    assert seen["taken"] > 1000


def test_everything_is_placed_where_there_is_room() -> None:
    """Frames for each page of each tensor are enough for any plan."""
    for seed in range(150):
        case = case_of(seed)
        if simulate(case.trace, case.hardware, case.plan).feasible:
            layout = place(case.trace, case.plan, 4 * total_pages(case.trace))
            assert layout.unplaced_pages == 0


def check_frames(trace: Trace, plan: Plan, layout: Layout) -> None:
    """No frame has two pages at any time, and what is on the device changes its base only where
    the layout shifts it."""
    spells, count = spells_in_order(trace, plan, layout.frames), trace.pages(PAGE)
    numbers = trace.tensor_ids.tolist()
    owner = np.repeat(np.arange(trace.tensors), count)
    inside = np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)
    base = {numbers.index(number): at for number, at in layout.start.items()}
    for tick in range(2 * spells.ticks):
        at, time = tick % spells.ticks, spells.times[tick % spells.ticks]
        held = (spells.begin <= at) & (spells.end > at)
        held |= (spells.begin <= at + spells.ticks) & (spells.end > at + spells.ticks)
        pages = spells.page[held]
        there = set(owner[pages].tolist())
        before = spells.times[at - 1] if at else -1.0
        base |= {numbers.index(n): to for op, n, to in layout.shifts if before < op <= time}
        for tensor in np.flatnonzero(~trace.tensor_persistent).tolist():
            if trace.first_op[tensor] + 0.2 == time:
                base[tensor] = layout.births[numbers[tensor]]
        for move, (first, _) in spells.ins.items():
            tensor = numbers.index(plan.moves[move].tensor)
            if first == at:
                own = pages[owner[pages] == tensor]
                began = spells.page[(spells.begin % spells.ticks == at) & held]
                assert base.get(tensor) == layout.ins[move] or set(own) <= set(began)
                base[tensor] = layout.ins[move]
        frames = [base[int(owner[page])] + int(inside[page]) for page in pages]
        assert len(set(frames)) == len(frames)
        assert all(0 <= frame < layout.frames for frame in frames)
        assert there <= base.keys()


def test_what_has_no_place_as_long_as_it_lasts_is_shifted() -> None:
    seen: Counter[str] = Counter()
    for trace, hardware, plan in planned(200):
        layout = place(trace, plan, frames_of(trace, hardware))
        if layout.unplaced_pages:
            seen["unplaced"] += 1
            continue
        check_frames(trace, plan, layout)
        seen["placed"] += 1
        seen["shifted"] += bool(layout.shifts)
    assert seen["placed"] > 50
    assert seen["shifted"] > 5
    assert seen["unplaced"] < seen["placed"] / 4


def test_slots_of_several_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where time is too fine for the grid, pages hold their frames a little longer, never less."""
    monkeypatch.setattr("tensorpager.planner.places.layout.MIN_SLOTS", 3)
    monkeypatch.setattr("tensorpager.planner.places.layout.MAX_SLOTS", 3)
    assert carried_out(planned(200))["cases"] > 20


# --- by hand -------------------------------------------------------------------------------------

LINK = Hardware(4 * PAGE, 10**6, 0, 1e8, 1e8, page_size=PAGE)  # 10 µs a page


def holes() -> tuple[Trace, Plan]:
    """A persistent tensor of 4 pages whose first two are away while one of 2 lives in their
    frames: 4 frames are enough, and all are taken at any time."""
    trace = paged_trace(
        [(4, True), (2, False)],
        [50.0, 50.0, 50.0],
        [[Access(0, 0, 4, READ)], [Access(1, 0, 2, WRITE)], [Access(0, 2, 4, READ)]],
    )
    moves = [Move(3, 0, 2, "host", "out", 1), Move(3, 0, 2, "host", "in", 2)]
    return trace, plan_of(LINK, moves, [])


def test_frames_of_absent_pages_are_for_others() -> None:
    trace, plan = holes()
    layout = lay_out(trace, LINK, plan)
    assert layout == Layout(4, {3: 0}, {13: 0}, {1: 0}, 0)
    assert carried_out([(trace, LINK, plan)], spare=False)["cases"] == 1


def test_a_stay_around_the_end_of_the_iteration() -> None:
    """In from op 2 on, out after op 0: a base for the start, and the same one for the move in."""
    trace = paged_trace(
        [(3, True), (4, False)],
        [50.0, 50.0, 50.0, 50.0],
        [[Access(0, 0, 3, READ)], [Access(1, 0, 4, WRITE)], [], [Access(0, 0, 3, READ)]],
    )
    moves = [Move(3, 0, 3, "host", "out", 1), Move(3, 0, 3, "host", "in", 2)]
    plan = plan_of(LINK, moves, [])
    layout = lay_out(trace, LINK, plan)
    assert layout.unplaced_pages == 0
    assert layout.births == {13: 0}
    assert layout.start == {3: layout.ins[1]}
    assert carried_out([(trace, LINK, plan)], spare=False)["cases"] == 1


def test_a_move_in_has_one_base() -> None:
    """Its first page has come and gone before there is a frame for its second."""
    trace = paged_trace(
        [(2, False), (2, True)],
        [50.0] * 5,
        [[Access(0, 0, 2, WRITE)], [], [Access(0, 0, 2, READ)], [Access(1, 1, 2, READ)], []],
    )
    moves = [
        Move(13, 0, 2, "host", "in", 1),
        Move(13, 0, 1, "host", "out", 2),
        Move(13, 1, 1, "host", "out", 4),
    ]
    plan = plan_of(LINK, moves, [StartRun(13, 0, 2, "host")])
    stays = find_stays(trace, plan, spells_in_order(trace, plan, 3), 100)
    assert sorted(trace.tensor_ids[stays.tensor].tolist()) == [3, 13]
    assert stays.of_in.keys() == {0}


def test_what_finds_no_room_is_counted() -> None:
    """Three frames are too few for what lives and what has just died; five hold all pages."""
    trace = paged_trace(
        [(1, False), (1, True), (1, False), (2, False)],
        [50.0] * 4,
        [
            [Access(0, 0, 1, WRITE), Access(1, 0, 1, READ), Access(2, 0, 1, WRITE)],
            [Access(0, 0, 1, READ)],
            [Access(3, 0, 2, WRITE)],
            [Access(2, 0, 1, READ), Access(3, 0, 2, READ)],
        ],
    )
    layout = place(trace, plan_of(LINK, [], []), 3)
    assert layout.unplaced_pages > 0
    roomy = place(trace, plan_of(LINK, [], []), 5)
    assert roomy.unplaced_pages == 0


def test_an_empty_trace() -> None:
    layout = lay_out(paged_trace([], [], []), LINK, plan_of(LINK, [], []))
    assert layout == Layout(4, {}, {}, {}, 0)


def test_nothing_moves() -> None:
    """Persistent tensors that are all there and nothing else: places for all of them."""
    trace = paged_trace(
        [(2, True), (1, True)], [5.0], [[Access(0, 0, 2, READ), Access(1, 0, 1, READ)]]
    )
    layout = lay_out(trace, LINK.with_(device_bytes=3 * PAGE), plan_of(LINK, [], []))
    assert layout == Layout(3, {3: 0, 13: 2}, {}, {}, 0)


def test_json_round_trip() -> None:
    layout = lay_out(holes()[0], LINK, holes()[1])
    assert layout_from_json(layout_to_json(layout)) == layout


# --- the simulator's log of transfers ------------------------------------------------------------


def expected_transfers(machine: Any, trace: Trace) -> list[tuple[int, str, float]]:
    """(page, what, when) of one iteration by the validator, µs since its begin: "out" and "in" when
    a page arrives, "begin" when it begins to come in."""
    period = machine.durations[-1]
    began = machine.iteration_began / TICKS_PER_US - period
    found = []
    for event in [*machine.pages.events, *machine.pages.arrived_in]:
        begins = event.what == "take" and event.why == "in"
        if begins or event.why == "out" or event.what == "arrive":
            at = event.us - began
            if -1e-6 <= at < period - 1e-6:
                found.append((event.page, "begin" if begins else event.why, at))
    return found


def test_transfers_are_logged_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that arrives in one iteration of the steady state, whichever queued it."""
    compared = 0
    for seed in range(300):
        case = case_of(seed)
        trace = case.trace
        simulation = simulate(trace, case.hardware, case.plan, log_transfers=True)
        plain = simulate(trace, case.hardware, case.plan)
        assert (plain.feasible, plain.predicted, plain.stalls) == (
            simulation.feasible, simulation.predicted, simulation.stalls
        )  # fmt: skip
        assert plain.transfers is None
        if not simulation.feasible:
            continue
        machine = replay(trace, case.hardware, case.plan, monkeypatch)
        if machine is None:
            continue
        assert simulation.predicted is not None
        period = simulation.predicted.iteration_us
        base = [sum(trace.pages(PAGE)[:t].tolist()) for t in range(trace.tensors)]
        logged = []
        for transfer in simulation.transfers or []:
            move = case.plan.moves[transfer.move]
            assert (move.tier, move.action == "out") == (transfer.tier, transfer.is_out)
            each = (transfer.end_us - transfer.begin_us) / transfer.page_count
            for nth in range(transfer.page_count):
                page = base[transfer.tensor] + transfer.first_page + nth
                begin, end = (transfer.begin_us + n * each for n in (nth, nth + 1))
                times = []
                if transfer.arrived:
                    times.append(("out" if transfer.is_out else "in", end))
                if not transfer.is_out and each:
                    times.append(("begin", begin))
                for what, at in times:
                    logged.append((page, what, at - (period if at > period - 1e-6 else 0.0)))
        expected = expected_transfers(machine, trace)
        assert len(logged) == len(expected)
        for ours, theirs in zip(sorted(logged), sorted(expected)):
            assert ours[:2] == theirs[:2]
            assert abs(ours[2] - theirs[2]) < 1e-4
        compared += bool(logged)
    assert compared > 20


def test_a_transfer_goes_on_into_the_next_iteration() -> None:
    trace = paged_trace([(4, True)], [50.0, 10.0, 50.0], [[], [Access(0, 0, 4, WRITE)], []])
    moves = [Move(3, 0, 4, "host", "out", 2), Move(3, 0, 4, "host", "in", 0)]
    plan = plan_of(LINK, moves, [StartRun(3, 0, 4, "host")])
    slow = LINK.with_(d2h_bytes_per_s=PAGE / 20e-6)
    simulation = simulate(trace, slow, plan, log_transfers=True)
    assert simulation.predicted is not None
    outs = [t for t in simulation.transfers or [] if t.is_out]
    assert sum(t.page_count for t in outs) == 4
    assert max(t.end_us for t in outs) > simulation.predicted.iteration_us
