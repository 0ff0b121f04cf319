"""Dense memory that the CPU has no room for is refused by name; what was unforeseen gets room."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest
import torch
from torch import nn

import tensorpager as tp
from tensorpager.pager.debug.check import check_invariants
from tensorpager.pager.devices.dense_allocator import Account, DenseAllocator

from .models import plain

MIB = 1 << 20
BUDGET = 8 * MIB


class Head(nn.Module):
    """Takes as much dense memory as it is told to, on its way forward or back."""

    def __init__(self) -> None:
        super().__init__()
        squares = [nn.Linear(256, 256) for _ in range(4)]  # 3 MiB with optimizer states
        self.linear = nn.Sequential(nn.Linear(128, 256), *squares)
        self.more, self.more_back = 0, 0
        self.look: Callable[[], object] = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.linear(x)
        if self.more:
            more = torch.zeros(self.more // 4)
            self.look()
            out = out + more.sum()
        if self.more_back:
            out = out.sum().expand(self.more_back // 4)[:1]  # backward makes zeros of that size
        return out.sum()


@pytest.fixture
def pager(one_thread: None) -> Iterator[tp.Pager]:
    with tp.Pager(
        BUDGET, host_budget="16MiB", page_size="64KiB", device="cpu", policy="lru"
    ) as made:
        yield made


def make(pager: tp.Pager | None) -> tuple[Head, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Head()
    if pager is not None:
        pager.page_module(model)
    optimizer = torch.optim.AdamW(model.parameters())
    return model, optimizer if pager is None else pager.optimizer(optimizer)


def step(pager: tp.Pager, model: Head, optimizer: torch.optim.Optimizer) -> float:
    with pager.iteration():
        loss = model(torch.ones(64, 128))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def test_what_cannot_be_had_is_refused_with_names(
    pager: tp.Pager, allocator: DenseAllocator
) -> None:
    model, optimizer = make(pager)
    step(pager, model, optimizer)
    before = plain(list(model.parameters()))
    model.more = 12 * MIB

    def refused() -> None:
        with pager.iteration():
            held = [torch.ones(200, 1000), torch.ones(300, 1000), torch.ones(100_000)]
            model(held[0][:64, :128])

    with pytest.raises(tp.InfeasibleBudget) as refusal:
        refused()
    text = str(refusal.value)
    assert "Head.forward() at" in text
    assert "torch.zeros(self.more // 4)" in text
    assert " asked for 12.00 MiB (12582912 bytes)" in text
    largest = "[300, 1000], torch.float32), 781.25 KiB ([200, 1000], torch.float32), 390.62 KiB"
    assert largest in text
    assert f"Raise device_budget (now {BUDGET} bytes)" in text
    assert all(torch.equal(a, b) for a, b in zip(before, plain(list(model.parameters()))))
    assert refusal.value.minimum >= 12 * MIB
    model.more = 0
    step(pager, model, optimizer)
    torch.ones(12 * MIB)  # outside of iterations there is no cap


def spread(x: torch.Tensor) -> torch.Tensor:
    wide = x.repeat(96, 1)
    return wide + wide


class Spread(nn.Module):
    """With a function between the module and the op."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(128, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return spread(self.linear(x)).sum()


def test_the_first_iteration_is_refused_with_names(
    pager: tp.Pager, allocator: DenseAllocator
) -> None:
    model = pager.page_module(Spread())
    optimizer = pager.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    other = torch.ones(4 * MIB)  # from before: none of it
    with pytest.raises(tp.InfeasibleBudget, match="No parameter was changed") as refusal:
        step(pager, model, optimizer)
    text = str(refusal.value)
    assert "was at its peak of 12.09 MiB when spread() at 'return wide + wide' in Spread" in text
    made = "(made by spread() at 'wide = x.repeat(96, 1)' in Spread.forward())"
    assert f"6.00 MiB {made}" in text
    assert other.nbytes == 16 * MIB


def test_dense_memory_after_the_first_step_is_named(
    pager: tp.Pager, allocator: DenseAllocator
) -> None:
    model, optimizer = make(pager)
    held = []

    def refused() -> None:
        with pager.iteration():
            model(torch.ones(64, 128)).backward()
            optimizer.step()
            held.append(torch.ones(7, MIB // 4))
            held.append(torch.ones(3, MIB // 4))

    with pytest.raises(tp.InfeasibleBudget, match="after the optimizer's step") as refusal:
        refused()
    text = str(refusal.value)
    assert "when refused() at 'held.append(torch.ones(3, MIB // 4))' had what it takes" in text
    assert "7.00 MiB ([7, 262144], torch.float32), 3.00 MiB ([3, 262144], torch.float32)" in text


def test_the_optimizers_step_is_named(pager: tp.Pager, allocator: DenseAllocator) -> None:
    model = pager.page_module(nn.Linear(512, 1024, bias=False))
    optimizer = pager.optimizer(torch.optim.Rprop(model.parameters()))

    def refused() -> None:
        with pager.iteration():
            model(torch.ones(1, 512)).sum().backward()
            optimizer.step()

    with pytest.raises(tp.InfeasibleBudget, match="is a step of Rprop"):
        refused()


def test_an_op_that_is_called_by_its_name_is_named(
    pager: tp.Pager, allocator: DenseAllocator
) -> None:
    step(pager, *make(pager))
    with (
        pytest.raises(tp.InfeasibleBudget, match=r"aten\.zeros\.default\(.* asked for"),
        pager.iteration(),
    ):
        torch.ops.aten.zeros.default([3 * MIB])


def test_an_op_of_backward_is_named(pager: tp.Pager, allocator: DenseAllocator) -> None:
    model, optimizer = make(pager)
    step(pager, model, optimizer)
    model.more_back = 12 * MIB
    with pytest.raises(tp.InfeasibleBudget, match="SliceBackward0 asked for 12"):
        step(pager, model, optimizer)
    model.more_back = 0
    step(pager, model, optimizer)


def test_what_was_not_foreseen_gets_room(pager: tp.Pager, allocator: DenseAllocator) -> None:
    more = [0, 0, BUDGET * 5 // 8, BUDGET * 5 // 8, 0]
    model, optimizer = make(pager)
    found, arenas = [], []
    for model.more in more:
        found.append(step(pager, model, optimizer))
        arenas.append(pager.stats()["arena_bytes"])
    assert arenas[0] == arenas[1] > arenas[2] >= arenas[3] == arenas[4]
    assert arenas[2] + more[2] <= BUDGET
    assert pager.stats()["dense_peak_bytes"] > 4 * MIB
    expected = []
    other, optimizer = make(None)
    for _ in more:
        loss = other(torch.ones(64, 128))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    assert found == expected


def taken(pager: tp.Pager) -> int:
    """Frames that are committed, and dense bytes, now."""
    account = pager.core.backend._account
    return pager.core.residency.frames * pager.page_size + account.current


def test_the_arena_gives_frames_while_the_op_runs(
    pager: tp.Pager, allocator: DenseAllocator
) -> None:
    model, optimizer = make(pager)
    step(pager, model, optimizer)
    seen: list[int] = []
    model.look = lambda: seen.append(taken(pager))
    for model.more in (BUDGET // 2, BUDGET * 5 // 8):
        step(pager, model, optimizer)
        assert model.more < seen[-1] <= BUDGET
    assert pager.stats()["peak_bytes"]["device"] <= BUDGET
    model.more, model.more_back = 0, BUDGET * 3 // 4
    step(pager, model, optimizer)
    assert pager.stats()["peak_bytes"]["device"] <= BUDGET


def test_an_iteration_that_fails_after_it_was_given_frames(
    pager: tp.Pager, allocator: DenseAllocator
) -> None:
    model, optimizer = make(pager)
    step(pager, model, optimizer)
    before = plain(list(model.parameters()))
    model.more, model.more_back = BUDGET // 2, 2 * BUDGET
    with pytest.raises(tp.InfeasibleBudget, match="asked for 16"):
        step(pager, model, optimizer)
    optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(before, plain(list(model.parameters()))))
    model.more = model.more_back = 0
    step(pager, model, optimizer)
    check_invariants(pager.core)


def test_what_is_pinned_stays(pager: tp.Pager, allocator: DenseAllocator) -> None:
    model, optimizer = make(pager)
    step(pager, model, optimizer)
    values = plain(list(model.parameters()))

    def beside_pins(nbytes: int) -> int:
        with pager.iteration(), ExitStack() as stack:
            for parameter in model.parameters():
                stack.enter_context(parameter.pin())
            more = torch.zeros(nbytes // 4)
            assert more.nbytes == nbytes
            return taken(pager)

    assert beside_pins(BUDGET // 2) <= BUDGET
    with pytest.raises(tp.InfeasibleBudget, match=r"asked for 7\.50 MiB"):
        beside_pins(BUDGET * 15 // 16)
    assert all(torch.equal(a, b) for a, b in zip(values, plain(list(model.parameters()))))
    check_invariants(pager.core)
    step(pager, model, optimizer)


def test_a_pin_in_the_way_of_the_border_is_no_refusal(
    pager: tp.Pager, allocator: DenseAllocator
) -> None:
    """Frames below what is pinned are lent: no page gets there, and they take no memory."""
    model, optimizer = make(pager)
    step(pager, model, optimizer)
    values = plain(list(model.parameters()))
    others = [pager.page(torch.full((100_000,), float(i))) for i in range(20)]  # 8 MB
    high = max(others, key=lambda tensor: tensor._storage.run.base)
    with pager.iteration():
        with high.pin() as dense:
            expected = dense.clone()
            more = [torch.zeros(BUDGET // 4 // 4), torch.zeros(BUDGET // 8 // 4)]
            assert taken(pager) <= BUDGET
            lent = pager.core.residency._lent.tolist()
            assert lent
            assert not any(pager.core.residency.arena.view(-1, pager.page_size)[lent].any(1))
            check_invariants(pager.core)
            assert [int(other[0]) for other in others] == list(range(20))
            assert taken(pager) <= BUDGET
            assert torch.equal(dense, expected)
        assert all(torch.equal(a, b) for a, b in zip(values, plain(list(model.parameters()))))
        assert more[0].nbytes == BUDGET // 4
    assert pager.stats()["peak_bytes"]["device"] <= BUDGET
    check_invariants(pager.core)
    others.clear()
    del more, high
    model.more = BUDGET * 5 // 8
    model.look = lambda: seen.append(taken(pager))
    seen: list[int] = []
    step(pager, model, optimizer)
    assert model.more < seen[0] <= BUDGET


def _held_beside(
    allocator: DenseAllocator, budget: int, rows: list[int], optimizer: type[torch.optim.Optimizer]
) -> int:
    """Most device bytes in an iteration that was not metered: the arena, and what an account of our
    own counts. The batch is made inside, and it and what the model gives live until the end."""
    account, most = Account(allocator), 0
    torch.manual_seed(0)
    with tp.Pager(
        budget, "16MiB", page_size="64KiB", device="cpu", policy="lru"
    ) as pager, closing(account):  # fmt: skip
        model = pager.page_module(nn.Linear(2048, 40))
        paged = pager.optimizer(optimizer(model.parameters()))
        for number in rows:
            with pager.iteration():
                account.reset()
                x = torch.ones(number, 2048)
                out = model(x).repeat(1, 40)
                out.square().mean().backward()
                metered = pager.core.budget.metering
                paged.step()
                paged.zero_grad()
                peak = account.peak
            if not metered:
                most = max(most, pager.stats()["arena_bytes"] + peak)
            del x, out
        assert pager.stats()["peak_bytes"]["device"] <= budget
    return most


@pytest.mark.parametrize(
    ("rows", "optimizer"), [([1, 16, 16, 1, 16], torch.optim.SGD), ([16, 16], torch.optim.Adamax)]
)
def test_nothing_goes_beyond_the_minimum(
    rows: list[int],
    optimizer: type[torch.optim.Optimizer],
    allocator: DenseAllocator,
    one_thread: None,
) -> None:
    """Neither a batch that is there before the model sees its shape, nor what is held while the
    optimizer steps."""
    minimum = 256 << 10
    for _ in range(3):
        try:
            most = _held_beside(allocator, minimum, rows, optimizer)
            break
        except tp.InfeasibleBudget as refusal:
            minimum = refusal.minimum
    assert minimum // 2 < most <= minimum


def test_little_by_little_no_more_is_had(pager: tp.Pager, allocator: DenseAllocator) -> None:
    model, optimizer = make(pager)
    step(pager, model, optimizer)
    held: list[torch.Tensor] = []

    def hoard() -> None:
        with pager.iteration():
            while len(held) < 200:
                held.append(torch.zeros(MIB // 64))

    with pytest.raises(tp.InfeasibleBudget, match="asked for 64"):
        hoard()
    assert sum(more.nbytes for more in held) <= BUDGET


def test_dense_memory_is_refused_where_no_tier_takes_the_pages(
    one_thread: None, allocator: DenseAllocator
) -> None:
    with tp.Pager(
        BUDGET, host_budget="1MiB", page_size="64KiB", device="cpu", policy="lru"
    ) as pager:
        model, optimizer = make(pager)
        step(pager, model, optimizer)
        before = plain(list(model.parameters()))
        full = pager.page(torch.ones(512, 1024))
        model.more = BUDGET * 5 // 8
        with pytest.raises(tp.InfeasibleBudget, match=r"asked for 5\.00 MiB"):
            step(pager, model, optimizer)
        assert all(torch.equal(a, b) for a, b in zip(before, plain(list(model.parameters()))))
        assert bool((full == 1).all())
        check_invariants(pager.core)
        model.more = 0
        step(pager, model, optimizer)


def test_without_an_allocator_nothing_is_refused(no_allocator: None, pager: tp.Pager) -> None:
    model, optimizer = make(pager)
    step(pager, model, optimizer)
    model.more = 12 * MIB
    step(pager, model, optimizer)


class Keeper:
    """A training that keeps dense tensors from one iteration to the next: an average of its
    weights, made in the first one, or its latest outputs, perhaps until its next step is over."""

    def __init__(self, keeps: str) -> None:
        torch.manual_seed(0)
        self.keeps = keeps
        self.model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256))
        self.kept: list[torch.Tensor] = []

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        out = self.model(torch.randn(256, 256))
        if self.keeps == "outputs":
            self.kept = [out.detach()]
        out.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if self.keeps == "outputs for long":
            self.kept = [out.detach()]
        elif self.keeps == "average" and not self.kept:
            self.kept = [p.detach().clone() for p in self.model.parameters()]
            self.kept = [p.to_dense() if type(p) is tp.PagedTensor else p for p in self.kept]

    def train(self, budget: int, allocator: DenseAllocator) -> int:
        """Most device bytes in an iteration that was not metered: the arena, and what an account of
        our own counts of all that iterations have made."""
        account, most = Account(allocator), 0
        with tp.Pager(
            budget, "16MiB", page_size="64KiB", device="cpu", policy="lru"
        ) as pager, closing(account):  # fmt: skip
            optimizer = torch.optim.SGD(pager.page_module(self.model).parameters(), lr=0.1)
            pager.optimizer(optimizer)
            for number in range(5):
                account.resume()
                try:
                    with pager.iteration():
                        self.step(optimizer)
                        metered = pager.core.budget.metering
                except tp.InfeasibleBudget:
                    foreseen = self.keeps != "outputs for long"
                    assert number == 0 or (number == 1 and not foreseen)
                    raise
                if not metered:
                    most = max(most, pager.stats()["arena_bytes"] + account.peak)
                account.pause()
            assert pager.stats()["peak_bytes"]["device"] <= budget
        return most


@pytest.mark.parametrize("keeps", ["average", "outputs", "outputs for long"])
def test_what_lives_on_counts_in_later_iterations(
    keeps: str, allocator: DenseAllocator, one_thread: None
) -> None:
    minimum = 4 << 16
    for _ in range(2 if keeps == "outputs for long" else 1):
        with pytest.raises(tp.InfeasibleBudget) as refusal:
            Keeper(keeps).train(minimum, allocator)
        minimum = refusal.value.minimum
    for budget in (minimum, minimum * 3 // 2, 3 * minimum):
        assert 0 < Keeper(keeps).train(budget, allocator) <= budget
    with pytest.raises(tp.InfeasibleBudget) as refusal:
        Keeper(keeps).train(minimum - (1 << 16), allocator)
    assert abs(refusal.value.minimum - minimum) <= 4096  # what is named is rounded up


def test_what_others_make_between_iterations_is_none_of_theirs(
    pager: tp.Pager, allocator: DenseAllocator
) -> None:
    model, optimizer = make(pager)
    kept = []
    for _ in range(4):
        step(pager, model, optimizer)
        kept.append(torch.ones(2 * MIB))  # as large as the budget
    assert pager.stats()["peak_bytes"]["device"] <= BUDGET
    assert pager.stats()["arena_bytes"] > BUDGET // 2
