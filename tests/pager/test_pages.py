"""The page layer as a whole: random use against plain tensors, invariants after each step."""

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import tensorpager as tp
from tensorpager.pager.debug.chaos import chaos, scattered, scramble
from tensorpager.pager.debug.check import check_invariants
from tensorpager.pager.memory.frame_pool import sliding_max

PAGE = 64 << 10


class PagesMachine(RuleBasedStateMachine):
    """Pages tensors of many sizes, reads, writes, views, frees and scrambles them in a small arena;
    every value is compared with a plain twin."""

    def __init__(self) -> None:
        super().__init__()
        self.pager: tp.Pager | None = None
        self.twins: list[tuple[tp.PagedTensor, torch.Tensor]] = []

    @initialize(
        frames=st.integers(12, 24),
        host_pages=st.sampled_from([0, 5, 200]),
        is_scattered=st.booleans(),
        verify=st.booleans(),
    )
    def start(self, frames: int, host_pages: int, is_scattered: bool, verify: bool) -> None:
        self.pager = tp.Pager(
            frames * PAGE + PAGE,
            host_budget=host_pages * PAGE,
            disk_budget=200 * PAGE,
            disk_path="/tmp",
            page_size=PAGE,
            dense_reserve=PAGE,
            device="cpu",
            verify=verify,
        )
        self.pager.core.residency.scattered = is_scattered
        self.generator = torch.Generator().manual_seed(0)

    @precondition(lambda self: len(self.twins) < 20)
    @rule(elements=st.one_of(st.integers(0, 300), st.integers(5_000, 60_000)))
    def page(self, elements: int) -> None:
        plain = torch.randn(elements, generator=self.generator)
        self.twins.append((self.pager.page(plain), plain.clone()))

    @precondition(lambda self: self.twins)
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        paged, plain = data.draw(st.sampled_from(self.twins))
        start = data.draw(st.integers(0, plain.numel()))
        for tensor in (paged, plain):
            tensor[start:].mul_(0.5).add_(start)

    @precondition(lambda self: self.twins)
    @rule(data=st.data())
    def read_two(self, data: st.DataObject) -> None:
        (a, x), (b, y) = (data.draw(st.sampled_from(self.twins)) for _ in range(2))
        count = min(x.numel(), y.numel())
        assert torch.equal(a[:count] - b[:count], x[:count] - y[:count])

    @precondition(lambda self: self.twins)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.twins.pop(data.draw(st.integers(0, len(self.twins) - 1)))

    @precondition(lambda self: self.twins)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        paged, plain = data.draw(st.sampled_from(self.twins))
        other, expected = data.draw(st.sampled_from(self.twins))
        with paged.pin() as dense:
            scramble(self.pager.core)
            assert torch.equal(other.to_dense(), expected)
            dense.add_(1)
        plain.add_(1)

    @rule()
    def evict_all(self) -> None:
        scramble(self.pager.core)

    @rule(frames=st.integers(12, 24))
    def move_border(self, frames: int) -> None:
        self.pager.core.residency.resize(frames)

    @rule()
    def compact(self) -> None:
        self.pager.core.residency.compact(set())

    @invariant()
    def rules_hold(self) -> None:
        if self.pager is not None:
            check_invariants(self.pager.core)

    def teardown(self) -> None:
        if self.pager is None:
            return
        for paged, plain in self.twins:
            assert torch.equal(paged.to_dense(), plain)
        self.pager.close()


PagesMachine.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestPages = PagesMachine.TestCase


@pytest.mark.parametrize("width", [1, 2, 7, 30])
def test_sliding_max(width: int) -> None:
    values = np.random.default_rng(0).integers(0, 100, 30)
    expected = [values[i : i + width].max() for i in range(30 - width + 1)]
    assert sliding_max(values, width).tolist() == expected


def small_pager(frames: int = 8, **options: object) -> tp.Pager:
    options = {"host_budget": 64 * PAGE, **options}
    return tp.Pager(
        (frames + 1) * PAGE, page_size=PAGE, dense_reserve=PAGE, device="cpu", **options
    )


def pages(count: int, value: float = 0.0) -> torch.Tensor:
    """A tensor of exactly ``count`` pages."""
    return torch.full((count * PAGE // 4,), value)


def test_clean_pages_are_not_written_twice() -> None:
    with small_pager() as pager:
        paged = pager.page(pages(4, 1.0))
        scramble(pager.core)
        written = pager.stats()["bytes_out"]
        assert written == 4 * PAGE
        for _ in range(3):
            paged.sum()
            scramble(pager.core)
        assert pager.stats()["bytes_out"] == written
        paged.add_(1)  # now the copy is void
        scramble(pager.core)
        assert pager.stats()["bytes_out"] == 2 * written


def test_least_recently_used_leaves_first() -> None:
    with small_pager(frames=8) as pager:
        first, second = pager.page(pages(4)), pager.page(pages(4))
        first.sum()  # second is the older one now
        pager.page(pages(4))
        assert first.residency()["device"] == 4 * PAGE
        assert second.residency()["device"] == 0


def test_free_frames_go_before_pages_that_a_stream_is_over_with() -> None:
    with tp.Pager("2MiB", page_size=PAGE, dense_reserve=PAGE, device="cpu") as pager:
        one, other = (pager.page(pages(4, 1.0)) for _ in range(2))
        residency = pager.core.residency
        residency.spent(one._storage.run)
        residency.relocate(other._storage.run.pages[3:], np.array([30]))  # no longer in one piece
        assert other.sum() == one.sum() == PAGE  # with nowhere to go for any page


def test_a_device_alone_that_is_full_names_what_to_give() -> None:
    with tp.Pager("1MiB", page_size=PAGE, dense_reserve=PAGE, device="cpu") as pager:
        kept = [pager.page(pages(7, 2.0)) for _ in range(2)]
        with pytest.raises(tp.TierFull, match=r"no tier below.*raise host_budget or device_budget"):
            pager.page(pages(7))
        assert all(one.sum() == 7 * PAGE // 2 for one in kept)


def test_a_window_takes_only_part_of_a_tensor() -> None:
    with small_pager(frames=8) as pager:
        big = pager.page(pages(8, 3.0))
        small = pager.page(pages(2, 4.0))
        assert big.residency()["device"] == 6 * PAGE
        assert big.residency()["host"] == 2 * PAGE
        assert torch.equal(small.to_dense(), pages(2, 4.0))
        assert torch.equal(big.to_dense(), pages(8, 3.0))


def test_pins_in_the_way_are_worked_around_by_gathering() -> None:
    with small_pager(frames=8) as pager:
        parts = [pager.page(pages(1, float(i))) for i in range(8)]
        del parts[0], parts[0], parts[1], parts[1]  # frames 0, 1, 3, 4 are free
        with parts[0].pin(), parts[1].pin():  # frames 2 and 5
            big = pager.page(pages(5, 9.0))  # no five frames in a row
            before = pager.stats()["gathers"]
            assert big.mul_(2).cos_().sum().item() == pytest.approx(math.cos(18) * big.numel())
            assert pager.stats()["gathers"] == before + 1  # of cos_; page kernels do the others
        assert torch.equal(big.to_dense(), pages(5, 18.0).cos_())
        check_invariants(pager.core)


def test_compaction_makes_room_without_lower_tiers() -> None:
    with small_pager(frames=8, host_budget=0) as pager:
        parts = [pager.page(pages(1, float(i))) for i in range(8)]
        del parts[1], parts[2], parts[3]  # three holes, not side by side
        big = pager.page(pages(3, 9.0))
        assert pager.stats()["compactions"] == 1
        assert torch.equal(big.to_dense(), pages(3, 9.0))
        assert [p[0].item() for p in parts] == [0.0, 2.0, 4.0, 6.0, 7.0]
        check_invariants(pager.core)


def test_small_tensors_share_pages_aligned_to_64_bytes() -> None:
    with small_pager() as pager:
        parts = [pager.page(torch.full((n,), float(n))) for n in range(1, 200)]
        assert pager.core.space.live_pages == 2
        assert all(p._storage.offset % 64 == 0 for p in parts)
        with chaos(pager.core):
            assert all((p == n).all() for n, p in enumerate(parts, start=1))
        del parts
        pager.core.residency.collect()
        assert pager.core.space.live_pages == 0


def test_scattered_lane_really_scatters() -> None:
    with small_pager() as pager, scattered(pager.core):
        paged = pager.page(pages(4, 2.0))
        frames = pager.core.table.frame[paged._storage.run.first :][:4]
        assert (np.diff(frames) != 1).any()
        assert torch.equal(paged + 1, pages(4, 3.0))
        assert pager.stats()["gathers"] == 0
        assert torch.equal(paged.cos(), pages(4, 2.0).cos())
        assert pager.stats()["gathers"] == 1


def test_a_tensor_of_many_times_the_budget_is_paged_in_parts() -> None:
    values = torch.randn(64 * PAGE // 4 + 5)
    with small_pager(frames=8) as pager:
        paged = pager.page(values)
        assert pager.core.residency.pool.count * PAGE <= pager.core.budget_bytes["device"]
        assert pager.core.residency.peak_frames <= 8
        assert torch.equal(paged.to_dense(), values)
        check_invariants(pager.core)


def test_stats_can_be_held_by_json() -> None:
    import json

    with small_pager() as pager:
        pager.page(pages(3)).add_(1)
        stats = json.loads(json.dumps(pager.stats()))
        keys = "iterations faults prefetches prefetch_hits bytes_out bytes_in disk_bytes_written"
        assert set(f"{keys} stall_us gathers mode peak_bytes budget_bytes".split()) <= set(stats)
        assert set(stats["peak_bytes"]) == set(stats["budget_bytes"]) == {"device", "host", "disk"}
