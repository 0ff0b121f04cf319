"""Embeddings: a table ten times the arena is looked up and trained, bit for bit as PyTorch does."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tensorpager as tp
from tensorpager.pager.streaming import gradients as gradient_ops

from .. import programs
from .models import PAGE_BYTES, World, assert_same, make_pager, mlp
from .tables import (
    FRAMES,
    LANES,
    ROWS,
    WIDTH,
    is_paged,
    paged_table,
    pages_of_table,
    read_table,
    slab_sgd,
    tight,
    write_table,
)
from .test_planned import compare_planned, planned_pager

TEN_TIMES = 10 * FRAMES


@pytest.fixture(autouse=True)
def _seed(one_thread: None) -> None:
    torch.manual_seed(3)


def slow(value: Any) -> Any:
    return pytest.param(value, marks=pytest.mark.slow)


def lookups(count: int = 300, rows: int = ROWS) -> torch.Tensor:
    """Many distinct rows, the first and the last, and some of them many times."""
    indices = torch.randint(rows, (5, count // 5))
    indices[0, :20] = indices[1, 0]
    indices[2, 0], indices[2, 1] = 0, rows - 1
    return indices


def gradients_of(table: torch.Tensor, indices: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    """The rows, and the table's gradient after one, and after two, backward passes."""
    results = []
    table.grad = None
    for step in range(2):
        out = F.embedding(indices + step, table, **options)
        out.sin().mul(torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
        assert table.grad is not None
        results += [out.detach(), read_table(table.grad).clone()]
    return results


# -- the same bits ---------------------------------------------------------------------------------
@pytest.mark.parametrize("lane", ["chaos", *map(slow, ("plain", "scattered"))])
@pytest.mark.parametrize("padding", ["a row", *map(slow, ("none", "the last"))])
def test_ten_times_the_arena(lane: str, padding: str) -> None:
    """Forward, backward, and one more backward pass that adds to the gradient."""
    dense = torch.randn(ROWS, WIDTH)
    plain = nn.Parameter(dense.clone())
    indices = lookups(rows=ROWS - 1)
    row = {"none": None, "a row": int(indices[1, 0]), "the last": -1}[padding]
    with tight(lane) as pager:
        table = paged_table(pager, dense)
        assert pages_of_table(table) >= TEN_TIMES
        before = pager.core.gathers
        found = gradients_of(table, indices, padding_idx=row)
        assert pager.core.gathers == before
        assert_same(found, gradients_of(plain, indices, padding_idx=row))
        assert is_paged(table.grad)


def test_indices_may_be_resized_afterwards() -> None:
    indices = lookups()
    with tight() as pager:
        F.embedding(indices, paged_table(pager, torch.randn(ROWS, WIDTH))).sum().backward()
    assert indices.resize_(2, *indices.shape).numel() > 0


def test_sums_of_gradients_have_torchs_bits() -> None:
    """A half plus a product is rounded otherwise at the end of what a thread does than before."""
    torch.set_num_threads(2)
    dense = torch.randn(ROWS, WIDTH).bfloat16()
    plain = nn.Parameter(dense.clone())
    one, two = lookups(), lookups()
    with tight() as pager:
        table = paged_table(pager, dense)
        sums = []
        for weight in (table, plain):
            pair = [
                torch.autograd.grad(F.embedding(i, weight).sum(), weight)[0] for i in (one, two)
            ]
            sums.append(torch.add(pair[0], pair[1], alpha=0.3))
        assert is_paged(sums[0])
        assert torch.equal(read_table(sums[0]), sums[1])


def test_used_twice_in_one_graph() -> None:
    """Autograd adds the two gradients up: in pages again."""
    dense = torch.randn(ROWS, WIDTH)
    plain = nn.Parameter(dense.clone())
    one, two = lookups(), lookups()
    with tight() as pager:
        table = paged_table(pager, dense)
        for weight in (table, plain):
            loss = F.embedding(one, weight).sin().sum() + F.embedding(two, weight).cos().sum()
            loss.backward()
        assert is_paged(table.grad)
        assert torch.equal(read_table(table.grad), plain.grad)


def test_the_gradient_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd takes over what backward made."""
    copies = []
    copy_gradient = gradient_ops.copy_gradient
    monkeypatch.setattr(
        gradient_ops, "copy_gradient", lambda given: copies.append(1) or copy_gradient(given)
    )
    with tight() as pager:
        table = paged_table(pager, torch.randn(ROWS, WIDTH))
        F.embedding(lookups(), table).sum().backward()
        assert is_paged(table.grad)
        assert not copies
        twin = table.grad.clone()
        assert copies
        assert is_paged(twin)
        assert torch.equal(read_table(twin), read_table(table.grad))


@pytest.mark.parametrize("lane", [slow("plain"), "chaos"])
def test_rows_of_several_pages(lane: str) -> None:
    dense = torch.randn(40, 40_000)  # 2.4 pages
    plain = nn.Parameter(dense.clone())
    indices = torch.tensor([[3, 39, 0], [3, 17, 17]])
    with tight(lane) as pager:
        table = paged_table(pager, dense)
        for weight in (table, plain):
            F.embedding(indices, weight, padding_idx=0).sin().sum().backward()
        assert torch.equal(F.embedding(indices, table), F.embedding(indices, plain))
        assert torch.equal(read_table(table.grad), plain.grad)


@pytest.mark.parametrize("dtype", [slow(torch.float64), torch.bfloat16, slow(torch.float16)])
def test_dtypes(dtype: torch.dtype) -> None:
    """Halves are summed in float32 and rounded once."""
    dense = torch.randn(ROWS, WIDTH).to(dtype)
    indices = lookups()
    with tight() as pager:
        table = paged_table(pager, dense)
        out = F.embedding(indices, table)
        assert torch.equal(out, dense[indices])
        grad = torch.randn(out.shape).to(dtype)
        out.backward(grad)
        wide = grad if dtype is torch.float64 else grad.float()
        expected = torch.ops.aten.embedding_dense_backward(wide, indices, len(dense), -1, False)
        assert torch.equal(read_table(table.grad), expected.to(dtype))


@pytest.mark.parametrize("kind", ["by frequency", "empty", "strided", *map(slow, ("int32", "one"))])
def test_other_calls(kind: str) -> None:
    options: dict[str, Any] = {}
    indices = lookups()
    if kind == "by frequency":
        options["scale_grad_by_freq"] = True
    elif kind == "int32":
        indices = indices.int()
    elif kind == "empty":
        indices = torch.empty(2, 0, dtype=torch.int64)
    elif kind == "one":
        indices = torch.tensor(11)
    else:
        indices = indices.t()[::2]
    dense = torch.randn(ROWS, WIDTH)
    plain = nn.Parameter(dense.clone())
    with tight() as pager:
        table = paged_table(pager, dense)
        results = []
        for weight in (table, plain):
            out = F.embedding(indices, weight, **options)
            out.sin().sum().backward()
            results.append([out.detach(), out.stride(), read_table(weight.grad)])
        assert_same(*results)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(F.embedding(indices, table), plain.detach()[indices.long()])


def test_errors_are_pytorchs() -> None:
    with tight() as pager:
        table = paged_table(pager, torch.randn(ROWS, WIDTH))
        plain = read_table(table)
        for indices in (torch.tensor([3, ROWS]), torch.tensor([-1, 2])):
            with pytest.raises(IndexError) as expected:
                F.embedding(indices, plain)
            with pytest.raises(IndexError) as found:
                F.embedding(indices, table)
            assert str(found.value) == str(expected.value)
            assert pager.core.residency.pinned_pages() == 0
        with pytest.raises(AssertionError, match="Padding_idx"):
            F.embedding(torch.tensor([3]), table, padding_idx=ROWS)


# -- what moves ------------------------------------------------------------------------------------
def test_only_the_pages_of_the_rows_come_in() -> None:
    with tight() as pager:
        table = paged_table(pager, torch.arange(ROWS * WIDTH).view(ROWS, WIDTH).float())
        scramble(pager)
        row_bytes = WIDTH * 4
        straddling = next(
            row
            for row in range(1000, ROWS)
            if row * row_bytes // PAGE_BYTES != ((row + 1) * row_bytes - 1) // PAGE_BYTES
        )
        before = pager.stats()["bytes_in"]
        with torch.no_grad():
            out = F.embedding(torch.tensor([0, straddling, 5, straddling]), table)
        assert pager.stats()["bytes_in"] - before == 3 * PAGE_BYTES
        assert out[1, 0] == straddling * WIDTH
        assert torch.equal(out[1], out[3])


def scramble(pager: tp.Pager) -> None:
    for run in list(pager.core.space.runs.values()):
        with pager.core.quiet():
            pager.core.residency.evict_run(run)


def test_a_table_that_fits_is_pytorchs_own_way() -> None:
    with make_pager(frames=40) as pager:
        table = paged_table(pager, torch.randn(100, WIDTH))
        out = F.embedding(torch.tensor([3, 5]), table)
        assert "Embedding" in type(out.grad_fn).__name__
        out.sum().backward()
        middle = paged_table(pager, torch.randn(1400, WIDTH))  # 17 of 40 frames
        out = F.embedding(torch.tensor([3, 5]), middle)
        assert "Lookup" in type(out.grad_fn).__name__
    with make_pager(fits=True) as pager:
        table = paged_table(pager, torch.randn(ROWS, WIDTH))
        for _ in range(2):
            table.grad = None
            with pager.iteration():
                F.embedding(torch.tensor([3, 5]), table).sum().backward()
        assert pager.core.fits
        assert not is_paged(table.grad)


def test_ways_that_stay_pytorchs() -> None:
    """A table that could be on the device as a whole: transforms and modes see its ops."""
    with make_pager(frames=24) as pager:
        dense = torch.randn(1400, WIDTH)
        table = paged_table(pager, dense.clone())
        indices = lookups(100, 1400)
        assert "Lookup" in type(F.embedding(indices, table).grad_fn).__name__
        expected = F.embedding(indices, dense)
        rows = torch.func.vmap(lambda some: F.embedding(some, table))(indices)
        assert torch.equal(rows, expected)
        with torch.no_grad():
            renormed = F.embedding(indices, table, max_norm=1.0)
        assert torch.equal(renormed, F.embedding(indices, dense.clone(), max_norm=1.0))
        assert float(table.detach().to_dense()[indices[0, 0]].norm()) < 1.001


# -- gradients of other kinds ----------------------------------------------------------------------
def test_gradients_of_gradients() -> None:
    dense = torch.randn(1400, WIDTH, dtype=torch.float64)
    plain = nn.Parameter(dense.clone())
    indices, factor = lookups(50, 1400), torch.randn(5, 10, WIDTH, dtype=torch.float64)
    with make_pager(frames=30) as pager:  # the table has 34
        table = paged_table(pager, dense)
        found = []
        for weight in (table, plain):
            leaf = factor.clone().requires_grad_()
            out = F.embedding(indices, weight)
            assert ("Lookup" in type(out.grad_fn).__name__) == is_paged(weight)
            (grad,) = torch.autograd.grad((out * leaf).sum(), weight, create_graph=True)
            assert torch.equal(read_table(grad), grad.detach())
            found.append(torch.autograd.grad(grad.square().sum(), leaf)[0])
        assert torch.equal(*found)
        (grad,) = torch.autograd.grad(F.embedding(indices, table).sum(), table)
        assert is_paged(grad)


@pytest.mark.slow
def test_sparse_and_dense_gradients_of_one_table() -> None:
    """In one graph, and added to each other over two passes."""
    dense = torch.randn(ROWS, WIDTH)
    one, two = lookups(50), lookups(50)
    results = []
    with tight() as pager:
        for table in (paged_table(pager, dense), nn.Parameter(dense.clone())):
            both = F.embedding(one, table, sparse=True).sin() + F.embedding(two, table).cos()
            both.sum().backward()
            F.embedding(two, table, sparse=True).sin().sum().backward()
            results.append(read_table(table.grad))
    assert torch.equal(*results)


@pytest.mark.parametrize("optimizer", [slow("SGD"), "SparseAdam"])
def test_sparse_gradients_train_rows(optimizer: str) -> None:
    """The pages of the rows, and no others, are read and written."""
    dense = torch.randn(ROWS, WIDTH)
    few = torch.tensor([[3, 4, 4, 900], [3500, 4, 3, 3]])
    with tight("chaos") as pager:
        modules = [nn.Embedding(ROWS, WIDTH, sparse=True, device="meta") for _ in range(2)]
        pager.page_module(modules[0])
        modules[1].weight = nn.Parameter(dense.clone())
        write_table(modules[0].weight, dense)
        kind: Any = getattr(torch.optim, optimizer)
        steps = [kind(module.parameters(), lr=0.1) for module in modules]
        pager.optimizer(steps[0])
        moved = 0
        for number in range(3):
            before = pager.stats()["bytes_in"]
            grads = []
            for module, step in zip(modules, steps):
                module(few + number).sin().sum().backward()
                grads.append(module.weight.grad)
                step.step()
                module.zero_grad()
            moved = pager.stats()["bytes_in"] - before
            assert torch.equal(grads[0]._indices(), grads[1]._indices())
            assert torch.equal(grads[0]._values(), grads[1]._values())
        assert torch.equal(read_table(modules[0].weight), modules[1].weight)
        assert moved <= 30 * PAGE_BYTES
        for key, value in steps[1].state[modules[1].weight].items():
            if isinstance(value, torch.Tensor):
                found = steps[0].state[modules[0].weight][key]
                assert torch.equal(read_table(found), value)


# -- training --------------------------------------------------------------------------------------
OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda table: torch.optim.SGD([table], lr=0.5, momentum=0.9, foreach=False),
    "AdamW": lambda table: torch.optim.AdamW([table], lr=1e-2, foreach=False),
}


@pytest.mark.parametrize("lane", ["plain", slow("chaos")])
@pytest.mark.parametrize("optimizer", [slow("SGD"), "AdamW"])
def test_a_table_ten_times_the_arena_trains(optimizer: str, lane: str) -> None:
    """From the first, metered iteration on; the losses have the same bits."""
    dense = torch.randn(ROWS, WIDTH)
    with tight(lane, frames=FRAMES + 2) as pager:
        results = []
        for table in (paged_table(pager, dense), nn.Parameter(dense.clone())):
            paged = is_paged(table)
            torch.manual_seed(8)
            step = OPTIMIZERS[optimizer](table)
            if paged:
                pager.optimizer(step)
            losses = []
            for _ in range(3):
                with pager.iteration() if paged else nullcontext():
                    loss = F.embedding(lookups(100), table, padding_idx=2).sin().square().mean()
                    loss.backward()
                    step.step()
                    step.zero_grad()
                losses.append(loss.item())
            results.append([losses, read_table(table)])
        assert pager.stats()["dense_peak_bytes"] < dense.nbytes
    assert_same(*results)


def a_table_and_a_model(world: World) -> object:
    """Words through a table larger than the arena, and a model that is pressed out of it."""
    dense = torch.randn(ROWS, WIDTH)
    model = world.module(nn.Sequential(nn.Linear(WIDTH, 128), mlp(depth=4)))
    optimizer = world.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    pager = world.pager
    table = nn.Parameter(dense.clone()) if pager is None else paged_table(pager, dense)
    losses = []
    for step in range(8):
        with world.iteration():
            words, labels = lookups(100), torch.randint(10, (20,))
            rows = F.embedding(words, table, padding_idx=1) + F.embedding(words // 2, table)
            loss = F.cross_entropy(model(rows.mean(0)), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if step % 2:  # two passes for one update
            slab_sgd(table, 0.5)
            table.grad = None
        losses.append(loss.item())
    return losses, model, optimizer, read_table(table)


@pytest.mark.slow
@pytest.mark.parametrize("lane", ["plain", "chaos"])
def test_planned_training(lane: str) -> None:
    with planned_pager(verify=True) as pager, LANES[lane](pager.core):
        stats = compare_planned(a_table_and_a_model, pager)
        assert pager.core.residency.pinned_pages() == 0
    assert stats["peak_bytes"]["device"] <= stats["budget_bytes"]["device"]


@pytest.mark.slow
def test_an_iteration_is_recorded(tmp_path: Path) -> None:
    """The recorder is a mode, which keeps smaller tables on PyTorch's own way."""
    with tight() as pager:
        table = paged_table(pager, torch.randn(ROWS, WIDTH))
        with pager.record(tmp_path / "trace.parquet"), pager.iteration():
            F.embedding(lookups(50), table).sum().backward()
        assert is_paged(table.grad)
        assert (tmp_path / "trace.parquet").stat().st_size > 0


TRAIN = """
import json, resource, sys, torch
import tensorpager as tp
from tensorpager.pager.tensor.slabs import put_bytes
paged, folder = sys.argv[1] == "paged", sys.argv[2]
torch.set_num_threads(1)
budget, page, width = 16 << 20, 256 << 10, 1024
rows = 10 * budget // (4 * width)
def part(first):
    chance = torch.Generator().manual_seed(first)
    return torch.randn(256, width, generator=chance)
tiny = torch.nn.Embedding(2, 2)
tiny(torch.tensor([1])).sum().backward()
torch.optim.SGD(tiny.parameters(), lr=1.0).step()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
if paged:
    pager = tp.Pager(budget, disk_budget="512MiB", disk_path=folder, page_size=page, device="cpu",
                     dense_reserve="6MiB", policy="lru")
    model = pager.page_module(torch.nn.Embedding(rows, width, device="meta"))
    for first in range(0, rows, 256):
        values = part(first).view(-1).view(torch.uint8)
        put_bytes(model.weight._storage, values, first * 4 * width)
else:
    model = torch.nn.Embedding(rows, width)
    with torch.no_grad():
        for first in range(0, rows, 256):
            model.weight[first : first + 256] = part(first)
torch.manual_seed(1)
optimizer = torch.optim.SGD(model.parameters(), lr=100.0, foreach=False)
if paged:
    pager.optimizer(optimizer)
losses = []
for _ in range(2):
    words = torch.randint(rows, (64,))
    if paged:
        with pager.iteration():
            loss = model(words).square().mean()
            loss.backward()
            optimizer.step()
    else:
        loss = model(words).square().mean()
        loss.backward()
        optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
with torch.no_grad():
    losses.append(model(torch.arange(0, rows, 101)).double().sum().item())
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - peak
stats = pager.stats() if paged else None
print(json.dumps({"losses": losses, "grown": grown, "stats": stats, "budget": budget}))
"""


@pytest.mark.slow
def test_seen_from_outside(tmp_path: Path) -> None:
    """The process grows by the budget, while the table is ten times that."""
    done = {}
    for world in ("plain", "paged"):
        result = programs.run("-c", TRAIN, world, str(tmp_path))
        assert result.returncode == 0, result.stderr
        done[world] = json.loads(result.stdout)
    paged, budget = done["paged"], done["paged"]["budget"]
    assert paged["losses"] == done["plain"]["losses"]
    assert done["plain"]["grown"] > 9 * budget  # the table, and most of its gradient
    assert paged["grown"] <= 1.1 * budget + (24 << 20)
    assert paged["stats"]["peak_bytes"]["device"] <= budget
    assert paged["stats"]["gathers"] == 0
