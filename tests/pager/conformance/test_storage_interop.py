"""Doors that have crashed the interpreter: each test runs in a process of its own."""

import copy
import itertools

import pytest
import torch

from .interop import in_process
from .lanes import CHAOS, PLAIN

LANES = pytest.mark.parametrize("lane", [PLAIN, CHAOS], ids=lambda lane: lane.name)


@pytest.mark.parametrize(
    "take",
    [
        "torch.from_dlpack(p)",
        "torch.from_dlpack(p[1:3])",
        "torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(p))",
        "torch.utils.dlpack.from_dlpack(p.__dlpack__())",
        "torch.from_numpy(numpy.from_dlpack(p).copy())",
    ],
)
def test_dlpack(take):
    expected = "x[1:3]" if "[1:3]" in take else "x"
    body = f"got = {take}\np.zero_()\nanswer('right' if got.equal({expected}) else 'wrong')"
    assert in_process(body) in ("right", "refused")


def test_data_ptr():
    body = """
address = p.data_ptr()
memory = ctypes.string_at(address, x.nbytes) if address else b""
answer("right" if memory == x.numpy().tobytes() else "wrong")
"""
    assert in_process(body) in ("right", "refused")


READS = (
    "s[0]",
    "s[1:3]",
    "s.tolist()",
    "list(s)",
    "bytes(s)",
    "s.clone()",
    "s.float()",
    "s.cpu()",
    "s.to(device='cpu')",
    "s.pin_memory()",
    "s.share_memory_()",
    "s.fill_(0)",
    "s.resize_(8)",
    "s.copy_(x.untyped_storage())",
    "s.__setitem__(0, 1)",
    "copy.copy(s)",
    "copy.deepcopy(s)",
    "torch.save(s, io.BytesIO())",
    "torch.save(s, io.BytesIO(), _use_new_zipfile_serialization=False)",
    "pickle.dumps(s)",
    "type(s)(8)",
)
BELOW = (  # PyTorch's own words, from below Python
    "memoryview(s)",
    "torch.frombuffer(s, dtype=torch.uint8)",
    "torch.empty(0).set_(s)",
    "torch.UntypedStorage(s.nbytes()).copy_(s)",
)


@pytest.mark.parametrize("storage", ["p.untyped_storage()", "p.storage()"])
def test_nobody_reads_the_memory_of_a_storage(storage):
    body = f"""
import io, pickle, warnings
warnings.simplefilter("ignore", UserWarning)
s = {storage}
wrong = []
for read in {READS!r} + {BELOW!r}:
    try:
        eval(read)
        wrong.append(read)
    except Exception as error:
        if read in {READS!r} and "in pages" not in str(error):
            wrong.append((read, str(error)))
answer("right" if not wrong else str(wrong))
"""
    assert in_process(body) == "right"


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_storages_compare_as_plain_ones(tight_pager):
    pager = tight_pager
    plain = torch.randn(300, 200)
    paged, small = pager.page(plain), pager.page(torch.ones(3))
    one, other = paged.untyped_storage(), small.untyped_storage()
    assert one.nbytes() == paged.storage().nbytes() == plain.nbytes
    assert other.nbytes() == 12
    assert len(paged.storage()) == plain.numel()
    assert isinstance(one, torch.UntypedStorage)
    assert one.device == plain.device
    assert not one.is_shared()
    for alias in (paged.detach(), paged.view(-1)[5:], paged.t(), paged.data):
        assert alias.untyped_storage().data_ptr() == one.data_ptr()
        assert alias.storage().data_ptr() == one.data_ptr()
        assert alias.untyped_storage()._cdata == one._cdata
    assert paged.is_set_to(paged.detach())
    assert not paged.is_set_to(paged.view(-1))
    places = [(one.data_ptr(), plain.nbytes), (other.data_ptr(), 12)]
    places.append((plain.data_ptr(), plain.nbytes))
    places.append((pager.core.backend.address, pager.core.reach_bytes))
    places.sort()
    for (start, nbytes), (following, _) in itertools.pairwise(places):
        assert start + nbytes <= following
    assert pager.page(torch.empty(0, 3)).untyped_storage().nbytes() == 0
    assert copy.deepcopy(paged).untyped_storage().data_ptr() != one.data_ptr()


def test_storage_that_grows(tight_pager):
    paged = tight_pager.page(torch.arange(4.0))
    before = paged.untyped_storage()
    paged.resize_(2000)
    assert paged.untyped_storage().nbytes() == 8000
    assert before.nbytes() == 16


@pytest.mark.parametrize(
    "take",
    [
        "p.set_(torch.ones(3))",
        "p.set_(torch.ones(3).untyped_storage())",
        "torch.empty(0).set_(p)",
        "torch.empty(0).set_(p.untyped_storage())",
        "p.set_()",
    ],
)
def test_set_(take):
    """Right only if both then share memory, which a paged and a plain tensor cannot."""
    body = f"""
try:
    got = {take}
except RuntimeError as error:
    if "storage on different device" not in str(error):  # PyTorch's own words
        raise
    answer("refused")
    raise SystemExit
if "set_()" in {take!r}:
    right = got is p and got.numel() == 0 and (p + 1).numel() == 0
elif got.numel():
    right = got is not p and got.add_(1).flatten().equal(p.to_dense().flatten())
else:
    right = p.untyped_storage().nbytes() == 0
answer("right" if right else "wrong")
"""
    assert in_process(body) in ("right", "refused")


def test_data_of_a_plain_tensor_set_to_a_paged_one():
    body = """
plain = torch.zeros_like(x)
try:
    plain.data = p
    answer("right" if (plain + 0).equal(x) else "wrong")
except RuntimeError as error:
    if "incompatible tensor type" not in str(error):
        raise
    answer("refused")
"""
    assert in_process(body) in ("right", "refused")


def test_share_memory_is_refused():
    body = """
assert not p.is_shared()
p.share_memory_()
answer("not refused")
"""
    assert in_process(body) == "refused"


def test_set_to_another_paged_tensor():
    body = """
q = pager.page(x[:2] + 1)
p.set_(q)
p.mul_(2)
answer("right" if all(t.to_dense().equal((x[:2] + 1) * 2) for t in (p, q)) else "wrong")
"""
    assert in_process(body) in ("right", "refused")


@LANES
def test_deepcopy_of_a_module(lane):
    body = """
model = pager.page_module(torch.nn.Linear(30, 20))
inputs = torch.randn(4, 30)
expected = model(inputs).detach()
twin = copy.deepcopy(model)
with torch.no_grad():
    model.weight.zero_()
right = twin(inputs).equal(expected) and not model.weight.to_dense().any()
model(inputs).sum().backward()
right = right and twin.weight.grad is None
answer("right" if right else "wrong")
"""
    assert in_process(body, lane) in ("right", "refused")


@pytest.mark.parametrize(
    ("backend", "lane"),
    [
        pytest.param("eager", CHAOS, marks=pytest.mark.slow),
        pytest.param("aot_eager", PLAIN, marks=pytest.mark.slow),
        ("aot_eager", CHAOS),
    ],
    ids=["eager-chaos", "aot_eager-plain", "aot_eager-chaos"],
)
def test_compiled_module_with_paged_parameters(backend, lane):
    body = f"""
from contextlib import nullcontext
from torch import nn
results = []
for paged in (False, True):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 300), nn.GELU(), nn.LayerNorm(300), nn.Linear(300, 2))
    if paged:
        pager.page_module(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend={backend!r})
    for _ in range(2):
        with pager.iteration() if paged else nullcontext():
            result = compiled(torch.ones(40, 64))
            result.square().sum().backward()
    gradients = [p.grad for p in model.parameters()]
    results.append([result.detach(), *(g.to_dense() if paged else g for g in gradients)])
answer("right" if all(a.equal(b) for a, b in zip(*results)) else "wrong")
"""
    assert in_process(body, lane) == "right"
