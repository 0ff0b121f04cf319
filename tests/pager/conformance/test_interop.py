"""Doors that lead out of the pages without passing through dispatch."""

import copy
import io
import pickle
from contextlib import nullcontext
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch
from torch import nn

import tensorpager as tp

from .interop import Twins, must_be_clear, right_or_refused, same, twins
from .lanes import CHAOS, PLAIN

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(params=[PLAIN, CHAOS], ids=lambda lane: lane.name, autouse=True)
def lane(request, pager):
    with request.param.on(pager):
        yield request.param


class TestNumpy:
    @pytest.mark.parametrize("take", [lambda p: p.numpy(), np.asarray, np.array])
    def test_is_a_copy_or_refused(self, pager, take):
        x, p = twins(pager)
        try:
            array = take(p)
        except Exception as error:
            must_be_clear(error)
            return
        expected = x.numpy().copy()
        assert np.array_equal(array, expected)
        if take is not np.array:
            assert not array.flags.writeable, "writes to it would be lost"
        p.zero_()
        assert np.array_equal(array, expected), "the array is a view of frames"

    def test_of_a_tensor_that_requires_grad_is_refused(self, pager):
        p = twins(pager, requires_grad=True).paged
        with pytest.raises(RuntimeError):
            p.numpy()

    def test_of_a_view(self, pager):
        x, p = twins(pager)
        right_or_refused(x.t()[3:5].tolist(), lambda: p.t()[3:5].numpy().tolist())

    def test_torch_tensor_and_as_tensor(self, pager):
        x, p = twins(pager, 7)
        same(torch.tensor(x), torch.tensor(p))
        same(torch.as_tensor(x), torch.as_tensor(p))


class TestPythonValues:
    def test_tolist(self, pager):
        x, p = twins(pager)
        assert p.tolist() == x.tolist()
        assert p[2, 5:9].tolist() == x[2, 5:9].tolist()

    def test_item(self, pager):
        x, p = twins(pager)
        assert p[4, 10_000].item() == x[4, 10_000].item()
        assert float(p[1, 1]) == float(x[1, 1])
        assert complex(p[1, 1]) == complex(x[1, 1])

    def test_index_and_int(self, pager):
        p = pager.page(torch.tensor(3))
        assert int(p) == 3
        assert "abcdef"[p] == "d"
        assert list(range(p)) == [0, 1, 2]

    def test_bool(self, pager):
        assert pager.page(torch.tensor([1.0]))
        assert not pager.page(torch.tensor([0.0]))
        with pytest.raises(RuntimeError):
            bool(pager.page(torch.ones(2)))

    def test_hash_and_identity(self, pager):
        p, q = pager.page(torch.ones(3)), pager.page(torch.ones(3))
        assert hash(p) == hash(p)
        assert {p: 1, q: 2}[p] == 1
        assert len({p, q, p}) == 2

    def test_len_and_iteration(self, pager):
        x, p = twins(pager)
        assert len(p) == len(x)
        rows = list(p)
        same(list(x), rows)
        rows[1].zero_()
        x[1] = 0
        same(x, p)
        with pytest.raises(TypeError):
            iter(p[0, 0])
        assert [float(value) for value in reversed(p[:, 3])] == x[:, 3].flip(0).tolist()

    def test_contains(self, pager):
        p = pager.page(torch.arange(5))
        assert 3 in p
        assert 7 not in p

    def test_comparisons(self, pager):
        x, p = twins(pager)
        other = x.roll(1)
        same(x == other, p == other)
        same(other < x, other < p)
        same(x >= 0, p >= 0)
        assert torch.equal(p, x)
        assert torch.equal(x, p)
        assert not torch.equal(p, other)
        assert torch.allclose(p, x)
        assert torch.allclose(x, p)
        same(torch.isclose(x, other), torch.isclose(p, other))
        torch.testing.assert_close(p, x)

    @pytest.mark.parametrize("shape", [(), (3,), (5, 10_001)], ids=str)
    def test_printing(self, pager, shape):
        x, p = (
            twins(pager, *shape)
            if shape
            else Twins(torch.tensor(2.5), pager.page(torch.tensor(2.5)))
        )
        for text in (repr(p), str(p), f"{p}", repr(nn.Parameter(p)), repr(p.t() if p.dim() else p)):
            value = f"{x.flatten()[0]:.4f}".rstrip("0")
            assert value in text or str(tuple(x.shape)) in text
        assert f"{p.flatten()[0]:.3f}" == f"{x.flatten()[0]:.3f}"


class TestConversions:
    def test_to_the_same_is_itself(self, pager):
        x, p = twins(pager)
        for convert in (
            lambda t: t.to(torch.float32),
            lambda t: t.to("cpu"),
            lambda t: t.cpu(),
            lambda t: t.float(),
            lambda t: t.contiguous(),
            lambda t: t.type(torch.float32),
            lambda t: t.to(x),
        ):
            assert convert(x) is x
            assert convert(p) is p

    @pytest.mark.parametrize("name", ["half", "double", "bfloat16", "long", "bool", "cfloat"])
    def test_to_another_dtype(self, pager, name):
        x, p = twins(pager)
        same(getattr(x, name)(), getattr(p, name)())
        dtype = getattr(x, name)().dtype
        same(x.to(dtype), p.to(dtype))
        same(x.type(dtype), p.type(dtype))

    def test_to_meta_and_copies(self, pager):
        x, p = twins(pager)
        assert p.to("meta").shape == x.shape
        copy_ = p.to(torch.float32, copy=True)
        copy_.zero_()
        same(x, p)
        assert tuple(p.t().contiguous().shape) == (10_001, 5)
        same(x.t().contiguous(), p.t().contiguous())

    def test_like_factories(self, pager):
        x, p = twins(pager)
        for make in (
            torch.zeros_like,
            torch.ones_like,
            lambda t: t.new_zeros(3),
            lambda t: t.new_full((2, 2), 7),
        ):
            same(make(x), make(p))
        assert torch.empty_like(p).shape == x.shape

    @pytest.mark.parametrize("into_paged", [True, False])
    def test_copy_(self, pager, into_paged):
        for dtype in (torch.float32, torch.float64, torch.int32):
            x, p = twins(pager)
            source = torch.arange(10_001, dtype=dtype)
            if into_paged:
                p.copy_(source)
            else:
                target = torch.zeros_like(x)
                target.copy_(pager.page(source))
                p = target
            same(x.copy_(source), p)


class TestCopiesAndPickles:
    def test_deepcopy_is_independent(self, pager):
        x, p = twins(pager)
        twin = copy.deepcopy(p)
        same(x, twin)
        twin.zero_()
        same(x, p)
        p.fill_(3)
        same(torch.zeros_like(x), twin)

    def test_deepcopy_keeps_what_a_parameter_is(self, pager):
        p = nn.Parameter(pager.page(torch.randn(20)))
        first, second = copy.deepcopy([p, p])
        assert first is second
        assert isinstance(first, nn.Parameter)
        assert first.requires_grad
        assert first.is_leaf
        same(p, first)

    def test_deepcopy_of_a_view_keeps_sharing(self, pager):
        x, p = twins(pager)
        base, view = copy.deepcopy([p, p[1]])
        same([x, x[1]], [base, view])

    def test_copy_copy_shares_or_is_refused(self, pager):
        x, p = twins(pager)
        try:
            other = copy.copy(p)
        except Exception as error:
            must_be_clear(error)
            return
        other.mul_(2)
        same(x.mul_(2), p)

    def test_clone_is_independent(self, pager):
        x, p = twins(pager)
        twin = p.clone()
        p.zero_()
        same(x, twin)

    @pytest.mark.parametrize("weights_only", [True, False])
    def test_save_and_load_give_a_plain_tensor(self, pager, weights_only):
        x, p = twins(pager)
        file = io.BytesIO()
        torch.save({"p": p, "view": p[1:3]}, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=weights_only)
        assert type(loaded["p"]) is torch.Tensor
        same({"p": x, "view": x[1:3]}, loaded)

    def test_state_dict_saved_and_loaded_elsewhere(self, pager):
        model = pager.page_module(nn.Linear(300, 200))
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        other = nn.Linear(300, 200)
        other.load_state_dict(torch.load(file, weights_only=True))
        inputs = torch.randn(2, 300)
        same(other(inputs).detach(), model(inputs).detach())

    def test_pickle(self, pager):
        x, p = twins(pager)
        right_or_refused(x, lambda: pickle.loads(pickle.dumps(p)))

    def test_pickled_parameter(self, pager):
        p = nn.Parameter(pager.page(torch.arange(9.0)))
        right_or_refused(torch.arange(9.0), lambda: pickle.loads(pickle.dumps(p)).detach())

    def test_sharing_with_processes_copies_or_is_refused(self, pager):
        x, p = twins(pager)
        right_or_refused(x, lambda: pickle.loads(ForkingPickler.dumps(p)))


class TestData:
    def test_get_shares_memory(self, pager):
        x, p = twins(pager, requires_grad=True)
        same(x.data, p.data)
        assert not p.data.requires_grad
        p.data.mul_(3)
        x.data.mul_(3)
        same(x, p)

    def test_writes_to_data_are_not_seen_by_autograd(self, pager):
        p = twins(pager, requires_grad=True).paged
        version = p._version
        p.data.add_(1)
        assert p._version == version

    @pytest.mark.parametrize("shape", [(5, 10_001), (3, 7)], ids=str)
    @pytest.mark.parametrize("paged_value", [True, False])
    def test_set_on_a_paged_tensor(self, pager, shape, paged_value):
        _, p = twins(pager, requires_grad=True)
        value = torch.randn(shape)

        def assign():
            p.data = pager.page(value) if paged_value else value.clone()
            return p.detach(), (p * 2).detach()

        if right_or_refused((value, value * 2), assign):
            assert p.requires_grad
            p.sum().backward()
            same(torch.ones(shape), p.grad)

    def test_set_to_a_function_of_itself(self, pager):
        x, p = twins(pager, requires_grad=True)

        def assign():
            p.data = p.data * 2
            return p.detach()

        right_or_refused(x.detach() * 2, assign)

    @pytest.mark.parametrize("shape", [(3, 7), (5, 10_001)], ids=str)
    @pytest.mark.parametrize("paged_value", [True, False])
    def test_set_leaves_the_old_values_to_what_shared_them(self, pager, shape, paged_value):
        x = torch.randn(shape, requires_grad=True)
        p = pager.page(x)
        value = torch.randn(shape)
        old, row, view = p.data, p.detach()[1], p.view(-1)[2:9]
        p.data = pager.page(value) if paged_value else value
        same(value, p.detach())
        for expected, shared in ((x, old), (x[1], row), (x.view(-1)[2:9], view)):
            same(expected.detach(), shared.detach())
        old.mul_(2)
        same(x.detach()[1] * 2, row)
        same(value, p.detach())
        p.data = old  # and back
        same(x.detach() * 2, p.detach())
        p.data.add_(1)
        same(x.detach() * 2, old)
        assert p.requires_grad
        (p * 3).sum().backward()
        same(torch.full(shape, 3.0), p.grad)

    def test_set_to_a_transposed_view_of_itself(self, pager):
        x = torch.randn(70, 70)
        p = pager.page(x)
        p.data = p.data.t()
        assert torch.equal(x.t(), p.to_dense())

    def test_set_takes_no_new_pages_where_nothing_shares_the_old_ones(self, pager):
        p = pager.page(torch.zeros(100_000))
        run = p._storage.run
        p.data = torch.ones(100_000)
        assert p._storage.run is run
        alias = p.data
        p.data = torch.full((100_000,), 2.0)
        assert p._storage.run is run, "its name and its place in plans stay its own"
        assert alias._storage.run is not run


class Average:
    """Of a model's parameters, as it is in many a training loop: put in for an evaluation."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.average = {name: p.data.clone() for name, p in model.named_parameters()}

    def update(self) -> None:
        for name, p in self.model.named_parameters():
            self.average[name] = 0.1 * p.data + 0.9 * self.average[name]

    def evaluate(self, x: torch.Tensor) -> torch.Tensor:
        parameters = dict(self.model.named_parameters())
        backup = {name: p.data for name, p in parameters.items()}
        for name, p in parameters.items():
            p.data = self.average[name]
        with torch.no_grad():
            result = self.model(x).square().mean()
        for name, p in parameters.items():
            p.data = backup[name]
        return result


@pytest.mark.parametrize("budget", ["16MiB", "1792KiB"])
def test_an_average_of_the_weights_is_put_in_and_out(budget):
    def train(pager=None):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if pager is not None:
            pager.page_module(model)
            optimizer = pager.optimizer(optimizer)
        average, found = Average(model), []
        for _ in range(6):
            x = torch.randn(8, 64)
            with pager.iteration() if pager is not None else nullcontext():
                loss = (model(x) - x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                average.update()
            found += [loss.item(), average.evaluate(x).item()]
        return found

    with tp.Pager(budget, "16MiB", page_size="64KiB", device="cpu") as pager:
        assert train(pager) == train()
        assert pager.stats()["peak_bytes"]["device"] <= pager.stats()["budget_bytes"]["device"]


def test_a_model_that_is_converted_in_pages_says_what_to_do(pager):
    model = pager.page_module(nn.Linear(3, 3))
    before = model.weight.detach().to_dense()
    with pytest.raises(tp.PagerError, match="before page_module"):
        model.half()
    same(before, model.weight.detach())
    with pytest.raises(TypeError, match=r"an object of list; .* page_module"):
        pager.page([model])


def test_mixed_lists(pager):
    x, p = twins(pager)
    for join in (torch.cat, torch.stack, torch.vstack, torch.block_diag):
        args = (
            (lambda t: (t[:2, :3], x[:1, :4]))
            if join is torch.block_diag
            else (lambda t: ([t, x],))
        )
        same(join(*args(x)), join(*args(p)))
    same(torch.broadcast_tensors(x, x[:1]), torch.broadcast_tensors(p, x[:1]))
    same(torch.einsum("ij,kj->ik", x, x), torch.einsum("ij,kj->ik", p, x))
    same(torch._foreach_add([x, x], 1), torch._foreach_add([p, x], 1))


def test_pages_are_given_back(pager):
    """A hundred tensors of a third of the device budget, one after another."""
    for value in range(100):
        p = pager.page(torch.full((4 << 20,), float(value)))
        assert p[-1].item() == value


def test_a_module_that_is_moved_to_where_it_is_is_not_written(pager):
    model = pager.page_module(nn.Linear(300, 300))
    writes = [p._storage.run.writes for p in model.parameters()]
    model.to("cpu").float()
    assert [p._storage.run.writes for p in model.parameters()] == writes
