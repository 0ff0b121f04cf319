"""fill_pages on every implementation."""

import pytest
import torch
from page_suite import MIB, Backend, FrameCase, Guarded, distant_frame, frame_cases

from tensorpager.kernels.fill import fill_pages


@frame_cases
@pytest.mark.parametrize("value", [0, 1, 0x7F, 0x80, 0xFF])
def test_frames_are_filled(backend: Backend, case: FrameCase, value: int) -> None:
    arena = Guarded(case.arena_frames * case.page_bytes, backend)
    frames = backend.frames(case.dst)
    expected = bytearray(arena.bytes())
    for frame in case.dst:
        expected[case.bytes_of(frame)] = bytes([value]) * case.page_bytes

    backend.run(
        fill_pages,
        *(arena.tensor, frames, case.page_bytes, value),
        reads=[frames],
        writes=[arena.tensor[case.bytes_of(f)] for f in case.dst],
    )

    arena.assert_is(bytes(expected))


def test_hand_made(backend: Backend) -> None:
    arena = torch.zeros(3 * 4096, dtype=torch.uint8, device=backend.device)
    frames = backend.frames([1])
    backend.run(fill_pages, arena, frames, 4096, 200, reads=[frames], writes=[arena])
    assert arena.tolist() == [0] * 4096 + [200] * 4096 + [0] * 4096


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_255_is_nan(backend: Backend, dtype: torch.dtype) -> None:
    arena = torch.zeros(4096, dtype=torch.uint8, device=backend.device)
    frames = backend.frames([0])
    backend.run(fill_pages, arena, frames, 4096, 255, reads=[frames], writes=[arena])
    assert arena.view(dtype).isnan().all()


def test_distant_frame(backend: Backend) -> None:
    arena, frame = distant_frame(backend, MIB)
    page = arena[frame * MIB :][:MIB]
    frames = backend.frames([frame])
    backend.run(fill_pages, arena, frames, MIB, 7, reads=[frames], writes=[page])
    assert bytes(page.cpu().numpy()) == bytes([7]) * MIB
