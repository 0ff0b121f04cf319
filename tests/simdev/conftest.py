"""The simulated device, for each test with nothing queued, no races found, and nothing to fail."""

from collections.abc import Iterator

import pytest
import torch

from tensorpager.pager.devices.allocator_build import NotBuiltError

from .device import Machine, simulated
from .references import queue_references


@pytest.fixture(scope="session")
def built() -> Machine:
    try:
        return simulated()
    except NotBuiltError as error:
        pytest.skip(f"the simulated device is not built: {error}")


@pytest.fixture
def machine(built: Machine) -> Iterator[Machine]:
    built.schedule("lazy")
    yield built
    built.fail_copy(-1)
    built.fail_allocation(-1)
    built.limit(None)
    built.schedule("lazy")


@pytest.fixture(scope="session")
def kernels(built: Machine) -> Iterator[None]:
    """Page kernels are queued work."""
    with pytest.MonkeyPatch.context() as patch:
        queue_references(built, patch)
        yield


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Sums have one order, in the plain run and in threads of the device. For all tests at once:
    autograd's threads keep the number that holds when they start, and MKL has one for all."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
