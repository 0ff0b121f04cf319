"""One pager for all conformance tests of a worker, replaced when a test has failed with it."""

from collections.abc import Iterator

import pytest
import torch

import tensorpager as tp

from .worlds import PAGE_BYTES

FAILED = pytest.StashKey[bool]()


class _Shared:
    """Holds the pager in use, so that a failed test can hand a fresh one to the next. ``open``: has
    it as long as it stays open between tests."""

    def __init__(self, open: list[tp.Pager]) -> None:
        self.pager: tp.Pager | None = None
        self.open = open

    def get(self) -> tp.Pager:
        if self.pager is None:
            self.pager = tp.Pager(
                policy="lru",
                device_budget="176MiB",
                host_budget="256MiB",
                page_size=PAGE_BYTES,
                dense_reserve="128MiB",
                device="cpu",
            )
            self.open.append(self.pager)
        return self.pager

    def drop(self) -> None:
        if self.pager is not None:
            self.open.remove(self.pager)
            self.pager.close()
            self.pager = None


@pytest.fixture(scope="package")
def shared_pager(shared_pagers: list[tp.Pager]) -> Iterator[_Shared]:
    shared = _Shared(shared_pagers)
    yield shared
    shared.drop()


@pytest.fixture
def pager(shared_pager: _Shared, request: pytest.FixtureRequest) -> Iterator[tp.Pager]:
    yield shared_pager.get()
    if request.node.stash.get(FAILED, False):
        shared_pager.drop()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    report = yield
    if report.when == "call":
        item.stash[FAILED] = report.failed
    return report


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Bit equality assumes one number of threads; one suits small samples."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
