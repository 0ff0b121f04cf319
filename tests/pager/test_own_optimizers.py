"""Optimizers of other people's classes: each of their steps is one step, of all parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

import tensorpager as tp

from .models import make_pager

PAGE = 64 << 10


class Everything(torch.optim.Optimizer):
    """Counts its steps in each group, in itself and in its state; divides by the norm of all
    gradients; draws random numbers."""

    def __init__(self, parameters: Any, lr: float = 1e-2) -> None:
        super().__init__(parameters, {"lr": lr})
        self.calls = 0

    def step(self, closure: Any = None, *, scale: float = 1.0) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.calls += 1
        self.state["steps"] = self.state.get("steps", 0) + 1  # type: ignore[index]
        with torch.no_grad():
            members = [(g, p) for g in self.param_groups for p in g["params"] if p.grad is not None]
            norm = torch.stack([p.grad.norm() for _, p in members]).norm()
            for group in self.param_groups:
                group["step"] = group.get("step", 0) + 1
            for group, p in members:
                state = self.state[p]
                if not state:
                    state["mean"] = torch.zeros_like(p)
                state["mean"].lerp_(p.grad / norm.clamp_min(0.1), 0.1)
                noise = 1e-3 * torch.randn_like(p)
                change = state["mean"] / (1 - 0.9 ** group["step"]) + noise
                p.add_(change, alpha=-scale * group["lr"] / self.calls**0.5)
        return loss


class Noise(torch.optim.Optimizer):
    """Has nothing but its groups, so that a step of it can be tried out."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-2})

    def change(self, p: torch.Tensor) -> torch.Tensor:
        return torch.randn_like(p)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(self.change(p), alpha=-group["lr"])


class Own(torch.optim.AdamW):
    """PyTorch's own step, with other defaults."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=1e-2, weight_decay=0.1)


class Twice(torch.optim.SGD):
    """Asks for the loss twice, as what looks ahead does."""

    def step(self, closure: Any = None) -> Any:
        assert closure is not None
        with torch.enable_grad():
            closure()
        super().step()
        with torch.enable_grad():
            loss = closure()
        super().step()
        return loss


class Ahead(torch.optim.Optimizer):
    """Lookahead: another optimizer steps, and every second time parameters go half the way back."""

    def __init__(self, parameters: Any) -> None:
        self.inner = torch.optim.AdamW(parameters, lr=1e-2)
        super().__init__(self.inner.param_groups, {})
        self.param_groups = self.inner.param_groups
        self.calls = 0

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = self.inner.step(closure)
        self.calls += 1
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    slow = self.state[p].setdefault("slow", p.detach().clone())
                    if self.calls % 2 == 0:
                        p.copy_(slow.lerp_(p, 0.5))
        return loss


def _momentum(p: torch.Tensor, grad: torch.Tensor, mean: torch.Tensor, count: torch.Tensor) -> None:
    mean.lerp_(grad, 0.1)
    p.add_(mean / (1 - 0.9**count), alpha=-0.01)


class Compiled(torch.optim.Optimizer):
    """Its update is one graph, as those of torchao's optimizers are; it counts before."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"begun": 0})
        self.calls = 0
        # New code: up to PyTorch 2.13 what could not be compiled once is never compiled again.
        update = FunctionType(_momentum.__code__.replace(), globals())
        self.update = torch.compile(update, backend="eager", fullgraph=True, dynamic=False)

    def prepare(self, p: torch.Tensor) -> None:
        pass

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.calls += 1
        self.state["steps"] = self.state.get("steps", 0) + 1  # type: ignore[index]
        for group in self.param_groups:
            group["begun"] += 1
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["mean"], state["count"] = torch.zeros_like(p), torch.zeros(())
                state["count"] += 1
                self.prepare(p)
                self.update(p.detach(), p.grad, state["mean"], state["count"])
        return loss


class DecaysFirst(Compiled):
    def prepare(self, p: torch.Tensor) -> None:
        p.mul_(0.999)


class PartlyCompiled(torch.optim.Optimizer):
    """As Muon: what is compiled gets plain tensors. ``shapes``: of them, when it was compiled."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.shapes: list[Any] = []

        def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
            self.shapes += [x.shape for x in inputs if isinstance(x, torch.Tensor)]
            return graph

        self.normed = torch.compile(lambda x: x / (x.norm() + 1e-7), backend=backend)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                mean.lerp_(p.grad, 0.05)
                p.add_(self.normed(p.grad.lerp(mean, 0.95)), alpha=-0.02)


Train = Callable[[nn.Module, torch.optim.Optimizer, torch.Tensor, int], torch.Tensor]


def in_turns(
    model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, turn: int
) -> torch.Tensor:
    if turn % 2:
        return by_closure(model, optimizer, inputs, turn)
    loss = (model(inputs) - inputs).square().mean()
    loss.backward()
    optimizer.step(scale=0.5)  # type: ignore[call-arg]
    return loss


def by_closure(
    model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, turn: int
) -> torch.Tensor:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(inputs) - inputs).square().mean()
        loss.backward()
        return loss

    return optimizer.step(closure)  # type: ignore[return-value]


def plainly(
    model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, turn: int
) -> torch.Tensor:
    loss = (model(inputs) - inputs).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def train(make: Any, one: Train, pager: tp.Pager | None) -> list[Any]:
    """Losses, parameters, and what the optimizer says of itself, loaded again in between."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    if pager is not None:
        pager.page_module(model)
    optimizer = make([{"params": model[0].parameters()}, {"params": model[2].parameters()}])
    if pager is not None:
        optimizer = pager.optimizer(optimizer)
    losses = []
    for turn in range(6):
        inputs = torch.randn(16, 64)
        with pager.iteration() if pager is not None else nullcontext():
            losses.append(one(model, optimizer, inputs, turn).item())
            optimizer.zero_grad()
        if turn == 3:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    settings = [
        {k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups
    ]
    numbers = [optimizer.state.get("steps"), getattr(optimizer, "calls", None)]
    values = [p.detach().clone() for p in model.parameters()]
    return [losses, settings, numbers, *(v.to_dense() if pager is not None else v for v in values)]


def same(expected: list[Any], found: list[Any]) -> None:
    assert found[:3] == expected[:3]
    assert all(map(torch.equal, expected[3:], found[3:]))


@pytest.mark.parametrize("budget", ["16MiB", "1280KiB"])
@pytest.mark.parametrize(
    ("make", "one"),
    [
        (Everything, in_turns), (Everything, by_closure), (Twice, by_closure), (Own, by_closure),
        (Ahead, by_closure), (Compiled, plainly),
    ],
    ids=["everything", "everything by closure", "twice", "own defaults", "ahead", "one graph"],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:Compiled compiles its step")
def test_a_step_is_one_step(make: Any, one: Train, budget: str, one_thread: None) -> None:
    """Each parameter had a step of its own: counters went up with each, and norms were of one. What
    is one graph ended with the error of torch.compile."""
    with torch.compiler.set_stance("force_eager"):
        expected = train(make, one, None)
    with tp.Pager(budget, "32MiB", page_size=PAGE, device="cpu") as pager:
        same(expected, train(make, one, pager))
        stats = pager.stats()
        assert stats["peak_bytes"]["device"] <= stats["budget_bytes"]["device"]
        assert stats["fits"] is (budget == "16MiB")


@pytest.mark.parametrize("whole", [False, True])
def test_what_a_step_compiles_is_compiled_for_its_own_shapes(whole: bool, one_thread: None) -> None:
    """It was compiled for the small operands of a step that was tried out, and for the real ones
    then with sizes that may change: other bits than plain PyTorch's."""
    with make_pager() as pager:
        model = pager.page_module(nn.Linear(512, 256, bias=False))
        optimizer = pager.optimizer(PartlyCompiled(model.parameters()))
        step = torch.compile(optimizer.step, backend="eager") if whole else optimizer.step
        for _ in range(2):
            with pager.iteration():
                model(torch.randn(4, 512)).sum().backward()
                step()
        assert optimizer.shapes == [torch.Size([256, 512])]


def test_such_a_step_says_so_and_counts_once_when_states_were_loaded(one_thread: None) -> None:
    with iteration_of(Compiled) as optimizer:
        with pytest.warns(UserWarning, match=r"Compiled compiles its step .* op by op"):
            optimizer.step()
        saved = tree_map_only(tp.PagedTensor, tp.PagedTensor.to_dense, optimizer.state_dict())
    with iteration_of(Compiled) as optimizer:
        optimizer.load_state_dict(saved)
        with pytest.warns(UserWarning, match="Compiled compiles its step"):
            optimizer.step()
        assert optimizer.state.pop("steps") == 2
        assert [int(state["count"]) for state in optimizer.state.values()] == [2, 2]
        assert optimizer.param_groups[0]["begun"] == 2
        assert optimizer.calls == 1


@pytest.mark.parametrize("kind", [DecaysFirst, Compiled])
def test_one_that_has_written_or_asked_before_ends_with_the_error(
    kind: type, one_thread: None
) -> None:
    """It could not be begun anew."""
    closure = None if kind is DecaysFirst else lambda: torch.zeros(())
    with (
        pytest.raises(torch._dynamo.exc.TorchDynamoException),
        iteration_of(kind) as optimizer,
    ):
        optimizer.step(closure)


@contextmanager
def iteration_of(make: Any) -> Iterator[Any]:
    """An iteration with gradients; the optimizer, which has not stepped."""
    with make_pager() as pager:
        model = pager.page_module(nn.Linear(256, 256))
        optimizer = pager.optimizer(make(model.parameters()))
        with pager.iteration():
            model(torch.randn(4, 256)).sum().backward()
            yield optimizer


def test_states_are_in_pages_as_they_are_made(one_thread: None) -> None:
    with iteration_of(Everything) as optimizer:
        optimizer.step()
        weight = optimizer.param_groups[0]["params"][0]
        assert type(optimizer.state[weight]["mean"]) is tp.PagedTensor


def test_states_of_an_optimizer_inside_another_are_in_pages(one_thread: None) -> None:
    """They were dense, and the refusal said that the optimizer was not paged."""
    with iteration_of(Ahead) as optimizer:
        optimizer.step()
        weight = optimizer.param_groups[0]["params"][0]
        states = [optimizer.state[weight]["slow"], optimizer.inner.state[weight]["exp_avg"]]
        assert all(type(state) is tp.PagedTensor for state in states)


def test_a_step_is_tried_out_without_drawing_random_numbers(one_thread: None) -> None:
    with iteration_of(Noise) as optimizer:
        torch.manual_seed(1)
        optimizer.step()
        found = torch.randn(3)
    torch.manual_seed(1)
    torch.randn(256, 256)
    torch.randn(256)
    assert torch.equal(found, torch.randn(3))


# -- what their steps take -------------------------------------------------------------------------
class Lists(torch.optim.Optimizer):
    """Makes lists as large as all parameters, three of them at once from its fourth step on, one of
    them by a function that is an attribute of its own. ``hidden``: it has something else, too,
    without which it cannot be tried out."""

    def __init__(self, parameters: Any, *, hidden: bool) -> None:
        super().__init__(parameters, {"lr": 1e-2, "step": 0})
        self.clip = lambda tensors: torch._foreach_clamp_max(tensors, 1.0)
        self.factors = [1.0, 2.0]
        self.hidden = {"all": 1.0} if hidden else 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] += 1
            parameters = [p for p in group["params"] if p.grad is not None]
            grads = [p.grad for p in parameters]
            twice = torch._foreach_mul(grads, self.factors[1])
            if group["step"] > 3:
                both = torch._foreach_add(twice, grads)
                clipped = self.clip(both)
                twice = torch._foreach_add(clipped, both)
            assert self.hidden
            torch._foreach_add_(parameters, twice, alpha=-group["lr"])


class Loop(Noise):
    """Makes two tensors as large as the parameter that it is at."""

    def change(self, p: torch.Tensor) -> torch.Tensor:
        assert p.grad is not None
        return (p.grad * 2.0).clamp_max(1.0)


LAYERS, LAYER = 12, 4 * 128 * 128


def smallest(make: Any, steps: int = 8, budget: int = 4 * PAGE) -> list[int]:
    """The budgets that are named for so many steps, until one is enough for them."""
    named: list[int] = []
    while True:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(LAYERS)))
        with tp.Pager(budget, "32MiB", page_size=PAGE, device="cpu") as pager:
            pager.page_module(model)
            optimizer = pager.optimizer(make(model.parameters()))
            try:
                for _ in range(steps):
                    with pager.iteration():
                        model(torch.randn(4, 128)).square().mean().backward()
                        optimizer.step()
                        optimizer.zero_grad()
            except tp.InfeasibleBudget as error:
                more = error.minimum or 0
            else:
                assert 2 * LAYER <= pager.stats()["peak_bytes"]["device"] <= budget
                return named
        assert more > budget
        named.append(budget := more)


def test_what_is_made_of_all_parameters_at_once_counts(one_thread: None) -> None:
    """In the first refusal, though it does so in later steps only."""
    (named,) = smallest(lambda parameters: Lists(parameters, hidden=False))
    assert named > 3 * LAYERS * LAYER


def test_what_cannot_be_tried_out_is_refused_when_it_was_seen(one_thread: None) -> None:
    """It was trained with in any budget, however much its steps took."""
    named = smallest(lambda parameters: Lists(parameters, hidden=True))
    assert named[-1] > 3 * LAYERS * LAYER


def test_what_a_loop_makes_counts_for_one_parameter(one_thread: None) -> None:
    (named,) = smallest(Loop, budget=2 * PAGE)
    assert named < 6 * LAYER + 6 * PAGE
