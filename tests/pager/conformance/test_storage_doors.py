"""Doors that have crashed the interpreter: each test runs in a process of its own."""

import pytest

from .doors import in_process
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


def test_untyped_storage_is_empty_or_right():
    body = """
storage = p.untyped_storage()
same = storage.nbytes() == x.nbytes and bytes(storage.tolist()) == x.numpy().tobytes()
answer("right" if storage.nbytes() == 0 or same else "wrong")
"""
    assert in_process(body) in ("right", "refused")


def test_typed_storage_is_empty_or_right():
    body = """
storage = p.storage()
answer("right" if len(storage) == 0 or storage.tolist() == x.flatten().tolist() else "wrong")
"""
    assert in_process(body) in ("right", "refused")


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
got = {take}
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
from torch import nn
results = []
for paged in (False, True):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 2))
    if paged:
        pager.page_module(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend={backend!r})
    for _ in range(2):
        result = compiled(torch.ones(3, 64))
        result.square().sum().backward()
    gradients = [p.grad for p in model.parameters()]
    results.append([result.detach(), *(g.to_dense() if paged else g for g in gradients)])
answer("right" if all(a.equal(b) for a, b in zip(*results)) else "wrong")
"""
    assert in_process(body, lane) == "right"
