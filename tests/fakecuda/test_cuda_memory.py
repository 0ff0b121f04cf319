"""What the kit for NVIDIA GPUs asks of CUDA."""

import ctypes
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

import tensorpager as tp
from tensorpager.pager.devices.cuda_memory import CudaMemory

MIB = 1 << 20
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
        assert pager.host.capacity_bytes == 64 * MIB


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
