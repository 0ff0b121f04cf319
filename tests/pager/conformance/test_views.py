"""Views of paged tensors: they share memory, survive eviction and follow in-place changes."""

import pytest
import torch

from .interop import raises_alike, right_or_refused, same, twins
from .lanes import CHAOS, LANES, PLAIN

pytestmark = pytest.mark.filterwarnings("ignore")

VIEWS = {
    "row": lambda t: t[2],
    "element": lambda t: t[4, 7],
    "slice": lambda t: t[1:4, ::3],
    "narrow": lambda t: t.narrow(1, 5_000, 3_000),
    "select": lambda t: t.select(1, 9_999),
    "t": lambda t: t.t(),
    "T": lambda t: t.T,
    "mT": lambda t: t.mT,
    "view": lambda t: t.view(-1),
    "view_dtype": lambda t: t.view(torch.int32),
    "view_wider": lambda t: t.view(-1)[:50_000].view(torch.float64),
    "reshape": lambda t: t.reshape(10_001, 5),
    "permute": lambda t: t.permute(1, 0),
    "unsqueeze": lambda t: t.unsqueeze(1),
    "squeeze": lambda t: t[:1].squeeze(0),
    "expand": lambda t: t[:1].expand(4, -1),
    "diagonal": lambda t: t.diagonal(),
    "unfold": lambda t: t.unfold(1, 100, 100),
    "as_strided": lambda t: t.as_strided((3, 3), (10_001, 2), 11),
    "unflatten": lambda t: t[:, :9_999].unflatten(1, (3, -1)),
    "detach": lambda t: t.detach(),
    "alias": lambda t: torch.ops.aten.alias(t),
    "chain": lambda t: t.t()[100:].unsqueeze(0).transpose(0, 2)[1:, :50],
    "split": lambda t: t.split(2)[1],
    "chunk": lambda t: t.chunk(3, dim=1)[2],
    "unbind": lambda t: t.unbind(0)[3],
    "tensor_split": lambda t: t.tensor_split([2, 4])[1],
    "hsplit": lambda t: t.hsplit([100, 5_000])[1],
    "real": lambda t: t.real,
    "view_as": lambda t: t.view_as(t),
    "movedim": lambda t: t.movedim(0, 1),
    "swapaxes": lambda t: t.swapaxes(0, 1),
    "data": lambda t: t.data,
}


@pytest.fixture(params=[PLAIN, CHAOS, LANES[-1]], ids=lambda lane: lane.name, autouse=True)
def lane(request, pager):
    with request.param.on(pager):
        yield request.param


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
class TestSharing:
    def test_writes_to_the_view_reach_the_base(self, pager, view):
        x, p = twins(pager)
        xv, pv = view(x), view(p)
        same(xv, pv)
        if xv.shape != (4, 10_001):  # expanded: more than one element in one place
            xv.copy_(xv + 1)
            pv.copy_(pv + 1)
        same([x, xv], [p, pv])

    def test_writes_to_the_base_reach_the_view(self, pager, view):
        x, p = twins(pager)
        xv, pv = view(x), view(p)
        x.mul_(2)
        p.mul_(2)
        same([x, xv], [p, pv])

    def test_view_outlives_its_base(self, pager, view):
        x, p = twins(pager)
        xv, pv = view(x), view(p)
        del x, p
        others = [pager.page(torch.ones(5, 10_001)) for _ in range(3)]
        same(xv, pv)
        assert all(other.eq(1).all() for other in others)


METADATA_CHANGES = {
    "t_": lambda t: t.t_(),
    "unsqueeze_": lambda t: t.unsqueeze_(1),
    "squeeze_": lambda t: t.unsqueeze_(0).squeeze_(),
    "squeeze_dim": lambda t: t.unsqueeze_(0).squeeze_(0),
    "transpose_": lambda t: t.transpose_(0, 1),
    "swapaxes_": lambda t: t.swapaxes_(0, 1),
    "swapdims_": lambda t: t.swapdims_(0, 1),
    "as_strided_": lambda t: t.as_strided_((3, 4), (2, 10), 5),
    "resize_same": lambda t: t.resize_(5, 10_001),
    "resize_shape": lambda t: t.resize_(10_001, 5),
    "resize_smaller": lambda t: t.resize_(3, 7),
    "resize_as_": lambda t: t.resize_as_(torch.empty(2, 9)),
}


@pytest.mark.parametrize("change", METADATA_CHANGES.values(), ids=METADATA_CHANGES)
class TestMetadataInPlace:
    def test_is_right_or_refused(self, pager, change):
        x, p = twins(pager)
        change(x)
        x.add_(1)
        same_object = []

        def act():
            same_object.append(change(p) is p)
            p.add_(1)
            return p

        if right_or_refused(x, act):
            assert same_object == [True]
            same(x * 2, p * 2)

    def test_of_a_view_leaves_the_base(self, pager, change):
        x, p = twins(pager)
        xv, pv = x.view(5, 10_001), p.view(5, 10_001)
        change(xv)
        xv.fill_(9)

        def act():
            change(pv)
            pv.fill_(9)
            return p, pv

        right_or_refused((x, xv), act)


def test_resize_larger_keeps_what_was_there(pager):
    x, p = twins(pager)

    def act():
        p.resize_(12, 10_001)
        return tuple(p.shape), p[:5]

    right_or_refused(((12, 10_001), x), act)


def test_as_strided_beyond_the_tensor_raises(pager):
    raises_alike(twins(pager), lambda t: t.as_strided((6, 10_001), (10_001, 1)))
    raises_alike(twins(pager), lambda t: t.as_strided((2,), (1,), 5 * 10_001 - 1))


RESHAPED_OUTPUTS = {
    "smaller": lambda t: torch.add(torch.ones(3), 1, out=t),
    "empty_before": lambda t: torch.add(torch.ones(3), 1, out=t.resize_(0)),
    "larger": lambda t: torch.add(torch.ones(9, 10_001), 1, out=t),
    "other_strides": lambda t: torch.mm(torch.ones(4, 3), torch.ones(3, 2), out=t),
    "folded": lambda t: torch.matmul(torch.ones(2, 5, 4), torch.ones(4, 3), out=t),
    "conjugated": lambda t: _solve_from_the_right(t),
    "broadcast_self": lambda t: (
        t.resize_(1).fill_(1).addbmm_(torch.ones(2, 3, 4), torch.ones(2, 4, 5))
    ),
}


def _solve_from_the_right(out: torch.Tensor) -> torch.Tensor:
    """A kernel that leaves its result transposed and lazily conjugated."""
    torch.manual_seed(0)
    factors = torch.linalg.lu_factor(torch.randn(3, 3, dtype=torch.complex64))
    right = torch.randn(2, 3, dtype=torch.complex64)
    return torch.linalg.lu_solve(*factors, right, left=False, out=out)


@pytest.mark.parametrize("write", RESHAPED_OUTPUTS.values(), ids=RESHAPED_OUTPUTS)
def test_ops_that_give_their_output_another_shape(pager, write):
    """PyTorch resizes ``out`` (with a warning), and the self of a few in-place ops."""
    x, p = twins(pager)
    if write is RESHAPED_OUTPUTS["conjugated"]:
        x, p = (torch.zeros(2, 3, dtype=torch.complex64) for _ in range(2))
        p = pager.page(p)
    write(x)
    right_or_refused(x, lambda: (write(p), p)[1])


def test_a_single_number_grows_into_a_matrix(pager):
    """Here ``addbmm_`` asks for memory that the tensor's pages do not have, after it has given the
    tensor its new shape."""
    torch.manual_seed(0)
    x, one, other = torch.randn(1), torch.randn(2, 5, 4), torch.randn(2, 4, 3)
    p = pager.page(x.clone())
    x.addbmm_(one, other)
    p.addbmm_(one, other)
    same(x, p)


def test_conjugation_inside_an_op(pager):
    """Kernels conjugate lazily, also on the dense tensors that an op makes inside."""
    torch.manual_seed(0)
    x, y = torch.randn(5, 3, dtype=torch.complex64), torch.randn(5, 2, dtype=torch.complex64)
    same(
        torch.linalg.lstsq(x, y, driver="gels").residuals,
        torch.linalg.lstsq(pager.page(x), pager.page(y), driver="gels").residuals,
    )
    same(x.mul(x.conj()), pager.page(x).mul(pager.page(x).conj()))
    same(x.conj().imag, pager.page(x).conj().imag)


SPLITS = {
    "unsafe_split": lambda t: t.unsafe_split(2),
    "unsafe_split_with_sizes": lambda t: t.unsafe_split_with_sizes([1, 4]),
    "unsafe_chunk": lambda t: t.unsafe_chunk(2, 1),
    "tensor_split": lambda t: t.tensor_split(torch.tensor([1, 3])),
    "tensor_split_count": lambda t: t.tensor_split(torch.tensor(3)),
    "split_copy": lambda t: torch.split_copy(t, 2),
    "unbind_copy": lambda t: torch.unbind_copy(t),
}


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
def test_splits_survive_eviction(pager, split):
    x, p = twins(pager)
    parts = split(p)
    reusing_freed_memory = [torch.full_like(x, torch.nan) for _ in range(8)]
    same(split(x), parts)
    assert len(reusing_freed_memory) == 8


def test_tensor_split_with_paged_indices(pager):
    x, p = twins(pager)
    for indices in (torch.tensor([1, 3]), torch.tensor(3)):
        same(x.tensor_split(indices), p.tensor_split(pager.page(indices)))
        same(x.tensor_split(indices), x.tensor_split(pager.page(indices)))


class TestIndexing:
    def test_reading(self, pager):
        x, p = twins(pager)
        rows, mask = torch.tensor([4, 0, 4]), x[:, 0] > 0
        columns = torch.arange(3)
        for index in (rows, mask, (rows, columns), (slice(1, 3), rows), (..., rows), None, x > 1):
            paged = torch.utils._pytree.tree_map_only(torch.Tensor, pager.page, index)
            same(x[index], p[index])
            same(x[index], p[paged])
            same(x[index], x[paged])

    def test_writing(self, pager):
        rows = torch.tensor([4, 0])
        for value in (5.0, torch.tensor(2.0), torch.ones(2, 10_001)):
            x, p = twins(pager)
            _, q = twins(pager)
            plain = x.clone()
            x[rows] = value
            p[rows] = value
            q[pager.page(rows)] = pager.page(torch.as_tensor(value))
            plain[pager.page(rows)] = pager.page(torch.as_tensor(value))
            same([x, x, x], [p, q, plain])

    def test_writing_by_mask_and_slice(self, pager):
        x, p = twins(pager)
        for t in (x, p):
            t[t > 1] = 0
            t[1:3, ::5] += 1
            t[0] = t[4]
            t[..., -1] *= 3
        same(x, p)
        x.index_put_((torch.tensor([1, 1]),), torch.tensor(1.0), accumulate=True)
        p.index_put_((pager.page(torch.tensor([1, 1])),), torch.tensor(1.0), accumulate=True)
        same(x, p)

    def test_augmented_assignment_keeps_the_object(self, pager):
        x, p = twins(pager)
        before = p
        p += 1
        p *= 2
        p -= pager.page(torch.ones(10_001))
        x += 1
        x *= 2
        x -= 1
        assert p is before
        same(x, p)

    def test_out_of_range(self, pager):
        raises_alike(twins(pager), lambda t: t[5])
        raises_alike(twins(pager), lambda t: t[torch.tensor([0, 5])])
