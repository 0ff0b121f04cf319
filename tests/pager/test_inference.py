"""``torch.inference_mode()``, where composite ops reach the dispatcher whole: the same bits, copies
where PyTorch copies and views where it gives views, with autocast and among dispatch modes too."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import tensorpager as tp

from .models import World, assert_same, batch, loss_of, mlp, plain, train

COPIES = {
    "cast": lambda w: w.to(torch.bfloat16),
    "double": lambda w: w.double() + 0,
    "contiguous": lambda w: w.t().contiguous(),
    "reshape": lambda w: w.t().reshape(-1),
    "flatten": lambda w: w.t().flatten(),
}
VIEWS = {
    "reshape": lambda w: w.reshape(-1),
    "chunk": lambda w: w.chunk(3)[1],
    "narrow": lambda w: w.narrow(0, 1, 2),
    "to": lambda w: w.to(torch.float32),
}


@pytest.fixture
def pager(tight_pager):
    return tight_pager


def both(pager: tp.Pager, size: tuple[int, ...] = (33, 40)) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    weight = torch.randn(size)
    return weight, pager.page(weight)


@pytest.mark.parametrize("op", COPIES)
def test_a_copy_is_a_copy(pager, op: str) -> None:
    weight, paged = both(pager)
    with torch.inference_mode():
        result = COPIES[op](paged)
        assert_same(plain(result), COPIES[op](weight))
        result.zero_()
    assert_same(plain(paged), weight)


@pytest.mark.parametrize("op", VIEWS)
def test_a_view_is_a_view(pager, op: str) -> None:
    weight, paged = both(pager)
    with torch.inference_mode():
        for tensor in (weight, paged):
            VIEWS[op](tensor).zero_()
    assert_same(plain(paged), weight)
    assert bool((weight == 0).any())
    assert paged._version == weight._version


AUTOCAST = {
    "linear": lambda x, w: F.linear(x, w),
    "matmul": lambda x, w: x @ w.t(),
    "einsum": lambda x, w: torch.einsum("ij,kj->ik", x, w),
    "attention": lambda x, w: F.scaled_dot_product_attention(x[None], w[None], w[None]),
    "norm": lambda x, w: F.layer_norm(x, (40,), w[0]) @ w.t(),
}


@pytest.mark.parametrize("op", AUTOCAST)
def test_autocast(pager, op: str) -> None:
    """Autocast is at work for the ops that a composite is made of."""
    weight, paged = both(pager)
    x = torch.randn(7, 40)
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(plain(AUTOCAST[op](x, paged)), AUTOCAST[op](x, weight))


class _Nothing(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("modes", [1, 2])
def test_among_dispatch_modes(pager, modes: int) -> None:
    """A mode sees a composite; the plain ops of which it is made do not look for that mode."""
    weight, paged = both(pager)
    x = torch.randn(7, 40)

    def run(w: torch.Tensor) -> torch.Tensor:
        return torch.einsum("ij,kj->ik", x, w).softmax(0) + w.t().reshape(40, 33)[:7]

    watching = [_Nothing() for _ in range(modes)]
    with torch.inference_mode():
        expected = run(weight)
        for mode in watching:
            mode.__enter__()
        try:
            result = run(paged)
        finally:
            for mode in reversed(watching):
                mode.__exit__(None, None, None)
    assert_same(plain(result), expected)
    assert all(mode.seen for mode in watching)


def test_an_op_that_copies_though_its_schema_says_view(pager) -> None:
    """The proof is whether the result shares memory, not what a schema promises."""
    with torch.library._scoped_library("tensorpager_test", "DEF") as library:
        library.define("maybe_view(Tensor(a) x, bool copy) -> Tensor(a)")
        library.impl(
            "maybe_view", lambda x, copy: x.clone() if copy else x[1:], "CompositeExplicitAutograd"
        )
        op = torch.ops.tensorpager_test.maybe_view
        weight, paged = both(pager)
        with torch.inference_mode():
            for copy in (True, False):
                for tensor in (weight, paged):
                    op(tensor, copy).fill_(copy)
                assert_same(plain(paged), weight)
    assert not bool((weight == 1).any())
    assert bool((weight[1:] == 0).all())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_encoder_layer_is_the_one_that_is_not_fused(pager, mode) -> None:
    """PyTorch takes its fused kernel for plain tensors only, whatever a subclass could do."""
    torch.manual_seed(3)
    layer, x = torch.nn.TransformerEncoderLayer(32, 2, 64, batch_first=True).eval(), batch(5, 32)[0]
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with mode():
            expected = layer(x[None])
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
    with mode():
        assert_same(plain(pager.page_module(layer)(x[None])), expected)


@pytest.mark.parametrize("autocast", [False, True])
def test_training_evaluation_training(same, autocast: bool) -> None:
    def script(world: World) -> object:
        model = world.module(mlp())
        optimizer = world.optimizer(torch.optim.AdamW(model.parameters()))
        results = [train(world, model, optimizer, 1)]
        for inside in (False, True):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                if inside:
                    with world.iteration(), torch.inference_mode():
                        results.append(plain(model(batch(24)[0])))
                else:
                    with torch.inference_mode():
                        results.append(plain(loss_of(model)))
            results.append(train(world, model, optimizer, 1))
        return results, model

    same(script)
