"""move_pages and slide_pages on every implementation."""

import pytest
import torch
from page_suite import MIB, Backend, FrameCase, Guarded, distant_frame, frame_cases

from tensorpager.kernels.move import move_pages, move_pages_reference, slide_pages


@frame_cases
def test_frames_arrive(backend: Backend, case: FrameCase) -> None:
    arena = Guarded(case.arena_frames * case.page_bytes, backend)
    src_frames, dst_frames = backend.frames(case.src), backend.frames(case.dst)
    before = arena.bytes()
    expected = bytearray(before)
    for src, dst in zip(case.src, case.dst, strict=True):
        expected[case.bytes_of(dst)] = before[case.bytes_of(src)]

    backend.run(
        move_pages,
        *(arena.tensor, src_frames, dst_frames, case.page_bytes),
        reads=[src_frames, dst_frames, *(arena.tensor[case.bytes_of(f)] for f in case.src)],
        writes=[arena.tensor[case.bytes_of(f)] for f in case.dst],
    )

    arena.assert_is(bytes(expected))


def test_hand_made(backend: Backend) -> None:
    arena = torch.arange(4, dtype=torch.uint8).repeat_interleave(4096).to(backend.device)
    src_frames, dst_frames = backend.frames([3, 1]), backend.frames([0, 2])
    backend.run(
        move_pages,
        *(arena, src_frames, dst_frames, 4096),
        reads=[src_frames, dst_frames, arena],
        writes=[arena],
    )
    assert arena.view(4, 4096)[:, 0].tolist() == [3, 1, 1, 3]
    assert arena.view(4, 4096).float().var(dim=1).tolist() == [0, 0, 0, 0]


def test_one_source_for_two_frames(backend: Backend) -> None:
    arena = Guarded(3 * 4096, backend)
    src_frames, dst_frames = backend.frames([1, 1]), backend.frames([0, 2])
    page = arena.bytes()[4096:8192]
    backend.run(
        move_pages,
        *(arena.tensor, src_frames, dst_frames, 4096),
        reads=[src_frames, dst_frames, arena.tensor[4096:8192]],
        writes=[arena.tensor[:4096], arena.tensor[8192:]],
    )
    arena.assert_is(page * 3)


def test_distant_frame(backend: Backend) -> None:
    arena, frame = distant_frame(backend, MIB)
    src, dst = arena[frame * MIB :][:MIB], arena[(frame - 2) * MIB :][:MIB]
    src.copy_(Guarded(MIB, backend).tensor)
    src_frames, dst_frames = backend.frames([frame]), backend.frames([frame - 2])
    backend.run(
        move_pages,
        *(arena, src_frames, dst_frames, MIB),
        reads=[src_frames, dst_frames, src],
        writes=[dst],
    )
    assert bytes(dst.cpu().numpy()) == Guarded(MIB, backend).bytes()


@pytest.mark.parametrize(
    ("src", "dst", "message"),
    [([0, 1], [1, 2], r"frames \[1\] are both"), ([0, 1], [2, 2], "a frame is twice")],
)
def test_reference_asserts_that_copies_do_not_race(src: list, dst: list, message: str) -> None:
    arena = torch.zeros(4 * 4096, dtype=torch.uint8)
    tables = (torch.tensor(src, dtype=torch.int32), torch.tensor(dst, dtype=torch.int32))
    with pytest.raises(AssertionError, match=message):
        move_pages_reference(arena, *tables, 4096)


@pytest.mark.parametrize("page_bytes", [4096, 32768])
@pytest.mark.parametrize(
    ("src", "dst", "pages"),
    [(1, 0, 9), (3, 1, 9), (7, 2, 21), (5, 1, 3), (5, 4, 1), (2, 0, 0)],
)
def test_a_run_slides_over_itself(
    backend: Backend, src: int, dst: int, pages: int, page_bytes: int
) -> None:
    arena = Guarded((src + pages) * page_bytes, backend)
    before = arena.bytes()
    moved = slice(dst * page_bytes, (dst + pages) * page_bytes)
    expected = bytearray(before)
    expected[moved] = before[src * page_bytes :]
    backend.run(
        slide_pages,
        *(arena.tensor, src, dst, pages, page_bytes),
        reads=[arena.tensor[src * page_bytes :]],
        writes=[arena.tensor[moved]],
    )
    arena.assert_is(bytes(expected))


@pytest.mark.parametrize(("src", "dst", "pages"), [(1, 1, 1), (0, 1, 1), (2, -1, 1), (2, 1, 3)])
def test_what_cannot_slide_is_refused(src: int, dst: int, pages: int) -> None:
    arena = torch.zeros(4 * 4096, dtype=torch.uint8)
    with pytest.raises(ValueError, match=f"frames {src} to {src + pages} cannot slide to {dst}"):
        slide_pages(arena, src, dst, pages, 4096)
