"""The validator alone: what it says of bad plans, its ledger, its clock, laws of any run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, note

from tensorpager.planner.hardware import Hardware
from tensorpager.planner.plan import Predicted, StartRun
from tensorpager.planner.simulation import Simulation
from tensorpager.planner.trace import make_trace
from tensorpager.planner.validator import validate
from tensorpager.planner.validator.ledger import (
    DISK,
    HERE,
    HOST,
    VALID,
    WRITING,
    Infeasible,
    Ledger,
)
from tensorpager.planner.validator.link import TICKS_PER_US, Direction, Job, Queue, ticks

from .examples import examples
from .machine_cases import FEASIBLE, INFEASIBLE, LASTING, TRANSIENT, HandCase, M, reads, writes
from .random_plans import PAGE, Case, cases, plan_of


def run(case: Case) -> Simulation:
    return validate(case.trace, case.hardware, case.plan)


def by_name(name: str) -> Case:
    return next(case for case in FEASIBLE if case.name == name).build()


@pytest.mark.parametrize("case", INFEASIBLE, ids=lambda case: case.name)
def test_reason_names_what_and_where(case: HandCase) -> None:
    result = run(case.build())
    assert not result.feasible
    assert case.reason in result.reason
    assert "\n" not in result.reason


def test_page_size_is_the_hardwares() -> None:
    case = by_name("stall_for_frames")
    result = validate(case.trace, case.hardware, replace(case.plan, page_size=2 * PAGE))
    assert not result.feasible
    assert "2000 is not the hardware's 1000" in result.reason


def test_pages_may_be_larger_than_the_traces() -> None:
    case = by_name("stall_for_frames")
    hardware = replace(case.hardware, page_size=2 * PAGE, device_bytes=8 * PAGE)
    plan = replace(case.plan, page_size=2 * PAGE, moves=[], start=[])
    result = validate(case.trace, hardware, plan)
    assert result.predicted is not None
    assert result.predicted.peak_device_bytes == 3 * 2 * PAGE  # 3 pages become 2, 2 become 1


def test_a_trace_without_ops() -> None:
    trace = make_trace([], [], page_size=PAGE)
    hardware = Hardware(device_bytes=PAGE, page_size=PAGE)
    result = validate(trace, hardware, plan_of(hardware, [], []))
    assert result.feasible
    assert result.predicted == Predicted(0, 0, 0, 0, 0, 0, 0, 0, 0)


def test_op_times_are_of_the_last_iteration() -> None:
    case = by_name("an_in_goes_on_into_the_next_iteration")
    result = run(case)
    assert result.iterations == 3
    assert result.op_start_us is not None
    assert result.op_end_us is not None
    np.testing.assert_allclose(result.op_start_us, [6, 26, 36], atol=1e-6)
    np.testing.assert_allclose(result.op_end_us, [16, 36, 40], atol=1e-6)


def test_ops_that_take_no_time_start_before_transfers_begin() -> None:
    """Op 1 takes no time, so op 2 starts at the same instant and takes the last frame before the
    in of tensor 0 can begin; that comes 20 to 30, op 3 to 40."""
    case = HandCase(
        "no_time",
        "",
        2,
        [(1, LASTING), (1, TRANSIENT), (1, TRANSIENT)],
        [(10, [writes(1)]), (0, []), (10, [reads(1), writes(2)]), (10, [reads(0)])],
        [M(0, "out", "host", 0, 0, 1), M(1, "in", "host", 0, 0, 1)],
    ).build()
    result = run(case)
    assert result.predicted is not None, result.reason
    assert result.predicted.iteration_us == pytest.approx(40, abs=1e-6)


def test_a_plan_that_never_settles_is_judged_by_its_last_iteration() -> None:
    """Iterations of 153.33 and 143.3 µs take turns: what the disk queue is doing when the host
    queue begins differs from one to the next."""
    tensors = [(4, LASTING), (2, LASTING)]
    ops = [(10, [reads(0), writes(0)]), (10, [reads(1), reads(0, 1, 2)]), (10, []), (33.3, [])]
    case = HandCase(
        "restless",
        "",
        6,
        tensors,
        ops,
        [
            M(0, "out", "disk", 1, 1, 2),
            M(0, "out", "host", 0, 1, 2),
            M(0, "in", "host", 0, 0, 1),
            M(0, "in", "disk", 1, 1, 2),
            M(0, "in", "host", 0, 1, 2),
            M(1, "out", "host", 0, 0, 1),
            M(1, "out", "disk", 0, 2, 4),
            M(3, "in", "disk", 0, 2, 4),
        ],
        [("host", 0, 0, 1)],
        {"h2d_bytes_per_s": 5e7, "disk_write_bytes_per_s": 3e7},
    ).build()
    result = run(case)
    assert result.iterations == 40
    assert result.predicted is not None
    assert result.predicted.iteration_us == pytest.approx(143.3, abs=0.01)


# The ledger.


def ledger() -> Ledger:
    """Tensor 0: pages 0 and 1 on the device; tensor 1: page 2 in host. 4 frames, 2 + 2 slots."""
    trace = make_trace([(0, 2 * PAGE, True), (1, PAGE, True)], [("op", 1.0, [0, 1], [])],
                       page_size=PAGE)  # fmt: skip
    pages = Ledger(trace, PAGE, (4, 2, 2))
    pages.place_below(2, HOST)
    pages.place_here(0)
    pages.place_here(1)
    pages.audit()
    return pages


def test_ledger_follows_a_page_out_and_in() -> None:
    pages = ledger()
    assert pages.queue_out(0, DISK)
    assert pages.frames == 2
    pages.begin_out(0, DISK)
    pages.audit()
    assert pages.slots == [1, 1]
    pages.end_out(0, DISK)
    assert pages.frames == 1
    pages.queue_in(0, DISK)
    pages.begin_in(0, DISK)
    pages.audit()
    pages.end_in(0)
    assert pages.frames == 2
    assert not pages.queue_out(0, DISK), "its copy is valid: nothing to transfer"
    assert pages.frames == 1
    pages.audit()
    with pytest.raises(Infeasible, match="page 0 of tensor 0 is in disk, not on the device"):
        pages.queue_out(0, HOST)


TAMPER: dict[str, Callable[[Ledger], object]] = {
    "a frame too many": lambda p: setattr(p, "frames", p.frames + 1),
    "a slot too few": lambda p: p.slots.__setitem__(HOST, 0),
    "a page nowhere": lambda p: (p.copy[HOST].__setitem__(2, 0), p.slots.__setitem__(HOST, 0)),
    "a copy written of a page that stays": lambda p: (
        p.copy[DISK].__setitem__(0, WRITING),
        p.slots.__setitem__(DISK, 1),
    ),
    "over the cap": lambda p: setattr(p, "frame_cap", 1),
    "a dead page with a copy": lambda p: (
        p.place.__setitem__(0, 0),
        setattr(p, "frames", 1),
        p.copy[DISK].__setitem__(0, VALID),
        p.slots.__setitem__(DISK, 1),
    ),
}


@pytest.mark.parametrize("what", TAMPER)
def test_audit_sees(what: str) -> None:
    pages = ledger()
    TAMPER[what](pages)
    with pytest.raises(AssertionError):
        pages.audit()


def test_ledger_refuses_impossible_transitions() -> None:
    pages = ledger()
    with pytest.raises(AssertionError):
        pages.begin_out(0, HOST)  # not queued
    with pytest.raises(AssertionError):
        pages.end_in(2)  # not moving
    with pytest.raises(AssertionError):
        pages.write(2, 3)  # not on the device
    assert pages.place[0] == HERE
    pages.audit()


# The clock and the link.


def test_ticks_do_not_drift() -> None:
    """A million transfers of a third of a µs end within a nanosecond of where they should."""
    third = ticks(1 / 3)
    assert abs(third * 10**6 / TICKS_PER_US - 10**6 / 3) < 1e-3 * 1e-3


def test_rates_change_in_mid_page() -> None:
    """Host alone 10 µs a page; a disk page at a quarter of the link from 5 to 45 µs."""
    disk, host = Queue(DISK, "out", 0.0, PAGE), Queue(HOST, "out", 0.0, PAGE)
    link = Direction(disk, host, link=100.0, disk_rate=25.0)
    host.add(Job(0, [0, 1]), 0)
    host.begin(0)
    link.share(0)
    assert host.arrival == ticks(10.0)
    disk.add(Job(1, [2]), ticks(5.0))
    disk.begin(ticks(5.0))
    link.share(ticks(5.0))
    assert disk.arrival == ticks(45.0)
    assert host.arrival is not None
    assert host.arrival / TICKS_PER_US == pytest.approx(5 + 5 / 0.75)
    assert host.finish(host.arrival) == 0
    assert host.candidate(ticks(12.0)) == 1
    assert host.next_event(ticks(12.0)) is None, "a head that may begin has no event ahead"


def test_a_starved_page_has_no_arrival_until_the_disk_is_idle() -> None:
    disk, host = Queue(DISK, "in", 0.0, PAGE), Queue(HOST, "in", 0.0, PAGE)
    link = Direction(disk, host, link=100.0, disk_rate=500.0)
    for queue in (disk, host):
        queue.add(Job(0, [0]), 0)
        queue.begin(0)
    link.share(0)
    assert disk.arrival == ticks(10.0), "no faster than the link"
    assert host.arrival is None
    disk.finish(ticks(10.0))
    link.share(ticks(10.0))
    assert host.arrival == ticks(20.0)


def test_forgotten_pages_are_not_transferred() -> None:
    queue = Queue(HOST, "out", 3.0, PAGE)
    queue.add(Job(0, [4, 5]), 0)
    queue.add(Job(1, [6]), 0)
    queue.forget(4, 6, ticks(2.0))
    assert queue.next_event(ticks(2.0)) == ticks(5.0), "the next move's latency begins"
    assert queue.candidate(ticks(5.0)) == 6


# Laws of any run.


@examples(300)
@given(case=cases())
def test_no_run_beats_its_link_or_its_caps(case: Case) -> None:
    note(repr(case))
    result = run(case)
    if not result.feasible:
        assert result.reason
        return
    predicted, hardware = result.predicted, case.hardware
    assert predicted is not None
    assert predicted.iteration_us >= case.trace.ideal_us - 1e-3
    assert predicted.peak_device_bytes <= hardware.device_bytes
    assert predicted.peak_host_bytes <= hardware.host_bytes
    assert predicted.peak_disk_bytes <= hardware.disk_bytes
    assert predicted.disk_bytes_written <= predicted.bytes_out
    # What one iteration moves fits into it, up to the pages that were half done when it began.
    half_done = 2 * PAGE
    for moved, rate in (
        (predicted.bytes_out, hardware.d2h_bytes_per_s),
        (predicted.bytes_in, hardware.h2d_bytes_per_s),
        (predicted.disk_bytes_written, hardware.disk_write_bytes_per_s),
    ):
        assert (moved - half_done) / rate * 1e6 <= predicted.iteration_us + 1e-3
    assert result.op_start_us is not None
    assert result.op_end_us is not None
    assert (result.op_start_us[1:] >= result.op_end_us[:-1] - 1e-5).all()
    np.testing.assert_allclose(
        result.op_end_us - result.op_start_us, case.trace.op_duration_us, atol=1e-5
    )


@examples(100)
@given(case=cases())
def test_without_limits_and_moves_nothing_waits(case: Case) -> None:
    hardware = replace(case.hardware, device_bytes=float("inf"))
    result = validate(case.trace, hardware, plan_of(hardware, [], []))
    assert result.predicted is not None
    assert result.predicted.stall_us == pytest.approx(0, abs=1e-5)
    assert result.predicted.peak_device_bytes <= int(case.trace.pages(PAGE).sum()) * PAGE


def test_start_in_a_plan_of_two_tiers() -> None:
    """Pages of one tensor may start in both tiers."""
    case = HandCase(
        "two tiers",
        "disk in 0 to 40, host page at 3/4 of the link to 13.33; op 0 to 50, op 1 to 60",
        2,
        [(2, LASTING), (2, TRANSIENT)],
        [(10, [reads(0)]), (10, [writes(1)])],
        [
            M(0, "in", "host", 0, 0, 1),
            M(0, "in", "disk", 0, 1, 2),
            M(1, "out", "disk", 0, 1, 2),
            M(1, "out", "host", 0, 0, 1),
        ],
        [("host", 0, 0, 1), ("disk", 0, 1, 2)],
    ).build()
    assert StartRun(3, 1, 1, "disk") in case.plan.start
    result = run(case)
    assert result.predicted is not None, result.reason
    assert result.predicted.iteration_us == pytest.approx(60)


def test_transients_need_no_frame_when_dead() -> None:
    """A chain of ten one-page tensors runs in two frames."""
    tensors = [(1, TRANSIENT)] * 10
    ops = [(1.0, [writes(0)])] + [(1.0, [reads(i - 1), writes(i)]) for i in range(1, 10)]
    result = run(HandCase("chain", "", 2, tensors, ops, []).build())
    assert result.predicted is not None, result.reason
    assert result.predicted.peak_device_bytes == 2 * PAGE
