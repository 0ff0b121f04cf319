"""``torch.func`` inside ``iteration()``: PyTorch's results, and the hooks on again afterwards."""

import subprocess
import sys
import textwrap

import pytest
import torch
from torch import func
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

import tensorpager as tp

from .models import assert_same, plain

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # in PyTorch's own jvp
ROWS = 96  # a matrix of ROWS × ROWS is saved in pages: it is larger than the threshold


@pytest.fixture
def pager(tight_pager):
    return tight_pager


def cubes(w: torch.Tensor) -> torch.Tensor:
    return (w * w * w).sum()


def waves(w: torch.Tensor) -> torch.Tensor:
    return w.sin() * w


def rows(w: torch.Tensor) -> torch.Tensor:
    return torch.arange(3.0 * w.size(-1)).view(3, -1)


TRANSFORMS = {
    "grad": lambda w: func.grad(cubes)(w),
    "grad_and_value": lambda w: func.grad_and_value(cubes)(w),
    "grad of grad": lambda w: func.grad(lambda v: func.grad(cubes)(v).square().sum())(w),
    "vjp": lambda w: func.vjp(waves, w)[1](torch.ones(w.size()))[0],
    "jacrev": lambda w: func.jacrev(waves)(w[0, :5]),
    "hessian": lambda w: func.hessian(cubes)(w[0, :5]),
    "vmap": lambda w: func.vmap(lambda x: F.linear(x, w))(rows(w)),
    "vmap of grad": lambda w: func.vmap(func.grad(lambda x: F.linear(x, w).sin().sum()))(rows(w)),
    "vmap of vjp": lambda w: func.vmap(lambda x: func.vjp(waves, x)[1](x)[0])(rows(w)),
    "vmap of jacrev": lambda w: func.vmap(func.jacrev(waves))(rows(w)[:, :4]),
    "vmap of hessian": lambda w: func.vmap(func.hessian(cubes))(rows(w)[:, :4]),
}


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_results(pager, transform: str, paged: bool) -> None:
    torch.manual_seed(2)
    weight = torch.randn(ROWS, ROWS)
    expected = TRANSFORMS[transform](weight)
    given = pager.page(weight) if paged else weight
    with pager.iteration():
        result = TRANSFORMS[transform](given)
        assert_hooks_are_on(pager)
    assert_same(plain(result), plain(expected))


def assert_hooks_are_on(pager: tp.Pager) -> None:
    """What autograd saves goes into pages."""
    before = saved_pages(pager)
    kept = torch.ones(ROWS, ROWS).requires_grad_().add(1).sin()
    assert saved_pages(pager) > before
    assert kept.grad_fn is not None


def saved_pages(pager: tp.Pager) -> int:
    pager.core.residency.collect()
    return sum(run.count for run in pager.core.space.runs.values() if run.kind == "activation")


def test_in_a_training_step(pager) -> None:
    """Gradients through a transform, of weights that the transform does not own."""

    def step(model: torch.nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(4)
        x = torch.randn(5, 64)
        slopes = func.vmap(func.grad(lambda row: model(row).sum()))(x)
        (model(x).square().mean() + slopes.square().mean()).backward()
        return [plain(p.grad) for p in model.parameters()]

    def model() -> torch.nn.Module:
        torch.manual_seed(3)
        return torch.nn.Sequential(
            torch.nn.Linear(64, 128), torch.nn.Tanh(), torch.nn.Linear(128, 1)
        )

    expected = step(model())
    with pager.iteration():
        result = step(pager.page_module(model()))
    assert_same(result, expected)


def test_an_error_inside(pager) -> None:
    def fail(w: torch.Tensor) -> torch.Tensor:
        raise KeyError("mine")

    with pager.iteration():
        with pytest.raises(KeyError, match="mine"):
            func.grad(fail)(torch.ones(3))
        assert_hooks_are_on(pager)


def test_an_iteration_inside(pager) -> None:
    def inside(w: torch.Tensor) -> torch.Tensor:
        with pager.iteration():
            return cubes(w)

    assert_same(func.grad(inside)(torch.ones(3)), 3 * torch.ones(3))
    with pager.iteration():
        assert_hooks_are_on(pager)


def test_hooks_of_others_are_refused_as_ever(pager) -> None:
    def others() -> saved_tensors_hooks:
        return saved_tensors_hooks(lambda t: t, lambda t: t)

    with pager.iteration(), others(), pytest.raises(RuntimeError, match="saved tensor hooks"):
        func.grad(cubes)(torch.ones(3))
    with others(), pager.iteration():
        with pytest.raises(RuntimeError, match="saved tensor hooks"):
            func.grad(cubes)(torch.ones(3))
        assert_hooks_are_on(pager)
    with others(), pytest.raises(RuntimeError, match="saved tensor hooks"):
        func.grad(cubes)(torch.ones(3))


def test_two_pagers(pager) -> None:
    with tp.Pager("8MiB", page_size="64KiB", device="cpu", policy="lru") as other:
        with pager.iteration(), other.iteration():
            assert_same(func.grad(cubes)(torch.ones(3)), 3 * torch.ones(3))
            assert_hooks_are_on(other)
        with pager.iteration():
            assert_hooks_are_on(pager)


@pytest.mark.slow
def test_compiled_transforms() -> None:
    """The guard is no obstacle to ``torch.compile``, which was loaded before the first Pager."""
    program = """
        import torch, torch._dynamo.variables
        import tensorpager as tp
        with tp.Pager("8MiB", page_size="64KiB", device="cpu", policy="lru"):
            slope = torch.func.vmap(torch.func.grad(lambda v: (v * v * v).sum()))
            compiled = torch.compile(slope, backend="eager", fullgraph=True)
            assert torch.equal(compiled(torch.ones(2, 3)), 3 * torch.ones(2, 3))
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program)],
        capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=800,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
