"""A host slot that a kernel has yet to read is not filled again, nor given back.

With the accelerator's own order of work on fake streams, where a kernel runs as late as it may.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import tensorpager as tp
from tensorpager.pager.streaming import host_rows
from tensorpager.pager.streaming.slabs import page_set, pages_of

from .fake_streams import FakeAccelerator, Streams, streams  # noqa: F401
from .models import PAGE_BYTES
from .tables import ROWS, WIDTH, paged_table, tight, write_table
from .test_embedding import scramble
from .test_host_rows import first_rows, look_up

PAGES = -(-ROWS * WIDTH * 4 // PAGE_BYTES)


@pytest.fixture
def late(streams: Streams, monkeypatch: pytest.MonkeyPatch, one_thread: None) -> Streams:  # noqa: F811
    """Kernels that read host slots are deferred; they read what is less than half a page."""
    monkeypatch.setattr(host_rows, "most_bytes_of", lambda pager, row_bytes: PAGE_BYTES // 2)
    fetch = host_rows.fetch_blocks
    monkeypatch.setattr(
        host_rows, "fetch_blocks", lambda blocks: streams.defer(lambda: fetch(blocks))
    )
    return streams


def backend_of(pager: tp.Pager) -> FakeAccelerator:
    assert isinstance(pager.backend, FakeAccelerator)
    return pager.backend


def slots_of(table: tp.PagedTensor) -> set[int]:
    """Addresses of the table's host slots."""
    pager, run = table.pager, table._storage.run
    slots = pager.table.host[run.first : run.first + run.count]
    return {pager.host.view(slot, 1).ctypes.data for slot in slots.tolist() if slot >= 0}


def by_faults(table: tp.PagedTensor, values: torch.Tensor) -> None:
    """Write page after page; each that comes makes another one leave, to a slot that is free."""
    pager, source = table.pager, values.view(-1).view(torch.uint8)
    for page in range(PAGES):
        part = source[page * PAGE_BYTES : (page + 1) * PAGE_BYTES]
        with page_set(pager, pages_of(table, [page], write=True)) as frames:
            start = int(frames[0]) * PAGE_BYTES
            pager.residency.arena[start : start + len(part)].copy_(part)


WRITES: dict[str, Callable[[tp.PagedTensor, torch.Tensor], None]] = {
    "fault": by_faults,
    "planned": write_table,  # in slabs: used pages leave by the channels of planned moves
}


def write_over_what_is_read(late: Streams, way: str) -> bool:
    """Look rows up, then write the whole table before the kernel has run; whether the lookup gave
    what it should."""
    dense = torch.randn(ROWS, WIDTH)
    with tight(policy="lp", host_budget=(PAGES + 1) * PAGE_BYTES) as pager:
        table = paged_table(pager, dense)
        scramble(pager)
        read, backend = slots_of(table), backend_of(pager)
        assert len(read) == PAGES
        indices = first_rows(range(PAGES - 1))
        out = look_up(table, indices)
        assert len(late.pending) == 1
        for written in backend.written.values():
            written.clear()
        WRITES[way](table, torch.zeros_like(dense))
        assert len(backend.written[way] & read) > PAGES // 2, "no slot was used again"
        late.run_before(late.compute)
        return torch.equal(out, dense[indices])


@pytest.mark.parametrize("way", WRITES)
def test_slots_wait_for_the_kernel_that_reads_them(
    late: Streams,
    way: str,
) -> None:
    assert write_over_what_is_read(late, way)


@pytest.mark.parametrize("way", WRITES)
def test_that_would_be_noticed(late: Streams, way: str) -> None:
    late.forgetful = True
    assert not write_over_what_is_read(late, way)


@pytest.mark.parametrize("end", ["grow", "close"])
def test_host_memory_is_not_given_back_under_a_kernel(late: Streams, end: str) -> None:
    """Growing gives none back, so nobody waits for the kernel there."""
    dense = torch.randn(ROWS, WIDTH)
    indices = first_rows(range(PAGES - 1))
    with tight() as pager:
        table = paged_table(pager, dense)
        scramble(pager)
        out = look_up(table, indices)
        assert len(late.pending) == 1
        if end == "grow":
            pager.grow(host_budget="128MiB")
            assert len(late.pending) == 1
    assert not late.pending
    assert torch.equal(out, dense[indices])
