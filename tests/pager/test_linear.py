"""A linear layer with a paged weight: bit for bit PyTorch's, forward, backward, backward twice."""

import copy
import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
import torch.utils.checkpoint
from torch.nn import functional as F

import tensorpager as tp
from tensorpager.pager.debug.chaos import chaos, scattered
from tensorpager.pager.streaming import linear as linear_module

SHAPES = [(5, 7), (1, 7), (3, 4, 7), (1, 1, 7), (2, 3, 4, 7), (64, 7), (0, 7), (7,)]


@pytest.fixture
def pager():
    with tp.Pager("8MiB", "32MiB", page_size="64KiB", device="cpu", policy="lru") as pager:
        yield pager


def both_ways(pager, inputs, weight, bias, *, frozen=(), twice=False, change=None):
    """Results and gradients on plain tensors and with weight and bias in pages. ``change``: the
    result, in place."""
    found = []
    for paged in (False, True):
        leaves = [None if t is None else t.detach().clone() for t in (inputs, weight, bias)]
        leaves[0] = inputs.detach()  # nobody writes to it; strides matter
        if paged:
            leaves[1:] = [None if t is None else pager.page(t) for t in leaves[1:]]
        for index, leaf in enumerate(leaves):
            if leaf is not None and index not in frozen:
                leaf.requires_grad_()
        out = F.linear(*leaves)
        assert type(out) is torch.Tensor
        if change is not None:
            change(out)
        results = [out]
        if out.requires_grad:
            wanted = [t for t in leaves if t is not None and t.requires_grad]
            seed = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
            grads = torch.autograd.grad(out, wanted, seed, create_graph=twice)
            results += grads
            if twice:
                loss = sum((g * g).sum() for g in grads)
                results += torch.autograd.grad(loss, wanted, allow_unused=True)
        found.append([None if t is None else t.detach().to_dense() for t in results])
    return found


def assert_same(plain, paged):
    assert len(plain) == len(paged)
    for left, right in zip(plain, paged, strict=True):
        assert (left is None) == (right is None)
        if left is not None:
            assert left.size() == right.size()
            assert left.stride() == right.stride()
            assert torch.equal(left, right)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_same_bits(pager, shape, with_bias, dtype):
    inputs, weight = torch.randn(shape, dtype=dtype), torch.randn(6, 7, dtype=dtype)
    bias = torch.randn(6, dtype=dtype) if with_bias else None
    assert_same(*both_ways(pager, inputs, weight, bias))


@pytest.mark.parametrize(
    "change",
    [
        lambda out: out.relu_(),
        lambda out: out.mul_(2).add_(out.detach().clone()),
        lambda out: out[..., 1:3].mul_(0.5),
        lambda out: out.view(-1, 6).masked_fill_(out.detach().view(-1, 6) > 0, 1.0),
        lambda out: F.dropout(out, 1.0, True, True),
    ],
    ids=["relu", "twice", "a part", "a view", "dropout"],
)
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("shape", [(5, 7), (3, 4, 7), (2, 3, 4, 7), (7,)], ids=str)
def test_results_are_changed_in_place(pager, shape, with_bias, change):
    bias = torch.randn(6) if with_bias else None
    assert_same(*both_ways(pager, torch.randn(shape), torch.randn(6, 7), bias, change=change))


@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2), (0, 1, 2)])
def test_frozen_operands(pager, frozen):
    operands = torch.randn(3, 5, 7), torch.randn(6, 7), torch.randn(6)
    assert_same(*both_ways(pager, *operands, frozen=frozen))


@pytest.mark.parametrize("shape", [(5, 7), (2, 5, 7)], ids=str)
def test_twice_backward(pager, shape):
    operands = torch.randn(shape), torch.randn(6, 7), torch.randn(6)
    assert_same(*both_ways(pager, *operands, twice=True))


def _penalized(weight, inputs, uses, *, with_loss=True):
    """The weight's gradient of a loss and of the square of the loss' own gradient."""
    out = F.linear(F.linear(inputs, weight), weight) if uses > 3 else F.linear(inputs, weight)
    loss = out.pow(2).mean() if with_loss else out.sin().sum()
    if uses > 1:
        loss = loss + 1e-3 * weight.sum()
    if uses > 2:
        loss = loss + 1e-2 * weight.cos().sum()
    (grad,) = torch.autograd.grad(loss, inputs, create_graph=True)
    penalty = grad.pow(2).sum()
    for _ in range(2):  # the graph stays as it is
        total = penalty + loss if with_loss else penalty + weight.sin().sum() + weight.exp().sum()
        total.backward(retain_graph=True)
    return weight.grad.detach().to_dense()


@pytest.mark.parametrize("everything_fits", [False, True])
@pytest.mark.parametrize("with_loss", [True, False])
@pytest.mark.parametrize("uses", [1, 2, 3, 4])
def test_second_derivatives_are_added_in_the_order_of_pytorch(
    pager, uses, with_loss, everything_fits
):
    """First and second ones of a linear meet before they meet those of the weight's other uses."""
    with pager.iteration():
        pager.page(torch.zeros(8)).sum()
    assert pager.core.fits
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(40, 40, generator=generator)
        inputs = torch.randn(16, 40, generator=generator).requires_grad_()
        expected = _penalized(weight.clone().requires_grad_(), inputs, uses, with_loss=with_loss)
        with pager.iteration() if everything_fits else nullcontext():
            paged = pager.page(weight).requires_grad_()
            found = _penalized(paged, inputs, uses, with_loss=with_loss)
        assert torch.equal(found, expected)


def _penalized_by_all(pager, shape, with_bias, frozen_bias):
    """The gradients of a loss and of the squares of all its gradients; everything has three uses
    or more."""
    generator = torch.Generator().manual_seed(3)
    weight, bias, scale = (torch.randn(s, generator=generator) / 4 for s in ((40, 40), 40, 40))
    inputs = torch.randn(*shape, 40, generator=generator).requires_grad_()
    if pager is not None:
        weight, bias, scale = (pager.page(t) for t in (weight, bias, scale))
    leaves = [inputs, weight.requires_grad_(), scale.requires_grad_()]
    if not frozen_bias:
        bias.requires_grad_()
    if with_bias and not frozen_bias:
        leaves.append(bias)
    hidden = inputs * scale
    out = F.linear(hidden, weight, bias if with_bias else None)
    out = out.tanh() * hidden + F.layer_norm(hidden, (40,), scale)
    out = F.linear(out.sin(), weight, bias if with_bias else None) + hidden + inputs * weight[0]
    loss = out.cos().mean()
    slopes = torch.autograd.grad(loss, leaves, create_graph=True)
    (loss + sum(slope.square().sum() for slope in slopes)).backward()
    return [leaf.grad.detach().to_dense() for leaf in leaves]


@pytest.mark.parametrize("shape", [(16,), (4, 8)], ids=str)
@pytest.mark.parametrize("bias", ["none", "trained", "frozen"])
def test_second_derivatives_of_inputs_weight_and_bias(pager, shape, bias):
    given = shape, bias != "none", bias == "frozen"
    for found, expected in zip(
        _penalized_by_all(pager, *given), _penalized_by_all(None, *given), strict=True
    ):
        assert torch.equal(found, expected)


def test_a_graph_of_second_derivatives_goes_with_its_result(pager):
    weight = pager.page(torch.randn(6, 7)).requires_grad_()
    inputs = torch.randn(5, 7, requires_grad=True)
    out = F.linear(inputs, weight)
    node = weakref.ref(out.grad_fn)
    (grad,) = torch.autograd.grad(out.pow(2).sum(), inputs, create_graph=True)
    gc.disable()
    try:
        del out, grad
        assert node() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("with_bias", [True, False])
def test_inputs_in_other_orders(pager, with_bias):
    bias = torch.randn(6) if with_bias else None
    for inputs in (
        torch.randn(7, 5).t(),
        torch.randn(5, 14)[:, ::2],
        torch.randn(4, 3, 7).transpose(0, 1),
        torch.randn(1, 7).expand(5, 7),
    ):
        plain, paged = both_ways(pager, inputs, torch.randn(6, 7), bias)
        assert_same(plain, paged)


@pytest.mark.parametrize("lane", [chaos, scattered])
def test_under_eviction(pager, lane):
    inputs, weight, bias = torch.randn(4, 300), torch.randn(500, 300), torch.randn(500)
    with lane(pager.core):
        assert_same(*both_ways(pager, inputs, weight, bias, twice=True))


def test_it_is_one_node(pager):
    """So that the fast way cannot fall out of use unnoticed."""
    weight = pager.page(torch.randn(6, 7)).requires_grad_()
    out = F.linear(torch.randn(5, 7), weight)
    assert "Linear" in type(out.grad_fn).__name__


def test_ways_that_stay_pytorchs(pager):
    weight = pager.page(torch.randn(6, 7)).requires_grad_()
    inputs = torch.randn(5, 7)
    expected = F.linear(inputs, weight.detach().to_dense())
    with torch.autocast("cpu", torch.bfloat16):
        assert F.linear(inputs, weight).dtype is torch.bfloat16
    primal, tangent = inputs, torch.ones_like(inputs)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(primal, tangent)
        out = torch.autograd.forward_ad.unpack_dual(F.linear(dual, weight))
        assert torch.equal(out.primal, expected)
        assert torch.allclose(out.tangent, F.linear(tangent, weight.detach().to_dense()))
    rows = torch.func.vmap(lambda row: F.linear(row, weight))(inputs)
    assert torch.allclose(rows, expected)
    assert torch.equal(F.linear(input=inputs, weight=weight), expected)


def test_wrong_shapes_are_pytorchs_errors(pager):
    weight = pager.page(torch.randn(6, 7)).requires_grad_()
    for inputs in (torch.randn(5, 8), torch.randn(5, 7, dtype=torch.float64)):
        with pytest.raises(RuntimeError) as plain:
            F.linear(inputs, weight.detach().to_dense())
        with pytest.raises(RuntimeError) as paged:
            F.linear(inputs, weight)
        assert str(paged.value) == str(plain.value)


def test_hooks_and_accumulation(pager):
    model = torch.nn.Sequential(torch.nn.Linear(7, 6), torch.nn.ReLU(), torch.nn.Linear(6, 3))
    twin = copy.deepcopy(model)
    paged = pager.page_module(model)
    seen = []
    paged[0].weight.register_hook(lambda grad: seen.append(grad.shape))
    batch = torch.randn(5, 7)
    for _ in range(2):
        paged(batch).sum().backward()
        twin(batch).sum().backward()
    assert seen == [torch.Size([6, 7])] * 2
    for mine, other in zip(paged.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.grad.to_dense(), other.grad)


def test_modified_weight_is_noticed(pager):
    weight = pager.page(torch.randn(6, 7)).requires_grad_()
    inputs = torch.randn(5, 7, requires_grad=True)
    out = F.linear(inputs, weight)
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("paged", [False, True])
def test_what_is_saved_is_what_is_needed(pager, paged):
    """As PyTorch has it: no inputs for a frozen weight, no weight for inputs without gradient.
    Whole numbers: no order of additions rounds."""
    weight = torch.arange(28.0).reshape(4, 7)
    weight = pager.page(weight) if paged else weight
    inputs = torch.arange(35.0).reshape(5, 7).requires_grad_()
    between = inputs * 2
    memory = weakref.ref(between)
    out = F.linear(between, weight)
    del between
    assert memory() is None
    out.sum().backward()
    assert torch.equal(inputs.grad, 2 * weight.to_dense().sum(0).expand(5, 7))

    weight.requires_grad_()
    out = F.linear(inputs.detach(), weight)
    with torch.no_grad():
        weight.zero_()
    out.sum().backward()
    assert torch.equal(weight.grad.to_dense(), inputs.detach().sum(0).expand(4, 7))


def test_a_weight_that_is_a_view(pager):
    """It is no leaf: autograd keeps it."""
    base = pager.page(torch.arange(56.0).reshape(8, 7)).requires_grad_()
    inputs = torch.arange(35.0).reshape(5, 7).requires_grad_()
    F.linear(inputs, base[2:6]).sum().backward()
    assert torch.equal(inputs.grad, base.detach()[2:6].to_dense().sum(0).expand(5, 7))
    expected = torch.zeros(8, 7)
    expected[2:6] = inputs.detach().sum(0)
    assert torch.equal(base.grad.to_dense(), expected)


def test_paged_inputs(pager):
    inputs, weight, bias = torch.randn(3, 5, 7), torch.randn(6, 7), torch.randn(6)
    plain, _ = both_ways(pager, inputs, weight, bias)
    leaves = [pager.page(t).requires_grad_() for t in (inputs, weight, bias)]
    out = F.linear(*leaves)
    assert "Linear" in type(out.grad_fn).__name__
    seed = torch.linspace(-1, 1, out.numel()).reshape(out.shape)
    grads = torch.autograd.grad(out, leaves, seed)
    assert_same(plain, [out.detach(), *grads])


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed(reentrant):
    model = torch.nn.Sequential(torch.nn.Linear(70, 600), torch.nn.ReLU(), torch.nn.Linear(600, 3))
    twin, batch = copy.deepcopy(model), torch.randn(500, 70, requires_grad=True)
    with tp.Pager("8MiB", "32MiB", page_size="64KiB", device="cpu", policy="lru") as pager:
        paged = pager.page_module(model)
        with pager.iteration():
            torch.utils.checkpoint.checkpoint(
                paged, batch, use_reentrant=reentrant
            ).sum().backward()
        twin(batch.detach()).sum().backward()
        for mine, other in zip(paged.parameters(), twin.parameters(), strict=True):
            assert torch.equal(mine.grad.to_dense(), other.grad)


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_views_at_hand(pager, monkeypatch, grad, with_bias):
    """The quick way is taken for each product as soon as dense views are there."""
    calls = []
    quickly = linear_module._on_views_at_hand

    def counting(func, *given):
        out = quickly(func, *given)
        calls.append((func, out is not linear_module.NOT_QUICK))
        return out

    monkeypatch.setattr(linear_module, "_on_views_at_hand", counting)
    weight = pager.page(torch.randn(6, 7)).requires_grad_(grad)
    bias = pager.page(torch.randn(6)).requires_grad_(grad) if with_bias else None
    inputs = torch.randn(5, 7, requires_grad=grad)
    for _ in range(2):
        out = F.linear(inputs, weight, bias)
    assert calls == [(F.linear, False), (F.linear, True)]
    if grad:
        out.sum().backward()
        assert calls[2:] == [(torch.mm, True)]


def test_a_failure_leaves_no_view(pager):
    """What a product raises passes through, nothing stays pinned, and the next one is right."""
    weight = pager.page(torch.randn(6, 7))
    inputs = torch.randn(5, 7)
    expected = F.linear(inputs, weight)
    assert weight._view is not None

    def fails(*given):
        raise MemoryError("no memory")

    with pytest.raises(MemoryError, match="no memory"):
        linear_module._on_views_at_hand(fails, inputs, weight)
    assert weight._view is None
    assert weight._storage.run.pins == 0
    assert torch.equal(F.linear(inputs, weight), expected)


def test_a_weight_of_another_shape_is_seen(pager):
    """What is remembered of a weight does not outlive a change of its shape."""
    weight = pager.page(torch.randn(6, 6))
    inputs = torch.randn(5, 6)
    F.linear(inputs, weight)
    dense = F.linear(inputs, weight)  # remembers
    assert torch.equal(dense, F.linear(inputs, weight.to_dense()))
    weight.t_()
    assert torch.equal(F.linear(inputs, weight), F.linear(inputs, weight.to_dense()))
    weight.t_()
    weight.unsqueeze_(0)
    with pytest.raises(RuntimeError):
        F.linear(inputs, weight)


def test_it_is_found_where_it_moved(pager, monkeypatch):
    """A channel may move a weight just before it is pinned: a new view, and no second access."""
    weight, bias = pager.page(torch.randn(6, 7)), pager.page(torch.randn(6))
    inputs = torch.randn(5, 7)
    expected = F.linear(inputs, weight, bias)
    accesses = []
    take = pager.core.take

    def moves_first(runs):
        accesses.append(runs)
        with pager.core.quiet():
            for run in runs:
                pager.core.residency.evict_run(run)
        take(runs)

    monkeypatch.setattr(pager.core, "take", moves_first)
    assert torch.equal(F.linear(inputs, weight, bias), expected)
    assert len(accesses) == 1


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="needs PyTorch 2.13")
def test_the_loss_in_chunks_is_pytorchs(pager):
    """What docs name for a smaller loss."""
    inputs, targets, found = torch.randn(90, 8), torch.arange(90) % 50, []
    weight = torch.randn(50, 8)
    for leaf in (weight.clone(), pager.page(weight)):
        leaf.requires_grad_()
        hidden = inputs.clone().requires_grad_()
        chosen = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=32)
        loss = F.linear_cross_entropy(hidden, leaf, targets, options=chosen)
        loss.backward()
        found.append([loss.detach(), hidden.grad, leaf.grad.to_dense()])
    assert_same(*found)
