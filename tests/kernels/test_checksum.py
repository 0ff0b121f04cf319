"""page_checksums: one value on every implementation, and what it must never overlook."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from address_checker import checked_addresses
from page_suite import KIB, MIB, Backend, Guarded, distant_frame

from tensorpager.kernels import checksum
from tensorpager.kernels.checksum import page_checksums, page_checksums_reference

PAGE = 4 * KIB
WORDS = PAGE // 4
ALL_ONES = 0xFFFFFFFF
KNOWN_SUMS = [2234611973801, 2195455898059, 2217308409165]


def _checksum(page: bytes) -> int:
    """The definition in the module's docstring, one word at a time."""
    total = 0
    for i in range(len(page) // 4):
        word = int.from_bytes(page[4 * i : 4 * i + 4], "little")
        place = i * 0x9E3779B1
        x = (word ^ place) & ALL_ONES
        x = ((x ^ x >> 16) * 0x85EBCA6B + place) & ALL_ONES
        x = ((x ^ x >> 13) * 0xC2B2AE35) & ALL_ONES
        total += x ^ x >> 16
    return total


def _run(backend: Backend, arena: torch.Tensor, frames: torch.Tensor, page_bytes: int) -> list[int]:
    """Sums by this implementation, which may touch only the frames' bytes and its own."""
    if backend.name == "reference":
        return page_checksums_reference(arena, frames, page_bytes).tolist()
    if backend.name != "interpreter":
        return page_checksums(arena, frames, page_bytes).tolist()
    pages = [arena[f * page_bytes : (f + 1) * page_bytes] for f in frames.tolist()]
    launch = checksum.launch

    def checked(kernel, programs, arena, frames, sums, *rest, **named) -> None:
        with checked_addresses([frames, *pages], [sums]):
            launch(kernel, programs, arena, frames, sums, *rest, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checksum, "launch", checked)
        return page_checksums(arena, frames, page_bytes).tolist()


def _sums(pages: Sequence[bytes]) -> list[int]:
    """Sums of whole pages, by the reference: the kernel gives the same (tested below)."""
    arena = torch.frombuffer(bytearray(b"".join(pages)), dtype=torch.uint8)
    frames = torch.arange(len(pages), dtype=torch.int32)
    return page_checksums_reference(arena, frames, len(pages[0])).tolist()


@pytest.mark.parametrize("frames", [(), (3,), (1, 4, 7), (0, 1, 2, 8), (2, 1, 0)], ids=str)
@pytest.mark.parametrize("page_bytes", [PAGE, 2 * PAGE, 64 * KIB])
def test_sums_are_those_of_the_definition(
    backend: Backend, page_bytes: int, frames: tuple[int, ...]
) -> None:
    arena = Guarded((max(frames, default=0) + 2) * page_bytes, backend)
    before = arena.bytes()
    got = _run(backend, arena.tensor, backend.frames(frames), page_bytes)
    assert got == [_checksum(before[f * page_bytes : (f + 1) * page_bytes]) for f in frames]
    arena.assert_is(before)


def test_known_sums(backend: Backend) -> None:
    """Sums of a page are the same in every version: zeros, ones, and every byte in turn."""
    pages = [bytes(PAGE), b"\xff" * PAGE, bytes(range(256)) * (PAGE // 256)]
    arena = torch.frombuffer(bytearray(b"".join(pages)), dtype=torch.uint8).to(backend.device)
    got = _run(backend, arena, backend.frames([0, 1, 2]), PAGE)
    assert got == KNOWN_SUMS


def test_a_frame_may_appear_twice(backend: Backend) -> None:
    arena = Guarded(4 * PAGE, backend).tensor
    arena[2 * PAGE : 3 * PAGE] = arena[:PAGE]
    sums = _run(backend, arena, backend.frames([0, 2, 0, 1]), PAGE)
    assert sums[0] == sums[1] == sums[2] != sums[3]


def test_distant_frame(backend: Backend) -> None:
    arena, frame = distant_frame(backend, MIB // 16)
    page = arena[frame * MIB // 16 :][: MIB // 16]
    page[-1] = 77
    got = _run(backend, arena, backend.frames([frame]), MIB // 16)
    assert got == _sums([bytes(page.cpu().numpy())])


def _random_page(seed: int, dtype: str = "u4") -> np.ndarray:
    random = np.random.default_rng(seed)
    if dtype == "f4":
        return random.standard_normal(WORDS, dtype=np.float32).view(np.uint32)
    return random.integers(0, 2**32, WORDS, dtype=np.uint32)


PAGES = {
    "random": _random_page(1),
    "weights": _random_page(2, "f4"),
    "zeros": np.zeros(WORDS, np.uint32),
    "ones": np.full(WORDS, 0x3F800000, np.uint32),
    "counting": np.arange(WORDS, dtype=np.uint32),
    "sparse": np.where(_random_page(3) % 16 == 0, _random_page(4), 0).astype(np.uint32),
}
pages = pytest.mark.parametrize("name", PAGES)


def _all_differ(words: np.ndarray, damaged: np.ndarray) -> bool:
    """Whether every damaged page [n, WORDS] that is another page has another sum."""
    other = (damaged != words).any(1)
    sums = np.array(_sums([words.tobytes(), *(page.tobytes() for page in damaged)]))
    assert other.any()
    return bool((sums[1:][other] != sums[0]).all())


@pytest.mark.parametrize("name", ["random", pytest.param("zeros", marks=pytest.mark.slow)])
def test_any_flipped_bit_changes_the_sum(name: str) -> None:
    """All 32,768 of them."""
    words = PAGES[name]
    for first in range(0, WORDS, 64):
        damaged = np.repeat(words[None], 64 * 32, 0)
        bits = np.arange(64 * 32)
        damaged[bits, first + bits // 32] ^= np.uint32(1) << (bits % 32).astype(np.uint32)
        assert _all_differ(words, damaged)


def test_a_flipped_bit_changes_the_sum_everywhere(backend: Backend) -> None:
    for page_bytes in (PAGE, 64 * KIB):
        memory = Guarded(page_bytes, backend).tensor
        frames = backend.frames([0])
        clean = _run(backend, memory, frames, page_bytes)
        for byte in (0, 3, page_bytes // 2 - 1, page_bytes // 2, page_bytes - 1):
            memory[byte] ^= 1 << byte % 8
            assert _run(backend, memory, frames, page_bytes) != clean
            memory[byte] ^= 1 << byte % 8
        assert _run(backend, memory, frames, page_bytes) == clean


@pages
def test_words_that_changed_places_change_the_sum(name: str) -> None:
    """2,000 pairs; of two equal words nothing changes."""
    words = PAGES[name]
    random = np.random.default_rng(5)
    damaged = np.repeat(words[None], 2000, 0)
    at, to = random.integers(0, WORDS, (2, 2000))
    each = np.arange(2000)
    damaged[each, at], damaged[each, to] = words[to], words[at]
    if name in ("zeros", "ones"):  # one word is another, and its place is lost
        damaged[each, at] = 0xDEADBEEF
        moved = np.repeat(words[None], 2000, 0)
        moved[each, (at + 1 + to % (WORDS - 1)) % WORDS] = 0xDEADBEEF
        sums = np.array(_sums([page.tobytes() for page in [*damaged, *moved]])).reshape(2, -1)
        assert (sums[0] != sums[1]).all()
    else:
        assert _all_differ(words, damaged)


@pages
def test_blocks_that_changed_places_change_the_sum(name: str) -> None:
    """Halves, and blocks of every power of two from 8 bytes on, each with its neighbour."""
    words = PAGES[name].copy()
    words[7] ^= 0x10  # of equal blocks nothing changes
    damaged = [words.reshape(-1, 2, 1 << k)[:, ::-1].ravel() for k in range(10)]
    damaged += [np.roll(words, shift) for shift in (1, 2, 3, 16, 512, -1)]
    damaged += [words[::-1]]
    assert _all_differ(words, np.stack(damaged))


@pages
def test_a_lost_tail_or_sector_changes_the_sum(name: str) -> None:
    words = PAGES[name]
    damaged = []
    for start in range(0, WORDS, 16):
        tail, sector, ones = words.copy(), words.copy(), words.copy()
        tail[start:] = 0
        sector[start : start + 128] = 0
        ones[start : start + 128] = ALL_ONES
        damaged += [tail, sector, ones]
    assert _all_differ(words, np.stack(damaged))


@pytest.mark.slow
@pages
def test_damage_of_a_few_words_changes_the_sum(name: str) -> None:
    """49,000 pages with 2 to 8 words that are others."""
    words = PAGES[name]
    random = np.random.default_rng(9)
    for count in range(2, 9):
        damaged = np.repeat(words[None], 7000, 0)
        at = random.integers(0, WORDS, (7000, count))
        damaged[np.arange(7000)[:, None], at] = random.integers(0, 2**32, at.shape)
        assert _all_differ(words, damaged)
