"""The loss of a head in slabs: the same bits paged or plain, whatever the budget; near torch's own.

Stated bound: loss and gradients differ from ``F.cross_entropy(F.linear(…))`` in float32 by no more
than ``BOUND`` of the largest value, for logits of about 1.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tensorpager as tp
from tensorpager.pager.disk.tier import DiskTier

from .models import World, assert_same, make_pager, mlp
from .tables import (
    FRAMES,
    LANES,
    ROWS,
    WIDTH,
    is_paged,
    paged_table,
    pages_of_table,
    read_table,
)
from .tables import tight as tight_without_copies
from .test_planned import compare_planned, planned_pager

BOUND = 5e-6
TOKENS = 30
SLABS = -(-ROWS // 256)
tight = partial(tight_without_copies, may_gather=True)  # of slabs that are in pieces


@pytest.fixture(autouse=True)
def _seed(one_thread: None) -> None:
    torch.manual_seed(5)


def slow(value: Any) -> Any:
    return pytest.param(value, marks=pytest.mark.slow)


def words(classes: int = ROWS) -> torch.Tensor:
    targets = torch.randint(classes, (3, TOKENS // 3))
    targets[0, 0], targets[1, 1], targets[2, :3] = 0, classes - 1, -100
    return targets


def passed(
    weight: torch.Tensor,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    loss_of: Any = None,
    **options: Any,
) -> list[torch.Tensor]:
    """The loss, and all gradients."""
    leaves = [hidden.detach().clone().requires_grad_(), weight, bias]
    for leaf in leaves:
        if leaf is not None:
            leaf.grad = None
    loss = (loss_of or tp.linear_cross_entropy)(leaves[0], weight, targets, bias, **options)
    loss.backward(torch.linspace(0.5, 1, loss.numel()).view(loss.shape).to(loss.dtype))
    return [loss.detach(), *(read_table(t.grad).clone() for t in leaves if t is not None)]


def torchs(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, bias: Any, **options: Any
) -> torch.Tensor:
    logits = F.linear(hidden, weight, bias)
    loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), **options)
    return loss.view(targets.shape) if options.get("reduction") == "none" else loss


def assert_near(found: list[torch.Tensor], expected: list[torch.Tensor], bound: float) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert float((one - other).abs().max()) <= bound * float(other.abs().max())


# -- values ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("lane", [slow("plain"), "chaos", slow("scattered")])
def test_ten_times_the_arena(lane: str) -> None:
    """Paged or plain the same bits; within the bound of torch's own."""
    dense, targets = 0.1 * torch.randn(ROWS, WIDTH), words()
    hidden = torch.randn(3, TOKENS // 3, WIDTH)
    options = {"label_smoothing": 0.1, "reduction": "none"} if lane == "plain" else {}
    plain, bias = nn.Parameter(dense.clone()), nn.Parameter(torch.randn(ROWS))
    with tight(lane) as pager:
        weight, paged_bias = paged_table(pager, dense), paged_table(pager, bias.detach())
        assert pages_of_table(weight) >= 10 * FRAMES
        before = pager.core.gathers
        found = passed(weight, hidden, targets, paged_bias, **options)
        assert pager.core.gathers - before <= 2 * SLABS  # never of the whole
        assert is_paged(weight.grad)
        assert type(found[1]) is torch.Tensor
    assert_same(found, passed(plain, hidden, targets, bias, **options))
    assert_near(found, passed(plain, hidden, targets, bias, loss_of=torchs, **options), BOUND)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
@pytest.mark.parametrize("kind", ["small", "plain"])
def test_like_torchs(kind: str, label_smoothing: float, reduction: str) -> None:
    dense, hidden = 0.2 * torch.randn(1000, 40), torch.randn(3, TOKENS // 3, 40)
    targets = words(1000)
    options: dict[str, Any] = {"label_smoothing": label_smoothing, "reduction": reduction}
    options["ignore_index"] = int(targets[0, 1])
    targets = targets.clamp(min=0)
    plain = nn.Parameter(dense.clone())
    expected = passed(plain, hidden, targets, loss_of=torchs, **options)
    if kind == "plain":
        assert_near(passed(plain, hidden, targets, **options), expected, BOUND)
        return
    with make_pager(frames=40) as pager:
        weight = paged_table(pager, dense)
        assert_near(passed(weight, hidden, targets, **options), expected, BOUND)
        assert not is_paged(weight.grad) or weight.grad._storage.run.kind == "gradient"


@pytest.mark.parametrize("dtype", [slow(torch.float64), torch.bfloat16])
def test_dtypes(dtype: torch.dtype) -> None:
    dense, hidden = torch.randn(ROWS, WIDTH).to(dtype), torch.randn(TOKENS, WIDTH).to(dtype)
    targets = words().flatten()
    plain = nn.Parameter(dense.clone())
    with tight() as pager:
        found = passed(paged_table(pager, dense), hidden, targets)
    assert_same(found, passed(plain, hidden, targets))
    assert found[0].dtype == (torch.float64 if dtype is torch.float64 else torch.float32)
    wide = nn.Parameter(dense.double())
    expected = passed(wide, hidden.double(), targets, loss_of=torchs)
    assert_near([t.double() for t in found], expected, 1e-13 if dtype is torch.float64 else 5e-2)


@pytest.mark.parametrize("frozen", ["weight", *map(slow, ("hidden", "all"))])
def test_frozen(frozen: str) -> None:
    dense, hidden, targets = torch.randn(ROWS, WIDTH), torch.randn(TOKENS, WIDTH), words().flatten()
    results = []
    with tight() as pager:
        for weight in (paged_table(pager, dense), nn.Parameter(dense.clone())):
            leaf = hidden.clone().requires_grad_(frozen == "weight")
            weight.requires_grad_(frozen == "hidden")
            loss = tp.linear_cross_entropy(leaf, weight, targets)
            assert loss.requires_grad == (frozen != "all")
            if frozen != "all":
                loss.backward()
            assert (weight.grad is None) == (frozen != "hidden")
            grads = [leaf.grad, None if weight.grad is None else read_table(weight.grad)]
            results.append([loss.detach(), *grads])
            assert pager.core.residency.pinned_pages() == 0
    assert_same(*results)


@pytest.mark.slow
def test_autocast() -> None:
    dense, hidden, targets = torch.randn(ROWS, WIDTH), torch.randn(TOKENS, WIDTH), words().flatten()
    plain = nn.Parameter(dense.clone())
    with tight() as pager, torch.autocast("cpu", torch.bfloat16):
        weight = paged_table(pager, dense)
        found = passed(weight, hidden, targets)
        assert weight.grad.dtype is torch.float32
        assert_same(found, passed(plain, hidden, targets))
    assert_near(found, passed(plain, hidden, targets, loss_of=torchs), 5e-2)


# -- the budget ------------------------------------------------------------------------------------
@pytest.mark.parametrize("frames", [2 * FRAMES, *map(slow, (FRAMES, 40, 70)), 400])
def test_whatever_the_budget(frames: int) -> None:
    """The same bits from run to run, in a metered iteration, a small arena and a large one."""
    dense, hidden, targets = torch.randn(ROWS, WIDTH), torch.randn(TOKENS, WIDTH), words().flatten()
    expected = passed(nn.Parameter(dense.clone()), hidden, targets)
    with make_pager(frames=frames) as pager:
        weight = paged_table(pager, dense)
        gathers = []
        for _ in range(2):
            with pager.iteration():
                assert_same(passed(weight, hidden, targets), expected)
            gathers.append(pager.core.gathers)
        stats = pager.stats()
        assert stats["peak_bytes"]["device"] <= stats["budget_bytes"]["device"]
        assert gathers[0] == gathers[1] or frames < 400
        assert pager.core.residency.peak_frames <= frames


def test_logits_never_exist() -> None:
    """Dense memory of the iteration, as metered: less than half the logits."""
    tokens = 1024
    hidden, targets = torch.randn(tokens, WIDTH), torch.randint(ROWS, (tokens,))
    with make_pager(frames=3 * FRAMES) as pager:
        weight = paged_table(pager, torch.randn(ROWS, WIDTH))
        leaf = hidden.requires_grad_()
        with pager.iteration():
            tp.linear_cross_entropy(leaf, weight, targets).backward()
        assert pager.stats()["dense_peak_bytes"] < tokens * ROWS * 4 // 2


def test_the_next_slab_is_read_ahead() -> None:
    with tight(frames=12) as pager:
        weight = paged_table(pager, torch.randn(ROWS, WIDTH))
        before = pager.core.residency.pages_ahead
        passed(weight, torch.randn(TOKENS, WIDTH), words().flatten())
        assert pager.core.residency.pages_ahead - before > 0


# -- graphs ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("lane", ["plain", slow("chaos")])
def test_tied_to_an_embedding(lane: str) -> None:
    """Both gradients of one weight, over two backward passes."""
    dense, indices, targets = torch.randn(ROWS, WIDTH) * 0.1, words().clamp(min=0), words()
    results = []
    with tight(lane) as pager:
        for weight in (paged_table(pager, dense), nn.Parameter(dense.clone())):
            losses = []
            for _ in range(2):
                hidden = F.embedding(indices, weight, padding_idx=0).tanh()
                loss = tp.linear_cross_entropy(hidden, weight, targets)
                loss.backward()
                losses.append(loss.detach())
            results.append([losses, read_table(weight.grad)])
    assert_same(*results)


def test_backward_twice() -> None:
    dense, hidden, targets = torch.randn(ROWS, WIDTH), torch.randn(TOKENS, WIDTH), words().flatten()
    with tight() as pager:
        weight = paged_table(pager, dense)
        loss = tp.linear_cross_entropy(hidden.requires_grad_(), weight, targets)
        loss.backward(retain_graph=True)
        once = read_table(weight.grad).clone()
        loss.backward()
        assert torch.equal(read_table(weight.grad), 2 * once)
        loss = tp.linear_cross_entropy(hidden, weight, targets)
        with pytest.raises(RuntimeError, match="once"):
            torch.autograd.grad(loss, hidden, create_graph=True)
        assert pager.core.residency.pinned_pages() == 0


def test_a_changed_operand_is_noticed() -> None:
    with make_pager(frames=100) as pager:
        for changed in ("weight", "hidden"):
            weight = paged_table(pager, torch.randn(400, WIDTH))
            source = torch.randn(TOKENS, WIDTH, requires_grad=True)
            hidden = source * 2
            loss = tp.linear_cross_entropy(hidden, weight, words(400).flatten())
            with torch.no_grad():
                (weight if changed == "weight" else hidden).mul_(2)
            with pytest.raises(RuntimeError, match="modified by an inplace"):
                loss.backward()
            assert pager.core.residency.pinned_pages() == 0


# -- errors ----------------------------------------------------------------------------------------
def test_errors() -> None:
    with tight() as pager:
        weight = paged_table(pager, torch.randn(ROWS, WIDTH))
        hidden, targets = torch.randn(TOKENS, WIDTH), words().flatten()
        with pytest.raises(IndexError, match=f"{ROWS} is out of bounds"):
            tp.linear_cross_entropy(hidden, weight, targets.clamp(min=0) + ROWS)
        for arguments, message in (
            ((hidden[:, 1:], weight, targets), "features"),
            ((hidden, weight[0], targets), "classes"),
            ((hidden, weight, targets, torch.zeros(3)), "bias"),
            ((hidden, weight, targets[1:]), "targets"),
        ):
            with pytest.raises(ValueError, match=message):
                tp.linear_cross_entropy(*arguments)
        with pytest.raises(RuntimeError, match="dtype"):
            tp.linear_cross_entropy(hidden.double(), weight, targets)
        assert pager.core.residency.pinned_pages() == 0


@pytest.mark.slow
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_disk_that_fails(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """Nothing stays pinned; when the disk is well again the loss is what it is."""
    disk = {"host_budget": 0, "disk_budget": "32MiB", "disk_path": tmp_path}
    dense, hidden, targets = torch.randn(ROWS, WIDTH), torch.randn(TOKENS, WIDTH), words().flatten()
    with tight(**disk) as pager:
        weight = paged_table(pager, dense)
        expected = tp.linear_cross_entropy(hidden, weight, targets)

        def failing(self: DiskTier, *args: Any, **kwargs: Any) -> Any:
            raise tp.PagerError("the disk is ill")

        with monkeypatch.context() as patch:
            loss = tp.linear_cross_entropy(hidden, weight, targets)
            patch.setattr(DiskTier, "submit_read", failing)
            again = (
                loss.backward if when == "backward" else (lambda: passed(weight, hidden, targets))
            )
            with pytest.raises(tp.PagerError, match="ill"):
                again()
            assert pager.core.residency.pinned_pages() == 0
        assert torch.equal(tp.linear_cross_entropy(hidden, weight, targets), expected)
        expected.backward()


# -- training --------------------------------------------------------------------------------------
def a_language_model(world: World) -> object:
    """A table, larger than the arena, that is both ends of a model."""
    dense = torch.randn(ROWS, WIDTH) * 0.1
    layers = nn.Sequential(nn.Linear(WIDTH, 128), mlp(depth=3), nn.Linear(10, WIDTH))
    model = world.module(layers)
    optimizer = world.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    pager = world.pager
    table = nn.Parameter(dense.clone()) if pager is None else paged_table(pager, dense)
    sgd = world.optimizer(torch.optim.SGD([table], lr=0.5, momentum=0.9, foreach=False))
    losses = []
    for _ in range(4):
        with world.iteration():
            targets = words()
            hidden = model(F.embedding(targets.clamp(min=0), table))
            loss = tp.linear_cross_entropy(hidden, table, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if pager is not None:
            assert is_paged(table.grad)
        sgd.step()
        sgd.zero_grad()
        losses.append(loss.item())
    return losses, model, optimizer, read_table(table)


@pytest.mark.parametrize("lane", ["plain", slow("chaos")])
def test_planned_training(lane: str) -> None:
    with planned_pager(verify=True) as pager, LANES[lane](pager.core):
        stats = compare_planned(a_language_model, pager)
        assert pager.core.residency.pinned_pages() == 0
    assert stats["peak_bytes"]["device"] <= stats["budget_bytes"]["device"]
