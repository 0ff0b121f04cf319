"""Autograd around paged tensors: hooks, accumulation, higher orders, transforms, compilation."""

import pickle

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import tensorpager as tp

from .interop import right_or_refused, same, twins
from .lanes import CHAOS, LANES, PLAIN

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(params=[PLAIN, CHAOS, LANES[-1]], ids=lambda lane: lane.name, autouse=True)
def lane(request, pager):
    with request.param.on(pager):
        yield request.param


@pytest.fixture
def twin(pager):
    return twins(pager, requires_grad=True)


def test_requires_grad_(pager):
    p = pager.page(torch.ones(4))
    assert not p.requires_grad
    assert p.requires_grad_() is p
    assert p.requires_grad
    assert p.is_leaf
    p.requires_grad_(False)
    assert not (p * 2).requires_grad


def test_page_keeps_requires_grad_and_parameters(pager):
    q = pager.page(nn.Parameter(torch.ones(4)))
    assert isinstance(q, nn.Parameter)
    assert q.requires_grad
    assert q.is_leaf
    assert not pager.page(nn.Parameter(torch.ones(4), requires_grad=False)).requires_grad
    assert not pager.page(torch.ones(4)).requires_grad
    leaf = pager.page(torch.ones(4, requires_grad=True) * 2)
    assert leaf.is_leaf


def test_gradients_accumulate(twin):
    for t in twin:
        (t * t).sum().backward()
        (t.exp() * 3).sum().backward()
    same(twin.plain.grad, twin.paged.grad)
    kept = twin.paged.grad
    twin.paged.sum().backward()
    assert kept is twin.paged.grad, "accumulation is in place"


def test_gradient_can_be_assigned_and_cleared(pager, twin):
    p = twin.paged
    for gradient in (torch.ones_like(twin.plain), pager.page(torch.ones_like(twin.plain))):
        p.grad = gradient
        (p * 2).sum().backward()
        same(torch.full_like(twin.plain, 3, requires_grad=False), p.grad)
        p.grad = None
    assert p.grad is None
    with pytest.raises(RuntimeError):
        p.grad = torch.ones(3)


def test_leaf_in_place_is_refused_as_usual(twin):
    with pytest.raises(RuntimeError, match="leaf"):
        twin.paged.add_(1)
    with torch.no_grad():
        for t in twin:
            t.add_(1)
    twin.check()


def test_in_place_on_what_autograd_saved_is_noticed(twin):
    for change in (lambda y: y.add_(1), lambda y: y.view(-1)[3:].zero_()):
        for t in twin:
            y = t[:2] * 1
            z = y.exp() * y
            change(y)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                z.sum().backward()


def test_in_place_on_a_saved_paged_tensor_is_noticed(pager):
    for change in (
        lambda t: t.add_(1),
        lambda t: t.view(-1)[3:].zero_(),
        lambda t: t.t().mul_(2),
        lambda t: t.detach().mul_(2),
    ):
        for w in twins(pager, 40, 30):
            x = torch.ones(2, 40, requires_grad=True)
            y = x @ w
            change(w)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()


def test_in_place_on_a_view_is_differentiated(twin):
    for t in twin:
        y = t * 1
        y[1].mul_(5)
        y.view(-1)[::2].exp_()
        y.sum().backward()
    same(twin.plain.grad, twin.paged.grad)


def test_backward_through_views_of_a_leaf(twin):
    for t in twin:
        (t.t()[3:9].exp() @ t[:, ::2]).sum().backward()
    same(twin.plain.grad, twin.paged.grad)


def test_hooks(twin):
    seen = []
    for t in twin:
        handle = t.register_hook(lambda g: g * 2)
        t.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf))
        t.exp().sum().backward()
        handle.remove()
        t.sum().backward()
    same(twin.plain.grad, twin.paged.grad)
    assert [leaf is t for leaf, t in zip(seen, [twin.plain] * 2 + [twin.paged] * 2)] == [True] * 4


def test_hook_may_replace_the_gradient_by_a_paged_one(pager, twin):
    gradient = torch.randn(5, 10_001)
    twin.plain.register_hook(lambda g: gradient)
    twin.paged.register_hook(lambda g: pager.page(gradient))
    for t in twin:
        t.exp().sum().backward()
        t.exp().sum().backward()
    same(twin.plain.grad, twin.paged.grad)


def test_retain_grad(twin):
    kept = []
    for t in twin:
        view, result = t.t(), t * 2
        view.retain_grad()
        result.retain_grad()
        (view.exp().sum() + result.exp().sum()).backward()
        kept.append((view.grad, result.grad))
    same(*kept)


def test_autograd_grad(twin):
    gradients = [torch.autograd.grad((t.exp() * t[0]).sum(), t) for t in twin]
    same(*gradients)
    unused = [torch.autograd.grad(t[0].sum(), [t, t], allow_unused=True) for t in twin]
    same(*unused)
    assert twin.paged.grad is None


def test_double_backward(twin):
    results = []
    for t in twin:
        (first,) = torch.autograd.grad((t**3).sum(), t, create_graph=True)
        (second,) = torch.autograd.grad(first.exp().clamp(max=9).sum(), t)
        results.append((first.detach(), second))
    same(*results)


def test_retain_graph(twin):
    for t in twin:
        y = (t.exp() * t).sum()
        y.backward(retain_graph=True)
        y.backward()
    same(twin.plain.grad, twin.paged.grad)


def test_checkpoint(twin):
    for t in twin:
        checkpoint(
            lambda a: (a @ a.t()).exp().clamp(max=3), t, use_reentrant=False
        ).sum().backward()
    same(twin.plain.grad, twin.paged.grad)


def test_custom_function(twin):
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, t):
            ctx.save_for_backward(t)
            return t**3

        @staticmethod
        def backward(ctx, gradient):
            (t,) = ctx.saved_tensors
            return gradient * 3 * t**2

    for t in twin:
        Cube.apply(t).sum().backward()
    same(twin.plain.grad, twin.paged.grad)


def test_inference_mode(twin):
    with torch.inference_mode():
        results = [t.exp().t() for t in twin]
        views = [t[1:3] for t in twin]
        same(*results)
        same(*views)


def _cubes(t: torch.Tensor) -> torch.Tensor:
    return (t**3).sum()


TRANSFORMS = {
    "func.grad": lambda t: torch.func.grad(_cubes)(t),
    "func.vmap": lambda t: torch.func.vmap(lambda row: row.exp().sum())(t),
    "func.vmap_captured": lambda t: torch.func.vmap(lambda row: row @ t.t())(torch.ones(3, 40)),
    "func.vjp": lambda t: torch.func.vjp(torch.exp, t)[1](torch.ones(30, 40))[0],
    "func.jvp": lambda t: torch.func.jvp(torch.exp, (t,), (torch.ones(30, 40),)),
    "func.jacrev": lambda t: torch.func.jacrev(torch.exp)(t[0, :5]),
    "func.jacfwd": lambda t: torch.func.jacfwd(torch.exp)(t[0, :5]),
    "func.hessian": lambda t: torch.func.hessian(_cubes)(t[0, :5]),
    "func.functionalize": lambda t: torch.func.functionalize(lambda a: a.clone().add_(1))(t),
    "autograd.functional": lambda t: torch.autograd.functional.jacobian(torch.exp, t[0, :5]),
    "is_grads_batched": lambda t: _batched_gradients(t.clone()),
}


def _batched_gradients(t: torch.Tensor) -> torch.Tensor:
    t = t.detach().requires_grad_()
    return torch.autograd.grad(t.exp(), t, torch.ones(2, *t.shape), is_grads_batched=True)[0]


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transforms_are_right_or_refused(pager, transform):
    x, p = twins(pager, 30, 40)
    right_or_refused(transform(x), lambda: transform(p))
    same(x, p)


def test_functional_call(pager):
    model = nn.Linear(30, 20)
    weights = {"weight": torch.randn(20, 30), "bias": torch.zeros(20)}
    inputs = torch.randn(4, 30)
    paged = {name: pager.page(value) for name, value in weights.items()}
    expected = torch.func.functional_call(model, weights, inputs)
    right_or_refused(expected, lambda: torch.func.functional_call(model, paged, inputs))


class TestModules:
    """What training code does with the modules whose parameters are paged."""

    @pytest.fixture
    def models(self, pager):
        models = []
        for _ in range(2):
            torch.manual_seed(0)
            models.append(
                nn.Sequential(nn.Linear(130, 300), nn.BatchNorm1d(300), nn.Linear(300, 4))
            )
        pager.page_module(models[1])
        return models

    def test_tied_parameters_stay_tied(self, pager):
        model = nn.Module()
        model.a, model.b = nn.Embedding(200, 100), nn.Linear(100, 200, bias=False)
        model.b.weight = model.a.weight
        pager.page_module(model)
        assert model.a.weight is model.b.weight
        assert len(list(model.parameters())) == 1

    def test_names_order_and_hooks_survive(self, models):
        names = [[name for name, _ in model.named_parameters()] for model in models]
        assert names[0] == names[1]
        assert all(isinstance(p, nn.Parameter) for p in models[1].parameters())

    def test_load_state_dict_keeps_the_pages(self, pager, models):
        other = nn.Sequential(nn.Linear(130, 300), nn.BatchNorm1d(300), nn.Linear(300, 4))
        before = list(models[1].parameters())
        for model in models:
            model.load_state_dict(other.state_dict())
        assert all(a is b for a, b in zip(before, models[1].parameters()))
        assert isinstance(models[1][0].weight, tp.PagedTensor)
        same(dict(models[0].state_dict()), dict(models[1].state_dict()))

    def test_initialisers(self, models):
        for model in models:
            torch.manual_seed(3)
            nn.init.xavier_uniform_(model[0].weight)
            nn.init.normal_(model[2].weight)
            nn.init.orthogonal_(model[2].weight)
            nn.init.zeros_(model[0].bias)
        same(*(dict(model.named_parameters()) for model in models))

    @pytest.mark.parametrize("foreach", [None, False, True])
    def test_clipping_and_vectors(self, models, foreach):
        results = []
        for model in models:
            model(torch.linspace(0, 1, 520).view(4, 130)).square().sum().backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=foreach)
            nn.utils.clip_grad_value_(model.parameters(), 0.01, foreach=foreach)
            gradients = [p.grad for p in model.parameters()]
            vector = nn.utils.parameters_to_vector(model.parameters())
            results.append((norm, gradients, vector.detach()))
        if models[1][
            0
        ].weight.pager.core.residency.scattered:  # norms have another order of additions
            plain, paged = results
            for expected, got in zip(tree_leaves(plain), tree_leaves(paged), strict=True):
                torch.testing.assert_close(got.to_dense(), expected, rtol=1e-5, atol=0)
            return
        same(*results)

    def test_vector_to_parameters(self, models):
        vector = torch.randn(sum(p.numel() for p in models[0].parameters()))

        def fill(model):
            nn.utils.vector_to_parameters(vector, model.parameters())
            return [p.detach() for p in model.parameters()]

        right_or_refused(fill(models[0]), lambda: fill(models[1]))

    @pytest.mark.parametrize("convert", [nn.Module.double, nn.Module.bfloat16, nn.Module.float])
    def test_conversions(self, models, convert):
        def state(model):
            return [p.detach() for p in convert(model).parameters()]

        right_or_refused(state(models[0]), lambda: state(models[1]))

    def test_zero_grad(self, models):
        for set_to_none in (False, True):
            for model in models:
                model(torch.ones(4, 130)).sum().backward()
                model.zero_grad(set_to_none=set_to_none)
            same(*([p.grad for p in model.parameters()] for model in models))

    def test_weight_norm(self, models):
        results = []
        for model in models:
            nn.utils.parametrizations.weight_norm(model[2])
            result = model(torch.ones(4, 130))
            result.sum().backward()
            results.append([result.detach(), *(p.grad for p in model.parameters())])
        same(*results)

    def test_parametrization(self, models):
        """PyTorch gives the parameter new memory with ``set_`` here."""

        def train(model):
            nn.utils.parametrize.register_parametrization(model[0], "bias", nn.Softplus())
            result = model(torch.ones(4, 130))
            result.sum().backward()
            return [result.detach(), *(p.grad for p in model.parameters())]

        right_or_refused(train(models[0]), lambda: train(models[1]))

    def test_autocast(self, models):
        results = []
        for model in models:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                result = model(torch.linspace(0, 1, 520).view(4, 130))
                again = model(torch.ones(4, 130))
            (result.float().square().sum() + again.float().sum()).backward()
            results.append([result.detach(), *(p.grad for p in model.parameters())])
        same(*results)

    def test_gradient_scaler(self, models):
        for model in models:
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
            for _ in range(3):
                loss = model(torch.linspace(0, 1, 520).view(4, 130)).square().sum()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        same(*(dict(model.named_parameters()) for model in models))

    def test_pickled_module(self, models):
        right_or_refused(
            dict(models[0].named_parameters()),
            lambda: dict(pickle.loads(pickle.dumps(models[1])).named_parameters()),
        )

    def test_inference_mode(self, models):
        for model in models:
            model.eval()
        with torch.inference_mode():
            same(*(model(torch.ones(4, 130)) for model in models))

    def test_parameters_can_be_replaced_by_half_of_themselves(self, models):
        with torch.no_grad():
            for model in models:
                for p in model.parameters():
                    p.mul_(0.5).add_(p, alpha=-0.1)
                    p.lerp_(torch.ones_like(p), 0.1)
        same(*(dict(model.named_parameters()) for model in models))
