"""What plain PyTorch takes for the ops of an iteration, as a pager measures it."""

from __future__ import annotations

import statistics
import threading
import time

import pytest
import torch
from torch import nn

import tensorpager as tp
from tensorpager.pager.plan.plain_speed import OpTimes, between_ops

from .models import make_pager

WIDTH, ROWS = 512, 512
WITHIN = 2.0
"""Times as much or as little as a real plain run takes, at most. An op is timed by the clock: where
others use the same cores and caches it may take twice as long, in the best of three runs too."""


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    layers = [each for _ in range(4) for each in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    return nn.Sequential(*layers)


class Training:
    def __init__(self, pager: tp.Pager | None) -> None:
        self._pager = pager
        self.model = model_of(3)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), foreach=False)
        if pager is not None:
            self.model = pager.page_module(self.model)
            self._optimizer = pager.optimizer(self._optimizer)

    def step(self) -> float:
        """Seconds that this thread computed, without what others on the same cores take."""
        if self._pager is None:
            return self._step()
        with self._pager.iteration():
            return self._step()

    def _step(self) -> float:
        began = time.thread_time()
        self.model(torch.ones(ROWS, WIDTH)).square().mean().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return time.thread_time() - began


def test_the_ideal_is_what_a_plain_run_takes(one_thread: None) -> None:
    plain, seconds, measured = Training(None), [], []
    plain.step()  # makes AdamW's states
    for _ in range(3):  # in turns: both meet what the machine is at
        with make_pager(policy="lp", frames=80) as pager:
            assert pager.core.follower is not None
            pager.core.follower.most_plans = 0
            paged = Training(pager)
            for _ in range(4):
                paged.step()
                seconds.append(plain.step())
            assert pager.stats()["faults"] > 0
            kind = pager.core.follower.current
            assert kind is not None
            assert kind.plain_us is not None
            measured.append(kind.plain_us / 1e6)
    ratio = min(measured) / statistics.median(seconds)
    assert 1 / WITHIN < ratio < WITHIN, (ratio, measured, seconds)


def test_timing_changes_no_bits_and_is_done_once(one_thread: None) -> None:
    plain = Training(None)
    with make_pager(policy="lp", frames=80) as pager:
        assert pager.core.follower is not None
        pager.core.follower.most_plans = 0
        paged, timed = Training(pager), []
        for _ in range(6):
            with pager.iteration():
                timed.append(torch._C._len_torch_dispatch_stack())
                paged._step()
            plain.step()
            assert not torch._C._len_torch_dispatch_stack()
        assert timed == [0, 1, 0, 0, 0, 0]  # the first one is metered
        assert len(pager.core.follower.signatures.all) == 1  # and the second as the others
        for mine, theirs in zip(paged.model.parameters(), plain.model.parameters()):
            assert torch.equal(mine.to_dense(), theirs)  # type: ignore[attr-defined]


def _modes_of_iterations(budget: int) -> list[int]:
    """Modes that iterations had, in a training in which a gradient is a sum of large parts."""
    options = {"host_budget": "64MiB", "page_size": 64 << 10, "device": "cpu", "policy": "lp"}
    modes = []
    with tp.Pager(device_budget=budget, **options) as pager:  # type: ignore[arg-type]
        assert pager.core.follower is not None
        pager.core.follower.most_plans = 0
        model = pager.page_module(model_of(3))
        optimizer = pager.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(4):
            with pager.iteration():
                modes.append(torch._C._len_torch_dispatch_stack())
                inputs = torch.ones(ROWS, WIDTH, requires_grad=True)
                loss = model(inputs[:1]).sum()
                for row in range(4):
                    loss = loss + inputs[row : row + 1].sum()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    return modes


def test_nothing_is_timed_where_that_has_no_room() -> None:
    """Beside a mode autograd adds gradients up in new memory."""
    with pytest.raises(tp.InfeasibleBudget) as refused:
        _modes_of_iterations(512 << 10)
    assert refused.value.minimum is not None
    assert _modes_of_iterations(refused.value.minimum) == [0, 0, 0, 0]


def test_copies_of_pages_are_none_of_it(one_thread: None) -> None:
    with make_pager(policy="lp", frames=80) as pager:
        times = OpTimes(pager.core)
        times.start()
        paged = pager.page(torch.ones(WIDTH, WIDTH))
        assert not times._seconds.keys() & {torch.ops.aten.copy_.default}
        paged.sum()
        times.stop()
        names = {key[0] for key in times._seconds}
        assert torch.ops.aten.sum.default in names
        assert times.total_us() > between_ops() * 1e6


def test_one_that_is_ended_elsewhere_times_no_more(one_thread: None) -> None:
    """An iteration may be abandoned by another thread."""
    with make_pager() as pager:
        times = OpTimes(pager.core)
        times.start()
        thread = threading.Thread(target=times.stop)
        thread.start()
        thread.join()
        torch.ones(4).add(1)
        assert not times._seconds
        assert times.stop()
        assert not torch._C._len_torch_dispatch_stack()
