"""gather_pages and scatter_pages on every implementation, and the round trip."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from page_suite import MIB, Backend, DenseCase, Guarded, dense_cases, distant_frame

from tensorpager.kernels.copies import gather_pages, scatter_pages


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


def test_gather_by_hand(backend: Backend) -> None:
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


def test_gather_from_a_distant_frame(backend: Backend) -> None:
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


@dense_cases
def test_pages_arrive_in_their_frames(backend: Backend, case: DenseCase) -> None:
    arena = Guarded(case.arena_frames * case.page_bytes, backend, seed=1)
    src = Guarded(case.nbytes, backend, offset=case.offset, seed=2)
    frame_of = backend.frames(case.frame_of)
    dense = src.bytes()
    expected = bytearray(arena.bytes())
    for i in range(len(case.frame_of)):
        expected[case.place(i)] = dense[case.page(i)]

    backend.run(
        scatter_pages,
        *(src.tensor, frame_of, arena.tensor, case.page_bytes),
        reads=[frame_of, src.tensor],
        writes=[arena.tensor[case.place(i)] for i in range(len(case.frame_of))],
    )

    arena.assert_is(bytes(expected))
    src.assert_is(dense)


def test_scatter_by_hand(backend: Backend) -> None:
    src = torch.tensor([1] * 4096 + [2] * 3, dtype=torch.uint8, device=backend.device)
    arena = torch.zeros(3 * 4096, dtype=torch.uint8, device=backend.device)
    frame_of = backend.frames([2, 0])
    backend.run(scatter_pages, src, frame_of, arena, 4096, reads=[frame_of, src], writes=[arena])
    assert arena.tolist() == [2] * 3 + [0] * (4096 - 3) + [0] * 4096 + [1] * 4096


def test_scatter_to_a_distant_frame(backend: Backend) -> None:
    arena, frame = distant_frame(backend, 16 * MIB)
    page = arena[frame * 16 * MIB :][:20_000]
    src = Guarded(20_000, backend)
    frame_of = backend.frames([frame])
    backend.run(
        scatter_pages,
        *(src.tensor, frame_of, arena, 16 * MIB),
        reads=[frame_of, src.tensor],
        writes=[page],
    )
    assert bytes(page.cpu().numpy()) == src.bytes()


@st.composite
def _dense_tensors(draw: st.DrawFn) -> DenseCase:
    page_bytes = draw(st.sampled_from([4096, 8192, 16384]))
    pages = draw(st.integers(1, 5))
    frame_of = draw(st.permutations(range(8)))[:pages]
    tail = draw(st.integers(1, page_bytes))
    offset = draw(st.sampled_from([0, 0, 1, 2, 4, 8, 13]))
    return DenseCase(page_bytes, tuple(frame_of), (pages - 1) * page_bytes + tail, offset)


@settings(max_examples=40, deadline=None)
@given(case=_dense_tensors())
def test_round_trip(backend: Backend, case: DenseCase) -> None:
    arena = Guarded(8 * case.page_bytes, backend, seed=1)
    src = Guarded(case.nbytes, backend, offset=case.offset, seed=2)
    out = Guarded(case.nbytes, backend, offset=(case.offset * 5) % 16, seed=3)
    frame_of = backend.frames(case.frame_of)
    places = [arena.tensor[case.place(i)] for i in range(len(case.frame_of))]
    args = (frame_of, arena.tensor, case.page_bytes)
    backend.run(scatter_pages, src.tensor, *args, reads=[frame_of, src.tensor], writes=places)
    args = (arena.tensor, frame_of, out.tensor, case.page_bytes)
    backend.run(gather_pages, *args, reads=[frame_of, *places], writes=[out.tensor])
    out.assert_is(src.bytes())
