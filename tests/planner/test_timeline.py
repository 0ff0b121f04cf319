"""The timeline of a plan: spans by hand, and two derivations of it against each other."""

import random
from pathlib import Path

import numpy as np
import pytest

from tensorpager.planner.errors import PlanError
from tensorpager.planner.hardware import load_hardware
from tensorpager.planner.plan import Deferred, Plan
from tensorpager.planner.simulator import simulate
from tensorpager.planner.timeline import (
    COMING,
    DEVICE,
    HOST,
    LEAVING,
    Timeline,
    device_curve,
    instants,
    timeline,
)
from tensorpager.planner.trace import make_trace

from .command_line import HARDWARE, MOVES, PAGE, weight_trace
from .random_plans import case_of, choice_case_of

HOLDING = (DEVICE, LEAVING, COMING)


@pytest.fixture
def line(tmp_path: Path) -> Timeline:
    (tmp_path / "hw.toml").write_text(HARDWARE)
    hardware = load_hardware(str(tmp_path / "hw.toml"))
    plan = Plan("by hand", PAGE, 4 * PAGE, 1_000_000, 0, MOVES)
    return timeline(weight_trace(), plan, hardware)


def test_a_weight_leaves_and_comes_back(line: Timeline) -> None:
    """The copy stays good in the steady state, as 'update' only reads: leaving costs no time."""
    assert line.residency(0) == [
        (0, 0, 2, 0.0, 10.0, DEVICE),
        (0, 0, 2, 10.0, 20.0, HOST),
        (0, 0, 2, 20.0, 40.0, COMING),
        (0, 0, 2, 40.0, 50.0, DEVICE),
    ]
    assert line.residency(1) == [(1, 0, 4, 10.0, 20.0, DEVICE)]
    assert line.iteration_us == 50.0
    curve = device_curve(line)
    levels = {
        time: (int(curve.by_kind["parameter"][i]), int(curve.by_kind["activation"][i]))
        for i, time in enumerate(curve.time_us.tolist())
    }
    assert levels == {
        0.0: (2000, 0),
        10.0: (0, 4000),
        20.0: (1000, 0),
        30.0: (2000, 0),
    }


def test_without_a_plan_nothing_moves() -> None:
    line = timeline(weight_trace())
    assert line.iteration_us == 30.0
    assert line.residency(1) == [(1, 0, 4, 10.0, 20.0, DEVICE)]
    assert device_curve(line).total.tolist() == [2000, 6000, 2000]


def test_an_infeasible_plan_is_refused(line: Timeline) -> None:
    assert line.hardware is not None
    empty = Plan("none", PAGE, 4 * PAGE, 0, 0, [])
    with pytest.raises(PlanError, match="infeasible on this machine: op 1"):
        timeline(weight_trace(), empty, line.hardware)


def test_what_lies_within_an_instant_is_at_one_time() -> None:
    times = np.array([7.0 + 1e-9, 3.0, 7.0, 7.0 + 1e-5, 3.0 - 1e-12])
    early = 3.0 - 1e-12
    assert instants(times).tolist() == [7.0, early, 7.0, 7.0 + 1e-5, early]
    assert instants(np.zeros(0)).tolist() == []


@pytest.mark.parametrize("seed", [393, 969, 2142, 2332])
def test_a_frame_given_back_and_taken_at_one_instant_is_held_once(seed: int) -> None:
    """Here that instant is reached over two sums that differ in their last bits."""
    case = case_of(seed)
    line = timeline(case.trace, case.plan, case.hardware)
    assert line.simulation is not None
    assert line.simulation.predicted is not None
    peak = line.simulation.predicted.peak_device_bytes
    assert device_curve(line).total.max() == peak


class _PageByPage(Timeline):
    def _runs(self, tensor: int) -> list[tuple[int, int]]:
        count = int(self.trace.pages(self.page_size)[tensor])
        return [(page, page + 1) for page in range(count)]


def test_spans_and_frames_agree_on_random_plans() -> None:
    """Frames counted from transfers equal the spans that hold one, page by page, at any time; they
    never exceed the device nor what the simulator calls the peak."""
    compared = 0
    for seed in range(400):
        case = case_of(seed)
        result = simulate(case.trace, case.hardware, case.plan)
        if not result.feasible or not case.trace.ops:
            continue
        line = timeline(case.trace, case.plan, case.hardware)
        line = _PageByPage(**vars(line))
        curve = device_curve(line)
        assert result.predicted is not None
        assert curve.total.max(initial=0) <= result.predicted.peak_device_bytes
        spans = [span for tensor in range(case.trace.tensors) for span in line.residency(tensor)]
        begins = np.array([span.begin_us for span in spans if span.place in HOLDING])
        ends = np.array([span.end_us for span in spans if span.place in HOLDING])
        times = np.array([random.Random(seed).uniform(0, line.iteration_us) for _ in range(50)])
        edges = np.concatenate([begins, ends, curve.time_us])
        clear = np.abs(times[:, None] - edges[None]).min(axis=1, initial=np.inf) > 1e-3
        for time in times[clear].tolist():
            held = int(((begins <= time) & (time < ends)).sum()) * case.hardware.page_size
            place = int(np.searchsorted(curve.time_us, time, "right")) - 1
            assert held == int(curve.total[place]), (seed, time)
            compared += 1
    assert compared > 2000


def test_choices_are_in_the_curve_and_never_above_the_peak() -> None:
    """What is discarded gives its frames back, what runs again takes some, what a host step uses or
    a deferred update needs lives on. Some plans have their peak before they are steady, or in an op
    that takes no time."""
    same = different = 0
    for seed in range(600):
        case = choice_case_of(seed)
        if not case.plan.has_choices or not case.trace.ops:
            continue
        result = simulate(case.trace, case.hardware, case.plan)
        if result.predicted is None:
            continue
        line = timeline(case.trace, case.plan, case.hardware)
        total = device_curve(line).total
        peak = result.predicted.peak_device_bytes
        assert total.min(initial=0) >= 0
        assert total.max(initial=0) <= peak, seed
        same, different = same + (total.max(initial=0) == peak), different + 1
        for tensor in range(case.trace.tensors):
            for span in line.residency(tensor):
                assert 0 <= span.begin_us < span.end_us <= line.iteration_us + 1e-6
    assert same >= 0.9 * different > 50


def test_what_lives_into_the_next_iteration_is_at_the_begin_of_this_one() -> None:
    """A gradient that a deferred update takes: of op 1, until the update ran before op 1."""
    trace = make_trace(
        [(0, PAGE, True), (1, PAGE, False)],
        [("forward", 10.0, [0], []), ("backward", 10.0, [], [1]), ("update", 5.0, [1, 0], [0])],
        page_size=PAGE,
    )
    plan = Plan("by hand", PAGE, 4 * PAGE, 0, 0, [], deferred=[Deferred(2, 0)])
    line = timeline(trace, plan, load_hardware("cpu").with_(page_size=PAGE))
    assert [span[3:] for span in line.residency(1)] == [(0.0, 5.0, DEVICE), (15.0, 25.0, DEVICE)]
    assert device_curve(line).total.tolist() == [2 * PAGE, PAGE, 2 * PAGE]
