"""Batches of varying shape: which of them are metered, and what stays where it is meanwhile."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import nn

import tensorpager as tp
from tensorpager.pager.profile_run import Lengths, Shapes

from .models import World, compare_runs, loss_of, make_pager, mlp

# A budget in which the model is on the device with all that training makes, and pages move.
BUDGETS = {"roomy": "64MiB", "tight": "2MiB"}


class Metered(World):
    """Notes which iterations were metered, of those that :func:`script` runs."""

    def __init__(self, pager: tp.Pager) -> None:
        super().__init__(pager)
        self.metered: list[bool] = []


def script(world: World, sizes: list[int], make: Callable[[], nn.Module] = mlp) -> object:
    model = world.module(make())
    optimizer = world.optimizer(torch.optim.AdamW(model.parameters()))
    losses = []
    for size in sizes:
        with world.iteration():
            loss = loss_of(model, size)
            loss.backward()
            if isinstance(world, Metered):
                world.metered.append(world.pager.core.budget.metering)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


def even_mlp() -> nn.Sequential:
    """Of matrices that take several pages, the last one too."""
    return nn.Sequential(*mlp()[:-1], nn.Linear(256, 256))


def script_of_steps(world: World) -> object:
    return script(world, [64] * 3, even_mlp)


def assert_inside(pager: tp.Pager) -> None:
    stats = pager.stats()
    assert stats["peak_bytes"]["device"] <= stats["budget_bytes"]["device"]


def open_pager(budget: str) -> tp.Pager:
    return tp.Pager(budget, host_budget="32MiB", page_size="64KiB", device="cpu", policy="lru")


def test_in_a_roomy_budget_the_first_iteration_moves_nothing(
    one_thread: None, allocator: object
) -> None:
    with open_pager(BUDGETS["roomy"]) as pager:
        script(Metered(pager), [64])
        stats = pager.stats()
        assert stats["bytes_out"] == stats["bytes_in"] == 0
        assert_inside(pager)


def test_everything_fits_in_what_is_needed_and_not_in_less(
    one_thread: None, allocator: object
) -> None:
    with open_pager("64MiB") as pager:
        _trained = script_of_steps(World(pager))
        needed = pager.stats()["needed_bytes"]
    with tp.Pager(needed, page_size="64KiB", device="cpu") as pager:
        compare_runs(script_of_steps, World(pager), must_move=False)
        assert pager.stats()["fits"]
        assert_inside(pager)
    with open_pager(str(needed - 1)) as pager:
        compare_runs(script_of_steps, World(pager), must_move=False)
        assert not pager.stats()["fits"]


@pytest.mark.parametrize("policy", ["lp", "lru"])
def test_a_roomy_device_needs_no_tier_below(policy: str) -> None:
    with tp.Pager("256MiB", page_size="64KiB", device="cpu", policy=policy) as pager:
        compare_runs(script_of_steps, World(pager), must_move=False)
        assert pager.stats()["bytes_out"] == 0
        assert_inside(pager)


@pytest.mark.parametrize(("budget", "metered"), [("roomy", [64]), ("tight", [64, 200])])
def test_only_larger_shapes_are_metered(
    one_thread: None, allocator: object, budget: str, metered: list[int]
) -> None:
    """And those only where there may be no room for what they take."""
    sizes = [64, 63, 7, 64, 80, 65, 80, 200, 199]
    with open_pager(BUDGETS[budget]) as pager:
        world = Metered(pager)
        compare_runs(lambda w: script(w, sizes), world, must_move=budget != "roomy")
        assert [size for size, some in zip(sizes, world.metered) if some] == metered
        assert_inside(pager)


@pytest.mark.parametrize("metered", [False, True])
def test_what_takes_more_than_foreseen(one_thread: None, allocator: object, metered: bool) -> None:
    """A larger input that takes dense memory of which smaller ones have told nothing. Where that
    would leave fewer frames than were foreseen too, the iteration is metered from there on."""
    extra = (1800 if metered else 1000) << 10
    with open_pager(BUDGETS["tight"]) as pager:
        model = pager.page_module(mlp())
        found = []
        for size in (32, 32, 48, 48):
            with pager.iteration():
                loss = loss_of(model, size)
                found.append(pager.core.budget.metering)
                (loss * torch.ones(extra // 4 if size == 48 else 1).mean()).backward()
                found.append(pager.core.budget.metering)
                model.zero_grad()
        assert found[:6] == [True, True, False, False, False, metered]
        assert_inside(pager)
        assert bool(pager.stats()["streamed"]) is metered


def test_what_fits_stays_while_a_new_shape_is_metered(one_thread: None, allocator: object) -> None:
    with open_pager(BUDGETS["roomy"]) as pager:
        script(World(pager), [8, 8])
        frames = pager.stats()["arena_bytes"]
        before = pager.stats()["bytes_out"], pager.stats()["bytes_in"]
        models = [pager.page_module(nn.Linear(128, 10)) for _ in range(4)]
        smallest = []
        for model, size in zip(models, (16, 32, 64, 128)):
            with pager.iteration():
                loss_of(model, size).backward()
                assert pager.core.budget.metering
                smallest.append(pager.stats()["arena_bytes"])
        assert (pager.stats()["bytes_out"], pager.stats()["bytes_in"]) == before
        assert min(smallest) > frames * 3 // 4


def test_other_kinds_of_calls_are_metered(one_thread: None) -> None:
    with make_pager() as pager:
        model = pager.page_module(nn.Sequential(nn.Linear(64, 64), nn.Dropout()))

        def metered(x: torch.Tensor, *, grad: bool = True) -> bool:
            with pager.iteration():
                with torch.set_grad_enabled(grad):
                    model(x)
                return pager.core.budget.metering

        x = torch.ones(8, 64)
        assert metered(x)
        assert not metered(x[:4])
        assert metered(x[None])
        assert metered(x, grad=False)
        model.eval()
        assert metered(x)
        assert not metered(x)


class Wide(nn.Module):
    """Its activations need more of the device at once than its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(12))
        self.wide, self.narrow = nn.Linear(64, 256), nn.Linear(256, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        narrow: torch.Tensor = self.narrow(nn.functional.gelu(self.wide(x)))
        return narrow


def test_what_was_expected_to_need_more_needs_it_after_a_metered_one_too(
    one_thread: None, allocator: object
) -> None:
    with open_pager("1800000") as pager:
        model = pager.page_module(Wide())
        optimizer = pager.optimizer(torch.optim.AdamW(model.parameters()))

        def step(rows: int) -> bool:
            with pager.iteration():
                model(torch.randn(rows, 64)).square().mean().backward()
                metered = pager.core.budget.metering
                optimizer.step()
                optimizer.zero_grad()
            return metered

        assert [*map(step, (100, 330, 400))] == [True, True, False]
        needed = pager.core.residency.largest_need
        model.eval()
        with pager.iteration(), torch.no_grad():
            model(torch.randn(100, 64))
            assert pager.core.budget.metering
        model.train()
        assert pager.core.residency.frames >= needed
        assert not step(400)
        assert_inside(pager)


def test_a_module_in_the_place_of_one_that_is_gone_is_metered(one_thread: None) -> None:
    """Python gives its number, ``id``, to the next one that is made there."""
    with make_pager() as pager:
        metered = []
        for _ in range(20):
            model = pager.page_module(nn.Linear(64, 64))
            for _ in range(2):
                with pager.iteration():
                    model(torch.ones(8, 64))
                    metered.append(pager.core.budget.metering)
            del model
        assert metered == [True, False] * 20
        assert len(pager.core.profile_run._calls) <= 1


def test_shorter_batches_have_more_of_the_device(one_thread: None, allocator: object) -> None:
    """What they leave of the dense reserve holds pages, so fewer move; and a longer one gets it
    back."""
    sizes = [400, 400, 8, 8, 8, 400, 300, 8]

    def run(world: World) -> object:
        model = world.module(mlp())
        optimizer = world.optimizer(torch.optim.AdamW(model.parameters()))
        for size in sizes:
            with world.iteration():
                loss_of(model, size).backward()
                optimizer.step()
                optimizer.zero_grad()
            if world.pager is not None:
                stats = world.pager.stats()
                seen.append((stats["arena_bytes"], stats["bytes_in"]))
                assert_inside(world.pager)
        return model

    seen: list[tuple[int, int]] = []
    with open_pager(BUDGETS["tight"]) as pager:
        compare_runs(run, World(pager))
    arena, total = zip(*seen)
    moved = [after - before for before, after in itertools.pairwise(total)]
    assert arena[2] < arena[3] == arena[4] == arena[7]
    assert arena[5] == arena[1] < arena[3]
    assert moved[3] < moved[1]


@pytest.mark.parametrize("change", ["step", "write"])
def test_a_refusal_knows_of_changes_before_the_metering(
    one_thread: None, allocator: object, change: str
) -> None:
    """The second batch of an iteration has no room, and is metered from there on."""
    with open_pager(BUDGETS["tight"]) as pager:
        model = pager.page_module(mlp())
        optimizer = pager.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))

        @pager.iteration()
        def train(*batches: torch.Tensor) -> None:
            for batch in batches:
                model(batch).sum().backward()
                if change == "step":
                    optimizer.step()
                else:
                    with torch.no_grad():
                        next(model.parameters()).mul_(0.5)
                optimizer.zero_grad()

        short, long = torch.ones(8, 128), torch.ones(3000, 128)
        train(short)
        with pytest.raises(tp.InfeasibleBudget, match="is as plain PyTorch has it") as refusal:
            train(short, long)
        assert "No parameter" not in str(refusal.value)


def test_shapes_are_covered_in_every_dimension() -> None:
    shapes = Shapes()
    assert not shapes.cover((2, 100))
    shapes.add((2, 100))
    shapes.add((9, 10))
    assert shapes.cover((2, 100))
    assert shapes.cover((1, 99))
    assert shapes.cover((9, 1))
    assert not shapes.cover((3, 11))
    shapes.add((9, 100))
    assert shapes.cover((3, 11))


def test_what_classes_of_lengths_take() -> None:
    """Of a class as much as between its longest one and a longer one that was seen; no more than
    was said, as long as none takes more."""
    lengths = Lengths()
    lengths.add(512, 5000)
    assert lengths.dense(100) is None
    lengths.add(100, 1000)
    assert lengths.longest(100) == lengths.longest(65) == 128
    assert lengths.dense(70) == 1000 + 28 * 4000 // 412
    lengths.add(128, 1200)
    assert lengths.dense(70) == 1271
    lengths.add(90, 1300)
    assert lengths.dense(128) == 1300
    assert lengths.dense(500) == 5000
    assert lengths.dense(300) is None
    lengths.add(1024, 9000)  # classes are twice as wide
    assert lengths.longest(1) == 128
    assert lengths.dense(1) == 1300


def encoder() -> nn.Module:
    layers = [
        nn.TransformerEncoderLayer(64, 4, 192, dropout=0.0, batch_first=True) for _ in range(3)
    ]
    return nn.Sequential(nn.Embedding(200, 64), *layers, nn.Linear(64, 50))


Inputs = list[tuple[int, int]]


def train_on(budget: int, make: Callable[[], nn.Module], inputs: Inputs) -> None:
    """One iteration per shape of inputs; those below 0 are evaluations."""
    torch.manual_seed(0)
    with open_pager(str(budget)) as pager:
        model = pager.page_module(make())
        optimizer = pager.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for rows, length in inputs:
            model.train(rows > 0)
            with pager.iteration(), torch.set_grad_enabled(rows > 0):
                loss = model(torch.randint(0, 200, (abs(rows), length))).square().mean()
                if rows > 0:
                    loss.backward()
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
        assert_inside(pager)


def named(make: Callable[[], nn.Module], inputs: Inputs) -> int:
    """The budget that works, after those that were refused."""
    budget = 300_000
    for _ in range(8):
        try:
            train_on(budget, make, inputs)
        except tp.InfeasibleBudget as refusal:
            budget = refusal.minimum
        else:
            return budget
    raise AssertionError(f"{budget} was refused too")


def test_the_named_budget_is_enough_for_shorter_batches(
    one_thread: None, allocator: object
) -> None:
    """Saved tensors that have pages in the longest batch have some in shorter ones too, though
    these are small."""
    budget = named(encoder, [(4, 52)])
    train_on(budget, encoder, [(4, length) for length in (52, 30, 25, 20, 15, 10, 5, 52)])


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(200, 64)
        self.first, self.second = nn.Conv1d(64, 128, 3, padding=1), nn.Conv1d(128, 64, 1)
        self.norm = nn.BatchNorm1d(128)
        self.last = nn.Linear(64, 50)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.norm(torch.relu(self.first(self.embedding(x).mT))))
        result: torch.Tensor = self.last(x.mT)
        return result


def test_budgets_above_one_that_works_do_too(one_thread: None, allocator: object) -> None:
    """Where there is more room a step takes more. After an evaluation with larger inputs than
    before, longer batches can have that all the same."""
    inputs = [(2, 50), (4, 42), (-4, 28), (-2, 47), (4, 50)]
    budget = named(Convolutions, inputs)
    for more in range(1, 9):
        train_on(budget + more * (8 << 10), Convolutions, inputs)
