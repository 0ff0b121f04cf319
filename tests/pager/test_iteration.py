"""``pager.iteration()``: its begin and its end, and what is left when it has none."""

import threading
import warnings
from collections.abc import Callable

import pytest
import torch

import tensorpager as tp
from tensorpager.pager.debug.check import check_invariants

from .. import programs
from .models import World, assert_same, loss_of, make_pager, mlp, plain, train


@pytest.fixture
def pager(tight_pager):
    return tight_pager


class _StopError(Exception):
    pass


def assert_is_off(pager: tp.Pager) -> None:
    """Nothing of an iteration is on, neither hooks on what autograd saves nor a measurement."""
    assert not pager.core.inside
    assert not pager.core.budget.metering
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    check_invariants(pager.core)


# -- begin and end -------------------------------------------------------------------------------
def test_begin_and_end_are_the_with_block(same) -> None:
    def script(world: World) -> object:
        model = world.module(mlp())
        optimizer = world.optimizer(torch.optim.AdamW(model.parameters()))
        iteration = None if world.pager is None else world.pager.iteration()
        before = 0 if world.pager is None else world.pager.core.iterations
        losses = []
        for _ in range(3):
            if iteration is not None:
                iteration.begin()
            loss = loss_of(model)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if iteration is not None:
                iteration.end()
        if world.pager is not None:
            assert world.pager.stats()["iterations"] == before + 3
            assert_is_off(world.pager)
        return losses, model

    same(script)


def test_a_decorator(pager) -> None:
    @pager.iteration()
    def step() -> None:
        assert pager.core.inside

    step()
    step()
    assert pager.stats()["iterations"] == 2


def test_what_does_not_fit_together_is_refused(pager) -> None:
    iteration = pager.iteration()
    with pytest.raises(tp.PagerError, match=r"not running; begin\(\) it first"):
        iteration.end()
    with pytest.raises(tp.PagerError, match=r"not running; begin\(\) it first"):
        iteration.abandon()
    iteration.begin()
    for again in (iteration, pager.iteration()):
        with pytest.raises(tp.PagerError, match=r"do not nest.*abandon\(\)"):
            again.begin()
    with pytest.raises(tp.PagerError, match="not running"):
        pager.iteration().end()
    iteration.end()
    assert_is_off(pager)


def test_the_end_belongs_to_the_thread_of_the_begin(pager) -> None:
    iteration = pager.iteration().begin()
    errors = []

    def elsewhere() -> None:
        try:
            iteration.end()
        except tp.PagerError as error:
            errors.append(str(error))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert len(errors) == 1
    assert "another thread" in errors[0]
    iteration.end()
    assert_is_off(pager)


def test_hooks_of_others_stay_on(pager) -> None:
    """An iteration that ends among them takes off its own only."""
    packed = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor)
        return tensor

    iteration = pager.iteration().begin()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        iteration.end()
        torch.ones(3).requires_grad_().sin()
    assert len(packed) == 1
    assert_is_off(pager)


# -- cut short -----------------------------------------------------------------------------------
def test_a_step_that_raised_says_what_was_dropped(pager) -> None:
    with pytest.raises(_StopError) as caught, pager.iteration():
        raise _StopError("in the forward pass")
    (note,) = caught.value.__notes__
    assert "cut short by _StopError: in the forward pass" in note
    assert "the measurement of its dense memory, which the next iteration repeats" in note
    assert note.removeprefix("tensorpager: ") in pager.explain()
    assert_is_off(pager)
    with pager.iteration():
        pass
    assert "cut short" not in pager.explain()
    assert pager.stats()["iterations"] == 1


def test_abandon(pager) -> None:
    model = pager.page_module(mlp())
    iteration = pager.iteration().begin()
    loss_of(model).backward()
    iteration.abandon()
    assert "cut short by abandon()" in pager.explain()
    assert_is_off(pager)
    assert model[0].weight.grad is not None
    assert pager.stats()["iterations"] == 0
    train(World(pager), model, pager.optimizer(torch.optim.SGD(model.parameters())), 1)


def test_a_recording_goes_on_with_the_next_step(pager, tmp_path) -> None:
    with pager.record(tmp_path / "trace.parquet"):
        with pytest.raises(_StopError) as caught, pager.iteration():
            raise _StopError
        with pager.iteration():
            pager.page(torch.ones(3)) + 1
    assert "the trace that was recorded of it" in caught.value.__notes__[0]
    assert (tmp_path / "trace.parquet").exists()


class _Failing:
    """A listener that fails at one of the two."""

    def __init__(self, where: str) -> None:
        self.where = where

    def begin(self) -> None:
        if self.where == "begin":
            raise _StopError

    def end(self, ok: bool) -> None:
        if self.where == "end":
            raise _StopError


@pytest.mark.parametrize("where", ["begin", "end"])
def test_a_begin_or_an_end_that_raises(pager, where: str) -> None:
    """All else is switched off; the next iteration is measured instead."""
    listener = _Failing(where)
    pager.core.on_iteration.append(listener)
    with pytest.raises(_StopError), pager.iteration():
        pass
    assert_is_off(pager)
    pager.core.on_iteration.remove(listener)
    with pager.iteration():
        assert pager.core.budget.metering
    assert_is_off(pager)


def test_a_profiler_in_the_way_of_the_begin(pager, monkeypatch) -> None:
    def refuse(*, go_on: bool = False) -> None:
        raise _StopError

    with monkeypatch.context() as patch:
        patch.setattr(pager.core.backend, "meter_start", refuse)
        with pytest.raises(_StopError), pager.iteration():
            pass
    assert not pager.core.inside
    with pager.iteration():
        pass
    assert_is_off(pager)


@pytest.mark.slow
def test_a_step_of_a_plan_that_raises(one_thread) -> None:
    """What follows has plain bits."""

    def cut_short(model: torch.nn.Module, world: World) -> None:
        with world.iteration():
            model[:3](torch.randn(64, 128))
            raise _StopError

    def steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, world: World) -> object:
        losses = train(world, model, optimizer, 3)
        if world.pager is not None:
            world.pager.plan()
        losses += train(world, model, optimizer, 1)
        state = torch.get_rng_state()
        with pytest.raises(_StopError) as caught:
            cut_short(model, world)
        torch.set_rng_state(state)
        losses += train(world, model, optimizer, 3)
        if world.pager is not None:
            assert "cut short" in caught.value.__notes__[0]
        return losses, model

    def run(world: World) -> object:
        torch.manual_seed(5)
        model = world.module(mlp())
        return plain(steps(model, world.optimizer(torch.optim.AdamW(model.parameters())), world))

    expected = run(World())
    with make_pager(policy="lp", frames=24) as pager:
        assert_same(run(World(pager)), expected)
        check_invariants(pager.core)


# -- dropped -------------------------------------------------------------------------------------
def test_dropped_and_forgotten(pager) -> None:
    pager.iteration().begin()  # and nobody has it
    with pytest.warns(RuntimeWarning, match="begun and never ended"), pager.iteration():
        assert pager.core.inside
    assert_is_off(pager)
    assert pager.stats()["iterations"] == 1


def test_dropped_before_the_close(one_thread) -> None:
    with make_pager() as pager:
        pager.iteration().begin()
        with pytest.warns(RuntimeWarning, match="begun and never ended"):
            pager.close()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_a_generator_that_is_dropped(pager) -> None:
    """It is closed there and then, as any ``with`` block in it."""

    def batches():
        with pager.iteration():
            yield 1

    given = batches()
    next(given)
    del given
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pager.iteration():
            pass
    assert_is_off(pager)


def test_dropped_by_another_thread(pager) -> None:
    check_dropped_by_another_thread(pager)


def test_dropped_by_another_thread_without_our_allocator(no_allocator: None, pager) -> None:
    check_dropped_by_another_thread(pager)


def check_dropped_by_another_thread(pager) -> None:
    """Its hooks stay on that thread; an iteration there, or anywhere, is as ever."""
    hooks: list[Callable[..., object]] = []
    proceed, begun = (threading.Barrier(2, timeout=300) for _ in range(2))

    def elsewhere() -> None:
        pager.iteration().begin()
        begun.wait()
        proceed.wait()  # here the main thread runs an iteration
        with pager.iteration():
            pass
        hooks.append(torch._C._autograd._top_saved_tensors_default_hooks(True))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    begun.wait()
    with pytest.warns(RuntimeWarning, match="begun and never ended"), pager.iteration():
        pass
    proceed.wait()
    thread.join()
    assert hooks == [None]
    assert_is_off(pager)


PROGRAM = """
import torch, tensorpager as tp
pager = tp.Pager("64MiB", page_size="64KiB", device="cpu")
model = pager.page_module(torch.nn.Linear(64, 64))
def batches():
    with pager.iteration():
        yield (model(torch.randn(8, 64)) ** 2).sum().backward()
"""
LATE = "torch.kept"  # of another module: gone when most of the interpreter is
ENDS = {
    "a context manager, late": f"{LATE} = pager.iteration(); {LATE}.__enter__()",
    "a generator, late": f"{LATE} = batches(); next({LATE})",
    "a generator": "given = batches(); next(given)",
    "a begin": "iteration = pager.iteration().begin(); model(torch.randn(8, 64)).sum().backward()",
    "a begin, dropped": "pager.iteration().begin(); model(torch.randn(8, 64)).sum().backward()",
}
QUICK = "a context manager, late"


@pytest.mark.parametrize(
    "end", [e if e == QUICK else pytest.param(e, marks=pytest.mark.slow) for e in ENDS]
)
def test_the_interpreter_ends_inside(end: str) -> None:
    """Without a word."""
    done = programs.run("-c", PROGRAM + ENDS[end])
    # PyTorch has a word of its own where its profiler measures, for want of our allocator.
    said = [line for line in done.stderr.splitlines() if "Leaked callback handle" not in line]
    assert (done.returncode, said) == (0, [])


@pytest.mark.parametrize("held", [True, False])
def test_parameters_that_were_replaced_and_are_still_held(held: bool, pager) -> None:
    """In a list that is clipped, say; an optimizer that was made before is given the new ones."""
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 256))
    stale = list(model.parameters()) if held else []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    pager.page_module(model)
    pager.optimizer(optimizer)
    with warnings.catch_warnings(record=True) as seen:
        for _ in range(2):
            with pager.iteration():
                model(torch.ones(2, 256)).sum().backward()
                optimizer.step()
    told = [str(warning.message) for warning in seen if "still held" in str(warning.message)]
    assert len(told) == held
    assert not held or f"{len(stale)} parameters that page_module has replaced" in told[0]
