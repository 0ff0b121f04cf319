"""Ops inside compiled functions: no graph breaks, eager's bits, and every write is seen."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ops_cases import PAGE, Memory, lists, ops, table, values
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters

from tensorpager.kernels.pieces import Paged

NO_FRAMES = torch.empty(0, dtype=torch.int32)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


class Layer:
    """A weight [40, 50], an input [6, 50] and an output [6, 40], all in pages of one arena."""

    def __init__(self) -> None:
        self.memory = Memory()
        self.weight = self.memory.page(values(40, 50))
        self.x = self.memory.page(values(6, 50, seed=1))
        self.out = self.memory.page(values(240, seed=2))
        self.tables = [table(paged) for paged in (self.weight, self.x, self.out)]

    @property
    def arena(self) -> torch.Tensor:
        return self.memory.arena


def _layer(
    arena: torch.Tensor,
    weight: torch.Tensor,
    x: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    dense = ops.gather_pages(arena, x, PAGE, [6, 50], torch.float32)
    y = ops.linear(dense, arena, weight, PAGE, torch.float32, 40, bias)
    paged = torch.empty(0)
    ops.elementwise(
        *("add", arena, PAGE, [240], [paged], [out], "ttn"),
        *([paged, y], [out, NO_FRAMES], [0.5]),
    )
    return y.relu(), ops.gather_pages(arena, out, PAGE, [240], torch.float32)


def test_gather_linear_elementwise_in_one_graph() -> None:
    eager, compiled = Layer(), Layer()
    bias = values(40, seed=3)
    with torch.no_grad():
        expected = _layer(eager.arena, *eager.tables, bias)
        counters.clear()
        run = torch.compile(_layer, backend="aot_eager", fullgraph=True)
        results = run(compiled.arena, *compiled.tables, bias)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert all(torch.equal(one, other) for one, other in zip(expected, results, strict=True))
    assert torch.equal(eager.arena, compiled.arena)
    changed = compiled.memory.dense(compiled.out)
    assert torch.equal(changed, results[1])
    assert not torch.equal(changed, values(240, seed=2))


def _traced(function: Callable[..., Any], *args: Any) -> tuple[Any, torch.fx.Graph]:
    """Result of the function, compiled, and the graph after functionalisation."""
    graphs = []

    def keep(module: torch.fx.GraphModule, _inputs: Any) -> Any:
        graphs.append(module.graph)
        return module

    with torch.no_grad():
        result = torch.compile(function, backend=aot_autograd(fw_compiler=keep), fullgraph=True)(
            *args
        )
    (graph,) = graphs
    return result, graph


def test_functionalisation_sees_writes() -> None:
    def around(arena: torch.Tensor, frames: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        before = arena.sum()
        ops.fill_pages(arena, frames, PAGE, 3)
        return before, arena.sum()

    layer = Layer()
    frames = layer.tables[0]
    before = int(layer.arena.sum())
    results, graph = _traced(around, layer.arena, frames)
    after = int(layer.arena.sum())
    assert [int(result) for result in results] == [before, after]
    assert before != after
    assert int((layer.arena == 3).sum()) >= len(frames) * PAGE
    targets = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    assert sum("auto_functionalized" in target for target in targets) == 1
    sums = [node.args[0] for node in graph.nodes if "aten.sum" in str(node.target)]
    assert len(set(sums)) == 2  # of the arena as it came, and of the arena as it was written
    assert not any(target.startswith("tensorpager") for target in targets)


def test_a_dead_gather_goes_and_a_dead_write_stays() -> None:
    def unused(arena: torch.Tensor, frames: torch.Tensor) -> None:
        ops.gather_pages(arena, frames, PAGE, [40, 50], torch.float32)
        ops.move_pages(arena, frames, frames - 1, PAGE)

    layer = Layer()
    _result, graph = _traced(unused, layer.arena, layer.tables[0])
    names = " ".join(str(node.args) + str(node.target) for node in graph.nodes)
    assert "gather_pages" not in names
    assert "move_pages" in names
    source, target = (paged_at(layer, layer.tables[0] + shift) for shift in (0, -1))
    assert torch.equal(source, target)


def paged_at(layer: Layer, frames: torch.Tensor) -> torch.Tensor:
    return layer.memory.dense(Paged(layer.arena, frames.numpy(), PAGE, torch.float32, 40 * 50))


def test_training_through_pages_that_are_written_in_between() -> None:
    """Forward, a write of other pages, backward: the gradients are eager's, bit for bit."""

    def loss(
        x: torch.Tensor, bias: torch.Tensor, arena: torch.Tensor, *frames: torch.Tensor
    ) -> torch.Tensor:
        y = ops.linear(x, arena, frames[0], PAGE, torch.float32, 40, bias)
        ops.scatter_pages(y.detach(), arena, frames[2], PAGE)
        return y.square().sum()

    results = []
    for function in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
        layer = Layer()
        x, bias = values(6, 50, seed=1).requires_grad_(), values(40).requires_grad_()
        value = function(x, bias, layer.arena, *layer.tables)
        value.backward()
        results.append((value.detach(), x.grad, bias.grad, layer.arena))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


def test_a_refusal_reaches_the_user_of_a_compiled_function() -> None:
    def loss(x: torch.Tensor, arena: torch.Tensor) -> torch.Tensor:
        return ops.total_norm(arena, PAGE, [5], [x], [NO_FRAMES])

    run = torch.compile(loss, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="total_norm cannot be differentiated, but"):
        run(values(5).requires_grad_(), Layer().arena)


@pytest.mark.slow
def test_steps_of_an_optimizer_compile_once() -> None:
    """Step and learning rate are tensors, so that they may change."""

    def update(
        arena: torch.Tensor, frames: torch.Tensor, grad: torch.Tensor, *rest: torch.Tensor
    ) -> None:
        *states, step, lr = rest
        paged = torch.empty(0)
        ops.adam_step(
            *(arena, PAGE, [2000], [paged], [frames], [grad], [NO_FRAMES]),
            *(states, [NO_FRAMES] * 2, [], [], [], []),
            *([step], lr, None, None, 0.9, 0.999, 1e-8, 0.01, True),
        )

    compiled = torch.compile(update, backend="aot_eager", fullgraph=True)
    layer, dense = Layer(), values(40, 50).view(-1).requires_grad_()
    optimizer = torch.optim.AdamW([dense], weight_decay=0.01, foreach=False)
    states = torch.zeros(2000), torch.zeros(2000)
    for number in range(1, 6):
        grad = values(2000, seed=number)
        lr = 1e-3 / number
        numbers = torch.tensor(float(number)), torch.tensor(lr, dtype=torch.float64)
        with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
            compiled(layer.arena, layer.tables[0], grad, *states, *numbers)
        dense.grad, optimizer.param_groups[0]["lr"] = grad, lr
        optimizer.step()
        assert torch.equal(layer.memory.dense(layer.weight), dense)


@pytest.mark.slow
def test_an_embedding_and_its_gradient_in_one_graph() -> None:
    """The number of distinct rows is not known when it is compiled."""

    def lookup(arena: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        frames, gradient, indices = rest
        call = PAGE, torch.float32, 40
        rows = ops.gather_rows(arena, frames, *call, 50, indices)
        grad = rows.sin().view(-1, 50)
        ops.add_rows(arena, gradient, *call, grad, *ops.group_rows(indices))
        return rows

    run = torch.compile(lookup, backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for indices in ([[3, 5, 3], [39, 0, 3]], [[1, 1, 1], [1, 1, 1]]):
            memory, chosen = Memory(), torch.tensor(indices)
            weight = values(40, 50)
            paged, gradient = memory.page(weight), memory.page(torch.zeros(40, 50))
            rows = run(memory.arena, table(paged), table(gradient), chosen)
            dense = weight.clone().requires_grad_()
            expected = torch.nn.functional.embedding(chosen, dense)
            expected.backward(expected.detach().sin())
            assert torch.equal(rows, expected)
            assert torch.equal(memory.dense(gradient).view(40, 50), dense.grad)


@pytest.mark.slow
def test_lists_of_any_mixture_in_one_graph() -> None:
    def scale(arena: torch.Tensor, frames: list[torch.Tensor], dense: list[torch.Tensor]) -> Any:
        call = arena, PAGE, [1500, 30], dense, frames
        norm = ops.total_norm(*call)
        ops.elementwise("mul", *call, "tc", [*dense, 1 / norm], [*frames, NO_FRAMES], [])
        return norm

    results = []
    for function in (scale, torch.compile(scale, backend="aot_eager", fullgraph=True)):
        memory = Memory()
        dense, frames = lists(memory.page(values(1500)), values(30, seed=1))
        results.append([function(memory.arena, frames, dense), memory.arena, dense[1]])
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)
    whole = torch.cat([values(1500), values(30, seed=1)])
    torch.testing.assert_close(results[0][0], whole.norm())
