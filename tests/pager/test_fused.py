"""AdamW, Adam and SGD by kernels on pages: scattered, larger than the arena, in less memory."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tensorpager as tp
from tensorpager.kernels.adam import adam_step
from tensorpager.pager.debug.chaos import chaos, scattered
from tensorpager.pager.debug.check import check_invariants
from tensorpager.pager.disk.tier import DiskTier
from tensorpager.pager.optim import again, fused
from tensorpager.pager.tensor.new_pages import empty_like_geometry

from .models import (
    PAGE_BYTES,
    World,
    assert_same,
    compare_runs,
    live_pages,
    loss_of,
    make_pager,
    mlp,
    plain,
    train,
)
from .test_planned import PlannedWorld, planned_pager

STATES = ("fp32", "bf16", "8bit")
FLOATS = PAGE_BYTES // 4  # of a page
LANES: dict[str, Callable[[tp.Pager], Any]] = {
    "plain": lambda pager: nullcontext(),
    "chaos": chaos,
    "scattered": scattered,
}
KINDS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda p, **k: torch.optim.AdamW(p, **{"lr": 1e-3, **k}),
    "adam": lambda p, **k: torch.optim.Adam(p, **{"lr": 1e-3, **k}),
    "sgd": lambda p, **k: torch.optim.SGD(p, **{"lr": 0.05, **k}),
}
FLAGS: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw": ("adamw", {}),
    "adamw-amsgrad-maximize": ("adamw", {"amsgrad": True, "maximize": True, "lr": 1e-5}),
    "adam-amsgrad": ("adam", {"amsgrad": True, "weight_decay": 0.1}),
    "adam-tensor-lr": ("adam", {"lr": torch.tensor(1e-3)}),
    "sgd": ("sgd", {}),
    "sgd-momentum": ("sgd", {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}),
    "sgd-nesterov-maximize": ("sgd", {"momentum": 0.9, "nesterov": True, "maximize": True}),
}


class FusedWorld(World):
    """Optimizers are paged with ``options``."""

    def __init__(self, pager: tp.Pager, **options: Any) -> None:
        super().__init__(pager)
        self.options = options

    def optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        assert self.pager is not None
        return self.pager.optimizer(optimizer, **self.options)


class Calls:
    """What the kernels were called for."""

    def __init__(self) -> None:
        self.lists: list[int] = []  # parameters of each call
        self.firsts: list[int] = []


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    seen = Calls()
    for name in ("adam_step", "sgd_step"):
        real = getattr(fused, name)

        def counted(params: Any, *args: Any, real: Any = real, **options: Any) -> None:
            seen.lists.append(len(params))
            seen.firsts.extend(options["firsts"])
            real(params, *args, **options)

        monkeypatch.setattr(fused, name, counted)
    return seen


def slow_unless(quick: Sequence[Any], every: Iterable[Any]) -> list[Any]:
    def case(value: Any) -> Any:
        values = value if isinstance(value, tuple) else (value,)
        return value if value in quick else pytest.param(*values, marks=pytest.mark.slow)

    return [case(value) for value in every]


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]


# -- the same bits -------------------------------------------------------------------------------
SAME_BITS = [(f, lane, s) for f in FLAGS for lane in LANES for s in (None, "fp32")]
QUICK_BITS = [
    ("adamw", "chaos", "fp32"),
    ("adamw", "scattered", None),
    ("sgd-momentum", "scattered", None),
]


@pytest.mark.parametrize(("flags", "lane", "states"), slow_unless(QUICK_BITS, SAME_BITS))
def test_the_same_bits(one_thread, calls: Calls, flags: str, lane: str, states: str | None) -> None:
    kind, options = FLAGS[flags]

    def script(world: World) -> object:
        model = world.module(mlp(depth=2 if lane == "chaos" else 4))
        chosen = {"foreach": False, **copy.deepcopy(options)}  # schedulers write to a tensor
        optimizer = world.optimizer(KINDS[kind](two_groups(model), **chosen))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.5)
        losses = []
        for _ in range(4 if (flags, lane, states) in QUICK_BITS else 20):
            losses += train(world, model, optimizer, 1)
            scheduler.step()
        return losses, model, optimizer

    # A matrix with gradient and states takes 16 pages. A third of the arena holds them together.
    frames = 48 if lane == "scattered" else 20
    with make_pager(frames=frames) as pager, LANES[lane](pager.core):
        compare_runs(script, FusedWorld(pager, states=states), must_move=lane != "scattered")
    if states is not None or lane == "scattered":
        assert calls.lists


@pytest.mark.parametrize("states", slow_unless((None,), [None, "fp32", "8bit"]))
def test_no_gathers_in_a_step_on_scattered_frames(one_thread, states: str | None) -> None:
    with make_pager() as pager, scattered(pager.core):
        world = FusedWorld(pager, states=states)
        model = world.module(mlp())
        optimizer = world.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
        for _ in range(3):
            with pager.iteration():
                loss_of(model).backward()
                before = pager.core.gathers
                optimizer.step()
                assert pager.core.gathers == before
                optimizer.zero_grad()
            check_invariants(pager.core)


def test_parameters_of_a_batch_share_a_launch(one_thread, calls: Calls) -> None:
    with make_pager(frames=200) as pager:
        world = FusedWorld(pager, states="fp32")
        model = world.module(mlp())
        optimizer = world.optimizer(torch.optim.AdamW(two_groups(model)))
        train(world, model, optimizer, 2)
        calls.lists.clear()
        train(world, model, optimizer, 1)
        # 200 / 8 frames for a batch. Matrices with gradient and states take 8, 16, 16 and 4; all
        # four vectors share pages.
        assert calls.lists == [2, 2, 4]


# -- larger than the arena -----------------------------------------------------------------------
def settled(pager: tp.Pager, frames: int) -> None:
    with pager.iteration():
        pass
    assert pager.core.residency.pool.count == frames


def large(pager: tp.Pager, numel: int, seed: int = 0, kind: str = "parameter") -> tp.PagedTensor:
    """Random numbers in pages, of which there may be more than frames."""
    tensor = empty_like_geometry(pager.core, torch.empty(numel, device="meta"), kind)
    return tensor.copy_(values(numel, seed))  # type: ignore[return-value]


def values(numel: int, seed: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


class Pair:
    """A large parameter and a plain one, with the same values and gradients, and optimizers."""

    def __init__(self, pager: tp.Pager, numel: int, flags: str, **paging: Any) -> None:
        kind, options = FLAGS[flags]
        self.numel, self.pager = numel, pager
        self.parameter = large(pager, numel).requires_grad_(True)
        self.twin = values(numel, 0).requires_grad_(True)
        options = {"foreach": False, **options}
        self.optimizer = pager.optimizer(KINDS[kind]([self.parameter], **options), **paging)
        self.plain_optimizer = KINDS[kind]([self.twin], **options)

    def grads(self, seed: int) -> None:
        self.parameter.grad = large(self.pager, self.numel, seed, "gradient")
        self.twin.grad = values(self.numel, seed)

    def step(self) -> None:
        self.optimizer.step()
        self.plain_optimizer.step()
        check_invariants(self.pager.core)
        assert self.pager.core.residency.pinned_pages() == 0

    def compare(self) -> None:
        assert_same(plain(self.parameter.detach()), self.twin.detach())
        assert_same(plain(self.optimizer), plain(self.plain_optimizer))


FRAMES = 10
TIERS: dict[str, dict[str, Any]] = {
    "host": {"host_budget": "32MiB"},
    "disk": {"host_budget": 0, "disk_budget": "32MiB"},
}


LARGE = [(f, tiers, lane) for f in FLAGS for tiers in TIERS for lane in LANES]
QUICK_LARGE = [("adamw", "disk", "plain"), ("sgd-momentum", "host", "chaos")]
NUMEL = 4 * FRAMES * FLOATS - 1000


@pytest.mark.parametrize(("flags", "tiers", "lane"), slow_unless(QUICK_LARGE, LARGE))
def test_four_times_the_arena(
    tmp_path, one_thread, calls: Calls, flags: str, tiers: str, lane: str
) -> None:
    options = {"disk_path": tmp_path} if tiers == "disk" else {}
    with make_pager(frames=FRAMES, **TIERS[tiers], **options) as pager, LANES[lane](pager.core):
        settled(pager, FRAMES)
        pair = Pair(pager, NUMEL, flags)
        for seed in range(1, 3):
            pair.grads(seed)
            pair.step()
        pair.compare()
        assert pager.core.residency.peak_frames <= FRAMES
        assert pager.core.gathers == 0
    assert calls.firsts[:2] == [0, calls.firsts[1]]
    assert len(calls.firsts) > 2 * 8, "the parameter was on the device in large parts"


def test_in_an_iteration_that_is_metered(one_thread) -> None:
    """Nothing is known yet, and a budget that is large enough is not refused."""
    with make_pager(frames=FRAMES, **TIERS["host"]) as pager:
        settled(pager, FRAMES)
        pair = Pair(pager, NUMEL, "adamw")
        pair.grads(1)
        pager.core.budget.settled = False
        with pager.iteration():
            assert pager.core.budget.metering
            pair.step()
        assert pager.core.residency.pool.count == FRAMES
        pair.grads(2)
        with pager.iteration():
            pair.step()
        pair.compare()
        assert pager.core.residency.peak_frames <= FRAMES


class Failing:
    """A disk that reads well ``times`` times, then fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times = math.inf
        real = DiskTier._to_read

        def to_read(tier: DiskTier, *args: Any, **options: Any) -> Any:
            self.times -= 1
            if self.times < 0:
                raise OSError(5, "the disk is broken")
            return real(tier, *args, **options)

        monkeypatch.setattr(DiskTier, "_to_read", to_read)


BROKEN = [(kind, states) for kind in ("adamw", "sgd-momentum") for states in (None, "8bit")]


@pytest.mark.parametrize(("flags", "states"), slow_unless([("sgd-momentum", "8bit")], BROKEN))
def test_a_disk_that_fails_amid_a_parameter(
    tmp_path, one_thread, monkeypatch, flags: str, states: str | None
) -> None:
    """Slabs before the failure keep their update, and the next step updates the others: in the end
    each element was updated once, as if nothing had happened."""
    disk = Failing(monkeypatch)

    def run(folder: Path, *fails_after: int) -> Any:
        folder.mkdir()
        amid = 0
        with make_pager(frames=FRAMES, **TIERS["disk"], disk_path=folder) as pager:
            settled(pager, FRAMES)
            pair = Pair(pager, NUMEL, flags, states=states)
            for seed in range(1, 3):
                pair.grads(seed)
                for times in fails_after:
                    disk.times = times
                    with pytest.raises(OSError, match="the disk is broken"):
                        pair.optimizer.step()
                    disk.times = math.inf
                    amid += bool(pair.optimizer._tp_paged.progress)
                    check_invariants(pager.core)
                    assert pager.core.residency.pinned_pages() == 0
                pair.step()
                assert not pair.optimizer._tp_paged.progress
            return amid, plain((pair.parameter.detach(), pair.optimizer))

    amid, result = run(tmp_path / "broken", 1, 9)
    assert amid > 1, "it never broke off amid the parameter"
    assert_same(result, run(tmp_path / "well")[1])


@pytest.mark.slow
@pytest.mark.parametrize("states", STATES)
def test_a_disk_that_fails_amid_a_step_of_many(
    tmp_path, one_thread, monkeypatch, states: str
) -> None:
    """Each parameter is updated once, however often the step has to be taken."""
    disk = Failing(monkeypatch)

    def run(folder: Path, fails: bool) -> Any:
        folder.mkdir()
        torch.manual_seed(7)
        failures = 0
        with make_pager(**TIERS["disk"], disk_path=folder) as pager:
            world = FusedWorld(pager, states=states)
            model = world.module(mlp())
            optimizer = world.optimizer(torch.optim.AdamW(model.parameters()))
            train(world, model, optimizer, 1)
            for _ in range(3):
                with pager.iteration():
                    loss_of(model).backward()
                    for times in range(20):
                        disk.times = times if fails else math.inf
                        try:
                            optimizer.step()
                        except OSError:
                            failures += 1
                            continue
                        finally:
                            disk.times = math.inf
                        break
                    optimizer.zero_grad()
                check_invariants(pager.core)
            return failures, plain((model, optimizer))

    failures, result = run(tmp_path / "broken", True)
    assert failures > 5
    assert_same(result, run(tmp_path / "well", False)[1])


def test_a_step_that_broke_off_is_forgotten_when_states_are_loaded(
    tmp_path, one_thread, monkeypatch
) -> None:
    disk = Failing(monkeypatch)
    with make_pager(frames=FRAMES, **TIERS["disk"], disk_path=tmp_path) as pager:
        settled(pager, FRAMES)
        pair = Pair(pager, NUMEL, "adamw")
        pair.grads(1)
        pair.step()
        saved = pair.optimizer.state_dict()
        disk.times = 9
        with pytest.raises(OSError, match="broken"):
            pair.optimizer.step()
        disk.times = math.inf
        assert pair.optimizer._tp_paged.progress
        pair.optimizer.load_state_dict(saved)
        assert not pair.optimizer._tp_paged.progress


# -- states in less memory -----------------------------------------------------------------------
def state_pages(pager: tp.Pager) -> int:
    return pager.core.space.kind_pages["optimizer"]


STEPS = {"adamw": 20, "sgd-momentum": 60}  # in which something is learnt


@pytest.mark.parametrize("flags", slow_unless(("adamw",), ("adamw", "sgd-momentum")))
def test_pages_of_states(one_thread, flags: str) -> None:
    """Of a parameter of 16 pages: exactly what its states take."""
    pages = {}
    for states in STATES:
        with make_pager(frames=200) as pager:
            pair = Pair(pager, 16 * FLOATS, flags, states=states)
            pair.grads(1)
            pair.optimizer.step()
            live_pages(pager)
            pages[states] = pager.core.space.kind_pages["optimizer"]
    count = 2 if flags == "adamw" else 1
    # Scales take 4 KiB for each state, and all are in one page of 64 KiB.
    assert pages == {"fp32": count * 16, "bf16": count * 8, "8bit": count * 4 + 1}


@pytest.mark.parametrize("flags", slow_unless(("adamw",), ("adamw", "sgd-momentum")))
@pytest.mark.parametrize("states", slow_unless(("8bit",), ("bf16", "8bit")))
def test_room_for_states_is_checked_before_anything_changes(
    one_thread, flags: str, states: str
) -> None:
    """With states of fp32 the same budget is refused."""
    count = 2 if flags == "adamw" else 1
    least = {"bf16": count * 8, "8bit": count * 4 + 1}[states] + 2 * 16
    for chosen in (states, "fp32"):
        host = (least - 8 + 6) * PAGE_BYTES  # 6 for room to move
        with make_pager(frames=8, host_budget=host) as pager:
            settled(pager, 8)
            pair = Pair(pager, 16 * FLOATS, flags, states=chosen)
            pair.grads(1)
            if chosen == states:
                pair.optimizer.step()
                continue
            with pytest.raises(tp.TierFull, match=r"the states of .* Nothing was changed"):
                pair.optimizer.step()
            assert not pair.optimizer.state
            assert_same(plain(pair.parameter.detach()), values(16 * FLOATS, 0))


def task(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A function to be learnt: the same for each run."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(64, 128, generator=generator)
    return inputs, (inputs[:, :10] * inputs[:, 10:20]).argmax(1)


def learn(world: World, flags: str, steps: int, dtype: torch.dtype = torch.float32) -> float:
    """Mean loss of the last steps."""
    torch.manual_seed(3)
    model = world.module(mlp(depth=2).to(dtype))
    kind, options = FLAGS[flags]
    options = {**options, "lr": {"adamw": 2e-3, "sgd": 0.1}[kind]}
    optimizer = world.optimizer(KINDS[kind](model.parameters(), **options))
    losses = []
    for seed in range(steps):
        inputs, labels = task(seed % 8)
        with world.iteration():
            loss = F.cross_entropy(model(inputs.to(dtype)).float(), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] > 2.2
    return sum(losses[-8:]) / 8


FACTOR = 1.01  # of the loss of plain torch


@pytest.mark.parametrize(
    ("flags", "states"), slow_unless([("adamw", "8bit")], [(f, s) for f in STEPS for s in STATES])
)
def test_a_model_learns(one_thread, flags: str, states: str) -> None:
    expected = learn(World(), flags, STEPS[flags])
    with make_pager(frames=40) as pager:
        loss = learn(FusedWorld(pager, states=states), flags, STEPS[flags])
    assert expected < 2.0
    assert expected / FACTOR <= loss <= FACTOR * expected


# -- master weights ------------------------------------------------------------------------------
def small(dtype: torch.dtype = torch.bfloat16) -> tuple[nn.Linear, torch.Tensor]:
    torch.manual_seed(1)
    return nn.Linear(256, 256, bias=False, dtype=dtype), torch.randn(16, 256)


def step_of(world: World, model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """One with random gradients of powers of two: exact in any dtype."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        grad = 2.0 ** torch.randint(-8, 0, parameter.shape, generator=generator)
        parameter.grad = world.page(grad.to(parameter.dtype))
    optimizer.step()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_masters_are_what_plain_torch_updates_in_fp32(one_thread, dtype: torch.dtype) -> None:
    """Steps that are too small for 16 bits add up."""
    with make_pager(frames=60) as pager:
        world = FusedWorld(pager, master_weights=True)
        model = world.module(small(dtype)[0])
        optimizer = world.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-5))
        twin = small(dtype)[0].float()
        plain_optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-5, foreach=False)
        for seed in range(10):
            step_of(world, model, optimizer, seed)
            step_of(World(), twin, plain_optimizer, seed)
        state = optimizer.state[model.weight]
        assert torch.equal(plain(state["master"]), twin.weight.detach())
        assert torch.equal(plain(model.weight.detach()), twin.weight.detach().to(dtype))
        assert state["exp_avg"].dtype is torch.float32


def test_masters_follow_what_is_written_to_parameters(one_thread) -> None:
    with make_pager(frames=60) as pager:
        world = FusedWorld(pager, master_weights=True)
        model = world.module(small()[0])
        optimizer = world.optimizer(torch.optim.SGD(model.parameters(), lr=1e-5))
        step_of(world, model, optimizer, 0)
        state = optimizer.state[model.weight]
        before = plain(state["master"])
        with torch.no_grad():
            model.weight[:16] = 3.0
        step_of(world, model, optimizer, 1)
        master, grad = plain(state["master"]), plain(model.weight.grad).float()
        assert torch.equal(master[:16], 3.0 - 1e-5 * grad[:16])
        assert torch.equal(master[16:], before[16:] - 1e-5 * grad[16:])

        saved = plain((model.state_dict(), optimizer.state_dict()))
        step_of(world, model, optimizer, 2)
        expected = plain((model.state_dict(), optimizer.state_dict()))
        optimizer.load_state_dict(saved[1])  # in this order: the model is written to afterwards
        model.load_state_dict(saved[0])
        step_of(world, model, optimizer, 2)
        assert_same(plain((model.state_dict(), optimizer.state_dict())), expected)


def test_a_master_of_four_times_the_arena(one_thread) -> None:
    with make_pager(frames=FRAMES, **TIERS["host"]) as pager:
        settled(pager, FRAMES)
        start = values(NUMEL, 0).bfloat16()
        tensor = empty_like_geometry(pager.core, start, "parameter").copy_(start)
        parameter = tensor.requires_grad_(True)
        optimizer = pager.optimizer(torch.optim.AdamW([parameter]), master_weights=True)
        twin = start.float().requires_grad_(True)
        plain_optimizer = torch.optim.AdamW([twin], foreach=False)
        grad = values(NUMEL, 1).bfloat16()
        for _ in range(2):
            parameter.grad = empty_like_geometry(pager.core, grad, "gradient").copy_(grad)
            twin.grad = grad.float()
            optimizer.step()
            plain_optimizer.step()
            parameter.detach().mul_(1)  # is written to, and does not change
        check_invariants(pager.core)
        assert_same(plain(optimizer.state[parameter]["master"]), twin.detach())
        assert_same(plain(parameter.detach()), twin.detach().bfloat16())


# -- state dicts ---------------------------------------------------------------------------------
def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def go_on(world: World, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    torch.manual_seed(11)
    return plain((train(world, model, optimizer, 2), model, optimizer))


ROUND_TRIPS = [(s, k) for s in (None, *STATES) for k in ("adamw-amsgrad-maximize", "sgd-momentum")]


@pytest.mark.parametrize(
    ("states", "flags"), slow_unless([("8bit", "adamw-amsgrad-maximize")], ROUND_TRIPS)
)
def test_restored_bit_for_bit(one_thread, states: str | None, flags: str) -> None:
    """By load_state_dict, and by deepcopy: training goes on as it would have."""
    kind, options = FLAGS[flags]
    with make_pager() as pager:
        world = FusedWorld(pager, states=states)
        model = world.module(mlp(depth=2))
        optimizer = world.optimizer(KINDS[kind](model.parameters(), **options))
        train(world, model, optimizer, 2)
        saved = through_a_file((model.state_dict(), optimizer.state_dict()))
        twins = copy.deepcopy((model, optimizer))
        expected = go_on(world, model, optimizer)
        assert_same(go_on(world, *twins), expected)
        if states == "8bit":
            weight = saved[1]["state"][2]
            assert {
                weight["momentum_buffer_codes" if kind == "sgd" else "exp_avg_codes"].dtype
            } == {torch.uint8}

        other = world.module(mlp(depth=2))
        other_optimizer = world.optimizer(KINDS[kind](other.parameters(), **options))
        other.load_state_dict(saved[0])
        other_optimizer.load_state_dict(saved[1])
        assert_same(plain(other_optimizer), plain(saved[1]))
        assert_same(go_on(world, other, other_optimizer), expected)


@pytest.mark.parametrize("states", slow_unless(("8bit",), [None, *STATES]))
def test_to_plain_torch_and_back(one_thread, states: str | None) -> None:
    with make_pager() as pager:
        world = FusedWorld(pager, states=states)
        model = world.module(mlp(depth=2))
        optimizer = world.optimizer(torch.optim.AdamW(model.parameters()))
        train(world, model, optimizer, 2)
        state = plain(optimizer)

        # What plain torch has made is quantised, or rounded, to what it is near to.
        twin = mlp(depth=2)
        plain_optimizer = torch.optim.AdamW(twin.parameters())
        train(World(), twin, plain_optimizer, 2)
        optimizer.load_state_dict(plain(plain_optimizer))  # torch would share small ones
        loaded = plain(optimizer)
        train(world, model, optimizer, 1)

        # By way of fp32 states, plain torch gets what there was.
        middle = pager.optimizer(torch.optim.AdamW(world.module(mlp(depth=2)).parameters()))
        middle.load_state_dict(loaded)
        for number, given in plain(plain_optimizer)["state"].items():
            for key, bound in {"exp_avg": 1 / 100, "exp_avg_sq": 1 / 50}.items():
                kept = plain(middle)["state"][number][key]
                assert kept.dtype is torch.float32
                most = given[key].abs().max() * (0.0 if states in (None, "fp32") else bound)
                assert (kept - given[key]).abs().max() <= most
        plain_optimizer.load_state_dict(plain(middle))
        train(World(), twin, plain_optimizer, 1)

        # A pickle is plain torch's at once.
        optimizer.load_state_dict(state)
        file = io.BytesIO()
        torch.save(optimizer, file)
        file.seek(0)
        pickled = torch.load(file, weights_only=False)
        assert type(pickled) is torch.optim.AdamW
        for p in pickled.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
            assert pickled.state[p]["exp_avg"].dtype is torch.float32
        pickled.step()


def test_an_optimizer_that_has_stepped_is_paged(one_thread) -> None:
    with make_pager() as pager:
        model = mlp(depth=2)
        optimizer = torch.optim.AdamW(model.parameters())
        train(World(), model, optimizer, 1)
        world = FusedWorld(pager, states="8bit")
        world.module(model)
        world.optimizer(optimizer)
        state = optimizer.state[model[2].weight]
        assert sorted(state) == sorted(
            ["step", *(f"exp_avg{a}_{b}" for a in ("", "_sq") for b in ("codes", "scales"))]
        )
        assert type(state["exp_avg_codes"]) is tp.PagedTensor
        train(world, model, optimizer, 1)
        assert state["step"] == 2


# -- the rest of training ------------------------------------------------------------------------
@pytest.mark.parametrize("fused_flag", [None, True])
@pytest.mark.parametrize("clip", slow_unless((True,), [False, True]))
def test_grad_scaler(one_thread, clip: bool, fused_flag: bool | None) -> None:
    """The gradient of the third of five steps is infinite: that step is left out, and not counted.
    With ``fused=True`` the scaler leaves the division to the optimizer."""

    def script(world: World) -> object:
        model = world.module(mlp(depth=2))
        wanted = {"fused": fused_flag} if world.pager is not None else {"foreach": False}
        optimizer = world.optimizer(torch.optim.AdamW(model.parameters(), **wanted))
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        for step in range(5):
            with world.iteration():
                scaler.scale(loss_of(model)).backward()
                if step == 2:
                    with torch.no_grad():
                        model[2].weight.grad[3, 5] = float("inf")
                if clip:
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        states = [optimizer.state[p] for p in model.parameters()]
        assert {float(state["step"]) for state in states} == {4.0}
        return model, scaler.state_dict()

    with make_pager() as pager:
        compare_runs(script, FusedWorld(pager, states="fp32"))


@pytest.mark.parametrize("states", slow_unless(("8bit",), ["fp32", "bf16", "8bit"]))
def test_updates_during_backward(one_thread, states: str) -> None:
    """The same bits as without, whatever the states."""
    results = []
    for overlap in (False, True):
        with make_pager() as pager:
            world = FusedWorld(pager, states=states, overlap=overlap)
            torch.manual_seed(7)
            model = world.module(mlp(depth=2))
            optimizer = world.optimizer(torch.optim.AdamW(model.parameters()))
            results.append(
                plain((train(world, model, optimizer, 4), model.state_dict(), optimizer))
            )
            assert pager.stats()["overlap_updates"] == (12 if overlap else 0)
    assert_same(results[1], results[0])


@pytest.mark.slow
@pytest.mark.parametrize("states", STATES)
def test_in_planned_mode(one_thread, states: str) -> None:
    """A step's accesses are logged as others are, so that plans are followed to the end."""
    results = []
    for policy in ("lru", "lp"):
        with make_pager() if policy == "lru" else planned_pager() as pager:

            class Planned(FusedWorld, PlannedWorld):
                pass

            world = (
                Planned(pager, states=states)
                if policy == "lp"
                else FusedWorld(pager, states=states)
            )
            torch.manual_seed(7)
            model = world.module(mlp(depth=6))
            optimizer = world.optimizer(torch.optim.AdamW(model.parameters()))
            results.append(plain((train(world, model, optimizer, 6), model, optimizer)))
            stats = pager.stats()
    assert_same(results[1], results[0])
    assert stats["planned_iterations"] > 0
    assert stats["departures"] == 0


def test_a_parameter_without_elements(one_thread) -> None:
    with make_pager() as pager:
        parameters = [torch.ones(0, 3), torch.ones(5000)]
        parameters = [pager.page(nn.Parameter(p)) for p in parameters]
        optimizer = pager.optimizer(torch.optim.AdamW(parameters), states="8bit")
        for parameter in parameters:
            parameter.grad = torch.ones(parameter.shape)
        optimizer.step()
        assert [float(optimizer.state[p]["step"]) for p in parameters] == [1, 1]
        assert (plain(parameters[1]) < 1).all()


def test_other_strides(one_thread) -> None:
    """Elements are paired by their place in the tensor, whatever the order in memory."""
    with make_pager() as pager:
        start = values(64 * 128, 0).view(64, 128).t()
        grad = values(64 * 128, 1).view(128, 64)
        parameter = pager.page(nn.Parameter(start))
        optimizer = pager.optimizer(torch.optim.AdamW([parameter]), states="fp32")
        twin = nn.Parameter(start.clone())
        plain_optimizer = torch.optim.AdamW([twin], foreach=False)
        for _ in range(2):
            parameter.grad, twin.grad = pager.page(grad), grad.clone()
            optimizer.step()
            plain_optimizer.step()
        assert_same(plain(parameter.detach()), twin.detach())


# -- errors --------------------------------------------------------------------------------------
def test_classes_that_are_not_known() -> None:
    class Own(torch.optim.AdamW):
        pass

    with make_pager() as pager:
        model = pager.page_module(mlp(depth=1))
        for kind in (torch.optim.LBFGS, torch.optim.Adagrad, Own):
            optimizer = kind(model.parameters())
            with pytest.raises(TypeError, match=f"states='8bit' .* not for {kind.__name__}; use"):
                pager.optimizer(optimizer, states="8bit")
            assert type(optimizer) is kind
        with pytest.raises(TypeError, match=r"master_weights=True is for .* not for Adagrad"):
            pager.optimizer(torch.optim.Adagrad(model.parameters()), master_weights=True)


def test_states_that_are_not_known() -> None:
    with make_pager() as pager:
        model = pager.page_module(mlp(depth=1))
        optimizer = torch.optim.AdamW(model.parameters())
        with pytest.raises(ValueError, match="states='int8'; choose one of fp32, bf16, 8bit"):
            pager.optimizer(optimizer, states="int8")
        pager.optimizer(optimizer, states="bf16")
        pager.optimizer(optimizer)
        with pytest.raises(tp.PagerError, match=r"paged already, .*'bf16'.* and now .*'8bit'"):
            pager.optimizer(optimizer, states="8bit")


def test_a_gradient_that_the_kernels_cannot_take() -> None:
    with make_pager() as pager:
        table = pager.page_module(nn.Embedding(64, 128, sparse=True))
        optimizer = pager.optimizer(torch.optim.SGD(table.parameters(), lr=0.1), states="bf16")
        before = plain(table.weight)
        table.weight.grad = torch.sparse_coo_tensor(
            [[1]], torch.ones(1, 128), (64, 128), check_invariants=True
        )
        with pytest.raises(ValueError, match=r"parameter 0 of group 0, .* gradient is sparse"):
            optimizer.step()
        assert torch.equal(plain(table.weight), before)


# -- made again ----------------------------------------------------------------------------------
@pytest.fixture
def again_on_cpu(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Kernels make all updates, as where they are compiled, by their reference; that of updates
    that are made again finds its operands by their addresses, as a kernel does. Gives how many
    parameters each of these calls was for."""
    calls: list[int] = []

    def at(address: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        cpu = torch.device("cpu")
        memory = torch._C._construct_storage_from_data_pointer(address, cpu, count * dtype.itemsize)
        return torch.empty(0, dtype=dtype).set_(memory, 0, (count,), (1,))

    def step(tables: Any, bases: Any, *, steps: Any, **options: Any) -> None:
        calls.append(tables.groups)
        options["steps"] = [number for some in steps for number in some.reshape(-1).tolist()]
        addresses = tables.at(bases).addresses  # of pieces: the first one of a group is its begin
        begins = [tables._group.tolist().index(group) for group in range(tables.groups)]
        rows = [
            [at(int(row[begin]), n, dtype) for begin, n in zip(begins, tables.numels)]
            for row, dtype in zip(addresses, tables.dtypes)
        ]
        grads, params, *states = rows
        adam_step(params, grads, *states[:2], max_exp_avg_sqs=(states[2:] or [None])[0], **options)

    monkeypatch.setattr(fused, "runs_triton", lambda device: True)
    monkeypatch.setattr(again, "runs_triton", lambda device: True)
    monkeypatch.setattr(again, "adam_step_again", step)
    return calls


def _adam(world: World) -> Any:
    model = world.module(mlp())
    optimizer = world.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3, amsgrad=True))
    losses = train(world, model, optimizer, 8)
    return losses, model, optimizer


@pytest.mark.parametrize("lane", ["fits", "planned", "scattered"])
def test_updates_are_made_again(again_on_cpu: list[int], one_thread: None, lane: str) -> None:
    planned = lane == "planned"
    with ExitStack() as stack:
        pager = stack.enter_context(planned_pager() if planned else make_pager(fits=True))
        stack.enter_context(LANES["scattered" if lane == "scattered" else "plain"](pager.core))
        world = PlannedWorld(pager) if planned else World(pager)
        compare_runs(_adam, world, must_move=planned)
    assert bool(again_on_cpu) == (lane != "scattered")  # there it has no addresses


def test_what_has_changed_is_updated_anew(again_on_cpu: list[int], one_thread: None) -> None:
    """Settings, states, gradients that are missing, and a parameter with another geometry."""

    def script(world: World) -> Any:
        model = world.module(mlp())
        optimizer = world.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
        parameters = list(model.parameters())
        found = []

        def step(*, without: int | None = None) -> None:
            again_on_cpu.clear()
            with world.iteration():
                loss_of(model).backward()
                if without is not None:
                    parameters[without].grad = None
                optimizer.step()
                optimizer.zero_grad()
            found.append([p.detach().clone() for p in parameters])

        for _ in range(3):
            step()
        assert world.pager is None or again_on_cpu
        optimizer.param_groups[0]["lr"] = 3e-3
        optimizer.param_groups[0]["weight_decay"] = 0.5
        step()
        assert world.pager is None or again_on_cpu
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        step()
        assert not again_on_cpu
        step(without=1)
        assert not again_on_cpu
        optimizer.param_groups[0]["maximize"] = True
        step()
        assert not again_on_cpu
        step()
        optimizer.state[parameters[2]]["exp_avg"] = torch.zeros_like(parameters[2])
        step()
        step()
        optimizer.state[parameters[1]]["step"].fill_(20)  # counters may be parts of one tensor
        step()
        assert world.pager is None or again_on_cpu
        optimizer.state[parameters[0]]["step"].data = torch.tensor(30.0)
        step()
        assert not again_on_cpu
        step()
        steps = [float(optimizer.state[p]["step"]) for p in parameters]
        assert steps[:2] == [32, 23]
        return found, model, optimizer

    with make_pager(fits=True) as pager:
        compare_runs(script, World(pager), must_move=False)


def test_a_step_that_fails_is_not_counted_again(
    again_on_cpu: list[int], one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_pager(fits=True) as pager:
        model = pager.page_module(mlp())
        optimizer = pager.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
        train(World(pager), model, optimizer, 3)
        steps = [float(state["step"]) for state in optimizer.state.values()]

        def fail(*_: Any, **__: Any) -> None:
            raise RuntimeError("no launch")

        monkeypatch.setattr(again, "adam_step_again", fail)
        with pytest.raises(RuntimeError, match="no launch"):
            train(World(pager), model, optimizer, 1)
        assert [float(state["step"]) for state in optimizer.state.values()] == steps
        assert all(run.pins == 0 for run in pager.core.space.runs.values())
        monkeypatch.undo()
