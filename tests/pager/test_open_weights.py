"""While everything fits, ops get weights as plain tensors: nothing may tell it from PyTorch's way,
and pages that have to move are never moved under an op or a graph."""

import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import tensorpager as tp
from tensorpager.pager.debug.chaos import scramble
from tensorpager.pager.debug.check import check_invariants
from tensorpager.pager.tensor.activations import SavedTensors, unpack
from tensorpager.pager.tensor.open_weights import run_opened

from .models import World, assert_same, know_that_all_fits, live_pages, make_pager, plain

WIDTH = 128  # a weight of 64 KiB: one page, and above what activations.py leaves alone


@pytest.fixture
def pager(one_thread: None) -> Iterator[tp.Pager]:
    with make_pager(fits=True) as pager:
        know_that_all_fits(pager)
        yield pager


def _model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)
    )


def _inputs() -> torch.Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(4))


def _gradients(model: nn.Module) -> dict[str, object]:
    return plain({name: p.grad for name, p in model.named_parameters()})


def _result(loss: torch.Tensor, model: nn.Module) -> list[object]:
    return [loss.detach(), _gradients(model)]


def _expected() -> list[object]:
    model = _model()
    loss = model(_inputs()).square().sum()
    loss.backward()
    return _result(loss, model)


def _pins(pager: tp.Pager) -> int:
    return sum(run.pins for run in pager.core.space.runs.values())


def _trains(body: Callable[[nn.Module], torch.Tensor], pager: tp.Pager) -> None:
    """``body`` gives the loss of the model, as plain PyTorch does, and so are the gradients."""
    model = pager.page_module(_model())
    with pager.iteration():
        loss = body(model)
        loss.backward()
        check_invariants(pager.core)
    assert_same(_result(loss, model), _expected())
    assert _pins(pager) == 0


# -- what it is for ------------------------------------------------------------------------------
def test_no_op_of_an_open_weight_reaches_the_dispatcher(
    pager: tp.Pager, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = pager.page_module(_model())
    reached = []
    whole = tp.PagedTensor.__torch_dispatch__

    def dispatch(cls, func, types, args=(), kwargs=None):
        reached.append(func)
        return whole(func, types, args, kwargs)

    monkeypatch.setattr(tp.PagedTensor, "__torch_dispatch__", classmethod(dispatch))
    for opened in (len(list(model.parameters())), 0):  # in the first iteration, and no more
        with pager.iteration():
            assert_same(model(_inputs()).square().sum().detach(), _expected()[0])
            model(_inputs()).square().sum().backward()
            assert reached == [torch.ops.aten.detach.default] * opened
        reached.clear()


def test_nothing_is_open_where_not_everything_fits(one_thread: None) -> None:
    with make_pager() as pager:
        model = pager.page_module(_model())
        for _ in range(2):
            with pager.iteration():
                model(_inputs()).sum().backward()
                assert model[0].weight._open is None


def test_nothing_is_open_outside_of_an_iteration(pager: tp.Pager) -> None:
    model = pager.page_module(_model())
    with pager.iteration():
        model(_inputs())
        assert model[0].weight._open is not None
    assert model[0].weight._open is None
    model(_inputs()).sum().backward()
    assert model[0].weight._open is None


def test_gradients_are_ready_in_the_order_of_pytorch(pager: tp.Pager) -> None:
    orders = []
    for model in (_model(), pager.page_module(_model())):
        order: list[str] = []
        orders.append(order)
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda p, n=name, o=order: o.append(n))
        for _ in range(2):  # in the second one all weights are opened before the first op
            with pager.iteration():
                model(_inputs()).square().sum().backward()
    assert orders[0] == orders[1]


def _gradients_of_uses(weight: torch.Tensor, order: str) -> list[torch.Tensor]:
    """Of a weight that ops use in turn: ``l``, ``e``: open where everything fits; ``s``: never."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(8, WIDTH, generator=generator)
    found = []
    for _ in range(2):
        total = torch.zeros(())
        for number, use in enumerate(order):
            if use == "l":
                part = F.linear(x * (number + 1), weight)
            elif use == "e":
                part = F.embedding(torch.arange(0, WIDTH, number + 1), weight).sin()
            else:
                part = 1e-3 * weight.sum(number % 2).cos()
            total = total + part.square().sum()
        total.backward()
        assert weight.grad is not None
        found.append(weight.grad.to_dense().clone())
        weight.grad = None
    return found


@pytest.mark.parametrize("order", ["lls", "lsl", "sll", "esl", "lese", "llssl"])
def test_gradients_of_several_uses_are_added_in_the_order_of_pytorch(
    pager: tp.Pager, order: str
) -> None:
    values = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(6))
    expected = _gradients_of_uses(values.clone().requires_grad_(), order)
    with pager.iteration():
        found = _gradients_of_uses(pager.page(values).requires_grad_(), order)
    assert_same(found, expected)


# -- pages that have to move ---------------------------------------------------------------------
def test_second_derivatives_of_several_uses(pager: tp.Pager) -> None:
    def gradients(scale: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
        scale.grad = x.grad = None
        y = F.layer_norm((x * scale).sin() * scale, (40,), scale).tanh()
        slopes = torch.autograd.grad(y.square().mean(), [x, scale], create_graph=True)
        (y.mean() + sum(slope.square().sum() for slope in slopes)).backward()
        return [scale.grad.to_dense(), x.grad]

    generator = torch.Generator().manual_seed(2)
    scale, inputs = torch.randn(40, generator=generator), torch.randn(16, 40, generator=generator)
    expected = gradients(scale.clone().requires_grad_(), inputs.requires_grad_())
    paged = pager.page(scale).requires_grad_()
    for _ in range(2):
        with pager.iteration():
            assert_same(gradients(paged, inputs), expected)
            assert paged._open is not None


@pytest.mark.parametrize("seed", range(6))
def test_derivatives_of_any_uses_are_added_in_the_order_of_pytorch(
    pager: tp.Pager, seed: int
) -> None:
    """First and second ones, from the first iteration in which a weight is open."""
    uses = (
        lambda x, w: F.linear(x, w),
        lambda x, w: (x @ w).sin(),
        lambda x, w: x * w[0],
        lambda x, w: F.layer_norm(x, (WIDTH,), w[1]),
        lambda x, w: torch.addmm(x, x, w.t()),
        lambda x, w: x + torch.mul(w, 2).tanh(),
    )
    choice = torch.randint(len(uses), (5,), generator=torch.Generator().manual_seed(seed))

    def gradients(w: torch.Tensor) -> list[torch.Tensor]:
        x = torch.linspace(-1, 1, WIDTH * WIDTH).view(WIDTH, WIDTH).requires_grad_()
        y = x @ w
        for use in choice:
            y = uses[use](y, w).tanh()
        assert not isinstance(w, tp.PagedTensor) or w._open is not None
        slopes = torch.autograd.grad(y.square().mean(), [x, w], create_graph=True)
        (y.mean() + sum(slope.square().sum() for slope in slopes)).backward()
        return [w.grad.to_dense(), x.grad]

    values = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(seed)) / 4
    expected = gradients(values.clone().requires_grad_())
    paged = pager.page(values).requires_grad_()
    with pager.iteration():
        found = gradients(paged)
    assert_same(found, expected)


def test_weights_evicted_between_forward_and_backward(pager: tp.Pager) -> None:
    def body(model: nn.Module) -> torch.Tensor:
        loss = model(_inputs()).square().sum()
        scramble(pager.core)
        assert model[0].weight.residency()["device"] == 0
        return loss

    _trains(body, pager)


def test_weights_evicted_after_an_op_has_taken_them(pager: tp.Pager) -> None:
    """By another thread, before PyTorch has asked where their gradients go."""
    weight = pager.page(torch.zeros(WIDTH, WIDTH)).requires_grad_()

    def op(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        assert type(w) is torch.Tensor
        evicting = threading.Thread(target=scramble, args=(pager.core,))
        evicting.start()
        evicting.join()
        assert weight._open is None
        return F.linear(x, w)

    with pager.iteration():
        run_opened(op, (_inputs(), weight), None).sum().backward()
    assert weight.grad is not None
    assert_same(weight.grad.to_dense(), _inputs().sum(0).expand(WIDTH, WIDTH))
    scramble(pager.core)
    assert _pins(pager) == 0


def test_weights_evicted_by_every_saved_tensor(pager: tp.Pager) -> None:
    """The hook runs inside the op whose weight is open."""

    def body(model: nn.Module) -> torch.Tensor:
        whole = pager.core.saved.pack

        def pack(tensor: torch.Tensor) -> object:
            packed = whole(tensor)
            scramble(pager.core)
            check_invariants(pager.core)
            return packed

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return model(_inputs()).square().sum()

    _trains(body, pager)


def test_weights_evicted_between_nodes_of_the_backward_pass(pager: tp.Pager) -> None:
    def body(model: nn.Module) -> torch.Tensor:
        for layer in model:
            layer.register_full_backward_hook(lambda *args: scramble(pager.core))
        return model(_inputs()).square().sum()

    _trains(body, pager)


@pytest.mark.parametrize("keep", ["as it is", "detached"])
def test_a_graph_past_our_hooks_keeps_the_pages(pager: tp.Pager, keep: str) -> None:
    def pack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if keep == "as it is" else tensor.detach()

    model = pager.page_module(_model())
    with pager.iteration(), torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
        loss = model(_inputs()).square().sum()
        scramble(pager.core)
    assert pager.core.opened.in_use
    scramble(pager.core)
    assert model[0].weight.residency()["device"] == 0  # the inputs' gradient is not wanted
    assert model[3].weight.residency()["device"] > 0
    loss.backward()
    assert_same(_result(loss, model), _expected())
    del loss
    with pager.core.quiet():
        assert not pager.core.opened.in_use
    assert _pins(pager) == 0
    scramble(pager.core)
    assert model[3].weight.residency()["device"] == 0


def test_a_graph_past_our_hooks_outlives_the_pager(one_thread: None) -> None:
    with make_pager(fits=True) as pager:
        know_that_all_fits(pager)
        model = pager.page_module(_model())
        x = _inputs().requires_grad_()
        with pager.iteration(), torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            loss = F.linear(x, model[0].weight).sum()
    loss.backward(inputs=[x])  # reads the weight, in memory that was not given back
    expected = _model()[0].weight.detach().sum(0).expand(8, WIDTH)
    torch.testing.assert_close(x.grad, expected)


def test_closed_inside_an_iteration(one_thread: None) -> None:
    with make_pager(fits=True) as pager:
        know_that_all_fits(pager)
        model = pager.page_module(_model())
        with pager.iteration():
            loss = model(_inputs()).sum()
            pager.close()
            with pytest.raises(tp.PagerError, match="was closed"):
                model(_inputs())
            with pytest.raises(tp.PagerError, match="was closed"):
                loss.backward()


def test_forked_inside_an_iteration(pager: tp.Pager) -> None:
    model = pager.page_module(_model())
    with pager.iteration():
        model(_inputs())
        child = os.fork()
        if not child:
            try:
                model[0].weight.pager.core.check_open()
            except tp.PagerError:
                try:
                    F.linear(torch.ones(1, WIDTH), model[0].weight)
                except tp.PagerError:
                    os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert model[0].weight._open is not None
        assert_same(model(_inputs()).square().sum().detach(), _expected()[0])


def test_a_storage_that_is_enlarged(pager: tp.Pager) -> None:
    frozen = pager.page_module(nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)).weight
    with pager.iteration():
        alias = frozen.detach()
        F.linear(_inputs(), alias)
        assert alias._open is not None
        frozen.resize_(2 * WIDTH, WIDTH)
        with torch.no_grad():
            frozen.fill_(1.0)
        assert_same(F.linear(torch.ones(1, WIDTH), alias), torch.full((1, WIDTH), float(WIDTH)))


def test_a_tensor_that_is_dropped_while_open_gives_its_pages_back(pager: tp.Pager) -> None:
    with pager.iteration():
        model = pager.page_module(_model())
        model(_inputs()).sum().backward()
        del model
    assert live_pages(pager) == 0


def test_a_weight_that_dies_with_its_pages_in_use(pager: tp.Pager) -> None:
    """What a graph past our hooks has is not given to others."""
    x = _inputs().requires_grad_()
    with pager.iteration(), torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        weight = pager.page(torch.full((WIDTH, WIDTH), 2.0)).requires_grad_()
        with torch.no_grad():
            frozen = weight.detach().clone()
        loss = F.linear(x, weight).sum()
        weight.requires_grad_(False)
        del weight
    gc.collect()
    others = [pager.page(torch.zeros(WIDTH, WIDTH)) for _ in range(40)]
    check_invariants(pager.core)
    loss.backward(inputs=[x])
    torch.testing.assert_close(x.grad, frozen.sum(0).expand(8, WIDTH))
    del loss, others
    check_invariants(pager.core)
    assert live_pages(pager) == 0


def test_two_threads_while_pages_are_evicted(pager: tp.Pager) -> None:
    models = [pager.page_module(_model()) for _ in range(2)]
    expected = _expected()
    errors: list[BaseException] = []

    def work(model: nn.Module) -> None:
        try:
            for _ in range(30):
                loss = model(_inputs()).square().sum()
                loss.backward()
                assert_same(_result(loss, model), expected)
                model.zero_grad()
        except BaseException as error:
            errors.append(error)

    with pager.iteration():
        threads = [threading.Thread(target=work, args=(model,)) for model in models]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            scramble(pager.core)
        for thread in threads:
            thread.join()
    assert not errors, errors
    check_invariants(pager.core)


# -- what may be done to a weight in between -----------------------------------------------------
def test_frozen_and_thawed(pager: tp.Pager) -> None:
    model = pager.page_module(_model())
    weight = model[0].weight
    with pager.iteration():
        assert model(_inputs()).requires_grad
        model.requires_grad_(False)
        assert not model(_inputs()).requires_grad
        model.requires_grad_(True)
        model(_inputs()).square().sum().backward()
    assert weight.grad is not None
    assert_same(_gradients(model), _expected()[1])


def test_written_between_two_passes(pager: tp.Pager) -> None:
    results = []
    for world in (World(), World(pager)):
        model = world.module(_model())
        with world.iteration():
            model(_inputs()).square().sum().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.5)
            model(_inputs()).square().sum().backward()
        results.append(plain(model))
    assert_same(results[1], results[0])


def test_written_while_a_graph_wants_it(pager: tp.Pager) -> None:
    model = pager.page_module(_model())
    for name, parameter in model.named_parameters():
        if name in ("0.bias", "1.bias", "3.bias"):  # nothing saves them
            continue
        with pager.iteration():
            loss = model(_inputs().requires_grad_()).square().sum()
            with torch.no_grad():
                parameter.mul_(1.0)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
    with pager.iteration():  # of two that share a page only one was written
        loss = F.layer_norm(_inputs(), (WIDTH,), model[1].weight, model[1].bias).square().sum()
        assert model[1].weight._storage.run is model[0].bias._storage.run
        with torch.no_grad():
            model[0].bias.mul_(1.0)
        loss.backward()


def test_rows_that_embedding_renormalizes_are_written_as_pages(pager: tp.Pager) -> None:
    results = []
    for world in (World(), World(pager)):
        torch.manual_seed(5)
        table = world.module(nn.Embedding(40, WIDTH, max_norm=0.5))
        if world.pager is not None:
            scramble(pager.core)  # copies below, which a write must void
        with world.iteration():
            table(torch.arange(0, 40, 2))
            if world.pager is not None:
                scramble(pager.core)
        results.append(plain(table.weight))
    assert_same(results[1], results[0])


def test_another_shape_in_the_middle_of_an_iteration(one_thread: None) -> None:
    """The iteration is metered from there on; checkpointed blocks see the same nodes again."""

    def script(world: World) -> object:
        model = world.module(_model())
        losses = []
        for _ in range(3):
            with world.iteration():
                x = _inputs().requires_grad_()
                loss = checkpoint(model, x, use_reentrant=False).square().sum()
                if world.pager is not None and len(losses) == 2:
                    assert model[0].weight._open is not None
                    model(torch.ones(999, WIDTH))
                    assert model[0].weight._open is None
                    assert pager.core.budget.metering
                loss.backward()
            losses.append(loss.detach())
        return losses, model

    with make_pager(fits=True) as pager:
        expected = plain(script(World()))
        assert_same(plain(script(World(pager))), expected)


def test_an_exception_inside_an_op(pager: tp.Pager) -> None:
    model = pager.page_module(_model())
    with pager.iteration():
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            model(torch.ones(2, 5))
        model(_inputs()).square().sum().backward()
    assert_same(_gradients(model), _expected()[1])
    gc.collect()
    with pager.core.quiet():
        assert _pins(pager) == 0


# -- how many bytes stay dense -------------------------------------------------------------------
@contextmanager
def _counted() -> Iterator[list[int]]:
    """Live bytes of what is packed dense, after each pack; seen from outside by weak references."""
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    seen: list[int] = []
    whole = SavedTensors.pack

    def pack(self: SavedTensors, tensor: torch.Tensor) -> object:
        packed = whole(self, tensor)
        if type(packed) is tuple and packed[0].numel() * 4 >= 32 << 10:
            alive.add(packed[0])
            seen.append(sum(t.numel() * t.element_size() for t in alive))
        return packed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SavedTensors, "pack", pack)
        yield seen


def test_the_dense_allowance_holds_over_many_passes(pager: tp.Pager) -> None:
    x = torch.randn(256, WIDTH)  # 128 KiB, saved by each product; the user keeps it
    allowance = 20 * x.nbytes
    pager.core.saved.dense_allowance = allowance
    weight = torch.randn(WIDTH, WIDTH).requires_grad_()
    with _counted() as seen:
        for _ in range(3):
            with pager.iteration():
                for _ in range(15):  # each graph dies before the next one is built
                    sum((x * (i + 1)).mm(weight).sum() for i in range(8)).backward()
                pager.core.residency.collect()
                assert pager.core.space.kind_pages.get("activation", 0) == 0
                losses = [(x * (i + 1)).mm(weight).sum() for i in range(60)]
                assert pager.core.space.kind_pages["activation"] > 0
                sum(losses).backward()
                del losses
            for _ in range(50):
                x.mm(weight).sum().backward()
    assert 0.9 * allowance <= max(seen) <= allowance
