"""Several threads use one pager: beside each other, and beside another's iteration."""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tensorpager as tp
from tensorpager.pager.debug.check import check_invariants
from tensorpager.pager.devices.dense_allocator import DenseAllocator
from tensorpager.pager.tensor.paged_tensor import direct_view

SIZE = 64 << 10
PAGE_FLOATS = SIZE // 4
NEVER_SECONDS = 120.0
pytestmark = pytest.mark.usefixtures("one_thread")


def make_pager(frames: int, *, policy: str = "lru", **options: Any) -> tp.Pager:
    """The border is fixed: ``frames`` frames, and 16 MiB beside them."""
    options.setdefault("dense_reserve", 16 << 20)
    return tp.Pager(
        device_budget=frames * SIZE + (16 << 20),
        host_budget="32MiB",
        page_size=SIZE,
        device="cpu",
        policy=policy,
        **options,
    )


def in_threads(*jobs: Callable[[], None]) -> list[BaseException | None]:
    """Run each in a thread of its own; what each has raised."""
    found: list[BaseException | None] = [None] * len(jobs)

    def run(index: int) -> None:
        torch.set_num_threads(1)  # a new thread begins with as many as there are cores
        try:
            jobs[index]()
        except BaseException as error:
            found[index] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(NEVER_SECONDS)
    assert not any(thread.is_alive() for thread in threads), "a thread waits for ever"
    return found


@contextmanager
def switching_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def wait_until(condition: Callable[[], Any]) -> None:
    """Of what another thread is about to do."""
    over = threading.Event()
    for _ in range(int(NEVER_SECONDS / 0.005)):
        if condition():
            return
        over.wait(0.005)
    raise AssertionError("it never came to that")


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


def matrix(pages: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(pages * PAGE_FLOATS // 128, 128, generator=generator)


# -- no iteration ----------------------------------------------------------------------------------
def _beside_each_other(pager: tp.Pager, ops: int, width: int = 128) -> None:
    """Four threads, each with inputs of its own, through one model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
    inputs = [torch.randn(4, width) for _ in range(4)]
    with torch.no_grad():
        wanted = [model(x) for x in inputs]
    pager.page_module(model)
    with torch.no_grad():
        alone = [model(x) for x in inputs]
    start = threading.Barrier(4)

    def job(index: int) -> Callable[[], None]:
        def run() -> None:
            start.wait(NEVER_SECONDS)
            for _ in range(ops):
                with torch.no_grad():
                    assert equal(model(inputs[index]), alone[index])

        return run

    with switching_often():
        assert in_threads(*(job(index) for index in range(4))) == [None] * 4
    check_invariants(pager.core)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(alone, wanted))


@pytest.mark.parametrize("policy", ["lru", "lp"])
@pytest.mark.parametrize("frames", [3, 5])
def test_threads_beside_each_other(frames: int, policy: str) -> None:
    """Each weight is 2 pages, and two of them take more than there is: in 3 frames one op at a time
    has room, in 5 frames it depends on what the others hold."""
    with make_pager(frames, policy=policy) as pager:
        _beside_each_other(pager, ops=8)


@pytest.mark.parametrize("policy", ["lru", "lp"])
def test_threads_through_one_streamed_model(policy: str) -> None:
    """Weights of 8 pages stream through 6 frames."""
    with make_pager(6, policy=policy) as pager:
        _beside_each_other(pager, ops=1, width=256)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["lru", "lp"])
@pytest.mark.parametrize(("frames", "width"), [(3, 128), (5, 128), (6, 256)])
def test_threads_beside_each_other_for_long(frames: int, width: int, policy: str) -> None:
    with make_pager(frames, policy=policy) as pager:
        _beside_each_other(pager, ops=500 if width == 128 else 100, width=width)


# -- frames that others have pinned ----------------------------------------------------------------
class _Watcher:
    """Looks on, and does nothing about it."""

    sees_ends = True

    def pinning(self, runs: Sequence[Any]) -> None: ...

    def writing(self, run: Any) -> None: ...

    def unpinned(self, runs: Sequence[Any]) -> None: ...

    def wait_begins(self) -> None: ...

    def waited(self, seconds: float, began: None, *, own: bool) -> None: ...

    def step(self, runs: Any, *, hosted: bool) -> None: ...

    def collective(self, what: str) -> None: ...


class _InOrder(_Watcher):
    """Runs in the order in which their uses end."""

    def __init__(self, pager: tp.Pager) -> None:
        self.ended: list[Any] = []
        pager.core.watch = self

    def unpinned(self, runs: Sequence[Any]) -> None:
        self.ended += runs


def test_an_op_waits_for_frames_that_another_thread_has_pinned() -> None:
    """Also one that takes all frames is served, and those that come later wait behind it."""
    plain = [matrix(3), matrix(8, 1), matrix(3, 2)]
    with make_pager(8) as pager:
        small, all_frames, other = (pager.page(tensor) for tensor in plain)
        order = _InOrder(pager)

        def large() -> None:
            assert equal(all_frames * 2, plain[1] * 2)

        def later() -> None:
            wait_until(lambda: len(pager.core.turns.queue) == 1)
            assert equal(other * 2, plain[2] * 2)

        def end_the_pin() -> None:
            with small.pin() as view:
                held.set()
                wait_until(lambda: len(pager.core.turns.queue) == 2)
                assert not order.ended
                assert equal(view, plain[0])

        held = threading.Event()

        def after(job: Callable[[], None]) -> Callable[[], None]:
            def run() -> None:
                assert held.wait(NEVER_SECONDS)
                job()

            return run

        assert in_threads(end_the_pin, after(large), after(later)) == [None] * 3
        assert order.ended == [tensor._storage.run for tensor in (small, all_frames, other)]
        assert not pager.core.turns.queue
        check_invariants(pager.core)


def test_threads_that_all_hold_pins_and_want_more_are_refused_and_not_left_waiting() -> None:
    plain = [matrix(3, seed) for seed in range(4)]
    with make_pager(8) as pager:
        paged = [pager.page(tensor) for tensor in plain]
        both_hold = threading.Barrier(2)

        def job(held: int, wanted: int) -> Callable[[], None]:
            def run() -> None:
                with paged[held].pin():
                    both_hold.wait(NEVER_SECONDS)
                    with paged[wanted].pin() as view:
                        assert equal(view, plain[wanted])

            return run

        one, other = in_threads(job(0, 2), job(1, 3))
        refused = [error for error in (one, other) if error is not None]
        assert len(refused) == 1, "the other one has its turn then"
        assert isinstance(refused[0], tp.InfeasibleBudget)
        assert "that other threads have pinned" in str(refused[0])
        assert all(equal(p.to_dense(), t) for p, t in zip(paged, plain))
        check_invariants(pager.core)


def test_what_others_have_pinned_is_no_part_of_what_an_op_needs() -> None:
    with make_pager(8) as pager:
        held, other = pager.page(matrix(3)), pager.page(matrix(4, 1))
        with pager.core.quiet():
            pager.core.residency.evict_run(other._storage.run)
        pager.core.residency.needs = 0, 0
        pinned, done = threading.Event(), threading.Event()

        def hold() -> None:
            with held.pin():
                pinned.set()
                assert done.wait(NEVER_SECONDS)

        thread = threading.Thread(target=hold, daemon=True)
        thread.start()
        assert pinned.wait(NEVER_SECONDS)
        other.sum()
        done.set()
        thread.join(NEVER_SECONDS)
        assert pager.core.residency.largest_need == 4


def test_scattered_pages_stay_where_another_op_reads_them() -> None:
    plain = [matrix(2, seed) for seed in range(4)]
    with make_pager(8) as pager:
        paged = [pager.page(tensor) for tensor in plain]
        pager.core.residency.scattered = True
        for tensor in paged:
            tensor.sum()
        pager.core.residency.scattered = False
        run = paged[0]._storage.run
        pager.core.residency.scattered = True
        pager.core.take([run])
        pager.core.residency.scattered = False
        before = pager.core.table.frame[run.first : run.first + run.count].copy()
        pager.core.take([run])
        assert (pager.core.table.frame[run.first : run.first + run.count] == before).all()
        pager.core.release([run])
        pager.core.release([run])
        assert equal(paged[0] * 1, plain[0])
        check_invariants(pager.core)


# -- what another thread does between two steps of ours --------------------------------------------
class _Meanwhile(_Watcher):
    """Another thread gets its turn between finding a dense view and pinning its pages."""

    def __init__(self, pager: tp.Pager, action: Callable[[], None]) -> None:
        self.pager, self.action = pager, action
        pager.core.watch = self

    def pinning(self, runs: Sequence[Any]) -> None:
        self.pager.core.watch = None
        self.action()


def test_a_view_that_was_made_anew_meanwhile_is_the_one_that_is_read() -> None:
    plain = matrix(2)
    with make_pager(8) as pager:
        paged, other = pager.page(plain), pager.page(matrix(6, 1))
        run = paged._storage.run
        paged.sum()
        first = run.base
        moved = []

        def move_elsewhere() -> None:
            with pager.core.quiet():
                pager.core.residency.evict_run(run)
            moved.append(pager.page(matrix(2, 2)))  # where it was
            with pager.core.quiet():
                pager.core.residency.evict_run(other._storage.run)
            pager.core.take([run])
            direct_view(paged)
            pager.core.release([run])
            assert run.base not in (first, -1)

        with torch.no_grad():
            _Meanwhile(pager, move_elsewhere)
            assert equal(paged * 2, plain * 2)
            assert moved


def test_an_op_that_fails_leaves_the_views_of_others_alone() -> None:
    plain = matrix(2)
    with make_pager(8) as pager:
        paged = pager.page(plain)
        paged.sum()
        with paged.pin():
            view = direct_view(paged)
            with pytest.raises(RuntimeError):
                paged @ torch.ones(3, 3)
            assert equal(view, plain)


def test_a_thread_that_raises_holds_nothing_afterwards() -> None:
    plain = [matrix(2), matrix(6, 1)]
    with make_pager(6) as pager:
        paged = [pager.page(tensor) for tensor in plain]

        def wrong() -> None:
            with paged[0].pin():
                raise ValueError("of the user's")

        def misfit() -> None:
            paged[0] @ torch.ones(3, 3)

        errors = in_threads(wrong, misfit)
        assert [type(error) for error in errors] == [ValueError, RuntimeError]
        assert equal(paged[1] * 2, plain[1] * 2)
        assert in_threads(lambda: paged[0].sum()) == [None]
        check_invariants(pager.core)


# -- beside an iteration ---------------------------------------------------------------------------
def _train(
    paged: bool, during: Callable[[tp.Pager | None, int, torch.Tensor], None], **options: Any
) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Parameters after three steps with other shapes each; ``during`` is called inside each."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    options = {"device_budget": "64MiB", "page_size": SIZE, "device": "cpu", **options}
    pager = tp.Pager(**options) if paged else None
    try:
        if pager is not None:
            pager.page_module(model)
            pager.optimizer(optimizer)
        for step in range(3):
            inputs = torch.randn(8 + step, 128)
            with pager.iteration() if pager is not None else torch.enable_grad():
                loss = model(inputs).pow(2).mean()
                during(pager, step, loss)
                if loss.grad_fn is not None and model[0].weight.grad is None:
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        found = [p.detach().clone() for p in model.parameters()]
        stats = pager.stats() if pager is not None else {}
        if pager is not None:
            check_invariants(pager.core)
        return found, stats
    finally:
        if pager is not None:
            pager.close()


@pytest.mark.parametrize("policy", ["lru", "lp"])
@pytest.mark.parametrize(
    "budget", [{}, {"device_budget": "2200KiB", "host_budget": "32MiB"}], ids=["fits", "tight"]
)
def test_an_evaluation_thread_changes_nothing_of_a_training(
    budget: dict[str, Any], policy: str
) -> None:
    """A model of its own, with new shapes in every step: nothing of it is metered, and what it
    pins is no part of what the training needs."""
    torch.manual_seed(1)
    other = nn.Linear(128, 512)
    plain = {rows: other(torch.ones(rows, 128)).detach() for rows in (3, 5, 7)}

    def evaluate(pager: tp.Pager | None, step: int, loss: torch.Tensor) -> None:
        if pager is None:
            return
        if step == 0:
            pager.page_module(other)
        metering, need = pager.core.budget.metering, pager.core.residency.largest_need

        def run() -> None:
            assert not pager.core.in_iteration()
            with torch.no_grad():
                rows = (3, 5, 7)[step]
                out = other(torch.ones(rows, 128))
                assert equal(out, plain[rows])
                assert not torch.autograd._profiler_enabled()

        assert in_threads(run, run) == [None, None]
        assert pager.core.budget.metering == metering
        assert pager.core.residency.largest_need == need

    def nothing(pager: tp.Pager | None, step: int, loss: torch.Tensor) -> None: ...

    wanted, _ = _train(False, nothing)
    alone, _ = _train(True, nothing, policy=policy, **budget)
    beside, stats = _train(True, evaluate, policy=policy, **budget)
    assert stats["iterations"] == 3
    assert all(equal(a, b) for a, b in zip(alone, wanted))
    assert all(equal(a, b) for a, b in zip(beside, wanted))


def test_other_threads_accesses_are_not_in_the_log_of_an_iteration() -> None:
    with make_pager(8, policy="lp") as pager:
        mine, theirs = pager.page(matrix(2)), pager.page(matrix(2, 1))
        for _ in range(2):
            with pager.iteration():
                mine.sum()
                before = len(pager.core.follower.log.keys)
                assert in_threads(lambda: theirs.add_(1)) == [None]
                assert len(pager.core.follower.log.keys) == before
                mine.add_(1)
                assert len(pager.core.follower.log.keys) == before + 1


def test_a_backward_pass_in_another_thread() -> None:
    """It is no part of the iteration, and the gradients are plain's."""

    def backward(pager: tp.Pager | None, step: int, loss: torch.Tensor) -> None:
        assert in_threads(loss.backward) == [None]

    wanted, _ = _train(False, backward)
    found, _ = _train(True, backward)
    assert all(equal(a, b) for a, b in zip(found, wanted))


def test_forward_passes_in_threads_of_an_iteration() -> None:
    """As ``torch.nn.DataParallel`` does them: the graph is made in threads, backward is not."""
    torch.manual_seed(0)
    weight = torch.randn(256, 128)
    inputs = [torch.randn(4, 128) for _ in range(3)]

    def train(weight: torch.Tensor) -> torch.Tensor:
        outs: list[Any] = [None] * 3

        def forward(index: int) -> Callable[[], None]:
            def run() -> None:
                outs[index] = F.linear(inputs[index], weight).pow(2).sum()

            return run

        assert in_threads(*(forward(index) for index in range(3))) == [None] * 3
        sum(outs).backward()
        assert weight.grad is not None
        return weight.grad.detach().clone()

    wanted = train(weight.clone().requires_grad_())
    with make_pager(4) as pager:
        paged = pager.page(weight).requires_grad_()
        with pager.iteration():
            assert equal(train(paged), wanted)


def test_an_iteration_in_another_thread_than_the_pagers() -> None:
    """While the thread that made the pager has something pinned, which is known as its own."""
    plain = [matrix(3), matrix(5, 1)]
    with make_pager(8, policy="lp") as pager:
        mine, theirs = (pager.page(tensor) for tensor in plain)

        def iterate() -> None:
            with pager.iteration():
                assert pager.core.in_iteration()
                theirs.mul_(2)
                assert len(pager.core.follower.log.keys) == 1

        with mine.pin() as view:
            assert in_threads(iterate) == [None]
            assert not pager.core.in_iteration()
            assert equal(view, plain[0])
        assert equal(theirs.to_dense(), plain[1] * 2)
        assert not pager.core.turns._listed
        check_invariants(pager.core)


def test_dense_memory_of_other_threads_is_not_measured_and_has_what_the_training_leaves(
    allocator: DenseAllocator,
) -> None:
    """The reserve is the training's peak; half as much more is refused to another thread, at its
    own cost, and nothing of it is in what the training is said to need."""
    torch.manual_seed(0)
    model, other = nn.Linear(128, 128), nn.Linear(128, 128)
    inputs = torch.randn(1 << 12, 128)
    found: list[list[BaseException | None]] = []

    def evaluate(rows: int) -> Callable[[], None]:
        def run() -> None:
            with torch.no_grad():
                other(torch.ones(1, 128))
                other(inputs[:1].expand(rows, 128))

        return run

    def train(pager: tp.Pager, *rows: int) -> int:
        for _ in range(3):
            with pager.iteration():
                out = model(inputs)
                errors = in_threads(*(evaluate(count) for count in rows))
                found.append(errors)
                out.sum().backward()
                model.zero_grad()
        return pager.core.budget.dense_peak

    with make_pager(32, dense_reserve="auto") as pager:
        pager.page_module(model)
        pager.page_module(other)
        alone = train(pager)
        assert train(pager, 1 << 10) == alone
        assert all(error is None for errors in found for error in errors)
        found.clear()
        train(pager, 1 << 16)
        for (error,) in found:
            assert isinstance(error, tp.InfeasibleBudget)
            assert "dense_reserve=" in str(error)
        check_invariants(pager.core)


def test_a_metered_iteration_does_not_measure_dense_memory_of_other_threads(
    allocator: DenseAllocator,
) -> None:
    def peak(rows: int) -> int:
        torch.manual_seed(0)
        model, other = nn.Linear(128, 128), nn.Linear(128, 128)

        def evaluate() -> None:
            with torch.no_grad():
                other(torch.ones(1, 128))
                other(torch.ones(1, 128).expand(rows, 128))

        with make_pager(32, dense_reserve="auto") as pager:
            pager.page_module(model)
            pager.page_module(other)
            with pager.iteration():
                loss = model(torch.ones(64, 128)).sum()
                assert pager.core.budget.metering
                assert in_threads(evaluate) == [None]
                loss.backward()
            return pager.core.budget.dense_peak

    assert peak(1 << 12) == peak(1)


class _Deeper(torch.autograd.Function):
    """Its backward pass runs another one, ``depth`` times: autograd does the deep ones on threads
    of its own."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, depth: int, seen: Callable[[], None]
    ) -> torch.Tensor:
        ctx.weight, ctx.depth, ctx.seen = weight, depth, seen
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.seen()
        if ctx.depth:
            with torch.enable_grad():
                x = torch.ones(1, requires_grad=True)
                _Deeper.apply(x, ctx.weight, ctx.depth - 1, ctx.seen).backward()  # type: ignore[no-untyped-call]
        return grad * float(ctx.weight.detach().mean()), None, None, None


def test_threads_of_autograds_own_do_the_work_of_the_iteration() -> None:
    """As on a GPU, where all backward passes run on them."""
    with make_pager(8, policy="lp") as pager:
        weight = pager.page(torch.ones(2 * PAGE_FLOATS))
        seen: list[tuple[bool, bool]] = []

        def look() -> None:
            seen.append(
                (threading.current_thread() is threading.main_thread(), pager.core.in_iteration())
            )

        for _ in range(2):
            seen.clear()
            with pager.iteration():
                x = torch.ones(1, requires_grad=True)
                _Deeper.apply(x, weight, 70, look).backward()  # type: ignore[no-untyped-call]
                assert len(pager.core.follower.log.keys) >= len(seen)
            assert x.grad is not None
            assert x.grad.item() == 1
            assert all(inside for _, inside in seen)
            assert not all(main for main, _ in seen)
        check_invariants(pager.core)
