"""Layers of many kinds, hooks on them, and several models at once, trained plain and paged."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import tensorpager as tp

from .. import programs
from .models import World, batch, loss_of, make_pager, mlp, plain, train


class _Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(128, 64, num_layers=2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x.view(-1, 1, 128).expand(-1, 3, -1))[0][:, -1])


class _LstmCell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LSTMCell(128, 128), nn.LSTMCell(128, 128)
        self.head = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = None, None
        for _ in range(3):
            first = self.first(x, first)
            second = self.second(first[0], second)
        return self.head(second[0])


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(128, 4, dropout=0.1, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True)
        self.head = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.view(16, -1, 128)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(self.layer(x)).view(-1, 10)


class _Convolutions(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Unflatten(1, (2, 8, 8)), nn.Conv2d(2, 64, 3), nn.BatchNorm2d(64), nn.ReLU(True),
            nn.Conv2d(64, 96, 3, padding=1), nn.BatchNorm2d(96), nn.ReLU(), nn.AvgPool2d(3),
            nn.Flatten(), nn.Linear(96 * 4, 64), nn.Linear(64, 10),
        )  # fmt: skip


class _Normed(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            parametrizations.weight_norm(nn.Linear(128, 256)), nn.ReLU(),
            parametrizations.spectral_norm(nn.Linear(256, 256)), nn.Tanh(),
            parametrizations.orthogonal(nn.Linear(256, 64)), nn.Linear(64, 10),
        )  # fmt: skip


@pytest.mark.parametrize("kind", [_Lstm, _LstmCell, _Attention, _Convolutions, _Normed])
def test_module(same, kind: type[nn.Module]) -> None:
    def script(world: World) -> object:
        model = world.module(kind())
        optimizer = world.optimizer(torch.optim.AdamW(model.parameters()))
        return train(world, model, optimizer, 3), model, optimizer

    same(script, frames=32)


@pytest.mark.parametrize("sparse", [False, True])
def test_embedding(same, sparse: bool) -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(1000, 128, sparse=sparse)
            self.mlp = mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.mlp(self.table((x[:, 0].abs() * 1000).long() % 1000))

    def script(world: World) -> object:
        model = world.module(Words())
        kind = torch.optim.SparseAdam if sparse else torch.optim.Adam
        words = world.optimizer(kind(model.table.parameters()))
        rest = world.optimizer(torch.optim.Adam(model.mlp.parameters()))
        losses = []
        for _ in range(3):
            with world.iteration():
                inputs, labels = batch()
                loss = F.cross_entropy(model(inputs), labels)
                loss.backward()
                words.step()
                rest.step()
                model.zero_grad()
            losses.append(loss.item())
        return losses, model, words, rest

    same(script)


def test_module_hooks(same) -> None:
    def script(world: World) -> object:
        model = world.module(mlp())
        seen = []
        model[2].register_forward_hook(lambda module, args, out: out * 1.5)
        model[4].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        model[2].register_full_backward_hook(
            lambda module, grad_in, grad_out: seen.append(grad_out[0].norm().item())
        )
        model[2].weight.register_hook(lambda grad: grad * 0.5)
        optimizer = world.optimizer(torch.optim.AdamW(model.parameters()))
        return train(world, model, optimizer), seen, model

    same(script)


# -- more than one -------------------------------------------------------------------------------
def test_two_models_in_one_pager(same) -> None:
    def script(world: World) -> object:
        maker, judge = world.module(mlp()), world.module(mlp(depth=2))
        first = world.optimizer(torch.optim.Adam(maker.parameters()))
        second = world.optimizer(torch.optim.Adam(judge.parameters()))
        widen = torch.randn(10, 128)
        losses = []
        for _ in range(3):
            with world.iteration():
                loss = F.cross_entropy(judge(maker(batch()[0]) @ widen), batch()[1])
                loss.backward()
                first.step()
                second.step()
                first.zero_grad()
                second.zero_grad()
            losses.append(loss.item())
        return losses, maker, judge

    same(script)


def test_two_pagers(same) -> None:
    def script(world: World) -> object:
        other = World(make_pager()) if world.pager is not None else World()
        one, two = world.module(mlp()), other.module(mlp())
        first = world.optimizer(torch.optim.Adam(one.parameters()))
        second = other.optimizer(torch.optim.Adam(two.parameters()))
        losses = []
        for _ in range(3):
            with world.iteration(), other.iteration():
                inputs, labels = batch()
                loss = F.cross_entropy(one(inputs) + two(inputs), labels)
                loss.backward()
                first.step()
                second.step()
                first.zero_grad()
                second.zero_grad()
            losses.append(loss.item())
        result = plain((losses, one, two, first, second))
        if other.pager is not None:
            other.pager.close()
        return result

    same(script)


@pytest.mark.parametrize("before", [True, False])
def test_hooks_of_the_user_on_parameters(same, before: bool) -> None:
    """They are kept, whether they were registered before the model was paged or after."""

    def script(world: World) -> object:
        model, seen = mlp(), []

        def register() -> None:
            weight = model[2].weight
            weight.register_hook(lambda grad: grad * 0.5)
            weight.register_post_accumulate_grad_hook(lambda p: seen.append(plain(p.grad.norm())))

        if before:
            register()
        model = world.module(model)
        if not before:
            register()
        optimizer = world.optimizer(torch.optim.AdamW(model.parameters()))
        return train(world, model, optimizer, 2), seen, model

    same(script)


def test_hooks_registered_before_paging_see_gradients_in_pages() -> None:
    """The pager's own hook is the first to run; the user's follow in their order, and their handles
    still remove them."""
    model, seen = mlp(), []
    weight = model[2].weight

    def note(name: str, parameter: torch.Tensor) -> None:
        seen.append((name, type(parameter.grad)))

    removed = weight.register_post_accumulate_grad_hook(partial(note, "removed"))
    for name in ("first", "second"):
        weight.register_post_accumulate_grad_hook(partial(note, name))
    with make_pager() as pager:
        pager.page_module(model)
        model[2].weight.register_post_accumulate_grad_hook(partial(note, "last"))
        removed.remove()
        with pager.iteration():
            loss_of(model).backward()
        assert seen == [(name, tp.PagedTensor) for name in ("first", "second", "last")]


def test_step_in_the_backward_pass(same) -> None:
    """Each parameter is stepped as soon as its gradient is there."""

    def script(world: World) -> object:
        model = world.module(mlp())
        optimizers = {p: world.optimizer(torch.optim.AdamW([p])) for p in model.parameters()}
        train(world, model, next(iter(optimizers.values())), 1)  # the metered iteration
        model.zero_grad()

        def step(parameter: torch.Tensor) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        handles = [p.register_post_accumulate_grad_hook(step) for p in model.parameters()]
        losses = []
        for _ in range(3):
            with world.iteration():
                loss = loss_of(model)
                loss.backward()
            losses.append(loss.item())
        for handle in handles:  # parameter, hook, optimizer, parameter: a cycle nobody collects
            handle.remove()
        return losses, model, list(optimizers.values())

    same(script)


_METERED_STEP_IN_BACKWARD = """
import torch
import tensorpager as tp
from torch import nn

for _ in range(4):
    pager = tp.Pager("64MiB", host_budget="64MiB", page_size="64KiB", device="cpu")
    model = pager.page_module(nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)]))
    optimizers = {p: pager.optimizer(torch.optim.AdamW([p])) for p in model.parameters()}
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    for _ in range(2):
        with torch.profiler.profile(), pager.iteration():
            model(torch.randn(8, 256)).sum().backward()
    with pager.iteration():
        model(torch.randn(16, 256)).sum().backward()
    with torch.profiler.profile():
        model(torch.randn(16, 256)).sum().backward()
    pager.close()
"""


def test_step_in_the_backward_pass_of_the_metered_iteration() -> None:
    """In a process of its own: the profiler that meters must not be switched inside of an op of the
    backward pass, which breaks it, and the next one to use it hangs or aborts."""
    done = programs.run("-c", _METERED_STEP_IN_BACKWARD)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "callback" not in done.stderr


def test_weights_tied_between_two_models(same) -> None:
    def script(world: World) -> object:
        first, second = mlp(), mlp()
        second[2].weight = first[2].weight
        first, second = world.module(first), world.module(second)
        assert second[2].weight is first[2].weight
        shared = {id(p): p for m in (first, second) for p in m.parameters()}
        optimizer = world.optimizer(torch.optim.AdamW(shared.values()))
        return [train(world, m, optimizer, 2) for m in (first, second)], first, second

    same(script)


class _Packed(torch.Tensor):
    """As torchao's quantised tensors are."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor) -> "_Packed":
        shape = (codes.shape[0], 2 * codes.shape[1])
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32)

    def __init__(self, codes: torch.Tensor) -> None:
        self.codes = codes

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return _Packed(args[0].codes)
        raise NotImplementedError(func)


class _Moved(nn.Parameter):
    """As bitsandbytes' parameters are: bytes, and what they mean is known to ``to``."""

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self


class _Marked(nn.Parameter):
    """Nothing but a name."""

    is_expert = True


@pytest.mark.parametrize("kind", [_Packed, _Moved])
def test_parameters_that_are_no_plain_ones_are_refused_by_name(kind: type) -> None:
    model = mlp()
    codes = torch.zeros(64, 64, dtype=torch.uint8)
    weights = {
        _Packed: lambda: nn.Parameter(_Packed(codes), False),
        _Moved: lambda: _Moved(codes, False),
    }
    model[2].weight = weights[kind]()
    before = model[0].weight
    with make_pager() as pager:
        with pytest.raises(tp.PagerError, match=rf"'2\.weight' is a .*{kind.__name__}"):
            pager.page_module(model)
        assert model[0].weight is before
        assert pager.stats()["live_bytes"] == 0


@pytest.mark.parametrize("library", ["torchao", "bitsandbytes"])
def test_those_of_libraries_too(library: str) -> None:
    module = pytest.importorskip(library)
    model = nn.Sequential(nn.Linear(64, 64))
    if library == "torchao":
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        quantize_(model, Int8WeightOnlyConfig())
    else:
        model[0] = module.nn.Linear4bit(64, 64)
    with make_pager() as pager, pytest.raises(tp.PagerError, match=library):
        pager.page_module(model)


def test_a_class_that_adds_nothing_to_parameters_is_paged() -> None:
    model = nn.Linear(64, 64)
    model.weight = _Marked(torch.ones(64, 64))
    with make_pager() as pager:
        pager.page_module(model)
        assert type(model.weight) is tp.PagedTensor


class _Tree(nn.Module):
    """A module of parameters alone, in a tree, with a name with dots for each leaf of it, as
    tensordict's ``TensorDictParams`` is. It is changed leaf by leaf, while it is not locked."""

    def __init__(self, **leaves: torch.Tensor) -> None:
        super().__init__()
        self.tree: dict[tuple[str, str], Any] = {}
        self.is_locked = False
        for name, leaf in leaves.items():
            self.set(("linear", name), nn.Parameter(leaf))
        self.lock_()

    def set(self, path: tuple[str, str], leaf: Any) -> None:
        assert not self.is_locked
        self.tree[path] = self._parameters[".".join(path)] = leaf

    def lock_(self) -> None:
        self.is_locked = True

    def unlock_(self) -> None:
        self.is_locked = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.tree["linear", "weight"], self.tree["linear", "bias"])


def test_parameters_in_a_tree_are_paged_leaf_by_leaf(same) -> None:
    """Their names with dots were refused, after some had been paged."""

    def script(world: World) -> object:
        weight, bias = 0.1 * torch.randn(512, 512), torch.randn(512)
        tree = _Tree(weight=weight, bias=bias)
        model = world.module(nn.Sequential(nn.Linear(128, 512), tree, nn.Linear(512, 10)))
        assert tree.is_locked
        optimizer = world.optimizer(torch.optim.AdamW(model.parameters()))
        return train(world, model, optimizer), model

    same(script)


def test_tensordicts_parameters_are_paged() -> None:
    params = pytest.importorskip("tensordict.nn").TensorDictParams
    tree = pytest.importorskip("tensordict").TensorDict
    model, inputs = mlp(), torch.randn(4, 128)
    leaves = params(tree.from_module(model), lock=True)
    expected = model(inputs)
    with make_pager() as pager:
        pager.page_module(leaves)
        assert all(type(p) is tp.PagedTensor for p in leaves.parameters())
        with leaves.to_module(model):
            assert torch.equal(plain(model(inputs)), expected)
