"""A named minimum has the frames of all ops on gradients in pages, also if they were dense when it
was found out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import tensorpager as tp

PAGE = 64 << 10
WIDTH = 320  # a weight of 7 pages
AFTERWARDS = 2 << 20  # dense bytes that are needed when all gradients are in pages
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def rows(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w[:200]).square().mean()


def rows_of_a_cast(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x.bfloat16(), w.bfloat16()[:300]).float().square().mean()


def hook(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    view = w.view_as(w)
    view.register_hook(lambda grad: grad - grad.mean(0))
    return F.linear(x, view).square().mean()


def given_away(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    loss = F.linear(x, w).square().mean()
    (grad,) = torch.autograd.grad(loss, [w], retain_graph=True)
    return loss * (1 + grad.mm(grad.t()).mean())


def autocast(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """One cast of the weight, whose two gradients are added up before they are cast."""
    with torch.autocast("cpu", torch.bfloat16):
        return F.linear(torch.tanh(F.linear(x, w)), w).float().square().mean()


def checkpointed(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = checkpoint(autocast, w, x, use_reentrant=False)
    return loss


def of_two_passes(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """In each a dense gradient is added to one that is dense where the weight is whole; the second
    sum goes on to one in pages."""

    def loss() -> torch.Tensor:
        y = torch.tanh(torch.bmm(x[None], w[None])[0])
        return torch.tanh(F.linear(y, w.flatten().view(w.shape))).square().mean()

    loss().backward()
    return loss()


def train(loss: Loss, budget: int, *, afterwards: int = AFTERWARDS) -> None:
    module = nn.Module()
    torch.manual_seed(0)
    module.w = nn.Parameter(torch.randn(WIDTH, WIDTH))
    with tp.Pager(budget, "64MiB", page_size=PAGE, policy="lru", device="cpu") as pager:
        pager.page_module(module)
        optimizer = pager.optimizer(torch.optim.SGD(module.parameters(), lr=0.01))
        for _ in range(2):
            with pager.iteration():
                loss(module.w, torch.randn(8, WIDTH)).backward()
                torch.ones(afterwards, dtype=torch.uint8)
                optimizer.step()
                optimizer.zero_grad()


@pytest.mark.parametrize("loss", [rows, rows_of_a_cast, hook, given_away, autocast, checkpointed])
def test_a_minimum_is_the_same_wherever_gradients_were(loss: Loss, one_thread: None) -> None:
    named = []
    for budget in (4 * PAGE, AFTERWARDS):  # under the first one nothing is whole, then all is
        with pytest.raises(tp.InfeasibleBudget, match="No parameter was changed") as refusal:
            train(loss, budget)
        named.append(refusal.value.minimum)
    assert named[0] == named[1]
    train(loss, named[0])


def test_a_sum_that_goes_to_a_gradient_in_pages_counts_as_one(one_thread: None) -> None:
    with pytest.raises(tp.InfeasibleBudget) as refusal:
        train(of_two_passes, 4 * PAGE, afterwards=0)
    train(of_two_passes, refusal.value.minimum, afterwards=0)


def test_a_hook_that_wants_an_address_is_told_what_works_in_every_iteration(
    one_thread: None,
) -> None:
    """In a metered iteration the gradient is in pages, in others it is not."""
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
    module = nn.Module()
    module.w = weight
    with tp.Pager("4MiB", "64MiB", page_size=PAGE, policy="lru", device="cpu") as pager:
        pager.page_module(module)
        paged = []

        def ask(gradient: torch.Tensor) -> None:
            paged.append(type(gradient) is tp.PagedTensor)
            assert gradient.to_dense().data_ptr()
            if paged[-1]:
                with pytest.raises(tp.PagerError, match=r"\.to_dense\(\) gives a plain tensor"):
                    gradient.data_ptr()

        module.w.register_hook(ask)
        for _ in range(2):
            with pager.iteration():
                torch.nn.functional.linear(torch.randn(8, WIDTH), module.w).sum().backward()
        assert paged == [True, False]
