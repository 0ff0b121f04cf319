"""Pages that are not what was written are found, and misuse is our own bug."""

import os

import numpy as np
import pytest

from tensorpager.pager.disk.file import aligned_bytes
from tensorpager.pager.disk.tier import DiskTier
from tensorpager.pager.errors import CorruptPage

from .disk_suite import PAGE, SLOTS, random_pages, unaligned


@pytest.mark.parametrize("aligned", [True, False])
def test_a_changed_byte_is_found(tier: DiskTier, small_tasks: None, aligned: bool) -> None:
    pages = random_pages(10)
    tier.write([(20, pages)])
    damaged = pages[7 * PAGE : 8 * PAGE].copy()
    damaged[1234] ^= 1
    block = aligned_bytes(PAGE)
    block[:] = damaged
    assert os.pwrite(tier.fileno(), block, 27 * PAGE) == PAGE
    back = aligned_bytes(pages.nbytes) if aligned else unaligned(pages)
    with pytest.raises(CorruptPage, match=rf"slot 27 .*'{tier.directory}'.*checkpoint"):
        tier.read([(20, back)])
    tier.read([(20, back[: 7 * PAGE]), (28, back[8 * PAGE :])])
    np.testing.assert_array_equal(back[: 7 * PAGE], pages[: 7 * PAGE])


def test_a_page_in_the_wrong_slot_is_found(tier: DiskTier) -> None:
    pages = random_pages(2)
    tier.write([(0, pages)])
    assert os.pwrite(tier.fileno(), pages[:PAGE], PAGE) == PAGE
    with pytest.raises(CorruptPage, match="slot 1 "):
        tier.read([(0, aligned_bytes(2 * PAGE))])


def test_a_slot_never_written(tier: DiskTier) -> None:
    tier.write([(0, random_pages(2))])
    back = random_pages(3, seed=1)
    with pytest.raises(CorruptPage, match=r"slot 2 .*never written"):
        tier.read([(0, back)])
    np.testing.assert_array_equal(back, random_pages(3, seed=1))


@pytest.mark.parametrize("slot", [-1, SLOTS - 1, SLOTS])
def test_slots_outside_are_our_bug(tier: DiskTier, slot: int) -> None:
    with pytest.raises(AssertionError):
        tier.write([(slot, random_pages(2))])
    with pytest.raises(AssertionError):
        tier.read([(slot, random_pages(2))])


def test_writing_a_slot_twice_in_a_batch_is_our_bug(tier: DiskTier) -> None:
    with pytest.raises(AssertionError, match="twice"):
        tier.write([(0, random_pages(3)), (2, random_pages(1))])


def test_arrays_that_are_not_pages_are_our_bug(tier: DiskTier) -> None:
    with pytest.raises(AssertionError, match="bytes for slot 3"):
        tier.write([(3, np.zeros(PAGE + 1, np.uint8))])
    with pytest.raises(AssertionError, match="scattered"):
        tier.write([(3, np.zeros(2 * PAGE, np.uint8)[::2])])
