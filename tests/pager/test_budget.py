"""Budgets that cannot work are refused with the exact minimum; nothing has changed by then."""

import re
from contextlib import ExitStack, nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tensorpager as tp
from tensorpager.pager.debug.check import check_invariants
from tensorpager.pager.errors import PagerError

PAGE = 64 << 10


def mlp(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.LayerNorm(512), nn.Linear(512, 10)
    )


def convnet(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(1024, 10)),
    )


MODELS = {"mlp": (mlp, (256, 64)), "convnet": (convnet, (16, 3, 20, 20))}
OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "adamw_amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "adafactor": lambda p: torch.optim.Adafactor(p),
}


def train(budget: int, model_name: str, optimizer_name: str, steps: int = 3, **options: object):  # type: ignore[no-untyped-def]
    """Losses and final parameters; asserts the invariants and the device peak on the way."""
    make, shape = MODELS[model_name]
    model = make()
    options = {"host_budget": "64MiB", "page_size": PAGE, "device": "cpu", **options}
    with tp.Pager(budget, **options) as pager:
        pager.page_module(model)
        optimizer = pager.optimizer(OPTIMIZERS[optimizer_name](model.parameters()))
        generator = torch.Generator().manual_seed(1)
        losses = []
        before = [p.to_dense().detach() for p in model.parameters()]
        try:
            for _ in range(steps):
                x = torch.randn(shape, generator=generator)
                y = torch.randint(0, 10, shape[:1], generator=generator)
                with pager.iteration():
                    loss = F.cross_entropy(model(x), y)
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                losses.append(loss.item())
                check_invariants(pager.core)
        except tp.InfeasibleBudget:
            after = [p.to_dense().detach() for p in model.parameters()]
            assert all(torch.equal(a, b) for a, b in zip(after, before)), "a parameter changed"
            assert not losses
            raise
        assert pager.stats()["peak_bytes"]["device"] <= budget
        return losses, [p.to_dense().detach() for p in model.parameters()], pager.stats()


@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
@pytest.mark.parametrize("model_name", MODELS)
def test_the_named_minimum_works_and_one_page_less_does_not(
    model_name: str, optimizer_name: str
) -> None:
    with pytest.raises(tp.InfeasibleBudget, match="No parameter was changed") as refusal:
        train(5 * PAGE, model_name, optimizer_name)
    minimum = refusal.value.minimum
    assert str(minimum) in str(refusal.value)
    losses, parameters, tight = train(minimum, model_name, optimizer_name)
    with pytest.raises(tp.InfeasibleBudget) as again:
        train(minimum - PAGE, model_name, optimizer_name)
    assert again.value.minimum == minimum
    plenty, expected, stats = train(64 << 20, model_name, optimizer_name)
    assert losses == plenty or (tight["streamed"] and losses == pytest.approx(plenty, rel=1e-3))
    same = all(torch.equal(a, b) for a, b in zip(parameters, expected))
    assert same or tight["streamed"]
    assert stats["fits"]


def test_a_refused_model_trains_on_with_a_larger_budget() -> None:
    model = mlp()
    with tp.Pager(8 * PAGE, host_budget="64MiB", page_size=PAGE, device="cpu") as pager:
        pager.page_module(model)
        optimizer = pager.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
        x, y = torch.randn(256, 64), torch.randint(0, 10, (256,))

        def step() -> float:
            with pager.iteration():
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                return loss.item()

        with pytest.raises(tp.InfeasibleBudget) as refusal:
            step()
        optimizer.zero_grad()
        pager.grow(device_budget=refusal.value.minimum)
        paged = [step() for _ in range(3)]
        streamed = pager.stats()["streamed"]
    plain_model = mlp()
    optimizer = torch.optim.AdamW(plain_model.parameters(), lr=1e-2)
    plain = []
    for _ in range(3):
        loss = F.cross_entropy(plain_model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        plain.append(loss.item())
    assert paged == plain or (streamed and paged == pytest.approx(plain, rel=1e-3))


def test_larger_shapes_later_are_refused_before_anything_changes() -> None:
    make, _ = MODELS["mlp"]
    with pytest.raises(tp.InfeasibleBudget) as refusal:
        train(5 * PAGE, "mlp", "adamw")
    budget = refusal.value.minimum
    model = make()
    with tp.Pager(budget, host_budget="64MiB", page_size=PAGE, device="cpu") as pager:
        pager.page_module(model)
        optimizer = pager.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))

        def step(batch: int) -> None:
            with pager.iteration():
                F.cross_entropy(model(torch.randn(batch, 64)), torch.zeros(batch).long()).backward()
                optimizer.step()
            optimizer.zero_grad()

        step(256)
        before = [p.to_dense().detach() for p in model.parameters()]
        with pytest.raises(tp.InfeasibleBudget) as larger:
            step(1024)
        assert larger.value.minimum > budget
        after = [p.to_dense().detach() for p in model.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(after, before))
        optimizer.zero_grad()
        step(256)  # the shapes that it was sized for still work
        check_invariants(pager.core)


def test_the_named_minimum_for_larger_shapes_later_works() -> None:
    """Under it the step goes slab by slab from then on: what it took before, when there was more
    room, is neither named nor used."""

    def refusal(budget: int, batches: list[int]) -> int | None:
        torch.manual_seed(0)
        model = nn.Linear(96, 96, bias=False, dtype=torch.float64)
        with tp.Pager(budget, "64MiB", page_size=PAGE, policy="lru", device="cpu") as pager:
            pager.page_module(model)
            optimizer = pager.optimizer(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
            for batch in batches:
                x = torch.randn(batch, 96, dtype=torch.float64)
                try:
                    with pager.iteration():
                        model(x).tanh().sin().exp().square().mean().backward()
                        optimizer.step()
                        optimizer.zero_grad()
                except tp.InfeasibleBudget as error:
                    return error.minimum
            assert pager.stats()["peak_bytes"]["device"] <= budget
        return None

    small = refusal(2 * PAGE, [1])
    assert small is not None
    assert refusal(small, [1, 1]) is None
    large = refusal(small, [1, 1, 100])
    assert large is not None
    assert large - small < 100 * 96 * 8 * 8
    assert refusal(large, [1, 1, 100, 1]) is None


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.RMSprop])
def test_a_step_that_a_later_iteration_takes_is_foreseen(optimizer, one_thread: None) -> None:  # type: ignore[no-untyped-def]
    """Gradients are accumulated over iterations. Refused is the first one, or none."""

    def refusal(budget: int) -> int | None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(160, 640), nn.ReLU(), nn.Linear(640, 160))
        with tp.Pager(budget, "64MiB", page_size=PAGE, policy="lru", device="cpu") as pager:
            pager.page_module(model)
            paged = pager.optimizer(optimizer(model.parameters()))
            for number in range(4):
                try:
                    with pager.iteration():
                        model(torch.randn(4, 160)).square().mean().backward()
                        if number % 2:
                            paged.step()
                            paged.zero_grad()
                except tp.InfeasibleBudget as error:
                    assert number == 0, "accepted, and refused later"
                    return error.minimum
            assert pager.stats()["peak_bytes"]["device"] <= budget
        return None

    minimum = refusal(2 * PAGE)
    assert minimum is not None
    assert refusal(minimum) is None


def _train_with_copies(budget: int | None) -> list[list[torch.Tensor]]:
    """Parameters after each step. Inside the iteration they are copied after the step, twice, as
    for an average: dense memory that the check before the step cannot know of."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(160, 640), nn.Linear(640, 160))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[list[torch.Tensor]] = []
    with ExitStack() as stack:
        pager = None
        if budget is not None:
            pager = stack.enter_context(
                tp.Pager(budget, "64MiB", page_size=PAGE, policy="lru", device="cpu")
            )
            pager.page_module(model)
            pager.optimizer(optimizer)
        for step in range(3):
            torch.manual_seed(step)
            try:
                with nullcontext() if pager is None else pager.iteration():
                    model(torch.randn(64, 160)).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    copies = [p.detach().clone() for p in model.parameters()]
                    copies += [2 * copy for copy in copies]
                    del copies
            except tp.InfeasibleBudget:
                assert step == 0, "accepted, and refused later"
                raise
            found.append([p.detach().to_dense().clone() for p in model.parameters()])
    return found


def test_dense_memory_after_the_step_counts() -> None:
    """In the first iteration a budget is refused or accepted for good: with plain bits where the
    weights are whole, and close to them where they stream."""
    expected = _train_with_copies(None)
    accepted, named = [], set()
    for kib in (1000, 1600, 2100, 2200, 2700):
        try:
            found = _train_with_copies(kib << 10)
        except tp.InfeasibleBudget as refusal:
            after = "MiB). Most dense memory was in use after the optimizer's step; what the step "
            named.add((refusal.minimum, after in str(refusal)))
            continue
        accepted.append(kib)
        for mine, plain in zip(found, expected, strict=True):
            same = torch.equal if kib > 2100 else torch.allclose
            assert all(same(a, b) for a, b in zip(mine, plain, strict=True))
    assert accepted == [2100, 2200, 2700]
    ((minimum, named_at_the_end),) = named
    assert named_at_the_end
    assert 1600 << 10 < minimum < 2100 << 10
    _train_with_copies(minimum)
    with pytest.raises(tp.InfeasibleBudget, match="after the optimizer's step") as refused:
        _train_with_copies(minimum - PAGE)
    assert refused.value.minimum == minimum


@pytest.mark.parametrize(
    ("module", "inputs", "optimizer"),
    [
        # writes a state by out=, which goes by way of a dense copy
        (lambda: nn.Linear(512, 256, bias=False), [512], torch.optim.Adamax),
        # has a weight of three dimensions, and what is stepped in its stead takes little
        (lambda: nn.Bilinear(48, 32, 64), [48, 32], torch.optim.AdamW),
    ],
    ids=["adamax", "bilinear"],
)
def test_all_of_the_first_step_is_foreseen(module, inputs, optimizer) -> None:  # type: ignore[no-untyped-def]
    def step(budget: int) -> None:
        torch.manual_seed(0)
        with tp.Pager(budget, "64MiB", page_size=PAGE, device="cpu") as pager:
            model = pager.page_module(module())
            paged = pager.optimizer(optimizer(model.parameters()))
            with pager.iteration():
                model(*(torch.randn(4, n) for n in inputs)).square().mean().backward()
                paged.step()

    with pytest.raises(tp.InfeasibleBudget, match="No parameter was changed") as refusal:
        step(5 * PAGE)
    step(refusal.value.minimum)


def test_a_fixed_reserve_that_is_too_small_is_named() -> None:
    with pytest.raises(tp.InfeasibleBudget, match="dense_reserve") as refusal:
        train(16 << 20, "mlp", "adamw", dense_reserve=PAGE)
    assert refusal.value.minimum > 0


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"device_budget": "20 apples"}, ValueError, ["device_budget", "20 apples", "GiB"]),
        ({"device_budget": -1}, ValueError, ["device_budget", "-1"]),
        ({"device_budget": None, "host_budget": 1}, ValueError, ["device_budget", "missing"]),
        ({"device_budget": [1]}, TypeError, ["device_budget", "[1]"]),
        ({"device_budget": "1KiB"}, tp.InfeasibleBudget, ["1024", "one page"]),
        ({"host_budget": "x"}, ValueError, ["host_budget"]),
        ({"page_size": "100KiB"}, ValueError, ["page_size", "102400", "power of two"]),
        ({"page_size": "32MiB"}, ValueError, ["page_size"]),
        ({"policy": "fifo"}, ValueError, ["policy", "fifo", "lru"]),
        ({"device": "meta"}, ValueError, ["meta", "cpu"]),
        ({"disk_budget": "1MiB"}, ValueError, ["disk_path"]),
        ({"disk_budget": "8MiB", "disk_path": "/no/such/dir"}, tp.PagerError, ["/no/such/dir"]),
        ({"disk_budget": "9PB", "disk_path": "/tmp"}, tp.PagerError, ["/tmp"]),
        ({"dense_reserve": "1GiB"}, tp.InfeasibleBudget, ["dense_reserve"]),
    ],
)
def test_bad_arguments_are_refused_at_start(
    options: dict[str, object], error: type[Exception], words: list[str]
) -> None:
    with pytest.raises(error) as refusal:
        tp.Pager(**{"device_budget": "4MiB", "device": "cpu", **options})  # type: ignore[arg-type]
    for word in words:
        assert word in str(refusal.value)


def test_full_tiers_lose_nothing_and_training_goes_on_after_growing() -> None:
    model, twin = mlp(), mlp()
    x, y = torch.randn(256, 64), torch.randint(0, 10, (256,))
    plain_optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    expected = []
    for _ in range(4):
        loss = F.cross_entropy(twin(x), y)
        loss.backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        expected.append(loss.item())
    with tp.Pager("5MiB", host_budget="1MiB", page_size=PAGE, device="cpu") as pager:
        pager.page_module(model)
        optimizer = pager.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
        losses = []
        refusals: list[str] = []
        while len(losses) < 4:
            try:
                with pager.iteration():
                    loss = F.cross_entropy(model(x), y)
                    loss.backward()
                    optimizer.step()
                losses.append(loss.item())
            except tp.TierFull as full:
                refusals.append(str(full))
                check_invariants(pager.core)
                pager.grow(host_budget=pager.core.budget_bytes["host"] + (1 << 20))
            optimizer.zero_grad()
        assert refusals
        assert all("host" in r for r in refusals)
        assert all("raise host_budget" in r for r in refusals)
        assert losses == expected


@pytest.mark.parametrize("device", ["3MiB", "6MiB", "9MiB"])
def test_what_full_tiers_ask_for_is_enough(device: str) -> None:
    """A host of the bytes that they name: at most twice, once while gradients are made and once
    before there are states."""
    asked = [0]
    for _ in range(3):
        model = mlp()
        with tp.Pager(device, host_budget=asked[-1], page_size=PAGE, device="cpu") as pager:
            pager.page_module(model)
            optimizer = pager.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
            try:
                for _ in range(4):
                    with pager.iteration():
                        model(torch.ones(256, 64)).square().mean().backward()
                        optimizer.step()
                    optimizer.zero_grad()
                break
            except tp.TierFull as full:
                asked.append(int(re.findall(r"host_budget=(\d+) bytes", str(full))[0]))
    else:
        pytest.fail(f"asked for {asked[1:]}, and it was not enough")
    assert (len(asked) > 1) == (device != "9MiB"), asked


@pytest.mark.parametrize("device", ["6MiB", "12MiB"])
def test_full_tiers_of_a_rank_say_that_its_figures_are_of_a_part(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of an iteration, and before there are states."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    model = mlp()
    with tp.Pager(device, page_size=PAGE, device="cpu") as pager:
        pager.page_module(model)
        optimizer = pager.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))

        def step() -> None:
            with pager.iteration():
                model(torch.ones(256, 64)).square().mean().backward()
                optimizer.step()

        with pytest.raises(tp.TierFull, match=r"one of 2 ranks: host_budget .* 2 times as much"):
            step()


@pytest.mark.parametrize("width", [64, 256, 1024])
def test_a_device_that_holds_everything_needs_no_other_tier(width: int) -> None:
    """The metered arena is as small as one op allows, and grows for what has nowhere else to go."""
    results = []
    for paged in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(width, width)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        with tp.Pager("64MiB", page_size="64KiB", device="cpu") as pager:
            if paged:
                model = pager.page_module(model)
                optimizer = pager.optimizer(optimizer)
            for _ in range(3):
                with pager.iteration():
                    model(torch.randn(32, width)).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                check_invariants(pager.core)
            results.append([torch.clone(value) for value in model.state_dict().values()])
    for plain, from_pages in zip(*results):
        assert torch.equal(plain, from_pages)


def test_parameters_that_no_tier_holds_are_refused_before_any_is_moved() -> None:
    model = nn.Linear(2048, 2048)
    with tp.Pager("4MiB", host_budget="4MiB", page_size=PAGE, device="cpu") as pager:
        with pytest.raises(tp.TierFull, match="parameters of Linear"):
            pager.page_module(model)
        assert type(model.weight) is nn.Parameter


def test_a_corrupt_disk_page_is_never_a_wrong_number(tmp_path) -> None:  # type: ignore[no-untyped-def]
    with tp.Pager(
        "1MiB", disk_budget="8MiB", disk_path=tmp_path, page_size=PAGE, device="cpu"
    ) as pager:
        paged = pager.page(torch.randn(200_000))
        from tensorpager.pager.debug.chaos import scramble

        scramble(pager.core)
        assert paged.residency()["disk"] > 0
        damage_disk_file(tmp_path)
        with pytest.raises(tp.CorruptPage, match="checksum"):
            paged.sum()
        check_invariants(pager.core)


def damage_disk_file(folder) -> None:  # type: ignore[no-untyped-def]
    """Flip bytes in the paging file of this process, found from the outside through /proc."""
    import os

    for name in os.listdir("/proc/self/fd"):
        link = f"/proc/self/fd/{name}"
        try:
            if str(folder) not in os.readlink(link):
                continue
        except OSError:
            continue
        with open(link, "r+b", buffering=0) as file:
            file.seek(1234)
            file.write(b"\xff\x00\xff\x00")
            os.fsync(file.fileno())
        return
    raise AssertionError("no paging file is open")


def test_verify_catches_damage_in_host_memory() -> None:
    from tensorpager.pager.debug.chaos import scramble

    with tp.Pager("1MiB", host_budget="8MiB", page_size=PAGE, device="cpu", verify=True) as pager:
        paged = pager.page(torch.randn(100_000))
        scramble(pager.core)
        pager.core.host.view(0, 1)[77] ^= 1
        with pytest.raises(tp.CorruptPage, match="slot 0"):
            paged.sum()
        check_invariants(pager.core)


# -- what streams under one budget and is whole under the one that is named -----------------------
class Case(nn.Module):
    """``table`` takes 24 pages; 5 MiB are dense for as long as an iteration runs."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.table = nn.Parameter(torch.randn(1536, 256))
        self.small = nn.Parameter(torch.randn(256, 256))
        self.table.requires_grad_(kind != "reduction")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ballast = torch.zeros(5 << 18)
        out = x @ self.small
        if self.kind == "linear":
            out = F.linear(out, self.table)
        elif self.kind == "embedding":
            out = out + F.embedding(torch.arange(0, 1536, 192), self.table)
        elif self.kind == "reduction":
            out = out * self.table.norm()
        loss = out.square().mean() + ballast.sum()
        if self.kind == "elementwise":
            with torch.no_grad():
                self.table.mul_(0.5).add_(1.0)
        return loss


CASES = ("linear", "embedding", "elementwise", "reduction", "optimizer")


def train_case(budget: int, kind: str, **options: object) -> list[float]:
    """Losses; asserts the invariants and the device peak on the way."""
    options = {"host_budget": "64MiB", "page_size": PAGE, "device": "cpu", **options}
    model = Case(kind)
    with tp.Pager(budget, **options) as pager:  # type: ignore[arg-type]
        pager.page_module(model)
        optimizer = pager.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
        losses = []
        for _ in range(3):
            with pager.iteration():
                loss = model(torch.ones(8, 256))
                loss.backward()
                if kind == "optimizer":
                    model.table.grad = pager.page(torch.ones(1536, 256))
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            check_invariants(pager.core)
        assert pager.stats()["peak_bytes"]["device"] <= budget
        return losses


@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"dense_reserve": 6 << 20}, marks=pytest.mark.slow)],
    ids=["auto", "reserve"],
)
@pytest.mark.parametrize("kind", CASES)
def test_a_budget_is_refused_once(kind: str, options: dict[str, int]) -> None:
    """The minimum that is named while something streamed works, whether it streams there or not."""
    budget = options["dense_reserve"] + PAGE if options else 16 * PAGE
    with pytest.raises(tp.InfeasibleBudget, match=r"was changed\.$") as refusal:
        train_case(budget, kind, **options)
    losses = train_case(refusal.value.minimum, kind, **options)
    assert losses == pytest.approx(train_case(64 << 20, kind), rel=1e-4)


def settle(pager: tp.Pager) -> None:
    pager.core.budget.settle(0, roomy=False)


@pytest.mark.parametrize("when", ["metered", "settled"])
def test_an_arena_that_cannot_grow_is_what_it_was(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no memory for more frames: those that are there work, and so does the next try."""

    def refuse(nbytes: int) -> None:
        if nbytes > pager.core.residency.pool.count * PAGE:
            raise PagerError("no memory for the arena")
        commit(nbytes)

    with tp.Pager("4MiB", host_budget="8MiB", page_size=PAGE, device="cpu") as pager:
        dense = torch.randn(500_000)
        paged = pager.page(dense)
        pager.core.budget.start()
        pager.core.residency.resize(2)
        commit = pager.core.backend.commit
        monkeypatch.setattr(pager.core.backend, "commit", refuse)
        grow = {"metered": lambda: paged.pin().__enter__(), "settled": lambda: settle(pager)}[when]
        with pytest.raises(PagerError, match="no memory for the arena"):
            grow()
        frames = pager.core.residency.pool.count
        assert frames == len(pager.core.table.frame_page) <= 2
        if when == "settled":
            assert pager.core.budget.reserve == pager.core.budget.bytes - frames * PAGE
        check_invariants(pager.core)
        assert torch.equal(pager.page(dense[:1000]).to_dense(), dense[:1000])
        monkeypatch.setattr(pager.core.backend, "commit", commit)
        settle(pager)
        assert pager.core.residency.pool.count > 2
        assert torch.equal(paged.to_dense(), dense)
        check_invariants(pager.core)
