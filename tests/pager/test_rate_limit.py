import math
from concurrent.futures import ThreadPoolExecutor

import pytest

from tensorpager.pager.disk.rate_limit import RateLimit


class Clock:
    """Time that passes only in ``sleep``, which wakes up early or late by ``slack``."""

    def __init__(self, slack: float = 0.0) -> None:
        self.now = 100.0
        self.slack = slack
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.slept.append(seconds)
        self.now += max(seconds + self.slack, 0.125)


def limit(clock: Clock, bytes_per_s: float | None = 1000) -> RateLimit:
    return RateLimit(bytes_per_s, clock=clock, sleep=clock.sleep)


def test_slots_follow_one_another() -> None:
    slots = limit(clock := Clock())
    assert [slots.reserve(n) for n in (500, 1000, 250)] == [100.5, 101.5, 101.75]
    clock.now = 101.0  # in the middle of the second
    assert slots.reserve(250) == 102.0


def test_idle_time_earns_no_credit() -> None:
    slots = limit(clock := Clock())
    assert slots.reserve(1000) == 101.0
    clock.now = 200.0
    assert [slots.reserve(1000), slots.reserve(1000)] == [201.0, 202.0]


def test_a_thread_that_wakes_late_delays_nobody_else() -> None:
    slots = limit(clock := Clock(slack=0.5))
    first, second = slots.reserve(1000), slots.reserve(1000)
    slots.wait_until(first)
    assert clock.now == 101.5
    assert slots.reserve(1000) == 103.0
    slots.wait_until(second)
    assert clock.slept == [1.0, 0.5]


def test_waiting_lasts_to_the_end_however_often_sleep_returns_early() -> None:
    slots = limit(clock := Clock(slack=-0.75))
    slots.wait_until(slots.reserve(2000))
    assert clock.now >= 102.0
    assert len(clock.slept) > 1


def test_a_slot_that_is_over_is_not_waited_for() -> None:
    slots = limit(clock := Clock())
    end = slots.reserve(1000)
    clock.now = 105.0
    slots.wait_until(end)
    assert clock.slept == []


def test_without_a_limit_nothing_waits() -> None:
    slots = limit(clock := Clock(), None)
    assert slots.bytes_per_s is None
    slots.wait_until(slots.reserve(1 << 40))
    assert clock.slept == []


def test_another_rate_counts_from_now_on() -> None:
    slots = limit(Clock())
    assert slots.reserve(1000) == 101.0
    slots.set(500)
    assert slots.bytes_per_s == 500
    assert slots.reserve(1000) == 103.0
    slots.set(None)
    assert slots.reserve(1000) == -math.inf


@pytest.mark.parametrize("rate", [0, -1.0, math.nan, math.inf])
def test_what_is_no_rate(rate: float) -> None:
    with pytest.raises(ValueError, match="is not a rate"):
        RateLimit(rate)
    slots = limit(Clock())
    with pytest.raises(ValueError, match="is not a rate"):
        slots.set(rate)
    assert slots.bytes_per_s == 1000


def test_many_threads_get_slots_that_do_not_overlap() -> None:
    slots = limit(Clock())
    with ThreadPoolExecutor(8) as threads:
        ends = list(threads.map(slots.reserve, [500] * 400))
    assert sorted(ends) == [100.5 + 0.5 * index for index in range(400)]
