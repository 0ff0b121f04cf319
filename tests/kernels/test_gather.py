"""gather_pages on every implementation."""

import torch
from page_suite import MIB, Backend, DenseCase, Guarded, dense_cases, distant_frame

from tensorpager.kernels.gather import gather_pages


@dense_cases
def test_pages_arrive_in_order(backend: Backend, case: DenseCase) -> None:
    arena = Guarded(case.arena_frames * case.page_bytes, backend, seed=1)
    out = Guarded(case.nbytes, backend, offset=case.offset, seed=2)
    frame_of = backend.frames(case.frame_of)
    before = arena.bytes()
    expected = b"".join(before[case.place(i)] for i in range(len(case.frame_of)))

    places = [arena.tensor[case.place(i)] for i in range(len(case.frame_of))]
    backend.run(
        gather_pages,
        *(arena.tensor, frame_of, out.tensor, case.page_bytes),
        reads=[frame_of, *places],
        writes=[out.tensor],
    )

    out.assert_is(expected)
    arena.assert_is(before)


def test_hand_made(backend: Backend) -> None:
    arena = torch.arange(4, dtype=torch.uint8).repeat_interleave(4096).to(backend.device)
    out = torch.full((4096 * 2 + 2,), 9, dtype=torch.uint8, device=backend.device)
    frame_of = backend.frames([3, 0, 2])
    backend.run(gather_pages, arena, frame_of, out, 4096, reads=[frame_of, arena], writes=[out])
    assert out.tolist() == [3] * 4096 + [0] * 4096 + [2, 2]


def test_one_frame_read_twice(backend: Backend) -> None:
    arena = Guarded(3 * 4096, backend)
    out = Guarded(2 * 4096, backend)
    frame_of = backend.frames([1, 1])
    page = arena.tensor[4096:8192]
    backend.run(
        gather_pages,
        *(arena.tensor, frame_of, out.tensor, 4096),
        reads=[frame_of, page],
        writes=[out.tensor],
    )
    out.assert_is(arena.bytes()[4096:8192] * 2)


def test_distant_frame(backend: Backend) -> None:
    arena, frame = distant_frame(backend, 16 * MIB)
    page = arena[frame * 16 * MIB :][:20_000]
    page.copy_(Guarded(20_000, backend).tensor)
    out = Guarded(20_000, backend, seed=1)
    frame_of = backend.frames([frame])
    backend.run(
        gather_pages,
        *(arena, frame_of, out.tensor, 16 * MIB),
        reads=[frame_of, page],
        writes=[out.tensor],
    )
    out.assert_is(Guarded(20_000, backend).bytes())
