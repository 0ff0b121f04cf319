"""Room in one piece: what is in the way is moved inside the arena, and nothing else changes."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

import tensorpager as tp
from tensorpager.pager.debug.check import check_invariants
from tensorpager.pager.moves.compaction import find_window, make_way, rearrange
from tensorpager.pager.tensor.new_pages import empty_like_geometry
from tensorpager.pager.tensor.paged_tensor import PagedTensor

from .models import PAGE_BYTES, make_pager

FRAMES = 10


def laid_out(pager: tp.Pager, letters: str) -> dict[str, PagedTensor]:
    """A tensor for each letter, in consecutive frames where ``letters`` has it, filled with the
    letter's number; dots are free."""
    assert len(letters) == FRAMES
    tensors = {}
    for letter in sorted(set(letters) - {"."}):
        pages = letters.count(letter)
        blank = torch.empty(pages * PAGE_BYTES, dtype=torch.uint8, device="meta")
        tensor = empty_like_geometry(pager.core, blank, "user")
        with pager.core.lock:
            assert pager.core.residency.place_at(tensor._storage.run, letters.index(letter))
        tensor.fill_(ord(letter))
        tensors[letter] = tensor
    return tensors


def layout(pager: tp.Pager, tensors: dict[str, PagedTensor]) -> str:
    """The inverse of ``laid_out``."""
    found = ["."] * FRAMES
    for letter, tensor in tensors.items():
        run = tensor._storage.run
        frames = pager.core.table.frame[run.first : run.first + run.count]
        for frame in frames[frames >= 0].tolist():
            found[frame] = letter
    return "".join(found)


def window(pager: tp.Pager, count: int) -> int | None:
    blank = torch.empty(count * PAGE_BYTES, dtype=torch.uint8, device="meta")
    wanting = empty_like_geometry(pager.core, blank, "user")
    with pager.core.lock:
        return find_window(pager.core.residency, wanting._storage.run)


def unchanged(tensors: dict[str, PagedTensor]) -> bool:
    return all(bool((tensor == ord(letter)).all()) for letter, tensor in tensors.items())


@pytest.mark.parametrize(
    ("before", "pinned", "count"),
    [
        ("AA..BB....", "", 4),  # nothing is in the way
        ("AA..B..CCC", "", 4),  # B has another place
        ("AA.BBB..CC", "AC", 3),  # none but where it is
        (".AAA.BBB.C", "", 3),  # all of the free frames
        (".AAA.BBB.C", "C", 3),
        (".AA.BBB.C.", "B", 2),  # on one side of what must stay
        (".AA.BBB.C.", "AB", 2),
    ],
)
def test_room_is_made(before: str, pinned: str, count: int) -> None:
    with make_pager(frames=FRAMES) as pager:
        tensors = laid_out(pager, before)
        runs = [tensors[letter]._storage.run for letter in pinned]
        pager.core.take(runs)
        base = window(pager, count)
        pager.core.release(runs)
        assert base is not None
        after = layout(pager, tensors)
        assert after[base : base + count] == "." * count
        for letter in tensors:
            assert letter * before.count(letter) in after  # still in one piece
        for letter in pinned:
            assert after.index(letter) == before.index(letter)
        check_invariants(pager.core)
        assert unchanged(tensors)


@pytest.mark.parametrize(
    ("before", "pinned", "count"),
    [
        ("AAABBBCCC.", "", 2),  # too few are free
        (".AA.BBB.C.", "ABC", 2),  # enough, but what must stay is between
        ("A.B.C.D.E.", "ABCDE", 2),
    ],
)
def test_room_cannot_be_made(before: str, pinned: str, count: int) -> None:
    with make_pager(frames=FRAMES) as pager:
        tensors = laid_out(pager, before)
        runs = [tensors[letter]._storage.run for letter in pinned]
        pager.core.take(runs)
        assert window(pager, count) is None
        pager.core.release(runs)
        check_invariants(pager.core)
        assert unchanged(tensors)


@pytest.mark.parametrize("together", [False, True])
def test_frames_that_a_queue_has_yet_to_empty_are_the_last_to_be_taken(together: bool) -> None:
    """Whoever took them would wait for all that is queued before. ``together``: for a run that is
    there in two pieces; otherwise for one that is nowhere yet."""
    with make_pager(frames=FRAMES) as pager:
        tensors = laid_out(pager, "...AA...BB")
        run, core = tensors["A"]._storage.run, pager.core
        with core.lock:
            core.residency.relocate(run.pages[1:], np.array([5]))
            late = np.array([0, 1, 2, 4] if together else [6, 7])
            ticket = core.mover.tickets.take("leaves", ("device", late))
        assert layout(pager, tensors) == "...A.A..BB"
        with core.lock:
            base = find_window(core.residency, run) if together else window(pager, 2)
        assert base in ((5, 6) if together else (0, 1))
        ticket.end()
        check_invariants(core)
        assert unchanged(tensors)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (".AAAABB.C.", ""),  # where it is
        ("AAAABB..CC", "..DD......"),  # D has another place
        ("AAAA.B.CCC", "..DD......"),  # all that is free, and its own frames
        ("BAAAA.C.DD", "...EE....."),
        ("B.C.AAAADD", "......EE.."),
    ],
)
def test_a_run_that_is_there_in_part_comes_together(before: str, after: str) -> None:
    """Its first half is there, and what came ``after`` is where the other half was."""
    with make_pager(frames=FRAMES) as pager:
        tensors = laid_out(pager, before)
        run = tensors["A"]._storage.run
        pages = np.arange(run.first, run.first + run.count)
        with pager.core.lock:
            pager.core.residency.evict_pages(pages[2:])
        if after:
            tensors |= laid_out(pager, after)
        with pager.core.lock:
            base = find_window(pager.core.residency, run)
            assert base is not None
            assert pager.core.table.frame[pages].tolist() == [base, base + 1, -1, -1]
            assert pager.core.residency.pool.is_free(base + 2, 2)
        check_invariants(pager.core)
        assert unchanged(tensors)


@pytest.mark.parametrize(
    ("before", "pinned", "homes", "frames", "after"),
    [
        ("AABB......", "", {"A": 6}, (0, 2), "..BB..AA.."),  # to its own place
        ("AABB......", "", {"A": 2, "B": 6}, (0, 4), "....AABB.."),  # or where there is room
        ("AABB......", "", {"B": 6}, (1, 3), "....AABB.."),  # A has none
        ("AABB......", "", {"A": 0}, (1, 3), ""),  # A is where it should be
        ("AABB......", "B", {"A": 6}, (0, 4), ""),  # B is in use
        ("AABBBBBB..", "", {"A": 6, "B": 2}, (0, 2), "..BBBBBBAA"),
        ("ABBBBBBBBB", "", {"A": 6, "B": 1}, (0, 1), ""),  # there is no room
    ],
)
def test_what_is_not_where_it_should_be_makes_way(
    before: str, pinned: str, homes: dict[str, int], frames: tuple[int, int], after: str
) -> None:
    """``frames`` from, to; ``after`` empty: nothing has moved."""
    with make_pager(frames=FRAMES) as pager:
        tensors = laid_out(pager, before)
        home_of = {tensors[letter]._storage.run: home for letter, home in homes.items()}
        wanting = empty_like_geometry(
            pager.core, torch.empty(PAGE_BYTES, dtype=torch.uint8, device="meta"), "user"
        )
        runs = [tensors[letter]._storage.run for letter in pinned]
        pager.core.take(runs)
        with pager.core.lock:
            made = make_way(
                pager.core.residency,
                wanting._storage.run,
                np.arange(*frames),
                lambda run: home_of.get(run, -1),
            )
        pager.core.release(runs)
        assert made is bool(after)
        assert layout(pager, tensors) == (after or before)
        check_invariants(pager.core)
        assert unchanged(tensors)


def test_random_layouts() -> None:
    """A window is found wherever enough frames are free between two that must stay."""
    chance = np.random.default_rng(0)
    for _ in range(60):
        before = "".join(_random_letters(chance))
        pinned = [letter for letter in set(before) - {"."} if chance.random() < 0.3]
        count = int(chance.integers(1, 5))
        walls = "".join("#" if letter in pinned else letter for letter in before)
        possible = any(part.count(".") >= count for part in walls.split("#"))
        with make_pager(frames=FRAMES) as pager:
            tensors = laid_out(pager, before)
            runs = [tensors[letter]._storage.run for letter in pinned]
            pager.core.take(runs)
            base = window(pager, count)
            pager.core.release(runs)
            assert base is not None or not possible, (before, pinned, count)
            assert base is None or layout(pager, tensors)[base : base + count] == "." * count
            check_invariants(pager.core)
            assert unchanged(tensors)


def _random_letters(chance: np.random.Generator) -> Sequence[str]:
    letters: list[str] = []
    for letter in "ABCDEFGHIJ":
        letters += "." * int(chance.integers(0, 3)) + letter * int(chance.integers(1, 4))
    return letters[:FRAMES]


@pytest.mark.parametrize("seed", range(8))
def test_pages_change_places_with_one_another(seed: int) -> None:
    """Each goes where it is told to, also round in circles, and where no frame is free."""
    random = np.random.default_rng(seed)
    count = FRAMES - seed % 3
    with make_pager(frames=FRAMES) as pager:
        core = pager.core
        numbers = torch.arange(count, dtype=torch.uint8).repeat_interleave(PAGE_BYTES)
        tensor = pager.page(numbers)
        pages, table = tensor._storage.run.pages, core.table
        for _ in range(20):
            with core.hold([tensor._storage.run]):
                pass
            targets = random.permutation(FRAMES)[:count]
            with core.lock:
                wrong = table.frame[pages] != targets
                rearrange(core.residency, pages[wrong], targets[wrong])
            assert (table.frame[pages] == targets).all()
            check_invariants(core)
            assert torch.equal(tensor.to_dense(), numbers)
