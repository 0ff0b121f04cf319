"""What the kit for NVIDIA GPUs asks of CUDA."""

import ctypes
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

import tensorpager as tp
from tensorpager.pager.devices.accelerator import Accelerator
from tensorpager.pager.devices.choice import make_device
from tensorpager.pager.devices.cuda_memory import CudaMemory, has_batches
from tensorpager.pager.devices.device import PLANNED, Bytes, Copy

MIB = 1 << 20
Counted = Callable[[Callable[[], object]], dict[str, int]]
SetLimit = Callable[[ctypes.c_size_t], object]
NO_LIMIT = ctypes.c_size_t(-1)

pytestmark = pytest.mark.gpu(values=False)


@pytest.fixture
def kit() -> Iterator[CudaMemory]:
    kit = CudaMemory(torch.device("cuda:0"), 16 * MIB, 8 * MIB)
    yield kit
    kit.close()


@pytest.fixture
def most_registered() -> Iterator[SetLimit]:
    """A function that limits the bytes of one registration of host memory."""
    limit = ctypes.CDLL(None).fakecuda_most_registered
    yield limit
    limit(NO_LIMIT)


def test_memory_that_cannot_be_page_locked_harms_no_later_call(
    most_registered: SetLimit,
) -> None:
    most_registered(ctypes.c_size_t(16 * MIB))
    with pytest.raises(tp.PagerError, match=r"page-locking .* bytes .* lower host_budget"):
        tp.Pager("64MiB", host_budget="64MiB", device="cuda")
    torch.zeros(1, device="cuda").add_(1)  # a launch asks CUDA for errors
    most_registered(NO_LIMIT)
    with tp.Pager("64MiB", host_budget="64MiB", device="cuda") as pager:
        assert pager.core.host.capacity_bytes == 64 * MIB


@pytest.mark.parametrize("where", ["cuda", "cpu"])
def test_any_thread_fills_the_arena_from_any_memory(kit: CudaMemory, where: str) -> None:
    source = torch.from_numpy(np.arange(64, dtype=np.uint8)).to(where)
    before = kit.arena[:MIB].cpu()

    def in_a_thread(offset: int) -> None:
        kit.fill(offset, source.untyped_storage(), 16, 32)

    in_a_thread(4096)
    thread = threading.Thread(target=in_a_thread, args=(8192,))
    thread.start()
    thread.join()
    for offset in (4096, 8192):
        before[offset : offset + 32] = torch.arange(16, 48, dtype=torch.uint8)
    assert torch.equal(kit.arena[:MIB].cpu(), before)


def test_any_thread_may_page_lock(kit: CudaMemory) -> None:
    memory = np.zeros(MIB, np.uint8)
    done: list[bool] = []

    def in_a_thread() -> None:
        kit.register_host(memory)
        done.append(torch.from_numpy(memory).is_pinned())
        kit.unregister_host(memory)
        done.append(torch.from_numpy(memory).is_pinned())

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
    assert done == [True, False]


def every_second_frame(host: Bytes) -> list[Copy]:
    """Every second MiB of the arena beside every MiB of ``host``."""
    return [Copy(2 * i * MIB, host[i * MIB : (i + 1) * MIB]) for i in range(len(host) // MIB)]


@pytest.mark.parametrize("batches", [True, False])
def test_copies_of_one_call_are_one_call_of_the_driver(batches: bool, counted: Counted) -> None:
    device = make_device(torch.device("cuda:1"), 16 * MIB, 16 * MIB)
    assert isinstance(device, Accelerator)
    assert device.batches_copies
    device.batches_copies = batches
    (memory,) = device.host_memory(8 * MIB)
    before = np.arange(8 * MIB, dtype=np.uint8)
    memory.bytes[:] = before
    copies = every_second_frame(memory.bytes)

    def both_ways() -> None:
        device.wait(device.copy(copies, PLANNED, (), to_device=True))
        memory.bytes[:] = 0
        device.wait(device.copy(copies, PLANNED, device.mark(), to_device=False))

    found = counted(both_ways)
    assert np.array_equal(memory.bytes, before)
    assert found["pageable_copies"] == 0
    assert found["copied_bytes"] == 2 * 8 * MIB
    calls = {name: found[name] for name in ("batches", "batched_copies", "copies")}
    expected = {"batches": 2, "batched_copies": 16, "copies": 0}
    assert calls == (expected if batches else {"batches": 0, "batched_copies": 0, "copies": 16})
    memory.give_back()
    device.close()


def test_no_copies_are_no_call(counted: Counted) -> None:
    device = make_device(torch.device("cuda:1"), 4 * MIB, 4 * MIB)
    found = counted(lambda: device.wait(device.copy([], PLANNED, (), to_device=True)))
    assert found["batches"] == found["copies"] == 0
    device.close()


def test_a_run_slides_by_copies_of_as_many_pages_as_it_goes(counted: Counted) -> None:
    device = make_device(torch.device("cuda:1"), 32 * MIB, 32 * MIB)
    for distance, pages, copies in ((1, 11, 11), (5, 6, 2)):
        found = counted(lambda: device.slide(distance, 0, pages, 2 * MIB))  # noqa: B023
        assert (found["launches"], found["copies"]) == (0, copies)
    device.close()


@pytest.mark.parametrize(
    ("version", "bindings", "expected"),
    [(13000, 13050, True), (13020, 12090, True), (12080, 12080, True), (12060, 12090, False),
     (12090, 13000, False)],
)  # fmt: skip
def test_batches_need_a_driver_that_the_bindings_can_ask(
    version: int, bindings: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cuda.bindings import driver

    monkeypatch.setattr(driver, "CUDA_VERSION", bindings)
    monkeypatch.setattr(driver, "cuDriverGetVersion", lambda: (driver.CUresult(0), version))
    has_batches.cache_clear()
    assert has_batches() is expected
    lacking = CudaMemory.lacking(torch.device("cuda:0"))
    assert lacking == ([] if expected else [lacking[0]])
    assert expected or "12.8" in lacking[0]
    monkeypatch.undo()
    has_batches.cache_clear()
