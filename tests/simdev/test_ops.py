"""Ops on pages on the simulated device, with all pages evicted and poisoned after each."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo
from torch.utils._pytree import tree_leaves, tree_map

import tensorpager as tp
from tensorpager.pager.debug.chaos import chaos, scattered
from tensorpager.pager.debug.check import check_invariants

from ..pager.conformance.left_out import OTHER_ORDER
from .device import NAME, Machine
from .trainings import PAGE_BYTES, nothing_is_left

pytestmark = [
    pytest.mark.simulated,
    pytest.mark.usefixtures("kernels"),
    pytest.mark.filterwarnings("ignore"),
]
SAMPLES = 2
NAMES = """
add addcmul addmm argmax baddbmm bmm cat clamp clone cumsum diagonal einsum exp expand flatten
gather index_add index_copy index_select linalg.vector_norm log_softmax masked_fill matmul mean mm
mul narrow nn.functional.cross_entropy nn.functional.embedding
nn.functional.gelu nn.functional.group_norm nn.functional.layer_norm nn.functional.linear
nn.functional.mse_loss nn.functional.scaled_dot_product_attention nn.functional.silu outer permute
prod repeat reshape roll scatter_add select sigmoid softmax sort split sqrt squeeze stack std sub
sum t tanh topk transpose tril unbind unfold unsqueeze var view where
"""
OPS = [op for op in op_db if op.name in NAMES.split() and not op.variant_test_name]


@pytest.fixture
def pager() -> Iterator[tp.Pager]:
    limits: dict[str, Any] = {"device_budget": (48 << 20) + 64 * PAGE_BYTES, "host_budget": "32MiB"}
    limits |= {"dense_reserve": 48 << 20, "page_size": PAGE_BYTES, "device": NAME, "policy": "lru"}
    with tp.Pager(**limits) as pager:
        yield pager


def results(op: OpInfo, sample: Any, page: Callable[[torch.Tensor], torch.Tensor]) -> list[Any]:
    """What the op returns, and the gradients of its inputs, on the host."""

    def put(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        paged = page(value.detach())
        return paged.requires_grad_() if value.requires_grad else paged

    given, args, kwargs = tree_map(put, (sample.input, sample.args, sample.kwargs))
    found = op(given, *args, **kwargs)
    outs = [out for out in tree_leaves(found) if isinstance(out, torch.Tensor)]
    inputs = [x for x in tree_leaves((given, args, kwargs)) if isinstance(x, torch.Tensor)]
    inputs = [x for x in inputs if x.requires_grad]
    graded = [out.sum() for out in outs if out.requires_grad]
    if graded and inputs:
        outs += [g for g in torch.autograd.grad(graded, inputs, allow_unused=True) if g is not None]
    dense = [out.to_dense() if isinstance(out, tp.PagedTensor) else out for out in outs]
    return [out.detach().cpu() for out in dense]


class Subclass(torch.Tensor):
    """A plain tensor for which PyTorch's backward formulas choose as for all that have a class."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C._DisableTorchDispatch():
            return func(*args, **(kwargs or {}))


def plain(op: OpInfo) -> Callable[[torch.Tensor], torch.Tensor]:
    """What pages are compared with. The gradient of a product is found by a division where the
    operand is of no subclass, and without one where it is: that is all of the difference."""
    if op.name in OTHER_ORDER:
        return lambda tensor: torch.Tensor._make_subclass(Subclass, tensor.clone())
    return torch.clone


def test_the_list_names_ops() -> None:
    assert {op.name for op in OPS} == set(NAMES.split())


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_an_op_has_the_bits_of_plain_tensors(machine: Machine, pager: tp.Pager, op: OpInfo) -> None:
    torch.manual_seed(0)
    grad = op.supports_autograd
    samples = op.sample_inputs(NAME, torch.float32, requires_grad=grad)
    tried = 0
    for sample, _ in zip(samples, range(SAMPLES)):
        expected = results(op, sample, plain(op))
        with chaos(pager.core):
            found = results(op, sample, pager.page)
        check_invariants(pager.core)
        assert len(found) == len(expected)
        for mine, theirs in zip(found, expected):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)
        tried += 1
    assert tried
    assert not machine.races()


# -- ops that run on pages, with frames that are nowhere consecutive -------------------------------
NUMEL = 4 * PAGE_BYTES // 4 - 100


Sums = list[tuple[torch.Tensor, torch.Tensor]]
"""Numbers, and what the bound of their error is in proportion to."""


def elementwise(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, Sums]:
    return x.mul_(0.5).add_(y, alpha=2).addcdiv_(y, y.abs() + 1, value=-1), []


def reductions(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, Sums]:
    sums = [(x.sum(), x.abs().sum())]
    sums += [(norm, norm) for norm in (y.norm(), torch.linalg.vector_norm(y, 1))]
    return x.abs().max(), sums


def copies(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, Sums]:
    x.copy_(y)
    y.zero_()
    x[10:-10].fill_(3)
    return x + y, []


def norms(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, Sums]:
    total = torch.nn.utils.get_total_norm([x, y])
    torch._foreach_mul_([x, y], 0.25)
    return torch.cat([x, y]), [(total, total)]


@pytest.mark.parametrize("schedule", ["lazy", "random"])
@pytest.mark.parametrize(
    "script", [elementwise, reductions, copies, norms], ids=lambda script: script.__name__
)
def test_page_ops(machine: Machine, pager: tp.Pager, script: Any, schedule: str) -> None:
    """The bits of plain tensors; sums, which go page by page, within 48 units
    of float32's 2^-24."""
    machine.schedule(schedule, 1)
    x, y = torch.randn(2, NUMEL, generator=torch.Generator().manual_seed(1)).to(NAME)
    with nothing_is_left(machine):
        expected = script(x.clone(), y.clone())[0].cpu()
        exact = [(a.item(), b.item()) for a, b in script(x.double(), y.double())[1]]
        with scattered(pager.core), chaos(pager.core):
            found, sums = script(pager.page(x), pager.page(y))
            found = found.to_dense() if isinstance(found, tp.PagedTensor) else found
        found, values = found.cpu(), [value.item() for value, _ in sums]
        del sums
        assert not machine.races()
    assert torch.equal(found, expected)
    for value, (true, scale) in zip(values, exact, strict=True):
        assert abs(value - true) <= 48 * 2**-24 * scale
