"""An accelerator without a kit of its own, as the runtime uses it."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tensorpager as tp
from tensorpager.pager.debug.check import check_invariants
from tensorpager.pager.devices import plain_memory
from tensorpager.pager.devices.accelerator import Accelerator
from tensorpager.pager.devices.choice import make_device, resolve
from tensorpager.pager.devices.device import URGENT, Copy
from tensorpager.pager.errors import PagerError
from tensorpager.pager.machine.doctor.gpu import gpu_findings
from tensorpager.planner.trace_file import read_trace

from .device import NAME, SCHEDULES, Machine, on

pytestmark = [pytest.mark.simulated, pytest.mark.usefixtures("machine")]
PAGE = 64 << 10
MIB = 1 << 20
SLOW_SECONDS = 0.1


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            self.qkv(self.norm(x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(x)))


def transformer() -> nn.Module:
    torch.manual_seed(0)
    blocks = [Block(96) for _ in range(2)]
    return nn.Sequential(nn.Embedding(128, 96), *blocks, nn.Linear(96, 128)).to(NAME)


def train(
    pager: tp.Pager | None, *, aside: bool = False, steps: int = 3
) -> tuple[list[float], list[torch.Tensor]]:
    """``aside``: forward and backward on a stream of the user's own, in every other step only the
    former; gradients end there too, behind the optimizer, as plain PyTorch wants it."""
    net = transformer()
    if pager is not None:
        pager.page_module(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    if pager is not None:
        pager.optimizer(optimizer)
    side = torch.Stream(NAME)
    chance = torch.Generator().manual_seed(1)
    losses = []
    for step in range(steps):
        x, y = torch.randint(0, 128, (2, 2, 32), generator=chance).to(NAME)
        with nullcontext() if pager is None else pager.iteration():
            with on_another(side) if aside else nullcontext():
                loss = F.cross_entropy(net(x).flatten(0, 1), y.flatten())
                if step % 2:
                    loss.backward()
            if not step % 2:
                loss.backward()
            optimizer.step()
            with on_another(side) if aside else nullcontext():
                optimizer.zero_grad()
        losses.append(loss.item())
        if pager is not None:
            check_invariants(pager.core)
    paged = pager is not None
    return losses, [(p.to_dense() if paged else p).detach().cpu() for p in net.parameters()]  # type: ignore[attr-defined]


@contextmanager
def on_another(stream: torch.Stream) -> Iterator[None]:
    """``stream`` is current inside, behind what was queued before; later work is behind it."""
    main = torch.accelerator.current_stream()
    stream.wait_stream(main)
    with on(stream):
        yield
    main.wait_stream(stream)


@pytest.fixture(scope="module")
def plain() -> tuple[list[float], list[torch.Tensor]]:
    return train(None)


LANES = ("aside", "host", "disk", "reserve", "fits")
QUICK = (("aside", "lazy"), ("fits", "lazy"))


@pytest.mark.parametrize(
    ("lane", "schedule"),
    [
        pytest.param(*both, marks=() if both in QUICK else pytest.mark.slow)
        for both in itertools.product(LANES, SCHEDULES)
    ],
)
def test_training_has_the_bits_of_the_same_device(
    lane: str,
    schedule: str,
    machine: Machine,
    plain: tuple[list[float], list[torch.Tensor]],
    tmp_path: Path,
) -> None:
    options: dict[str, object] = {"host_budget": 13 * MIB + 7}  # in pieces of several sizes
    if lane == "disk":
        options = {"host_budget": MIB, "disk_budget": "32MiB", "disk_path": tmp_path}
    elif lane == "reserve":
        options["dense_reserve"] = "2MiB"
    machine.schedule(schedule, 1)
    machine.check(True)
    machine.races()
    budget = 256 * MIB if lane == "fits" else 4 * MIB
    with tp.Pager(budget, page_size=PAGE, device=NAME, **options) as pager:  # type: ignore[arg-type]
        losses, parameters = train(pager, aside=lane == "aside")
        arena, settled = pager.core.backend.arena.numel(), pager.core.budget.settled
        frames = pager.core.residency.pool.count
        assert pager.device == torch.device(NAME, 0)
        assert pager.stats()["faults"] > 0
    assert (settled, arena) == (True, frames * PAGE)  # made anew in its final size
    assert lane != "fits" or arena < budget // 8  # what is left over is for dense memory
    assert losses == plain[0]
    assert all(torch.equal(a, b) for a, b in zip(parameters, plain[1], strict=True))
    assert machine.races() == []


# -- the kit ---------------------------------------------------------------------------------------
@pytest.fixture
def device() -> Iterator[Accelerator]:
    device = make_device(resolve(NAME), 64 * PAGE, 4 * PAGE)
    assert isinstance(device, Accelerator)
    yield device
    torch.accelerator.synchronize()
    device.close()


def test_host_memory_is_page_locked_and_no_more_than_was_asked_for(
    device: Accelerator, machine: Machine
) -> None:
    before = machine.page_locked_bytes()
    pieces = device.host_memory(13 * PAGE)
    assert [len(piece.bytes) // PAGE for piece in pieces] == [8, 4, 1]
    assert machine.page_locked_bytes() - before == 13 * PAGE
    for piece in pieces:
        assert torch.from_numpy(piece.bytes).is_pinned()


def test_nobody_waits_for_a_table(machine: Machine) -> None:
    with tp.Pager("4MiB", device=NAME, page_size=PAGE, host_budget="4MiB") as pager:
        paged = pager.page(torch.randn(3 * PAGE // 4, device=NAME))
        run = paged._storage.run
        before = machine.counts()
        with paged.pin():
            frames = pager.core.table.device_frames(run.first, run.count)
            pager.core.table.frame[run.first] = -7  # what comes later is not seen
        after = machine.counts()
        assert (after.waits, after.pageable) == (before.waits, before.pageable)
        found = frames.cpu().tolist()
        pager.core.table.frame[run.first] = found[0]
        assert found == list(range(found[0], found[0] + run.count))


@pytest.mark.parametrize("room", [True, False])
def test_an_arena_that_is_made_anew_keeps_its_bytes(
    device: Accelerator, machine: Machine, room: bool
) -> None:
    (piece,) = device.host_memory(4 * PAGE)
    piece.bytes[:] = torch.arange(4 * PAGE).to(torch.uint8).numpy()
    device.reach(device.copy([Copy(0, piece.bytes)], URGENT, (), to_device=True))
    assert device.remake((6 if room else 61) * PAGE, empty=False) == room  # beside the old one
    size = device.arena.numel()
    assert size == (6 if room else 4) * PAGE
    assert device.arena[: 4 * PAGE].cpu().numpy().tobytes() == piece.bytes.tobytes()
    machine.limit(torch.accelerator.memory_reserved())
    with pytest.raises(PagerError, match=r"bytes are free on queued:0 for the arena"):
        device.remake(1 << 30, empty=True)
    assert device.arena.numel() == size


def an_arena_that_has_to_grow(pager: tp.Pager) -> tuple[list[tp.PagedTensor], int]:
    """Full of pages, and a size for which the budget has no room beside it."""
    frames = pager.core.residency.pool.count
    weights = [pager.page(torch.full((PAGE // 4,), float(n), device=NAME)) for n in range(frames)]
    return weights, frames + 8


def hold_their_numbers(weights: list[tp.PagedTensor]) -> bool:
    return all(bool((w.to_dense().cpu() == n).all()) for n, w in enumerate(weights))


def test_pages_of_an_arena_that_is_made_anew_stay_inside_the_budgets(machine: Machine) -> None:
    """They leave for the tiers below, and no copy of them is made in other host memory."""
    with tp.Pager(BUDGET, page_size=PAGE, device=NAME, host_budget=BUDGET) as pager:
        weights, frames = an_arena_that_has_to_grow(pager)
        before = machine.counts()
        with pager.core.quiet():
            pager.core.residency.resize(frames)
        assert machine.counts().pageable == before.pageable
        assert pager.core.backend.arena.numel() == frames * PAGE
        check_invariants(pager.core)
        assert hold_their_numbers(weights)


def test_an_arena_whose_pages_have_nowhere_to_go_is_what_it_was() -> None:
    with tp.Pager(BUDGET, page_size=PAGE, device=NAME) as pager:
        weights, frames = an_arena_that_has_to_grow(pager)
        with pytest.raises(tp.TierFull, match=r"raise host_budget.*With dense_reserve= the arena"):
            pager.core.residency.resize(frames)
        check_invariants(pager.core)
        assert hold_their_numbers(weights)


@pytest.mark.parametrize("frozen", [9, 0])
def test_where_nothing_can_leave_the_arena_stays_as_large_as_it_is(frozen: int) -> None:
    """It is larger than it need be. Where dense memory has too little beside it, what the first
    iteration had in pages is in pages again."""
    plain = stack_of_linears(None, frozen)
    with tp.Pager(BUDGET, page_size=PAGE, device=NAME) as pager:
        before = pager.core.backend.arena.numel()
        assert stack_of_linears(pager, frozen) == plain
        assert pager.stats()["fits"] == (frozen > 0)
        assert pager.core.backend.arena.numel() == before
        assert pager.stats()["peak_bytes"]["device"] <= BUDGET


def stack_of_linears(pager: tp.Pager | None, frozen: int) -> list[float]:
    """Losses; the weights are a third of BUDGET."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(256, 256) for _ in range(10))).to(NAME)
    net[:frozen].requires_grad_(False)
    if pager is not None:
        pager.page_module(net)
    optimizer: Any = torch.optim.SGD(net[frozen:].parameters(), lr=0.1)
    if pager is not None:
        optimizer = pager.optimizer(optimizer)
    losses = []
    for _ in range(3):
        with nullcontext() if pager is None else pager.iteration():
            loss = net(torch.ones(4, 256, device=NAME)).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_an_allocator_that_does_not_count_needs_a_reserve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plain_memory, "has_statistics", lambda device: False)
    with pytest.raises(ValueError, match=r"does not say how much memory is in use; pass dense_res"):
        tp.Pager("4MiB", device=NAME, page_size=PAGE)
    with tp.Pager("4MiB", device=NAME, page_size=PAGE, dense_reserve="1MiB") as pager:
        x = torch.randn(1000, device=NAME)
        assert torch.equal(pager.page(x).to_dense(), x)


def test_doctor_says_what_the_kit_has_to_do_without() -> None:
    (found,) = (finding for finding in gpu_findings() if finding.what == "device memory")
    assert found.state == "warning"
    assert found.detail.startswith("queued: the plain kit, without virtual memory")


@pytest.mark.parametrize("name", [f"{NAME}:3", "cuda", "xpu:1"])
def test_a_device_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(PagerError, match="but PyTorch sees"):
        tp.Pager("4MiB", device=name)


# -- dense memory ----------------------------------------------------------------------------------
def test_the_meter_counts_what_comes_on_top(device: Accelerator) -> None:
    """Not what was alive, nor what the cache still held, nor the arena."""
    alive = torch.empty(4 * MIB, dtype=torch.uint8, device=NAME)
    device.count_anew()
    for _ in range(2):
        cached = torch.empty(64 * MIB, dtype=torch.uint8, device=NAME)
        del cached
        device.meter_start()
        temporary = torch.empty(8 * MIB, dtype=torch.uint8, device=NAME)
        del temporary
        assert 8 * MIB <= device.meter_stop() < 12 * MIB
    assert alive.numel() == 4 * MIB


class Watched:
    """Tensors on the device, the arena among them: the most at any allocation that is made here or
    by the kit, beyond what there was."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.most, self._before = 0, torch.accelerator.memory_allocated()
        allocate = plain_memory.PlainMemory._allocate

        def allocated(kit: plain_memory.PlainMemory, nbytes: int) -> torch.Tensor:
            memory = allocate(kit, nbytes)
            self.look()
            return memory

        monkeypatch.setattr(plain_memory.PlainMemory, "_allocate", allocated)

    def look(self) -> None:
        self.most = max(self.most, torch.accelerator.memory_allocated() - self._before)

    def dense(self, nbytes: int) -> torch.Tensor:
        tensor = torch.empty(nbytes, dtype=torch.uint8, device=NAME)
        self.look()
        return tensor


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    gc.collect()
    return Watched(monkeypatch)


BUDGET = 8 * MIB


@contextmanager
def one_linear(step: bool = True) -> Iterator[tuple[tp.Pager, Any]]:
    """A pager and ``train(act)``: an iteration in which ``act`` is called amid the forward pass."""
    with tp.Pager(BUDGET, page_size=PAGE, device=NAME, host_budget="16MiB") as pager:
        net = pager.page_module(nn.Sequential(*(nn.Linear(256, 256) for _ in range(8))).to(NAME))
        optimizer = pager.optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
        x = torch.ones(4, 256, device=NAME)

        def train(act: Any) -> None:
            with pager.iteration():
                y = x
                for layer in net:
                    y = layer(y)
                    act()
                y.sum().backward()
                if step:
                    optimizer.step()
                    optimizer.zero_grad()
            check_invariants(pager.core)

        yield pager, train


def test_the_arena_makes_room_in_the_first_iteration(watched: Watched) -> None:
    """It begins with three quarters of the budget, which no allocator can take from it."""
    with one_linear() as (pager, train):
        kept: list[torch.Tensor] = []
        train(lambda: kept.append(watched.dense(MIB // 2)))
        assert pager.core.budget.settled
    assert 4 * MIB < watched.most <= BUDGET + MIB


def test_the_arena_makes_room_when_a_step_begins(watched: Watched) -> None:
    with one_linear() as (pager, train):
        train(lambda: None)
        frames = pager.core.residency.pool.count
        watched.most = 0
        train(lambda: watched.dense(6 * MIB))
        assert pager.core.residency.pool.count < frames
        assert pager.core.backend.arena.numel() + 6 * MIB <= BUDGET
        watched.most = 0
        train(lambda: watched.dense(6 * MIB))
        assert 6 * MIB < watched.most <= BUDGET


@pytest.mark.parametrize("step", [True, False])
def test_too_much_dense_memory_is_refused_as_soon_as_it_is_seen(
    watched: Watched, step: bool
) -> None:
    with one_linear(step) as (pager, train):
        train(lambda: None)
        weight = next(pager.core.models[0]().parameters())  # type: ignore[union-attr]
        before = weight.to_dense().cpu()
        with pytest.raises(tp.InfeasibleBudget, match=r"\d{7} bytes of tensors were in use"):
            train(lambda: watched.dense(9 * MIB))
        assert torch.equal(weight.to_dense().cpu(), before)
        train(lambda: None)


def test_more_than_the_budget_in_the_first_iteration_is_told(watched: Watched) -> None:
    """Where the arena cannot become smaller in time."""
    with one_linear() as (pager, train):
        with pytest.warns(RuntimeWarning, match="bytes on queued:0 at once, .* more than device_b"):
            train(lambda: watched.dense(5 * MIB))
        assert pager.stats()["peak_bytes"]["device"] > BUDGET
        train(lambda: watched.dense(5 * MIB))


def test_small_tensors_are_aligned_as_by_the_allocators_of_gpus() -> None:
    with tp.Pager("4MiB", device=NAME, page_size=PAGE, host_budget="4MiB") as pager:
        tensors = [pager.page(torch.randn(n, device=NAME)) for n in (1, 100, 3, 200)]
        assert {t._storage.run.id for t in tensors} == {tensors[0]._storage.run.id}
        assert all(t._storage.offset % 512 == 0 for t in tensors)


# -- time ------------------------------------------------------------------------------------------
def one_slow_op(pager: tp.Pager, machine: Machine, weights: list[tp.PagedTensor]) -> None:
    """The device takes long, the host does not."""
    for number, weight in enumerate(weights):
        weight.mul_(2)
        if number == 1:
            machine.queue("slow", lambda: time.sleep(SLOW_SECONDS))


def test_ops_take_the_time_of_the_device(machine: Machine, tmp_path: Path) -> None:
    """In the logs that plans are made from, and in recordings."""
    machine.schedule("threads", delay_us=0, probability=0)
    budget = 6 * PAGE
    with tp.Pager(
        budget, page_size=PAGE, device=NAME, host_budget="8MiB", dense_reserve=2 * PAGE
    ) as pager:
        weights = [pager.page(torch.randn(2 * PAGE // 4, device=NAME)) for _ in range(4)]
        for _ in range(3):
            with pager.iteration():
                one_slow_op(pager, machine, weights)
        assert pager.core.follower is not None
        kind = pager.core.follower.signatures.all[-1]
        assert kind.seen > 1
        longest = max(range(len(kind.keys)), key=lambda at: kind.seconds()[at])
        assert (longest, kind.seconds()[longest] > SLOW_SECONDS / 2) == (1, True)
        path = tmp_path / "trace.parquet"
        with pager.record(path), pager.iteration():
            one_slow_op(pager, machine, weights)
    trace = read_trace(path)
    assert trace.op_duration_us.max() > SLOW_SECONDS / 2 * 1e6
    assert int(trace.op_duration_us.argmax()) < trace.ops - 1


def ops_on_late_pages(pager: tp.Pager, machine: Machine, weights: list[tp.PagedTensor]) -> None:
    """All ops are queued at once. The device waits for the pages of one."""
    backend = pager.core.backend
    assert isinstance(backend, Accelerator)
    for number, weight in enumerate(weights):
        if number == 1:
            for stream in backend._copies.values():
                with on(stream):
                    machine.queue("slow", lambda: time.sleep(SLOW_SECONDS))
        weight.mul_(2)


def test_waiting_of_the_device_for_pages_is_no_part_of_an_op(
    machine: Machine, tmp_path: Path
) -> None:
    """In neither log, though the host does not wait."""
    machine.schedule("threads", delay_us=0, probability=0)
    with tp.Pager(
        6 * PAGE, page_size=PAGE, device=NAME, host_budget="8MiB", dense_reserve=2 * PAGE
    ) as pager:
        weights = [pager.page(torch.randn(2 * PAGE // 4, device=NAME)) for _ in range(4)]
        assert pager.core.follower is not None
        pager.core.follower.most_plans = 0
        for _ in range(3):
            with pager.iteration():
                ops_on_late_pages(pager, machine, weights)
        kind = pager.core.follower.signatures.all[-1]
        assert kind.seen > 1
        assert max(kind.seconds()) < SLOW_SECONDS / 2
        on_demand = kind.ways.latest[False]
        assert min(taken.stall_us for taken in on_demand) > SLOW_SECONDS / 2 * 1e6
        assert min(taken.us for taken in on_demand) > 0
        path = tmp_path / "trace.parquet"
        with pager.record(path), pager.iteration():
            ops_on_late_pages(pager, machine, weights)
    trace = read_trace(path)
    assert trace.op_duration_us.max() < SLOW_SECONDS / 2 * 1e6
    assert trace.metadata["stall_us"] > SLOW_SECONDS / 2 * 1e6
