"""The runtime on CUDA: that it runs, what it allocates, and what it asks of CUDA per step."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

import tensorpager as tp

Counted = Callable[[Callable[[], object]], dict[str, int]]
MIB = 1 << 20
ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.gpu(values=False)


def used(index: int) -> int:
    torch.cuda.synchronize(index)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(index)
    return total - free


def stepper(pager: tp.Pager | None, device: str = "cuda") -> Callable[[], object]:
    """A function that trains one step: 8 weights of 4 MiB, as many gradients, two states each."""
    model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(8)]).to(device)
    if pager is not None:
        pager.page_module(model)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters())
    if pager is not None:
        optimizer = pager.optimizer(optimizer)
    x = torch.zeros(64, 1024, device=device)

    def step() -> None:
        with nullcontext() if pager is None else pager.iteration():
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    return step


def test_the_first_program_for_a_gpu_runs_to_its_end() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "gpu_smoke.py")]
    environment = {**os.environ, "FAKECUDA_ZEROS": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("ok, ") == 6


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:1"])
def test_memory_is_that_of_the_named_device_and_given_back(device: str) -> None:
    index = torch.device(device).index or 0
    stepper(None, device)()  # what libraries keep
    before = [used(0), used(1)]
    budget = 256 * MIB
    with tp.Pager(budget, host_budget="256MiB", device=device, policy="lru") as pager:
        step = stepper(pager, device)
        for _ in range(3):
            step()
        taken = [used(number) - was for number, was in enumerate(before)]
        assert taken[1 - index] == 0
        assert 0 < taken[index] <= budget
        assert pager.stats()["peak_bytes"]["device"] <= budget
        assert torch.cuda.current_device() == 0
        del step
    assert [used(0), used(1)] == before


def test_what_was_there_before_is_no_part_of_the_need() -> None:
    """PyTorch keeps all of the 4 GiB, since 8 MiB of them are in use."""
    large = torch.empty(4 << 30, dtype=torch.uint8, device="cuda")
    del large
    small = torch.zeros(2 * MIB, device="cuda")
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() > 4 << 30
    with tp.Pager("128MiB", host_budget="256MiB", device="cuda", policy="lru") as pager:
        step = stepper(pager)
        for _ in range(3):
            step()
        assert pager.stats()["faults"] > 0
    del small


def test_a_plan_is_followed_on_a_device_that_is_not_current(tmp_path: Path) -> None:
    stepper(None, "cuda:1")()
    others = used(0)
    lower = {"host_budget": "64MiB", "disk_budget": "256MiB", "disk_path": str(tmp_path)}
    with tp.Pager("96MiB", device="cuda:1", **lower) as pager:
        step = stepper(pager, "cuda:1")
        for _ in range(20):
            step()
            pager.plan(wait=True)
            if pager.stats()["mode"] == "planned":
                break
        step()
        stats = pager.stats()
        assert stats["mode"] == "planned"
        assert stats["disk_bytes_written"] > 0
        assert torch.cuda.current_device() == 0
        assert used(0) == others


def test_where_all_fits_a_step_waits_for_nothing(counted: Counted) -> None:
    plain = stepper(None)
    for _ in range(3):
        plain()
    expected = counted(plain)
    with tp.Pager("1GiB", device="cuda") as pager:
        paged = stepper(pager)
        for _ in range(4):
            paged()
        assert pager.stats()["fits"]
        found = counted(paged)
    for what in ("pageable_copies", "synchronizations", "mallocs", "maps"):
        assert found[what] == expected[what] == 0, (what, found, expected)
    assert found["launches"] <= expected["launches"] + 2, (found, expected)
    # Addresses of gradients and the numbers of a step; the optimizer's other tables stay there.
    assert found["copies"] <= expected["copies"] + 4, (found, expected)


def test_a_step_that_pages_makes_no_pageable_copy(counted: Counted) -> None:
    with tp.Pager("96MiB", host_budget="256MiB", device="cuda", policy="lru") as pager:
        step = stepper(pager)
        for _ in range(4):
            step()
        found = counted(step)
        assert pager.stats()["faults"] > 0
    assert found["pageable_copies"] == 0, found
    assert found["copied_bytes"] > 64 * MIB
    assert found["mallocs"] == found["maps"] == 0, found


def test_the_calls_per_step_are_measured(tmp_path: Path) -> None:
    target = tmp_path / "host.json"
    command = [sys.executable, str(ROOT / "scripts" / "bench_host_path.py"), "--json", str(target)]
    more = ["--preset", "10m", "--tokens", "512", "--steps", "2", "--mode", "fits"]
    subprocess.run([*command, *more], check=True)
    cases = json.loads(target.read_text())["cases"]["10m"]
    assert set(cases) == {"plain", "fits"}
    for case in cases.values():
        assert case["median"]["launches"] > 50
        assert case["median"]["pageable_copies"] == case["median"]["synchronizations"] == 0
        assert 0 < case["floor_ms"] < case["median"]["cpu_ms"]
    assert cases["fits"]["pager"]["fits"]
