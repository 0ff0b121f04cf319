"""Needs, the smallest budget and bounds of a trace, by hand where that can be."""

from __future__ import annotations

import pytest

from tensorpager.planner.buckets import SLAB_BYTES
from tensorpager.planner.hardware import Hardware
from tensorpager.planner.joint.policy import Bounds
from tensorpager.planner.outlook import BUDGETS, MECHANISMS, outlook
from tensorpager.planner.repeats import find_repeats
from tensorpager.planner.trace import make_trace

from .test_buckets import PAGE, chain
from .test_joint import machine as link
from .test_shorter import accumulated


def machine(pages: int) -> Hardware:
    return Hardware(pages * PAGE, 64 * PAGE, 64 * PAGE, 1e9, 1e9, 1e9, 1e9, page_size=PAGE)


def test_what_fits_needs_nothing() -> None:
    found = outlook(chain(), machine(40))
    assert found.fits
    assert found.points == []
    assert found.need_bytes["parameter"] == found.need_bytes["gradient"] == 4 * PAGE
    assert found.need_bytes["activation"] == 3 * PAGE
    assert found.need_bytes["optimizer"] == 0
    assert found.peak_bytes == 10 * PAGE  # of the last op: weight, gradient, two activations
    assert found.budgets == {"device": 10 * PAGE, "host": 0, "disk": 0}


def test_budgets_from_what_there_is_to_the_smallest() -> None:
    found = outlook(chain(), machine(9))
    assert found.smallest_bytes == 8 * PAGE  # the update: weight and gradient
    assert found.smallest_op == "update.w"
    sizes = [point.hardware.device_bytes // PAGE for point in found.points]
    assert sizes == [9, 8]
    assert len(sizes) <= BUDGETS
    times = [point.best.iteration_us for point in found.points if point.best]
    assert times == sorted(times)
    assert list(found.mechanisms) == list(MECHANISMS)
    alone, all_three = found.mechanisms["moves"], found.mechanisms["all three"]
    assert alone is not None
    assert all_three is not None
    assert all_three.iteration_us <= alone.iteration_us * (1 + 1e-6)
    with_disk = outlook(chain(), machine(8)).with_disk
    assert with_disk is not None
    assert with_disk.hardware.host_bytes == PAGE  # half of the two that do not fit


def test_a_device_that_is_too_small_has_no_speeds() -> None:
    found = outlook(chain(), machine(7))
    assert found.smallest_bytes == 8 * PAGE
    assert found.points == []
    assert not found.fits


def test_a_large_update_needs_a_slab_at_once() -> None:
    pages = 3 * SLAB_BYTES // PAGE
    trace = make_trace(
        [(0, pages * PAGE, True), (1, pages * PAGE, True), (2, pages * PAGE, False)],
        [("backward", 1.0, [0], [2]), ("update.w", 3.0, [0, 1, 2], [0, 1])],
        page_size=PAGE,
        kinds={0: "parameter", 1: "optimizer", 2: "gradient"},
        host_us=[None, 30.0],
    )
    found = outlook(trace, machine(4 * pages), speeds=False)
    assert found.smallest_bytes == 2 * pages * PAGE
    assert found.smallest_op == "backward"


@pytest.mark.parametrize("pages", [9])
def test_progress_ends_at_one(pages: int) -> None:
    told: list[float] = []
    outlook(chain(), machine(pages), lambda what, share: told.append(share))
    assert told[-1] == 1.0
    assert told == sorted(told)


def test_batches_take_what_one_takes_in_a_row_of_them() -> None:
    trace = accumulated(4, 3)
    repeats = find_repeats(trace, 2)
    assert repeats
    assert repeats.count == 2

    hardware = link(trace, 0.5, rate=1e9)  # without limit below

    def us(batches: int) -> float:
        found = outlook(trace, hardware, repeats=repeats, batches=batches)
        ideal = [part.ideal_us for part in (repeats.fewer(0).trace, repeats.one())]
        assert found.ideal_us == pytest.approx(ideal[0] + (batches - 1) * ideal[1])
        best = found.points[0].best
        assert best
        return best.iteration_us

    each = us(3) - us(2)
    assert each > repeats.one().ideal_us
    assert us(6) - us(3) == pytest.approx(3 * each, rel=1e-3)
    whole = Bounds(trace).best(outlook(trace, hardware).points[0].hardware)
    assert whole
    assert us(3) == pytest.approx(whole.iteration_us, rel=0.1)
