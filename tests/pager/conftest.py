"""Pagers under three kinds of pressure, and the comparison of a plain run with a paged one."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
import torch._dynamo  # the first optimizer loads it; here, so that collecting garbage skips it

import tensorpager as tp
from tensorpager.pager.debug.chaos import chaos
from tensorpager.pager.devices import cpu
from tensorpager.pager.devices.dense_allocator import DenseAllocator, load, why_not
from tensorpager.pager.plan import op_log

from .disk_suite import small_tasks, tier  # noqa: F401  (fixtures of the disk tier's tests)
from .models import (
    FRAMES,
    Script,
    World,
    beside_a_model,
    compare_runs,
    know_that_all_fits,
    make_pager,
)

LANES = ("tight", "chaos", "fits", "open")
ROOMY_LANES = ("fits", "open")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Bit equality assumes one number of threads; one suits small models."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def allocator() -> DenseAllocator:
    """Our allocator; skips where it cannot be had."""
    found = load()
    if found is None:
        pytest.skip(f"no allocator of our own: {why_not()}")
    return found


@pytest.fixture
def no_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine where our allocator cannot be built."""
    monkeypatch.setattr(cpu, "load", lambda: None)
    for module in (op_log, cpu):
        monkeypatch.setattr(module, "loaded", lambda: None)


@pytest.fixture(
    params=[
        lane if lane == "chaos" else pytest.param(lane, marks=pytest.mark.slow) for lane in LANES
    ]
)
def lane(request: pytest.FixtureRequest) -> str:
    """``tight``: far more live pages than frames. ``chaos``: as tight, and after each op all that
    is not pinned is evicted and its frames are poisoned. ``fits``: nothing has to move. ``open``:
    this is known before the first iteration, and so weights are open in it."""
    return request.param


@contextmanager
def _pager_in(lane: str, **options: Any) -> Iterator[tp.Pager]:
    with make_pager(fits=lane in ROOMY_LANES, **options) as pager, ExitStack() as stack:
        if lane == "chaos":
            stack.enter_context(chaos(pager.core))
        if lane == "open":
            know_that_all_fits(pager)
        yield pager


@pytest.fixture
def lane_pager(lane: str, one_thread: None) -> Iterator[tp.Pager]:
    with _pager_in(lane) as pager:
        yield pager


@pytest.fixture
def tight_pager(one_thread: None) -> Iterator[tp.Pager]:
    with make_pager() as pager:
        yield pager


@pytest.fixture
def same(lane: str, one_thread: None) -> Callable[..., None]:
    """``same(script)``: run it plain and paged; all that it returns has the same bits.

    ``frames``: of the arena, where one op takes more than the default. ``pressed``: the
    script has too few tensors to fill the arena, so a model trains beside it and presses them out.
    """

    def check(script: Script, *, frames: int = FRAMES, pressed: bool = False) -> None:
        with _pager_in(lane, frames=frames) as pager:
            compare_runs(
                beside_a_model(script) if pressed else script,
                World(pager),
                must_move=lane not in ROOMY_LANES,
            )

    return check
