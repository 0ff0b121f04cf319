"""The simulated device itself: what it lets pass, and what it finds."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from .device import NAME, SCHEDULES, Machine, on

pytestmark = pytest.mark.simulated
N = 1 << 15
MIB = 1 << 20
schedules = pytest.mark.parametrize("schedule", SCHEDULES)


def locked(value: float) -> torch.Tensor:
    return torch.full((N,), value).pin_memory()


# -- each of these is right with its wait, and wrong without --------------------------------------
def upload_then_use(machine: Machine, waits: bool) -> bool:
    host, x = locked(3), torch.zeros(N, device=NAME)
    torch.accelerator.synchronize()
    copies, compute = torch.Stream(NAME), torch.accelerator.current_stream()
    with on(copies):
        x.copy_(host, non_blocking=True)
    if waits:
        compute.wait_stream(copies)
    return torch.equal((x * 2).cpu(), host * 2)


def download_then_use(machine: Machine, waits: bool) -> bool:
    x, host = torch.zeros(N, device=NAME), locked(0)
    torch.accelerator.synchronize()
    out, done = torch.Stream(NAME), torch.Event(NAME)
    x.add_(1)
    done.record()
    if waits:
        out.wait_event(done)
    with on(out):
        host.copy_(x, non_blocking=True)
    out.synchronize()
    return bool((host == 1).all())


def reuse_a_frame(machine: Machine, waits: bool) -> bool:
    x, out_of, into = torch.full((N,), 7.0, device=NAME), locked(0), locked(9)
    torch.accelerator.synchronize()
    outward, inward = torch.Stream(NAME), torch.Stream(NAME)
    with on(outward):
        out_of.copy_(x, non_blocking=True)
    if waits:
        inward.wait_stream(outward)
    with on(inward):
        x.copy_(into, non_blocking=True)
    inward.synchronize()
    outward.synchronize()
    return bool((out_of == 7).all())


def host_reads(machine: Machine, waits: bool) -> bool:
    host = locked(0)
    host.copy_(torch.full((N,), 7.0, device=NAME), non_blocking=True)
    if waits:
        torch.accelerator.current_stream().synchronize()
    machine.touch(host.data_ptr(), host.nbytes, write=False)
    return bool((host == 7).all())


def host_writes(machine: Machine, waits: bool) -> bool:
    host, x = locked(7), torch.zeros(N, device=NAME)
    torch.accelerator.synchronize()
    x.copy_(host, non_blocking=True)
    if waits:
        torch.accelerator.current_stream().synchronize()
    machine.touch(host.data_ptr(), host.nbytes, write=True)
    host.fill_(8)
    return bool((x.cpu() == 7).all())


def event_before_the_work(machine: Machine, waits: bool) -> bool:
    """The wait is there, but for an event of too early."""
    x, host = torch.zeros(N, device=NAME), locked(0)
    torch.accelerator.synchronize()
    out, done = torch.Stream(NAME), torch.Event(NAME)
    if not waits:
        done.record()
    x.add_(1)
    if waits:
        done.record()
    out.wait_event(done)
    with on(out):
        host.copy_(x, non_blocking=True)
    out.synchronize()
    return bool((host == 1).all())


def free_while_in_use(machine: Machine, waits: bool) -> bool:
    host, x = locked(0), torch.full((N,), 5.0, device=NAME)
    other, compute = torch.Stream(NAME), torch.accelerator.current_stream()
    other.wait_stream(compute)
    with on(other):
        host.copy_(x, non_blocking=True)
    if waits:
        x.record_stream(other)
    del x
    y = torch.full((N,), 6.0, device=NAME)
    compute.synchronize()
    other.synchronize()
    return bool((host == 5).all()) and bool((y == 6).all())


def unlock_while_in_use(machine: Machine, waits: bool) -> bool:
    host, x = torch.full((N,), 4.0), torch.zeros(N, device=NAME)
    machine.lock_pages(host.data_ptr(), host.nbytes)
    torch.accelerator.synchronize()
    x.copy_(host, non_blocking=True)
    if waits:
        torch.accelerator.synchronize()
    machine.unlock_pages(host.data_ptr())
    return bool((x.cpu() == 4).all())


Case = Callable[[Machine, bool], bool]
CASES = (
    upload_then_use,
    download_then_use,
    reuse_a_frame,
    host_reads,
    host_writes,
    event_before_the_work,
    free_while_in_use,
    unlock_while_in_use,
)
cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)


@cases
@schedules
def test_a_missing_wait_is_a_race_under_every_schedule(
    machine: Machine, case: Case, schedule: str
) -> None:
    for seed in range(3):
        machine.schedule(schedule, seed)
        case(machine, False)
        assert machine.races()


@cases
@schedules
def test_waits_that_are_there_give_no_alarm(machine: Machine, case: Case, schedule: str) -> None:
    for seed in range(3):
        machine.schedule(schedule, seed)
        assert case(machine, True)
        assert not machine.races()


@pytest.mark.parametrize(
    "case", [upload_then_use, event_before_the_work, host_reads], ids=lambda case: case.__name__
)
def test_a_missing_wait_gives_wrong_bytes_where_work_is_late(machine: Machine, case: Case) -> None:
    assert not case(machine, False)


def train(device: str) -> tuple[list[float], list[torch.Tensor]]:
    torch.manual_seed(0)
    net = nn.Sequential(
        *(nn.Embedding(32, 48), nn.Linear(48, 96), nn.GELU(), nn.LayerNorm(96), nn.Linear(96, 32))
    ).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=False)
    losses = []
    for _ in range(3):
        tokens = torch.randint(0, 32, (4, 17)).to(device)
        loss = F.cross_entropy(net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [parameter.detach().cpu() for parameter in net.parameters()]


@schedules
def test_a_training_has_the_cpus_bits_and_no_race(machine: Machine, schedule: str) -> None:
    machine.schedule(schedule, 1)
    before = machine.counts()
    losses, parameters = train(NAME)
    after = machine.counts()
    assert not machine.races()
    assert after.queued - before.queued > 100
    assert after.waited == before.waited  # everything was queued
    expected, theirs = train("cpu")
    assert losses == expected
    assert all(map(torch.equal, parameters, theirs))


def test_work_runs_as_late_as_its_order_permits(machine: Machine) -> None:
    x = torch.zeros(N, device=NAME)
    before = machine.counts().executed
    x.add_(1)
    event = torch.Event(NAME)
    event.record()
    y = x * 2
    assert machine.counts().executed == before
    event.synchronize()
    middle = machine.counts().executed
    assert middle > before
    assert y.sum().item() == 2 * N
    assert machine.counts().executed > middle


# -- copies ---------------------------------------------------------------------------------------
def behind_queued_work(copy: Callable[[torch.Tensor], object], machine: Machine) -> bool:
    """Whether the host had to wait for work that was queued before the copy."""
    x = torch.zeros(N, device=NAME)
    torch.accelerator.synchronize()
    x.add_(1)
    before = machine.counts().executed
    copy(x)
    return machine.counts().executed > before


def test_page_locked_copies_do_not_block(machine: Machine) -> None:
    host = locked(0)
    before = machine.counts().pageable
    assert not behind_queued_work(lambda x: x.copy_(host, non_blocking=True), machine)
    assert not behind_queued_work(lambda x: host.copy_(x, non_blocking=True), machine)
    registered = torch.zeros(2 * N)[:N]
    machine.lock_pages(registered.data_ptr(), registered.nbytes)
    assert not behind_queued_work(lambda x: x.copy_(registered, non_blocking=True), machine)
    machine.schedule("lazy")
    machine.unlock_pages(registered.data_ptr())
    assert machine.counts().pageable == before
    assert behind_queued_work(lambda x: host.copy_(x), machine)  # non_blocking=False


def test_pageable_copies_block(machine: Machine) -> None:
    host = torch.zeros(N)  # 128 KiB
    before = machine.counts().pageable
    assert behind_queued_work(lambda x: x.copy_(host, non_blocking=True), machine)
    assert behind_queued_work(lambda x: host.copy_(x, non_blocking=True), machine)
    assert behind_queued_work(lambda x: host[:4].copy_(x[:4], non_blocking=True), machine)
    assert not behind_queued_work(lambda x: x[:64].copy_(host[:64], non_blocking=True), machine)
    assert machine.counts().pageable == before + 4


def test_a_staged_copy_takes_the_bytes_of_when_it_was_called(machine: Machine) -> None:
    host, x = torch.full((64,), 3.0), torch.zeros(64, device=NAME)
    x.copy_(host, non_blocking=True)
    host.fill_(4)
    assert bool((x == 3).all())


def test_page_locked_memory_is_kept_until_its_copies_are_done(machine: Machine) -> None:
    x = torch.zeros(N, device=NAME)
    torch.accelerator.synchronize()
    torch.zeros(1).pin_memory()  # what others gave back is gone now
    before = machine.page_locked_bytes()
    host = locked(6)
    assert host.is_pinned()
    x.copy_(host, non_blocking=True)
    del host
    assert machine.page_locked_bytes() >= before + 4 * N
    assert bool((x == 6).all())
    torch.zeros(1).pin_memory()
    assert machine.page_locked_bytes() == before


def test_a_copy_that_is_told_to_fail_does(machine: Machine) -> None:
    x, host = torch.ones(4, device=NAME), torch.zeros(4)
    machine.fail_copy(1)
    host.copy_(x)
    with pytest.raises(RuntimeError, match="told to fail"):
        host.copy_(x)
    assert host.copy_(x).sum() == 4


# -- memory ---------------------------------------------------------------------------------------
def statistic(name: str, what: str = "current") -> int:
    return int(torch.accelerator.memory_stats()[f"{name}.all.{what}"])


@pytest.fixture
def empty(machine: Machine) -> None:
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()


@pytest.mark.usefixtures("empty")
def test_blocks_are_split_and_joined() -> None:
    allocated, reserved = statistic("allocated_bytes"), statistic("reserved_bytes")
    small = [torch.empty(100, dtype=torch.uint8, device=NAME) for _ in range(4)]
    assert statistic("allocated_bytes") == allocated + 4 * 512
    assert statistic("reserved_bytes") <= reserved + 2 * MIB
    places = [tensor.data_ptr() for tensor in small]
    assert all(place % 512 == 0 for place in places)
    large = [torch.empty(2 * MIB, dtype=torch.uint8, device=NAME) for _ in range(3)]
    assert statistic("reserved_bytes") <= reserved + 22 * MIB
    assert large[1].data_ptr() == large[0].data_ptr() + 2 * MIB
    first = large[0].data_ptr()
    del large
    joined = torch.empty(6 * MIB, dtype=torch.uint8, device=NAME)
    assert joined.data_ptr() == first
    assert torch.accelerator.max_memory_allocated() == allocated + 4 * 512 + 6 * MIB
    del small, joined
    assert statistic("allocated_bytes") == allocated
    torch.accelerator.empty_cache()
    assert statistic("reserved_bytes") == reserved


@pytest.mark.usefixtures("empty")
def test_memory_is_reused_at_once_on_its_stream_and_later_on_others() -> None:
    other = torch.Stream(NAME)
    x = torch.empty(MIB, device=NAME)
    place = x.data_ptr()
    del x
    with on(other):
        theirs = torch.empty(MIB, device=NAME)
    assert theirs.data_ptr() != place
    y = torch.empty(MIB, device=NAME)
    assert y.data_ptr() == place
    with on(other):
        y.add_(1)
    y.record_stream(other)
    active = statistic("active_bytes")
    del y
    assert statistic("active_bytes") == active  # held until `other` has come so far
    assert torch.empty(MIB, device=NAME).data_ptr() != place
    other.synchronize()
    assert torch.empty(MIB, device=NAME).data_ptr() == place


@pytest.mark.usefixtures("empty")
def test_a_limit_empties_the_cache_before_it_refuses(machine: Machine) -> None:
    reserved = statistic("reserved_bytes")
    machine.limit(reserved + 40 * MIB)
    torch.empty(24 * MIB, dtype=torch.uint8, device=NAME)  # only cached
    kept = torch.empty(36 * MIB, dtype=torch.uint8, device=NAME)
    assert kept.nbytes == 36 * MIB
    assert torch.accelerator.memory_stats()["num_alloc_retries"] > 0
    with pytest.raises(torch.OutOfMemoryError, match="simdev is out of memory"):
        torch.empty(24 * MIB, dtype=torch.uint8, device=NAME)


def test_an_allocation_that_is_told_to_fail_does(machine: Machine) -> None:
    machine.fail_allocation(0)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(4, device=NAME)
    torch.empty(4, device=NAME)


@pytest.mark.usefixtures("empty")
def test_the_devices_memory_has_an_end(machine: Machine) -> None:
    free, total = torch.accelerator.get_memory_info()
    assert 0 < free <= total
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(total + 1, dtype=torch.uint8, device=NAME)


STRAY = """
import ctypes, torch
from {package}.device import simulated
simulated()
x = torch.ones(4, device="queued")
torch.accelerator.synchronize()
print(hex(x.data_ptr()), flush=True)
ctypes.string_at(x.data_ptr(), 4)
"""


def test_the_host_cannot_touch_device_memory(machine: Machine) -> None:
    """A child that does ends, and says which address it was."""
    tests = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", STRAY.format(package="simdev")],
        env={**os.environ, "PYTHONPATH": f"{tests}{os.pathsep}{tests.parent}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == -signal.SIGSEGV
    assert f"the host touched device address {done.stdout.strip()}" in done.stderr


# -- errors and other work ------------------------------------------------------------------------
def test_what_fails_in_queued_work_is_raised_where_somebody_waits(machine: Machine) -> None:
    table, rows = torch.zeros(4, 2, device=NAME), torch.tensor([9], device=NAME)
    picked = table[rows]  # the CPU's kernel looks at the index when it runs
    with pytest.raises(IndexError, match="out of"):
        picked.cpu()
    torch.accelerator.synchronize()


def test_work_in_python_is_queued_too(machine: Machine) -> None:
    x = torch.zeros(4, device=NAME)
    done = []
    machine.queue("note", lambda: done.append(True))
    assert not done
    assert x.sum().item() == 0
    assert done


def test_threads_that_wait_do_not_keep_python_from_working(machine: Machine) -> None:
    """Work in Python needs Python's lock, which who waits for it gives up."""
    machine.schedule("threads", 0)
    done = []
    for _ in range(20):
        machine.queue("note", lambda: done.append(True))
        torch.accelerator.current_stream().synchronize()
    assert len(done) == 20


def test_events_measure_time(machine: Machine) -> None:
    began, ended = (torch.Event(NAME, enable_timing=True) for _ in range(2))
    began.record()
    torch.zeros(N, device=NAME).add_(1)
    ended.record()
    ended.synchronize()
    assert 0 < began.elapsed_time(ended) < 60_000
