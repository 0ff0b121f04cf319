"""Ctrl-C at any moment: it is raised, and every page is where it belongs."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import tensorpager as tp
from tensorpager.pager.debug.check import check_invariants
from tensorpager.pager.memory.frame_pool import FramePool
from tensorpager.pager.memory.page_table import PageTable
from tensorpager.pager.moves import interrupts

PAGE = 64 << 10
OURS = """
def work(times, done):
    for _ in range(times):
        signal.raise_signal(signal.SIGINT)
    done.append("work")

def fail(done):
    signal.raise_signal(signal.SIGINT)
    raise ValueError(done)

@contextmanager
def held(done):
    work(1, done)
    try:
        yield
    finally:
        done.append("let go")
"""


@pytest.fixture(autouse=True)
def guarded() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupts.guard_interrupts()
    yield
    signal.signal(signal.SIGINT, before)
    assert sys.gettrace() is None


@pytest.fixture
def ours() -> dict[str, object]:
    """Functions as if they were of the pager's folder."""
    space = {
        "__name__": "tensorpager.pager.some", "signal": signal, "contextmanager": contextmanager,
    }  # fmt: skip
    exec(OURS, space)
    return space


def test_it_is_raised_when_ours_is_done(ours) -> None:  # type: ignore[no-untyped-def]
    done: list[str] = []

    def calling() -> None:
        try:
            ours["work"](1, done)
            done.append("next instruction")
        finally:
            done.append("finally")

    with pytest.raises(KeyboardInterrupt):
        calling()
    assert done == ["work", "finally"]


def test_it_is_raised_inside_of_the_block(ours) -> None:  # type: ignore[no-untyped-def]
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt), ours["held"](done):
        done.append("block")
    assert done == ["work", "let go"]


def test_an_error_of_ours_is_not_in_the_way(ours) -> None:  # type: ignore[no-untyped-def]
    """It comes where that is handled."""
    done: list[str] = []

    def between() -> None:
        ours["fail"](done)

    def handling() -> None:
        try:
            between()
        except ValueError:
            done.append("next instruction")

    with pytest.raises(KeyboardInterrupt):
        handling()
    assert not done


def test_a_second_one_is_raised_at_once(ours) -> None:  # type: ignore[no-untyped-def]
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        ours["work"](2, done)
    assert not done


def test_outside_of_ours_it_is_raised_at_once() -> None:
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_handler_of_the_user_stays() -> None:
    caught: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: caught.append(number))
    with tp.Pager("1MiB", "1MiB", page_size=PAGE, device="cpu"):
        signal.raise_signal(signal.SIGINT)
    assert caught == [signal.SIGINT]


@pytest.mark.parametrize("policy", ["lru", "lp"])
def test_a_training_that_is_interrupted_goes_on(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While frames and slots are taken, given back, and noted in the page table."""

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 128))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
        loss = model(torch.ones(16, 256)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    def evaluate() -> None:
        while True:
            with pager.iteration():
                model(torch.ones(16, 256)).square().mean().backward()
                optimizer.zero_grad()

    plain = make()
    expected = [step(*plain) for _ in range(4)]
    model, optimizer = make()
    calls_until = [0]

    def interrupting(kind: type, name: str) -> None:
        function = getattr(kind, name)

        def wrapped(*args: object, **kwargs: object) -> object:
            calls_until[0] -= 1
            if calls_until[0] == 0:
                signal.raise_signal(signal.SIGINT)
            return function(*args, **kwargs)

        monkeypatch.setattr(kind, name, wrapped)

    for name in ("take", "free"):
        interrupting(FramePool, name)
    for name in ("place", "unplace", "copied"):
        interrupting(PageTable, name)
    with tp.Pager("1700KiB", "64MiB", page_size=PAGE, device="cpu", policy=policy) as pager:
        pager.page_module(model)
        pager.optimizer(optimizer)
        losses = []
        for count in range(4):
            for calls in (1 + count, 7 + 5 * count, 30 + 11 * count):
                calls_until[0] = calls
                with pytest.raises(KeyboardInterrupt):
                    evaluate()
                optimizer.zero_grad()
                check_invariants(pager.core)
                assert not any(run.pins for run in pager.core.space.runs.values())
            with pager.iteration():
                losses.append(step(model, optimizer))
    assert losses == expected
