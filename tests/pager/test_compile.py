"""``torch.compile`` of code that trains a paged model: it stops at our doors, and the losses are
those of the plain run."""

from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.nn import functional as F

import tensorpager as tp
from tensorpager.pager.debug.check import check_invariants
from tensorpager.pager.tensor.paged_tensor import PagedTensor

from .models import PAGE_BYTES

pytestmark = pytest.mark.filterwarnings("ignore")


def train(pager: tp.Pager | None, how: str) -> tuple[list[float], list[torch.fx.GraphModule]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 8))
    if pager is not None:
        pager.page_module(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    if pager is not None:
        pager.optimizer(optimizer)
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def update(inputs: torch.Tensor) -> torch.Tensor:
        loss = forward(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def step(inputs: torch.Tensor) -> torch.Tensor:
        if pager is None:
            return update(inputs)
        with pager.iteration():
            return update(inputs)

    torch._dynamo.reset()
    forward = torch.compile(model, backend=backend) if how == "model" else model
    if how == "step":
        step = torch.compile(step, backend=backend)
    generator = torch.Generator().manual_seed(1)
    losses = [step(torch.randn(16, 64, generator=generator)).item() for _ in range(3)]
    torch._dynamo.reset()
    return losses, graphs


def is_ours(node: torch.fx.Node) -> bool:
    return "tensorpager/pager" in (node.stack_trace or "")


@pytest.mark.parametrize("how", ["step", "model"])
def test_losses_of_the_plain_run(one_thread: None, how: str) -> None:
    expected, _ = train(None, "plain")
    with tp.Pager("4MiB", "16MiB", page_size=PAGE_BYTES, device="cpu", policy="lru") as pager:
        losses, graphs = train(pager, how)
    assert losses == expected
    assert not [node for graph in graphs for node in graph.graph.nodes if is_ours(node)]
    assert len(graphs) < 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(128), nn.Linear(128, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.gelu(self.linear(self.norm(x))) * torch.sigmoid(x.mean())


def losses_of(model: nn.Module, call: Any, pager: tp.Pager | None) -> list[float]:
    """Of four steps of ``model``, which is called by ``call``."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    if pager is not None:
        pager.optimizer(optimizer)
    losses = []
    for _ in range(4):
        with pager.iteration() if pager is not None else nullcontext():
            loss = call(torch.ones(256, 128)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("budget", ["2MiB", "64MiB"])
def test_compiled_parts_get_plain_tensors(one_thread: None, budget: str) -> None:
    """Of what they have saved too, in pages meanwhile: their kernels read memory."""
    found = []
    given: set[type] = set()

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        def run(*tensors: Any) -> Any:
            given.update(type(one) for one in tensors)
            return graph(*tensors)

        return make_boxed_func(run)

    for paged in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(*(Block() for _ in range(4)))
        with ExitStack() as stack:
            if paged:
                limits = {"page_size": PAGE_BYTES, "device": "cpu", "policy": "lru"}
                pager = stack.enter_context(tp.Pager(budget, "64MiB", **limits))
                pager.page_module(model)
            compiled = torch.compile(model, backend=aot_autograd(fw_compiler=backend))
            found.append(losses_of(model, compiled, pager if paged else None))
            if paged:
                assert pager.stats()["fits"] is (budget == "64MiB")
    torch._dynamo.reset()
    assert found[0] == found[1]
    assert PagedTensor not in given
    assert torch.Tensor in given


def twice(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x) * 2  # type: ignore[no-any-return]


def capture(seen: list[Any]) -> Any:
    """A backend that runs graphs as they are, and notes their ops."""

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        seen.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph)

    return aot_autograd(fw_compiler=backend)


@pytest.mark.parametrize("budget", ["2MiB", "64MiB"])
@pytest.mark.parametrize("what", ["model", "blocks", "wrapped blocks", "a function"])
def test_where_everything_fits_weights_are_in_the_graphs(
    one_thread: None, what: str, budget: str
) -> None:
    found: list[Any] = []
    compiled_ops: list[Any] = []
    for paged in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(*(Block() for _ in range(3)))
        compiled_ops.clear()
        backend = capture(compiled_ops)
        call: Any = model
        with ExitStack() as stack:
            if paged:
                limits = {"page_size": PAGE_BYTES, "device": "cpu", "policy": "lru"}
                pager = stack.enter_context(tp.Pager(budget, "64MiB", **limits))
                pager.page_module(model)
            if what == "model":
                call = torch.compile(model, backend=backend)
            elif what == "blocks":
                for block in model:
                    block.compile(backend=backend)
            elif what == "wrapped blocks":
                for number, block in enumerate(model):
                    model[number] = torch.compile(block, backend=backend)
            else:
                call = torch.compile(partial(twice, model), backend=backend)
            found.append(losses_of(model, call, pager if paged else None))
            if paged:
                assert pager.stats()["fits"] is (budget == "64MiB")
                assert all(type(weight) is PagedTensor for weight in model.parameters())
                check_invariants(pager.core)
    torch._dynamo.reset()
    assert found[0] == found[1]
    products = compiled_ops.count(torch.ops.aten.addmm.default)
    assert (products > 0) is (budget == "64MiB")


class Shrinking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(128, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.linear.weight.mul_(0.5)
        if x.numel() == 0:
            raise ValueError("nothing to do")
        return self.linear(x)


def test_what_compiled_code_writes_to_a_weight_is_not_lost(one_thread: None) -> None:
    torch._dynamo.reset()
    model = Shrinking()
    expected = model.linear.weight.detach().clone()
    with tp.Pager("8MiB", "8MiB", page_size=PAGE_BYTES, device="cpu", policy="lru") as pager:
        pager.page_module(model)
        compiled = torch.compile(model, backend="aot_eager")
        run = model.linear.weight._storage.run
        for number in range(4):
            if number == 3:
                pager.core.residency.evict_run(run)  # a copy below, that is void after the write
                model.linear.weight.sum()
                assert (pager.core.table.host[run.pages] >= 0).all()
            with pager.iteration():
                compiled(torch.ones(4, 128)).sum().backward()
                model.zero_grad()
            expected *= 0.5
        assert pager.stats()["fits"]
        check_invariants(pager.core)
        pager.core.residency.evict_run(run)
        assert torch.equal(model.linear.weight.to_dense(), expected)
    torch._dynamo.reset()


def test_a_call_that_raises_leaves_paged_parameters(one_thread: None) -> None:
    torch._dynamo.reset()
    model = Shrinking()
    with tp.Pager("8MiB", "8MiB", page_size=PAGE_BYTES, device="cpu", policy="lru") as pager:
        pager.page_module(model)
        compiled = torch.compile(model, backend="aot_eager")
        for _ in range(3):
            with pager.iteration():
                compiled(torch.ones(4, 128)).sum().backward()
        with pytest.raises(ValueError, match="nothing to do"), pager.iteration():
            compiled(torch.ones(0, 128))
        assert all(type(weight) is PagedTensor for weight in model.parameters())
        with pager.iteration():
            compiled(torch.ones(4, 128)).sum().backward()
    torch._dynamo.reset()


def test_what_needs_a_whole_graph_says_why_there_is_none() -> None:
    model, inputs = nn.Sequential(nn.Linear(4, 4)), torch.ones(2, 4)
    said = r"PagedTensor.*pages.*to_dense\(\); .*strict=False"
    with tp.Pager("4MiB", "16MiB", page_size=PAGE_BYTES, device="cpu", policy="lru") as pager:
        paged = pager.page_module(model)[0].weight
        with pytest.raises(Exception, match=said):
            torch.cond(inputs.sum() > 0, lambda x: x @ paged, torch.sin, (inputs,))
        with pytest.raises(Exception, match=said):
            torch.export.export(model, (inputs,), strict=True)
