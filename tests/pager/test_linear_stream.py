"""Weights that are larger than the device budget: a linear layer reads them slab by slab."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import tensorpager as tp
from tensorpager.kernels.pieces import stretches
from tensorpager.pager.debug.chaos import chaos, scattered
from tensorpager.pager.debug.check import check_invariants
from tensorpager.pager.devices.dense_meter import DenseMeter
from tensorpager.pager.streaming import linear as linear_module
from tensorpager.pager.streaming import linear_stream
from tensorpager.pager.tensor.new_pages import empty_like_geometry
from tensorpager.pager.tensor.operands import slabs

from .models import PAGE_BYTES, live_pages, make_pager

ROOT = Path(__file__).parents[2]
FRAMES = 6
ROWS, COLUMNS = 1573, 260  # 63 rows in a page and a bit: 25 pages, and rows straddle two of them
LANES: dict[str, Callable[[tp.Pager], Any]] = {
    "plain": lambda pager: nullcontext(),
    "chaos": chaos,
    "scattered": scattered,
}
TIERS: dict[str, dict[str, Any]] = {
    "host": {"host_budget": "32MiB"},
    "disk": {"host_budget": 0, "disk_budget": "32MiB"},
}
MIB = 1 << 20


@contextmanager
def small_pager(folder: Path, tiers: str = "host", **options: Any) -> Iterator[tp.Pager]:
    options = {"frames": FRAMES, "disk_path": folder, **TIERS[tiers], **options}
    if "disk_budget" not in options:
        del options["disk_path"]
    with make_pager(**options) as pager:
        if pager.core.follower is not None:
            pager.core.follower.most_plans = 1  # of each kind of iteration: tests wait for plans
            pager.core.follower.only_if_faster = False
        yield pager


@pytest.fixture
def pager(tmp_path, one_thread) -> Iterator[tp.Pager]:
    """Its arena has ``FRAMES`` frames for good: the first iteration is over."""
    with small_pager(tmp_path) as pager:
        with pager.iteration():
            pass
        yield pager


def put(pager: tp.Pager, values: torch.Tensor, kind: str = "parameter") -> tp.PagedTensor:
    """In pages; a leaf that wants a gradient, as ``page_module`` makes it."""
    paged = empty_like_geometry(pager.core, values.to("meta"), kind)
    with torch.no_grad():
        paged.copy_(values)
    if kind == "parameter":
        paged.requires_grad_()
        paged.register_post_accumulate_grad_hook(pager.core.page_grad)
    return paged


def dense(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """A plain copy of a tensor of any size."""
    if type(tensor) is not tp.PagedTensor:
        return tensor if tensor is None else tensor.detach().clone()
    out = torch.empty(tensor.shape, dtype=tensor.dtype)
    flat = out.view(-1)
    for slab in slabs(tensor.pager.core, [tensor.detach()]):
        for source, target in stretches([slab.operands[0], flat[slab.start : slab.stop]]):
            target.copy_(source)
    return out


def operands(
    rows: int = ROWS, columns: int = COLUMNS, dtype: torch.dtype = torch.float32, m: int = 9
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs, weight, bias, and the gradient of the result."""
    generator = torch.Generator().manual_seed(3)
    shapes = (m, columns), (rows, columns), (rows,), (m, rows)
    made = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    return made[0], made[1], made[2], made[3]


def results(
    pager: tp.Pager | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    seed: torch.Tensor,
) -> list[torch.Tensor]:
    """The linear's result and all gradients, as plain tensors."""
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in (x, weight, bias)]
    if pager is not None:
        leaves[1] = put(pager, weight)
    out = F.linear(*leaves)
    assert type(out) is torch.Tensor
    out.backward(seed.view_as(out))
    if pager is not None:
        assert type(leaves[1].grad) is tp.PagedTensor
        assert leaves[1].grad._storage.run.kind == "gradient"
        check_invariants(pager.core)
        assert pager.core.residency.pinned_pages() == 0
    return [dense(t) for t in (out, *(leaf.grad for leaf in leaves if leaf is not None))]


def assert_near(found: list[torch.Tensor], expected: list[torch.Tensor], x: Any, w: Any, g: Any):
    """Within ``2 * terms * eps * sum(abs(products))`` of the whole product, element by element."""
    x, w, g = x.double().abs().flatten(0, -2), w.double().abs(), g.double().abs()
    sums = [(x @ w.t(), x.size(1) + 1), (g @ w, w.size(0)), (g.t() @ x, len(x)), (g.sum(0), len(x))]
    if len(found) > 3:
        sums[0] = sums[0][0] + 10, sums[0][1]  # the bias: below 10 in all these tests
    for mine, plain, (total, terms) in zip(found, expected, sums):
        assert (mine.shape, mine.dtype) == (plain.shape, plain.dtype)
        bound = 2 * terms * torch.finfo(mine.dtype).eps * total.view(plain.shape)
        assert ((mine.double() - plain.double()).abs() <= bound).all()


# -- one product -----------------------------------------------------------------------------------
@pytest.mark.parametrize("tiers", [pytest.param("disk", marks=pytest.mark.slow), "host"])
@pytest.mark.parametrize("shape", [(ROWS, COLUMNS), (1600, 256), (11, 40_000)], ids=str)
def test_products(tmp_path, one_thread, shape, tiers: str) -> None:
    """Rows that straddle pages, that do not, and that are longer than a page. The same bits in any
    frames, and in an arena of any size."""
    x, weight, bias, seed = operands(*shape)
    expected = results(None, x, weight, bias, seed)
    found = []
    for frames, lane in ((FRAMES, "plain"), (FRAMES, "chaos"), (14, "plain"), (14, "scattered")):
        with small_pager(tmp_path, tiers, frames=frames) as pager, LANES[lane](pager.core):
            with pager.iteration():
                pass
            found.append(results(pager, x, weight, bias, seed))
            assert pager.core.residency.peak_frames <= frames
    assert_near(found[0], expected, x, weight, seed)
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            assert torch.equal(one, two)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(pager, dtype) -> None:
    x, weight, bias, seed = operands(1601 if dtype is torch.float64 else 4001, dtype=dtype)
    found = results(pager, x, weight, bias, seed)
    assert_near(found, results(None, x, weight, bias, seed), x, weight, seed)


def test_halves_are_added_up_in_single(pager) -> None:
    """The input gradient is rounded once: 256 and 31 blocks of 1 would else stay 256."""
    weight = torch.ones(4096, 256, dtype=torch.bfloat16)  # 128 rows in a page
    seed = torch.full((1, 4096), 2.0**-7, dtype=torch.bfloat16)
    seed[0, :128] = 2
    x = torch.ones(1, 256, dtype=torch.bfloat16)
    found = results(pager, x, weight, None, seed)
    assert torch.equal(found[1], torch.full_like(x, 287.0))


def test_no_dense_copy_of_weight_or_gradient(pager) -> None:
    """From the allocator's events: a few pages, besides what the linear has to return."""
    x, weight, bias, seed = operands()
    paged, x = put(pager, weight), x.requires_grad_()
    nbytes = weight.nbytes
    del weight
    meter = DenseMeter()
    meter.start()
    for _ in range(2):
        F.linear(x, paged, bias).backward(seed)
    assert meter.stop() < nbytes // 4
    assert pager.core.residency.peak_frames <= FRAMES
    assert pager.core.residency.pages_ahead > 0


@pytest.mark.parametrize("shape", [(COLUMNS,), (2, 3, COLUMNS), (0, COLUMNS), (2, 0, COLUMNS)])
def test_shapes_of_inputs(pager, shape) -> None:
    _, weight, bias, _ = operands()
    x = torch.randn(shape)
    seed = torch.randn(*shape[:-1], ROWS)
    found = results(pager, x, weight, bias, seed)
    flat, seed = x.view(-1, COLUMNS), seed.view(-1, ROWS)
    assert_near(found, results(None, x, weight, bias, seed), flat, weight, seed)


def test_orders_and_kinds_of_inputs(pager) -> None:
    x, weight, bias, _ = operands()
    paged = put(pager, weight)
    expected = F.linear(x, weight, bias)
    for inputs in (x.t().contiguous().t(), pager.page(x), x.expand(1, 9, COLUMNS)):
        assert torch.allclose(F.linear(inputs, paged, bias).view(9, ROWS), expected, atol=1e-4)
    for one in (pager.page(bias), bias.expand(1, ROWS), bias[:1]):
        wanted = F.linear(x, weight, one.to_dense())
        assert torch.allclose(F.linear(x, paged, one), wanted, atol=1e-4)


@pytest.mark.parametrize("inference", [torch.no_grad, torch.inference_mode])
def test_without_a_graph(pager, inference) -> None:
    x, weight, bias, _ = operands()
    paged = put(pager, weight)
    with inference():
        out = F.linear(x, paged, bias)
    assert not out.requires_grad
    assert torch.allclose(out, F.linear(x, weight, bias), atol=1e-4)


def test_frozen_weight(pager) -> None:
    """As under LoRA: gradients to the inputs only, and no pages for the weight's."""
    x, weight, bias, seed = operands()
    paged, x = put(pager, weight).requires_grad_(False), x.requires_grad_()
    births = pager.core.space.births
    F.linear(x, paged, bias).backward(seed)
    assert paged.grad is None
    assert pager.core.space.births == births
    assert torch.allclose(x.grad, seed @ weight, atol=1e-3)


def test_some_rows_of_a_larger_weight(pager) -> None:
    """As attention does with its three projections; the piece may begin anywhere in a page."""
    x, weight, _, seed = operands()
    paged = put(pager, weight)
    with torch.no_grad():
        for first, stop in ((0, 500), (500, ROWS), (7, 9)):
            out = F.linear(x, paged[first:stop])
            assert torch.allclose(out, x @ weight[first:stop].t(), atol=1e-4)
    inputs = x.requires_grad_()
    piece = paged.detach()[500:]
    assert torch.allclose(
        torch.autograd.grad(F.linear(inputs, piece), inputs, seed[:, 500:])[0],
        seed[:, 500:] @ weight[500:],
        atol=1e-3,
    )


# -- gradients -------------------------------------------------------------------------------------
def test_accumulation_is_in_place(pager) -> None:
    x, weight, _, seed = operands()
    paged = put(pager, weight)
    F.linear(x, paged).backward(seed)
    run = paged.grad._storage.run
    first = dense(paged.grad)
    F.linear(x, paged).backward(seed)
    assert paged.grad._storage.run is run
    assert torch.equal(dense(paged.grad), 2 * first)
    del paged
    assert live_pages(pager) == 0


def test_used_twice_in_one_graph(pager) -> None:
    """Autograd adds both gradients itself."""
    x, weight, _, seed = operands()
    paged = put(pager, weight)
    F.linear(x, paged).add(F.linear(2 * x, paged)).backward(seed)
    assert type(paged.grad) is tp.PagedTensor
    assert torch.allclose(dense(paged.grad), 3 * (seed.t() @ x), atol=1e-3)


def test_module_that_was_dense(pager) -> None:
    module = nn.Linear(COLUMNS, ROWS)
    x = torch.randn(4, COLUMNS)
    expected = module(x)
    pager.page_module(module)
    assert torch.allclose(module(x), expected, atol=1e-4)


def test_hooks_see_the_gradient(pager) -> None:
    x, weight, _, seed = operands()
    paged = put(pager, weight)
    seen = []
    paged.register_hook(lambda grad: seen.append((type(grad), grad.shape)))
    F.linear(x, paged).backward(seed)
    assert seen == [(tp.PagedTensor, weight.shape)]


def test_twice_backward(pager) -> None:
    x, weight, _, _ = operands()
    found = []
    for leaf in (weight.clone().requires_grad_(), put(pager, weight)):
        inputs = x.clone().requires_grad_()
        out = F.linear(inputs, leaf)
        of_x, of_weight = torch.autograd.grad(out.pow(2).sum(), [inputs, leaf], create_graph=True)
        again = torch.autograd.grad(of_x.pow(2).sum(), [inputs, leaf], retain_graph=True)
        third = torch.autograd.grad(of_weight, [inputs, leaf], weight, retain_graph=True)
        if type(leaf) is tp.PagedTensor:
            seed = put(pager, weight, "user")
            third = torch.autograd.grad(of_weight, [inputs, leaf], seed)
        found.append([dense(t) for t in (of_x, of_weight, *again, *third)])
    for mine, plain in zip(found[1], found[0], strict=True):
        assert (mine - plain).abs().max() <= 1e-5 * plain.abs().max()


@pytest.mark.parametrize("of", ["inputs", "weight", "both"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_saves_no_more_for_second_derivatives_than_pytorch(pager, of, with_bias) -> None:
    """What is saved lives until then: the budget has it where the weight is whole."""
    x, weight, bias, _ = operands()
    found = []
    for leaf in (weight.clone(), put(pager, weight)):
        inputs = x.clone().requires_grad_(of != "weight")
        leaf.requires_grad_(of != "inputs")
        seed = torch.randn(len(x), len(weight)).requires_grad_()
        saved: list[int] = []

        def pack(tensor: torch.Tensor, saved: list[int] = saved) -> torch.Tensor:
            saved.append(tensor.numel())
            return tensor

        out = F.linear(inputs, leaf, bias if with_bias else None)
        wanted = [t for t in (inputs, leaf) if t.requires_grad]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            torch.autograd.grad(out, wanted, seed, create_graph=True)
        found.append(sorted(saved))
    assert found[1] == found[0]


def test_paged_inputs_are_saved_in_their_pages(pager) -> None:
    """As a whole product saves them: a block of a checkpoint that runs again is given such."""
    x, weight, bias, seed = operands()
    results = []
    for paged in (False, True):
        inputs = (pager.page(x) if paged else x.clone()).requires_grad_()
        leaf = put(pager, weight)
        out = F.linear(inputs, leaf, bias)
        node = out.grad_fn.next_functions[0][0]
        kept = [t for t in node.saved_tensors if t is not None and t.shape == x.shape]
        assert [type(t) is tp.PagedTensor for t in kept] == [paged]
        if paged:
            assert kept[0]._storage is inputs._storage
        del kept, node
        out.backward(seed)
        results.append([dense(t) for t in (out, inputs.grad, leaf.grad)])
    for mine, plain in zip(*results, strict=True):
        assert torch.equal(mine, plain)


def test_checkpoint(pager) -> None:
    x, weight, _, seed = operands()
    found = []
    for leaf in (weight.clone().requires_grad_(), put(pager, weight)):
        inputs = x.clone().requires_grad_()
        with pager.iteration():
            out = checkpoint(
                lambda x, w: F.linear(2 * x, w).relu(), inputs, leaf, use_reentrant=False
            )
            out.backward(seed)
        found.append((inputs.grad, dense(leaf.grad)))
    for mine, plain in zip(found[1], found[0], strict=True):
        assert torch.allclose(mine, plain, atol=1e-3)


@pytest.mark.parametrize("how", ["parameter", "part", "autocast", "cast", "bias", "rows", "frozen"])
def test_checkpoint_of_a_weight_that_streams_from_the_backward_pass_on(pager, how: str) -> None:
    """It finds again what was saved while the weight was whole; from PyTorch's own nodes too, which
    read it: autocast that casts, in the block ("cast" and on), rows with gaps, a frozen weight."""
    x, weight, _, _ = operands()
    dtype = torch.float64 if how == "autocast" else torch.float32
    x, weight, bias = x.to(dtype), weight[:120].to(dtype), weight[:120, 0].contiguous()
    if how in ("rows", "frozen"):
        x = torch.stack([x, -x], 1).transpose(0, 1)
    found = []

    def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=how not in ("parameter", "part")):
            w = w[:60] if how == "part" else w
            return F.linear(x, w, bias if how in ("bias", "frozen") else None).relu()

    for leaf in (weight.clone().requires_grad_(), put(pager, weight)):
        inputs = x.clone().requires_grad_(how != "part")
        leaf.requires_grad_(how != "frozen")
        for _ in range(2):
            with pager.iteration():
                out = checkpoint(product, inputs, leaf, use_reentrant=False)
                if type(leaf) is tp.PagedTensor:
                    leaf._storage.run.streamed = True
                out.square().sum().backward()
        found.append((inputs.grad, None if leaf.grad is None else dense(leaf.grad)))
    for mine, plain in zip(found[1], found[0], strict=True):
        close = 1e-2 if how not in ("parameter", "part", "autocast") else 1e-5
        assert (mine is plain is None) or (mine - plain).abs().max() <= close * plain.abs().max()


def test_autocast(pager) -> None:
    """The weight is cast block by block; its gradient has its own dtype."""
    x, weight, bias, seed = operands()
    found = []
    for leaf in (weight.clone().requires_grad_(), put(pager, weight)):
        inputs = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            out = F.linear(inputs, leaf, bias)
        out.backward(seed.bfloat16())
        found.append([dense(t) for t in (out, inputs.grad, leaf.grad)])
    for mine, plain in zip(found[1], found[0], strict=True):
        assert mine.dtype is plain.dtype
        assert (mine - plain).abs().max() <= 0.02 * plain.abs().max()


def test_modified_weight_is_noticed(pager) -> None:
    x, weight, _, _ = operands()
    paged = put(pager, weight)
    out = F.linear(x.requires_grad_(), paged)
    with torch.no_grad():
        paged.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_while_recording(pager, tmp_path) -> None:
    x, weight, _, seed = operands()
    paged = put(pager, weight)
    with pager.record(tmp_path / "trace.parquet"), pager.iteration():
        F.linear(x, paged).backward(seed)
    assert torch.allclose(dense(paged.grad), seed.t() @ x, atol=1e-3)


# -- what cannot be --------------------------------------------------------------------------------
def test_not_even_a_row_fits(tmp_path) -> None:
    with small_pager(tmp_path, frames=2) as pager:
        with pager.iteration():
            pass
        weight = put(pager, torch.randn(8, 3 * PAGE_BYTES // 4)).requires_grad_(False)
        with pytest.raises(tp.InfeasibleBudget, match="raise device_budget") as refusal:
            F.linear(torch.randn(2, weight.size(1)), weight)
        assert refusal.value.minimum > pager.core.budget_bytes["device"]
        assert pager.core.residency.pinned_pages() == 0
        check_invariants(pager.core)


def test_no_room_for_the_gradient(tmp_path) -> None:
    x, weight, _, seed = operands()
    with small_pager(tmp_path, host_budget=30 * PAGE_BYTES) as pager:
        with pager.iteration():
            pass
        paged = put(pager, weight)
        before = dense(paged)
        with pytest.raises(tp.TierFull):
            F.linear(x, paged).backward(seed)
        assert paged.grad is None
        assert pager.core.residency.pinned_pages() == 0
        check_invariants(pager.core)
        assert torch.equal(dense(paged), before)


def test_wrong_operands_are_pytorchs_errors(pager) -> None:
    weight = put(pager, torch.zeros(ROWS, COLUMNS))
    with pytest.raises(RuntimeError, match=r"same reduction dim|cannot be multiplied"):
        F.linear(torch.randn(5, COLUMNS + 1), weight)
    with pytest.raises(RuntimeError, match="same dtype"):
        F.linear(torch.randn(5, COLUMNS, dtype=torch.float64), weight)


# -- weights that fit ------------------------------------------------------------------------------
def test_a_weight_that_fits_is_whole(tmp_path, one_thread, monkeypatch) -> None:
    """And has PyTorch's bits, however much of the arena it takes."""
    monkeypatch.setattr(linear_stream.Matrix, "walk", None)
    x, weight, bias, seed = operands()
    with small_pager(tmp_path, frames=26) as pager:
        leaf = put(pager, weight)
        out = F.linear(x, leaf, bias)
        out.backward(seed)
        assert torch.equal(out, F.linear(x, weight, bias))
        assert torch.equal(dense(leaf.grad), seed.t() @ x)


def test_pins_of_others_leave_no_room(tmp_path, one_thread) -> None:
    """It would fit alone: it streams."""
    x, weight, bias, seed = operands()
    with small_pager(tmp_path, frames=30) as pager:
        with pager.iteration():
            pass
        leaf, other = put(pager, weight), pager.page(torch.ones(12 * PAGE_BYTES // 4))
        inputs = x.requires_grad_()
        with other.pin():
            out = F.linear(inputs, leaf, bias)
            (of_x,) = torch.autograd.grad(out, inputs, seed)
        assert torch.allclose(out, F.linear(x, weight, bias), atol=1e-4)
        assert torch.allclose(of_x, seed @ weight, atol=1e-3)


def test_scattered_without_room_for_a_copy(tmp_path, one_thread, monkeypatch) -> None:
    """A whole weight in scattered frames streams then, from now on, with the bits of streaming."""
    x, weight, bias, seed = operands()
    with small_pager(tmp_path, frames=60) as pager, scattered(pager.core):
        leaf, inputs = put(pager, weight), x.requires_grad_()
        monkeypatch.setattr(linear_module, "_room_bytes", lambda _: weight.nbytes - 1)
        out = F.linear(inputs, leaf, pager.page(bias))
        (of_x,) = torch.autograd.grad(out, inputs, seed)
        assert leaf._storage.run.streamed
        assert torch.allclose(out, F.linear(x, weight, bias), atol=1e-4)
        assert torch.allclose(of_x, seed @ weight, atol=1e-3)
        again = F.linear(inputs, leaf, pager.page(bias))
        assert torch.equal(out, again)
        assert torch.equal(of_x, torch.autograd.grad(again, inputs, seed)[0])


# -- training --------------------------------------------------------------------------------------
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
}


def build() -> nn.Module:
    return nn.Sequential(
        nn.Linear(40, COLUMNS), nn.ReLU(), nn.Linear(COLUMNS, ROWS), nn.ReLU(), nn.Linear(ROWS, 10)
    )


def train(pager: tp.Pager | None, optimizer_name: str, steps: int) -> list[float]:
    """Losses; each step but the first is two backward passes. The second linear's weight is larger
    than the arena, and the paged model is never dense as a whole."""
    torch.manual_seed(0)
    plain = model = build()
    if pager is not None:
        with torch.device("meta"):
            model = build()
        pager.page_module(model)
        with torch.no_grad():
            for mine, other in zip(model.parameters(), plain.parameters()):
                mine.copy_(other)
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    if pager is not None:
        pager.optimizer(optimizer)
    losses = []
    for step in range(steps):
        with nullcontext() if pager is None else pager.iteration():
            for _ in range(min(step + 1, 2)):
                x, labels = torch.randn(16, 40), torch.randint(10, (16,))
                loss = F.cross_entropy(model(x), labels)
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        if pager is not None:
            check_invariants(pager.core)
            if pager.core.follower is not None:
                pager.plan()
    return losses


def check_training(folder: Path, optimizer_name: str, steps: int, lanes: list[Any]) -> None:
    """The same losses in all lanes, to the last bit; the budget is kept."""
    expected = train(None, optimizer_name, steps)
    found = []
    for tiers, lane, options in lanes:
        with small_pager(folder, tiers, **options) as pager, LANES[lane](pager.core):
            found.append(train(pager, optimizer_name, steps))
            stats = pager.stats()
            assert pager.core.residency.peak_frames <= pager.core.residency.pool.count
            assert stats["peak_bytes"]["device"] <= stats["budget_bytes"]["device"]
            assert stats["departures"] == 0
            if options.get("policy") == "lp":
                assert stats["planned_iterations"] > 0, pager.explain()
                # Chaos mode evicts what was read ahead.
                assert (pager.core.residency.pages_ahead > 0) == (lane != "chaos")
    assert all(losses == found[0] for losses in found)
    torch.testing.assert_close(found[0], expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("name", [pytest.param("sgd", marks=pytest.mark.slow), "adamw"])
def test_training(tmp_path, one_thread, name: str) -> None:
    lanes = [("disk", "plain", {"policy": "lp"}), ("host", "scattered", {"frames": 12})]
    check_training(tmp_path, name, 4, lanes)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_long_training(tmp_path, one_thread, name: str) -> None:
    lanes = [
        ("host", "chaos", {"policy": "lp"}),
        ("disk", "scattered", {"policy": "lp", "verify": True}),
        ("disk", "chaos", {"frames": 15, "verify": True}),
        ("host", "plain", {"frames": 15, "policy": "lp"}),
    ]
    check_training(tmp_path, name, 8, lanes)


OUTSIDE = """
import sys, torch, tensorpager as tp
from torch import nn
from torch.nn import functional as F
def rss(which):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(l.split()[1]) << 10 for l in lines if l.startswith(which))
def step(model, optimizer, x, rows):
    F.linear(model(x), torch.ones(1, rows)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
tiny = nn.Linear(8, 4096)
step(tiny, torch.optim.SGD(tiny.parameters(), lr=0.1), torch.randn(4, 8), 4096)
before = rss("VmRSS")
pager = tp.Pager("8MiB", disk_budget="128MiB", disk_path=sys.argv[1], page_size="256KiB",
                 device="cpu", policy="lru")
with torch.device("meta"):
    model = nn.Linear(4096, 2048)  # 32 MiB
pager.page_module(model).reset_parameters()
optimizer = pager.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(3):
    with pager.iteration():
        step(model, optimizer, torch.randn(4, 4096), 2048)
print(rss("VmHWM") - before, pager.stats()["peak_bytes"]["device"])
"""


@pytest.mark.slow
def test_the_process_stays_small(tmp_path) -> None:
    """As the kernel sees it: a weight of 32 MiB and its gradient under a budget of 8 MiB. Beside it
    are I/O buffers, and Python's own objects."""
    done = subprocess.run(
        [sys.executable, "-c", OUTSIDE, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    grown, peak = map(int, done.stdout.split())
    assert peak <= 8 * MIB
    assert grown <= 24 * MIB
