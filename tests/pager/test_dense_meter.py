"""The profiler as a meter of dense memory, for where our allocator is not to be had."""

import threading
from collections.abc import Callable

import torch

from tensorpager.pager.devices.dense_meter import DenseMeter

MIB = 1 << 20


def profiler_is_on() -> bool:
    return torch._C._autograd._profiler_enabled()


def run_elsewhere(*actions: Callable[[], object]) -> list[object]:
    """In a thread of its own, one after another; what they gave."""
    given: list[object] = []
    thread = threading.Thread(target=lambda: given.extend(action() for action in actions))
    thread.start()
    thread.join()
    assert len(given) == len(actions)
    return given


def allocate(nbytes: int) -> None:
    torch.empty(nbytes, dtype=torch.uint8)


def test_the_peak_of_a_thread() -> None:
    meter = DenseMeter()
    meter.start()
    allocate(3 * MIB)
    allocate(2 * MIB)
    assert meter.stop() == 3 * MIB
    assert meter.timeline.nbytes.tolist() == [3 * MIB, 0, 2 * MIB, 0]
    one, _, two, _ = births = meter.timeline.birth.tolist()
    assert births == [one, one, two, two]
    assert one != two
    assert not profiler_is_on()


def test_what_another_thread_stops_is_switched_off_where_it_was_begun() -> None:
    meter = DenseMeter()
    meter.start()
    stopped, *there = run_elsewhere(
        meter.stop, meter.start, lambda: allocate(2 * MIB), meter.stop, profiler_is_on
    )
    assert isinstance(stopped, int)
    assert there[2:] == [2 * MIB, False]
    assert profiler_is_on()  # only this thread can switch it off
    meter.start()
    allocate(MIB)
    assert meter.stop() == MIB
    assert not profiler_is_on()


def test_another_meter_takes_over_what_was_left_on() -> None:
    left, meter = DenseMeter(), DenseMeter()
    left.start()
    run_elsewhere(left.stop)
    meter.start()
    allocate(MIB)
    assert meter.stop() == MIB
    assert not profiler_is_on()


def test_a_meter_that_is_in_use_is_left_alone() -> None:
    first, second = DenseMeter(), DenseMeter()
    first.start()
    second.start()
    allocate(MIB)
    assert second.stop() == 0  # it samples
    assert first.stop() == MIB


def test_begun_in_backward() -> None:
    """The profiler would be switched off behind its back when autograd is done."""
    meter = DenseMeter()
    x = torch.ones(4, requires_grad=True)
    y = x * 2
    y.register_hook(lambda gradient: meter.start())
    y.sum().backward()
    assert not profiler_is_on()
    meter.sample()
    assert meter.stop() >= 0
    meter.start()
    allocate(MIB)
    assert meter.stop() == MIB
