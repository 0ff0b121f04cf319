"""The runtime on a GPU: the same training as on dense tensors, inside a cap that CUDA counts.

Run where there is a GPU (``scripts/gpu_check.py`` does); skipped elsewhere.
"""

from collections.abc import Iterator
from contextlib import ExitStack, nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tensorpager as tp
from tensorpager.pager.debug.chaos import chaos, scattered
from tensorpager.pager.debug.check import check_invariants

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MIB = 1 << 20


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(256, 1024), *(nn.Linear(1024, 1024) for _ in range(8))]
    layers = [step for layer in layers for step in (layer, nn.GELU(), nn.LayerNorm(1024))]
    return nn.Sequential(*layers, nn.Linear(1024, 16)).cuda()


def train(pager: tp.Pager | None, steps: int = 4) -> tuple[list[float], list[torch.Tensor]]:
    net = model()
    if pager is not None:
        pager.page_module(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, foreach=False)
    if pager is not None:
        pager.optimizer(optimizer)
    generator = torch.Generator("cuda").manual_seed(1)
    losses = []
    for _ in range(steps):
        x = torch.randn(512, 256, generator=generator, device="cuda")
        y = torch.randint(0, 16, (512,), generator=generator, device="cuda")
        with nullcontext() if pager is None else pager.iteration():
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        if pager is not None:
            check_invariants(pager.core)
    # On the CPU: copies on the device would not fit below the cap that the pager has set.
    return losses, [p.detach().cpu() for p in net.parameters()]


@pytest.mark.parametrize("lane", ["tight", "disk", "chaos", "scattered", "fits"])
def test_same_bits_as_dense(lane: str, tmp_path) -> None:  # type: ignore[no-untyped-def]
    expected = train(None)
    budget = {"fits": "2GiB", "chaos": "512MiB"}.get(lane, "128MiB")
    lower = {"host_budget": "512MiB"}
    if lane == "disk":
        lower = {"host_budget": "8MiB", "disk_budget": "512MiB", "disk_path": str(tmp_path)}
    with tp.Pager(budget, device="cuda", page_size="2MiB", **lower) as pager, ExitStack() as stack:
        if lane in ("chaos", "scattered"):
            stack.enter_context({"chaos": chaos, "scattered": scattered}[lane](pager.core))
        losses, parameters = train(pager)
        stats = pager.stats()
    assert losses == expected[0]
    assert all(torch.equal(a, b) for a, b in zip(parameters, expected[1]))
    if lane in ("tight", "disk"):
        assert stats["faults"] > 0
        assert stats["peak_bytes"]["device"] <= stats["budget_bytes"]["device"]


def test_the_arena_gives_memory_back() -> None:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    pager = tp.Pager("1GiB", device="cuda", dense_reserve="64MiB")
    taken = before - torch.cuda.mem_get_info()[0]
    assert 900 * MIB <= taken <= 1024 * MIB
    pager.core.residency.resize(32)
    assert before - torch.cuda.mem_get_info()[0] <= 72 * MIB
    pager.close()
    assert before - torch.cuda.mem_get_info()[0] <= 8 * MIB


def test_pages_survive_many_overlapping_moves() -> None:
    """Evictions and faults queued back to back with compute: no copy may overtake another."""
    with tp.Pager("64MiB", host_budget="1GiB", device="cuda", dense_reserve="24MiB") as pager:
        twins = [torch.randn(1 << 20, device="cuda") for _ in range(60)]
        paged = [pager.page(t) for t in twins]
        for round_ in range(5):
            for tensor, twin in zip(paged, twins):
                tensor.mul_(1.5).add_(round_)
                twin.mul_(1.5).add_(round_)
        assert all(torch.equal(p.cpu(), t.cpu()) for p, t in zip(paged, twins))
        check_invariants(pager.core)
