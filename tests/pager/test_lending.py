"""Nodes of autograd are lent what they have saved; all others get PagedTensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tensorpager as tp
from tensorpager.pager.debug.check import check_invariants
from tensorpager.pager.memory.page_table import PageTable
from tensorpager.pager.memory.space import Space
from tensorpager.pager.tensor import lending
from tensorpager.pager.tensor.paged_tensor import Form, PagedTensor

from .models import make_pager
from .test_planned import planned_pager

SHAPE = 128, 512  # 256 KiB: 4 pages


class Net(nn.Module):
    """Nodes that save one tensor, two, and one that others have saved too."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(SHAPE[1])
        self.up = nn.Linear(SHAPE[1], SHAPE[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(self.up(self.norm(x)))
        return (hidden * hidden.sigmoid()).square().sum()


@pytest.fixture
def model() -> Net:
    return Net()


@pytest.fixture
def pager(model: Net, one_thread: None) -> Iterator[tp.Pager]:
    """Of ``model``; the iteration that is metered is over."""
    with make_pager(frames=200) as pager:
        pager.page_module(model)
        with pager.iteration():
            model(torch.randn(SHAPE)).backward()
        model.zero_grad()
        assert not pager.core.fits
        yield pager


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Of all that is lent, as a node has it that gives it on."""
    kept: list[torch.Tensor] = []
    lend = lending.Lender.lend

    def keep(self: Any, saved: Any, asking: Any) -> Any:
        lent = lend(self, saved, asking)
        if lent is not None:
            kept.append(lent.detach())
        return lent

    monkeypatch.setattr(lending.Lender, "lend", keep)
    return kept


def dispatched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ops of PagedTensors, as they come."""
    ops: list[str] = []
    inner = PagedTensor.__torch_dispatch__.__func__  # type: ignore[attr-defined]

    def noted(cls: Any, func: Any, *rest: Any) -> Any:
        ops.append(str(func))
        return inner(cls, func, *rest)

    monkeypatch.setattr(PagedTensor, "__torch_dispatch__", classmethod(noted))
    return ops


def test_no_op_of_a_backward_pass_comes_through_the_dispatcher(
    pager: tp.Pager, model: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pager.iteration():
        loss = model(torch.randn(SHAPE))
        ops = dispatched(monkeypatch)
        loss.backward()
        assert not [op for op in ops if not op.startswith("aten.add")]  # gradients that add up
    assert not pager.core.saved.lender.lends
    assert not pager.core.residency.pinned_pages()
    check_invariants(pager.core)


def test_a_node_is_one_access(pager: tp.Pager, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all that it has saved, as an op is that is given all of it."""
    with pager.iteration():
        a, b = (torch.randn(SHAPE, requires_grad=True) * 1.0 for _ in range(2))
        product = (a * b).sum()
        taken: list[bool] = []
        take = pager.core.take

        def noted(extents: Any, *args: Any, **how: Any) -> None:
            taken.append(bool(how.get("joins")))
            take(extents, *args, **how)

        monkeypatch.setattr(pager.core, "take", noted)
        product.backward()
    assert taken == [False, True]


class _Looks(torch.autograd.Function):
    saved: Any = None

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (_Looks.saved,) = ctx.saved_tensors
        return grad * 2


def test_who_may_keep_it_gets_a_paged_tensor(pager: tp.Pager) -> None:
    x = torch.randn(SHAPE)
    with pager.iteration():
        out = F.gelu(x.clone().requires_grad_() * 1.0)
        node: Any = out.grad_fn
        looked = [node._saved_self]
        node.register_prehook(lambda _: looked.append(node._saved_self))
        _Looks.apply(out).sum().backward()  # type: ignore[no-untyped-call]
    read, _Looks.saved = _Looks.saved, None
    assert [type(one) for one in looked] == [PagedTensor, PagedTensor]
    assert all(torch.equal(one.to_dense(), x) for one in looked)
    assert type(read) is torch.Tensor  # a copy: it may be read by its address
    assert torch.equal(read, F.gelu(x))


def test_what_is_differentiated_again_is_not_lent(pager: tp.Pager) -> None:
    x = torch.randn(SHAPE)
    grads = []
    for inside in (False, True):
        start = x.clone().requires_grad_()
        with pager.iteration():
            out = F.gelu(start * 1.0).square().sum()
            (first,) = torch.autograd.grad(out, start, create_graph=inside)
            assert pager.core.saved.lender.lends is not inside
            grads.append(first.detach())
    assert torch.equal(*grads)


def test_what_somebody_still_has_stays_where_it_is(
    pager: tp.Pager, model: Net, kept: list[torch.Tensor]
) -> None:
    core = pager.core
    with pager.iteration():
        model(torch.randn(SHAPE)).backward()
        before = [one.clone() for one in kept]
        filler = [pager.page(torch.full(SHAPE, 7.0)) for _ in range(60)]  # all frames, and more
        assert all(map(torch.equal, kept, before))
    assert core.residency.pinned_pages() >= 4
    assert core.saved.lender.in_use
    assert all(map(torch.equal, kept, before))
    kept.clear()
    with pager.iteration():
        model(torch.randn(SHAPE))
    assert core.residency.pinned_pages() == 0
    assert not core.saved.lender.in_use
    del filler
    check_invariants(core)


def test_a_pager_that_closes_leaves_what_somebody_has(
    pager: tp.Pager, model: Net, kept: list[torch.Tensor]
) -> None:
    with pager.iteration():
        model(torch.randn(SHAPE)).backward()
    before = [one.clone() for one in kept]
    pager.close()
    assert before
    assert all(map(torch.equal, kept, before))


def test_what_dies_with_its_node_makes_room_for_what_is_born_next(
    pager: tp.Pager, model: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    residency, waiting = pager.core.residency, []
    collect = residency.collect

    def noted() -> None:
        collect()
        waiting.append(len(residency._held_dead))

    with pager.iteration():
        loss = model(torch.randn(SHAPE))
        monkeypatch.setattr(residency, "collect", noted)
        loss.backward()
    assert waiting
    assert not any(waiting)


def test_iterations_are_alike_whether_ops_are_timed_or_nodes_are_lent_to(one_thread: None) -> None:
    """Otherwise nothing would be known of how long the accesses of a plan take."""
    with planned_pager(frames=100) as pager:
        model = pager.page_module(Net())
        optimizer = pager.optimizer(torch.optim.AdamW(model.parameters()))
        for step in range(8):
            with pager.iteration():
                model(torch.randn(SHAPE)).backward()
                optimizer.step()
                optimizer.zero_grad()
            if step > 1:
                pager.plan(wait=True)
        kind = pager.core.follower.current  # type: ignore[union-attr]
        assert pager.stats()["departures"] == 0
        assert len(kind.samples) > 1  # type: ignore[attr-defined]
        assert len(kind.beside) == pager.stats()["planned_iterations"] > 1  # type: ignore[attr-defined]


def test_a_part_of_a_parameter_as_a_weight(pager: tp.Pager, kept: list[torch.Tensor]) -> None:
    """It is no leaf, so autograd saves it, and our linear is lent it beside its inputs."""
    x, whole = torch.randn(SHAPE), torch.randn(256, SHAPE[1])
    grads = []
    for make in (nn.Parameter, lambda value: pager.page(nn.Parameter(value))):
        weight, start = make(whole.clone()), x.clone().requires_grad_()
        with pager.iteration():
            F.linear(start * 1.0, weight[64:192]).square().sum().backward()
        grads.append((weight.grad, start.grad))
    assert any(lent.shape == (128, SHAPE[1]) for lent in kept)
    for plain, paged in zip(*grads):
        assert torch.equal(plain, paged.to_dense() if type(paged) is PagedTensor else paged)


@pytest.mark.parametrize(("frames", "lent"), [(40, True), (14, False)])
def test_nothing_is_lent_where_an_op_needs_much_of_the_arena(
    frames: int, lent: bool, one_thread: None
) -> None:
    """A small part of what it needs would be in the way of the rest."""
    x = torch.randn(SHAPE)
    grads = []
    with make_pager(frames=frames) as pager:
        for rows in (SHAPE[0], SHAPE[0], SHAPE[0] // 4):  # the first iteration is metered
            start = x[:rows].clone().requires_grad_()
            with pager.iteration():
                F.gelu(start * 1.0).sum().backward()
                assert pager.core.saved.lender.lends is (lent and bool(grads))
            grads.append(start.grad)
    assert all(torch.equal(grad, grads[0][: len(grad)]) for grad in grads)


def test_a_dead_page_that_is_held_gets_nothing_new() -> None:
    space = Space(PageTable(8, torch.device("cpu")), 4096, 64)
    run, _ = space.allocate(64, "activation")
    run.pins += 1
    space.dead.append((run, 0, 64, 0))
    assert list(space.drain()) == [run]
    other, _ = space.allocate(64, "activation")
    assert other is not run
    space.forget(run)


def test_what_was_lent_is_lent_again_over_the_same_view(
    monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    """In planned iterations, which have the same tensors at the same places."""
    with planned_pager(frames=100) as pager:
        model = pager.page_module(Net())
        made: list[int] = []
        plain = Form.plain

        def noted(form: Form, *args: Any) -> torch.Tensor:
            made[-1] += 1
            return plain(form, *args)

        monkeypatch.setattr(Form, "plain", noted)
        for step in range(6):
            made.append(0)
            with pager.iteration():
                model(torch.randn(SHAPE)).backward()
                model.zero_grad()
            if step > 1:
                pager.plan(wait=True)
        assert pager.stats()["mode"] == "planned"
        assert made[1] > 0 == made[-1]
