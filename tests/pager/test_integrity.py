"""A page that comes back wrong is never used, and it is said whose it is and where it was."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import tensorpager as tp
from tensorpager.pager.debug.check import check_invariants
from tensorpager.pager.disk.integrity import Stamps, page_sums

from .faulty_engine import break_disk
from .models import PAGE_BYTES, make_pager, mlp

NAME = "2.weight"


@pytest.fixture
def pager(tmp_path: Path) -> Iterator[tp.Pager]:
    with make_pager(host_budget=0, disk_budget="8MiB", disk_path=tmp_path) as pager:
        yield pager


@pytest.fixture
def weight(pager: tp.Pager) -> tp.PagedTensor:
    """A parameter of four pages that has been on the disk and is written to now, whole."""
    model = pager.page_module(mlp())
    pager.keeps_alive = model  # type: ignore[attr-defined]
    weight = model[2].weight
    assert isinstance(weight, tp.PagedTensor)
    evict(pager, weight)
    rewrite(weight)
    return weight


def rewrite(tensor: tp.PagedTensor) -> None:
    with torch.no_grad():
        tensor.copy_(torch.randn(tensor.shape))


def evict(pager: tp.Pager, tensor: tp.PagedTensor) -> None:
    with pager.core.quiet():
        pager.core.residency.evict_run(tensor._storage.run)
    assert tensor.residency()["device"] == 0


def assert_names(error: tp.CorruptPage, tier: str = "disk") -> None:
    assert error.tier == tier
    assert error.slot >= 0
    assert f"of 4 of {NAME!r}" in str(error.tensor)
    for part in (NAME, f"slot {error.slot} ", f"{tier} tier", "was not used", "checkpoint"):
        assert part in str(error), part
    assert "\n" not in str(error)


# What a drive may do


@pytest.mark.parametrize("damage", ["flip", "torn", "lost"])
def test_a_write_that_goes_wrong(pager: tp.Pager, weight: tp.PagedTensor, damage: str) -> None:
    engine = break_disk(pager)
    # All four pages go in one write; a torn one ends in the middle of page 3.
    evict_one_by_one = damage == "torn"
    engine.damage = [damage]
    if evict_one_by_one:
        run = weight._storage.run
        with pager.core.quiet():
            pager.core.residency.evict_pages(np.array([run.first]))
    evict(pager, weight)
    assert engine.happened[damage] == 1
    with pytest.raises(tp.CorruptPage, match="checksum differs") as caught:
        weight.to_dense()
    assert_names(caught.value)
    check_invariants(pager.core)


def test_a_read_that_goes_astray(pager: tp.Pager, weight: tp.PagedTensor) -> None:
    expected = weight.to_dense()
    engine = break_disk(pager)
    evict(pager, weight)
    engine.astray_bytes = PAGE_BYTES
    with pytest.raises(tp.CorruptPage, match="checksum differs") as caught:
        weight.to_dense()
    assert_names(caught.value)
    engine.astray_bytes = 0  # the page itself is as good as ever
    assert torch.equal(weight.to_dense(), expected)


def test_a_bit_that_flips_on_the_way_is_read_again(pager: tp.Pager, weight: tp.PagedTensor) -> None:
    expected = weight.to_dense()
    engine = break_disk(pager)
    evict(pager, weight)
    engine.flipped_reads = 1
    assert torch.equal(weight.to_dense(), expected)
    assert pager.stats()["io_retries"] == 1


# What the page table may have wrong


def test_a_page_table_that_is_wrong(pager: tp.Pager, weight: tp.PagedTensor) -> None:
    """Two books say whose page a slot holds. Where they differ nothing is read."""
    evict(pager, weight)
    expected = weight.to_dense()
    evict(pager, weight)
    table, first = pager.core.table, weight._storage.run.first
    table.disk[[first, first + 1]] = table.disk[[first + 1, first]]
    with pytest.raises(tp.CorruptPage, match=r"page 2 of 4 .* wants .* of page 1 of 4") as caught:
        weight.to_dense()
    assert_names(caught.value)
    table.disk[[first, first + 1]] = table.disk[[first + 1, first]]
    table.version[first + 2] += 1
    with pytest.raises(tp.CorruptPage, match=r"is version .* wants version") as caught:
        weight.to_dense()
    assert_names(caught.value)
    with pytest.raises(AssertionError, match="another version"):
        check_invariants(pager.core)
    table.version[first + 2] -= 1
    assert torch.equal(weight.to_dense(), expected)


# Host memory


@pytest.mark.parametrize("kind", ["a bit", "a part", "an older version", "another page"])
def test_host_memory_that_changes(kind: str) -> None:
    with make_pager(verify=True) as pager:
        model = pager.page_module(mlp())
        weight = model[2].weight
        host = pager.core.host
        evict(pager, weight)
        slot = int(pager.core.table.host[weight._storage.run.first])
        old = host.view(slot, 1).copy()
        rewrite(weight)
        expected = weight.to_dense()
        evict(pager, weight)
        assert int(pager.core.table.host[weight._storage.run.first]) == slot
        good = host.view(slot, 1).copy()
        bad = {"an older version": old, "another page": host.view(slot + 1, 1)}.get(kind, good)
        bad = bad.copy()
        if kind == "a bit":
            bad[12345] ^= 2
        elif kind == "a part":
            bad[PAGE_BYTES // 2 :] = old[PAGE_BYTES // 2 :]
        host.view(slot, 1)[:] = bad
        with pytest.raises(tp.CorruptPage, match="checksum differs") as caught:
            weight.to_dense()
        assert_names(caught.value, "host")
        host.view(slot, 1)[:] = good
        assert torch.equal(weight.to_dense(), expected)


# Stamps by themselves


def random_page(seed: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, 4096, dtype=np.uint8)


def stamped(stamps: Stamps, slot: int, page: int, version: int, seed: int) -> None:
    slots = np.array([slot])
    stamps.claim(slots, np.array([page]), np.array([version]))
    stamps.begin(slots)
    stamps.wrote(slots, page_sums(random_page(seed).reshape(1, -1)))


def test_a_slot_that_was_never_written() -> None:
    stamps = Stamps(4, "disk", "/somewhere")
    stamped(stamps, 2, 7, 1, seed=0)
    with pytest.raises(tp.CorruptPage, match="never written") as caught:
        stamps.sums(np.array([2, 3]))
    assert (caught.value.tensor, caught.value.slot) == (None, 3)


def test_a_write_that_failed_leaves_no_stamp() -> None:
    stamps = Stamps(2, "disk", "/somewhere")
    stamped(stamps, 0, 7, 1, seed=0)
    stamps.begin(np.array([0]))
    with pytest.raises(tp.CorruptPage, match="never written"):
        stamps.sums(np.array([0]))


def test_more_slots() -> None:
    stamps = Stamps(2, "disk", "/somewhere")
    stamped(stamps, 1, 7, 3, seed=0)
    stamps.resize(5)
    stamped(stamps, 4, 8, 1, seed=1)
    stamps.expect(np.array([1, 4]), np.array([7, 8]), np.array([3, 1]))
    assert len(stamps.sums(np.array([1, 4]))) == 2


def test_versions_count_contents(pager: tp.Pager, weight: tp.PagedTensor) -> None:
    """All copies of a page are of one version; a write makes another."""
    page = weight._storage.run.first
    version = int(pager.core.table.version[page])
    evict(pager, weight)
    weight.to_dense()
    assert pager.core.table.version[page] == version
    rewrite(weight)
    assert pager.core.table.version[page] > version
